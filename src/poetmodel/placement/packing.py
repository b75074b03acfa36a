"""Which blocks must not overlap, and where one fits lowest beside those that are placed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from poetmodel.placement.lifetimes import Block

    Integers = NDArray[np.int64]

UNPLACED: Final = 2**60
"""The offset of a block that has none: above all others, so that it is in nobody's way [B]."""


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
