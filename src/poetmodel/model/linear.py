"""Limits as rows, scaled for the tolerances of solvers."""

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


LOOSENING: Final = 5e-7
"""Minimum fraction of a limit that is added to the limit: five times a solver's tolerance."""
MAX_SCALED_VALUE: Final = 1e3
"""Maximum coefficient of a value above the limit, in multiples of the limit."""
MAX_ARRAY_SUM: Final = 2.0**62
"""Integers with a larger sum are added as Python ints, because int64 might overflow."""
MIN_RELATIVE_VALUE: Final = 1e-9
"""Values below this fraction of the row's largest value within its limit are dropped, because
solvers ignore them."""


def literal_limit(row: LinearRow, upper_bounds: Sequence[float]) -> float:
    """Return the limit of a row rewritten as a sum of *literals* with absolute coefficients.

    The literal of a negative coefficient is ``u - x``, with the upper bound `u` of the column. A
    float limit includes the possible rounding error.
    """
    negated_sum: float = sum(
        -value * round(upper_bounds[column]) for value, column in row.terms if value < 0
    )
    is_integer = isinstance(row.upper, int)
    return row.upper + negated_sum + (0 if is_integer else ROUNDING_ERROR * negated_sum)


def scale_limit(row: LinearRow) -> LinearRow | None:
    """Return the scaled row of a limit, for a solver; None if the limit cannot bind.

    Limit and values are 0 or more, in the unit of the simulator, such as integer bytes, times or
    energies. In the returned row, the largest value within the limit has coefficient 1. But if all
    values within the limit together meet the limit, the row is ``sum of variables with values above
    the limit <= 0``. The row excludes no 0/1 point that meets the limit.

    Notes
    -----
    A solver's tolerance is absolute, and its conclusions from a row that a point meets exactly may
    be wrong by this tolerance. So each point that meets the limit must satisfy the row with slack:
    the right-hand side is raised by at least five tolerances. Integers are multiples of their
    greatest common divisor `g`, so the limit is first rounded down to a multiple and then raised by
    the maximum of ``g / 2`` and five tolerances; adding ``g / 2`` admits no further point. Cover
    cuts (`poetmodel.solver.covers`) exclude points that exceed the limit by less than the slack.

    A value above the limit forces its variable to 0. It becomes at least two limits, and at most a
    thousand, because solvers lose small values beside very large ones. Negligible values are
    dropped, which only loosens the row.
    """
    values, limit = np.asarray(row.values), row.upper
    if values.dtype.kind not in "if":  # Python integers beyond 64 bits
        values, limit = values.astype(np.float64), float(limit)
    scaled_values = _scale_values(values, limit)
    if scaled_values is None:
        return None
    is_retained, coefficients, upper = scaled_values
    index = (
        np.flatnonzero(is_retained).astype(np.int32)
        if row.index is None
        else row.index[is_retained]
    )
    return replace(row, index=index, values=coefficients, upper=upper)


def _scale_values(
    values: NDArray[Any], limit: float
) -> tuple[NDArray[np.bool_], NDArray[np.float64], float] | None:
    """Return (is retained, coefficients, upper) of a scaled row; None if the limit cannot bind."""
    if _exact_sum(values) <= limit:
        return None
    is_above = values > limit
    other_values = values[~is_above]
    if _exact_sum(other_values) <= limit:
        return is_above, np.ones(int(is_above.sum())), 0.0
    largest = other_values.max().item()
    half_divisor = 0.0
    if isinstance(limit, int):
        divisor = int(np.gcd.reduce(values.astype(np.int64)))
        limit = limit // divisor * divisor
        half_divisor = divisor / 2 / largest
    upper = limit / largest
    is_retained = values >= MIN_RELATIVE_VALUE * largest
    coefficients = values / largest
    coefficients[is_above] = np.clip(coefficients[is_above], 2 * upper, MAX_SCALED_VALUE * upper)
    return is_retained, coefficients[is_retained], upper + max(half_divisor, LOOSENING * upper)


def _exact_sum(values: NDArray[Any]) -> float:
    """Return the sum of values, exact for integers."""
    if values.dtype.kind == "f":
        return float(sum(values.tolist()))
    fits_array_sum = values.sum(dtype=np.float64) <= MAX_ARRAY_SUM
    return int(values.sum()) if fits_array_sum else int(sum(values.tolist()))


def reduce_coefficients(row: LinearRow, upper_bounds: Sequence[float]) -> LinearRow:
    """Return an equivalent limit, with values below ``-v`` raised to ``-v``.

    `v` is the maximum violation: the largest sum of the positive terms minus the limit. Solvers
    lose fewer small values beside large ones (coefficient reduction: Savelsbergh, ORSA Journal on
    Computing 6, 1994).
    """
    positive_sum = sum(
        value * round(upper_bounds[column]) for value, column in row.terms if value > 0
    )
    max_violation = positive_sum - row.upper
    if not isinstance(max_violation, int):
        max_violation += ROUNDING_ERROR * positive_sum
    return (
        replace(row, values=[max(value, -max_violation) for value in row.values])
        if max_violation > 0
        else row
    )


def scale_signed_limit(row: LinearRow, upper_bounds: Sequence[float]) -> LinearRow | None:
    """Return the row of a limit with negative values or counts; None if it cannot bind.

    Scaled by `scale_limit` as a row over literals, whose `literal_limit` must be 0 or more; a count
    up to `u` is `u` equal literals. A negligible negative value keeps a tiny coefficient, so that
    covers can count the variable.
    """
    terms = list(row.terms)
    counts = [round(upper_bounds[column]) for _, column in terms]
    if max(counts, default=1) == 1 and all(value >= 0 for value, _ in terms):
        return scale_limit(row)
    terms_and_counts = zip(terms, counts, strict=True)
    if sum(value * count for (value, _), count in terms_and_counts if value > 0) <= row.upper:
        return None
    literals = [
        (abs(value), (math.copysign(1.0, value), column))
        for (value, column), count in zip(terms, counts, strict=True)
        for _ in range(count)
    ]
    scaled_row = scale_limit(LinearRow.from_terms(literals, upper=literal_limit(row, upper_bounds)))
    if scaled_row is None:
        return None
    literal_terms = list(scaled_row.terms)
    upper = scaled_row.upper - sum(value for value, (sign, _) in literal_terms if sign < 0)
    coefficient_of_column = {column: sign * value for value, (sign, column) in literal_terms}
    negligible_value = MIN_RELATIVE_VALUE * max(value for value, _ in literals)
    for value, column in terms:
        if -negligible_value < value < 0:
            coefficient_of_column.setdefault(column, -2 * MIN_RELATIVE_VALUE)
    row_terms = ((value, column) for column, value in coefficient_of_column.items())
    return LinearRow.from_terms(row_terms, upper=upper, name=row.name, key=row.key)


def scale_and_register_limit(m: Model, limit: LinearRow) -> LinearRow | None:
    """Return a limit scaled by `scale_signed_limit`; register the unscaled limit for cover cuts."""
    row = scale_signed_limit(limit, m.upper)
    if row is not None:
        register_limit(m, limit)
    return row


def register_limit(m: Model, limit: LinearRow) -> None:
    """Add a limit to `Model.limits`, from which cover cuts are found."""
    m.limits[Label(limit.name, limit.key)] = limit
