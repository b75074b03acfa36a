"""Solvers behind one door: a linear model in, three separate facts out.

`compile_model` (in `poetmodel.backends.compiler`) and `StandardForm` (in
`poetmodel.backends.standard_form`) load numpy and scipy and are imported from their modules.
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

check_docstrings()
