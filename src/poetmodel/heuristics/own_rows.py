"""User-defined constraints of a partial schedule: the use of each row by each decision."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Self

from poetmodel.problem import USER_CONSTRAINTS, Coefficients, LinearRow, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Uses = tuple[tuple[int, float], ...]
"""Pairs of a row's position and the amount that one decision adds to it."""
_ROUNDING: Final = 1e-12
"""Maximum excess that counts as rounding error, in units of a row."""


class OwnRows:
    """The rows of a problem's user-defined constraints, by the decisions that they count."""

    def __init__(self, problem: Problem, limits: Sequence[LinearRow]) -> None:
        """Index the terms of `limits` by decision, and collect the rewarded decisions."""
        self.limits = tuple(limits)
        self.slacks = [limit.upper for limit in limits]
        self.units: list[float] = []
        """Unit of each row's excess."""
        self.only_adds: list[bool] = []
        """Whether all coefficients of a row are positive."""
        self.is_single: list[bool] = []
        """Whether a row counts at most one decision."""
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
        self.rewards: Coefficients | None = None
        """Reward of each decision by constraints or the objective; None if no decision is
        rewarded."""
        if any(any(column) for column in problem.rewards):
            self.rewards = problem.rewards
        self.rewarded_nodes = [
            k
            for k, reward in enumerate(problem.rewards.compute)
            if reward and problem.may_recompute(k)
        ]
        """Nodes whose recomputation is rewarded."""
        can_page = problem.can_page
        self.rewarded_page_ins = [
            i for i, reward in enumerate(problem.rewards.page_in) if reward and can_page
        ]
        """Tensors whose page-in is rewarded."""
        self.rewarded_page_outs = [
            i for i, reward in enumerate(problem.rewards.page_out) if reward and can_page
        ]
        """Tensors whose page-out is rewarded."""
        self.rewarded_storage_homes = [
            i for i, reward in enumerate(problem.rewards.storage_home) if reward and can_page
        ]
        """State whose home on storage is rewarded."""

    @classmethod
    def of(cls, problem: Problem) -> Self | None:
        """Return the rows of a problem.

        Return None if the problem has no user-defined constraints and its objective rewards no
        decision.
        """
        limits = [limit for limit in problem.linear_limits if limit.name == USER_CONSTRAINTS]
        has_rewards = any(min(column, default=0) < 0 for column in problem.objective.coefficients)
        return cls(problem, limits) if limits or has_rewards else None

    def is_exceeded(self, row: int, used: float) -> bool:
        """Return whether the use of a row exceeds its limit by more than rounding errors."""
        return used - self.slacks[row] > _ROUNDING * self.units[row]

    def count(self, used: list[float], exceeded: set[int], uses: Uses, change: int) -> None:
        """Add (1) or remove (-1) the amounts of a decision in `used`; update `exceeded`."""
        for row, amount in uses:
            used[row] += change * amount
            if self.is_exceeded(row, used[row]):
                exceeded.add(row)
            else:
                exceeded.discard(row)

    def allows(self, used: Sequence[float], uses: Uses) -> bool:
        """Return whether adding amounts exceeds no row that has only positive coefficients."""
        return all(
            used[row] + amount <= self.slacks[row] for row, amount in uses if self.only_adds[row]
        )

    def excess(self, used: Sequence[float], exceeded: Iterable[int]) -> float:
        """Return the sum of the excesses over rows, in units of the rows; 0 if all are met."""
        return math.fsum((used[row] - self.slacks[row]) / self.units[row] for row in exceeded)

    def change(self, used: Sequence[float], uses: Iterable[tuple[int, float]]) -> float:
        """Return the change of the excess if amounts are added to rows."""
        total = 0.0
        added_amounts: dict[int, float] = {}
        for row, amount in uses:
            added_amounts[row] = added_amounts.get(row, 0.0) + amount
        for row, amount in added_amounts.items():
            excess_before = max(0.0, used[row] - self.slacks[row])
            total += (max(0.0, used[row] + amount - self.slacks[row]) - excess_before) / self.units[
                row
            ]
        return total
