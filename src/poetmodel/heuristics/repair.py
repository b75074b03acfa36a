"""Make a partial schedule fit into RAM at little cost, and take out what there is room for."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from poetmodel.clock import check_time_limit, now_s
from poetmodel.heuristics.earlier_recomputation import EarlierRecomputation
from poetmodel.heuristics.recoveries import LONGEST_CHAIN, Recoveries, Recovery
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


FIT_NOISE: Final = 1.0
"""By how much a price may rise at random while room is made, relatively."""
DROP_NOISE: Final = 0.5
"""The same while restorations are dropped."""
CLEARLY: Final = 1 + 1e-9
"""Factor by which a price is above one that it equals but for rounding."""
PLACEMENTS: Final = 60
"""Most stages that are tried for what own constraints want."""


class RepairStyle(NamedTuple):
    """How repair chooses where there is a choice."""

    pages: bool = True
    """Whether tensors may be paged, where the problem lets them."""
    longest_chain: int = LONGEST_CHAIN
    """`LONGEST_CHAIN` where tensors may be paged: a low one prefers pages."""
    choices_per_relief: int = 20
    """One in so many of the tensors that could leave RAM leaves it before all are looked at again,
    fewer where the stage fits before."""


STYLE: Final = RepairStyle()
"""The style of what has no other."""


class Obstacle(NamedTuple):
    """Why a restoration could not be dropped: a stage would have been too full."""

    stage: int
    rise_bytes: int
    """By how much its use of RAM would have risen [B]."""
    gaps: tuple[tuple[tuple[int, int], ...], ...]
    """Where the tensors that it brings back were in RAM."""


@dataclass(slots=True)
class Repair:
    """Changes a partial schedule greedily."""

    problem: Problem
    partial: PartialSchedule
    prices: Coefficients
    """Quantity to be greedy about."""
    limit_bytes: int
    """RAM that every step keeps within [B]."""
    rng: Random | None = None
    """Source of noise on the prices; none without."""
    until_s: float = math.inf
    """When to give up, on the clock of `now_s` [s]."""
    style: RepairStyle = STYLE
    within_rows: bool = True
    """Whether to take nothing for which own constraints that only add have no room."""
    obstacles: dict[Restoration, Obstacle] = field(default_factory=dict)
    """What was in the way of dropping restorations. Repairs of one partial schedule share it, so
    that only what has room now is tried again."""
    paged_only: set[int] = field(default_factory=set)
    """Stages in which nothing is recomputed any more, because it did not fit."""
    _can_page: bool = field(init=False)
    _recompute_prices: list[float] | None = None

    def __post_init__(self) -> None:
        self._can_page = self.style.pages and self.problem.can_page

    # -- making room -----------------------------------------------------------------------------

    def fit(self) -> bool:
        """Bring tensors back later instead of keeping them until every step fits.

        The fullest stage is relieved first: by recomputing earlier what does not fit into it, which
        costs nothing, else by the tensors across it that free most bytes in stages that are too
        full for what it costs to bring them back at their next need. Where nothing is left across
        it, its recomputations become page-ins. Returns whether every step fits.
        """
        earlier = EarlierRecomputation(
            partial=self.partial,
            limit_bytes=self.limit_bytes,
            has_room_for=self.has_room_for,
        )
        while now_s() < self.until_s:
            check_time_limit()
            excess = self.partial.peaks() - self.limit_bytes
            fullest = int(excess.argmax())
            if excess[fullest] <= 0:
                return True
            if earlier.relieve(fullest):
                continue
            plans = self._relieving(fullest, np.maximum(excess, 0))
            if not plans and not self._page_instead(fullest):
                return False
            for plan in plans:
                self._add(plan)
                if self.partial.peak(fullest) <= self.limit_bytes:
                    break
        return False

    def _relieving(self, stage: int, excess: np.ndarray) -> list[Recovery]:
        """Return the changes that relieve a stage best for their price, the best first.

        They are one in `choices_per_relief` of all, at least one. The recovery of a tensor is
        searched only if its least price could make it one of them; where only one is returned, only
        below the price at which it would be.
        """
        partial = self.partial
        recoveries = Recoveries(self, stage)
        chain = self.style.longest_chain if self._can_page else LONGEST_CHAIN
        relief = _Relief(excess, counts_bytes=bool(partial.graph.state_tensors))
        ranked: list[tuple[float, int, int, float, Recovery | None]] = []
        """Least ranks of tensors, with their next needs, gains by noise, and recoveries, None if
        these are not known yet."""
        best = math.inf
        """The rank that some tensor has at most: with a page-in, or with a known recovery."""
        for i, first, need in partial.across(stage):
            check_time_limit()
            freed: Sequence[tuple[int, int]] = ((first, need),)
            known = None
            if i in partial.resident:
                known, freed = self._storage_home(i, (first, need))
                least = paged = math.inf if known is None else known.price
            else:
                least, paged = recoveries.price_range(i, need)
            if least < math.inf:
                gain = relief.of(freed, partial.sizes[i]) / self._noisy(1.0, FIT_NOISE)
                ranked.append((_rank(gain, least), i, need, gain, known))
                if paged < math.inf:
                    best = min(best, _rank(gain, paged))
        heapify(ranked)
        plans: list[Recovery] = []
        most = max(1, len(ranked) // self.style.choices_per_relief)
        while ranked and len(plans) < most:
            _, i, need, gain, known = heappop(ranked)
            if known is not None:
                plans.append(known)
                continue
            check_time_limit()
            is_bounded = most == 1 and -math.inf < best < 0
            below = gain / -best * CLEARLY if is_bounded else math.inf
            known = recoveries.cheapest(i, need, chain, below)
            if known is not None:
                rank = _rank(gain, known.price)
                best = min(best, rank)
                heappush(ranked, (rank, i, need, gain, known))
        return plans

    def _storage_home(
        self, i: int, gap: tuple[int, int]
    ) -> tuple[Recovery | None, Sequence[tuple[int, int]]]:
        """Return the way for state `i` out of RAM across a gap, if any; and the gaps freed.

        It gets a home on storage, which frees what is before its node and after its last reader,
        and is paged in where the gap is between them.
        """
        partial, graph = self.partial, self.problem.graph
        home = Restoration.at_its_node(graph, i, STORAGE_HOME)
        if not self.problem.can_page or not self.has_room_for(home):
            return None, ()
        outer = [span for span in partial.gaps[i] if span[1] <= graph.node_of[i]]
        outer += [span for span in partial.gaps[i] if span[1] == len(graph.nodes)]
        price = self._price(home, adding=True)
        if gap in outer:
            return Recovery(price, (home,)), outer
        page = Restoration(gap[1], i, PAGE_IN)
        price += self._price(page, adding=True)
        return Recovery(price, (home, page)), (*outer, gap)

    def _add(self, plan: Recovery) -> None:
        """Add what a plan brings back, as far as there is room for it."""
        for restoration in plan.restorations:
            if restoration not in self.partial and self.has_room_for(restoration):
                self.partial.add(restoration)

    @property
    def recompute_prices(self) -> list[float]:
        """The price of computing each node again, infinite where it may not be."""
        if self._recompute_prices is None:
            may_recompute = self.problem.may_recompute
            self._recompute_prices = [
                price if may_recompute(k) else math.inf
                for k, price in enumerate(self.prices.compute)
            ]
        return self._recompute_prices

    def page_in(self, i: int) -> tuple[float, int]:
        """Return the price of a page-in of tensor `i`, and the last stage that state allows.

        Without room for it that is -1.
        """
        graph = self.problem.graph
        k = graph.node_of[i]
        if not self._can_page and not graph.nodes[k].is_state:
            return math.inf, -1
        page = Restoration(k, i, PAGE_IN)
        if i in self.partial.resident or not self.has_room_for(page):
            return math.inf, -1
        return self._price(page, adding=True), graph.last_page_in(i)

    def _is_allowed(self, restoration: Restoration) -> bool:
        """Whether state allows it.

        What reads state runs no more once that is replaced, and resident state is not paged in.
        """
        stage, item, kind = restoration
        problem = self.problem
        if kind == RECOMPUTE:
            return stage <= problem.graph.last_stages[item]
        k = problem.graph.node_of[item]
        if stage == k or not problem.graph.nodes[k].is_state:
            return True
        return item not in self.partial.resident and stage <= problem.graph.last_page_in(item)

    def has_room_for(self, restoration: Restoration) -> bool:
        """Whether own constraints, storage and state have room for it."""
        partial, i = self.partial, restoration.item
        rows = partial.rows if self.within_rows else None
        limit = self.problem.aux_limit_bytes
        if not self._is_allowed(restoration):
            return False
        if rows is not None and not rows.allows(partial.used, self._uses(rows, restoration)):
            return False
        if restoration.kind == RECOMPUTE or limit is None or partial.goes_out(i):
            return True
        if partial.stored[i] and restoration.kind != STORAGE_HOME:
            return True
        return partial.aux_used_bytes + partial.sizes[i] <= limit

    def _page_instead(self, t: int) -> bool:
        """Page in what stage `t` recomputes; return whether that changed anything."""
        partial, graph = self.partial, self.problem.graph
        if not self._can_page or not partial.recomputed[t]:
            return False
        self.paged_only.add(t)
        changed = False
        for k in sorted(partial.recomputed[t], reverse=True):
            if k not in partial.recomputed[t]:
                continue
            pages = [
                Restoration(t, i, PAGE_IN)
                for i in graph.outputs_of[k]
                if partial.serves(i, t) and i not in partial.paged_in[t]
            ]
            if all(map(self.has_room_for, pages)):
                partial.remove(Restoration(t, k, RECOMPUTE))
                for page in pages:
                    partial.add(page)
                changed = True
        return changed

    # -- own constraints -------------------------------------------------------------------------

    def satisfy(self) -> None:
        """Add what own constraints or the objective want, and drop what exceeds them.

        One restoration or page-out at a time: that which lowers the excess most for its price and
        fits, while there is one; then those that the objective pays for, within all constraints.
        """
        rows, partial = self.partial.rows, self.partial
        if rows is None or rows.wanted is None:
            return
        while now_s() < self.until_s and rows.excess(partial.used, partial.exceeded) > 0:
            check_time_limit()
            if not self._lower_excess(rows):
                return
        prices = {item: self._price(item, adding=True) for item in self._additions(rows)}
        rewarded = [item for item in prices if prices[item] < 0]
        for item in sorted(rewarded, key=prices.__getitem__):
            while now_s() < self.until_s:
                check_time_limit()
                if rows.change(partial.used, self._uses(rows, item)) > 0 or not self._place(item):
                    break

    def place(self, wanted: Iterable[Restoration]) -> None:
        """Add what is wanted for its own sake wherever it fits; its stages count for nothing."""
        for restoration in wanted:
            self._place(restoration)

    def _lower_excess(self, rows: OwnRows) -> bool:
        """Take the best move that lowers the excess; return whether there is one."""
        partial = self.partial
        moves: list[tuple[float, int, Restoration]] = []
        for item in self._additions(rows):
            gain = -rows.change(partial.used, self._uses(rows, item))
            if gain > 0:
                moves.append(
                    (_rank(gain, self._noisy(self._price(item, adding=True), FIT_NOISE)), 1, item)
                )
        for item in partial.restorations():
            gain = -rows.change(partial.used, self._uses(rows, item, adding=False))
            if gain > 0:
                price = self._noisy(-self._price(item), FIT_NOISE)
                moves.append((_rank(gain, price), 0, item))
        for _, adds, item in sorted(moves):
            check_time_limit()
            if self._lowers_excess(item, self._place if adds else self._drop):
                gain = rows.change(partial.used, self._uses(rows, item)) if adds else 0.0
                while gain < 0 and self._lowers_excess(item, self._place):  # still the best one
                    if rows.change(partial.used, self._uses(rows, item)) > gain:
                        break
                return True
        return False

    def _uses(self, rows: OwnRows, restoration: Restoration, *, adding: bool = True) -> Uses:
        """Return the use of rows by an added restoration, negative for a dropped one.

        A tensor's first page-in needs its page-out; what serves only a restoration is not counted,
        but for the page-ins of state, which go with its home on storage.
        """
        item = restoration.item
        if restoration.kind == RECOMPUTE:
            uses = rows.compute[item]
        elif restoration.kind == STORAGE_HOME:
            uses = rows.storage_home[item]
            if not adding:
                uses = (*uses, *rows.page_in[item] * self.partial.page_ins[item])
        else:
            out = self.partial.changes_page_out(restoration, adding=adding)
            uses = rows.page_out[item] if out else ()
            if restoration.kind != PAGE_OUT:
                uses = (*rows.page_in[item], *uses)
        return uses if adding else tuple((row, -amount) for row, amount in uses)

    def _lowers_excess(self, restoration: Restoration, take: Callable[[Restoration], bool]) -> bool:
        """Take a move if it can be taken and lowers the excess; return whether it does."""
        before, mark = self._excess(), self.partial.mark()
        if take(restoration) and self._excess() < before:
            return True
        self.partial.undo(mark)
        return False

    def _additions(self, rows: OwnRows) -> Iterator[Restoration]:
        """Yield what is wanted: recomputations and page-ins in any stage, stood for by stage -1."""
        graph = self.problem.graph
        yield from (Restoration(-1, k, RECOMPUTE) for k in rows.nodes)
        yield from (Restoration(-1, i, PAGE_IN) for i in rows.arriving)
        for i in rows.leaving:
            if not self.partial.goes_out(i):
                yield Restoration.at_its_node(graph, i, PAGE_OUT)
        for i in rows.leaving_home:
            if i in self.partial.resident:
                yield Restoration.at_its_node(graph, i, STORAGE_HOME)

    def _place(self, restoration: Restoration) -> bool:
        """Add a wanted restoration where it fits, in the emptiest stages first; return if it does.

        A stage that has the inputs of a recomputation goes before one to which they must come.
        """
        partial, graph, item = self.partial, self.problem.graph, restoration.item
        if restoration.kind in (PAGE_OUT, STORAGE_HOME):
            fits = restoration not in partial and self.has_room_for(restoration)
            if fits:
                partial.add(restoration)
            return fits
        first = item if restoration.kind == RECOMPUTE else graph.node_of[item]
        chosen = partial.recomputed if restoration.kind == RECOMPUTE else partial.paged_in
        loads = partial.peaks().tolist()

        def rank(t: int) -> tuple[int, int]:
            inputs = partial.working.inputs_of[item] if restoration.kind == RECOMPUTE else ()
            return sum(not partial.is_available(p, t) for p in inputs), loads[t]

        stages = [
            t
            for t in range(first + 1, len(loads))
            if item not in chosen[t] and self._is_allowed(restoration._replace(stage=t))
        ]
        excess = self._excess()
        for t in sorted(stages, key=rank)[:PLACEMENTS]:
            check_time_limit()
            mark = partial.mark()
            brought = self._bring(restoration._replace(stage=t))
            if brought and self._excess() <= excess and partial.fits(self.limit_bytes):
                return True
            partial.undo(mark)
        return False

    def _excess(self) -> float:
        """Return the excess over own constraints, where what is dropped can cause one."""
        rows = self.partial.rows
        if rows is None or rows.wanted is None:
            return 0.0
        return rows.excess(self.partial.used, self.partial.exceeded)

    def _bring(self, restoration: Restoration) -> bool:
        """Add a restoration with what it needs; return whether there is room for it elsewhere."""
        plan: Recovery | None = Recovery(0.0, (restoration,))
        if restoration.kind == RECOMPUTE:
            item, stage = restoration.item, restoration.stage
            plan = Recoveries(self).recomputation(item, stage, LONGEST_CHAIN, math.inf)
        if plan is not None:
            self._add(plan)
        return restoration in self.partial

    # -- using room ------------------------------------------------------------------------------

    def drop_needless(self) -> None:
        """Drop restorations that there is room to do without, the dearest for its bytes first.

        Where a page costs much however small it is, room for one large tensor is room for many
        small ones that cost as much each.
        """
        gained = True
        while gained and now_s() < self.until_s:
            gained = False
            for restoration in sorted(self.partial.restorations(), key=self.drop_order):
                if now_s() >= self.until_s:
                    break
                check_time_limit()
                if self._price(restoration) < 0:
                    continue  # the objective wants it
                if restoration not in self.partial or self._is_blocked(restoration):
                    continue
                if self._may_go(restoration):
                    gained = self._drop(restoration) or gained

    def drop_order(self, restoration: Restoration) -> float:
        """Return a number that is less where a restoration costs more per byte it brings back."""
        item, graph = restoration.item, self.problem.graph
        brought = graph.outputs_of[item] if restoration.kind == RECOMPUTE else (item,)
        price = self._noisy(self._price(restoration), DROP_NOISE)
        return -price / max(1, sum(self.partial.sizes[i] for i in brought))

    def _price(self, restoration: Restoration, *, adding: bool = False) -> float:
        """Return the cost of a present or added restoration, with its own page-out."""
        prices, item, partial = self.prices, restoration.item, self.partial
        if restoration.kind == RECOMPUTE:
            return prices.compute[item]
        if restoration.kind == STORAGE_HOME:
            paged = 0 if adding else partial.page_ins[item]
            return prices.storage_home[item] + paged * prices.page_in[item]
        out = partial.changes_page_out(restoration, adding=adding)
        price = prices.page_out[item] if out else 0.0
        return price if restoration.kind == PAGE_OUT else prices.page_in[item] + price

    def _drop(self, restoration: Restoration) -> bool:
        """Drop a restoration unless RAM does not suffice, or own constraints want it."""
        partial, before, mark = self.partial, self._excess(), self.partial.mark()
        partial.remove(restoration)
        excess = partial.excess(self.limit_bytes)
        if excess is None and self._excess() <= before:
            self.obstacles.pop(restoration, None)
            return True
        partial.undo(mark)
        if excess is not None:
            stage, load = excess
            rise = load - partial.peak(stage)
            self.obstacles[restoration] = Obstacle(stage, rise, self._gaps(restoration))
        return False

    def _is_blocked(self, restoration: Restoration) -> bool:
        """Whether what was in the way of dropping a restoration still is."""
        obstacle, partial = self.obstacles.get(restoration), self.partial
        if obstacle is None or obstacle.gaps != self._gaps(restoration):
            return False
        load = partial.row_bytes[obstacle.stage] + partial.extra_bytes[obstacle.stage]
        return bool(load + obstacle.rise_bytes > self.limit_bytes)

    def _gaps(self, restoration: Restoration) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return where the tensors that a restoration brings back are in RAM."""
        item, graph = restoration.item, self.problem.graph
        brought = graph.outputs_of[item] if restoration.kind == RECOMPUTE else (item,)
        return tuple(tuple(self.partial.gaps[i]) for i in brought)

    def _may_go(self, restoration: Restoration) -> bool:
        """Whether what a restoration serves could be kept, by the rows of stages alone."""
        partial, graph, t = self.partial, self.problem.graph, restoration.stage
        freed = 0
        served: Sequence[int] = (restoration.item,)
        if restoration.kind == PAGE_OUT:
            return True
        if restoration.kind == STORAGE_HOME:
            return partial.row_bytes_if_resident(restoration.item) <= self.limit_bytes
        if restoration.kind == RECOMPUTE:
            served = [i for i in graph.outputs_of[restoration.item] if partial.serves(i, t)]
            inputs = partial.working.inputs_of[restoration.item]
            freed = sum(partial.sizes[i] for i in inputs)
        return all(partial.row_bytes_with(i, t) - freed <= self.limit_bytes for i in served)

    def _noisy(self, price: float, noise: float) -> float:
        return price * (1 + noise * self.rng.random()) if noise and self.rng is not None else price


def _rank(gain: float, price: float) -> float:
    """Return a number that is less where a change gains more for its price."""
    return -gain / price if price > 0 else -math.inf


class _Relief:
    """The bytes by which stages that are too full are relieved."""

    def __init__(self, excess: np.ndarray, *, counts_bytes: bool) -> None:
        self.stages: list[int] = np.flatnonzero(excess).tolist()
        self.excess = excess[self.stages]
        self.largest = max(self.excess.tolist(), default=0)
        self.sums: list[int] = [0, *self.excess.cumsum().tolist()]
        self.counts_bytes = counts_bytes
        """Whether no more than the excess of a stage counts: state is counted everywhere, so that
        what is enough goes first, and not the largest."""

    def of(self, freed: Iterable[tuple[int, int]], size_bytes: int) -> int:
        """Return what stages that are too full gain in all if so much is freed in some spans."""
        total = 0
        for first, end in freed:
            begin, until = bisect_left(self.stages, first), bisect_left(self.stages, end)
            if not self.counts_bytes:
                total += size_bytes * (until - begin)
            elif size_bytes >= self.largest:
                total += self.sums[until] - self.sums[begin]
            elif begin < until:
                total += int(np.minimum(self.excess[begin:until], size_bytes).sum())
        return total
