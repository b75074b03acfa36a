"""Pictures that stand still, PNG and SVG, by matplotlib."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

from poetmodel.report.pictures import (
    COLOURS,
    CURVE_COLOUR,
    LIMIT_COLOUR,
    AddressMap,
    Grid,
    Kind,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from poetmodel.report.pictures import Bar, GridCell, Timeline

DOTS_PER_INCH: Final = 150
FONT: Final = 6.0
"""Size of names [pt]."""
NAME_INCHES: Final = 0.1
"""Room that a name takes across its reading direction [in]."""
WIDTHS: Final = (9.0, 60.0)
"""Least and most width and height of what is drawn [in]."""
SHORTENED: Final = 22
"""Most characters of a name that are shown; longer ones lose their middle."""
LANE_INCHES: Final = 1.3
ADDRESS_INCHES: Final = 5.0
"""Height of a map of addresses [in]."""
PALE: Final = (Kind.KEPT, Kind.PAGED_OUT)
"""Colours on which names are black."""
NARROW_INCHES: Final = 0.02
"""Bars below this are drawn with a rim of their own colour, so that they can be seen [in]."""
HATCHED: Final = {Kind.STALL: "////"}
"""Bars that are hatched, and bear no name."""


def image(picture: Timeline | Grid | AddressMap, form: str) -> bytes:
    """Return a picture as the content of a file, png or svg; the same one gives the same bytes."""
    import matplotlib as mpl

    settings: Any = {
        "font.size": FONT + 2,
        "font.family": ["DejaVu Sans"],  # built into matplotlib
        "text.parse_math": False,
        "svg.hashsalt": "poetmodel",
        "svg.fonttype": "none",
    }
    with mpl.rc_context(settings):
        if isinstance(picture, AddressMap):
            figure = _addresses(picture)
        else:
            figure = _grid(picture) if isinstance(picture, Grid) else _timeline(picture)
        content = io.BytesIO()
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        figure.savefig(
            content, format=form, dpi=DOTS_PER_INCH, bbox_inches="tight", metadata=metadata
        )
    return content.getvalue()


def shortened(name: str) -> str:
    """Return a name that fits, with only characters that can be drawn."""
    text = _drawable(name)
    half = SHORTENED // 2 - 1
    return text if len(text) <= SHORTENED else f"{text[:half]}..{text[-half:]}"


def _drawable(text: str) -> str:
    return "".join(c if c.isprintable() and c.isascii() else "?" for c in text)


def _clamped(inches: float) -> float:
    return min(max(inches, WIDTHS[0]), WIDTHS[1])


# -- timelines ---------------------------------------------------------------------------------


def _timeline(picture: Timeline) -> Any:
    from matplotlib.figure import Figure

    end = max((time for time, _ in picture.points), default=0.0) or 1.0
    most = max(map(len, picture.lanes.values()), default=0)
    width = _clamped(most * NAME_INCHES)
    heights = [LANE_INCHES * len(picture.lanes), 2.2]
    figure = Figure(figsize=(width, sum(heights) + 0.6))
    lanes, curve = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    figure.subplots_adjust(left=0, right=1, bottom=0, top=1, hspace=0.2)
    for place, lane in enumerate(picture.lanes.values()):
        _draw_lane(lanes, place, lane, room=end / width)
    lanes.set_yticks(range(len(picture.lanes)), list(picture.lanes))
    lanes.set_ylim(len(picture.lanes) - 0.5, -0.5)
    lanes.set_xlim(0, end)
    lanes.set_title(_drawable(picture.title), loc="left", fontsize=FONT + 3)
    times, values = zip(*picture.points, strict=True) if picture.points else ((), ())
    curve.step(times, values, where="post", color=CURVE_COLOUR, linewidth=0.8)
    curve.fill_between(times, values, step="post", color=CURVE_COLOUR, alpha=0.2, linewidth=0)
    highest = max(values, default=0.0)
    if picture.limit is not None:
        highest = max(highest, picture.limit)
        curve.axhline(
            picture.limit,
            color=LIMIT_COLOUR,
            linestyle="--",
            linewidth=1,
            label=picture.limit_name,
        )
        curve.legend(
            loc="lower right", bbox_to_anchor=(1, 1), fontsize=FONT + 1, frameon=False, borderpad=0
        )
    curve.set_ylim(0, 1.08 * highest or 1)
    curve.set_ylabel(picture.curve_name)
    curve.set_xlabel(picture.time_name)
    _legend(lanes, picture.kinds)
    return figure


def _draw_lane(axes: Any, place: int, lane: Sequence[Bar], *, room: float) -> None:
    """Draw the bars of a lane; `room` is how much time one inch shows."""
    groups: dict[tuple[Kind, bool], list[Bar]] = {}
    for bar in lane:
        narrow = bar.end - bar.start < NARROW_INCHES * room
        groups.setdefault((bar.kind, narrow), []).append(bar)
    for (kind, narrow), bars in groups.items():
        axes.broken_barh(
            [(bar.start, bar.end - bar.start) for bar in bars],
            (place - 0.42, 0.84),
            facecolor=COLOURS[kind],
            edgecolor=COLOURS[kind] if narrow else "white",
            linewidth=0.5 if narrow else 0.2,
            hatch=None if narrow else HATCHED.get(kind),
            zorder=2 if narrow else 1,
        )
    for bar in lane:
        if bar.end - bar.start >= NAME_INCHES * room and bar.kind not in HATCHED:
            axes.text(
                (bar.start + bar.end) / 2,
                place,
                shortened(bar.name),
                rotation=90,
                ha="center",
                va="center",
                fontsize=FONT,
                color="black" if bar.kind in PALE else "white",
                clip_on=True,
            )


# -- addresses ---------------------------------------------------------------------------------


def _addresses(picture: AddressMap) -> Any:
    from matplotlib.collections import PatchCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    width, height = _clamped(NAME_INCHES * len(picture.boxes) / 4), ADDRESS_INCHES
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    end, top = picture.end or 1.0, picture.limit or 1.0
    for kind in picture.kinds:
        boxes = [box for box in picture.boxes if box.kind == kind]
        shapes = [
            Rectangle((box.start, box.low), box.end - box.start, box.high - box.low)
            for box in boxes
        ]
        rims = [
            COLOURS[kind] if (box.end - box.start) * width < NARROW_INCHES * end else "white"
            for box in boxes
        ]
        axes.add_collection(
            PatchCollection(shapes, facecolor=COLOURS[kind], edgecolor=rims, linewidth=0.3)
        )
    for box in picture.boxes:
        name = shortened(box.name)
        wide = (box.end - box.start) * width / end >= NAME_INCHES * (len(name) + 2) / 2
        if wide and (box.high - box.low) * height / top >= NAME_INCHES:
            axes.text(
                (box.start + box.end) / 2,
                (box.low + box.high) / 2,
                name,
                ha="center",
                va="center",
                fontsize=FONT,
                color="black" if box.kind in PALE else "white",
                clip_on=True,
            )
    axes.axhline(picture.limit, color=LIMIT_COLOUR, linestyle="--", linewidth=1)
    axes.set(xlim=(0, end), ylim=(0, 1.03 * top))
    axes.set(xlabel=picture.time_name, ylabel=picture.address_name)
    axes.set_title(_drawable(picture.title), loc="left", fontsize=FONT + 3)
    _legend(axes, picture.kinds)
    return figure


# -- grids -------------------------------------------------------------------------------------


def _grid(picture: Grid) -> Any:
    from matplotlib.figure import Figure

    size = [_clamped(NAME_INCHES * len(names)) for names in (picture.columns, picture.rows)]
    figure = Figure(figsize=(size[0], size[1]))
    axes = figure.add_axes((0, 0, 1, 1))
    draw_cells(axes, picture)
    axes.xaxis.set_ticks(*_ticks(picture.columns, size[0]), rotation=90)
    axes.yaxis.set_ticks(*_ticks(picture.rows, size[1]))
    axes.tick_params(labelsize=FONT, length=2, width=0.4)
    axes.grid(visible=True, linewidth=0.15, color="#BBBBBB")
    axes.set_title(_drawable(picture.title), loc="left", fontsize=FONT + 3)
    _legend(axes, (*picture.kinds, *picture.marks))
    return figure


def draw_cells(axes: Any, picture: Grid) -> None:
    """Draw the cells of a grid and their marks, above grid lines, and name the axes."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Polygon, Rectangle

    for kind in picture.kinds:
        runs = [
            Rectangle((column - 0.5, first - 0.5), 1, last - first + 1)
            for column, first, last in _runs(cell for cell in picture.cells if cell.kind == kind)
        ]
        axes.add_collection(PatchCollection(runs, facecolor=COLOURS[kind], linewidth=0))
    for mark in picture.marks:
        corners = [
            Polygon([(x - 0.5, y + 0.5), (x + 0.5, y + 0.5), (x + 0.5, y - 0.5)])
            for x, y in ((cell.column, cell.row) for cell in picture.cells if cell.mark == mark)
        ]
        axes.add_collection(PatchCollection(corners, facecolor=COLOURS[mark], linewidth=0))
    axes.set(xlim=(-0.5, len(picture.columns) - 0.5), ylim=(len(picture.rows) - 0.5, -0.5))
    axes.set(xlabel=picture.column_name, ylabel=picture.row_name)
    axes.set_axisbelow(True)


def _runs(cells: Iterable[GridCell]) -> Iterator[tuple[int, int, int]]:
    """Yield column, first and last row of cells that follow each other in a column."""
    places = sorted((cell.column, cell.row) for cell in cells)
    first = 0
    for k, (column, row) in enumerate(places):
        if k + 1 == len(places) or places[k + 1] != (column, row + 1):
            yield column, places[first][1], row
            first = k + 1


def _ticks(names: tuple[str, ...], inches: float) -> tuple[list[int], list[str]]:
    """Return where names stand: all of them where there is room, else every second, third ..."""
    step = max(1, -int(-len(names) * NAME_INCHES // inches) if inches else 1)
    places = list(range(0, len(names), step))
    return places, [shortened(names[place]) for place in places]


def _legend(axes: Any, kinds: Iterable[Kind]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(
            facecolor=COLOURS[kind],
            hatch=HATCHED.get(kind),
            edgecolor="white",
            label=str(kind),
        )
        for kind in kinds
    ]
    if handles:
        axes.legend(
            handles=handles,
            loc="lower right",
            bbox_to_anchor=(1, 1),
            borderaxespad=3,  # above the title
            ncols=len(handles),
            fontsize=FONT + 1,
            frameon=False,
        )
