"""Known optima of the paper's graphs, by the default way to solve a problem.

Overhead over the baseline, activations only, no deadline. Several models and solvers agree on them.
"""

from __future__ import annotations

import pytest

from poetmodel.device import Costs, Device
from poetmodel.graph.catalogue import load_model
from poetmodel.problem import Problem
from poetmodel.result import Status
from poetmodel.schedule import verify
from poetmodel.solver import solve

LIMIT_S = 600.0
"""Far more than is needed on any machine: speed is not what is promised here [s]."""


@pytest.mark.parametrize(
    ("model", "device", "ram", "percent"),
    [
        ("vgg16-cifar", "m4", "50%", 0.20337),
        ("vgg16-cifar", "a72", "50%", 0.01765),
        ("resnet18-cifar", "a72", "30%", 0.17027),
        ("resnet18-cifar", "m4", "40%", 0.16307),
        ("bert", "a72", "40%", 0.14904),
    ],
)
def test_defaults_prove_the_known_values(model: str, device: str, ram: str, percent: float) -> None:
    """To a gap of 0.01 % of the overhead, with a few hundred columns and a valid schedule."""
    graph = load_model(f"paper/{model}")
    costs = Costs.estimate(graph, Device.load(f"paper-{device}"))
    problem = Problem(graph, costs, ram=ram, deadline_counts="compute")
    result = solve(problem, time_limit=LIMIT_S)
    assert (result.status, result.formulation, result.backend) == (Status.OPTIMAL, "lazy", "highs")
    assert result.overhead_j is not None
    assert result.gap is not None
    assert result.gap <= 1e-4
    assert 100 * result.overhead_j / problem.baseline_energy_j == pytest.approx(percent, abs=5e-5)
    bound = 100 * result.overhead_bound_j / problem.baseline_energy_j
    assert percent * (1 - 3e-4) <= bound <= percent + 5e-6
    assert not verify(problem, result.require_schedule()).violations
    assert result.statistics["columns"] < 1000
    assert 0 < result.statistics["enforced_rows"] < 20
