"""What the page of results says of whole training steps: updates and all state in the budget."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from blocks import folded, table
from poetmodel.units import format_bytes
from pytorch.runs import KEEP_ALL
from result_pages.records import TrainingRecord, duels, percent_text, seconds_text, share_text
from result_pages.training import (
    budget_text,
    bytes_text,
    conditions,
    decided,
    duels_table,
    ratio_text,
    status_text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


CHART: Final = "results-whole-steps.svg"
"""Name of the section's chart."""


def section(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return what the page of results says of the comparison."""
    runs = [TrainingRecord.of(record) for record in records]
    by_model: dict[tuple[str, str], list[TrainingRecord]] = {}
    for run in runs:
        by_model.setdefault((run.network, run.optimizer or ""), []).append(run)
    parts = [
        "## Whole training steps",
        f"From `bench/results/{source}`, one process a run, one thread. {conditions(records)} "
        "Every step ends with the optimizer's updates, and everything counts: parameters, "
        "gradients, moments, buffers, inputs, activations and workspaces. The *peak* is that of "
        "the process's anonymous memory over its *baseline*: what it holds between steps that is "
        "no tensor, which is Python, PyTorch and, for compiled steps, the solver and the program. "
        "*With files* is the same of all resident pages, by the kernel's high-water mark: state "
        "that is mapped from a file counts there while the kernel keeps it in RAM. "
        "Freed memory goes back to the kernel at once, for all methods. Budgets are shares of the "
        "peak when everything is kept in RAM, or the peak of a peer. *Step* and *processor* are "
        "as above, beside eager with the same optimizer. `both` and `keep-all` have "
        "`rollback=False`, since no peer can undo a step; `safe` is `both` with `rollback=True`, "
        "where a kill at any moment leaves one whole state.",
        _PEERS,
        f"![Time of whole steps against the peak of the process, compiled and others]({CHART})",
        goals_table(runs),
        "### Whole steps at the peaks of others",
        "Each peer against the quickest compiled step whose measured peak is no larger. *Best* is "
        "the quickest peer with no larger peak.",
        folded("Peers of whole steps", duels_table(duels(runs))),
    ]
    for (network, optimizer), found in by_model.items():
        rows = folded("Methods and budgets", model_table(found))
        parts += [f"### `{network}` with {optimizer}", _heading(found), rows]
    return "\n\n".join(parts)


_PEERS = (
    "Peers are small programs of ours after what others do, each with a file in place of the other "
    "memory: `in-backward` updates a parameter as soon as its gradient is there; "
    "`moments-offloaded` has the moments in a file and streams them for the updates, as "
    "DeepSpeed's ZeRO-Offload; `parameters-offloaded` has parameters, gradients and moments there "
    "and fetches parameters block by block, the next beside the computation, as FSDP with its CPU "
    "offload; `-checkpoint` computes each block again too."
)


def goals_table(runs: Sequence[TrainingRecord]) -> str:
    """Return how many runs meet each goal."""
    own = [run for run in runs if run.own]
    ran = [run for run in own if run.ran]
    fought = duels(runs)
    slack = percent_text(max((run.slack for run in runs), default=0.0))
    rows = [
        ("a plan, or a proof that there is none", [decided(run) for run in own]),
        (
            f"peak of the process within the budget, to {slack}: memory comes in whole pages",
            [bool(run.within) for run in ran],
        ),
        (
            "losses, parameters, moments and buffers equal eager's after all steps",
            [run.record["equal"] for run in ran],
        ),
        (
            "at a peer's peak, step no slower than the best peer's",
            [duel.won for duel in fought],
        ),
    ]
    counted = [(goal, share_text(sum(met), len(met))) for goal, met in rows]
    return table(("goal", "runs that meet it"), counted, right=1)


def _heading(runs: Sequence[TrainingRecord]) -> str:
    """Return the peaks that budgets are relative to, and what is subtracted."""
    facts = []
    for words, kind, name in (
        ("eager's peak", "eager", "peak_bytes"),
        ("state between steps", "eager", "state_bytes"),
        ("keeping everything in RAM", KEEP_ALL, "keep_all_bytes"),
    ):
        found = [run.record[name] for run in runs if run.kind == kind and name in run.record]
        if found:
            facts.append(f"{words} {format_bytes(round(statistics.median(found)))}")
    return f"{', '.join(facts)}."


def model_table(runs: Sequence[TrainingRecord]) -> str:
    """Return a line for each method and budget."""
    rows = [
        (
            f"`{run.kind}`",
            budget_text(run),
            bytes_text(run.peak_bytes),
            _of_budget(run),
            bytes_text(run.record.get("process_peak_bytes")),
            bytes_text(run.record.get("baseline_bytes")),
            ratio_text(run.time_ratio),
            ratio_text(run.processor_ratio),
            bytes_text(run.written_bytes),
            _equal(run),
            seconds_text(run.record.get("solve_s")),
            percent_text(run.record.get("gap")),
            status_text(run),
        )
        for run in runs
    ]
    heads = ("method", "budget", "peak", "of budget", "with files", "baseline", "step", "processor")
    return table((*heads, "written", "equal", "solve", "gap", "status"), rows, right=2)


def _of_budget(run: TrainingRecord) -> str:
    """Return which share of its budget a compiled step takes; bold where it is too much."""
    if run.peak_bytes is None or run.budget_bytes is None:
        return "-"
    text = f"{100 * run.peak_bytes / run.budget_bytes:.1f} %"
    return text if run.within else f"**{text}**"


def _equal(run: TrainingRecord) -> str:
    if not run.ran:
        return "-"
    count = run.record["unequal"]
    return "yes" if run.record["equal"] else f"**no**: {count or 'a loss'}"
