"""Pictures of one schedule or plan that stand still, PNG and SVG, drawn by matplotlib."""

from __future__ import annotations

import io
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.room import PARTS
from poetmodel.report.bands import Band, Bar, Timeline, outline
from poetmodel.report.pictures import (
    COLOURS,
    CURVE_COLOUR,
    LIMIT_COLOUR,
    PART_COLOURS,
    AddressMap,
    Grid,
    GridCell,
    Kind,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


DOTS_PER_INCH: Final = 150
WIDTH_INCHES: Final = 10.0
"""Width of what is drawn, beside names of axes: a picture is about 1,600 pixels wide [in]."""
FONT: Final = 7.5
"""Size of names [pt]."""
NAME_INCHES: Final = 0.115
"""Room that a name takes across its reading direction [in]."""
LETTER_INCHES: Final = 0.062
"""Room that a letter of a name takes [in]."""
SHORTENED: Final = 22
"""Most characters of a name that are shown; longer ones lose their middle."""
LANE_INCHES: Final = 0.42
STACK_INCHES: Final = 3.6
"""Height of a lane, and of the stack below [in]."""
ADDRESS_INCHES: Final = 5.0
"""Height of a map of addresses [in]."""
RIM_SHARE: Final = 0.012
"""Bands above this share of the axis have a rim."""
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
        "hatch.linewidth": 1.4,
    }
    with mpl.rc_context(SETTINGS | settings):
        if isinstance(picture, AddressMap):
            figure = _addresses(picture)
        else:
            figure = _grid(picture) if isinstance(picture, Grid) else _timeline(picture)
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        return content(figure, form, bbox_inches="tight", metadata=metadata)


SETTINGS: Final[Any] = {"svg.hashsalt": "poetmodel", "svg.fonttype": "none"}
"""Settings that make equal pictures equal bytes, with text as text."""


def content(figure: Any, form: str, **how: Any) -> bytes:
    """Return a figure of matplotlib as the content of a file."""
    written = io.BytesIO()
    figure.savefig(written, format=form, dpi=DOTS_PER_INCH, **how)
    return written.getvalue()


def shortened(name: str) -> str:
    """Return a name that fits, with only characters that can be drawn."""
    text = _drawable(name)
    half = SHORTENED // 2 - 1
    return text if len(text) <= SHORTENED else f"{text[:half]}..{text[-half:]}"


def _drawable(text: str) -> str:
    return "".join(c if c.isprintable() and ord(c) in _glyphs() else "?" for c in text)


@cache
def _glyphs() -> frozenset[int]:
    """Return the characters of the font that matplotlib brings along and draws with."""
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


# -- timelines ---------------------------------------------------------------------------------


def _timeline(picture: Timeline) -> Any:
    from matplotlib.figure import Figure

    end = picture.points[-1][0] or 1.0
    lane_inches = LANE_INCHES * len(picture.lanes) if end else 0
    heights = [lane_inches, STACK_INCHES]
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights) + 1.4))
    lanes, stack = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    figure.subplots_adjust(left=0, right=1, bottom=0, top=1, hspace=0.62 / STACK_INCHES)
    for index, lane in enumerate(picture.lanes.values()):
        _draw_lane(lanes, index, lane, room=end / WIDTH_INCHES)
    lanes.set_yticks(range(len(picture.lanes)), list(picture.lanes))
    lanes.set_ylim(len(picture.lanes) - 0.5, -0.5)
    lanes.set_xlim(0, end)
    lanes.tick_params(bottom=False, left=False)
    _title(lanes, picture.title)
    _legend(lanes, [_patch(COLOURS[kind], str(kind), kind) for kind in picture.kinds])
    _draw_stack(stack, picture, end)
    for axes in (lanes, stack):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_stack(axes: Any, picture: Timeline, end: float) -> None:
    """Draw the ghost of keep-all, the bands before it, and the budget."""
    times, values = zip(*picture.points, strict=True)
    highest = max(*values, picture.limit or 0.0, *(value for _, value in picture.ghost), 0.0)
    top = 1.06 * highest or 1.0
    handles = [
        *(_patch(PART_COLOURS[part][0], PARTS[part]) for part in picture.parts),
        *(_patch(PART_COLOURS[1][0], f"{kind} copy", kind) for kind in picture.copies),
    ]
    if picture.ghost:
        x, y = zip(*picture.ghost, strict=True)
        axes.fill_between(x, y, step="post", color=CURVE_COLOUR, alpha=0.09, linewidth=0, zorder=0)
        (line,) = axes.step(
            x, y, where="post", color=CURVE_COLOUR, linewidth=1, linestyle=":", zorder=0
        )
        line.set_label(picture.ghost_name)
        handles.append(line)
    _draw_bands(axes, picture.bands, top)
    axes.step(times, values, where="post", color=CURVE_COLOUR, linewidth=0.7)
    if picture.limit is not None:
        handles.append(_draw_limit(axes, picture.limit, picture.limit_name))
    for band in picture.bands:
        _name_band(axes, band, (end / WIDTH_INCHES, top / STACK_INCHES))
    axes.set_ylim(0, top)
    axes.set_ylabel(picture.curve_name)
    axes.set_xlabel(picture.time_name)
    _legend(axes, handles)


