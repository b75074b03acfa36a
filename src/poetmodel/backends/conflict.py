"""Which rows of an infeasible model contradict each other: an irreducible infeasible subsystem.

Notes
-----
HiGHS finds one of the linear relaxation only, and says so: where it takes integrality to see the
contradiction its answer is not valid, and SCIP is asked, which looks at the whole model.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poetmodel.backends.protocol import Limits
from poetmodel.backends.registry import backend
from poetmodel.backends.standard_form import StandardForm

if TYPE_CHECKING:
    from collections.abc import Sequence

IRREDUCIBLE: Final = 6
"""HiGHS: a set of rows of the relaxation that is infeasible, and no smaller one of it is."""
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

    Parameters
    ----------
    form : StandardForm
        The model.
    time_s : float
        Wall time for it [s].

    Returns
    -------
    Conflict or None
        Rows that are infeasible together, checked by a solve of them alone; None where none was
        found in time, or where it takes SCIP and it is not installed.
    """
    ends_s = time.monotonic() + time_s
    single = _single(form)
    if single is not None:
        return Conflict(rows=(single,), found_by="reading")
    for name, ask in (("highs", _of_relaxation), ("scip", _of_whole)):
        left_s = ends_s - time.monotonic()
        if left_s < LEAST_S:
            return None
        rows = ask(form, left_s)
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


def _of_relaxation(form: StandardForm, time_s: float) -> Sequence[int] | None:
    """Ask HiGHS; None where the relaxation is feasible, and its answer therefore not valid."""
    highspy: Any = importlib.import_module("highspy")
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)  # noqa: FBT003 - takes no keyword
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("iis_strategy", IRREDUCIBLE)
    highs.setOptionValue("iis_time_limit", time_s)
    highs.setOptionValue("time_limit", time_s)
    highspy.Highs.resetGlobalScheduler(True)  # noqa: FBT003 - takes no keyword
    matrix, relaxed = form.matrix, np.zeros(form.n_columns, dtype=np.int32)
    highs.passModel(
        form.n_columns,
        form.n_rows,
        matrix.nnz,
        2,
        1,
        0.0,
        np.zeros(form.n_columns),
        form.lower,
        form.upper,
        form.row_lower,
        form.row_upper,
        matrix.indptr.astype(np.int32),
        matrix.indices.astype(np.int32),
        matrix.data,
        relaxed,
    )
    done, found = highs.getIis()
    if done == highspy.HighsStatus.kError or not found.valid_:
        return None
    return [int(i) for i in found.row_index_]


def _of_whole(form: StandardForm, time_s: float) -> Sequence[int] | None:
    """Ask SCIP, where it is installed; it takes integrality into account."""
    if importlib.util.find_spec("pyscipopt") is None:
        return None
    from poetmodel.backends.scip import conflicting_rows

    return conflicting_rows(form, time_s)


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
