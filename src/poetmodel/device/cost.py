"""Time and energy of one computation and of one transfer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """Time and energy of one computation or one transfer."""

    time_s: float
    """Duration [s]."""
    energy_j: float
    """Energy from the battery [J]."""


FREE = Cost(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class PageCost:
    """Costs of paging one tensor in and out."""

    page_in: Cost
    """Storage to RAM."""
    page_out: Cost
    """RAM to storage."""
