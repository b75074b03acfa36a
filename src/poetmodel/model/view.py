"""Conversion of a model to Pyomo, for extension by users and for other solvers."""

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


MAX_TERMS: Final = 5_000_000
"""Maximum number of memory-row terms that become Pyomo objects by default: about 15 s and 2 GB."""
MEMORY_FAMILY: Final = "memory"
"""Name of the family of memory rows, which have nearly all terms of a model."""
OMITTED_ROWS: Final = "memory_rows_left_out__build_with_memory_rows_True"
"""Name of a parameter without a value, in the row that replaces omitted memory rows. Solvers report
the name in their error."""


def to_pyomo(
    model: Model, user_components: Iterable[Component] = (), *, memory_rows: bool | None = None
) -> pyo.ConcreteModel:
    """Convert a model to a Pyomo model, and build user-defined components into it.

    Families and relations are attributes by their names; `variables` has the Pyomo variable of each
    column, `stated_rows` the expressions of rows by family and key, `stated_objective` that of the
    objective. If `memory_rows` is False, one row that solvers reject replaces memory rows with
    terms. If None, more than `MAX_TERMS` terms raise `TooLargeError`.
    """
    m = pyo.ConcreteModel(name=model.name)
    for name in ("problem", "formulation", "exact", "events"):
        if hasattr(model, name):
            setattr(m, name, getattr(model, name))
    m.arrays = model
    m.variables = _add_variables(m, model)
    if hasattr(model, "decisions"):
        m.decisions = model.decisions.map_columns(m.variables.__getitem__)
    m.stated_rows = {}
    for name, rows in model.row_families.items():
        if name == MEMORY_FAMILY and not _includes_memory_rows(
            model, rows, memory_rows=memory_rows
        ):
            _replace_memory_rows(m)
        else:
            _add_constraint(m, name, rows)
    if model.has_objective:
        terms = [(cost, m.variables[column]) for cost, column in model.costs]
        m.objective = pyo.Objective(expr=linear_expression(terms, model.offset))
        # A bound of this model is valid for the problem only if the objective is unchanged.
        m.stated_objective = m.objective.expr
        m.objective_unit = model.objective_unit
    _add_relations(m, model)
    for component in user_components:
        component.build(m)
    return m


def _add_variables(m: pyo.ConcreteModel, model: Model) -> list[Any]:
    """Add all variables, with fixed values; return the variable of each column."""
    variables: list[Any] = []
    for name, columns in model.families.items():
        first_column = next(iter(columns.values()), 0)
        stop_column = first_column + len(columns)
        domain = pyo.Reals
        if columns and model.integer[first_column]:
            is_binary = set(model.upper[first_column:stop_column]) == {1.0}
            domain = pyo.Binary if is_binary else pyo.Integers
        bounds = zip(
            model.lower[first_column:stop_column],
            model.upper[first_column:stop_column],
            strict=True,
        )
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


def _includes_memory_rows(model: Model, rows: range, *, memory_rows: bool | None) -> bool:
    """Return `memory_rows`, but True for rows without terms; None means True up to `MAX_TERMS`."""
    n_terms = model.n_terms(rows)
    if memory_rows is None and n_terms > MAX_TERMS:
        raise TooLargeError(
            f"model {model.name!r}: memory rows have {n_terms:,} terms, each of them an object of "
            "Pyomo; build(..., memory_rows=False) omits them, and poetmodel.solve adds them; "
            "memory_rows=True states them, for other solvers"
        )
    return not n_terms or memory_rows is not False


def _replace_memory_rows(m: pyo.ConcreteModel) -> None:
    """Replace the memory rows by a row with a parameter without value, which solvers reject."""
    setattr(m, OMITTED_ROWS, pyo.Param(mutable=True))
    m.memory = pyo.Constraint(expr=getattr(m, OMITTED_ROWS) * m.variables[0] <= 0)
    m.stated_rows[MEMORY_FAMILY] = {None: m.memory.expr}


def _add_constraint(m: pyo.ConcreteModel, name: str, rows: range) -> None:
    """Add rows as the Pyomo constraint `name`, and their expressions to ``m.stated_rows``."""
    model, variables = m.arrays, m.variables
    relations = {}
    for number in rows:
        terms, lower, upper = model.terms_and_bounds(number)
        body = linear_expression((value, variables[column]) for value, column in terms)
        relations[model.keys[number]] = _make_relation(lower, body, upper)
    if list(relations) == [None]:
        constraint = pyo.Constraint(expr=relations[None])
    else:
        constraint = pyo.Constraint(list(relations), rule=relations)
    setattr(m, name, constraint)
    m.stated_rows[name] = {key: row.expr for key, row in constraint.items()}


def _make_relation(lower: float, body: Any, upper: float) -> Any:
    """Return a row with one bound, or with equal bounds, as a Pyomo relation."""
    if lower == -math.inf:
        return InequalityExpression((body, upper), strict=False)
    if upper == math.inf:
        return InequalityExpression((lower, body), strict=False)
    return EqualityExpression((body, upper))


def linear_expression(terms: Iterable[tuple[float, Any]], constant: float = 0.0) -> Any:
    """Return ``sum of coefficient * variable + constant`` as a Pyomo expression.

    Built from monomials, which takes a third of the time of summing.
    """
    check_time_limit()
    summands: list[Any] = [MonomialTermExpression(term) for term in terms]
    if constant or not summands:
        summands.append(constant)
    return LinearExpression(summands)


def _add_relations(m: pyo.ConcreteModel, model: Model) -> None:
    """Add `zero`, `one` and the paper's relations that are not families, as `Relation`."""
    m.zero = pyo.Expression(expr=0.0)
    m.one = pyo.Expression(expr=1.0)
    relations = _RelationEntries(m)
    for name in RELATIONS:
        if name not in model.families:
            setattr(m, name, Relation(name, model.problem.graph, partial(relations.entry, name)))


class _RelationEntries:
    """Map from entries of the relations to Pyomo variables, or to constants for fixed entries."""

    def __init__(self, m: pyo.ConcreteModel) -> None:
        self.m = m

    def entry(self, name: str, t: int, k: int) -> Any:
        """Return the variable or constant of entry ``name[t,k]``."""
        column = self.m.arrays.relations.entry(name, t, k)
        if column >= 0:
            return self.m.variables[column]
        return self.m.one if column == ONE else self.m.zero


def unchanged_constraints(m: pyo.ConcreteModel) -> dict[int, range]:
    """Return a range of rows of the model for each unchanged Pyomo constraint, by its `id`.

    Unchanged: the expression is the object that `to_pyomo` made. The constraint in place of omitted
    memory rows has all of them.
    """
    rows_of_constraint: dict[int, range] = {}
    for name, row_range in m.arrays.row_families.items():
        constraint, stated_rows = m.component(name), m.stated_rows[name]
        if constraint is None:
            continue
        row_of_key = dict(zip(m.arrays.row_keys(name), row_range, strict=True))
        for key, member in constraint.items():
            if member.expr is stated_rows.get(key):
                rows_of_constraint[id(member)] = (
                    range(row_of_key[key], row_of_key[key] + 1) if key in row_of_key else row_range
                )
    return rows_of_constraint
