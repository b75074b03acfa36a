"""Saving a minimum cut between forward and backward pass, as PyTorch's partitioner does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.baselines.engine import begin_of_backward, droppable, fitting
from poetmodel.baselines.segments import recompute_once

if TYPE_CHECKING:
    from collections.abc import Collection

    import networkx

    from poetmodel.graph import Graph
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

SIZES: Final = 10
"""Equal steps in which the knapsack shrinks, from all tensors to none."""
UNITS: Final = 1000
"""Units into which the knapsack is divided."""


def min_cut(problem: Problem) -> Schedule:
    """Save a minimum cut of tensors for the backward pass and recompute the others once.

    Two steps, as in PyTorch (``torch/_functorch/partitioners.py``). A knapsack chooses which nodes
    must not run again: the most compute time for a number of bytes of their outputs. Then the
    tensors of least size are saved that cut those nodes, as sources, from what the backward pass
    reads. PyTorch chooses candidates by kinds of operators and counts all saved bytes. Here all
    nodes of the forward pass are candidates, each with its time, and the knapsack shrinks by tenths
    until the budget is kept. What is recomputed is computed when it is read first and stays until
    its last use, so a small saved set need not mean a small peak.
    """
    graph = problem.graph
    whole = sum(graph.tensor_bytes[i] for i in droppable(graph))
    knapsacks = (_knapsack(problem, whole * n // SIZES) for n in range(SIZES, -1, -1))
    schedules = (recompute_once(graph, saved_tensors(graph, once)) for once in knapsacks)
    return next(fitting(problem, schedules, "saved sets"))[0]


def saved_tensors(graph: Graph, once: Collection[int]) -> frozenset[int]:
    """Return the tensors of least size that spare some nodes of the forward pass a second run.

    All that the backward pass reads can be computed from these, from samples and from what cannot
    be recomputed, without running a node of `once`.
    """
    import networkx

    flow = _network(graph, once)
    _, (near, _) = networkx.minimum_cut(flow, "source", "sink")
    return frozenset(
        i for i in droppable(graph) if ("computed", i) in near and ("read", i) not in near
    )


def _network(graph: Graph, once: Collection[int]) -> networkx.DiGraph[object]:
    """Return the network whose cuts are the sets of tensors that may be saved.

    Each tensor is an edge of its size, from being computed to being read. Edges that cannot be cut
    have no capacity: from a node to its outputs, and from a tensor to the nodes that read it.
    """
    import networkx

    flow: networkx.DiGraph[object] = networkx.DiGraph()
    flow.add_nodes_from(("source", "sink"))
    free, begin = droppable(graph), begin_of_backward(graph)
    for k in once:
        flow.add_edge("source", ("node", k))
    for i in free:
        flow.add_edge(("node", graph.node_of[i]), ("computed", i))
        flow.add_edge(("computed", i), ("read", i), capacity=graph.tensor_bytes[i])
        for k in graph.users_of[i]:
            flow.add_edge(("read", i), "sink" if k >= begin else ("node", k))
    return flow


def _knapsack(problem: Problem, size_bytes: int) -> list[int]:
    """Return the nodes of most compute time whose outputs fit a knapsack."""
    graph, begin = problem.graph, begin_of_backward(problem.graph)
    free = droppable(graph)
    unit = max(1, -(-size_bytes // UNITS))
    room = size_bytes // unit
    nodes = [k for k in range(begin) if free.intersection(graph.outputs_of[k])]
    best = np.zeros(room + 1)
    taken = np.zeros((len(nodes), room + 1), dtype=bool)
    weights = [-(-graph.nodes[k].output_bytes // unit) for k in nodes]
    for place, (k, weight) in enumerate(zip(nodes, weights, strict=True)):
        if weight > room:
            continue
        with_it = best[: room + 1 - weight] + problem.table.compute_time_s[k]
        taken[place, weight:] = with_it > best[weight:]
        best[weight:] = np.maximum(best[weight:], with_it)
    chosen = []
    for place in range(len(nodes) - 1, -1, -1):
        if taken[place, room]:
            chosen.append(nodes[place])
            room -= weights[place]
    return chosen
