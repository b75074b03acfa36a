"""From a picture's description to a file: PNG and SVG by matplotlib, HTML by plotly."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import InputError, MissingExtraError, shown
from poetmodel.files import write_bytes
from poetmodel.report.bands import Timeline, plan_timeline
from poetmodel.report.charts import box_chart, graph_chart, map_chart
from poetmodel.report.pictures import AddressMap, Grid, address_map, stage_map
from poetmodel.report.presenter import escaped
from poetmodel.report.still import image
from poetmodel.report.template import render
from poetmodel.report.timeline import plan_chart

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from poetmodel.graph import Graph
    from poetmodel.plan import ArenaCheck, Plan, PlanCheck
    from poetmodel.schedule import Schedule

LIBRARIES: Final[Mapping[str, Sequence[str]]] = {
    ".png": ("matplotlib",),
    ".svg": ("matplotlib",),
    ".html": ("jinja2", "plotly"),
}
"""Libraries that draw a picture, by the ending of its file."""


def check_picture(path: str | Path, libraries: Mapping[str, Sequence[str]] = LIBRARIES) -> None:
    """Raise unless a picture of this name can be drawn; nothing is written."""
    suffix = Path(path).suffix.lower()
    if suffix not in libraries:
        raise InputError(
            f"{path}: expected a name that ends in {', '.join(libraries)}, got {shown(suffix)}"
        )
    check_installed(path, f"drawing {suffix[1:]}", *libraries[suffix])


def check_installed(path: str | Path, what: str, *libraries: str) -> None:
    """Raise unless libraries are installed, all of the extra ``report``; nothing is imported."""
    missing = [name for name in libraries if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{path}: {what} needs {' and '.join(missing)}, not installed here; "
            f'pip install "poetmodel[report]" installs {"it" if len(missing) == 1 else "them"}'
        )


def draw_plan(graph: Graph, plan: Plan, check: PlanCheck, path: str | Path) -> None:
    """Draw what a plan does and has in RAM over time; the ending of the file says how.

    HTML is a page that needs no network and says what is in RAM wherever one points.
    """
    check_picture(path)
    picture = plan_timeline(graph, plan, check)
    _draw(picture, graph, "timeline", lambda: plan_chart(graph, plan, check), path)


def draw_addresses(
    graph: Graph, plan: Plan, check: PlanCheck, places: ArenaCheck, path: str | Path
) -> None:
    """Draw what lies where and when, likewise."""
    check_picture(path)
    picture = address_map(graph, plan, check, places)
    _draw(picture, graph, "addresses", lambda: box_chart(picture), path)


def draw_stages(graph: Graph, schedule: Schedule, path: str | Path) -> None:
    """Draw the map of a schedule, stages by nodes, likewise."""
    check_picture(path)
    _draw(stage_map(graph, schedule), graph, "map", lambda: map_chart(graph, schedule), path)


def _draw(
    picture: Timeline | Grid | AddressMap,
    graph: Graph,
    kind: str,
    chart: Callable[[], Mapping[str, Any]],
    path: str | Path,
) -> None:
    """Write a picture as it is, or as a page with a chart of this kind."""
    suffix = Path(path).suffix.lower()
    if suffix != ".html":
        write_bytes(path, image(picture, suffix[1:]))
        return
    text = render(
        "picture.html.jinja",
        chart_scripts=(kind,),
        charts={
            "graph": graph_chart(graph),
            "charts": [{"type": kind, **chart(), "id": "picture"}],
        },
        kind=kind,
        title=escaped(picture.title),
    )
    write_bytes(path, text.encode("utf-8", "replace"))
