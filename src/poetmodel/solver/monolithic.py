"""Solve one model as a whole: solve, read, verify. `ExtendedProof` is that of a user's model."""

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
from poetmodel.backends.standard_form import StandardForm, round_binaries
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
from poetmodel.solver.covers import limit_rows, with_covers
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
"""Meaning of each reason of a back end to stop."""

GAP_SHARE: Final = 0.99
"""Part of the gap tolerance that a solver may leave; its bound is reduced by up to the rest."""

TOO_LATE: Final = "the time limit passed while the model was built"

ACCEPTED: Final = 1e-6
"""Largest violation of a scaled row by a start that may stand for a model's solution."""
HALF: Final = 0.5
"""A rounded decision above this is taken."""


def prove_formulation(
    problem: Problem, request: Request, formulation: str, *, start: Candidate | None
) -> Outcome:
    """Build the model of a formulation, and solve it; verify what comes out.

    A valid schedule to begin from is returned if nothing better is found.

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
        return too_late(time.monotonic() - begun)
    objective = problem.objective
    return ModelProof(
        problem=problem,
        arrays=model,
        request=request,
        form=form,
        unit=objective.unit if objective.is_sum else model.objective_unit,
        build_s=time.monotonic() - begun,
    ).run(start)


def too_late(build_s: float) -> Outcome:
    """Return the outcome of a model that was not ready in time."""
    return Outcome(termination=Termination.TIME_LIMIT, reason=TOO_LATE, build_s=build_s)


def start_values(form: StandardForm, schedule: Schedule) -> NDArray[np.float64] | None:
    """Return the columns of a schedule, NaN for those it says nothing of; None for ``paper``."""
    layout = require_layout(form)
    if layout.model.formulation == PAPER:
        return None
    return layout.point(form.n_columns, layout.model.relations.assign(schedule))


@dataclass(slots=True, kw_only=True)
class ModelProof:
    """The proof by one compiled model."""

    problem: Problem
    """Statement of the row."""
    arrays: Model
    request: Request
    form: StandardForm
    """The model as the solver gets it, cuts included."""
    unit: float
    """How much one unit of the form's objective is."""
    build_s: float
    """Time to build and compile the model [s]."""
    as_stated: bool = True
    """Whether the model minimizes what its problem does."""
    hint: str = ""
    """What to try where there is no schedule, in words."""
    further: ClassVar[str] = "together"
    """What a schedule must keep besides each limit, in words."""
    trimmed: ClassVar[bool] = True
    """Whether entries that nothing needs may be dropped from the solution: all its rows are those
    of the problem."""
    log: list[str] = field(default_factory=list)
    """The solver's log, in pieces."""
    latest: BackendProgress | None = None
    """The solver's reports, with its best solution."""
    is_late: bool = False
    """Whether the solver was left behind."""

    def run(self, start: Candidate | None) -> Outcome:
        """Solve from a start, which is the answer if it is the best and satisfies the model."""
        form = self.form
        values = None if start is None else start_values(form, start.schedule)
        raw, candidate = self._search(values)
        value, bound = (None, None) if raw is None else (raw.objective, raw.bound)
        if (
            start is not None
            and values is not None
            and (candidate is None or (self.trimmed and start.value < candidate.value))
            and not np.isnan(values).any()
            and form.violation(values) <= ACCEPTED
        ):
            candidate, value = start, form.value(values)
        if candidate is not None:
            candidate = replace(candidate, own=self.own(value, bound))
        return self._conclude(raw, candidate)

    def _search(
        self, values: NDArray[np.float64] | None
    ) -> tuple[RawSolution | None, Candidate | None]:
        """Solve until the verifier accepts what comes out.

        A solver's tolerance can let a point through that exceeds a limit. It is excluded by cuts
        that every schedule keeps, so that bounds and infeasibility proved with them hold.
        """
        formulation = self.arrays.formulation
        raw = self._ask(values)
        while raw is not None and raw.x is not None:
            try:  # A solver may be late: what it has found is verified all the same.
                with time_limit(self.request.remaining_s() + GRACE_S):
                    candidate = self._read(raw.x)
            except TimeLimitError:
                return _cut_short(raw), None
            if not candidate.violations or formulation == PAPER:
                return raw, candidate
            form = None
            if formulation in (COMPACT, UNREDUCED):
                form = with_covers(self.form, raw.x, limit_rows(self.form), rejected=True)
            if form is None:
                raise VerificationError(candidate.violations)
            self.form = form
            after = self._ask(values)
            if after is None:
                return _cut_short(raw), None
            bounds = [solution.bound for solution in (raw, after) if solution.bound is not None]
            raw = replace(
                after,
                bound=max(bounds, default=None) if self.as_stated else after.bound,
                build_s=raw.build_s + after.build_s,
                solve_s=raw.solve_s + after.solve_s,
            )
        return raw, None

    def _ask(self, values: NDArray[np.float64] | None) -> RawSolution | None:
        """Give the form to the solver; None if no time is left."""
        request, remaining = self.request, self.request.remaining_s()
        if remaining <= 0:
            return None
        solver = backend(request.backend)
        limits = Limits(
            time_s=remaining,
            rel_gap=GAP_SHARE * request.gap,
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
            return self._left_behind(request.elapsed_s() - (request.time_limit_s - remaining))

    def _left_behind(self, solve_s: float) -> RawSolution:
        """Return the results that a solver had reported before it was abandoned."""
        self.is_late, told = True, self.latest
        x = None if told is None else told.x
        return RawSolution(
            status=SolverStatus.TIME_LIMIT,
            x=x,
            objective=None if x is None else self.form.value(x),
            bound=None if told is None else told.bound,
            solve_s=solve_s,
        )

    def _report(self, progress: BackendProgress) -> bool | None:
        if self.is_late:
            return False
        before, self.latest = self.latest, progress
        if progress.x is None and before is not None:
            self.latest = replace(progress, x=before.x)
        incumbent = None
        if self.as_stated and progress.incumbent is not None:
            incumbent = max(0.0, progress.incumbent * self.unit)
        return self.request.report(incumbent, self._proven(progress.bound))

    def _read(self, x: NDArray[np.float64]) -> Candidate:
        problem, schedule = self.problem, self.schedule(x)
        candidate = as_candidate(problem, schedule)
        if self.trimmed and not candidate.violations:
            needed = PartialSchedule.of(
                problem.graph, schedule, problem.rewards, working=problem.working_graph
            )
            tidy = as_candidate(problem, needed.schedule())
            if not tidy.violations and tidy.value <= candidate.value:
                return tidy
        return candidate

    def schedule(self, x: NDArray[np.float64]) -> Schedule:
        """Return the facts in a solution."""
        rounded = round_binaries(x, self.form)
        values = require_layout(self.form).values(rounded)
        return schedule_from_columns(self.arrays, lambda column: bool(values[column] > HALF))

    def _proven(self, bound: float | None) -> float | None:
        """Return the bound on the problem, in its unit, from one of the model; None for none."""
        if bound is None or not (self.arrays.exact and self.as_stated):
            return None
        least = float(self.problem.objective.known_bound)
        return max(least, safe_bound(self.problem, bound) * self.unit)

    def own(self, value: float | None, bound: float | None) -> ModelObjective | None:  # noqa: ARG002
        """Return the model's own objective at a value, None where it has the stated one."""
        return None

    def _conclude(self, raw: RawSolution | None, candidate: Candidate | None) -> Outcome:
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
                reason=TOO_LATE,
                build_s=self.build_s,
                statistics=statistics,
            )
        figures = (("model_value", raw.objective), ("model_bound", raw.bound))
        for name, value in (*figures, ("root_bound", raw.root_bound)):
            if value is not None:
                statistics[name] = value * self.unit
        return Outcome(
            termination=TERMINATIONS[raw.status],
            candidate=candidate,
            bound=self._proven(raw.bound) or 0.0,
            infeasible=raw.infeasible and self.arrays.exact,
            reason=self._reason(raw),
            build_s=self.build_s + raw.build_s,
            versions=backend(self.request.backend).versions(),
            statistics=statistics,
            log="".join(self.log),
        )

    def _reason(self, raw: RawSolution) -> str:
        """Return in words why there is no schedule."""
        formulation = self.arrays.formulation
        if raw.status == SolverStatus.UNBOUNDED:
            return "the objective of the model is unbounded: give the variables in it bounds"
        if not raw.infeasible:
            return f"no schedule was found within {raw.solve_s:.3g} s"
        if not self.arrays.exact:
            return (
                f"the model of {formulation.name!r} has no schedule, which proves nothing of the "
                "problem; use lazy or compact"
            )
        contradiction = self.form.contradiction()
        if contradiction is not None:
            return f"proved: {contradiction}{self.hint}"
        return infeasibility_proof(self.problem, self.further) + self.hint


def _cut_short(raw: RawSolution) -> RawSolution:
    """Return the bound proved by a solution that is not taken."""
    return replace(raw, status=SolverStatus.TIME_LIMIT, x=None, objective=None)
