"""Solve one model as a whole, of a problem or as a user extended it: solve, read, verify."""

from __future__ import annotations

import math
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poetmodel.backends.layout import form_of, layout_of
from poetmodel.backends.protocol import BackendProgress, Limits, RawSolution, SolverStatus
from poetmodel.backends.registry import backend
from poetmodel.backends.sparse import csr_array
from poetmodel.backends.standard_form import MINIMIZE, StandardForm, round_binaries
from poetmodel.backends.worker import run_interruptibly
from poetmodel.clock import rare_collections, time_limit
from poetmodel.errors import TimeLimitError, VerificationError
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.model.arrays import Label, Model
from poetmodel.model.building import estimated_build_s, read_schedule, schedule_of, state
from poetmodel.model.compact import COMPACT
from poetmodel.model.linear import as_needed, room, signed_row
from poetmodel.model.objective import MOST_UNITS, WRITES_ROW, minimized
from poetmodel.model.paper import PAPER
from poetmodel.model.unreduced import UNREDUCED
from poetmodel.problem import DEADLINE_ROWS, FEWER_BYTES, LinearRow, Problem, over_totals
from poetmodel.problem.infeasibility import limits_in_words
from poetmodel.result import OwnObjective, Termination
from poetmodel.solver.covers import limit_rows, with_covers
from poetmodel.solver.outcome import (
    EQUAL,
    SOLVER_ERROR,
    Candidate,
    Outcome,
    as_candidate,
    safe_bound,
)
from poetmodel.solver.request import GRACE_S, PATIENCE_S, Request

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pyomo.environ as pyo
    from numpy.typing import NDArray

    from poetmodel.model.formulation import Formulation
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

MOST_OFFSET: Final = 1e12
"""Largest constant of a user's objective, in units: numbers have sixteen digits."""

TOO_LATE: Final = "the time limit passed while the model was built"

ACCEPTED: Final = 1e-6
"""Largest violation of a scaled row by a start that may stand for a model's solution."""
HALF: Final = 0.5
"""A rounded decision above this is taken."""


def prove_formulation(
    problem: Problem, request: Request, formulation: str, *, start: Candidate | None
) -> Outcome:
    """Build the model of a formulation, and solve it; see `prove_model`."""
    expected_s = estimated_build_s(problem, formulation)
    if expected_s > request.remaining_s():
        reason = (
            f"building the model of {formulation!r} takes about {expected_s:.0f} s, more than the "
            "time limit"
        )
        return Outcome(termination=Termination.TIME_LIMIT, reason=reason)
    begun = time.monotonic()
    try:
        with time_limit(request.remaining_s()), rare_collections():
            model = state(problem, formulation)
    except TimeLimitError:
        reason = f"the time limit passed while the model of {formulation!r} was built"
        build_s = time.monotonic() - begun
        return Outcome(termination=Termination.TIME_LIMIT, reason=reason, build_s=build_s)
    return prove_model(model, request, start=start, trimmed=True, begun_s=begun)


def prove_model(
    model: Model | pyo.ConcreteModel,
    request: Request,
    *,
    start: Candidate | None,
    trimmed: bool,
    problem: Problem | None = None,
    begun_s: float | None = None,
) -> Outcome:
    """Solve a model, of arrays or from `build` and perhaps extended; verify what comes out.

    A valid schedule to begin from is returned if nothing better is found and the model admits it.
    `trimmed` says whether entries that nothing needs may be dropped from the solution; not under a
    user's own constraints. With a `problem` the model states that, a surrogate of its own.
    Building began at `begun_s`, on the monotonic clock, or now [s].

    Raises `VerificationError` if the verifier rejects the solution of an exact formulation.
    """
    begun_s = time.monotonic() if begun_s is None else begun_s
    arrays, extended = (model, None) if isinstance(model, Model) else (model.arrays, model)
    problem = problem or arrays.problem
    # Whether a start satisfies a user's own constraints is only known of a compiled model.
    grace_s = 0.0 if trimmed else GRACE_S
    try:
        with time_limit(request.remaining_s() + grace_s):
            form = form_of(arrays) if extended is None else compiled(extended)
    except TimeLimitError:
        build_s = time.monotonic() - begun_s
        return Outcome(termination=Termination.TIME_LIMIT, reason=TOO_LATE, build_s=build_s)
    as_stated = extended is None or states_problem(extended)
    form = restated(form, problem, as_stated=as_stated)
    unit = _own_unit(form)
    if as_stated:
        own = problem.objective.is_sum
        unit = problem.objective.unit if own else arrays.objective_unit
    else:
        form = replace(form, objective=form.objective / unit, offset=form.offset / unit)
    return _ModelProof(
        problem=problem,
        arrays=arrays,
        extended=extended,
        request=request,
        trimmed=trimmed,
        form=form,
        as_stated=as_stated,
        unit=unit,
        build_s=time.monotonic() - begun_s,
    ).run(start)


