"""Pictures of sweeps and figures: panels with lines, or maps of schedules."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from poetmodel.files import write_bytes
from poetmodel.report.charts import KINDS, map_chart
from poetmodel.report.drawing import check_picture
from poetmodel.report.pictures import COLOURS, Kind, Map, Panel, moves_in_words
from poetmodel.schedule import GraphIdentity, Schedule
from poetmodel.sweeps.runs import graph_of
from poetmodel.sweeps.summaries import grouped, overhead_ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from poetmodel.sweeps.tables import Row

FORMS: Final = dict.fromkeys((".png", ".svg", ".pdf"), ("matplotlib",))
"""Libraries that draw a picture, by the ending of its file."""
DOTS_PER_INCH: Final = 150
SETTINGS: Final[Any] = {"svg.hashsalt": "poetmodel", "svg.fonttype": "none"}
"""Settings that make equal pictures equal bytes, with text as text."""
PANEL_INCHES: Final = (2.5, 2.3)
"""Width and height of a panel [in]."""
MAP_INCHES: Final = (3.75, 4.0)
"""Width and height of a map [in]."""
TICKS: Final = 6
"""Most powers of ten that a logarithmic axis names."""
FEW_DECADES: Final = 100
"""Ratio of its ends below which it names numbers between these too."""
LEGEND: Final = 4
"""Columns of the legend."""
MARKS: Final = "osv^D<>PX*"
"""Markers of lines, in turn."""


def panels(
    name: str,
    rows: Sequence[Row],
    schedule_of: Callable[[str], Mapping[str, Any] | None] = lambda _: None,
) -> tuple[Panel, ...] | tuple[Map, ...]:
    """Return the picture of a figure, of rows as `poetmodel.sweeps.tables.rows` gives them.

    Maps are drawn of schedule files, whose content `schedule_of` finds by the key of a run.
    """
    if name == "figure2":
        return tuple(_maps(rows, schedule_of))
    return tuple((_peaks_and_times if name == "table3" else overheads)(rows))


def digest(shown: Sequence[Panel] | Sequence[Map]) -> str:
    """Return an identifier of a picture's content; its file carries it."""
    text = json.dumps([asdict(panel) for panel in shown])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _maps(
    rows: Sequence[Row], schedule_of: Callable[[str], Mapping[str, Any] | None]
) -> Iterable[Map]:
    """Yield the map of each schedule, with what it moves in its title."""
    for row in rows:
        document = schedule_of(row["key"])
        if document is None:
            continue
        graph = graph_of(row["model"])
        schedule = Schedule.of_entries(document, GraphIdentity.of(graph))
        place = f"{row['model']}, {row['device']}, {row['ram']}"
        title = f"{place}\n{moves_in_words(schedule)}"
        yield Map(title=title, chart=map_chart(graph, schedule))


def overheads(table: Sequence[Row]) -> tuple[Panel, ...]:
    """Return the energy overhead against the RAM budget: a panel per model, device and deadline.

    Each method is a line; where several solvers were used, so is each solver.
    """
    shown = []
    several = len({row["backend"] for row in table} - {None}) > 1
    for (model, device, deadline), rows in grouped(table, "model", "device", "deadline").items():
        lines = []
        for (method, backend), line in grouped(rows, "method", "backend").items():
            points = [
                (row["ram_budget_bytes"] / 1024, 100 * ratio)
                for row in line
                if (ratio := overhead_ratio(row)) is not None
            ]
            name = f"{method}, {backend}" if several and backend else method
            lines.append((name, tuple(sorted(points))))
        limit = "" if deadline is None else f"\ndeadline {deadline}"
        shown.append(
            Panel(
                title=f"{model}, {device}{limit}",
                x_name="RAM budget [KiB]",
                y_name="energy overhead",
                lines=tuple(lines),
            )
        )
    return tuple(shown)


def _peaks_and_times(table: Sequence[Row]) -> Iterable[Panel]:
    for (model, device), rows in grouped(table, "model", "device").items():
        lines = []
        for (method, deadline), line in grouped(rows, "method", "deadline").items():
            points = [
                (row["peak_ram_bytes"] / 1024, 1000 * row["makespan_s"])
                for row in line
                if row["energy_j"] is not None
            ]
            limit = "" if deadline is None else f", deadline {deadline}"
            lines.append((method + limit, tuple(sorted(points))))
        yield Panel(
            title=f"{model}, {device}",
            x_name="peak RAM [KiB]",
            y_name="time [ms]",
            lines=tuple(lines),
            in_percent=False,
        )


def check_form(path: Path) -> None:
    """Raise unless a picture of this name can be drawn; nothing is written."""
    check_picture(path, FORMS)


def draw(path: Path, shown: Sequence[Panel] | Sequence[Map]) -> None:
    """Draw panels or maps into a file, row by row; the same ones give the same bytes.

    At most three panels or two maps stand side by side.
    """
    check_form(path)
    form = path.suffix[1:].lower()
    write_bytes(path, sheet(shown, form, note=f"data {digest(shown)}"))


# -- drawing, by matplotlib -----------------------------------------------------------------------


