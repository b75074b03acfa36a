"""What the simulation of a plan finds: metrics, times of instructions, violations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from poetmodel.units import brief, format_bytes, format_seconds

if TYPE_CHECKING:
    from poetmodel.schedule.machine import Moment


@dataclass(frozen=True, kw_only=True)
class PlanCheck:
    """The result of simulating a plan; with violations, the figures mean little."""

    violations: tuple[str, ...]
    """Every broken rule and limit, in words."""
    moments: tuple[Moment, ...] = field(repr=False)
    """One per instruction of the program; without costs all times are 0."""
    peak_ram_bytes: int
    """Highest RAM use [B]."""
    peak_position: int | None
    """The first instruction with that use; None for an empty program."""
    aux_used_bytes: int
    """All tensors ever paged out, and state that is not resident, together [B].

    Samples that start on storage do not count, and replacements take the room of what they replace.
    """
    written_bytes: int
    """Bytes paged out, each time counted [B]."""
    read_bytes: int
    """Bytes paged in, first reads of state included, each time counted [B]."""
    compute_s: float | None = None
    """Compute time [s]; None without costs."""
    transfer_s: float | None = None
    """Transfer time [s]; None without costs."""
    stall_s: float | None = None
    """Time that the core waits for the bus [s]; None without costs."""
    makespan_s: float | None = None
    """When both clocks have stopped [s]; None without costs."""
    energy_j: float | None = None
    """Energy of the step [J]: idle power is drawn over the makespan; None without costs."""

    def __repr__(self) -> str:
        faults = f"violations: {'; '.join(self.violations)}"
        peak = f"peak RAM {format_bytes(self.peak_ram_bytes)}"
        makespan = "" if self.makespan_s is None else format_seconds(self.makespan_s)
        return brief(self, faults if self.violations else "valid", peak, makespan)

    @property
    def valid(self) -> bool:
        """Whether there is no violation."""
        return not self.violations
