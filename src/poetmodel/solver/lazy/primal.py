"""The primal heuristic: repair of the solutions of relaxations, and a local search."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from poetmodel.clock import now_s
from poetmodel.heuristics.greedy import add_rewarded_decisions
from poetmodel.heuristics.neighbourhood import LargeNeighbourhoodSearch
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.heuristics.penalties import Score
from poetmodel.heuristics.restorations import (
    PAGE_IN,
    RECOMPUTE,
    Restoration,
    list_restorations,
)
from poetmodel.model.grouping import coefficient_change_stages
from poetmodel.solver.lazy.disaggregation import violated_stages, violated_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from poetmodel.solver.lazy.relaxation import Relaxation
    from poetmodel.solver.lazy.session import Session


@dataclass(slots=True)
class PrimalHeuristic:
    """Searches for schedules near relaxed solutions and near the best; never changes the bound."""

    session: Session
    should_stop: Callable[[], bool] = lambda: False
    """Returns whether a local search must end: a new solution is available, or a worker runs."""
    max_repair_s: float = math.inf
    """Maximum time of one repair, unless the heuristic is due more [s]."""
    neighbourhood: LargeNeighbourhoodSearch = field(init=False)
    idle_iterations_per_column: float = field(init=False)
    """Iterations without a better schedule after which the next local search ends, for each column
    of the largest relaxation; at least one in all."""
    started_s: float = field(init=False, default_factory=now_s)
    spent_s: float = field(init=False, default=0.0)
    """Time that the heuristic has used or forfeited so far [s]; see `improve`."""

    def __post_init__(self) -> None:
        session = self.session
        self.idle_iterations_per_column = session.policy.idle_iterations_per_column
        self.neighbourhood = LargeNeighbourhoodSearch(
            session.search.problem, seed=session.search.request.seed
        )

    @property
    def due_s(self) -> float:
        """Time that is due to the heuristic and not yet spent [s]; negative if it spent more."""
        fraction = self.session.policy.search_time_fraction(self.session.search.gap())
        return fraction * (now_s() - self.started_s) - self.spent_s

    def repair(self, solution: Sequence[Restoration], *, search_locally: bool = True) -> None:
        """Repair a relaxation's solution, search locally, and offer the best schedule."""
        neighbourhood, started_s = self.neighbourhood, now_s()
        if "repair" in self.session.policy.heuristics:
            neighbourhood.until_s = self._end_s(max(self.max_repair_s, self.due_s))
            neighbourhood.consider(solution)
            self._offer()
        self.spent_s += now_s() - started_s
        if search_locally and self.session.search.gap() > self.session.policy.small_gap_ratio:
            self.improve()

    def improve(self) -> None:
        """Search around the best schedule until iterations bring no better one; offer the best."""
        session, neighbourhood, started_s = self.session, self.neighbourhood, now_s()
        if "local_search" not in session.policy.heuristics:
            return
        max_s = max(session.policy.search_s, self.due_s)
        until_s = self._end_s(min(max_s, session.search.request.remaining_s() / 4))
        neighbourhood.until_s = until_s
        incumbent, score_before = session.search.best, neighbourhood.best_score
        if incumbent is not None and (0.0, incumbent.value) < score_before:
            score_before = Score(0.0, incumbent.value)
            neighbourhood.consider(
                list_restorations(session.search.problem.graph, incumbent.schedule)
            )
        n_iterations = n_idle = 0
        max_n_idle = max(1, int(self.idle_iterations_per_column * session.max_columns))
        while n_idle < max_n_idle and not (session.search.is_done() or self.should_stop()):
            n_idle = 0 if neighbourhood.iterate() else n_idle + 1
            n_iterations += 1
            if n_iterations % session.policy.iterations_per_offer == 0:
                self._offer()
            if now_s() > until_s:
                break
        self._offer()
        factor = 2.0 if neighbourhood.best_score < score_before else 0.5
        self.idle_iterations_per_column = max(
            session.policy.idle_iterations_per_column, factor * self.idle_iterations_per_column
        )
        # If the search ended with idle iterations, its maximum time counts as spent.
        self.spent_s += max(now_s() - started_s, max_s if n_idle >= max_n_idle else 0.0)

    def _end_s(self, max_s: float) -> float:
        """Return the end of a search of at most `max_s`, on the clock of `now_s` [s]."""
        return now_s() + min(max_s, self.session.search.request.remaining_s())

    def _offer(self) -> None:
        """Offer the best schedule that meets all limits, if it beats the incumbent."""
        incumbent = self.session.search.best
        if incumbent is None or self.neighbourhood.best_score < (0.0, incumbent.value):
            schedule = self.neighbourhood.schedule()
            if schedule is not None:
                self.session.search.offer(schedule)


class ViolatedRows(NamedTuple):
    """The rows that a solution violates and its relaxation does not enforce."""

    stages: list[int]
    """The worst stage of each sequence of stages with violated rows, the worst first."""
    steps: list[tuple[int, int]]
    """The worst violated step of each stage, by stage; empty if a stage row is violated."""
    user_limits: dict[int, frozenset[int]]
    """Violated per-stage constraints: the position in the problem's `stage_limits`, with the
    `coefficient_change_stages` of the constraint."""

    def __bool__(self) -> bool:
        return any(self)


def offer_solution(
    session: Session,
    relaxation: Relaxation,
    x: NDArray[Any],
    restorations: Sequence[Restoration],
) -> ViolatedRows:
    """Offer the schedule of `restorations` if it violates no memory row; return violated rows.

    A schedule that violates a user-defined limit is offered, too, and every schedule if the peak is
    minimized: it may be good although it exceeds the claimed peak. The rows are the worst that the
    relaxation does not enforce; step rows only if no stage row is violated.
    """
    problem = session.search.problem
    partial = PartialSchedule(problem.graph, restorations, working_graph=problem.working_graph)
    limit_bytes = relaxation.claimed_ram_bytes(x)
    stages = violated_stages(partial.row_bytes.tolist(), limit_bytes)
    steps = [] if stages else violated_steps(partial, limit_bytes)
    if not (stages or steps) or not problem.objective.is_sum:
        schedule = partial.schedule()
        if session.penalized_objective is not None:
            rewarded = relaxation.rewarded_decisions(x, restorations)
            schedule = add_rewarded_decisions(session.penalized_objective, restorations, rewarded)
        session.search.offer(schedule)
    grouping = relaxation.grouping
    return ViolatedRows(
        [t for t in stages if t not in grouping.stage_rows],
        [step for step in steps if step not in grouping.step_rows],
        _violated_user_limits(relaxation, restorations),
    )


def _violated_user_limits(
    relaxation: Relaxation, restorations: Sequence[Restoration]
) -> dict[int, frozenset[int]]:
    """Return where groups must end for violated, unenforced `stage_limits`, by their position."""
    limits = relaxation.problem.stage_limits
    if not limits:
        return {}
    names = {RECOMPUTE: "recomputed", PAGE_IN: "paged_in"}
    decisions = {(names.get(kind), (stage, item)) for stage, item, kind in restorations}
    return {
        position: coefficient_change_stages(row)
        for position, row in enumerate(limits)
        if position not in relaxation.grouping.user_rows
        and not row.is_satisfied(decisions.__contains__)
    }
