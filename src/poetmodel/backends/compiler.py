"""From a Pyomo model to arrays, and from a solution back to its variables."""

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
    SLACK,
    Layout,
    StandardForm,
    round_binaries,
)
from poetmodel.clock import check_time_limit
from poetmodel.errors import ModelError, listed
from poetmodel.model.view import stated_constraints

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import ArrayLike, NDArray

    from poetmodel.model.arrays import Label, Model

_listed: Final = partial(listed, most=10)
"""Faults of one kind: ten are named one by one; the others are counted."""
_ORDER: Final = FileDeterminism_to_SortComponents(FileDeterminism.ORDERED)
"""As a model declares its components."""


def compile_model(model: Any) -> StandardForm:
    """Return the arrays of a linear Pyomo model with one active objective, which stays unchanged.

    Columns and rows are in the model's own order. A range constraint is one row; fixed variables
    are folded into constants; variables that nothing mentions have no column. Of a model that
    `build` made, rows that nobody changed come from its arrays. A `ModelError` names
    each constraint that is not linear, each component that has to be transformed first, each
    variable of another model or of an integer domain with steps other than 1.

    A constraint without variables that does not hold makes the model infeasible, not malformed:
    the form is then that one contradiction, under the constraint's name.
    """
    _check_components(model)
    objective = _only_objective(model)
    try:
        rows = _Rows(model, objective)
    except (InvalidConstraintError, InvalidExpressionError) as error:
        raise ModelError(_nonlinear(model, objective, str(error))) from error
    except ValueError as error:
        raise ModelError(f"model {model.name!r}: {' '.join(str(error).split())}") from error
    sense = MINIMIZE if objective.sense == pyo.minimize else MAXIMIZE
    if rows.contradiction is not None:  # a form without columns whose one row cannot hold
        form = StandardForm.from_arrays(
            np.zeros((1, 0)), [], row_lower=1.0, sense=sense, rows=(rows.contradiction,)
        )
        layout = None if rows.stated is None else rows.stated.layout({})
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
        lower=[-np.inf if lb is None else lb for lb, _ in bounds],
        upper=[np.inf if ub is None else ub for _, ub in bounds],
        integer=[not variable.is_continuous() for variable in columns],
        row_lower=rows.lower,
        row_upper=rows.upper,
        offset=rows.offset,
        sense=sense,
        columns=columns,
        rows=tuple(rows.constraints),
    )
    position = {id(variable): j for j, variable in enumerate(columns)}
    unused = tuple(v for v in _variables(model) if id(v) not in position and not v.fixed)
    layout = None if rows.stated is None else rows.stated.layout(position)
    return replace(form, unused=unused, model=model, layout=layout)


def load_values(form: StandardForm, x: ArrayLike) -> None:
    """Write a solution back into the variables of the model that a form was compiled from.

    Integers are rounded. Variables without a column keep a value that their bounds allow and get
    the allowed one nearest to 0 otherwise.
    """
    if form.model is None:
        raise ModelError("form: was made of arrays; there are no variables to write to")
    values = round_binaries(x, form)
    for variable, value, whole in zip(
        form.columns, values.tolist(), form.integer.tolist(), strict=True
    ):
        variable.set_value(int(value) if whole else value, skip_validation=True)
    for variable in form.unused:
        variable.set_value(_allowed(variable), skip_validation=True)


