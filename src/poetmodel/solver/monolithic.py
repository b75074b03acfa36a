"""Solve one model as a whole and verify its solution; `ExtendedProof` solves users' models."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from poetmodel.backends.layout import require_layout, to_standard_form
from poetmodel.backends.protocol import BackendProgress, RawSolution, SolverStatus
from poetmodel.backends.registry import backend
from poetmodel.backends.standard_form import StandardForm, round_integers
from poetmodel.backends.worker import run_interruptibly
from poetmodel.clock import infrequent_gc, limit_time
from poetmodel.errors import TimeLimitError, VerificationError
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.model.building import build_arrays, estimate_build_s, schedule_from_columns
from poetmodel.model.compact import COMPACT
from poetmodel.model.paper import PAPER
from poetmodel.model.unreduced import UNREDUCED
from poetmodel.problem.infeasibility import infeasibility_proof
from poetmodel.result import ModelObjective, Termination
from poetmodel.solver.covers import add_covers, limit_rows
from poetmodel.solver.outcome import Candidate, make_candidate, safe_bound
from poetmodel.solver.request import GRACE_S, PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from poetmodel.model.arrays import Model
    from poetmodel.schedule import Schedule
    from poetmodel.solver.search import Search

TERMINATIONS: Final[Mapping[SolverStatus, Termination]] = {
    SolverStatus.OPTIMAL: Termination.PROVED,
    SolverStatus.INFEASIBLE: Termination.PROVED,
    SolverStatus.CUTOFF: Termination.PROVED,
    SolverStatus.OBJECTIVE_STOP: Termination.PROVED,
    SolverStatus.TIME_LIMIT: Termination.TIME_LIMIT,
    SolverStatus.INTERRUPTED: Termination.INTERRUPTED,
    SolverStatus.OTHER_LIMIT: Termination.STALLED,
    SolverStatus.UNBOUNDED: Termination.STALLED,
}
"""Termination of a solve by the status of the back end."""

GAP_FRACTION: Final = 0.99
"""Fraction of the gap tolerance that is passed to the solver. The rest covers the reduction of the
solver's bound by `safe_bound`."""

BUILD_TIMED_OUT: Final = "the time limit passed while the model was built"

MAX_START_VIOLATION: Final = 1e-6
"""Maximum violation of a scaled row, a bound or integrality up to which the first schedule is
accepted as a solution of the model."""
HALF: Final = 0.5
"""Threshold above which a binary decision counts as 1."""


def prove_formulation(search: Search, formulation: str, *, start: Candidate | None) -> None:
    """Build and solve the model of a formulation, and verify its solution.

    Cover cuts exclude a rejected solution, except one of ``paper``, and the model is solved again;
    ``paper`` ignores `start`. The search ends without a solve if the build takes, or is estimated
    to take, longer than the remaining time.
    """
    problem, request = search.problem, search.request
    expected_s = estimate_build_s(problem, formulation)
    if expected_s > request.remaining_s():
        reason = (
            f"building the model of {formulation!r} takes about {expected_s:.0f} s, more than the "
            "time limit"
        )
        search.end(Termination.TIME_LIMIT, reason)
        return
    started_s = time.monotonic()
    reason = f"the time limit passed while the model of {formulation!r} was built"
    try:
        with limit_time(request.remaining_s()), infrequent_gc():
            arrays = build_arrays(problem, formulation)
        reason = BUILD_TIMED_OUT
        with limit_time(request.remaining_s()):
            form = to_standard_form(arrays)
    except TimeLimitError:
        search.end(Termination.TIME_LIMIT, reason)
        return
    finally:
        search.add_build_time(time.monotonic() - started_s)
    objective = problem.objective
    ModelProof(
        search=search,
        arrays=arrays,
        form=form,
        unit=objective.unit if objective.is_sum else arrays.objective_unit,
    ).prove(start)


def schedule_point(form: StandardForm, schedule: Schedule) -> NDArray[np.float64] | None:
    """Return the form's columns for a schedule, undecided ones NaN; None for ``paper``."""
    layout = require_layout(form)
    if layout.model.formulation == PAPER:
        return None
    return layout.to_form_solution(form.n_columns, layout.model.relations.column_values(schedule))


