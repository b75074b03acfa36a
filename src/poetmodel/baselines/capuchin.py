"""Capuchin: swap or recompute tensors in their idle intervals, by the cost of these evictions."""

from __future__ import annotations

import math
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.baselines.homes import schedule_with_homes
from poetmodel.baselines.paging import (
    CostRule,
    EvictionExecution,
    IdleInterval,
    StorageSpace,
    eviction_costs,
    execute_evictions,
    find_idle_intervals,
    relieved_stages,
    require_within_budget,
)
from poetmodel.baselines.registry import METHODS
from poetmodel.clock import check_time_limit
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import checkpoint_all_profile
from poetmodel.schedule import Schedule, simulate
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from numpy.typing import NDArray

    from poetmodel.problem import Problem

MAX_ROUNDS: Final = 6
"""Maximum number of rounds that keep more recomputed tensors in RAM."""


def capuchin(problem: Problem, rule: str = "", *, refined: bool = True) -> Schedule:
    """Swap tensors whose transfers are hidden; then swap or recompute by memory saved per second.

    Candidates are the intervals between two accesses of a tensor that contain a stage above the RAM
    budget. The *free time* of an interval is its time in keep-all minus the times of page-out and
    page-in: from 0 on, computations hide both transfers.

    1. Swap in intervals of free time 0 or more, in descending order, until all stages fit.
    2. Then evict in the interval with the highest memory saving per second (MSPS): bytes divided by
       overhead. The overhead of a swap is the time that is not hidden, that of a recomputation the
       time of all computations and page-ins that it needs, given the plan so far. The smaller one
       decides; ties are swaps.

    The `rule` sets the costs. By default the best schedule of all three rules is returned.

    - ``published``: as above, on every device, without contention between transfers.
    - ``time``: where transfers block the core, free time is minus the transfer time (0 if the
      deadline counts only computations). Where they overlap, the channel is occupied by the plan's
      previous transfers: page-outs after the first access, page-ins before the second one.
    - ``energy``: overheads are energies, and free time is minus the energy of the transfers.

    The last two rules charge no page-out if the plan has written the tensor before. If `refined`,
    each is applied twice for the better schedule: the saving of an interval is all bytes of the
    tensor, then at most the largest excess of its stages. Homes of state: see `StateHomes`.

    Interpretations. The paper has one amount of memory to save; here every stage must fit. The
    paper triggers page-ins early and adjusts them by feedback; here a schedule pages in at the
    stage of use, and a plan moves transfers. A recomputation that does not fit in its stage becomes
    a swap if possible; otherwise further tensors are evicted in that stage. If `refined`,
    recomputed tensors stay in RAM until their next access if all stages until then have free bytes;
    the paper keeps the latest ones while memory lasts ("collective recomputation").
    """
    rules = [CostRule.parse(rule)] if rule else list(CostRule)
    searches = [
        partial(_plan_with_rule, rule=cost_rule, keeps_recomputed=refined) for cost_rule in rules
    ]
    if refined:
        adapted_rules = (cost_rule for cost_rule in rules if cost_rule != CostRule.PUBLISHED)
        searches += [
            partial(_plan_with_rule, rule=cost_rule, caps_savings=True)
            for cost_rule in adapted_rules
        ]
    return schedule_with_homes(
        METHODS["capuchin"].state_homes, problem, searches, may_overwrite=True
    )


def _plan_with_rule(
    problem: Problem,
    rule: CostRule,
    *,
    keeps_recomputed: bool = True,
    caps_savings: bool = False,
    overwrites: bool = False,
) -> Schedule:
    planner = _EvictionPlanner(problem, rule, caps_savings=caps_savings, overwrites=overwrites)
    return planner.plan(keeps_recomputed=keeps_recomputed)


