"""The page of whole training steps of built-in graphs: their least RAM, boards, methods."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from against import BEFORE, HERE
from poetmodel.bench.measurement import NOT_APPLICABLE
from poetmodel.device import Device
from poetmodel.units import format_bytes
from result_pages.records import ONE_PERCENT, Line, percent_text, seconds_text
from result_pages.rendering import render
from what_trains_where import (
    ACTIVATIONS,
    BOARDS,
    IN_PLACE,
    LEAST,
    MAPPED,
    METHODS,
    MLPERF_TINY,
    NETWORKS,
    PAGED,
    POLICIES,
    SMALL,
    SPEED,
    STATE,
    TILES,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

LEAST_CHART, BOARDS_CHART = "trains-least.svg", "trains-boards.svg"
"""Names of the page's charts."""
BUDGETS: Final = ("256 KiB", "320 KiB", "512 KiB", "1 MiB")
"""What the headline asks about."""
GOAL_S: Final = 10.0
"""Wanted median time to 1 % for the networks of MLPerf Tiny [s]."""
LARGER_GAP: Final = 0.02
"""Gap that larger networks are to be proved to within their limit."""
_UNITS: Final = {"KiB": 2**10, "MiB": 2**20}
_STORAGE: Final = {PAGED: "paged", MAPPED: "read in place"}


