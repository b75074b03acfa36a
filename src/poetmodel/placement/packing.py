"""Pack blocks into an arena: conflicts, lowest fit, and a search over placement orders."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import cycle
from random import Random
from typing import TYPE_CHECKING, Final, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from poetmodel.placement.lifetimes import Block

    Integers = NDArray[np.int64]

UNPLACED: Final = 2**60
"""Offset of a block that is not placed: above all placed blocks, so that it conflicts with none
[B]."""
MAX_PLACEMENTS: Final = 300_000
"""Maximum number of placements of single blocks in the search."""
MAX_PAIRS_OF_SHORT_SEARCH: Final = 30
"""Number of conflicting pairs of blocks up to which a tenth of `MAX_PLACEMENTS` suffices."""
MAX_MOVES: Final = 1000
"""Number of moves without a smaller arena after which the search restarts."""
LIFE_POWERS: Final = (0.0, 0.25, 0.5)
"""Exponents of initial orders: blocks are sorted by height times lifetime to this power, largest
first. Each restart uses the next exponent; the first one is that of the greedy order."""


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """Blocks that conflict with one block, because both are in RAM at some position."""

    numbers: Integers
    """Indices of the conflicting blocks."""
    below_bytes: Integers
    """For each conflicting block, the minimum distance by which this block must begin below it
    [B]."""
    above_bytes: Integers
    """For each conflicting block, the minimum distance by which this block must begin above it
    [B]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """Heights of blocks, and their conflicts."""

    height: tuple[int, ...]
    """Largest span of each block [B]."""
    neighbours: tuple[Neighbours, ...]
    """Conflicts of each block."""

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> Self:
        """Return the packing of blocks, with their conflicts.

        One sweep over the positions of the program finds all pairs that are in RAM together.
        """
        spans = sorted(
            (begin, end, size, number)
            for number, block in enumerate(blocks)
            for begin, end, size in block.spans
            if size
        )
        pairs: dict[tuple[int, int], tuple[int, int]] = {}
        live_blocks: list[tuple[int, int, int]] = []
        for begin, end, size, number in spans:
            live_blocks = [block for block in live_blocks if block[0] > begin]
            for _, other_size, other_number in live_blocks:
                if other_number != number:
                    key = (number, other_number)
                    sizes = pairs.get(key, (0, 0))
                    pairs[key] = max(sizes[0], size), max(sizes[1], other_size)
            live_blocks.append((end, size, number))
        rows: list[dict[int, tuple[int, int]]] = [{} for _ in blocks]
        for (number, other_number), (size, other_size) in pairs.items():
            for block_number, neighbour, block_bytes, neighbour_bytes in (
                (number, other_number, size, other_size),
                (other_number, number, other_size, size),
            ):
                sizes = rows[block_number].get(neighbour, (0, 0))
                rows[block_number][neighbour] = (
                    max(sizes[0], block_bytes),
                    max(sizes[1], neighbour_bytes),
                )
        return cls(
            height=tuple(max((span.bytes for span in block.spans), default=0) for block in blocks),
            neighbours=tuple(
                Neighbours(
                    np.array(list(row), dtype=np.int64),
                    np.array([block_bytes for block_bytes, _ in row.values()], dtype=np.int64),
                    np.array(
                        [neighbour_bytes for _, neighbour_bytes in row.values()], dtype=np.int64
                    ),
                )
                for row in rows
            ),
        )

    def lowest_offset(self, number: int, offsets: Integers) -> int:
        """Return the lowest offset at which block `number` fits among the placed blocks [B]."""
        conflicts = self.neighbours[number]
        if not conflicts.numbers.size:
            return 0
        neighbour_offsets = offsets[conflicts.numbers]
        low = neighbour_offsets - conflicts.below_bytes
        order = low.argsort()
        low, high = low[order], (neighbour_offsets + conflicts.above_bytes)[order]
        if low[0] >= 0:
            return 0
        np.maximum.accumulate(high, out=high)  # the first offset above all blocks that begin below
        fits_in_hole = low[1:] >= high[:-1]
        first = int(fits_in_hole.argmax()) if fits_in_hole.size else 0
        return int(high[first]) if fits_in_hole.size and fits_in_hole[first] else int(high[-1])

    def top(self, offsets: Integers) -> int:
        """Return the highest end of blocks at the given offsets [B]."""
        return int((offsets + np.array(self.height, dtype=np.int64)).max(initial=0))


