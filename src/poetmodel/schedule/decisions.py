"""Decisions of a schedule on each tensor, their costs, steps at the RAM limit, in-place outputs."""

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
    """Treatment of a tensor by a schedule after its first computation."""

    KEPT = "kept"
    """The tensor is in RAM until its last use."""
    RECOMPUTED = "recomputed"
    """The tensor's node is computed again, and the tensor is not paged."""
    PAGED = "paged"
    """The tensor is paged out, paged in, or both. If it is unread, its node may be recomputed."""
    BOTH = "paged and recomputed"
    """The tensor is read and paged, and its node is computed again."""
    UNUSED = "unused"
    """No node reads the tensor, and it is not paged."""
    RESIDENT = "resident"
    """State whose home is RAM."""
    ON_STORAGE = "on storage"
    """State whose home is storage: paged in or read in place, and written back if replaced."""
    REPLACEMENT = "replacement"
    """The tensor replaces state, in the memory of the state tensor."""

    @property
    def is_paged(self) -> bool:
        """Whether the tensor is paged, maybe also recomputed; False for state and replacements."""
        return self in (Treatment.PAGED, Treatment.BOTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision of a schedule on one tensor, with its cost."""

    tensor: int
    """Index of the tensor."""
    treatment: Treatment
    """Treatment of the tensor after its first computation."""
    in_ram: tuple[StageRange, ...]
    """Ranges of stages in which the tensor is in RAM at some step; for a replacement, the stage
    that computes it."""
    on_storage: tuple[StageRange, ...]
    """Ranges of stages that begin with the tensor on storage: those of ``S_AUX`` or, for state on
    storage, all stages up to that of its replacement (to the end without one)."""
    recomputed: tuple[int, ...]
    """Stages that recompute the tensor's node."""
    paged_in: tuple[int, ...]
    """Stages that page the tensor in, including the first read of state on storage; none for state
    that is read in place."""
    paged_out: tuple[int, ...]
    """Stages that page the tensor out. For state on storage, the stages that page out its
    replacement; the decision on the replacement lists none."""
    energy_j: float
    """Energy of the recomputations and transfers of the tensor [J].

    Includes idle power over their counted time, except for ``overlap``. Each output of a node has
    the full cost of the node's recomputations. Write-backs that commits contain do not count, as
    the single pass includes them."""
    time_s: float
    """Time of the recomputations and transfers that count in `energy_j` [s]."""
    bytes_at_limit: int
    """Size times the number of steps at the RAM limit at which the tensor is in RAM [B].

    0 for replacements, which allocate no memory."""

    @property
    def has_cost(self) -> bool:
        """Whether the tensor is recomputed or paged."""
        is_paged = bool(self.paged_in or self.paged_out)
        return is_paged or self.treatment in (Treatment.RECOMPUTED, Treatment.BOTH)

    def to_dict(self, graph: Graph) -> dict[str, Any]:
        """Return the decision as JSON values in SI units, with the size of the tensor."""
        return {
            "tensor": graph.tensors[self.tensor].name,
            "node": graph.nodes[graph.node_of[self.tensor]].name,
            "bytes": graph.tensor_bytes[self.tensor],
            "fate": str(self.treatment),
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
    problem: Problem, schedule: Schedule, limit_steps: Iterable[MemoryPoint] = ()
) -> tuple[Decision, ...]:
    """Return each tensor's `Decision` in a valid schedule; `limit_steps`: see `steps_at_limit`."""
    stages, points = _StagesByItem(problem, schedule), tuple(limit_steps)
    return tuple(
        _find_decision(problem, stages, i, points) for i in range(len(problem.graph.tensors))
    )


def steps_at_limit(
    problem: Problem, schedule: Schedule, simulation: Simulation
) -> tuple[MemoryPoint, ...]:
    """Return the steps of a schedule at which free RAM is too small for a cheaper decision.

    That is smaller than a tensor restored later instead of kept, or than state that cannot be
    resident. Without such tensors, the steps with peak RAM.
    """
    graph, stages = problem.graph, _StagesByItem(problem, schedule)
    recomputed_or_paged = {i for _, i in schedule.M_in} - stages.on_storage
    recomputed_or_paged.update(i for t, k in schedule.R if k < t for i in graph.outputs_of[k])
    costly_state = stages.read_into_ram.union(stages.on_storage.intersection(graph.replacement_of))
    if not recomputed_or_paged and not costly_state:
        return tuple(
            point for point in simulation.curve if point.ram_bytes == simulation.peak_ram_bytes
        )
    absent_bytes = [0] * len(graph.nodes)
    for i in recomputed_or_paged | costly_state:
        k = graph.node_of[i]
        useful_stages = range(len(graph.nodes))  # Resident state would be in RAM in all stages.
        if i in recomputed_or_paged:
            useful_stages = range(k + 1, max(stages.paged_in[i] | stages.computed[k]))
        for t in set(useful_stages) - stages.in_ram(i):
            absent_bytes[t] = max(absent_bytes[t], graph.tensor_bytes[i])
    usable_bytes = problem.usable_ram_bytes
    return tuple(
        point
        for point in simulation.curve
        if usable_bytes - point.ram_bytes < absent_bytes[point.stage]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlaceUse:
    """An output that a schedule writes over an input whose last use is that step."""

    stage: int
    """Stage of the step."""
    node: int
    """Node of the step."""
    output: int
    """Tensor that overwrites the input."""
    input: int
    """Tensor that is overwritten."""
    saved_bytes: int
    """Bytes that the step saves by this output [B]."""


def in_place_uses(graph: Graph, schedule: Schedule) -> tuple[InPlaceUse, ...]:
    """Return each output that a valid schedule writes over an input, in execution order."""
    if not any(graph.in_place_of):
        return ()
    stages_of_node = _stages_by_index(schedule.R)
    shared_bytes = graph.shared_bytes_of
    return tuple(
        InPlaceUse(
            stage=t,
            node=k,
            output=output,
            input=source,
            saved_bytes=shared_bytes[k].get(source, 0),
        )
        for t, k in schedule.R
        for output, source in graph.in_place_of[k]
        if not schedule.is_kept(t + 1, source)
        and not any(t in stages_of_node[j] for j in graph.users_of[source] if j > k)
    )


def saved_in_place_bytes(problem: Problem, schedule: Schedule, simulation: Simulation) -> int:
    """Return the increase of a schedule's peak if no output overwrites an input [B]."""
    graph = problem.graph
    if not any(graph.in_place_of):
        return 0
    unshared_graph = replace(graph, nodes=tuple(replace(node, in_place=()) for node in graph.nodes))
    return (
        simulate(unshared_graph, problem.costs, schedule).peak_ram_bytes - simulation.peak_ram_bytes
    )


class _StagesByItem:
    """The stages of each relation, by node or tensor."""

    def __init__(self, problem: Problem, schedule: Schedule) -> None:
        graph = problem.graph
        self.graph = graph
        self.resident = frozenset(schedule.resident)
        self.state_of = graph.state_of
        on_storage = set(graph.state_tensors) - self.resident
        self.on_storage = frozenset(on_storage)
        """State whose home is storage."""
        self.read_into_ram = frozenset(() if problem.reads_in_place else on_storage)
        """State that is read into RAM from storage."""
        self.computed = _stages_by_index(schedule.R)
        self.kept = _stages_by_tensor(schedule.kept)
        self.stored = _stages_by_tensor(schedule.stored)
        self.paged_in = _stages_by_index(schedule.M_in)
        self.paged_out = _stages_by_index(schedule.M_out)

    def in_ram(self, i: int) -> set[int]:
        """Return the stages with tensor `i` in RAM at some step, none if it is read in place."""
        if i in self.resident:
            return set(range(len(self.graph.nodes)))
        if i in self.on_storage - self.read_into_ram:
            return set()
        return self.kept[i] | self.computed[self.graph.node_of[i]] | self.paged_in[i]

    def is_in_ram_at(self, t: int, k: int, i: int) -> bool:
        """Return whether `i` is in RAM at step `k` of stage `t`; always for resident state."""
        if i in self.resident or i in self.state_of:
            return i in self.resident  # A replacement allocates no memory.
        writer = self.graph.node_of[i]
        if k < writer and t not in self.kept[i]:
            return False
        if t + 1 in self.kept[i]:
            return True
        uses = [j for j in self.graph.users_of[i] if j >= writer and t in self.computed[j]]
        return k <= max(uses, default=writer)


def _find_decision(
    problem: Problem, stages: _StagesByItem, i: int, limit_steps: tuple[MemoryPoint, ...]
) -> Decision:
    """Return the decision of a schedule, given by its `stages`, on tensor `i`."""
    graph, table, energy = problem.graph, problem.table, problem.energy.coefficients
    k = graph.node_of[i]
    treatment, on_storage = Treatment.KEPT, stages.stored[i]
    recomputed = tuple(sorted(stages.computed[k] - {k}))
    paged_in, paged_out, paged_out_tensor = (
        sorted(stages.paged_in[i]),
        sorted(stages.paged_out[i]),
        i,
    )
    if i in stages.state_of:
        treatment, paged_out = Treatment.REPLACEMENT, []
    elif i in stages.resident:
        treatment = Treatment.RESIDENT
    elif i in stages.on_storage:
        treatment, paged_out_tensor = Treatment.ON_STORAGE, graph.replacement_of.get(i, i)
        on_storage = set(range(graph.last_page_in_stage(i) + 1))
        paged_in = sorted({k, *paged_in}) if i in stages.read_into_ram else []
        paged_out = sorted(stages.paged_out[paged_out_tensor])
    elif paged_in or paged_out:
        treatment = Treatment.BOTH if recomputed and graph.users_of[i] else Treatment.PAGED
    elif not graph.users_of[i]:
        treatment = Treatment.UNUSED
    elif recomputed:
        treatment = Treatment.RECOMPUTED
    energy_j = energy.compute[k] * len(recomputed)
    time_s = table.compute_time_s[k] * len(recomputed)
    if paged_in or paged_out:
        # The single pass includes commits, and with them these write-backs.
        is_committed = table.commit is not None and paged_out_tensor in table.commit.replacements
        n_page_outs = 0 if is_committed else len(paged_out)
        energy_j += energy.page_in[i] * len(paged_in)
        energy_j += energy.page_out[paged_out_tensor] * n_page_outs
        time_s += table.page_in_time_s[i] * len(paged_in)
        time_s += table.page_out_time_s[paged_out_tensor] * n_page_outs
    in_ram = stages.in_ram(i)
    n_limit_steps = sum(
        t in in_ram and stages.is_in_ram_at(t, step, i) for t, step, _ in limit_steps
    )
    return Decision(
        tensor=i,
        treatment=treatment,
        in_ram=tuple(_consecutive_ranges(in_ram)),
        on_storage=tuple(_consecutive_ranges(on_storage)),
        recomputed=recomputed,
        paged_in=tuple(paged_in),
        paged_out=tuple(paged_out),
        energy_j=energy_j,
        time_s=time_s,
        bytes_at_limit=graph.tensor_bytes[i] * n_limit_steps,
    )


def _stages_by_index(pairs: Iterable[Pair]) -> dict[int, set[int]]:
    """Return the set of stages of each node or tensor; empty for one without pairs."""
    stages: defaultdict[int, set[int]] = defaultdict(set)
    for t, k in pairs:
        stages[k].add(t)
    return stages


def _stages_by_tensor(spans: Iterable[Span]) -> dict[int, set[int]]:
    """Return the set of stages of each tensor; empty for one without spans."""
    stages: defaultdict[int, set[int]] = defaultdict(set)
    for i, first, last in spans:
        stages[i].update(range(first, last + 1))
    return stages


def _consecutive_ranges(stages: set[int]) -> Iterator[StageRange]:
    """Yield (first, last) of each range of consecutive stages, ascending."""
    firsts = (t for t in sorted(stages) if t - 1 not in stages)
    lasts = (t for t in sorted(stages) if t + 1 not in stages)
    return zip(firsts, lasts, strict=True)
