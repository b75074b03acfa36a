"""``lazy``: row generation over groups of stages; see `poetmodel.solver.lazy.row_generation`."""

from poetmodel.solver.lazy.params import LazyParams
from poetmodel.solver.lazy.solve import solve_lazily

__all__ = ["LazyParams", "solve_lazily"]
