"""Addresses of plans: valid by the independent walk, never below the bound, and on it if easy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kit.instances import seeded
from kit.plans import HELD, STORED, plan, random_plan, random_program, random_state_plan, state_step
from kit.strategies import graphs
from kit.worked import skip_graph
from poetmodel.device import StorageMode
from poetmodel.errors import PlanError
from poetmodel.graph import Graph, operation
from poetmodel.placement import place
from poetmodel.plan import Plan, check_arena, check_plan

if TYPE_CHECKING:
    from poetmodel.plan import Arena


def checked(graph: Graph, found: Plan, arena: Arena) -> Arena:
    """Return addresses once the independent walk has found nothing wrong."""
    check = check_arena(graph, replace(found, ram_budget_bytes=None), arena)
    assert check.violations == ()
    return arena


@given(
    graph=graphs(max_nodes=8, non_recomputable=False),
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(StorageMode),
)
def test_addresses_of_random_programs_are_valid(graph: Graph, seed: int, mode: StorageMode) -> None:
    """With recomputations and page-ins at random, and tensors of any size."""
    found = random_program(graph, seeded(seed), mode)
    arena = checked(graph, found, place(graph, found, alignment=1))
    assert arena.lower_bound_bytes == check_plan(graph, None, found).peak_ram_bytes
    assert arena.bytes >= arena.lower_bound_bytes


@given(
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(StorageMode),
    alignment=st.sampled_from((1, 2, 4, 16)),
)
@example(seed=18, mode=StorageMode.DMA, alignment=1)
def test_addresses_of_plans_with_state_are_valid(
    seed: int, mode: StorageMode, alignment: int
) -> None:
    """Resident, on storage or memory-mapped, replaced, and with operators in place."""
    graph, _, found = random_state_plan(seeded(seed), mode)
    arena = checked(graph, found, place(graph, found, alignment=alignment))
    if alignment == 1:
        peak = check_plan(graph, None, found).peak_ram_bytes
        assert arena.lower_bound_bytes == peak


@pytest.mark.parametrize("seed", range(20))
def test_addresses_of_schedules_are_valid(seed: int) -> None:
    """Plans of random schedules, for both modes."""
    for mode in StorageMode:
        graph, _, found = random_plan(seeded(seed), mode)
        checked(graph, found, place(graph, found))


@pytest.mark.parametrize(("text", "resident"), [(STORED, ()), (HELD, (1, 3))])
def test_worked_plans_reach_the_bound(text: str, resident: tuple[int, ...]) -> None:
    """The step of five tensors fits in its peak of 26 B, rounded up to a multiple of 8 each."""
    graph, found = state_step(), plan(text, "blocking", resident=resident)
    arena = checked(graph, found, place(graph, found, alignment=8))
    assert arena.fragmentation == 0.0
    assert arena.bytes == 40


def test_the_search_closes_holes_that_greedy_leaves() -> None:
    """Best fit by size needs 11 B here, the bound is 7."""
    graph, found = holes()
    arena = checked(graph, found, place(graph, found, alignment=1))
    assert (arena.bytes, arena.lower_bound_bytes) == (7, 7)
    greedy = checked(graph, found, place(graph, found, alignment=1, time_limit=0.0))
    assert greedy.bytes == 11


def holes() -> tuple[Graph, Plan]:
    """Return a graph and a plan whose largest tensors must not lie side by side."""
    sizes = {"a": 2, "b": 3, "c": 2, "d": 3, "e": 4}
    graph = Graph(
        name="holes",
        nodes=tuple(operation(name, output_bytes=size) for name, size in sizes.items()),
    )
    return graph, plan("c0 c1 c2 f1 c3 f0 f2 c4 f3 f4", "blocking")


def test_the_same_seed_gives_the_same_addresses() -> None:
    """Whatever the search does at random comes from the seed."""
    for seed in range(10):
        graph, _, found = random_state_plan(seeded(f"same/{seed}"), "dma")
        assert place(graph, found, seed=3) == place(graph, found, seed=3)


def test_empty_things_have_addresses_too() -> None:
    """Tensors of no bytes are placed, and take nothing."""
    graph = Graph(name="empty", nodes=(operation("a", output_bytes=0),))
    arena = place(graph, plan("c0 f0", "blocking"))
    assert (arena.bytes, arena.fragmentation, len(arena.offsets)) == (0, 0.0, 1)


def test_what_is_no_valid_plan_is_refused() -> None:
    """The violations are told; a budget that is too small is none of them."""
    with pytest.raises(PlanError, match="needs tensor 'a' in RAM"):
        place(skip_graph(), plan("c1"))
    with pytest.raises(PlanError, match=r"alignment: .* got 3"):
        place(skip_graph(), plan("c0 c1 f0 c2 f1 c3"), alignment=3)
    graph, found = holes()
    assert place(graph, replace(found, ram_budget_bytes=1)).bytes > 1
