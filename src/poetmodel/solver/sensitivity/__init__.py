"""Effects of limits and decisions: changed problems, solved within a common time limit."""

from poetmodel.solver.sensitivity.alternatives import (
    Alternative,
    Forbidden,
    RamStep,
    find_alternatives,
    find_ram_step,
)
from poetmodel.solver.sensitivity.explanation import Explanation, explain_infeasible
from poetmodel.solver.sensitivity.limits import Limit, find_limits
from poetmodel.solver.sensitivity.limits import search_limits as search_limits
from poetmodel.solver.sensitivity.remedies import Change, Remedy
from poetmodel.solver.sensitivity.used import LimitState, UsedLimit, find_used_limits

__all__ = [
    "Alternative",
    "Change",
    "Explanation",
    "Forbidden",
    "Limit",
    "LimitState",
    "RamStep",
    "Remedy",
    "UsedLimit",
    "explain_infeasible",
    "find_alternatives",
    "find_limits",
    "find_ram_step",
    "find_used_limits",
]
