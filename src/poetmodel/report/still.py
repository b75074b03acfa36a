"""Still images of a schedule or plan, as SVG, PNG or PDF, drawn by matplotlib."""

from __future__ import annotations

import io
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.ram import KIND_NAMES, kind_index
from poetmodel.report.charts import KINDS
from poetmodel.report.pictures import COLOURS, PART_COLOURS, Kind
from poetmodel.report.timeline import AGAIN, FIRST_READ, LETTERS, ORIGINS
from poetmodel.schedule.instructions import Op
from poetmodel.schedule.machine import Origin
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from poetmodel.graph import Graph
    from poetmodel.report.pictures import Map

    Runs = list[list[float]]
    """Consecutive segments of a band: start time, end time, lower and upper edge."""

PICTURE_LIBRARIES: Final = dict.fromkeys((".png", ".svg", ".pdf"), ("matplotlib",))
"""Libraries that draw a still image, by file suffix."""
DOTS_PER_INCH: Final = 150
SETTINGS: Final[Any] = {
    "svg.hashsalt": "poetmodel",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],  # part of matplotlib
}
"""Settings for which equal images have equal bytes, and text is stored as text."""
MAX_NAMES: Final = 260
"""Maximum number of names on the axis of a map; for more nodes, each second, third, ... is
named."""
MAP_INCHES: Final = 0.09
"""Width and height of a cell of a map [in]."""
MIN_INCHES, MAX_INCHES = 4.0, 24.0
"""Limits of the sides of a map [in]."""
MAX_CHARACTERS: Final = 40
"""Maximum length of a name on an axis."""
TIMELINE_INCHES: Final = (7.2, 3.6)
"""Width and height of the stack of a timeline [in]."""
LANE_INCHES: Final = 0.26
"""Height of a lane of a timeline [in]."""
_ORIGIN_KINDS: Final = {Origin.RECOMPUTED: Kind.RECOMPUTED, Origin.PAGED_IN: Kind.PAGED_IN}
"""Kinds of copies by origin, except the first computation."""
_LANES: Final[Mapping[str, Mapping[str, Kind]]] = {
    "core": {
        LETTERS[Op.COMPUTE]: Kind.COMPUTED,
        AGAIN: Kind.RECOMPUTED,
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


def draw_timeline(graph: Graph, chart: Mapping[str, Any], title: str, form: str) -> bytes:
    """Draw the RAM of a plan over time, below core and bus; return the content of the file.

    Parameters
    ----------
    graph : Graph
        The training graph.
    chart : mapping
        Data of the timeline, as `poetmodel.report.timeline.plan_chart` returns it, with times.
    title : str
        Title of the image.
    form : str
        svg, png or pdf.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    lanes = {name: _bars(chart, kinds) for name, kinds in _LANES.items()}
    lanes = {name: bars for name, bars in lanes.items() if bars}
    width, stack_inches = TIMELINE_INCHES
    heights = [LANE_INCHES * len(lanes) + 0.1, stack_inches]
    with mpl.rc_context(SETTINGS | {"font.size": 8, "axes.titlesize": 9}):
        figure = Figure(figsize=(width, sum(heights) + 0.9), layout="constrained")
        top, stack = figure.subplots(2, 1, sharex=True, height_ratios=heights)
        _draw_lanes(top, lanes)
        top.set_title(replace_missing_glyphs(title))
        _draw_stack(stack, graph, chart)
        figure.legend(
            handles=_legend(lanes, stack), loc="outside lower center", ncols=4, frameon=False
        )
        return encode_figure(figure, form, note=title)


def draw_stage_map(stage_map: Map, form: str) -> bytes:
    """Draw the map of a schedule, stages by nodes; return the content of the file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    side = min(MAX_INCHES, max(MIN_INCHES, MAP_INCHES * len(stage_map.chart["columns"])))
    with mpl.rc_context(SETTINGS | {"font.size": 8, "axes.titlesize": 9}):
        figure = Figure(figsize=(side, side), layout="constrained")
        patches = draw_map(figure.subplots(), stage_map)
        figure.legend(
            list(patches.values()),
            list(patches),
            loc="outside lower center",
            ncols=3,
            frameon=False,
        )
        return encode_figure(figure, form, note=stage_map.title)


def encode_figure(figure: Any, form: str, *, note: str) -> bytes:
    """Encode a matplotlib figure as a file with a note in its metadata; return the content.

    Equal figures have equal bytes.
    """
    date_metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form, {})
    metadata = {"Subject" if form == "pdf" else "Description": note} | date_metadata
    stream = io.BytesIO()
    figure.savefig(stream, format=form, dpi=DOTS_PER_INCH, metadata=metadata)
    return stream.getvalue()


def replace_missing_glyphs(text: str) -> str:
    """Replace the characters that the font lacks by question marks."""
    return "".join(c if c == "\n" or ord(c) in _glyphs() else "?" for c in text)


def _shorten(name: str) -> str:
    """Replace the middle of a long name by dots."""
    half = MAX_CHARACTERS // 2 - 1
    return name if len(name) <= MAX_CHARACTERS else f"{name[:half]}..{name[-half:]}"


@cache
def _glyphs() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


# -- maps ------------------------------------------------------------------------------------------


def draw_map(axis: Any, stage_map: Map) -> dict[str, Any]:
    """Draw a map, with page-outs as marks on its cells; return one patch per kind by its name."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Patch, Polygon, Rectangle

    labels = stage_map.chart["labels"]
    names = [_shorten(replace_missing_glyphs(name)) for name in stage_map.chart["columns"]]
    shapes: dict[Kind, list[Any]] = {kind: [] for kind in KINDS}
    for x, first, last, label in stage_map.chart["runs"]:
        number, is_marked, _ = labels[label]
        shapes[KINDS[number]].append(Rectangle((x - 0.5, first - 0.5), 1, last - first + 1))
        shapes[Kind.PAGED_OUT] += (
            Polygon([(x - 0.5, y + 0.5), (x + 0.5, y + 0.5), (x + 0.5, y - 0.5)])
            for y in range(first, last + 1)
            if is_marked
        )
    drawn_kinds = [kind for kind in KINDS if shapes[kind]]
    for kind in drawn_kinds:
        collection = PatchCollection(shapes[kind], facecolor=COLOURS[kind], linewidth=0)
        axis.add_collection(collection)
    axis.set(
        xlim=(-0.5, len(names) - 0.5),
        ylim=(len(names) - 0.5, -0.5),
        title=replace_missing_glyphs(stage_map.title),
    )
    axis.set(xlabel="node", ylabel="stage, by the node it first computes")
    step = -(-len(names) // MAX_NAMES)
    named_positions = range(0, len(names), step)
    axis.set_xticks(named_positions, names[::step], rotation=90, fontsize=5)
    axis.set_yticks(named_positions, names[::step], fontsize=5)
    axis.set_axisbelow(True)
    axis.grid(visible=True, linewidth=0.1)
    return {str(kind): Patch(facecolor=COLOURS[kind]) for kind in drawn_kinds}


# -- timelines -------------------------------------------------------------------------------------


def stack_bands(graph: Graph, chart: Mapping[str, Any]) -> Iterator[tuple[str, Runs]]:
    """Yield (kind or part, segments) of the band of each copy and workspace in the RAM stack.

    Parts are stacked in the order of `KIND_NAMES`, and copies of a part by time.
    """
    end_times = list(chart["issued"][:-1])
    for position, _, end in chart["work"]:
        if chart["ops"][position] not in (LETTERS[Op.PAGE_IN], LETTERS[Op.PAGE_OUT]):
            end_times[position] = end
    times = [time for pair in zip(chart["issued"], end_times, strict=False) for time in pair]
    times.append(chart["issued"][-1])
    base = {at: 0 for at in range(len(times) - 1) if times[at + 1] > times[at]}
    stays = sorted(
        (kind_index(graph, stay[0] if stay[0] >= 0 else None), max(stay[2], 0), -stay[3], stay)
        for stay in chart["stays"]
    )
    for part, begin, _, (
        _,
        size,
        _,
        end,
        origin,
        _,
        overwrite_position,
        overwritten_bytes,
        *_,
    ) in stays:
        runs: Runs = []
        for at in range(2 * begin, min(2 * end + 1, len(times) - 1)):
            if at not in base:
                continue
            low = base[at]
            base[at] += size - (overwritten_bytes if 0 <= overwrite_position <= at // 2 else 0)
            edges = [low / chart["scale"], base[at] / chart["scale"]]
            if runs and runs[-1][1:] == [times[at], *edges]:
                runs[-1][1] = times[at + 1]
            else:
                runs.append([times[at], times[at + 1], *edges])
        if runs:
            yield _ORIGIN_KINDS.get(ORIGINS[origin], KIND_NAMES[part]), runs


def keep_all_curve(chart: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return (time, RAM) points of keep-all, in the units of the chart."""
    positions, kept = chart["ghost"]
    points = [
        (chart["issued"][position], ram / chart["scale"])
        for position, ram in zip(positions, kept, strict=True)
    ]
    return [*points, (chart["issued"][-1], points[-1][1])]


def outline(runs: Runs) -> list[tuple[float, float]]:
    """Return the corners of a band: along its upper edge, and back along its lower edge."""
    top = [(time, run[3]) for run in runs for time in run[:2]]
    bottom = [(time, run[2]) for run in runs for time in run[:2]]
    return [*top, *reversed(bottom)]


def band_colour(kind_or_part: str) -> str:
    """Return the colour of a kind or part of `stack_bands`."""
    return (
        COLOURS[Kind(kind_or_part)]
        if kind_or_part in tuple(Kind)
        else PART_COLOURS[KIND_NAMES.index(kind_or_part)][0]
    )


def _bars(chart: Mapping[str, Any], kinds: Mapping[str, Kind]) -> list[tuple[Kind, float, float]]:
    """Return (kind, start, length) of the bars of a lane."""
    return [
        (kinds[letter], start, end - start)
        for position, start, end in chart["work"]
        if (letter := chart["ops"][position]) in kinds
    ]


def _draw_lanes(axes: Any, lanes: Mapping[str, Sequence[tuple[Kind, float, float]]]) -> None:
    """Draw the bars of core and bus, one row each; stalls are hatched."""
    for row, bars in enumerate(lanes.values()):
        for kind in dict.fromkeys(kind for kind, *_ in bars):
            spans = [(start, length) for bar_kind, start, length in bars if bar_kind == kind]
            hatch = "////" if kind == Kind.STALL else None
            axes.broken_barh(
                spans, (row - 0.4, 0.8), facecolor=COLOURS[kind], linewidth=0, hatch=hatch
            )
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.tick_params(bottom=False, left=False, labelbottom=False)
    axes.spines[:].set_visible(False)


def _draw_stack(axes: Any, graph: Graph, chart: Mapping[str, Any]) -> None:
    """Draw the RAM of keep-all, the bands in front of it, and the budget."""
    from matplotlib.collections import PolyCollection

    bands: dict[str, list[Any]] = {}
    for form, runs in stack_bands(graph, chart):
        bands.setdefault(form, []).append(outline(runs))
    x, y = zip(*keep_all_curve(chart), strict=True)
    filled, line = _KEEP_ALL_COLOURS
    axes.fill_between(x, y, step="post", color=filled, linewidth=0, zorder=0.5)
    kept = format_bytes(round(max(y) * chart["scale"]))
    axes.step(x, y, where="post", color=line, linewidth=0.8, label=f"keep-all: {kept}")
    for form in (*KIND_NAMES, *_ORIGIN_KINDS.values()):
        if form in bands:
            axes.add_collection(
                PolyCollection(
                    bands[form],
                    facecolor=band_colour(form),
                    edgecolor="#ffffff",
                    linewidth=0.25,
                    label=f"{form} copy" if form in tuple(Kind) else form,
                )
            )
    top = max(y)
    if chart.get("budget") is not None:
        limit = chart["budget"] / chart["scale"]
        name = f"budget: {format_bytes(chart['budget'])}"
        axes.axhline(limit, color=_BUDGET_COLOUR, linewidth=1, linestyle="--", label=name)
        top = max(top, limit)
    axes.set(xlim=(0, x[-1]), ylim=(0, 1.06 * top))
    axes.set(xlabel=f"time [{chart['unit']}]", ylabel=f"RAM [{chart['size']}]")
    axes.spines[["top", "right"]].set_visible(False)


def _legend(lanes: Mapping[str, Sequence[tuple[Kind, float, float]]], stack: Any) -> list[Any]:
    """Return the legend handles of the lanes and of the RAM stack."""
    from matplotlib.patches import Patch

    kinds = dict.fromkeys(kind for bars in lanes.values() for kind, *_ in bars)
    return [
        *(Patch(facecolor=COLOURS[kind], label=str(kind)) for kind in kinds),
        *stack.get_legend_handles_labels()[0],
    ]
