"""What the page of results says of the cost of a compiled step, and of convolutions in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from result_pages.rendering import render

if TYPE_CHECKING:
    from collections.abc import Sequence


def section(records: Sequence[dict[str, Any]], source: str) -> str:
    """Return what the page of results says of both."""
    steps = [record for record in records if record["kind"] == "step-cost"]
    return render(
        "step-costs",
        records=records,
        source=source,
        steps=steps,
        pairs=sorted({record["cell"]["pairs"] for record in steps}),
        convolutions=[record for record in records if record["kind"] == "convolutions"],
    )
