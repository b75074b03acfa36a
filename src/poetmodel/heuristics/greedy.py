"""Schedules without a solver: keep-all, its greedy repair, and paging of every tensor.

A solve starts from these schedules, and returns one if time runs out before a better schedule is
found. *Keep-all* is the schedule that computes each node once and keeps each tensor until its last
use.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from poetmodel.clock import now_s
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.heuristics.penalties import WORST, PenalizedObjective
from poetmodel.heuristics.repair import Repair
from poetmodel.heuristics.restorations import PAGE_IN, STORAGE_HOME, Restoration, list_restorations
from poetmodel.problem.infeasibility import infeasibility_reason
from poetmodel.schedule import Schedule, checkpoint_all

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.problem import Problem


N_PENALTIES: Final = 3
"""Maximum number of finite penalties above 0 tried by bisection, if the limits are met with an
infinite penalty and not with 0."""
MAX_PENALTY_LOG2: Final = 10.0
"""Binary logarithm of the upper limit of the bisection; its negative is that of the lower limit."""
N_PEAKS: Final = 8
"""Maximum number of peaks tried by bisection if RAM is minimized."""
DROP_TIME_RATIO: Final = 0.1
"""Minimum time to satisfy constraints and drop unneeded restorations, as a fraction of the time to
make the schedule fit in RAM. It applies until a schedule meets all limits."""


def construct(problem: Problem, *, max_s: float = math.inf) -> Schedule | None:
    """Construct a greedy schedule that meets every limit; None if none was found in `max_s` [s].

    Per-stage constraints are not checked. The first fit in RAM has no time limit. Tensors kept
    across full stages are evicted, those with the most freed bytes per price first. Bisection finds
    the smallest penalty, then if RAM is minimized the smallest RAM limit. With paging, unlimited
    storage and RAM as only limit, a schedule is found from the minimum RAM on.
    """
    greedy = _Greedy(problem, now_s() + max_s)
    greedy.find_best()
    return None if greedy.best is None else greedy.best.schedule()


def add_rewarded_decisions(
    objective: PenalizedObjective,
    restorations: Iterable[Restoration],
    rewarded: Iterable[Restoration],
) -> Schedule:
    """Return the schedule of `restorations` and of rewarded decisions, `rewarded` ones first.

    Some are left out to meet user-defined constraints.
    """
    problem = objective.problem
    partial = objective.make_partial(restorations)
    repair = Repair(problem, partial, objective.prices(0.0), problem.usable_ram_bytes)
    repair.add_rewarded(rewarded)
    repair.satisfy_constraints()
    return partial.schedule()


def refit(problem: Problem, schedule: Schedule, *, max_s: float = math.inf) -> Schedule | None:
    """Repair a schedule to fit in the RAM of a problem with less RAM; None if that fails.

    The result may exceed other limits. The graph of the schedule may have other sizes.
    """
    objective = PenalizedObjective(problem)
    partial = objective.make_partial(list_restorations(problem.graph, schedule))
    repair = Repair(problem, partial, objective.prices(0.0), problem.usable_ram_bytes)
    repair.until_s = now_s() + max_s
    if not repair.fit():
        return None
    repair.satisfy_constraints()
    repair.drop_unneeded()
    return partial.schedule()


def page_everything(problem: Problem) -> Schedule | None:
    """Return the schedule that pages in the inputs of each stage; None without paging.

    It fits in the minimum RAM; it may exceed other limits.
    """
    if not problem.can_page:
        return None
    graph = problem.graph
    homes = (Restoration.at_its_node(graph, i, STORAGE_HOME) for i in graph.state_tensors)
    partial = PartialSchedule(graph, homes, working_graph=problem.working_graph)
    for i, intervals in enumerate(partial.intervals):
        for _, need in tuple(intervals):
            partial.add(Restoration(need, i, PAGE_IN))
    return partial.schedule()


def keep_all_if_within_budgets(problem: Problem) -> Schedule | None:
    """Return keep-all if it meets the limits on RAM, time, energy and commits, else None.

    The result may violate user-defined constraints. If it meets them, a better schedule exists only
    if RAM is minimized or decisions are rewarded.
    """
    if checkpoint_all_peak_bytes(problem.graph) > problem.usable_ram_bytes:
        return None
    return None if infeasibility_reason(problem) is not None else checkpoint_all(problem.graph)


class _Greedy:
    """Bisection over penalties, and over peaks if RAM is minimized; stores the best schedule."""

    def __init__(self, problem: Problem, until_s: float) -> None:
        self.problem = problem
        self.until_s = until_s
        """Time at which the search ends, on the clock of `now_s` [s]."""
        self.objective = PenalizedObjective(problem)
        self.best: PartialSchedule | None = None
        self.best_score = WORST

    def find_best(self) -> None:
        """Store in `best` the schedule with the smallest sufficient penalty, by bisection."""
        usable_bytes = self.problem.usable_ram_bytes
        penalty = 0.0
        if not self._try_repair(penalty, usable_bytes):
            penalty = math.inf
            if not (self.objective.is_limited and self._try_repair(penalty, usable_bytes)):
                return
            penalty = self._find_min_penalty(usable_bytes)
        if not self.problem.objective.is_sum:
            self._minimize_peak(penalty)

    def _find_min_penalty(self, limit_bytes: int) -> float:
        """Bisect the logarithm of the penalty for the smallest one that suffices, else inf."""
        low, high = -MAX_PENALTY_LOG2, MAX_PENALTY_LOG2
        penalty = math.inf
        for _ in range(N_PENALTIES):
            if now_s() > self.until_s:
                break
            middle = (low + high) / 2
            if self._try_repair(2.0**middle, limit_bytes):
                high, penalty = middle, 2.0**middle
            else:
                low = middle
        return penalty

    def _minimize_peak(self, penalty: float) -> None:
        """Bisect for the smallest peak at the prices of `penalty`; store the best schedule."""
        low = self.problem.floor.bytes
        for _ in range(N_PEAKS):
            high = int(self.best_score.value)
            if high <= low or now_s() > self.until_s:
                break
            middle = (low + high) // 2
            if not self._try_repair(penalty, middle):
                low = middle + 1

    def _try_repair(self, penalty: float, limit_bytes: int) -> bool:
        """Repair keep-all within `limit_bytes`, store a new best; return if all limits are met."""
        partial = self.objective.make_partial()
        repair = Repair(self.problem, partial, self.objective.prices(penalty), limit_bytes)
        repair.until_s = self.until_s if self.best is not None else math.inf
        started_s = now_s()
        if not repair.fit():
            return False
        repair.until_s = self.until_s
        if self.best is None:
            fitted_s = now_s()
            drop_s = DROP_TIME_RATIO * (fitted_s - started_s)
            repair.until_s = max(self.until_s, fitted_s + drop_s)
        repair.satisfy_constraints()
        repair.drop_unneeded()
        score = self.objective.score(partial)
        if score < self.best_score and score.excess == 0:
            self.best, self.best_score = partial, score
        return score.excess == 0
