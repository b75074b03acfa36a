"""The page that says which networks train on which boards, as measured from exported C."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from mcu.boards import (
    BOARD,
    BOARDS,
    KEEP_ALL,
    LAST_LAYER,
    LEARNING_RATE,
    LOSS_TOLERANCE,
    MOST_PER_MAC,
    ON_BOARDS,
    PLACES,
    SECOND_TOLERANCES,
    STEPS,
    TILES,
    YES,
)
from mcu.others import OTHERS
from poetmodel.bench.measurement import FAILED
from poetmodel.device import Device
from poetmodel.units import format_bytes, parse_size
from result_pages.records import Line
from result_pages.rendering import render

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

CHART: Final = "boards-ram.svg"
"""Name of the page's chart."""
SMALL_RAM, LARGER_RAM = 256 * 2**10, 512 * 2**10
GOALS: Final = (
    (SMALL_RAM, ("ds-cnn", "autoencoder", "resnet8")),
    (LARGER_RAM, ("mobilenetv1-vww", "mobilenetv2-035")),
)
"""RAM, and networks that are to train whole in it."""
SIZES: Final = {
    "mobilenetv1-vww": "96 x 96",
    "mobilenetv2-035": "48 x 48",
    "autoencoder": "batch 2",
}
"""What names of networks do not say."""


@dataclass(frozen=True, slots=True)
class Exported(Line):
    """The record of a network that was exported."""

    @property
    def board_text(self) -> str:
        """Its board, as pages have it."""
        return f"`{self.place[0]}`"

    @property
    def network(self) -> str:
        """Which network."""
        return str(self["cell"]["network"])

    @property
    def trains(self) -> bool:
        """Whether it was built within the RAM and run, and the board's flash takes it."""
        return bool(self["status"] == YES) and not self.fault_of_flash

    @property
    def fault_of_flash(self) -> str:
        """Why the flash of its board does not run what was recorded; empty where it does.

        Flash loses a block before it is written, which only commits allow for.
        """
        board = Device.load(self["cell"]["board"])
        if self["cell"]["part"] != BOARD or self["status"] != YES or board.flash is None:
            return ""
        if self["flash_bytes"] > board.flash.size_bytes:
            taken, size = (format_bytes(b) for b in (self["flash_bytes"], board.flash.size_bytes))
            return f"program and first weights are {taken}, and the flash has {size}"
        written = self["written_bytes"] and not self.record.get("commit")
        if board.stores_in_flash and board.is_memory_mapped and written:
            return "state on flash needs `--commit`, which this record lacks"
        return ""

    @property
    def place(self) -> tuple[str, str | None]:
        """Board, and how much of its RAM."""
        return self["cell"]["board"], self["cell"]["ram"]

    @property
    def ram_limit_bytes(self) -> int:
        """All of the RAM that it may take [B]."""
        return ram_of(self.place)

    @property
    def tile(self) -> str | None:
        """The size of tiles that was found to fit."""
        found: str | None = self["tried"][-1]["tile"]
        return found

    @property
    def time_s(self) -> float:
        """Estimated time of a step: an instruction a cycle, then the transfers [s]."""
        return float(self["instructions"] / self["clock_hz"] + self["transfer_s"])

    @property
    def energy_j(self) -> float:
        """Estimated energy of a step [J]."""
        core_j = self["instructions"] / self["clock_hz"] * self["power_w"]
        return float(core_j + self["transfer_j"])

    @property
    def refusal(self) -> str:
        """Why it does not train."""
        if self["status"] == FAILED:
            return str(self["reason"])
        if self.fault_of_flash:
            return self.fault_of_flash
        last = self["tried"][-1]
        if "floor_bytes" not in last:
            return str(last["reason"]).removeprefix("proved: ")
        left_bytes = max(0, self.ram_limit_bytes - last["reserved_bytes"])
        return (
            f"inputs, stack and runtime leave {format_bytes(left_bytes)}, and "
            f"`{last['floor_node']}` ({last['floor_op']}) alone needs "
            f"{format_bytes(last['floor_bytes'])}"
        )


def ram_of(place: tuple[str, str | None]) -> int:
    """Return the RAM of a board, or how much of it may be taken [B]."""
    board, ram = place
    return Device.load(board).ram_bytes if ram is None else parse_size(ram, field="ram")


def of_part(records: Iterable[Mapping[str, Any]], part: str) -> list[Exported]:
    """Return the records of a part, in the order of networks, then of boards."""
    found = [Exported(each) for each in records if each["cell"]["part"] == part]
    places = {place: number for number, place in enumerate(PLACES)}

    def order(run: Exported) -> tuple[int, int]:
        return ON_BOARDS.index(run.network), places.get(run.place, len(places))

    return sorted(found, key=order)


