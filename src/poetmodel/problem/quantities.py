"""Quantities that problems minimize and limit, and the times that a deadline counts."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

USER_OBJECTIVE: Final = "own"
"""Value of `minimize` for a user-defined objective."""


class Quantity(StrEnum):
    """Quantity that a problem minimizes."""

    ENERGY = "energy"
    """Energy of one training step [J]."""
    TIME = "time"
    """Time of one training step, as counted by the deadline [s]."""
    RAM = "ram"
    """Peak RAM [B]."""
    WRITES = "writes"
    """Bytes that page-outs and, on average per step, commits write [B]; a page-out that is a write
    of a commit counts only in the commits."""


class DeadlineCounts(StrEnum):
    """Time that a deadline limits."""

    COMPUTE = "compute"
    """Compute time only (POET, ICML 2022, equation 3)."""
    SERIAL = "serial"
    """Compute plus transfer time, for storage that blocks the core."""
    OVERLAP = "overlap"
    """The makespan, with one DMA channel that transfers tensors while the core computes."""


class TimeSum(NamedTuple):
    """Weights of compute and transfer time in a sum."""

    compute: float
    """Weight of compute time."""
    transfer: float
    """Weight of transfer time."""

    def weigh(self, compute_s: float, transfer_s: float) -> float:
        """Return the weighted sum [s]."""
        return self.compute * compute_s + self.transfer * transfer_s
