"""The search for schedules beside the proof: answers mended, local search, and a restriction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from poetmodel.heuristics.neighbourhood import LargeNeighbourhoodSearch
from poetmodel.heuristics.partial_schedule import Restoration, restorations_of
from poetmodel.heuristics.penalties import Score
from poetmodel.solver.lazy.disaggregation import place
from poetmodel.solver.lazy.relaxation import Allowed
from poetmodel.solver.lazy.rows import broken_stages, broken_steps, claimed_ram
from poetmodel.solver.lazy.session import FAR, WIDE
from poetmodel.solver.lazy.symmetry import solve_counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from poetmodel.model.grouping import Grouping
    from poetmodel.solver.lazy.relaxation import Relaxation, Used
    from poetmodel.solver.lazy.session import Session

LONGEST_S: Final = 10.0
"""Longest local search, and longest restricted one, after one answer [s]."""
RESTRICTED_S: Final = 2.0
"""Time for the first restricted relaxation [s]; twice as much after one that led to something."""
WIDE_S: Final = 5.0
"""Least time for one while the gap is wide [s]."""
VAGUE: Final = 0.05
"""Gap above which each but the first has the longest time: where the proof has not come near by
then, it is the schedule that is far from the best one."""
USED: Final = 0.01
"""Least value at which a fractional answer counts as using a decision."""
WIDER: Final = 2
"""How many stages earlier and later everything is allowed when nothing was found."""
PATIENCE: Final = 0.01
"""Turns without gain after which the first local search ends, for each column of the largest
relaxation so far. The next has twice as many after one that found something, else half as many, but
never fewer than the first."""
TURNS: Final = 100
"""After how many turns of a local search what it has found goes to the verifier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A point of a relaxation, in terms of the graph: all that the search for schedules needs."""

    grouping: Grouping
    """Rows that the relaxation enforces."""
    restorations: tuple[Restoration, ...]
    """What it brings back, placed on stages."""
    used: Used
    """Decisions that it uses, fractional ones included."""

    @classmethod
    def of(cls, relaxation: Relaxation, x: NDArray[Any]) -> Answer:
        """Return a point of a relaxation as an answer."""
        graph = relaxation.problem.graph
        placement = place(graph, relaxation.grouping, relaxation.events, relaxation.decisions(x))
        return cls(
            grouping=relaxation.grouping,
            restorations=(
                *(Restoration(t, k, recompute=True) for t, k in placement.recomputed),
                *(Restoration(t, i, recompute=False) for t, i in placement.paged_in),
            ),
            used=relaxation.used(x, USED),
        )


@dataclass(slots=True)
class ScheduleSearch:
    """Looks for schedules: near answers of relaxations, and near the best schedule.

    Answers are placed on stages and mended where they do not fit, and a local search goes on from
    the best schedule. Then the relaxation is restricted to the recomputations and page-ins that
    answers so far used, which makes it small. Rows that its placed answers break are added to it
    alone, until one is valid.
    """

    session: Session
    grouping: Grouping
    """Rows enforced here: those of the proof and its own."""
    allowed: Allowed = field(default_factory=Allowed)
    hurry: Callable[[], bool] = lambda: False
    """Whether something better than a local search waits: it ends then."""
    neighbourhood: LargeNeighbourhoodSearch = field(init=False)
    patience: float = PATIENCE
    restricted_s: float = RESTRICTED_S
    """Time for the next restricted relaxation [s]."""
    again: bool = False
    """Whether a restricted relaxation has been solved before."""
    fruitless: int = 0
    """Restricted relaxations in a row that found nothing."""
    passed: int = 0
    """Answers since the last one."""

    def __post_init__(self) -> None:
        request = self.session.request
        self.neighbourhood = LargeNeighbourhoodSearch(self.session.problem, seed=request.seed)
        self.neighbourhood.until_s = request.started_s + request.time_limit_s

    def run(self, answer: Answer, *, force: bool = False) -> None:
        """Search with what one more answer used.

        The restriction is not solved again where the answer used nothing new, and more and more
        seldom while that finds nothing.
        """
        new = self.allowed.add(answer.used)
        self.glance(answer)
        self.passed += 1
        due = self.passed >= 2**self.fruitless
        if ((new and due) or force) and not self.session.done():
            self.passed = 0
            self._restrict(answer.grouping)

    def glance(self, answer: Answer) -> None:
        """Mend an answer where it does not fit, and offer it.

        While the gap is far from closed, a local search goes on from there.
        """
        self.neighbourhood.consider(answer.restorations)
        self._offer()
        if self._is_far():
            self.improve()

    def enforce(self, grouping: Grouping) -> None:
        """Enforce these rows here too."""
        self.grouping = self.grouping.add(tuple(grouping.stage_rows), tuple(grouping.step_rows))

    def _is_far(self) -> bool:
        return self.session.gap() > FAR

    def improve(self) -> None:
        """Search locally until nothing is gained for a while, and offer what was found."""
        session, neighbourhood = self.session, self.neighbourhood
        best, before = session.best, neighbourhood.best
        if best is not None and (0.0, best.value) < before:
            before = Score(0.0, best.value)
            neighbourhood.consider(restorations_of(best.schedule))
        until = session.request.elapsed_s() + min(LONGEST_S, session.request.remaining_s() / 4)
        turns = 0
        most = max(1, int(self.patience * session.columns))
        idle = 0
        while idle < most and not (session.done() or self.hurry()):
            idle = 0 if neighbourhood.iterate() else idle + 1
            turns += 1
            if turns % TURNS == 0:
                self._offer()
            if session.request.elapsed_s() > until:
                break
        self._offer()
        factor = 2.0 if neighbourhood.best < before else 0.5
        self.patience = max(PATIENCE, factor * self.patience)

    def _offer(self) -> None:
        """Give the best schedule of the local search to the verifier, if it seems to be better."""
        best = self.session.best
        if best is None or self.neighbourhood.best < (0.0, best.value):
            schedule = self.neighbourhood.schedule()
            if schedule is not None:
                self.session.offer(schedule)

    def _restrict(self, grouping: Grouping) -> None:
        """Solve the restricted relaxation, with more rows as its answers break them."""
        session = self.session
        if session.best is not None:
            self.allowed.add_schedule(session.best.schedule)
        self.enforce(grouping)
        relaxation = session.build(self.grouping)
        before = session.best
        most_s = LONGEST_S if before is None else self.restricted_s
        if session.gap() > WIDE:
            most_s = max(most_s, LONGEST_S if self.again and session.gap() > VAGUE else WIDE_S)
        self.again = True
        until = session.request.elapsed_s() + min(most_s, session.request.remaining_s() / 4)
        self._solve_restricted(relaxation, until)
        self.fruitless += 1
        if session.best is not before:
            self.fruitless = 0
            self.restricted_s = min(2 * self.restricted_s, LONGEST_S)

    def _solve_restricted(self, relaxation: Relaxation, until: float) -> None:
        session = self.session
        widened = False
        while not session.done() and session.request.elapsed_s() < until:
            form = relaxation.restricted(self.allowed)
            start = start_point(session, relaxation)
            if start is not None and (start > form.upper).any():
                start = None  # the best schedule does what is not allowed here
            raw = solve_counted(
                session,
                form,
                most_s=max(1.0, (until - session.request.elapsed_s()) / 2),
                targets=session.cutoff(relaxation),
                start=start,
            )
            if raw is None or raw.x is None:
                if widened or raw is None or session.best is not None:
                    return
                widened = True
                self.allowed.widen(WIDER)
                continue
            rows, steps = examine(session, relaxation, raw.x)
            if not rows and not steps:
                return
            self.grouping = self.grouping.add(rows, steps)
            relaxation = session.build(self.grouping)


def start_point(session: Session, relaxation: Relaxation) -> NDArray[Any] | None:
    """Return the best schedule as a point of a relaxation, if there is one and it has room."""
    best = session.best
    return None if best is None else relaxation.start(best.schedule)


def examine(
    session: Session, relaxation: Relaxation, x: NDArray[Any]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Place an answer; offer it where it keeps all rows, else return those that it breaks.

    With the peak minimized, an answer that is above the peak it claims may still be a good one.
    """
    placement = place(
        session.problem.graph, relaxation.grouping, relaxation.events, relaxation.decisions(x)
    )
    limit = claimed_ram(relaxation, x)
    rows = broken_stages(placement.stage_loads(), limit)
    steps = [] if rows else broken_steps(placement, limit)
    if not (rows or steps) or not session.problem.objective.is_sum:
        session.offer(placement.schedule())
    grouping = relaxation.grouping
    return (
        [t for t in rows if t not in grouping.stage_rows],
        [step for step in steps if step not in grouping.step_rows],
    )
