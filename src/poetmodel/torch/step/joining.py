"""Joining: operations whose results nobody should keep become one with what reads them.

A tensor that one operation reads, and that is no smaller than what this makes of it, is not worth
keeping: the result is, which takes less room and spares more. The solver need not find that out for
each of them, so it sees one node, which needs what both need at any moment, with all that either
reads held throughout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from poetmodel.device import Cost
from poetmodel.plan import Instruction, Op

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from poetmodel.device import Costs
    from poetmodel.graph import Graph, Node, Tensor
    from poetmodel.plan import Program
    from poetmodel.torch.step.trace import ScheduledGraph

JOINED_SHARE: Final = 0.5
"""Most that a joined node may need of the budget: it is no obstacle to a schedule then."""

EXTRA_SHARE: Final = 0.1
"""Most of the budget that it may need beyond what the largest of its operations does."""


def joined(
    scheduled: ScheduledGraph, costs: Costs, *, results: Collection[int], budget_bytes: int
) -> tuple[ScheduledGraph, Costs]:
    """Join operations one after the other, and their costs, as far as a budget allows.

    Tensors with the numbers `results` are handed out, and stay as they are.
    """
    graph = scheduled.graph
    number_of = dict(zip((t.name for t in graph.tensors), scheduled.numbers, strict=True))
    apart = {name for name, number in number_of.items() if number in results}
    runs = list(_runs(graph, apart, budget_bytes))
    new = replace(graph, nodes=tuple(run.node for run in runs))
    names = [tensor.name for tensor in new.tensors]
    names += [tensor.name for run in runs for tensor in run.inside]
    index_of = {name: index for index, name in enumerate(names)}
    own = iter(scheduled.steps)
    steps = tuple(
        tuple(_steps([next(own) for _ in run.parts], [index_of[t.name] for t in run.inside]))
        for run in runs
    )
    numbers = tuple(number_of[name] for name in names)
    return replace(scheduled, graph=new, numbers=numbers, steps=steps), _costs(costs, runs, new)


def _costs(costs: Costs, runs: Sequence[_Run], graph: Graph) -> Costs:
    """Return costs with those of joined operations added up, and of the tensors of a graph."""
    compute = {}
    for run in runs:
        summands = [costs.compute[node.name] for node in run.parts if not node.is_state]
        if summands:
            total = Cost(
                sum(cost.time_s for cost in summands), sum(cost.energy_j for cost in summands)
            )
            compute[run.node.name] = summands[0] if len(summands) == 1 else total
    pages = costs.pages
    if pages is not None:
        pages = {tensor.name: pages[tensor.name] for tensor in graph.tensors}
    return replace(costs, compute=compute, pages=pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Operations one after the other, each of which reads what the one before makes."""

    parts: tuple[Node, ...]
    inside: tuple[Tensor, ...]
    """Outputs of each but the last, which are gone when the next one has run."""
    sizes: dict[str, int]
    """The size of each tensor of the graph [B]."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Inputs from outside."""
        own = {tensor.name for tensor in self.inside}
        read = (name for node in self.parts for name in node.inputs if name not in own)
        return tuple(dict.fromkeys(read))

    @property
    def needed_bytes(self) -> int:
        """The most that is there at once while it runs, with all inputs held throughout [B]."""
        sizes, most = self.sizes, 0
        before = 0
        for k, node in enumerate(self.parts):
            over = min(before, node.output_bytes) if k and node.in_place else 0
            most = max(most, before + node.output_bytes + node.workspace_bytes - over)
            before = node.output_bytes
        return most + sum(sizes[name] for name in self.inputs)

    @property
    def node(self) -> Node:
        """The run as one node, by the name of the last."""
        if len(self.parts) == 1:
            return self.parts[0]
        last, parts = self.parts[-1], self.parts
        held_bytes = sum(self.sizes[name] for name in self.inputs) + last.output_bytes
        moved = [node.bytes_moved for node in parts if node.bytes_moved is not None]
        return replace(
            last,
            op="+".join(dict.fromkeys(node.op for node in parts)),
            inputs=self.inputs,
            workspace_bytes=self.needed_bytes - held_bytes,
            flops=sum(node.flops for node in parts),
            bytes_moved=sum(moved) if len(moved) == len(parts) else None,
            in_place=(),
        )

    def has_room(self, budget_bytes: int) -> bool:
        """Whether a budget leaves enough beside it."""
        alone = (replace(self, parts=(node,), inside=()).needed_bytes for node in self.parts)
        extra_bytes = self.needed_bytes - max(alone)
        return (
            self.needed_bytes <= JOINED_SHARE * budget_bytes
            and extra_bytes <= EXTRA_SHARE * budget_bytes
        )

    def longer(self, node: Node) -> _Run:
        """Return the run with one more operation."""
        output = self.parts[-1].outputs[0]
        return replace(self, parts=(*self.parts, node), inside=(*self.inside, output))


def _runs(graph: Graph, apart: Collection[str], budget_bytes: int) -> Iterator[_Run]:
    """Yield the operations of a graph, in their order, as runs of one or more."""
    sizes = {tensor.name: tensor.bytes for tensor in graph.tensors}
    run: _Run | None = None
    for k, node in enumerate(graph.nodes):
        if run is not None and _may_join(graph, k, apart):
            longer = run.longer(node)
            if longer.has_room(budget_bytes):
                run = longer
                continue
        if run is not None:
            yield run
        run = _Run(parts=(node,), inside=(), sizes=sizes)
    if run is not None:
        yield run


def _may_join(graph: Graph, k: int, apart: Collection[str]) -> bool:
    """Whether nobody keeps what the node before a node makes, for this to read."""
    node, before = graph.nodes[k], graph.nodes[k - 1]
    if len(before.outputs) != 1 or before.outputs[0].name in apart:
        return False
    output = before.outputs[0]
    plain = all(
        operation.recomputable and all(tensor.replaces is None for tensor in operation.outputs)
        for operation in (before, node)
    )
    return (
        plain
        and not before.in_place
        and all(read == output.name for _, read in node.in_place)
        and graph.users_of[graph.tensor_index[output.name]] == (k,)
        and node.output_bytes <= output.bytes
    )


def _steps(parts: Sequence[Program], inside: Sequence[int]) -> Iterator[Instruction]:
    """Yield the program of operations one after the other, each but the first of which ends one."""
    for k, part in enumerate(parts):
        yield from part
        if k:
            yield Instruction(Op.FREE, inside[k - 1])
