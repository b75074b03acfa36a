"""Records of the grid's cells: what can be read off them, in which order they go, and words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

ONE_PERCENT: Final = 0.01
"""Gap that the grid's cells are to be proved to."""


@dataclass(frozen=True, slots=True)
class CellRun:
    """One record of a cell."""

    record: dict[str, Any]
    """The line."""

    @property
    def cell(self) -> dict[str, Any]:
        """What was solved."""
        return dict(self.record["cell"])

    @property
    def seconds(self) -> float:
        """Wall time [s]."""
        return float(self.record["seconds"])

    @property
    def gap(self) -> float | None:
        """Gap that it ended with."""
        gap = self.record.get("gap")
        return None if gap is None else float(gap)

    @property
    def status(self) -> str:
        """How it ended."""
        return str(self.record["status"])

    @property
    def below_floor(self) -> bool:
        """Whether its budget is less than one step needs."""
        budget = self.record.get("ram_budget_bytes")
        return budget is not None and budget < self.record["floor_bytes"]

    @property
    def done(self) -> bool:
        """Whether it ended with the gap that was asked for, or with a proof that nothing can be."""
        if self.status == "infeasible":
            return True
        return self.gap is not None and self.gap <= self.record["requested_gap"]

    @property
    def overhead_ratio(self) -> float | None:
        """Overhead over the baseline."""
        if self.record.get("overhead_j") is None or not self.record["baseline_energy_j"]:
            return None
        return float(self.record["overhead_j"] / self.record["baseline_energy_j"])

    @property
    def label(self) -> str:
        """What names it in a sentence."""
        cell = self.cell
        parts = [f"`{cell['model']}`", cell["device"], cell["ram"]]
        if cell["deadline"]:
            parts.append(f"serial {cell['deadline']}")
        return ", ".join(parts)

    def within(self, gap: float) -> bool:
        """Return whether it was proved to a gap."""
        return self.gap is not None and self.gap <= gap

    def time_to(self, gap: float) -> float | None:
        """Return when it first had a gap [s]; None if never."""
        for seconds, reached in self.record.get("gaps", ()):
            if reached <= gap:
                return float(seconds)
        return self.seconds if self.within(gap) else None

    def size(self, name: str) -> int:
        """Return the largest ``columns`` or ``rows`` of any model that it solved."""
        found = self.record.get("statistics", {})
        return int(found.get(f"max_{name}", found.get(name, 0)))


def of_goal(records: Sequence[dict[str, Any]], goal: int) -> list[CellRun]:
    """Return the runs of one goal, in the order of their names."""
    found = [CellRun(record) for record in records if record["cell"]["goal"] == goal]
    return sorted(found, key=lambda run: _place(run.cell))


def _place(cell: dict[str, Any]) -> tuple[Any, ...]:
    """Return what cells are sorted by: the model, smaller ones of a family first, the limits."""
    model = cell["model"]
    family = model.rstrip("0123456789")
    number = int(model.removeprefix(family) or 0)
    ram = -1.0 if cell["ram"].startswith("floor") else float(cell["ram"].rstrip("%"))
    deadline = float(cell["deadline"].rstrip("%")) if cell["deadline"] else math.inf
    return family, number, model, cell["device"], ram, -deadline, cell["method"]


def feasible(runs: Sequence[CellRun]) -> list[CellRun]:
    """Return the runs that were not proved infeasible; those without a schedule stay in."""
    return [run for run in runs if run.status != "infeasible"]


# -- words -----------------------------------------------------------------------------------------


def seconds_text(value: float | None) -> str:
    """Return a time with three digits."""
    if value is None:
        return "-"
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"  # noqa: PLR2004


def percent_text(ratio: float | None, digits: int = 3) -> str:
    """Return a fraction as a percentage, or a dash."""
    return "-" if ratio is None else f"{100 * ratio:.{digits}g} %"


def share_text(part: int, whole: int) -> str:
    """Return how many of how many."""
    return f"{part} of {whole} ({100 * part / whole:.1f} %)" if whole else "-"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that at least this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
