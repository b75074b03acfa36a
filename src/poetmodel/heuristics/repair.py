"""Make a partial schedule fit into RAM at little cost, and take out what there is room for."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from poetmodel.errors import InputError
from poetmodel.heuristics.partial_schedule import PartialSchedule, Restoration
from poetmodel.time_limit import check_time_limit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from poetmodel.problem import Coefficients, Problem


_MOST_NESTED: Final = 300
"""Longest chain of recomputations that calls, which nest two deep for each, can follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairParams:
    """Parameters of repair; `InputError` if a number is out of its range."""

    pages: bool = True
    """Whether tensors may be paged, where the problem lets them."""
    longest_chain: int = _MOST_NESTED
    """Most recomputations one behind the other that bring a tensor back, 0 to 300."""
    longest_chain_beside_pages: int = _MOST_NESTED
    """The same where tensors may be paged; a low one prefers pages."""
    choices_per_relief: int = 20
    """One in so many of the tensors that could leave RAM leaves it before all are looked at again;
    at least 1."""
    fit_noise_ratio: float = 1.0
    """By how much a price may rise at random while room is made, relatively, at least 0."""
    drop_noise_ratio: float = 0.5
    """The same while restorations are dropped."""

    def __post_init__(self) -> None:
        require_within(self, 1, "choices_per_relief")
        require_within(self, 0, "longest_chain", "longest_chain_beside_pages", most=_MOST_NESTED)
        require_within(self, 0, "fit_noise_ratio", "drop_noise_ratio")


def require_within(params: object, least: float, *names: str, most: float = math.inf) -> None:
    """Raise `InputError` if parameters are outside of their range."""
    expected = f"{least:g} to {most:g}" if most < math.inf else f"at least {least:g}"
    faults = [
        f"{name}: expected {expected}, got {getattr(params, name)!r}"
        for name in names
        if not least <= getattr(params, name) <= most
    ]
    if faults:
        raise InputError(faults)


class _Recovery(NamedTuple):
    """A way to bring a tensor back."""

    price: float
    restorations: tuple[Restoration, ...]


