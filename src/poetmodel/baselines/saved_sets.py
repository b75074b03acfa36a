"""Methods that save a set of tensors for the backward pass, and recompute other tensors once."""

from __future__ import annotations

from itertools import pairwise
from math import isqrt
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.baselines.engine import simulated_within_budget
from poetmodel.baselines.homes import all_in_ram, forward_only
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
"""Number of thresholds of `chen_greedy` in equal ratios, and in equal steps."""
N_SIZES: Final = 200
"""Number of equal steps in which the knapsack of `min_cut` shrinks, from all tensors to none."""
UNCUT: Final = 2**31 - 1
"""Capacity of an edge that must not be cut; all tensors together have at most half of it."""
UNITS: Final = 1000
"""Units into which a knapsack is divided."""


# -- segments -------------------------------------------------------------------------------------


def keep_all(problem: Problem) -> Schedule:
    """Compute each node once and keep each tensor until its last use; the budget is ignored."""
    return checkpoint_all(problem.graph)


@all_in_ram
@forward_only
def chen_sqrt(problem: Problem) -> Schedule:
    """Keep about ``sqrt(m)`` of ``m`` layers, and recompute each segment between them once.

    Of ``m`` candidates (nodes at which a segment may end), each ``ceil(sqrt(m))``-th is kept, with
    all its outputs that are read later. The tensors behind the last of them are kept, too, because
    the backward pass begins with them. Two sets of candidates are tried: the articulation points of
    the forward pass (Chen et al., 2016), and all nodes of the forward pass in order, as if they
    were a chain (the linearized variant of Jain et al., 2020). The fastest schedule within the
    budget is returned. Samples, labels and tensors that cannot be recomputed are always kept.
    """
    segment_ends = (_sqrt_segment_ends(nodes) for nodes in _segment_ends(problem.graph))
    return _fastest(problem, _schedules_of_segments(problem.graph, segment_ends), "segments")


@all_in_ram
@forward_only
def chen_greedy(problem: Problem) -> Schedule:
    """Close a segment when its tensors exceed a threshold; use the best threshold.

    Algorithm 3 of Chen et al. (2016) adds up the bytes of the outputs. Once the sum exceeds the
    threshold, the algorithm keeps the next candidate and restarts from zero. Thresholds range from
    the largest tensor to all bytes, in equal ratios and in equal steps. Candidates are those of
    `chen_sqrt`. The fastest schedule within the budget is returned. The run time is proportional to
    the square of the number of nodes, for each threshold.
    """
    graph = problem.graph
    segment_ends = (
        _close_segments(graph, nodes, threshold)
        for nodes in _segment_ends(graph)
        for threshold in _thresholds(graph)
    )
    return _fastest(problem, _schedules_of_segments(graph, segment_ends), "segments")


def _segment_ends(graph: Graph) -> tuple[Sequence[int], ...]:
    """Return two candidate lists of nodes at which segments may end: cut points, and all nodes."""
    recomputable = {graph.node_of[i] for i in evictable_tensors(graph)}
    points = articulation_points(graph, phases={Phase.FORWARD, Phase.LOSS})
    forward = [k for k in range(first_backward_node(graph)) if k in recomputable]
    return ([k for k in forward if k in points], forward)


def _sqrt_segment_ends(nodes: Sequence[int]) -> list[int]:
    """Return each ``ceil(sqrt(m))``-th of ``m`` nodes."""
    width = isqrt(max(0, len(nodes) - 1)) + 1
    return list(nodes[width - 1 :: width])


def _thresholds(graph: Graph) -> Iterator[float]:
    """Yield 0 and thresholds from the largest tensor to all bytes [B]."""
    sizes = [graph.tensor_bytes[i] for i in evictable_tensors(graph)]
    min_bytes, max_bytes = max(sizes, default=0), sum(sizes)
    yield 0.0
    if min_bytes:
        ratio = (max_bytes / min_bytes) ** (1 / (N_RATIOS - 1))
        yield from (min_bytes * ratio**exponent for exponent in range(N_RATIOS))
        yield from (max_bytes * step / N_STEPS for step in range(1, N_STEPS))


def _close_segments(graph: Graph, nodes: Sequence[int], threshold: float) -> list[int]:
    """Return the candidates in `nodes` after which a segment closes for a threshold [B]."""
    closing, ends = [], set(nodes)
    segment_bytes = 0
    for k in range(first_backward_node(graph)):
        segment_bytes += graph.nodes[k].output_bytes
        if k in ends and segment_bytes > threshold:
            closing.append(k)
            segment_bytes = 0
    return closing


def _fastest(problem: Problem, schedules: Iterable[Schedule], kind: str) -> Schedule:
    """Return the schedule with minimum compute time among those within the budget.

    Raises `MethodNotApplicableError` if there is none; `kind` names the schedules in the message.
    """
    candidates = simulated_within_budget(problem, schedules, kind)
    return min(candidates, key=lambda candidate: candidate[1].compute_s or 0.0)[0]


def _schedules_of_segments(
    graph: Graph, segment_ends: Iterable[Sequence[int]]
) -> Iterator[Schedule]:
    """Yield the schedules that keep the outputs of segment ends and of the last segment."""
    for ends in dict.fromkeys(map(tuple, segment_ends)):
        starts = [0, *(k + 1 for k in ends), first_backward_node(graph)]
        groups = [range(*pair) for pair in pairwise(starts)]
        saved = {i for k in (*ends, *groups[-1]) for i in graph.outputs_of[k]}
        yield recompute_once(graph, saved, groups)


# -- a minimum cut --------------------------------------------------------------------------------


