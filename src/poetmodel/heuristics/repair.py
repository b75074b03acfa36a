"""Make a partial schedule fit into RAM at little cost, and take out what there is room for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.heuristics.partial_schedule import Restoration
from poetmodel.time_limit import check_time_limit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from poetmodel.heuristics.partial_schedule import PartialSchedule
    from poetmodel.problem import Coefficients, Problem

SHORT: Final = 6
"""Longest chain of recomputations that brings a tensor back, so that pages are preferred."""
LONG: Final = 300
"""The same where a chain may reach back to its beginning."""
_BATCH: Final = 20
"""One in how many of the tensors that could leave RAM leaves it before all are looked at again."""

Plan = tuple[float, tuple[Restoration, ...]]
"""Price and restorations that bring a tensor back."""


@dataclass(slots=True)
class Repair:
    """Changes a partial schedule: greedily, with a little noise where a search asks for it.

    Parameters
    ----------
    problem : Problem
        What may be done.
    partial : PartialSchedule
        What is changed.
    prices : Coefficients
        What to be greedy about.
    limit_bytes : int
        RAM that every step keeps within.
    rng : Random, optional
        Source of noise.
    until_s : float
        When to give up, on the monotonic clock [s].
    depth : int
        Longest chain of recomputations that brings a tensor back; `LONG` where nothing is paged.
    paging : bool
        Whether tensors may be paged here, where the problem lets them.
    """

    problem: Problem
    partial: PartialSchedule
    prices: Coefficients
    limit_bytes: int
    rng: Random | None = None
    until_s: float = float("inf")
    depth: int = LONG
    paging: bool = True
    banned: set[int] = field(default_factory=set)
    """Stages in which nothing is recomputed any more, because it did not fit."""
    _known: dict[tuple[int, int], Plan | None] = field(default_factory=dict)

    @property
    def _can_page(self) -> bool:
        return self.paging and self.problem.can_page

    # -- making room -----------------------------------------------------------------------------

    def fit(self, noise: float = 0.0) -> bool:
        """Bring tensors back later instead of keeping them until every step fits.

        The fullest stage is relieved first, by the tensors across it that free most bytes in
        stages that are too full for what it costs to bring them back at their next need. Where
        nothing is left across it, its recomputations become page-ins.

        Returns
        -------
        bool
            Whether every step fits.
        """
        partial = self.partial
        depth = self.depth if self._can_page else LONG
        while time.monotonic() < self.until_s:
            check_time_limit()
            partial.settle()
            excess = partial.load + partial.extra - self.limit_bytes
            worst = int(excess.argmax())
            if excess[worst] <= 0:
                return True
            choices = self._choices(worst, excess > 0, depth, noise)
            if not choices:
                if self._page_instead(worst):
                    continue
                return False
            for _, _, plan in choices[: max(1, len(choices) // _BATCH)]:
                for restoration in plan:
                    if restoration not in partial and self._has_storage(restoration):
                        partial.add(restoration)
        return False

    def _choices(
        self, worst: int, crowded: np.ndarray, depth: int, noise: float
    ) -> list[tuple[float, int, tuple[Restoration, ...]]]:
        """Return what relieves a stage, the most for its price first."""
        self._known.clear()
        partial = self.partial
        count = np.concatenate(([0], np.cumsum(crowded))).tolist()
        found = []
        for i, gaps in enumerate(partial.gaps):
            check_time_limit()
            for first, need in gaps:
                if first <= worst < need:
                    break
            else:
                continue
            if not partial.sizes[i]:
                continue
            plan = self._plan(i, need, depth)
            if plan is None:
                continue
            price = plan[0]
            if noise and self.rng is not None:
                price *= 1 + noise * self.rng.random()
            relief = partial.sizes[i] * (count[need] - count[first])
            found.append((-relief / price if price > 0 else float("-inf"), i, plan[1]))
        return sorted(found)

    def _plan(self, i: int, t: int, depth: int) -> Plan | None:
        """Return the cheapest way to have tensor `i` in stage `t` again, None if there is none."""
        if (i, t) not in self._known:
            self._known[i, t] = self._plan_anew(i, t, depth)
        return self._known[i, t]

    def _plan_anew(self, i: int, t: int, depth: int) -> Plan | None:
        problem, partial, prices = self.problem, self.partial, self.prices
        k = problem.graph.node_of[i]
        best: Plan | None = None
        page = Restoration(t, i, recompute=False)
        if self._can_page and self._has_storage(page):
            price = prices.page_in[i] + (0.0 if partial.page_ins[i] else prices.page_out[i])
            best = (price, (page,))
        if not depth or t in self.banned or not problem.may_recompute(k):
            return best
        total = prices.compute[k]
        parts: tuple[Restoration, ...] = ()
        for p in problem.graph.inputs_of[k]:
            if partial.at_hand(p, t) or self._has_room(p, t):
                continue
            plan = self._plan(p, t, depth - 1)
            if plan is None or (best is not None and total + plan[0] >= best[0]):
                return best
            total += plan[0]
            parts += plan[1]
        if best is None or total < best[0]:
            best = (total, tuple(dict.fromkeys((*parts, Restoration(t, k, recompute=True)))))
        return best

    def _has_room(self, i: int, t: int) -> bool:
        """Return whether tensor `i` can be kept for a step of stage `t` as things are."""
        partial = self.partial
        span = slice(partial.kept_from(i, t), t)
        full = partial.load[span] + partial.extra[span]
        return not full.size or int(full.max()) + partial.sizes[i] <= self.limit_bytes

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
        self.banned.add(t)
        changed = False
        for k in sorted(partial.recomputed[t], reverse=True):
            if k not in partial.recomputed[t]:
                continue
            wanted = [
                Restoration(t, i, recompute=False)
                for i in graph.outputs_of[k]
                if partial.serves(i, t) and i not in partial.paged_in[t]
            ]
            if all(self._has_storage(restoration) for restoration in wanted):
                partial.remove(Restoration(t, k, recompute=True))
                for restoration in wanted:
                    partial.add(restoration)
                changed = True
        return changed

    # -- using room ------------------------------------------------------------------------------

    def tighten(self, noise: float = 0.0) -> None:
        """Take away restorations that there is room to do without, the dearest first."""
        gained = True
        while gained and time.monotonic() < self.until_s:
            gained = False
            for restoration in sorted(
                self.partial.restorations(), key=lambda s: -self._worth(s, noise)
            ):
                if time.monotonic() >= self.until_s:
                    break
                check_time_limit()
                if restoration in self.partial and self._may_go(restoration):
                    gained = self._drop(restoration) or gained

    def _worth(self, restoration: Restoration, noise: float) -> float:
        prices, item = self.prices, restoration.item
        if restoration.recompute:
            worth = prices.compute[item]
        else:
            worth = prices.page_in[item]
            if self.partial.page_ins[item] == 1:
                worth += prices.page_out[item]
        return worth * (1 + noise * self.rng.random()) if noise and self.rng is not None else worth

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
        supplied: Sequence[int] = (restoration.item,)
        if restoration.recompute:
            supplied = [i for i in graph.outputs_of[restoration.item] if partial.serves(i, t)]
            freed = sum(partial.sizes[i] for i in graph.inputs_of[restoration.item])
        for i in supplied:
            rows = partial.load[partial.kept_from(i, t) : t]
            if rows.size and int(rows.max()) + partial.sizes[i] - freed > self.limit_bytes:
                return False
        return True
