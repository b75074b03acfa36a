"""Meanings of columns: decisions that count for limits and objectives, and liveness of tensors."""

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
"""In place of a column where there is none."""
Term = tuple[float, int]
"""A coefficient and a column."""


def merge_terms(terms: Iterable[Term]) -> list[Term]:
    """Add the coefficients of each column, and drop those that are 0."""
    total: dict[int, float] = {}
    for coefficient, column in terms:
        if coefficient:
            total[column] = total.get(column, 0) + coefficient
    return [(coefficient, column) for column, coefficient in total.items() if coefficient]


@dataclass(frozen=True)
class Decisions:
    """Decisions of a formulation beyond the single pass."""

    recomputations: Sequence[tuple[int, Any]]
    """(node, column that counts one more computation of it); of a Pyomo model its variables."""
    page_ins: Sequence[tuple[int, Any]]
    """(tensor, column that counts one page-in of it)."""
    page_outs: Sequence[tuple[int, Any]]
    """(tensor, column that counts one page-out of it)."""
    storage_homes: Sequence[tuple[int, Any]] = ()
    """(state tensor, column that says that its home is on storage)."""

    def over(self, variable: Callable[[int], Any]) -> Decisions:
        """Return the decisions with `variable` applied to each column."""
        families = (getattr(self, field) for field in self.__dataclass_fields__)
        return Decisions(
            *([(item, variable(column)) for item, column in pairs] for pairs in families)
        )

    def stated(self, row: LinearRow) -> LinearRow:
        """Return a row over totals as one over the columns of these decisions."""
        terms = self.terms(row.coefficients)
        return LinearRow.from_terms(terms, upper=row.upper, name=row.name, key=row.key)

    def terms(self, coefficients: Coefficients) -> list[Term]:
        """Return a sum over these decisions, in the unit of its coefficients."""
        return merge_terms(
            (coefficient, column)
            for amounts, columns in zip(coefficients, self._by_item, strict=True)
            for item, coefficient in enumerate(amounts)
            if coefficient
            for column in columns.get(item, ())
        )

    @cached_property
    def _by_item(self) -> tuple[dict[int, list[int]], ...]:
        """The columns of each node or tensor: a sum may speak of few of them."""
        columns: tuple[dict[int, list[int]], ...] = ({}, {}, {}, {})
        counted = (self.recomputations, self.page_ins, self.page_outs, self.storage_homes)
        for by_item, pairs in zip(columns, counted, strict=True):
            for item, column in pairs:
                by_item.setdefault(item, []).append(column)
        return columns


class Liveness(NamedTuple):
    """A column from 0 to 1 that is as large as rows over other columns need it to be."""

    needs: tuple[int, ...]
    """Columns of which each needs it to be 1 ..."""
    unless: int = NO_COLUMN
    """... unless this one is 1, ..."""
    provided: int = NO_COLUMN
    """... provided that this one is 1."""

    def value(self, values: Mapping[int, float] | NDArray[np.float64]) -> float:
        """Return the least value, given those of other columns."""
        most = max(float(values[column]) for column in self.needs)
        most -= values[self.unless] if self.unless >= 0 else 0.0
        return max(0.0, most - (1 - values[self.provided] if self.provided >= 0 else 0.0))
