"""Methods: published strategies and user-defined functions, run under the same simulator.

`run` and `recompute_once` are imported on first use, so that listing the methods imports no solver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poetmodel.baselines.lookup import method
from poetmodel.baselines.registry import METHODS, Aware, Method, StateHomes, method_names

if TYPE_CHECKING:
    from poetmodel.baselines.running import run
    from poetmodel.heuristics.execution import recompute_once

__all__ = [
    "METHODS",
    "Aware",
    "Method",
    "StateHomes",
    "method",
    "method_names",
    "recompute_once",
    "run",
]


def __getattr__(name: str) -> Any:
    """Import `run` or `recompute_once` when it is used; raise AttributeError for other names."""
    if name == "run":
        from poetmodel.baselines.running import run

        return run
    if name == "recompute_once":
        from poetmodel.heuristics.execution import recompute_once

        return recompute_once
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
