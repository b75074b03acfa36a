"""The policy of the row generation: what to do next, as its parameters say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from poetmodel.problem import Problem
    from poetmodel.solver.lazy.bounds import BoundTracker
    from poetmodel.solver.lazy.params import LazyParams


FIRST_SLICE_S: Final = 5.0
"""Least time of an integer solve; each that ends by its time doubles it [s]."""


@dataclass(slots=True)
class Policy:
    """Decides how the rounds go on; no answer depends on it."""

    problem: Problem
    bounds: BoundTracker
    params: LazyParams
    slice_s: float = FIRST_SLICE_S
    """Least time of the next integer solve [s]."""
    bound_before_rows: float = float("-inf")
    """The bound when rows were last added."""

    def is_wide(self) -> bool:
        """Return whether the gap is far from closed."""
        return self.bounds.gap() > self.params.wide_gap_ratio

    def solves_again(self) -> None:
        """Give the next solve of the same relaxation more time."""
        self.slice_s *= 2

    def solve_time_s(self, remaining_s: float) -> float:
        """Return the most time for an integer solve [s]."""
        ratio = self.params.wide_gap_time_ratio if self.is_wide() else 1.0
        return max(self.slice_s, remaining_s * ratio)

    def rows_to_add(self, nodes: int | None, groups: int) -> int | None:
        """Return how many rows to add after what the last ones gained; None for all.

        `nodes` are those of the last integer solve, None if it came to no end, `groups` those of
        its relaxation.
        """
        most = self._rows_for_rise()
        easy = nodes is not None and nodes <= 1
        if most is None or not easy:
            return most
        return max(most, int(self.params.easy_growth_ratio * groups))

    def _rows_for_rise(self) -> int | None:
        params, bound = self.params, self.bounds.lower
        rise, self.bound_before_rows = bound - self.bound_before_rows, bound
        if rise > params.single_row_gain_ratio * bound:
            return 1
        if self.is_wide():
            return params.wide_gap_rows
        return params.few_rows if rise > params.single_row_gain_ratio / 2 * bound else None

    def restores_at_once(self, *, only_ram: bool) -> bool:
        """Return whether recompute-memory cuts are stated from the first integer relaxation on."""
        wide = self.bounds.gap() > self.params.very_wide_gap_ratio
        return wide and only_ram and self._may_restore()

    def restores_instead_of_steps(self) -> bool:
        """Return whether recompute-memory cuts are tried before rows of steps."""
        return self.is_wide() and self._may_restore()

    def _may_restore(self) -> bool:
        return self.problem.objective.is_sum and "recompute_memory" in self.params.cuts