@all_in_ram
@forward_only
def min_cut(problem: Problem) -> Schedule:
    """Save a minimum cut of tensors for the backward pass, and recompute other tensors once.

    There are two steps, as in PyTorch (``torch/_functorch/partitioners.py``). A knapsack selects
    the nodes that must not run again: maximum compute time for a given number of output bytes. Then
    the smallest set of tensors is saved that cuts these nodes, as sources, from the reads of the
    backward pass. PyTorch selects candidates by kinds of operators and counts all saved bytes. Here
    all nodes of the forward pass are candidates, each with its time. Knapsacks of 201 sizes are
    tried, and the fastest schedule within the budget is returned. A recomputed tensor stays from
    its first use to its last, so a smaller saved set does not imply a smaller peak.
    """
    graph = problem.graph
    total_bytes = sum(graph.tensor_bytes[i] for i in evictable_tensors(graph))
    knapsacks = (_knapsack(problem, total_bytes * n // N_SIZES) for n in range(N_SIZES, -1, -1))
    cuts = _Cuts(graph)
    saved = dict.fromkeys(cuts.saved_tensors(single_run) for single_run in dict.fromkeys(knapsacks))
    schedules = (recompute_once(graph, tensors) for tensors in saved)
    return _fastest(problem, schedules, "saved sets")


def saved_tensors(graph: Graph, single_run_nodes: Collection[int]) -> frozenset[int]:
    """Return the smallest set of tensors to save so that some forward nodes run only once.

    All reads of the backward pass can be computed from this set, from samples and from tensors that
    cannot be recomputed, without running a node of `single_run_nodes`. Of several minimum cuts the
    one next to the backward pass is returned.
    """
    return _Cuts(graph).saved_tensors(single_run_nodes)


class _Cuts:
    """Flow network whose cuts are the sets of tensors that may be saved.

    Each tensor is an edge with its size as capacity, from its computation to its reads. If the
    tensors exceed 1 GiB in total, sizes are rounded up to a multiple of a few bytes. Edges that
    must not be cut connect the source with the nodes that must not run again, a node with its
    outputs, and a tensor with its readers: nodes of the forward pass, or the sink. Vertex 0 is the
    source and vertex 1 the sink; the nodes follow, and then two vertices per tensor.
    """

    def __init__(self, graph: Graph) -> None:
        """Build the network except the edges from the source, which each cut adds."""
        self.recomputable, begin = sorted(evictable_tensors(graph)), first_backward_node(graph)
        total_bytes = sum(graph.tensor_bytes[i] for i in self.recomputable)
        unit_bytes = 1 + 2 * total_bytes // UNCUT
        first = 2 + len(graph.nodes)
        self.computed = first + 2 * np.arange(len(self.recomputable))
        self.n_vertices = first + 2 * len(self.recomputable)
        edges: dict[tuple[int, int], int] = {}
        for i, computed in zip(self.recomputable, self.computed.tolist(), strict=True):
            edges[2 + graph.node_of[i], computed] = UNCUT
            edges[computed, computed + 1] = -(-graph.tensor_bytes[i] // unit_bytes)
            for k in graph.users_of[i]:
                edges[computed + 1, 1 if k >= begin else 2 + k] = UNCUT
        self.edges = edges

    def saved_tensors(self, single_run_nodes: Collection[int]) -> frozenset[int]:
        """Return the tensors of the minimum cut for which no node of `single_run_nodes` reruns."""
        if not self.recomputable:
            return frozenset()
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        edges = self.edges | {(0, 2 + k): UNCUT for k in single_run_nodes}
        endpoints = tuple(np.array(list(edges), dtype=np.int32).T)
        capacity = csr_array(
            (np.array(list(edges.values()), dtype=np.int32), endpoints),
            shape=(self.n_vertices, self.n_vertices),
        )
        residual = capacity - maximum_flow(capacity, 0, 1).flow
        backwards = csr_array(residual.T)
        backwards.eliminate_zeros()
        on_source_side = np.ones(self.n_vertices, dtype=bool)
        on_source_side[breadth_first_order(backwards, 1, return_predecessors=False)] = False
        cut = on_source_side[self.computed] & ~on_source_side[self.computed + 1]
        return frozenset(i for i, is_cut in zip(self.recomputable, cut, strict=True) if is_cut)


def _knapsack(problem: Problem, size_bytes: int) -> tuple[int, ...]:
    """Return the nodes of maximum compute time whose outputs fit a knapsack."""
    graph, begin = problem.graph, first_backward_node(problem.graph)
    recomputable = evictable_tensors(graph)
    unit_bytes = max(1, -(-size_bytes // UNITS))
    capacity = size_bytes // unit_bytes
    nodes = [k for k in range(begin) if recomputable.intersection(graph.outputs_of[k])]
    best = np.zeros(capacity + 1)
    is_taken = np.zeros((len(nodes), capacity + 1), dtype=bool)
    weights = [-(-graph.nodes[k].output_bytes // unit_bytes) for k in nodes]
    for index, (k, weight) in enumerate(zip(nodes, weights, strict=True)):
        if weight > capacity:
            continue
        with_node_s = best[: capacity + 1 - weight] + problem.table.compute_time_s[k]
        is_taken[index, weight:] = with_node_s > best[weight:]
        best[weight:] = np.maximum(best[weight:], with_node_s)
    packed_nodes = []
    for index in range(len(nodes) - 1, -1, -1):
        if is_taken[index, capacity]:
            packed_nodes.append(nodes[index])
            capacity -= weights[index]
    return tuple(packed_nodes)
