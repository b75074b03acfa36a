"""What a graph needs before anything is decided: the checkpoint-all peak, the floor, cut points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from poetmodel.graph.structure import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The largest working set of one step: no schedule needs less."""

    bytes: int
    """Inputs, outputs and workspace of the step together [B]."""
    node: int
    """The operation whose step it is (the first, where several tie)."""


def working_set_bytes(graph: Graph, k: int) -> int:
    """Return inputs, outputs and workspace of node `k` together [B]."""
    return graph.step_bytes[k]


def floor(graph: Graph) -> Floor:
    """Return the largest working set of one step and the node that sets it.

    Notes
    -----
    ``max_k (sum of in(k) + sum of out(k) + workspace[k])``: inputs, outputs and workspace of a step
    are in RAM together, so every schedule has at least this peak.
    """
    sets = graph.step_bytes
    k = max(range(len(sets)), key=sets.__getitem__)
    return Floor(bytes=sets[k], node=k)


def checkpoint_all_profile(graph: Graph) -> tuple[int, ...]:
    """Return the RAM in use at each node's computation when every tensor is kept to its last use.

    Returns
    -------
    tuple of int, one per node [B]
        Live tensors, outputs and workspace of the step.
    """
    sizes = graph.tensor_bytes
    freed: list[list[int]] = [[] for _ in graph.nodes]
    for i, users in enumerate(graph.users_of):
        freed[users[-1] if users else graph.node_of[i]].append(i)
    live = 0
    profile = []
    for k, node in enumerate(graph.nodes):
        live += graph.output_bytes[k]
        profile.append(live + node.workspace_bytes)
        live -= sum(sizes[i] for i in freed[k])
    return tuple(profile)


def checkpoint_all_peak_bytes(graph: Graph) -> int:
    """Return the peak when each node is computed once and each tensor kept to its last use [B]."""
    return max(checkpoint_all_profile(graph))


def articulation_points(graph: Graph, *, phases: Collection[str] | None = None) -> tuple[int, ...]:
    """Return the nodes across which nothing else is carried.

    Node `k` is one when no tensor made before it is read after it: its outputs alone are enough to
    go on from there. Segmenting methods cut at them (Chen et al., 2016, section 4).

    Parameters
    ----------
    graph : Graph
        The training graph.
    phases : collection of str, optional
        Consider only nodes of these phases and only what they read; ``{"input", "forward"}`` gives
        the cut points of the network itself, which its backward pass would hide.

    Returns
    -------
    tuple of int
        Node indices, ascending.
    """
    chosen = [k for k, node in enumerate(graph.nodes) if phases is None or node.phase in phases]
    place = {k: position for position, k in enumerate(chosen)}
    opens = [0] * (len(chosen) + 1)
    for i, k in enumerate(graph.node_of):
        users = [place[user] for user in graph.users_of[i] if user in place]
        if k in place and users and users[-1] > place[k] + 1:
            opens[place[k] + 1] += 1
            opens[users[-1]] -= 1
    points = []
    carried = 0
    for position, k in enumerate(chosen):
        carried += opens[position]
        if carried == 0:
            points.append(k)
    return tuple(points)
