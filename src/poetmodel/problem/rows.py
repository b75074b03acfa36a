"""Linear rows over decisions, and what decisions add to a quantity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

RELATIVE_TOLERANCE: Final = 1e-9
"""Times and energies that differ by less than this, relatively, count as equal."""
ROUNDING: Final = 1e-13
"""Relative error of the difference of two sums."""


def within(value: float, limit: float | None) -> bool:
    """Return whether a time or energy keeps its limit, to the relative tolerance."""
    return limit is None or value <= limit + RELATIVE_TOLERANCE * abs(limit)


class Coefficients(NamedTuple):
    """Contribution of each decision to a quantity, in its unit."""

    compute: Sequence[float]
    """For each node, one more computation."""
    page_in: Sequence[float]
    """For each tensor, one page-in."""
    page_out: Sequence[float]
    """For each tensor, one page-out."""
    storage_home: Sequence[float]
    """For each tensor that is state, its home on storage in place of RAM: what reads it first and
    what writes its replacement back."""


def weighted(*parts: tuple[Coefficients, float]) -> Coefficients:
    """Return the sum of weighted coefficients; what cancels out but for rounding is 0."""
    weights = [weight for _, weight in parts]

    def added(values: Iterable[float]) -> float:
        products: list[float] = list(map(mul, weights, values))
        total: float = sum(products)
        if isinstance(total, int):
            return total
        if len(products) > 2:  # noqa: PLR2004  # the sum of two is rounded once in any case
            total = math.fsum(products)
        return total if abs(total) > ROUNDING * max(map(abs, products)) else 0.0

    return Coefficients(
        *(
            tuple(added(values) for values in zip(*columns, strict=True))
            for columns in zip(*(coefficients for coefficients, _ in parts), strict=True)
        )
    )


@dataclass(eq=False, kw_only=True)  # frozen ones take models a tenth longer to build
class LinearRow:
    """The row ``lower <= sum of value * decision <= upper``, in its own unit.

    What limits, models, own constraints, cuts and heuristics say is such a row. Whole numbers stay
    ints of any size, so that sums of them are exact.
    """

    space: Sequence[Any]
    """The decisions, shared by many rows: variables of a model, columns of a form, or pairs.

    Over totals pairs are (field of `Coefficients`, item), all of them as `Problem.totals` has them;
    over stages they are (family, index) as ``compact`` names them: ``("recomputed", (t, k))``.
    """
    values: Sequence[float] | NDArray[Any]
    """Contribution of one of each decision."""
    index: NDArray[np.int32] | None = None
    """For each value the position of its decision in `space`, none twice; None for all in order."""
    lower: float = -math.inf
    upper: float = math.inf
    """Contributions of decisions; an int, compared exactly, if everything is whole."""
    baseline: float = 0.0
    """Contribution of a single pass, beyond the subject of `lower` and `upper`."""
    name: str = ""
    """Name of the constraint of a model that states it."""
    key: Any = None
    """Which row of that constraint: of a user's own (its name, ``upper`` or ``lower``), of a memory
    row (stage, node); None where it has one."""

    @classmethod
    def of(cls, terms: Iterable[tuple[float, Any]], **stated: Any) -> Self:
        """Return the row of pairs of value and decision, no decision in two of them."""
        values, decisions = tuple(zip(*terms, strict=True)) or ((), ())
        return cls(space=decisions, values=values, **stated)

    @property
    def terms(self) -> Iterator[tuple[float, Any]]:
        """Pairs of value and decision."""
        if self.index is None:
            return zip(self.values, self.space, strict=True)
        decisions = map(self.space.__getitem__, self.index.tolist())
        return zip(self.values.tolist(), decisions, strict=True)  # type: ignore[union-attr]

    @cached_property
    def coefficients(self) -> Coefficients:
        """The values of a row over all totals, by what they count."""
        columns: dict[str, list[float]] = {field: [] for field in Coefficients._fields}
        for value, (field, _) in self.terms:
            columns[field].append(value)
        return Coefficients(**columns)

    def value(self, amount: Callable[[Any], float]) -> float:
        """Return its sum; `amount` says how much of a decision is taken."""
        return sum(value * amount(decision) for value, decision in self.terms)

    def is_kept(self, amount: Callable[[Any], float]) -> bool:
        """Return whether its sum keeps both sides, to the relative tolerance."""
        value = self.value(amount)
        return within(value, self.upper) and within(-value, -self.lower)
