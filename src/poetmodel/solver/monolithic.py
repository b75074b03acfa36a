"""Solve one Pyomo model as it was built: compile, solve, read, verify."""

from __future__ import annotations

import math
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from pyomo.core import Objective, minimize

from poetmodel.backends.compiler import compile_model, load_values
from poetmodel.backends.protocol import Limits, SolverStatus
from poetmodel.backends.registry import backend
from poetmodel.backends.worker import run_interruptibly
from poetmodel.errors import TimeLimitError, VerificationError
from poetmodel.heuristics.trimming import trim
from poetmodel.model import read_schedule
from poetmodel.model.compact import COMPACT
from poetmodel.model.paper import PAPER
from poetmodel.model.quantities import MOST_UNITS
from poetmodel.model.unreduced import UNREDUCED
from poetmodel.problem.infeasibility import limits_in_words
from poetmodel.result import OwnObjective, Termination
from poetmodel.solver.covers import limit_rows, with_covers
from poetmodel.solver.outcome import (
    EQUAL,
    SOLVER_ERROR,
    Candidate,
    Outcome,
    least_value,
    safe_bound,
    verify_schedule,
)
from poetmodel.solver.overlap import states_problem
from poetmodel.solver.request import SolveProgress
from poetmodel.time_limit import time_limit

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyomo.environ as pyo
    from numpy.typing import NDArray

    from poetmodel.backends.protocol import BackendProgress, RawSolution
    from poetmodel.backends.standard_form import StandardForm
    from poetmodel.schedule import Schedule
    from poetmodel.solver.request import Request

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
"""What each way of a back end to stop means for a solve."""

GAP_SHARE: Final = 0.99
"""Part of the gap tolerance that a solver may leave; its bound is reduced by up to the rest."""

MOST_OFFSET: Final = 1e12
"""Largest constant of a user's objective, in units: numbers have sixteen digits."""

ACCEPTED: Final = 1e-6
"""Largest violation of a scaled row by a start that may stand for a model's solution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiled:
    model: pyo.ConcreteModel
    form: StandardForm
    build_s: float
    as_stated: bool
    """Whether the model still minimizes what `build` stated."""
    unit: float
    """How much one unit of the form's objective is."""

    @classmethod
    def of(cls, model: pyo.ConcreteModel, form: StandardForm, build_s: float) -> _Compiled:
        as_stated = states_problem(model)
        unit = float(model.objective_unit) if as_stated else _own_unit(form)
        if not as_stated:
            form = replace(form, objective=form.objective / unit, offset=form.offset / unit)
        return cls(model=model, form=form, build_s=build_s, as_stated=as_stated, unit=unit)

    def own(self, value: float | None, bound: float | None) -> OwnObjective | None:
        """Return the model's own objective at a value, None where it has the stated one.

        As everywhere, a bound counts less the solver's error, and one within it of the value is the
        value with rounding errors. One beyond the value proves nothing.
        """
        if self.as_stated or value is None:
            return None
        (objective,) = self.model.component_data_objects(Objective, active=True)
        proven = None
        if bound is not None and math.isfinite(bound):
            sense, error = self.form.sense, SOLVER_ERROR * max(1.0, abs(bound) / 1000)
            missing = sense * (value - bound)
            if missing > error:
                proven = self.quantity(bound - sense * error)
            elif missing >= -EQUAL * max(1.0, abs(value)):
                proven = self.quantity(value)
        return OwnObjective(
            name=objective.name,
            sense="minimize" if objective.sense == minimize else "maximize",
            value=self.quantity(value),
            bound=proven,
        )

    @property
    def bounds_problem(self) -> bool:
        """Whether the model's bound holds for the problem."""
        return bool(self.model.exact) and self.as_stated

    def bound(self, bound: float) -> float:
        """Return what a solver's bound of the model proves of the problem, in its unit."""
        problem = self.model.problem
        return max(least_value(problem), self.quantity(safe_bound(problem, bound)))

    def quantity(self, objective: float) -> float:
        """Return the form's objective in the unit of the minimized quantity, or of the user's."""
        return objective * self.unit


def _own_unit(form: StandardForm) -> float:
    """Return the unit in which a solver gets a user's objective.

    Its tolerances are absolute: the smallest cost counts a thousand, as far as the largest is not
    above a million. A power of two changes no digit.
    """
    costs = np.abs(form.objective[form.objective != 0])
    if not costs.size:
        return 1.0
    least = max(costs.min() / 1000, sys.float_info.min)
    unit = max(least, costs.max() / MOST_UNITS, abs(form.offset) / MOST_OFFSET)
    return float(2.0 ** math.floor(math.log2(unit)))


