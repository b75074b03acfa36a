"""The strategies of earlier work, each a function from a problem to a schedule, verified alike.

Names load on first use, so that whoever only lists the methods needs no solver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poetmodel.baselines.registry import METHODS, Aware, Method, method, method_names
    from poetmodel.baselines.result import run

_HOMES = {
    "METHODS": "poetmodel.baselines.registry",
    "Aware": "poetmodel.baselines.registry",
    "Method": "poetmodel.baselines.registry",
    "method": "poetmodel.baselines.registry",
    "method_names": "poetmodel.baselines.registry",
    "run": "poetmodel.baselines.result",
}

__all__ = ["METHODS", "Aware", "Method", "method", "method_names", "run"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
