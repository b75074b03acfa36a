"""The stated problem: a graph, its costs, what is limited and what is minimized."""

import warnings
from typing import Any

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


def __getattr__(name: str) -> Any:
    if name == "TotalsConstraint":
        message = "TotalsConstraint is called Constraint; the old name goes in 0.3"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return Constraint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
