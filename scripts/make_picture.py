"""Draw ``docs/timeline.svg``: the RAM of a schedule over one training step, in front of keep-all's.

``python scripts/make_picture.py`` solves the problem of the README's first command, checks its plan
and draws its RAM as reports do. One file serves light and dark pages.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import poetmodel as pm
from poetmodel.graph.catalogue import load_model
from poetmodel.plan import check_plan
from poetmodel.planner import make_plan
from poetmodel.report.still import draw_stack
from poetmodel.report.timeline import plan_chart
from poetmodel.units import format_bytes

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "bench"))

from charts import Chart  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping

PICTURE: Final = ROOT / "docs" / "timeline.svg"
MODEL, DEVICE, RAM = "mobilenetv2", "rpi4b", "40%"
"""The problem of the README's first command."""
_LABEL_STYLE: Final[Any] = {
    "textcoords": "offset points",
    "size": 12,
    "weight": "bold",
    "ha": "center",
}


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
    """Return the picture: RAM by kind of tensor, the curve of keep-all, and the budget."""
    overhead = 100 * (result.overhead_j or 0.0) / result.problem.baseline_energy_j
    keep_all, budget = max(timeline["ghost"][1]), timeline["budget"]
    texts = {
        keep_all: f"keep-all: {format_bytes(keep_all)}",
        budget: f"poetmodel: {format_bytes(result.peak_ram_bytes or 0)}, +{overhead:.1f} % energy",
    }

    def paint(figure: Any, _: Any) -> None:
        axes = figure.subplots()
        draw_stack(axes, result.problem.graph, timeline)
        centre = timeline["issued"][-1] / 2
        for size, text in texts.items():
            axes.annotate(text, (centre, size / timeline["scale"]), (0, 5), **_LABEL_STYLE)
        axes.set(title=f"One training step of {MODEL} on {DEVICE}")
        axes.set_ylim(top=1.12 * keep_all / timeline["scale"])
        axes.grid(visible=False)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[1:-1], labels[1:-1], loc="upper right")  # only bands

    return Chart(shown=texts, paint=paint, height_inches=3.9)


if __name__ == "__main__":
    make_chart(*solve_readme_problem()).write(PICTURE)
    sys.stdout.write(f"wrote {PICTURE}\n")
