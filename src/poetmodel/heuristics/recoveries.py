"""Recoveries: the cheapest restorations that return a tensor to RAM, while nothing else changes."""

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
"""Maximum length of a chain of recomputations for one tensor. Each recomputation nests two calls,
so longer chains would exceed the recursion limit."""


class Recovery(NamedTuple):
    """Restorations that return a tensor to RAM, with their price."""

    price: float
    restorations: tuple[Restoration, ...]


class RecoveryRules(Protocol):
    """Prices and limits of restorations, for a fixed partial schedule."""

    partial: PartialSchedule
    limit_bytes: int
    """RAM limit of every step [B]."""
    paged_only: set[int]
    """Stages without recomputations."""

    @property
    def recompute_prices(self) -> Sequence[float]:
        """The price of recomputing each node; infinite if that is forbidden."""

    def page_in(self, i: int) -> tuple[float, int]:
        """Return the price of a page-in of tensor `i`, and the last possible stage of the page-in.

        The stage is -1 if no page-in is possible.
        """

    def fits_limits(self, restoration: Restoration) -> bool:
        """Return whether user-defined constraints, storage and state permit a restoration."""


class Recoveries:
    """The cheapest recoveries, cached until the partial schedule changes.

    Parameters
    ----------
    rules : RecoveryRules
        Prices, limits and the partial schedule, such as a `poetmodel.heuristics.repair.Repair`.
    relieved_stage : int
        The stage to relieve; recomputations for it happen after it. -1 for none.
    """

    def __init__(self, rules: RecoveryRules, relieved_stage: int = -1) -> None:
        """Read the prices and the present peaks; recoveries are computed on demand."""
        self.rules = rules
        self.relieved_stage = relieved_stage
        self.partial = rules.partial
        self.limit_bytes = rules.limit_bytes
        self._compute_prices = rules.recompute_prices
        self._last_stages = self.partial.graph.last_stages
        self._node_of = self.partial.graph.node_of
        self._inputs_of = self.partial.working.inputs_of
        self._has_rows = self.partial.rows is not None
        self._peaks = self.partial.peaks()
        self._cache: dict[tuple[int, int], tuple[Recovery | None, float]] = {}
        """By (tensor, stage): the cheapest recovery, or None and the price below which there is
        none."""
        self._page_ins: dict[int, tuple[float, int]] = {}
        """By tensor: the price of a page-in and its last possible stage; -1 for none."""
        self._readable: dict[tuple[int, int], bool] = {}
        self._full_stages: dict[int, list[int]] = {}
        """By size: the stages in which that many more bytes exceed the limit."""

    def cheapest(self, i: int, t: int, chain: int, max_price: float) -> Recovery | None:
        """Return the cheapest recovery of tensor `i` for stage `t`.

        Return None if no recovery with at most `chain` nested recomputations costs less than
        `max_price`.
        """
        recovery, floor = self._cache.get((i, t), (None, -1.0))
        if recovery is None and floor < max_price:
            recovery = self._find_cheapest(i, t, chain, max_price)
            self._cache[i, t] = recovery, max_price
        return recovery if recovery is not None and recovery.price < max_price else None

    def price_range(self, i: int, t: int) -> tuple[float, float]:
        """Return a lower and an upper bound on the price of recovering tensor `i` for stage `t`.

        The upper bound is the price of a page-in, infinite if none is possible. Both are infinite
        if there is no recovery.
        """
        page_in, last = self._page_in(i)
        max_price = math.inf if t > last else page_in
        return min(max_price, self._compute_prices[self._node_of[i]]), max_price

    def _page_in(self, i: int) -> tuple[float, int]:
        """Return the cached price of a page-in of tensor `i` and its last possible stage."""
        page_in = self._page_ins.get(i)
        if page_in is None:
            page_in = self._page_ins[i] = self.rules.page_in(i)
        return page_in

    def _find_cheapest(self, i: int, t: int, chain: int, max_price: float) -> Recovery | None:
        """Return the cheaper of a recomputation and a page-in of tensor `i` for stage `t`.

        Return None if neither is possible below `max_price`.
        """
        k = self._node_of[i]
        price, last = self._page_in(i)
        if t > last:
            price = math.inf
        max_price = min(max_price, price)
        recomputation_plan: Recovery | None = None
        if self._compute_prices[k] < max_price and chain:
            stage = t if t <= self._last_stages[k] else self._last_stage(i, t)
            if stage >= 0 and stage not in self.rules.paged_only:
                recomputation_plan = self.recomputation(k, stage, chain, max_price)
        if recomputation_plan is not None and recomputation_plan.price < price:
            return recomputation_plan
        return Recovery(price, (Restoration(t, i, PAGE_IN),)) if t <= last else None

    def _last_stage(self, i: int, t: int) -> int:
        """Return the last stage before `t` in which tensor `i` can be recomputed and kept for `t`.

        This is needed if the state that the tensor's node reads is replaced before `t`. Return -1
        if there is no such stage.
        """
        partial = self.partial
        last = self._last_stages[self._node_of[i]]
        if last <= self.relieved_stage or last < partial.first_keeping_stage(i, t):
            return -1
        if partial.is_available(i, t):
            return last  # kept across the relieved stage, so later stages count the tensor already
        return last if self._fits_in_stages(last, t, partial.sizes[i]) else -1

    def recomputation(self, k: int, t: int, chain: int, max_price: float) -> Recovery | None:
        """Return the recovery that recomputes node `k` in stage `t`; missing inputs are restored.

        Return None if no such recovery costs less than `max_price`.
        """
        recomputation_plan = Restoration(t, k, RECOMPUTE)
        if self._has_rows and not self.rules.fits_limits(recomputation_plan):
            return None
        total = self._compute_prices[k]
        restorations: tuple[Restoration, ...] = ()
        for p in self._inputs_of[k]:
            key = (p, t)
            can_read = self._readable.get(key)
            if can_read is None:
                can_read = self._readable[key] = self.is_readable(p, t)
            if can_read:
                continue
            recovery = self.cheapest(p, t, chain - 1, max_price - total)
            if recovery is None:
                return None
            total += recovery.price
            restorations += recovery.restorations
        return Recovery(total, tuple(dict.fromkeys((*restorations, recomputation_plan))))

    def is_readable(self, p: int, t: int) -> bool:
        """Return whether a step of stage `t` can read tensor `p` without a restoration.

        The step can if the tensor is in RAM, or if every stage since the last one with the tensor
        has enough free bytes to keep the tensor.
        """
        sources, needs = self.partial.links_of(p)
        n_sources_before = bisect_right(sources, t)
        last = sources[n_sources_before - 1]
        if last == t:
            return True
        need = bisect_left(needs, t)
        if need < len(needs) and (
            n_sources_before == len(sources) or needs[need] < sources[n_sources_before]
        ):
            return True
        if need and needs[need - 1] > last:
            last = needs[need - 1]
        first, saved = self.partial.first_counted(p, last)
        if first < t and saved is not None:
            if int(self._peaks[first]) + saved > self.limit_bytes:
                return False
            first += 1
        return self._fits_in_stages(first, t, self.partial.sizes[p])

    def _fits_in_stages(self, first: int, end: int, size_bytes: int) -> bool:
        """Return whether `size_bytes` more fit in all stages from `first` until before `end`."""
        full_stages = self._full_stages.get(size_bytes)
        if full_stages is None:
            full_stages = np.flatnonzero(self._peaks > self.limit_bytes - size_bytes).tolist()
            self._full_stages[size_bytes] = full_stages
        position = bisect_left(full_stages, first)
        return position == len(full_stages) or full_stages[position] >= end
