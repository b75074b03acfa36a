"""Addresses of plans: valid by the independent walk, never below the bound, and on it if easy."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kit.instances import make_rng
from kit.plans import HELD, STORED, parse_plan, random_program, random_state_plan, state_step
from kit.strategies import graphs
from kit.worked import skip_graph
from poetmodel.device import StorageMode
from poetmodel.errors import PlanError
from poetmodel.graph import Graph, operation
from poetmodel.placement import place
from poetmodel.placement.lifetimes import Block, Span, lower_bound_bytes
from poetmodel.placement.packing import UNPLACED, PackingProblem, search_offsets
from poetmodel.plan import check_arena, check_plan


def checked(graph, found, arena):
    """Return addresses that the independent walk has verified."""
    check = check_arena(graph, replace(found, ram_budget_bytes=None), arena)
    assert check.violations == ()
    return arena


@given(
    graph=graphs(max_nodes=8, non_recomputable=False),
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(StorageMode),
)
def test_addresses_of_random_programs_are_valid(graph, seed, mode):
    """With recomputations and page-ins at random, and tensors of any size."""
    found = random_program(graph, make_rng(seed), mode)
    arena = checked(graph, found, place(graph, found, alignment=1))
    assert arena.lower_bound_bytes == check_plan(graph, None, found).peak_ram_bytes
    assert arena.bytes >= arena.lower_bound_bytes


@given(
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(StorageMode),
    alignment=st.sampled_from((1, 2, 4, 16)),
)
@example(seed=18, mode=StorageMode.DMA, alignment=1)
def test_addresses_of_plans_with_state_are_valid(seed, mode, alignment):
    """Resident, on storage or memory-mapped, replaced, and with operators in place."""
    graph, _, found = random_state_plan(make_rng(seed), mode)
    arena = checked(graph, found, place(graph, found, alignment=alignment))
    if alignment == 1:
        peak = check_plan(graph, None, found).peak_ram_bytes
        assert arena.lower_bound_bytes == peak


@pytest.mark.parametrize(("text", "resident"), [(STORED, ()), (HELD, (1, 3))])
def test_worked_plans_reach_the_bound(text, resident):
    """The step of five tensors fits in its peak of 26 B, rounded up to a multiple of 8 each."""
    graph, found = state_step(), parse_plan(text, "blocking", resident=resident)
    arena = checked(graph, found, place(graph, found, alignment=8))
    assert (arena.fragmentation_ratio, arena.bytes) == (0.0, 40)


def holes():
    """Return a graph and a plan whose largest tensors must not lie side by side."""
    sizes = (2, 3, 2, 3, 4)
    nodes = [operation(name, output_bytes=size) for name, size in zip("abcde", sizes, strict=True)]
    graph = Graph(name="holes", nodes=tuple(nodes))
    return graph, parse_plan("c0 c1 c2 f1 c3 f0 f2 c4 f3 f4", "blocking")


def test_the_search_closes_holes_that_greedy_leaves():
    """Best fit by size needs 11 B here, the bound is 7."""
    graph, found = holes()
    arena = checked(graph, found, place(graph, found, alignment=1))
    assert (arena.bytes, arena.lower_bound_bytes) == (7, 7)
    greedy = checked(graph, found, place(graph, found, alignment=1, time_limit=0.0))
    assert greedy.bytes == 11


def test_the_same_seed_gives_the_same_addresses():
    """All random choices of the search depend on the seed."""
    for seed in range(10):
        graph, _, found = random_state_plan(make_rng(f"same/{seed}"), "dma")
        assert place(graph, found, seed=3) == place(graph, found, seed=3)


def test_empty_things_have_addresses_too():
    """Tensors of 0 bytes are placed, and need no RAM."""
    graph = Graph(name="empty", nodes=(operation("a", output_bytes=0),))
    arena = place(graph, parse_plan("c0 f0", "blocking"))
    assert (arena.bytes, arena.fragmentation_ratio, len(arena.offsets)) == (0, 0.0, 1)


def test_what_is_no_valid_plan_is_refused():
    """The violations are listed; a budget that is too small is not one of them."""
    with pytest.raises(PlanError, match="needs tensor 'a' in RAM"):
        place(skip_graph(), parse_plan("c1"))
    with pytest.raises(PlanError, match=r"alignment: .* got 3"):
        place(skip_graph(), parse_plan("c0 c1 f0 c2 f1 c3"), alignment=3)
    graph, found = holes()
    assert place(graph, replace(found, ram_budget_bytes=1)).bytes > 1


# -- the search over orders, against all orders of a few blocks ------------------------------------
def placed(packing, order):
    """Return the top of blocks that are placed in an order."""
    offsets = np.full(len(packing.heights), UNPLACED, dtype=np.int64)
    for number in order:
        offsets[number] = packing.lowest_offset(number, offsets)
    return packing.max_end(offsets)


def random_blocks(seed, count, length=6):
    """Return blocks of random lifetimes and sizes, some with a second span."""
    rng, found = make_rng(f"exact/{seed}"), []
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
def test_the_search_finds_what_all_orders_find(seed):
    """Placing each block lowest, in every order, has the least top among its results."""
    blocks = random_blocks(seed, 7, 8)
    packing, bound = PackingProblem.from_blocks(blocks), lower_bound_bytes(blocks, 8)
    least = min(placed(packing, order) for order in permutations(range(7)))
    found = packing.max_end(search_offsets(blocks, packing, bound=bound, until_s=float("inf")))
    assert found == least >= bound


def test_lower_spans_of_a_block_keep_their_bytes():
    """Sizes below the highest span of a block count to the byte, whatever divides the highest."""
    spans = (
        [(3, 6, 8)],
        [(3, 6, 12)],
        [(1, 3, 12), (3, 6, 10)],
        [(1, 2, 8), (2, 6, 2)],
        [(4, 5, 12)],
    )
    blocks = [Block(spans=[Span(*span) for span in block]) for block in spans]
    packing = PackingProblem.from_blocks(blocks)
    found = packing.max_end(search_offsets(blocks, packing, bound=40, until_s=float("inf")))
    assert found == min(placed(packing, order) for order in permutations(range(5))) == 44
