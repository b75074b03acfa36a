"""Solve one model as a whole and verify its solution.

`ExtendedProof` is the variant for users' models.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from poetmodel.backends.layout import require_layout, to_standard_form
from poetmodel.backends.protocol import BackendProgress, Limits, RawSolution, SolverStatus
from poetmodel.backends.registry import backend
from poetmodel.backends.standard_form import StandardForm, round_integers
from poetmodel.backends.worker import run_interruptibly
from poetmodel.clock import infrequent_gc, time_limit
from poetmodel.errors import TimeLimitError, VerificationError
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.model.building import build_arrays, estimate_build_s, schedule_from_columns
from poetmodel.model.compact import COMPACT
from poetmodel.model.paper import PAPER
from poetmodel.model.unreduced import UNREDUCED
from poetmodel.problem.infeasibility import infeasibility_proof
from poetmodel.result import ModelObjective, Termination
from poetmodel.solver.covers import add_covers, limit_rows
from poetmodel.solver.outcome import (
    Candidate,
    Outcome,
    as_candidate,
    safe_bound,
)
from poetmodel.solver.request import GRACE_S, PATIENCE_S, Request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from poetmodel.model.arrays import Model
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

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
"""Fraction of the gap tolerance for the solver. The rest covers the safe reduction of its bound."""

BUILD_TIMED_OUT: Final = "the time limit passed while the model was built"

MAX_START_VIOLATION: Final = 1e-6
"""Maximum violation of a scaled row by a first schedule that is accepted as a solution of the
model."""
HALF: Final = 0.5
"""Threshold above which a binary decision counts as 1."""


def prove_formulation(
    problem: Problem, request: Request, formulation: str, *, start: Candidate | None
) -> Outcome:
    """Build and solve the model of a formulation, and verify its solution.

    The valid schedule `start` is returned if the solver finds no better one.

    Raises `VerificationError` if the verifier rejects the solution of an exact formulation.
    """
    expected_s = estimate_build_s(problem, formulation)
    if expected_s > request.remaining_s():
        reason = (
            f"building the model of {formulation!r} takes about {expected_s:.0f} s, more than the "
            "time limit"
        )
        return Outcome(termination=Termination.TIME_LIMIT, reason=reason)
    begun = time.monotonic()
    try:
        with time_limit(request.remaining_s()), infrequent_gc():
            model = build_arrays(problem, formulation)
    except TimeLimitError:
        reason = f"the time limit passed while the model of {formulation!r} was built"
        build_s = time.monotonic() - begun
        return Outcome(termination=Termination.TIME_LIMIT, reason=reason, build_s=build_s)
    try:
        with time_limit(request.remaining_s()):
            form = to_standard_form(model)
    except TimeLimitError:
        return late_outcome(time.monotonic() - begun)
    objective = problem.objective
    return ModelProof(
        problem=problem,
        arrays=model,
        request=request,
        form=form,
        unit=objective.unit if objective.is_sum else model.objective_unit,
        build_s=time.monotonic() - begun,
    ).run(start)


def late_outcome(build_s: float) -> Outcome:
    """Return the outcome of a model that was not built within the time limit."""
    return Outcome(termination=Termination.TIME_LIMIT, reason=BUILD_TIMED_OUT, build_s=build_s)


def start_values(form: StandardForm, schedule: Schedule) -> NDArray[np.float64] | None:
    """Return the columns of a schedule, NaN where it does not decide them; None for ``paper``."""
    layout = require_layout(form)
    if layout.model.formulation == PAPER:
        return None
    return layout.to_form_solution(form.n_columns, layout.model.relations.column_values(schedule))


@dataclass(slots=True, kw_only=True)
class ModelProof:
    """The proof by one compiled model."""

    problem: Problem
    """The problem that the model states."""
    arrays: Model
    request: Request
    form: StandardForm
    """The model as the solver gets it, cuts included."""
    unit: float
    """Amount of the minimized quantity in one unit of the form's objective."""
    build_s: float
    """Time to build and compile the model [s]."""
    as_stated: bool = True
    """Whether the model minimizes its problem's objective."""
    hint: str = ""
    """Hint for a model without a schedule, as text."""
    conflict_phrase: ClassVar[str] = "together"
    """How the limits conflict if each can be met alone, as text for the reason of infeasibility."""
    drops_unneeded: ClassVar[bool] = True
    """Whether unneeded decisions may be removed from the solution; not if the model has rows of a
    user."""
    log: list[str] = field(default_factory=list)
    """The solver's log, in the pieces that it wrote."""
    latest: BackendProgress | None = None
    """The solver's last report, with its best solution."""
    is_abandoned: bool = False
    """Whether the solver exceeded the limit and its reports are ignored."""

    def run(self, start: Candidate | None) -> Outcome:
        """Solve, and return the better of the solution and the first schedule.

        The first schedule counts only if it satisfies the rows of the model.
        """
        form = self.form
        values = None if start is None else start_values(form, start.schedule)
        raw, candidate = self._search(values)
        value, bound = (None, None) if raw is None else (raw.objective, raw.bound)
        if (
            start is not None
            and values is not None
            and (candidate is None or (self.drops_unneeded and start.value < candidate.value))
            and not np.isnan(values).any()
            and form.max_violation(values) <= MAX_START_VIOLATION
        ):
            candidate, value = start, form.objective_value(values)
        if candidate is not None:
            candidate = replace(candidate, own=self.own(value, bound))
        return self._make_outcome(raw, candidate)

    def _search(
        self, values: NDArray[np.float64] | None
    ) -> tuple[RawSolution | None, Candidate | None]:
        """Solve, and exclude rejected solutions by cover cuts until the verifier accepts one.

        A solver's tolerance may permit a point that exceeds a limit. Every schedule satisfies the
        cover cuts that exclude the point, so bounds and infeasibility proved with them hold.

        Raises `VerificationError` if no cover cut excludes a rejected solution.
        """
        formulation = self.arrays.formulation
        raw = self._call_solver(values)
        while raw is not None and raw.x is not None:
            try:  # The solution of a late solver is verified as well, within GRACE_S.
                with time_limit(self.request.remaining_s() + GRACE_S):
                    candidate = self._extract_candidate(raw.x)
            except TimeLimitError:
                return _without_solution(raw), None
            if not candidate.violations or formulation == PAPER:
                return raw, candidate
            form = None
            if formulation in (COMPACT, UNREDUCED):
                form = add_covers(self.form, raw.x, limit_rows(self.form), rejected=True)
            if form is None:
                raise VerificationError(candidate.violations)
            self.form = form
            next_solution = self._call_solver(values)
            if next_solution is None:
                return _without_solution(raw), None
            bounds = [
                solution.bound for solution in (raw, next_solution) if solution.bound is not None
            ]
            raw = replace(
                next_solution,
                bound=max(bounds, default=None) if self.as_stated else next_solution.bound,
                build_s=raw.build_s + next_solution.build_s,
                solve_s=raw.solve_s + next_solution.solve_s,
            )
        return raw, None

    def _call_solver(self, values: NDArray[np.float64] | None) -> RawSolution | None:
        """Solve the form within the remaining time; return None if no time remains.

        If the solver exceeds the limit, it is abandoned and its last report is returned.
        """
        request, remaining = self.request, self.request.remaining_s()
        if remaining <= 0:
            return None
        solver = backend(request.backend)
        limits = Limits(
            time_s=remaining,
            rel_gap=GAP_FRACTION * request.gap,
            threads=request.threads,
            seed=request.seed,
            presolve=request.presolve,
            log=self.log.append,
            options=request.solver_options,
        )
        stop = threading.Event()
        self.latest = None
        solve = partial(solver.solve, self.form, limits, start=values)
        solve = partial(solve, on_progress=self._report, stop=stop)
        try:
            return run_interruptibly(solve, stop, max_s=remaining + PATIENCE_S)
        except TimeLimitError:
            return self._abandoned_solution(
                request.elapsed_s() - (request.time_limit_s - remaining)
            )

    def _abandoned_solution(self, solve_s: float) -> RawSolution:
        """Return the last report of a solver as its solution, and mark the solver as abandoned."""
        self.is_abandoned, last_report = True, self.latest
        x = None if last_report is None else last_report.x
        return RawSolution(
            status=SolverStatus.TIME_LIMIT,
            x=x,
            objective=None if x is None else self.form.objective_value(x),
            bound=None if last_report is None else last_report.bound,
            solve_s=solve_s,
        )

    def _report(self, progress: BackendProgress) -> bool | None:
        """Forward a report of the solver as bounds on the problem.

        Returns False to stop an abandoned solver.
        """
        if self.is_abandoned:
            return False
        previous, self.latest = self.latest, progress
        if progress.x is None and previous is not None:
            self.latest = replace(progress, x=previous.x)
        incumbent = None
        if self.as_stated and progress.incumbent is not None:
            incumbent = max(0.0, progress.incumbent * self.unit)
        return self.request.report(incumbent, self._problem_bound(progress.bound))

    def _extract_candidate(self, x: NDArray[np.float64]) -> Candidate:
        """Verify the schedule of a solution, without unneeded decisions if `drops_unneeded`."""
        problem, schedule = self.problem, self.schedule(x)
        candidate = as_candidate(problem, schedule)
        if self.drops_unneeded and not candidate.violations:
            needed_decisions = PartialSchedule.of(
                problem.graph, schedule, problem.rewards, working=problem.working_graph
            )
            cleaned = as_candidate(problem, needed_decisions.schedule())
            if not cleaned.violations and cleaned.value <= candidate.value:
                return cleaned
        return candidate

    def schedule(self, x: NDArray[np.float64]) -> Schedule:
        """Return the schedule of a solution."""
        rounded = round_integers(x, self.form)
        values = require_layout(self.form).model_values(rounded)
        return schedule_from_columns(self.arrays, lambda column: bool(values[column] > HALF))

    def _problem_bound(self, bound: float | None) -> float | None:
        """Convert the model's bound to one on the problem, in the unit of the problem.

        Return None if the model is not exact, or minimizes another objective.
        """
        if bound is None or not (self.arrays.exact and self.as_stated):
            return None
        known_bound = float(self.problem.objective.known_bound)
        return max(known_bound, safe_bound(self.problem, bound) * self.unit)

    def own(self, value: float | None, bound: float | None) -> ModelObjective | None:  # noqa: ARG002
        """Return the user-defined objective at a value; None except in `ExtendedProof`."""
        return None

    def _make_outcome(self, raw: RawSolution | None, candidate: Candidate | None) -> Outcome:
        """Return the outcome with the candidate, and bound and statistics of the raw solution."""
        form = self.form
        statistics: dict[str, Any] = {
            "columns": form.n_columns,
            "rows": form.n_rows,
            "nonzeros": int(form.matrix.nnz),
            "nodes": None if raw is None else raw.nodes,
        }
        if raw is None:
            return Outcome(
                termination=Termination.TIME_LIMIT,
                candidate=candidate,
                reason=BUILD_TIMED_OUT,
                build_s=self.build_s,
                statistics=statistics,
            )
        metrics = (("model_value", raw.objective), ("model_bound", raw.bound))
        for name, value in (*metrics, ("root_bound", raw.root_bound)):
            if value is not None:
                statistics[name] = value * self.unit
        return Outcome(
            termination=TERMINATIONS[raw.status],
            candidate=candidate,
            bound=self._problem_bound(raw.bound) or 0.0,
            infeasible=raw.is_infeasible and self.arrays.exact,
            reason=self._no_schedule_reason(raw),
            build_s=self.build_s + raw.build_s,
            versions=backend(self.request.backend).versions(),
            statistics=statistics,
            log="".join(self.log),
        )

    def _no_schedule_reason(self, raw: RawSolution) -> str:
        """Return why no schedule was found, as text."""
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
        return infeasibility_proof(self.problem, self.conflict_phrase) + self.hint


def _without_solution(raw: RawSolution) -> RawSolution:
    """Return a raw solution without its point, with its bound and the status of a time limit."""
    return replace(raw, status=SolverStatus.TIME_LIMIT, x=None, objective=None)
