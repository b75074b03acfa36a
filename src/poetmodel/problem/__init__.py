"""The stated problem: a graph, its costs, what is limited and what is minimized."""

from poetmodel.problem.objective import (
    DEADLINE_ROWS,
    RELATIVE_TOLERANCE,
    Coefficients,
    DeadlineCounts,
    LinearLimit,
    Objective,
    Quantity,
    TimeSum,
    weighted,
)
from poetmodel.problem.problem import Problem, within
from poetmodel.problem.surrogate import Surrogate

__all__ = [
    "DEADLINE_ROWS",
    "RELATIVE_TOLERANCE",
    "Coefficients",
    "DeadlineCounts",
    "LinearLimit",
    "Objective",
    "Problem",
    "Quantity",
    "Surrogate",
    "TimeSum",
    "weighted",
    "within",
]