@dataclass(frozen=True, slots=True)
class StepRecord(Line):
    """The record of one training step, scheduled by one method."""

    @property
    def found(self) -> bool:
        """Whether there is a schedule."""
        return self.record.get("energy_j") is not None

    @property
    def proved(self) -> bool:
        """Whether it ended with the gap that was asked for, or with a proof of nothing."""
        return self.status in ("optimal", "infeasible")

    @property
    def trains(self) -> str:
        """Whether the network trains on the device: proved, or open."""
        if self.found:
            return "yes"
        return "no" if self.status == "infeasible" else "open"

    @property
    def unlimited(self) -> bool:
        """Whether its method cannot do better: what it solves, if anything, is proved."""
        facts = self.record.get("statistics") or {}
        return not self.found or facts.get("restricted_status", "optimal") == "optimal"

    @property
    def ram_bytes(self) -> int:
        """All RAM of its device [B]."""
        return Device.load(self.cell["device"]).ram_bytes

    @property
    def least_bytes(self) -> tuple[int, int]:
        """The least RAM as far as it is known: a proven bound, and that of a schedule [B]."""
        bound = int(-(-self.record["objective_bound"] // 1))
        return bound, int(self.record["objective_value"])

    @property
    def least_text(self) -> str:
        """The least RAM; a range is what is proved and what a schedule takes."""
        if not self.found:
            return "-"
        bound, value = map(format_bytes, self.least_bytes)
        return value if self.proved else f"{bound} to {value}"

    @property
    def overhead_ratio(self) -> float | None:
        """Overhead over the baseline; None without a schedule."""
        if not self.found:
            return None
        return float(self.record["overhead_j"] / self.record["baseline_energy_j"])

    @property
    def time_text(self) -> str:
        """How long it took, bold where it ran into its limit."""
        text = seconds_text(self.seconds)
        return text if self.proved or self.status == NOT_APPLICABLE else f"**{text}**"

    def times(self, name: str, other: str) -> str:
        """Return how many times as large as another one of its figures is."""
        value, unit = self.record[name], self.record[other]
        return number_text(value / unit) if unit else "-"


def of_part(records: Iterable[Mapping[str, Any]], part: str) -> list[StepRecord]:
    """Return the records of a part, in the run's order."""
    return [StepRecord(record) for record in records if record["cell"]["part"] == part]


def first(runs: Iterable[StepRecord], **cell: Any) -> StepRecord | None:
    """Return the first record that has these fields in its cell."""
    return next((run for run in runs if cell.items() <= run.cell.items()), None)


def number_text(value: float) -> str:
    """Return a number with three digits, or whole where it is larger."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _share_text(ratio: float | None) -> str:
    """Return a fraction as a percentage; as a whole one where it is large."""
    if ratio is None or ratio < 10:
        return percent_text(ratio)
    return f"{100 * ratio:,.0f} %"


def page(
    records: Sequence[dict[str, Any]],
    source: str,
    against: Sequence[dict[str, Any]] = (),
    against_source: str = "",
) -> str:
    """Return the page."""
    parts = {part: of_part(records, part) for part in (LEAST, BOARDS, POLICIES, SPEED)}
    names = tuple(NETWORKS)
    problems = equal_rams(parts[POLICIES])
    optima = [run for run in parts[POLICIES] if run.cell["method"] == METHODS[0]]
    text = render(
        "built-in-steps",
        records=records,
        source=source,
        charts=(LEAST_CHART, BOARDS_CHART),
        **budgets(parts[LEAST]),
        least=partial(first, parts[LEAST]),
        columns=(ACTIVATIONS, STATE, IN_PLACE),
        tiles=TILES,
        boards=sorted(
            parts[BOARDS], key=lambda run: (names.index(run.cell["network"]), run.ram_bytes)
        ),
        problems=problems,
        keeping=lambda method: sum(problem.keeps(method) for problem in problems),
        excesses=lambda method: list(filter(None, (p.excess(method) for p in problems))),
        methods=METHODS[1:],
        optima=optima,
        optima_proved=sum((run.gap or 0) <= ONE_PERCENT and run.proved for run in optima),
        larger=parts[SPEED],
        larger_proved=sum(run.gap is not None and run.gap <= LARGER_GAP for run in parts[SPEED]),
        larger_gap=LARGER_GAP,
        goal_s=GOAL_S,
        number=number_text,
        share_of=_share_text,
    )
    if against:
        text += f"\n\n## Graphs without state\n\n{code_section(against, against_source)}"
    return f"{text}\n"


# -- the headline ----------------------------------------------------------------------------------


def bytes_of(budget: str) -> int:
    """Return a budget of `BUDGETS` in bytes."""
    amount, unit = budget.split()
    return int(amount) * _UNITS[unit]


def verdict(least: Sequence[StepRecord], network: str, device: str, budget: str) -> str:
    """Return whether a network trains in a budget on a kind of storage: proved, or open."""
    limit, answers = bytes_of(budget), []
    for graph in (IN_PLACE, TILES):
        run = first(least, network=network, graph=graph, device=device, paging=True)
        if run is None or not run.found:
            answers.append("open")
            continue
        bound, value = run.least_bytes
        if value <= limit:
            return "yes" if graph == IN_PLACE else "in tiles"
        answers.append("no" if bound > limit else "open")
    return "open" if "open" in answers else "no"


def headline(least: Sequence[StepRecord]) -> str:
    """Return which networks of MLPerf Tiny train in which RAM, and where that is open."""
    return render("built-in-steps", block="headline", **budgets(least))


def budgets(least: Sequence[StepRecord]) -> dict[str, Any]:
    """Return what is said of budgets, with a verdict by budget, network and kind of storage."""
    verdicts = {
        budget: {
            network: {device: verdict(least, network, device, budget) for device in _STORAGE}
            for network in dict.fromkeys((*MLPERF_TINY, *SMALL))
        }
        for budget in BUDGETS
    }
    return {
        "verdicts": verdicts,
        "tiny": MLPERF_TINY,
        "networks": SMALL,
        "storage": _STORAGE,
    }


# -- boards ----------------------------------------------------------------------------------------


# -- methods at equal RAM --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EqualRam:
    """One network, board and budget, scheduled by several methods."""

    runs: dict[str, StepRecord]
    """Records, by method."""

    @property
    def optimum(self) -> StepRecord | None:
        """The record of the optimum."""
        return self.runs.get(METHODS[0])

    def keeps(self, method: str) -> bool:
        """Return whether a method has a schedule within the budget."""
        return method in self.runs and self.runs[method].found

    def excess(self, method: str) -> float | None:
        """Return how many times the overhead of the optimum that of a method is."""
        if self.optimum is None or method not in self.runs:
            return None
        least, own = self.optimum.overhead_ratio, self.runs[method].overhead_ratio
        return own / least if least and own is not None else None


def equal_rams(policies: Sequence[StepRecord]) -> list[EqualRam]:
    """Return the records of each network, board and budget."""
    problems: dict[tuple[str, ...], EqualRam] = {}
    for run in policies:
        key = itemgetter("network", "device", "ram")(run.cell)
        problems.setdefault(key, EqualRam({})).runs[run.cell["method"]] = run
    return list(problems.values())


# -- graphs without state, by two commits ----------------------------------------------------------


def code_section(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return how the grid's instances fare against an earlier commit."""
    quickest: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        cell = record["cell"]
        parts = (f"`{cell['model']}`", cell["device"], cell["ram"], cell["deadline"])
        codes = quickest.setdefault(", ".join(filter(None, parts)), {})
        if "cpu_s" in record:  # else it failed
            codes[cell["code"]] = min(
                codes.get(cell["code"], record), record, key=itemgetter("cpu_s")
            )
    pairs = {
        label: (codes[BEFORE], codes[HERE])
        for label, codes in quickest.items()
        if {BEFORE, HERE} <= codes.keys()
    }
    commits = {record["cell"]["code"]: record["commit"][:7] for record in records}
    return render(
        "against",
        records=records,
        source=source,
        pairs=pairs,
        ratios=[here["cpu_s"] / before["cpu_s"] for before, here in pairs.values()],
        before=commits.get(BEFORE),
        here=commits.get(HERE),
    )
