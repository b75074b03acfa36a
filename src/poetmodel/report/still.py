"""Still images of a schedule or plan, as SVG, PNG or PDF, drawn by matplotlib."""

from __future__ import annotations

import io
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.ram import KIND_NAMES, kind_index
from poetmodel.report.charts import KINDS
from poetmodel.report.pictures import COLOURS, RAM_KIND_COLOURS, Kind
from poetmodel.report.timeline import FIRST_READ, LETTERS, ORIGINS, RECOMPUTATION
from poetmodel.schedule.instructions import Op
from poetmodel.schedule.machine import Origin
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from poetmodel.graph import Graph
    from poetmodel.report.pictures import Map

    BandSegments = list[list[float]]
    """Consecutive segments of a band: start and end on the time axis, lower and upper edge."""

PICTURE_LIBRARIES: Final = dict.fromkeys((".png", ".svg", ".pdf"), ("matplotlib",))
"""Libraries that draw a still image, by file suffix."""
DOTS_PER_INCH: Final = 150
"""Resolution of PNG images."""
SETTINGS: Final[Any] = {
    "svg.hashsalt": "poetmodel",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],  # part of matplotlib
}
"""Settings of matplotlib: equal images have equal bytes, SVG files store text as text, and dollar
signs do not begin formulas."""
MAX_NAMES: Final = 260
"""Maximum number of names on the axis of a map; if there are more nodes, only each second, third,
... has its name."""
CELL_INCHES: Final = 0.09
"""Width and height of the image of a map for each node [in]."""
MIN_INCHES, MAX_INCHES = 4.0, 24.0
"""Smallest and largest side of the image of a map [in]."""
MAX_CHARACTERS: Final = 40
"""Maximum length of a name on an axis."""
TIMELINE_INCHES: Final = (7.2, 3.6)
"""Width and height of the stack of a timeline [in]."""
LANE_INCHES: Final = 0.26
"""Height of a lane of a timeline [in]."""
_ORIGIN_KINDS: Final = {Origin.RECOMPUTED: Kind.RECOMPUTED, Origin.PAGED_IN: Kind.PAGED_IN}
"""Kinds of copies and workspaces by origin; with another origin, these have the colour of their
kind of RAM use."""
_LANES: Final[Mapping[str, Mapping[str, Kind]]] = {
    "core": {
        LETTERS[Op.COMPUTE]: Kind.COMPUTED,
        RECOMPUTATION: Kind.RECOMPUTED,
        LETTERS[Op.WAIT]: Kind.STALL,
    },
    "bus": {
        LETTERS[Op.PAGE_IN]: Kind.PAGED_IN,
        FIRST_READ: Kind.PAGED_IN,
        LETTERS[Op.PAGE_OUT]: Kind.PAGED_OUT,
    },
}
"""Kinds of the bars of each lane, by the letter of the instruction."""
_BUDGET_COLOUR: Final = "#B2182B"
_KEEP_ALL_COLOURS: Final = ("#DDDDDD", "#767676")
"""Colours of the area and of the line of keep-all."""


def draw_timeline(graph: Graph, chart: Mapping[str, Any], title: str, file_format: str) -> bytes:
    """Draw the work of core and bus over time, and RAM below it; return the content of the file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    lanes = {name: _lane_bars(chart, kind_by_letter) for name, kind_by_letter in _LANES.items()}
    lanes = {name: bars for name, bars in lanes.items() if bars}
    width, stack_inches = TIMELINE_INCHES
    heights = [LANE_INCHES * len(lanes) + 0.1, stack_inches]
    with mpl.rc_context(SETTINGS | {"font.size": 8, "axes.titlesize": 9}):
        figure = Figure(figsize=(width, sum(heights) + 0.9), layout="constrained")
        lane_axes, stack_axes = figure.subplots(2, 1, sharex=True, height_ratios=heights)
        _draw_lanes(lane_axes, lanes)
        lane_axes.set_title(replace_missing_glyphs(title))
        draw_stack(stack_axes, graph, chart)
        figure.legend(
            handles=_legend_handles(lanes, stack_axes),
            loc="outside lower center",
            ncols=4,
            frameon=False,
        )
        return encode_figure(figure, file_format, note=title)


def draw_stage_map(stage_map: Map, file_format: str) -> bytes:
    """Draw the map of a schedule, stages by nodes; return the content of the file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    side_inches = min(MAX_INCHES, max(MIN_INCHES, CELL_INCHES * len(stage_map.chart["columns"])))
    with mpl.rc_context(SETTINGS | {"font.size": 8, "axes.titlesize": 9}):
        figure = Figure(figsize=(side_inches, side_inches), layout="constrained")
        patches = draw_map(figure.subplots(), stage_map)
        figure.legend(
            list(patches.values()),
            list(patches),
            loc="outside lower center",
            ncols=3,
            frameon=False,
        )
        return encode_figure(figure, file_format, note=stage_map.title)


