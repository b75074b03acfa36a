"""The solver: `solve` takes a problem or a model, and returns a `SolveResult`.

Names are imported on first use: the command line needs only the options of a search at its start.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from poetmodel.solver.facade import solve
    from poetmodel.solver.fitting import Fitted, fit_arena
    from poetmodel.solver.request import SolveProgress

__all__ = ["Fitted", "SolveProgress", "fit_arena", "solve"]

_MODULES: Final = {
    "Fitted": "fitting",
    "SolveProgress": "request",
    "fit_arena": "fitting",
    "solve": "facade",
}
"""The module of each name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
