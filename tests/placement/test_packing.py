"""The search over orders of placement, against all orders of a few blocks."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from kit.instances import seeded
from poetmodel.placement.lifetimes import Block, Span, lower_bound_bytes
from poetmodel.placement.packing import UNPLACED, Packing, search


def placed(packing: Packing, order: tuple[int, ...] | list[int]) -> int:
    """Return the top of blocks that are placed in an order."""
    offsets = np.full(len(packing.height), UNPLACED, dtype=np.int64)
    for number in order:
        offsets[number] = packing.lowest(number, offsets)
    return packing.top(offsets)


def random_blocks(seed: int, count: int, length: int = 6) -> list[Block]:
    """Return blocks of random lives and sizes, some with a second span."""
    rng, found = seeded(f"exact/{seed}"), []
    for _ in range(count):
        begin = rng.randrange(length - 1)
        spans = [Span(begin, rng.randint(begin + 1, length), rng.randint(1, 9))]
        if rng.random() < 0.3:
            spans.append(Span(spans[0].end - 1, length, rng.randint(1, 9)))
        found.append(Block(spans=spans))
    return found


@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.seeds) for seed in range(3, 30))]
)
def test_the_search_finds_what_all_orders_find(seed: int) -> None:
    """Placing each block lowest, in every order, has the least top among its results."""
    blocks = random_blocks(seed, 7, 8)
    packing, bound = Packing.of(blocks), lower_bound_bytes(blocks, 8)
    least = min(placed(packing, order) for order in permutations(range(7)))
    found = packing.top(search(blocks, packing, bound=bound, until_s=float("inf")))
    assert found == least >= bound


def test_lower_spans_of_a_block_keep_their_bytes() -> None:
    """Sizes below the highest span of a block count to the byte, whatever divides the highest."""
    spans = (
        [(3, 6, 8)],
        [(3, 6, 12)],
        [(1, 3, 12), (3, 6, 10)],
        [(1, 2, 8), (2, 6, 2)],
        [(4, 5, 12)],
    )
    blocks = [Block(spans=[Span(*span) for span in block]) for block in spans]
    packing = Packing.of(blocks)
    found = packing.top(search(blocks, packing, bound=40, until_s=float("inf")))
    assert found == min(placed(packing, order) for order in permutations(range(5))) == 44