def encode_figure(figure: Any, file_format: str, *, note: str) -> bytes:
    """Encode a matplotlib figure as a file with a note in its metadata.

    If `SETTINGS` are active, equal figures have equal bytes in the same version of matplotlib.
    """
    date_metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(file_format, {})
    metadata = {"Subject" if file_format == "pdf" else "Description": note} | date_metadata
    stream = io.BytesIO()
    figure.savefig(stream, format=file_format, dpi=DOTS_PER_INCH, metadata=metadata)
    return stream.getvalue()


def replace_missing_glyphs(text: str) -> str:
    """Replace the characters that the font lacks by question marks, except line breaks."""
    return "".join(
        character if character == "\n" or ord(character) in _glyphs() else "?" for character in text
    )


def _shorten(name: str) -> str:
    """Replace the middle of a name with more than `MAX_CHARACTERS` characters by two dots."""
    half = MAX_CHARACTERS // 2 - 1
    return name if len(name) <= MAX_CHARACTERS else f"{name[:half]}..{name[-half:]}"


@cache
def _glyphs() -> frozenset[int]:
    """Return the code points of all characters in the font of pictures."""
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


# -- maps ------------------------------------------------------------------------------------------


def draw_map(axes: Any, stage_map: Map) -> dict[str, Any]:
    """Draw a map, with page-outs as marks on its cells; return legend patches by drawn kind."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Patch, Polygon, Rectangle

    labels = stage_map.chart["labels"]
    names = [_shorten(replace_missing_glyphs(name)) for name in stage_map.chart["columns"]]
    shapes_by_kind: dict[Kind, list[Any]] = {kind: [] for kind in KINDS}
    for x, first, last, label in stage_map.chart["runs"]:
        action_index, is_marked, _ = labels[label]
        shapes_by_kind[KINDS[action_index]].append(
            Rectangle((x - 0.5, first - 0.5), 1, last - first + 1)
        )
        shapes_by_kind[Kind.PAGED_OUT] += (
            Polygon([(x - 0.5, y + 0.5), (x + 0.5, y + 0.5), (x + 0.5, y - 0.5)])
            for y in range(first, last + 1)
            if is_marked
        )
    drawn_kinds = [kind for kind in KINDS if shapes_by_kind[kind]]
    for kind in drawn_kinds:
        collection = PatchCollection(shapes_by_kind[kind], facecolor=COLOURS[kind], linewidth=0)
        axes.add_collection(collection)
    axes.set(
        xlim=(-0.5, len(names) - 0.5),
        ylim=(len(names) - 0.5, -0.5),
        title=replace_missing_glyphs(stage_map.title),
    )
    axes.set(xlabel="node", ylabel="stage (its first computation)")
    name_interval = -(-len(names) // MAX_NAMES)
    named_positions = range(0, len(names), name_interval)
    axes.set_xticks(named_positions, names[::name_interval], rotation=90, fontsize=5)
    axes.set_yticks(named_positions, names[::name_interval], fontsize=5)
    axes.set_axisbelow(True)
    axes.grid(visible=True, linewidth=0.1)
    return {str(kind): Patch(facecolor=COLOURS[kind]) for kind in drawn_kinds}


# -- timelines -------------------------------------------------------------------------------------


def stack_bands(graph: Graph, chart: Mapping[str, Any]) -> Iterator[tuple[str, BandSegments]]:
    """Yield (band kind, segments) of each copy and workspace in RAM, from the bottom of the stack.

    A segment is [start, end, lower edge, upper edge] in the chart's units. Bytes that an output
    overwrites in place count for the output from then on.
    """
    end_times = list(chart["issued"][:-1])
    for position, _, end in chart["work"]:
        if chart["ops"][position] not in (LETTERS[Op.PAGE_IN], LETTERS[Op.PAGE_OUT]):
            end_times[position] = end
    times = [time for pair in zip(chart["issued"], end_times, strict=False) for time in pair]
    times.append(chart["issued"][-1])
    base_bytes = {
        interval: 0 for interval in range(len(times) - 1) if times[interval + 1] > times[interval]
    }
    copies = sorted(
        (kind_index(graph, copy[0] if copy[0] >= 0 else None), max(copy[2], 0), -copy[3], copy)
        for copy in chart["stays"]
    )
    for name_index, begin, _, copy in copies:
        _, size, _, end, origin, _, overwrite_position, overwritten_bytes, *_ = copy
        segments: BandSegments = []
        for interval in range(2 * begin, min(2 * end + 1, len(times) - 1)):
            if interval not in base_bytes:
                continue
            lower_bytes = base_bytes[interval]
            base_bytes[interval] += size - (
                overwritten_bytes if 0 <= overwrite_position <= interval // 2 else 0
            )
            edges = [lower_bytes / chart["scale"], base_bytes[interval] / chart["scale"]]
            if segments and segments[-1][1:] == [times[interval], *edges]:
                segments[-1][1] = times[interval + 1]
            else:
                segments.append([times[interval], times[interval + 1], *edges])
        if segments:
            yield _ORIGIN_KINDS.get(ORIGINS[origin], KIND_NAMES[name_index]), segments


def keep_all_curve(chart: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return the points (time, RAM) of keep-all, a step function in the units of the chart."""
    positions, ram_values = chart["ghost"]
    points = [
        (chart["issued"][position], ram_bytes / chart["scale"])
        for position, ram_bytes in zip(positions, ram_values, strict=True)
    ]
    return [*points, (chart["issued"][-1], points[-1][1])]


