"""The primal heuristic: answers repaired, a local search, and a restricted relaxation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from poetmodel.heuristics.neighbourhood import LargeNeighbourhoodSearch
from poetmodel.heuristics.partial_schedule import Restoration, restorations_of
from poetmodel.heuristics.penalties import Score
from poetmodel.solver.lazy.disaggregation import broken_stages, broken_steps
from poetmodel.solver.lazy.relaxation import AllowedDecisions, Relaxation, UsedDecisions
from poetmodel.solver.lazy.symmetry import solve_counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from poetmodel.model.aggregated import Grouping
    from poetmodel.solver.lazy.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxedAnswer:
    """A point of a relaxation, in terms of the graph: all that the primal heuristic needs."""

    grouping: Grouping
    """Rows that the relaxation enforces."""
    restorations: tuple[Restoration, ...]
    """What it brings back, disaggregated to stages."""
    used: UsedDecisions
    """Decisions that it uses, fractional ones included."""

    @classmethod
    def of(cls, relaxation: Relaxation, x: NDArray[Any], least: float) -> RelaxedAnswer:
        """Return a point as an answer that uses the decisions of at least `least`."""
        result = relaxation.disaggregate(x)
        return cls(
            grouping=relaxation.grouping,
            restorations=(
                *(Restoration(t, k, recompute=True) for t, k in result.recomputed),
                *(Restoration(t, i, recompute=False) for t, i in result.paged_in),
            ),
            used=relaxation.used(x, least),
        )


@dataclass(slots=True)
class PrimalHeuristic:
    """Looks for schedules: near answers of relaxations, and near the incumbent.

    Answers are disaggregated and repaired where they do not fit, and a local search goes on from
    the incumbent. Then the relaxation is restricted to the recomputations and page-ins that answers
    so far used, which makes it small. Rows that its own answers break are added to it alone, until
    one is valid. None of this touches the bound.
    """

    session: Session
    grouping: Grouping
    """Rows enforced here: those of the proof and its own."""
    allowed: AllowedDecisions = field(default_factory=AllowedDecisions)
    is_waited_for: Callable[[], bool] = lambda: False
    """Whether something better than a local search waits: it ends then."""
    neighbourhood: LargeNeighbourhoodSearch = field(init=False)
    idle_iterations_per_column: float = field(init=False)
    """Turns without gain after which the next local search ends, for each column."""
    restricted_s: float = field(init=False)
    """Time for the next restricted relaxation [s]."""
    solved_before: bool = False
    """Whether a restricted relaxation has been solved."""
    fruitless: int = 0
    """Restricted relaxations in a row that found nothing."""
    passed: int = 0
    """Answers since the last one."""

    def __post_init__(self) -> None:
        request, params = self.session.request, self.session.params
        self.idle_iterations_per_column = params.idle_iterations_per_column
        self.restricted_s = params.restricted_s
        self.neighbourhood = LargeNeighbourhoodSearch(self.session.problem, seed=request.seed)
        self.neighbourhood.until_s = request.started_s + request.time_limit_s

    def enforce(self, grouping: Grouping) -> None:
        """Enforce these rows here too."""
        self.grouping = self.grouping.add(tuple(grouping.stage_rows), tuple(grouping.step_rows))

    def run(self, answer: RelaxedAnswer, *, force: bool = False) -> None:
        """Search with one more answer.

        The restriction is not solved again where the answer uses nothing new, and more and more
        seldom while that finds nothing; `force` solves it all the same.
        """
        new = self.allowed.add(answer.used)
        self.repair(answer)
        self.passed += 1
        due = self.passed >= 2**self.fruitless
        wanted = "restriction" in self.session.params.heuristics
        if wanted and ((new and due) or force) and not self.session.done():
            self.passed = 0
            self.restrict(answer.grouping)

    # -- repair and local search -----------------------------------------------------------------

    def repair(self, answer: RelaxedAnswer) -> None:
        """Repair an answer where it does not fit, and offer it.

        While the gap is far from closed, a local search goes on from there.
        """
        if "repair" in self.session.params.heuristics:
            self.neighbourhood.consider(answer.restorations)
            self._offer()
        if self.session.bounds.gap() > self.session.params.small_gap_ratio:
            self.improve()

    def improve(self) -> None:
        """Search locally until nothing is gained for a while, and offer what was found."""
        session, neighbourhood, params = self.session, self.neighbourhood, self.session.params
        if "local_search" not in params.heuristics:
            return
        best, before = session.bounds.incumbent, neighbourhood.best
        if best is not None and (0.0, best.value) < before:
            before = Score(0.0, best.value)
            neighbourhood.consider(restorations_of(best.schedule))
        until_s = self._until_s(params.search_most_s)
        iterations = idle = 0
        most = max(1, int(self.idle_iterations_per_column * session.columns))
        while idle < most and not (session.done() or self.is_waited_for()):
            idle = 0 if neighbourhood.iterate() else idle + 1
            iterations += 1
            if iterations % params.iterations_per_offer == 0:
                self._offer()
            if session.request.elapsed_s() > until_s:
                break
        self._offer()
        factor = 2.0 if neighbourhood.best < before else 0.5
        self.idle_iterations_per_column = max(
            params.idle_iterations_per_column, factor * self.idle_iterations_per_column
        )

    def _until_s(self, most_s: float) -> float:
        """Return when to end what may take some time, or a quarter of the time left [s]."""
        request = self.session.request
        return request.elapsed_s() + min(most_s, request.remaining_s() / 4)

    def _offer(self) -> None:
        """Give the best schedule of the local search to the verifier, if it seems to be better."""
        best = self.session.bounds.incumbent
        if best is None or self.neighbourhood.best < (0.0, best.value):
            schedule = self.neighbourhood.schedule()
            if schedule is not None:
                self.session.offer(schedule)

    # -- restricted relaxation -------------------------------------------------------------------

    def restrict(self, grouping: Grouping) -> None:
        """Solve the restricted relaxation, with more rows as its answers break them."""
        bounds, params = self.session.bounds, self.session.params
        before = bounds.incumbent
        if before is not None:
            self.allowed.add_schedule(before.schedule)
        self.enforce(grouping)
        relaxation = self.session.build(self.grouping)
        most_s = params.search_most_s if before is None else self.restricted_s
        if bounds.gap() > params.wide_gap_ratio:
            again = self.solved_before and bounds.gap() > params.restricted_most_gap_ratio
            most_s = max(most_s, params.search_most_s if again else params.restricted_wide_s)
        self.solved_before = True
        self._solve_restricted(relaxation, self._until_s(most_s))
        self.fruitless += 1
        if bounds.incumbent is not before:
            self.fruitless = 0
            self.restricted_s = min(2 * self.restricted_s, params.search_most_s)

    def _solve_restricted(self, relaxation: Relaxation, until_s: float) -> None:
        session = self.session
        widened = False
        while not session.done() and session.request.elapsed_s() < until_s:
            form = relaxation.restricted(self.allowed)
            start = session.start_point(relaxation)
            if start is not None and (start > form.upper).any():
                start = None  # the incumbent does what is not allowed here
            raw = solve_counted(
                session,
                form,
                most_s=max(1.0, (until_s - session.request.elapsed_s()) / 2),
                targets=session.cutoff(relaxation),
                start=start,
            )
            if raw is None or raw.x is None:
                if widened or raw is None or session.bounds.incumbent is not None:
                    return
                widened = True
                self.allowed.widen(session.params.widened_stages)
                continue
            rows, steps = examine(session, relaxation, raw.x)
            if not rows and not steps:
                return
            self.grouping = self.grouping.add(rows, steps)
            relaxation = session.build(self.grouping)


def examine(
    session: Session, relaxation: Relaxation, x: NDArray[Any]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Disaggregate an answer; offer it where it keeps all rows, else return those that it breaks.

    With the peak minimized, an answer that is above the peak it claims may still be a good one.
    """
    result = relaxation.disaggregate(x)
    limit = relaxation.claimed_ram(x)
    rows = broken_stages(result.stage_loads(), limit)
    steps = [] if rows else broken_steps(result, limit)
    if not (rows or steps) or not session.problem.objective.is_sum:
        session.offer(result.schedule())
    grouping = relaxation.grouping
    return (
        [t for t in rows if t not in grouping.stage_rows],
        [step for step in steps if step not in grouping.step_rows],
    )
