"""The façade: a problem or a model in, a verified schedule with its proof out.

The package and the function share the name: ``poetmodel.solve(problem)`` works whichever of the two
the attribute holds, for importing any submodule makes it the package.
"""

from __future__ import annotations

import sys
from types import ModuleType

from poetmodel.solve.facade import solve
from poetmodel.solve.progress import SolveProgress

__all__ = ["SolveProgress", "solve"]


class _CallableModule(ModuleType):
    """A package that can be called like its function."""

    __call__ = staticmethod(solve)


sys.modules[__name__].__class__ = _CallableModule
