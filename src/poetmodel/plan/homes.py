"""What nodes read and make in RAM once the homes of state are known, for making programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from poetmodel.plan.program import Instruction, Op

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from poetmodel.graph import Graph
    from poetmodel.plan.program import Plan, Program

_NONE: Final[frozenset[int]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanHomes:
    """The copies of tensors that the nodes of a graph read and make.

    Programs are made of *steps*, in which the first read of state is the page-in that it is; in a
    program it is the ``compute`` of its node.
    """

    graph: Graph
    sizes: Sequence[int]
    """What a copy of each tensor takes of RAM [B]."""
    inputs: Sequence[Sequence[int]]
    """For each node the tensors whose copies it reads."""
    outputs: Sequence[Sequence[int]]
    """For each node the tensors whose copies it makes."""
    step_bytes: Sequence[int]
    """For each node what it takes beside its inputs: its outputs and its workspace [B]."""
    stored: frozenset[int]
    """The tensors that are on storage from the start."""
    ram_bytes: int = 0
    """What resident state takes [B]."""
    first_reads: Mapping[int, int] = field(default_factory=dict)
    """Nodes whose ``compute`` reads state from storage, each with its tensor."""
    replaced: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Nodes that replace state on storage, with the tensors whose copies end in that."""
    written_back: frozenset[int] = _NONE
    """The tensors that replace state on storage."""

    @classmethod
    def of(cls, graph: Graph, plan: Plan | None = None) -> PlanHomes:
        """Return what the homes that a plan states make of a graph; without one none is RAM."""
        state = frozenset(graph.state_tensors)
        resident = state.intersection(() if plan is None else plan.resident or ())
        mapped = plan is not None and plan.memory_mapped
        on_storage = state - resident
        new = graph.replacement_of
        apart = {*(state if mapped else resident), *(new[i] for i in resident if i in new)}
        replaced: dict[int, frozenset[int]] = {}
        for old in (state - apart) & new.keys():
            k = graph.node_of[new[old]]
            replaced[k] = replaced.get(k, _NONE) | {old}
        sizes = list(graph.tensor_bytes)
        for old in on_storage & new.keys() if mapped else ():
            sizes[new[old]] = 0
        outputs = [tuple(i for i in made if i not in apart) for made in graph.outputs_of]
        return cls(
            graph=graph,
            sizes=sizes,
            inputs=[tuple(i for i in read if i not in apart) for read in graph.inputs_of],
            outputs=outputs,
            step_bytes=[
                node.workspace_bytes + sum(sizes[i] for i in made if i not in graph.state_of)
                for node, made in zip(graph.nodes, outputs, strict=True)
            ],
            stored=graph.on_aux | on_storage,
            ram_bytes=sum(sizes[i] for i in resident),
            first_reads={graph.node_of[i]: i for i in sorted(state - apart)},
            replaced=replaced,
            written_back=frozenset(new[i] for i in on_storage if i in new),
        )

    def shared(self, k: int, dying: Iterable[int]) -> dict[int, int]:
        """Return which of some inputs node `k` writes over, each with how much of it [B]."""
        pairs, gone = self.graph.in_place_of[k], set(dying)
        return {x: min(self.sizes[x], self.sizes[y]) for y, x in pairs if x in gone}

    def steps_of(self, program: Iterable[Instruction]) -> Program:
        """Return a program with first reads as page-ins."""
        reads = self.first_reads
        return tuple(
            Instruction(Op.PAGE_IN, reads[step.index])
            if step.op == Op.COMPUTE and step.index in reads
            else step
            for step in program
        )

    def program_of(self, steps: Iterable[Instruction]) -> Program:
        """Return steps with the first page-in of state as the ``compute`` of its node."""
        unread = {i: k for k, i in self.first_reads.items()}
        return tuple(
            Instruction(Op.COMPUTE, unread.pop(step.index))
            if step.op == Op.PAGE_IN and step.index in unread
            else step
            for step in steps
        )
