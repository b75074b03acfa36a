"""poetmodel: train neural networks on devices with little memory, with provably minimal energy.

All names but `__version__` are imported on first use (PEP 562), so that ``import poetmodel`` is
fast and needs no extra.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from poetmodel.version import __version__

if TYPE_CHECKING:
    from poetmodel.baselines.own import method
    from poetmodel.device import Costs, Device
    from poetmodel.graph import Graph, Node, Tensor, operation, zoo
    from poetmodel.model import build
    from poetmodel.placement import place
    from poetmodel.plan import Arena, Plan, PlanCheck, check_arena, check_plan
    from poetmodel.planner import verify
    from poetmodel.problem import Constraint, Problem
    from poetmodel.result import SolveResult
    from poetmodel.schedule import Schedule, Simulation, simulate
    from poetmodel.solver import fit_arena, solve

_NAMES_OF_MODULE = {
    "poetmodel.baselines.own": ("method",),
    "poetmodel.device": ("Costs", "Device"),
    "poetmodel.graph": ("Graph", "Node", "Tensor", "operation"),
    "poetmodel.model": ("build",),
    "poetmodel.placement": ("place",),
    "poetmodel.plan": ("Arena", "Plan", "PlanCheck", "check_arena", "check_plan"),
    "poetmodel.planner": ("verify",),
    "poetmodel.problem": ("Constraint", "Problem"),
    "poetmodel.result": ("SolveResult",),
    "poetmodel.schedule": ("Schedule", "Simulation", "simulate"),
    "poetmodel.solver": ("fit_arena", "solve"),
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}

__all__ = [
    "Arena",
    "Constraint",
    "Costs",
    "Device",
    "Graph",
    "Node",
    "Plan",
    "PlanCheck",
    "Problem",
    "Schedule",
    "Simulation",
    "SolveResult",
    "Tensor",
    "__version__",
    "build",
    "check_arena",
    "check_plan",
    "fit_arena",
    "method",
    "operation",
    "place",
    "simulate",
    "solve",
    "verify",
    "zoo",
]


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` on its first use; raise AttributeError for other names."""
    if name == "zoo":
        return import_module("poetmodel.graph.zoo")
    if name in _MODULE_OF_NAME:
        value = getattr(import_module(_MODULE_OF_NAME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
