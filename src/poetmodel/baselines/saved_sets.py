"""Methods that save tensors for the backward pass, and recompute the others once."""

from __future__ import annotations

from itertools import pairwise
from math import isqrt
from typing import TYPE_CHECKING, Final

import numpy as np

from poetmodel.baselines.engine import fitting
from poetmodel.baselines.homes import all_in_ram, forward_only
from poetmodel.graph import Graph, Phase, articulation_points
from poetmodel.heuristics.execution import (
    begin_of_backward,
    droppable,
    recompute_once,
)
from poetmodel.schedule import Schedule, checkpoint_all

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from poetmodel.problem import Problem

RATIOS, STEPS = 12, 40
"""Thresholds of the greedy method in equal ratios, and in equal steps."""
SIZES: Final = 200
"""Equal steps in which the knapsack of the minimum cut shrinks, from all tensors to none."""
UNCUT: Final = 2**31 - 1
"""Capacity of an edge that cannot be cut; all tensors together have half of it at most."""
UNITS: Final = 1000
"""Units into which that knapsack is divided."""


# -- segments -------------------------------------------------------------------------------------


def keep_all(problem: Problem) -> Schedule:
    """Compute every node once and keep every tensor to its last use, whatever the budget is."""
    return checkpoint_all(problem.graph)


@all_in_ram
@forward_only
def chen_sqrt(problem: Problem) -> Schedule:
    """Keep about the square root of the layers and recompute each segment between them once.

    Of ``m`` candidates every ``ceil(sqrt(m))``-th is kept, all its outputs that are still read.
    What follows the last of them is kept as well: the backward pass begins with it. Two sets of
    candidates are tried: the articulation points of the forward pass (the paper's segments), and
    all its nodes in their order, as if they were a chain (the linearized variant of Jain et al.,
    2020). The quickest schedule that fits the budget wins. Samples, labels and what cannot be
    recomputed are always kept.
    """
    plans = (_every_root(nodes) for nodes in _candidates(problem.graph))
    return _quickest(problem, _segmented(problem.graph, plans), "segments")


@all_in_ram
@forward_only
def chen_greedy(problem: Problem) -> Schedule:
    """Close a segment where its tensors exceed a threshold; take the quickest that fits the budget.

    Algorithm 3 of the paper adds up the bytes of the outputs and, once they exceed the threshold,
    keeps the next candidate and starts again from zero. Thresholds go from the largest tensor to
    all bytes, in equal ratios and in equal steps. Candidates as in `chen_sqrt`. It takes time in
    proportion to the square of the number of nodes, for each threshold.
    """
    graph = problem.graph
    plans = (
        _above(graph, nodes, threshold)
        for nodes in _candidates(graph)
        for threshold in _thresholds(graph)
    )
    return _quickest(problem, _segmented(graph, plans), "segments")


def _candidates(graph: Graph) -> tuple[Sequence[int], ...]:
    """Return the nodes at which segments may end: cut points, and all nodes."""
    own = {graph.node_of[i] for i in droppable(graph)}
    points = articulation_points(graph, phases={Phase.FORWARD, Phase.LOSS})
    forward = [k for k in range(begin_of_backward(graph)) if k in own]
    return ([k for k in forward if k in points], forward)


def _every_root(nodes: Sequence[int]) -> list[int]:
    width = isqrt(max(0, len(nodes) - 1)) + 1
    return list(nodes[width - 1 :: width])


def _thresholds(graph: Graph) -> Iterator[float]:
    sizes = [graph.tensor_bytes[i] for i in droppable(graph)]
    least, most = max(sizes, default=0), sum(sizes)
    yield 0.0
    if least:
        ratio = (most / least) ** (1 / (RATIOS - 1))
        yield from (least * ratio**exponent for exponent in range(RATIOS))
        yield from (most * step / STEPS for step in range(1, STEPS))


def _above(graph: Graph, nodes: Sequence[int], threshold: float) -> list[int]:
    """Return the candidates that close a segment."""
    closing, ends = [], set(nodes)
    gathered = 0
    for k in range(begin_of_backward(graph)):
        gathered += graph.nodes[k].output_bytes
        if k in ends and gathered > threshold:
            closing.append(k)
            gathered = 0
    return closing


def _quickest(problem: Problem, schedules: Iterable[Schedule], what: str) -> Schedule:
    """Return the schedule with the least compute time of those that keep the budget."""
    fits = fitting(problem, schedules, what)
    return min(fits, key=lambda candidate: candidate[1].compute_s or 0.0)[0]


def _segmented(graph: Graph, plans: Iterable[Sequence[int]]) -> Iterator[Schedule]:
    """Yield the schedules that keep the outputs of segment ends and of the last segment."""
    for ends in dict.fromkeys(map(tuple, plans)):
        starts = [0, *(k + 1 for k in ends), begin_of_backward(graph)]
        groups = [range(*pair) for pair in pairwise(starts)]
        saved = {i for k in (*ends, *groups[-1]) for i in graph.outputs_of[k]}
        yield recompute_once(graph, saved, groups)


