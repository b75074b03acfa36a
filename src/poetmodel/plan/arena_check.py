"""Check of offsets against the RAM content that the machine simulates, independent of placement."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from poetmodel.errors import quote
from poetmodel.plan.alignment import round_up
from poetmodel.plan.stays import list_stays
from poetmodel.schedule.machine import BEFORE, Content, Stay
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from poetmodel.graph import Graph
    from poetmodel.plan.arena import Arena
    from poetmodel.plan.program import Plan


class Rectangle(NamedTuple):
    """Memory of a copy or workspace: a range of bytes over a range of program positions."""

    begin: int
    """Position of the instruction that makes the copy; `BEFORE` for resident state."""
    end: int
    """Position of the free, or one past the last position at which the copy is in RAM."""
    offset: int | None
    """Offset of the first byte [B]; None if the arena has no offset for the copy."""
    bytes: int
    """Size [B]."""
    content: Content
    """Whether this is a copy of a tensor or a workspace."""
    index: int  # type: ignore[assignment] # Hides tuple.index.
    """Index of a tensor, or of a node for a workspace."""


@dataclass(frozen=True, kw_only=True)
class ArenaCheck:
    """Violations of a plan's arena, and the rectangles of all copies."""

    violations: tuple[str, ...]
    """A message for every violated rule."""
    bytes: int
    """Highest end of a copy or workspace with an offset, rounded up to the alignment [B]."""
    lower_bound_bytes: int
    """Maximum sum of sizes in RAM at once, each rounded up to the alignment [B]."""
    rectangles: tuple[Rectangle, ...] = field(repr=False)
    """All copies and workspaces, in the order in which the program makes them."""

    @property
    def valid(self) -> bool:
        """Whether there are no violations."""
        return not self.violations


def check_arena(graph: Graph, plan: Plan, arena: Arena) -> ArenaCheck:
    """Check the offsets of a program against its simulated RAM content; return every violation.

    Parameters
    ----------
    graph : Graph
        The training graph.
    plan : Plan
        A plan that `check_plan` finds valid.
    arena : Arena
        The offsets of the plan.

    Returns
    -------
    ArenaCheck
        Violations, sizes and rectangles. Violations of other rules by the program are neither
        reported nor raised.

    Raises
    ------
    PlanError
        If the plan is for another graph.
    TimeLimitError
        If a time limit of the calling context passes.

    Notes
    -----
    Each copy (a first computation, a recomputation, a page-in, a first read of state, resident
    state) and each workspace has exactly one aligned offset and ends inside the arena. Copies and
    workspaces that are in RAM together do not overlap, except an output that overwrites an input in
    place: both have the same offset. A replacement has no offset: it uses the memory of its state
    tensor. Offsets of copies that the program does not make are violations. Stated sizes equal the
    simulated ones, and the arena fits the budget of the plan.
    """
    checker = _ArenaChecker(graph, plan, arena)
    for _, copies in groupby(list_stays(graph, plan), key=attrgetter("begin")):
        checker.check_copies(list(copies))
    checker.check_totals()
    return ArenaCheck(
        violations=tuple(checker.violations),
        bytes=checker.end_bytes,
        lower_bound_bytes=checker.lower_bound_bytes,
        rectangles=tuple(checker.rectangles),
    )


