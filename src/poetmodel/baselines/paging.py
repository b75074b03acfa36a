"""Paging methods: LRU, `offload_all` and `zero_offload`; common code of all methods that page.

An `IdleInterval` is the interval between two consecutive uses of a tensor.
Offline methods choose the idle intervals in which a tensor is evicted from RAM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from poetmodel.baselines.engine import select_best_schedule
from poetmodel.baselines.homes import schedule_with_homes, use_homes_of
from poetmodel.baselines.registry import METHODS
from poetmodel.errors import InputError, MethodNotApplicableError
from poetmodel.heuristics.execution import FORWARD_PHASES, StagedExecution
from poetmodel.problem import Problem, Quantity
from poetmodel.schedule import Schedule, simulate
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from poetmodel.graph import Graph


def lru_paging(problem: Problem) -> Schedule:
    """Page out the least recently used tensor whenever RAM is short; page in tensors that are read.

    A tensor is used when a node computes or reads it; of equal last uses, the lowest index is paged
    out. Tensors do not change, so each is written at most once, within the storage limit; later
    evictions only free it, like a clean page. Tensors without a further user are freed at once.
    Tensors of 0 bytes stay until then. Homes of state are those of `StateHomes.EITHER`.
    """
    return schedule_with_homes(
        METHODS["lru-paging"].state_homes,
        problem,
        (page_least_recently_used,),
        may_overwrite=True,
    )


def page_least_recently_used(problem: Problem, *, overwrites: bool = False) -> Schedule:
    """Return the schedule of `lru_paging` for a problem without state."""
    return _LruExecution(problem, overwrites=overwrites).execute_stages()


def offload_all(problem: Problem) -> Schedule:
    """Page out every tensor that is saved for the backward pass, and page it in there.

    A saved tensor is computed by an input, forward or loss node and read by a backward or update
    node. It stays in RAM until its last use before the backward pass, and longer if the next node
    reads it, too. The better of two variants is taken. As in vDNN, the tensor is paged in once and
    stays until its last use. As with ``torch.autograd.graph.save_on_cpu``, it is paged in for each
    node that reads it, and stays longer only if the next node also reads it: more transfers, less
    RAM. The variants ignore the budget and the storage limit. Gradients and tensors of 0 bytes stay
    in RAM. Samples that are on storage initially are not written. Homes of state are those of
    `StateHomes.EITHER`; state on storage is paged as by `zero_offload`.
    """
    if not problem.can_page:
        raise MethodNotApplicableError(
            "it pages every saved tensor out, and the problem allows no paging"
        )
    if all(node.phase in FORWARD_PHASES or node.is_state for node in problem.graph.nodes):
        raise MethodNotApplicableError(
            "it pages tensors that the backward pass reads, and the graph has no backward nodes"
        )

    @use_homes_of("offload-all")
    def schedule(stateless: Problem) -> Schedule:
        """Return the best schedule of both variants of `offload_all`, by `select_best_schedule`."""
        saved_intervals = _find_saved_intervals(stateless.graph)
        first_intervals = {interval.tensor: interval for interval in reversed(saved_intervals)}
        state_evictions = _make_state_evictions(problem, stateless.graph)
        evictions_of_variants = (
            dict.fromkeys(evicted_intervals, True) | state_evictions
            for evicted_intervals in (first_intervals.values(), saved_intervals)
        )
        return select_best_schedule(
            stateless,
            (
                partial(_execute_within_budget, stateless, evictions)
                for evictions in evictions_of_variants
            ),
        )

    return schedule(problem)


def _find_saved_intervals(graph: Graph) -> list[IdleInterval]:
    """Return idle intervals of nonempty forward tensors that end at a backward or update node."""
    is_forward = [node.phase in FORWARD_PHASES for node in graph.nodes]
    return [
        interval
        for interval in find_idle_intervals(graph)
        if graph.tensor_bytes[interval.tensor]
        and is_forward[graph.node_of[interval.tensor]]
        and not is_forward[interval.after]
    ]


def _execute_within_budget(problem: Problem, evictions: Mapping[IdleInterval, bool]) -> Schedule:
    return require_within_budget(problem, execute_evictions(problem, evictions))


def zero_offload(problem: Problem) -> Schedule:
    """Put all state on storage: page it in for each use, and write it back after updates.

    State is parameters, moments and running statistics. Each state tensor is paged in at its node
    and stays until its first reader, longer only if the next node reads it, too; it is paged in
    again for each later use. On memory-mapped storage, it is read in place. All other tensors are
    kept until their last use, whatever the budget.

    ZeRO-Offload keeps master copies and moments in the memory of the host, updates them there, and
    moves gradients out as soon as they are computed. Here storage replaces the host but cannot
    compute: moments are paged in for the update, which consumes the gradient in RAM. The graph
    determines when updates run. For a graph without state the schedule is keep-all.
    """

    @use_homes_of("zero-offload")
    def schedule(stateless: Problem) -> Schedule:
        return execute_evictions(stateless, _make_state_evictions(problem, stateless.graph))

    return require_within_budget(problem, schedule(problem))


def _make_state_evictions(problem: Problem, graph: Graph) -> dict[IdleInterval, bool]:
    """Return evictions (True: all are paged) of the problem's state between readers in `graph`."""
    state_tensors = frozenset(problem.graph.state_tensors)
    return {
        interval: True
        for interval in find_idle_intervals(graph)
        if interval.tensor in state_tensors and interval.before != graph.node_of[interval.tensor]
    }


