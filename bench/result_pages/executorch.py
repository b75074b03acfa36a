"""What `docs/guides/executorch.md` says of the arenas of ExecuTorch's programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from result_pages.rendering import render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def block(records: Sequence[Mapping[str, Any]], source: str) -> str:
    """Return a row for each network and budget; budgets below the least of it are one row."""
    rows: dict[tuple[str, int], Mapping[str, Any]] = {}
    for record in records:
        rows.setdefault((record["cell"]["network"], record["ram_budget_bytes"]), record)
    return render("executorch", records=records, rows=list(rows.values()), source=source)
