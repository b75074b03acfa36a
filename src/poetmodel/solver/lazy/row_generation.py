"""Row generation: enforce few memory rows, solve, disaggregate, verify; add rows; repeat.

Every round is a relaxation of the problem, so its proven bound is a lower bound; every
disaggregated schedule that the verifier accepts is an upper bound.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from poetmodel.backends.protocol import BackendProgress, RawSolution, SolverStatus
from poetmodel.clock import time_limit
from poetmodel.errors import TimeLimitError, TooLargeError
from poetmodel.result import Termination
from poetmodel.solver.covers import limit_rows, with_covers
from poetmodel.solver.lazy.linear import add_cuts, add_rows
from poetmodel.solver.lazy.primal import REPAIR_S, SEARCH_S, BrokenRows, PrimalHeuristic, examine
from poetmodel.solver.lazy.symmetry import relax_counted
from poetmodel.solver.request import GRACE_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from poetmodel.model.grouping import Grouping
    from poetmodel.solver.lazy.primal_worker import PrimalWorker
    from poetmodel.solver.lazy.relaxation import Relaxation
    from poetmodel.solver.lazy.session import Session

FIRST_SLICE_S: Final = 5.0
"""Least time of an integer solve; each that ends by its time doubles it [s]."""
_TO_ITS_END: Final = frozenset({SolverStatus.OPTIMAL, SolverStatus.OBJECTIVE_STOP})
"""After these no better answer of a relaxation is of use."""


class RowGeneration:
    """The rounds of one session, which enforces the rows of a grouping from the beginning."""

    def __init__(self, session: Session, grouping: Grouping) -> None:
        self.session = session
        self.grouping = grouping
        self.primal = PrimalHeuristic(session, repair_most_s=REPAIR_S)
        self.worker: PrimalWorker | None = None
        self.rounds = 0
        """Integer relaxations so far."""
        self._linear_answers = 0
        self._slice_s = FIRST_SLICE_S
        """Least time of the next integer solve [s]."""
        self._moved_s = 0.0
        """When the running integer solve last raised the bound or found a better answer, on the
        monotonic clock [s]."""
        self._idle_root_s = math.inf
        """How long after that it ends if it is still at its root [s]."""
        self._bound_before_rows = float("-inf")
        """The bound when rows were last added."""

    def run(self) -> bool:
        """Relax, disaggregate, search, separate, refine, until nothing is left to do.

        Returns whether it is proved that there is no schedule.
        """
        session, infeasible = self.session, False
        with self._within_limits():
            relaxation = self._linear_phase()
            infeasible = relaxation is None
            while relaxation is not None and not session.done():
                before = session.known()
                raw = self._relax(relaxation)
                if raw is None:
                    break  # the time is over
                if raw.infeasible or raw.status == SolverStatus.CUTOFF:
                    infeasible = self._is_infeasible()
                    break
                if raw.x is None:
                    self._slice_s *= 2
                    if raw.status == SolverStatus.INTERRUPTED and not session.done():
                        self._search_locally()
                    continue
                broken = examine(session, relaxation, raw.x)
                if not session.done():
                    self._search(relaxation, raw.x)
                if broken:
                    relaxation = self._refine(relaxation, raw, broken)
                elif not self._add_covers(relaxation, raw.x):
                    self._slice_s *= 2
                    idle = raw.status in _TO_ITS_END and session.known() == before
                    if idle and not session.done():
                        # Nothing moved: the rest is below the solver's tolerances.
                        session.stopped = Termination.STALLED
        return infeasible

    @contextmanager
    def _within_limits(self) -> Iterator[None]:
        """Let rounds run while time is left, beside the primal worker on a second thread."""
        session = self.session
        try:
            with time_limit(session.request.remaining_s() + GRACE_S):
                if session.request.threads == 1:
                    yield
                    return
                from poetmodel.solver.lazy.primal_worker import PrimalWorker

                with PrimalWorker(session) as self.worker:
                    self.primal.is_waited_for = self.worker.runs.is_set
                    yield
        except TimeLimitError:
            session.stopped = session.stopped or Termination.TIME_LIMIT
        except TooLargeError:
            session.stopped = session.stopped or Termination.STALLED
        if self.worker is not None:
            self.worker.check()

    # -- relaxations -----------------------------------------------------------------------------

    def _linear_phase(self) -> Relaxation | None:
        """Return the first integer relaxation; None where a linear one has no point."""
        session = self.session
        searches = self._search_linear, self._search_if_due
        relaxation, answer = add_rows(session, self.grouping, *searches)
        self.grouping = relaxation.grouping
        if answer.x is not None and not session.done():
            self._search(relaxation, answer.x)
        return None if answer.infeasible else relaxation

    def _relax(self, relaxation: Relaxation) -> RawSolution | None:
        """Solve an integer relaxation, for answers below the incumbent's value."""
        session, params = self.session, self.session.params
        targets = session.cutoff(relaxation)
        gap = session.request.gap / 2
        if session.bounds.lower > 0 and gap < 1:
            targets["objective_stop"] = session.bounds.lower / (1 - gap) / relaxation.unit
        left_s, ratio, self._idle_root_s = session.request.remaining_s(), 1.0, math.inf
        if self._is_wide():
            ratio = params.solve_share(session.bounds.gap())
            self._idle_root_s = max(self._slice_s, params.idle_root_time_ratio * left_s)
        self._moved_s = time.monotonic()
        self.rounds += 1
        raw = relax_counted(
            session,
            relaxation.cut_form(),
            most_s=max(self._slice_s, left_s * ratio),
            targets=targets,
            start=session.start_point(relaxation),
            watch=lambda progress: self._watch(relaxation, progress),
        )
        if raw is not None and raw.bound is not None:
            session.raise_bound(session.within_cutoff(relaxation, raw.bound))
        return raw

    def _watch(self, relaxation: Relaxation, progress: BackendProgress) -> bool:
        """Follow a running solve, with answers on its way; return whether it should go on."""
        session, before = self.session, self.session.known()
        if progress.bound is not None:
            session.raise_bound(session.within_cutoff(relaxation, progress.bound))
        best = session.bounds.incumbent
        if (
            progress.x is not None
            and progress.incumbent is not None
            and (best is None or progress.incumbent * relaxation.unit < best.value)
        ):
            examine(session, relaxation, progress.x)
            repairs = "repair_on_the_way" in session.params.heuristics
            if repairs and session.bounds.incumbent is best and not session.done():
                self._search(relaxation, progress.x, locally=False)
        if progress.x is not None or session.known() != before:
            self._moved_s = time.monotonic()
        return not (session.done() or self._is_idle_at_root(progress))

    def _is_idle_at_root(self, progress: BackendProgress) -> bool:
        """Return whether the running solve is still at its root, and has not moved for long."""
        idle_s = time.monotonic() - self._moved_s
        return progress.nodes is not None and progress.nodes <= 1 and idle_s > self._idle_root_s

    def _is_infeasible(self) -> bool:
        """Return whether there is no schedule, after a relaxation without answers.

        No answer is below the cutoff: is there none at all?
        """
        bounds = self.session.bounds
        nothing = bounds.incumbent is None and self.session.stopped is None
        return nothing and math.isinf(bounds.ceiling)

    # -- rows and cuts ---------------------------------------------------------------------------

    def _refine(self, relaxation: Relaxation, raw: RawSolution, broken: BrokenRows) -> Relaxation:
        """Enforce rows that an answer breaks, as many as are of use, and add cuts."""
        session = self.session
        if session.done():
            return relaxation
        easy = raw.status in _TO_ITS_END and raw.nodes is not None and raw.nodes <= 1
        most = self._rows_to_add(relaxation.grouping.n_groups, easy=easy)
        self.grouping = relaxation.grouping.add(
            broken.stages[:most], broken.steps[:most], broken.own
        )
        following = session.build(self.grouping, relaxation)
        if not session.done():
            add_cuts(session, following)
        return following

    def _rows_to_add(self, groups: int, *, easy: bool) -> int | None:
        """Return the number of rows to add, by the gain of the last ones; None for all.

        More after a relaxation that was `easy`, of so many groups.
        """
        params, bound = self.session.params, self.session.bounds.lower
        rise, self._bound_before_rows = bound - self._bound_before_rows, bound
        if rise > params.single_row_gain_ratio * bound:
            most = 1
        elif self._is_wide():
            most = params.wide_gap_rows
        elif rise > params.single_row_gain_ratio / 2 * bound:
            most = params.few_rows
        else:
            return None
        return max(most, int(params.easy_growth_ratio * groups)) if easy else most

    def _add_covers(self, relaxation: Relaxation, x: NDArray[Any]) -> bool:
        """Cut off an answer that only the solver's tolerance let through; return whether it was."""
        tighter = with_covers(relaxation.form, x, limit_rows(relaxation.form))
        if tighter is not None:
            relaxation.form = tighter
        return tighter is not None

    def _is_wide(self) -> bool:
        """Return whether the gap is far from closed."""
        return self.session.bounds.gap() > self.session.params.wide_gap_ratio

    # -- primal heuristic ------------------------------------------------------------------------

    def _search(self, relaxation: Relaxation, x: NDArray[Any], *, locally: bool = True) -> None:
        """Search for schedules: now, or beside the proof where there is a worker for it.

        Now is a slice of time for the repair of an answer, and one for a local search.
        """
        answer = relaxation.disaggregate(x).schedule()
        if self.worker is not None:
            self.worker.put(answer)
        if self.worker is None or not self.worker.runs.is_set():
            self.primal.repair(answer, locally=locally)

    def _search_locally(self) -> None:
        """Search near the incumbent, unless the worker does."""
        if self.worker is None or not self.worker.runs.is_set():
            self.primal.improve()

    def _search_linear(self, relaxation: Relaxation, x: NDArray[Any]) -> None:
        """Search from a linear answer: from the first, the second, the fourth, ...

        Not locally: what the next rows tell is worth more.
        """
        self._linear_answers += 1
        if not self._linear_answers & (self._linear_answers - 1):
            self._search(relaxation, x, locally=False)

    def _search_if_due(self, relaxation: Relaxation, x: NDArray[Any]) -> None:
        """Search between linear relaxations where these take long and the gap is wide."""
        if self._is_wide() and self.primal.due_s > SEARCH_S:
            self._search(relaxation, x)
