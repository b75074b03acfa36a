"""Time and energy of one computation and of one transfer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """Time and energy of a computation or a transfer, or their sum over several."""

    time_s: float
    """Duration [s]."""
    energy_j: float
    """Energy from the battery [J]."""

    @classmethod
    def at_power(cls, time_s: float, power_w: float) -> Cost:
        """Return the cost of a time at a constant power."""
        return cls(time_s, time_s * power_w)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.time_s + other.time_s, self.energy_j + other.energy_j)

    def __mul__(self, factor: float) -> Cost:
        return Cost(factor * self.time_s, factor * self.energy_j)


FREE = Cost(0.0, 0.0)
"""No time and no energy."""


@dataclass(frozen=True, slots=True)
class PageCost:
    """Costs of paging one tensor in and out."""

    page_in: Cost
    """Cost of a transfer from storage to RAM."""
    page_out: Cost
    """Cost of a transfer from RAM to storage."""