def band_outline(segments: BandSegments) -> list[tuple[float, float]]:
    """Return the corners of a band: along its upper edge, and back along its lower edge."""
    upper_edge = [(time, segment[3]) for segment in segments for time in segment[:2]]
    lower_edge = [(time, segment[2]) for segment in segments for time in segment[:2]]
    return [*upper_edge, *reversed(lower_edge)]


def band_colour(band_kind: str) -> str:
    """Return the colour of a band kind of `stack_bands`."""
    return (
        COLOURS[Kind(band_kind)]
        if band_kind in tuple(Kind)
        else RAM_KIND_COLOURS[KIND_NAMES.index(band_kind)][0]
    )


def _lane_bars(
    chart: Mapping[str, Any], kind_by_letter: Mapping[str, Kind]
) -> list[tuple[Kind, float, float]]:
    """Return (kind, start, length) of the bars of a lane, in program order and the chart's unit.

    Work whose letter `kind_by_letter` lacks has no bar in the lane.
    """
    return [
        (kind_by_letter[letter], start, end - start)
        for position, start, end in chart["work"]
        if (letter := chart["ops"][position]) in kind_by_letter
    ]


def _draw_lanes(axes: Any, lanes: Mapping[str, Sequence[tuple[Kind, float, float]]]) -> None:
    """Draw one row of bars for each lane, the first on top; stalls are hatched."""
    for lane_index, lane_bars in enumerate(lanes.values()):
        for kind in dict.fromkeys(kind for kind, *_ in lane_bars):
            bar_spans = [
                (start, length) for bar_kind, start, length in lane_bars if bar_kind == kind
            ]
            hatch = "////" if kind == Kind.STALL else None
            axes.broken_barh(
                bar_spans,
                (lane_index - 0.4, 0.8),
                facecolor=COLOURS[kind],
                linewidth=0,
                hatch=hatch,
            )
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.tick_params(bottom=False, left=False, labelbottom=False)
    axes.spines[:].set_visible(False)


def draw_stack(axes: Any, graph: Graph, chart: Mapping[str, Any]) -> None:
    """Draw the RAM of keep-all as an area, the bands of `stack_bands` on it, and the budget."""
    from matplotlib.collections import PolyCollection

    outlines_by_kind: dict[str, list[Any]] = {}
    for band_kind, segments in stack_bands(graph, chart):
        outlines_by_kind.setdefault(band_kind, []).append(band_outline(segments))
    x, y = zip(*keep_all_curve(chart), strict=True)
    fill_colour, line_colour = _KEEP_ALL_COLOURS
    axes.fill_between(x, y, step="post", color=fill_colour, linewidth=0, zorder=0.5)
    peak_text = format_bytes(round(max(y) * chart["scale"]))
    axes.step(x, y, where="post", color=line_colour, linewidth=0.8, label=f"keep-all: {peak_text}")
    for band_kind in (*KIND_NAMES, *_ORIGIN_KINDS.values()):
        if band_kind in outlines_by_kind:
            axes.add_collection(
                PolyCollection(
                    outlines_by_kind[band_kind],
                    facecolor=band_colour(band_kind),
                    edgecolor="#ffffff",
                    linewidth=0.25,
                    label=f"{band_kind} copy" if band_kind in tuple(Kind) else band_kind,
                )
            )
    max_ram = max(y)
    if chart.get("budget") is not None:
        budget_ram = chart["budget"] / chart["scale"]
        budget_name = f"budget: {format_bytes(chart['budget'])}"
        axes.axhline(
            budget_ram, color=_BUDGET_COLOUR, linewidth=1, linestyle="--", label=budget_name
        )
        max_ram = max(max_ram, budget_ram)
    max_ram = max(max_ram, max(chart["during"], default=0) / chart["scale"])
    axes.set(xlim=(0, x[-1]), ylim=(0, 1.06 * max_ram))
    axes.set(xlabel=f"time [{chart['unit']}]", ylabel=f"RAM [{chart['size']}]")
    axes.spines[["top", "right"]].set_visible(False)


def _legend_handles(
    lanes: Mapping[str, Sequence[tuple[Kind, float, float]]], stack_axes: Any
) -> list[Any]:
    """Return legend handles: one for each kind of bar in the lanes, then those of the RAM stack."""
    from matplotlib.patches import Patch

    kinds = dict.fromkeys(kind for lane_bars in lanes.values() for kind, *_ in lane_bars)
    return [
        *(Patch(facecolor=COLOURS[kind], label=str(kind)) for kind in kinds),
        *stack_axes.get_legend_handles_labels()[0],
    ]
