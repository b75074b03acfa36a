"""Content of RAM under a plan, from one position of its program to another."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from poetmodel.plan.alignment import round_up
from poetmodel.plan.stays import list_stays
from poetmodel.schedule.machine import BEFORE, Content

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
    """Content at one offset: a workspace, or a copy and all that is made in its place."""

    spans: list[Span] = field(default_factory=list)
    """They may overlap where one copy is made in place of another."""
    contents: list[tuple[int, Content, int]] = field(default_factory=list)
    """Positions, contents and indices with this offset."""

    @property
    def is_throughout(self) -> bool:
        """Whether it is there from before the program to its end: resident state."""
        return self.contents[0][0] == BEFORE


def blocks_of(graph: Graph, plan: Plan, alignment: int) -> list[Block]:
    """Return all that a valid plan places, in the order of its program."""
    blocks: list[Block] = []
    latest: dict[int | None, Block] = {}
    """The block with the latest copy of each tensor."""
    for copy in list_stays(graph, plan):
        block = latest.get(copy.in_place_of)
        if block is None:
            block = Block()
            blocks.append(block)
        if copy.content == Content.OUTPUT:
            latest[copy.index] = block
        end = copy.first_free_position(plan.program)
        block.spans.append(Span(copy.begin, end, round_up(copy.bytes, alignment)))
        block.contents.append((copy.begin, copy.content, copy.index))
    return blocks


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
    total, totals = 0, []
    for step in steps[:-1]:
        total += step
        totals.append(total)
    return totals


def apart(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of a block without overlaps: the higher one where there are two."""
    if len(spans) == 1:
        return list(spans)
    edges = sorted({position for begin, end, _ in spans for position in (begin, end)})
    return [
        Span(a, b, max((size for begin, end, size in spans if begin <= a < end), default=0))
        for a, b in pairwise(edges)
    ]
