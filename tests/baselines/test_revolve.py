"""Revolve: its closed form, its schedules, and what the budget makes of it."""

from __future__ import annotations

import heapq

import pytest

from kit.instances import seeded
from kit.rotor_reference import chain_graph, random_layers
from kit.worked import chain_costs, training_chain
from poetmodel.baselines.chain import Chain
from poetmodel.baselines.revolve import forward_steps, griewank_walther, revolve
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, operation
from poetmodel.problem import Problem
from poetmodel.schedule import simulate, verify

LENGTHS = range(1, 11)


def least_steps(length: int, slots: int) -> int:
    """Return the fewest forward steps by trying everything: states are (stored, at, left).

    `stored` holds the positions whose state is stored (0 always), `at` is the position of the
    state at hand, `left` the steps that are not reversed yet. The last of these is reversed from
    the state before it, which takes no forward step.
    """
    queue = [(0, frozenset({0}), 0, length)]
    seen: set[tuple[frozenset[int], int, int]] = set()
    while queue:
        steps, stored, at, left = heapq.heappop(queue)
        if left == 0:
            return steps
        if (stored, at, left) in seen:
            continue
        seen.add((stored, at, left))
        if at == left - 1:
            heapq.heappush(queue, (steps, frozenset(s for s in stored if s < left), at, left - 1))
        if at + 1 < left:
            heapq.heappush(queue, (steps + 1, stored, at + 1, left))
        if at not in stored and at < left and len(stored) < slots:
            heapq.heappush(queue, (steps, stored | {at}, at, left))
        for s in stored - {at}:
            heapq.heappush(queue, (steps, stored, s, left))
        for s in stored - {0}:
            heapq.heappush(queue, (steps, stored - {s}, at, left))
    raise AssertionError


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_closed_form_is_the_least_number_of_steps(slots: int) -> None:
    """No order of advancing and storing takes fewer forward steps than the closed form says."""
    found = [forward_steps(length, slots) for length in LENGTHS]
    assert found == [least_steps(length, slots) for length in LENGTHS]


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 10])
@pytest.mark.parametrize("length", LENGTHS)
def test_schedule_takes_the_steps_of_the_closed_form(length: int, slots: int) -> None:
    """On a chain whose gradients read the state before a layer, forward steps are the closed form.

    The last layer's one computation is beside it: revolve reverses it from the state before it.
    """
    graph = training_chain([1] * (length + 1), reads_own=False, loss=False)
    if length == 1:
        with pytest.raises(MethodNotApplicableError, match="single step"):
            Chain(graph)
        return
    schedule = revolve(Chain(graph), slots)
    assert simulate(graph, None, schedule).valid
    layers = sum(graph.nodes[k].phase == "forward" for _, k in schedule.R)
    assert layers - 1 == forward_steps(length, slots)


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_no_more_states_than_slots_are_kept(slots: int) -> None:
    """Between the parts of the backward pass there are at most as many states as slots.

    At the turn there is one more: the state that the forward pass has at hand.
    """
    graph = training_chain([1] * 12, reads_own=False, loss=False)
    schedule = revolve(Chain(graph), slots)
    states = {i for i, k in enumerate(graph.node_of) if graph.nodes[k].phase != "backward"}
    begin = next(k for k, node in enumerate(graph.nodes) if node.phase == "backward")
    kept = [sum((t, i) in schedule.S_RAM for i in states) for t in range(begin, len(graph.nodes))]
    assert kept[0] == slots + 1
    assert max(kept[1:]) == slots


def test_slots_follow_from_the_budget() -> None:
    """All slots at 100 %, the most that fit below, and an error where one slot is too much."""
    graph = training_chain([1] * 11)
    costs = chain_costs(graph)
    spent = []
    for ram in ("100%", 9, 7, 5):
        problem = Problem(graph, costs, ram=ram)
        schedule = griewank_walther(problem)
        assert verify(problem, schedule).valid
        spent.append(len(schedule.R))
    assert spent[0] == len(graph.nodes)
    assert spent == sorted(spent)
    assert len(set(spent)) == 4
    with pytest.raises(MethodNotApplicableError, match="one slot"):
        griewank_walther(Problem(graph, costs, ram=3))


def test_graph_that_is_no_chain_is_refused() -> None:
    """A backward pass in the order of the forward pass is not bent into a chain."""
    graph = training_chain([1] * 5)
    nodes = list(graph.nodes)
    moved = operation("late", output_bytes=1, phase="backward", inputs=("f4", "f1", "g1"))
    bent = Graph(name="bent", nodes=(*nodes, moved))
    with pytest.raises(MethodNotApplicableError, match=r"no chain.*'late'"):
        Chain(bent)
    with pytest.raises(MethodNotApplicableError, match="no backward pass"):
        Chain(Graph(name="forward", nodes=tuple(nodes[:5])))


def test_state_is_freed_and_recomputed_where_it_takes_too_much() -> None:
    """On tight chains it finds a schedule wherever one fits that frees states as revolve does."""
    only_freed = 0
    for seed in range(20):
        rng = seeded(f"revolve/{seed}")
        graph = chain_graph(random_layers(rng, rng.randint(3, 7)))
        chain, costs = Chain(graph), chain_costs(graph)
        slots = range(1, len(chain.steps) + 1)
        least = [
            min(simulate(graph, None, revolve(chain, n, freed=freed)).peak_ram_bytes for n in slots)
            for freed in (False, True)
        ]
        only_freed += least[1] < least[0]
        problem = Problem(graph, costs, ram=min(least), paging=False)
        schedule = griewank_walther(problem)
        assert verify(problem, schedule).valid
        with pytest.raises(MethodNotApplicableError, match="with one slot it needs"):
            griewank_walther(Problem(graph, costs, ram=min(least) - 1, paging=False))
    assert only_freed > 0
