"""Result of simulating a plan: metrics, times of instructions, violations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from poetmodel.device.costs import digest_costs
from poetmodel.units import brief, format_bytes, format_seconds

if TYPE_CHECKING:
    from poetmodel.device import CostTable, Device
    from poetmodel.schedule.machine import InstructionRecord


@dataclass(frozen=True, kw_only=True)
class PlanCheck:
    """The result of simulating a plan; with violations, metrics are unreliable."""

    violations: tuple[str, ...]
    """A message for every violated rule and limit."""
    records: tuple[InstructionRecord, ...] = field(repr=False)
    """The record of each instruction of the program; without costs, all times are 0."""
    peak_ram_bytes: int
    """Maximum RAM use [B]; 0 for an empty program."""
    peak_position: int | None
    """Position of the first instruction with the maximum RAM use; None for an empty program."""
    aux_used_bytes: int
    """Size of all tensors ever paged out, and of state that is not resident [B].

    Samples that start on storage do not count; replacements share the storage of their state."""
    written_bytes: int
    """Bytes that page-outs and commits write, on average per step [B].

    Commits count only if the costs include them; then the replacements that commits write do not
    count as paged out."""
    read_bytes: int
    """Bytes paged in, once per page-in, including first reads of state [B]."""
    compute_s: float | None = None
    """Compute time [s]; None without costs."""
    transfer_s: float | None = None
    """Transfer time, including commits [s]; None without costs."""
    stall_s: float | None = None
    """Time that the core stalls in waits [s]: 0 for ``blocking`` transfers; None without costs."""
    makespan_s: float | None = None
    """Time until core and bus are finished, plus the time of commits [s]; None without costs."""
    energy_j: float | None = None
    """Energy of the step, including commits and idle power over the makespan [J]; None without
    costs."""

    table: CostTable | None = field(default=None, repr=False, compare=False)
    """The costs of times and energy; None without costs."""
    device: Device | None = field(default=None, repr=False, compare=False)
    """The device of the costs; None if unknown."""

    def __repr__(self) -> str:
        faults = f"violations: {'; '.join(self.violations)}"
        peak = f"peak RAM {format_bytes(self.peak_ram_bytes)}"
        makespan = "" if self.makespan_s is None else format_seconds(self.makespan_s)
        return brief(self, faults if self.violations else "valid", peak, makespan)

    @property
    def valid(self) -> bool:
        """Whether there are no violations."""
        return not self.violations

    @property
    def costs_sha256(self) -> str | None:
        """SHA-256 of the costs (`poetmodel.device.costs.digest_costs`); None without costs."""
        return None if self.table is None else digest_costs(self.table, self.device)
