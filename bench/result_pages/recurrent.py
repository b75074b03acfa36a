"""What `docs/guides/export.md` says of recurrent networks: exports in less and less RAM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poetmodel.result import Status
from result_pages.rendering import render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def block(records: Sequence[Mapping[str, Any]], source: str) -> str:
    """Return a row for each network and share of its RAM, as captured and by time steps."""
    pairs: dict[tuple[str, int], dict[bool, Mapping[str, Any]]] = {}
    for record in records:
        cell = record["cell"]
        pairs.setdefault((cell["network"], cell["share"]), {})[cell["apart"]] = record
    both = {key: pair for key, pair in pairs.items() if len(pair) == len((False, True))}
    bases = {
        network: pair[False]["baseline_j"]
        for (network, _), pair in both.items()
        if pair[False]["baseline_j"]
    }
    steps = {network: pair for (network, _), pair in both.items()}
    return render(
        "recurrent",
        records=records,
        rows=both,
        steps=steps,
        bases=bases,
        source=source,
        OPTIMAL=Status.OPTIMAL,
    )
