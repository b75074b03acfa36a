"""Methods that save a set of tensors for the backward pass, and recompute other tensors once."""

from __future__ import annotations

from itertools import pairwise
from math import isqrt
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.baselines.engine import simulate_within_budget
from poetmodel.baselines.homes import use_homes_of
from poetmodel.graph import Graph, Phase, articulation_points
from poetmodel.heuristics.execution import (
    evictable_tensors,
    first_backward_node,
    recompute_once,
)
from poetmodel.schedule import Schedule, checkpoint_all

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from poetmodel.problem import Problem

N_RATIOS, N_STEPS = 12, 40
"""Number of thresholds of `chen_greedy` in equal ratios, and of equal steps up to the bytes of all
recomputable forward tensors."""
N_SIZES: Final = 200
"""Number of equal steps in which the knapsack of `min_cut` shrinks, from all tensors to none."""
UNCUT_CAPACITY: Final = 2**31 - 1
"""Capacity of an edge that must not be cut; all tensors together have at most about half of it."""
UNITS: Final = 1000
"""Maximum number of units into which a knapsack is divided."""


# -- segments -------------------------------------------------------------------------------------


def keep_all(problem: Problem) -> Schedule:
    """Compute each node once; keep tensors until their last use and all state in RAM."""
    return checkpoint_all(problem.graph)


@use_homes_of("chen-sqrt")
def chen_sqrt(problem: Problem) -> Schedule:
    """Keep about ``sqrt(m)`` of ``m`` layers, and recompute each segment between them once.

    Of ``m`` candidates (nodes at which a segment may end), each ``ceil(sqrt(m))``-th is kept, with
    all its outputs that are read later. The tensors after the last kept node are kept, too, because
    the backward pass begins with them. Two sets of recomputable candidates are tried: the
    articulation points of the forward pass (Chen et al., 2016), and all nodes of the forward pass
    in order, as if they were a chain (the linearized variant of Jain et al., 2020). The fastest
    schedule within the budget is returned. Samples, labels and tensors that cannot be recomputed
    are always kept. All state is in RAM.
    """
    segment_ends = (_sqrt_segment_ends(nodes) for nodes in _list_candidate_ends(problem.graph))
    return _select_fastest(problem, _schedule_segments(problem.graph, segment_ends), "segments")


@use_homes_of("chen-greedy")
def chen_greedy(problem: Problem) -> Schedule:
    """Close a segment when its tensors exceed a threshold; try several thresholds.

    Algorithm 3 of Chen et al. (2016) adds up the bytes of the outputs of forward nodes. If the sum
    exceeds the threshold at a candidate, the algorithm keeps the candidate and restarts from zero.
    Each threshold is tried with the two sets of candidates of `chen_sqrt`. Thresholds are 0, equal
    ratios from the largest recomputable forward tensor to the bytes of all of these tensors, and
    equal steps up to these bytes. The tensors after the last kept node are kept, too. The fastest
    schedule within the budget is returned. All state is in RAM.
    """
    graph = problem.graph
    segment_ends = (
        _find_closing_nodes(graph, nodes, threshold)
        for nodes in _list_candidate_ends(graph)
        for threshold in _list_thresholds(graph)
    )
    return _select_fastest(problem, _schedule_segments(graph, segment_ends), "segments")


def _list_candidate_ends(graph: Graph) -> tuple[Sequence[int], ...]:
    """Return two ascending lists of recomputable forward nodes: articulation points, and all."""
    recomputable = {graph.node_of[i] for i in evictable_tensors(graph)}
    cut_nodes = articulation_points(graph, phases={Phase.FORWARD, Phase.LOSS})
    forward_nodes = [k for k in range(first_backward_node(graph)) if k in recomputable]
    return ([k for k in forward_nodes if k in cut_nodes], forward_nodes)


def _sqrt_segment_ends(nodes: Sequence[int]) -> list[int]:
    """Return each ``ceil(sqrt(m))``-th of ``m`` nodes."""
    segment_length = isqrt(max(0, len(nodes) - 1)) + 1
    return list(nodes[segment_length - 1 :: segment_length])


