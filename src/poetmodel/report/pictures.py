"""What a picture shows, in plain values that know no drawing library."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping


class Kind(StrEnum):
    """What a bar or a cell stands for; the value is the word in the legend."""

    COMPUTED = "computed"
    """First computation of a node."""
    RECOMPUTED = "recomputed"
    """A later one."""
    KEPT = "kept in RAM"
    """A tensor that stays."""
    PAGED_IN = "paged in"
    """A transfer from storage."""
    PAGED_OUT = "paged out"
    """A transfer to storage."""
    STALL = "stall"
    """The core waits for the bus."""


COLOURS: Final[Mapping[Kind, str]] = {
    Kind.COMPUTED: "#0072B2",
    Kind.RECOMPUTED: "#E69F00",
    Kind.KEPT: "#C6DCEC",
    Kind.PAGED_IN: "#009E73",
    Kind.PAGED_OUT: "#CC79A7",
    Kind.STALL: "#D55E00",
}
"""One colour each, after Okabe and Ito, whose colours the colour-blind can tell apart."""
CURVE_COLOUR: Final = "#555555"
LIMIT_COLOUR: Final = "#B00020"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A stretch of time on a lane."""

    start: float
    """In the unit of the picture's time axis."""
    end: float
    """As `start`."""
    kind: Kind
    """What it is."""
    name: str
    """Stands on it where there is room."""
    details: str
    """Shown when one points at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A row of bars."""

    name: str
    """Stands beside it."""
    bars: tuple[Bar, ...]
    """In order of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A quantity over time that changes in steps."""

    name: str
    """The axis label, unit included."""
    points: tuple[tuple[float, float], ...]
    """(time, value): the value holds from this time to the next."""
    limit: float | None
    """A limit to draw, if there is one."""
    limit_name: str
    """What the limit is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Lanes of bars above a curve, over one time axis."""

    title: str
    """Stands above it."""
    time_name: str
    """Label of the time axis, unit included."""
    lanes: tuple[Lane, ...]
    """From the top."""
    curve: Curve
    """Below them."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that occur, in the order of `Kind`."""
        found = {bar.kind for lane in self.lanes for bar in lane.bars}
        return tuple(kind for kind in Kind if kind in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What happens at one row and column of a grid."""

    row: int
    column: int
    kind: Kind
    """Its colour."""
    mark: Kind | None
    """Drawn over half of it, where there is one."""
    details: str
    """Shown when one points at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Coloured cells under named columns, beside named rows."""

    title: str
    """Stands above it."""
    row_name: str
    """What rows are."""
    column_name: str
    """What columns are."""
    rows: tuple[str, ...]
    """Names of the rows, from the top."""
    columns: tuple[str, ...]
    """Names of the columns, from the left."""
    cells: tuple[Cell, ...]
    """At most one per row and column."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that occur as colours, in the order of `Kind`."""
        found = {cell.kind for cell in self.cells}
        return tuple(kind for kind in Kind if kind in found)

    @property
    def marks(self) -> tuple[Kind, ...]:
        """The kinds that occur as marks, in the order of `Kind`."""
        found = {cell.mark for cell in self.cells}
        return tuple(kind for kind in Kind if kind in found)
