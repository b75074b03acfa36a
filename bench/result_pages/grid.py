"""What the pages of results say of the grid: summaries, misses, comparison, full tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from grid import CAPTURED
from result_pages import comparison
from result_pages.records import (
    Sample,
    SolveRecord,
    circumstances,
    of_goal,
    threads_text,
    versions_text,
)
from result_pages.rendering import render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


FREE_SIZE: Final = 2000
"""Columns, and rows, that the licence that comes with Gurobi takes."""
WORST: Final = 15
"""How many instances with the largest gaps are named for each goal."""

SCALE_CHART, OVERHEAD_CHART = "results-scale.svg", "results-overhead.svg"
"""Names of charts."""
AGAINST_OTHERS: Final = "Against others"
"""Heading of the comparison with other formulations."""
GOALS: Final = {
    1: (
        "Published graphs",
        "Wanted: every feasible instance within 1 % after at most 60 s, 95 % of them within "
        "0.1 %, and a median below 1 s.",
    ),
    2: (
        "The zoo on every device",
        "Wanted: 95 % of the instances within 1 % after at most 60 s, all within 5 %.",
    ),
    3: ("Graphs traced from PyTorch", "Wanted: every instance within 1 % after at most 60 s."),
    4: (
        "Scale",
        "Wanted: BERT of 24, 48 and 96 blocks within 1 % after at most 1, 3 and 10 minutes, with "
        "less than 4 GB of memory.",
    ),
    6: (
        "Captured models",
        "Steps of models as people train them, captured from PyTorch, with the costs that were "
        "measured then. Wanted: 90 % of the instances within 1 % after at most 60 s, all within "
        "5 %, a median below 5 s, the first schedule within 1 s, with less than 2 GB of memory.",
    ),
    7: (
        "Captured whole steps",
        "Some of the same with the updates of AdamW, their state and operators in place. Wanted: "
        "the same within 120 s.",
    ),
}
"""Heading of each goal, and what is wanted of it."""
HEADINGS: Final = {goal: heading for goal, (heading, _) in GOALS.items()} | {5: AGAINST_OTHERS}
"""Heading of each goal, the comparison with other formulations included."""

# -- parts of the page -----------------------------------------------------------------------------


def sentence(records: Sequence[dict[str, Any]]) -> str:
    """Return how many of the published instances were proved, in one sentence and a space."""
    sample = Sample(of_goal(records, 1))
    return f"{render('grid-sentence', sample=sample)} " if sample.able else ""


def _circumstances(records: Sequence[dict[str, Any]]) -> str:
    """Return when, where and with how many threads; of several, which parts had which."""
    by_goal: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        by_goal.setdefault(record["cell"]["goal"], []).append(record)
    places: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for together in by_goal.values():
        for record in together:
            machine = record["machine"]
            place = machine["cpu"], versions_text(machine), threads_text(together)
            places.setdefault(place, []).append(record)
    if len(places) == 1:
        return f"{_circumstance(records)}."
    return " ".join(f"{_parts(there)}: {_circumstance(there)}." for there in places.values())


def _parts(records: Sequence[dict[str, Any]]) -> str:
    goals = sorted({record["cell"]["goal"] for record in records})
    return ", ".join(f"*{HEADINGS[goal]}*" for goal in goals)


def _circumstance(records: Sequence[dict[str, Any]]) -> str:
    workers = max(record.get("workers", 1) for record in records)
    at_a_time = "one instance at a time" if workers == 1 else f"{workers} instances at a time"
    return circumstances(records, where=f"{at_a_time} with {threads_text(records)} each")


# -- pages -----------------------------------------------------------------------------------------


def section(
    records: Sequence[dict[str, Any]],
    source: str,
    *,
    registered: Mapping[int, int],
    again: Sequence[dict[str, Any]] = (),
) -> str:
    """Return what the page of results says of the grid.

    `source` names the files, `registered` says how many instances each goal has; `again` are
    records of instances that were solved again with two threads.
    """
    samples = {goal: Sample(of_goal(records, goal)) for goal in HEADINGS}
    counts = {goal: len(of_goal(records, goal)) for goal in registered}
    able = samples[1].able
    return render(
        "grid",
        source=source,
        circumstance=_circumstances(records),
        samples={goal: samples[goal] for goal in GOALS if samples[goal].runs},
        goals=GOALS,
        registered=registered,
        missing={
            goal: count - counts[goal] for goal, count in registered.items() if counts[goal] < count
        },
        twice=Sample([SolveRecord(record) for record in again]),
        again={record["name"]: SolveRecord(record) for record in again},
        captured=CAPTURED,
        free_size=FREE_SIZE,
        fitting=sum(
            run.size("columns") <= FREE_SIZE and run.size("rows") <= FREE_SIZE for run in able
        ),
        worst=WORST,
        chart=SCALE_CHART,
        heading=HEADINGS[5],
        comparison=comparison.section(records) if samples[5].runs else "",
    )


def full_page(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return the page of every instance."""
    text = render(
        "results-grid",
        source=source,
        samples={HEADINGS[goal]: (goal, Sample(of_goal(records, goal))) for goal in HEADINGS},
        chart=OVERHEAD_CHART,
    )
    return f"{text}\n"
