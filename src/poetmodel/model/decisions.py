"""Decisions that limits and objectives count, and bounds on the liveness of tensors, as columns."""

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
"""Placeholder where there is no column; negative, unlike columns."""
Term = tuple[float, int]
"""A coefficient and a column."""


def merge_terms(terms: Iterable[Term]) -> list[Term]:
    """Return one term for each column, with the sum of its coefficients; omit sums of 0."""
    sums: dict[int, float] = {}
    for coefficient, column in terms:
        if coefficient:
            sums[column] = sums.get(column, 0) + coefficient
    return [(coefficient, column) for column, coefficient in sums.items() if coefficient]


@dataclass(frozen=True)
class Decisions:
    """Columns of a formulation's decisions beyond the single pass; with Pyomo, its variables."""

    recomputations: Sequence[tuple[int, Any]]
    """(node, column that counts recomputations of the node)."""
    page_ins: Sequence[tuple[int, Any]]
    """(tensor, column that counts page-ins of the tensor)."""
    page_outs: Sequence[tuple[int, Any]]
    """(tensor, column that counts page-outs of the tensor)."""
    storage_homes: Sequence[tuple[int, Any]] = ()
    """(state tensor, column that is 1 if its home is storage)."""

    @property
    def by_kind(self) -> tuple[Sequence[tuple[int, Any]], ...]:
        """The pairs of each kind, in the order of the fields of `Coefficients`."""
        return self.recomputations, self.page_ins, self.page_outs, self.storage_homes

    def map_columns(self, variable_of: Callable[[int], Any]) -> Decisions:
        """Return the decisions with `variable_of(column)` in place of each column."""
        return Decisions(
            *([(item, variable_of(column)) for item, column in pairs] for pairs in self.by_kind)
        )

    def row_over_columns(self, row: LinearRow) -> LinearRow:
        """Convert a limit on totals to a row over columns, without its `lower` and `baseline`."""
        terms = self.terms(row.coefficients)
        return LinearRow.from_terms(terms, upper=row.upper, name=row.name, key=row.key)

    def terms(self, coefficients: Coefficients) -> list[Term]:
        """Return one term (coefficient, column) per column of decisions; omit coefficients of 0."""
        return merge_terms(
            (coefficient, column)
            for coefficients_by_item, columns_by_item in zip(
                coefficients, self._columns_by_item, strict=True
            )
            for item, coefficient in enumerate(coefficients_by_item)
            if coefficient
            for column in columns_by_item.get(item, ())
        )

    @cached_property
    def _columns_by_item(self) -> tuple[dict[int, list[int]], ...]:
        """Columns by node or tensor: of recomputations, page-ins, page-outs and storage homes."""
        dicts: tuple[dict[int, list[int]], ...] = ({}, {}, {}, {})
        for columns_of_item, pairs in zip(dicts, self.by_kind, strict=True):
            for item, column in pairs:
                columns_of_item.setdefault(item, []).append(column)
        return dicts


class LivenessBounds(NamedTuple):
    """Lower bounds on a liveness column, a variable from 0 to 1.

    The column is at least ``need - waiver - (1 - condition)`` for each column `need` in `needs`. A
    `waiver` or `condition` of `NO_COLUMN` is omitted from the bound.
    """

    needs: tuple[int, ...]
    """Columns of decisions, each of which needs the tensor in RAM."""
    waiver: int = NO_COLUMN
    """Column that cancels the bounds if it is 1."""
    condition: int = NO_COLUMN
    """Column that must be 1 for the bounds to apply."""

    def min_value(self, values: Mapping[int, float] | NDArray[np.float64]) -> float:
        """Return the minimum of the liveness column, given the values of decisions."""
        bound = max(float(values[column]) for column in self.needs)
        bound -= values[self.waiver] if self.waiver >= 0 else 0.0
        return max(0.0, bound - (1 - values[self.condition] if self.condition >= 0 else 0.0))