def solve_model(
    model: pyo.ConcreteModel,
    request: Request,
    *,
    start: Candidate | None,
    trimmed: bool,
    build_s: float = 0.0,
) -> Outcome:
    """Solve a model and verify what comes out.

    Parameters
    ----------
    model : ConcreteModel
        From `build`, perhaps extended.
    request : Request
        Solver and limits.
    start : Candidate or None
        A valid schedule to begin from; returned if nothing better is found and the model admits it.
    trimmed : bool
        Whether entries that nothing needs may be dropped from the solution; not under a user's own
        constraints.
    build_s : float
        Time that building took so far [s].

    Raises
    ------
    VerificationError
        If the verifier rejects the solution of a formulation that claims to be exact.
    """
    begun = time.monotonic()
    # Whether a start satisfies a user's own constraints is only known of a compiled model.
    limit_s = request.remaining_s() if trimmed else math.inf
    try:
        with time_limit(limit_s):
            form = compile_model(model)
    except TimeLimitError:
        return Outcome(
            termination=Termination.TIME_LIMIT,
            candidate=start,
            reason="the time limit passed while the model was built",
            build_s=build_s + time.monotonic() - begun,
        )
    compiled = _Compiled.of(model, form, build_s + time.monotonic() - begun)
    form = compiled.form
    values = None if start is None else start_values(model, form, start.schedule)
    fallback = start if values is not None and _admits(form, values) else None
    raw, candidate = _search(compiled, request, values, trimmed=trimmed)
    value, bound = (None, None) if raw is None else (raw.objective, raw.bound)
    if (
        values is not None
        and fallback is not None
        and (candidate is None or (trimmed and fallback.value < candidate.value))
    ):
        candidate, value = fallback, form.value(values)
    if candidate is not None:
        candidate = replace(candidate, own=compiled.own(value, bound))
    return _conclude(compiled, request, raw, candidate, trimmed=trimmed)


def start_values(
    model: pyo.ConcreteModel, form: StandardForm, schedule: Schedule
) -> NDArray[np.float64] | None:
    """Return the columns of a schedule, NaN for those it says nothing of; None for ``paper``."""
    if model.formulation == PAPER:
        return None
    values = np.full(form.n_columns, np.nan)
    column = {id(variable): j for j, variable in enumerate(form.columns)}
    for variable, value in model.relations.assign(schedule):
        j = column.get(id(variable))
        if j is not None:
            values[j] = value
    return values


def _admits(form: StandardForm, values: NDArray[np.float64]) -> bool:
    return not np.isnan(values).any() and form.violation(values) <= ACCEPTED


def _run(
    compiled: _Compiled, request: Request, values: NDArray[np.float64] | None
) -> RawSolution | None:
    remaining = request.remaining_s()
    if remaining <= 0:
        return None
    solver = backend(request.backend)
    pieces: list[str] = []
    limits = Limits(
        time_s=remaining,
        rel_gap=GAP_SHARE * request.gap,
        threads=request.threads,
        seed=request.seed,
        log=pieces.append,
    )

    def report(progress: BackendProgress) -> bool | None:
        return _report(compiled, request, progress)

    def attempt(stop: threading.Event) -> RawSolution:
        return solver.solve(compiled.form, limits, start=values, on_progress=report, stop=stop)

    stop = threading.Event()
    raw = run_interruptibly(lambda: attempt(stop), stop)
    return replace(raw, log="".join(pieces) or raw.log)


def _report(compiled: _Compiled, request: Request, progress: BackendProgress) -> bool | None:
    if request.on_progress is None:
        return None
    bound = None
    if compiled.bounds_problem and progress.bound is not None:
        bound = compiled.bound(progress.bound)
    incumbent = None
    if compiled.as_stated and progress.incumbent is not None:
        incumbent = max(0.0, compiled.quantity(progress.incumbent))
    return request.on_progress(
        SolveProgress(seconds=request.elapsed_s(), incumbent=incumbent, bound=bound)
    )


