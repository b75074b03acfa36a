"""Row generation: enforce few memory rows, solve, disaggregate, verify; add rows; repeat.

Every round is a relaxation of the problem, so its proven bound is a lower bound; every
disaggregated schedule that the verifier accepts is an upper bound.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from poetmodel.backends.protocol import BackendProgress, RawSolution, SolverStatus
from poetmodel.clock import time_limit
from poetmodel.errors import TimeLimitError, TooLargeError
from poetmodel.result import Termination
from poetmodel.solver.covers import limit_rows, with_covers
from poetmodel.solver.lazy.cuts.recompute_memory import PRESENT
from poetmodel.solver.lazy.linear import add_cuts, add_rows
from poetmodel.solver.lazy.policy import Policy
from poetmodel.solver.lazy.primal import REPAIR_S, PrimalHeuristic, broken_own_rows, examine
from poetmodel.solver.lazy.primal_worker import PrimalWorker
from poetmodel.solver.lazy.symmetry import counted_limits, solve_counted
from poetmodel.solver.request import GRACE_S

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from poetmodel.model.aggregated import Grouping
    from poetmodel.solver.lazy.relaxation import Relaxation
    from poetmodel.solver.lazy.session import Session
    from poetmodel.solver.outcome import Candidate


class RowGeneration:
    """The rounds of one session, which enforces the rows of a grouping from the beginning."""

    def __init__(self, session: Session, grouping: Grouping) -> None:
        self.session = session
        self.grouping = grouping
        self.policy = Policy(session.problem, session.bounds, session.params)
        self.primal = PrimalHeuristic(session, repair_most_s=REPAIR_S)
        self.worker: PrimalWorker | None = None
        self.rounds = 0
        """Integer relaxations so far."""
        self._linear_answers = 0

    def run(self) -> bool:
        """Solve, disaggregate, search, separate, refine, until nothing is left to do.

        Returns whether it is proved that there is no schedule.
        """
        session = self.session
        relaxation = self._linear_phase()
        if relaxation is None:
            return True
        while not session.done():
            self.rounds += 1
            before = (session.bounds.lower, session.bounds.incumbent)
            raw = self._solve(relaxation)
            if raw is None:
                break  # the time is over
            if raw.bound is not None:
                session.raise_bound(session.within_cutoff(relaxation, raw.bound))
            if raw.infeasible or raw.status == SolverStatus.CUTOFF:
                # No answer is below the cutoff: is there none at all?
                nothing = session.bounds.incumbent is None and session.stopped is None
                return nothing and math.isinf(session.bounds.ceiling)
            if raw.x is None:
                self.policy.solves_again()
            else:
                proved = raw.status in (SolverStatus.OPTIMAL, SolverStatus.OBJECTIVE_STOP)
                nodes = raw.nodes if proved else None
                relaxation = self._follow(
                    relaxation, raw.x, proved=proved, nodes=nodes, before=before
                )
        return False

    def run_within_limits(self) -> bool:
        """Run, with the primal worker if there is a second thread; end where no time is left.

        Returns whether it is proved that there is no schedule.
        """
        session = self.session
        try:
            with time_limit(session.request.remaining_s() + GRACE_S):
                if session.request.threads == 1:
                    return self.run()
                with PrimalWorker(session) as self.worker:
                    self.primal.is_waited_for = self.worker.runs.is_set
                    infeasible = self.run()
        except TimeLimitError:
            session.stopped = session.stopped or Termination.TIME_LIMIT
            infeasible = False
        except TooLargeError:
            session.stopped = session.stopped or Termination.STALLED
            infeasible = False
        if self.worker is not None:
            self.worker.check()
        return infeasible

    # -- one round -------------------------------------------------------------------------------

    def _linear_phase(self) -> Relaxation | None:
        """Return the first integer relaxation; None where a linear one has no point."""
        session = self.session
        relaxation, answer = add_rows(session, self.grouping, self._search_linear)
        self.grouping = relaxation.grouping
        if answer.infeasible:
            return None
        if answer.x is None or session.done():
            return relaxation
        self._search(relaxation, answer.x)
        only_ram = not counted_limits(relaxation.form)
        if not session.done() and self.policy.restores_at_once(only_ram=only_ram):
            session.restoring = True
            relaxation = session.build(relaxation.grouping, relaxation)
            add_cuts(session, relaxation)
        return relaxation

    def _solve(self, relaxation: Relaxation) -> RawSolution | None:
        """Solve an integer relaxation, for answers below the incumbent's value."""
        session = self.session
        targets = session.cutoff(relaxation)
        gap = session.request.gap / 2
        if session.bounds.lower > 0 and gap < 1:
            targets["objective_stop"] = session.bounds.lower / (1 - gap) / relaxation.unit
        return solve_counted(
            session,
            relaxation.cut_form(),
            most_s=self.policy.solve_time_s(session.request.remaining_s()),
            targets=targets,
            start=session.start_point(relaxation),
            watch=lambda progress: self._watch(relaxation, progress),
        )

    def _watch(self, relaxation: Relaxation, progress: BackendProgress) -> bool:
        """Follow a running solve, with answers on its way; return whether it should go on."""
        session = self.session
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
        return not session.done()

    def _follow(
        self,
        relaxation: Relaxation,
        x: NDArray[Any],
        *,
        proved: bool,
        nodes: int | None,
        before: tuple[float, Candidate | None],
    ) -> Relaxation:
        """Make a schedule of an answer, or cut off what it breaks; return what to solve next.

        `proved` says whether no better one is of use, `nodes` after how many of branch and bound,
        `before` what was known before the solve.
        """
        session = self.session
        rows, steps = examine(session, relaxation, x)
        own = broken_own_rows(relaxation, x)
        final = proved and not (rows or steps or own)
        if not session.done():
            self._search(relaxation, x)
        lasting = (one for one in relaxation.separators.values() if one.lasting)
        found = [cut for separator in lasting for cut in separator.separate(x, PRESENT)]
        relaxation.lasting += found
        if rows or steps or own:
            return self._refine(relaxation, rows, [] if found else steps, own, nodes=nodes)
        tighter = with_covers(relaxation.form, x, limit_rows(relaxation.form))
        if tighter is not None:  # only the solver's tolerance let the answer through
            relaxation.form = tighter
            return relaxation
        self.policy.solves_again()
        known = (session.bounds.lower, session.bounds.incumbent)
        if final and known == before and not session.done():
            # Solved to its end and nothing moved: the rest is below the solver's tolerances.
            session.stopped = Termination.STALLED
        return relaxation

    def _refine(
        self,
        relaxation: Relaxation,
        rows: list[int],
        steps: list[tuple[int, int]],
        own: dict[int, frozenset[int]] | None = None,
        *,
        nodes: int | None = None,
    ) -> Relaxation:
        """Enforce rows that an answer breaks, as many as the policy says, and add cuts.

        `nodes` are those of the solve, if it came to its end.
        """
        session = self.session
        if not (rows or steps or own) or session.done():
            return relaxation  # with new cuts where there are no rows
        if steps and not session.restoring and self.policy.restores_instead_of_steps():
            session.restoring = True
            steps = []
        most = self.policy.rows_to_add(nodes, relaxation.grouping.n_groups)
        relaxation.make_lasting()
        self.grouping = relaxation.grouping.add(rows[:most], steps[:most], own)
        following = session.build(self.grouping, relaxation)
        if not session.done():
            add_cuts(session, following)
        return following

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

    def _search_linear(self, relaxation: Relaxation, x: NDArray[Any]) -> None:
        """Search from a linear answer: from the first, the second, the fourth, ...

        Not locally: what the next rows tell is worth more.
        """
        self._linear_answers += 1
        if not self._linear_answers & (self._linear_answers - 1):
            self._search(relaxation, x, locally=False)
