"""Solve a user's model: made by `build`, with any rows, variables and objective added to it."""

from __future__ import annotations

import logging
import math
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import pyomo.core as pyo

from poetmodel.backends.compiler import compile_model, load_values
from poetmodel.backends.layout import require_layout
from poetmodel.backends.protocol import RawSolution, SolverStatus
from poetmodel.backends.sparse import csr_array
from poetmodel.backends.standard_form import round_integers
from poetmodel.clock import limit_time
from poetmodel.errors import InputError, TimeLimitError
from poetmodel.model.arrays import Label
from poetmodel.model.building import read_schedule
from poetmodel.model.compact import COMPACT
from poetmodel.model.linear import literal_limit, reduce_coefficients, scale_signed_limit
from poetmodel.model.objective import MAX_COST_UNITS, WRITES_ROW, objective_terms
from poetmodel.problem import (
    DEADLINE_ROWS,
    LinearRow,
    Problem,
    row_over_totals,
)
from poetmodel.result import ModelObjective, Termination
from poetmodel.solver.monolithic import (
    BUILD_TIMED_OUT,
    MAX_START_VIOLATION,
    ModelProof,
    schedule_point,
)
from poetmodel.solver.outcome import EQUALITY_TOLERANCE, SOLVER_ERROR, Candidate
from poetmodel.solver.request import GRACE_S
from poetmodel.solver.restatement import (
    GUIDE,
    PAGE_OUT_FAMILIES,
    added_families,
    has_problem_objective,
    may_be_rules,
)
from poetmodel.solver.statement import WRITTEN_BYTES_CUTOFF, restate
from poetmodel.solver.task import StartCheck, Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from poetmodel.backends.standard_form import StandardForm
    from poetmodel.schedule import Schedule
    from poetmodel.solver.search import Search

_LOG: Final = logging.getLogger(__name__)
MIN_WARNED_NODES: Final = 50
"""Number of nodes from which a user's model causes a warning if `subject_to` and `minimizing` can
state its additions: a problem with these is solved much faster. The model takes 4 to 100 times the
processor time for networks of 67 to 413 nodes, and a second or less for smaller ones."""
MAX_OFFSET: Final = 1e12
"""Largest constant of a user-defined objective, in units: floats have sixteen decimal digits."""


@dataclass(frozen=True, kw_only=True)
class ModelTask(Task):
    """A task stated by a model from `build` that may have added rows, variables and an objective.

    Only the compiled model shows whether a schedule satisfies the added rows.
    """

    model: pyo.ConcreteModel
    can_restate: ClassVar[bool] = False

    @classmethod
    def from_model(cls, model: pyo.ConcreteModel, formulation: str | None) -> ModelTask:
        """Return a model's task; `formulation` must match; warn if `subject_to` suits better."""
        problem = getattr(model, "problem", None)
        if not isinstance(problem, Problem):
            raise InputError(
                "solve takes a Problem or a model made by build(problem), which carries its problem"
            )
        formulation_name = model.formulation.name
        if formulation is not None and not formulation_name.startswith(formulation):
            raise InputError(
                f"formulation: the model was built as {formulation_name!r}; leave it out, or pass "
                "the problem"
            )
        if len(problem.graph.nodes) >= MIN_WARNED_NODES and may_be_rules(model):
            _LOG.warning(
                "model %s: rules over totals are solved several times faster, and over all "
                "schedules; where problem.subject_to and minimizing can state its additions, use "
                "these (%s)",
                model.name,
                GUIDE,
            )
        return cls(problem=problem, formulation=formulation_name, model=model)

    @property
    def is_exact(self) -> bool:
        """Whether the formulation is exact, and the model minimizes the problem's objective."""
        return bool(self.model.exact) and has_problem_objective(self.model)

    @property
    def planned_problem(self) -> Problem:
        """The problem against which plans are verified.

        Plans may omit page-outs that no page-in needs. If additions count page-outs, no row may
        limit the transfer time alone.
        """
        if added_families(self.model) & PAGE_OUT_FAMILIES:
            return restate(self.problem, rewards_page_outs=True)
        return self.problem

    def check_start(self, start: Schedule) -> StartCheck:
        """Check a schedule against all rows of the model, with its value in an added objective."""
        form = restate_form(compile_model(self.model), self.planned_problem)
        point = schedule_point(form, start)
        if (
            point is None
            or np.isnan(point).any()
            or form.max_violation(point) > MAX_START_VIOLATION
        ):
            return StartCheck(is_solution=False)
        if has_problem_objective(self.model):
            return StartCheck(is_solution=True)
        value = form.objective_value(point)
        return StartCheck(
            is_solution=True, model_objective=_model_objective(self.model, value, None)
        )

    def prove(self, search: Search, start: Candidate | None) -> None:
        """Solve the model, restated for the problem of `search`: see `prove_model`."""
        prove_model(self.model, search, start=start)


