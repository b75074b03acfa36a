"""From a Pyomo model to arrays, and from a solution back to its variables."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poetmodel.backends.standard_form import MAXIMIZE, MINIMIZE, SLACK, StandardForm, round_binaries
from poetmodel.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import ArrayLike, NDArray

_NAMED: Final = 10
"""Faults of one kind that are named one by one; the others are counted."""


def compile_model(model: Any) -> StandardForm:
    """Return the arrays of a linear Pyomo model.

    Parameters
    ----------
    model : ConcreteModel or Block
        The model, with one active objective. It is not changed.

    Returns
    -------
    StandardForm
        Columns and rows in the model's own order. A range constraint is one row; fixed variables
        are folded into constants; variables that nothing mentions have no column.

    Raises
    ------
    ModelError
        If the model cannot be handed to a linear solver. The error names each constraint that is
        not linear, each component that has to be transformed first, each variable of another
        model or of an integer domain with steps other than 1.

    Notes
    -----
    A constraint without variables that does not hold makes the model infeasible, not malformed:
    the form is then that one contradiction, under the constraint's name.
    """
    import pyomo.environ as pyo
    from pyomo.common.errors import (
        InfeasibleConstraintException,
        InvalidConstraintError,
        InvalidExpressionError,
    )
    from pyomo.repn.plugins.standard_form import LinearStandardFormCompiler

    _refuse_untransformed(model)
    _refuse_unset(model)
    objective = _only_objective(model)
    try:
        info = LinearStandardFormCompiler().write(model, mixed_form=True, set_sense=None)
    except InfeasibleConstraintException as error:
        return _contradiction(model, objective, str(error))
    except (InvalidConstraintError, InvalidExpressionError) as error:
        raise ModelError(_nonlinear(model, objective, str(error))) from error
    except ValueError as error:
        msg = f"model {model.name!r}: {' '.join(str(error).split())}"
        raise ModelError(msg) from error
    columns = tuple(info.columns)
    _refuse_columns(columns, model)
    first, low, up = _merge_ranges(info.rows, np.asarray(info.rhs, dtype=np.float64))
    bounds = [variable.bounds for variable in columns]
    known = {id(variable) for variable in columns}
    form = StandardForm.from_arrays(
        info.A.tocsr()[first],
        info.c.toarray().reshape(-1),
        lower=np.array([-np.inf if lb is None else lb for lb, _ in bounds], dtype=np.float64),
        upper=np.array([np.inf if ub is None else ub for _, ub in bounds], dtype=np.float64),
        integer=np.array([not variable.is_continuous() for variable in columns], dtype=np.bool_),
        row_lower=low,
        row_upper=up,
        offset=float(info.c_offset[0]),
        sense=MINIMIZE if objective.sense == pyo.minimize else MAXIMIZE,
        columns=columns,
        rows=tuple(info.rows[i].constraint for i in first),
    )
    unused = tuple(
        variable
        for variable in model.component_data_objects(pyo.Var, active=True)
        if id(variable) not in known and not variable.fixed
    )
    return replace(form, unused=unused, model=model)


def load_values(form: StandardForm, x: ArrayLike) -> None:
    """Write a solution back into the variables of the model.

    Parameters
    ----------
    form : StandardForm
        A form made by `compile_model`.
    x : array_like, shape (n_columns,)
        One value per column; integers are rounded. Variables without a column keep a value that
        their bounds allow and get the allowed one nearest to 0 otherwise.

    Raises
    ------
    BackendError
        If an integer column is not whole within tolerance.
    ModelError
        If the form was made of arrays.
    """
    if form.model is None:
        msg = "form: was made of arrays; there are no variables to write to"
        raise ModelError(msg)
    values = round_binaries(x, form)
    for variable, value, whole in zip(
        form.columns, values.tolist(), form.integer.tolist(), strict=True
    ):
        variable.set_value(int(value) if whole else value, skip_validation=True)
    for variable in form.unused:
        variable.set_value(_allowed(variable), skip_validation=True)


def read_values(form: StandardForm) -> NDArray[np.float64]:
    """Return the present values of the model's variables as a start, NaN where there is none."""
    values = (variable.value for variable in form.columns)
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _merge_ranges(
    rows: list[Any], sides: NDArray[np.float64]
) -> tuple[NDArray[np.intp], NDArray[np.float64], NDArray[np.float64]]:
    """Join the two rows of each range constraint.

    The compiler gives a range as two consecutive rows of the same constraint, ``<=`` (1) and
    ``>=`` (-1); equations (0) and one-sided constraints have one.
    """
    kinds = np.array([row.bound_type for row in rows], dtype=np.int8)
    second = np.array(
        [
            i > 0 and row.bound_type == -1 and rows[i - 1].constraint is row.constraint
            for i, row in enumerate(rows)
        ],
        dtype=np.bool_,
    )
    low = np.where(kinds <= 0, sides, -np.inf)
    up = np.where(kinds >= 0, sides, np.inf)
    followed = np.flatnonzero(second) - 1
    low[followed] = low[followed + 1]
    first = np.flatnonzero(~second)
    return first, low[first], up[first]


