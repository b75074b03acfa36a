"""Compile a Pyomo model to a `StandardForm`, and write a solution back to its variables."""

from __future__ import annotations

import math
import sys
from array import array
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyomo.core as pyo
from pyomo.common.errors import InvalidConstraintError, InvalidExpressionError
from pyomo.core.expr.numvalue import polynomial_degree
from pyomo.repn.linear import LinearRepnVisitor
from pyomo.repn.util import (
    FileDeterminism,
    FileDeterminism_to_SortComponents,
    OrderedVarRecorder,
    categorize_valid_components,
)

from poetmodel.backends.sparse import csr_array
from poetmodel.backends.standard_form import (
    MAXIMIZE,
    MINIMIZE,
    ROUNDING_TOLERANCE,
    Layout,
    StandardForm,
    contains_zero,
    round_integers,
)
from poetmodel.clock import check_time_limit
from poetmodel.errors import ModelError, join_names
from poetmodel.model.view import unchanged_constraints

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import ArrayLike, NDArray

    from poetmodel.model.arrays import Label, Model

_join_names: Final = partial(join_names, max_names=10)
"""Function that joins names; if there are 12 or more, it names ten and states how many remain."""
_DECLARATION_ORDER: Final = FileDeterminism_to_SortComponents(FileDeterminism.ORDERED)
"""Sort option: components in the order in which the model declares them."""


def compile_model(model: Any) -> StandardForm:
    """Return the standard form of a linear Pyomo model with one active objective.

    Rows are in the order of the model, components of variables in the order of their first mention.
    Fixed variables are constants; variables without nonzero coefficients have no column. Rows that
    are unchanged since `build` are copied from its arrays. A violated constraint without unfixed
    variables makes the model infeasible: the form then has no columns and one infeasible row.

    Raises
    ------
    ModelError
        If the model is not linear with one active objective, or has an unsupported component,
        domain or value, or a variable of another model. Names up to 11 items of each kind.
    TimeLimitError
        Once the limit of `poetmodel.clock.limit_time` has passed.
    """
    _check_components(model)
    objective = _single_objective(model)
    try:
        rows = _RowCollector(model, objective)
    except (InvalidConstraintError, InvalidExpressionError) as error:
        raise ModelError(_nonlinear_errors(model, objective, str(error))) from error
    except ValueError as error:
        raise ModelError(f"model {model.name!r}: {' '.join(str(error).split())}") from error
    sense = MINIMIZE if objective.sense == pyo.minimize else MAXIMIZE
    if rows.contradiction is not None:  # return a form without columns and with one infeasible row
        form = StandardForm.from_arrays(
            np.zeros((1, 0)), [], row_lower=1.0, sense=sense, rows=(rows.contradiction,)
        )
        layout = None if rows.unchanged_rows is None else rows.unchanged_rows.layout({})
        return replace(form, model=model, layout=layout)
    check_time_limit()
    matrix, costs, columns = rows.arrays()
    check_time_limit()
    _check_columns(columns, model)
    check_time_limit()
    bounds = [variable.bounds for variable in columns]
    form = StandardForm.from_arrays(
        matrix,
        costs,
        lower=[-np.inf if lower is None else lower for lower, _ in bounds],
        upper=[np.inf if upper is None else upper for _, upper in bounds],
        integer=[not variable.is_continuous() for variable in columns],
        row_lower=rows.lower,
        row_upper=rows.upper,
        offset=rows.offset,
        sense=sense,
        columns=columns,
        rows=tuple(rows.constraints),
    )
    position_by_id = {id(variable): j for j, variable in enumerate(columns)}
    unused = tuple(
        variable
        for variable in _iterate_variables(model)
        if id(variable) not in position_by_id and not variable.fixed
    )
    layout = None if rows.unchanged_rows is None else rows.unchanged_rows.layout(position_by_id)
    return replace(form, unused=unused, model=model, layout=layout)