def _draw_bands(axes: Any, bands: Sequence[Band], top: float) -> None:
    """Draw the bands of a part and kind together; the copies of some kinds are hatched."""
    from matplotlib.collections import PolyCollection

    groups: dict[tuple[int, Kind | None, bool], list[Any]] = {}
    for band in bands:
        tall = max(run[3] - run[2] for run in band.runs) > RIM_SHARE * top
        groups.setdefault((band.part, band.kind, tall), []).append(outline(band.runs))
    for (part, kind, tall), shapes in groups.items():
        colour = PART_COLOURS[part][0]
        axes.add_collection(
            PolyCollection(
                shapes,
                facecolor=colour,
                edgecolor=colour if kind is None else COLOURS[kind],
                hatch=None if kind is None else "//////",
                linewidth=0,
            )
        )
        if tall:
            axes.add_collection(
                PolyCollection(shapes, facecolor="none", edgecolor="white", linewidth=0.5)
            )


def _name_band(axes: Any, band: Band, room: tuple[float, float]) -> None:
    """Write the name on a band where it fits; `room` is what one inch shows of each axis."""
    start, end, low, high = max(band.runs, key=lambda run: run[1] - run[0])
    name = shortened(band.name)
    if (end - start) / room[0] < LETTER_INCHES * (len(name) + 1):
        return
    if (high - low) / room[1] < NAME_INCHES:
        return
    _write(axes, (start + end) / 2, (low + high) / 2, name, dark=band.part == 0)


def _write(axes: Any, x: float, y: float, name: str, *, dark: bool) -> None:
    """Write a name in the middle of what has it, which is dark or pale."""
    axes.text(
        x,
        y,
        name,
        ha="center",
        va="center_baseline",
        fontsize=FONT,
        color="white" if dark else "black",
        clip_on=True,
    )


def _draw_limit(axes: Any, limit: float, name: str) -> Any:
    """Draw a limit; return its entry of the legend."""
    line = axes.axhline(limit, color=LIMIT_COLOUR, linestyle="--", linewidth=1.2)
    line.set_label(name)
    return line


def _draw_lane(axes: Any, index: int, lane: Sequence[Bar], *, room: float) -> None:
    """Draw the bars of a lane; `room` is how much time one inch shows."""
    groups: dict[tuple[Kind, bool], list[Bar]] = {}
    for bar in lane:
        narrow = bar.end - bar.start < NARROW_INCHES * room
        groups.setdefault((bar.kind, narrow), []).append(bar)
    for (kind, narrow), bars in groups.items():
        axes.broken_barh(
            [(bar.start, bar.end - bar.start) for bar in bars],
            (index - 0.42, 0.84),
            facecolor=COLOURS[kind],
            edgecolor=COLOURS[kind] if narrow else "white",
            linewidth=0.5 if narrow else 0.2,
            hatch=None if narrow else HATCHED.get(kind),
            zorder=2 if narrow else 1,
        )
    for bar in lane:
        name = shortened(bar.name)
        if bar.end - bar.start < LETTER_INCHES * (len(name) + 1) * room or bar.kind in HATCHED:
            continue
        _write(axes, (bar.start + bar.end) / 2, index, name, dark=bar.kind not in PALE)


