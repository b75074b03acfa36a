"""Pack blocks into an arena: conflicts, lowest offsets, and a search over placement orders."""

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
"""Number of placements of single blocks, after the greedy ones, at which the search stops."""
MAX_SHORT_SEARCH_PAIRS: Final = 30
"""Number of conflicting pairs of blocks up to which a tenth of `MAX_PLACEMENTS` suffices."""
MAX_FRUITLESS_MOVES: Final = 1000
"""Maximum number of moves without a smaller arena; then the search restarts."""
LIFETIME_POWERS: Final = (0.0, 0.25, 0.5)
"""Exponents of initial orders: blocks are sorted by height times lifetime to this power, largest
first. Each restart uses the next exponent, in a cycle; the greedy order uses the first one."""


@dataclass(frozen=True, slots=True, eq=False)
class Conflicts:
    """Blocks that conflict with one block, because both are in RAM at some position."""

    indices: Integers
    """Indices of the conflicting blocks."""
    min_bytes_below: Integers
    """For each conflicting block, the minimum distance by which this block must begin below that
    block, if it is placed below [B]."""
    min_bytes_above: Integers
    """For each conflicting block, the minimum distance by which this block must begin above that
    block, if it is placed above [B]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackingProblem:
    """Blocks to pack: their heights and conflicts."""

    heights: tuple[int, ...]
    """Largest size of each block over its lifetime [B]."""
    conflicts_of: tuple[Conflicts, ...]
    """Conflicts of each block."""

    @classmethod
    def from_blocks(cls, blocks: Sequence[Block]) -> Self:
        """Return the packing problem: pairs of blocks in RAM at once, with minimum distances."""
        spans = sorted(
            (begin, end, size, index)
            for index, block in enumerate(blocks)
            for begin, end, size in block.spans
            if size
        )
        pairs: dict[tuple[int, int], tuple[int, int]] = {}
        live_blocks: list[tuple[int, int, int]] = []
        for begin, end, size, index in spans:
            live_blocks = [block for block in live_blocks if block[0] > begin]
            for _, other_size, other_index in live_blocks:
                if other_index != index:
                    key = (index, other_index)
                    sizes = pairs.get(key, (0, 0))
                    pairs[key] = max(sizes[0], size), max(sizes[1], other_size)
            live_blocks.append((end, size, index))
        rows: list[dict[int, tuple[int, int]]] = [{} for _ in blocks]
        for (index, other_index), (size, other_size) in pairs.items():
            for block_index, other_block, block_bytes, other_bytes in (
                (index, other_index, size, other_size),
                (other_index, index, other_size, size),
            ):
                sizes = rows[block_index].get(other_block, (0, 0))
                rows[block_index][other_block] = (
                    max(sizes[0], block_bytes),
                    max(sizes[1], other_bytes),
                )
        return cls(
            heights=tuple(max((span.bytes for span in block.spans), default=0) for block in blocks),
            conflicts_of=tuple(
                Conflicts(
                    np.array(list(row), dtype=np.int64),
                    np.array([block_bytes for block_bytes, _ in row.values()], dtype=np.int64),
                    np.array([other_bytes for _, other_bytes in row.values()], dtype=np.int64),
                )
                for row in rows
            ),
        )

    def lowest_offset(self, index: int, offsets: Integers) -> int:
        """Return the lowest offset at which block `index` fits among blocks at `offsets` [B]."""
        conflicts = self.conflicts_of[index]
        if not conflicts.indices.size:
            return 0
        conflict_offsets = offsets[conflicts.indices]
        low = conflict_offsets - conflicts.min_bytes_below
        order = low.argsort()
        low, high = low[order], (conflict_offsets + conflicts.min_bytes_above)[order]
        if low[0] >= 0:
            return 0
        np.maximum.accumulate(high, out=high)  # the first offset above all blocks that begin below
        fits_in_hole = low[1:] >= high[:-1]
        first = int(fits_in_hole.argmax()) if fits_in_hole.size else 0
        return int(high[first]) if fits_in_hole.size and fits_in_hole[first] else int(high[-1])

    def max_end(self, offsets: Integers) -> int:
        """Return the highest end of blocks at the given offsets [B]; 0 without blocks."""
        return int((offsets + np.array(self.heights, dtype=np.int64)).max(initial=0))


def search_offsets(
    blocks: Sequence[Block],
    problem: PackingProblem,
    *,
    bound: int,
    until_s: float,
    seed: int = 0,
) -> Integers:
    """Return offsets of `blocks` with the smallest arena found, until it has `bound` bytes.

    Blocks are placed one by one at the lowest offset where they fit, within a target size halfway
    between the bound and the best arena. A block that does not fit moves to a random earlier
    position in the order. `until_s` is of the monotonic clock [s].
    """
    search = _OrderSearch(blocks, problem, bound, Random(seed))  # noqa: S311 - reproducible
    return search.find_offsets(until_s)


class _OrderSearch:
    """Random local search over orders of block indices; `offsets` has an entry per block."""

    def __init__(
        self,
        blocks: Sequence[Block],
        problem: PackingProblem,
        bound: int,
        rng: Random,
    ) -> None:
        self.problem, self.bound, self.rng = problem, bound, rng
        self.lifetimes = [sum(end - begin for begin, end, _ in block.spans) for block in blocks]
        self.powers = cycle(LIFETIME_POWERS)
        self.offsets: Integers = np.full(len(blocks), UNPLACED, dtype=np.int64)
        self.order = self._initial_order()
        self.n_placements = 0
        """Number of placements of single blocks so far."""

    def find_offsets(self, until_s: float) -> Integers:
        """Place greedily, then search for a smaller arena; return the best offsets."""
        self._place_from(0, None)
        best_offsets = self.offsets.copy()
        arena_bytes, target = self._unplace_all(best_offsets)
        is_short = (
            sum(block_conflicts.indices.size for block_conflicts in self.problem.conflicts_of)
            <= 2 * MAX_SHORT_SEARCH_PAIRS
        )
        max_placements = self.n_placements + (MAX_PLACEMENTS // 10 if is_short else MAX_PLACEMENTS)
        begin = n_moves = 0
        while (
            arena_bytes > self.bound
            and self.n_placements < max_placements
            and time.monotonic() < until_s
        ):
            stuck_position = self._place_from(begin, target)
            if stuck_position is None:
                best_offsets = self.offsets.copy()
                arena_bytes, target = self._unplace_all(best_offsets)
                begin = n_moves = 0
                continue
            n_moves += 1
            if n_moves > MAX_FRUITLESS_MOVES:
                self.order, begin, n_moves = self._initial_order(), 0, 0
                self.offsets[:] = UNPLACED
                continue
            begin = self.rng.randrange(stuck_position) if stuck_position else 0
            self.order.insert(begin, self.order.pop(stuck_position))
            self.offsets[self.order[begin : stuck_position + 1]] = UNPLACED
        return best_offsets

    def _place_from(self, begin: int, target: int | None) -> int | None:
        """Place blocks from a position of the order on, in `offsets`.

        Returns the position of the first that would end above `target` [B], or None.
        """
        for position in range(begin, len(self.order)):
            index = self.order[position]
            offset = self.problem.lowest_offset(index, self.offsets)
            self.n_placements += 1
            if target is not None and offset + self.problem.heights[index] > target:
                return position
            self.offsets[index] = offset
        return None

    def _unplace_all(self, offsets: Integers) -> tuple[int, int]:
        """Unplace all blocks; return the arena size at `offsets`, and the next target size."""
        self.offsets[:] = UNPLACED
        arena_bytes = self.problem.max_end(offsets)
        return arena_bytes, (self.bound + arena_bytes) // 2

    def _initial_order(self) -> list[int]:
        """Return the block indices in the order of the next exponent of `LIFETIME_POWERS`."""
        power, heights = next(self.powers), self.problem.heights
        return sorted(
            range(len(heights)), key=lambda index: -heights[index] * self.lifetimes[index] ** power
        )