def compiled(model: pyo.ConcreteModel) -> StandardForm:
    """Return the form of a Pyomo model; Pyomo is loaded only where somebody has such a model."""
    from poetmodel.backends.compiler import compile_model

    return compile_model(model)


def start_values(form: StandardForm, schedule: Schedule) -> NDArray[np.float64] | None:
    """Return the columns of a schedule, NaN for those it says nothing of; None for ``paper``."""
    layout = layout_of(form)
    if layout.model.formulation == PAPER:
        return None
    return layout.point(form.n_columns, layout.model.relations.assign(schedule))


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


@dataclass(slots=True, kw_only=True)
class _ModelProof:
    """The proof by one compiled model."""

    problem: Problem
    """Statement of the row."""
    arrays: Model
    extended: pyo.ConcreteModel | None
    """The user's model, None where there is none."""
    request: Request
    trimmed: bool
    """As in `prove_model`."""
    form: StandardForm
    """The model as the solver gets it, cuts included."""
    as_stated: bool
    """Whether the model still minimizes what `build` stated."""
    unit: float
    """How much one unit of the form's objective is."""
    build_s: float
    """Time to build and compile the model [s]."""
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
            candidate = replace(candidate, own=self._own(value, bound))
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
        )
        stop = threading.Event()
        self.latest = None
        solve = partial(solver.solve, self.form, limits, start=values)
        solve = partial(solve, on_progress=self._report, stop=stop)
        try:
            return run_interruptibly(solve, stop, most_s=remaining + PATIENCE_S)
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
        problem, schedule = self.problem, self._schedule(x)
        candidate = as_candidate(problem, schedule)
        if self.trimmed and not candidate.violations:
            needed = PartialSchedule.of(
                problem.graph, schedule, problem.wanted, working=problem.working_graph
            )
            tidy = as_candidate(problem, needed.schedule())
            if not tidy.violations and tidy.value <= candidate.value:
                return tidy
        return candidate

    def _schedule(self, x: NDArray[np.float64]) -> Schedule:
        """Return the facts in a solution; a user's model gets its values."""
        if self.extended is not None:
            from poetmodel.backends.compiler import load_values

            load_values(self.form, x)
            return read_schedule(self.extended)
        rounded = round_binaries(x, self.form)
        values = layout_of(self.form).values(rounded)
        return schedule_of(self.arrays, lambda column: bool(values[column] > HALF))

    def _proven(self, bound: float | None) -> float | None:
        """Return the bound on the problem, in its unit, from one of the model; None for none."""
        if bound is None or not (self.arrays.exact and self.as_stated):
            return None
        least = float(self.problem.objective.least)
        return max(least, safe_bound(self.problem, bound) * self.unit)

    def _own(self, value: float | None, bound: float | None) -> OwnObjective | None:
        """Return the model's own objective at a value, None where it has the stated one.

        As everywhere, a bound counts less the solver's error, and one within it of the value is the
        value with rounding errors. One beyond the value proves nothing.
        """
        if self.as_stated or value is None or self.extended is None:
            return None
        from pyomo.core import Objective, minimize

        (objective,) = self.extended.component_data_objects(Objective, active=True)
        proven = None
        if bound is not None and math.isfinite(bound):
            sense, error = self.form.sense, SOLVER_ERROR * max(1.0, abs(bound) / 1000)
            missing = sense * (value - bound)
            if missing > error:
                proven = (bound - sense * error) * self.unit
            elif missing >= -EQUAL * max(1.0, abs(value)):
                proven = value * self.unit
        return OwnObjective(
            name=objective.name,
            sense="minimize" if objective.sense == minimize else "maximize",
            value=value * self.unit,
            bound=proven,
        )

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
            return f"proved: {contradiction}{'' if self.trimmed else _hint(formulation)}"
        if self.trimmed:
            return f"proved: no schedule keeps {limits_in_words(self.problem)} together"
        return nothing_keeps(self.problem, formulation)


def nothing_keeps(problem: Problem, formulation: Formulation | None) -> str:
    """Return in words that it is proved that no schedule keeps what was added to a model."""
    limits, hint = limits_in_words(problem), _hint(formulation)
    return f"proved: no schedule keeps {limits} and the constraints added to the model{hint}"


def _hint(formulation: Formulation | None) -> str:
    reduced = formulation == COMPACT
    return "; the reductions may drop what they need: try reductions=False" * reduced


def _cut_short(raw: RawSolution) -> RawSolution:
    """Return the bound proved by a solution that is not taken."""
    return replace(raw, status=SolverStatus.TIME_LIMIT, x=None, objective=None)


