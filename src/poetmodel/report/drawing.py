"""Pictures of schedules and plans: interactive HTML pages, and still images."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import InputError, MissingExtraError, quote
from poetmodel.files import write_bytes
from poetmodel.report import still
from poetmodel.report.charts import graph_chart, map_chart
from poetmodel.report.pictures import Map, format_move_counts
from poetmodel.report.presenter import escape_controls
from poetmodel.report.template import LIBRARIES, render
from poetmodel.report.timeline import plan_chart, plan_title

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from poetmodel.graph import Graph
    from poetmodel.plan import Plan, PlanCheck
    from poetmodel.schedule import Schedule

PICTURE_LIBRARIES: Final[Mapping[str, Sequence[str]]] = {
    ".html": LIBRARIES,
    **still.PICTURE_LIBRARIES,
}
"""Libraries that draw a picture, by file suffix."""


def check_picture(
    path: str | Path, libraries: Mapping[str, Sequence[str]] = PICTURE_LIBRARIES
) -> None:
    """Check that a picture with this file name can be drawn; write no file.

    `libraries` are those that each suffix needs. Raises `InputError` for another suffix,
    `MissingExtraError` if a library is not installed.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in libraries:
        raise InputError(
            f"{path}: expected a name that ends in {', '.join(libraries)}, got {quote(suffix)}"
        )
    check_installed(path, f"drawing {suffix[1:]}", *libraries[suffix])


def check_installed(path: str | Path, purpose: str, *libraries: str) -> None:
    """Raise `MissingExtraError` unless all `libraries` of the extra ``report`` are installed."""
    missing = [name for name in libraries if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{path}: {purpose} needs {' and '.join(missing)}, not installed here; "
            f'pip install "poetmodel[report]" installs {"it" if len(missing) == 1 else "them"}'
        )


def draw_plan(graph: Graph, plan: Plan, check: PlanCheck, path: str | Path) -> None:
    """Draw RAM, core and bus of a plan over time, as a page or an image by the suffix of `path`.

    Raises `InputError` for an image of a plan that takes no time.
    """
    check_picture(path)
    title, chart = plan_title(graph, plan, check), plan_chart(graph, plan, check)
    suffix = Path(path).suffix.lower()
    if suffix in still.PICTURE_LIBRARIES:
        if not check.makespan_s:
            raise InputError(f"{path}: the plan takes no time, which only a page shows; use .html")
        write_bytes(path, still.draw_timeline(graph, chart, title, suffix[1:]))
    else:
        _write_page(title, graph, "timeline", chart, path)


def draw_stages(graph: Graph, schedule: Schedule, path: str | Path) -> None:
    """Draw the map of a schedule, stages by nodes, as a page or an image by the suffix."""
    check_picture(path)
    title, chart = f"{graph.name}: {format_move_counts(schedule)}", map_chart(graph, schedule)
    suffix = Path(path).suffix.lower()
    if suffix in still.PICTURE_LIBRARIES:
        write_bytes(path, still.draw_stage_map(Map(title=title, chart=chart), suffix[1:]))
    else:
        _write_page(title, graph, "map", chart, path)


def _write_page(
    title: str, graph: Graph, chart_type: str, chart: Mapping[str, Any], path: str | Path
) -> None:
    """Write a page with one chart of type `chart_type`, which is also the name of its script."""
    page_text = render(
        "picture.html.jinja",
        chart_scripts=(chart_type,),
        charts={
            "graph": graph_chart(graph),
            "charts": [{"type": chart_type, **chart, "id": "picture"}],
        },
        kind=chart_type,
        title=escape_controls(title),
    )
    write_bytes(path, page_text.encode("utf-8", "replace"))
