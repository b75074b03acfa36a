"""Row generation: enforce few memory rows, solve, disaggregate, verify, add rows, and repeat.

Every round solves a relaxation of the problem, so its proven bound is a lower bound of the problem.
The value of every disaggregated schedule that the verifier accepts is an upper bound.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from poetmodel.backends.protocol import BackendProgress, RawSolution, SolverStatus
from poetmodel.clock import limit_time
from poetmodel.errors import TimeLimitError, TooLargeError
from poetmodel.result import Termination
from poetmodel.solver.covers import add_covers, limit_rows
from poetmodel.solver.lazy.linear import add_cuts, add_rows
from poetmodel.solver.lazy.primal import (
    PrimalHeuristic,
    ViolatedRows,
    offer_solution,
)
from poetmodel.solver.lazy.symmetry import solve_with_counts
from poetmodel.solver.request import GRACE_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from poetmodel.heuristics.restorations import Restoration
    from poetmodel.model.grouping import Grouping
    from poetmodel.solver.lazy.primal_worker import PrimalWorker
    from poetmodel.solver.lazy.relaxation import Relaxation
    from poetmodel.solver.lazy.session import Session

_COMPLETED: Final = frozenset({SolverStatus.OPTIMAL, SolverStatus.OBJECTIVE_STOP})
"""Statuses with a solution after which the same relaxation needs no further solve."""


class RowGeneration:
    """The rounds of one session, which begin with the rows of a grouping."""

    def __init__(self, session: Session, grouping: Grouping) -> None:
        self.session = session
        self.grouping = grouping
        self.primal = PrimalHeuristic(session, max_repair_s=session.policy.repair_s)
        self.worker: PrimalWorker | None = None
        self.n_rounds = 0
        """Number of integer solves so far."""
        self._n_linear_solutions = 0
        self._min_solve_s = session.policy.min_solve_s
        """Minimum time limit of the next integer solve [s]."""
        self._last_gain_s = 0.0
        """Time at which the bound, the incumbent or the solution of the integer solve last
        improved, after the request [s]."""
        self._max_root_idle_s = math.inf
        """Time without such an improvement after which the integer solve ends if it is still at its
        root [s]."""
        self._bound_before_rows = float("-inf")
        """The bound when rows were last added; minus infinity before."""

    def execute_rounds(self) -> bool:
        """Repeat rounds until the search is done or a round has no effect.

        Linear relaxations come first. Returns whether it is proved that no schedule exists.
        """
        search = self.session.search
        with self._limit_execution():
            relaxation = self._first_relaxation()
            if relaxation is None:
                return True
            while not search.is_done():
                known_before = search.best_known()
                raw = self._solve_relaxation(relaxation)
                if raw is None:
                    break  # the time limit has passed, or the search was stopped
                if raw.is_infeasible or raw.status == SolverStatus.CUTOFF:
                    return self._is_infeasible()
                if raw.x is None:
                    self._search_longer(raw)
                    continue
                violated_rows = self._offer_and_improve(relaxation, raw.x)
                if violated_rows:
                    relaxation = self._refine(relaxation, raw, violated_rows)
                elif self._add_covers(relaxation, raw.x):
                    continue
                elif raw.status in _COMPLETED and search.best_known() == known_before:
                    search.stall()  # further rounds would change neither bound nor incumbent
                else:
                    self._min_solve_s *= 2
        return False

    @contextmanager
    def _limit_execution(self) -> Iterator[None]:
        """Limit the context's time, setting `stop_reason`; run any primal worker in parallel."""
        session, search = self.session, self.session.search
        try:
            with limit_time(search.request.remaining_s() + GRACE_S):
                if search.request.threads == 1:
                    yield
                    return
                from poetmodel.solver.lazy.primal_worker import PrimalWorker

                with PrimalWorker(session) as self.worker:
                    self.primal.should_stop = self.worker.running_event.is_set
                    yield
        except TimeLimitError:
            search.stop_reason = search.stop_reason or Termination.TIME_LIMIT
        except TooLargeError:
            search.stop_reason = search.stop_reason or Termination.STALLED
        if self.worker is not None:
            self.worker.raise_error()

    # -- relaxations -----------------------------------------------------------------------------

    def _first_relaxation(self) -> Relaxation | None:
        """Solve linear relaxations; return an integer one with their rows, None if infeasible."""
        session = self.session
        callbacks = self._search_from_linear, self._search_if_due
        relaxation, solution = add_rows(session, self.grouping, *callbacks)
        self.grouping = relaxation.grouping
        if solution.x is not None and not session.search.is_done():
            self._repair_and_search(relaxation.to_restorations(solution.x))
        return None if solution.is_infeasible else relaxation

    def _solve_relaxation(self, relaxation: Relaxation) -> RawSolution | None:
        """Solve an integer relaxation below any cutoff, raise the bound; None if out of time."""
        session, policy = self.session, self.session.policy
        extra_limits = session.cutoff_limits(relaxation)
        gap = session.search.request.gap / 2
        if session.search.bound > 0 and gap < 1:
            extra_limits["objective_stop"] = session.search.bound / (1 - gap) / relaxation.unit
        remaining_s, time_ratio, self._max_root_idle_s = (
            session.search.request.remaining_s(),
            1.0,
            math.inf,
        )
        if self._has_wide_gap():
            time_ratio = policy.solve_time_fraction(session.search.gap())
            self._max_root_idle_s = max(
                self._min_solve_s, policy.idle_root_time_ratio * remaining_s
            )
        self._last_gain_s = session.search.request.elapsed_s()
        self.n_rounds += 1
        raw = solve_with_counts(
            session,
            relaxation.form_with_all_cuts(),
            max_s=max(self._min_solve_s, remaining_s * time_ratio),
            extra_limits=extra_limits,
            start=session.start_point(relaxation),
            progress_callback=lambda progress: self._handle_progress(relaxation, progress),
        )
        if raw is not None and raw.bound is not None:
            session.search.prove(session.to_problem_bound(relaxation, raw.bound))
        return raw

    def _handle_progress(self, relaxation: Relaxation, progress: BackendProgress) -> bool:
        """Raise the bound and offer better solutions during an integer solve; False stops it."""
        session, best_known_before = self.session, self.session.search.best_known()
        if progress.bound is not None:
            session.search.prove(session.to_problem_bound(relaxation, progress.bound))
        incumbent = session.search.best
        if (
            progress.x is not None
            and progress.incumbent is not None
            and (incumbent is None or progress.incumbent * relaxation.unit < incumbent.value)
        ):
            restorations = relaxation.to_restorations(progress.x)
            offer_solution(session, relaxation, progress.x, restorations)
            repairs_solutions = "repair_on_the_way" in session.policy.heuristics
            if (
                repairs_solutions
                and session.search.best is incumbent
                and not session.search.is_done()
            ):
                self._repair_and_search(restorations, search_locally=False)
        if progress.x is not None or session.search.best_known() != best_known_before:
            self._last_gain_s = session.search.request.elapsed_s()
        return not (session.search.is_done() or self._is_idle_at_root(progress))

    def _is_idle_at_root(self, progress: BackendProgress) -> bool:
        """Return whether the solve is at its root, without a gain for over `_max_root_idle_s`."""
        idle_s = self.session.search.request.elapsed_s() - self._last_gain_s
        return progress.nodes is not None and progress.nodes <= 1 and idle_s > self._max_root_idle_s

    def _is_infeasible(self) -> bool:
        """Return whether an infeasible relaxation, without a cutoff, proves infeasibility."""
        search = self.session.search
        return search.upper_value() is None and search.stop_reason is None

    # -- rows and cuts ---------------------------------------------------------------------------

    def _refine(
        self, relaxation: Relaxation, raw: RawSolution, violated_rows: ViolatedRows
    ) -> Relaxation:
        """Return a relaxation that also enforces some of `violated_rows`, with cuts."""
        session = self.session
        if session.search.is_done():
            return relaxation
        is_easy = raw.status in _COMPLETED and raw.nodes is not None and raw.nodes <= 1
        max_rows = self._max_rows_to_add(relaxation.grouping.n_groups, is_easy=is_easy)
        self.grouping = relaxation.grouping.with_rows(
            violated_rows.stages[:max_rows],
            violated_rows.steps[:max_rows],
            violated_rows.user_limits,
        )
        finer_relaxation = session.build_relaxation(self.grouping, relaxation)
        if not session.search.is_done():
            add_cuts(session, finer_relaxation)
        return finer_relaxation

    def _max_rows_to_add(self, n_groups: int, *, is_easy: bool) -> int | None:
        """Return the row maximum, low if the bound rose since the last call; None for all rows."""
        policy, bound = self.session.policy, self.session.search.bound
        gain, self._bound_before_rows = bound - self._bound_before_rows, bound
        if gain > policy.single_row_gain_ratio * bound:
            max_rows = 1
        elif self._has_wide_gap():
            max_rows = policy.wide_gap_rows
        elif gain > policy.single_row_gain_ratio / 2 * bound:
            max_rows = policy.few_rows
        else:
            return None
        return max(max_rows, int(policy.easy_growth_ratio * n_groups)) if is_easy else max_rows

    def _add_covers(self, relaxation: Relaxation, x: NDArray[Any]) -> bool:
        """Add cover cuts for limits that `x` exceeds in tolerance; return whether any was added."""
        form_with_covers = add_covers(relaxation.form, x, limit_rows(relaxation.form))
        if form_with_covers is not None:
            relaxation.form = form_with_covers
        return form_with_covers is not None

    def _has_wide_gap(self) -> bool:
        """Return whether the gap exceeds `wide_gap_ratio`; True without an upper value."""
        return self.session.search.gap() > self.session.policy.wide_gap_ratio

    # -- primal heuristic ------------------------------------------------------------------------

    def _offer_and_improve(self, relaxation: Relaxation, x: NDArray[Any]) -> ViolatedRows:
        """Offer the schedule of a solution, repair and search near it; return violated rows."""
        restorations = relaxation.to_restorations(x)
        violated_rows = offer_solution(self.session, relaxation, x, restorations)
        if not self.session.search.is_done():
            self._repair_and_search(restorations)
        return violated_rows

    def _search_longer(self, raw: RawSolution) -> None:
        """After a solve without a point: give the next one more time; search if it was stopped."""
        self._min_solve_s *= 2
        if raw.status == SolverStatus.INTERRUPTED and not self.session.search.is_done():
            self._search_locally()

    def _repair_and_search(
        self, solution: Sequence[Restoration], *, search_locally: bool = True
    ) -> None:
        """Repair a relaxation's solution and search near it, in the primal worker if that runs."""
        if self.worker is not None:
            self.worker.send_solution(solution)
        if self.worker is None or not self.worker.running_event.is_set():
            self.primal.repair(solution, search_locally=search_locally)

    def _search_locally(self) -> None:
        """Search near the incumbent, unless the primal worker runs."""
        if self.worker is None or not self.worker.running_event.is_set():
            self.primal.improve()

    def _search_from_linear(self, relaxation: Relaxation, x: NDArray[Any]) -> None:
        """Round and repair linear solutions number 1, 2, 4, 8, ... without a local search."""
        self._n_linear_solutions += 1
        if not self._n_linear_solutions & (self._n_linear_solutions - 1):
            self._repair_and_search(relaxation.to_restorations(x), search_locally=False)

    def _search_if_due(self, relaxation: Relaxation, x: NDArray[Any]) -> None:
        """Between linear relaxations, repair and search if the gap is wide and time is due."""
        if self._has_wide_gap() and self.primal.due_s > self.session.policy.search_s:
            self._repair_and_search(relaxation.to_restorations(x))
