"""Bytes of a budget that the graph to be scheduled does not count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Reserve(NamedTuple):
    """Bytes in RAM beside those of a graph, with what they are for."""

    name: str
    bytes: int
    is_forward: bool = True
    """Whether they are in RAM during the forward pass, too, where plans distinguish passes."""


@dataclass(frozen=True, slots=True)
class Reserves:
    """All reserves of one plan."""

    items: tuple[Reserve, ...] = ()

    @property
    def bytes(self) -> int:
        """Sum of all reserves [B]."""
        return sum(item.bytes for item in self.items)

    @property
    def forward_bytes(self) -> int:
        """Sum of the reserves of the forward pass [B]."""
        return sum(item.bytes for item in self.items if item.is_forward)

    def with_item(self, name: str, size_bytes: int) -> Reserves:
        """Return these reserves and a further one, of both passes."""
        return Reserves((*self.items, Reserve(name, size_bytes)))

    def __str__(self) -> str:
        return " + ".join(f"{item.bytes:,} B {item.name}" for item in self.items if item.bytes)