def page(records: Sequence[dict[str, Any]], source: str, beside: str = "") -> str:
    """Return the page, with a section on what was measured beside exported steps."""
    boards = of_part(records, BOARD)
    everything, last = (_by_network(records, part) for part in (KEEP_ALL, LAST_LAYER))
    nodes = [
        {**node, "network": run.network, "per_mac": node["instructions"] / node["macs"]}
        for run in everything.values()
        for node in run["nodes"]
    ]
    text = render(
        "what-trains-where",
        records=records,
        source=source,
        lead=lead(records),
        beside=beside,
        goals=GOALS,
        matrix=matrix(boards),
        runs=boards,
        trained=[run for run in boards if run.trains],
        ways={
            network: (everything.get(network), _least(boards, network), last.get(network))
            for network in ON_BOARDS
        },
        everything=everything,
        compared=[
            run["state_sha256"] == everything[run.network]["state_sha256"]
            for run in boards
            if run.trains and run.network in everything
        ],
        limits=limits(records),
        nodes=nodes,
        most_per_mac=MOST_PER_MAC,
        others=OTHERS,
        chart=CHART,
        named=named,
        answer=answer,
        place_text=place_text,
        steps=STEPS,
        tolerance=LOSS_TOLERANCE,
        mobilenet_tolerance=SECOND_TOLERANCES["mobilenetv2-035"],
    )
    return f"{text}\n"


def _by_network(records: Sequence[Mapping[str, Any]], part: str) -> dict[str, Exported]:
    return {run.network: run for run in of_part(records, part) if run.trains}


def _least(boards: Sequence[Exported], network: str) -> Exported | None:
    """Return the run of a network that takes the least RAM."""
    able = [run for run in boards if run.network == network and run.trains]
    return min(able, key=itemgetter("ram_bytes"), default=None)


def named(network: str) -> str:
    """Return a network as tables have it."""
    more = SIZES.get(network)
    return f"`{network}`" + (f", {more}" if more else "")


def place_text(place: tuple[str, str | None]) -> str:
    """Return a board with the RAM that may be taken of it."""
    return f"`{place[0]}`, {format_bytes(ram_of(place))}"


def lead(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the run that saves most RAM, in a sentence; "" without runs."""
    everything = _by_network(records, KEEP_ALL)
    able = [run for run in of_part(records, BOARD) if run.trains and run.network in everything]
    if not able:
        return ""

    def saved(run: Exported) -> tuple[float, float]:
        ratio = everything[run.network]["ram_bytes"] / run.ram_limit_bytes
        return ratio, -run["instructions"]

    run = max(able, key=saved)
    kept = everything[run.network]
    return render("boards-lead", run=run, kept=kept, network=named(run.network))


def matrix(boards: Sequence[Exported]) -> str:
    """Return whether each network trains in each place."""
    runs = {(run.network, run.place): run for run in boards}
    return render(
        "boards-matrix",
        rows={
            named(network): [answer(runs.get((network, place))) for place in PLACES]
            for network in ON_BOARDS
        },
        places=list(map(place_text, PLACES)),
        storages={board: Device.load(board).storage for board in BOARDS},
        tiles=list(filter(None, TILES)),
    )


def answer(run: Exported | None) -> str:
    """Return whether a network trains in a place, with its tiles if it has some."""
    if run is None:
        return "-"
    if run["status"] == FAILED:
        return "failed"
    if run.fault_of_flash:
        return "open" if "commit" in run.fault_of_flash else "no: flash"
    return f"yes, {run.tile}" if run.trains and run.tile else str(run["status"])


def smallest(records: Sequence[Mapping[str, Any]]) -> list[tuple[Exported, Exported]]:
    """Return each network's run in the smallest RAM that it was found to fit, and keep-all's."""
    boards, everything = of_part(records, BOARD), _by_network(records, KEEP_ALL)
    pairs = []
    for network in everything:
        able = [run for run in boards if run.network == network and run.trains]
        if able:
            run = min(able, key=lambda run: (run.ram_limit_bytes, run.energy_j))
            pairs.append((run, everything[network]))
    return pairs


def readme_table(records: Sequence[dict[str, Any]]) -> str:
    """Return the README's block: each network in the smallest RAM that it was found to fit."""
    rows = smallest(records)
    return render(
        "boards-readme",
        rows=rows,
        named=named,
        learning_rate=LEARNING_RATE,
        limits=limits([run.record for run, _ in rows]),
    )


def limits(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how long solves might take."""
    return [f"{s:g} s" for s in sorted({record["cell"]["solve_s"] for record in records})]
