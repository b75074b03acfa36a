"""Capuchin: swap or recompute each tensor in its idle intervals, by the cost of doing so."""

from __future__ import annotations

import math
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.baselines.homes import best_homes
from poetmodel.baselines.paging import (
    EvictionExecution,
    IdleInterval,
    Overhead,
    StorageSpace,
    eviction_costs,
    execute_evictions,
    idle_intervals,
    relieved_stages,
    require_within_budget,
)
from poetmodel.clock import check_time_limit
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import checkpoint_all_profile
from poetmodel.problem import DeadlineCounts, Problem
from poetmodel.schedule import Schedule, simulate
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from numpy.typing import NDArray

MAX_ROUNDS: Final = 6
"""Maximum number of rounds that keep more recomputed tensors in RAM."""


def capuchin(problem: Problem, rule: str = "", *, refined: bool = True) -> Schedule:
    """Swap tensors whose transfers are hidden; then swap or recompute by memory saved per second.

    Candidates are the intervals between two accesses of a tensor that cross a peak: a stage that
    does not fit in RAM. The *free time* of an interval on the timeline of keep-all is the time
    between the two accesses, minus the times of page-out and page-in. If it is not negative,
    computations hide both transfers.

    1. Tensors are swapped in intervals of free time 0 or more, in descending order of free time,
       until all stages fit.
    2. Then a tensor is evicted in the interval with the highest memory saving per second (MSPS):
       bytes divided by overhead. The overhead of a swap is the time that is not hidden. The
       overhead of a recomputation is the compute time of all nodes that it computes, given the plan
       so far. The smaller overhead decides between swap and recomputation; ties are swaps.

    The `rule` sets the costs. By default the best schedule of all three rules is returned.

    - ``published``: as above, on every device, without contention between transfers.
    - ``time``: where transfers block the core, the free time of an interval is minus its transfer
      time. If the deadline counts only computations, transfers take no time. Where transfers
      overlap computations, the channel is occupied by the plan's previous transfers: page-outs
      directly after the first access, page-ins directly before the second one.
    - ``energy``: overheads are energies, and the free time of an interval is minus the energy of
      its transfers.

    The last two rules charge no page-out if the plan has written the tensor before. If `refined`,
    each of them is run twice, and the better schedule is returned: the saving of an interval is all
    bytes of the tensor, or at most the excess of a stage in the interval over the budget.

    Interpretations. The paper has one amount of memory to save; here every stage must fit. The
    paper triggers page-ins early and adjusts them by feedback; here a schedule pages in at the
    stage of use, and a plan moves transfers. A recomputation that does not fit in its stage becomes
    a swap if possible; otherwise further tensors are evicted in that stage.

    If `refined`, tensors that a stage recomputes as intermediate results stay in RAM until their
    own next access, in the order of these accesses, if all stages until then have free bytes. The
    paper keeps the latest ones while memory lasts ("collective recomputation"). The choices above
    do not anticipate this.

    The run time is O(intervals) choices, each of which examines every interval and its
    recomputations.
    """
    rules = [Overhead(rule)] if rule else list(Overhead)
    searches = [partial(_search_with_rule, rule=each, keeps_recomputed=refined) for each in rules]
    if refined:
        adapted_rules = (each for each in rules if each != Overhead.PUBLISHED)
        searches += [
            partial(_search_with_rule, rule=each, caps_savings=True) for each in adapted_rules
        ]
    return best_homes(problem, searches)


def _search_with_rule(
    problem: Problem, rule: Overhead, *, keeps_recomputed: bool = True, caps_savings: bool = False
) -> Schedule:
    return _Capuchin(problem, rule, caps_savings=caps_savings).run(
        keeps_recomputed=keeps_recomputed
    )


