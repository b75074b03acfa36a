"""The cheapest ways to bring tensors back, while a partial schedule stays as it is."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from poetmodel.heuristics.restorations import PAGE_IN, RECOMPUTE, Restoration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.heuristics.partial_schedule import PartialSchedule

LONGEST_CHAIN: Final = 300
"""Most recomputations one behind the other that bring a tensor back: the longest chain that calls,
which nest two deep for each, can follow."""


class Recovery(NamedTuple):
    """A way to bring a tensor back."""

    price: float
    restorations: tuple[Restoration, ...]


class RecoveryRules(Protocol):
    """Prices of restorations, and what is allowed, while a partial schedule stays as it is."""

    partial: PartialSchedule
    limit_bytes: int
    """RAM that every step keeps within [B]."""
    paged_only: set[int]
    """Stages in which nothing is recomputed."""

    @property
    def recompute_prices(self) -> Sequence[float]:
        """The price of computing each node again, infinite where it may not be."""

    def page_in(self, i: int) -> tuple[float, int]:
        """Return the price of a page-in of tensor `i`, and the last stage for it; -1 for none."""

    def has_room_for(self, restoration: Restoration) -> bool:
        """Return whether own constraints, storage and state have room for a restoration."""


class Recoveries:
    """The cheapest recoveries, cached until the partial schedule changes.

    Parameters
    ----------
    rules : RecoveryRules
        Prices, limits and the partial schedule; a `poetmodel.heuristics.repair.Repair` has them.
    relieved : int
        The stage that is relieved; what is computed again for it must be so after it. -1 for none.
    """

    def __init__(self, rules: RecoveryRules, relieved: int = -1) -> None:
        self.rules = rules
        self.relieved = relieved
        self.partial = rules.partial
        self.limit_bytes = rules.limit_bytes
        self._compute_prices = rules.recompute_prices
        self._last_stages = self.partial.graph.last_stages
        self._node_of = self.partial.graph.node_of
        self._inputs_of = self.partial.working.inputs_of
        self._has_rows = self.partial.rows is not None
        self._peaks = self.partial.peaks()
        self._known: dict[tuple[int, int], tuple[Recovery | None, float]] = {}
        """Cheapest recoveries; without one, below which price there is none."""
        self._page_ins: dict[int, tuple[float, int]] = {}
        """Price of a page-in of each tensor, and the last stage that may have it; -1 for none."""
        self._at_hand: dict[tuple[int, int], bool] = {}
        self._full: dict[int, list[int]] = {}
        """For each size the stages that have no room for as much more."""

    def cheapest(self, i: int, t: int, chain: int, most: float) -> Recovery | None:
        """Return the cheapest way to have tensor `i` in stage `t` again, below a price `most`.

        None if there is none with at most `chain` recomputations one behind the other.
        """
        known, floor = self._known.get((i, t), (None, -1.0))
        if known is None and floor < most:
            known = self._search(i, t, chain, most)
            self._known[i, t] = known, most
        return known if known is not None and known.price < most else None

    def price_range(self, i: int, t: int) -> tuple[float, float]:
        """Return the least price of a way to have tensor `i` in stage `t` again, and the most.

        The most is that of a page-in. Infinite if there is no way, or no page-in.
        """
        page_in, last = self._page_in(i)
        most = math.inf if t > last else page_in
        return min(most, self._compute_prices[self._node_of[i]]), most

    def _page_in(self, i: int) -> tuple[float, int]:
        """Return the price of a page-in of tensor `i`, and the last stage that may have it."""
        page_in = self._page_ins.get(i)
        if page_in is None:
            page_in = self._page_ins[i] = self.rules.page_in(i)
        return page_in

    def _search(self, i: int, t: int, chain: int, most: float) -> Recovery | None:
        k = self._node_of[i]
        price, last = self._page_in(i)
        if t > last:
            price = math.inf
        most = min(most, price)
        again: Recovery | None = None
        if self._compute_prices[k] < most and chain:
            stage = t if t <= self._last_stages[k] else self._last_stage(i, t)
            if stage >= 0 and stage not in self.rules.paged_only:
                again = self.recomputation(k, stage, chain, most)
        if again is not None and again.price < price:
            return again
        return Recovery(price, (Restoration(t, i, PAGE_IN),)) if t <= last else None

    def _last_stage(self, i: int, t: int) -> int:
        """Return the stage before `t` in which tensor `i` may be computed again for a step of `t`.

        What its node reads is replaced by then: it is the last stage before, from which there is
        room to keep it; -1 where there is none.
        """
        partial = self.partial
        last = self._last_stages[self._node_of[i]]
        if last <= self.relieved or last < partial.kept_from(i, t):
            return -1
        if partial.is_available(i, t):
            return last  # kept over the stage that is relieved, so that all after it count it
        return last if self._has_room(last, t, partial.sizes[i]) else -1

    def recomputation(self, k: int, t: int, chain: int, most: float) -> Recovery | None:
        """Return the way to recompute node `k` in stage `t`; None if there is none below `most`.

        What is missing of its inputs comes back before.
        """
        again = Restoration(t, k, RECOMPUTE)
        if self._has_rows and not self.rules.has_room_for(again):
            return None
        total = self._compute_prices[k]
        parts: tuple[Restoration, ...] = ()
        for p in self._inputs_of[k]:
            key = (p, t)
            at_hand = self._at_hand.get(key)
            if at_hand is None:
                at_hand = self._at_hand[key] = self.is_at_hand(p, t)
            if at_hand:
                continue
            recovery = self.cheapest(p, t, chain - 1, most - total)
            if recovery is None:
                return None
            total += recovery.price
            parts += recovery.restorations
        return Recovery(total, tuple(dict.fromkeys((*parts, again))))

    def is_at_hand(self, p: int, t: int) -> bool:
        """Return whether a step of stage `t` can read tensor `p` without a restoration.

        It is in RAM, or every stage from the last one that has it has room to keep it.
        """
        sources, needs = self.partial.links_of(p)
        before = bisect_right(sources, t)
        last = sources[before - 1]
        if last == t:
            return True
        need = bisect_left(needs, t)
        if need < len(needs) and (before == len(sources) or needs[need] < sources[before]):
            return True
        if need and needs[need - 1] > last:
            last = needs[need - 1]
        first, saved = self.partial.first_counted(p, last)
        if first < t and saved is not None:
            if int(self._peaks[first]) + saved > self.limit_bytes:
                return False
            first += 1
        return self._has_room(first, t, self.partial.sizes[p])

    def _has_room(self, first: int, end: int, size_bytes: int) -> bool:
        """Return whether all stages from `first` until before `end` have room for so much more."""
        full = self._full.get(size_bytes)
        if full is None:
            full = np.flatnonzero(self._peaks > self.limit_bytes - size_bytes).tolist()
            self._full[size_bytes] = full
        at = bisect_left(full, first)
        return at == len(full) or full[at] >= end
