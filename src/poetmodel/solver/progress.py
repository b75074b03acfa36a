"""What a running solve tells whoever watches."""

from __future__ import annotations

from dataclasses import dataclass

from poetmodel.result import relative_gap


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveProgress:
    """The state of a solve at one moment; quantities are those minimized, in their own unit.

    Energies and times count beyond the single pass that all schedules pay, so the
    gap is the gap of what can be decided.
    """

    seconds: float
    """Since the solve was requested, building included [s]."""
    incumbent: float | None
    """Best value found so far; None before the first."""
    bound: float | None
    """Best proven lower bound so far; None before the first."""

    @property
    def gap(self) -> float | None:
        """Gap between the two, as a fraction of the incumbent; None while one is missing."""
        if self.incumbent is None or self.bound is None:
            return None
        return relative_gap(self.incumbent, self.bound)
