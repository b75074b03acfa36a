"""Which back ends there are, and whether they work here.

A new one is a module with a `Solver`, both of its name, and that name here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from poetmodel.errors import InputError

if TYPE_CHECKING:
    from poetmodel.backends.solver import Solver

_NAMES: Final = ("highs", "scip", "gurobi")


def backend_names() -> tuple[str, ...]:
    """Return the names of all back ends, the default one first, whether installed or not."""
    return _NAMES


def backend(name: str) -> Solver:
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
    if name not in _NAMES:
        raise InputError(f"backend {name!r}: expected one of {', '.join(_NAMES)}")
    solver: Solver = getattr(import_module(f"poetmodel.backends.{name}"), name.capitalize())()
    return solver