@dataclass(slots=True)
class Repair:
    """Changes a partial schedule greedily."""

    problem: Problem
    partial: PartialSchedule
    prices: Coefficients
    """What to be greedy about."""
    limit_bytes: int
    """RAM that every step keeps within [B]."""
    rng: Random | None = None
    """Source of noise on the prices; none without."""
    until_s: float = math.inf
    """When to give up, on the monotonic clock [s]."""
    params: RepairParams = field(default_factory=RepairParams)
    _paged_only: set[int] = field(default_factory=set)
    """Stages in which nothing is recomputed any more, because it did not fit."""
    _known: dict[tuple[int, int], _Recovery | None] = field(default_factory=dict)

    # -- making room -----------------------------------------------------------------------------

    def fit(self) -> bool:
        """Bring tensors back later instead of keeping them until every step fits.

        The fullest stage is relieved first, by the tensors across it that free most bytes in
        stages that are too full for what it costs to bring them back at their next need. Where
        nothing is left across it, its recomputations become page-ins. Returns whether every step
        fits.
        """
        while time.monotonic() < self.until_s:
            check_time_limit()
            excess = self.partial.peaks() - self.limit_bytes
            fullest = int(excess.argmax())
            if excess[fullest] <= 0:
                return True
            plans = self._relieving(fullest, excess > 0)
            if not plans and not self._page_instead(fullest):
                return False
            for plan in plans[: max(1, len(plans) // self.params.choices_per_relief)]:
                for restoration in plan.restorations:
                    if restoration not in self.partial and self._has_storage(restoration):
                        self.partial.add(restoration)
        return False

    def _relieving(self, stage: int, crowded: np.ndarray) -> list[_Recovery]:
        """Return what relieves a stage, the most for its price first."""
        self._known.clear()
        partial, params = self.partial, self.params
        chain = params.longest_chain_beside_pages if self._can_page else params.longest_chain
        count = np.concatenate(([0], np.cumsum(crowded))).tolist()
        found = []
        for i, gaps in enumerate(partial.gaps):
            check_time_limit()
            across = (gap for gap in gaps if gap[0] <= stage < gap[1])
            first, need = next(across, (0, 0))
            recovery = self._recovery(i, need, chain) if need and partial.sizes[i] else None
            if recovery is None:
                continue
            price = self._noisy(recovery.price, params.fit_noise_ratio)
            relief = partial.sizes[i] * (count[need] - count[first])
            found.append((-relief / price if price > 0 else -math.inf, i, recovery))
        return [recovery for _, _, recovery in sorted(found)]

    def _recovery(self, i: int, t: int, chain: int) -> _Recovery | None:
        """Return the cheapest way to have tensor `i` in stage `t` again, None if there is none."""
        if (i, t) not in self._known:
            self._known[i, t] = self._cheapest(i, t, chain)
        return self._known[i, t]

    def _cheapest(self, i: int, t: int, chain: int) -> _Recovery | None:
        problem, partial, prices = self.problem, self.partial, self.prices
        k = problem.graph.node_of[i]
        best: _Recovery | None = None
        page = Restoration(t, i, recompute=False)
        if self._can_page and self._has_storage(page):
            price = prices.page_in[i] + (0.0 if partial.page_ins[i] else prices.page_out[i])
            best = _Recovery(price, (page,))
        if not chain or t in self._paged_only or not problem.may_recompute(k):
            return best
        total = prices.compute[k]
        parts: tuple[Restoration, ...] = ()
        for p in problem.graph.inputs_of[k]:
            if partial.is_available(p, t) or self._has_room(p, t):
                continue
            recovery = self._recovery(p, t, chain - 1)
            if recovery is None or (best is not None and total + recovery.price >= best.price):
                return best
            total += recovery.price
            parts += recovery.restorations
        if best is None or total < best.price:
            again = Restoration(t, k, recompute=True)
            best = _Recovery(total, tuple(dict.fromkeys((*parts, again))))
        return best

    def _has_room(self, i: int, t: int) -> bool:
        """Return whether tensor `i` can be kept for a step of stage `t` as things are."""
        partial = self.partial
        span = slice(partial.kept_from(i, t), t)
        full = partial.row_bytes[span] + partial.extra_bytes[span]
        return not full.size or int(full.max()) + partial.sizes[i] <= self.limit_bytes

    @property
    def _can_page(self) -> bool:
        return self.params.pages and self.problem.can_page

    def _has_storage(self, restoration: Restoration) -> bool:
        """Return whether there is room on storage for what a restoration pages in."""
        limit = self.problem.aux_limit_bytes
        graph, partial, i = self.problem.graph, self.partial, restoration.item
        if restoration.recompute or limit is None or partial.page_ins[i]:
            return True
        stored = graph.nodes[graph.node_of[i]].on_aux
        return stored or partial.written_bytes + partial.sizes[i] <= limit

    def _page_instead(self, t: int) -> bool:
        """Page in what stage `t` recomputes; return whether that changed anything."""
        partial, graph = self.partial, self.problem.graph
        if not self._can_page or not partial.recomputed[t]:
            return False
        self._paged_only.add(t)
        changed = False
        for k in sorted(partial.recomputed[t], reverse=True):
            if k not in partial.recomputed[t]:
                continue
            pages = [
                Restoration(t, i, recompute=False)
                for i in graph.outputs_of[k]
                if partial.serves(i, t) and i not in partial.paged_in[t]
            ]
            if all(map(self._has_storage, pages)):
                partial.remove(Restoration(t, k, recompute=True))
                for page in pages:
                    partial.add(page)
                changed = True
        return changed

    # -- using room ------------------------------------------------------------------------------

    def drop_needless(self) -> None:
        """Drop restorations that there is room to do without, the dearest first."""
        gained = True
        while gained and time.monotonic() < self.until_s:
            gained = False
            for restoration in sorted(self.partial.restorations(), key=self._worth):
                if time.monotonic() >= self.until_s:
                    break
                check_time_limit()
                if restoration in self.partial and self._may_go(restoration):
                    gained = self._drop(restoration) or gained

    def _worth(self, restoration: Restoration) -> float:
        """Return what a restoration costs, negative, with noise."""
        prices, item = self.prices, restoration.item
        if restoration.recompute:
            price = prices.compute[item]
        else:
            price = prices.page_in[item]
            if self.partial.page_ins[item] == 1:
                price += prices.page_out[item]
        return -self._noisy(price, self.params.drop_noise_ratio)

    def _drop(self, restoration: Restoration) -> bool:
        mark = self.partial.mark()
        self.partial.remove(restoration)
        if self.partial.fits(self.limit_bytes):
            return True
        self.partial.undo(mark)
        return False

    def _may_go(self, restoration: Restoration) -> bool:
        """Return whether what a restoration serves could be kept, by the rows of stages alone."""
        partial, graph, t = self.partial, self.problem.graph, restoration.stage
        freed = 0
        served: Sequence[int] = (restoration.item,)
        if restoration.recompute:
            served = [i for i in graph.outputs_of[restoration.item] if partial.serves(i, t)]
            freed = sum(partial.sizes[i] for i in graph.inputs_of[restoration.item])
        for i in served:
            rows = partial.row_bytes[partial.kept_from(i, t) : t]
            if rows.size and int(rows.max()) + partial.sizes[i] - freed > self.limit_bytes:
                return False
        return True

    def _noisy(self, price: float, noise: float) -> float:
        return price * (1 + noise * self.rng.random()) if noise and self.rng is not None else price