class _Capuchin:
    """The plan of swaps and recomputations for one rule."""

    def __init__(self, problem: Problem, rule: Overhead, *, caps_savings: bool = False) -> None:
        """Collect the eviction intervals and the excess of keep-all; the plan is empty."""
        graph = problem.graph
        self.problem = problem
        self.caps_savings = caps_savings
        """Whether the saving of an interval is at most the excess of a stage."""
        self.graph = graph
        self.sizes = graph.tensor_bytes
        self.intervals = [
            interval
            for interval in idle_intervals(graph, includes_overwritten=True)
            if self.sizes[interval.tensor]
        ]
        self.intervals_of: dict[int, list[IdleInterval]] = {}
        for interval in self.intervals:
            self.intervals_of.setdefault(interval.tensor, []).append(interval)
        self.excess: NDArray[np.int64] = (
            np.array(checkpoint_all_profile(graph)) - problem.usable_ram_bytes
        )
        """Bytes of each stage above the budget under the current plan, shape (stages,) [B]."""
        self.pages: dict[IdleInterval, bool] = {}
        """Current plan: eviction intervals, True for a swap and False for a recomputation."""
        self.storage = StorageSpace(problem)
        self.end_s = list(accumulate(problem.table.compute_time_s))
        self.rule = rule
        counted_time = (
            DeadlineCounts.OVERLAP if rule == Overhead.PUBLISHED else problem.deadline_counts
        )
        self.overlaps = rule != Overhead.ENERGY and counted_time == DeadlineCounts.OVERLAP
        """Whether computations hide transfers."""
        self.computing, self.paging_in, self.paging_out = eviction_costs(problem, rule)
        self.busy_times: list[tuple[float, float]] = []
        """Begin and end of the channel's busy times under the current plan [s]."""

    def run(self, *, keeps_recomputed: bool) -> Schedule:
        """Plan swaps and recomputations until the schedule meets the budget; return it.

        With `keeps_recomputed`, recomputed tensors stay in RAM where bytes are free.
        """
        self._swap_hidden()
        while True:
            self._choose_until_fit()
            schedule = execute_evictions(self.problem, self.pages)
            if not self._repair(schedule):
                break
        require_within_budget(self.problem, schedule)
        return self._keep_recomputed(schedule) if keeps_recomputed else schedule

    # -- choosing -------------------------------------------------------------------------------

    def _swap_hidden(self) -> None:
        """Plan swaps with non-negative free time, longest first, until all stages fit."""
        free_times = {interval: self._free_time(interval) for interval in self.intervals}
        for interval in sorted(self.intervals, key=lambda interval: -free_times[interval]):
            check_time_limit()
            if free_times[interval] < 0 or self.excess.max() <= 0:
                break
            is_hidden = self._free_time(interval) >= 0  # again, because the channel may be busy now
            relieves_excess = self.excess[relieved_stages(self.graph, interval)].max() > 0
            if is_hidden and relieves_excess and self.storage.has_space_for(interval.tensor):
                self._evict_in(interval, page=True)

    def _choose_until_fit(self) -> None:
        """Add the eviction with the highest saving per cost to the plan until all stages fit.

        Raises `MethodNotApplicableError` if no candidate is left.
        """
        while self.excess.max() > 0:
            best: tuple[float, IdleInterval, bool] | None = None
            n_excess_before = [0, *accumulate((self.excess > 0).tolist())]
            for interval in self.intervals:
                check_time_limit()
                first = relieved_stages(self.graph, interval).start
                if (
                    n_excess_before[interval.after] == n_excess_before[first]
                    or interval in self.pages
                ):
                    continue
                saved_bytes = self._saved_bytes(interval)
                swap_cost = max(0.0, -self._free_time(interval))
                min_cost = min(swap_cost, self.computing[self.graph.node_of[interval.tensor]])
                if best is not None and saved_bytes <= best[0] * min_cost:
                    continue  # further recomputations only add to the cost
                max_cost = (
                    swap_cost
                    if best is None or not best[0]
                    else min(swap_cost, saved_bytes / best[0])
                )
                overhead = (
                    min(swap_cost, self._recomputation_cost(interval, max_cost))
                    if swap_cost > 0
                    else 0.0
                )
                if overhead == math.inf:
                    continue
                saving = saved_bytes / overhead if overhead > 0 else math.inf
                if best is None or saving > best[0]:
                    best = (saving, interval, swap_cost == overhead)
            if best is None:
                worst = int(self.excess.argmax())
                raise MethodNotApplicableError(
                    f"at {self.graph.nodes[worst].name!r} {format_bytes(int(self.excess[worst]))} "
                    "more than available are needed, and no tensor is left to swap or recompute"
                )
            self._evict_in(best[1], page=best[2])

    def _saved_bytes(self, interval: IdleInterval) -> int:
        size = self.sizes[interval.tensor]
        if not self.caps_savings:
            return size
        return min(size, int(self.excess[relieved_stages(self.graph, interval)].max()))

    def _evict_in(self, interval: IdleInterval, *, page: bool) -> None:
        """Add an eviction to the plan, as a swap if `page`, and update excess, bus and storage."""
        if interval not in self.pages:
            self.excess[interval.before + 1 : interval.after] -= self.sizes[interval.tensor]
            if relieved_stages(self.graph, interval).start == interval.before:
                self.excess[interval.before] -= self.graph.shared_bytes_of[interval.before][
                    interval.tensor
                ]
        self.pages[interval] = page
        if page and self.overlaps and self.rule != Overhead.PUBLISHED:
            begin, end = self.end_s[interval.before], self.end_s[interval.after - 1]
            out_s, in_s = self._transfer_costs(interval)
            self.busy_times += [(begin, begin + out_s), (end - in_s, end)]
        if page:
            self.storage.write(interval.tensor)

    def _transfer_costs(self, interval: IdleInterval) -> tuple[float, float]:
        """Return the costs of page-out and page-in in an interval [s or J]."""
        i = interval.tensor
        on_storage = self.graph.on_aux if self.rule == Overhead.PUBLISHED else self.storage.stored
        return 0.0 if i in on_storage else self.paging_out[i], self.paging_in[i]

    def _free_time(self, interval: IdleInterval) -> float:
        """Return the free time of an interval [s]; -inf if storage has no space for the tensor.

        If computations hide no transfers, this is minus the cost of the transfers [s or J].
        """
        if not self.storage.has_space_for(interval.tensor):
            return -math.inf
        transfers = sum(self._transfer_costs(interval))
        if not self.overlaps:
            return -transfers
        begin, end = self.end_s[interval.before], self.end_s[interval.after - 1]
        busy_s = sum(max(0.0, min(end, b) - max(begin, a)) for a, b in self.busy_times)
        return end - begin - busy_s - transfers

    def _recomputation_cost(self, interval: IdleInterval, max_cost: float) -> float:
        """Return the cost of recomputing a tensor after an interval under the plan [s or J].

        Returns inf if the cost exceeds `max_cost` or a node cannot be recomputed.
        """
        graph, problem = self.graph, self.problem
        t = interval.after
        total = 0.0
        missing, visited = [interval.tensor], {interval.tensor}
        computed: set[int] = set()
        while missing:
            k = graph.node_of[missing.pop()]
            if k in computed:
                continue
            if not problem.may_recompute(k):
                return math.inf
            computed.add(k)
            total += self.computing[k]
            if total > max_cost:
                return math.inf
            for p in graph.inputs_of[k]:
                if p in visited or self._is_in_ram(p, t):
                    continue
                visited.add(p)
                if p in self.storage.stored:
                    total += self.paging_in[p]
                else:
                    missing.append(p)
        return total

    def _is_in_ram(self, p: int, t: int) -> bool:
        """Return whether tensor `p` is in RAM at stage `t` under the plan, recomputations aside."""
        users = self.graph.users_of[p]
        if not users or users[-1] < t:
            return False
        return not any(
            interval in self.pages
            for interval in self.intervals_of.get(p, ())
            if interval.before < t < interval.after
        )

    # -- collective recomputation ---------------------------------------------------------------

    def _keep_recomputed(self, schedule: Schedule) -> Schedule:
        """Return the schedule with recomputed tensors kept where RAM is free.

        Kept tensors avoid recomputations, which frees RAM for a further round.
        """
        kept_tensors, full_stages = frozenset[tuple[int, int]](), set[int]()
        for _ in range(MAX_ROUNDS):
            free_bytes = self.problem.usable_ram_bytes - self._peaks(schedule)
            execution = _KeepingExecution(
                self.problem, self.pages, kept_tensors, free_bytes, full_stages
            )
            candidate = execution.execute_stages()
            excess = self._peaks(candidate) - self.problem.usable_ram_bytes
            exceeded_stages = set(np.flatnonzero(excess > 0).tolist())
            if exceeded_stages - full_stages:
                full_stages |= exceeded_stages
            elif exceeded_stages or execution.kept_tensors == kept_tensors:
                break
            else:
                schedule, kept_tensors = candidate, execution.kept_tensors
        return schedule

    def _peaks(self, schedule: Schedule) -> NDArray[np.int64]:
        """Return the peak of each stage, shape (stages,) [B]."""
        peaks = np.zeros(len(self.graph.nodes), dtype=np.int64)
        for point in simulate(self.graph, None, schedule).curve:
            peaks[point.stage] = max(point.ram_bytes, peaks[point.stage])
        return peaks

    # -- recomputations that do not fit ------------------------------------------------------------

    def _repair(self, schedule: Schedule) -> bool:
        """Change the plan where recomputations do not fit; return whether any did not fit."""
        excess = self._peaks(schedule) - self.problem.usable_ram_bytes
        excess_bytes = {int(t): int(excess[t]) for t in np.flatnonzero(excess > 0)}
        for t, stage_excess in excess_bytes.items():
            recomputed = [
                interval
                for interval, page in self.pages.items()
                if interval.after == t and not page
            ]
            swappable = next(
                (
                    interval
                    for interval in recomputed
                    if self.storage.has_space_for(interval.tensor)
                ),
                None,
            )
            if swappable is not None:
                self._evict_in(swappable, page=True)
            else:
                self.excess[t] += stage_excess
        return bool(excess_bytes)


