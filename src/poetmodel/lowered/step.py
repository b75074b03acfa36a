"""A lowered step: a training graph with the kernel calls of each node, and its initial values.

Captures of PyTorch modules and step files become lowered steps, which the exporter reads. No module
of this package imports PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poetmodel.graph import Node, Phase, Tensor
from poetmodel.lowered.calls import DataType
from poetmodel.lowered.instructions import estimate_instructions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    import numpy as np

    from poetmodel.graph import Graph
    from poetmodel.lowered.calls import Buffer, Call, NamedTensor, Ref


class LoweredNode(NamedTuple):
    """A node with the calls that compute it."""

    node: Node
    calls: tuple[Call, ...]
    """Empty for nodes that hold state."""

    def with_instructions(self) -> LoweredNode:
        """Return the operation with its estimated instructions; state has none."""
        if self.node.is_state:
            return self
        count = estimate_instructions(self.node, self.calls)
        return self._replace(node=replace(self.node, instructions=count))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredStep:
    """A training step that can be exported.

    Tensors of the graph are buffers of the same names, but a replacement is written to the buffer
    of the state that it replaces. The caller owns the inputs. Inputs and constants (values that no
    step changes) are no tensors of the graph.
    """

    graph: Graph
    calls: tuple[tuple[Call, ...], ...]
    """The calls of each node; empty for nodes that hold state."""
    buffers: Mapping[str, Buffer]
    """All buffers except workspaces."""
    inputs: tuple[NamedTensor, ...]
    states: tuple[NamedTensor, ...]
    """Parameters and buffers in the order of the model, then optimizer state; includes those that
    no step changes."""
    gradients: tuple[NamedTensor, ...]
    """Returned gradients, in the order of the parameters; empty if the step updates parameters."""
    loss: Ref
    """The loss; in a forward pass in evaluation mode, the output."""
    values: Mapping[str, np.ndarray] = field(repr=False)
    """Elements of each state tensor and constant before the first step, flat, by buffer; a forward
    pass in evaluation mode omits those that it shares with the training step or an earlier pass."""
    learning_rate: float | None = None
    """Present learning rate of the optimizer's first group of trained parameters; None without
    updates."""
    accumulate: int = 1
    """Number of batches over which gradients are summed before an update."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the packages that captured the step."""
    output: NamedTensor | None = None
    """The tensor that a forward pass in evaluation mode writes for the caller; None in the
    training step. Like inputs, it is no tensor of the graph."""
    inference: LoweredStep | None = None
    """The forward pass in evaluation mode, if requested. Its calls read the state of this step by
    name; its own graph has no state, and it has no gradients."""
    evaluation: LoweredStep | None = None
    """The forward pass in evaluation mode with the loss, if requested. Its output is the loss and,
    if the labels are classes, the number of samples whose label has the highest score."""

    @property
    def forward_passes(self) -> tuple[LoweredStep, ...]:
        """The forward passes in evaluation mode that are present: inference and evaluation."""
        return tuple(step for step in (self.inference, self.evaluation) if step is not None)

    @property
    def returned_buffers(self) -> frozenset[str]:
        """The buffers of the loss and the gradients, which the caller reads after the step."""
        gradients = (ref.buffer for tensor in self.gradients for ref in tensor.pieces)
        return frozenset((self.loss.buffer, *gradients))

    def list_pieces(self, tensor: NamedTensor) -> Iterator[tuple[str, int, int]]:
        """Yield (buffer, first element, number of elements) of each piece of a state tensor."""
        remaining = tensor.elements
        for ref in tensor.pieces:
            count = min(remaining, self.buffers[ref.buffer].elements - ref.offset)
            yield ref.buffer, ref.offset, count
            remaining -= count

    @property
    def operations(self) -> tuple[LoweredNode, ...]:
        """The nodes with their calls."""
        return tuple(map(LoweredNode, self.graph.nodes, self.calls))

    def with_operations(self, operations: Iterable[LoweredNode], **changes: Any) -> LoweredStep:
        """Return the step with other operations, their instructions estimated, and other fields.

        Updates are deferred (`defer_updates`), so that a step whose loss is not finite can return
        with unchanged state.
        """
        loss = changes.get("loss", self.loss)
        ordered = [one.with_instructions() for one in defer_updates(operations, loss.buffer)]
        nodes, calls = tuple(one.node for one in ordered), tuple(one.calls for one in ordered)
        return replace(self, graph=replace(self.graph, nodes=nodes), calls=calls, **changes)

    def edit(
        self, replacements: Mapping[int, Iterable[LoweredNode]], **changes: Any
    ) -> LoweredStep:
        """Return the step with any number of operations in place of some nodes, and new fields."""
        operations = (
            new
            for k, operation in enumerate(self.operations)
            for new in replacements.get(k, (operation,))
        )
        return self.with_operations(operations, **changes)

    def map_passes(self, rewrite: Callable[[LoweredStep], LoweredStep]) -> LoweredStep:
        """Return the step with a rewrite of itself and of each of its forward passes."""
        inference, evaluation = (
            None if one is None else rewrite(one) for one in (self.inference, self.evaluation)
        )
        return replace(rewrite(self), inference=inference, evaluation=evaluation)


