"""The methods that solve a program: Checkmate against exhaustive search, the ablations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kit.instances import random_instance, random_training_graph, seeded
from kit.oracle import optimum
from kit.worked import chain_costs, training_chain
from poetmodel.baselines import run
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.problem import Problem
from poetmodel.result import Status

LIMITS = {"deadline": False, "energy_budget": False, "aux_limit": False, "switches": False}


@pytest.mark.parametrize("seed", range(6))
def test_checkmate_is_the_quickest_recomputation(seed: int) -> None:
    """Its compute time is that of an exhaustive search without paging, or both find nothing."""
    graph = random_training_graph(seeded(f"checkmate/{seed}"), 4)
    ram = (floor(graph).bytes + checkpoint_all_peak_bytes(graph)) // 2
    problem = Problem(graph, chain_costs(graph), ram=ram, deadline_counts="serial")
    best = optimum(replace(problem, paging=False, minimize="time", deadline_counts="compute"))
    if best is None:
        with pytest.raises(MethodNotApplicableError, match="checkmate: it has no schedule"):
            run(problem, "checkmate", gap=0.0)
        return
    result = run(problem, "checkmate", gap=0.0)
    assert result.simulation is not None
    assert result.simulation.compute_s == pytest.approx(best.value)
    assert result.method == "checkmate"


@pytest.mark.parametrize("number", range(5))
def test_ablations_are_dominated_by_the_whole(number: int) -> None:
    """Neither half costs less than both together, and neither uses the other half's means."""
    problem = random_instance(seeded(f"halves/{number}"), (3, 5), minimize="energy", **LIMITS)
    whole = run(problem, "optimal")
    for name in ("paging-only", "recompute-only"):
        try:
            half = run(problem, name)
        except MethodNotApplicableError:
            continue
        assert half.energy_j is not None
        assert whole.energy_j is not None
        assert half.energy_j >= whole.energy_j * (1 - 2e-4)
        schedule = half.require_schedule()
        if name == "paging-only":
            assert all(t == k for t, k in schedule.R)
        else:
            assert schedule.M_in == ()


def test_bound_of_a_restriction_is_not_claimed() -> None:
    """What is proved without paging is no bound of the problem: the baseline is."""
    graph = training_chain([3] * 6)
    problem = Problem(graph, chain_costs(graph), ram="80%", deadline_counts="serial")
    result = run(problem, "recompute-only")
    assert result.status == Status.FEASIBLE
    assert result.bound_j == result.baseline_energy_j
    assert result.statistics["restricted_status"] == "optimal"
    assert result.problem is problem


def test_limits_that_a_method_does_not_know_are_verified() -> None:
    """Checkmate knows no deadline: where its schedule misses one, the reason says so."""
    graph = training_chain([3] * 6)
    limits = {"ram": "75%", "deadline_counts": "serial", "deadline": "101%"}
    with pytest.raises(MethodNotApplicableError, match=r"checkmate: .* above the deadline"):
        run(Problem(graph, chain_costs(graph), **limits), "checkmate")
