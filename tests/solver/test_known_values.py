"""Known optima of the paper's graphs: overhead over the baseline, activations only, no deadline.

Values were found by several independent models and solvers, and proved where said below. They are
slow on a busy machine; limits are generous because speed is not what they promise.
"""

from __future__ import annotations

import pytest

from poetmodel.device import Costs, Device
from poetmodel.graph.catalogue import load_model
from poetmodel.model import build
from poetmodel.problem import Problem
from poetmodel.result import Status
from poetmodel.schedule import verify
from poetmodel.solver import solve

LIMIT_S = 900.0


def paper_problem(model: str, device: str, ram: str) -> Problem:
    """State a problem of a graph and a device of the published code."""
    graph = load_model(f"paper/{model}")
    costs = Costs.estimate(graph, Device.load(f"paper-{device}"))
    return Problem(graph, costs, ram=ram, deadline_counts="compute")


def percent(overhead_j: float | None, problem: Problem) -> float:
    """Return an overhead as a percentage of the baseline."""
    assert overhead_j is not None
    return 100 * overhead_j / problem.baseline_energy_j


@pytest.mark.slow
@pytest.mark.parametrize(("device", "value"), [("m4", 0.20337), ("a72", 0.01765)])
def test_vgg16_is_proved_with_all_stages(device: str, value: float) -> None:
    """VGG-16 on CIFAR-10 at half the memory: the optimum, with its proof, by ``compact``."""
    problem = paper_problem("vgg16-cifar", device, "50%")
    result = solve(problem, formulation="compact", time_limit=LIMIT_S)
    assert result.status == Status.OPTIMAL
    assert percent(result.overhead_j, problem) == pytest.approx(value, abs=1e-5)
    assert percent(result.overhead_bound_j, problem) == pytest.approx(value, rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "device", "ram", "value", "gap"),
    [
        ("vgg16-cifar", "m4", "50%", 0.20337, 1e-4),
        ("resnet18-cifar", "a72", "30%", 0.17027, 1e-4),
        ("resnet18-cifar", "m4", "40%", 0.16307, 1e-4),
        ("bert", "a72", "40%", 0.14904, 1e-2),
    ],
)
def test_event_stages_reach_the_known_values(
    model: str, device: str, ram: str, value: float, gap: float
) -> None:
    """As schedules: valid, of that overhead within the gap, and of no claim beyond."""
    problem = paper_problem(model, device, ram)
    result = solve(build(problem, stages="events"), gap=gap, time_limit=LIMIT_S)
    found = percent(result.overhead_j, problem)
    assert value - 1e-5 <= found <= value * (1 + 1.02 * gap) + 1e-5
    assert not verify(problem, result.require_schedule()).violations
    assert (result.status, result.bound_j) == (Status.FEASIBLE, problem.baseline_energy_j)


@pytest.mark.parametrize(
    ("model", "device", "ram", "value"),
    [
        ("vgg16-cifar", "m4", "50%", 0.20337),
        ("vgg16-cifar", "a72", "50%", 0.01765),
        ("resnet18-cifar", "a72", "30%", 0.17027),
        ("resnet18-cifar", "m4", "40%", 0.16307),
        pytest.param("bert", "a72", "40%", 0.14904, marks=pytest.mark.slow),
    ],
)
def test_defaults_prove_the_known_values(model: str, device: str, ram: str, value: float) -> None:
    """To a gap of 0.01 % of the overhead, with a few hundred columns and a valid schedule."""
    problem = paper_problem(model, device, ram)
    result = solve(problem, time_limit=LIMIT_S)
    assert (result.status, result.formulation, result.backend) == (Status.OPTIMAL, "lazy", "highs")
    assert result.gap is not None
    assert result.gap <= 1e-4
    assert percent(result.overhead_j, problem) == pytest.approx(value, abs=5e-5)
    assert value * (1 - 3e-4) <= percent(result.overhead_bound_j, problem) <= value + 5e-6
    assert not verify(problem, result.require_schedule()).violations
    assert result.statistics["columns"] < 1000
    assert 0 < result.statistics["enforced_rows"] < 20