def _list_thresholds(graph: Graph) -> Iterator[float]:
    """Yield the thresholds of `chen_greedy` [B]: 0, then in equal ratios, then in equal steps."""
    sizes = [graph.tensor_bytes[i] for i in evictable_tensors(graph)]
    min_bytes, max_bytes = max(sizes, default=0), sum(sizes)
    yield 0.0
    if min_bytes:
        ratio = (max_bytes / min_bytes) ** (1 / (N_RATIOS - 1))
        yield from (min_bytes * ratio**exponent for exponent in range(N_RATIOS))
        yield from (max_bytes * step / N_STEPS for step in range(1, N_STEPS))


def _find_closing_nodes(graph: Graph, nodes: Sequence[int], threshold: float) -> list[int]:
    """Return the members of `nodes` at which outputs since the last one exceed `threshold` [B]."""
    closing_nodes, ends = [], set(nodes)
    segment_bytes = 0
    for k in range(first_backward_node(graph)):
        segment_bytes += graph.nodes[k].output_bytes
        if k in ends and segment_bytes > threshold:
            closing_nodes.append(k)
            segment_bytes = 0
    return closing_nodes


def _select_fastest(
    problem: Problem, schedules: Iterable[Schedule], schedule_kind: str
) -> Schedule:
    """Return the first schedule with minimum compute time among those within the budget."""
    candidates = simulate_within_budget(problem, schedules, schedule_kind)
    return min(candidates, key=lambda candidate: candidate[1].compute_s or 0.0)[0]


def _schedule_segments(graph: Graph, segment_ends: Iterable[Sequence[int]]) -> Iterator[Schedule]:
    """Yield a schedule for each distinct list of last nodes of segments, which are kept."""
    for ends in dict.fromkeys(map(tuple, segment_ends)):
        starts = [0, *(k + 1 for k in ends), first_backward_node(graph)]
        segments = [range(*pair) for pair in pairwise(starts)]
        saved_tensors = {i for k in (*ends, *segments[-1]) for i in graph.outputs_of[k]}
        yield recompute_once(graph, saved_tensors, segments)


# -- a minimum cut --------------------------------------------------------------------------------


