"""What a plan has in RAM, from which position of its program to which."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from poetmodel.device import StorageMode
from poetmodel.plan import Op
from poetmodel.plan.arena import BEFORE, Content, aligned

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from poetmodel.graph import Graph
    from poetmodel.plan import Plan


class Span(NamedTuple):
    """A stretch of the program during which a block has one height."""

    begin: int
    """The first position."""
    end: int
    """One past the last."""
    bytes: int
    """Its size, rounded up to the alignment [B]."""


@dataclass(slots=True, kw_only=True)
class Block:
    """What begins at one offset: a workspace, or a copy and all that is made in its place."""

    spans: list[Span] = field(default_factory=list)
    """They may overlap where one copy is made in place of another."""
    contents: list[tuple[int, Content, int]] = field(default_factory=list)
    """What has this offset: position, content, index."""

    @property
    def is_throughout(self) -> bool:
        """Whether it is there from before the program to its end: resident state."""
        return self.contents[0][0] == BEFORE


def blocks_of(graph: Graph, plan: Plan, alignment: int) -> list[Block]:
    """Return all that a valid plan places, in the order of its program."""
    walk = _Walk(graph, plan, alignment)
    walk.run()
    return walk.blocks


def lower_bound_bytes(blocks: Iterable[Block], length: int) -> int:
    """Return the highest sum of what is in RAM at one position of a program of this length [B].

    Where the spans of one block overlap, its higher one counts.
    """
    return max(levels(blocks, length), default=0)


def levels(blocks: Iterable[Block], length: int) -> list[int]:
    """Return the sum of what is in RAM at each position [B]; the first is that before it begins."""
    steps = [0] * (length + 2)
    for block in blocks:
        for begin, end, size in apart(block.spans):
            steps[begin + 1] += size
            steps[end + 1] -= size
    total, found = 0, []
    for step in steps[:-1]:
        total += step
        found.append(total)
    return found


def apart(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of a block without overlaps: the higher one where there are two."""
    if len(spans) == 1:
        return list(spans)
    edges = sorted({place for begin, end, _ in spans for place in (begin, end)})
    return [
        Span(a, b, max((size for begin, end, size in spans if begin <= a < end), default=0))
        for a, b in pairwise(edges)
    ]


class _Walk:
    """One walk through the steps of a plan, for the blocks that it makes."""

    def __init__(self, graph: Graph, plan: Plan, alignment: int) -> None:
        self.plan, self.alignment = plan, alignment
        self.graph, self.homes = graph, plan.homes(graph)
        self.resident = sorted(set(graph.state_tensors).intersection(plan.resident or ()))
        self.blocks: list[Block] = []
        self.copies: dict[int, tuple[Block, int, int]] = {}
        """The copy of each tensor in RAM: its block, the position that made it, its size."""
        self.moving: set[int] = set()

    def run(self) -> None:
        """Walk from what is there before the program to its end."""
        steps = self.homes.steps_of(self.plan.program)
        for i in self.resident:
            self._make(i, BEFORE)
        for position, (op, index) in enumerate(steps):
            if op == Op.COMPUTE:
                self._compute(index, position, self._dying(position))
            elif op == Op.PAGE_IN:
                self._make(index, position)
            elif op == Op.FREE:
                self._end(index, position)
            if op in (Op.PAGE_IN, Op.PAGE_OUT) and self.plan.mode == StorageMode.DMA:
                self.moving.add(index)
            elif op == Op.WAIT:
                self.moving.discard(index)
        for i in list(self.copies):
            self._end(i, len(steps))

    def _dying(self, position: int) -> set[int]:
        """Return the tensors at rest that are freed right after a position."""
        program, place = self.plan.program, position + 1
        found: set[int] = set()
        while place < len(program) and program[place].op == Op.FREE:
            found.add(program[place].index)
            place += 1
        return (found - self.moving) & self.copies.keys()

    def _compute(self, k: int, position: int, dying: set[int]) -> None:
        in_place = {y: x for y, x in self.graph.in_place_of[k] if x in dying}
        for i in self.homes.outputs[k]:
            if i not in self.graph.state_of:
                inside = self.copies[in_place[i]][0] if i in in_place else None
                self._end(i, position + 1)  # an old copy is beside the new one until then
                self._make(i, position, inside)
        workspace = self.graph.nodes[k].workspace_bytes
        if workspace:
            span = Span(position, position + 1, aligned(workspace, self.alignment))
            contents = [(position, Content.WORKSPACE, k)]
            self.blocks.append(Block(spans=[span], contents=contents))
        for old in self.homes.replaced.get(k, ()):
            self.copies[self.graph.replacement_of[old]] = self.copies.pop(old)

    def _make(self, i: int, position: int, inside: Block | None = None) -> None:
        block = inside
        if block is None:
            block = Block()
            self.blocks.append(block)
        block.contents.append((position, Content.OUTPUT, i))
        size = aligned(self.graph.tensor_bytes[i], self.alignment)
        self.copies[i] = block, position, size

    def _end(self, i: int, position: int) -> None:
        if i in self.copies:
            block, made, size = self.copies.pop(i)
            block.spans.append(Span(made, position, size))
