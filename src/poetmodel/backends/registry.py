"""Which back ends there are. A new one is a module with a `Solver`, and a line here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from poetmodel.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.backends.protocol import Backend
    from poetmodel.backends.solver import Solver

_HOMES: Final[Mapping[str, tuple[str, str]]] = {
    "highs": ("poetmodel.backends.highs", "Highs"),
    "scip": ("poetmodel.backends.scip", "Scip"),
    "gurobi": ("poetmodel.backends.gurobi", "Gurobi"),
}


def backend_names() -> tuple[str, ...]:
    """Return the names of all back ends, the default one first, whether installed or not."""
    return tuple(_HOMES)


def backend(name: str) -> Backend:
    """Return a back end by its name; its package is needed only when it solves.

    Parameters
    ----------
    name : str
        One of `backend_names`.

    Raises
    ------
    InputError
        If there is none of that name.

    Examples
    --------
    >>> backend("highs").name
    'highs'
    """
    if name not in _HOMES:
        msg = f"backend {name!r}: expected one of {', '.join(_HOMES)}"
        raise InputError(msg)
    module, kind = _HOMES[name]
    solver: Solver = getattr(importlib.import_module(module), kind)()
    return solver
