"""The time from the call of a command to its answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """When a command was called and when its solve began, on the monotonic clock."""

    begun_s: float
    """When the command was called [s]."""
    solve_begun_s: float = field(default_factory=time.monotonic)
    """When all inputs had been read [s]."""

    @property
    def reading_s(self) -> float:
        """Time to load the program, and to read graph, device and limits [s]."""
        return self.solve_begun_s - self.begun_s

    def total_s(self) -> float:
        """Return the time from the call until now [s]."""
        return time.monotonic() - self.begun_s
