"""The check of addresses against the machine's RAM; it knows nothing of what chose them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from poetmodel.errors import shown
from poetmodel.plan.alignment import aligned
from poetmodel.plan.stays import stays
from poetmodel.schedule.machine import BEFORE, Content, Stay
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from poetmodel.graph import Graph
    from poetmodel.plan.arena import Arena
    from poetmodel.plan.program import Plan


class Rectangle(NamedTuple):
    """RAM of a copy or workspace, over positions of the program."""

    begin: int
    """The position that makes it; `BEFORE` for resident state."""
    end: int
    """The position that frees it, or one past the last that has it."""
    offset: int | None
    """Its first byte [B]; None without an address."""
    bytes: int
    """Its size [B]."""
    content: Content
    index: int  # type: ignore[assignment] # as above
    """A tensor's number; a node's index for a workspace."""


@dataclass(frozen=True, kw_only=True)
class ArenaCheck:
    """Faults of a plan's addresses, and the plan's content of RAM over time."""

    violations: tuple[str, ...]
    """Every broken rule, in words."""
    bytes: int
    """The highest end of what has an address, rounded up to the alignment [B]."""
    lower_bound_bytes: int
    """The highest sum of what is in RAM at once, each rounded up to the alignment [B]."""
    rectangles: tuple[Rectangle, ...] = field(repr=False)
    """All copies and workspaces, in the order in which the program makes them."""

    @property
    def valid(self) -> bool:
        """Whether there is no violation."""
        return not self.violations


def check_arena(graph: Graph, plan: Plan, arena: Arena) -> ArenaCheck:
    """Hold the addresses of a program against what it has in RAM, and report every violation.

    Parameters
    ----------
    graph : Graph
        The training graph.
    plan : Plan
        A plan that `check_plan` finds valid.
    arena : Arena
        Its addresses.

    Returns
    -------
    ArenaCheck
        Violations and sizes. It never raises on a bad program.

    Raises
    ------
    PlanError
        If the plan names another graph.

    Notes
    -----
    Each copy (a first computation, a recomputation, a page-in, a first read of state, resident
    state) and each workspace has exactly one offset, which is aligned, and ends inside the block.
    What is in RAM together does not overlap, but for an output that takes over the memory of an
    input: both have the same offset. A replacement of state lies where the state lay. Nothing has
    an offset that the program does not make; sizes stated are those of the walk, and the block
    fits the budget of the plan.
    """
    offsets = _Offsets(graph, plan, arena)
    for _, copies in groupby(stays(graph, plan), key=attrgetter("begin")):
        offsets.check(list(copies))
    offsets.check_claims()
    return ArenaCheck(
        violations=tuple(offsets.violations),
        bytes=offsets.highest,
        lower_bound_bytes=offsets.lower_bound_bytes,
        rectangles=tuple(offsets.rectangles),
    )


class _Offsets:
    """The addresses of what is in RAM, from instruction to instruction."""

    def __init__(self, graph: Graph, plan: Plan, arena: Arena) -> None:
        self.graph, self.plan, self.arena = graph, plan, arena
        self.rectangles: list[Rectangle] = []
        self.live: list[Rectangle] = []
        self.lower_bound_bytes = self.highest = 0
        self.violations: list[str] = []
        self.unused: dict[tuple[int, Content, int], int] = {}
        for position, content, index, offset in arena.offsets:
            key = (position, content, index)
            if key in self.unused:
                self._violate(key, "has two offsets")
            self.unused[key] = offset

    def check(self, copies: Sequence[Stay]) -> None:
        """Give what an instruction makes its addresses, beside all that is in RAM."""
        position = copies[0].begin
        self.live = [other for other in self.live if other.end > position]
        total, alignment = 0, self.arena.alignment
        for copy in copies:
            offset, end = self._offset(copy), copy.first_free_position(self.plan.program)
            rectangle = Rectangle(position, end, offset, copy.bytes, copy.content, copy.index)
            giver = None if copy.in_place_of is None else self._giver(copy)
            self._check_apart(rectangle, (other for other in self.live if other is not giver))
            if giver is not None:
                self._check_pair(rectangle, giver)
                # Both are live: what the output took over counts once.
                total -= aligned(min(rectangle.bytes, giver.bytes), alignment)
            self.live.append(rectangle)
            self.rectangles.append(rectangle)
        total += sum(aligned(rectangle.bytes, alignment) for rectangle in self.live)
        self.lower_bound_bytes = max(self.lower_bound_bytes, total)

    def _giver(self, copy: Stay) -> Rectangle:
        """Return the previous content of the memory that a copy takes over."""
        return next(
            other
            for other in self.live
            if other.index == copy.in_place_of and other.begin < copy.begin
        )

    def _offset(self, copy: Stay) -> int | None:
        """Return the offset of something, and check it by itself."""
        key = (copy.begin, copy.content, copy.index)
        offset = self.unused.pop(key, None)
        if offset is None:
            self._violate(key, "has no offset")
            return None
        if offset % self.arena.alignment:
            self._violate(key, f"is at {offset:,}, no multiple of {self.arena.alignment}")
        end = offset + copy.bytes
        if end > self.arena.bytes:
            self._violate(key, f"ends at {end:,}, outside of the {self.arena.bytes:,} B")
        self.highest = max(self.highest, aligned(end, self.arena.alignment))
        return offset

    def _check_apart(self, rectangle: Rectangle, others: Iterable[Rectangle]) -> None:
        begin, size = rectangle.offset, rectangle.bytes
        if begin is None or not size:
            return
        end = begin + size
        for other in others:
            at = other.offset
            if at is None or at >= end or at + other.bytes <= begin or not other.bytes:
                continue
            self._violate(
                (rectangle.begin, rectangle.content, rectangle.index),
                f"is at {begin:,} to {end:,} and overlaps "
                f"{self._name(other.content, other.index)} at {at:,} to {at + other.bytes:,}",
            )

    def _check_pair(self, rectangle: Rectangle, giver: Rectangle) -> None:
        if (
            rectangle.offset != giver.offset
            and rectangle.offset is not None
            and giver.offset is not None
        ):
            self._violate(
                (rectangle.begin, rectangle.content, rectangle.index),
                f"is at {rectangle.offset:,}, but is made in place of "
                f"{self._name(giver.content, giver.index)} at {giver.offset:,}",
            )

    def check_claims(self) -> None:
        """Look for offsets of nothing, and hold the sizes stated against those that came out."""
        for key in self.unused:
            self._violate(key, "has an offset, but the program makes no such thing there")
        arena, budget = self.arena, self.plan.ram_budget_bytes
        for name, stated, actual in (
            ("bytes", arena.bytes, self.highest),
            ("lower_bound_bytes", arena.lower_bound_bytes, self.lower_bound_bytes),
        ):
            if stated != actual:
                self.violations.append(f"arena: {name} is {actual:,}, stated are {stated:,}")
        if budget is not None and arena.bytes > budget:
            self.violations.append(
                f"arena: {arena.bytes:,} B are {format_bytes(arena.bytes - budget)} above the "
                f"{budget:,} B that tensors may use"
            )

    def _violate(self, key: tuple[int, Content, int], what: str) -> None:
        position, content, index = key
        where = "before the program" if position == BEFORE else f"instruction {position}"
        self.violations.append(f"arena: {where}: {self._name(content, index)} {what}")

    def _name(self, content: Content, index: int) -> str:
        known = self.graph.tensors if content == Content.OUTPUT else self.graph.nodes
        name = shown(known[index].name) if 0 <= index < len(known) else str(index)
        return f"tensor {name}" if content == Content.OUTPUT else f"the workspace of {name}"
