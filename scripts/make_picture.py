"""Draw ``docs/timeline.svg``: the RAM of a schedule over one training step, before keep-all's.

``python scripts/make_picture.py`` solves the problem of the README's first command, checks its plan
and draws what the plan checker says. One file serves light and dark pages.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import poetmodel as pm
from poetmodel.device.ram import KIND_NAMES
from poetmodel.graph.catalogue import load_model
from poetmodel.plan import check_plan
from poetmodel.planner import make_plan
from poetmodel.report.pictures import Kind
from poetmodel.report.still import band_colour, band_outline, keep_all_curve, stack_bands
from poetmodel.report.timeline import plan_chart
from poetmodel.units import format_bytes

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "bench"))

from charts import GREY, RED, Chart  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping

    Runs = list[list[float]]
    """Start, end, lowest and highest value of stretches one after the other, as the rest moves."""

PICTURE: Final = ROOT / "docs" / "timeline.svg"
MODEL, DEVICE, RAM = "mobilenetv2", "rpi4b", "40%"
"""The problem of the README's first command."""
_FORMS: Final = (*KIND_NAMES, Kind.RECOMPUTED, Kind.PAGED_IN)
"""Parts and kinds of bands, from the bottom."""


def solved() -> tuple[dict[str, Any], pm.SolveResult]:
    """Return the timeline of the best schedule's plan, and the result that has the schedule."""
    graph = load_model(MODEL)
    costs = pm.Costs.estimate(graph, pm.Device.load(DEVICE))
    problem = pm.Problem(graph, costs, ram=RAM)
    result = pm.solve(problem)
    budget = problem.ram_budget_bytes
    schedule = result.require_schedule()
    plan = make_plan(graph, costs, schedule, mode="blocking", ram_budget_bytes=budget)
    return plan_chart(graph, plan, check_plan(graph, costs, plan)), result


def chart(timeline: Mapping[str, Any], result: pm.SolveResult) -> Chart:
    """Return the picture: bands by what they are, the ghost of keep-all, the budget."""
    bands: dict[str, list[Any]] = {}
    for form, runs in stack_bands(result.problem.graph, timeline):
        bands.setdefault(form, []).append(runs)
    overhead = 100 * (result.overhead_j or 0.0) / result.problem.baseline_energy_j
    peak = format_bytes(0 if result.simulation is None else result.simulation.peak_ram_bytes)
    shown = {
        "title": f"One training step of {MODEL} on {DEVICE}",
        "bands": {form: bands[form] for form in _FORMS if form in bands},
        "ghost": tuple(keep_all_curve(timeline)),
        "kept": f"keep-all: {format_bytes(max(timeline['ghost'][1]))}",
        "limit": timeline["budget"] / timeline["scale"],
        "budget": f"poetmodel: {peak}, +{overhead:.1f} % energy",
        "axes": [f"time [{timeline['unit']}]", f"RAM [{timeline['size']}]"],
    }
    return Chart(shown=shown, paint=_paint, height_inches=3.9)


def _paint(figure: Any, shown: Any) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    axes = figure.subplots()
    x, y = zip(*shown["ghost"], strict=True)
    axes.fill_between(x, y, step="post", color="#dddddd", linewidth=0, zorder=0.5)
    axes.step(x, y, where="post", color=GREY, linewidth=1)
    top = max(y)
    handles = []
    for form, bands in shown["bands"].items():
        colour = band_colour(form)
        polygons = [band_outline(runs) for runs in bands]
        axes.add_collection(
            PolyCollection(polygons, facecolor=colour, edgecolor="#ffffff", linewidth=0.25)
        )
        handles.append(Patch(color=colour, label=form))
    axes.axhline(shown["limit"], color=RED, linewidth=1.5, linestyle="--")
    axes.annotate(shown["kept"], (x[y.index(top)], top), (0, 5), **_WORDS, ha="center")
    axes.annotate(shown["budget"], (0.5 * x[-1], shown["limit"]), (0, 5), **_WORDS, ha="center")
    axes.set(xlim=(0, x[-1]), ylim=(0, 1.12 * top), title=shown["title"])
    axes.set(xlabel=shown["axes"][0], ylabel=shown["axes"][1])
    axes.grid(visible=False)
    axes.legend(handles=handles, loc="upper right")


_WORDS: Final[Any] = {"textcoords": "offset points", "size": 12, "weight": "bold"}


if __name__ == "__main__":
    chart(*solved()).write(PICTURE)
    sys.stdout.write(f"wrote {PICTURE}\n")
