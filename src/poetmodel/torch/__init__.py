"""The PyTorch front end: capture a module's training step, measure it, run it inside a budget.

Names load on first use; PyTorch itself is imported only when something is captured.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poetmodel.torch.certificate import Certificate
    from poetmodel.torch.compilation import Step, compile
    from poetmodel.torch.failures import CaptureError
    from poetmodel.torch.joint import Joint, capture
    from poetmodel.torch.pages import PageError
    from poetmodel.torch.profiling import Profile, measure
    from poetmodel.torch.tracing import Trace, trace

_HOMES = {
    "CaptureError": "failures",
    "Certificate": "certificate",
    "Joint": "joint",
    "PageError": "pages",
    "Profile": "profiling",
    "Step": "compilation",
    "Trace": "tracing",
    "capture": "joint",
    "compile": "compilation",
    "measure": "profiling",
    "trace": "tracing",
}

__all__ = [
    "CaptureError",
    "Certificate",
    "Joint",
    "PageError",
    "Profile",
    "Step",
    "Trace",
    "capture",
    "compile",
    "measure",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"poetmodel.torch.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted(__all__)
