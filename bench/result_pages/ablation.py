"""What `bench/lazy-records.md` says of the ablation: means over a sample, and single runs."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from cases import GAP

from poetmodel.bench.store import RecordFile
from result_pages.rendering import render

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SHIFT_S: Final = 1.0
"""Shift of the geometric mean of times [s]."""
EVERYTHING: Final = "everything"
"""The variant that leaves nothing out."""


def read(path: Path) -> list[dict[str, Any]]:
    """Return the last record of each run; the same one with another limit is another run."""
    key = itemgetter("name", "variant")
    return RecordFile(path, lambda record: (key(record), _limit_s(record))).records()


def page(records: Sequence[dict[str, Any]], *later: Sequence[dict[str, Any]]) -> str:
    """Return what records say: means over the sample, and the runs with other limits."""
    return "\n\nA later record: ".join(map(_section, (records, *later)))


def _section(records: Sequence[dict[str, Any]]) -> str:
    least_s, most_s = (pick(_limit_s(record) for record in records) for pick in (min, max))
    sample = [record for record in records if _limit_s(record) == least_s]
    others = [record for record in records if _limit_s(record) != least_s]
    return render(
        "ablation",
        count=len({_problem(record) for record in sample if record["variant"] == EVERYTHING}),
        limit_s=least_s,
        first=sample[0],
        means=means(sample),
        others=others,
        most_s=most_s,
        problem=lambda record: " ".join(str(v) for v in json.loads(_problem(record)) if v),
        is_solved=is_solved,
    )


def _limit_s(record: dict[str, Any]) -> float:
    return float(record["cell"]["limit_s"])


def means(records: Sequence[dict[str, Any]]) -> list[tuple[str, int, int, float, float]]:
    """Return runs, solved instances, mean time and mean gap of each variant.

    Where a variant was not run on an instance, for what it leaves out is not used there, the run
    that leaves out one part less stands in: that of the longest name that its name begins with.
    """
    by_variant: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    for record in records:
        by_variant[record["variant"]][_problem(record)] = record
    base = by_variant[EVERYTHING]
    rows = []
    for variant, own in by_variant.items():
        less = (name for name in by_variant if variant.startswith(f"{name},"))
        instead = base | by_variant[max(less, key=len, default=EVERYTHING)]
        runs = [own.get(key, instead[key]) for key in base]
        mean_s = statistics.geometric_mean(_seconds(run) + SHIFT_S for run in runs) - SHIFT_S
        gap = statistics.fmean(map(_gap, runs))
        rows.append((variant, len(own), sum(map(is_solved, runs)), mean_s, gap))
    return rows


def is_solved(record: dict[str, Any]) -> bool:
    """Return whether a run ended with a proof."""
    return record["status"] == "infeasible" or _gap(record) <= GAP


def _problem(record: dict[str, Any]) -> str:
    """Return graph, device, budget and deadline of a run."""
    cell = record["cell"]
    return json.dumps([cell[name] for name in ("model", "device", "ram", "deadline")])


def _gap(record: dict[str, Any]) -> float:
    """Return the final gap; 1 where nothing was found or proved."""
    if record["status"] == "infeasible":
        return 0.0
    gap = record.get("gap")
    return 1.0 if gap is None else float(gap)


def _seconds(record: dict[str, Any]) -> float:
    """Return the time to the gap tolerance, or the limit."""
    return float(record["seconds"]) if is_solved(record) else _limit_s(record)
