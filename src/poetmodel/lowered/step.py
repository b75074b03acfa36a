"""A step: a training graph with the kernel calls of each node, and the values that it begins with.

It is what a front end hands over, and all that the exporter knows; no module here imports PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.graph import Node, Phase, Tensor
from poetmodel.lowered.calls import DataType, Ref
from poetmodel.lowered.instructions import counted_nodes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    import numpy as np

    from poetmodel.graph import Graph
    from poetmodel.lowered.calls import Buffer, Call, NamedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredStep:
    """A training step that can be exported.

    Tensors of the graph are buffers by their names; a replacement is written where the state that
    it replaces lies, and calls name that. Inputs belong to the caller. Constants are what no step
    changes; they are read where they are stored, and like inputs are no tensors of the graph.
    """

    graph: Graph
    calls: tuple[tuple[Call, ...], ...]
    """For each node of the graph what computes it; nothing for state."""
    buffers: Mapping[str, Buffer]
    """All but workspaces."""
    inputs: tuple[NamedTensor, ...]
    states: tuple[NamedTensor, ...]
    """What the step has when it begins, in the order of the model: parameters and buffers, then
    what an optimizer keeps; constants among them."""
    gradients: tuple[NamedTensor, ...]
    """What it hands out, in the order of the parameters; nothing where it updates them."""
    loss: Ref
    """Of an inference its output."""
    values: Mapping[str, np.ndarray] = field(repr=False)
    """For each state tensor and each constant its elements before the first step."""
    learning_rate: float | None = None
    """That of the optimizer's first group of trained parameters now; None without updates."""
    accumulate: int = 1
    """Over how many batches gradients are summed before an update."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of what captured it."""
    output: NamedTensor | None = None
    """Of an inference what it writes for the caller; no tensor of the graph, like inputs."""
    inference: LoweredStep | None = None
    """The forward pass in evaluation mode, where it was asked for. Its calls read the state of this
    step, by name; that is no tensor of its graph, and it has no state and no gradients itself."""
    evaluation: LoweredStep | None = None
    """The same to the loss; its output is that and, where the labels are classes, how many samples
    have their label as the highest score."""

    @property
    def beside(self) -> tuple[LoweredStep, ...]:
        """The forward passes in evaluation mode that are exported beside the step."""
        return tuple(part for part in (self.inference, self.evaluation) if part is not None)

    @property
    def handed_out(self) -> frozenset[str]:
        """The buffers of the loss and of gradients, which the caller reads after the step."""
        gradients = (ref.buffer for value in self.gradients for ref in value.pieces)
        return frozenset((self.loss.buffer, *gradients))

    def with_nodes(
        self, nodes: Iterable[Node], calls: Iterable[tuple[Call, ...]], **changes: Any
    ) -> LoweredStep:
        """Return a step with other nodes, their instructions counted, and with other changes.

        Nodes that replace state come after the node of the loss, so that a step can return with all
        state as before if its loss is not finite.
        """
        loss = changes.get("loss", self.loss)
        pairs = defer_updates(zip(nodes, calls, strict=True), loss.buffer)
        ordered = tuple(of_node for _, of_node in pairs)
        graph = replace(self.graph, nodes=counted_nodes((node for node, _ in pairs), ordered))
        return replace(self, graph=graph, calls=ordered, **changes)


def _output_names(node: Node) -> set[str]:
    return {tensor.name for tensor in node.outputs}


def defer_updates(
    pairs: Iterable[tuple[Node, tuple[Call, ...]]], loss: str
) -> list[tuple[Node, tuple[Call, ...]]]:
    """Return nodes with their calls, those that replace state moved behind the node of the loss.

    A node that replaces state stays in front of the loss only if the loss, or a node that stays
    there, reads another output of it, or if a node that stays there replaces state that it reads.
    """
    ordered = list(pairs)
    made = (k for k, (node, _) in enumerate(ordered) if loss in _output_names(node))
    end = next(made, -1)
    moved: list[tuple[Node, tuple[Call, ...]]] = []
    kept: list[tuple[Node, tuple[Call, ...]]] = []
    read: set[str | None] = {loss}
    stale: set[str | None] = set()
    for node, calls in reversed(ordered[: end + 1]):
        replaced = {tensor.replaces for tensor in node.outputs if tensor.replaces is not None}
        if replaced and not read & _output_names(node) and stale.isdisjoint(node.inputs):
            moved.append((node, calls))
        else:
            kept.append((node, calls))
            read.update(node.inputs)
            stale |= replaced
    return [*kept[::-1], *moved[::-1], *ordered[end + 1 :]]


ALIGNMENT: Final = 16
"""Where a buffer begins in the file is a multiple of this [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Constants and the first values of state, one after the other; zeros of state are left out.

    Reals are little-endian floats, integers 32 bits, truth values bytes. All reals come first, so
    that one index counts them.
    """

    data: bytes = field(repr=False)
    offsets: Mapping[str, int]
    """Where each buffer begins [B]; state that begins with zeros is nowhere."""
    reals: int
    """How many elements of reals there are, gaps included."""

    @classmethod
    def of(cls, step: LoweredStep) -> Weights:
        """Return the file of a step and its forward passes: constants, first values of state."""
        parts = (step, *step.beside)
        stored = [(part, name, values) for part in parts for name, values in part.values.items()]
        data, offsets, reals = bytearray(), {}, 0
        for kind in DataType:
            for part, name, values in stored:
                if part.buffers[name].type is not kind:
                    continue
                content = values.astype(kind.stored).tobytes()
                if any(content) or name not in step.graph.tensor_index:
                    offsets[name] = len(data)
                    data += content
                    data += bytes(-len(data) % ALIGNMENT)
            if kind is DataType.REAL:
                reals = len(data) // kind.itemsize
        return cls(data=bytes(data), offsets=offsets, reals=reals)


def reading_state(inference: LoweredStep, stored: Collection[str]) -> LoweredStep:
    """Return an inference in whose graph some state is a sample on storage.

    Each tensor of it has a node in front of its first reader. All other state is read where it is,
    like constants.
    """
    nodes: list[Node] = []
    calls: list[tuple[Call, ...]] = []
    there: set[str] = set()
    for node, its_calls in zip(inference.graph.nodes, inference.calls, strict=True):
        named = (a.buffer for call in its_calls for a in call.arguments if isinstance(a, Ref))
        read = [name for name in dict.fromkeys(named) if name in stored]
        nodes += _samples(inference, (name for name in read if name not in there))
        calls += [()] * (len(nodes) - len(calls))
        there.update(read)
        nodes.append(replace(node, inputs=(*node.inputs, *read)))
        calls.append(its_calls)
    return inference.with_nodes(nodes, calls)


def _samples(inference: LoweredStep, names: Iterator[str]) -> Iterator[Node]:
    for name in names:
        tensor = Tensor(name=name, bytes=inference.buffers[name].bytes)
        yield Node(name=name, op="state", phase=Phase.INPUT, outputs=(tensor,), on_aux=True)
