"""The stated problem: a graph, its costs, what is limited and what is minimized."""

from poetmodel.problem.objective import (
    CONSTRAINTS,
    DEADLINE_ROWS,
    LIMITED_SUMS,
    OWN,
    RELATIVE_TOLERANCE,
    Coefficients,
    DeadlineCounts,
    LinearLimit,
    Objective,
    Quantity,
    TimeSum,
    largest_rewards,
    weighted,
)
from poetmodel.problem.problem import FEWER_BYTES, Problem, within
from poetmodel.problem.surrogate import StageLimit, Surrogate
from poetmodel.problem.totals import TotalsConstraint

__all__ = [
    "CONSTRAINTS",
    "DEADLINE_ROWS",
    "FEWER_BYTES",
    "LIMITED_SUMS",
    "OWN",
    "RELATIVE_TOLERANCE",
    "Coefficients",
    "DeadlineCounts",
    "LinearLimit",
    "Objective",
    "Problem",
    "Quantity",
    "StageLimit",
    "Surrogate",
    "TimeSum",
    "TotalsConstraint",
    "largest_rewards",
    "weighted",
    "within",
]
