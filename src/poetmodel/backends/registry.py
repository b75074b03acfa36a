"""Which back ends there are, and whether they work here.

A new one is a module with a `Solver`, both of its name, and that name here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from poetmodel.errors import InputError, LicenceError

if TYPE_CHECKING:
    from poetmodel.backends.solver import Solver

_NAMES: Final = ("highs", "scip", "gurobi")

LICENCE_SIZE: Final = 2001
"""One column or row more than a size-limited licence allows."""


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


def refusal(name: str, *, columns: int, rows: int) -> LicenceError | None:
    """Return the licence's limit against models of this size, None for none.

    The solver itself is given models of as many columns and of as many rows.

    Raises
    ------
    BackendError
        If the back end cannot be tried for another reason.
    """
    try:
        _least(name, columns, 1)
        _least(name, 1, rows)
    except LicenceError as error:
        return error
    return None


def _least(name: str, columns: int, rows: int) -> float | None:
    """Minimize a sum of binaries that every row wants to be at least one."""
    from poetmodel.backends.protocol import Limits
    from poetmodel.backends.standard_form import StandardForm

    form = StandardForm.from_arrays(
        [[1.0] * columns] * rows, [1.0] * columns, upper=1.0, row_lower=1.0, integer=True
    )
    return backend(name).solve(form, Limits(time_s=10.0)).objective
