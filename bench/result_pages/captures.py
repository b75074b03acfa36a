"""What the page of results says of captured models: budget by budget, and graph by graph."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from blocks import table
from poetmodel.units import format_bytes
from result_pages.comparison import method_text
from result_pages.records import ONE_PERCENT, feasible, ram_place, seconds_text, share_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from result_pages.records import SolveRecord

FIVE_PERCENT: Final = 0.05
"""Gap that all of them are to be proved to."""


def section(runs: Sequence[SolveRecord]) -> str:
    """Return both tables of a goal's runs, and what one cannot see in them."""
    return "\n\n".join(
        (
            budgets_table(runs),
            "First schedule is when the solve told of it. Memory is that of the process and of "
            "the one that it starts with two threads, the most of each; late are solves that "
            "took a second longer than their limit.",
            graphs_table(runs),
        )
    )


def _budgets(runs: Sequence[SolveRecord]) -> list[str]:
    """Return the budgets, the largest first."""
    return sorted({run.cell["ram"] for run in runs}, key=ram_place, reverse=True)


def budgets_table(runs: Sequence[SolveRecord]) -> str:
    """Return a line for each budget, and one for all."""
    groups = {ram: [run for run in runs if run.cell["ram"] == ram] for ram in _budgets(runs)}
    rows = [_budget_row(ram, of_budget) for ram, of_budget in (groups | {"all": runs}).items()]
    heads = (
        *("RAM", "instances", "within 1 %", "within 5 %", "median time"),
        *("median first schedule", "latest", "most memory", "late"),
    )
    return table(heads, rows, right=1)


def _budget_row(ram: str, runs: Sequence[SolveRecord]) -> tuple[str, ...]:
    able = feasible(runs)
    first = [seconds for run in able if (seconds := run.record.get("first_schedule_s")) is not None]
    memory = [used for run in runs if (used := run.memory_bytes) is not None]
    return (
        ram,
        f"{len(able)}",
        *(
            share_text(sum(run.within(gap) for run in able), len(able))
            for gap in (ONE_PERCENT, FIVE_PERCENT)
        ),
        seconds_text(statistics.median(run.seconds for run in able) if able else None),
        seconds_text(statistics.median(first) if first else None),
        seconds_text(max(first, default=None)) if len(first) == len(able) else "never",
        format_bytes(max(memory)) if memory else "-",
        f"{sum(run.late for run in runs)}",
    )


def graphs_table(runs: Sequence[SolveRecord]) -> str:
    """Return a line for each graph, with its time at each budget and the gap that was left."""
    by_graph: dict[str, dict[str, SolveRecord]] = {}
    for run in runs:
        by_graph.setdefault(run.cell["model"], {})[run.cell["ram"]] = run
    budgets = _budgets(runs)
    rows = [
        (
            f"`{graph}`",
            f"{max(run.record.get('graph_nodes', 0) for run in found.values()):,}",
            *(method_text(found.get(ram)) for ram in budgets),
        )
        for graph, found in by_graph.items()
    ]
    return table(("graph", "nodes", *budgets), rows, right=1)
