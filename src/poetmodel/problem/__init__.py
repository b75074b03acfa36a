"""The stated problem: a graph, its costs, limits and an objective."""

from poetmodel.problem.limits import Limits
from poetmodel.problem.objective import (
    DEADLINE_ROWS,
    LIMITED_SUMS,
    USER_CONSTRAINTS,
    Objective,
    min_negative_sum,
    row_over_totals,
)
from poetmodel.problem.problem import Problem
from poetmodel.problem.quantities import USER_OBJECTIVE, DeadlineCounts, Quantity, TimeSum
from poetmodel.problem.rows import (
    RELATIVE_TOLERANCE,
    Coefficients,
    LinearRow,
    is_within,
    weighted_sum,
)
from poetmodel.problem.totals import Constraint

__all__ = [
    "DEADLINE_ROWS",
    "LIMITED_SUMS",
    "RELATIVE_TOLERANCE",
    "USER_CONSTRAINTS",
    "USER_OBJECTIVE",
    "Coefficients",
    "Constraint",
    "DeadlineCounts",
    "Limits",
    "LinearRow",
    "Objective",
    "Problem",
    "Quantity",
    "TimeSum",
    "is_within",
    "min_negative_sum",
    "row_over_totals",
    "weighted_sum",
]