def _only_objective(model: Any) -> Any:
    import pyomo.environ as pyo

    found = list(model.component_data_objects(pyo.Objective, active=True))
    if len(found) != 1:
        names = f" ({_listed(objective.name for objective in found)})" if found else ""
        msg = (
            f"model {model.name!r}: expected one active objective, got {len(found)}{names}; "
            "deactivate the others, or add one"
        )
        raise ModelError(msg)
    return found[0]


def _refuse_untransformed(model: Any) -> None:
    """Raise for components that a linear solver has no notion of."""
    import pyomo.environ as pyo
    from pyomo.gdp import Disjunct, Disjunction
    from pyomo.mpec import Complementarity

    remedies = (
        (Disjunction, "apply TransformationFactory('gdp.bigm') first"),
        (Disjunct, "apply TransformationFactory('gdp.bigm') first"),
        (pyo.LogicalConstraint, "apply TransformationFactory('core.logical_to_linear') first"),
        (pyo.SOSConstraint, "write it with binary variables"),
        (Complementarity, "write it with binary variables"),
    )
    faults = []
    for kind, remedy in remedies:
        names = [item.name for item in model.component_data_objects(kind, active=True)]
        if names:
            faults.append(f"{_listed(names)}: {kind.__name__} is not linear; {remedy}")
    if faults:
        raise ModelError(faults)


def _refuse_unset(model: Any) -> None:
    """Raise for variables that are fixed to nothing."""
    import pyomo.environ as pyo

    unset = [
        variable.name
        for variable in model.component_data_objects(pyo.Var, active=True)
        if variable.fixed and variable.value is None
    ]
    if unset:
        msg = f"{_listed(unset)}: is fixed but has no value; give it one or unfix it"
        raise ModelError(msg)


def _refuse_columns(columns: Iterable[Any], model: Any) -> None:
    """Raise for variables of another model and for domains that are not plain integers or reals."""
    root = model.model()
    homes: dict[int, bool] = {}
    domains: dict[int, bool] = {}
    foreign, stepped = [], []
    for variable in columns:
        container = variable.parent_component()
        if homes.setdefault(id(container), container.model() is root) is False:
            foreign.append(variable.name)
        domain = variable.domain
        if domains.setdefault(id(domain), _is_plain(domain)) is False:
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
    curved = [item.name for item in _expressions(model, objective) if not _is_linear(item)]
    if curved:
        return [f"{_listed(curved)}: is not linear; state it with linear terms"]
    return [f"{message} A fixed variable times a variable counts as nonlinear: use a Param"]


def _expressions(model: Any, objective: Any) -> Iterator[Any]:
    import pyomo.environ as pyo

    yield objective
    yield from model.component_data_objects(pyo.Constraint, active=True)


def _is_linear(item: Any) -> bool:
    from pyomo.core.expr.numvalue import polynomial_degree

    return polynomial_degree(item.body if hasattr(item, "body") else item.expr) in (0, 1)


def _contradiction(model: Any, objective: Any, message: str) -> StandardForm:
    """Return a form without columns whose one row is the constraint that cannot hold."""
    import pyomo.environ as pyo

    quoted = re.search(r"'(.+)'", message)
    form = StandardForm.from_arrays(
        np.zeros((1, 0)),
        [],
        row_lower=1.0,
        sense=MINIMIZE if objective.sense == pyo.minimize else MAXIMIZE,
        rows=(quoted.group(1) if quoted else message,),
    )
    return replace(form, model=model)


def _allowed(variable: Any) -> float | int:
    """Return the value if the bounds allow it, else the allowed one nearest to 0."""
    lower = -math.inf if variable.lb is None else variable.lb
    upper = math.inf if variable.ub is None else variable.ub
    whole = not variable.is_continuous()
    if whole:
        lower = lower if math.isinf(lower) else math.ceil(lower - SLACK)
        upper = upper if math.isinf(upper) else math.floor(upper + SLACK)
    value = variable.value
    if value is not None and lower <= value <= upper and (not whole or value == round(value)):
        return value  # type: ignore[no-any-return]
    nearest = min(max(0.0, lower), upper)
    return int(nearest) if whole else nearest


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