def states_problem(model: pyo.ConcreteModel) -> bool:
    """Return whether a model still minimizes what `build` stated: nobody replaced or changed it."""
    objective = model.component("objective")
    return (
        getattr(objective, "active", False)
        and getattr(objective, "sense", None) == MINIMIZE
        and getattr(objective, "expr", None) is getattr(model, "stated_objective", None)
    )


# -- surrogates ----------------------------------------------------------------------------------


def restated(form: StandardForm, problem: Problem, *, as_stated: bool) -> StandardForm:
    """Return the form of a model of a problem for one of that problem's surrogates.

    The surrogate may be measured by a known schedule, or have fewer bytes than one has. A user's
    own objective stays, where the model is not `as_stated`.
    """
    model = layout_of(form).model
    before, objective = model.problem, problem.objective
    if problem is before:
        return form
    form = _with_planned_transfers(form, problem)
    if problem.time_sum != before.time_sum:
        for limit in problem.linear_limits:
            if limit.name == DEADLINE_ROWS[0]:
                form = _with_limit(form, replace(limit, name=DEADLINE_ROWS[-1]))
    if problem.usable_ram_bytes < before.usable_ram_bytes:
        form = _with_lower_peak(form, problem)
    elif problem.aux_limit_bytes != before.aux_limit_bytes:
        most = problem.aux_limit_bytes or 0
        fewer = over_totals(problem, objective.coefficients, name=WRITES_ROW, upper=most)
        form = _with_limit(form, fewer)
    for limit in problem.linear_limits:
        if limit.key == (FEWER_BYTES, "upper"):
            form = _with_limit(form, replace(limit, name=WRITES_ROW, key=None))
    if objective.is_sum and objective != before.objective and as_stated:
        costs, offset = minimized(model, problem)
        columns, added = _in_form(form, costs)
        objective_row = np.zeros(form.n_columns)
        objective_row[list(columns)] = list(columns.values())
        form = replace(form, objective=objective_row, offset=offset + added)
    return form


def _with_planned_transfers(form: StandardForm, problem: Problem) -> StandardForm:
    """Return a form without a limit on the time of transfers, where plans do not make all."""
    if problem.plans_all_transfers:
        return form
    kept = [
        number
        for number, row in enumerate(form.rows)
        if not (isinstance(row, Label) and row.family == DEADLINE_ROWS[1])
    ]
    return replace(
        form,
        matrix=form.matrix[kept],
        row_lower=form.row_lower[kept],
        row_upper=form.row_upper[kept],
        rows=[form.rows[number] for number in kept],
    )


def _with_limit(form: StandardForm, limit: LinearRow) -> StandardForm:
    """Return a form with a limit over totals besides."""
    model = layout_of(form).model
    needed = as_needed(model.decisions.stated(limit), model.upper)
    columns: Mapping[int, float] = {}
    lower, upper = -math.inf, math.inf
    if room(needed, model.upper) < 0:
        lower = 1.0  # a row of nothing, which no values satisfy
    else:
        row = signed_row(needed, model.upper)
        if row is None:
            return form
        columns, constant = _in_form(form, row.terms)
        upper = row.upper - constant
    label = Label(limit.name, limit.key)
    shape = (1, form.n_columns)
    block = csr_array((list(columns.values()), list(columns), [0, len(columns)]), shape=shape)
    form = form.with_rows(block, [lower], [upper], [label])
    layout = layout_of(form)
    return replace(form, layout=replace(layout, limits={**layout.limits, label: needed}))


def _with_lower_peak(form: StandardForm, problem: Problem) -> StandardForm:
    """Return a form whose peak is lower, of a model that minimizes it."""
    layout = layout_of(form)
    before, peak = layout.model.problem, layout.model.peak
    lower = before.usable_ram_bytes - problem.usable_ram_bytes
    limits = {
        label: replace(limit, upper=limit.upper - lower) if label.family == "memory" else limit
        for label, limit in layout.limits.items()
    }
    upper = form.upper.copy()
    position = -1 if peak is None else layout.positions[peak]
    if position >= 0:
        most = upper[position] * problem.usable_ram_bytes / before.usable_ram_bytes
        upper[position] = max(form.lower[position], most)
    return replace(form, upper=upper, layout=replace(layout, limits=limits))


def _in_form(
    form: StandardForm, terms: Iterable[tuple[float, int]]
) -> tuple[dict[int, float], float]:
    """Return terms over a model as coefficients of columns of a form, and their constant part."""
    layout = layout_of(form)
    columns: dict[int, float] = {}
    constant = 0.0
    for value, column in terms:
        position, fixed = int(layout.positions[column]), float(layout.fixed[column])
        if position >= 0:
            columns[position] = value
        elif not math.isnan(fixed):
            constant += value * fixed
    return columns, constant