class _Rows:
    """Objective and constraints of a model as rows of coefficients, in the model's order.

    Pyomo's own compiler to a standard form walks a model in the same way. It loads all of
    ``scipy.stats`` for its matrices, which takes longer than a small model takes to solve.
    """

    def __init__(self, model: Any, objective: Any) -> None:
        self.variables: dict[int, Any] = {}
        self._order: dict[int, int] = {}
        self._recorder = OrderedVarRecorder(self.variables, self._order, _ORDER)
        self._walk = LinearRepnVisitor({}, var_recorder=self._recorder).walk_expression
        self.stated = _StatedRows(model) if hasattr(model, "arrays") else None
        """Untouched parts of a model that `build` made."""
        self.constraints: list[Any] = []
        """Meaning of each row: a label of `build`'s own, or the user's constraint."""
        self.lower: list[float] = []
        """Lower side of each row, constants folded."""
        self.upper: list[float] = []
        """Upper side likewise."""
        self._data = array("d")
        self._index = array("i")
        self._ends = [0]
        self.contradiction: str | None = None
        """The name of the first constraint without variables that does not hold."""
        linear = self._linear(objective, objective.expr)
        self.offset = float(linear.constant)
        self._costs = {self._order[key]: value for key, value in linear.linear.items()}
        for constraint in model.component_data_objects(pyo.Constraint, active=True, sort=_ORDER):
            check_time_limit()
            if not self._add(constraint):
                self.contradiction = constraint.name
                return

    def _linear(self, item: Any, expression: Any) -> Any:
        repn = self._walk(expression)
        if repn.nonlinear is not None:
            raise InvalidExpressionError(f"{item.name}: has terms that are not linear.")
        return repn

    def _add(self, constraint: Any) -> bool:
        """Add the row of a constraint; return whether it can hold."""
        if self.stated is not None and id(constraint) in self.stated.rows:
            rows = self.stated.rows[id(constraint)]
            return all(self._add_stated(self.stated, number) for number in rows)
        low, body, up = constraint.to_bounded_expression()
        if low is None and up is None:
            return True
        linear = self._linear(constraint, body)
        low = -math.inf if low is None else pyo.value(low) - linear.constant
        up = math.inf if up is None else pyo.value(up) - linear.constant
        if not linear.linear:
            return bool(low <= 0 <= up)
        self.constraints.append(constraint)
        self.lower.append(low)
        self.upper.append(up)
        self._index.extend(map(self._order.__getitem__, linear.linear))
        self._data.extend(linear.linear.values())
        self._ends.append(len(self._data))
        return True

    def _add_stated(self, stated: _StatedRows, number: int) -> bool:
        """Add a row that says what it was made to say; return whether it can hold."""
        columns, values = stated.terms(number)
        constants = stated.fixed[columns]
        free = np.isnan(constants)
        constant = 0.0 if free.all() else float(values[~free] @ constants[~free])
        low = stated.model.row_lower[number] - constant
        up = stated.model.row_upper[number] - constant
        columns, values = columns[free], values[free]
        if not columns.size:
            return low <= 0 <= up
        positions = [self._position(stated.variables[column]) for column in columns.tolist()]
        self.constraints.append(stated.labels[number])
        self.lower.append(low)
        self.upper.append(up)
        self._index.extend(positions)
        self._data.frombytes(values.tobytes())
        self._ends.append(len(self._data))
        return True

    def _position(self, variable: Any) -> int:
        """Return the position of a variable in the order of the columns."""
        position = self._order.get(id(variable))
        if position is None:
            self._recorder.add(variable)
            position = self._order[id(variable)]
        return position

    def arrays(self) -> tuple[csr_array, NDArray[np.float64], tuple[Any, ...]]:
        """Return matrix, costs and variables of the columns that have a coefficient."""
        costs = np.zeros(len(self._order))
        costs[list(self._costs)] = list(self._costs.values())
        data = np.frombuffer(self._data, dtype=np.float64)
        index = np.frombuffer(self._index, dtype=np.int32)
        used = costs != 0
        used[index[data != 0]] = True
        matrix = csr_array(
            (data, index, np.array(self._ends, dtype=np.int32)),
            shape=(len(self.constraints), len(costs)),
        )
        matrix.eliminate_zeros()
        ordered = {position: self.variables.get(key) for key, position in self._order.items()}
        columns = tuple(ordered[position] for position in np.flatnonzero(used).tolist())
        return matrix[:, used], costs[used], columns


