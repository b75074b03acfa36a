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
    """Return the SHA-256 of the computation of a step before tiling, in hexadecimal.

    Steps with one identity compute equal losses and new state from equal state, inputs, learning
    rate and random numbers. Values of constants count; initial values of replaced state, passes in
    evaluation mode, and the names of the graph and of its other tensors do not.
    """
    return _StepEncoder(step).digest()


def front_identity(
    step: LoweredStep, *, nodes: Iterable[int], outputs: Sequence[str], inputs: Sequence[int]
) -> str:
    """Return the SHA-256 of a front's calls and of the form of a stored sample's tensors, in hex.

    A sample has outputs of the front, then inputs of the step such as labels. Values of constants
    count; the number of classes does not.
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
        """Return the canonical name of a buffer; register its elements and type in `_buffers`."""
        if buffer == WORKSPACE:
            return buffer
        if buffer not in self._names:
            self._names[buffer] = self._new_name(buffer)
        name, used_buffer = self._names[buffer], self._step.buffers[buffer]
        self._buffers[name] = (used_buffer.elements, str(used_buffer.type))
        return name

    def _new_name(self, buffer: str) -> str:
        """Return ``state NAME`` if replaced, ``constant TYPE HASH``, or ``tensor NUMBER``."""
        if buffer in self._replaced_names:
            return f"state {buffer}"
        values, element_type = self._step.values.get(buffer), self._step.buffers[buffer].type
        if values is None:
            return f"tensor {len(self._names)}"
        content = values.astype(element_type.file_dtype).tobytes()
        return f"constant {element_type} {sha256(content).hexdigest()}"
