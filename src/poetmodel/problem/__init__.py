"""The stated problem: a graph, its costs, what is limited and what is minimized."""

from poetmodel.problem.objective import (
    CONSTRAINTS,
    DEADLINE_ROWS,
    LIMITED_SUMS,
    OWN,
    DeadlineCounts,
    Objective,
    Quantity,
    TimeSum,
    largest_rewards,
    over_totals,
)
from poetmodel.problem.problem import FEWER_BYTES, Problem, StandIn
from poetmodel.problem.rows import (
    RELATIVE_TOLERANCE,
    Coefficients,
    LinearRow,
    weighted,
    within,
)
from poetmodel.problem.totals import Constraint

__all__ = [
    "CONSTRAINTS",
    "DEADLINE_ROWS",
    "FEWER_BYTES",
    "LIMITED_SUMS",
    "OWN",
    "RELATIVE_TOLERANCE",
    "Coefficients",
    "Constraint",
    "DeadlineCounts",
    "LinearRow",
    "Objective",
    "Problem",
    "Quantity",
    "StandIn",
    "TimeSum",
    "largest_rewards",
    "over_totals",
    "weighted",
    "within",
]