def prove_model(
    model: pyo.ConcreteModel,
    search: Search,
    *,
    start: Candidate | None,
) -> None:
    """Solve a model from `build`, with any additions, and verify its solution.

    Loads the final solution of each solver call into the variables of the model. A rejected
    solution that no cover cut excludes raises `VerificationError`, except for ``paper``.
    """
    started_s = time.monotonic()
    problem = search.problem
    # Only a compiled model shows whether a start satisfies the added rows.
    try:
        with limit_time(search.request.remaining_s() + GRACE_S):
            form = compile_model(model)
    except TimeLimitError:
        search.add_build_time(time.monotonic() - started_s)
        search.end(Termination.TIME_LIMIT, BUILD_TIMED_OUT)
        return
    is_problem_objective = has_problem_objective(model)
    form = restate_form(form, problem)
    if not is_problem_objective:
        unit = _objective_unit(form)
        form = replace(form, objective=form.objective / unit, offset=form.offset / unit)
    elif problem.objective.is_sum:
        unit = problem.objective.unit
        form = _with_truncated_costs(form, problem)
    else:
        unit = model.arrays.objective_unit
    search.add_build_time(time.monotonic() - started_s)
    ExtendedProof(
        search=search,
        arrays=model.arrays,
        model=model,
        form=form,
        is_problem_objective=is_problem_objective,
        hint=_reduction_hint(model),
        unit=unit,
    ).prove(start)


def _objective_unit(form: StandardForm) -> float:
    """Return the unit in which a solver minimizes a user-defined objective, a power of two.

    A solver's tolerances are absolute, so the smallest absolute cost becomes 1000 to 2000 units, or
    fewer if the largest exceeds about `MAX_COST_UNITS`, or the constant `MAX_OFFSET`.
    """
    costs = np.abs(form.objective[form.objective != 0])
    if not costs.size:
        return 1.0
    min_cost = max(costs.min() / 1000, sys.float_info.min)
    unit = max(min_cost, costs.max() / MAX_COST_UNITS, abs(form.offset) / MAX_OFFSET)
    return float(2.0 ** math.floor(math.log2(unit)))


def _in_finer_unit(form: StandardForm, x: NDArray[np.float64]) -> tuple[StandardForm, float] | None:
    """Return the form in a unit for the value of `x`, and the ratio of units; None if not finer.

    The unit is about a thousandth of the value's excess over the minimum within column bounds.
    Integer columns are fixed at their cheaper bound if one step costs more than the excess.
    """
    costs = form.sense * form.objective
    cheapest_bounds = np.where(costs > 0, form.lower, form.upper)
    used = costs != 0
    if not np.isfinite(cheapest_bounds[used]).all():
        return None
    excess = math.fsum((costs[used] * (x[used] - cheapest_bounds[used])).tolist())
    if excess <= 0:
        return None
    is_fixed = form.integer & (np.abs(costs) > excess * (1 + EQUALITY_TOLERANCE))
    max_cost = np.abs(costs[~is_fixed]).max(initial=0.0)
    constants = form.objective[is_fixed] * cheapest_bounds[is_fixed]
    offset = math.fsum([form.offset, *constants.tolist()])
    ratio = max(excess / 1000, max_cost / MAX_COST_UNITS, abs(offset) / MAX_OFFSET)
    ratio = max(2.0 ** math.floor(math.log2(ratio)), sys.float_info.min)
    if ratio >= 1:
        return None
    return replace(
        form,
        objective=np.where(is_fixed, 0.0, form.objective) / ratio,
        offset=offset / ratio,
        lower=np.where(is_fixed, cheapest_bounds, form.lower),
        upper=np.where(is_fixed, cheapest_bounds, form.upper),
    ), ratio


