"""The PyTorch front end: capture a training step, measure it, and execute it within a budget.

PyTorch is imported at the first use of a name that needs it, not with this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from poetmodel.torch.errors import (
    CaptureError,
    PageError,
    convert_moved_names,
    require_executorch,
)

if TYPE_CHECKING:
    from poetmodel.torch.capturing.joint import capture
    from poetmodel.torch.capturing.joint_graph import Joint
    from poetmodel.torch.choosing import Choice, choose
    from poetmodel.torch.compilation import Step, compile
    from poetmodel.torch.dynamo.backend import backend, partitioner, plans, summary
    from poetmodel.torch.dynamo.compiling import Backend
    from poetmodel.torch.dynamo.regions import region
    from poetmodel.torch.executorch.program import ExecutorchProgram, to_executorch
    from poetmodel.torch.exporting import export
    from poetmodel.torch.int8.front import QuantizedFront
    from poetmodel.torch.int8.quantizing import quantized
    from poetmodel.torch.int8.training import QuantizedNetwork, QuantizedSGD
    from poetmodel.torch.keras import from_keras
    from poetmodel.torch.onnx.module import from_onnx
    from poetmodel.torch.runtime.certificate import Certificate
    from poetmodel.torch.runtime.profiling import Profile, measure
    from poetmodel.torch.state.exported import load_state, save_state
    from poetmodel.torch.state.recovery import recover
    from poetmodel.torch.step.trace import Trace, trace

_MODULES: Final = {
    "Backend": "dynamo.compiling",
    "Certificate": "runtime.certificate",
    "ExecutorchProgram": "executorch.program",
    "Choice": "choosing",
    "Joint": "capturing.joint_graph",
    "Profile": "runtime.profiling",
    "QuantizedFront": "int8.front",
    "QuantizedNetwork": "int8.training",
    "QuantizedSGD": "int8.training",
    "Step": "compilation",
    "Trace": "step.trace",
    "backend": "dynamo.backend",
    "capture": "capturing.joint",
    "choose": "choosing",
    "compile": "compilation",
    "export": "exporting",
    "from_keras": "keras",
    "from_onnx": "onnx.module",
    "load_state": "state.exported",
    "measure": "runtime.profiling",
    "partitioner": "dynamo.backend",
    "plans": "dynamo.backend",
    "quantized": "int8.quantizing",
    "recover": "state.recovery",
    "region": "dynamo.regions",
    "save_state": "state.exported",
    "summary": "dynamo.backend",
    "to_executorch": "executorch.program",
    "trace": "step.trace",
}
"""Module in this package of each name that is imported at its first use."""

__all__ = [
    "Backend",
    "CaptureError",
    "Certificate",
    "Choice",
    "ExecutorchProgram",
    "Joint",
    "PageError",
    "Profile",
    "QuantizedFront",
    "QuantizedNetwork",
    "QuantizedSGD",
    "Step",
    "Trace",
    "backend",
    "capture",
    "choose",
    "compile",
    "export",
    "from_keras",
    "from_onnx",
    "load_state",
    "measure",
    "partitioner",
    "plans",
    "quantized",
    "recover",
    "region",
    "save_state",
    "summary",
    "to_executorch",
    "trace",
]


def __getattr__(name: str) -> Any:
    """Import a name at its first use, and store it as a global of this module."""
    if name in _MODULES:
        with convert_moved_names():
            if _MODULES[name].startswith("executorch."):
                require_executorch()
            value = getattr(import_module(f"poetmodel.torch.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
