"""The mixed-integer program agrees with all orders of a few blocks, and with the search."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from kit.instances import seeded
from poetmodel.placement.exact import exact_order, is_small
from poetmodel.placement.lifetimes import Block, Span, lower_bound_bytes
from poetmodel.placement.packing import UNPLACED, Packing
from poetmodel.placement.search import search


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


@pytest.mark.parametrize("seed", range(6))
def test_the_program_finds_what_all_orders_find(seed: int) -> None:
    """Placing each block lowest, in every order, has the least top among its results."""
    blocks = random_blocks(seed, 5)
    packing, bound = Packing.of(blocks), lower_bound_bytes(blocks, 6)
    least = min(placed(packing, order) for order in permutations(range(5)))
    worst = max(placed(packing, order) for order in permutations(range(5)))
    assert is_small(packing)
    order = exact_order(packing, bound=bound, top=worst, limit_s=60.0)
    assert order is not None
    assert placed(packing, order) == least >= bound


def test_lower_spans_of_a_block_keep_their_bytes() -> None:
    """Sizes below the highest span of a block count to the byte, whatever divides the highest."""
    spans = (
        [(3, 6, 8)],
        [(3, 6, 12)],
        [(1, 3, 12), (3, 6, 10)],
        [(1, 2, 8), (2, 6, 2)],
        [(4, 5, 12)],
    )
    packing = Packing.of([Block(spans=[Span(*span) for span in block]) for block in spans])
    order = exact_order(packing, bound=40, top=52, limit_s=60.0)
    assert order is not None
    assert placed(packing, order) == min(placed(packing, o) for o in permutations(range(5))) == 44


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.seeds) for seed in range(2, 6))]
)
def test_the_search_finds_the_least_of_some_blocks(seed: int) -> None:
    """Where it stays above the bound, no block is smaller."""
    blocks = random_blocks(100 + seed, 7, 8)
    packing, bound = Packing.of(blocks), lower_bound_bytes(blocks, 8)
    found = packing.top(search(blocks, packing, bound=bound, until_s=float("inf")))
    order = exact_order(packing, bound=bound, top=found, limit_s=60.0)
    assert order is not None
    assert placed(packing, order) == found


def test_no_time_is_no_proof() -> None:
    """Then the answer of the search stays."""
    packing = Packing.of(random_blocks(1, 10, 8))
    assert exact_order(packing, bound=1, top=90, limit_s=0.0) is None


def test_many_pairs_are_left_to_the_search() -> None:
    """Blocks that are all in RAM together make a pair each."""
    blocks = [Block(spans=[Span(0, 1, 1)]) for _ in range(20)]
    assert not is_small(Packing.of(blocks))
