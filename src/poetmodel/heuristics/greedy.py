"""Schedules without a solver: greedy, from keep-all on.

They start the search, and are what is returned when time runs out before a better one is found.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from poetmodel.clock import now_s
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.heuristics.penalties import WORST, PenalizedObjective
from poetmodel.heuristics.repair import Repair
from poetmodel.heuristics.restorations import PAGE_IN, STORAGE_HOME, Restoration, restorations_of
from poetmodel.problem.infeasibility import infeasibility_reason
from poetmodel.schedule import Schedule, checkpoint_all

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.problem import Problem


PENALTIES: Final = 3
"""Penalties tried by bisection, where the limits alone can be kept."""
LARGEST_PENALTY_LOG2: Final = 10.0
"""Binary logarithm of the largest of them; its negative is that of the least."""
PEAKS: Final = 8
"""Peaks tried by bisection where the least is requested."""
DROP_TIME_RATIO: Final = 0.1
"""Time that the first schedule has in any case to drop what it can do without, as a share of the
time that it took."""


def construct(problem: Problem, *, most_s: float = math.inf) -> Schedule | None:
    """Return a schedule made greedily that keeps every limit, or None if none was found.

    After `most_s` it returns what it has [s]. The first schedule is made to its end, and has a
    share of that time more to drop what it can do without.

    Notes
    -----
    Tensors across stages that are too full leave RAM and are brought back at their next need, those
    first that relieve most for their price. Prices are those of the objective; where that exceeds a
    limit, a penalty for the use of the limits joins them, as strong as bisection finds needed.
    Where tensors may be paged, storage is not limiting and there is no deadline, a schedule is
    found whenever the budget is at least the floor: every tensor can go out and come back at each
    use, and state lies on storage.
    """
    greedy = _Greedy(problem, now_s() + most_s)
    greedy.run()
    return None if greedy.best is None else greedy.best.schedule()


def with_wanted(
    objective: PenalizedObjective, schedule: Schedule, beside: Iterable[Restoration] = ()
) -> Schedule:
    """Return a schedule with what own constraints, or the objective, want for its own sake.

    What of `beside` has room comes first, then what the constraints still lack.
    """
    problem = objective.problem
    partial = objective.partial(restorations_of(problem.graph, schedule))
    repair = Repair(problem, partial, objective.prices(0.0), problem.usable_ram_bytes)
    repair.place(beside)
    repair.satisfy()
    return partial.schedule()


def refitted(problem: Problem, schedule: Schedule, *, most_s: float = math.inf) -> Schedule | None:
    """Return a schedule of a problem with more RAM, repaired to keep that of this one, or None.

    The graphs have the same nodes and tensors; sizes may differ.
    """
    objective = PenalizedObjective(problem)
    partial = objective.partial(restorations_of(problem.graph, schedule))
    repair = Repair(problem, partial, objective.prices(0.0), problem.usable_ram_bytes)
    repair.until_s = now_s() + most_s
    if not repair.fit():
        return None
    repair.satisfy()
    repair.drop_needless()
    return partial.schedule()


def page_everything(problem: Problem) -> Schedule | None:
    """Return the schedule that pages everything out at once and in at each use, if that is allowed.

    Every stage then holds its own working set only: valid at the floor, found in no time. All
    state lies on storage.
    """
    if not problem.can_page:
        return None
    graph = problem.graph
    homes = (Restoration.at_its_node(graph, i, STORAGE_HOME) for i in graph.state_tensors)
    partial = PartialSchedule(graph, homes, working=problem.working_graph)
    for i, gaps in enumerate(partial.gaps):
        for _, need in tuple(gaps):
            partial.add(Restoration(need, i, PAGE_IN))
    return partial.schedule()


def trivial(problem: Problem) -> Schedule | None:
    """Return keep-all where it keeps RAM, time and energy: only what is wanted can be better."""
    if checkpoint_all_peak_bytes(problem.graph) > problem.usable_ram_bytes:
        return None
    return None if infeasibility_reason(problem) is not None else checkpoint_all(problem.graph)


class _Greedy:
    """Tries penalties, and peaks where the least is requested; keeps the best partial schedule."""

    def __init__(self, problem: Problem, until_s: float) -> None:
        self.problem = problem
        self.until_s = until_s
        self.objective = PenalizedObjective(problem)
        self.best: PartialSchedule | None = None
        self.score = WORST

    def run(self) -> None:
        usable = self.problem.usable_ram_bytes
        penalty = 0.0
        if not self._attempt(penalty, usable):
            penalty = math.inf
            if not (self.objective.is_limited and self._attempt(penalty, usable)):
                return
            penalty = self._least_penalty(usable)
        if not self.problem.objective.is_sum:
            self._lower_peak(penalty)

    def _least_penalty(self, limit_bytes: int) -> float:
        """Look for the least penalty that keeps the limits; return it."""
        low, high = -LARGEST_PENALTY_LOG2, LARGEST_PENALTY_LOG2
        penalty = math.inf
        for _ in range(PENALTIES):
            if now_s() > self.until_s:
                break
            middle = (low + high) / 2
            if self._attempt(2.0**middle, limit_bytes):
                high, penalty = middle, 2.0**middle
            else:
                low = middle
        return penalty

    def _lower_peak(self, penalty: float) -> None:
        """Look for the least peak, which is what scores count."""
        low = self.problem.floor.bytes
        for _ in range(PEAKS):
            high = int(self.score.value)
            if high <= low or now_s() > self.until_s:
                break
            middle = (low + high) // 2
            if not self._attempt(penalty, middle):
                low = middle + 1

    def _attempt(self, penalty: float, limit_bytes: int) -> bool:
        """Repair keep-all; return whether the result keeps all limits."""
        partial = self.objective.partial()
        repair = Repair(self.problem, partial, self.objective.prices(penalty), limit_bytes)
        repair.until_s = self.until_s if self.best is not None else math.inf
        begun_s = now_s()
        if not repair.fit():
            return False
        repair.until_s = self.until_s
        if self.best is None:
            fitted_s = now_s()
            share_s = DROP_TIME_RATIO * (fitted_s - begun_s)
            repair.until_s = max(self.until_s, fitted_s + share_s)
        repair.satisfy()
        repair.drop_needless()
        score = self.objective.score(partial)
        if score < self.score and score.excess == 0:
            self.best, self.score = partial, score
        return score.excess == 0
