"""Cover cuts: exact rows against points that only a solver's tolerance let through.

No family of `solver.lazy.cuts`: they belong to the proof, whatever the parameters, and to forms of
any model, ``compact`` and a user's included.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from poetmodel.backends.sparse import csr_array
from poetmodel.model.arrays import Label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from poetmodel.backends.standard_form import StandardForm

EXCEEDED: Final = Fraction(1, 10**12)
"""By how much a row must be exceeded, relatively, so that rounding errors of its sum do not
count."""
_HALF: Final = 0.5


class _Literal(NamedTuple):
    """A column that is 0 or 1 as a row counts it: itself, or what it lacks to 1."""

    column: int
    size: Fraction
    """Need where it holds, 0 or more."""
    sign: int
    """1 for the column itself, -1 for ``1 - column``."""

    def holds(self, x: NDArray[np.float64]) -> bool:
        """Return whether it is 1 at a point."""
        return bool(x[self.column] > _HALF) == (self.sign > 0)


def limit_rows(form: StandardForm) -> list[int]:
    """Return the rows of a form that state what the verifier looks at: those of exact limits."""
    limits = {} if form.layout is None else form.layout.limits
    return [r for r, row in enumerate(form.rows) if isinstance(row, Label) and row in limits]


def with_covers(
    form: StandardForm, x: NDArray[np.float64], rows: Sequence[int], *, rejected: bool = False
) -> StandardForm | None:
    """Return a form that also excludes a 0/1 point wherever it exceeds a row; None if nowhere.

    The rows are ``sum of coefficient * column <= limit``. Columns with positive coefficients are 0
    or 1 in every solution that matters, those with negative ones have an upper bound. If the point
    is `rejected`, it is known to exceed a limit: the least excess then counts where no row is
    exceeded by more.

    Notes
    -----
    A solver keeps rows to an absolute tolerance. Where a row mixes tensors of 100 MB and of 4 B,
    ten bytes too many are within it. The columns ``C`` of such a point exceed the limit by
    themselves, so ``sum of C <= |C| - 1`` holds for every schedule, and no tolerance hides that.
    Columns that need at least as much as the largest of ``C`` may join the sum. Of limits that a
    model states in bytes, times or energies these are compared. All sums are exact. A column that
    takes off such a limit counts as a literal: ``1 - x`` takes what `x` would take off, of a limit
    that is higher by as much.

    References
    ----------
    E. Balas, Facets of the knapsack polytope, Mathematical Programming 8, 1975.
    """
    covers = []
    for allowance in (EXCEEDED, Fraction(0)) if rejected else (EXCEEDED,):
        stated = (_exactly(form, row, allowance) for row in rows)
        covers = [cut for limit in stated if (cut := _cover(form, x, *limit)) is not None]
        if covers:
            break
    else:
        return None
    index = [literal.column for literals, _ in covers for literal in literals]
    signs = [literal.sign for literals, _ in covers for literal in literals]
    ends = np.cumsum([0, *(len(literals) for literals, _ in covers)])
    cuts = csr_array(
        (np.array(signs, dtype=np.float64), np.array(index, dtype=np.int32), ends),
        shape=(len(covers), form.n_columns),
    )
    least, most = np.full(len(covers), -np.inf), [float(right) for _, right in covers]
    return form.with_rows(cuts, least, most, ["cover"] * len(covers))


def _cover(
    form: StandardForm, x: NDArray[np.float64], literals: list[_Literal], limit: Fraction
) -> tuple[list[_Literal], int] | None:
    """Return literals that exceed a limit, and the limit of a row on their columns.

    None where `x` keeps it, or where a column may be more than 1.
    """
    ordered = sorted(literals, key=lambda literal: -literal.size)
    chosen = [literal for literal in ordered if literal.holds(x)]
    sums = list(accumulate((literal.size for literal in chosen), initial=Fraction(0)))
    size = next((u for u, taken in enumerate(sums) if taken > limit), 0)
    if not size or any(form.upper[literal.column] > 1 for literal in literals):
        return None
    begin = 0  # as many that need less, so that more columns need as much as the largest
    while begin + size < len(chosen) and sums[begin + 1 + size] - sums[begin + 1] > limit:
        begin += 1
    cover = chosen[begin : begin + size]
    members = {literal for literal in ordered if literal.size >= cover[0].size}.union(cover)
    lacking = sum(literal.sign < 0 for literal in members)
    return sorted(members), size - 1 - lacking


def _exactly(form: StandardForm, row: int, allowance: Fraction) -> tuple[list[_Literal], Fraction]:
    """Return the need of each column of a row, and the limit; in the limit's unit if known."""
    label, layout = form.rows[row], form.layout
    exact = layout.limits.get(label) if layout and isinstance(label, Label) else None
    if layout is None or exact is None:
        span = slice(form.matrix.indptr[row], form.matrix.indptr[row + 1])
        limit, literals = Fraction(form.row_upper[row]), []
        for j, value in zip(form.matrix.indices[span], form.matrix.data[span], strict=True):
            if value < 0:
                limit -= Fraction(value) * Fraction(form.upper[j])
            else:
                literals.append(_Literal(int(j), Fraction(value), 1))
        return literals, limit + allowance
    terms, upper = layout.exact_limit(exact)
    literals = [_Literal(j, abs(Fraction(value)), 1 if value > 0 else -1) for value, j in terms]
    limit = upper - sum(min(Fraction(value), Fraction(0)) for value, _ in terms)
    return literals, limit if isinstance(exact.upper, int) else limit + allowance * abs(limit)
