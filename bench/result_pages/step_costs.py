"""What the page of results says of the cost of a compiled step, and of convolutions in parts."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from blocks import table
from result_pages.records import circumstances, percent_text, seconds_text
from result_pages.training import bytes_text

if TYPE_CHECKING:
    from collections.abc import Sequence

_MODES: Final = {"new": "new gradients", "added": "gradients that are added to"}


def section(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return what the page of results says of both."""
    steps = [record for record in records if record["kind"] == "step-cost"]
    convolutions = [record for record in records if record["kind"] == "convolutions"]
    torch = ", ".join(sorted({record["torch"] for record in records}))
    pairs = ", ".join(sorted({str(record["cell"]["pairs"]) for record in steps}, key=int))
    return "\n\n".join(
        [
            "## What a compiled step costs",
            f"From `bench/results/{source}`. {circumstances(records, packages=f'torch {torch}, ')}"
            f", one thread, {pairs} pairs of steps.",
            "### Steps that keep everything",
            "The median over pairs of the time of the processor, beside that of the same step of "
            "eager PyTorch: guards, Python and handing out gradients are in it. Under *heap kept* "
            "glibc gives no memory back to the kernel (`MALLOC_TRIM_THRESHOLD_` and "
            "`MALLOC_MMAP_THRESHOLD_`), so that no step takes page faults; under *default* "
            "either kind of step may take thousands, as its blocks happen to lie. That is the "
            "most that one block of memory with planned addresses could save.",
            steps_table(steps),
            "### Convolutions in parts",
            "The least budget as a share of keeping everything, when no convolution is divided "
            "and when those are that need much of it, and the time of the processor of these "
            "both ways. *Equal* counts those whose results on the step's own data have the same "
            "bits; *trials* is what `compile` takes to find the parts.",
            convolutions_table(convolutions),
        ]
    )


def steps_table(records: Sequence[dict[str, Any]]) -> str:
    """Return how long steps take beside eager's, and their page faults, by network and heap."""
    heads = ["network", "heap", "eager step"]
    for told in _MODES.values():
        heads += [f"{told}: time", "page faults", "eager's"]
    rows = []
    for record in records:
        row = [f"`{record['cell']['network']}`", record["cell"]["heap"]]
        row.append(seconds_text(statistics.median(pair[2] for pair in record["new"])))
        for mode in _MODES:
            pairs = record[mode]
            ratio = statistics.median(pair[0] / pair[2] for pair in pairs)
            faults = [statistics.median(pair[place] for pair in pairs) for place in (1, 3)]
            row += [f"{ratio:.3f}", *(f"{count:,.0f}" for count in faults)]
        rows.append(row)
    return table(heads, rows, right=2)


def convolutions_table(records: Sequence[dict[str, Any]]) -> str:
    """Return what dividing convolutions changes, by network."""
    heads = (
        "network",
        "keep-all",
        "least budget",
        "in parts",
        "divided",
        "equal",
        "time",
        "trials",
    )
    rows = []
    for record in records:
        whole_bytes, divided = record["keep_all_bytes"], record["divided"]
        least = [record[key] / whole_bytes for key in ("least_bytes", "least_in_parts_bytes")]
        both = [seconds_text(record[key]) for key in ("whole_s", "parts_s")]
        rows.append(
            (
                f"`{record['cell']['network']}`",
                bytes_text(whole_bytes),
                *(percent_text(ratio, 2) for ratio in least),
                str(divided),
                str(divided - record["unequal"]),
                " -> ".join(both) if divided else "",
                seconds_text(record["trials_s"]) if divided else "",
            )
        )
    return table(heads, rows, right=1)
