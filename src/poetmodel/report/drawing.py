"""Pictures of schedules and plans: pages of HTML, and still pictures."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import InputError, MissingExtraError, shown
from poetmodel.files import write_bytes
from poetmodel.report import still
from poetmodel.report.charts import graph_chart, map_chart
from poetmodel.report.pictures import Map, moves_in_words
from poetmodel.report.presenter import escaped
from poetmodel.report.template import LIBRARIES, render
from poetmodel.report.timeline import plan_chart, plan_title

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from poetmodel.graph import Graph
    from poetmodel.plan import Plan, PlanCheck
    from poetmodel.schedule import Schedule

FORMS: Final[Mapping[str, Sequence[str]]] = {".html": LIBRARIES, **still.FORMS}
"""Libraries that draw a picture, by the ending of its file."""


def check_picture(path: str | Path, libraries: Mapping[str, Sequence[str]] = FORMS) -> None:
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
    """Draw the RAM of a plan over time, with core and bus.

    The suffix of the path selects a page that needs no network (.html), or a still picture.
    """
    check_picture(path)
    title, chart = plan_title(graph, plan, check), plan_chart(graph, plan, check)
    form = Path(path).suffix.lower()
    if form in still.FORMS:
        write_bytes(path, still.draw_timeline(graph, chart, title, form[1:]))
    else:
        _draw_page(title, graph, "timeline", chart, path)


def draw_stages(graph: Graph, schedule: Schedule, path: str | Path) -> None:
    """Draw the map of a schedule, stage by node, as a page or a still picture."""
    check_picture(path)
    title, chart = f"{graph.name}: {moves_in_words(schedule)}", map_chart(graph, schedule)
    form = Path(path).suffix.lower()
    if form in still.FORMS:
        write_bytes(path, still.draw_stage_map(Map(title=title, chart=chart), form[1:]))
    else:
        _draw_page(title, graph, "map", chart, path)


def _draw_page(
    title: str, graph: Graph, kind: str, chart: Mapping[str, Any], path: str | Path
) -> None:
    """Write a page with a chart of this kind."""
    text = render(
        "picture.html.jinja",
        chart_scripts=(kind,),
        charts={
            "graph": graph_chart(graph),
            "charts": [{"type": kind, **chart, "id": "picture"}],
        },
        kind=kind,
        title=escaped(title),
    )
    write_bytes(path, text.encode("utf-8", "replace"))