def load_values(form: StandardForm, x: ArrayLike) -> None:
    """Write a solution, its integers rounded, into the variables of the form's Pyomo model.

    An unfixed variable without a column keeps its value if bounds and domain allow it; otherwise it
    becomes the allowed value nearest to 0.
    """
    if form.model is None:
        raise ModelError("form: was made from arrays; there are no variables to write to")
    values = round_integers(x, form)
    for variable, value, is_integer in zip(
        form.columns, values.tolist(), form.integer.tolist(), strict=True
    ):
        variable.set_value(int(value) if is_integer else value, skip_validation=True)
    for variable in form.unused:
        variable.set_value(_allowed_value(variable), skip_validation=True)


class _RowCollector:
    """Collects objective and constraints of a model as coefficient rows, in the model's order.

    Pyomo's standard-form compiler does the same, but imports ``scipy.stats``, which takes longer
    than solving a small model.
    """

    def __init__(self, model: Any, objective: Any) -> None:
        self.variables: dict[int, Any] = {}
        """Registered variables, by `id`."""
        self._position_by_id: dict[int, int] = {}
        self._recorder = OrderedVarRecorder(
            self.variables, self._position_by_id, _DECLARATION_ORDER
        )
        self._walk_expression = LinearRepnVisitor({}, var_recorder=self._recorder).walk_expression
        self.unchanged_rows = _UnchangedRows(model) if hasattr(model, "arrays") else None
        """Rows that are unchanged since `build` made them; None for a model of another origin."""
        self.constraints: list[Any] = []
        """Origin of each row: a row label of `build`, or the Pyomo constraint."""
        self.lower: list[float] = []
        """Lower bound of each row, constants moved to this side."""
        self.upper: list[float] = []
        """Upper bound of each row, constants moved to this side."""
        self._values = array("d")
        self._positions = array("i")
        self._row_ends = [0]
        self.contradiction: str | None = None
        """Name of the first violated constraint without unfixed variables; None without one."""
        linear = self._linearize(objective, objective.expr)
        self.offset = float(linear.constant)
        self._costs = {self._position_by_id[key]: value for key, value in linear.linear.items()}
        for constraint in model.component_data_objects(
            pyo.Constraint, active=True, sort=_DECLARATION_ORDER
        ):
            check_time_limit()
            if not self._add_constraint(constraint):
                self.contradiction = constraint.name
                return

    def _linearize(self, item: Any, expression: Any) -> Any:
        """Return Pyomo's linear representation of an expression; register its variables."""
        repn = self._walk_expression(expression)
        if repn.nonlinear is not None:
            raise InvalidExpressionError(f"{item.name}: has terms that are not linear.")
        return repn

    def _add_constraint(self, constraint: Any) -> bool:
        """Append the rows of a constraint; stop and return False at a violated constant row."""
        if self.unchanged_rows is not None and id(constraint) in self.unchanged_rows.rows:
            rows = self.unchanged_rows.rows[id(constraint)]
            return all(self._add_unchanged_row(self.unchanged_rows, row) for row in rows)
        lower, body, upper = constraint.to_bounded_expression()
        if lower is None and upper is None:
            return True
        linear = self._linearize(constraint, body)
        lower = -math.inf if lower is None else pyo.value(lower) - linear.constant
        upper = math.inf if upper is None else pyo.value(upper) - linear.constant
        if not linear.linear:
            return bool(contains_zero(lower, upper))
        self.constraints.append(constraint)
        self.lower.append(lower)
        self.upper.append(upper)
        self._positions.extend(map(self._position_by_id.__getitem__, linear.linear))
        self._values.extend(linear.linear.values())
        self._row_ends.append(len(self._values))
        return True

    def _add_unchanged_row(self, source: _UnchangedRows, row: int) -> bool:
        """Append a row from the arrays of `build`; return False if it is constant and violated."""
        columns, values = source.terms(row)
        constants = source.fixed_values[columns]
        is_unfixed = np.isnan(constants)
        constant = 0.0 if is_unfixed.all() else float(values[~is_unfixed] @ constants[~is_unfixed])
        lower = source.model.row_lower[row] - constant
        upper = source.model.row_upper[row] - constant
        columns, values = columns[is_unfixed], values[is_unfixed]
        if not columns.size:
            return bool(contains_zero(lower, upper))
        positions = [
            self._find_or_add_position(source.variables[column]) for column in columns.tolist()
        ]
        self.constraints.append(source.labels[row])
        self.lower.append(lower)
        self.upper.append(upper)
        self._positions.extend(positions)
        self._values.frombytes(values.tobytes())
        self._row_ends.append(len(self._values))
        return True

    def _find_or_add_position(self, variable: Any) -> int:
        """Return the position of a variable; if it is new, first append those of its component."""
        position = self._position_by_id.get(id(variable))
        if position is None:
            self._recorder.add(variable)
            position = self._position_by_id[id(variable)]
        return position

    def arrays(self) -> tuple[csr_array, NDArray[np.float64], tuple[Any, ...]]:
        """Return matrix, costs and variables of the columns with a nonzero coefficient or cost."""
        costs = np.zeros(len(self._position_by_id))
        costs[list(self._costs)] = list(self._costs.values())
        values = np.frombuffer(self._values, dtype=np.float64)
        positions = np.frombuffer(self._positions, dtype=np.int32)
        is_used = costs != 0
        is_used[positions[values != 0]] = True
        matrix = csr_array(
            (values, positions, np.array(self._row_ends, dtype=np.int32)),
            shape=(len(self.constraints), len(costs)),
        )
        matrix.eliminate_zeros()
        variable_of_position = {
            position: self.variables.get(key) for key, position in self._position_by_id.items()
        }
        columns = tuple(
            variable_of_position[position] for position in np.flatnonzero(is_used).tolist()
        )
        return matrix[:, is_used], costs[is_used], columns