class StorageSpace:
    """The tensors on storage, and the free bytes of storage.

    Samples that are initially on storage do not count towards the storage limit.
    """

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        self.sizes = graph.tensor_bytes
        self.can_page = problem.can_page
        self.stored_tensors = set(graph.on_aux) if problem.can_page else set[int]()
        """Tensors on storage."""
        limit = problem.aux_limit_bytes
        self.free_bytes = math.inf if limit is None else limit
        """Free bytes of storage; inf without a limit."""

    def has_space_for(self, i: int) -> bool:
        """Return whether tensor `i` is on storage, or may be paged out and fits."""
        return i in self.stored_tensors or (self.can_page and self.sizes[i] <= self.free_bytes)

    def write(self, i: int) -> None:
        """Record a write of tensor `i` to storage, unless it is already there."""
        if i not in self.stored_tensors:
            self.stored_tensors.add(i)
            self.free_bytes -= self.sizes[i]


class CostRule(StrEnum):
    """Measure of the cost of an eviction, for `eviction_costs`."""

    PUBLISHED = "published"
    """Time that computations do not hide, as on the paper's machine."""
    TIME = "time"
    """Time as the problem's deadline counts it: transfers that block the core are not hidden."""
    ENERGY = "energy"
    """Energy, including the energy of hidden transfers."""

    @classmethod
    def parse(cls, name: str) -> CostRule:
        """Return the rule with that name; raise `InputError` for an unknown name."""
        if name not in tuple(cls):
            raise InputError(f"rule {name!r}: expected one of {', '.join(cls)}")
        return cls(name)


def eviction_costs(
    problem: Problem, rule: CostRule
) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """Return the costs of nodes, and of page-ins and page-outs of tensors, by a rule [s or J].

    Times of transfers are 0 without storage or, with `CostRule.TIME`, if the deadline counts only
    computations. Hidden times are not subtracted.
    """
    table, energy = problem.table, problem.energy.coefficients
    if rule == CostRule.ENERGY:
        return energy.compute, energy.page_in, energy.page_out
    if not table.has_storage or (rule == CostRule.TIME and problem.counts_compute_alone):
        zeros = (0.0,) * len(problem.graph.tensors)
        return table.compute_time_s, zeros, zeros
    return table.compute_time_s, table.page_in_time_s, table.page_out_time_s


def transfer_costs(problem: Problem) -> tuple[Sequence[float], Sequence[float]]:
    """Return page-in and page-out costs by tensor: time [s] if it is minimized, else energy [J].

    0 without storage; times also if the deadline counts only computations.
    """
    rule = CostRule.TIME if problem.minimize == Quantity.TIME else CostRule.ENERGY
    _, page_in, page_out = eviction_costs(problem, rule)
    return page_in, page_out


class _LruExecution(StagedExecution):
    """Execution of `lru_paging`: evicts the least recently used tensor."""

    def __init__(self, problem: Problem, *, overwrites: bool) -> None:
        super().__init__(problem.graph, problem.usable_ram_bytes, overwrites=overwrites)
        self.storage = StorageSpace(problem)
        self.n_steps = 0
        """Number of executed computations."""
        self.last_use = [0] * len(self.sizes)
        """For each tensor, the value of `n_steps` at its last use."""

    def choose_victim(self, k: int) -> int | None:
        """Return the least recently used tensor to page out, if any; add it to `storage`."""
        evictable_tensors = [
            i for i in self.evictable_candidates(k) if self.storage.has_space_for(i)
        ]
        victim = min(evictable_tensors, key=lambda i: self.last_use[i], default=None)
        if victim is not None:
            self.storage.write(victim)
        return victim

    def pages_in(self, i: int) -> bool:
        return i in self.storage.stored_tensors

    def compute(self, k: int) -> None:
        super().compute(k)
        self.n_steps += 1
        for i in (*self.graph.inputs_of[k], *self.graph.outputs_of[k]):
            self.last_use[i] = self.n_steps


