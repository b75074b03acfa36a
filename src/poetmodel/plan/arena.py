"""Addresses: where in one block of RAM each copy of a tensor and each workspace of a plan lies.

`check_arena` walks a program and its addresses. It shares no code with what places them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poetmodel.device import StorageMode
from poetmodel.errors import PlanError, shown
from poetmodel.plan.simulation import check_identity
from poetmodel.schedule.instructions import Op
from poetmodel.units import brief, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from poetmodel.graph import Graph
    from poetmodel.plan.program import Plan

ALIGNMENT: Final = 16
"""Offsets are multiples of this unless another alignment is wanted [B]."""
BEFORE: Final = -1
"""The position of what is in RAM before the program: resident state."""
_NOTHING: Final[Mapping[int, int]] = MappingProxyType({})


class Content(StrEnum):
    """What an offset is given to."""

    OUTPUT = "output"
    """A copy of a tensor: computed, computed again, or paged in."""
    WORKSPACE = "workspace"
    """What a node needs while it is computed."""


class Placed(NamedTuple):
    """The offset of one copy of a tensor, or of one workspace."""

    position: int
    """The instruction that makes it; `BEFORE` for resident state."""
    content: Content
    index: int  # type: ignore[assignment] # takes the place of the search method of tuples
    """A tensor's number; a node's index for a workspace."""
    offset: int
    """Its first byte [B]."""


def aligned(size_bytes: int, alignment: int) -> int:
    """Return a size rounded up to a multiple of the alignment."""
    return -(-size_bytes // alignment) * alignment


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
                *((f"offsets[{n}][3]", one.offset) for n, one in enumerate(placed)),
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
        from poetmodel.plan.io import load_document

        arena = load_document(path).arena
        if arena is None:
            raise PlanError(f"{path}: arena: missing; 'poetmodel plan --arena' makes addresses")
        return arena


def check_alignment(alignment: int) -> None:
    """Raise `PlanError` unless this is a power of two."""
    if alignment < 1 or alignment & (alignment - 1):
        raise PlanError(f"alignment: expected a power of two, got {shown(alignment)}")


class Rectangle(NamedTuple):
    """What a copy or workspace takes of RAM, over positions of the program."""

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
    """What is wrong with the addresses of a plan, and what the plan has in RAM when."""

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
    """Walk a program and its addresses, and report every violation.

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
    check_identity(graph, plan)
    walk = _Walk(graph, plan, arena)
    walk.run()
    return ArenaCheck(
        violations=tuple(walk.violations),
        bytes=walk.highest,
        lower_bound_bytes=walk.lower_bound_bytes,
        rectangles=tuple(sorted(walk.done, key=_order)),
    )


def _order(one: Rectangle) -> tuple[int, str, int]:
    return one.begin, one.content, one.index


