"""Random layered graphs: what holds for every one, and what is like the published ones."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean
from typing import Any

import pytest

import poetmodel as pm
from poetmodel.baselines import run
from poetmodel.errors import GraphError

PUBLISHED = {100: 236, 250: 944, 500: 2461, 1000: 5875}
"""Edges of the graphs of github.com/haoming-codes/moccasin, ff7ad8b, by their nodes."""


@pytest.mark.parametrize("n", [4, 5, 30, 100])
@pytest.mark.parametrize("seed", range(5))
def test_every_node_is_between_source_and_sink(n: int, seed: int) -> None:
    """One node reads nothing, one is read by nothing, and an edge goes forward."""
    graph = pm.zoo.random_layered(n, seed)
    assert len(graph.nodes) == n
    assert [k for k in range(n) if not graph.inputs_of[k]] == [0]
    assert [i for i in range(n) if not graph.users_of[i]] == [n - 1]
    assert all(i < k for k in range(n) for i in graph.inputs_of[k])
    assert graph.nodes[0].flops == graph.nodes[-1].flops == 0


def test_numbers_decide_the_graph() -> None:
    """The same graph on every machine and in every version; another seed is another graph."""
    first = pm.zoo.random_layered(100, 1)
    assert first == pm.zoo.random_layered(100, seed=1)
    assert first.sha256.startswith("ac158c81")
    assert len({pm.zoo.random_layered(100, seed).sha256 for seed in range(10)}) == 10


def test_graphs_are_as_dense_as_the_published_ones() -> None:
    """The published number of edges lies among those of some seeds."""
    for n, edges in PUBLISHED.items():
        found = [pm.zoo.random_layered(n, seed).n_edges for seed in range(10)]
        assert min(found) < edges < max(found)


def test_durations_and_sizes_are_spread_as_published() -> None:
    """Durations are uniform to 1000 units; the middle size is about 1,400, the largest 5,500."""
    nodes = [node for seed in range(5) for node in pm.zoo.random_layered(500, seed).nodes]
    units = sorted(node.output_bytes / 1024 for node in nodes)
    assert 450 < mean(node.flops / 1e6 for node in nodes) < 550
    assert max(node.flops for node in nodes) <= 1000e6
    assert 1150 < units[len(units) // 2] < 1450
    assert units[-1] <= 5500


def test_training_graph_has_every_gradient() -> None:
    """Each tensor but the sample has one, of its size, which reads what its readers read.

    The forward pass is the graph without one, and the backward pass takes twice its FLOP.
    """
    plain = pm.zoo.random_layered(40, 3)
    graph = pm.zoo.random_layered(40, 3, backward=True)
    assert [node.inputs for node in graph.nodes[:40]] == [node.inputs for node in plain.nodes]
    assert [node.name for node in graph.nodes[40:]] == [f"dv{k}" for k in range(39, 0, -1)]
    by_name = {node.name: node for node in graph.nodes}
    for node in graph.nodes[1:40]:
        gradient = by_name[f"d{node.name}"]
        assert gradient.output_bytes == node.output_bytes
        readers = [reader for reader in graph.nodes[:40] if node.name in reader.inputs]
        read = {f"d{r.name}" for r in readers} | {name for r in readers for name in r.inputs}
        assert set(gradient.inputs) == (read or {node.name})
    forward, backward = (
        sum(node.flops for node in part) for part in (plain.nodes, graph.nodes[40:])
    )
    through_the_sample = sum(
        2 * node.flops / len(node.inputs) for node in plain.nodes if "v0" in node.inputs
    )
    assert backward == pytest.approx(2 * forward - through_the_sample, rel=1e-6)


def test_training_graph_can_be_scheduled() -> None:
    """Methods for backward passes apply, and the optimum is no worse than any."""
    graph = pm.zoo.random_layered(30, 1, backward=True)
    problem = pm.Problem(graph, pm.Costs.estimate(graph, pm.Device.load("paper-m4")), ram="80%")
    best = pm.solve(problem, time_limit=20, gap=0.05)
    for name in ("capuchin", "dtr-paging", "lru-paging"):
        assert best.bound_j <= run(problem, name).energy_j


def test_energy_of_a_recomputation_is_in_proportion_to_its_duration() -> None:
    """On the published devices, so that the overhead is the increase of duration of Moccasin."""
    graph = pm.zoo.random_layered(60, 2)
    costs = pm.Costs.estimate(graph, pm.Device.load("paper-m4"))
    ratios = {
        round(costs.compute[node.name].energy_j / node.flops, 15)
        for node in graph.nodes
        if node.flops
    }
    assert len(ratios) == 1


def test_less_memory_costs_more_and_is_proved() -> None:
    """A small graph is solved to the end at three budgets."""
    graph = pm.zoo.random_layered(30, 1)
    costs = pm.Costs.estimate(graph, pm.Device.load("paper-m4"))
    found = [
        pm.solve(pm.Problem(graph, costs, ram=ram, paging=False), time_limit=60.0)
        for ram in ("100%", "95%", "90%")
    ]
    assert {str(result.status) for result in found} <= {"optimal", "infeasible"}
    overheads = [result.overhead_j for result in found if result.overhead_j is not None]
    assert overheads[0] == 0
    assert all(more >= less for less, more in pairwise(overheads))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"n": 3}, "n: expected a whole number from 4, got 3"),
        ({"n": 10.0}, "n: expected a whole number from 4, got 10.0"),
        ({"n": True, "seed": -1}, "n: .* got True; seed: expected a whole number from 0, got -1"),
    ],
)
def test_number_out_of_range_is_refused(arguments: dict[str, Any], said: str) -> None:
    """Every fault is said at once."""
    with pytest.raises(GraphError, match=said):
        pm.zoo.random_layered(**arguments)
