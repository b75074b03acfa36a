"""POFO finds the quickest choice of one action per layer."""

import itertools
import math

import pytest

from kit.instances import seeded
from kit.worked import chain_costs, training_chain
from poetmodel.baselines.checkpointing import ChainTable, rotor
from poetmodel.baselines.paging import Overhead
from poetmodel.baselines.pofo import (
    Action,
    ActionPrefix,
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


def nothing_again(*_):
    """Say that no run can be recomputed."""
    return math.inf


def planned_s(problem, table, actions):
    """Return the makespan of the plan for some actions; None where they take too much RAM."""
    schedule = schedule_of(table, ActionPrefix(actions=actions))
    simulation = verify(problem, schedule).simulation
    fits = simulation.peak_ram_bytes <= problem.usable_ram_bytes
    return simulation.makespan_s if fits else None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_no_choice_of_actions_is_quicker(seed):
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
        assert found.total >= planned


@pytest.mark.parametrize("seed", range(6))
def test_offloading_is_no_worse_than_none(seed):
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


def test_quick_transfers_are_hidden_and_slow_ones_avoided():
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
