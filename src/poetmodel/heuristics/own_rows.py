"""Own constraints while a partial schedule changes: what each decision uses of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Self

from poetmodel.problem import USER_CONSTRAINTS, Coefficients, LinearRow, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Uses = tuple[tuple[int, float], ...]
"""Rows by position, and what one decision adds to each."""
_ROUNDING: Final = 1e-12
"""Excess that rounding errors may make, in units of a row."""


class OwnRows:
    """The rows of a problem's own constraints, by the decisions that they count."""

    def __init__(self, problem: Problem, limits: Sequence[LinearRow]) -> None:
        self.limits = tuple(limits)
        self.slacks = [limit.upper for limit in limits]
        self.units: list[float] = []
        """Unit of an excess."""
        self.only_adds: list[bool] = []
        self.is_single: list[bool] = []
        """Whether a row counts no more than one decision."""
        uses: dict[tuple[str, int], list[tuple[int, float]]] = {key: [] for key in problem.totals}
        for row, limit in enumerate(limits):
            amounts = [amount for amount, _ in limit.terms if amount]
            for amount, decision in limit.terms:
                if amount:
                    uses[decision].append((row, amount))
            self.units.append(max(abs(limit.upper), min(map(abs, amounts), default=1.0)))
            self.only_adds.append(min(amounts, default=0) >= 0)
            self.is_single.append(len(amounts) <= 1)
        columns: dict[str, list[Uses]] = {field: [] for field in Coefficients._fields}
        for (field, _), rows in uses.items():
            columns[field].append(tuple(rows))
        self.compute, self.page_in, self.page_out, self.storage_home = columns.values()
        """Use of each decision: for nodes, then for tensors."""
        self.wanted: Coefficients | None = None
        """How much each decision is wanted, by constraints or the objective; None if none is."""
        if any(any(column) for column in problem.rewards):
            self.wanted = problem.rewards
        self.nodes = [
            k for k, want in enumerate(problem.rewards.compute) if want and problem.may_recompute(k)
        ]
        """Nodes whose recomputation is wanted."""
        pages = problem.can_page
        self.arriving = [i for i, wanted in enumerate(problem.rewards.page_in) if wanted and pages]
        """Tensors whose page-in is wanted."""
        self.leaving = [i for i, wanted in enumerate(problem.rewards.page_out) if wanted and pages]
        """Tensors whose page-out is wanted."""
        self.leaving_home = [
            i for i, wanted in enumerate(problem.rewards.storage_home) if wanted and pages
        ]
        """State whose home is wanted on storage."""

    @classmethod
    def of(cls, problem: Problem) -> Self | None:
        """Return those of a problem; None where it has none and its objective wants nothing."""
        limits = [limit for limit in problem.linear_limits if limit.name == USER_CONSTRAINTS]
        wants = any(min(column, default=0) < 0 for column in problem.objective.coefficients)
        return cls(problem, limits) if limits or wants else None

    def exceeded(self, row: int, used: float) -> bool:
        """Whether a row is, rounding errors aside."""
        return used - self.slacks[row] > _ROUNDING * self.units[row]

    def count(self, used: list[float], exceeded: set[int], uses: Uses, change: int) -> None:
        """Note that a decision is taken once more (1) or once less (-1)."""
        for row, amount in uses:
            used[row] += change * amount
            if self.exceeded(row, used[row]):
                exceeded.add(row)
            else:
                exceeded.discard(row)

    def allows(self, used: Sequence[float], uses: Uses) -> bool:
        """Whether all rows that only add have room for a decision."""
        return all(
            used[row] + amount <= self.slacks[row] for row, amount in uses if self.only_adds[row]
        )

    def excess(self, used: Sequence[float], exceeded: Iterable[int]) -> float:
        """Return the excess over rows, in their units, summed: 0 where all are kept."""
        return math.fsum((used[row] - self.slacks[row]) / self.units[row] for row in exceeded)

    def change(self, used: Sequence[float], uses: Iterable[tuple[int, float]]) -> float:
        """Return the change of the excess when amounts are added to rows."""
        total = 0.0
        added: dict[int, float] = {}
        for row, amount in uses:
            added[row] = added.get(row, 0.0) + amount
        for row, amount in added.items():
            before = max(0.0, used[row] - self.slacks[row])
            total += (max(0.0, used[row] + amount - self.slacks[row]) - before) / self.units[row]
        return total
