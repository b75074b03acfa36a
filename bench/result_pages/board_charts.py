"""Charts of whole training steps: the least RAM, every board, what exported C takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mcu.boards import BOARD, KEEP_ALL, ON_BOARDS
from poetmodel.device import Device
from poetmodel.units import format_bytes
from result_pages import boards, trains
from result_pages.drawing import BLUE, GREEN, GREY, ORANGE, RED, Chart
from what_trains_where import BOARDS, IN_PLACE, LEAST, MAPPED, PAGED, SMALL, STATE, TILES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from result_pages.boards import Exported
    from result_pages.trains import StepRecord

_SIZES: Final = tuple(2**k for k in range(15, 23))
"""Ticks of an axis of bytes."""
_LIMITS: Final = (256 * 2**10, 512 * 2**10, 2**20)
"""RAM of common boards [B]."""


def _bytes_axis(axes: Any, most: float) -> None:
    from matplotlib.ticker import NullLocator

    ticks = [size for size in _SIZES if size <= most * 1.2]
    axes.set(xscale="log", xlim=(ticks[0], most * 1.5))
    axes.set_xticks(ticks, labels=[format_bytes(size).replace(".00", "") for size in ticks])
    axes.xaxis.set_minor_locator(NullLocator())


def _rows_axis(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


# -- the least RAM ---------------------------------------------------------------------------------


def least_ram(records: Sequence[Mapping[str, Any]]) -> Chart:
    """Return the RAM of keep-all and the least that was found, by network and kind of storage."""
    least = trains.of_part(records, LEAST)
    shown = {}
    for network in SMALL:
        kept = _found(least, network=network, graph=STATE, paging=False)
        sizes = {
            device: min(
                (
                    run.least_bytes[1]
                    for graph in (IN_PLACE, TILES)
                    for run in _found(least, network=network, graph=graph, device=device)
                    if run.cell["paging"] and run.found
                ),
                default=None,
            )
            for device in (PAGED, MAPPED)
        }
        if kept and all(sizes.values()):
            shown[network] = [kept[0].record["keep_all_bytes"], sizes[PAGED], sizes[MAPPED]]
    return Chart(shown=shown, paint=_paint_least)


def _found(runs: Sequence[StepRecord], **wanted: Any) -> list[StepRecord]:
    return [run for run in runs if wanted.items() <= run.cell.items()]


def _paint_least(figure: Any, shown: Any) -> None:
    axes = figure.subplots()
    kept, paged, mapped = zip(*shown.values(), strict=True)
    places = range(len(shown))
    for limit in _LIMITS:
        axes.axvline(limit, color=RED, linewidth=1, linestyle="--", zorder=0)
    axes.hlines(places, mapped, kept, color="#bbbbbb", linewidth=3)
    axes.plot(kept, places, "o", color=GREY, markersize=8, label="keep-all")
    axes.plot(paged, places, "o", color=ORANGE, markersize=12, label="least, storage is paged")
    label = "least, storage is read in place"
    axes.plot(mapped, places, "o", color=BLUE, markersize=7, label=label)
    _bytes_axis(axes, max(kept))
    _rows_axis(axes, list(shown))
    figure.suptitle("RAM of a whole training step", x=0.01, ha="left", fontsize=9, weight="bold")
    figure.legend(loc="outside lower center", ncols=3)


# -- every board -----------------------------------------------------------------------------------


def on_boards(records: Sequence[Mapping[str, Any]]) -> Chart:
    """Return whether each network trains on each board, and the energy over keep-all's."""
    shown: dict[str, Any] = {}
    for run in trains.of_part(records, BOARDS):
        record = run.record
        times = record["energy_j"] / record["baseline_energy_j"] if run.found else None
        cell = [run.trains, times]
        shown.setdefault(run.cell["network"], {})[run.cell["device"]] = cell
    return Chart(shown=shown, paint=_paint_boards, height_inches=4.6)


def _paint_boards(figure: Any, shown: Any) -> None:
    from matplotlib.patches import Patch, Rectangle

    axes = figure.subplots()
    networks = [name for name in SMALL if name in shown]
    devices = sorted(
        {device for cells in shown.values() for device in cells},
        key=lambda name: (Device.load(name).ram_bytes, name),
    )
    colours = {"yes": GREEN, "open": ORANGE, "no": "#dddddd"}
    for column, network in enumerate(networks):
        for row, device in enumerate(devices):
            answer, times = shown[network].get(device, (None, None))
            if answer is None:
                continue
            box = Rectangle((column - 0.48, row - 0.45), 0.96, 0.9, color=colours[answer])
            axes.add_patch(box)
            text = answer if times is None else f"{trains.number_text(times)} x"
            colour = "#555555" if answer == "no" else "#ffffff"
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=8)
    names = [
        f"{device}, {format_bytes(Device.load(device).ram_bytes).replace('.00', '')}"
        for device in devices
    ]
    _rows_axis(axes, names)
    heads = [name.replace(", ", "\n").replace("-", "-\n", 1) for name in networks]
    axes.set_xticks(range(len(networks)), heads, fontsize=8)
    axes.set_xlim(-0.5, len(networks) - 0.5)
    axes.grid(visible=False)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)
    handles = [
        Patch(color=GREEN, label="trains whole; energy over keep-all's"),
        Patch(color="#dddddd", label="cannot: proved"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)


# -- exported C ------------------------------------------------------------------------------------


def exported(records: Sequence[Mapping[str, Any]]) -> Chart:
    """Return the RAM of keep-all and of the smallest place in which each network trains."""
    found = boards.of_part(records, BOARD)
    everything = {run.network: run for run in boards.of_part(records, KEEP_ALL) if run.trains}
    shown = {}
    for network in ON_BOARDS:
        able = [run for run in found if run.network == network and run.trains]
        if able and network in everything:
            run, kept = min(able, key=_smallest), everything[network]
            more = run["instructions"] / kept["instructions"]
            sizes = [kept["ram_bytes"], run["ram_bytes"], run.ram_limit_bytes]
            shown[boards.named(network).replace("`", "")] = [*sizes, more, run.place[0]]
    return Chart(shown=shown, paint=_paint_exported, height_inches=3.6)


def _smallest(run: Exported) -> tuple[float, float]:
    return run.ram_limit_bytes, run.energy_j


def _paint_exported(figure: Any, shown: Any) -> None:
    axes = figure.subplots()
    kept, here, limits, more, places = zip(*shown.values(), strict=True)
    rows = range(len(shown))
    axes.hlines(rows, here, kept, color="#bbbbbb", linewidth=3)
    axes.plot(kept, rows, "o", color=GREY, markersize=8, label="keep-all")
    axes.plot(here, rows, "o", color=BLUE, markersize=8, label="on the board")
    axes.plot(limits, rows, "|", color=RED, markersize=16, markeredgewidth=2, label="its RAM")
    ends = map(max, kept, limits)
    for row, (size, times, board) in enumerate(zip(ends, more, places, strict=True)):
        text = f"{board}, {times:.2f} x instructions"
        axes.annotate(text, (size, row), (8, 0), textcoords="offset points", va="center", size=8)
    _bytes_axis(axes, max(kept))
    axes.set_xlim(2**16, max(kept) * 6)
    _rows_axis(axes, list(shown))
    title = "RAM of C that trains on a Cortex-M: stack, inputs and runtime included"
    figure.suptitle(title, x=0.01, ha="left", fontsize=9, weight="bold")
    figure.legend(loc="outside lower center", ncols=3)
