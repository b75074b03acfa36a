"""The charts of the pages: solves, compiled steps, boards, exported C, tested cases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from poetmodel.device import Device
from poetmodel.units import format_bytes
from pytorch.runs import SAFE
from result_pages import boards, trains
from result_pages.drawing import BLUE, COLOURS, GREEN, GREY, ORANGE, RED, Chart
from result_pages.grid import GOALS
from result_pages.records import ONE_PERCENT, SolveRecord, feasible, of_goal
from result_pages.training import TrainingRecord, duels
from what_trains_where import BOARDS, IN_PLACE, LEAST, MAPPED, PAGED, SMALL, STATE, TILES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_STYLE: Final = {
    ("paper-m4", "20%"): (RED, "o"),
    ("paper-m4", "40%"): ("#ef8a62", "s"),
    ("paper-a72", "20%"): ("#2166ac", "^"),
    ("paper-a72", "40%"): ("#67a9cf", "D"),
}
"""Colour and marker by device and budget."""
_DEVICES: Final = {"paper-a72": (ORANGE, 5.0), "paper-m0": (GREEN, 2.5), "paper-m4": (BLUE, 1.0)}
"""Colour and width of the devices of the published graphs: equal lines are seen as such."""
_MIB: Final = 2**20
_GIB: Final = 2**30
_COLUMNS: Final = 4
"""Panels side by side."""

Point = tuple[int, float, bool, float]
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


def _panels(figure: Any, count: int, columns: int, *, spare: int = 0, **options: Any) -> Any:
    """Return axes row by row, at least so many and some to spare; those beyond are left empty."""
    down = -(-(count + spare) // columns)
    panels = figure.subplots(down, columns, squeeze=False, **options).ravel()
    for axes in panels[count:]:
        axes.set_axis_off()
    return panels


# -- times to a proof ------------------------------------------------------------------------------


def times(records: Sequence[dict[str, Any]]) -> Chart:
    """Return which share of the instances was proved to 1 % after which time, for each grid."""
    shown = []
    for goal, (heading, _) in GOALS.items():
        able = feasible(of_goal(records, goal))
        found = sorted(t for run in able if (t := run.time_to(ONE_PERCENT)) is not None)
        if able:
            shown.append([heading, len(able), found])
    return Chart(shown=shown, paint=_paint_times)


def _paint_times(figure: Any, shown: Any) -> None:
    axes = figure.subplots()
    for (heading, count, found), colour in zip(shown, COLOURS, strict=False):
        shares = [100 * (k + 1) / count for k in range(len(found))]
        label = f"{heading}: {len(found)} of {count}"
        axes.step(found, shares, where="post", color=colour, linewidth=2, label=label)
    axes.set(xscale="log", xlabel="time", ylim=(0, 103))
    axes.set_title("Problems proved to within 1 % of the optimum's overhead")
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.xaxis.set_major_formatter("{x:g} s")
    axes.legend(loc="lower right")


# -- compiled steps --------------------------------------------------------------------------------


def steps(records: Sequence[dict[str, Any]]) -> Chart:
    """Return the times of compiled steps beside the quickest other way within the same peak."""
    shown: dict[str, list[list[float]]] = {}
    for duel in duels([TrainingRecord.of(record) for record in records]):
        pair = [duel.best.time_ratio, None if duel.own is None else duel.own.time_ratio]
        if all(pair):
            shown.setdefault(duel.peer.network, []).append([value or 0.0 for value in pair])
    return Chart(shown=shown, paint=_paint_steps, height_inches=3.4)


def _paint_steps(figure: Any, shown: Any) -> None:
    axes = figure.subplots()
    most = 1.02 * max(x for pairs in shown.values() for x, _ in pairs)
    axes.plot((0.9, most), (0.9, most), color=GREY, linewidth=1, linestyle="--")
    for (network, pairs), colour in zip(shown.items(), COLOURS, strict=False):
        axes.scatter(*zip(*pairs, strict=True), color=colour, s=22, alpha=0.8, label=network)
    high = 1.1 * max(y for pairs in shown.values() for _, y in pairs)
    axes.annotate("as quick", (high, high), (6, -12), textcoords="offset points")
    axes.set(xlim=(0.9, most), ylim=(0.85, high))
    axes.set_title("Compiled PyTorch steps and other ways to save memory, within the same peak")
    axes.set(xlabel="quickest other way, time over eager's", ylabel="compiled, time over eager's")
    axes.legend(loc="upper right", ncols=2)


def whole_steps(records: Sequence[dict[str, Any]]) -> Chart:
    """Return the times of whole steps against the memory of the process, network by network."""
    shown: dict[str, list[list[Any]]] = {}
    for run in (TrainingRecord.of(record) for record in records):
        if run.peak_bytes is not None and run.time_ratio is not None:
            panel = shown.setdefault(f"{run.network}, {run.optimizer}", [])
            kind = "compiled" if run.own and run.kind != SAFE else run.kind
            panel.append([kind, run.peak_bytes / _MIB, run.time_ratio])
    down = -(-len(shown) // 2)
    return Chart(shown=shown, paint=_paint_whole_steps, height_inches=0.9 + 2.3 * down)


def _paint_whole_steps(figure: Any, shown: Any) -> None:
    panels = _panels(figure, len(shown), 2)
    kinds = list(dict.fromkeys(kind for points in shown.values() for kind, _, _ in points))
    peers = [kind for kind in kinds if kind != "compiled"]
    for axes, (heading, points) in zip(panels, shown.items(), strict=False):
        own = sorted((x, y) for kind, x, y in points if kind == "compiled")
        if own:
            axes.plot(*zip(*own, strict=True), "o-", color=BLUE, linewidth=1, label="compiled")
        for place, peer in enumerate(peers):
            at = [(x, y) for kind, x, y in points if kind == peer]
            colour = COLOURS[1:][place % len(COLOURS[1:])]
            if at:
                axes.scatter(*zip(*at, strict=True), color=colour, marker="sD^vP*X"[place % 7],
                             s=34, label=peer)  # fmt: skip
        axes.set_title(heading)
        most = [1.08 * max(point[place] for point in points) for place in (1, 2)]
        axes.set(xlim=(0, most[0]), ylim=(0, most[1]), xlabel="peak of the process [MiB]")
    named = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3)
    figure.supylabel("time of a step, over eager's", fontsize=9)


# -- what memory costs -----------------------------------------------------------------------------


def overheads(records: Sequence[dict[str, Any]]) -> Chart:
    """Return the overhead against the budget for each published graph and device."""
    shown: dict[str, dict[str, list[list[float]]]] = {}
    for run in of_goal(records, 1):
        ratio = run.overhead_ratio
        if ratio is None or run.cell["deadline"] or run.cell["ram"].startswith("floor"):
            continue
        lines = shown.setdefault(run.cell["model"], {})
        share = float(run.cell["ram"].rstrip("%"))
        lines.setdefault(run.cell["device"], []).append([share, 100 * ratio])
    return Chart(shown=shown, paint=_paint_overheads, height_inches=4.4)


def _paint_overheads(figure: Any, shown: Any) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    panels = _panels(figure, len(shown), _COLUMNS, spare=1, sharex=True, sharey=True)
    for axes, (model, lines) in zip(panels, shown.items(), strict=False):
        axes.set_title(model.removeprefix("paper/"))
        for device, points in sorted(lines.items()):
            colour, width = _DEVICES.get(device, (GREY, 1.0))
            label = device.removeprefix("paper-").upper()
            xs, ys = zip(*points, strict=True)
            axes.plot(
                xs, ys, "o-", color=colour, linewidth=width, markersize=width + 2, label=label
            )
        axes.set(yscale="log", xlim=(0, 95), xticks=(20, 50, 80))
        axes.yaxis.set_major_locator(LogLocator(numticks=12))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g} %")
        axes.xaxis.set_major_formatter("{x:g} %")
        axes.xaxis.set_tick_params(labelbottom=True)
    names = panels[0].get_legend_handles_labels()
    panels[-1].legend(*names, loc="center", title="device")
    figure.supxlabel("RAM, of what keeping everything takes", fontsize=9)
    figure.supylabel("energy beyond one pass", fontsize=9)


# -- scale -----------------------------------------------------------------------------------------


def points(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[Point]]:
    """Return what is plotted: BERT of all sizes, by device and budget.

    Returns
    -------
    dict
        Lists of nodes, time to a gap of 1 % or else to the end [s], whether that gap was proved,
        and memory [B].
    """
    found: dict[tuple[str, str], list[Point]] = {key: [] for key in _STYLE}
    for record in records:
        run = SolveRecord(record)
        cell = run.cell
        key = cell["device"], cell["ram"]
        is_bert = cell["model"].startswith("paper/bert") and cell["goal"] in (1, 4)
        if key not in found or not is_bert or cell["deadline"] or "graph_nodes" not in record:
            continue
        seconds = run.time_to(ONE_PERCENT)
        found[key].append(
            (
                record["graph_nodes"],
                run.seconds if seconds is None else seconds,
                seconds is not None,
                record["peak_memory_bytes"],
            )
        )
    return {key: sorted(values) for key, values in found.items() if values}


def scale(records: Sequence[dict[str, Any]]) -> Chart:
    """Return time and memory against the number of nodes."""
    shown = [[*key, values] for key, values in points(records).items()]
    return Chart(shown=shown, paint=_paint_scale)


def _paint_scale(figure: Any, shown: Any) -> None:
    from matplotlib.ticker import NullLocator

    left, right = figure.subplots(1, 2)
    for device, ram, values in shown:
        colour, marker = _STYLE[device, ram]
        nodes, seconds, proved, memory = zip(*values, strict=True)
        name = f"{device}, {ram}"
        for axes, heights in ((left, seconds), (right, [value / _GIB for value in memory])):
            axes.plot(nodes, heights, color=colour, linewidth=1)
            faces = [colour if done else "white" for done in proved]
            axes.scatter(
                nodes, heights, c=faces, edgecolors=colour, marker=marker, label=name, zorder=3
            )
    left.set(xscale="log", yscale="log", xlabel="nodes", title="Time to a gap of 1 %")
    right.set(xscale="log", xlabel="nodes", title="Memory of the process", ylim=(0, None))
    ticks = sorted({point[0] for *_, values in shown for point in values})
    for axes in (left, right):
        axes.set_xticks(ticks, labels=[f"{tick:,}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
    left.yaxis.set_major_formatter("{x:g} s")
    right.yaxis.set_major_formatter("{x:g} GiB")
    words = {"title": "hollow: limit reached", "title_fontsize": 9, "ncols": 4}
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", **words)


# -- the least RAM ---------------------------------------------------------------------------------


def least_ram(records: Sequence[Mapping[str, Any]]) -> Chart:
    """Return the RAM of keep-all and the least that was found, by network and kind of storage."""
    least = trains.of_part(records, LEAST)
    sizes: dict[tuple[str, str], list[int]] = {}
    for run in least:
        if run.cell["paging"] and run.cell["graph"] in (IN_PLACE, TILES) and run.found:
            place = run.cell["network"], run.cell["device"]
            sizes.setdefault(place, []).append(run.least_bytes[1])
    shown = {}
    for network in SMALL:
        kept = trains.first(least, network=network, graph=STATE, paging=False)
        paged, mapped = (sizes.get((network, device)) for device in (PAGED, MAPPED))
        if kept and paged and mapped:
            shown[network] = [kept.record["keep_all_bytes"], min(paged), min(mapped)]
    return Chart(shown=shown, paint=_paint_least)


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
    shown = {}
    for run, kept in boards.smallest(records):
        sizes = [kept["ram_bytes"], run["ram_bytes"], run.ram_limit_bytes]
        more = run["instructions"] / kept["instructions"]
        shown[boards.named(run.network).replace("`", "")] = [*sizes, more, run.place[0]]
    return Chart(shown=shown, paint=_paint_exported, height_inches=3.6)


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