# -- a minimum cut --------------------------------------------------------------------------------


@all_in_ram
@forward_only
def min_cut(problem: Problem) -> Schedule:
    """Save a minimum cut of tensors for the backward pass and recompute the others once.

    Two steps, as in PyTorch (``torch/_functorch/partitioners.py``). A knapsack chooses which nodes
    must not run again: the most compute time for a number of bytes of their outputs. Then the
    tensors of least size are saved that cut those nodes, as sources, from what the backward pass
    reads. PyTorch chooses candidates by kinds of operators and counts all saved bytes. Here all
    nodes of the forward pass are candidates, each with its time. Knapsacks of 201 sizes are tried,
    and the quickest schedule that keeps the budget is taken: what is recomputed stays from its
    first use to its last, so a smaller saved set need not mean a smaller peak.
    """
    graph = problem.graph
    whole = sum(graph.tensor_bytes[i] for i in droppable(graph))
    knapsacks = (_knapsack(problem, whole * n // SIZES) for n in range(SIZES, -1, -1))
    cuts = _Cuts(graph)
    saved = dict.fromkeys(cuts.saved_tensors(once) for once in dict.fromkeys(knapsacks))
    schedules = (recompute_once(graph, tensors) for tensors in saved)
    return _quickest(problem, schedules, "saved sets")


def saved_tensors(graph: Graph, once: Collection[int]) -> frozenset[int]:
    """Return the tensors of least size that spare some nodes of the forward pass a second run.

    All that the backward pass reads can be computed from these, from samples and from what cannot
    be recomputed, without running a node of `once`. Of several cuts of least size, the one next to
    the backward pass is taken.
    """
    return _Cuts(graph).saved_tensors(once)


class _Cuts:
    """The network whose cuts are the sets of tensors that may be saved.

    Each tensor is an edge of its size, from being computed to being read. Beyond 1 GiB in all,
    sizes are rounded up to a few bytes. Edges that cannot be cut go from the source to the nodes
    that must not run again, from a node to its outputs, and from a tensor to its readers: nodes of
    the forward pass, or the sink. Vertex 0 is the source, 1 the sink; then come the nodes, and two
    vertices for each tensor.
    """

    def __init__(self, graph: Graph) -> None:
        self.free, begin = sorted(droppable(graph)), begin_of_backward(graph)
        whole = sum(graph.tensor_bytes[i] for i in self.free)
        unit = 1 + 2 * whole // UNCUT
        first = 2 + len(graph.nodes)
        self.computed = first + 2 * np.arange(len(self.free))
        self.count = first + 2 * len(self.free)
        edges: dict[tuple[int, int], int] = {}
        for i, computed in zip(self.free, self.computed.tolist(), strict=True):
            edges[2 + graph.node_of[i], computed] = UNCUT
            edges[computed, computed + 1] = -(-graph.tensor_bytes[i] // unit)
            for k in graph.users_of[i]:
                edges[computed + 1, 1 if k >= begin else 2 + k] = UNCUT
        self.edges = edges

    def saved_tensors(self, once: Collection[int]) -> frozenset[int]:
        """Return the tensors of a minimum cut behind some nodes."""
        if not self.free:
            return frozenset()
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        edges = self.edges | {(0, 2 + k): UNCUT for k in once}
        ends = tuple(np.array(list(edges), dtype=np.int32).T)
        capacity = csr_array(
            (np.array(list(edges.values()), dtype=np.int32), ends), shape=(self.count, self.count)
        )
        left = capacity - maximum_flow(capacity, 0, 1).flow
        backwards = csr_array(left.T)
        backwards.eliminate_zeros()
        near = np.ones(self.count, dtype=bool)
        near[breadth_first_order(backwards, 1, return_predecessors=False)] = False
        cut = near[self.computed] & ~near[self.computed + 1]
        return frozenset(i for i, is_cut in zip(self.free, cut, strict=True) if is_cut)


def _knapsack(problem: Problem, size_bytes: int) -> tuple[int, ...]:
    """Return the nodes of most compute time whose outputs fit a knapsack."""
    graph, begin = problem.graph, begin_of_backward(problem.graph)
    free = droppable(graph)
    unit = max(1, -(-size_bytes // UNITS))
    room = size_bytes // unit
    nodes = [k for k in range(begin) if free.intersection(graph.outputs_of[k])]
    best = np.zeros(room + 1)
    taken = np.zeros((len(nodes), room + 1), dtype=bool)
    weights = [-(-graph.nodes[k].output_bytes // unit) for k in nodes]
    for index, (k, weight) in enumerate(zip(nodes, weights, strict=True)):
        if weight > room:
            continue
        with_it = best[: room + 1 - weight] + problem.table.compute_time_s[k]
        taken[index, weight:] = with_it > best[weight:]
        best[weight:] = np.maximum(best[weight:], with_it)
    chosen = []
    for index in range(len(nodes) - 1, -1, -1):
        if taken[index, room]:
            chosen.append(nodes[index])
            room -= weights[index]
    return tuple(chosen)
