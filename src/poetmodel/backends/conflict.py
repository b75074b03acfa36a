"""Which rows of an infeasible model contradict each other: an irreducible infeasible subsystem.

Notes
-----
HiGHS finds one of the linear relaxation only, and says so: where it takes integrality to see the
contradiction its answer is not valid, and SCIP looks at the whole model.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from typing import Final

import numpy as np

from poetmodel.backends.protocol import Limits
from poetmodel.backends.registry import backend
from poetmodel.backends.standard_form import StandardForm

LEAST_S: Final = 0.1
"""Less time than this is not worth a try [s]."""


def find_conflict(form: StandardForm, *, time_s: float) -> list[int]:
    """Return a few rows, ascending, that no values within the columns' bounds satisfy together.

    They are checked by a solve of them alone. Empty where none was found in time [s], or where it
    takes SCIP and it is not installed.
    """
    ends_s = time.monotonic() + time_s
    single = _single(form)
    if single is not None:
        return [single]
    for name, package in (("highs", "highspy"), ("scip", "pyscipopt")):
        left_s = ends_s - time.monotonic()
        if left_s < LEAST_S or importlib.util.find_spec(package) is None:
            return []
        solver = importlib.import_module(f"poetmodel.backends.{name}")
        rows = sorted(solver.conflicting_rows(form, left_s) or ())
        if rows and _infeasible(form, rows, ends_s - time.monotonic()):
            return rows
    return []


def _single(form: StandardForm) -> int | None:
    """Return a row that its own columns' bounds rule out, if there is one."""
    matrix = form.matrix
    low, up = form.lower[matrix.indices], form.upper[matrix.indices]
    positive = matrix.data > 0
    least = np.where(positive, matrix.data * low, matrix.data * up)
    most = np.where(positive, matrix.data * up, matrix.data * low)
    row_of = np.repeat(np.arange(form.n_rows), np.diff(matrix.indptr))
    smallest = np.bincount(row_of, weights=least, minlength=form.n_rows)
    largest = np.bincount(row_of, weights=most, minlength=form.n_rows)
    slack = 1e-6 * (1.0 + np.bincount(row_of, weights=np.abs(matrix.data), minlength=form.n_rows))
    broken = (smallest > form.row_upper + slack) | (largest < form.row_lower - slack)
    rows = np.flatnonzero(broken)
    return int(rows[0]) if rows.size else None


def _infeasible(form: StandardForm, rows: list[int], time_s: float) -> bool:
    """Return whether HiGHS proves that these rows alone are infeasible."""
    if time_s <= 0:
        return False
    part = StandardForm.from_arrays(
        form.matrix[rows],
        np.zeros(form.n_columns),
        lower=form.lower,
        upper=form.upper,
        integer=form.integer,
        row_lower=form.row_lower[rows],
        row_upper=form.row_upper[rows],
    )
    return backend("highs").solve(part, Limits(time_s=time_s)).infeasible
