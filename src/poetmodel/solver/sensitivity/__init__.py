"""Costs of limits and decisions: changed problems, solved in a shared time."""

from poetmodel.solver.sensitivity.explanation import Explanation, explain_infeasible
from poetmodel.solver.sensitivity.limits import Limit, find_limits
from poetmodel.solver.sensitivity.remedies import Change, Remedy

__all__ = ["Change", "Explanation", "Limit", "Remedy", "explain_infeasible", "find_limits"]
