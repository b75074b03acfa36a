"""Repair: make a partial schedule fit in RAM at low cost, and drop unneeded restorations."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from poetmodel.clock import check_time_limit, now_s
from poetmodel.heuristics.earlier_recomputation import EarlierRecomputation
from poetmodel.heuristics.recoveries import MAX_CHAIN, Recoveries, Recovery
from poetmodel.heuristics.restorations import (
    PAGE_IN,
    PAGE_OUT,
    RECOMPUTE,
    STORAGE_HOME,
    Restoration,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from random import Random

    from poetmodel.heuristics.own_rows import OwnRows, Uses
    from poetmodel.heuristics.partial_schedule import PartialSchedule
    from poetmodel.problem import Coefficients, Problem


FIT_NOISE_RATIO: Final = 1.0
"""Maximum random relative rise of a price while the partial schedule is made to fit."""
DROP_NOISE_RATIO: Final = 0.5
"""Maximum random relative rise of a price while restorations are dropped."""
ROUNDING_FACTOR: Final = 1 + 1e-9
"""Factor by which a price exceeds one that is equal except for rounding."""
MAX_PLACEMENTS: Final = 60
"""Maximum number of stages that are tried for a rewarded decision."""


class RepairStyle(NamedTuple):
    """Options of repair."""

    pages: bool = True
    """Whether tensors may be paged, if the problem permits it."""
    max_chain: int = MAX_CHAIN
    """Maximum chain of recomputations if tensors may be paged: a small one prefers page-ins."""
    choices_per_relief: int = 20
    """One in this number of the tensors that could be evicted is evicted before all are ranked
    again; fewer if the stage fits before."""


DEFAULT_STYLE: Final = RepairStyle()
"""Style of repair by default."""


class Obstacle(NamedTuple):
    """A stage that would have exceeded the limit if a restoration had been dropped."""

    stage: int
    rise_bytes: int
    """Rise of the RAM use of the stage without the restoration [B]."""
    intervals: tuple[tuple[tuple[int, int], ...], ...]
    """Intervals in which the restored tensors were in RAM."""


@dataclass(slots=True)
class Repair:
    """Modifies a partial schedule greedily."""

    problem: Problem
    partial: PartialSchedule
    prices: Coefficients
    """Prices of decisions."""
    limit_bytes: int
    """RAM limit of every step [B]."""
    rng: Random | None = None
    """Source of noise on the prices; None for no noise."""
    until_s: float = math.inf
    """Time at which the repair ends, on the clock of `now_s` [s]."""
    style: RepairStyle = DEFAULT_STYLE
    respects_rows: bool = True
    """Whether to add no decision that exceeds a user-defined constraint with positive coefficients
    only."""
    obstacles: dict[Restoration, Obstacle] = field(default_factory=dict)
    """Obstacles to dropping restorations. Repairs of one partial schedule share them, so that a
    restoration is tried again only if its obstacle no longer exists."""
    paged_only: set[int] = field(default_factory=set)
    """Stages in which no node is recomputed any more, because its recomputation did not fit."""
    _can_page: bool = field(init=False)
    _recompute_prices: list[float] | None = None

    def __post_init__(self) -> None:
        self._can_page = self.style.pages and self.problem.can_page

    # -- fitting in RAM --------------------------------------------------------------------------

    def fit(self) -> bool:
        """Evict and restore tensors until every step fits in RAM; return whether that succeeded.

        The fullest stage is relieved first. Recomputations that do not fit in it move to earlier
        stages, which costs nothing. Otherwise tensors kept across it are evicted and restored at
        their next need, those first that free most bytes in stages above the limit for their price.
        If no tensor is kept across it, its recomputations are replaced by page-ins.
        """
        earlier_recomputation = EarlierRecomputation(
            partial=self.partial,
            limit_bytes=self.limit_bytes,
            fits_limits=self.fits_limits,
        )
        while now_s() < self.until_s:
            check_time_limit()
            excess = self.partial.peaks() - self.limit_bytes
            fullest_stage = int(excess.argmax())
            if excess[fullest_stage] <= 0:
                return True
            if earlier_recomputation.relieve(fullest_stage):
                continue
            plans = self._best_recoveries(fullest_stage, np.maximum(excess, 0))
            if not plans and not self._replace_by_page_ins(fullest_stage):
                return False
            for plan in plans:
                self._add_plan(plan)
                if self.partial.peak(fullest_stage) <= self.limit_bytes:
                    break
        return False

    def _best_recoveries(self, stage: int, excess: np.ndarray) -> list[Recovery]:
        """Return the recoveries that relieve a stage most for their price, the best first.

        Their number is one in `choices_per_relief` of the tensors that could be evicted, at least
        one. The recovery of a tensor is searched only if the tensor's minimum price could make the
        recovery one of the best. If only one is returned, the search has an upper bound on the
        price.
        """
        partial = self.partial
        recoveries = Recoveries(self, stage)
        max_chain = self.style.max_chain if self._can_page else MAX_CHAIN
        relief = _Relief(excess, counts_bytes=bool(partial.graph.state_tensors))
        ranked_tensors: list[tuple[float, int, int, float, Recovery | None]] = []
        """Smallest ranks of tensors, with their next needs, gains by noise, and recoveries, None if
        these are not known yet."""
        best_rank = math.inf
        """The rank that some tensor has at most: with a page-in, or with a known recovery."""
        for i, first, need in partial.kept_across(stage):
            check_time_limit()
            freed_intervals: Sequence[tuple[int, int]] = ((first, need),)
            recovery = None
            if i in partial.resident:
                recovery, freed_intervals = self._storage_home_plan(i, (first, need))
                min_price = page_in_price = math.inf if recovery is None else recovery.price
            else:
                min_price, page_in_price = recoveries.price_range(i, need)
            if min_price < math.inf:
                gain = relief.total_bytes(freed_intervals, partial.sizes[i]) / self._add_noise(
                    1.0, FIT_NOISE_RATIO
                )
                ranked_tensors.append((_rank(gain, min_price), i, need, gain, recovery))
                if page_in_price < math.inf:
                    best_rank = min(best_rank, _rank(gain, page_in_price))
        heapify(ranked_tensors)
        plans: list[Recovery] = []
        max_plans = max(1, len(ranked_tensors) // self.style.choices_per_relief)
        while ranked_tensors and len(plans) < max_plans:
            _, i, need, gain, recovery = heappop(ranked_tensors)
            if recovery is not None:
                plans.append(recovery)
                continue
            check_time_limit()
            is_bounded = max_plans == 1 and -math.inf < best_rank < 0
            max_price = gain / -best_rank * ROUNDING_FACTOR if is_bounded else math.inf
            recovery = recoveries.cheapest(i, need, max_chain, max_price)
            if recovery is not None:
                rank = _rank(gain, recovery.price)
                best_rank = min(best_rank, rank)
                heappush(ranked_tensors, (rank, i, need, gain, recovery))
        return plans

    def _storage_home_plan(
        self, i: int, interval: tuple[int, int]
    ) -> tuple[Recovery | None, Sequence[tuple[int, int]]]:
        """Return the recovery that evicts state `i` across an interval, and the intervals it frees.

        The state gets a home on storage, which frees the intervals before the state's node and
        after the last reader. An interval between these two is freed, too, and ends with a page-in.
        Return (None, ()) if the state cannot have its home on storage.
        """
        partial, graph = self.partial, self.problem.graph
        home = Restoration.at_its_node(graph, i, STORAGE_HOME)
        if not self.problem.can_page or not self.fits_limits(home):
            return None, ()
        outer_intervals = [span for span in partial.intervals[i] if span[1] <= graph.node_of[i]]
        outer_intervals += [span for span in partial.intervals[i] if span[1] == len(graph.nodes)]
        price = self._price(home, adding=True)
        if interval in outer_intervals:
            return Recovery(price, (home,)), outer_intervals
        page_in = Restoration(interval[1], i, PAGE_IN)
        price += self._price(page_in, adding=True)
        return Recovery(price, (home, page_in)), (*outer_intervals, interval)

    def _add_plan(self, plan: Recovery) -> None:
        """Add the restorations of a recovery that limits other than RAM permit."""
        for restoration in plan.restorations:
            if restoration not in self.partial and self.fits_limits(restoration):
                self.partial.add(restoration)

    @property
    def recompute_prices(self) -> list[float]:
        """The price of recomputing each node; infinite if that is forbidden."""
        if self._recompute_prices is None:
            may_recompute = self.problem.may_recompute
            self._recompute_prices = [
                price if may_recompute(k) else math.inf
                for k, price in enumerate(self.prices.compute)
            ]
        return self._recompute_prices

    def page_in(self, i: int) -> tuple[float, int]:
        """Return the price of a page-in of tensor `i` and the last stage that state permits.

        Infinite and -1 if no page-in is possible.
        """
        graph = self.problem.graph
        k = graph.node_of[i]
        if not self._can_page and not graph.nodes[k].is_state:
            return math.inf, -1
        page_in_restoration = Restoration(k, i, PAGE_IN)
        if i in self.partial.resident or not self.fits_limits(page_in_restoration):
            return math.inf, -1
        return self._price(page_in_restoration, adding=True), graph.last_page_in_stage(i)

    def _is_allowed(self, restoration: Restoration) -> bool:
        """Return whether state permits a restoration.

        A node that reads state cannot be recomputed after the replacement, and resident state is
        not paged in.
        """
        stage, item, kind = restoration
        problem = self.problem
        if kind == RECOMPUTE:
            return stage <= problem.graph.last_stages[item]
        k = problem.graph.node_of[item]
        if stage == k or not problem.graph.nodes[k].is_state:
            return True
        return item not in self.partial.resident and stage <= problem.graph.last_page_in_stage(item)

    def fits_limits(self, restoration: Restoration) -> bool:
        """Return whether user-defined constraints, storage and state permit a restoration."""
        partial, i = self.partial, restoration.item
        rows = partial.rows if self.respects_rows else None
        limit = self.problem.aux_limit_bytes
        if not self._is_allowed(restoration):
            return False
        if rows is not None and not rows.allows(partial.used, self._uses(rows, restoration)):
            return False
        if restoration.kind == RECOMPUTE or limit is None or partial.is_paged_out(i):
            return True
        if partial.stored[i] and restoration.kind != STORAGE_HOME:
            return True
        return partial.aux_used_bytes + partial.sizes[i] <= limit

    def _replace_by_page_ins(self, t: int) -> bool:
        """Replace the recomputations of stage `t` by page-ins; return whether any was replaced."""
        partial, graph = self.partial, self.problem.graph
        if not self._can_page or not partial.recomputed[t]:
            return False
        self.paged_only.add(t)
        is_changed = False
        for k in sorted(partial.recomputed[t], reverse=True):
            if k not in partial.recomputed[t]:
                continue
            page_ins = [
                Restoration(t, i, PAGE_IN)
                for i in graph.outputs_of[k]
                if partial.is_read_from(i, t) and i not in partial.paged_in[t]
            ]
            if all(map(self.fits_limits, page_ins)):
                partial.remove(Restoration(t, k, RECOMPUTE))
                for page_in in page_ins:
                    partial.add(page_in)
                is_changed = True
        return is_changed

    # -- user-defined constraints ----------------------------------------------------------------

    def satisfy(self) -> None:
        """Add decisions that constraints or the objective reward, and drop excessive ones.

        Each move adds or drops the one decision that lowers the excess over user-defined
        constraints most for its price and fits. When no such move is left, decisions with negative
        prices are added if they exceed no constraint.
        """
        rows, partial = self.partial.rows, self.partial
        if rows is None or rows.rewards is None:
            return
        while now_s() < self.until_s and rows.excess(partial.used, partial.exceeded) > 0:
            check_time_limit()
            if not self._lower_excess(rows):
                return
        prices = {item: self._price(item, adding=True) for item in self._additions(rows)}
        profitable = [item for item in prices if prices[item] < 0]
        for item in sorted(profitable, key=prices.__getitem__):
            while now_s() < self.until_s:
                check_time_limit()
                if rows.change(partial.used, self._uses(rows, item)) > 0 or not self._place_one(
                    item
                ):
                    break

    def place_rewarded(self, rewarded: Iterable[Restoration]) -> None:
        """Add each rewarded decision in any stage in which it fits.

        The given stages are ignored.
        """
        for restoration in rewarded:
            self._place_one(restoration)

    def _lower_excess(self, rows: OwnRows) -> bool:
        """Apply the best move that lowers the excess; return whether a move was applied."""
        partial = self.partial
        moves: list[tuple[float, int, Restoration]] = []
        for item in self._additions(rows):
            gain = -rows.change(partial.used, self._uses(rows, item))
            if gain > 0:
                moves.append(
                    (
                        _rank(
                            gain, self._add_noise(self._price(item, adding=True), FIT_NOISE_RATIO)
                        ),
                        1,
                        item,
                    )
                )
        for item in partial.restorations():
            gain = -rows.change(partial.used, self._uses(rows, item, adding=False))
            if gain > 0:
                price = self._add_noise(-self._price(item), FIT_NOISE_RATIO)
                moves.append((_rank(gain, price), 0, item))
        for _, is_addition, item in sorted(moves):
            check_time_limit()
            if self._apply_if_better(item, self._place_one if is_addition else self._drop):
                gain = rows.change(partial.used, self._uses(rows, item)) if is_addition else 0.0
                while gain < 0 and self._apply_if_better(item, self._place_one):  # still the best
                    if rows.change(partial.used, self._uses(rows, item)) > gain:
                        break
                return True
        return False

    def _uses(self, rows: OwnRows, restoration: Restoration, *, adding: bool = True) -> Uses:
        """Return the row amounts of adding a restoration, or of dropping one if not `adding`.

        A tensor's first page-in includes its page-out. Restorations that serve only this one are
        not included, except the page-ins of state, which end with its home on storage.
        """
        item = restoration.item
        if restoration.kind == RECOMPUTE:
            uses = rows.compute[item]
        elif restoration.kind == STORAGE_HOME:
            uses = rows.storage_home[item]
            if not adding:
                uses = (*uses, *rows.page_in[item] * self.partial.page_ins[item])
        else:
            page_out = self.partial.changes_page_out(restoration, adding=adding)
            uses = rows.page_out[item] if page_out else ()
            if restoration.kind != PAGE_OUT:
                uses = (*rows.page_in[item], *uses)
        return uses if adding else tuple((row, -amount) for row, amount in uses)

    def _apply_if_better(
        self, restoration: Restoration, apply_move: Callable[[Restoration], bool]
    ) -> bool:
        """Apply a move; undo it unless it succeeds and lowers the excess.

        Return whether the move was retained.
        """
        excess_before, mark = self._excess(), self.partial.mark()
        if apply_move(restoration) and self._excess() < excess_before:
            return True
        self.partial.undo(mark)
        return False

    def _additions(self, rows: OwnRows) -> Iterator[Restoration]:
        """Yield all rewarded decisions; recomputations and page-ins with stage -1 for any stage."""
        graph = self.problem.graph
        yield from (Restoration(-1, k, RECOMPUTE) for k in rows.rewarded_nodes)
        yield from (Restoration(-1, i, PAGE_IN) for i in rows.rewarded_page_ins)
        for i in rows.rewarded_page_outs:
            if not self.partial.is_paged_out(i):
                yield Restoration.at_its_node(graph, i, PAGE_OUT)
        for i in rows.rewarded_storage_homes:
            if i in self.partial.resident:
                yield Restoration.at_its_node(graph, i, STORAGE_HOME)

    def _place_one(self, restoration: Restoration) -> bool:
        """Add a rewarded decision in the best stage in which it fits; return whether it was added.

        Stages that have the inputs of a recomputation in RAM are tried first, then those with the
        smallest RAM use.
        """
        partial, graph, item = self.partial, self.problem.graph, restoration.item
        if restoration.kind in (PAGE_OUT, STORAGE_HOME):
            fits = restoration not in partial and self.fits_limits(restoration)
            if fits:
                partial.add(restoration)
            return fits
        first_stage = item if restoration.kind == RECOMPUTE else graph.node_of[item]
        present_items = partial.recomputed if restoration.kind == RECOMPUTE else partial.paged_in
        peaks = partial.peaks().tolist()

        def rank(t: int) -> tuple[int, int]:
            inputs = partial.working.inputs_of[item] if restoration.kind == RECOMPUTE else ()
            return sum(not partial.is_available(p, t) for p in inputs), peaks[t]

        stages = [
            t
            for t in range(first_stage + 1, len(peaks))
            if item not in present_items[t] and self._is_allowed(restoration._replace(stage=t))
        ]
        excess_before = self._excess()
        for t in sorted(stages, key=rank)[:MAX_PLACEMENTS]:
            check_time_limit()
            mark = partial.mark()
            is_added = self._add_with_inputs(restoration._replace(stage=t))
            if is_added and self._excess() <= excess_before and partial.fits(self.limit_bytes):
                return True
            partial.undo(mark)
        return False

    def _excess(self) -> float:
        """Return the excess over user-defined constraints.

        Return 0 if dropping decisions cannot cause an excess.
        """
        rows = self.partial.rows
        if rows is None or rows.rewards is None:
            return 0.0
        return rows.excess(self.partial.used, self.partial.exceeded)

    def _add_with_inputs(self, restoration: Restoration) -> bool:
        """Add a restoration and those of its inputs.

        Return whether limits other than RAM permit it.
        """
        plan: Recovery | None = Recovery(0.0, (restoration,))
        if restoration.kind == RECOMPUTE:
            item, stage = restoration.item, restoration.stage
            plan = Recoveries(self).recomputation(item, stage, MAX_CHAIN, math.inf)
        if plan is not None:
            self._add_plan(plan)
        return restoration in self.partial

    # -- dropping restorations -------------------------------------------------------------------

    def drop_unneeded(self) -> None:
        """Drop restorations whose tensors can be kept, the most expensive for their bytes first.

        Each page-in may cost much however small it is, so dropping many small ones can be better
        than dropping a large one.
        """
        has_dropped = True
        while has_dropped and now_s() < self.until_s:
            has_dropped = False
            for restoration in sorted(self.partial.restorations(), key=self.drop_order):
                if now_s() >= self.until_s:
                    break
                check_time_limit()
                if self._price(restoration) < 0:
                    continue  # the objective rewards it
                if restoration not in self.partial or self._is_blocked(restoration):
                    continue
                if self._may_drop(restoration):
                    has_dropped = self._drop(restoration) or has_dropped

    def drop_order(self, restoration: Restoration) -> float:
        """Return a sort key that is smaller if a restoration costs more per restored byte."""
        item, graph = restoration.item, self.problem.graph
        restored_tensors = graph.outputs_of[item] if restoration.kind == RECOMPUTE else (item,)
        price = self._add_noise(self._price(restoration), DROP_NOISE_RATIO)
        return -price / max(1, sum(self.partial.sizes[i] for i in restored_tensors))

    def _price(self, restoration: Restoration, *, adding: bool = False) -> float:
        """Return the price of a present restoration, or of adding one; with its page-out."""
        prices, item, partial = self.prices, restoration.item, self.partial
        if restoration.kind == RECOMPUTE:
            return prices.compute[item]
        if restoration.kind == STORAGE_HOME:
            n_page_ins = 0 if adding else partial.page_ins[item]
            return prices.storage_home[item] + n_page_ins * prices.page_in[item]
        page_out = partial.changes_page_out(restoration, adding=adding)
        price = prices.page_out[item] if page_out else 0.0
        return price if restoration.kind == PAGE_OUT else prices.page_in[item] + price

    def _drop(self, restoration: Restoration) -> bool:
        """Drop a restoration unless a step then exceeds RAM, or the excess over constraints rises.

        Returns whether it was dropped. If RAM does not suffice, the obstacle is stored.
        """
        partial, excess_before, mark = self.partial, self._excess(), self.partial.mark()
        partial.remove(restoration)
        excess = partial.excess(self.limit_bytes)
        if excess is None and self._excess() <= excess_before:
            self.obstacles.pop(restoration, None)
            return True
        partial.undo(mark)
        if excess is not None:
            stage, load = excess
            rise = load - partial.peak(stage)
            self.obstacles[restoration] = Obstacle(stage, rise, self._intervals_of(restoration))
        return False

    def _is_blocked(self, restoration: Restoration) -> bool:
        """Return whether the obstacle to dropping a restoration still exists."""
        obstacle, partial = self.obstacles.get(restoration), self.partial
        if obstacle is None or obstacle.intervals != self._intervals_of(restoration):
            return False
        load = partial.row_bytes[obstacle.stage] + partial.extra_bytes[obstacle.stage]
        return bool(load + obstacle.rise_bytes > self.limit_bytes)

    def _intervals_of(self, restoration: Restoration) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the intervals in which the tensors of a restoration are in RAM."""
        item, graph = restoration.item, self.problem.graph
        restored_tensors = graph.outputs_of[item] if restoration.kind == RECOMPUTE else (item,)
        return tuple(tuple(self.partial.intervals[i]) for i in restored_tensors)

    def _may_drop(self, restoration: Restoration) -> bool:
        """Return whether the RAM rows alone permit keeping the tensors of a restoration in RAM.

        A row is the RAM use at the last step of a stage.
        """
        partial, graph, t = self.partial, self.problem.graph, restoration.stage
        freed = 0
        tensors: Sequence[int] = (restoration.item,)
        if restoration.kind == PAGE_OUT:
            return True
        if restoration.kind == STORAGE_HOME:
            return partial.row_bytes_if_resident(restoration.item) <= self.limit_bytes
        if restoration.kind == RECOMPUTE:
            tensors = [i for i in graph.outputs_of[restoration.item] if partial.is_read_from(i, t)]
            inputs = partial.working.inputs_of[restoration.item]
            freed = sum(partial.sizes[i] for i in inputs)
        return all(partial.row_bytes_with(i, t) - freed <= self.limit_bytes for i in tensors)

    def _add_noise(self, price: float, noise: float) -> float:
        """Return a price with a random relative rise of up to `noise`."""
        return price * (1 + noise * self.rng.random()) if noise and self.rng is not None else price