def search(
    blocks: Sequence[Block],
    packing: Packing,
    *,
    bound: int,
    until_s: float,
    seed: int = 0,
) -> Integers:
    """Return offsets with a small arena; `bound` is a lower bound on its size [B].

    Blocks are placed one by one at the lowest offset where they fit: first in the greedy order,
    then with smaller and smaller target sizes. A block that does not fit below the target moves to
    a random earlier position in the order, and the blocks from that position on are placed again.
    """
    packing_search = _Search(blocks, packing, bound, Random(seed))  # noqa: S311 - reproducible
    return packing_search.run(until_s)


class _Search:
    """Random local search over placement orders.

    Its state is the order of the blocks and the offsets of the placed ones.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        packing: Packing,
        bound: int,
        rng: Random,
    ) -> None:
        """Sort the blocks by the first exponent of `LIFE_POWERS`; place no block yet."""
        self.packing, self.bound, self.rng = packing, bound, rng
        self.life = [sum(end - begin for begin, end, _ in block.spans) for block in blocks]
        self.powers = cycle(LIFE_POWERS)
        self.offsets: Integers = np.full(len(blocks), UNPLACED, dtype=np.int64)
        self.order = self._initial_order()
        self.placements = 0

    def run(self, until_s: float) -> Integers:
        """Place greedily, then search until the bound is reached or time or placements run out."""
        self._place_from(0, None)
        best_offsets = self.offsets.copy()
        arena_bytes, target = self._unplace_all(best_offsets)
        is_short = (
            sum(conflicts.numbers.size for conflicts in self.packing.neighbours)
            <= 2 * MAX_PAIRS_OF_SHORT_SEARCH
        )
        max_placements = self.placements + (MAX_PLACEMENTS // 10 if is_short else MAX_PLACEMENTS)
        begin = n_moves = 0
        while (
            arena_bytes > self.bound
            and self.placements < max_placements
            and time.monotonic() < until_s
        ):
            stuck_position = self._place_from(begin, target)
            if stuck_position is None:
                best_offsets = self.offsets.copy()
                arena_bytes, target = self._unplace_all(best_offsets)
                begin = n_moves = 0
                continue
            n_moves += 1
            if n_moves > MAX_MOVES:
                self.order, begin, n_moves = self._initial_order(), 0, 0
                self.offsets[:] = UNPLACED
                continue
            begin = self.rng.randrange(stuck_position) if stuck_position else 0
            self.order.insert(begin, self.order.pop(stuck_position))
            self.offsets[self.order[begin : stuck_position + 1]] = UNPLACED
        return best_offsets

    def _place_from(self, begin: int, target: int | None) -> int | None:
        """Place blocks from a position of the order on.

        Return the position of the first block that ends above `target`, or None.
        """
        for position in range(begin, len(self.order)):
            number = self.order[position]
            offset = self.packing.lowest_offset(number, self.offsets)
            self.placements += 1
            if target is not None and offset + self.packing.height[number] > target:
                return position
            self.offsets[number] = offset
        return None

    def _unplace_all(self, offsets: Integers) -> tuple[int, int]:
        """Unplace all blocks; return the arena size at `offsets`, and the next target size."""
        self.offsets[:] = UNPLACED
        top = self.packing.top(offsets)
        return top, (self.bound + top) // 2

    def _initial_order(self) -> list[int]:
        power, height = next(self.powers), self.packing.height
        return sorted(range(len(height)), key=lambda n: -height[n] * self.life[n] ** power)
