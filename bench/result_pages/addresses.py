"""What `docs/concepts/plans.md` says of the fragmentation of addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from result_pages.rendering import render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WAYS: Final = {"arena_bytes": "`place`", "greedy_bytes": "greedy alone", "in_order_bytes": "heap"}
"""Ways to place, by the key of their size."""
WANTED_WORST: Final = 0.03
"""Wanted fragmentation at worst; the median wanted is 0."""


def block(records: Sequence[Mapping[str, Any]], source: str) -> str:
    """Return figures by group of networks, and what was wanted."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        groups.setdefault(record["cell"]["group"], []).append(record)
    return render(
        "addresses",
        records=records,
        source=source,
        groups={**groups, "all": records},
        ways=WAYS,
        wanted=WANTED_WORST,
        networks={(record["cell"]["group"], record["cell"]["network"]) for record in records},
        timed=[record for record in records if "cpu_s" in record],
        fragmentation=fragmentation,
    )


def fragmentation(records: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """Return how much larger each block is than its lower bound, as a fraction of that."""
    return [float(record[key] / record["lower_bound_bytes"] - 1) for record in records]
