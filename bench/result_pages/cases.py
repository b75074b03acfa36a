"""The page of results and the README's table: cases, stating a problem, starting up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from blocks import table
from poetmodel.units import format_bytes
from result_pages import constraints, grid, training
from result_pages.comparison import compared, method_text
from result_pages.records import (
    SolveRecord,
    circumstances,
    made_text,
    percent_text,
    seconds_text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from result_pages.records import Key

IN_README: Final = (
    ("resnet18-cifar", "rpi4b", "40%"),
    ("resnet50", "rpi4b", "50%"),
    ("bert-base", "rpi4b", "50%"),
    ("paper/vgg16-cifar", "paper-m4", "50%"),
    ("paper/vgg16-cifar", "paper-a72", "50%"),
    ("paper/resnet18-cifar", "paper-m4", "50%"),
    ("paper/resnet18-cifar", "paper-a72", "50%"),
)
"""Model, device and budget of the rows of the README's table."""


def solves(records: Sequence[dict[str, Any]], group: str) -> dict[Key, SolveRecord]:
    """Return the solves of one table by problem, in the run's order."""
    runs = [
        SolveRecord.of_case(record)
        for record in records
        if record["kind"] == "solve" and record["case"]["group"] == group
    ]
    return {run.key: run for run in runs}


def default_table(records: Sequence[dict[str, Any]], group: str) -> str:
    """Return the table of problems that are solved by default."""
    rows = []
    for (model, device, ram), run in solves(records, group).items():
        result, counts = run.record["result"], run.record["counts"] or {}
        peak = result["peak_ram_bytes"]
        expected = run.record["case"]["expected_overhead_ratio"]
        rows.append(
            (
                f"`{model}`",
                device,
                ram,
                str(result["status"]),
                percent_text(run.overhead_ratio, 5),
                *([percent_text(expected, 5)] if group == "reference" else []),
                percent_text(result["gap"]),
                run.time_text,
                "-" if peak is None else format_bytes(peak),
                "/".join(
                    str(counts.get(key, "-")) for key in ("recomputed", "paged_out", "paged_in")
                ),
            )
        )
    known = ("known least",) if group == "reference" else ()
    heads = ("graph", "device", "RAM", "status", "overhead", *known, "gap", "time", "peak RAM")
    return table((*heads, "recomputed/out/in"), rows, right=4)


def build_table(records: Sequence[dict[str, Any]]) -> str:
    """Return times and sizes of building and compiling."""
    rows = [
        (
            record["name"].replace(" | ", ", "),
            seconds_text(record["seconds"]),
            f"{record['columns']:,}",
            f"{record['rows']:,}",
        )
        for record in records
        if record["kind"] == "build"
    ]
    return table(("model", "build and compile", "columns", "rows"), rows, right=1)


def startup_table(records: Sequence[dict[str, Any]]) -> str:
    """Return times of whole processes."""
    rows = [
        (f"`{record['name']}`", seconds_text(record["seconds"]), f"{record['rounds']}")
        for record in records
        if record["kind"] == "startup"
    ]
    return table(("process", "median time", "rounds"), rows, right=1)


def limits(records: Sequence[dict[str, Any]]) -> str:
    """Return the limits of the run, in words."""
    solved = [record for record in records if record["kind"] == "solve"]
    times = sorted({record["case"]["limit_s"] for record in solved})
    gaps = {record["result"]["problem"]["gap"] for record in solved}
    unasked = {record["result"]["problem"]["formulation"] for record in solved}
    return (
        f"Limits: {', '.join(f'{limit_s:g} s for default' for limit_s in times)}; "
        f"gap {', '.join(map(str, sorted(gaps)))}; one thread. "
        f"Default is {', '.join(f'`{name}`' for name in sorted(unasked))}."
    )


def page(
    records: Sequence[dict[str, Any]], source: str, *sections: str, opening: Sequence[str] = ()
) -> str:
    """Return the page of results, with how it opens and what it says of other records."""
    parts = [
        "# Results",
        *opening,
        "Also: [what trains where](what-trains-where.md), [on a "
        "microcontroller](on-a-microcontroller.md), [every instance of the "
        "grid](results-grid.md), [the paper's figures, made again](paper-figures.md).",
        "## ResNet-18/CIFAR on a Raspberry Pi",
        f"Generated from `bench/results/{source}` by `scripts/make_results.py`; "
        "[the protocol](../bench/protocol.md) says how it was measured.",
        circumstances(records) + ".",
        limits(records) + " Bold times ended at their limit, with the gap that was left.",
        default_table(records, "main"),
        "## Problems with a known optimum",
        "Compute time counts, no deadline; overhead over the baseline.",
        default_table(records, "reference"),
        "## The zoo",
        default_table(records, "zoo"),
        *sections,
        "## Stating the problem",
        build_table(records),
        "## Starting up",
        startup_table(records),
    ]
    return "\n\n".join(parts) + "\n"


TIMES_CHART, STEPS_CHART = "results-time.svg", "results-pytorch.svg"
"""Names of the page's first charts."""


def opening(
    solved: Sequence[dict[str, Any]],
    constrained: Sequence[dict[str, Any]],
    trained: Sequence[dict[str, Any]],
) -> list[str]:
    """Return what the page begins with: sentences and charts of the grid and of training."""
    parts = []
    if solved:
        words = grid.sentence(solved) + constraints.sentence(constrained)
        parts += [words.strip(), f"![Problems proved to 1 % after which time]({TIMES_CHART})"]
    if trained:
        alt = "Times of compiled steps and of other ways to save memory"
        parts += [training.sentence(trained).strip(), f"![{alt}]({STEPS_CHART})"]
    return parts


def readme_table(
    records: Sequence[dict[str, Any]],
    solved: Sequence[dict[str, Any]],
    constrained: Sequence[dict[str, Any]],
    trained: Sequence[dict[str, Any]],
) -> str:
    """Return the README's block.

    Of the records of all cases, the grid, own constraints, and training methods.
    """
    by_problem = compared(solved)
    own = {**solves(records, "main"), **solves(records, "zoo")}
    rows, beside = [], []
    for key in IN_README:
        published = by_problem.get(key, {})
        run = own.get(key) or published.get("default")
        if run is None:
            continue
        beside += [published[name].record for name in ("default", "paper") if name in published]
        model, device, ram = key
        rows.append(
            (
                f"`{model}`",
                f"`{device}`",
                ram,
                percent_text(run.overhead_ratio),
                percent_text(run.gap),
                seconds_text(run.seconds),
                method_text(published.get("paper")),
            )
        )
    heads = ("network", "device", "RAM", "energy overhead", "proven gap", "time", "`paper`")
    return (
        f"{table(heads, rows, right=2)}\n\n"
        "RAM is relative to keep-all, overhead to a single pass, the gap to "
        "the overhead; `paper` is the published formulation with the same solver, bold where it "
        f"ran into its limit, with its own gap. {circumstances(records)}"
        f"{f'; networks with `paper`: {made_text(beside)}' if beside else ''}. "
        f"{grid.sentence(solved)}{constraints.sentence(constrained)}"
        f"{training.sentence(trained)}"
        "All of it: [docs/results.md](docs/results.md)."
    )
