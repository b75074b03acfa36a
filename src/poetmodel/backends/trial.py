"""Trying a back end out: whether it solves at all, and whether its licence takes a model's size."""

from __future__ import annotations

from typing import Final

import numpy as np

from poetmodel.backends.protocol import Limits
from poetmodel.backends.registry import backend
from poetmodel.backends.standard_form import StandardForm
from poetmodel.errors import BackendError, LicenceError

SMALL: Final = (2, 1)
"""Columns and rows of the model that every back end must solve."""
LICENCE_SIZE: Final = 2001
"""One column or row more than a size-limited licence allows."""


def try_out(name: str) -> None:
    """Solve a small model, which also loads the solver.

    Raises
    ------
    BackendUnavailableError
        If the solver is missing, or its licence refuses even that.
    BackendError
        If the small model is not solved.
    """
    value = _least(name, *SMALL)
    if value != 1.0:
        msg = f"the least value of a small model is 1, and it says {value}"
        raise BackendError(msg)


def refusal(name: str, *, columns: int, rows: int) -> LicenceError | None:
    """Return what the licence of a back end says against models of this size, None for nothing.

    The solver itself is asked, by models of as many columns and of as many rows.

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
    form = StandardForm.from_arrays(
        np.ones((rows, columns)), np.ones(columns), upper=1.0, row_lower=1.0, integer=True
    )
    return backend(name).solve(form, Limits(time_s=10.0)).objective
