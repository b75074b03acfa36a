"""Meanings of columns: decisions that limits and objectives count, and liveness of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poetmodel.problem.rows import LinearRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from poetmodel.problem import Coefficients

NO_COLUMN: Final = -(2**62)
"""Placeholder for a missing column."""
Term = tuple[float, int]
"""A coefficient and a column."""


def merge_terms(terms: Iterable[Term]) -> list[Term]:
    """Add the coefficients of each column, and drop sums that are 0."""
    total: dict[int, float] = {}
    for coefficient, column in terms:
        if coefficient:
            total[column] = total.get(column, 0) + coefficient
    return [(coefficient, column) for column, coefficient in total.items() if coefficient]


@dataclass(frozen=True)
class Decisions:
    """Decisions of a formulation, in addition to the single pass."""

    recomputations: Sequence[tuple[int, Any]]
    """(node, column that counts its recomputations); variables for a Pyomo model."""
    page_ins: Sequence[tuple[int, Any]]
    """(tensor, column that counts its page-ins)."""
    page_outs: Sequence[tuple[int, Any]]
    """(tensor, column that counts its page-outs)."""
    storage_homes: Sequence[tuple[int, Any]] = ()
    """(state tensor, column that is 1 if its home is storage)."""

    def map_columns(self, variable: Callable[[int], Any]) -> Decisions:
        """Return the decisions with `variable` applied to each column."""
        families = (getattr(self, field) for field in self.__dataclass_fields__)
        return Decisions(
            *([(item, variable(column)) for item, column in pairs] for pairs in families)
        )

    def row_over_columns(self, row: LinearRow) -> LinearRow:
        """Convert a row over totals to a row over the columns of the decisions."""
        terms = self.terms(row.coefficients)
        return LinearRow.from_terms(terms, upper=row.upper, name=row.name, key=row.key)

    def terms(self, coefficients: Coefficients) -> list[Term]:
        """Return the terms over columns of the sum with these coefficients, in the sum's unit."""
        return merge_terms(
            (coefficient, column)
            for coefficients_by_item, columns_by_item in zip(
                coefficients, self._by_item, strict=True
            )
            for item, coefficient in enumerate(coefficients_by_item)
            if coefficient
            for column in columns_by_item.get(item, ())
        )

    @cached_property
    def _by_item(self) -> tuple[dict[int, list[int]], ...]:
        """Columns of each node or tensor, for sums with few of them."""
        columns: tuple[dict[int, list[int]], ...] = ({}, {}, {}, {})
        families = (self.recomputations, self.page_ins, self.page_outs, self.storage_homes)
        for by_item, pairs in zip(columns, families, strict=True):
            for item, column in pairs:
                by_item.setdefault(item, []).append(column)
        return columns


class Liveness(NamedTuple):
    """Lower bounds on a liveness column, a variable from 0 to 1.

    The column is at least ``need - unless - (1 - provided)`` for each column `need` in `needs`.
    Missing columns (`NO_COLUMN`) do not count.
    """

    needs: tuple[int, ...]
    """Columns of decisions, each of which needs the tensor in RAM."""
    unless: int = NO_COLUMN
    """Column that removes the bounds if it is 1."""
    provided: int = NO_COLUMN
    """Column that must be 1 for the bounds to apply."""

    def min_value(self, values: Mapping[int, float] | NDArray[np.float64]) -> float:
        """Return the lower bound on the column; `values` are those of the other columns."""
        largest = max(float(values[column]) for column in self.needs)
        largest -= values[self.unless] if self.unless >= 0 else 0.0
        return max(0.0, largest - (1 - values[self.provided] if self.provided >= 0 else 0.0))
