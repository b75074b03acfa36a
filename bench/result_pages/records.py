"""What can be read off the records of benchmarks, and the words in which pages say it."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Key = tuple[str, str, str]

ONE_PERCENT: Final = 0.01
"""Gap that the grid's instances are to be proved to."""

LATE_S: Final = 1.0
"""How long after its limit an answer may come [s]."""

# -- words -----------------------------------------------------------------------------------------


def seconds_text(value: float | None) -> str:
    """Return a time with three digits."""
    if value is None:
        return "-"
    return f"{value:.3g} s" if value < 100 else f"{value:.0f} s"


def percent_text(ratio: float | None, digits: int = 3) -> str:
    """Return a fraction as a percentage, or a dash."""
    return "-" if ratio is None else f"{100 * ratio:.{digits}g} %"


def share_text(part: int, whole: int) -> str:
    """Return how many of how many."""
    return f"{part} of {whole} ({100 * part / whole:.1f} %)" if whole else "-"


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the least value that at least this share of all does not exceed; None of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def threads_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Return how many threads each solve had, at most."""
    threads = max(record.get("threads", 1) for record in records)
    return "one thread" if threads == 1 else f"{threads} threads"


def days_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the day on which records were made, or the first and the last one."""
    days = sorted({record["recorded"][:10] for record in records})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def made_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Return when and where records were made, shortly: ``2026-11-22, AMD EPYC``."""
    places = dict.fromkeys(record["machine"]["cpu"] for record in records)
    return f"{days_text(records)}, {' and '.join(places)}"


def circumstances(
    records: Sequence[Mapping[str, Any]], *, where: str | None = None, packages: str = ""
) -> str:
    """Return when, where and with what records were made.

    Parameters
    ----------
    records : sequence of dict
        Records of one machine.
    where : str, optional
        What else there is to say of it; the system by default.
    packages : str
        Packages and their versions that the machine's do not have.
    """
    machine = records[0]["machine"]
    load = statistics.median(record["load_average"] for record in records)
    return (
        f"{days_text(records)}, {machine['cpu']}, {machine['cores']} cores, "
        f"{where or machine['system']} (median load {load:.1f}); Python {machine['python']}, "
        f"{packages}{versions_text(machine)}"
    )


def versions_text(machine: Mapping[str, Any]) -> str:
    """Return the versions that a record's machine had, in a row."""
    return ", ".join(f"{name} {found}" for name, found in machine["versions"].items())


# -- lines -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file of records."""

    record: Mapping[str, Any]
    """All of it."""

    def __getitem__(self, name: str) -> Any:
        """Return one of its fields."""
        return self.record[name]

    @property
    def cell(self) -> dict[str, Any]:
        """What was measured."""
        return dict(self["cell"])

    @property
    def status(self) -> str:
        """How it ended."""
        return str(self["status"])

    @property
    def seconds(self) -> float:
        """Wall time [s]."""
        return float(self["seconds"])

    @property
    def gap(self) -> float | None:
        """Gap that it ended with."""
        gap = self.record.get("gap")
        return None if gap is None else float(gap)


# -- cases and the grid ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SolveRecord(Line):
    """The record of an instance of the grid, or of a case."""

    @classmethod
    def of_case(cls, record: dict[str, Any]) -> SolveRecord:
        """Read the record of a case, which keeps the fields of its result apart."""
        result = record["result"]
        asked = {"cell": record["case"], "requested_gap": result["problem"]["gap"]}
        return cls({**record, **result, **asked})

    @property
    def key(self) -> Key:
        """Model, device and budget."""
        return self.cell["model"], self.cell["device"], self.cell["ram"]

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
    def time_text(self) -> str:
        """Its time, bold where it ran into its limit."""
        text = seconds_text(self.seconds)
        return text if self.done else f"**{text}**"

    @property
    def answer_text(self) -> str:
        """How its method fared: its time, with the gap where one was left."""
        if self.status == "failed":
            licence = "licence" in self.record["reason"]
            return "too large for its licence" if licence else "failed"
        if self.status == "infeasible":
            return "infeasible"
        left = "" if self.done else f", gap {percent_text(self.gap)}"
        rejected = ", rejected" if self.record.get("violations") else ""
        return f"{self.time_text}{left}{rejected}"

    @property
    def memory_bytes(self) -> int | None:
        """The most that the process had resident, with the most that one had that it started [B].

        Records of runs with one thread may have nothing of the latter.
        """
        own = self.record.get("peak_memory_bytes")
        return None if own is None else int(own) + int(self.record.get("worker_memory_bytes", 0))

    @property
    def building_s(self) -> float:
        """Time in which the problem was stated and models were built [s]."""
        return (self.record.get("stated_s") or 0.0) + (self.record.get("build_s") or 0.0)

    @property
    def late(self) -> bool:
        """Whether the solve, stating the problem aside, ended `LATE_S` or more after its limit."""
        solve_s = self.seconds - (self.record.get("stated_s") or 0.0)
        return bool(solve_s > self.cell["limit_s"] + LATE_S)

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


