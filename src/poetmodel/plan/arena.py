"""The arena: offsets in one block of RAM for all copies of tensors and workspaces of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from poetmodel.errors import PlanError, quote
from poetmodel.plan.alignment import ALIGNMENT, check_alignment
from poetmodel.schedule.machine import Content
from poetmodel.units import brief, format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from poetmodel.plan.io import ArenaEntry


class CopyOffset(NamedTuple):
    """The offset of one copy of a tensor, or of one workspace."""

    position: int
    """Position of the instruction that makes the copy or workspace; `BEFORE` for resident state."""
    content: Content
    """Whether this is a copy of a tensor or a workspace."""
    index: int  # type: ignore[assignment] # Hides tuple.index.
    """Index of a tensor, or of a node for a workspace."""
    offset: int
    """Offset of the first byte [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """Offsets in one block of RAM for all copies of tensors and workspaces of a plan.

    An output that overwrites an input in place has the offset of the input. A replacement of state
    has no offset of its own, since it uses the memory of its state tensor.

    Raises
    ------
    PlanError
        If the alignment is no power of two, or an offset or a size is negative.
    ValueError
        If an offset has an unknown kind of content.
    """

    bytes: int
    """Size: the highest end of a copy or workspace, rounded up to the alignment [B]."""
    lower_bound_bytes: int
    """Maximum sum of sizes in RAM at once, each rounded up to the alignment [B]."""
    alignment: int = ALIGNMENT
    """Alignment of every offset, a power of two [B]."""
    offsets: tuple[CopyOffset, ...] = field(repr=False)
    """The offset of each copy and workspace, in the order in which the program makes them."""

    def __post_init__(self) -> None:
        """Convert `offsets` to a tuple of `CopyOffset`; validate the fields."""
        copy_offsets = tuple(
            CopyOffset(position, Content(content), index, offset)
            for position, content, index, offset in self.offsets
        )
        object.__setattr__(self, "offsets", copy_offsets)
        check_alignment(self.alignment)
        faults = [
            f"{name}: expected 0 or more bytes, got {quote(value)}"
            for name, value in (
                ("bytes", self.bytes),
                ("lower_bound_bytes", self.lower_bound_bytes),
                *(
                    (f"offsets[{number}][3]", copy_offset.offset)
                    for number, copy_offset in enumerate(copy_offsets)
                ),
            )
            if value < 0
        ]
        if faults:
            raise PlanError(faults)

    def __repr__(self) -> str:
        size = f"{format_bytes(self.bytes)}, {self.fragmentation_ratio:.2%} above its lower bound"
        return brief(self, size, f"{len(self.offsets)} offsets", f"aligned to {self.alignment}")

    @property
    def fragmentation_ratio(self) -> float:
        """Excess of the arena over the lower bound, as a fraction of the bound.

        If the bound is 0, 1 for any excess and 0 without excess.
        """
        excess = self.bytes - self.lower_bound_bytes
        return excess / self.lower_bound_bytes if self.lower_bound_bytes else float(excess > 0)

    def to_dict(self) -> dict[str, Any]:
        """Return the value of ``arena`` in a plan file."""
        return {
            "bytes": self.bytes,
            "lower_bound_bytes": self.lower_bound_bytes,
            "alignment": self.alignment,
            "offsets": [
                [position, str(content), index, offset]
                for position, content, index, offset in self.offsets
            ],
        }

    @staticmethod
    def load(path: str | Path) -> Arena:
        """Read the arena of a ``*.plan.json`` file.

        Raises `PlanError` if the file cannot be read, is invalid or has no arena.
        """
        from poetmodel.plan.io import load_file

        entry = load_file(path).arena
        if entry is None:
            raise PlanError(f"{path}: arena: missing; 'poetmodel plan --arena' makes addresses")
        return Arena.from_entry(entry)

    @staticmethod
    def from_entry(entry: ArenaEntry) -> Arena:
        """Make an arena from the parsed value of ``arena`` in a plan file.

        Raises `PlanError` if the alignment is no power of two.
        """
        return Arena(
            bytes=entry.bytes,
            lower_bound_bytes=entry.lower_bound_bytes,
            alignment=entry.alignment,
            offsets=tuple(
                CopyOffset(position, Content(content), index, offset)
                for position, content, index, offset in entry.offsets
            ),
        )
