"""What a schedule decides on each tensor: lives, prices, and where memory binds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from instances import random_graph, random_schedule, seeded
from poetmodel.problem import Problem
from poetmodel.schedule import checkpoint_all, simulate
from poetmodel.solver import solve
from poetmodel.solver.decisions import Fate, _ByIndex, binding_points, find_lives
from worked import even_costs, skip_graph, skip_problem

if TYPE_CHECKING:
    from poetmodel.schedule import Simulation


def test_life_of_a_recomputed_tensor() -> None:
    """With 13 B, a is computed again in stage 3, for 1 J and 1 s; the others are kept."""
    problem = skip_problem()
    result = solve(problem)
    points = binding_points(problem, result.require_schedule(), simulate_of(problem))
    a, b, c, d = find_lives(problem, result.require_schedule(), points)
    assert (a.fate, a.recomputed, a.energy_j, a.time_s) == (Fate.RECOMPUTED, (3,), 1.0, 1.0)
    assert a.in_ram == ((0, 1), (3, 3))
    assert a.on_storage == ()
    assert [life.fate for life in (b, c, d)] == [Fate.KEPT, Fate.KEPT, Fate.UNUSED]
    assert [(point.stage, point.node) for point in points] == [(2, 2)]
    assert [life.binding_bytes for life in (a, b, c, d)] == [0, 6, 5, 0]
    assert a.to_dict(problem.graph)["in_ram"] == [[0, 1], [3, 3]]


def simulate_of(problem: Problem) -> Simulation:
    """Return what the best schedule of a problem does."""
    simulation = solve(problem).simulation
    assert simulation is not None
    return simulation


def test_life_of_a_paged_tensor() -> None:
    """Without recomputation, a goes out in stage 0 and comes back in stage 3, for 2 J and 2 s."""
    problem = skip_problem(recompute=False)
    a, *_ = find_lives(problem, solve(problem).require_schedule())
    assert (a.fate, a.paged_out, a.paged_in) == (Fate.PAGED, (0,), (3,))
    assert (a.energy_j, a.time_s) == (2.0, 2.0)
    assert a.on_storage == ((1, 3),)


def test_all_kept_binds_at_its_peak() -> None:
    """Where nothing is done anew the fullest step binds."""
    graph = skip_graph()
    problem = Problem(graph, even_costs(graph), ram=20)
    schedule = checkpoint_all(graph)
    points = binding_points(problem, schedule, simulate(graph, None, schedule))
    assert [(point.stage, point.node, point.ram_bytes) for point in points] == [(2, 2, 15)]


@pytest.mark.parametrize("number", range(12))
def test_tensors_in_ram_are_those_that_the_judge_counts(number: int) -> None:
    """At every executed step the tensors that are held add up to the verifier's curve."""
    rng = seeded(f"held/{number}")
    graph = random_graph(rng, (4, 7), on_aux=False, two_outputs=False)
    schedule = random_schedule(rng, graph)
    found = _ByIndex(graph, schedule)
    simulation = simulate(graph, None, schedule)
    assert simulation.valid
    for t, k, used_bytes in simulation.curve:
        held = [i for i in range(len(graph.tensors)) if found.is_held(t, k, i)]
        total = sum(graph.tensor_bytes[i] for i in held)
        computed = t in found.computed[k]
        total += graph.nodes[k].workspace_bytes * computed
        # A node that is computed beside an old copy of its output counts both for that step.
        old = sum(
            graph.tensor_bytes[i]
            for i in graph.outputs_of[k]
            if computed and (t in found.kept[i] or t in found.paged_in[i])
        )
        assert used_bytes == total + old
