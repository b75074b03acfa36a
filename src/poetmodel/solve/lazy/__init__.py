"""``lazy``: row generation over groups of stages; see `poetmodel.solve.lazy.driver`."""

from poetmodel.solve.lazy.driver import solve_lazily

__all__ = ["solve_lazily"]
