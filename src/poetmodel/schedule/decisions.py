"""Decisions of a schedule on each tensor, their costs, and the steps with RAM at its limit."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from poetmodel.schedule.simulation import MemoryPoint, Simulation, simulate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from poetmodel.graph import Graph
    from poetmodel.problem import Problem
    from poetmodel.schedule.relations import Pair, Schedule, Span

StageRange = tuple[int, int]
"""First and last of consecutive stages."""


class Treatment(StrEnum):
    """Actions of a schedule on a tensor after its first computation."""

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
    RESIDENT = "resident"
    """State whose home is RAM."""
    ON_STORAGE = "on storage"
    """State whose home is storage: it is read from there, and written back where it is replaced."""
    REPLACEMENT = "replacement"
    """It replaces state, in the memory of that."""

    @property
    def pages(self) -> bool:
        """Whether the tensor is paged, recomputed or not."""
        return self in (Treatment.PAGED, Treatment.BOTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Decision of a schedule on one tensor."""

    tensor: int
    choice: Treatment
    in_ram: tuple[StageRange, ...]
    """Stages with it in RAM at some step."""
    on_storage: tuple[StageRange, ...]
    """Stages that begin with it on storage."""
    recomputed: tuple[int, ...]
    """Stages in which its node is computed again."""
    paged_in: tuple[int, ...]
    """Stages of page-ins; of state on storage its first read is among them."""
    paged_out: tuple[int, ...]
    """Stage of the page-out; state on storage has its replacement's, which has none itself."""
    energy_j: float
    """Energy of these recomputations and transfers [J]; a node's outputs share recomputations."""
    time_s: float
    """Their time [s]."""
    bytes_at_limit: int
    """Its bytes times the steps with RAM at its limit and it in RAM [B]."""

    @property
    def has_cost(self) -> bool:
        """Whether the tensor is recomputed or paged; outputs that nothing reads do not count."""
        moved = bool(self.paged_in or self.paged_out)
        return moved or self.choice in (Treatment.RECOMPUTED, Treatment.BOTH)

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
    """Return the decision of a valid schedule on each tensor, in the order of the graph.

    `at_limit` are the steps with RAM at its limit, see `steps_at_limit`.
    """
    stages, steps = _Stages(problem, schedule), tuple(at_limit)
    return tuple(_decision(problem, stages, i, steps) for i in range(len(problem.graph.tensors)))


def steps_at_limit(
    problem: Problem, schedule: Schedule, simulation: Simulation
) -> tuple[MemoryPoint, ...]:
    """Return the steps with RAM at its limit.

    They leave less RAM than the size of a tensor that is out of RAM in their stage and is
    recomputed or paged in later: it could not have been kept over them. So do those for state on
    storage that it costs something to read or replace: it could not be resident. If nothing is
    recomputed or paged, they are the steps at the peak.
    """
    graph, stages = problem.graph, _Stages(problem, schedule)
    moved = {i for _, i in schedule.M_in} - stages.on_storage
    moved.update(i for t, k in schedule.R if k < t for i in graph.outputs_of[k])
    apart = stages.copied.union(stages.on_storage.intersection(graph.replacement_of))
    if not moved and not apart:
        return tuple(p for p in simulation.curve if p.ram_bytes == simulation.peak_ram_bytes)
    absent_bytes = [0] * len(graph.nodes)
    for i in moved | apart:
        k = graph.node_of[i]
        wanted = range(len(graph.nodes))  # for state a home
        if i in moved:
            wanted = range(k + 1, max(stages.paged_in[i] | stages.computed[k]))
        for t in set(wanted) - stages.in_ram(i):
            absent_bytes[t] = max(absent_bytes[t], graph.tensor_bytes[i])
    usable = problem.usable_ram_bytes
    return tuple(p for p in simulation.curve if usable - p.ram_bytes < absent_bytes[p.stage])


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlaceUse:
    """An output that a schedule writes over an input, which dies at that step."""

    stage: int
    node: int
    output: int
    input: int
    saved_bytes: int
    """Bytes that the step saves by it [B]."""


def in_place_uses(graph: Graph, schedule: Schedule) -> tuple[InPlaceUse, ...]:
    """Return the operations in place of a valid schedule, in the order of execution."""
    if not any(graph.in_place_of):
        return ()
    computed = _by_index(schedule.R)
    shared = graph.shared_bytes_of
    return tuple(
        InPlaceUse(stage=t, node=k, output=y, input=x, saved_bytes=shared[k].get(x, 0))
        for t, k in schedule.R
        for y, x in graph.in_place_of[k]
        if not schedule.is_kept(t + 1, x)
        and not any(t in computed[j] for j in graph.users_of[x] if j > k)
    )


