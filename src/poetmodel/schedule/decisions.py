"""What a schedule decides on each tensor, what that costs, and the steps with RAM at its limit."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from poetmodel.graph import Graph
    from poetmodel.problem import Problem
    from poetmodel.schedule.relations import Pair, Schedule
    from poetmodel.schedule.simulation import MemoryPoint, Simulation

StageRange = tuple[int, int]
"""First and last of consecutive stages."""


class Choice(StrEnum):
    """What a schedule does to a tensor after its first computation."""

    KEPT = "kept"
    """It stays in RAM until its last use."""
    RECOMPUTED = "recomputed"
    """Its node is computed again."""
    PAGED = "paged"
    """It goes to storage and comes back, or comes from there."""
    BOTH = "paged and recomputed"
    """Both."""
    UNUSED = "unused"
    """Nothing reads it."""

    @property
    def has_cost(self) -> bool:
        """Whether the tensor is recomputed or paged."""
        return self not in (Choice.KEPT, Choice.UNUSED)

    @property
    def pages(self) -> bool:
        """Whether the tensor is paged, recomputed or not."""
        return self in (Choice.PAGED, Choice.BOTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a schedule decides on one tensor."""

    tensor: int
    choice: Choice
    in_ram: tuple[StageRange, ...]
    """Stages with it in RAM at some step."""
    on_storage: tuple[StageRange, ...]
    """Stages that begin with it on storage."""
    recomputed: tuple[int, ...]
    """Stages in which its node is computed again."""
    paged_in: tuple[int, ...]
    paged_out: tuple[int, ...]
    energy_j: float
    """Energy of these recomputations and transfers [J]; a node's outputs share recomputations."""
    time_s: float
    """Their time [s]."""
    bytes_at_limit: int
    """Its bytes times the steps with RAM at its limit and it in RAM [B]."""

    def to_dict(self, graph: Graph) -> dict[str, Any]:
        """Return it as plain values, SI."""
        return {
            "tensor": graph.tensors[self.tensor].name,
            "node": graph.nodes[graph.node_of[self.tensor]].name,
            "bytes": graph.tensor_bytes[self.tensor],
            "fate": str(self.choice),
            "in_ram": [list(stages) for stages in self.in_ram],
            "on_storage": [list(stages) for stages in self.on_storage],
            "recomputed": list(self.recomputed),
            "paged_in": list(self.paged_in),
            "paged_out": list(self.paged_out),
            "energy_j": self.energy_j,
            "time_s": self.time_s,
            "binding_bytes": self.bytes_at_limit,
        }


def find_decisions(
    problem: Problem, schedule: Schedule, at_limit: Iterable[MemoryPoint] = ()
) -> tuple[Decision, ...]:
    """Return what a valid schedule decides on each tensor, in the order of the graph.

    `at_limit` are the steps with RAM at its limit, see `steps_at_limit`.
    """
    stages, steps = _Stages(problem.graph, schedule), tuple(at_limit)
    return tuple(_decision(problem, stages, i, steps) for i in range(len(problem.graph.tensors)))


def steps_at_limit(
    problem: Problem, schedule: Schedule, simulation: Simulation
) -> tuple[MemoryPoint, ...]:
    """Return the steps with RAM at its limit.

    They leave less RAM than the size of a tensor that is out of RAM in their stage and is
    recomputed or paged in later: it could not have been kept over them. If nothing is recomputed or
    paged, they are the steps at the peak.
    """
    graph, stages = problem.graph, _Stages(problem.graph, schedule)
    moved = {i for _, i in schedule.M_in}
    moved.update(i for t, k in schedule.R if k < t for i in graph.outputs_of[k])
    if not moved:
        return tuple(p for p in simulation.curve if p.ram_bytes == simulation.peak_ram_bytes)
    absent_bytes = [0] * len(graph.nodes)
    for i in moved:
        k = graph.node_of[i]
        last = max(stages.paged_in[i] | stages.computed[k])
        for t in set(range(k + 1, last)) - stages.in_ram(i):
            absent_bytes[t] = max(absent_bytes[t], graph.tensor_bytes[i])
    usable = problem.usable_ram_bytes
    return tuple(p for p in simulation.curve if usable - p.ram_bytes < absent_bytes[p.stage])


class _Stages:
    """The stages of each relation, by node or tensor."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph = graph
        self.computed = _by_index(schedule.R)
        self.kept = _by_index(schedule.S_RAM)
        self.stored = _by_index(schedule.S_AUX)
        self.paged_in = _by_index(schedule.M_in)
        self.paged_out = _by_index(schedule.M_out)

    def in_ram(self, i: int) -> set[int]:
        """Return the stages with tensor `i` in RAM at some step."""
        return self.kept[i] | self.computed[self.graph.node_of[i]] | self.paged_in[i]

    def is_there(self, t: int, k: int, i: int) -> bool:
        """Return whether tensor `i`, in RAM in stage `t`, is so at step `k`, which may make it."""
        made = self.graph.node_of[i]
        if k < made and t not in self.kept[i]:
            return False
        if t + 1 in self.kept[i]:
            return True
        uses = [j for j in self.graph.users_of[i] if j >= made and t in self.computed[j]]
        return k <= max(uses, default=made)


def _decision(
    problem: Problem, stages: _Stages, i: int, at_limit: tuple[MemoryPoint, ...]
) -> Decision:
    graph, table, energy = problem.graph, problem.table, problem.energy.coefficients
    k = graph.node_of[i]
    recomputed = tuple(sorted(stages.computed[k] - {k}))
    paged_in, paged_out = sorted(stages.paged_in[i]), sorted(stages.paged_out[i])
    energy_j = energy.compute[k] * len(recomputed)
    time_s = table.compute_time_s[k] * len(recomputed)
    choice = Choice.KEPT if graph.users_of[i] else Choice.UNUSED
    if choice == Choice.KEPT and recomputed:
        choice = Choice.RECOMPUTED
    if paged_in or paged_out:
        choice = Choice.BOTH if choice == Choice.RECOMPUTED else Choice.PAGED
        energy_j += energy.page_in[i] * len(paged_in)
        energy_j += energy.page_out[i] * len(paged_out)
        time_s += table.page_in_time_s[i] * len(paged_in)
        time_s += table.page_out_time_s[i] * len(paged_out)
    in_ram = stages.in_ram(i)
    steps = sum(t in in_ram and stages.is_there(t, step, i) for t, step, _ in at_limit)
    return Decision(
        tensor=i,
        choice=choice,
        in_ram=tuple(_ranges(in_ram)),
        on_storage=tuple(_ranges(stages.stored[i])),
        recomputed=recomputed,
        paged_in=tuple(paged_in),
        paged_out=tuple(paged_out),
        energy_j=energy_j,
        time_s=time_s,
        bytes_at_limit=graph.tensor_bytes[i] * steps,
    )


def _by_index(pairs: Iterable[Pair]) -> dict[int, set[int]]:
    stages: defaultdict[int, set[int]] = defaultdict(set)
    for t, k in pairs:
        stages[k].add(t)
    return stages


def _ranges(stages: set[int]) -> Iterator[StageRange]:
    """Yield the ranges of consecutive stages, ascending."""
    firsts = (t for t in sorted(stages) if t - 1 not in stages)
    lasts = (t for t in sorted(stages) if t + 1 not in stages)
    return zip(firsts, lasts, strict=True)
