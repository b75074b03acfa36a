"""Cover cuts: exact rows against points that only a solver's tolerance let through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.backends.sparse import csr_array
from poetmodel.model.objective import WRITES_ROW
from poetmodel.problem import DEADLINE_ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from poetmodel.backends.standard_form import StandardForm

EXCEEDED: Final = 1e-12
"""By how much a scaled row must be exceeded, so that rounding errors of its sum do not count."""
_HALF: Final = 0.5
LIMITS: Final = frozenset({"memory", "storage", *DEADLINE_ROWS, "energy_budget", WRITES_ROW})
"""Constraints of the exact formulations that state limits which the verifier looks at."""


def limit_rows(form: StandardForm) -> list[int]:
    """Return the rows of a form that state what the verifier looks at."""
    return [
        r
        for r, row in enumerate(form.rows)
        if not isinstance(row, str) and row.parent_component().local_name in LIMITS
    ]


def with_covers(
    form: StandardForm, x: NDArray[np.float64], rows: Sequence[int], *, rejected: bool = False
) -> StandardForm | None:
    """Return a form that also excludes a 0/1 point wherever it exceeds a row; None if nowhere.

    The rows are ``sum of coefficient * column <= limit``. Columns with positive coefficients are 0
    or 1 in every solution that matters, those with negative ones have an upper bound. If the point
    is `rejected`, it is known to exceed a limit: rounding errors of a sum then count as excess
    where no row is exceeded by more.

    Notes
    -----
    A solver keeps rows to an absolute tolerance. Where a row mixes tensors of 100 MB and of 4 B,
    ten bytes too many are within it. The columns ``C`` of such a point exceed the limit by
    themselves, so ``sum of C <= |C| - 1`` holds for every schedule, and no tolerance hides that.
    Columns that need at least as much as the largest of ``C`` may join the sum. Of limits that a
    model states in bytes, times or energies these are compared, bytes as integers.

    References
    ----------
    E. Balas, Facets of the knapsack polytope, Mathematical Programming 8, 1975.
    """
    found = []
    for allowance in (EXCEEDED, -EXCEEDED) if rejected else (EXCEEDED,):
        found = [cut for row in rows if (cut := _cover(form, x, row, allowance)) is not None]
        if found:
            break
    else:
        return None
    index = np.concatenate([columns for columns, _ in found])
    ends = np.cumsum([0, *(columns.size for columns, _ in found)])
    cuts = csr_array((np.ones(index.size), index, ends), shape=(len(found), form.n_columns))
    least, most = np.full(len(found), -np.inf), [float(right) for _, right in found]
    return form.with_rows(cuts, least, most, ["cover"] * len(found))


def _cover(
    form: StandardForm, x: NDArray[np.float64], row: int, allowance: float
) -> tuple[NDArray[np.int32], int] | None:
    """Return columns of a row, and how many of them can be 1; None where `x` keeps the row."""
    values, limit = _exactly(form, row, allowance)
    ordered = sorted(values.items(), key=lambda entry: -entry[1])
    chosen = [entry for entry in ordered if x[entry[0]] > _HALF]
    needs = [value for _, value in chosen]
    size = next((u for u in range(1, len(needs) + 1) if sum(needs[:u]) > limit), None)
    if size is None:
        return None
    begin = 0  # as many that need less, so that more columns need as much as the largest
    while begin + size < len(needs) and sum(needs[begin + 1 : begin + 1 + size]) > limit:
        begin += 1
    cover = chosen[begin : begin + size]
    largest = cover[0][1]
    members = {column for column, _ in cover}
    members.update(column for column, value in ordered if value >= largest)
    return np.array(sorted(members), dtype=np.int32), size - 1


def _exactly(form: StandardForm, row: int, allowance: float) -> tuple[dict[int, float], float]:
    """Return what each column of a row needs, and the limit; in bytes where they are known."""
    constraint = form.rows[row]
    stated = getattr(form.model, "exact_limits", {})
    name = getattr(getattr(constraint, "parent_component", lambda: None)(), "local_name", None)
    exact = None if name is None else stated.get((name, constraint.index()))
    if exact is None:
        span = slice(form.matrix.indptr[row], form.matrix.indptr[row + 1])
        columns, coefficients = form.matrix.indices[span], form.matrix.data[span]
        falling = coefficients < 0
        limit = form.row_upper[row] - coefficients[falling] @ form.upper[columns[falling]]
        pairs = zip(columns[~falling].tolist(), coefficients[~falling].tolist(), strict=True)
        return dict(pairs), float(limit) + allowance
    column = {id(variable): j for j, variable in enumerate(form.columns)}
    limit = exact.limit
    values: dict[int, float] = {}
    for value, variable in exact.terms:
        j = column.get(id(variable))
        if j is not None:
            values[j] = value
        elif variable.value:  # fixed
            limit -= value
    if not isinstance(limit, int):
        limit += allowance * abs(limit)
    return values, limit