# -- evictions of offline methods -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IdleInterval:
    """Interval between two consecutive uses of a tensor, usually not in adjacent stages.

    Intervals between adjacent stages exist if the tensor may be overwritten in the first.
    """

    tensor: int
    before: int
    """Node that computes or reads the tensor before the interval."""
    after: int
    """Node that reads the tensor after the interval."""


def find_idle_intervals(graph: Graph, *, overwrites: bool = False) -> list[IdleInterval]:
    """Return all intervals between consecutive uses in stages that are not adjacent.

    By tensor, then by stage; the first use is the computation. With `overwrites`, adjacent stages
    count if the first node can save bytes by overwriting the tensor.
    """
    return [
        IdleInterval(i, before, after)
        for i, readers in enumerate(graph.users_of)
        for before, after in pairwise((graph.node_of[i], *readers))
        if after > before + 1 or (overwrites and i in graph.shared_bytes_of[before])
    ]


def relieved_stages(graph: Graph, interval: IdleInterval, *, overwrites: bool) -> slice:
    """Return the slice of stages that need less RAM if a tensor is evicted in an interval.

    Stages strictly between both uses, and with `overwrites` the first if it can save bytes.
    """
    is_overwritten = overwrites and interval.tensor in graph.shared_bytes_of[interval.before]
    return slice(interval.before + (not is_overwritten), interval.after)


def execute_evictions(problem: Problem, evictions: Mapping[IdleInterval, bool]) -> Schedule:
    """Return the schedule in which tensors are evicted in the idle intervals of `evictions`.

    True pages a tensor in after the interval, False recomputes it. RAM and storage are not limited.
    A missing input of a recomputation follows its own interval; outside of one, it is paged in if
    it is on storage, else recomputed.
    """
    return EvictionExecution(problem, evictions).execute_stages()


class EvictionExecution(StagedExecution):
    """Execution in which tensors are evicted in given idle intervals; see `execute_evictions`."""

    def __init__(self, problem: Problem, evictions: Mapping[IdleInterval, bool]) -> None:
        super().__init__(problem.graph)
        self.is_paged_in_after = {
            (interval.tensor, interval.before): is_paged_in
            for interval, is_paged_in in evictions.items()
        }
        """For each evicted tensor and the node before its interval: whether the tensor is paged in
        after the interval, not recomputed."""
        self.last_use = list(problem.graph.node_of)
        """For each tensor, its node, or the latest node that has read it in its own stage."""
        self.stored_tensors = {
            interval.tensor for interval, is_paged_in in evictions.items() if is_paged_in
        }
        """Tensors that are paged in after an interval, or are on storage initially."""
        self.stored_tensors |= StorageSpace(problem).stored_tensors

    def pages_in(self, i: int) -> bool:
        """Return whether tensor `i` is paged in, not recomputed, after its current interval."""
        return self.is_paged_in_after.get((i, self.last_use[i]), i in self.stored_tensors)

    def retains(self, i: int) -> bool:
        """Return whether tensor `i` stays in RAM: it is read later and not evicted now."""
        return self.is_awaited(i) and (i, self.last_use[i]) not in self.is_paged_in_after

    def compute(self, k: int) -> None:
        """Compute node `k`; at its first computation, record it as the last use of its inputs."""
        super().compute(k)
        if k == self.stage:
            for i in self.graph.inputs_of[k]:
                self.last_use[i] = k


def require_within_budget(problem: Problem, schedule: Schedule) -> Schedule:
    """Return the schedule; raise `MethodNotApplicableError` if it exceeds `usable_ram_bytes`."""
    usable_bytes = problem.usable_ram_bytes
    peak = simulate(problem.graph, problem.costs, schedule).peak
    if peak.ram_bytes > usable_bytes:
        raise MethodNotApplicableError(
            f"its schedule needs {format_bytes(peak.ram_bytes)} at "
            f"{problem.graph.nodes[peak.node].name!r}, and tensors may use "
            f"{format_bytes(usable_bytes)}"
        )
    return schedule