@dataclass(kw_only=True)  # With slots, super() would not find the base class.
class ExtendedProof(ModelProof):
    """The proof of a bound by a user's model, which may have rows that the problem lacks."""

    model: pyo.ConcreteModel
    conflict_phrase: ClassVar[str] = "and the constraints added to the model"
    drops_unneeded_decisions: ClassVar[bool] = False

    def _solve_until_accepted(
        self, start_point: NDArray[np.float64] | None
    ) -> tuple[RawSolution | None, Candidate | None]:
        """Solve; while a solution is tiny beside the costs, solve again in a finer unit.

        Only for a user-defined objective. Without a solution in the finer unit, there is no bound,
        because the coarser unit may hide better solutions.
        """
        raw, candidate = super()._solve_until_accepted(start_point)
        while raw is not None and raw.x is not None and not self.is_problem_objective:
            x = round_integers(raw.x, self.form)
            raw = replace(raw, x=x, objective=self.form.objective_value(x))
            finer = _in_finer_unit(self.form, x)
            if finer is None:
                break
            form, ratio = finer
            coarse_form, coarse_unit = self.form, self.unit
            self.form, self.unit = form, ratio * coarse_unit
            next_raw, next_candidate = super()._solve_until_accepted(x)
            if next_raw is None or next_raw.x is None:
                self.form, self.unit = coarse_form, coarse_unit
                return replace(raw, status=SolverStatus.TIME_LIMIT, bound=None), candidate
            raw = replace(
                next_raw,
                build_s=raw.build_s + next_raw.build_s,
                solve_s=raw.solve_s + next_raw.solve_s,
            )
            candidate = next_candidate
        return raw, candidate

    def extract_schedule(self, x: NDArray[np.float64]) -> Schedule:
        """Return the schedule of a solution, and load the solution into the Pyomo model."""
        load_values(self.form, x)
        return read_schedule(self.model)

    def model_objective(self, value: float | None, bound: float | None) -> ModelObjective | None:
        """Return the user-defined objective with its value and bound, in the user's unit.

        `value` and `bound` are in units of the form. The bound is weakened by the solver's error;
        one beyond the value within tolerance becomes the value, one further beyond is no proof:
        None.
        """
        if self.is_problem_objective or value is None:
            return None
        proven_bound = None
        if bound is not None and math.isfinite(bound):
            sense, tolerance = self.form.sense, SOLVER_ERROR * max(1.0, abs(bound) / 1000)
            difference = sense * (value - bound)
            if difference > tolerance:
                proven_bound = (bound - sense * tolerance) * self.unit
            elif difference >= -EQUALITY_TOLERANCE * max(1.0, abs(value)):
                proven_bound = value * self.unit
        return _model_objective(self.model, value * self.unit, proven_bound)


def _model_objective(model: pyo.ConcreteModel, value: float, bound: float | None) -> ModelObjective:
    """Return the active objective of a model with a value and a bound, in the user's unit."""
    (objective,) = model.component_data_objects(pyo.Objective, active=True)
    sense = "minimize" if objective.sense == pyo.minimize else "maximize"
    return ModelObjective(name=objective.name, sense=sense, value=value, bound=bound)


def _reduction_hint(model: pyo.ConcreteModel) -> str:
    """Return the hint for an infeasible model of ``compact`` with reductions; else ""."""
    if model.formulation != COMPACT:
        return ""
    remedy = "reductions=False"
    if may_be_rules(model):
        remedy += f", or problem.subject_to and minimizing ({GUIDE})"
    return f"; the model's reductions may exclude decisions that the constraints need: try {remedy}"


# -- surrogates ----------------------------------------------------------------------------------