def of_goal(records: Sequence[dict[str, Any]], goal: int) -> list[SolveRecord]:
    """Return the records of one goal, in the order of their names."""
    found = [SolveRecord(record) for record in records if record["cell"]["goal"] == goal]
    return sorted(found, key=lambda run: _place(run.cell))


def _place(cell: dict[str, Any]) -> tuple[Any, ...]:
    """Return what instances are sorted by: the model, the smaller of a family first, the limits."""
    model = cell["model"]
    family = model.rstrip("0123456789")
    number = int(model.removeprefix(family) or 0)
    deadline = float(cell["deadline"].rstrip("%")) if cell["deadline"] else math.inf
    return family, number, model, cell["device"], ram_place(cell["ram"]), -deadline, cell["method"]


def ram_place(ram: str) -> float:
    """Return what budgets are sorted by: the one near the minimum RAM first."""
    return -1.0 if ram.startswith("floor") else float(ram.rstrip("%"))


def feasible(runs: Sequence[SolveRecord]) -> list[SolveRecord]:
    """Return the records that were not proved infeasible; those without a schedule stay in."""
    return [run for run in runs if run.status != "infeasible"]


@dataclass(frozen=True, slots=True)
class Sample:
    """Some of the records of the grid, and what they come to."""

    runs: Sequence[SolveRecord]

    @property
    def able(self) -> list[SolveRecord]:
        """Those that were not proved infeasible."""
        return feasible(self.runs)

    @property
    def below(self) -> int:
        """How many have a budget below the minimum RAM."""
        return sum(run.below_floor for run in self.runs)

    @property
    def late(self) -> int:
        """How many ended late."""
        return sum(run.late for run in self.runs)

    @property
    def seconds(self) -> list[float]:
        """Times of those that are feasible [s]."""
        return [run.seconds for run in self.able]

    @property
    def missed(self) -> list[SolveRecord]:
        """Those that were not proved to 1 %, the largest gap first."""
        missed = [run for run in self.able if not run.within(ONE_PERCENT)]
        return sorted(missed, key=lambda run: -(math.inf if run.gap is None else run.gap))

    def proved(self, gap: float) -> int:
        """Return how many were proved to a gap."""
        return sum(run.within(gap) for run in self.able)

    def median_to(self, gap: float) -> float | None:
        """Return the median time to a gap; runs that never had it count as longer than all."""
        times = [run.time_to(gap) for run in self.able]
        middle = statistics.median([math.inf if t is None else t for t in times] or [math.inf])
        return middle if math.isfinite(middle) else None

    @property
    def nodes(self) -> list[int]:
        """How many nodes each graph has; 0 where that is not on record."""
        return [run.record.get("graph_nodes", 0) for run in self.runs]

    @property
    def memory_bytes(self) -> list[int]:
        """The most memory of each that has it on record [B]."""
        return [used for run in self.runs if (used := run.memory_bytes) is not None]

    @property
    def first_s(self) -> list[float]:
        """When each that is feasible had its first schedule, if ever [s]."""
        times = [run.record.get("first_schedule_s") for run in self.able]
        return [seconds for seconds in times if seconds is not None]

    def by(self, field: str) -> dict[str, Sample]:
        """Return the records by a field of their cells, in the order of the first of each."""
        groups: dict[str, list[SolveRecord]] = {}
        for run in self.runs:
            groups.setdefault(run.cell[field], []).append(run)
        return {value: Sample(runs) for value, runs in groups.items()}

    @property
    def by_budget(self) -> list[tuple[str, Sample]]:
        """The records by budget, the largest first."""
        return sorted(self.by("ram").items(), key=lambda item: ram_place(item[0]), reverse=True)