# -- addresses ---------------------------------------------------------------------------------


def _addresses(picture: AddressMap) -> Any:
    from matplotlib.collections import PatchCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(WIDTH_INCHES, ADDRESS_INCHES))
    axes = figure.add_axes((0, 0, 1, 1))
    end, top = picture.end or 1.0, picture.limit or 1.0
    for kind in picture.kinds:
        boxes = [box for box in picture.boxes if box.kind == kind]
        shapes = [
            Rectangle((box.start, box.low), box.end - box.start, box.high - box.low)
            for box in boxes
        ]
        rims = [
            COLOURS[kind] if box.end - box.start < NARROW_INCHES * end / WIDTH_INCHES else "white"
            for box in boxes
        ]
        axes.add_collection(
            PatchCollection(shapes, facecolor=COLOURS[kind], edgecolor=rims, linewidth=0.3)
        )
    for box in picture.boxes:
        name = shortened(box.name)
        wide = (box.end - box.start) * WIDTH_INCHES / end >= LETTER_INCHES * (len(name) + 1)
        if wide and (box.high - box.low) * ADDRESS_INCHES / top >= NAME_INCHES:
            x, y = (box.start + box.end) / 2, (box.low + box.high) / 2
            _write(axes, x, y, name, dark=box.kind not in PALE)
    limit = _draw_limit(axes, picture.limit, picture.limit_name)
    axes.set(xlim=(0, end), ylim=(0, 1.03 * top))
    axes.set(xlabel=picture.time_name, ylabel=picture.address_name)
    axes.spines[["top", "right"]].set_visible(False)
    _title(axes, picture.title)
    _legend(axes, [*(_patch(COLOURS[kind], str(kind), kind) for kind in picture.kinds), limit])
    return figure


# -- grids -------------------------------------------------------------------------------------


def _grid(picture: Grid) -> Any:
    from matplotlib.figure import Figure

    height = WIDTH_INCHES * len(picture.rows) / max(1, len(picture.columns))
    size = (WIDTH_INCHES, min(height, WIDTH_INCHES))
    figure = Figure(figsize=size)
    axes = figure.add_axes((0, 0, 1, 1))
    draw_cells(axes, picture)
    axes.xaxis.set_ticks(*_ticks(picture.columns, size[0]), rotation=90)
    axes.yaxis.set_ticks(*_ticks(picture.rows, size[1]))
    axes.tick_params(labelsize=FONT, length=2, width=0.4)
    axes.grid(visible=True, linewidth=0.15, color="#BBBBBB")
    _title(axes, picture.title)
    kinds = (*picture.kinds, *picture.marks)
    _legend(axes, [_patch(COLOURS[kind], str(kind)) for kind in kinds])
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
    """Return the positions of names: all if there is room, else every second, third ..."""
    step = max(1, -int(-len(names) * NAME_INCHES // inches) if inches else 1)
    places = list(range(0, len(names), step))
    return places, [shortened(names[index]) for index in places]


def _title(axes: Any, text: str) -> None:
    axes.set_title(_drawable(text), loc="left", fontsize=FONT + 3, pad=24, fontweight="bold")


def _patch(colour: str, name: str, kind: Kind | None = None) -> Any:
    """Return an entry of a legend; stalls and copies that came back are hatched as they are."""
    from matplotlib.patches import Patch

    if kind in HATCHED:
        return Patch(facecolor=colour, hatch=HATCHED[kind], edgecolor="white", label=name)
    if kind is not None and colour != COLOURS[kind]:
        return Patch(
            facecolor=colour, hatch="//////", edgecolor=COLOURS[kind], linewidth=0, label=name
        )
    return Patch(facecolor=colour, edgecolor="white", label=name)


def _legend(axes: Any, handles: Sequence[Any]) -> None:
    """Write a legend in one row between title and axes, where it covers nothing."""
    if handles:
        axes.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            borderaxespad=0.3,
            borderpad=0,
            ncols=len(handles),
            columnspacing=1.4,
            handlelength=1.4,
            fontsize=FONT + 1,
            frameon=False,
        )
