"""Limits as rows, scaled so that solvers see numbers near one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poetmodel.model.arrays import Label, Model
from poetmodel.problem.rows import ROUNDING_ERROR, LinearRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


RESOLVED: Final = 5e-7
"""By how much a row is loosened, relative to its limit: five times a solver's tolerance."""
EXCLUDED: Final = 1e3
"""Largest coefficient of a value above the limit, in limits."""
LARGEST_SUM: Final = 2.0**62
"""Sums of whole numbers above this do not fit into those of arrays."""
NEGLIGIBLE: Final = 1e-9
"""Share of a row's largest value below which a value is left out: solvers drop such numbers."""


def room(row: LinearRow, most: Sequence[float]) -> float:
    """Return the room for the *literals* of a limit together, each its value without the sign.

    The literal of a positive value is its variable `x`, that of a negative one ``1 - x``; of a
    count up to `u` it is ``u - x``. Real numbers get what their sum may be off by. `most` has the
    upper bound of each column.
    """
    taken: float = sum(-value * round(most[column]) for value, column in row.terms if value < 0)
    whole = isinstance(row.upper, int)
    return row.upper + taken + (0 if whole else ROUNDING_ERROR * taken)


def limit_row(row: LinearRow) -> LinearRow | None:
    """Return the row that a solver gets for a limit, None if it cannot bind.

    Limit and values are 0 or more, in their own unit as the simulator looks at them: whole bytes,
    or times or energies, on variables that are 0 or 1 where it matters. The row has coefficients
    near one, and loses no 0/1 point that keeps the limit.

    Notes
    -----
    A solver's tolerance is absolute, and what it concludes from a row that a point meets exactly
    may be wrong by as much. So each point that keeps the limit must keep the row with room to
    spare: the right-hand side is raised by five tolerances. Bytes are multiples of their greatest
    common divisor `g`, so the limit is first rounded down to one and then raised by ``g / 2``,
    which admits nothing, where that is more. Points that exceed the limit by less than the row
    shows are excluded by cover cuts (`poetmodel.solver.covers`).

    A value above the limit rules its variable out, however large it is. It counts as at most a
    thousand limits, so that small ones beside it are not lost; where the others keep the limit
    whatever they are, the row says only that all such variables are 0. Values that are negligible
    are left out, which only loosens the row.
    """
    values, most = np.asarray(row.values), row.upper
    if values.dtype.kind not in "if":  # whole numbers that arrays do not hold
        values, most = values.astype(np.float64), float(most)
    parts = _scaled(values, most)
    if parts is None:
        return None
    kept, scaled, right = parts
    index = np.flatnonzero(kept).astype(np.int32) if row.index is None else row.index[kept]
    return replace(row, index=index, values=scaled, upper=right)


def _scaled(
    values: NDArray[Any], most: float
) -> tuple[NDArray[np.bool_], NDArray[np.float64], float] | None:
    """Return the values in the row of a limit, their coefficients, and the right-hand side."""
    if _total(values) <= most:
        return None
    above = values > most
    fitting = values[~above]
    if _total(fitting) <= most:
        return above, np.ones(int(above.sum())), 0.0
    largest = fitting.max().item()
    half = 0.0
    if isinstance(most, int):
        divisor = int(np.gcd.reduce(values.astype(np.int64)))
        most = most // divisor * divisor
        half = divisor / 2 / largest
    right = most / largest
    kept = values >= NEGLIGIBLE * largest
    scaled = values / largest
    scaled[above] = np.clip(scaled[above], 2 * right, EXCLUDED * right)
    return kept, scaled[kept], right + max(half, RESOLVED * right)


def _total(values: NDArray[Any]) -> float:
    """Return the sum of values, exactly where they are whole numbers."""
    if values.dtype.kind == "f":
        return float(sum(values.tolist()))
    fits = values.sum(dtype=np.float64) <= LARGEST_SUM
    return int(values.sum()) if fits else int(sum(values.tolist()))


def as_needed(row: LinearRow, most: Sequence[float]) -> LinearRow:
    """Return a limit in which nothing takes off more than all others can exceed the limit by.

    The same decisions keep it, and small values are not lost beside large ones (coefficient
    reduction: Savelsbergh, ORSA Journal on Computing 6, 1994). `most` has the upper bound of each
    column.
    """
    added = sum(value * round(most[column]) for value, column in row.terms if value > 0)
    needed = added - row.upper
    if not isinstance(needed, int):
        needed += ROUNDING_ERROR * added
    return replace(row, values=[max(value, -needed) for value in row.values]) if needed > 0 else row


def signed_row(row: LinearRow, most: Sequence[float]) -> LinearRow | None:
    """Return the row of a limit with negative values or counts, as `limit_row` does for the others.

    The row is that of the literals, a count being as many of them as it may be, all alike. Positive
    values that do not exceed the limit cannot break it. What takes off too little for a solver to
    see takes off the least that it does: so it has the variable, and covers can count it. `most`
    has the upper bound of each column.
    """
    terms = list(row.terms)
    times = [round(most[column]) for _, column in terms]
    if max(times, default=1) == 1 and all(value >= 0 for value, _ in terms):
        return limit_row(row)
    taken = zip(terms, times, strict=True)
    if sum(value * count for (value, _), count in taken if value > 0) <= row.upper:
        return None
    literals = [
        (abs(value), (math.copysign(1.0, value), column))
        for (value, column), count in zip(terms, times, strict=True)
        for _ in range(count)
    ]
    scaled = limit_row(LinearRow.from_terms(literals, upper=room(row, most)))
    if scaled is None:
        return None
    signed = list(scaled.terms)
    right = scaled.upper - sum(value for value, (sign, _) in signed if sign < 0)
    merged_row = {column: sign * value for value, (sign, column) in signed}
    lost = NEGLIGIBLE * max(value for value, _ in literals)
    for value, column in terms:
        if -lost < value < 0:
            merged_row.setdefault(column, -2 * NEGLIGIBLE)
    pairs = ((value, column) for column, value in merged_row.items())
    return LinearRow.from_terms(pairs, upper=right, name=row.name, key=row.key)


def stated_limit(m: Model, limit: LinearRow) -> LinearRow | None:
    """Return the row for a limit, None where it cannot bind; a row that can is kept as a limit."""
    row = signed_row(limit, m.upper)
    if row is not None:
        keep_limit(m, limit)
    return row


def keep_limit(m: Model, limit: LinearRow) -> None:
    """Keep a limit of a model for cover cuts."""
    m.limits[Label(limit.name, limit.key)] = limit
