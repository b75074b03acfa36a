"""``lazy``: row generation over groups of stages, as in `poetmodel.solver.lazy.row_generation`."""

from poetmodel.solver.lazy.params import LazyParams
from poetmodel.solver.lazy.proof import prove

__all__ = ["LazyParams", "prove"]
