"""What the page of results says of the comparison of training methods, whole steps included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pytorch.runs import KEEP_ALL
from result_pages.records import Duel, TrainingRecord, duels, savings
from result_pages.rendering import render

if TYPE_CHECKING:
    from collections.abc import Sequence

LESS_WRITTEN: Final = 0.4
"""Share of the file hook's bytes that is not to be written."""
OVERHEAD: Final = 0.03
"""Most that a compiled step with room for everything is to take longer than eager."""
WHOLE_STEPS_CHART: Final = "results-whole-steps.svg"
"""Name of the chart of whole steps."""


def section(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return what the page of results says of the comparison."""
    context = _context(records)
    runs, compiled = context["runs"], context["compiled"]
    keep_all = [run for run in compiled if run.kind == KEEP_ALL and run.ran]
    return render(
        "training",
        source=source,
        less={
            method: [saved is not None and saved >= LESS_WRITTEN for saved in savings(runs, method)]
            for method in ("both", "paging")
        },
        slower={
            clock: [ratio <= 1 + OVERHEAD for ratio in ratios if ratio is not None]
            for clock, ratios in (
                ("clock", [run.time_ratio for run in keep_all]),
                ("processor", [run.processor_ratio for run in keep_all]),
            )
        },
        keep_all=KEEP_ALL,
        less_written=LESS_WRITTEN,
        overhead=OVERHEAD,
        **context,
    )


def whole_section(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return what the page of results says of whole steps: updates and all state in the budget."""
    return render(
        "whole-steps",
        source=source,
        chart=WHOLE_STEPS_CHART,
        keep_all=KEEP_ALL,
        **_context(records),
    )


def _context(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what both sections are made from."""
    runs = [TrainingRecord.of(record) for record in records]
    compiled = [run for run in runs if run.own]
    groups: dict[tuple[str, str], list[TrainingRecord]] = {}
    for run in runs:
        groups.setdefault((run.network, run.optimizer or ""), []).append(run)
    return {
        "records": records,
        "runs": runs,
        "compiled": compiled,
        "ran": [run for run in compiled if run.ran],
        "duels": duels(runs),
        "groups": groups,
    }


def sentence(records: Sequence[dict[str, Any]]) -> str:
    """Return how compiled steps fared, in one sentence and a space; "" without records."""
    context = _context(records)
    return f"{render('training-sentence', **context)} " if context["ran"] else ""


def duels_table(fought: Sequence[Duel]) -> str:
    """Return a line for each peer."""
    return render("duels", duels=fought)