def restate_form(form: StandardForm, problem: Problem) -> StandardForm:
    """Return a model's form, changed to the limits of a surrogate of the model's problem.

    Changed limits become additional rows; rows that limit the transfer time are removed unless
    `Problem.plans_all_transfers`. For the model's problem itself, returns `form`.
    """
    model = require_layout(form).model
    model_problem, objective = model.problem, problem.objective
    if problem is model_problem:
        return form
    form = _drop_transfer_deadline(form, problem)
    if problem.time_sum != model_problem.time_sum:
        for limit in problem.linear_limits:
            if limit.name == DEADLINE_ROWS[0]:
                form = _add_limit_row(form, replace(limit, name=DEADLINE_ROWS[-1]))
    if problem.usable_ram_bytes < model_problem.usable_ram_bytes:
        form = _lower_peak_limits(form, problem)
    elif problem.aux_limit_bytes != model_problem.aux_limit_bytes:
        upper_limit = problem.aux_limit_bytes or 0
        limit_row = row_over_totals(
            problem.totals, objective.coefficients, name=WRITES_ROW, upper=upper_limit
        )
        form = _add_limit_row(form, limit_row)
    for limit in problem.linear_limits:
        if limit.key == (WRITTEN_BYTES_CUTOFF, "upper"):
            form = _add_limit_row(form, replace(limit, name=WRITES_ROW, key=None))
    return form


def _with_truncated_costs(form: StandardForm, problem: Problem) -> StandardForm:
    """Return a form that minimizes the objective of `problem`, a sum, in its unit."""
    costs, offset = objective_terms(require_layout(form).model, problem)
    columns, constant = _to_form_columns(form, costs)
    objective_row = np.zeros(form.n_columns)
    objective_row[list(columns)] = list(columns.values())
    return replace(form, objective=objective_row, offset=offset + constant)


def _drop_transfer_deadline(form: StandardForm, problem: Problem) -> StandardForm:
    """Return the form without rows on transfer time; `form` if all transfers are planned."""
    if problem.plans_all_transfers:
        return form
    retained_rows = [
        row_number
        for row_number, row in enumerate(form.rows)
        if not (isinstance(row, Label) and row.family == DEADLINE_ROWS[1])
    ]
    return replace(
        form,
        matrix=form.matrix[retained_rows],
        row_lower=form.row_lower[retained_rows],
        row_upper=form.row_upper[retained_rows],
        rows=[form.rows[row_number] for row_number in retained_rows],
    )


def _add_limit_row(form: StandardForm, limit: LinearRow) -> StandardForm:
    """Return a form with a scaled row for a limit on totals; `Layout.limits` has it unscaled."""
    model = require_layout(form).model
    reduced_terms = reduce_coefficients(model.decisions.row_over_columns(limit), model.upper)
    columns: Mapping[int, float] = {}
    lower, upper = -math.inf, math.inf
    if literal_limit(reduced_terms, model.upper) < 0:
        lower = 1.0  # an empty row that no values satisfy
    else:
        row = scale_signed_limit(reduced_terms, model.upper)
        if row is None:
            return form
        columns, constant = _to_form_columns(form, row.terms)
        upper = row.upper - constant
    label = Label(limit.name, limit.key)
    shape = (1, form.n_columns)
    new_row = csr_array((list(columns.values()), list(columns), [0, len(columns)]), shape=shape)
    form = form.with_rows(new_row, [lower], [upper], [label])
    layout = require_layout(form)
    return replace(form, layout=replace(layout, limits={**layout.limits, label: reduced_terms}))


def _lower_peak_limits(form: StandardForm, problem: Problem) -> StandardForm:
    """Return a form with the smaller RAM budget of `problem`, which minimizes RAM."""
    layout = require_layout(form)
    model_problem, peak = layout.model.problem, layout.model.peak
    reduction_bytes = model_problem.usable_ram_bytes - problem.usable_ram_bytes
    limits = {
        label: replace(limit, upper=limit.upper - reduction_bytes)
        if label.family == "memory"
        else limit
        for label, limit in layout.limits.items()
    }
    upper = form.upper.copy()
    position = -1 if peak is None else layout.positions[peak]
    if position >= 0:
        upper_limit = upper[position] * problem.usable_ram_bytes / model_problem.usable_ram_bytes
        upper[position] = max(form.lower[position], upper_limit)
    return replace(form, upper=upper, layout=replace(layout, limits=limits))


def _to_form_columns(
    form: StandardForm, terms: Iterable[tuple[float, int]]
) -> tuple[dict[int, float], float]:
    """Convert terms over a model's columns to coefficients by column of a form, and a constant."""
    layout = require_layout(form)
    columns: dict[int, float] = {}
    constant = 0.0
    for value, column in terms:
        position, fixed = int(layout.positions[column]), float(layout.fixed_values[column])
        if position >= 0:
            columns[position] = value
        elif not math.isnan(fixed):
            constant += value * fixed
    return columns, constant