def _search(
    compiled: _Compiled,
    request: Request,
    values: NDArray[np.float64] | None,
    *,
    trimmed: bool,
) -> tuple[RawSolution | None, Candidate | None]:
    """Solve until the verifier accepts what comes out.

    A solver's tolerance can let a point through that exceeds a limit. It is excluded by cuts that
    every schedule keeps, so that bounds and infeasibility proved with them hold.
    """
    model = compiled.model
    raw = _run(compiled, request, values)
    while raw is not None and raw.x is not None:
        candidate = _read(compiled, raw.x, trimmed=trimmed)
        if not candidate.violations or model.formulation == PAPER:
            return raw, candidate
        form = None
        if model.formulation in (COMPACT, UNREDUCED):
            rows = limit_rows(compiled.form)
            form = with_covers(compiled.form, raw.x, rows, rejected=True)
        if form is None:
            raise VerificationError(candidate.violations)
        compiled = replace(compiled, form=form)
        raw = _joined(raw, _run(compiled, request, values), as_stated=compiled.as_stated)
    return raw, None


def _joined(before: RawSolution, after: RawSolution | None, *, as_stated: bool) -> RawSolution:
    """Return what two runs found together, the second one on a tighter model."""
    if after is None:
        return replace(before, status=SolverStatus.TIME_LIMIT, x=None, objective=None)
    bounds = [raw.bound for raw in (before, after) if raw.bound is not None]
    return replace(
        after,
        bound=max(bounds, default=None) if as_stated else after.bound,
        build_s=before.build_s + after.build_s,
        solve_s=before.solve_s + after.solve_s,
    )


def _conclude(
    compiled: _Compiled,
    request: Request,
    raw: RawSolution | None,
    candidate: Candidate | None,
    *,
    trimmed: bool,
) -> Outcome:
    if raw is None:
        return Outcome(
            termination=Termination.TIME_LIMIT,
            candidate=candidate,
            reason="the time limit passed while the model was built",
            build_s=compiled.build_s,
            statistics=_statistics(compiled, None),
        )
    bound = 0.0
    if compiled.bounds_problem and raw.bound is not None:
        bound = compiled.bound(raw.bound)
    proved_nothing = raw.infeasible and not compiled.model.exact
    return Outcome(
        termination=TERMINATIONS[raw.status],
        candidate=candidate,
        bound=bound,
        infeasible=raw.infeasible and not proved_nothing,
        reason=_reason(compiled, raw, own_rows=not trimmed, proved_nothing=proved_nothing),
        build_s=compiled.build_s + raw.build_s,
        solve_s=raw.solve_s,
        versions=backend(request.backend).versions(),
        statistics=_statistics(compiled, raw),
        log=raw.log or "",
    )


def _read(compiled: _Compiled, x: NDArray[np.float64], *, trimmed: bool) -> Candidate:
    model = compiled.model
    load_values(compiled.form, x)
    schedule = read_schedule(model)
    candidate = verify_schedule(model.problem, schedule)
    if trimmed and not candidate.violations:
        tidy = verify_schedule(model.problem, trim(model.problem.graph, schedule))
        if not tidy.violations and tidy.value <= candidate.value:
            return tidy
    return candidate


def _reason(compiled: _Compiled, raw: RawSolution, *, own_rows: bool, proved_nothing: bool) -> str:
    name = compiled.model.formulation.name
    if proved_nothing:
        return (
            f"the model of {name!r} has no schedule, which proves nothing of the problem; "
            "use lazy or compact"
        )
    if raw.status == SolverStatus.UNBOUNDED:
        return "the objective of the model is unbounded: give the variables in it bounds"
    if raw.infeasible:
        reduced = own_rows and compiled.model.formulation == COMPACT
        hint = "; the reductions may drop what they need: try reductions=False" * reduced
        contradiction = compiled.form.contradiction()
        if contradiction is not None:
            return f"proved: {contradiction}{hint}"
        limits = limits_in_words(compiled.model.problem)
        if not own_rows:
            return f"proved: no schedule keeps {limits} together"
        return f"proved: no schedule keeps {limits} and the constraints added to the model{hint}"
    return f"no schedule was found within {raw.solve_s:.3g} s"


def _statistics(compiled: _Compiled, raw: RawSolution | None) -> dict[str, Any]:
    form = compiled.form
    statistics: dict[str, Any] = {
        "columns": form.n_columns,
        "rows": form.n_rows,
        "nonzeros": int(form.matrix.nnz),
        "nodes": None if raw is None else raw.nodes,
    }
    if raw is not None and raw.objective is not None:
        statistics["model_value"] = compiled.quantity(raw.objective)
    if raw is not None and raw.bound is not None:
        statistics["model_bound"] = compiled.quantity(raw.bound)
    return statistics