def sheet(shown: Sequence[Panel] | Sequence[Map], form: str, *, note: str) -> bytes:
    """Return panels or maps, row by row, as the content of a file that bears a note.

    Forms are png, svg and pdf; the same ones give the same bytes.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    maps = [panel for panel in shown if isinstance(panel, Map)]
    lines = [panel for panel in shown if isinstance(panel, Panel)]
    across = max(1, min(2 if maps else 3, len(shown)))
    down = max(1, -(-len(shown) // across))
    width, height = MAP_INCHES if maps else PANEL_INCHES
    names = list(dict.fromkeys(name for panel in lines for name, _ in panel.lines))
    with mpl.rc_context(SETTINGS | {"font.size": 8, "axes.titlesize": 8}):
        size = (width * across, height * down + 0.2 * -(-len(names or Kind) // LEGEND) + 0.1)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(down, across, squeeze=False).ravel()
        handles: dict[str, Any] = {}
        for axis, panel in zip(axes, lines, strict=False):
            handles = _draw_panel(axis, panel, names) | handles
        for axis, drawn_panel in zip(axes, maps, strict=False):
            handles |= _draw_map(axis, drawn_panel)
        names += [str(kind) for kind in Kind]
        for axis in axes[len(shown) :]:
            axis.set_axis_off()
        if handles:
            drawn = [name for name in names if name in handles]
            shapes = [handles[name] for name in drawn]
            figure.legend(shapes, drawn, loc="outside lower center", ncols=LEGEND, frameon=False)
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form, {})
        metadata = {"Subject" if form == "pdf" else "Description": note} | undated
        written = io.BytesIO()
        figure.savefig(written, format=form, dpi=DOTS_PER_INCH, metadata=metadata)
        return written.getvalue()


def _draw_panel(axis: Any, panel: Panel, names: Sequence[str]) -> dict[str, Any]:
    """Draw one panel; return the lines by name."""
    handles = {}
    for name, points in panel.lines:
        if not points:
            continue
        slot = names.index(name)
        main = name == "optimal"
        (handles[name],) = axis.plot(
            *zip(*points, strict=True),
            color="black" if main else f"C{slot % 10}",
            linestyle="-" if main else ("--", ":", "-.")[slot // 10 % 3],
            linewidth=1.8 if main else 0.9,
            marker=MARKS[slot % len(MARKS)],
            markersize=3,
            zorder=2 if main else 3,  # what reaches the optimum is seen on it
        )
    axis.set(title=panel.title, xlabel=panel.x_name, ylabel=panel.y_name)
    axis.locator_params(axis="x", nbins=4)
    if panel.in_percent:
        _set_overheads(axis, [y for _, points in panel.lines for _, y in points])
    axis.grid(visible=True, linewidth=0.2)
    if not handles:
        axis.annotate("no schedule", (0.5, 0.5), xycoords="axes fraction", ha="center")
        axis.set(xticks=(), yticks=())
    return handles


def _draw_map(axis: Any, shown: Map) -> dict[str, Any]:
    """Draw one map, page-outs as marks over its cells; return a patch for each kind by its word."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Patch, Polygon, Rectangle

    names, labels = shown.chart["columns"], shown.chart["labels"]
    shapes: dict[Kind, list[Any]] = {kind: [] for kind in KINDS}
    for x, first, last, label in shown.chart["runs"]:
        number, is_marked, _ = labels[label]
        shapes[KINDS[number]].append(Rectangle((x - 0.5, first - 0.5), 1, last - first + 1))
        shapes[Kind.PAGED_OUT] += (
            Polygon([(x - 0.5, y + 0.5), (x + 0.5, y + 0.5), (x + 0.5, y - 0.5)])
            for y in range(first, last + 1)
            if is_marked
        )
    drawn = [kind for kind in KINDS if shapes[kind]]
    for kind in drawn:
        collection = PatchCollection(shapes[kind], facecolor=COLOURS[kind], linewidth=0)
        axis.add_collection(collection)
    axis.set(xlim=(-0.5, len(names) - 0.5), ylim=(len(names) - 0.5, -0.5), title=shown.title)
    axis.set(xlabel="node", ylabel="stage, by the node it first computes")
    axis.set_xticks(range(len(names)), names, rotation=90, fontsize=5)
    axis.set_yticks(range(len(names)), names, fontsize=5)
    axis.set_axisbelow(True)
    axis.grid(visible=True, linewidth=0.1)
    return {str(kind): Patch(facecolor=COLOURS[kind]) for kind in drawn}


def _set_overheads(axis: Any, overheads: Sequence[float]) -> None:
    """Scale the axis logarithmically; where overheads are 0, linearly below the least other."""
    from matplotlib.ticker import LogLocator, NullLocator, SymmetricalLogLocator

    positive = [overhead for overhead in overheads if overhead > 0]
    if not positive:
        axis.yaxis.set_major_formatter("{x:g} %")
        return
    least, most = min(positive), max(positive)
    steps = (1, 2, 5) if most < FEW_DECADES * least else (1,)
    if len(positive) == len(overheads):
        axis.set_yscale("log")
        ticks: Any = LogLocator(subs=steps, numticks=TICKS)
    else:
        axis.set_yscale("symlog", linthresh=least)
        axis.set_ylim(bottom=0)
        ticks = SymmetricalLogLocator(base=10, linthresh=least, subs=steps)
        ticks.set_params(numticks=TICKS)
    axis.yaxis.set_major_locator(ticks)
    axis.yaxis.set_major_formatter("{x:g} %")
    axis.yaxis.set_minor_locator(NullLocator())
