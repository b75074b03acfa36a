"""A user's model of a problem, with whatever was added to it: it is solved as it is."""

from __future__ import annotations

import logging
import math
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np
import pyomo.core as pyo
from pyomo.core.expr import identify_variables

from poetmodel.backends.compiler import compile_model, load_values
from poetmodel.backends.layout import require_layout
from poetmodel.backends.sparse import csr_array
from poetmodel.clock import time_limit
from poetmodel.errors import InputError, TimeLimitError
from poetmodel.model.arrays import Label
from poetmodel.model.building import read_schedule
from poetmodel.model.compact import COMPACT
from poetmodel.model.linear import literal_slack, reduce_coefficients, scale_signed_limit
from poetmodel.model.objective import MAX_UNITS, WRITES_ROW, objective_terms
from poetmodel.problem import (
    DEADLINE_ROWS,
    WRITTEN_BYTES_CUTOFF,
    LinearRow,
    Problem,
    row_over_totals,
)
from poetmodel.result import ModelObjective
from poetmodel.solver.monolithic import ModelProof, too_late
from poetmodel.solver.outcome import (
    EQUAL,
    SOLVER_ERROR,
    Candidate,
    Outcome,
)
from poetmodel.solver.request import GRACE_S, Request
from poetmodel.solver.restatement import restatement
from poetmodel.solver.task import Task

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from poetmodel.backends.standard_form import StandardForm
    from poetmodel.model.formulation import Formulation
    from poetmodel.schedule import Schedule

_LOG: Final = logging.getLogger(__name__)
MANY_NODES: Final = 50
"""Nodes from which a model takes several times as long as its problem with own constraints: 4 to
100 times the processor time for networks of 67 to 413 nodes, and a second or less below."""
MOST_OFFSET: Final = 1e12
"""Largest constant of a user's objective, in units: numbers have sixteen digits."""
PAGE_OUTS: Final = frozenset({"paged_out", "M_out"})
"""Families of variables that say what is paged out."""


@dataclass(frozen=True, kw_only=True)
class ModelTask(Task):
    """A model that `build` made, with whatever was added to it.

    Whether a schedule keeps its rows is known only once it is compiled.
    """

    model: pyo.ConcreteModel
    as_rules: str | None = None
    """What was added to the model as a call of `subject_to` and `minimizing`, where they say it."""
    restates: ClassVar[bool] = False

    @classmethod
    def of(cls, model: pyo.ConcreteModel, formulation: str | None) -> ModelTask:
        """Return the task of a model, which is solved as it was built."""
        problem = getattr(model, "problem", None)
        if not isinstance(problem, Problem):
            raise InputError(
                "solve takes a Problem or a model made by build(problem), which carries its problem"
            )
        name = model.formulation.name
        if formulation is not None and not name.startswith(formulation):
            raise InputError(
                f"formulation: the model was built as {name!r}; leave it out, or pass the problem"
            )
        as_rules = restatement(model)
        if as_rules is not None and len(problem.graph.nodes) >= MANY_NODES:
            _LOG.warning(
                "model %s: what was added can be stated as %s, which is solved several times "
                "faster, and over all schedules",
                model.name,
                as_rules,
            )
        return cls(problem=problem, formulation=name, model=model, as_rules=as_rules)

    @property
    def exact(self) -> bool:
        """Whether what is proved of it holds for the problem."""
        return bool(self.model.exact) and states_problem(self.model)

    @property
    def planned(self) -> Problem:
        """The problem, with page-outs that no page-in needs where something added wants them."""
        if names_page_outs(self.model):
            return self.problem.surrogate(wants_page_outs=True)
        return self.problem

    def prove(
        self,
        stated: Problem,
        request: Request,
        start: Candidate | None,
        bound: float = 0.0,  # noqa: ARG002 - a model is solved as a whole
    ) -> Outcome:
        """Solve the model, for a surrogate of its problem."""
        return prove_model(self.model, request, start=start, problem=stated, as_rules=self.as_rules)


def prove_model(
    model: pyo.ConcreteModel,
    request: Request,
    *,
    start: Candidate | None,
    problem: Problem | None = None,
    as_rules: str | None = None,
) -> Outcome:
    """Solve a model from `build`, perhaps extended; verify what comes out.

    A valid schedule to begin from is returned if nothing better is found and the model admits it.
    With a `problem` the model states that, a surrogate of its own. `as_rules` states what was added
    to the model without it, for the reason of a model that has no schedule.

    Raises `VerificationError` if the verifier rejects the solution of an exact formulation.
    """
    begun_s = time.monotonic()
    problem = problem or model.problem
    # Whether a start satisfies a user's own constraints is only known of a compiled model.
    try:
        with time_limit(request.remaining_s() + GRACE_S):
            form = compile_model(model)
    except TimeLimitError:
        return too_late(time.monotonic() - begun_s)
    as_stated = states_problem(model)
    form = restated(form, problem, as_stated=as_stated)
    unit = _own_unit(form)
    if as_stated:
        own = problem.objective.is_sum
        unit = problem.objective.unit if own else model.arrays.objective_unit
    else:
        form = replace(form, objective=form.objective / unit, offset=form.offset / unit)
    return ExtendedProof(
        problem=problem,
        arrays=model.arrays,
        model=model,
        request=request,
        form=form,
        as_stated=as_stated,
        hint=_hint(model.formulation, as_rules),
        unit=unit,
        build_s=time.monotonic() - begun_s,
    ).run(start)


