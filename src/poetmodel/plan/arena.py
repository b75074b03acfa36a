"""Addresses: where in one block of RAM each copy of a tensor and each workspace of a plan lies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from poetmodel.errors import PlanError, shown
from poetmodel.plan.alignment import ALIGNMENT, check_alignment
from poetmodel.schedule.machine import Content
from poetmodel.units import brief, format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from poetmodel.plan.io import ArenaEntry


class Placed(NamedTuple):
    """The offset of one copy of a tensor, or of one workspace."""

    position: int
    """The instruction that makes it; `BEFORE` for resident state."""
    content: Content
    index: int  # type: ignore[assignment] # takes the place of the search method of tuples
    """A tensor's number; a node's index for a workspace."""
    offset: int
    """Its first byte [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """Offsets for all that a plan has in RAM, in one block.

    Outputs that take over the memory of an input, or replace state, are where that was: the first
    have the same offset, the second none of their own.

    Raises
    ------
    PlanError
        If the alignment is no power of two, or an offset or a size is negative.
    """

    bytes: int
    """The size of the block: the highest end of a copy, rounded up to the alignment [B]."""
    lower_bound_bytes: int
    """The highest sum of what is in RAM at once, each rounded up to the alignment [B]."""
    alignment: int = ALIGNMENT
    """Every offset is a multiple of it, a power of two [B]."""
    offsets: tuple[Placed, ...] = field(repr=False)
    """One for each copy and workspace, in the order in which the program makes them."""

    def __post_init__(self) -> None:
        placed = tuple(Placed(p, Content(content), k, at) for p, content, k, at in self.offsets)
        object.__setattr__(self, "offsets", placed)
        check_alignment(self.alignment)
        faults = [
            f"{name}: expected 0 or more bytes, got {shown(value)}"
            for name, value in (
                ("bytes", self.bytes),
                ("lower_bound_bytes", self.lower_bound_bytes),
                *((f"offsets[{n}][3]", placed_copy.offset) for n, placed_copy in enumerate(placed)),
            )
            if value < 0
        ]
        if faults:
            raise PlanError(faults)

    def __repr__(self) -> str:
        size = f"{format_bytes(self.bytes)}, {self.fragmentation:.2%} above its lower bound"
        return brief(self, size, f"{len(self.offsets)} offsets", f"aligned to {self.alignment}")

    @property
    def fragmentation(self) -> float:
        """How much more than the lower bound the block takes, as a fraction of the bound."""
        more = self.bytes - self.lower_bound_bytes
        return more / self.lower_bound_bytes if self.lower_bound_bytes else float(more > 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the part ``arena`` of a plan file."""
        return {
            "bytes": self.bytes,
            "lower_bound_bytes": self.lower_bound_bytes,
            "alignment": self.alignment,
            "offsets": [[p, str(content), index, at] for p, content, index, at in self.offsets],
        }

    @staticmethod
    def load(path: str | Path) -> Arena:
        """Read the addresses in a ``*.plan.json`` file; `PlanError` where it has none."""
        from poetmodel.plan.io import load_file

        entry = load_file(path).arena
        if entry is None:
            raise PlanError(f"{path}: arena: missing; 'poetmodel plan --arena' makes addresses")
        return Arena.of_entry(entry)

    @staticmethod
    def of_entry(entry: ArenaEntry) -> Arena:
        """Return the addresses of a plan file."""
        return Arena(
            bytes=entry.bytes,
            lower_bound_bytes=entry.lower_bound_bytes,
            alignment=entry.alignment,
            offsets=tuple(
                Placed(p, Content(content), k, at) for p, content, k, at in entry.offsets
            ),
        )
