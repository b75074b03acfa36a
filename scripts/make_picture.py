"""Draw ``docs/timeline.svg``: the RAM of a schedule over one training step, in front of keep-all's.

``python scripts/make_picture.py`` solves the problem of the README's first command, checks its plan
and draws the RAM curve of the plan checker. One file serves light and dark pages.
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
    """Start, end, lowest and highest value of each segment of a band, in order of time."""

PICTURE: Final = ROOT / "docs" / "timeline.svg"
MODEL, DEVICE, RAM = "mobilenetv2", "rpi4b", "40%"
"""The problem of the README's first command."""
_BAND_KINDS: Final = (*KIND_NAMES, Kind.RECOMPUTED, Kind.PAGED_IN)
"""Kinds of bands, from the bottom."""


def solve_readme_problem() -> tuple[dict[str, Any], pm.SolveResult]:
    """Solve the problem; return the timeline of the best schedule's plan, and the result."""
    graph = load_model(MODEL)
    costs = pm.Costs.estimate(graph, pm.Device.load(DEVICE))
    problem = pm.Problem(graph, costs, ram=RAM)
    result = pm.solve(problem)
    budget_bytes = problem.ram_budget_bytes
    schedule = result.require_schedule()
    plan = make_plan(graph, costs, schedule, mode="blocking", ram_budget_bytes=budget_bytes)
    return plan_chart(graph, plan, check_plan(graph, costs, plan)), result


def make_chart(timeline: Mapping[str, Any], result: pm.SolveResult) -> Chart:
    """Return the picture: bands of RAM by kind of tensor, the curve of keep-all, and the budget."""
    bands: dict[str, list[Any]] = {}
    for kind, segments in stack_bands(result.problem.graph, timeline):
        bands.setdefault(kind, []).append(segments)
    overhead = 100 * (result.overhead_j or 0.0) / result.problem.baseline_energy_j
    peak = format_bytes(0 if result.simulation is None else result.simulation.peak_ram_bytes)
    data = {
        "title": f"One training step of {MODEL} on {DEVICE}",
        "bands": {kind: bands[kind] for kind in _BAND_KINDS if kind in bands},
        "ghost": tuple(keep_all_curve(timeline)),
        "kept": f"keep-all: {format_bytes(max(timeline['ghost'][1]))}",
        "limit": timeline["budget"] / timeline["scale"],
        "budget": f"poetmodel: {peak}, +{overhead:.1f} % energy",
        "axes": [f"time [{timeline['unit']}]", f"RAM [{timeline['size']}]"],
    }
    return Chart(shown=data, paint=_paint, height_inches=3.9)


def _paint(figure: Any, shown: Any) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    axes = figure.subplots()
    times, ram_values = zip(*shown["ghost"], strict=True)
    axes.fill_between(times, ram_values, step="post", color="#dddddd", linewidth=0, zorder=0.5)
    axes.step(times, ram_values, where="post", color=GREY, linewidth=1)
    keep_all_peak = max(ram_values)
    handles = []
    for kind, bands in shown["bands"].items():
        colour = band_colour(kind)
        polygons = [band_outline(segments) for segments in bands]
        axes.add_collection(
            PolyCollection(polygons, facecolor=colour, edgecolor="#ffffff", linewidth=0.25)
        )
        handles.append(Patch(color=colour, label=kind))
    axes.axhline(shown["limit"], color=RED, linewidth=1.5, linestyle="--")
    axes.annotate(
        shown["kept"],
        (times[ram_values.index(keep_all_peak)], keep_all_peak),
        (0, 5),
        **_LABEL_STYLE,
        ha="center",
    )
    axes.annotate(
        shown["budget"], (0.5 * times[-1], shown["limit"]), (0, 5), **_LABEL_STYLE, ha="center"
    )
    axes.set(xlim=(0, times[-1]), ylim=(0, 1.12 * keep_all_peak), title=shown["title"])
    axes.set(xlabel=shown["axes"][0], ylabel=shown["axes"][1])
    axes.grid(visible=False)
    axes.legend(handles=handles, loc="upper right")


_LABEL_STYLE: Final[Any] = {"textcoords": "offset points", "size": 12, "weight": "bold"}


if __name__ == "__main__":
    make_chart(*solve_readme_problem()).write(PICTURE)
    sys.stdout.write(f"wrote {PICTURE}\n")
