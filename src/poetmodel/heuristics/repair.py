"""Make a draft fit into RAM at little cost, and take out of it what there is room for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.heuristics.partial_schedule import Supply
from poetmodel.time_limit import check_time_limit

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from poetmodel.heuristics.partial_schedule import Draft
    from poetmodel.heuristics.penalties import Prices
    from poetmodel.problem import Problem

SHORT: Final = 6
"""Longest chain of recomputations that brings a tensor back, so that pages are preferred."""
LONG: Final = 300
"""The same where a chain may reach back to its beginning."""
_BATCH: Final = 20
"""One in how many of the tensors that could leave RAM leaves it before all are looked at again."""

Plan = tuple[float, tuple[Supply, ...]]
"""Price and supplies that bring a tensor back."""


@dataclass(slots=True)
class Repair:
    """Changes a draft: greedily, with a little noise where a search asks for it.

    Parameters
    ----------
    problem : Problem
        What may be done.
    draft : Draft
        What is changed.
    prices : Prices
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
    draft: Draft
    prices: Prices
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
        draft = self.draft
        depth = self.depth if self._can_page else LONG
        while time.monotonic() < self.until_s:
            check_time_limit()
            draft.settle()
            excess = draft.load + draft.extra - self.limit_bytes
            worst = int(excess.argmax())
            if excess[worst] <= 0:
                return True
            choices = self._choices(worst, excess > 0, depth, noise)
            if not choices:
                if self._page_instead(worst):
                    continue
                return False
            for _, _, plan in choices[: max(1, len(choices) // _BATCH)]:
                for supply in plan:
                    if supply not in draft and self._has_storage(supply):
                        draft.add(supply)
        return False

    def _choices(
        self, worst: int, crowded: np.ndarray, depth: int, noise: float
    ) -> list[tuple[float, int, tuple[Supply, ...]]]:
        """Return what relieves a stage, the most for its price first."""
        self._known.clear()
        draft = self.draft
        count = np.concatenate(([0], np.cumsum(crowded))).tolist()
        found = []
        for i, gaps in enumerate(draft.gaps):
            check_time_limit()
            for first, need in gaps:
                if first <= worst < need:
                    break
            else:
                continue
            if not draft.sizes[i]:
                continue
            plan = self._plan(i, need, depth)
            if plan is None:
                continue
            price = plan[0]
            if noise and self.rng is not None:
                price *= 1 + noise * self.rng.random()
            relief = draft.sizes[i] * (count[need] - count[first])
            found.append((-relief / price if price > 0 else float("-inf"), i, plan[1]))
        return sorted(found)

    def _plan(self, i: int, t: int, depth: int) -> Plan | None:
        """Return the cheapest way to have tensor `i` in stage `t` again, None if there is none."""
        if (i, t) not in self._known:
            self._known[i, t] = self._plan_anew(i, t, depth)
        return self._known[i, t]

    def _plan_anew(self, i: int, t: int, depth: int) -> Plan | None:
        problem, draft, prices = self.problem, self.draft, self.prices
        k = problem.graph.node_of[i]
        best: Plan | None = None
        page = Supply(t, i, again=False)
        if self._can_page and self._has_storage(page):
            price = prices.page_in[i] + (0.0 if draft.page_ins[i] else prices.page_out[i])
            best = (price, (page,))
        if not depth or t in self.banned or not problem.may_recompute(k):
            return best
        total = prices.compute[k]
        parts: tuple[Supply, ...] = ()
        for p in problem.graph.inputs_of[k]:
            if draft.at_hand(p, t) or self._has_room(p, t):
                continue
            plan = self._plan(p, t, depth - 1)
            if plan is None or (best is not None and total + plan[0] >= best[0]):
                return best
            total += plan[0]
            parts += plan[1]
        if best is None or total < best[0]:
            best = (total, tuple(dict.fromkeys((*parts, Supply(t, k, again=True)))))
        return best

    def _has_room(self, i: int, t: int) -> bool:
        """Return whether tensor `i` can be kept for a step of stage `t` as things are."""
        draft = self.draft
        span = slice(draft.kept_from(i, t), t)
        full = draft.load[span] + draft.extra[span]
        return not full.size or int(full.max()) + draft.sizes[i] <= self.limit_bytes

    def _has_storage(self, supply: Supply) -> bool:
        """Return whether there is room on storage for what a supply pages in."""
        limit = self.problem.aux_limit_bytes
        graph, draft, i = self.problem.graph, self.draft, supply.item
        if supply.again or limit is None or draft.page_ins[i]:
            return True
        stored = graph.nodes[graph.node_of[i]].on_aux
        return stored or draft.written_bytes + draft.sizes[i] <= limit

    def _page_instead(self, t: int) -> bool:
        """Page in what stage `t` recomputes; return whether that changed anything."""
        draft, graph = self.draft, self.problem.graph
        if not self._can_page or not draft.again[t]:
            return False
        self.banned.add(t)
        changed = False
        for k in sorted(draft.again[t], reverse=True):
            if k not in draft.again[t]:
                continue
            wanted = [
                Supply(t, i, again=False)
                for i in graph.outputs_of[k]
                if draft.serves(i, t) and i not in draft.arrive[t]
            ]
            if all(self._has_storage(supply) for supply in wanted):
                draft.remove(Supply(t, k, again=True))
                for supply in wanted:
                    draft.add(supply)
                changed = True
        return changed

    # -- using room ------------------------------------------------------------------------------

    def tighten(self, noise: float = 0.0) -> None:
        """Take away supplies that there is room to do without, the dearest first."""
        gained = True
        while gained and time.monotonic() < self.until_s:
            gained = False
            for supply in sorted(self.draft.supplies(), key=lambda s: -self._worth(s, noise)):
                if time.monotonic() >= self.until_s:
                    break
                check_time_limit()
                if supply in self.draft and self._may_go(supply):
                    gained = self._drop(supply) or gained

    def _worth(self, supply: Supply, noise: float) -> float:
        prices, item = self.prices, supply.item
        if supply.again:
            worth = prices.compute[item]
        else:
            worth = prices.page_in[item]
            if self.draft.page_ins[item] == 1:
                worth += prices.page_out[item]
        return worth * (1 + noise * self.rng.random()) if noise and self.rng is not None else worth

    def _drop(self, supply: Supply) -> bool:
        mark = self.draft.mark()
        self.draft.remove(supply)
        if self.draft.fits(self.limit_bytes):
            return True
        self.draft.undo(mark)
        return False

    def _may_go(self, supply: Supply) -> bool:
        """Return whether what a supply serves could be kept, going by the rows of stages alone."""
        draft, graph, t = self.draft, self.problem.graph, supply.stage
        freed = 0
        supplied: Sequence[int] = (supply.item,)
        if supply.again:
            supplied = [i for i in graph.outputs_of[supply.item] if draft.serves(i, t)]
            freed = sum(draft.sizes[i] for i in graph.inputs_of[supply.item])
        for i in supplied:
            rows = draft.load[draft.kept_from(i, t) : t]
            if rows.size and int(rows.max()) + draft.sizes[i] - freed > self.limit_bytes:
                return False
        return True
