"""The primal heuristic: repair of relaxations' solutions, and a local search."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poetmodel.clock import now_s
from poetmodel.heuristics.greedy import add_rewarded
from poetmodel.heuristics.neighbourhood import LargeNeighbourhoodSearch
from poetmodel.heuristics.penalties import Score
from poetmodel.heuristics.restorations import restorations_of
from poetmodel.model.grouping import coefficient_change_stages
from poetmodel.solver.lazy.disaggregation import Disaggregation, broken_stages, broken_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from poetmodel.schedule import Schedule
    from poetmodel.solver.lazy.relaxation import Relaxation
    from poetmodel.solver.lazy.session import Session

REPAIR_S: Final = 1.0
"""Maximum time of one repair in the proof's thread, unless the heuristic is due more [s]."""
SEARCH_S: Final = 3.0
"""Maximum time of the local search after one solution [s]."""
IDLE_ITERATIONS_PER_COLUMN: Final = 0.01
"""Iterations without gain after which the first local search ends, for each column of the largest
relaxation. The limit is doubled after a search that found a better schedule, and halved after
others, but never below this."""
ITERATIONS_PER_OFFER: Final = 100
"""Number of iterations of a local search after which its best schedule is verified."""


@dataclass(slots=True)
class PrimalHeuristic:
    """Searches for schedules near the solutions of relaxations and near the incumbent.

    Solutions are disaggregated and repaired if they violate limits, and a large neighbourhood
    search continues from the incumbent. The heuristic never changes the bound.
    """

    session: Session
    has_new_solution: Callable[[], bool] = lambda: False
    """Returns whether a new solution of a relaxation is available, which ends a local search."""
    max_repair_s: float = math.inf
    """Maximum time of one repair [s]."""
    neighbourhood: LargeNeighbourhoodSearch = field(init=False)
    idle_iterations_per_column: float = IDLE_ITERATIONS_PER_COLUMN
    """Iterations without gain after which the next local search ends, for each column."""
    started_s: float = field(init=False, default_factory=now_s)
    spent_s: float = field(init=False, default=0.0)
    """Execution time so far [s]."""

    def __post_init__(self) -> None:
        session = self.session
        self.neighbourhood = LargeNeighbourhoodSearch(session.problem, seed=session.request.seed)

    @property
    def due_s(self) -> float:
        """Time that is due to the heuristic and not yet spent [s]."""
        fraction = self.session.params.search_time_fraction(self.session.bounds.gap())
        return fraction * (now_s() - self.started_s) - self.spent_s

    def repair(self, solution: Schedule, *, locally: bool = True) -> None:
        """Repair the schedule of a relaxation's solution, and offer the result to the session.

        While the gap is not small, a local search follows if `locally`.
        """
        neighbourhood, started_s = self.neighbourhood, now_s()
        if "repair" in self.session.params.heuristics:
            neighbourhood.until_s = self._deadline_s(max(self.max_repair_s, self.due_s))
            neighbourhood.consider(restorations_of(self.session.problem.graph, solution))
            self._offer()
        self.spent_s += now_s() - started_s
        if locally and self.session.bounds.gap() > self.session.params.small_gap_ratio:
            self.improve()

    def improve(self) -> None:
        """Search locally until several iterations gain nothing, and offer the best schedule."""
        session, neighbourhood, started_s = self.session, self.neighbourhood, now_s()
        if "local_search" not in session.params.heuristics:
            return
        max_s = max(SEARCH_S, self.due_s)
        until_s = self._deadline_s(min(max_s, session.request.remaining_s() / 4))
        neighbourhood.until_s = until_s
        incumbent, score_before = session.bounds.incumbent, neighbourhood.best
        if incumbent is not None and (0.0, incumbent.value) < score_before:
            score_before = Score(0.0, incumbent.value)
            neighbourhood.consider(restorations_of(session.problem.graph, incumbent.schedule))
        iterations = n_idle = 0
        max_n_idle = max(1, int(self.idle_iterations_per_column * session.columns))
        while n_idle < max_n_idle and not (session.done() or self.has_new_solution()):
            n_idle = 0 if neighbourhood.iterate() else n_idle + 1
            iterations += 1
            if iterations % ITERATIONS_PER_OFFER == 0:
                self._offer()
            if now_s() > until_s:
                break
        self._offer()
        factor = 2.0 if neighbourhood.best < score_before else 0.5
        self.idle_iterations_per_column = max(
            IDLE_ITERATIONS_PER_COLUMN, factor * self.idle_iterations_per_column
        )
        # After an idle end, the rest of the due time counts as spent.
        self.spent_s += max(now_s() - started_s, max_s if n_idle >= max_n_idle else 0.0)

    def _deadline_s(self, max_s: float) -> float:
        """Return the time on the clock of `now_s` at which a phase of at most `max_s` ends [s]."""
        return now_s() + min(max_s, self.session.request.remaining_s())

    def _offer(self) -> None:
        """Offer the best schedule of the local search to the session if its value is better."""
        best = self.session.bounds.incumbent
        if best is None or self.neighbourhood.best < (0.0, best.value):
            schedule = self.neighbourhood.schedule()
            if schedule is not None:
                self.session.offer(schedule)


class BrokenRows(NamedTuple):
    """The rows that a solution violates and its relaxation does not enforce."""

    stages: list[int]
    """Stages, the worst violation first."""
    steps: list[tuple[int, int]]
    """Steps, if no row of a stage is violated."""
    own: dict[int, frozenset[int]]
    """User-defined constraints by stage: the position in the problem, with the stages to
    separate."""

    def __bool__(self) -> bool:
        return any(self)


def offer_solution(session: Session, relaxation: Relaxation, x: NDArray[Any]) -> BrokenRows:
    """Convert a solution to a schedule, and offer it to the session if it meets all rows.

    Return the violated rows. If the peak is minimized, the schedule is offered in any case: it may
    be good although it exceeds the peak that the solution claims.
    """
    result = relaxation.disaggregate(x)
    limit = relaxation.claimed_ram(x)
    stages = broken_stages(result.stage_loads(), limit)
    steps = [] if stages else broken_steps(result, limit)
    if not (stages or steps) or not session.problem.objective.is_sum:
        schedule = result.schedule()
        if session.own is not None:
            schedule = add_rewarded(session.own, schedule, relaxation.rewarded_decisions(x, result))
        session.offer(schedule)
    grouping = relaxation.grouping
    return BrokenRows(
        [t for t in stages if t not in grouping.stage_rows],
        [step for step in steps if step not in grouping.step_rows],
        _broken_own_rows(relaxation, result),
    )


def _broken_own_rows(relaxation: Relaxation, result: Disaggregation) -> dict[int, frozenset[int]]:
    """Return the user-defined constraints by stage that a solution violates, with their stages."""
    limits = relaxation.problem.stage_limits
    if not limits:
        return {}
    decisions = {("recomputed", index) for index in result.recomputed}
    decisions.update(("paged_in", index) for index in result.paged_in)
    return {
        position: coefficient_change_stages(row)
        for position, row in enumerate(limits)
        if position not in relaxation.grouping.user_rows
        and not row.is_satisfied(decisions.__contains__)
    }
