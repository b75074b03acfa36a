"""What is proved and what is found: the bound, the incumbent, and the gap between them."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from poetmodel.result import relative_gap
from poetmodel.solver.outcome import Candidate, is_closed

if TYPE_CHECKING:
    from poetmodel.problem import Problem


@dataclass(slots=True)
class BoundTracker:
    """Bound, incumbent and gap of one solve; several threads may use it at once.

    All values are of the minimized quantity beyond what every schedule pays, in its unit.
    """

    problem: Problem
    tolerance: float
    """Gap at which the solve is over."""
    incumbent: Candidate | None = None
    """Best schedule that the verifier accepts."""
    ceiling: float = math.inf
    """Schedules above this value are of no use: that none is below it ends the solve."""
    lower: float = 0.0
    """Best proven bound."""
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def __post_init__(self) -> None:
        self.lower = max(self.lower, self.problem.objective.least)

    def raise_to(self, bound: float) -> bool:
        """Take note of a proven bound; return whether it is the best."""
        with self.lock:
            better = bound > self.lower
            self.lower = max(bound, self.lower)
        return better

    def replace_incumbent(self, candidate: Candidate) -> bool:
        """Take note of a valid schedule; return whether it is the best."""
        with self.lock:
            better = self.incumbent is None or candidate.value < self.incumbent.value
            if better:
                self.incumbent = candidate
        return better

    def upper(self) -> float | None:
        """Return the value that schedules should be below: that of the incumbent, or the ceiling.

        None where every schedule would do.
        """
        best = self.incumbent
        upper = self.ceiling if best is None else min(best.value, self.ceiling)
        return None if math.isinf(upper) else upper

    def gap(self) -> float:
        """Return the gap between `lower` and `upper`; infinite where there is no `upper`."""
        upper = self.upper()
        return math.inf if upper is None else relative_gap(upper, self.lower)

    def closed(self) -> bool:
        """Return whether the incumbent is within the tolerance, or nothing below the ceiling."""
        with self.lock:
            if self.lower >= self.ceiling:
                return True
            if self.incumbent is None:
                return False
            value = self.incumbent.value
            return is_closed(self.problem, value, self.lower, self.tolerance)
