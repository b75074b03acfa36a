"""Methods that cut the forward pass into segments and recompute each of them once, or none."""

from __future__ import annotations

from itertools import pairwise
from math import isqrt
from typing import TYPE_CHECKING, Final

from poetmodel.baselines.engine import (
    begin_of_backward,
    droppable,
    fitting,
    last_forward_uses,
    retain,
)
from poetmodel.graph import Phase, articulation_points
from poetmodel.schedule import checkpoint_all

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from poetmodel.graph import Graph
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

THRESHOLDS: Final = 12
"""Thresholds of the greedy method for each set of candidates."""


def keep_all(problem: Problem) -> Schedule:
    """Compute every node once and keep every tensor to its last use, whatever the budget is."""
    return checkpoint_all(problem.graph)


def chen_sqrt(problem: Problem) -> Schedule:
    """Keep about the square root of the layers and recompute each segment between them once.

    Of ``m`` candidates every ``ceil(sqrt(m))``-th is kept, all its outputs that are still read.
    What follows the last of them is kept as well: the backward pass begins with it. Two sets of
    candidates are tried: the articulation points of the forward pass (the paper's segments), and
    all its nodes in their order, as if they were a chain (the linearized variant of Jain et al.,
    2020). The quickest schedule that fits the budget wins. Samples, labels and what cannot be
    recomputed are always kept.
    """
    return _quickest(problem, (_every_root(nodes) for nodes in _candidates(problem.graph)))


def chen_greedy(problem: Problem) -> Schedule:
    """Close a segment where its tensors exceed a threshold; take the quickest that fits the budget.

    Algorithm 3 of the paper adds up the bytes of the outputs and, once they exceed the threshold,
    keeps the next candidate and starts again from zero. Thresholds go from the largest tensor to
    all bytes in equal ratios. Candidates as in `chen_sqrt`. It takes time in proportion to the
    square of the number of nodes, for each threshold.
    """
    graph = problem.graph
    plans = (
        _above(graph, nodes, threshold)
        for nodes in _candidates(graph)
        for threshold in _thresholds(graph)
    )
    return _quickest(problem, plans)


def recompute_once(
    graph: Graph, saved: Collection[int], groups: Collection[range] = ()
) -> Schedule:
    """Return the schedule that saves some tensors and recomputes the others when they are read.

    Every node is recomputed at most once: what is recomputed, and what is saved, stays until
    nothing more is computed from it. Groups are ranges of nodes that are recomputed together: when
    one of their tensors is missing, all that will still be read are recomputed.
    """
    begin, last = begin_of_backward(graph), last_forward_uses(graph)
    final = tuple(users[-1] if users else -1 for users in graph.users_of)
    group_of = {k: group for group in groups for k in group}
    stays = set(saved)

    def keep(t: int, i: int) -> bool:
        return i in stays or t < last[i] or t >= begin

    def demand(t: int) -> Iterable[int]:
        read = [group_of.get(graph.node_of[i]) for i in graph.inputs_of[t] if i not in stays]
        for group in read if t >= begin else ():
            for k in group or ():
                yield from (i for i in graph.outputs_of[k] if final[i] >= t)

    return retain(graph, keep, demand)


def _candidates(graph: Graph) -> tuple[Sequence[int], ...]:
    """Return the nodes at which segments may end: cut points, and all nodes."""
    own = {graph.node_of[i] for i in droppable(graph)}
    points = articulation_points(graph, phases={Phase.FORWARD, Phase.LOSS})
    chained = [k for k in range(begin_of_backward(graph)) if k in own]
    return ([k for k in points if k in own], chained)


def _every_root(nodes: Sequence[int]) -> list[int]:
    width = isqrt(max(0, len(nodes) - 1)) + 1
    return list(nodes[width - 1 :: width])


def _thresholds(graph: Graph) -> Iterator[float]:
    sizes = [graph.tensor_bytes[i] for i in droppable(graph)]
    least, most = max(sizes, default=0), sum(sizes)
    yield 0.0
    if least:
        ratio = (most / least) ** (1 / (THRESHOLDS - 1))
        yield from (least * ratio**place for place in range(THRESHOLDS))


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


def _quickest(problem: Problem, plans: Iterable[Sequence[int]]) -> Schedule:
    """Return the schedule with the least compute time of those that keep the budget."""
    different = dict.fromkeys(map(tuple, plans))
    schedules = (_segmented(problem.graph, ends) for ends in different)
    fits = fitting(problem, schedules, "segments")
    return min(fits, key=lambda found: found[1].compute_s or 0.0)[0]


def _segmented(graph: Graph, ends: Sequence[int]) -> Schedule:
    """Return the schedule that keeps the outputs of segment ends and of the last segment."""
    starts = [0, *(k + 1 for k in ends), begin_of_backward(graph)]
    groups = [range(*pair) for pair in pairwise(starts)]
    saved = {i for k in (*ends, *groups[-1]) for i in graph.outputs_of[k]}
    return recompute_once(graph, saved, groups)
