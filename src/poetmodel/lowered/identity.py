"""The identity of an exported step: steps with one identity can exchange their state."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING

from poetmodel.lowered.calls import WORKSPACE, Ref, ScaledLearningRate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from poetmodel.lowered.calls import Argument, Call
    from poetmodel.lowered.step import LoweredStep


def step_identity(step: LoweredStep) -> str:
    """Return the SHA-256 of the computation of a step, as hexadecimal digits.

    Steps with one identity compute the same losses and the same new state from the same state,
    inputs, learning rate and random numbers. The identity covers the calls with all their numbers,
    the values of constants that calls read (frozen weights, class weights, tables of byte inputs),
    and the names of replaced state. It excludes the initial values of replaced state, the forward
    passes in evaluation mode, the name of the graph, and the names of other tensors.

    Parameters
    ----------
    step : LoweredStep
        The step before tiling; tiling changes calls, but no bit of a result.
    """
    return _StepEncoder(step).digest()


def front_identity(
    step: LoweredStep, *, nodes: Iterable[int], outputs: Sequence[str], inputs: Sequence[int]
) -> str:
    """Return the SHA-256 of a front's calls and of the form of a stored sample's tensors.

    It is in hexadecimal digits. The front has the `nodes` of these indices. A sample has outputs of
    the front, then inputs of the step such as labels. Values of constants count. The outputs count
    by the order of first use in the front's calls, the inputs by their index in the step, both by
    size and type, inputs also by shape. The number of classes does not count.
    """
    encoder = _StepEncoder(step)
    calls = [encoder.encode_call(call) for k in sorted(nodes) for call in step.calls[k]]
    encoded_outputs = [encoder.encode(Ref(name)) for name in outputs]
    buffers = [step.buffers[name] for name in outputs]
    forms: list[object] = [(buffer.elements, str(buffer.type)) for buffer in buffers]
    forms += [(step.inputs[k].shape, str(step.inputs[k].type)) for k in inputs]
    content = json.dumps([calls, encoded_outputs, inputs, forms])
    return sha256(content.encode()).hexdigest()


class _StepEncoder:
    """Encodes calls with canonical buffer names; tensors are numbered in the order of their use."""

    def __init__(self, step: LoweredStep) -> None:
        self._step = step
        self._names = {value.pieces[0].buffer: f"input {k}" for k, value in enumerate(step.inputs)}
        graph = step.graph
        self._replaced_names = {graph.tensors[old].name for old in graph.replacement_of}
        self._buffers: dict[str, tuple[int, str]] = {}
        """Elements and type of each buffer used so far, by canonical name."""

    def digest(self) -> str:
        """Return the SHA-256 of calls, loss, gradients and used buffers, as hexadecimal digits."""
        step = self._step
        calls = [self.encode_call(call) for node_calls in step.calls for call in node_calls]
        gradients = (ref for tensor in step.gradients for ref in tensor.pieces)
        results = [self.encode(ref) for ref in (step.loss, *gradients)]
        content = json.dumps([calls, results, self._buffers])
        return sha256(content.encode()).hexdigest()

    def encode_call(self, call: Call) -> list[object]:
        """Return a call for JSON; register its buffers."""
        condition = call.condition and [self.encode(call.condition.counter), call.condition.value]
        return [call.kernel, [*map(self.encode, call.arguments)], condition, call.index_range]

    def encode(self, argument: Argument) -> object:
        """Return an argument for JSON; register the buffer of a pointer."""
        if isinstance(argument, Ref):
            return [self._canonical_name(argument.buffer), argument.offset]
        if isinstance(argument, ScaledLearningRate):
            return {"learning rate": argument.factor}
        return argument

    def _canonical_name(self, buffer: str) -> str:
        """Return the canonical name of a buffer; register its elements and type in `_buffers`.

        An input is named by its index, the workspace by its own name, any other buffer by
        `_new_name` in the first call; later calls return the same name. The workspace is not
        registered.
        """
        if buffer == WORKSPACE:
            return buffer
        if buffer not in self._names:
            self._names[buffer] = self._new_name(buffer)
        name, used_buffer = self._names[buffer], self._step.buffers[buffer]
        self._buffers[name] = (used_buffer.elements, str(used_buffer.type))
        return name

    def _new_name(self, buffer: str) -> str:
        """Return the canonical name of a buffer that has none yet.

        State that the step replaces is named by its own name. Any other buffer with values is a
        constant, named by its type and the hash of its values. Other buffers are tensors, named by
        number.
        """
        if buffer in self._replaced_names:
            return f"state {buffer}"
        values, element_type = self._step.values.get(buffer), self._step.buffers[buffer].type
        if values is None:
            return f"tensor {len(self._names)}"
        content = values.astype(element_type.file_dtype).tobytes()
        return f"constant {element_type} {sha256(content).hexdigest()}"
