"""The page that says which networks train on which boards, their whole state included."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from blocks import folded, table
from mcu.boards import BOARD
from poetmodel.bench.measurement import NOT_APPLICABLE
from poetmodel.device import Device
from poetmodel.units import format_bytes
from result_pages import boards
from result_pages.records import (
    circumstances,
    percent_text,
    seconds_text,
)
from result_pages.times import code_section, speed
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
_UNITS: Final = {"KiB": 2**10, "MiB": 2**20}
_STORAGE: Final = {PAGED: "paged", MAPPED: "read in place"}


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The record of one training step, scheduled by one method."""

    record: Mapping[str, Any]
    """The line."""

    @property
    def cell(self) -> dict[str, Any]:
        """What was scheduled."""
        return dict(self.record["cell"])

    @property
    def status(self) -> str:
        """How it ended."""
        return str(self.record["status"])

    @property
    def gap(self) -> float | None:
        """Gap of what was minimized."""
        return self.record.get("gap")

    @property
    def found(self) -> bool:
        """Whether there is a schedule."""
        return self.record.get("energy_j") is not None

    @property
    def proved(self) -> bool:
        """Whether it ended with the gap that was asked for, or with a proof of nothing."""
        return self.status in ("optimal", "infeasible")

    @property
    def least_bytes(self) -> tuple[int, int]:
        """The least RAM as far as it is known: a proven bound, and that of a schedule [B]."""
        bound = int(-(-self.record["objective_bound"] // 1))
        return bound, int(self.record["objective_value"])

    @property
    def overhead_ratio(self) -> float | None:
        """Overhead over the baseline; None without a schedule."""
        if not self.found:
            return None
        return float(self.record["overhead_j"] / self.record["baseline_energy_j"])

    @property
    def time_text(self) -> str:
        """How long it took, bold where it ran into its limit."""
        text = seconds_text(self.record["seconds"])
        return text if self.proved or self.status == NOT_APPLICABLE else f"**{text}**"


def of_part(records: Iterable[Mapping[str, Any]], part: str) -> list[StepRecord]:
    """Return the records of a part, in the run's order."""
    return [StepRecord(record) for record in records if record["cell"]["part"] == part]


def page(
    records: Sequence[dict[str, Any]],
    source: str,
    against: Sequence[dict[str, Any]] = (),
    against_source: str = "",
    exported: Sequence[dict[str, Any]] = (),
) -> str:
    """Return the page; what is said of a board is said of the kernels that are exported for it."""
    least = of_part(records, LEAST)
    on_boards = boards.of_part(exported, BOARD)
    parts = [
        "# What trains where",
        headline(least),
        f"![RAM of a whole training step: keep-all, and the least of all]({LEAST_CHART})",
        f"![Which built-in graph trains on which board, and with how much energy]({BOARDS_CHART})",
        _MEANING,
        budgets_table(least),
        *(
            ("## On boards, as exported C", _EXPORTED_WORDS, boards.matrix(on_boards))
            * bool(exported)
        ),
        f"Generated from `bench/results/{source}` by `scripts/make_results.py`; "
        "[the protocol](../bench/protocol.md#what-trains-where) says how it was measured. "
        f"{circumstances(records, where='one thread a solve, beside other work')}.",
        "Every figure is for a whole training step of one sample: full backpropagation in single "
        "precision, gradients, and the update of every parameter by plain SGD. The RAM counts "
        "all of it: parameters, gradients, running statistics, activations and workspaces. Times, "
        "energies and wear are estimates from [data sheets](how-to/device.md).",
        "## The least RAM",
        _LEAST_WORDS,
        folded("Every network", least_table(least)),
        "## Every board",
        _BOARD_WORDS,
        boards_summary(of_part(records, BOARDS)),
        folded("Every network on every board", boards_table(of_part(records, BOARDS), on_boards)),
        "## Methods at equal RAM",
        _POLICY_WORDS,
        policies_summary(of_part(records, POLICIES)),
        folded("Every budget", policies_table(of_part(records, POLICIES))),
        "## How long it takes",
        speed(of_part(records, POLICIES), of_part(records, SPEED)),
    ]
    if against:
        parts += ["## Graphs without state", code_section(against, against_source)]
    return "\n\n".join(part for part in parts if part) + "\n"


# -- the headline ----------------------------------------------------------------------------------


def bytes_of(budget: str) -> int:
    """Return a budget of `BUDGETS` in bytes."""
    amount, unit = budget.split()
    return int(amount) * _UNITS[unit]


def verdict(least: Sequence[StepRecord], network: str, device: str, budget: str) -> str:
    """Return whether a network trains in a budget on a kind of storage: proved, or open."""
    limit, answers = bytes_of(budget), []
    for graph in (IN_PLACE, TILES):
        found = _paged(least, network, graph, device)
        if not found or not found[0].found:
            answers.append("open")
            continue
        bound, value = found[0].least_bytes
        if value <= limit:
            return "yes" if graph == IN_PLACE else "in tiles"
        answers.append("no" if bound > limit else "open")
    return "open" if "open" in answers else "no"


def _paged(least: Sequence[StepRecord], network: str, graph: str, device: str) -> list[StepRecord]:
    wanted = {"network": network, "graph": graph, "device": device, "paging": True}
    return [run for run in least if wanted.items() <= run.cell.items()]


def headline(least: Sequence[StepRecord]) -> str:
    """Return which networks train in which RAM."""
    said = []
    for budget in BUDGETS:
        able = {
            network: {verdict(least, network, device, budget) for device in (PAGED, MAPPED)}
            for network in MLPERF_TINY
        }
        names = [f"`{name}`" for name, found in able.items() if found & {"yes", "in tiles"}]
        unsure = [f"`{name}`" for name, found in able.items() if "open" in found]
        text = f"{budget}: {', '.join(names) or 'none'}"
        said.append(text + (f" (open: {', '.join(unsure)})" if unsure else ""))
    return (
        "**Which networks of MLPerf Tiny train whole, as built-in graphs, in a RAM of "
        f"{'; '.join(said)}.**"
    )


_MEANING: Final = (
    "This table is about the built-in graphs, with one kernel for each operator and each part of "
    "its backward pass; a *no* is proved of these. The kernels of exported C are others: some take "
    "a range of channels, and each board has RAM for stack, inputs and runtime too. "
    "*Yes* and *in tiles* stand for a schedule that the verifier accepts, *no* for a "
    "proof that there is none, *open* for neither within the limit. *In tiles*: larger weights "
    "are split into tensors of at most 32 KiB. *Read in place*: the core reads storage like "
    "RAM (NOR flash, PSRAM); *paged*: what is read must be copied to RAM (SD card)."
)


_EXPORTED_WORDS: Final = (
    "For a board, what counts is the graph of the [exported kernels](how-to/export.md): *yes* is a "
    "program that was linked into that RAM and run, *no* is proved of these kernels. Where it "
    "differs from the table above, the kernels do. [On a microcontroller](on-a-microcontroller.md) "
    "has the figures; `poetmodel limits` of a step file says the least RAM of the same graph."
)

_AS_EXPORTED: Final = {
    "ds-cnn": "ds-cnn",
    "resnet8": "resnet8",
    "autoencoder": "autoencoder",
    "mobilenetv1-vww": "mobilenetv1-vww",
    "mobilenetv2-035, 48 x 48": "mobilenetv2-035",
}
"""The networks that are exported too, by the names of those here."""


def budgets_table(least: Sequence[StepRecord]) -> str:
    """Return whether each network trains in each RAM."""
    rows = [
        (
            f"`{network}`" if device == PAGED else "",
            _STORAGE[device],
            *(verdict(least, network, device, budget) for budget in BUDGETS),
        )
        for network in SMALL
        for device in (PAGED, MAPPED)
    ]
    return table(("network", "state on storage is", *BUDGETS), rows)


# -- least RAM -------------------------------------------------------------------------------------

_LEAST_WORDS: Final = (
    "Each column adds to the one before. *Activations*: as in graphs without state; parameters and "
    "gradients are outside and come on top. *State*: all parameters, running statistics and "
    "gradients are in the graph and in RAM. *In place*: operators may write over inputs that die. "
    "*Paging*: state has its home on storage or in RAM, and everything may be paged; the other "
    "columns may recompute only. A range is what is proved and what was found within the limit."
)


def least_table(least: Sequence[StepRecord]) -> str:
    """Return a line for each network, in tiles or not, on each kind of storage."""
    rows = []
    for network in SMALL:
        for graph in (IN_PLACE, TILES):
            columns = [ACTIVATIONS, STATE, graph] if graph == IN_PLACE else ["", "", graph]
            dry = [_least_cell(_dry(least, network, column)) for column in columns]
            for device in (PAGED, MAPPED):
                again = device == MAPPED
                known = _dry(least, network, graph)
                rows.append(
                    (
                        "" if again else f"`{network}`" + (", tiles" if graph == TILES else ""),
                        *(("", "", "", "", "") if again else (*_sizes(known), *dry)),
                        _STORAGE[device],
                        _least_cell(_paged(least, network, graph, device)),
                    )
                )
    heads = ("network", "state", "keep-all", "activations", "+ state", "+ in place", "storage")
    return table((*heads, "+ paging"), rows)


def _dry(least: Sequence[StepRecord], network: str, graph: str) -> list[StepRecord]:
    wanted = {"network": network, "graph": graph, "paging": False}
    return [run for run in least if wanted.items() <= run.cell.items()]


def _sizes(runs: Sequence[StepRecord]) -> tuple[str, str]:
    if not runs:
        return "-", "-"
    record = runs[0].record
    return format_bytes(record["state_bytes"]), format_bytes(record["keep_all_bytes"])


def _least_cell(runs: Sequence[StepRecord]) -> str:
    if not runs:
        return ""
    if not runs[0].found:
        return "-"
    bound, value = runs[0].least_bytes
    text = format_bytes(value)
    return text if runs[0].proved else f"{format_bytes(bound)} to {text}"


# -- boards ----------------------------------------------------------------------------------------

_BOARD_WORDS: Final = (
    "Figures are those of the built-in graphs, with operators in place and weights in tiles of "
    "32 KiB, for the least energy within all of the board's RAM; beside stands whether exported C "
    "trains there. Energy and time are those of the step over those of keep-all, which computes "
    "every node once and pages nothing (on most boards it does not fit). *Worn after* is how many "
    "steps the storage endures, with ideal wear levelling, where the board's data sheet says."
)


def trains(run: StepRecord) -> str:
    """Return whether a network trains on a board: proved, or open."""
    if run.found:
        return "yes"
    return "no" if run.status == "infeasible" else "open"


def boards_summary(found: Sequence[StepRecord]) -> str:
    """Return on how many boards each network trains."""
    said = []
    for network in SMALL:
        runs = [run for run in found if run.cell["network"] == network]
        if runs:
            able = sum(trains(run) == "yes" for run in runs)
            said.append(f"`{network}` on {able} of {len(runs)}")
    late = [run for run in found if run.found and not run.proved]
    unproved = f" {len(late)} schedules are not proved to 1 %." if late else ""
    return f"As built-in graphs they train: {'; '.join(said)} boards.{unproved}" if said else ""


def boards_table(runs: Sequence[StepRecord], exported: Sequence[boards.Exported] = ()) -> str:
    """Return a line for each network and board: as built-in graph, and whether its C trains."""
    rows = []
    as_c = {(run.network, run.place): run for run in exported}
    order = tuple(NETWORKS)
    for run in sorted(runs, key=lambda run: (order.index(run.cell["network"]), _ram(run))):
        record = run.record
        able = run.found
        rows.append(
            (
                f"`{run.cell['network']}`",
                f"`{run.cell['device']}`",
                format_bytes(_ram(run)),
                trains(run),
                _as_c(run, as_c),
                format_bytes(record["peak_ram_bytes"]) if able else "-",
                _times(record["energy_j"], record["baseline_energy_j"]) if able else "-",
                _times(record["time_s"], record["pass_s"]) if able else "-",
                format_bytes(record["written_bytes"]) if able else "-",
                _worn(record) if able else "-",
                percent_text(run.gap) if able else "-",
                run.time_text,
            )
        )
    first = ("network", "board", "RAM", "built-in graph", "exported C")
    heads = (*first, "peak", "energy", "time", "written", "worn after", "gap", "solved in")
    return table(heads, rows, right=len(first))


def _as_c(
    run: StepRecord, exported: Mapping[tuple[str, tuple[str, str | None]], boards.Exported]
) -> str:
    """Return whether the exported C of a network trains on the board."""
    name = _AS_EXPORTED.get(run.cell["network"], "")
    found = exported.get((name, (run.cell["device"], None)))
    if found is None:
        return "-"
    batch = boards.SIZES.get(name, "")
    return boards.answer(found) + (f", {batch}" if batch.startswith("batch") else "")


def _ram(run: StepRecord) -> int:
    return Device.load(run.cell["device"]).ram_bytes


def _times(value: float, one: float) -> str:
    return number_text(value / one) if one else "-"


def number_text(value: float) -> str:
    """Return a number with three digits, or whole where it is larger."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _share(ratio: float | None) -> str:
    """Return a fraction as a percentage; as a whole one where it is large."""
    if ratio is None or ratio < 10:
        return percent_text(ratio)
    return f"{100 * ratio:,.0f} %"


def _worn(record: Mapping[str, Any]) -> str:
    steps = record.get("steps_until_worn")
    return "-" if steps is None else f"{steps:,.0f}"


# -- methods at equal RAM --------------------------------------------------------------------------

_POLICY_WORDS: Final = (
    "Budgets go from the least RAM to that of keep-all. Overhead is energy beyond keep-all's, over "
    "that. [`resident`](baselines.md#graphs-with-state) has all state in RAM and the rest as the "
    "optimum has it; `zero-offload` has all state on storage and activations in RAM; `offload-all` "
    "has all state on storage and pages every saved activation. A dash: the method does not keep "
    "the budget. In brackets: how many times the overhead that `optimal` found; below 1 where that "
    "ran into its limit (bold) far from the least. A star: not proved to 1 % within the limit, so "
    "that the method may do better."
)


def problems_of(policies: Sequence[StepRecord]) -> dict[tuple[str, ...], dict[str, StepRecord]]:
    """Return the records of each network, board and budget, by method."""
    found: dict[tuple[str, ...], dict[str, StepRecord]] = {}
    for run in policies:
        cell = run.cell
        place = (cell["network"], cell["device"], cell["ram"])
        found.setdefault(place, {})[cell["method"]] = run
    return found


def _excess(methods: Mapping[str, StepRecord], name: str) -> float | None:
    """Return how many times the overhead of the optimum that of a method is."""
    best, other = (methods.get(each) for each in (METHODS[0], name))
    least = None if best is None else best.overhead_ratio
    mine = None if other is None else other.overhead_ratio
    return mine / least if least and mine is not None else None


def _is_best(run: StepRecord) -> bool:
    """Return whether a method cannot do better: what it solves, if anything, is proved."""
    facts = run.record.get("statistics") or {}
    return not run.found or facts.get("restricted_status", "optimal") == "optimal"


def policies_summary(policies: Sequence[StepRecord]) -> str:
    """Return how often each method keeps the budget, and what it costs then."""
    problems = problems_of(policies)
    said = []
    for name in METHODS[1:]:
        able = sum(name in methods and methods[name].found for methods in problems.values())
        ratios = [each for methods in problems.values() if (each := _excess(methods, name))]
        cost = (
            f", with {number_text(statistics.median(ratios))} times the overhead that `optimal` "
            f"found in the median and {number_text(max(ratios))} at most"
            if ratios
            else ""
        )
        said.append(f"`{name}` keeps {able} of {len(problems)} budgets{cost}")
    return "; ".join(said) + "." if problems else ""


def policies_table(policies: Sequence[StepRecord]) -> str:
    """Return a line for each network, board and budget."""
    rows = []
    for (network, device, ram), methods in problems_of(policies).items():
        best = methods.get(METHODS[0])
        if best is None:
            continue
        cells = []
        for name in METHODS[1:]:
            run, times = methods.get(name), _excess(methods, name)
            ratio = None if run is None else run.overhead_ratio
            star = "" if run is None or _is_best(run) else "\\*"
            cells.append(_share(ratio) + star + (f" ({number_text(times)})" if times else ""))
        rows.append(
            (
                f"`{network}`",
                f"`{device}`",
                ram.replace("+", " + "),
                format_bytes(best.record["ram_budget_bytes"]),
                _share(best.overhead_ratio),
                percent_text(best.gap),
                best.time_text,
                *cells,
            )
        )
    heads = ("network", "board", "budget", "RAM", "optimum", "gap", "solved in", *METHODS[1:])
    return table(heads, rows, right=3)
