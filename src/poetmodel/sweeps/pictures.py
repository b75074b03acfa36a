"""Draw panels and maps with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from poetmodel.files import write_bytes
from poetmodel.report.drawing import check_picture
from poetmodel.report.pictures import Kind, Map, Panel
from poetmodel.report.still import PICTURE_LIBRARIES, SETTINGS, draw_map, encode_figure
from poetmodel.sweeps.panels import data_digest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PANEL_INCHES: Final = (2.5, 2.3)
"""Width and height of a panel [in]."""
MAP_INCHES: Final = (3.75, 4.0)
"""Width and height of a map [in]."""
MAX_TICKS: Final = 6
"""Maximum number of labelled powers of ten on a logarithmic axis."""
MAX_LABELLED_RATIO: Final = 100
"""Ratio of largest to smallest positive overhead below which ticks between powers of ten are
labelled."""
LEGEND_COLUMNS: Final = 4
"""Maximum number of columns of the legend."""
MARKERS: Final = "osv^D<>PX*"
"""Markers of lines; they repeat if there are more lines."""


def check_suffix(path: Path) -> None:
    """Check that a picture can be drawn: the suffix .png, .svg or .pdf, and its library."""
    check_picture(path, PICTURE_LIBRARIES)


def draw(path: Path, panels: Sequence[Panel] | Sequence[Map]) -> None:
    """Draw panels or maps into a file, with at most three panels or two maps in a row.

    With one version of matplotlib, equal data produce equal bytes.
    """
    check_suffix(path)
    file_format = path.suffix[1:].lower()
    write_bytes(path, render_sheet(panels, file_format, note=f"data {data_digest(panels)}"))


def render_sheet(panels: Sequence[Panel] | Sequence[Map], file_format: str, *, note: str) -> bytes:
    """Return the content of a picture file with panels or maps and a note in its metadata.

    Call `check_suffix` before: matplotlib may be missing.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    maps = [panel for panel in panels if isinstance(panel, Map)]
    line_panels = [panel for panel in panels if isinstance(panel, Panel)]
    n_columns = max(1, min(2 if maps else 3, len(panels)))
    n_rows = max(1, -(-len(panels) // n_columns))
    width, height = MAP_INCHES if maps else PANEL_INCHES
    line_names = list(dict.fromkeys(name for panel in line_panels for name, _ in panel.lines))
    with mpl.rc_context(SETTINGS | {"font.size": 8, "axes.titlesize": 8}):
        size = (
            width * n_columns,
            height * n_rows + 0.2 * -(-len(line_names or Kind) // LEGEND_COLUMNS) + 0.1,
        )
        figure = Figure(figsize=size, layout="constrained")
        all_axes = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
        handles: dict[str, Any] = {}
        for axes, panel in zip(all_axes, line_panels, strict=False):
            handles = _draw_panel(axes, panel, line_names) | handles
        for axes, schedule_map in zip(all_axes, maps, strict=False):
            handles |= draw_map(axes, schedule_map)
        line_names += [str(kind) for kind in Kind]
        for axes in all_axes[len(panels) :]:
            axes.set_axis_off()
        if handles:
            legend_names = [name for name in line_names if name in handles]
            legend_shapes = [handles[name] for name in legend_names]
            figure.legend(
                legend_shapes,
                legend_names,
                loc="outside lower center",
                ncols=LEGEND_COLUMNS,
                frameon=False,
            )
        return encode_figure(figure, file_format, note=note)


def _draw_panel(axes: Any, panel: Panel, line_names: Sequence[str]) -> dict[str, Any]:
    """Draw one panel; return its lines with points by name. `line_names` determine the styles."""
    handles = {}
    for name, points in panel.lines:
        if not points:
            continue
        style_index = line_names.index(name)
        is_optimal = name == "optimal"
        (handles[name],) = axes.plot(
            *zip(*points, strict=True),
            color="black" if is_optimal else f"C{style_index % 10}",
            linestyle="-" if is_optimal else ("--", ":", "-.")[style_index // 10 % 3],
            linewidth=1.8 if is_optimal else 0.9,
            marker=MARKERS[style_index % len(MARKERS)],
            markersize=3,
            # Lines that coincide with the optimum are in front of it.
            zorder=2 if is_optimal else 3,
        )
    axes.set(title=panel.title, xlabel=panel.x_name, ylabel=panel.y_name)
    axes.locator_params(axis="x", nbins=4)
    if panel.in_percent:
        _set_overhead_scale(axes, [y for _, points in panel.lines for _, y in points])
    axes.grid(visible=True, linewidth=0.2)
    if not handles:
        axes.annotate("no schedule", (0.5, 0.5), xycoords="axes fraction", ha="center")
        axes.set(xticks=(), yticks=())
    return handles


def _set_overhead_scale(axes: Any, overheads: Sequence[float]) -> None:
    """Scale the y axis logarithmically, and linearly near 0 if an overhead is 0."""
    from matplotlib.ticker import LogLocator, NullLocator, SymmetricalLogLocator

    positive_overheads = [overhead for overhead in overheads if overhead > 0]
    if not positive_overheads:
        axes.yaxis.set_major_formatter("{x:g} %")
        return
    smallest, largest = min(positive_overheads), max(positive_overheads)
    tick_factors = (1, 2, 5) if largest < MAX_LABELLED_RATIO * smallest else (1,)
    if len(positive_overheads) == len(overheads):
        axes.set_yscale("log")
        ticks: Any = LogLocator(subs=tick_factors, numticks=MAX_TICKS)
    else:
        axes.set_yscale("symlog", linthresh=smallest)
        axes.set_ylim(bottom=0)
        ticks = SymmetricalLogLocator(base=10, linthresh=smallest, subs=tick_factors)
        ticks.set_params(numticks=MAX_TICKS)
    axes.yaxis.set_major_locator(ticks)
    axes.yaxis.set_major_formatter("{x:g} %")
    axes.yaxis.set_minor_locator(NullLocator())
