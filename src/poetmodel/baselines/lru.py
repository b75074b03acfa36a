"""Demand paging: what was used longest ago goes to storage, and comes back when it is read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from poetmodel.baselines.execution import Execution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule


def lru_paging(problem: Problem) -> Schedule:
    """Page out the least recently used tensor whenever RAM is short, page in what is read.

    Parameters
    ----------
    problem : Problem
        What to schedule. Nothing is recomputed.

    Returns
    -------
    Schedule
        Within the RAM budget and the storage limit.

    Raises
    ------
    MethodNotApplicableError
        If a step does not fit and no tensor can be paged out.

    Notes
    -----
    A tensor is used when a node makes or reads it; among those of the same step the lowest number
    goes first. Tensors do not change, so that each is written once: evicted again it is dropped, as
    a clean page is. Tensors without a further user are freed at once, those of 0 bytes stay.
    Takes O(n) evictions of O(n) candidates.

    References
    ----------
    Denning: Virtual Memory. ACM Computing Surveys 2(3), 1970, doi 10.1145/356571.356573: demand
    paging and least recently used replacement, here with tensors in place of pages.
    """
    return _LeastRecentlyUsed(problem).run()


class _LeastRecentlyUsed(Execution):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        graph = problem.graph
        self.steps = 0
        self.last_use = [0] * len(self.sizes)
        self.stored: set[int] = set()
        """With a copy on storage."""
        if problem.can_page:
            self.stored = {i for i, k in enumerate(graph.node_of) if graph.nodes[k].on_aux}
        self.room_bytes = math.inf if problem.aux_limit_bytes is None else problem.aux_limit_bytes
        """Storage that is left [B]."""

    def choose(self, candidates: Sequence[int]) -> int | None:
        can_go = [i for i in candidates if self._can_go(i)]
        victim = min(can_go, key=lambda i: self.last_use[i], default=None)
        if victim is not None and victim not in self.stored:
            self.stored.add(victim)
            self.room_bytes -= self.sizes[victim]
        return victim

    def fetches(self, i: int) -> bool:
        return i in self.stored

    def on_compute(self, k: int) -> None:
        self.steps += 1
        for i in (*self.graph.inputs_of[k], *self.graph.outputs_of[k]):
            self.last_use[i] = self.steps

    def _can_go(self, i: int) -> bool:
        return i in self.stored or (self.problem.can_page and self.sizes[i] <= self.room_bytes)