@use_homes_of("min-cut")
def min_cut(problem: Problem) -> Schedule:
    """Save a minimum cut of tensors for the backward pass, and recompute other tensors once.

    As in PyTorch (``torch/_functorch/partitioners.py``), a knapsack selects the nodes that must not
    be recomputed: maximum compute time for a given number of output bytes. Then the set of tensors
    with the fewest bytes is saved that cuts these nodes, as sources, from the reads of the backward
    pass. PyTorch selects candidates by kinds of operators and counts all saved bytes. Here all
    recomputable nodes of the forward pass are candidates, each with its time. Knapsacks of 201
    sizes are tried, and the fastest schedule within the budget is returned. A recomputed tensor
    stays from its first use to its last, so a smaller saved set does not imply a smaller peak. All
    state is in RAM.
    """
    graph = problem.graph
    total_bytes = sum(graph.tensor_bytes[i] for i in evictable_tensors(graph))
    knapsacks = (
        _pack_knapsack(problem, total_bytes * step // N_SIZES) for step in range(N_SIZES, -1, -1)
    )
    network = CutNetwork(graph)
    saved_sets = dict.fromkeys(
        network.find_saved_tensors(nodes_computed_once)
        for nodes_computed_once in dict.fromkeys(knapsacks)
    )
    schedules = (recompute_once(graph, tensors) for tensors in saved_sets)
    return _select_fastest(problem, schedules, "saved sets")


class CutNetwork:
    """Flow network whose cuts are the sets of tensors that may be saved.

    Each evictable tensor is an edge with its size as capacity; from 1 GiB in all on, sizes are
    rounded up to a multiple of a few bytes. Vertex 0 is the source and vertex 1 the sink; the nodes
    follow, and then two vertices per tensor.
    """

    def __init__(self, graph: Graph) -> None:
        self.recomputable, first_backward = (
            sorted(evictable_tensors(graph)),
            first_backward_node(graph),
        )
        total_bytes = sum(graph.tensor_bytes[i] for i in self.recomputable)
        unit_bytes = 1 + 2 * total_bytes // UNCUT_CAPACITY
        first_tensor_vertex = 2 + len(graph.nodes)
        self.tensor_vertices = first_tensor_vertex + 2 * np.arange(len(self.recomputable))
        self.n_vertices = first_tensor_vertex + 2 * len(self.recomputable)
        edges: dict[tuple[int, int], int] = {}
        for i, vertex in zip(self.recomputable, self.tensor_vertices.tolist(), strict=True):
            edges[2 + graph.node_of[i], vertex] = UNCUT_CAPACITY
            edges[vertex, vertex + 1] = -(-graph.tensor_bytes[i] // unit_bytes)
            for k in graph.users_of[i]:
                edges[vertex + 1, 1 if k >= first_backward else 2 + k] = UNCUT_CAPACITY
        self.edges = edges

    def find_saved_tensors(self, nodes_computed_once: Collection[int]) -> frozenset[int]:
        """Return the tensors of fewest bytes to save so that given nodes are computed only once.

        Backward reads can be computed from this set, samples and tensors that cannot be recomputed.
        Of several minimum cuts, the one next to the backward pass is returned.
        """
        if not self.recomputable:
            return frozenset()
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        edges = self.edges | {(0, 2 + k): UNCUT_CAPACITY for k in nodes_computed_once}
        endpoints = tuple(np.array(list(edges), dtype=np.int32).T)
        capacity = csr_array(
            (np.array(list(edges.values()), dtype=np.int32), endpoints),
            shape=(self.n_vertices, self.n_vertices),
        )
        residual = capacity - maximum_flow(capacity, 0, 1).flow
        reversed_residual = csr_array(residual.T)
        reversed_residual.eliminate_zeros()
        is_on_source_side = np.ones(self.n_vertices, dtype=bool)
        is_on_source_side[breadth_first_order(reversed_residual, 1, return_predecessors=False)] = (
            False
        )
        is_tensor_cut = (
            is_on_source_side[self.tensor_vertices] & ~is_on_source_side[self.tensor_vertices + 1]
        )
        return frozenset(
            i for i, is_saved in zip(self.recomputable, is_tensor_cut, strict=True) if is_saved
        )


def _pack_knapsack(problem: Problem, size_bytes: int) -> tuple[int, ...]:
    """Return recomputable forward nodes of maximum total time whose outputs fit in `size_bytes`."""
    graph, first_backward = problem.graph, first_backward_node(problem.graph)
    recomputable = evictable_tensors(graph)
    unit_bytes = max(1, -(-size_bytes // UNITS))
    capacity = size_bytes // unit_bytes
    nodes = [k for k in range(first_backward) if recomputable.intersection(graph.outputs_of[k])]
    max_times_s = np.zeros(capacity + 1)
    is_taken = np.zeros((len(nodes), capacity + 1), dtype=bool)
    weights = [-(-graph.nodes[k].output_bytes // unit_bytes) for k in nodes]
    for index, (k, weight) in enumerate(zip(nodes, weights, strict=True)):
        if weight > capacity:
            continue
        times_with_node_s = max_times_s[: capacity + 1 - weight] + problem.table.compute_time_s[k]
        is_taken[index, weight:] = times_with_node_s > max_times_s[weight:]
        max_times_s[weight:] = np.maximum(max_times_s[weight:], times_with_node_s)
    packed_nodes = []
    for index in range(len(nodes) - 1, -1, -1):
        if is_taken[index, capacity]:
            packed_nodes.append(nodes[index])
            capacity -= weights[index]
    return tuple(packed_nodes)
