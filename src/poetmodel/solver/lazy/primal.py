"""The primal heuristic: answers of relaxations repaired, and a local search."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poetmodel.clock import now_s
from poetmodel.heuristics.greedy import with_wanted
from poetmodel.heuristics.neighbourhood import LargeNeighbourhoodSearch
from poetmodel.heuristics.penalties import Score
from poetmodel.heuristics.restorations import restorations_of
from poetmodel.model.grouping import change_stages
from poetmodel.solver.lazy.disaggregation import Disaggregation, broken_stages, broken_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from poetmodel.schedule import Schedule
    from poetmodel.solver.lazy.relaxation import Relaxation
    from poetmodel.solver.lazy.session import Session

REPAIR_S: Final = 1.0
"""Longest repair of one answer that the proof waits for, unless more is due to the search [s]."""
SEARCH_S: Final = 3.0
"""Longest local search after one answer [s]."""
IDLE_ITERATIONS_PER_COLUMN: Final = 0.01
"""Iterations without gain after which the first local search ends, for each column of the largest
relaxation. The next has twice as many after one that found something, else half as many, but never
fewer than the first."""
ITERATIONS_PER_OFFER: Final = 100
"""After how many iterations of a local search what it has found goes to the verifier."""


@dataclass(slots=True)
class PrimalHeuristic:
    """Looks for schedules: near answers of relaxations, and near the incumbent.

    Answers are disaggregated and repaired where they do not fit, and a large neighbourhood search
    goes on from the incumbent. None of this touches the bound.
    """

    session: Session
    is_waited_for: Callable[[], bool] = lambda: False
    """Whether something better than a local search waits: it ends then."""
    repair_most_s: float = math.inf
    """Longest repair of one answer [s]."""
    neighbourhood: LargeNeighbourhoodSearch = field(init=False)
    idle_iterations_per_column: float = IDLE_ITERATIONS_PER_COLUMN
    """Turns without gain after which the next local search ends, for each column."""
    begun_s: float = field(init=False, default_factory=now_s)
    spent_s: float = field(init=False, default=0.0)
    """How long it has run [s]."""

    def __post_init__(self) -> None:
        session = self.session
        self.neighbourhood = LargeNeighbourhoodSearch(session.problem, seed=session.request.seed)

    @property
    def due_s(self) -> float:
        """What is left of its share of the time [s]."""
        share = self.session.params.search_share(self.session.bounds.gap())
        return share * (now_s() - self.begun_s) - self.spent_s

    def repair(self, answer: Schedule, *, locally: bool = True) -> None:
        """Repair an answer of a relaxation where it does not fit, and offer it.

        While the gap is far from closed, a local search goes on from there, if `locally`.
        """
        neighbourhood, begun_s = self.neighbourhood, now_s()
        if "repair" in self.session.params.heuristics:
            neighbourhood.until_s = self._end_s(max(self.repair_most_s, self.due_s))
            neighbourhood.consider(restorations_of(self.session.problem.graph, answer))
            self._offer()
        self.spent_s += now_s() - begun_s
        if locally and self.session.bounds.gap() > self.session.params.small_gap_ratio:
            self.improve()

    def improve(self) -> None:
        """Search locally until nothing is gained for a while, and offer what was found."""
        session, neighbourhood, begun_s = self.session, self.neighbourhood, now_s()
        if "local_search" not in session.params.heuristics:
            return
        most_s = max(SEARCH_S, self.due_s)
        until_s = self._end_s(min(most_s, session.request.remaining_s() / 4))
        neighbourhood.until_s = until_s
        best, before = session.bounds.incumbent, neighbourhood.best
        if best is not None and (0.0, best.value) < before:
            before = Score(0.0, best.value)
            neighbourhood.consider(restorations_of(session.problem.graph, best.schedule))
        iterations = idle = 0
        most = max(1, int(self.idle_iterations_per_column * session.columns))
        while idle < most and not (session.done() or self.is_waited_for()):
            idle = 0 if neighbourhood.iterate() else idle + 1
            iterations += 1
            if iterations % ITERATIONS_PER_OFFER == 0:
                self._offer()
            if now_s() > until_s:
                break
        self._offer()
        factor = 2.0 if neighbourhood.best < before else 0.5
        self.idle_iterations_per_column = max(
            IDLE_ITERATIONS_PER_COLUMN, factor * self.idle_iterations_per_column
        )
        # What it did not take because nothing was gained is not due later.
        self.spent_s += max(now_s() - begun_s, most_s if idle >= most else 0.0)

    def _end_s(self, most_s: float) -> float:
        """Return when something ends that may take so long, on the clock of `now_s` [s]."""
        return now_s() + min(most_s, self.session.request.remaining_s())

    def _offer(self) -> None:
        """Give the best schedule of the local search to the verifier, if it seems to be better."""
        best = self.session.bounds.incumbent
        if best is None or self.neighbourhood.best < (0.0, best.value):
            schedule = self.neighbourhood.schedule()
            if schedule is not None:
                self.session.offer(schedule)


class BrokenRows(NamedTuple):
    """The rows that an answer breaks and its relaxation does not enforce."""

    stages: list[int]
    """Stages, the worst first."""
    steps: list[tuple[int, int]]
    """Steps, if no row of a stage is broken."""
    own: dict[int, frozenset[int]]
    """Over stages, by position among those of the problem, with their cuts."""

    def __bool__(self) -> bool:
        return any(self)


def examine(session: Session, relaxation: Relaxation, x: NDArray[Any]) -> BrokenRows:
    """Disaggregate an answer; offer it where it keeps all rows; return those that it breaks.

    With the peak minimized, an answer that is above the peak it claims may still be a good one.
    """
    result = relaxation.disaggregate(x)
    limit = relaxation.claimed_ram(x)
    stages = broken_stages(result.stage_loads(), limit)
    steps = [] if stages else broken_steps(result, limit)
    if not (stages or steps) or not session.problem.objective.is_sum:
        schedule = result.schedule()
        if session.own is not None:
            schedule = with_wanted(session.own, schedule, relaxation.wanted(x, result))
        session.offer(schedule)
    grouping = relaxation.grouping
    return BrokenRows(
        [t for t in stages if t not in grouping.stage_rows],
        [step for step in steps if step not in grouping.step_rows],
        _broken_own_rows(relaxation, result),
    )


def _broken_own_rows(relaxation: Relaxation, result: Disaggregation) -> dict[int, frozenset[int]]:
    """Return the rows over stages that an answer breaks on stages."""
    stated = relaxation.problem.stage_limits
    if not stated:
        return {}
    chosen = {("recomputed", index) for index in result.recomputed}
    chosen.update(("paged_in", index) for index in result.paged_in)
    return {
        number: change_stages(row)
        for number, row in enumerate(stated)
        if number not in relaxation.grouping.own_rows and not row.is_satisfied(chosen.__contains__)
    }
