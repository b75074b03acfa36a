"""What `docs/what-trains-where.md` says of AIfES beside exported steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from poetmodel.result import Status
from result_pages.rendering import render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROGRAMS: Final = {"aifes": "AIfES", "keep_all": "keep-all", "least_ram": "least RAM"}
"""Programs of a network, and what the table calls them."""


def section(records: Sequence[Mapping[str, Any]], source: str) -> str:
    """Return a row for each program of each network; "" without records."""
    if not records:
        return ""

    def times(field: str) -> str:
        """Return how many times as much AIfES takes as keep-all: the least and the most."""
        programs = [record["programs"] for record in records]
        found = [each["aifes"][field] / each["keep_all"][field] for each in programs]
        return f"{min(found):.1f} to {max(found):.1f}"

    return render(
        "aifes",
        records=records,
        source=source,
        times=times,
        PROGRAMS=PROGRAMS,
        OPTIMAL=Status.OPTIMAL,
    )
