"""``lazy``: row generation over groups of stages; see `poetmodel.solver.lazy.row_generation`."""

from poetmodel.solver.lazy.row_generation import solve_lazily

__all__ = ["solve_lazily"]