class _ArenaChecker:
    """Checks offsets instruction by instruction, and collects rectangles and violations."""

    def __init__(self, graph: Graph, plan: Plan, arena: Arena) -> None:
        self.graph, self.plan, self.arena = graph, plan, arena
        self.rectangles: list[Rectangle] = []
        """Rectangles of all copies so far."""
        self.live_rectangles: list[Rectangle] = []
        """Rectangles of the copies in RAM."""
        self.lower_bound_bytes = self.end_bytes = 0
        self.violations: list[str] = []
        self.unused_offsets: dict[tuple[int, Content, int], int] = {}
        """Offsets of the arena that no copy has so far, by position, content and index."""
        for position, content, index, offset in arena.offsets:
            key = (position, content, index)
            if key in self.unused_offsets:
                self._add_violation(key, "has two offsets")
            self.unused_offsets[key] = offset

    def check_copies(self, copies: Sequence[Stay]) -> None:
        """Check the offsets of the copies made at one position; add their rectangles."""
        position = copies[0].begin
        self.live_rectangles = [
            live_rectangle
            for live_rectangle in self.live_rectangles
            if live_rectangle.end > position
        ]
        live_bytes, alignment = 0, self.arena.alignment
        for copy in copies:
            offset, end = self._pop_offset(copy), copy.first_free_position(self.plan.program)
            rectangle = Rectangle(position, end, offset, copy.bytes, copy.content, copy.index)
            overwritten = None if copy.in_place_of is None else self._overwritten_rectangle(copy)
            self._check_overlap(
                rectangle,
                (
                    live_rectangle
                    for live_rectangle in self.live_rectangles
                    if live_rectangle is not overwritten
                ),
            )
            if overwritten is not None:
                self._check_in_place(rectangle, overwritten)
                # Both rectangles are live: overwritten bytes count once.
                live_bytes -= round_up(min(rectangle.bytes, overwritten.bytes), alignment)
            self.live_rectangles.append(rectangle)
            self.rectangles.append(rectangle)
        live_bytes += sum(
            round_up(rectangle.bytes, alignment) for rectangle in self.live_rectangles
        )
        self.lower_bound_bytes = max(self.lower_bound_bytes, live_bytes)

    def _overwritten_rectangle(self, copy: Stay) -> Rectangle:
        """Return the rectangle of the input that a copy overwrites in place."""
        return next(
            rectangle
            for rectangle in self.live_rectangles
            if rectangle.index == copy.in_place_of and rectangle.begin < copy.begin
        )

    def _pop_offset(self, copy: Stay) -> int | None:
        """Remove and return a copy's offset (None: missing); add violations; update `end_bytes`."""
        key = (copy.begin, copy.content, copy.index)
        offset = self.unused_offsets.pop(key, None)
        if offset is None:
            self._add_violation(key, "has no offset")
            return None
        if offset % self.arena.alignment:
            self._add_violation(key, f"is at {offset:,}, no multiple of {self.arena.alignment}")
        end = offset + copy.bytes
        if end > self.arena.bytes:
            self._add_violation(key, f"ends at {end:,}, outside of the {self.arena.bytes:,} B")
        self.end_bytes = max(self.end_bytes, round_up(end, self.arena.alignment))
        return offset

    def _check_overlap(self, rectangle: Rectangle, live_rectangles: Iterable[Rectangle]) -> None:
        """Add a violation for each of `live_rectangles` that shares bytes with `rectangle`."""
        begin_offset, size = rectangle.offset, rectangle.bytes
        if begin_offset is None or not size:
            return
        end_offset = begin_offset + size
        for live_copy in live_rectangles:
            live_begin = live_copy.offset
            if (
                live_begin is None
                or live_begin >= end_offset
                or live_begin + live_copy.bytes <= begin_offset
                or not live_copy.bytes
            ):
                continue
            self._add_violation(
                (rectangle.begin, rectangle.content, rectangle.index),
                f"is at {begin_offset:,} to {end_offset:,} and overlaps "
                f"{self._describe(live_copy.content, live_copy.index)} at {live_begin:,} to "
                f"{live_begin + live_copy.bytes:,}",
            )

    def _check_in_place(self, rectangle: Rectangle, overwritten: Rectangle) -> None:
        """Add a violation if an output in place and its input have different offsets."""
        if (
            rectangle.offset != overwritten.offset
            and rectangle.offset is not None
            and overwritten.offset is not None
        ):
            self._add_violation(
                (rectangle.begin, rectangle.content, rectangle.index),
                f"is at {rectangle.offset:,}, but is made in place of "
                f"{self._describe(overwritten.content, overwritten.index)} at "
                f"{overwritten.offset:,}",
            )

    def check_totals(self) -> None:
        """Add violations for unused offsets, wrong sizes of the arena, and an exceeded budget."""
        for key in self.unused_offsets:
            self._add_violation(key, "has an offset, but the program makes no such copy there")
        arena, budget = self.arena, self.plan.ram_budget_bytes
        for name, stated_bytes, actual_bytes in (
            ("bytes", arena.bytes, self.end_bytes),
            ("lower_bound_bytes", arena.lower_bound_bytes, self.lower_bound_bytes),
        ):
            if stated_bytes != actual_bytes:
                self.violations.append(
                    f"arena: {name} is {actual_bytes:,}, stated is {stated_bytes:,}"
                )
        if budget is not None and arena.bytes > budget:
            self.violations.append(
                f"arena: {arena.bytes:,} B are {format_bytes(arena.bytes - budget)} above the "
                f"{budget:,} B that tensors may use"
            )

    def _add_violation(self, key: tuple[int, Content, int], problem: str) -> None:
        position, content, index = key
        position_text = "before the program" if position == BEFORE else f"instruction {position}"
        self.violations.append(
            f"arena: {position_text}: {self._describe(content, index)} {problem}"
        )

    def _describe(self, content: Content, index: int) -> str:
        items = self.graph.tensors if content == Content.OUTPUT else self.graph.nodes
        name = quote(items[index].name) if 0 <= index < len(items) else str(index)
        return f"tensor {name}" if content == Content.OUTPUT else f"the workspace of {name}"
