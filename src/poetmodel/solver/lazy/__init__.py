"""``lazy``: the proof of a bound by row generation over groups of stages."""

from poetmodel.solver.lazy.proof import prove

__all__ = ["prove"]
