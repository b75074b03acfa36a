"""The solver: a problem or a model in, a verified schedule with its proof out."""

from poetmodel.solver.facade import solve
from poetmodel.solver.fitting import Fitted, fit_arena
from poetmodel.solver.request import SolveProgress

__all__ = ["Fitted", "SolveProgress", "fit_arena", "solve"]
