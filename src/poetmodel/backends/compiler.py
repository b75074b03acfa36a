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
from poetmodel.backends.standard_form import MAXIMIZE, MINIMIZE, SLACK, StandardForm, round_binaries
from poetmodel.clock import check_time_limit
from poetmodel.errors import ModelError, listed
from poetmodel.model.rows import RowConstraintData

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import ArrayLike, NDArray

    from poetmodel.problem import LinearRow

_listed: Final = partial(listed, most=10)
"""Faults of one kind: ten are named one by one; the others are counted."""
_ORDER: Final = FileDeterminism_to_SortComponents(FileDeterminism.ORDERED)
"""As a model declares its components."""


def compile_model(model: Any) -> StandardForm:
    """Return the arrays of a linear Pyomo model with one active objective, which stays unchanged.

    Columns and rows are in the model's own order. A range constraint is one row; fixed variables
    are folded into constants; variables that nothing mentions have no column. A `ModelError` names
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
        return replace(form, model=model)
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
    known = {id(variable) for variable in columns}
    unused = tuple(v for v in _variables(model) if id(v) not in known and not v.fixed)
    return replace(form, unused=unused, model=model)


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
        self._known: dict[int, tuple[NDArray[np.int32], NDArray[np.float64] | None]] = {}
        """Columns and fixed values of the variables that rows of arrays share, by `id`."""
        self.constraints: list[Any] = []
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
        found = self._walk(expression)
        if found.nonlinear is not None:
            raise InvalidExpressionError(f"{item.name}: has terms that are not linear.")
        return found

    def _add(self, constraint: Any) -> bool:
        """Add the row of a constraint; return whether it can hold."""
        row = constraint.row if isinstance(constraint, RowConstraintData) else None
        if row is not None:
            return self._add_row(constraint, row)
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

    def _add_row(self, constraint: Any, row: LinearRow) -> bool:
        """Add a row that has no expression yet; return whether it can hold."""
        low, up = row.lower, row.upper
        begin, constant = len(self._data), 0.0
        if row.index is not None:
            constant = self._add_arrays(row, row.index)
        else:
            for coefficient, variable in row.terms:
                if variable.fixed:
                    constant += coefficient * variable.value
                else:
                    self._index.append(self._place(variable))
                    self._data.append(coefficient)
        low, up = low - constant, up - constant
        if len(self._data) == begin:
            return low <= 0 <= up
        self.constraints.append(constraint)
        self.lower.append(low)
        self.upper.append(up)
        self._ends.append(len(self._data))
        return True

    def _add_arrays(self, row: LinearRow, index: NDArray[np.int32]) -> float:
        """Add the terms of a row on free variables; return the sum of the others."""
        columns, fixed = self._columns_of(row.space)
        data, constant = np.asarray(row.values), 0.0
        if fixed is not None:
            known = ~np.isnan(fixed[index])
            constant = float(data[known] @ fixed[index[known]])
            index, data = index[~known], data[~known]
        self._index.frombytes(columns[index].tobytes())
        self._data.frombytes(data.astype(np.float64).tobytes())
        return constant

    def _place(self, variable: Any) -> int:
        """Return the place of a variable in the order of the columns."""
        place = self._order.get(id(variable))
        if place is None:
            self._recorder.add(variable)
            place = self._order[id(variable)]
        return place

    def _columns_of(
        self, variables: Sequence[Any]
    ) -> tuple[NDArray[np.int32], NDArray[np.float64] | None]:
        """Return the columns of variables, and the values of those that are fixed, if any is."""
        found = self._known.get(id(variables))
        if found is None:
            places = [self._place(variable) for variable in variables]
            values = [variable.value if variable.fixed else math.nan for variable in variables]
            fixed = np.array(values, dtype=np.float64)
            none = bool(np.isnan(fixed).all())
            found = np.array(places, dtype=np.int32), None if none else fixed
            self._known[id(variables)] = found
        return found

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
        known = {place: self.variables.get(key) for key, place in self._order.items()}
        columns = tuple(known[place] for place in np.flatnonzero(used).tolist())
        return matrix[:, used], costs[used], columns


def _variables(model: Any) -> Iterable[Any]:
    found: Iterable[Any] = model.component_data_objects(pyo.Var, active=True)
    return found


def _only_objective(model: Any) -> Any:
    found = list(model.component_data_objects(pyo.Objective, active=True))
    if len(found) != 1:
        names = f" ({_listed(objective.name for objective in found)})" if found else ""
        raise ModelError(
            f"model {model.name!r}: expected one active objective, got {len(found)}{names}; "
            "deactivate the others, or add one"
        )
    return found[0]


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
    for kind, found in unknown.items():
        remedy = _REMEDIES.get(kind.__name__)
        why = f"{kind.__name__} is not linear; {remedy}"
        if remedy is None:
            why = f"a linear solver knows no {kind.__name__}"
        faults.append(f"{_listed(item.name for item in found)}: {why}")
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
