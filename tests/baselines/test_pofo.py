"""POFO finds the quickest choice of one action per layer."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from kit.instances import random_training_graph, seeded
from kit.worked import chain_costs, training_chain
from poetmodel.baselines.checkpointing import ChainTable, rotor
from poetmodel.baselines.paging import Overhead
from poetmodel.baselines.pofo import (
    WIDE,
    Action,
    ActionPrefix,
    Beam,
    Layer,
    Transfers,
    best_actions,
    layers_of,
    pofo,
    schedule_of,
)
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.planner import verify
from poetmodel.problem import Problem

STAYING = (Action.KEEP, Action.OFFLOAD)


def nothing_again(*_: int) -> float:
    """Say that no run can be recomputed."""
    return math.inf


def planned_s(problem: Problem, table: ChainTable, actions: tuple[Action, ...]) -> float | None:
    """Return the makespan of the plan for some actions; None where they take too much RAM."""
    schedule = schedule_of(table, ActionPrefix(actions=actions))
    simulation = verify(problem, schedule).simulation
    fits = simulation.peak_ram_bytes <= problem.usable_ram_bytes
    return simulation.makespan_s if fits else None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_no_choice_of_actions_is_quicker(seed: int) -> None:
    """The plan of the layers that are offloaded is as quick as that of the best combination.

    The time counted by the method is never below that of the plan.
    """
    rng = seeded(f"pofo/{seed}")
    graph = training_chain(
        [rng.randint(1, 5) for _ in range(4)], gradient_bytes=2, reads_own=rng.random() < 0.7
    )
    costs = chain_costs(graph, seconds=[rng.randint(1, 6) for _ in graph.nodes])
    for ram in range(floor(graph).bytes, checkpoint_all_peak_bytes(graph) + 1, 2):
        problem = Problem(graph, costs, ram=ram, deadline_counts="overlap", recompute=False)
        table = ChainTable(problem)
        every = itertools.product(STAYING, repeat=len(table.chain.steps) - 1)
        times = [planned_s(problem, table, (*actions, Action.KEEP)) for actions in every]
        least = min((time for time in times if time is not None), default=None)
        layers = tuple(layers_of(problem, table.chain, Overhead.PUBLISHED))
        found = best_actions(layers, ram, STAYING, nothing_again)
        if found is None:
            assert least is None
            continue
        planned = planned_s(problem, table, found.actions)
        assert planned == least
        assert planned is not None
        assert found.total >= planned


@pytest.mark.parametrize("seed", range(6))
def test_offloading_is_no_worse_than_none(seed: int) -> None:
    """With runs by rotor, and rotor itself among its choices, it pays no more than rotor."""
    rng = seeded(f"pofo runs/{seed}")
    graph = training_chain([rng.randint(1, 6) for _ in range(7)], gradient_bytes=1)
    costs = chain_costs(graph, seconds=[rng.randint(1, 9) for _ in graph.nodes], page_s=30)
    for ram in range(floor(graph).bytes + 1, checkpoint_all_peak_bytes(graph), 3):
        problem = Problem(graph, costs, ram=ram, deadline_counts="serial", minimize="time")
        try:
            without = verify(problem, rotor(problem)).simulation
        except MethodNotApplicableError:
            continue
        chosen = verify(problem, pofo(problem)).simulation
        assert chosen.time_s <= without.time_s
        alone = verify(problem, pofo(problem, "time")).simulation
        assert alone.time_s <= without.time_s * 1.05


def test_wide_beam_finds_what_a_narrow_one_misses() -> None:
    """On chains of seven layers the wide beam loses nothing; four prefixes are often too few."""
    missed = 0
    for seed in range(12):
        rng = seeded(f"beam/{seed}")
        graph = training_chain([rng.randint(1, 9) for _ in range(7)], gradient_bytes=1)
        costs = chain_costs(graph, seconds=[rng.randint(1, 9) for _ in graph.nodes], page_s=1)
        problem = Problem(graph, costs, ram="70%", deadline_counts="serial", minimize="time")
        table = ChainTable(problem)
        layers = tuple(layers_of(problem, table.chain, Overhead.TIME))
        budget = problem.usable_ram_bytes
        whole, wide, narrow = (
            best_actions(layers, budget, tuple(Action), table.run_cost, beam)
            for beam in (Beam(10**6, 1), WIDE, Beam(4, 2))
        )
        assert whole is not None
        assert wide is not None
        assert wide.total == whole.total
        missed += narrow is None or narrow.total > wide.total
    assert missed > 2


def test_blocking_transfers_are_charged_by_hand() -> None:
    """One of seven layers must leave, all nodes take 1 s, and the others hide the transfers.

    So it is paged. Where transfers block the core, 4 s each way are more than recomputing it in 1.
    """
    graph = training_chain([4] * 8, gradient_bytes=1)
    costs = chain_costs(graph, page_s=1)
    ram = checkpoint_all_peak_bytes(graph) - 1
    problem = Problem(graph, costs, ram=ram, deadline_counts="serial", minimize="time")
    hidden, charged = pofo(problem, "published"), pofo(problem, "time")
    assert (len(hidden.M_out), len(charged.M_out)) == (1, 0)
    once = len(graph.nodes)
    assert (len(hidden.R), len(charged.R)) == (once, once + 1)


def test_quick_transfers_are_hidden_and_slow_ones_avoided() -> None:
    """With RAM for less than all, cheap storage is used; dear storage gives way to recomputing."""
    graph = training_chain([2] * 7)
    seconds = [10] * len(graph.nodes)
    problem = Problem(
        graph, chain_costs(graph, seconds=seconds), ram="70%", deadline_counts="overlap"
    )
    schedule = pofo(problem)
    assert schedule.M_out
    assert verify(problem, schedule).simulation.makespan_s == problem.pass_time_s
    costs = chain_costs(graph, page_s=50)
    slow = Problem(graph, costs, ram="70%", deadline_counts="overlap")
    assert not pofo(slow).M_out
    without = Problem(graph, chain_costs(graph), ram="70%", paging=False)
    assert not pofo(without).M_out
    single = Problem(
        graph, chain_costs(graph), ram="70%", recompute=False, deadline_counts="serial"
    )
    assert verify(single, pofo(single)).valid


@pytest.mark.parametrize("seed", range(6))
def test_networks_of_steps_keep_the_budget(seed: int) -> None:
    """Where steps have several nodes, what comes out is valid and fits, or is refused."""
    graph = random_training_graph(seeded(f"pofo steps/{seed}"), 7)
    for share in (100, 85, 70):
        problem = Problem(graph, chain_costs(graph), ram=f"{share}%", deadline_counts="overlap")
        try:
            schedule = pofo(problem)
        except MethodNotApplicableError:
            continue
        assert verify(problem, schedule).valid


def test_loss_waits_for_page_outs_and_the_backward_pass_for_page_ins() -> None:
    """Worked by hand: a layer that must be offloaded, transfers of 5 s, everything else 1 s.

    Forward 1, page-out 5, loss 1, page-in 5 (the loss's gradient reads the layer), backward 1 + 1.
    """
    layer = Layer(
        forward_cost=1.0,
        backward_cost=1.0,
        out_s=5.0,
        in_s=5.0,
        size_bytes=4,
        state_bytes=4,
        input_bytes=0,
        forward_bytes=4,
        backward_bytes=0,
    )
    loss = replace(layer, forward_bytes=5, input_bytes=3, backward_bytes=4)
    found = best_actions((layer, loss), 8, STAYING, nothing_again)
    assert found is not None
    assert (found.actions[0], found.total) == (Action.OFFLOAD, 14.0)
    kept = best_actions((layer, loss), 9, STAYING, nothing_again)
    assert kept is not None
    assert (kept.actions[0], kept.total) == (Action.KEEP, 4.0)


def test_transfers_end_one_after_the_other() -> None:
    """Bytes are freed as transfers end; waiting for room takes until enough of them have."""
    line = Transfers().then(2.0, 5).then(3.0, 1)
    assert (line.drain_s, line.left_bytes(), line.left_bytes(2.0)) == (5.0, 6, 1)
    assert [line.wait_s(room) for room in (6, 1, 0, -1)] == [0.0, 2.0, 5.0, None]
    assert line.after(2.0).ends == ((3.0, 1),)
    assert line.after(1.0).within(line)
    assert not line.within(line.after(1.0))