class _KeepingExecution(EvictionExecution):
    """Execution that keeps recomputed tensors until their next use where RAM is free."""

    def __init__(
        self,
        problem: Problem,
        pages: Mapping[IdleInterval, bool],
        kept_tensors: Collection[tuple[int, int]],
        free_bytes: NDArray[np.int64],
        full_stages: Collection[int],
    ) -> None:
        """Start an execution of evictions; `kept_tensors` stay in RAM until their next use."""
        super().__init__(problem, pages)
        self.kept_tensors = frozenset(kept_tensors)
        """(stage, tensor) of each recomputed tensor that stays in RAM after the stage."""
        self.free_bytes, self.full_stages = free_bytes, full_stages
        """Free bytes of each stage [B]; stages whose free bytes the recomputations themselves
        need."""
        self.kept_until: dict[int, int] = {}
        """Stage of the next use of each kept tensor."""

    def retains(self, i: int) -> bool:
        return super().retains(i) or self.kept_until.get(i, -1) > self.stage

    def _find_missing(self) -> tuple[set[int], set[int]]:
        """Return the nodes and page-ins that the stage needs; mark recomputed tensors to keep."""
        computed, page_ins = super()._find_missing()
        t = self.stage
        recomputed = [
            i for k in computed - {t} for i in self.graph.outputs_of[k] if self.is_awaited(i)
        ]
        next_use = {i: next(k for k in self.graph.users_of[i] if k > t) for i in recomputed}
        for i in sorted(recomputed, key=lambda i: (next_use[i], i)):
            free_span = self.free_bytes[t + (t not in self.full_stages) : next_use[i]]
            if (t, i) not in self.kept_tensors:
                if free_span.min(initial=self.sizes[i]) < self.sizes[i]:
                    continue
                free_span -= self.sizes[i]
                self.kept_tensors |= {(t, i)}
            self.kept_until[i] = next_use[i]
        return computed, page_ins
