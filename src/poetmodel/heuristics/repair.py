"""Repair: make a partial schedule fit in RAM, add rewarded and drop unneeded restorations."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from poetmodel.clock import check_time_limit, now_s
from poetmodel.heuristics.earlier_recomputation import EarlierRecomputation
from poetmodel.heuristics.recoveries import MAX_CHAIN, PageInPrice, Recoveries, Recovery
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

    from poetmodel.heuristics.partial_schedule import PartialSchedule
    from poetmodel.heuristics.user_rows import RowAmounts, UserRows
    from poetmodel.problem import Coefficients, Problem


FIT_NOISE_RATIO: Final = 1.0
"""Maximum random relative rise of a price while the partial schedule is made to fit in RAM, or its
excess over user-defined constraints is lowered."""
DROP_NOISE_RATIO: Final = 0.5
"""Maximum random relative rise of a price while restorations are dropped."""
ROUNDING_FACTOR: Final = 1 + 1e-9
"""Factor on an upper bound of prices, so that an equal price with a rounding error is below it."""
MAX_TRIED_STAGES: Final = 60
"""Maximum number of stages in which a rewarded decision is tried."""


class RepairStyle(NamedTuple):
    """Options of repair."""

    may_page: bool = True
    """Whether tensors other than state may be paged to save RAM, if the problem permits paging."""
    max_chain: int = MAX_CHAIN
    """Maximum number of nested recomputations for one evicted tensor if tensors may be paged. If
    not, and for rewarded decisions, the maximum is `MAX_CHAIN`. A small number prefers page-ins."""
    candidates_per_relief: int = 20
    """Of n tensors that could be evicted from a stage, at most ``n // candidates_per_relief``, but
    at least one, are evicted before all are ranked again. Fewer are evicted if the stage then
    fits."""


DEFAULT_STYLE: Final = RepairStyle()
"""The default style of repair."""


class Obstacle(NamedTuple):
    """A stage that exceeded the RAM limit when a restoration was dropped: the drop was undone."""

    stage: int
    rise_bytes: int
    """RAM use of a step that exceeds the limit without the restoration, minus the peak of the stage
    with the restoration [B]."""
    intervals: tuple[tuple[tuple[int, int], ...], ...]
    """For each restored tensor, its `PartialSchedule.intervals` after the drop was undone."""


@dataclass(slots=True)
class Repair:
    """Changes a partial schedule greedily to meet limits at low prices; timeouts undo nothing."""

    problem: Problem
    partial: PartialSchedule
    prices: Coefficients
    """Prices of decisions, from `PenalizedObjective.prices`."""
    limit_bytes: int
    """RAM limit of every step [B]."""
    rng: Random | None = None
    """Random number generator for the noise on prices; None for no noise."""
    until_s: float = math.inf
    """Time at which `fit`, `satisfy_constraints` and `drop_unneeded` end, on the clock of `now_s`
    [s]."""
    style: RepairStyle = DEFAULT_STYLE
    respects_rows: bool = True
    """Whether decisions are refused that exceed a user-defined constraint with only positive
    coefficients."""
    obstacles: dict[Restoration, Obstacle] = field(default_factory=dict)
    """Obstacles to dropping restorations: a drop is tried again only if its obstacle no longer
    exists. Repairs of one partial schedule may share this dictionary."""
    paging_only_stages: set[int] = field(default_factory=set)
    """Stages in which recoveries recompute no node any more, because recomputations did not fit;
    see `RecoveryRules`."""
    _can_page: bool = field(init=False)
    _recompute_prices: list[float] | None = None

    def __post_init__(self) -> None:
        self._can_page = self.style.may_page and self.problem.can_page

    # -- fitting in RAM --------------------------------------------------------------------------

    def fit(self) -> bool:
        """Evict and restore tensors until every step fits in RAM; return whether that succeeded.

        The fullest stage is relieved first: by an earlier recomputation at no cost, by eviction at
        the lowest price per freed byte, or by page-ins instead of recomputations. Changes remain
        after a failure.
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
            recoveries = self._find_best_recoveries(fullest_stage, np.maximum(excess, 0))
            if not recoveries and not self._replace_by_page_ins(fullest_stage):
                return False
            for recovery in recoveries:
                self._add_recovery(recovery)
                if self.partial.peak(fullest_stage) <= self.limit_bytes:
                    break
        return False

    def _find_best_recoveries(self, stage: int, excess: np.ndarray) -> list[Recovery]:
        """Return the best recoveries of tensors kept across a stage, most relief per price first.

        They are one per `candidates_per_relief` of these tensors, and at least one if there is any.
        """
        partial = self.partial
        recoveries = Recoveries(self, stage)
        max_chain = self.style.max_chain if self._can_page else MAX_CHAIN
        relief = _Relief(excess, is_limited_by_excess=bool(partial.graph.state_tensors))
        candidates: list[_Candidate] = []
        best_rank = math.inf
        """Upper bound on the smallest rank, by a page-in or a found recovery."""
        for i, first_stage, need in partial.tensors_kept_across(stage):
            check_time_limit()
            freed_intervals: Sequence[tuple[int, int]] = ((first_stage, need),)
            recovery = None
            if i in partial.resident:
                recovery, freed_intervals = self._storage_home_recovery(i, (first_stage, need))
                min_price = page_in_price = math.inf if recovery is None else recovery.price
            else:
                min_price, page_in_price = recoveries.price_range(i, need)
            if min_price < math.inf:
                gain = relief.total_bytes(freed_intervals, partial.sizes[i]) / self._add_noise(
                    1.0, FIT_NOISE_RATIO
                )
                candidates.append(_Candidate(_rank(gain, min_price), i, need, gain, recovery))
                if page_in_price < math.inf:
                    best_rank = min(best_rank, _rank(gain, page_in_price))
        heapify(candidates)
        best_recoveries: list[Recovery] = []
        max_count = max(1, len(candidates) // self.style.candidates_per_relief)
        while candidates and len(best_recoveries) < max_count:
            _, i, need, gain, recovery = heappop(candidates)
            if recovery is not None:
                best_recoveries.append(recovery)
                continue
            check_time_limit()
            is_bounded = max_count == 1 and -math.inf < best_rank < 0
            max_price = gain / -best_rank * ROUNDING_FACTOR if is_bounded else math.inf
            recovery = recoveries.find_cheapest(i, need, max_chain, max_price)
            if recovery is not None:
                rank = _rank(gain, recovery.price)
                best_rank = min(best_rank, rank)
                heappush(candidates, _Candidate(rank, i, need, gain, recovery))
        return best_recoveries

    def _storage_home_recovery(
        self, i: int, interval: tuple[int, int]
    ) -> tuple[Recovery | None, Sequence[tuple[int, int]]]:
        """Return the move of state `i` to storage that frees `interval`, and all that it frees."""
        partial, graph = self.partial, self.problem.graph
        home = Restoration.at_its_node(graph, i, STORAGE_HOME)
        if not self.problem.can_page or not self.fits_limits(home):
            return None, ()
        outer_intervals = [span for span in partial.intervals[i] if span[1] <= graph.node_of[i]]
        outer_intervals += [span for span in partial.intervals[i] if span[1] == len(graph.nodes)]
        price = self._price(home, is_added=True)
        if interval in outer_intervals:
            return Recovery(price, (home,)), outer_intervals
        page_in = Restoration(interval[1], i, PAGE_IN)
        price += self._price(page_in, is_added=True)
        return Recovery(price, (home, page_in)), (*outer_intervals, interval)

    def _add_recovery(self, recovery: Recovery) -> None:
        """Add the absent restorations of a recovery that `fits_limits` permits."""
        for restoration in recovery.restorations:
            if restoration not in self.partial and self.fits_limits(restoration):
                self.partial.add(restoration)

    @property
    def recompute_prices(self) -> list[float]:
        """The price in `prices` of recomputing each node, cached; infinite if it is forbidden."""
        if self._recompute_prices is None:
            may_recompute = self.problem.may_recompute
            self._recompute_prices = [
                price if may_recompute(k) else math.inf
                for k, price in enumerate(self.prices.compute)
            ]
        return self._recompute_prices

    def price_page_in(self, i: int) -> PageInPrice:
        """Return the price in `prices` of a page-in with its page-out."""
        graph = self.problem.graph
        k = graph.node_of[i]
        page_in_restoration = Restoration(k, i, PAGE_IN)
        if (
            not (self._can_page or graph.nodes[k].is_state)
            or i in self.partial.resident
            or not self.fits_limits(page_in_restoration)
        ):
            return PageInPrice(math.inf, -1)
        return PageInPrice(
            self._price(page_in_restoration, is_added=True), graph.last_page_in_stage(i)
        )

    def _is_allowed(self, restoration: Restoration) -> bool:
        """Return whether the rules for state permit a restoration."""
        stage, item, kind = restoration
        problem = self.problem
        if kind == RECOMPUTE:
            return stage <= problem.graph.last_stages[item]
        k = problem.graph.node_of[item]
        if stage == k or not problem.graph.nodes[k].is_state:
            return True
        return item not in self.partial.resident and stage <= problem.graph.last_page_in_stage(item)

    def fits_limits(self, restoration: Restoration) -> bool:
        """Return whether user-defined constraints, storage and state permit adding a restoration.

        RAM, and constraints with negative coefficients, are not checked.
        """
        partial, i = self.partial, restoration.item
        rows = partial.rows if self.respects_rows else None
        limit = self.problem.aux_limit_bytes
        if not self._is_allowed(restoration):
            return False
        if rows is not None and not rows.permits(
            partial.row_use, self._row_amounts(rows, restoration)
        ):
            return False
        if restoration.kind == RECOMPUTE or limit is None or partial.is_paged_out(i):
            return True
        if partial.starts_on_storage[i] and restoration.kind != STORAGE_HOME:
            return True
        return partial.aux_used_bytes + partial.sizes[i] <= limit

    def _replace_by_page_ins(self, t: int) -> bool:
        """Replace the recomputations of stage `t` by page-ins; return whether any was replaced."""
        partial, graph = self.partial, self.problem.graph
        if not self._can_page or not partial.recomputed[t]:
            return False
        self.paging_only_stages.add(t)
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

    def satisfy_constraints(self) -> None:
        """Add rewarded decisions; drop some to meet constraints. No effect without rewards."""
        rows, partial = self.partial.rows, self.partial
        if rows is None or rows.rewards is None:
            return
        while (
            now_s() < self.until_s and rows.total_excess(partial.row_use, partial.exceeded_rows) > 0
        ):
            check_time_limit()
            if not self._lower_excess(rows):
                return
        prices = {
            decision: self._price(decision, is_added=True)
            for decision in self._rewarded_additions(rows)
        }
        profitable_decisions = [decision for decision in prices if prices[decision] < 0]
        for decision in sorted(profitable_decisions, key=prices.__getitem__):
            while now_s() < self.until_s:
                check_time_limit()
                if rows.excess_change(
                    partial.row_use, self._row_amounts(rows, decision)
                ) > 0 or not self._add_in_best_stage(decision):
                    break

    def add_rewarded(self, rewarded: Iterable[Restoration]) -> None:
        """Add each of the `rewarded` decisions that fits, in its best stage."""
        for restoration in rewarded:
            self._add_in_best_stage(restoration)

    def _lower_excess(self, rows: UserRows) -> bool:
        """Add or drop the decision that lowers the excess most per price; False if none does.

        An addition is repeated in further stages while it lowers the excess as much.
        """
        partial = self.partial
        moves: list[tuple[float, int, Restoration]] = []
        """(rank, 1 to add or 0 to drop, decision) of each move."""
        for decision in self._rewarded_additions(rows):
            gain = -rows.excess_change(partial.row_use, self._row_amounts(rows, decision))
            if gain > 0:
                moves.append(
                    (
                        _rank(
                            gain,
                            self._add_noise(self._price(decision, is_added=True), FIT_NOISE_RATIO),
                        ),
                        1,
                        decision,
                    )
                )
        for decision in partial.restorations():
            gain = -rows.excess_change(
                partial.row_use, self._row_amounts(rows, decision, is_added=False)
            )
            if gain > 0:
                price = self._add_noise(-self._price(decision), FIT_NOISE_RATIO)
                moves.append((_rank(gain, price), 0, decision))
        for _, is_addition, decision in sorted(moves):
            check_time_limit()
            if self._apply_if_better(
                decision, self._add_in_best_stage if is_addition else self._drop
            ):
                excess_change = (
                    rows.excess_change(partial.row_use, self._row_amounts(rows, decision))
                    if is_addition
                    else 0.0
                )
                while excess_change < 0 and self._apply_if_better(
                    decision, self._add_in_best_stage
                ):  # repeat the move
                    if (
                        rows.excess_change(partial.row_use, self._row_amounts(rows, decision))
                        > excess_change
                    ):
                        break
                return True
        return False

    def _row_amounts(
        self, rows: UserRows, restoration: Restoration, *, is_added: bool = True
    ) -> RowAmounts:
        """Return (row, change) for the user rows that adding or dropping a restoration changes."""
        item = restoration.item
        if restoration.kind == RECOMPUTE:
            amounts = rows.compute[item]
        elif restoration.kind == STORAGE_HOME:
            amounts = rows.storage_home[item]
            if not is_added:
                amounts = (*amounts, *rows.page_in[item] * self.partial.page_ins[item])
        else:
            changes_page_out = self.partial.changes_page_out(restoration, is_added=is_added)
            amounts = rows.page_out[item] if changes_page_out else ()
            if restoration.kind != PAGE_OUT:
                amounts = (*rows.page_in[item], *amounts)
        return amounts if is_added else tuple((row, -amount) for row, amount in amounts)

    def _apply_if_better(
        self, restoration: Restoration, apply_move: Callable[[Restoration], bool]
    ) -> bool:
        """Make a move with a restoration if that lowers the limits' excess; return whether so."""
        excess_before, mark = self._excess(), self.partial.mark()
        if apply_move(restoration) and self._excess() < excess_before:
            return True
        self.partial.undo(mark)
        return False

    def _rewarded_additions(self, rows: UserRows) -> Iterator[Restoration]:
        """Yield the rewarded decisions that may be added; stage -1 means any stage."""
        graph = self.problem.graph
        yield from (Restoration(-1, k, RECOMPUTE) for k in rows.rewarded_nodes)
        yield from (Restoration(-1, i, PAGE_IN) for i in rows.rewarded_page_ins)
        for i in rows.rewarded_page_outs:
            if not self.partial.is_paged_out(i):
                yield Restoration.at_its_node(graph, i, PAGE_OUT)
        for i in rows.rewarded_storage_homes:
            if i in self.partial.resident:
                yield Restoration.at_its_node(graph, i, STORAGE_HOME)

    def _add_in_best_stage(self, restoration: Restoration) -> bool:
        """Add a rewarded decision where it fits; return whether it was added."""
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
            """Return (number of missing inputs, peak RAM [B]) of a stage; the least is best."""
            inputs = partial.working_graph.inputs_of[item] if restoration.kind == RECOMPUTE else ()
            return sum(not partial.is_available(p, t) for p in inputs), peaks[t]

        stages = [
            t
            for t in range(first_stage + 1, len(peaks))
            if item not in present_items[t] and self._is_allowed(restoration._replace(stage=t))
        ]
        excess_before = self._excess()
        for t in sorted(stages, key=rank)[:MAX_TRIED_STAGES]:
            check_time_limit()
            mark = partial.mark()
            is_added = self._add_with_inputs(restoration._replace(stage=t))
            if is_added and self._excess() <= excess_before and partial.fits(self.limit_bytes):
                return True
            partial.undo(mark)
        return False

    def _excess(self) -> float:
        """Return `UserRows.total_excess`; 0 without rewards, when no drop can raise the excess."""
        rows = self.partial.rows
        if rows is None or rows.rewards is None:
            return 0.0
        return rows.total_excess(self.partial.row_use, self.partial.exceeded_rows)

    def _add_with_inputs(self, restoration: Restoration) -> bool:
        """Add a restoration and those of its missing inputs; return whether it is present.

        RAM is not checked. After False, restorations of inputs may remain.
        """
        recovery: Recovery | None = Recovery(0.0, (restoration,))
        if restoration.kind == RECOMPUTE:
            item, stage = restoration.item, restoration.stage
            recovery = Recoveries(self).plan_recomputation(item, stage, MAX_CHAIN, math.inf)
        if recovery is not None:
            self._add_recovery(recovery)
        return restoration in self.partial

    # -- dropping restorations -------------------------------------------------------------------

    def drop_unneeded(self) -> None:
        """Drop restorations whose tensors can be kept in RAM, highest (noisy) price per byte first.

        Prices are per byte, because dropping many small page-ins can save more than a large one.
        """
        has_dropped = True
        while has_dropped and now_s() < self.until_s:
            has_dropped = False
            for restoration in sorted(self.partial.restorations(), key=self.drop_sort_key):
                if now_s() >= self.until_s:
                    break
                check_time_limit()
                if self._price(restoration) < 0:
                    continue  # the objective rewards it
                if restoration not in self.partial or self._is_blocked(restoration):
                    continue
                if self._may_drop(restoration):
                    has_dropped = self._drop(restoration) or has_dropped

    def drop_sort_key(self, restoration: Restoration) -> float:
        """Return a sort key, with noise: the price per byte of the restored tensors, negated."""
        item, graph = restoration.item, self.problem.graph
        restored_tensors = graph.outputs_of[item] if restoration.kind == RECOMPUTE else (item,)
        price = self._add_noise(self._price(restoration), DROP_NOISE_RATIO)
        return -price / max(1, sum(self.partial.sizes[i] for i in restored_tensors))

    def _price(self, restoration: Restoration, *, is_added: bool = False) -> float:
        """Return the price of a present restoration or, if `is_added`, a new one, without noise."""
        prices, item, partial = self.prices, restoration.item, self.partial
        if restoration.kind == RECOMPUTE:
            return prices.compute[item]
        if restoration.kind == STORAGE_HOME:
            n_page_ins = 0 if is_added else partial.page_ins[item]
            return prices.storage_home[item] + n_page_ins * prices.page_in[item]
        changes_page_out = partial.changes_page_out(restoration, is_added=is_added)
        price = prices.page_out[item] if changes_page_out else 0.0
        return price if restoration.kind == PAGE_OUT else prices.page_in[item] + price

    def _drop(self, restoration: Restoration) -> bool:
        """Drop a restoration and those that serve only it; undo and return False beyond a limit.

        In `obstacles`, sets the RAM that prevents it, or removes the restoration.
        """
        partial, excess_before, mark = self.partial, self._excess(), self.partial.mark()
        partial.remove(restoration)
        stage_and_bytes = partial.find_excess(self.limit_bytes)
        if stage_and_bytes is None and self._excess() <= excess_before:
            self.obstacles.pop(restoration, None)
            return True
        partial.undo(mark)
        if stage_and_bytes is not None:
            stage, ram_bytes = stage_and_bytes
            rise_bytes = ram_bytes - partial.peak(stage)
            self.obstacles[restoration] = Obstacle(
                stage, rise_bytes, self._intervals_of(restoration)
            )
        return False

    def _is_blocked(self, restoration: Restoration) -> bool:
        """Return whether dropping a restoration still exceeds the RAM limit at its obstacle."""
        obstacle, partial = self.obstacles.get(restoration), self.partial
        if obstacle is None or obstacle.intervals != self._intervals_of(restoration):
            return False
        ram_bytes = partial.row_bytes[obstacle.stage] + partial.extra_bytes[obstacle.stage]
        return bool(ram_bytes + obstacle.rise_bytes > self.limit_bytes)

    def _intervals_of(self, restoration: Restoration) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return, for each restored tensor, its `PartialSchedule.intervals`."""
        item, graph = restoration.item, self.problem.graph
        restored_tensors = graph.outputs_of[item] if restoration.kind == RECOMPUTE else (item,)
        return tuple(tuple(self.partial.intervals[i]) for i in restored_tensors)

    def _may_drop(self, restoration: Restoration) -> bool:
        """Return whether RAM rows (last steps) permit keeping a restoration's tensors instead."""
        partial, graph, t = self.partial, self.problem.graph, restoration.stage
        freed_bytes = 0
        tensors: Sequence[int] = (restoration.item,)
        if restoration.kind == PAGE_OUT:
            return True
        if restoration.kind == STORAGE_HOME:
            return partial.row_bytes_if_resident(restoration.item) <= self.limit_bytes
        if restoration.kind == RECOMPUTE:
            tensors = [i for i in graph.outputs_of[restoration.item] if partial.is_read_from(i, t)]
            inputs = partial.working_graph.inputs_of[restoration.item]
            freed_bytes = sum(partial.sizes[i] for i in inputs)
        return all(partial.row_bytes_with(i, t) - freed_bytes <= self.limit_bytes for i in tensors)

    def _add_noise(self, price: float, noise: float) -> float:
        """Return a price with a random relative rise of up to `noise`; unchanged without `rng`."""
        return price * (1 + noise * self.rng.random()) if noise and self.rng is not None else price


def _rank(gain: float, price: float) -> float:
    """Return a sort key that is smaller if a change gains more for its price."""
    return -gain / price if price > 0 else -math.inf


class _Candidate(NamedTuple):
    """A tensor whose eviction frees RAM."""

    rank: float
    """Lower bound on the rank; with a recovery, the rank itself."""
    tensor: int
    need: int
    """The next stage that needs the tensor."""
    gain: float
    """Relief by the eviction, with noise [B]."""
    recovery: Recovery | None
    """The cheapest recovery; None until it is found."""


class _Relief:
    """The stages above the limit, to sum the bytes by which an eviction relieves these stages."""

    def __init__(self, excess: np.ndarray, *, is_limited_by_excess: bool) -> None:
        self.stages: list[int] = np.flatnonzero(excess).tolist()
        self.excess = excess[self.stages]
        self.max_excess = max(self.excess.tolist(), default=0)
        self.cumulative_excess: list[int] = [0, *self.excess.cumsum().tolist()]
        self.is_limited_by_excess = is_limited_by_excess
        """Whether the relief of a stage is at most the stage's excess. This is needed for state,
        which is in RAM in all stages: otherwise the largest state would always be evicted first."""

    def total_bytes(self, intervals: Iterable[tuple[int, int]], size_bytes: int) -> int:
        """Return the relief of full stages if intervals [first, end) free `size_bytes` [B]."""
        total_bytes = 0
        for first, end in intervals:
            first_index, end_index = bisect_left(self.stages, first), bisect_left(self.stages, end)
            if not self.is_limited_by_excess:
                total_bytes += size_bytes * (end_index - first_index)
            elif size_bytes >= self.max_excess:
                total_bytes += (
                    self.cumulative_excess[end_index] - self.cumulative_excess[first_index]
                )
            elif first_index < end_index:
                total_bytes += int(np.minimum(self.excess[first_index:end_index], size_bytes).sum())
        return total_bytes
