"""A model as Pyomo states it, which users extend and give to any solver: the whole model."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyomo.core as pyo
from pyomo.core.expr.numeric_expr import LinearExpression, MonomialTermExpression
from pyomo.core.expr.relational_expr import EqualityExpression, InequalityExpression

from poetmodel.clock import check_time_limit
from poetmodel.errors import TooLargeError
from poetmodel.model.relations import ONE, Relation
from poetmodel.schedule import RELATIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from poetmodel.model.arrays import Model
    from poetmodel.model.formulation import Component


MOST_TERMS: Final = 5_000_000
"""Terms of memory rows that Pyomo states without being told to: in about 15 s and 2 GB."""
MEMORY: Final = "memory"
"""The constraint with the memory rows, nearly all terms of a model."""
LEFT_OUT: Final = "memory_rows_left_out__build_with_memory_rows_True"
"""Name of a parameter without a value, by which whoever reads a model without its memory rows is
told of it."""


def view(
    model: Model, own: Iterable[Component] = (), *, memory_rows: bool | None = None
) -> pyo.ConcreteModel:
    """Return a model as a Pyomo model, and components of one's own built into that.

    It carries `arrays`, the model itself; `variables`, for each column its variable;
    `stated_rows`, for each constraint the expressions of its rows, by index; `stated_objective`.
    """
    m = pyo.ConcreteModel(name=model.name)
    for name in ("problem", "formulation", "exact", "events"):
        if hasattr(model, name):
            setattr(m, name, getattr(model, name))
    m.arrays = model
    m.variables = _declare(m, model)
    if hasattr(model, "decisions"):
        m.decisions = model.decisions.over(m.variables.__getitem__)
    m.stated_rows = {}
    for name, rows in model.row_families.items():
        if name == MEMORY and not _states_memory(model, rows, memory_rows=memory_rows):
            _leave_out(m)
        else:
            _state(m, name, rows)
    if model.has_objective:
        terms = [(cost, m.variables[column]) for cost, column in model.costs]
        m.objective = pyo.Objective(expr=linear(terms, model.offset))
        # A bound of this model is one of the problem only while nobody changes the objective.
        m.stated_objective = m.objective.expr
        m.objective_unit = model.objective_unit
    _add_relations(m, model)
    for component in own:
        component.build(m)
    return m


def _declare(m: pyo.ConcreteModel, model: Model) -> list[Any]:
    """Declare the variables; return that of each column."""
    variables: list[Any] = []
    for name, columns in model.families.items():
        first = next(iter(columns.values()), 0)
        last = first + len(columns)
        domain = pyo.Reals
        if columns and model.integer[first]:
            whole = set(model.upper[first:last]) == {1.0}
            domain = pyo.Binary if whole else pyo.Integers
        bounds = zip(model.lower[first:last], model.upper[first:last], strict=True)
        if list(columns) == [None]:
            family = pyo.Var(domain=domain, bounds=next(bounds))
        else:
            family = pyo.Var(
                list(columns), domain=domain, bounds=dict(zip(columns, bounds, strict=True))
            )
        setattr(m, name, family)
        variables += family.values()
        check_time_limit()
    for column, value in model.fixed.items():
        variables[column].fix(value)
    return variables


def _states_memory(model: Model, rows: range, *, memory_rows: bool | None) -> bool:
    """Return whether memory rows are stated; raise where nobody said so and they are too many."""
    count = model.n_terms(rows)
    if memory_rows is None and count > MOST_TERMS:
        raise TooLargeError(
            f"model {model.name!r}: memory rows have {count:,} terms, each of them an object of "
            "Pyomo; build(..., memory_rows=False) leaves them out, and poetmodel.solve has "
            "them all the same; memory_rows=True states them, for other solvers"
        )
    return not count or memory_rows is not False


def _leave_out(m: pyo.ConcreteModel) -> None:
    """State in place of the memory rows one that nobody can read, so that no solver misses them."""
    setattr(m, LEFT_OUT, pyo.Param(mutable=True))
    m.memory = pyo.Constraint(expr=getattr(m, LEFT_OUT) * m.variables[0] <= 0)
    m.stated_rows[MEMORY] = {None: m.memory.expr}


def _state(m: pyo.ConcreteModel, name: str, rows: range) -> None:
    """State the rows of a constraint."""
    model, variables = m.arrays, m.variables
    stated = {}
    for number in rows:
        terms, lower, upper = model.row(number)
        body = linear((value, variables[column]) for value, column in terms)
        stated[model.keys[number]] = _relation(lower, body, upper)
    if list(stated) == [None]:
        constraint = pyo.Constraint(expr=stated[None])
    else:
        constraint = pyo.Constraint(list(stated), rule=stated)
    setattr(m, name, constraint)
    m.stated_rows[name] = {key: row.expr for key, row in constraint.items()}


def _relation(lower: float, body: Any, upper: float) -> Any:
    """Return a row with one side or with equal ones."""
    if lower == -math.inf:
        return InequalityExpression((body, upper), strict=False)
    if upper == math.inf:
        return InequalityExpression((lower, body), strict=False)
    return EqualityExpression((body, upper))


def linear(terms: Iterable[tuple[float, Any]], constant: float = 0.0) -> Any:
    """Return ``sum of coefficient * variable + constant`` as a Pyomo expression.

    Built from monomials directly: a third of the time that summing takes. Models have thousands of
    these, so that it looks at the time limit.
    """
    check_time_limit()
    parts: list[Any] = [MonomialTermExpression(term) for term in terms]
    if constant or not parts:
        parts.append(constant)
    return LinearExpression(parts)


def _add_relations(m: pyo.ConcreteModel, model: Model) -> None:
    """Add the paper's relations, where they are not families of variables as they are."""
    m.zero = pyo.Expression(expr=0.0)
    m.one = pyo.Expression(expr=1.0)
    relations = _Relations(m)
    for name in RELATIONS:
        if name not in model.families:
            setattr(m, name, Relation(name, model.problem.graph, partial(relations.entry, name)))


class _Relations:
    """Entries of the relations as variables, or as constants where they are decided."""

    def __init__(self, m: pyo.ConcreteModel) -> None:
        self.m = m

    def entry(self, name: str, t: int, k: int) -> Any:
        """Return an entry of a relation."""
        column = self.m.arrays.relations.entry(name, t, k)
        if column >= 0:
            return self.m.variables[column]
        return self.m.one if column == ONE else self.m.zero


def stated_constraints(m: pyo.ConcreteModel) -> dict[int, range]:
    """Return the rows of each constraint that says what `view` made it say, by `id`.

    That is one row, but where memory rows are left out: one constraint stands for all of them.
    """
    rows: dict[int, range] = {}
    for name, span in m.arrays.row_families.items():
        constraint, stated = m.component(name), m.stated_rows[name]
        if constraint is None:
            continue
        numbers = dict(zip(m.arrays.row_keys(name), span, strict=True))
        for key, row in constraint.items():
            if row.expr is stated.get(key):
                rows[id(row)] = range(numbers[key], numbers[key] + 1) if key in numbers else span
    return rows
