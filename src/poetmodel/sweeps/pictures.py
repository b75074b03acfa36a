"""Draw panels and maps with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from poetmodel.files import write_bytes
from poetmodel.report.drawing import check_picture
from poetmodel.report.pictures import Kind, Map, Panel
from poetmodel.report.still import PICTURE_LIBRARIES, SETTINGS, draw_map, encode_figure
from poetmodel.sweeps.panels import digest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PANEL_INCHES: Final = (2.5, 2.3)
"""Width and height of a panel [in]."""
MAP_INCHES: Final = (3.75, 4.0)
"""Width and height of a map [in]."""
TICKS: Final = 6
"""Maximum number of labelled powers of ten on a logarithmic axis."""
FEW_DECADES: Final = 100
"""Ratio of an axis's ends below which ticks between powers of ten are labelled, too."""
LEGEND: Final = 4
"""Columns of the legend."""
MARKS: Final = "osv^D<>PX*"
"""Markers of lines, in turn."""


def check_suffix(path: Path) -> None:
    """Raise if a picture with this name cannot be drawn. Writes no file."""
    check_picture(path, PICTURE_LIBRARIES)


def draw(path: Path, shown: Sequence[Panel] | Sequence[Map]) -> None:
    """Draw panels or maps into a file, with at most three panels or two maps in a row.

    Equal data give equal bytes.
    """
    check_suffix(path)
    file_format = path.suffix[1:].lower()
    write_bytes(path, sheet(shown, file_format, note=f"data {digest(shown)}"))


def sheet(shown: Sequence[Panel] | Sequence[Map], file_format: str, *, note: str) -> bytes:
    """Return the content of a picture file with panels or maps and a note in its metadata.

    Formats are png, svg and pdf. Equal data give equal bytes.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    maps = [panel for panel in shown if isinstance(panel, Map)]
    lines = [panel for panel in shown if isinstance(panel, Panel)]
    n_columns = max(1, min(2 if maps else 3, len(shown)))
    n_rows = max(1, -(-len(shown) // n_columns))
    width, height = MAP_INCHES if maps else PANEL_INCHES
    names = list(dict.fromkeys(name for panel in lines for name, _ in panel.lines))
    with mpl.rc_context(SETTINGS | {"font.size": 8, "axes.titlesize": 8}):
        size = (width * n_columns, height * n_rows + 0.2 * -(-len(names or Kind) // LEGEND) + 0.1)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
        handles: dict[str, Any] = {}
        for axis, panel in zip(axes, lines, strict=False):
            handles = _draw_panel(axis, panel, names) | handles
        for axis, schedule_map in zip(axes, maps, strict=False):
            handles |= draw_map(axis, schedule_map)
        names += [str(kind) for kind in Kind]
        for axis in axes[len(shown) :]:
            axis.set_axis_off()
        if handles:
            legend_names = [name for name in names if name in handles]
            legend_shapes = [handles[name] for name in legend_names]
            figure.legend(
                legend_shapes, legend_names, loc="outside lower center", ncols=LEGEND, frameon=False
            )
        return encode_figure(figure, file_format, note=note)


def _draw_panel(axis: Any, panel: Panel, names: Sequence[str]) -> dict[str, Any]:
    """Draw one panel; return the drawn lines by name."""
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
            zorder=2 if main else 3,  # methods that reach the optimum stay visible
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


def _set_overheads(axis: Any, overheads: Sequence[float]) -> None:
    """Scale the axis logarithmically; linearly below the smallest positive overhead if one is 0."""
    from matplotlib.ticker import LogLocator, NullLocator, SymmetricalLogLocator

    positive_overheads = [overhead for overhead in overheads if overhead > 0]
    if not positive_overheads:
        axis.yaxis.set_major_formatter("{x:g} %")
        return
    smallest, largest = min(positive_overheads), max(positive_overheads)
    tick_factors = (1, 2, 5) if largest < FEW_DECADES * smallest else (1,)
    if len(positive_overheads) == len(overheads):
        axis.set_yscale("log")
        ticks: Any = LogLocator(subs=tick_factors, numticks=TICKS)
    else:
        axis.set_yscale("symlog", linthresh=smallest)
        axis.set_ylim(bottom=0)
        ticks = SymmetricalLogLocator(base=10, linthresh=smallest, subs=tick_factors)
        ticks.set_params(numticks=TICKS)
    axis.yaxis.set_major_locator(ticks)
    axis.yaxis.set_major_formatter("{x:g} %")
    axis.yaxis.set_minor_locator(NullLocator())
