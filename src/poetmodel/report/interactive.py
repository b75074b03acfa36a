"""Pictures for the browser: one HTML file that needs no network, by plotly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from poetmodel.report.pictures import COLOURS, CURVE_COLOUR, LIMIT_COLOUR, AddressMap, Grid
from poetmodel.report.presenter import escaped

if TYPE_CHECKING:
    from poetmodel.report.pictures import Kind, Timeline

CELL_PIXELS: Final = 14
"""Side of a cell of a grid, where that gives a figure within bounds [px]."""
BOUNDS: Final = (500, 3000)
"""Least and most width and height of a grid [px]."""
MARGIN_PIXELS: Final = 220
NARROW_SHARE: Final = 0.002
"""Bars below this share of the whole time are narrow."""
FONT: Final = 9


def page(picture: Timeline | Grid | AddressMap) -> str:
    """Return a picture as the text of an HTML file; the same picture gives the same text."""
    if isinstance(picture, AddressMap):
        figure = _addresses(picture)
    else:
        figure = _grid(picture) if isinstance(picture, Grid) else _timeline(picture)
    text: str = figure.to_html(
        include_plotlyjs=True, full_html=True, div_id="picture", config={"displaylogo": False}
    )
    return text


def safe(text: str) -> str:
    """Return a text that plotly shows as it is: it takes `<` for the start of a tag."""
    return escaped(text).replace("&", "&amp;").replace("<", "&lt;")


def _timeline(picture: Timeline) -> Any:
    from plotly.graph_objects import Scatter
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, row_heights=[0.4, 0.6], vertical_spacing=0.05
    )
    for kind in picture.kinds:
        figure.add_trace(_bars(picture, kind), row=1, col=1)
    curve = Scatter(
        x=[time for time, _ in picture.points],
        y=[value for _, value in picture.points],
        line={"shape": "hv", "color": CURVE_COLOUR, "width": 1},
        fill="tozeroy",
        name=picture.curve_name,
        showlegend=False,
    )
    figure.add_trace(curve, row=2, col=1)
    if picture.limit is not None:
        figure.add_hline(
            y=picture.limit,
            line={"color": LIMIT_COLOUR, "dash": "dash"},
            annotation_text=safe(picture.limit_name),
            row=2,
            col=1,
        )
    figure.update_yaxes(autorange="reversed", fixedrange=True, row=1, col=1)
    figure.update_yaxes(title=safe(picture.curve_name), rangemode="tozero", row=2, col=1)
    figure.update_xaxes(title=safe(picture.time_name), row=2, col=1)
    figure.update_layout(
        title=safe(picture.title), barmode="overlay", template="plotly_white", height=700
    )
    return figure


def _bars(picture: Timeline, kind: Kind) -> Any:
    """Return the bars of one kind; narrow ones have a rim of their own colour, to be seen."""
    from plotly.graph_objects import Bar

    narrow = NARROW_SHARE * max((time for time, _ in picture.points), default=0.0)
    placed = [
        (lane, bar) for lane, bars in picture.lanes.items() for bar in bars if bar.kind == kind
    ]
    rims = [COLOURS[kind] if bar.end - bar.start < narrow else "white" for _, bar in placed]
    return Bar(
        base=[bar.start for _, bar in placed],
        x=[bar.end - bar.start for _, bar in placed],
        y=[name for name, _ in placed],
        text=[safe(bar.name) for _, bar in placed],
        hovertext=[safe(bar.details) for _, bar in placed],
        orientation="h",
        marker={"color": COLOURS[kind], "line": {"color": rims, "width": 0.5}},
        textposition="inside",
        insidetextanchor="middle",
        hoverinfo="text",
        name=str(kind),
    )


def _addresses(picture: AddressMap) -> Any:
    from plotly.graph_objects import Bar, Figure

    figure = Figure()
    for kind in picture.kinds:
        boxes = [box for box in picture.boxes if box.kind == kind]
        narrow = NARROW_SHARE * picture.end
        rims = [COLOURS[kind] if box.end - box.start < narrow else "white" for box in boxes]
        figure.add_trace(
            Bar(
                x=[(box.start + box.end) / 2 for box in boxes],
                width=[box.end - box.start for box in boxes],
                base=[box.low for box in boxes],
                y=[box.high - box.low for box in boxes],
                text=[safe(box.name) for box in boxes],
                hovertext=[safe(box.details) for box in boxes],
                marker={"color": COLOURS[kind], "line": {"color": rims, "width": 0.5}},
                textposition="inside",
                insidetextanchor="middle",
                hoverinfo="text",
                name=str(kind),
            )
        )
    figure.add_hline(
        y=picture.limit,
        line={"color": LIMIT_COLOUR, "dash": "dash"},
        annotation_text=safe(picture.limit_name),
    )
    figure.update_xaxes(title=safe(picture.time_name), range=[0, picture.end])
    figure.update_yaxes(title=safe(picture.address_name), rangemode="tozero")
    figure.update_layout(
        title=safe(picture.title), barmode="overlay", template="plotly_white", height=700
    )
    return figure


def _grid(picture: Grid) -> Any:
    from plotly.graph_objects import Figure, Heatmap, Scatter

    kinds, n = picture.kinds, len(picture.columns)
    codes: list[list[int | None]] = [[None] * n for _ in picture.rows]
    words = [[""] * n for _ in picture.rows]
    for cell in picture.cells:
        codes[cell.row][cell.column] = kinds.index(cell.kind)
        words[cell.row][cell.column] = safe(cell.details)
    figure = Figure(
        Heatmap(
            z=codes,
            text=words,
            hoverinfo="text",
            colorscale=_steps([COLOURS[kind] for kind in kinds]),
            zmin=-0.5,
            zmax=len(kinds) - 0.5,
            showscale=False,
            xgap=0.5,
            ygap=0.5,
        )
    )
    for kind in kinds:  # for the legend
        marker = {"color": COLOURS[kind], "symbol": "square", "size": 10}
        figure.add_trace(Scatter(x=[None], y=[None], mode="markers", marker=marker, name=str(kind)))
    for mark in picture.marks:
        marked = [cell for cell in picture.cells if cell.mark == mark]
        figure.add_trace(
            Scatter(
                x=[cell.column for cell in marked],
                y=[cell.row for cell in marked],
                mode="markers",
                marker={"color": COLOURS[mark], "symbol": "triangle-down", "size": 8},
                hovertext=[safe(cell.details) for cell in marked],
                hoverinfo="text",
                name=str(mark),
            )
        )
    for update, names, side in (
        (figure.update_xaxes, picture.columns, picture.column_name),
        (figure.update_yaxes, picture.rows, picture.row_name),
    ):
        update(
            title=safe(side),
            tickvals=list(range(len(names))),
            ticktext=[safe(name) for name in names],
            tickfont={"size": FONT},
            showgrid=False,
            zeroline=False,
        )
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(
        title=safe(picture.title),
        template="plotly_white",
        width=_pixels(n),
        height=_pixels(len(picture.rows)),
    )
    return figure


def _pixels(cells: int) -> int:
    return min(max(CELL_PIXELS * cells, BOUNDS[0]), BOUNDS[1]) + MARGIN_PIXELS


def _steps(colours: list[str]) -> list[tuple[float, str]]:
    """Return a scale that has one flat step per colour."""
    width = 1 / max(1, len(colours))
    edges = [(k * width, (k + 1) * width, colour) for k, colour in enumerate(colours)]
    return [(min(1.0, place), colour) for low, high, colour in edges for place in (low, high)]
