"""A search over the order in which blocks are placed."""

from __future__ import annotations

import time
from itertools import cycle
from random import Random
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.placement.packing import UNPLACED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.placement.lifetimes import Block
    from poetmodel.placement.packing import Integers, Packing


PLACEMENTS: Final = 300_000
"""How often a block is placed in all, beyond the first time."""
FEW_PAIRS: Final = 30
"""Pairs of blocks in RAM together up to which a tenth of these placements is enough."""
MOVES: Final = 1000
"""Moves without a lower top after which the search begins anew."""
LIFE_POWERS: Final = (0.0, 0.25, 0.5)
"""Blocks begin in descending order of their height times their life to this power; each new
beginning takes the next one. The first power is that of the greedy order."""


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