class _UnchangedRows:
    """Unchanged rows of a model from `build`, as arrays, with row labels and fixed variables.

    A constraint is unchanged if its expression is still the object that `build` made.
    """

    def __init__(self, model: Any) -> None:
        self.model: Model = model.arrays
        self.variables: list[Any] = model.variables
        self.rows = unchanged_constraints(model)
        """Rows of each unchanged constraint, by `id` of the constraint."""
        self.labels: list[Label] = self.model.row_labels()
        _, self._columns, self._values = self.model.terms()
        self.fixed_values = np.array(
            [variable.value if variable.fixed else math.nan for variable in self.variables],
            dtype=np.float64,
        )
        """Value of each fixed column, fixed by `build` or the user; NaN for columns that are not
        fixed."""

    def terms(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the columns and the coefficients of a row."""
        term_range = self.model.term_slice(row)
        return self._columns[term_range], self._values[term_range]

    def layout(self, index_by_id: Mapping[int, int]) -> Layout:
        """Return the layout of the form, given the column index of each variable by its `id`."""
        positions = [index_by_id.get(id(variable), -1) for variable in self.variables]
        columns = np.array(positions, dtype=np.int32)
        return Layout(self.model, columns, self.fixed_values, self.model.limits)


def _iterate_variables(model: Any) -> Iterable[Any]:
    """Return the variables of all active blocks, fixed or not."""
    variables: Iterable[Any] = model.component_data_objects(pyo.Var, active=True)
    return variables


def _single_objective(model: Any) -> Any:
    """Return the active objective; raise `ModelError` unless there is exactly one."""
    active = list(model.component_data_objects(pyo.Objective, active=True))
    if len(active) != 1:
        names = f" ({_join_names(objective.name for objective in active)})" if active else ""
        raise ModelError(
            f"model {model.name!r}: expected one active objective, got {len(active)}{names}; "
            "leave one active, or add one"
        )
    return active[0]


_APPLY_BIGM: Final = "apply TransformationFactory('gdp.bigm') first"
_REMEDIES: Final = {
    "Disjunction": _APPLY_BIGM,
    "Disjunct": _APPLY_BIGM,
    "LogicalConstraint": _APPLY_BIGM.replace("gdp.bigm", "core.logical_to_linear"),
    "SOSConstraint": "write it with binary variables",
    "Complementarity": "write it with binary variables",
}
"""Remedy in the error message, by the name of an unsupported type of component."""


def _check_components(model: Any) -> None:
    """Raise `ModelError` for unsupported active components, or fixed variables without value."""
    network_module = sys.modules.get("pyomo.network")
    valid = {pyo.Block, pyo.Constraint, pyo.Var, pyo.Param, pyo.Expression, pyo.Set, pyo.RangeSet}
    valid |= {pyo.ExternalFunction} | (set() if network_module is None else {network_module.Port})
    targets = {pyo.Suffix, pyo.Objective}
    _, unsupported = categorize_valid_components(
        model, active=True, sort=_DECLARATION_ORDER, valid=valid, targets=targets
    )
    errors = []
    for component_type, items in unsupported.items():
        remedy = _REMEDIES.get(component_type.__name__)
        reason = f"{component_type.__name__} is not linear; {remedy}"
        if remedy is None:
            reason = f"linear solvers do not support {component_type.__name__}"
        errors.append(f"{_join_names(item.name for item in items)}: {reason}")
    if errors:
        raise ModelError(errors)
    unset_names = [
        variable.name
        for variable in _iterate_variables(model)
        if variable.fixed and variable.value is None
    ]
    if unset_names:
        raise ModelError(
            f"{_join_names(unset_names)}: is fixed but has no value; give it one or unfix it"
        )


def _check_columns(variables: Iterable[Any], model: Any) -> None:
    """Raise `ModelError` for variables of another model or none, or of an unsupported domain."""
    root = model.model()
    is_in_model: dict[int, bool] = {}
    has_unit_steps: dict[int, bool] = {}
    foreign_names, non_unit_names = [], []
    for variable in variables:
        container, domain = variable.parent_component(), variable.domain
        if not is_in_model.setdefault(id(container), container.model() is root):
            foreign_names.append(variable.name)
        if not has_unit_steps.setdefault(id(domain), _has_unit_steps(domain)):
            non_unit_names.append(variable.name)
    errors = []
    if foreign_names:
        errors.append(f"{_join_names(foreign_names)}: belongs to another model, or to none")
    if non_unit_names:
        errors.append(
            f"{_join_names(non_unit_names)}: the domain is neither an interval nor all whole "
            "numbers of one; use an integer variable and multiply it"
        )
    if errors:
        raise ModelError(errors)


def _has_unit_steps(domain: Any) -> bool:
    """Return whether a domain is a real interval or all whole numbers of an interval."""
    low, _, step = domain.get_interval()
    if step == 0:
        return True
    return step in (1, -1) and (low is None or float(low).is_integer() or math.isinf(low))


def _nonlinear_errors(model: Any, objective: Any, message: str) -> list[str]:
    """Return one message with up to 11 nonlinear items, or `message` without any."""
    expressions = [(objective, objective.expr)]
    for row in model.component_data_objects(pyo.Constraint, active=True):
        expressions.append((row, row.body))
    nonlinear_names = [
        item.name for item, expression in expressions if polynomial_degree(expression) not in (0, 1)
    ]
    if nonlinear_names:
        return [f"{_join_names(nonlinear_names)}: is not linear; state it with linear terms"]
    return [message]


def _allowed_value(variable: Any) -> float | int:
    """Return the variable's value if bounds and domain allow it, else the allowed one nearest 0."""
    lower = -math.inf if variable.lb is None else variable.lb
    upper = math.inf if variable.ub is None else variable.ub
    is_integer = not variable.is_continuous()
    if is_integer:
        lower, upper = np.ceil(lower - ROUNDING_TOLERANCE), np.floor(upper + ROUNDING_TOLERANCE)
    value = variable.value
    if value is not None and lower <= value <= upper and (not is_integer or value == round(value)):
        return value  # type: ignore[no-any-return]
    nearest = min(max(0.0, lower), upper)
    return int(nearest) if is_integer else nearest