class _Walk:
    """One walk through a program: which copy of each tensor is in RAM, and where."""

    def __init__(self, graph: Graph, plan: Plan, arena: Arena) -> None:
        self.graph, self.plan, self.arena = graph, plan, arena
        self.homes = plan.homes(graph)
        self.sizes = graph.tensor_bytes
        self.live: dict[int, Rectangle] = {}
        """The copies in RAM, by tensor."""
        self.live_bytes = 0
        """What they take together, each rounded up to the alignment [B]."""
        self.under_way: set[int] = set()
        """The tensors whose transfer may be under way."""
        self.done: list[Rectangle] = []
        self.position = BEFORE
        self.lower_bound_bytes = self.highest = 0
        self.violations: list[str] = []
        self.unused: dict[tuple[int, Content, int], int] = {}
        for position, content, index, offset in arena.offsets:
            key = (position, content, index)
            if key in self.unused:
                self._violate(key, "has two offsets")
            self.unused[key] = offset

    def run(self) -> None:
        """Walk from what is there before the program to its end."""
        self._make([(Content.OUTPUT, i) for i in sorted(self.homes.resident)])
        for position, (op, index) in enumerate(self.plan.program):
            self.position = position
            if not 0 <= index < len(self.graph.nodes if op == Op.COMPUTE else self.sizes):
                continue
            if op == Op.COMPUTE:
                self._compute(index)
            elif op == Op.PAGE_IN:
                self._make([(Content.OUTPUT, index)])
                self.under_way.add(index)
            elif op == Op.PAGE_OUT:
                self.under_way.add(index)
            elif op == Op.WAIT:
                self.under_way.discard(index)
            elif op == Op.FREE:
                self._end(index, self.position)
        for i in list(self.live):
            self._end(i, len(self.plan.program))
        for key in self.unused:
            self._violate(key, "has an offset, but the program makes no such thing there")
        self._check_stated()

    def _compute(self, k: int) -> None:
        if k in self.homes.first_reads:
            i = self.homes.first_reads[k]
            self._make([(Content.OUTPUT, i)])
            self.under_way.add(i)
            return
        made = [(Content.OUTPUT, i) for i in self.homes.new[k]]
        has_workspace = self.graph.nodes[k].workspace_bytes > 0
        self._make([*made, *[(Content.WORKSPACE, k)] * has_workspace], self._in_place(k))
        for new in self.graph.outputs_of[k]:
            old = self.graph.state_of.get(new)
            if old in self.live:  # the bytes of the one are those of the other from here on
                self.live[new] = self.live.pop(old)

    def _in_place(self, k: int) -> dict[int, int]:
        """Return the outputs that take over the memory of an input, each with it."""
        dying = set()
        for op, i in islice(self.plan.program, self.position + 1, None):
            if op != Op.FREE:
                break
            dying.add(i)
        if self.plan.mode == StorageMode.DMA:
            dying -= self.under_way
        return {y: x for y, x in self.graph.in_place_of[k] if x in dying and x in self.live}

    def _make(
        self, made: list[tuple[Content, int]], in_place: Mapping[int, int] = _NOTHING
    ) -> None:
        """Give what an instruction makes its addresses, beside all that is in RAM."""
        new: list[Rectangle] = []
        for content, index in made:
            is_output = content == Content.OUTPUT
            size = self.sizes[index] if is_output else self.graph.nodes[index].workspace_bytes
            offset = self._offset(content, index, size)
            one = Rectangle(self.position, self.position + 1, offset, size, content, index)
            giver = in_place.get(index) if is_output else None
            beside = (other for i, other in self.live.items() if i != giver)
            self._check_apart(one, self.live.values() if giver is None else beside)
            self._check_apart(one, new)
            if giver is not None:
                self._check_pair(one, self.live[giver])
            new.append(one)
        self._count(new, in_place)
        for one in new:
            if one.content == Content.WORKSPACE:
                self.done.append(one)
                continue
            self._end(one.index, self.position + 1)  # an old copy is beside the new one until now
            self.live[one.index] = one
            self.live_bytes += aligned(one.bytes, self.arena.alignment)

    def _offset(self, content: Content, index: int, size: int) -> int | None:
        """Return the offset of something, and check it by itself."""
        key = (self.position, content, index)
        offset = self.unused.pop(key, None)
        if offset is None:
            self._violate(key, "has no offset")
            return None
        if offset % self.arena.alignment:
            self._violate(key, f"is at {offset:,}, no multiple of {self.arena.alignment}")
        end = offset + size
        if end > self.arena.bytes:
            self._violate(key, f"ends at {end:,}, outside of the {self.arena.bytes:,} B")
        self.highest = max(self.highest, aligned(end, self.arena.alignment))
        return offset

    def _check_apart(self, one: Rectangle, others: Iterable[Rectangle]) -> None:
        begin, size = one.offset, one.bytes
        if begin is None or not size:
            return
        end = begin + size
        for other in others:
            at = other.offset
            if at is None or at >= end or at + other.bytes <= begin or not other.bytes:
                continue
            self._violate(
                (one.begin, one.content, one.index),
                f"is at {begin:,} to {end:,} and overlaps "
                f"{self._name(other.content, other.index)} at {at:,} to {at + other.bytes:,}",
            )

    def _check_pair(self, one: Rectangle, giver: Rectangle) -> None:
        if one.offset != giver.offset and one.offset is not None and giver.offset is not None:
            self._violate(
                (one.begin, one.content, one.index),
                f"is at {one.offset:,}, but is made in place of "
                f"{self._name(giver.content, giver.index)} at {giver.offset:,}",
            )

    def _count(self, new: list[Rectangle], in_place: Mapping[int, int]) -> None:
        """Add up what is in RAM during an instruction."""
        size = {one.index: one.bytes for one in new if one.content == Content.OUTPUT}
        alignment = self.arena.alignment
        total = self.live_bytes + sum(aligned(one.bytes, alignment) for one in new)
        for y, x in in_place.items():
            total -= aligned(min(size.get(y, 0), self.sizes[x]), alignment)
        self.lower_bound_bytes = max(self.lower_bound_bytes, total)

    def _end(self, i: int, position: int) -> None:
        if i in self.live:
            gone = self.live.pop(i)
            self.live_bytes -= aligned(gone.bytes, self.arena.alignment)
            self.done.append(gone._replace(end=position))

    def _check_stated(self) -> None:
        arena, budget = self.arena, self.plan.ram_budget_bytes
        for name, stated, found in (
            ("bytes", arena.bytes, self.highest),
            ("lower_bound_bytes", arena.lower_bound_bytes, self.lower_bound_bytes),
        ):
            if stated != found:
                self.violations.append(f"arena: {name} is {found:,}, stated are {stated:,}")
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