@dataclass(slots=True, kw_only=True)
class ModelProof:
    """The proof of a bound by one compiled model."""

    search: Search
    """The search for the problem that the model states."""
    arrays: Model
    form: StandardForm
    """The model that the solver solves, cover cuts included."""
    unit: float
    """Amount of the minimized quantity in one unit of the form's objective."""
    is_problem_objective: bool = True
    """Whether the model minimizes its problem's objective."""
    hint: str = ""
    """Text that is appended to the reason if the model is infeasible."""
    conflict_phrase: ClassVar[str] = "together"
    """End of the message that the limits cannot be met, if each can be met alone."""
    drops_unneeded_decisions: ClassVar[bool] = True
    """Whether unneeded decisions may be removed from the solution; False if users may have added
    rows."""
    last_report: BackendProgress | None = None
    """Last report of the solver's latest call, with the last solution that the call reported; None
    without a report."""
    is_abandoned: bool = False
    """Whether the solver exceeded the limit and its reports are ignored."""

    def prove(self, start: Candidate | None) -> None:
        """Solve the model from `start`; end the search with its solution and bound.

        A solution of a user's model replaces the best schedule, others compete with it.
        """
        form = self.form
        self.search.states_bound = self.arrays.exact and self.is_problem_objective
        start_point = None if start is None else schedule_point(form, start.schedule)
        raw, candidate = self._solve_until_accepted(start_point)
        value, bound = (None, None) if raw is None else (raw.objective, raw.bound)
        if (
            start is not None
            and start_point is not None
            and (
                candidate is None
                or (self.drops_unneeded_decisions and start.value < candidate.value)
            )
            and not np.isnan(start_point).any()
            and form.max_violation(start_point) <= MAX_START_VIOLATION
        ):
            candidate, value = start, form.objective_value(start_point)
        if candidate is not None:
            candidate = replace(candidate, model_objective=self.model_objective(value, bound))
        self._end_search(raw, candidate)

    def _solve_until_accepted(
        self, start_point: NDArray[np.float64] | None
    ) -> tuple[RawSolution | None, Candidate | None]:
        """Solve; exclude rejected solutions by cover cuts until the verifier accepts one.

        A solver's tolerance may permit a point that exceeds a limit. Every schedule satisfies the
        cover cuts, so bounds and infeasibility proved with them hold. The cuts remain in `form`.
        """
        formulation = self.arrays.formulation
        raw = self._call_solver(start_point)
        while raw is not None and raw.x is not None:
            try:  # The solution of a late solver is verified as well, within GRACE_S.
                with limit_time(self.search.request.remaining_s() + GRACE_S):
                    candidate = self._extract_candidate(raw.x)
            except TimeLimitError:
                return _without_solution(raw), None
            if not candidate.violations or formulation == PAPER:
                return raw, candidate
            form = None
            if formulation in (COMPACT, UNREDUCED):
                form = add_covers(self.form, raw.x, limit_rows(self.form), is_rejected=True)
            if form is None:
                raise VerificationError(candidate.violations)
            self.form = form
            next_solution = self._call_solver(start_point)
            if next_solution is None:
                return _without_solution(raw), None
            bounds = [
                solution.bound for solution in (raw, next_solution) if solution.bound is not None
            ]
            raw = replace(
                next_solution,
                bound=max(bounds, default=None)
                if self.is_problem_objective
                else next_solution.bound,
                build_s=raw.build_s + next_solution.build_s,
                solve_s=raw.solve_s + next_solution.solve_s,
            )
        return raw, None

    def _call_solver(self, start_point: NDArray[np.float64] | None) -> RawSolution | None:
        """Solve the form within the remaining time; None if no time remains."""
        request = self.search.request
        remaining_s = request.remaining_s()
        if remaining_s <= 0:
            return None
        solver = backend(request.backend)
        limits = replace(
            request.solver_limits(remaining_s, rel_gap=GAP_FRACTION * request.gap),
            threads=request.threads,
            log=self.search.log.append,
        )
        stop = self.search.stop_event  # still set if Ctrl-C came in an earlier call
        self.last_report = None
        solve = partial(solver.solve, self.form, limits, start=start_point)
        solve = partial(solve, on_progress=self._report, stop=stop)
        try:
            return run_interruptibly(solve, stop, max_s=remaining_s + PATIENCE_S)
        except TimeLimitError:
            return self._abandoned_solution(
                request.elapsed_s() - (request.time_limit_s - remaining_s)
            )

    def _abandoned_solution(self, solve_s: float) -> RawSolution:
        """Convert the last report of the solver to a solution, and mark the solver as abandoned."""
        self.is_abandoned, last_report = True, self.last_report
        x = None if last_report is None else last_report.x
        return RawSolution(
            status=SolverStatus.TIME_LIMIT,
            x=x,
            objective=None if x is None else self.form.objective_value(x),
            bound=None if last_report is None else last_report.bound,
            solve_s=solve_s,
        )

    def _report(self, progress: BackendProgress) -> bool:
        """Store and forward a report of the solver; return whether the solver continues."""
        if self.is_abandoned:
            return False
        previous, self.last_report = self.last_report, progress
        if progress.x is None and previous is not None and not progress.is_restart:
            self.last_report = replace(progress, x=previous.x)
        incumbent = None
        if self.is_problem_objective and progress.incumbent is not None:
            incumbent = max(0.0, progress.incumbent * self.unit)
        return self.search.report(incumbent, self._problem_bound(progress.bound))

    def _extract_candidate(self, x: NDArray[np.float64]) -> Candidate:
        """Verify the schedule of a solution, and return the schedule with any violations."""
        problem, schedule = self.search.problem, self.extract_schedule(x)
        candidate = make_candidate(problem, schedule)
        if self.drops_unneeded_decisions and not candidate.violations:
            needed_decisions = PartialSchedule.from_schedule(
                problem.graph, schedule, problem.rewards, working_graph=problem.working_graph
            )
            cleaned_candidate = make_candidate(problem, needed_decisions.schedule())
            if not cleaned_candidate.violations and cleaned_candidate.value <= candidate.value:
                return cleaned_candidate
        return candidate

    def extract_schedule(self, x: NDArray[np.float64]) -> Schedule:
        """Return a solution's schedule; refuse values that are not finite or not whole."""
        rounded = round_integers(x, self.form)
        values = require_layout(self.form).model_values(rounded)
        return schedule_from_columns(self.arrays, lambda column: bool(values[column] > HALF))

    def _problem_bound(self, bound: float | None) -> float | None:
        """Convert the model's bound to one on the problem; None if it is none of the problem."""
        if bound is None or not (self.arrays.exact and self.is_problem_objective):
            return None
        problem = self.search.problem
        known_bound = float(problem.objective.known_bound)
        return max(known_bound, safe_bound(problem, bound) * self.unit)

    def model_objective(self, value: float | None, bound: float | None) -> ModelObjective | None:  # noqa: ARG002
        """Return None: only `ExtendedProof` has a user-defined objective."""
        return None

    def _end_search(self, raw: RawSolution | None, candidate: Candidate | None) -> None:
        """End the search with its results; `raw` is None if no time was left."""
        search, form = self.search, self.form
        search.statistics = {
            "columns": form.n_columns,
            "rows": form.n_rows,
            "nonzeros": int(form.matrix.nnz),
            "nodes": None if raw is None else raw.nodes,
        }
        if candidate is not None:
            (search.store_if_best if self.drops_unneeded_decisions else search.settle)(candidate)
        if raw is None:
            search.end(Termination.TIME_LIMIT, BUILD_TIMED_OUT)
            return
        metrics = (("model_value", raw.objective), ("model_bound", raw.bound))
        for name, value in (*metrics, ("root_bound", raw.root_bound)):
            if value is not None:
                search.statistics[name] = value * self.unit
        search.end(
            TERMINATIONS[raw.status],
            self._no_schedule_reason(raw),
            is_infeasible=raw.is_infeasible and self.arrays.exact,
        )
        search.bound = max(search.bound, self._problem_bound(raw.bound) or 0.0)
        search.add_build_time(raw.build_s)
        search.versions = backend(search.request.backend).versions()

    def _no_schedule_reason(self, raw: RawSolution) -> str:
        """Return the reason of an outcome without a schedule."""
        formulation = self.arrays.formulation
        if raw.status == SolverStatus.UNBOUNDED:
            return "the objective of the model is unbounded: give the variables in it bounds"
        if not raw.is_infeasible:
            return f"no schedule was found within {raw.solve_s:.3g} s"
        if not self.arrays.exact:
            return (
                f"the model of {formulation.name!r} has no schedule, which proves nothing of the "
                "problem; use lazy or compact"
            )
        contradiction = self.form.describe_contradiction()
        if contradiction is not None:
            return f"proved: {contradiction}{self.hint}"
        return infeasibility_proof(self.search.problem, self.conflict_phrase) + self.hint


def _without_solution(raw: RawSolution) -> RawSolution:
    """Return a raw solution without its point, with its bound, as one that was cut short."""
    is_interrupted = raw.status is SolverStatus.INTERRUPTED
    status = raw.status if is_interrupted else SolverStatus.TIME_LIMIT
    return replace(raw, status=status, x=None, objective=None)