def saved_in_place_bytes(problem: Problem, schedule: Schedule, simulation: Simulation) -> int:
    """Return the rise of a schedule's peak if nothing operates in place [B]."""
    graph = problem.graph
    if not any(graph.in_place_of):
        return 0
    apart = replace(graph, nodes=tuple(replace(node, in_place=()) for node in graph.nodes))
    return simulate(apart, problem.costs, schedule).peak_ram_bytes - simulation.peak_ram_bytes


class _Stages:
    """The stages of each relation, by node or tensor."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        graph = problem.graph
        self.graph = graph
        self.resident = frozenset(schedule.resident)
        self.state_of = graph.state_of
        on_storage = set(graph.state_tensors) - self.resident
        self.on_storage = frozenset(on_storage)
        """State whose home is storage."""
        self.copied = frozenset(() if problem.reads_in_place else on_storage)
        """State that is read into RAM from there."""
        self.computed = _by_index(schedule.R)
        self.kept = _by_tensor(schedule.kept)
        self.stored = _by_tensor(schedule.stored)
        self.paged_in = _by_index(schedule.M_in)
        self.paged_out = _by_index(schedule.M_out)

    def in_ram(self, i: int) -> set[int]:
        """Return the stages with tensor `i` in RAM at some step."""
        if i in self.resident:
            return set(range(len(self.graph.nodes)))
        if i in self.on_storage - self.copied:
            return set()
        return self.kept[i] | self.computed[self.graph.node_of[i]] | self.paged_in[i]

    def is_there(self, t: int, k: int, i: int) -> bool:
        """Return whether tensor `i`, in RAM in stage `t`, is so at step `k`, which may make it."""
        if i in self.resident or i in self.state_of:
            return i in self.resident  # a replacement takes no room of its own
        writer = self.graph.node_of[i]
        if k < writer and t not in self.kept[i]:
            return False
        if t + 1 in self.kept[i]:
            return True
        uses = [j for j in self.graph.users_of[i] if j >= writer and t in self.computed[j]]
        return k <= max(uses, default=writer)


def _decision(
    problem: Problem, stages: _Stages, i: int, at_limit: tuple[MemoryPoint, ...]
) -> Decision:
    graph, table, energy = problem.graph, problem.table, problem.energy.coefficients
    k = graph.node_of[i]
    choice, on_storage = Treatment.KEPT, stages.stored[i]
    recomputed = tuple(sorted(stages.computed[k] - {k}))
    paged_in, paged_out, written = sorted(stages.paged_in[i]), sorted(stages.paged_out[i]), i
    if i in stages.state_of:
        choice, paged_out = Treatment.REPLACEMENT, []
    elif i in stages.resident:
        choice = Treatment.RESIDENT
    elif i in stages.on_storage:
        choice, written = Treatment.ON_STORAGE, graph.replacement_of.get(i, i)
        on_storage = set(range(graph.last_page_in(i) + 1))
        paged_in = sorted({k, *paged_in}) if i in stages.copied else []
        paged_out = sorted(stages.paged_out[written])
    elif paged_in or paged_out:
        choice = Treatment.BOTH if recomputed and graph.users_of[i] else Treatment.PAGED
    elif not graph.users_of[i]:
        choice = Treatment.UNUSED
    elif recomputed:
        choice = Treatment.RECOMPUTED
    energy_j = energy.compute[k] * len(recomputed)
    time_s = table.compute_time_s[k] * len(recomputed)
    if paged_in or paged_out:
        energy_j += energy.page_in[i] * len(paged_in) + energy.page_out[written] * len(paged_out)
        time_s += table.page_in_time_s[i] * len(paged_in)
        time_s += table.page_out_time_s[written] * len(paged_out)
    in_ram = stages.in_ram(i)
    steps = sum(t in in_ram and stages.is_there(t, step, i) for t, step, _ in at_limit)
    return Decision(
        tensor=i,
        choice=choice,
        in_ram=tuple(_ranges(in_ram)),
        on_storage=tuple(_ranges(on_storage)),
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


def _by_tensor(spans: Iterable[Span]) -> dict[int, set[int]]:
    stages: defaultdict[int, set[int]] = defaultdict(set)
    for i, first, last in spans:
        stages[i].update(range(first, last + 1))
    return stages


def _ranges(stages: set[int]) -> Iterator[StageRange]:
    """Yield the ranges of consecutive stages, ascending."""
    firsts = (t for t in sorted(stages) if t - 1 not in stages)
    lasts = (t for t in sorted(stages) if t + 1 not in stages)
    return zip(firsts, lasts, strict=True)
