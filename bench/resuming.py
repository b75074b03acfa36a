"""Going on with a run of cells that was stopped: what its file of records has already."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FAILED: Final = "failed"
"""Status of a cell that ended without a result."""


class Recorded(Protocol):
    """A cell that can say what its record says of it."""

    def to_dict(self) -> dict[str, Any]:
        """Return its fields."""


AnyCell = TypeVar("AnyCell", bound=Recorded)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, without a last line that was cut off while it was written."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def still_to_do(
    chosen: Sequence[AnyCell], records: Sequence[dict[str, Any]]
) -> tuple[AnyCell, ...]:
    """Return the cells that have no record with these settings, or only one of a failure."""
    done = [record["cell"] for record in records if record["status"] != FAILED]
    return tuple(cell for cell in chosen if cell.to_dict() not in done)


def end_line(path: Path) -> None:
    """End a last line that was cut off, so that the next record begins a line."""
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        path.write_bytes(content + b"\n")
