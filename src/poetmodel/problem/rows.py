"""Linear rows over decisions, and coefficients of decisions in a quantity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from operator import mul
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

RELATIVE_TOLERANCE: Final = 1e-9
"""Maximum relative difference of times and energies that count as equal."""
ROUNDING_ERROR: Final = 1e-13
"""Maximum rounding error of the difference of two sums, relative to the larger one."""


def is_within(value: float, limit: float | None) -> bool:
    """Return whether a time or energy meets its limit (None: no limit), with the tolerance."""
    return limit is None or value <= limit + RELATIVE_TOLERANCE * abs(limit)


class Coefficients(NamedTuple):
    """Contribution of each decision to a quantity, in the quantity's unit."""

    compute: Sequence[float]
    """Contribution of one more computation of each node."""
    page_in: Sequence[float]
    """Contribution of one page-in of each tensor."""
    page_out: Sequence[float]
    """Contribution of one page-out of each tensor."""
    storage_home: Sequence[float]
    """Contribution of a home on storage instead of RAM of each state tensor, including its first
    read and its write-back; 0 for other tensors."""


def weighted_sum(*terms: tuple[Coefficients, float]) -> Coefficients:
    """Return the weighted sum of at least one pair (coefficients, weight), for each decision."""
    weights = [weight for _, weight in terms]

    def weigh(values: Iterable[float]) -> float:
        """Return the weighted sum of the coefficients of one decision; 0 for a rounding error."""
        products: list[float] = list(map(mul, weights, values))
        total: float = sum(products)
        if isinstance(total, int):
            return total
        if len(products) > 2:  # noqa: PLR2004  # The sum of two is rounded only once.
            total = math.fsum(products)
        return total if abs(total) > ROUNDING_ERROR * max(map(abs, products)) else 0.0

    return Coefficients(
        *(
            tuple(map(cache(weigh), zip(*columns, strict=True)))  # layers are often alike
            for columns in zip(*(coefficients for coefficients, _ in terms), strict=True)
        )
    )


@dataclass(eq=False, kw_only=True)  # If frozen, models would take a tenth longer to build.
class LinearRow:
    """The row ``lower <= sum of value * decision <= upper``, in its own unit.

    Whole numbers are ints of any size, so that their sums are exact.
    """

    space: Sequence[Any]
    """The decisions, shared by rows: variables of a model, columns of a standard form, or pairs.

    Over totals, pairs are (field of `Coefficients`, item), all of `Problem.totals` in order. Over
    stages, they are (family, index) as in ``compact``: ``("recomputed", (t, k))``."""
    values: Sequence[float] | NDArray[Any]
    """Coefficient of each decision."""
    index: NDArray[np.int32] | None = None
    """Position in `space` of each value's decision, without repeats; None for all in order."""
    lower: float = -math.inf
    """Lower bound."""
    upper: float = math.inf
    """Upper bound; for a user constraint whose values are all ints, an int without tolerance."""
    baseline: float = 0.0
    """Contribution of a single pass, which `lower` and `upper` exclude; for the rows of a deadline,
    `Problem.pass_time_s`."""
    name: str = ""
    """Name of the model constraint with the row; for a per-stage constraint, its own name."""
    key: Any = None
    """Index within that constraint: (name, ``upper`` or ``lower``) for a user constraint, (stage,
    node) for a memory row; None if that constraint has one row."""

    @classmethod
    def from_terms(cls, terms: Iterable[tuple[float, Any]], **fields: Any) -> Self:
        """Return the row of pairs (value, decision) without repeated decisions."""
        values, decisions = tuple(zip(*terms, strict=True)) or ((), ())
        return cls(space=decisions, values=values, **fields)

    @property
    def terms(self) -> Iterator[tuple[float, Any]]:
        """Iterator over the pairs (value, decision), in the order of `values`."""
        if self.index is None:
            return zip(self.values, self.space, strict=True)
        decisions = map(self.space.__getitem__, self.index.tolist())
        return zip(self.values.tolist(), decisions, strict=True)  # type: ignore[union-attr]

    @cached_property
    def coefficients(self) -> Coefficients:
        """The values of a row over all totals, by field."""
        columns: dict[str, list[float]] = {field: [] for field in Coefficients._fields}
        for value, (field, _) in self.terms:
            columns[field].append(value)
        return Coefficients(**columns)

    def value(self, value_of: Callable[[Any], float]) -> float:
        """Return the row's sum, without `baseline`; `value_of` maps a decision to its value."""
        return sum(value * value_of(decision) for value, decision in self.terms)

    def is_satisfied(self, value_of: Callable[[Any], float]) -> bool:
        """Return whether the row's sum is between the bounds, with the relative tolerance."""
        value = self.value(value_of)
        return is_within(value, self.upper) and is_within(-value, -self.lower)
