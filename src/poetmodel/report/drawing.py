"""From a picture's description to a file: PNG and SVG by matplotlib, HTML by plotly."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import InputError, MissingExtraError, shown
from poetmodel.files import write_bytes
from poetmodel.report.bands import plan_timeline
from poetmodel.report.pictures import address_map, stage_map
from poetmodel.report.presenter import escaped

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from poetmodel.graph import Graph
    from poetmodel.plan import ArenaCheck, Plan, PlanCheck
    from poetmodel.report.bands import Timeline
    from poetmodel.report.pictures import AddressMap, Grid
    from poetmodel.schedule import Schedule

LIBRARIES: Final[Mapping[str, Sequence[str]]] = {
    ".png": ("matplotlib",),
    ".svg": ("matplotlib",),
    ".html": ("jinja2", "plotly"),
}
"""What draws a picture, by the ending of its file."""


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
    if not _is_page(path):
        _write_still(picture, path)
        return
    from poetmodel.report.timeline import plan_chart

    _write_page(path, graph, picture.title, {"type": "timeline", **plan_chart(graph, plan, check)})


def draw_addresses(
    graph: Graph, plan: Plan, check: PlanCheck, places: ArenaCheck, path: str | Path
) -> None:
    """Draw what lies where and when, likewise."""
    check_picture(path)
    picture = address_map(graph, plan, check, places)
    if not _is_page(path):
        _write_still(picture, path)
        return
    from poetmodel.report.charts import box_chart

    _write_page(path, graph, picture.title, {"type": "addresses", **box_chart(picture)})


def draw_stages(graph: Graph, schedule: Schedule, path: str | Path) -> None:
    """Draw the map of a schedule, stages by nodes, likewise."""
    check_picture(path)
    picture = stage_map(graph, schedule)
    if not _is_page(path):
        _write_still(picture, path)
        return
    from poetmodel.report.charts import map_chart

    _write_page(path, graph, picture.title, {"type": "map", **map_chart(graph, schedule)})


def _is_page(path: str | Path) -> bool:
    return Path(path).suffix.lower() == ".html"


def _write_still(picture: Timeline | Grid | AddressMap, path: str | Path) -> None:
    from poetmodel.report.still import image

    write_bytes(path, image(picture, Path(path).suffix.lower()[1:]))


def _write_page(path: str | Path, graph: Graph, title: str, chart: Mapping[str, Any]) -> None:
    from poetmodel.report.charts import graph_chart
    from poetmodel.report.template import render

    kind = chart["type"]
    text = render(
        "picture.html.jinja",
        chart_scripts=(kind,),
        charts={"graph": graph_chart(graph), "charts": [{**chart, "id": "picture"}]},
        kind=kind,
        title=escaped(title),
    )
    write_bytes(path, text.encode("utf-8", "replace"))
