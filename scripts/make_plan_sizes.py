"""Put the sizes of coded plans into ``docs/plans.md``.

``python scripts/make_plan_sizes.py`` solves every case of the table and plans it in both modes,
which takes a few minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from blocks import replace_block, table, update_pages
from poetmodel import Costs, Device, Graph, Problem, solve
from poetmodel.device import StorageMode
from poetmodel.graph.catalogue import load_model
from poetmodel.plan import Op, check_plan, decode, encode
from poetmodel.planner import make_plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel import Schedule

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "plans.md"
MODELS: Final = ("paper/resnet18-cifar", "paper/vgg16-cifar", "paper/bert")
DEVICES: Final = ("paper-m4", "paper-a72")
BUDGETS: Final = ("30%", "40%", "50%", "60%", "70%")
GAP: Final = 1e-3
TIME_LIMIT_S: Final = 60.0
HEADS: Final = (
    "network",
    "device",
    "budget",
    "recomputed",
    "paged out, in",
    "blocking: program",
    "coded",
    "dma: program",
    "coded",
)


def rows() -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table; a budget below the minimum RAM has none."""
    for model in MODELS:
        graph = load_model(model)
        for device in DEVICES:
            costs = Costs.estimate(graph, Device.load(device))
            for budget in BUDGETS:
                problem = Problem(graph, costs, ram=budget)
                schedule = solve(problem, gap=GAP, time_limit=TIME_LIMIT_S).schedule
                if schedule is not None:
                    yield (model, device, budget, *_figures(problem, schedule))


def _figures(problem: Problem, schedule: Schedule) -> tuple[str, ...]:
    graph = problem.graph
    moved = f"{len(schedule.M_out)}, {len(schedule.M_in)}"
    figures = [str(len(schedule.R) - len(graph.nodes)), moved]
    for mode in StorageMode:
        figures += _coded(problem, graph, schedule, mode)
    return tuple(figures)


def _coded(
    problem: Problem, graph: Graph, schedule: Schedule, mode: StorageMode
) -> tuple[str, str]:
    """Return how many instructions a plan has and how many bytes; it must be valid and come back.

    Raises
    ------
    ValueError
        If it does not.
    """
    budget = problem.usable_ram_bytes
    plan = make_plan(graph, problem.costs, schedule, mode=mode, ram_budget_bytes=budget)
    data = encode(graph, plan)
    if check_plan(graph, problem.costs, plan).violations or decode(graph, data) != plan:
        msg = f"the plan of {graph.name} at {budget} B, {mode}, is not valid or does not come back"
        raise ValueError(msg)
    waits = sum(step.op == Op.WAIT for step in plan.program)
    remark = f" ({waits} waits)" if waits else ""
    return f"{len(plan.program)}{remark}", f"{len(data)} B"


def main() -> int:
    """Make the table; return the exit status."""
    text = PAGE.read_text(encoding="utf-8")
    block = table(HEADS, list(rows()), right=3)
    return update_pages({PAGE: replace_block(text, "sizes", block)}, check=False)


if __name__ == "__main__":
    sys.exit(main())
