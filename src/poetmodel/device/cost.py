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


FREE = Cost(0.0, 0.0)
"""No time and no energy."""


@dataclass(frozen=True, slots=True)
class PageCost:
    """Costs of paging one tensor in and out."""

    page_in: Cost
    """Cost of a transfer from storage to RAM."""
    page_out: Cost
    """Cost of a transfer from RAM to storage."""
