"""Keep-all peak, minimum RAM, inference profile and articulation points of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from poetmodel.graph.node import Phase

if TYPE_CHECKING:
    from collections.abc import Collection

    from poetmodel.graph.structure import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Minimum RAM of a graph: the largest working set of one node. No schedule needs less."""

    bytes: int
    """Inputs, outputs and workspace of that node together [B].

    Includes all state if `floor` was called with `resident`, none if only with `memory_mapped`."""
    node: int
    """Index of the node with the largest working set (the first, if several are equal)."""


def floor(graph: Graph, *, memory_mapped: bool = False, resident: bool = False) -> Floor:
    """Return the minimum RAM: the largest working set of one node, and the index of that node.

    Parameters
    ----------
    graph : Graph
        The training graph.
    memory_mapped : bool
        Whether the core reads state from storage in place, so that state occupies no RAM.
    resident : bool
        Whether all state stays in RAM, because paging is impossible; overrides `memory_mapped`.

    Notes
    -----
    ``max_k (sum of in(k) + sum of out(k) + workspace[k])``: inputs, outputs and workspace of a node
    are in RAM together, so every schedule has at least this peak. State that a node does not read
    may be on storage and does not count, unless `resident`. A replacement uses the memory of the
    state that it replaces, and every output that can overwrite an input uses that input's memory.
    """
    working_sets = graph.step_bytes
    if memory_mapped or resident:
        state = frozenset(graph.state_tensors)
        resident_bytes = graph.state_bytes if resident else 0
        working_sets = tuple(
            size + resident_bytes - sum(graph.tensor_bytes[i] for i in {*inputs, *outputs} & state)
            for size, inputs, outputs in zip(
                working_sets, graph.inputs_of, graph.outputs_of, strict=True
            )
        )
    k = max(range(len(working_sets)), key=working_sets.__getitem__)
    return Floor(bytes=working_sets[k], node=k)


def checkpoint_all_profile(graph: Graph) -> tuple[int, ...]:
    """Return the RAM in use at each node under keep-all [B]: live tensors, outputs and workspace.

    Keep-all computes each node once and keeps each tensor until its last use, and state throughout.
    """
    return graph.keep_all_bytes


def checkpoint_all_peak_bytes(graph: Graph) -> int:
    """Return the keep-all peak [B]: the maximum of `checkpoint_all_profile`."""
    return max(checkpoint_all_profile(graph))


def inference_profile(graph: Graph) -> dict[int, int] | None:
    """Return the RAM in use at each node of inference, by node [B].

    None if phases do not separate the forward pass from the rest of the step.
    """
    forward = {k for k, node in enumerate(graph.nodes) if node.phase == Phase.FORWARD}
    if not forward or all(node.phase in (Phase.INPUT, Phase.FORWARD) for node in graph.nodes):
        return None
    unvisited_nodes = list(forward)
    while unvisited_nodes:
        new_nodes = {graph.node_of[i] for i in graph.inputs_of[unvisited_nodes.pop()]} - forward
        forward |= new_nodes
        unvisited_nodes.extend(new_nodes)
    inference_nodes = sorted(forward)
    return dict(zip(inference_nodes, graph.bytes_of_computing(inference_nodes), strict=True))


def articulation_points(graph: Graph, *, phases: Collection[str] | None = None) -> tuple[int, ...]:
    """Return the indices of nodes whose outputs alone carry all data to later nodes, ascending.

    Segmenting methods cut the graph at these nodes (Chen et al., 2016, section 4). With `phases`,
    only nodes of these phases and their reads count.
    """
    node_indices = [
        k for k, node in enumerate(graph.nodes) if phases is None or node.phase in phases
    ]
    position_of = {k: position for position, k in enumerate(node_indices)}
    crossing_change = [0] * (len(node_indices) + 1)
    for i, k in enumerate(graph.node_of):
        users = [position_of[user] for user in graph.users_of[i] if user in position_of]
        if k in position_of and users and users[-1] > position_of[k] + 1:
            crossing_change[position_of[k] + 1] += 1
            crossing_change[users[-1]] -= 1
    points = []
    n_crossing = 0
    for position, k in enumerate(node_indices):
        n_crossing += crossing_change[position]
        if n_crossing == 0:
            points.append(k)
    return tuple(points)
