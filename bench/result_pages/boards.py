"""The page that says which networks train on which boards, as measured from exported C."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from blocks import folded, table
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
from result_pages.records import circumstances, seconds_text, share_text

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
class Exported:
    """The record of a network that was exported."""

    record: Mapping[str, Any]
    """The line."""

    def __getitem__(self, name: str) -> Any:
        """Return one of its fields."""
        return self.record[name]

    @property
    def network(self) -> str:
        """Which network."""
        return str(self["cell"]["network"])

    @property
    def trains(self) -> bool:
        """Whether it was built within the RAM and run."""
        return bool(self["status"] == YES)

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


def page(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return the page."""
    boards = of_part(records, BOARD)
    everything, last = (_by_network(records, part) for part in (KEEP_ALL, LAST_LAYER))
    limits = sorted({f"{each['cell']['solve_s']:g} s" for each in records})
    tools = ", ".join(f"{name}: {said}" for name, said in records[-1]["tools"].items())
    parts = [
        "# On a microcontroller",
        lead(records),
        f"![RAM of keep-all and of the exported program, network by network]({CHART})",
        goals(boards),
        same_bits(boards, everything),
        f"Generated from `bench/results/{source}` by `scripts/make_results.py`; "
        "[the protocol](../bench/protocol.md#on-a-microcontroller) says how it was measured. "
        f"{circumstances(records, where='beside other work')}. {tools}. "
        f"Each solve had {' or '.join(limits)}.",
        _WORDS,
        "## What trains where",
        matrix(boards),
        "## What a step takes",
        _STEP_WORDS,
        folded("Steps", steps_table(boards, everything)),
        _MEMORY_WORDS,
        folded("RAM maps", memory_table(boards)),
        "## What does not fit, and why",
        refusals(boards),
        "## Against keeping everything, and against the last layer alone",
        _AGAINST_WORDS,
        against_table(boards, everything, last),
        "## Instructions for each multiply-accumulate",
        kernels_section(everything.values()),
        "## What others publish",
        _OTHERS_WORDS,
        others_table(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _by_network(records: Sequence[Mapping[str, Any]], part: str) -> dict[str, Exported]:
    return {run.network: run for run in of_part(records, part) if run.trains}


_WORDS: Final = (
    "Every network is [exported as C](how-to/export.md) with `pmt.export`: all parameters, single "
    "precision, full backpropagation, batch norm in training mode, plain SGD, a batch of one (of "
    "two for the autoencoder, whose batch norm needs two samples). *Yes* means: GCC's linker fits "
    "the program into that RAM, stack, inputs and runtime included; the emulated core "
    f"(QEMU, Cortex-M4F or M7) runs {STEPS} steps of it, and each loss equals that of the same "
    f"program on this machine within a fraction of {LOSS_TOLERANCE:g} (the second loss of "
    f"MobileNetV2 within {SECOND_TOLERANCES['mobilenetv2-035']:g}: its batch norms over few values "
    "make rounding errors larger; PyTorch's own is 1.4 % off that in double, these 0.2 %). *No* is "
    "proved: no schedule of the exported step fits, in none of the tiles tried. *Open* is neither. "
    "RAM, stack, flash and instructions are measured; times and energies are estimates. No board "
    "was at hand."
)


# -- the headline ----------------------------------------------------------------------------------


def named(network: str) -> str:
    """Return a network as tables have it."""
    more = SIZES.get(network)
    return f"`{network}`" + (f", {more}" if more else "")


def lead(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the run that saves most RAM, in a sentence; "" without runs."""
    boards, everything = of_part(records, BOARD), _by_network(records, KEEP_ALL)
    able = [run for run in boards if run.trains and run.network in everything]
    if not able:
        return ""

    def saved(run: Exported) -> tuple[float, float]:
        ratio = everything[run.network]["ram_bytes"] / run.ram_limit_bytes
        return ratio, -run["instructions"]

    run = max(able, key=saved)
    kept = everything[run.network]
    return (
        f"C of a PyTorch model trains whole on a microcontroller: {named(run.network)} takes "
        f"{format_bytes(kept['ram_bytes'])} where everything is kept, and trains in "
        f"{format_bytes(run.ram_limit_bytes)} of `{run.place[0]}` with "
        f"{run['instructions'] / kept['instructions']:.2f} times the instructions."
    )


def best(boards: Iterable[Exported], network: str, ram_bytes: int) -> Exported | None:
    """Return the run with the fewest joules among those that train within so much RAM."""
    able = [run for run in boards if run.network == network and run.trains]
    able = [run for run in able if run.ram_limit_bytes <= ram_bytes]
    return min(able, key=lambda run: run.energy_j, default=None)


def goals(boards: Sequence[Exported]) -> str:
    """Return which goals are met, each with where."""
    said = []
    for ram_bytes, networks in GOALS:
        for network in networks:
            runs = [r for r in boards if r.network == network and r.ram_limit_bytes <= ram_bytes]
            able = dict.fromkeys(f"`{run.place[0]}`" for run in runs if run.trains)
            unable = dict.fromkeys(f"`{run.place[0]}`" for run in runs if not run.trains)
            verdict = f"met ({', '.join(able)})" if able else "**missed**" if unable else "not run"
            but = f"; not on {', '.join(unable)}" if unable else ""
            said.append(f"- {named(network)} in {format_bytes(ram_bytes)}: {verdict}{but}")
    return "Goals, of training whole within a RAM:\n\n" + "\n".join(said)


def same_bits(boards: Sequence[Exported], everything: Mapping[str, Exported]) -> str:
    """Return how many leave the very state that keep-all leaves."""
    kept = everything
    pairs = [(run, kept[run.network]) for run in boards if run.trains and run.network in kept]
    same = sum(run["state_sha256"] == other["state_sha256"] for run, other in pairs)
    if not pairs:
        return ""
    return (
        f"After {STEPS} steps, all parameters and running statistics equal those of keep-all on a "
        f"Cortex-M4, bit by bit, in {share_text(same, len(pairs))} of the programs."
    )


def matrix(boards: Sequence[Exported]) -> str:
    """Return whether each network trains in each place."""
    runs = {(run.network, run.place): run for run in boards}
    rows = []
    for network in ON_BOARDS:
        cells = [answer(runs.get((network, place))) for place in PLACES]
        rows.append((named(network), *cells))
    heads = ("network", *map(_place, PLACES))
    storage = "; ".join(f"`{board}`: {_storage(board)}" for board in BOARDS)
    return (
        f"{table(heads, rows)}\n\nStorage: {storage}. A size after *yes*: larger parameters are in "
        f"[tiles](how-to/training-step.md) of that size; tried were whole parameters and tiles of "
        f"{' and '.join(tile for tile in TILES if tile)}, in this order."
    )


def _place(place: tuple[str, str | None]) -> str:
    return f"`{place[0]}`, {format_bytes(ram_of(place))}"


def _storage(board: str) -> str:
    storage = Device.load(board).storage
    if storage is None:
        return "none"
    mapped = "read in place" if storage.memory_mapped else "paged"
    return f"{mapped}, {storage.mode}"


def answer(run: Exported | None) -> str:
    """Return whether a network trains in a place, with its tiles if it has some."""
    if run is None:
        return "-"
    if run["status"] == FAILED:
        return "failed"
    return f"yes, {run.tile}" if run.trains and run.tile else str(run["status"])


# -- what a step takes -----------------------------------------------------------------------------

_STEP_WORDS: Final = (
    "*Instructions* of the second step, counted by the emulator, without those of the storage's "
    "driver; in brackets how many times those of keep-all on a Cortex-M4. *Time* is one "
    "instruction a cycle of the board's clock plus the transfers by the figures of the "
    "[device file](how-to/device.md); *energy* the power of the core for that time plus that of "
    "the transfers. A Cortex-M4 takes two cycles for many loads and a Cortex-M7 may issue two "
    "instructions at once, so that the true time may differ by a factor of about 1.5. *Gap* is "
    "what is proved of the schedule's overhead within the limit."
)


def steps_table(boards: Sequence[Exported], everything: Mapping[str, Exported]) -> str:
    """Return instructions, time, energy and transfers of each that trains."""
    rows = []
    for run in boards:
        if run.trains:
            kept = everything.get(run.network)
            again = f" ({run['instructions'] / kept['instructions']:.2f})" if kept else ""
            worn = run["steps_until_worn"]
            rows.append(
                (
                    named(run.network),
                    _place(run.place),
                    f"{run['instructions'] / 1e6:.1f} M{again}",
                    seconds_text(run.time_s),
                    f"{1e3 * run.energy_j:.3g} mJ",
                    format_bytes(run["read_bytes"]),
                    format_bytes(run["written_bytes"]),
                    str(run["recomputations"]),
                    "-" if worn is None else f"{worn:,.0f}",
                    f"{100 * run['gap']:.3g} %",
                )
            )
    heads = ("network", "board, RAM", "instructions", "time", "energy", "paged in", "paged out")
    return table((*heads, "recomputed", "worn after steps", "gap"), rows, right=2)


_MEMORY_WORDS: Final = (
    "The RAM map: *state* that has its home in RAM, *rest of arena* for all other tensors, "
    "*in gaps* what the addresses cost above the least. Flash holds the program and the first "
    "weights; where these exceed the chip's flash they must be put on storage another way."
)


def memory_table(boards: Sequence[Exported]) -> str:
    """Return the RAM map of each that trains, from its program and its run."""
    rows = [
        (
            named(run.network),
            _place(run.place),
            format_bytes(run["ram_bytes"] - run["stack_limit_bytes"] + run["stack_bytes"]),
            format_bytes(run["stack_bytes"]),
            format_bytes(run["resident_state_bytes"]),
            format_bytes(run["arena_bytes"] - run["resident_state_bytes"]),
            f"{100 * (run['arena_bytes'] / run['arena_bound_bytes'] - 1):.2g} %",
            format_bytes(run["input_bytes"]),
            format_bytes(run["runtime_bytes"]),
            format_bytes(run["flash_bytes"] - run["weight_bytes"]),
            format_bytes(run["weight_bytes"]),
        )
        for run in boards
        if run.trains
    ]
    heads = ("network", "board, RAM", "RAM used", "stack", "state", "rest of arena", "in gaps")
    rest = ("inputs", "runtime", "program", "weights")
    return table((*heads, *rest), rows, right=2)


# -- what does not fit -----------------------------------------------------------------------------


def refusals(boards: Sequence[Exported]) -> str:
    """Return why each that does not train does not."""
    rows = [
        (named(run.network), _place(run.place), str(run["status"]), _why(run))
        for run in boards
        if not run.trains
    ]
    return table(("network", "board, RAM", "trains", "because"), rows) if rows else ""


def _why(run: Exported) -> str:
    if run["status"] == FAILED:
        return str(run["reason"])
    last = run["tried"][-1]
    if "floor_bytes" in last:
        left = run.ram_limit_bytes - last["reserved_bytes"]
        return (
            f"inputs, stack and runtime leave {format_bytes(max(0, left))}, and "
            f"`{last['floor_node']}` ({last['floor_op']}) alone needs "
            f"{format_bytes(last['floor_bytes'])}"
        )
    return str(last["reason"]).removeprefix("proved: ")


# -- against other ways ----------------------------------------------------------------------------

_AGAINST_WORDS: Final = (
    "*Keep-all*: everything in RAM and computed once. *Last layer*: real exports in which all "
    "parameters but the last linear layer's are frozen constants in flash and batch norm takes its "
    "running statistics; what most work on such boards updates. *Here*: the largest saving, the "
    "run of the least RAM on a board above. RAM as measured, stack reserved as by default."
)


def against_table(
    boards: Sequence[Exported], everything: Mapping[str, Exported], last: Mapping[str, Exported]
) -> str:
    """Return RAM and instructions of each network in three ways."""
    rows = []
    for network in ON_BOARDS:
        able = [run for run in boards if run.network == network and run.trains]
        least = min(able, key=lambda run: run["ram_bytes"], default=None)
        cells = [_ram_and_work(run) for run in (everything.get(network), least, last.get(network))]
        rows.append((named(network), *(cell for pair in cells for cell in pair)))
    heads = ("network", "keep-all: RAM", "instructions", "here: RAM", "instructions")
    return table((*heads, "last layer: RAM", "instructions"), rows, right=1)


def _ram_and_work(run: Exported | None) -> tuple[str, str]:
    if run is None:
        return "-", "-"
    return format_bytes(run["ram_bytes"]), f"{run['instructions'] / 1e6:.2f} M"


# -- kernels ---------------------------------------------------------------------------------------


def kernels_section(everything: Iterable[Exported]) -> str:
    """Return instructions for each multiply-accumulate, by kernel and network."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    missing = ""
    for run in everything:
        if "not_counted" in run.record:
            missing += f" Not counted: {named(run.network)} ({run['not_counted']})."
        for node in run["nodes"]:
            groups.setdefault((node["kernel"], run.network), []).append(node)
    nodes = [node for found in groups.values() for node in found]
    if not nodes:
        return ""
    rows = []
    for (kernel, network), found in sorted(groups.items()):
        worst = max(found, key=_per_mac)
        macs = sum(node["macs"] for node in found)
        rows.append(
            (
                f"`{kernel}`",
                named(network),
                str(len(found)),
                f"{macs / 1e6:.3g} M",
                f"{sum(node['instructions'] for node in found) / macs:.2f}",
                f"{_per_mac(worst):.2f}",
                f"`{worst['node']}`, {worst['macs']:,} MAC",
            )
        )
    within = sum(_per_mac(node) <= MOST_PER_MAC for node in nodes)
    heads = ("kernel", "network", "nodes", "MAC", "mean", "worst node", "which")
    return (
        "Of each node on an emulated Cortex-M4F with GCC at -O2, loops, padding and calls "
        f"included, by `PROFILE=1`. At most {MOST_PER_MAC} were wanted of convolutions and matrix "
        f"products: {share_text(within, len(nodes))} nodes keep that; the median is "
        f"{statistics.median(map(_per_mac, nodes)):.2f}, the largest "
        f"{max(map(_per_mac, nodes)):.2f}.{missing}\n\n"
        f"{folded('Kernels', table(heads, rows, right=2))}"
    )


def _per_mac(node: Mapping[str, Any]) -> float:
    return float(node["instructions"] / node["macs"])


# -- others ----------------------------------------------------------------------------------------

_OTHERS_WORDS: Final = (
    "Figures are their authors', for their networks and boards, from abstracts where nothing else "
    "is named; they cannot be compared number by number with ours, which are of other networks, "
    "of single precision, and emulated."
)


def others_table() -> str:
    """Return what others publish on such devices, with their limits."""
    heads = ("work", "trains", "updates", "precision", "RAM", "operations or time a step", "limits")
    rows = [
        (
            f"[{each.name}]({each.url})",
            each.trains,
            each.updates,
            each.precision,
            each.ram,
            each.work,
            each.limits,
        )
        for each in OTHERS
    ]
    return table(heads, rows)


# -- the README ------------------------------------------------------------------------------------


def readme_table(records: Sequence[dict[str, Any]]) -> str:
    """Return the README's block: each network in the smallest RAM that it was found to fit."""
    boards, everything = of_part(records, BOARD), _by_network(records, KEEP_ALL)
    rows = []
    for network in ON_BOARDS:
        able = [run for run in boards if run.network == network and run.trains]
        if not able or network not in everything:
            continue
        run = min(able, key=lambda each: (each.ram_limit_bytes, each.energy_j))
        kept = everything[network]
        rows.append(
            (
                named(network),
                f"`{run.place[0]}`",
                format_bytes(run.ram_limit_bytes),
                format_bytes(kept["ram_bytes"]),
                f"{run['instructions'] / 1e6:.1f} M",
                f"{run['instructions'] / kept['instructions']:.2f}",
                seconds_text(run.time_s),
                f"{100 * run['gap']:.3g} %",
            )
        )
    heads = ("network", "board", "RAM", "keep-all's RAM", "instructions", "of keep-all's", "time")
    return (
        f"{table((*heads, 'gap'), rows, right=2)}\n\n"
        f"All parameters, single precision, plain SGD (learning rate {LEARNING_RATE:g}); stack, "
        "inputs and runtime are in the RAM, which the linker enforces, and an emulated core runs "
        "it. Time is estimated. The gap is that of the schedule's energy overhead at the end of a "
        "limited solve: with 100 % it is valid, and nothing is proved of how much less another "
        "one takes. "
        "[Every network and board, RAM maps, and what does not fit](docs/on-a-microcontroller.md)."
    )
