"""Cover cuts: exact rows that exclude points which only a solver's tolerance permitted.

Cover cuts are not a family of `solver.lazy.cuts`: the proof needs them even if all families are
disabled, and they apply to the standard form of any model, including ``compact`` and users' models.
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

MIN_EXCESS_RATIO: Final = Fraction(1, 10**12)
"""Excess of a row over its limit above which the row counts as violated.

Relative to the exact limit; for a row without one, in the unit of the scaled row. It exceeds the
rounding errors of coefficients."""
_HALF: Final = 0.5


class _Literal(NamedTuple):
    """A binary column of a row, or its complement ``1 - column``."""

    column: int
    size: Fraction
    """Amount, 0 or more, that the literal adds to the row's sum when it is 1."""
    sign: int
    """1 for the column itself, -1 for ``1 - column``."""

    def is_one(self, x: NDArray[np.float64]) -> bool:
        """Return whether the literal is 1 at the point `x`, rounded."""
        return bool(x[self.column] > _HALF) == (self.sign > 0)


def limit_rows(form: StandardForm) -> list[int]:
    """Return the ascending indices of rows that have an exact limit, which the verifier checks."""
    limits = {} if form.layout is None else form.layout.limits
    return [
        row_index
        for row_index, row in enumerate(form.rows)
        if isinstance(row, Label) and row in limits
    ]


def add_covers(
    form: StandardForm, x: NDArray[np.float64], rows: Sequence[int], *, is_rejected: bool = False
) -> StandardForm | None:
    """Return a form with a cover cut for each of `rows` that `x` violates; None without a cut.

    Solvers meet rows to a tolerance; a cover cut forbids the rounded point exactly
    (docs/concepts/lazy.md, "Numbers"). If the verifier rejected the point (`is_rejected`), any
    excess counts once no row has one above rounding errors.
    """
    covers = []
    for min_excess_ratio in (MIN_EXCESS_RATIO, Fraction(0)) if is_rejected else (MIN_EXCESS_RATIO,):
        exact_rows = (_exact_row(form, row, min_excess_ratio) for row in rows)
        covers = [
            cut
            for literals_and_limit in exact_rows
            if (cut := _find_cover(form, x, *literals_and_limit)) is not None
        ]
        if covers:
            break
    else:
        return None
    column_indices = [literal.column for literals, _ in covers for literal in literals]
    signs = [literal.sign for literals, _ in covers for literal in literals]
    row_starts = np.cumsum([0, *(len(literals) for literals, _ in covers)])
    cuts = csr_array(
        (np.array(signs, dtype=np.float64), np.array(column_indices, dtype=np.int32), row_starts),
        shape=(len(covers), form.n_columns),
    )
    lower_bounds, upper_bounds = (
        np.full(len(covers), -np.inf),
        [float(right_side) for _, right_side in covers],
    )
    return form.with_rows(cuts, lower_bounds, upper_bounds, ["cover"] * len(covers))


def _find_cover(
    form: StandardForm, x: NDArray[np.float64], literals: list[_Literal], limit: Fraction
) -> tuple[list[_Literal], int] | None:
    """Return the literals of a cover cut, ordered by column, and its right-hand side.

    The cover is the smallest of the sets with the fewest literals that are 1 at `x` and exceed the
    limit together. Literals of at least its largest size join the cut.
    """
    sorted_literals = sorted(literals, key=lambda literal: -literal.size)
    true_literals = [literal for literal in sorted_literals if literal.is_one(x)]
    sums = list(accumulate((literal.size for literal in true_literals), initial=Fraction(0)))
    cover_size = next((n_literals for n_literals, total in enumerate(sums) if total > limit), 0)
    if not cover_size or any(form.upper[literal.column] > 1 for literal in literals):
        return None
    begin = 0  # The smallest literals that exceed the limit let the most columns join the cut.
    while (
        begin + cover_size < len(true_literals)
        and sums[begin + 1 + cover_size] - sums[begin + 1] > limit
    ):
        begin += 1
    cover = true_literals[begin : begin + cover_size]
    members = {literal for literal in sorted_literals if literal.size >= cover[0].size}.union(cover)
    n_complements = sum(literal.sign < 0 for literal in members)
    return sorted(members), cover_size - 1 - n_complements


def _exact_row(
    form: StandardForm, row: int, min_excess_ratio: Fraction
) -> tuple[list[_Literal], Fraction]:
    """Return the literals of a row, and the largest sum of them that is no violation.

    Both are in the unit of the exact limit, otherwise in that of the form; then columns with
    negative coefficients count at their upper bounds.
    """
    label, layout = form.rows[row], form.layout
    exact_limit = layout.limits.get(label) if layout and isinstance(label, Label) else None
    if layout is None or exact_limit is None:
        row_slice = slice(form.matrix.indptr[row], form.matrix.indptr[row + 1])
        limit, literals = Fraction(form.row_upper[row]), []
        for column, value in zip(
            form.matrix.indices[row_slice], form.matrix.data[row_slice], strict=True
        ):
            if value < 0:
                limit -= Fraction(value) * Fraction(form.upper[column])
            else:
                literals.append(_Literal(int(column), Fraction(value), 1))
        return literals, limit + min_excess_ratio
    terms, upper = layout.exact_limit(exact_limit)
    literals = [
        _Literal(column, abs(Fraction(value)), 1 if value > 0 else -1) for value, column in terms
    ]
    limit = upper - sum(min(Fraction(value), Fraction(0)) for value, _ in terms)
    return literals, limit if isinstance(
        exact_limit.upper, int
    ) else limit + min_excess_ratio * abs(limit)
