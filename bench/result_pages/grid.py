"""What the pages of results say of the grid: summaries, misses, comparison, full tables."""

from __future__ import annotations

import math
import statistics
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from blocks import folded, table
from grid import CAPTURED
from poetmodel.units import format_bytes
from result_pages import captures, comparison
from result_pages.comparison import method_text
from result_pages.records import (
    ONE_PERCENT,
    SolveRecord,
    circumstances,
    days_text,
    feasible,
    made_text,
    of_goal,
    percent_text,
    percentile,
    seconds_text,
    share_text,
    threads_text,
    versions_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


ONE_TENTH: Final = 0.001
"""Gap that most of them are to be proved to."""
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


def summary_table(records: Sequence[dict[str, Any]], registered: Mapping[int, int]) -> str:
    """Return a line for each goal: how many instances, how far they came, how long they took."""
    rows = []
    for goal, (heading, _) in GOALS.items():
        runs = of_goal(records, goal)
        if not runs:
            continue
        able = feasible(runs)
        below = sum(run.below_floor for run in runs)
        times = [run.seconds for run in able]
        rows.append(
            (
                heading,
                _share_run(len(runs), registered.get(goal, len(runs))),
                f"{below}",
                f"{len(runs) - len(able) - below}",
                f"{len(able)}",
                share_text(sum(run.within(ONE_PERCENT) for run in able), len(able)),
                share_text(sum(run.within(ONE_TENTH) for run in able), len(able)),
                seconds_text(statistics.median(times) if times else None),
                seconds_text(percentile(times, 0.95) if times else None),
                seconds_text(_median_to(able, ONE_PERCENT)),
            )
        )
    heads = (
        "grid",
        "instances",
        "below the minimum RAM",
        "else infeasible",
        "others",
        "proved to 1 %",
        "to 0.1 %",
        "median time",
        "95th percentile",
        "median to 1 %",
    )
    return table(heads, rows, right=1)


def _share_run(count: int, registered: int) -> str:
    return f"{count}" if count >= registered else f"{count} of {registered:,}"


def unfinished(records: Sequence[dict[str, Any]], registered: Mapping[int, int]) -> str:
    """Return a sentence where instances of the registry are not on record; "" where all are."""
    missing = {
        goal: count - len(of_goal(records, goal))
        for goal, count in registered.items()
        if len(of_goal(records, goal)) < count
    }
    if not missing:
        return ""
    told = ", ".join(f"{count:,} of goal {goal}" for goal, count in missing.items())
    return (
        f"The run is not complete: instances that are missing are {told}. Within each command of a "
        "run the order is mixed, the same each time, so that what is there is a sample, not a "
        "choice. "
    )


def _again(twice: Mapping[str, SolveRecord]) -> str:
    """Return a sentence on the instances that were solved again; "" where none was."""
    if not twice:
        return ""
    within = sum(run.within(ONE_PERCENT) for run in twice.values())
    refuted = sum(run.status == "infeasible" for run in twice.values())
    also = f", and {refuted} were proved infeasible" if refuted else ""
    records = [run.record for run in twice.values()]
    where = f"{days_text(records)}, {records[0]['machine']['cpu']}"
    return (
        f"Of the instances that one thread left above 1 %, {len(twice)} were solved again with "
        f"two threads ({where}), one at a time; {within} then ended within 1 %{also}. "
        "Summaries do not count them. "
    )


def _median_to(runs: Sequence[SolveRecord], gap: float) -> float | None:
    """Return the median time to a gap; runs that never had it count as longer than all others."""
    times = [run.time_to(gap) for run in runs]
    middle = statistics.median([math.inf if value is None else value for value in times] or [0.0])
    return middle if math.isfinite(middle) and times else None


def worst_table(
    runs: Sequence[SolveRecord], twice: Mapping[str, SolveRecord] = MappingProxyType({})
) -> str:
    """Return the instances that were not proved to 1 %, those with the largest gaps first.

    Where one was solved again with two threads, as `twice` has it by name, it says how far.
    """
    able = feasible(runs)
    missed = [run for run in able if not run.within(ONE_PERCENT)]
    if not missed:
        return "Every feasible instance was proved to 1 %."
    missed.sort(key=lambda run: -(math.inf if run.gap is None else run.gap))
    rows = [
        (
            run.label,
            run.status,
            seconds_text(run.seconds),
            percent_text(run.gap),
            percent_text(run.overhead_ratio),
            f"{run.size('columns'):,}",
            *((method_text(twice.get(run.record["name"])),) if twice else ()),
        )
        for run in missed[:WORST]
    ]
    last = ("two threads",) if twice else ()
    heads = ("instance", "status", "time", "gap", "overhead", "columns", *last)
    more = f"{len(missed)} of {len(able)} were not proved to 1 %"
    more += f"; the worst {WORST}:" if len(missed) > WORST else ":"
    return f"{more}\n\n{table(heads, rows, right=2)}"


def by_model_table(runs: Sequence[SolveRecord]) -> str:
    """Return a line for each graph of a goal."""
    rows = []
    for model, of_model in _grouped(runs).items():
        able = feasible(of_model)
        if not able:
            continue
        times = [run.seconds for run in able]
        gaps = [math.inf if run.gap is None else run.gap for run in able]
        worst = max(gaps)
        rows.append(
            (
                f"`{model}`",
                f"{of_model[0].record.get('graph_nodes', 0):,}",
                f"{len(able)}",
                f"{sum(run.within(ONE_PERCENT) for run in able)}",
                f"{sum(run.within(ONE_TENTH) for run in able)}",
                seconds_text(statistics.median(times)),
                seconds_text(percentile(times, 0.95)),
                percent_text(worst) if math.isfinite(worst) else "no schedule",
            )
        )
    heads = (
        "graph",
        "nodes",
        "instances",
        "1 %",
        "0.1 %",
        "median",
        "95th percentile",
        "worst gap",
    )
    return table(heads, rows, right=1)


def _grouped(runs: Sequence[SolveRecord]) -> dict[str, list[SolveRecord]]:
    found: dict[str, list[SolveRecord]] = {}
    for run in runs:
        found.setdefault(run.cell["model"], []).append(run)
    return found


def free_size_sentence(records: Sequence[dict[str, Any]]) -> str:
    """Return which share of the first grid fits the licence that comes with Gurobi."""
    able = feasible(of_goal(records, 1))
    fitting = sum(
        run.size("columns") <= FREE_SIZE and run.size("rows") <= FREE_SIZE for run in able
    )
    return (
        f"All models of all rounds have at most {FREE_SIZE:,} columns and {FREE_SIZE:,} rows, "
        "which is what the licence that comes with Gurobi takes, in "
        f"{share_text(fitting, len(able))} of the feasible instances of this grid."
    )


def sentence(records: Sequence[dict[str, Any]]) -> str:
    """Return how many of the published instances were proved, in one sentence and a space."""
    able = feasible(of_goal(records, 1))
    if not able:
        return ""
    proved = share_text(sum(run.within(ONE_PERCENT) for run in able), len(able))
    middle = seconds_text(statistics.median(run.seconds for run in able))
    return (
        "On the published graphs, with RAM from 2 % above the least that a step needs to 90 % and "
        f"with four deadlines, {proved} feasible problems were proved to 1 % of the overhead "
        f"within 60 s on {threads_text([run.record for run in able])}; the median took {middle} "
        f"({made_text([run.record for run in able])}). "
    )


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
    twice = {record["name"]: SolveRecord(record) for record in again}
    parts = [
        "## The grid",
        f"From {source}, one process an instance; "
        f"[every instance](results-grid.md). {_circumstances(records)} A budget of `floor+2%` is "
        "1.02 times the minimum RAM; all others are shares of the "
        "keep-all peak. Budgets below the minimum RAM are proved infeasible at once and counted "
        "apart. Every other instance counts, those without a schedule and those that ran into "
        "their limit included, with the time that they took. "
        f"{_again(twice)}{unfinished(records, registered)}".strip(),
        summary_table(records, registered),
    ]
    for goal, (heading, wanted) in GOALS.items():
        runs = of_goal(records, goal)
        if runs:
            captured = goal in CAPTURED
            graphs = captures.section(runs) if captured else by_model_table(runs)
            worst = worst_table(runs, {} if captured else twice)
            parts += [f"### {heading}", wanted, graphs, worst]
        if runs and goal == 1:
            parts.append(free_size_sentence(records))
        if runs and goal == 4:
            parts += [f"![Time and memory against nodes]({SCALE_CHART})", full_table(runs)]
    if of_goal(records, 5):
        parts += [f"### {AGAINST_OTHERS}", comparison.section(records)]
    return "\n\n".join(parts)


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


def full_table(runs: Sequence[SolveRecord]) -> str:
    """Return a line for each instance that is not below the minimum RAM."""
    rows = []
    for run in runs:
        if run.below_floor:
            continue
        cell, counts = run.cell, run.record.get("statistics", {})
        memory = run.memory_bytes
        rows.append(
            (
                f"`{cell['model']}`" if cell["goal"] != 1 else cell["device"],
                *((cell["device"],) if cell["goal"] != 1 else ()),
                cell["ram"],
                cell["deadline"] or "-",
                run.status if cell["method"] == "default" else f"{cell['method']}: {run.status}",
                run.time_text,
                percent_text(run.gap),
                percent_text(run.overhead_ratio, 5),
                f"{run.size('columns'):,}",
                f"{run.size('rows'):,}",
                str(counts.get("rounds", "-")),
                seconds_text(run.record.get("first_schedule_s")),
                "-" if memory is None else format_bytes(memory),
            )
        )
    first = ("device",) if runs and runs[0].cell["goal"] == 1 else ("graph", "device")
    heads = (*first, "RAM", "deadline", "status", "time", "gap", "overhead", "columns", "rows")
    return table((*heads, "rounds", "first schedule", "memory"), rows, right=len(first) + 3)


def full_page(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return the page of every instance."""
    return "\n\n".join(_full_parts(records, source)) + "\n"


def _full_parts(records: Sequence[dict[str, Any]], source: str) -> Iterator[str]:
    yield "# Every instance of the grid"
    yield (
        "What memory costs: the least energy of a training step beyond that of computing "
        "everything once, by how much RAM there is, without a deadline. Colours are devices; "
        "lines that lie on each other are equal."
    )
    yield f"![Energy overhead against the RAM budget, graph by graph]({OVERHEAD_CHART})"
    yield (
        f"Generated from {source} by `scripts/make_results.py`; summaries are in "
        "[the results](results.md). Bold times ended at their limit. Columns and rows are those of "
        "the largest model solved; memory is the most that the whole process had resident. "
        "Budgets below the minimum RAM are left out here: they are proved infeasible at once."
    )
    for goal, heading in HEADINGS.items():
        runs = of_goal(records, goal)
        if not runs:
            continue
        yield f"## {heading}"
        if goal != 1:
            yield folded(heading, full_table(runs))
            continue
        for model, of_model in _grouped(runs).items():
            yield f"### `{model}`"
            yield folded(f"All of <code>{model}</code>", full_table(of_model))