def _rank(gain: float, price: float) -> float:
    """Return a sort key that is smaller if a change gains more for its price."""
    return -gain / price if price > 0 else -math.inf


class _Relief:
    """Index of the stages above the limit, to sum the bytes by which an eviction relieves them."""

    def __init__(self, excess: np.ndarray, *, counts_bytes: bool) -> None:
        """Index the stages whose excess over the limit is above 0 [B]."""
        self.stages: list[int] = np.flatnonzero(excess).tolist()
        self.excess = excess[self.stages]
        self.largest = max(self.excess.tolist(), default=0)
        self.sums: list[int] = [0, *self.excess.cumsum().tolist()]
        self.counts_bytes = counts_bytes
        """Whether the relief of a stage is limited to the stage's excess. Needed for state, which
        is in RAM in all stages: otherwise the largest state would always be evicted first."""

    def total_bytes(self, intervals: Iterable[tuple[int, int]], size_bytes: int) -> int:
        """Return the total relief of all stages if `size_bytes` are freed in intervals [B]."""
        total = 0
        for first, end in intervals:
            begin, stop = bisect_left(self.stages, first), bisect_left(self.stages, end)
            if not self.counts_bytes:
                total += size_bytes * (stop - begin)
            elif size_bytes >= self.largest:
                total += self.sums[stop] - self.sums[begin]
            elif begin < stop:
                total += int(np.minimum(self.excess[begin:stop], size_bytes).sum())
        return total
