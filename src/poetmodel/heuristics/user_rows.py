"""User-defined constraints on totals: the amounts that each decision adds to their rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Self

from poetmodel.problem import USER_CONSTRAINTS, Coefficients, LinearRow, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

RowAmounts = tuple[tuple[int, float], ...]
"""(row, amount) pairs of one decision: the position of a row, and the amount added to that row."""
_ROUNDING: Final = 1e-12
"""Maximum excess that counts as rounding error, in units of a row."""


class UserRows:
    """The rows of a problem's user-defined constraints on totals, indexed by decision."""

    def __init__(self, problem: Problem, limits: Sequence[LinearRow]) -> None:
        self.limits = tuple(limits)
        self.upper_limits = [limit.upper for limit in limits]
        """For each row, the largest sum that its limit permits."""
        self.units: list[float] = []
        """For each row, the amount by which its excess is divided: the larger of its limit and its
        smallest coefficient other than 0, as absolute values; 1 without a coefficient, unless the
        limit is larger."""
        self.has_only_positive: list[bool] = []
        """For each row, whether all of its coefficients are positive."""
        self.counts_one_decision: list[bool] = []
        """For each row, whether at most one decision has a coefficient other than 0."""
        amounts_of: dict[tuple[str, int], list[tuple[int, float]]] = {
            key: [] for key in problem.totals
        }
        for row, limit in enumerate(limits):
            amounts = [amount for amount, _ in limit.terms if amount]
            for amount, decision in limit.terms:
                if amount:
                    amounts_of[decision].append((row, amount))
            self.units.append(max(abs(limit.upper), min(map(abs, amounts), default=1.0)))
            self.has_only_positive.append(min(amounts, default=0) >= 0)
            self.counts_one_decision.append(len(amounts) <= 1)
        columns: dict[str, list[RowAmounts]] = {field: [] for field in Coefficients._fields}
        for (field, _), row_amounts in amounts_of.items():
            columns[field].append(tuple(row_amounts))
        self.compute, self.page_in, self.page_out, self.storage_home = columns.values()
        """Row amounts of each decision: by node for `compute`, otherwise by tensor."""
        self.rewards: Coefficients | None = None
        """`Problem.rewards`; None if all are 0."""
        if any(any(column) for column in problem.rewards):
            self.rewards = problem.rewards
        self.rewarded_nodes = [
            k
            for k, reward in enumerate(problem.rewards.compute)
            if reward and problem.may_recompute(k)
        ]
        """Nodes whose recomputation is rewarded and permitted."""
        can_page = problem.can_page
        self.rewarded_page_ins = [
            i for i, reward in enumerate(problem.rewards.page_in) if reward and can_page
        ]
        """Tensors whose page-in is rewarded; empty without paging."""
        self.rewarded_page_outs = [
            i for i, reward in enumerate(problem.rewards.page_out) if reward and can_page
        ]
        """Tensors whose page-out is rewarded; empty without paging."""
        self.rewarded_storage_homes = [
            i for i, reward in enumerate(problem.rewards.storage_home) if reward and can_page
        ]
        """State whose home on storage is rewarded; empty without paging."""

    @classmethod
    def from_problem(cls, problem: Problem) -> Self | None:
        """Return the rows; None if there is none, and the objective rewards no decision."""
        limits = [limit for limit in problem.linear_limits if limit.name == USER_CONSTRAINTS]
        has_rewards = any(min(column, default=0) < 0 for column in problem.objective.coefficients)
        return cls(problem, limits) if limits or has_rewards else None

    def is_exceeded(self, row: int, row_use: float) -> bool:
        """Return whether the sum `row_use` of a row exceeds its limit by more than rounding."""
        return row_use - self.upper_limits[row] > _ROUNDING * self.units[row]

    def count_decision(
        self, row_use: list[float], exceeded_rows: set[int], row_amounts: RowAmounts, sign: int
    ) -> None:
        """Add (`sign` 1) or subtract (-1) amounts in `row_use`; update `exceeded_rows`."""
        for row, amount in row_amounts:
            row_use[row] += sign * amount
            if self.is_exceeded(row, row_use[row]):
                exceeded_rows.add(row)
            else:
                exceeded_rows.discard(row)

    def permits(self, row_use: Sequence[float], row_amounts: RowAmounts) -> bool:
        """Return whether adding `row_amounts` exceeds no row of `has_only_positive`."""
        return all(
            row_use[row] + amount <= self.upper_limits[row]
            for row, amount in _sum_by_row(row_amounts).items()
            if self.has_only_positive[row]
        )

    def total_excess(self, row_use: Sequence[float], exceeded_rows: Iterable[int]) -> float:
        """Return the sum of the excesses of `exceeded_rows`, each divided by its unit (`units`)."""
        return math.fsum(
            (row_use[row] - self.upper_limits[row]) / self.units[row] for row in exceeded_rows
        )

    def excess_change(
        self, row_use: Sequence[float], row_amounts: Iterable[tuple[int, float]]
    ) -> float:
        """Return the change of `total_excess` if `row_amounts` are added."""
        total = 0.0
        for row, amount in _sum_by_row(row_amounts).items():
            excess_before = max(0.0, row_use[row] - self.upper_limits[row])
            total += (
                max(0.0, row_use[row] + amount - self.upper_limits[row]) - excess_before
            ) / self.units[row]
        return total


def _sum_by_row(row_amounts: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return the sum of the amounts of each row."""
    sums: dict[int, float] = {}
    for row, amount in row_amounts:
        sums[row] = sums.get(row, 0.0) + amount
    return sums
