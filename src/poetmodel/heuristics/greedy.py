"""Schedules without a solver: greedy, from checkpoint-all on.

They start the search, and are what is returned when time runs out before a better one is found.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.heuristics.partial_schedule import PartialSchedule, Restoration
from poetmodel.heuristics.penalties import PenalizedObjective
from poetmodel.heuristics.repair import Repair
from poetmodel.problem.infeasibility import obstacle
from poetmodel.schedule import checkpoint_all

if TYPE_CHECKING:
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

_ONLY_LIMITS: Final = float("inf")
"""Penalty at which only the limits count."""
_HALVINGS: Final = 3
"""How often the range of penalty that may be best is halved."""
_STRONGEST: Final = 10.0
"""Power of two of the largest penalty tried in between."""
_PEAKS: Final = 8
"""How many peaks are tried where the least is requested."""


def construct(problem: Problem, *, most_s: float = float("inf")) -> Schedule | None:
    """Return a schedule made greedily that keeps every limit, or None if none was found.

    Parameters
    ----------
    problem : Problem
        What to schedule.
    most_s : float
        Time after which it returns what it has [s].

    Notes
    -----
    Tensors across stages that are too full leave RAM and are brought back at their next need, those
    first that relieve most for their price. Prices are those of the objective; where that exceeds a
    limit, the use of the limits joins them, as strongly as needed, by halving. Where tensors may be
    paged, storage is not limiting and there is no deadline, a schedule is found whenever the budget
    is at least the floor: every tensor can go out and come back at each use.
    """
    greedy = _Greedy(problem, time.monotonic() + most_s)
    greedy.run()
    return None if greedy.best is None else greedy.best[1].schedule()


def offload_all(problem: Problem) -> Schedule | None:
    """Return the schedule that pages everything out at once and in at each use, if that is allowed.

    Every stage then holds its own working set only: valid at the floor, found in no time.
    """
    if not problem.can_page:
        return None
    partial = PartialSchedule(problem.graph)
    for i, gaps in enumerate(partial.gaps):
        for _, need in tuple(gaps):
            partial.add(Restoration(need, i, recompute=False))
    return partial.schedule()


def trivial(problem: Problem) -> Schedule | None:
    """Return checkpoint-all where it keeps every limit: nothing can cost less than it."""
    if checkpoint_all_peak_bytes(problem.graph) > problem.usable_ram_bytes:
        return None
    return None if obstacle(problem) is not None else checkpoint_all(problem.graph)


class _Greedy:
    """Tries prices, and peaks where the least is requested, and keeps the best partial schedule."""

    def __init__(self, problem: Problem, until_s: float) -> None:
        self.problem = problem
        self.until_s = until_s
        self.objective = PenalizedObjective(problem)
        self.best: tuple[float, PartialSchedule] | None = None

    def run(self) -> None:
        usable = self.problem.usable_ram_bytes
        if self._attempt(0.0, usable):
            penalty = 0.0
        elif self.objective.limits and self._attempt(_ONLY_LIMITS, usable):
            penalty = self._halve(usable)
        else:
            return
        if not self.problem.objective.is_sum:
            self._lower(penalty)

    def _halve(self, limit_bytes: int) -> float:
        """Look for the least penalty that keeps the limits; return it."""
        least, most = -_STRONGEST, _STRONGEST
        penalty = _ONLY_LIMITS
        for _ in range(_HALVINGS):
            if time.monotonic() > self.until_s:
                break
            middle = (least + most) / 2
            if self._attempt(2.0**middle, limit_bytes):
                most, penalty = middle, 2.0**middle
            else:
                least = middle
        return penalty

    def _lower(self, penalty: float) -> None:
        """Look for the least peak."""
        least = floor(self.problem.graph).bytes
        for _ in range(_PEAKS):
            most = int(self.best[0]) if self.best is not None else least
            if most <= least or time.monotonic() > self.until_s:
                break
            middle = (least + most) // 2
            if not self._attempt(penalty, middle):
                least = middle + 1

    def _attempt(self, penalty: float, limit_bytes: int) -> bool:
        """Make a partial schedule; return whether it keeps all limits."""
        partial = PartialSchedule(self.problem.graph)
        repair = Repair(self.problem, partial, self.objective.prices(penalty), limit_bytes)
        repair.until_s = self.until_s if self.best is not None else float("inf")
        if not repair.fit():
            return False
        repair.until_s = self.until_s
        repair.tighten()
        if self.objective.excess(partial) > 0:
            return False
        value = self.objective.value(partial)
        if self.best is None or value < self.best[0]:
            self.best = (value, partial)
        return True
