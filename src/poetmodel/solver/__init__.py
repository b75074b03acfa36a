"""The solver: `solve` takes a problem or a model, and returns a `SolveResult`.

`fitting` is imported on first use, because `solve` does not need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poetmodel.solver.facade import solve
from poetmodel.solver.request import SolveProgress

if TYPE_CHECKING:
    from poetmodel.solver.fitting import Fitted, fit_arena

__all__ = ["Fitted", "SolveProgress", "fit_arena", "solve"]


def __getattr__(name: str) -> Any:
    if name in ("Fitted", "fit_arena"):
        from poetmodel.solver import fitting

        return getattr(fitting, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
