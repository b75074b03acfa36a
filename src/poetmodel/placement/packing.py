"""Which blocks must not overlap, where one fits lowest, and a search over the order of placing."""

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
"""The offset of a block that has none: above all others, so that it is in nobody's way [B]."""
PLACEMENTS: Final = 300_000
"""How often a block is placed in all, beyond the first time."""
FEW_PAIRS: Final = 30
"""Pairs of blocks in RAM together up to which a tenth of these placements is enough."""
MOVES: Final = 1000
"""Moves without a lower top after which the search begins anew."""
LIFE_POWERS: Final = (0.0, 0.25, 0.5)
"""Blocks begin in descending order of their height times their life to this power; each new
beginning takes the next one. The first power is that of the greedy order."""


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """The blocks that are in RAM together with one block, at any position."""

    numbers: Integers
    """Which."""
    below_bytes: Integers
    """How much lower than each of them the block must begin, to be below it [B]."""
    above_bytes: Integers
    """How much higher than each of them the block must begin, to be above it [B]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """Which blocks are in RAM together, and how high they are then."""

    height: tuple[int, ...]
    """The highest span of each block [B]."""
    neighbours: tuple[Neighbours, ...]
    """For each block."""

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> Self:
        """Find the pairs that are in RAM together, by one sweep over the positions."""
        spans = sorted(
            (begin, end, size, number)
            for number, block in enumerate(blocks)
            for begin, end, size in block.spans
            if size
        )
        pairs: dict[tuple[int, int], tuple[int, int]] = {}
        there: list[tuple[int, int, int]] = []
        for begin, end, size, number in spans:
            there = [block for block in there if block[0] > begin]
            for _, other_size, other in there:
                if other != number:
                    key = (number, other)
                    known = pairs.get(key, (0, 0))
                    pairs[key] = max(known[0], size), max(known[1], other_size)
            there.append((end, size, number))
        rows: list[dict[int, tuple[int, int]]] = [{} for _ in blocks]
        for (number, other), (size, other_size) in pairs.items():
            for here, there_, below, above in (
                (number, other, size, other_size),
                (other, number, other_size, size),
            ):
                known = rows[here].get(there_, (0, 0))
                rows[here][there_] = max(known[0], below), max(known[1], above)
        return cls(
            height=tuple(max((span.bytes for span in block.spans), default=0) for block in blocks),
            neighbours=tuple(
                Neighbours(
                    np.array(list(row), dtype=np.int64),
                    np.array([below for below, _ in row.values()], dtype=np.int64),
                    np.array([above for _, above in row.values()], dtype=np.int64),
                )
                for row in rows
            ),
        )

    def lowest(self, number: int, offsets: Integers) -> int:
        """Return the lowest offset at which a block fits beside those that are placed [B]."""
        beside = self.neighbours[number]
        if not beside.numbers.size:
            return 0
        others = offsets[beside.numbers]
        low = others - beside.below_bytes
        order = low.argsort()
        low, high = low[order], (others + beside.above_bytes)[order]
        if low[0] >= 0:
            return 0
        np.maximum.accumulate(high, out=high)  # the first offset above all that begin below
        fits = low[1:] >= high[:-1]
        first = int(fits.argmax()) if fits.size else 0
        return int(high[first]) if fits.size and fits[first] else int(high[-1])

    def top(self, offsets: Integers) -> int:
        """Return the highest end of blocks at these offsets [B]."""
        return int((offsets + np.array(self.height, dtype=np.int64)).max(initial=0))


def search(
    blocks: Sequence[Block],
    packing: Packing,
    *,
    bound: int,
    until_s: float,
    seed: int = 0,
) -> Integers:
    """Return offsets whose top is as low as is found; `bound` is a lower bound on it [B].

    Blocks are placed one after the other, each at the lowest offset where it fits: first by size,
    which is the greedy answer, then with ever lower tops wanted. A block that does not fit below
    the top wanted moves to an earlier place in the order, at random, and the blocks from there on
    are placed again.
    """
    searched = _Search(blocks, packing, bound, Random(seed))  # noqa: S311 - reproducible
    return searched.run(until_s)


class _Search:
    def __init__(
        self,
        blocks: Sequence[Block],
        packing: Packing,
        bound: int,
        rng: Random,
    ) -> None:
        self.packing, self.bound, self.rng = packing, bound, rng
        self.life = [sum(end - begin for begin, end, _ in block.spans) for block in blocks]
        self.powers = cycle(LIFE_POWERS)
        self.offsets: Integers = np.full(len(blocks), UNPLACED, dtype=np.int64)
        self.order = self._order()
        self.placements = 0

    def run(self, until_s: float) -> Integers:
        """Place greedily, and search until the bound is reached or time or placements are up."""
        self._place(0, None)
        best = self.offsets.copy()
        top, target = self._anew_below(best)
        few = sum(beside.numbers.size for beside in self.packing.neighbours) <= 2 * FEW_PAIRS
        most = self.placements + (PLACEMENTS // 10 if few else PLACEMENTS)
        begin = moves = 0
        while top > self.bound and self.placements < most and time.monotonic() < until_s:
            stuck = self._place(begin, target)
            if stuck is None:
                best = self.offsets.copy()
                top, target = self._anew_below(best)
                begin = moves = 0
                continue
            moves += 1
            if moves > MOVES:
                self.order, begin, moves = self._order(), 0, 0
                self.offsets[:] = UNPLACED
                continue
            begin = self.rng.randrange(stuck) if stuck else 0
            self.order.insert(begin, self.order.pop(stuck))
            self.offsets[self.order[begin : stuck + 1]] = UNPLACED
        return best

    def _place(self, begin: int, target: int | None) -> int | None:
        """Place the blocks from one place in the order on; return where one ends too high."""
        for position in range(begin, len(self.order)):
            number = self.order[position]
            offset = self.packing.lowest(number, self.offsets)
            self.placements += 1
            if target is not None and offset + self.packing.height[number] > target:
                return position
            self.offsets[number] = offset
        return None

    def _anew_below(self, offsets: Integers) -> tuple[int, int]:
        """Take all blocks out; return the top that was found, and the one wanted next."""
        self.offsets[:] = UNPLACED
        top = self.packing.top(offsets)
        return top, (self.bound + top) // 2

    def _order(self) -> list[int]:
        power, height = next(self.powers), self.packing.height
        return sorted(range(len(height)), key=lambda n: -height[n] * self.life[n] ** power)
