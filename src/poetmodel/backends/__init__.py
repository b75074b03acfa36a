"""Adapters to MILP solvers: each solves a `StandardForm` and returns a `RawSolution`.

Import `compile_model` from `poetmodel.backends.compiler` and `StandardForm` from
`poetmodel.backends.standard_form`. Both modules load numpy, and the first one scipy and Pyomo; this
package loads none of them.
"""

from __future__ import annotations

from poetmodel.backends.protocol import (
    BackendProgress,
    Capabilities,
    Limits,
    OptionValue,
    RawSolution,
    SolverStatus,
)
from poetmodel.backends.registry import backend, backend_class, backend_names, register
from poetmodel.backends.worker import run_interruptibly
from poetmodel.errors import check_docstrings

__all__ = [
    "BackendProgress",
    "Capabilities",
    "Limits",
    "OptionValue",
    "RawSolution",
    "SolverStatus",
    "backend",
    "backend_class",
    "backend_names",
    "register",
    "run_interruptibly",
]

check_docstrings()  # raises under ``python -OO``
