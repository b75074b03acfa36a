"""What `docs/plans.md` says of the fragmentation of addresses."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from blocks import table
from result_pages.records import days_text, percent_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Records = Sequence[Mapping[str, Any]]

WAYS: Final = {"arena_bytes": "`place`", "greedy_bytes": "greedy alone", "in_order_bytes": "heap"}
"""Ways to place, by the key of their size."""
WANTED_WORST: Final = 0.03
"""Wanted fragmentation at worst; the median wanted is 0."""


def block(records: Records, source: str) -> str:
    """Return figures by group of networks, and what was wanted."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["cell"]["group"], []).append(record)
    rows = [_row(name, found) for name, found in groups.items()]
    rows.append(_row("all", records))
    heads = ["networks", "plans"]
    for way in WAYS.values():
        heads += [f"{way}: median", "worst", "at the bound"]
    return "\n\n".join((_summary(records, source), table(heads, rows, right=1)))


def fragmentation(record: Mapping[str, Any], key: str) -> float:
    """Return how much larger a block is than its lower bound, as a fraction of that."""
    return float(record[key] / record["lower_bound_bytes"] - 1)


def _row(name: str, records: Records) -> list[str]:
    row = [name, str(len(records))]
    for key in WAYS:
        found = [fragmentation(record, key) for record in records]
        row += [
            percent_text(statistics.median(found), 2),
            percent_text(max(found), 2),
            str(sum(share == 0 for share in found)),
        ]
    return row


def _summary(records: Records, source: str) -> str:
    found = [fragmentation(record, "arena_bytes") for record in records]
    met = statistics.median(found) == 0 and max(found) < WANTED_WORST
    timed = [record for record in records if "cpu_s" in record]
    times = [record["cpu_s"] for record in timed]
    largest = max(timed, key=lambda record: record["offsets"], default=None)
    took = ""
    if largest is not None:
        took = (
            f" Placing takes {seconds_text(statistics.median(times))} of the processor at the "
            f"median and {seconds_text(max(times))} at most; the largest plan has "
            f"{largest['nodes']:,} nodes and {largest['offsets']:,} offsets "
            f"({seconds_text(largest['cpu_s'])})."
        )
    networks = len({(record["cell"]["group"], record["cell"]["network"]) for record in records})
    return (
        f"{len(records)} plans of {networks} networks at 35 and 50 % of their keep-all peak, or "
        "near their minimum RAM where that is more; both modes where something is paged. "
        f"Wanted was a median of 0 and less than {percent_text(WANTED_WORST)} at worst, which is "
        f"{'met' if met else 'missed'}.{took} From `bench/results/{source}`, "
        f"{days_text(records)}."
    )