class _EvictionPlanner:
    """Plans swaps and recomputations by one rule; `caps_savings` limits savings to the excess."""

    def __init__(
        self, problem: Problem, rule: CostRule, *, caps_savings: bool, overwrites: bool
    ) -> None:
        graph = problem.graph
        self.problem = problem
        self.caps_savings = caps_savings
        self.overwrites = overwrites
        self.graph = graph
        self.sizes = graph.tensor_bytes
        self.intervals = [
            interval
            for interval in find_idle_intervals(graph, overwrites=overwrites)
            if self.sizes[interval.tensor]
        ]
        self.intervals_of: dict[int, list[IdleInterval]] = {}
        for interval in self.intervals:
            self.intervals_of.setdefault(interval.tensor, []).append(interval)
        self.excess: NDArray[np.int64] = (
            np.array(checkpoint_all_profile(graph)) - problem.usable_ram_bytes
        )
        """Bytes of each stage above the budget under the current plan, shape (stages,) [B];
        negative for free bytes."""
        self.evictions: dict[IdleInterval, bool] = {}
        """Current plan: for each interval with an eviction, True for a swap, False for a
        recomputation."""
        self.storage = StorageSpace(problem)
        self.node_end_s = list(accumulate(problem.table.compute_time_s))
        """End of each node on the timeline of keep-all [s]."""
        self.rule = rule
        self.hides_transfers = rule == CostRule.PUBLISHED or (
            rule != CostRule.ENERGY and problem.is_overlapping
        )
        """Whether the rule counts transfers as hidden by computations."""
        self.compute_costs, self.page_in_costs, self.page_out_costs = eviction_costs(problem, rule)
        self.busy_times: list[tuple[float, float]] = []
        """(begin, end) of each transfer of the current plan on the timeline of keep-all [s]; empty
        unless the rule is ``time`` and hides transfers."""

    def plan(self, *, keeps_recomputed: bool) -> Schedule:
        """Return a schedule within the budget, improved by `_keep_recomputed_tensors` if asked."""
        self._plan_hidden_swaps()
        while True:
            self._plan_until_fit()
            schedule = execute_evictions(self.problem, self.evictions)
            if not self._repair(schedule):
                break
        require_within_budget(self.problem, schedule)
        return self._keep_recomputed_tensors(schedule) if keeps_recomputed else schedule

    def _relieved_stages(self, interval: IdleInterval) -> slice:
        return relieved_stages(self.graph, interval, overwrites=self.overwrites)

    # -- choosing -------------------------------------------------------------------------------

    def _plan_hidden_swaps(self) -> None:
        """Plan swaps of free time 0 or more, the longest first, until all stages fit."""
        free_times = {interval: self._free_time(interval) for interval in self.intervals}
        for interval in sorted(self.intervals, key=lambda interval: -free_times[interval]):
            check_time_limit()
            if free_times[interval] < 0 or self.excess.max() <= 0:
                break
            # The free time is computed again, because earlier swaps occupy the channel.
            is_hidden = self._free_time(interval) >= 0
            relieves_excess = self.excess[self._relieved_stages(interval)].max() > 0
            if is_hidden and relieves_excess and self.storage.has_space_for(interval.tensor):
                self._add_eviction(interval, is_swap=True)

    def _plan_until_fit(self) -> None:
        """Plan the eviction of highest saving per cost until all stages fit; refuse if stuck."""
        while self.excess.max() > 0:
            best: tuple[float, IdleInterval, bool] | None = None
            n_excess_before = [0, *accumulate((self.excess > 0).tolist())]
            for interval in self.intervals:
                check_time_limit()
                first_stage = self._relieved_stages(interval).start
                if (
                    n_excess_before[interval.after] == n_excess_before[first_stage]
                    or interval in self.evictions
                ):
                    continue
                saved_bytes = self._count_saved_bytes(interval)
                swap_cost = max(0.0, -self._free_time(interval))
                min_cost = min(swap_cost, self.compute_costs[self.graph.node_of[interval.tensor]])
                if best is not None and saved_bytes <= best[0] * min_cost:
                    continue  # further recomputations only add to the cost
                max_cost = swap_cost if best is None else min(swap_cost, saved_bytes / best[0])
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
                worst_stage = int(self.excess.argmax())
                raise MethodNotApplicableError(
                    f"at {self.graph.nodes[worst_stage].name!r} "
                    f"{format_bytes(int(self.excess[worst_stage]))} more than available are "
                    "needed, and no tensor is left to swap or recompute"
                )
            self._add_eviction(best[1], is_swap=best[2])

    def _count_saved_bytes(self, interval: IdleInterval) -> int:
        """Return the bytes of an interval's tensor, capped if `caps_savings` [B]."""
        size = self.sizes[interval.tensor]
        if not self.caps_savings:
            return size
        return min(size, int(self.excess[self._relieved_stages(interval)].max()))

    def _add_eviction(self, interval: IdleInterval, *, is_swap: bool) -> None:
        """Add a swap or recomputation to the plan; a swap may replace a planned recomputation."""
        if interval not in self.evictions:
            self.excess[interval.before + 1 : interval.after] -= self.sizes[interval.tensor]
            if self._relieved_stages(interval).start == interval.before:
                self.excess[interval.before] -= self.graph.shared_bytes_of[interval.before][
                    interval.tensor
                ]
        self.evictions[interval] = is_swap
        if is_swap and self.hides_transfers and self.rule != CostRule.PUBLISHED:
            begin, end = self.node_end_s[interval.before], self.node_end_s[interval.after - 1]
            out_s, in_s = self._transfer_costs(interval)
            self.busy_times += [(begin, begin + out_s), (end - in_s, end)]
        if is_swap:
            self.storage.write(interval.tensor)

    def _transfer_costs(self, interval: IdleInterval) -> tuple[float, float]:
        """Return the costs of page-out, 0 if storage has a copy, and of page-in [s or J]."""
        i = interval.tensor
        stored_tensors = (
            self.graph.on_aux if self.rule == CostRule.PUBLISHED else self.storage.stored_tensors
        )
        return 0.0 if i in stored_tensors else self.page_out_costs[i], self.page_in_costs[i]

    def _free_time(self, interval: IdleInterval) -> float:
        """Return the time that an interval leaves beside its transfers; -inf without storage [s].

        If the rule hides no transfers, the result is minus their cost [s or J].
        """
        if not self.storage.has_space_for(interval.tensor):
            return -math.inf
        transfer_cost = sum(self._transfer_costs(interval))
        if not self.hides_transfers:
            return -transfer_cost
        begin, end = self.node_end_s[interval.before], self.node_end_s[interval.after - 1]
        busy_s = sum(
            max(0.0, min(end, busy_end) - max(begin, busy_begin))
            for busy_begin, busy_end in self.busy_times
        )
        return end - begin - busy_s - transfer_cost

    def _recomputation_cost(self, interval: IdleInterval, max_cost: float) -> float:
        """Return the cost [s or J]; inf if forbidden, or computations alone exceed `max_cost`."""
        graph, problem = self.graph, self.problem
        t = interval.after
        total_cost = 0.0
        missing_tensors, visited_tensors = [interval.tensor], {interval.tensor}
        computed_nodes: set[int] = set()
        while missing_tensors:
            k = graph.node_of[missing_tensors.pop()]
            if k in computed_nodes:
                continue
            if not problem.may_recompute(k):
                return math.inf
            computed_nodes.add(k)
            total_cost += self.compute_costs[k]
            if total_cost > max_cost:
                return math.inf
            for p in graph.inputs_of[k]:
                if p in visited_tensors or self._is_in_ram(p, t):
                    continue
                visited_tensors.add(p)
                if p in self.storage.stored_tensors:
                    total_cost += self.page_in_costs[p]
                else:
                    missing_tensors.append(p)
        return total_cost

    def _is_in_ram(self, p: int, t: int) -> bool:
        """Return whether the plan has tensor `p` in RAM at stage `t`, without recomputed copies."""
        readers = self.graph.users_of[p]
        if not readers or readers[-1] < t:
            return False
        return not any(
            interval in self.evictions
            for interval in self.intervals_of.get(p, ())
            if interval.before < t < interval.after
        )

    # -- collective recomputation ---------------------------------------------------------------

    def _keep_recomputed_tensors(self, schedule: Schedule) -> Schedule:
        """Return the schedule with recomputed tensors kept until their next use if RAM is free.

        Kept tensors avoid recomputations, which frees RAM for the next round. The last round within
        the budget counts.
        """
        kept_tensors, full_stages = frozenset[tuple[int, int]](), set[int]()
        for _ in range(MAX_ROUNDS):
            free_bytes = self.problem.usable_ram_bytes - self._peaks(schedule)
            execution = _KeepingExecution(
                self.problem, self.evictions, kept_tensors, free_bytes, full_stages
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
        """Change the plan for each stage of `schedule` above the budget; return whether any is.

        A recomputation there becomes a swap, or else the bytes above are added to `excess`.
        """
        excess = self._peaks(schedule) - self.problem.usable_ram_bytes
        excess_bytes = {int(t): int(excess[t]) for t in np.flatnonzero(excess > 0)}
        for t, stage_excess in excess_bytes.items():
            recompute_intervals = [
                interval
                for interval, is_swap in self.evictions.items()
                if interval.after == t and not is_swap
            ]
            swappable_interval = next(
                (
                    interval
                    for interval in recompute_intervals
                    if self.storage.has_space_for(interval.tensor)
                ),
                None,
            )
            if swappable_interval is not None:
                self._add_eviction(swappable_interval, is_swap=True)
            else:
                self.excess[t] += stage_excess
        return bool(excess_bytes)


class _KeepingExecution(EvictionExecution):
    """Execution that keeps recomputed tensors until their next use where RAM is free.

    `evictions` are as in `execute_evictions`; `kept_tensors` are pairs (recomputing stage, tensor).
    Further ones that fit in `free_bytes` and, if their stage is one of `full_stages`, in that stage
    are kept, too, and their bytes are subtracted from `free_bytes`.
    """

    def __init__(
        self,
        problem: Problem,
        evictions: Mapping[IdleInterval, bool],
        kept_tensors: Collection[tuple[int, int]],
        free_bytes: NDArray[np.int64],
        full_stages: Collection[int],
    ) -> None:
        super().__init__(problem, evictions)
        self.kept_tensors = frozenset(kept_tensors)
        """(stage, tensor) of each recomputed tensor that stays in RAM after the stage."""
        self.free_bytes, self.full_stages = free_bytes, full_stages
        """Free bytes of each stage [B], and stages that exceeded the budget in an earlier round."""
        self.kept_until: dict[int, int] = {}
        """Stage of the next use of each kept tensor."""

    def retains(self, i: int) -> bool:
        return super().retains(i) or self.kept_until.get(i, -1) > self.stage

    def _find_missing(self) -> tuple[set[int], set[int]]:
        """Return the nodes that the stage computes and the tensors to page in.

        Further recomputed tensors that fit in `free_bytes` are added to `kept_tensors`.
        """
        computed_nodes, page_ins = super()._find_missing()
        t = self.stage
        recomputed_tensors = [
            i for k in computed_nodes - {t} for i in self.graph.outputs_of[k] if self.is_awaited(i)
        ]
        next_use = {i: next(k for k in self.graph.users_of[i] if k > t) for i in recomputed_tensors}
        for i in sorted(recomputed_tensors, key=lambda i: (next_use[i], i)):
            free_span = self.free_bytes[t + (t not in self.full_stages) : next_use[i]]
            if (t, i) not in self.kept_tensors:
                if free_span.min(initial=self.sizes[i]) < self.sizes[i]:
                    continue
                free_span -= self.sizes[i]
                self.kept_tensors |= {(t, i)}
            self.kept_until[i] = next_use[i]
        return computed_nodes, page_ins
