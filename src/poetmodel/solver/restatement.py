"""User-defined parts of a Pyomo model, and whether `Problem.subject_to` may state them instead.

A problem with the same rules is solved faster: the default formulation enforces few rows, over all
schedules. A model is solved as a whole, over the schedules that its variables can represent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyomo.core as pyo
from pyomo.core.expr import identify_variables

if TYPE_CHECKING:
    from collections.abc import Iterator

GUIDE: Final = "docs/guides/constraints.md#large-graphs"
"""Page that compares rules over totals with models."""
PAGE_OUT_FAMILIES: Final = frozenset({"paged_out", "M_out"})
"""Families of the variables that decide page-outs."""
COUNTED_FAMILIES: Final = PAGE_OUT_FAMILIES | {
    *("recomputed", "R", "paged_in", "M_in", "resident", "storage_home")
}
"""Families of the variables that totals and counts in stages count."""


def has_problem_objective(model: pyo.ConcreteModel) -> bool:
    """Return whether the objective that `build` made is active, minimized and unchanged."""
    objective = model.component("objective")
    return (
        getattr(objective, "active", False)
        and getattr(objective, "sense", None) == pyo.minimize
        and getattr(objective, "expr", None) is getattr(model, "stated_objective", None)
    )


def added_families(model: pyo.ConcreteModel) -> frozenset[str]:
    """Return the families of the variables in rows and objectives that were added to a model."""
    return frozenset(
        variable.parent_component().local_name
        for expression in _added_expressions(model)
        for variable in identify_variables(expression)
    )


def _added_expressions(model: pyo.ConcreteModel) -> Iterator[Any]:
    for row in model.component_data_objects(pyo.Constraint, active=True):
        if row.parent_component().name not in model.stated_rows:
            yield row.body
    if not has_problem_objective(model):
        for objective in model.component_data_objects(pyo.Objective, active=True):
            yield objective.expr


def may_be_rules(model: pyo.ConcreteModel) -> bool:
    """Return whether a model has additions, and these count decisions alone."""
    families = added_families(model)
    return bool(model.exact) and bool(families) and families <= COUNTED_FAMILIES
