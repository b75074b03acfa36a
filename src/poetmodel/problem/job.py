"""A whole training job: number of samples, time and battery."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from poetmodel.errors import BudgetError, quote
from poetmodel.units import parse_energy, parse_time

if TYPE_CHECKING:
    from poetmodel.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job: samples over all epochs, time for all [s], and energy for all [J].

    A step trains on one batch; the last batch may be smaller and costs as much as a full one.
    ``within`` and ``battery`` may be texts, such as ``6h`` and ``1.2Wh``.

    Examples
    --------
    >>> job = Job(samples=500, within="6h", battery="1.2Wh")
    >>> job.within_s, job.battery_j
    (21600.0, 4320.0)
    """

    samples: int
    within: str | float | None = None
    battery: str | float | None = None

    def __post_init__(self) -> None:
        """Raise `BudgetError` for samples below 1, and for an invalid or zero time or energy."""
        faults = []
        samples: object = self.samples
        if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
            faults.append(f"samples: expected a whole number from 1, got {quote(samples)}")
        for name, parsed_name in (("within", "within_s"), ("battery", "battery_j")):
            try:
                number = getattr(self, parsed_name)
            except BudgetError as error:
                faults.extend(error.faults)
                continue
            if number == 0:
                faults.append(f"{name}: expected more than 0, got {quote(getattr(self, name))}")
        if faults:
            raise BudgetError(faults)

    @property
    def within_s(self) -> float | None:
        """Time for the whole job [s]; None for no limit."""
        return None if self.within is None else parse_time(self.within, field="within")

    @property
    def battery_j(self) -> float | None:
        """Energy for the whole job [J]; None for no limit."""
        return None if self.battery is None else parse_energy(self.battery, field="battery")

    def steps(self, graph: Graph) -> int:
        """Return the number of steps for all samples, with the graph's batch size, rounded up."""
        return -(-self.samples // graph.batch_size)

    def deadline_s(self, graph: Graph) -> float | None:
        """Return the time limit of one step [s]; None for no limit."""
        return None if self.within_s is None else self.within_s / self.steps(graph)

    def energy_budget_j(self, graph: Graph) -> float | None:
        """Return the energy limit of one step [J]; None for no limit."""
        return None if self.battery_j is None else self.battery_j / self.steps(graph)
