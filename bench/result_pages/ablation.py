"""What `bench/lazy-records.md` says of the ablation: means over a sample, and single runs."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from blocks import table
from cases import GAP
from poetmodel.bench.store import RecordFile

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
    parts = [_circumstances(sample), means(sample)]
    if others:
        parts += [f"Single runs of {most_s:g} s on further instances:", runs(others)]
    return "\n\n".join(parts)


def _circumstances(records: Sequence[dict[str, Any]]) -> str:
    """Return what was run, and where."""
    count = len({_problem(record) for record in records if record["variant"] == EVERYTHING})
    machine = records[0]["machine"]
    n_threads = records[0]["threads"]
    threads = "one thread" if n_threads == 1 else f"{n_threads} threads"
    return (
        f"{count} instances, {_limit_s(records[0]):g} s each, {threads}, seed 0 where none is "
        f"named; {machine['cpu']}, Python {machine['python']}, HiGHS "
        f"{machine['versions']['highspy']}, {records[0]['recorded'][:10]}."
    )


def _limit_s(record: dict[str, Any]) -> float:
    return float(record["cell"]["limit_s"])


def means(records: Sequence[dict[str, Any]]) -> str:
    """Return a line for each variant: runs, solved instances, mean time and mean gap.

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
        found = [own.get(key, instead[key]) for key in base]
        times = [_seconds(record) for record in found]
        mean_s = math.exp(sum(math.log(t + SHIFT_S) for t in times) / len(times)) - SHIFT_S
        gap = sum(map(_gap, found)) / len(found)
        solved = sum(map(is_solved, found))
        rows.append((variant, str(len(own)), str(solved), f"{mean_s:.1f}", f"{100 * gap:.1f}"))
    heads = ("variant", "runs", "solved", "mean time (s)", "mean gap (%)")
    return table(heads, rows, right=1)


def runs(records: Sequence[dict[str, Any]]) -> str:
    """Return a line for each run."""
    rows = []
    for record in records:
        gap = "" if is_solved(record) or record.get("gap") is None else f"{100 * record['gap']:.2f}"
        name = " ".join(str(part) for part in json.loads(_problem(record)) if part)
        rows.append((name, record["variant"], record["status"], f"{record['seconds']:.1f}", gap))
    return table(("instance", "variant", "status", "time (s)", "gap (%)"), rows, right=3)


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
