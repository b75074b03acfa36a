"""Lifetimes of the memory blocks of a plan, in positions of its program."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from poetmodel.plan.alignment import round_up
from poetmodel.plan.stays import list_stays
from poetmodel.schedule.machine import BEFORE, Content

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from poetmodel.graph import Graph
    from poetmodel.plan import Plan


class Span(NamedTuple):
    """Range of positions of the program during which a block has one size."""

    begin: int
    """First position."""
    end: int
    """Position after the last one."""
    bytes: int
    """Size, rounded up to the alignment [B]."""


@dataclass(slots=True, kw_only=True)
class Block:
    """Memory at one offset: a workspace, or a copy and the chain of copies made in place of it."""

    spans: list[Span] = field(default_factory=list)
    """Spans of all copies, or of the workspace; two spans overlap if one copy is made in place of
    the other."""
    contents: list[tuple[int, Content, int]] = field(default_factory=list)
    """(position, kind of content, index of tensor or node) of each copy or workspace."""

    @property
    def is_resident(self) -> bool:
        """Whether the block is in RAM during the whole program: resident state."""
        return self.contents[0][0] == BEFORE


def list_blocks(graph: Graph, plan: Plan, alignment: int) -> list[Block]:
    """Return blocks of a valid plan, rounded up to `alignment` [B]; an in-place copy shares one."""
    blocks: list[Block] = []
    latest_block_of: dict[int | None, Block] = {}
    """Block that contains the latest copy of each tensor."""
    for copy in list_stays(graph, plan):
        block = latest_block_of.get(copy.in_place_of)
        if block is None:
            block = Block()
            blocks.append(block)
        if copy.content == Content.OUTPUT:
            latest_block_of[copy.index] = block
        end = copy.first_free_position(plan.program)
        block.spans.append(Span(copy.begin, end, round_up(copy.bytes, alignment)))
        block.contents.append((copy.begin, copy.content, copy.index))
    return blocks


def lower_bound_bytes(blocks: Iterable[Block], length: int) -> int:
    """Return a lower bound on the size of the arena: the maximum RAM of the blocks [B].

    The maximum is over the `length` positions of the program, and the position before it. If spans
    of a block overlap, the largest one counts.
    """
    ram_changes = [0] * (length + 2)
    for block in blocks:
        for begin, end, size in split_overlaps(block.spans):
            ram_changes[begin + 1] += size
            ram_changes[end + 1] -= size
    return max(accumulate(ram_changes))


def split_overlaps(spans: Sequence[Span]) -> list[Span]:
    """Split a block's spans at every begin and end; the largest counts, and 0 B in a hole."""
    if len(spans) == 1:
        return list(spans)
    edges = sorted({position for begin, end, _ in spans for position in (begin, end)})
    return [
        Span(
            start,
            stop,
            max((size for begin, end, size in spans if begin <= start < end), default=0),
        )
        for start, stop in pairwise(edges)
    ]
