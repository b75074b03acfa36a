"""The stated problem: a graph, its costs, what is limited and what is minimized."""

from poetmodel.problem.problem import (
    RELATIVE_TOLERANCE,
    SMALLEST_COST,
    DeadlineCounts,
    Problem,
    Quantity,
    TimeSum,
    deadline_slack_s,
    energy_slack_j,
    within,
)

__all__ = [
    "RELATIVE_TOLERANCE",
    "SMALLEST_COST",
    "DeadlineCounts",
    "Problem",
    "Quantity",
    "TimeSum",
    "deadline_slack_s",
    "energy_slack_j",
    "within",
]
