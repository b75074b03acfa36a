"""Offloading: every saved tensor goes out and comes back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baseline_checks import valid_or_refused
from instances import random_instances
from poetmodel.baselines.offload import offload_all
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, operation
from poetmodel.graph.catalogue import load_model
from poetmodel.problem import Problem
from poetmodel.schedule import simulate
from worked import comb_graph, even_costs, skip_problem


def test_hand_trace() -> None:
    """Of three forward tensors two wait for their backward node, on storage; peak 4 + 4."""
    graph = comb_graph(3)
    schedule = offload_all(Problem(graph, even_costs(graph), ram=8))
    assert schedule.M_out == ((0, 0), (1, 1))
    assert schedule.M_in == ((4, 1), (5, 0))
    assert schedule.S_RAM == ((1, 0), (2, 1), (3, 2), (4, 3), (5, 4))
    assert simulate(graph, None, schedule).peak_ram_bytes == 8


def test_a_tensor_comes_in_for_each_of_its_readers() -> None:
    """Read by two backward nodes that are no neighbours, it comes in twice and is written once."""
    graph = Graph(
        name="twice",
        nodes=(
            operation("f", output_bytes=4),
            operation("loss", output_bytes=1, phase="loss"),
            operation("g", output_bytes=1, phase="backward", inputs=("f", "loss")),
            operation("h", output_bytes=1, phase="backward", inputs=("g",)),
            operation("w", output_bytes=1, phase="update", inputs=("f", "h")),
        ),
    )
    schedule = offload_all(Problem(graph, even_costs(graph), ram=8))
    assert schedule.M_out == ((0, 0),)
    assert schedule.M_in == ((2, 0), (4, 0))


def test_budget_is_not_bent() -> None:
    """What the forward pass itself holds is not moved: where that is too much, it says how much."""
    graph = Graph(
        name="residual",
        nodes=(
            operation("a", output_bytes=4),
            operation("b", output_bytes=4, inputs=("a",)),
            operation("c", output_bytes=4, inputs=("b",)),
            operation("d", output_bytes=1, inputs=("a", "c")),
            operation("g", output_bytes=1, phase="backward", inputs=("d",)),
        ),
    )
    costs = even_costs(graph)
    assert offload_all(Problem(graph, costs, ram=12)).M_in == ()
    with pytest.raises(MethodNotApplicableError, match="needs 12 B at 'c', and tensors may use 11"):
        offload_all(Problem(graph, costs, ram=11))


def test_does_not_apply_without_storage_or_backward_pass() -> None:
    """Each of the two reasons is said."""
    graph = comb_graph(3)
    with pytest.raises(MethodNotApplicableError, match="allows no paging"):
        offload_all(Problem(graph, even_costs(graph), ram="100%", paging=False))
    with pytest.raises(MethodNotApplicableError, match="no backward nodes"):
        offload_all(skip_problem())


def test_schedules_keep_the_budget_or_are_refused() -> None:
    """On random graphs whose second half is a backward pass: valid and within RAM, or a reason."""
    paged = 0
    for problem in random_instances(200, (4, 9), seed=71, resident=True):
        nodes = problem.graph.nodes
        half = len(nodes) // 2
        halves = (*nodes[:half], *(replace(node, phase="backward") for node in nodes[half:]))
        graph = replace(problem.graph, nodes=halves)
        costs = even_costs(graph)
        schedule = valid_or_refused(
            offload_all, Problem(graph, costs, ram=problem.ram_budget_bytes, paging=problem.paging)
        )
        paged += schedule is not None and bool(schedule.M_in)
    assert paged > 20


def test_all_saved_tensors_of_a_network_go_out() -> None:
    """In a real training graph everything the backward pass reads later is paged, once out."""
    graph = load_model("mlp")
    schedule = offload_all(Problem(graph, even_costs(graph), ram="100%"))
    phases = [node.phase for node in graph.nodes]
    late = {
        i
        for i, users in enumerate(graph.users_of)
        for k in users
        if graph.tensor_bytes[i]
        and phases[graph.node_of[i]] in ("input", "forward", "loss")
        and phases[k] in ("backward", "update")
        and all(u >= k or k - u > 1 for u in (graph.node_of[i], *users))
    }
    assert {i for _, i in schedule.M_in} == late
    assert late