def _output_names(node: Node) -> set[str]:
    return {tensor.name for tensor in node.outputs}


def defer_updates(operations: Iterable[LoweredNode], loss: str) -> list[LoweredNode]:
    """Move operations that replace state behind that of the loss.

    Such an operation stays if it makes the loss, if a later one that stays reads one of its
    outputs, or if a later one that stays replaces state that it reads.
    """
    all_operations = list(operations)
    loss_nodes = (k for k, (node, _) in enumerate(all_operations) if loss in _output_names(node))
    loss_index = next(loss_nodes, -1)
    deferred: list[LoweredNode] = []
    earlier: list[LoweredNode] = []
    read_names: set[str | None] = {loss}
    replaced_names: set[str | None] = set()
    for operation in reversed(all_operations[: loss_index + 1]):
        node = operation.node
        replacements = {tensor.replaces for tensor in node.outputs if tensor.replaces is not None}
        if (
            replacements
            and not read_names & _output_names(node)
            and replaced_names.isdisjoint(node.inputs)
        ):
            deferred.append(operation)
        else:
            earlier.append(operation)
            read_names.update(node.inputs)
            replaced_names |= replacements
    return [*earlier[::-1], *deferred[::-1], *all_operations[loss_index + 1 :]]


ALIGNMENT: Final = 16
"""Alignment of buffers in `Weights.data` [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Constants and initial values of state as the content of one file.

    Elements have the types `DataType.file_dtype`. All reals are first, so that one index can
    address them. State tensors of the training graph are omitted if all of their bytes are 0.
    """

    data: bytes = field(repr=False)
    offsets: Mapping[str, int]
    """Offset of each buffer in `data` [B]; omitted state tensors have none."""
    real_elements: int
    """Number of real elements in `data`, padding included."""

    @classmethod
    def from_step(cls, step: LoweredStep) -> Weights:
        """Return the values of a step, but not zero state, and constants of its forward passes."""
        steps = (step, *step.forward_passes)
        values_of_steps = [
            (owning_step, name, values)
            for owning_step in steps
            for name, values in owning_step.values.items()
        ]
        file_bytes, offsets, real_elements = bytearray(), {}, 0
        for element_type in DataType:
            for owning_step, name, values in values_of_steps:
                if owning_step.buffers[name].type is not element_type:
                    continue
                content = values.astype(element_type.file_dtype).tobytes()
                if any(content) or name not in step.graph.tensor_index:
                    offsets[name] = len(file_bytes)
                    file_bytes += content
                    file_bytes += bytes(-len(file_bytes) % ALIGNMENT)
            if element_type is DataType.REAL:
                real_elements = len(file_bytes) // element_type.itemsize
        return cls(data=bytes(file_bytes), offsets=offsets, real_elements=real_elements)


def with_stored_state(forward_pass: LoweredStep, stored_names: Collection[str]) -> LoweredStep:
    """Return a forward pass in evaluation mode whose graph can page the state `stored_names`.

    Each such tensor becomes the output of a node (`Node.on_aux`) before its first reader. All other
    state is read from its home, like constants.
    """
    operations: list[LoweredNode] = []
    earlier_names: set[str] = set()
    for node, calls in forward_pass.operations:
        refs = (ref for call in calls for ref in call.refs)
        read_names = [
            name for name in dict.fromkeys(r.buffer for r in refs) if name in stored_names
        ]
        new_names = [name for name in read_names if name not in earlier_names]
        operations += (LoweredNode(_make_stored_node(forward_pass, name), ()) for name in new_names)
        earlier_names.update(read_names)
        operations.append(LoweredNode(replace(node, inputs=(*node.inputs, *read_names)), calls))
    return forward_pass.with_operations(operations)


def _make_stored_node(forward_pass: LoweredStep, name: str) -> Node:
    """Return a node of a state tensor that begins on storage."""
    tensor = Tensor(name=name, bytes=forward_pass.buffers[name].bytes)
    return Node(name=name, op="state", phase=Phase.INPUT, outputs=(tensor,), on_aux=True)
