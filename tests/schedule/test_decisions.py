"""What a schedule decides on each tensor, what that costs, and where RAM is at its limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from instances import random_graph, random_schedule, seeded
from poetmodel.problem import Problem
from poetmodel.schedule import checkpoint_all, simulate
from poetmodel.schedule.decisions import Choice, find_decisions, steps_at_limit
from poetmodel.solver import solve
from worked import even_costs, skip_graph, skip_problem

if TYPE_CHECKING:
    from poetmodel.schedule import Simulation


def test_decision_on_a_recomputed_tensor() -> None:
    """With 13 B, a is computed again in stage 3, for 1 J and 1 s; the others are kept."""
    problem = skip_problem()
    result = solve(problem)
    points = steps_at_limit(problem, result.require_schedule(), simulate_of(problem))
    a, b, c, d = find_decisions(problem, result.require_schedule(), points)
    assert (a.choice, a.recomputed, a.energy_j, a.time_s) == (Choice.RECOMPUTED, (3,), 1.0, 1.0)
    assert a.in_ram == ((0, 1), (3, 3))
    assert a.on_storage == ()
    assert [decision.choice for decision in (b, c, d)] == [Choice.KEPT, Choice.KEPT, Choice.UNUSED]
    assert [(point.stage, point.node) for point in points] == [(2, 2)]
    assert [decision.bytes_at_limit for decision in (a, b, c, d)] == [0, 6, 5, 0]
    assert a.to_dict(problem.graph)["in_ram"] == [[0, 1], [3, 3]]


def simulate_of(problem: Problem) -> Simulation:
    """Return what the best schedule of a problem does."""
    simulation = solve(problem).simulation
    assert simulation is not None
    return simulation


def test_decision_on_a_paged_tensor() -> None:
    """Without recomputation, a goes out in stage 0 and comes back in stage 3, for 2 J and 2 s."""
    problem = skip_problem(recompute=False)
    a, *_ = find_decisions(problem, solve(problem).require_schedule())
    assert (a.choice, a.paged_out, a.paged_in) == (Choice.PAGED, (0,), (3,))
    assert (a.energy_j, a.time_s) == (2.0, 2.0)
    assert a.on_storage == ((1, 3),)


def test_keep_all_is_at_its_limit_at_its_peak() -> None:
    """If nothing is recomputed or paged, RAM is at its limit at the peak."""
    graph = skip_graph()
    problem = Problem(graph, even_costs(graph), ram=20)
    schedule = checkpoint_all(graph)
    points = steps_at_limit(problem, schedule, simulate(graph, None, schedule))
    assert [(point.stage, point.node, point.ram_bytes) for point in points] == [(2, 2, 15)]


@pytest.mark.parametrize("number", range(12))
def test_tensors_in_ram_are_those_that_the_simulator_counts(number: int) -> None:
    """At every executed step the tensors in RAM add up to the simulator's curve."""
    rng = seeded(f"held/{number}")
    graph = random_graph(rng, (4, 7), on_aux=False, two_outputs=False)
    schedule = random_schedule(rng, graph)
    problem = Problem(graph, even_costs(graph), ram=2**40)
    simulation = simulate(graph, None, schedule)
    assert simulation.valid
    for point in simulation.curve:
        t, k, used_bytes = point
        total = sum(d.bytes_at_limit for d in find_decisions(problem, schedule, [point]))
        computed = (t, k) in schedule.R
        total += graph.nodes[k].workspace_bytes * computed
        # A node that is computed beside an old copy of its output counts both for that step.
        old = sum(
            graph.tensor_bytes[i]
            for i in graph.outputs_of[k]
            if computed and ((t, i) in schedule.S_RAM or (t, i) in schedule.M_in)
        )
        assert used_bytes == total + old
