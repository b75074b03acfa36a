"""Recoveries: the cheapest restorations that return a tensor to RAM in a fixed partial schedule."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from poetmodel.heuristics.restorations import PAGE_IN, RECOMPUTE, Restoration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.heuristics.partial_schedule import PartialSchedule

MAX_CHAIN: Final = 300
"""Maximum number of nested recomputations for one tensor. Each nests three Python calls, so a much
larger number would exceed the recursion limit."""


class Recovery(NamedTuple):
    """Restorations that return a tensor to RAM, with the sum of their prices."""

    price: float
    """Sum of prices. A restoration that several inputs need counts once for each."""
    restorations: tuple[Restoration, ...]
    """The restorations, each after those of its inputs, without duplicates."""


class PageInPrice(NamedTuple):
    """The price of a page-in of a tensor, in any stage up to `last_stage`; -1 if in none."""

    price: float
    last_stage: int


class RecoveryRules(Protocol):
    """Prices and limits of restorations, for a fixed partial schedule."""

    partial: PartialSchedule
    limit_bytes: int
    """RAM limit of every step [B]."""
    paging_only_stages: set[int]
    """Stages in which recoveries recompute no node, except the node of `plan_recomputation`."""

    @property
    def recompute_prices(self) -> Sequence[float]:
        """The price of recomputing each node; infinite if that is forbidden."""

    def price_page_in(self, i: int) -> PageInPrice:
        """Return the price of a page-in of tensor `i`."""

    def fits_limits(self, restoration: Restoration) -> bool:
        """Return whether user-defined constraints, storage and state permit a restoration."""


class Recoveries:
    """Searches for the cheapest recoveries in a fixed partial schedule, and caches them.

    Tensors evicted in `relieved_stage`, whose RAM is to be reduced (-1: none), may be recomputed
    only in later stages.
    """

    def __init__(self, rules: RecoveryRules, relieved_stage: int = -1) -> None:
        self.rules = rules
        self.relieved_stage = relieved_stage
        self.partial = rules.partial
        self.limit_bytes = rules.limit_bytes
        self._recompute_prices = rules.recompute_prices
        self._last_stages = self.partial.graph.last_stages
        self._node_of = self.partial.graph.node_of
        self._inputs_of = self.partial.working_graph.inputs_of
        self._has_user_rows = self.partial.rows is not None
        self._peaks = self.partial.peaks()
        self._cache: dict[tuple[int, int], tuple[Recovery | None, float]] = {}
        """By (tensor, stage): the recovery found, or None; and the price limit of the search."""
        self._page_in_prices: dict[int, PageInPrice] = {}
        self._readable: dict[tuple[int, int], bool] = {}
        """By (tensor, stage): the result of `is_readable`."""
        self._full_stages: dict[int, list[int]] = {}
        """By size: the stages in which a further tensor of that size exceeds the limit."""

    def find_cheapest(self, i: int, t: int, max_chain: int, max_price: float) -> Recovery | None:
        """Return the cheapest recovery of tensor `i` for stage `t` below `max_price`, or None.

        At most `max_chain` recomputations are nested; a cached result may be of another maximum.
        """
        recovery, failed_price = self._cache.get((i, t), (None, -1.0))
        if recovery is None and failed_price < max_price:
            recovery = self._search_cheapest(i, t, max_chain, max_price)
            self._cache[i, t] = recovery, max_price
        return recovery if recovery is not None and recovery.price < max_price else None

    def price_range(self, i: int, t: int) -> tuple[float, float]:
        """Return a lower and an upper bound on the price of recovering tensor `i` for stage `t`."""
        max_price = self._price_page_in(i, t)
        return min(max_price, self._recompute_prices[self._node_of[i]]), max_price

    def _price_page_in(self, i: int, t: int) -> float:
        """Return the cached price of a page-in of tensor `i` in stage `t`; inf if impossible."""
        page_in = self._page_in_prices.get(i)
        if page_in is None:
            page_in = self._page_in_prices[i] = self.rules.price_page_in(i)
        return page_in.price if t <= page_in.last_stage else math.inf

    def _search_cheapest(self, i: int, t: int, max_chain: int, max_price: float) -> Recovery | None:
        """Return the cheaper of a recomputation and a page-in (on ties) below `max_price`."""
        k = self._node_of[i]
        page_in_price = self._price_page_in(i, t)
        recovery: Recovery | None = None
        if page_in_price < max_price:
            recovery = Recovery(page_in_price, (Restoration(t, i, PAGE_IN),))
            max_price = page_in_price
        if self._recompute_prices[k] < max_price and max_chain:
            stage = t if t <= self._last_stages[k] else self._last_recompute_stage(i, t)
            if stage >= 0 and stage not in self.rules.paging_only_stages:
                recomputation = self.plan_recomputation(k, stage, max_chain, max_price)
                if recomputation is not None and recomputation.price < max_price:
                    return recomputation
        return recovery

    def _last_recompute_stage(self, i: int, t: int) -> int:
        """Return the last stage that may recompute `i` and keep it for `t`, or -1."""
        partial = self.partial
        last_stage = self._last_stages[self._node_of[i]]
        if last_stage <= self.relieved_stage or last_stage < partial.first_keeping_stage(i, t):
            return -1
        if partial.is_available(i, t):
            # The tensor is kept across the relieved stage, so later stages count it already.
            return last_stage
        return last_stage if self._fits_in_stages(last_stage, t, partial.sizes[i]) else -1

    def plan_recomputation(
        self, k: int, t: int, max_chain: int, max_price: float
    ) -> Recovery | None:
        """Return the recovery that recomputes node `k` in stage `t` and restores missing inputs.

        None if limits refuse it or an input has none. Callers check the problem's permission.
        """
        recomputation = Restoration(t, k, RECOMPUTE)
        if self._has_user_rows and not self.rules.fits_limits(recomputation):
            return None
        total_price = self._recompute_prices[k]
        restorations: tuple[Restoration, ...] = ()
        for p in self._inputs_of[k]:
            key = (p, t)
            can_read = self._readable.get(key)
            if can_read is None:
                can_read = self._readable[key] = self.is_readable(p, t)
            if can_read:
                continue
            recovery = self.find_cheapest(p, t, max_chain - 1, max_price - total_price)
            if recovery is None:
                return None
            total_price += recovery.price
            restorations += recovery.restorations
        return Recovery(total_price, tuple(dict.fromkeys((*restorations, recomputation))))

    def is_readable(self, p: int, t: int) -> bool:
        """Return whether a step of stage `t` can read tensor `p` without a restoration."""
        sources, needs = self.partial.sources_and_needs(p)
        n_sources_before = bisect_right(sources, t)
        last_stage = sources[n_sources_before - 1]
        if last_stage == t:
            return True
        need_index = bisect_left(needs, t)
        if need_index < len(needs) and (
            n_sources_before == len(sources) or needs[need_index] < sources[n_sources_before]
        ):
            return True
        if need_index and needs[need_index - 1] > last_stage:
            last_stage = needs[need_index - 1]
        first_stage, first_stage_bytes = self.partial.first_counting_stage(p, last_stage)
        if first_stage < t and first_stage_bytes is not None:
            if int(self._peaks[first_stage]) + first_stage_bytes > self.limit_bytes:
                return False
            first_stage += 1
        return self._fits_in_stages(first_stage, t, self.partial.sizes[p])

    def _fits_in_stages(self, first: int, end: int, size_bytes: int) -> bool:
        """Return whether `size_bytes` more fit at the peaks of stages `first` to ``end - 1``."""
        full_stages = self._full_stages.get(size_bytes)
        if full_stages is None:
            full_stages = np.flatnonzero(self._peaks > self.limit_bytes - size_bytes).tolist()
            self._full_stages[size_bytes] = full_stages
        position = bisect_left(full_stages, first)
        return position == len(full_stages) or full_stages[position] >= end