class _StatedRows:
    """The rows of a model that `build` made which say what they were made to say."""

    def __init__(self, model: Any) -> None:
        self.model: Model = model.arrays
        self.variables: list[Any] = model.variables
        self.rows = stated_constraints(model)
        """The rows of each constraint, by `id`."""
        self.labels: list[Label] = self.model.row_labels()
        _, self._columns, self._values = self.model.terms()
        self.fixed = np.array(
            [variable.value if variable.fixed else math.nan for variable in self.variables],
            dtype=np.float64,
        )
        """Value that each column is fixed to, by `build` or the user; NaN for none."""

    def terms(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return columns and values of a row."""
        span = self.model.span(number)
        return self._columns[span], self._values[span]

    def layout(self, position: Mapping[int, int]) -> Layout:
        """Return the positions of the columns, given the position of each variable by `id`."""
        positions = [position.get(id(variable), -1) for variable in self.variables]
        columns = np.array(positions, dtype=np.int32)
        return Layout(self.model, columns, self.fixed, self.model.limits)


def _variables(model: Any) -> Iterable[Any]:
    variables: Iterable[Any] = model.component_data_objects(pyo.Var, active=True)
    return variables


def _only_objective(model: Any) -> Any:
    active = list(model.component_data_objects(pyo.Objective, active=True))
    if len(active) != 1:
        names = f" ({_listed(objective.name for objective in active)})" if active else ""
        raise ModelError(
            f"model {model.name!r}: expected one active objective, got {len(active)}{names}; "
            "deactivate the others, or add one"
        )
    return active[0]


_BIGM: Final = "apply TransformationFactory('gdp.bigm') first"
_REMEDIES: Final = {
    "Disjunction": _BIGM,
    "Disjunct": _BIGM,
    "LogicalConstraint": _BIGM.replace("gdp.bigm", "core.logical_to_linear"),
    "SOSConstraint": "write it with binary variables",
    "Complementarity": "write it with binary variables",
}


def _check_components(model: Any) -> None:
    """Raise for components that no linear solver knows, and for variables fixed to nothing."""
    network = sys.modules.get("pyomo.network")
    valid = {pyo.Block, pyo.Constraint, pyo.Var, pyo.Param, pyo.Expression, pyo.Set, pyo.RangeSet}
    valid |= {pyo.ExternalFunction} | (set() if network is None else {network.Port})
    targets = {pyo.Suffix, pyo.Objective}
    _, unknown = categorize_valid_components(
        model, active=True, sort=_ORDER, valid=valid, targets=targets
    )
    faults = []
    for kind, items in unknown.items():
        remedy = _REMEDIES.get(kind.__name__)
        why = f"{kind.__name__} is not linear; {remedy}"
        if remedy is None:
            why = f"a linear solver knows no {kind.__name__}"
        faults.append(f"{_listed(item.name for item in items)}: {why}")
    if faults:
        raise ModelError(faults)
    unset = [v.name for v in _variables(model) if v.fixed and v.value is None]
    if unset:
        raise ModelError(f"{_listed(unset)}: is fixed but has no value; give it one or unfix it")


def _check_columns(columns: Iterable[Any], model: Any) -> None:
    """Raise for variables of another model and for domains that are not plain integers or reals."""
    root = model.model()
    homes: dict[int, bool] = {}
    domains: dict[int, bool] = {}
    foreign, stepped = [], []
    for variable in columns:
        container, domain = variable.parent_component(), variable.domain
        if not homes.setdefault(id(container), container.model() is root):
            foreign.append(variable.name)
        if not domains.setdefault(id(domain), _is_plain(domain)):
            stepped.append(variable.name)
    faults = []
    if foreign:
        faults.append(f"{_listed(foreign)}: belongs to another model, or to none")
    if stepped:
        faults.append(
            f"{_listed(stepped)}: the domain has gaps other than between whole numbers; "
            "use an integer variable and multiply it"
        )
    if faults:
        raise ModelError(faults)


def _is_plain(domain: Any) -> bool:
    """Tell whether a domain is an interval of the reals or all whole numbers in one."""
    low, _, step = domain.get_interval()
    if step == 0:
        return True
    return step in (1, -1) and (low is None or float(low).is_integer() or math.isinf(low))


def _nonlinear(model: Any, objective: Any, message: str) -> list[str]:
    """Name everything that is not linear; `message` is what the compiler said of the first."""
    stated = [(objective, objective.expr)]
    for row in model.component_data_objects(pyo.Constraint, active=True):
        stated.append((row, row.body))
    curved = [item.name for item, terms in stated if polynomial_degree(terms) not in (0, 1)]
    if curved:
        return [f"{_listed(curved)}: is not linear; state it with linear terms"]
    return [message]


def _allowed(variable: Any) -> float | int:
    """Return the value if the bounds allow it, else the allowed one nearest to 0."""
    lower = -math.inf if variable.lb is None else variable.lb
    upper = math.inf if variable.ub is None else variable.ub
    whole = not variable.is_continuous()
    if whole:
        lower, upper = np.ceil(lower - SLACK), np.floor(upper + SLACK)
    value = variable.value
    if value is not None and lower <= value <= upper and (not whole or value == round(value)):
        return value  # type: ignore[no-any-return]
    nearest = min(max(0.0, lower), upper)
    return int(nearest) if whole else nearest
