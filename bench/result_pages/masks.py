"""What `docs/guides/model.md` says of masks: RAM of exported steps with and without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poetmodel.result import Status
from result_pages.rendering import render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def block(records: Sequence[Mapping[str, Any]], source: str) -> str:
    """Return a row for each network and what is trained of it, without masks and with them."""
    pairs: dict[tuple[str, str], dict[bool, Mapping[str, Any]]] = {}
    for record in records:
        cell = record["cell"]
        pairs.setdefault((cell["network"], cell["trained"]), {})[cell["masks"]] = record
    both = {key: pair for key, pair in pairs.items() if len(pair) == len((False, True))}
    return render("masks", records=records, rows=both, source=source, OPTIMAL=Status.OPTIMAL)