def _own_unit(form: StandardForm) -> float:
    """Return the unit in which a solver gets a user's objective.

    Its tolerances are absolute: the smallest cost counts a thousand, as far as the largest is not
    above a million. A power of two changes no digit.
    """
    costs = np.abs(form.objective[form.objective != 0])
    if not costs.size:
        return 1.0
    least = max(costs.min() / 1000, sys.float_info.min)
    unit = max(least, costs.max() / MAX_UNITS, abs(form.offset) / MOST_OFFSET)
    return float(2.0 ** math.floor(math.log2(unit)))


@dataclass(slots=True, kw_only=True)
class ExtendedProof(ModelProof):
    """The proof by a user's model, whose rows may want what the problem does not."""

    model: pyo.ConcreteModel
    further: ClassVar[str] = "and the constraints added to the model"
    trimmed: ClassVar[bool] = False

    def schedule(self, x: NDArray[np.float64]) -> Schedule:
        """Return the facts in a solution, whose values the model gets."""
        load_values(self.form, x)
        return read_schedule(self.model)

    def own(self, value: float | None, bound: float | None) -> ModelObjective | None:
        """Return the model's own objective at a value, None where it has the stated one.

        As everywhere, a bound counts less the solver's error, and one within it of the value is the
        value with rounding errors. One beyond the value proves nothing.
        """
        if self.as_stated or value is None:
            return None
        (objective,) = self.model.component_data_objects(pyo.Objective, active=True)
        proven = None
        if bound is not None and math.isfinite(bound):
            sense, error = self.form.sense, SOLVER_ERROR * max(1.0, abs(bound) / 1000)
            missing = sense * (value - bound)
            if missing > error:
                proven = (bound - sense * error) * self.unit
            elif missing >= -EQUAL * max(1.0, abs(value)):
                proven = value * self.unit
        return ModelObjective(
            name=objective.name,
            sense="minimize" if objective.sense == pyo.minimize else "maximize",
            value=value * self.unit,
            bound=proven,
        )


def states_problem(model: pyo.ConcreteModel) -> bool:
    """Return whether a model still minimizes what `build` stated: nobody replaced or changed it."""
    objective = model.component("objective")
    return (
        getattr(objective, "active", False)
        and getattr(objective, "sense", None) == pyo.minimize
        and getattr(objective, "expr", None) is getattr(model, "stated_objective", None)
    )


def names_page_outs(model: pyo.ConcreteModel) -> bool:
    """Return whether rows, or an objective, that were added to a model name page-outs."""
    expressions = [
        row.body
        for row in model.component_data_objects(pyo.Constraint, active=True)
        if row.parent_component().name not in model.stated_rows
    ]
    if not states_problem(model):
        objectives = model.component_data_objects(pyo.Objective, active=True)
        expressions += [objective.expr for objective in objectives]
    return any(
        variable.parent_component().local_name in PAGE_OUTS
        for expression in expressions
        for variable in identify_variables(expression)
    )


def _hint(formulation: Formulation | None, as_rules: str | None) -> str:
    """Return what to try if a reduced model has no schedule."""
    if formulation != COMPACT:
        return ""
    remedy = "reductions=False" if as_rules is None else as_rules
    return f"; the reductions may drop what they need: try {remedy}"


# -- surrogates ----------------------------------------------------------------------------------


def restated(form: StandardForm, problem: Problem, *, as_stated: bool) -> StandardForm:
    """Return the form of a model of a problem for one of that problem's surrogates.

    The surrogate may be measured by a known schedule, or have fewer bytes than one has. A user's
    own objective stays, where the model is not `as_stated`.
    """
    model = require_layout(form).model
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
        fewer = row_over_totals(problem, objective.coefficients, name=WRITES_ROW, upper=most)
        form = _with_limit(form, fewer)
    for limit in problem.linear_limits:
        if limit.key == (WRITTEN_BYTES_CUTOFF, "upper"):
            form = _with_limit(form, replace(limit, name=WRITES_ROW, key=None))
    if objective.is_sum and objective != before.objective and as_stated:
        costs, offset = objective_terms(model, problem)
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
    model = require_layout(form).model
    needed = reduce_coefficients(model.decisions.row_over_columns(limit), model.upper)
    columns: Mapping[int, float] = {}
    lower, upper = -math.inf, math.inf
    if literal_slack(needed, model.upper) < 0:
        lower = 1.0  # a row of nothing, which no values satisfy
    else:
        row = scale_signed_limit(needed, model.upper)
        if row is None:
            return form
        columns, constant = _in_form(form, row.terms)
        upper = row.upper - constant
    label = Label(limit.name, limit.key)
    shape = (1, form.n_columns)
    block = csr_array((list(columns.values()), list(columns), [0, len(columns)]), shape=shape)
    form = form.with_rows(block, [lower], [upper], [label])
    layout = require_layout(form)
    return replace(form, layout=replace(layout, limits={**layout.limits, label: needed}))


def _with_lower_peak(form: StandardForm, problem: Problem) -> StandardForm:
    """Return a form whose peak is lower, of a model that minimizes it."""
    layout = require_layout(form)
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
    layout = require_layout(form)
    columns: dict[int, float] = {}
    constant = 0.0
    for value, column in terms:
        position, fixed = int(layout.positions[column]), float(layout.fixed[column])
        if position >= 0:
            columns[position] = value
        elif not math.isnan(fixed):
            constant += value * fixed
    return columns, constant
