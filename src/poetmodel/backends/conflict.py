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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.backends.protocol import Limits
from poetmodel.backends.registry import backend
from poetmodel.backends.standard_form import StandardForm

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_S: Final = 0.1
"""Less time than this is not worth a try [s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Rows of a model that no values satisfy together."""

    rows: tuple[int, ...]
    """Their numbers, ascending; with the bounds of their columns they are infeasible."""
    found_by: str
    """Who found them: ``highs``, ``scip``, or ``reading`` where one row says it alone."""


def find_conflict(form: StandardForm, *, time_s: float) -> Conflict | None:
    """Find a few rows of an infeasible model that contradict each other.

    They are checked by a solve of them alone. None where none was found in time [s], or where it
    takes SCIP and it is not installed.
    """
    ends_s = time.monotonic() + time_s
    single = _single(form)
    if single is not None:
        return Conflict(rows=(single,), found_by="reading")
    for name, package in (("highs", "highspy"), ("scip", "pyscipopt")):
        left_s = ends_s - time.monotonic()
        if left_s < LEAST_S or importlib.util.find_spec(package) is None:
            return None
        solver = importlib.import_module(f"poetmodel.backends.{name}")
        rows = solver.conflicting_rows(form, left_s)
        if rows and _infeasible(form, rows, ends_s - time.monotonic()):
            return Conflict(rows=tuple(sorted(rows)), found_by=name)
    return None


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
    found = np.flatnonzero(broken)
    return int(found[0]) if found.size else None


def _infeasible(form: StandardForm, rows: Sequence[int], time_s: float) -> bool:
    """Return whether HiGHS proves that these rows alone are infeasible."""
    chosen = sorted(rows)
    part = StandardForm.from_arrays(
        form.matrix[chosen],
        np.zeros(form.n_columns),
        lower=form.lower,
        upper=form.upper,
        integer=form.integer,
        row_lower=form.row_lower[chosen],
        row_upper=form.row_upper[chosen],
    )
    if time_s <= 0:
        return False
    return backend("highs").solve(part, Limits(time_s=time_s)).infeasible
