"""How long solves of training steps take, and graphs without state by two states of the code."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from against import BEFORE, HERE
from blocks import folded, table
from poetmodel.units import format_bytes
from result_pages.records import (
    ONE_PERCENT,
    circumstances,
    percent_text,
    percentile,
    seconds_text,
    share_text,
)
from what_trains_where import METHODS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from result_pages.trains import StepRecord

GOAL_S: Final = 10.0
"""Wanted median time to 1 % for the networks of MLPerf Tiny [s]."""
LARGER_GAP: Final = 0.02
"""Gap that larger networks are to be proved to within their limit."""


def speed(policies: Sequence[StepRecord], larger: Sequence[StepRecord]) -> str:
    """Return how long solves take, against what was wanted."""
    parts = []
    best = [run for run in policies if run.cell["method"] == METHODS[0]]
    if best:
        times = [run.record["seconds"] for run in best]
        proved = share_text(
            sum((run.gap or 0) <= ONE_PERCENT and run.proved for run in best), len(best)
        )
        middle = statistics.median(times)
        processor = [run.record["cpu_s"] for run in best if "cpu_s" in run.record]
        of_it = (
            f" ({seconds_text(statistics.median(processor))} of the processor)" if processor else ""
        )
        met = "met" if middle <= GOAL_S else "missed"
        parts.append(
            f"Networks of MLPerf Tiny at the budgets above, to 1 % within "
            f"{best[0].cell['limit_s']:g} s: {proved} proved, median time "
            f"{seconds_text(middle)}{of_it}, 95th percentile "
            f"{seconds_text(percentile(times, 0.95))}. Wanted was a median of "
            f"{GOAL_S:g} s, which is {met}."
        )
    if larger:
        limit = larger[0].cell["limit_s"]
        proved = share_text(
            sum(run.gap is not None and run.gap <= LARGER_GAP for run in larger), len(larger)
        )
        parts.append(
            f"Larger networks with their state in the graph and operators in place, on "
            f"`{larger[0].cell['device']}`: {proved} are proved to {percent_text(LARGER_GAP)} "
            f"within {limit:g} s, which was wanted of all."
        )
        rows = [
            (
                run.cell["network"],
                run.cell["ram"].replace("+", " + "),
                f"{run.record['graph_nodes']:,}",
                format_bytes(run.record["state_bytes"]),
                run.status,
                percent_text(run.overhead_ratio),
                percent_text(run.gap),
                run.time_text,
            )
            for run in larger
        ]
        heads = ("network", "budget", "nodes", "state", "status", "overhead", "gap", "time")
        parts.append(table(heads, rows, right=2))
    return "\n\n".join(parts)


def code_section(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return how the grid's instances fare against an earlier commit."""
    best: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        cell = record["cell"]
        if "cpu_s" not in record:
            continue  # it failed
        label = ", ".join(
            filter(None, (f"`{cell['model']}`", cell["device"], cell["ram"], cell["deadline"]))
        )
        kept = best.setdefault(label, {}).get(cell["code"])
        if kept is None or record["cpu_s"] < kept["cpu_s"]:
            best[label][cell["code"]] = record
    rows, ratios = [], []
    whole = {HERE: 0.0, BEFORE: 0.0}
    for label, codes in best.items():
        if {HERE, BEFORE} <= codes.keys():
            here, before = codes[HERE], codes[BEFORE]
            ratios.append(here["cpu_s"] / before["cpu_s"])
            whole = {code: whole[code] + codes[code]["cpu_s"] for code in whole}
            rows.append(
                (
                    label,
                    *map(_processor_text, (before, here)),
                    f"{ratios[-1]:.2f}",
                    *(percent_text(each.get("gap")) for each in (before, here)),
                )
            )
    commits = {record["cell"]["code"]: record["commit"][:7] for record in records}
    said = (
        f"From `bench/results/{source}`: a sample of [the grid](results-grid.md), where no state "
        f"is in the graph, by commit {commits.get(BEFORE)}, before there was any, and by "
        f"{commits.get(HERE)}, one right after the other; processor time, the least of each, "
        "bold where the limit of wall time ended it. "
        f"{circumstances(records)}."
    )
    if ratios:
        said += (
            f" The median of the ratios is {statistics.median(ratios):.2f}, the largest "
            f"{max(ratios):.2f}; all together took {seconds_text(whole[BEFORE])} before and "
            f"{seconds_text(whole[HERE])} now."
        )
    heads = ("instance", "before", "now", "ratio", "gap before", "gap now")
    return f"{said}\n\n{folded('Instances', table(heads, rows, right=1))}"


def _processor_text(record: Mapping[str, Any]) -> str:
    text = seconds_text(record["cpu_s"])
    return text if record["status"] in ("optimal", "infeasible") else f"**{text}**"
