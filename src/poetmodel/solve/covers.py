"""Cover cuts: exact rows against points that only a solver's tolerance let through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.backends.sparse import csr_array
from poetmodel.model.quantities import DEADLINE_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from poetmodel.backends.standard_form import StandardForm

EXCEEDED: Final = 1e-12
"""By how much a scaled row must be exceeded, so that rounding errors of its sum do not count."""
_HALF: Final = 0.5
LIMITS: Final = frozenset({"memory", "storage", *DEADLINE_ROWS, "energy_budget"})
"""Constraints of the exact formulations that state limits which the judge looks at."""


def limit_rows(form: StandardForm) -> list[int]:
    """Return the rows of a form that state what the judge looks at."""
    return [
        r
        for r, row in enumerate(form.rows)
        if not isinstance(row, str) and row.parent_component().local_name in LIMITS
    ]


def with_covers(
    form: StandardForm, x: NDArray[np.float64], rows: Iterable[int]
) -> StandardForm | None:
    """Return a form that also excludes a 0/1 point wherever it exceeds a row.

    Parameters
    ----------
    form : StandardForm
        What was solved.
    x : ndarray of float64, shape (n_columns,)
        A point that the solver calls feasible, binaries rounded.
    rows : iterable of int
        Rows ``sum of coefficient * column <= limit`` to look at. Columns with positive coefficients
        are 0 or 1 in every solution that matters, those with negative ones have an upper bound.

    Returns
    -------
    StandardForm or None
        None if the point exceeds none of these rows.

    Notes
    -----
    A solver keeps rows to an absolute tolerance. Where a row mixes tensors of 100 MB and of 4 B,
    ten bytes too many are within it. The columns ``C`` of such a point exceed the limit by
    themselves, so ``sum of C <= |C| - 1`` holds for every schedule, and no tolerance hides that.

    References
    ----------
    E. Balas, Facets of the knapsack polytope, Mathematical Programming 8, 1975.
    """
    found = [cover for row in rows if (cover := _cover(form, x, row)) is not None]
    if not found:
        return None
    index = np.concatenate(found)
    ends = np.cumsum([0, *(cover.size for cover in found)])
    cuts = csr_array((np.ones(index.size), index, ends), shape=(len(found), form.n_columns))
    least, most = np.full(len(found), -np.inf), [cover.size - 1.0 for cover in found]
    return form.with_rows(cuts, least, most, ["cover"] * len(found))


def _cover(form: StandardForm, x: NDArray[np.float64], row: int) -> NDArray[np.int32] | None:
    """Return the fewest columns at 1 in `x` that exceed a row by themselves, or None."""
    span = slice(form.matrix.indptr[row], form.matrix.indptr[row + 1])
    columns, coefficients = form.matrix.indices[span], form.matrix.data[span]
    falling = coefficients < 0
    limit = form.row_upper[row] - coefficients[falling] @ form.upper[columns[falling]]
    chosen = (coefficients > 0) & (x[columns] > _HALF)
    order = np.argsort(-coefficients[chosen], kind="stable")
    total = np.cumsum(coefficients[chosen][order])
    if not total.size or total[-1] <= limit + EXCEEDED:
        return None
    enough = int(np.argmax(total > limit + EXCEEDED)) + 1
    cover: NDArray[np.int32] = columns[chosen][order[:enough]].astype(np.int32)
    return cover
