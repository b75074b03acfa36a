"""Needs of a graph under any schedule: keep-all peak, minimum RAM and articulation points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from poetmodel.graph.node import Phase

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from poetmodel.graph.structure import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The largest working set of one step: no schedule needs less."""

    bytes: int
    """Inputs, outputs and workspace of the step together [B]."""
    node: int
    """The operation whose step it is (the first, where several tie)."""


def floor(graph: Graph, *, memory_mapped: bool = False, resident: bool = False) -> Floor:
    """Return the largest working set of one step and the node that sets it.

    Parameters
    ----------
    graph : Graph
        The training graph.
    memory_mapped : bool
        Whether the core reads state where it lies on storage, so that it takes no RAM.
    resident : bool
        Whether all state is in RAM, because nothing may be paged.

    Notes
    -----
    ``max_k (sum of in(k) + sum of out(k) + workspace[k])``: inputs, outputs and workspace of a step
    are in RAM together, so every schedule has at least this peak. State may all lie on storage:
    what a step does not read does not count. A replacement takes the room of what it replaces, and
    every output that may take over an input does.
    """
    sets = graph.step_bytes
    if memory_mapped or resident:
        state = frozenset(graph.state_tensors)
        always = graph.state_bytes if resident else 0
        sets = tuple(
            whole + always - sum(graph.tensor_bytes[i] for i in {*read, *outputs} & state)
            for whole, read, outputs in zip(sets, graph.inputs_of, graph.outputs_of, strict=True)
        )
    k = max(range(len(sets)), key=sets.__getitem__)
    return Floor(bytes=sets[k], node=k)


def checkpoint_all_profile(graph: Graph) -> tuple[int, ...]:
    """Return the RAM in use at each node when every tensor is kept to its last use [B].

    It is that of live tensors, outputs and workspace of the step. All state is in RAM throughout.
    """
    return _kept_to_last_use(graph, range(len(graph.nodes)))


def _kept_to_last_use(graph: Graph, chosen: Sequence[int]) -> tuple[int, ...]:
    """Return the RAM in use at each of some nodes when they alone are computed, in this order."""
    sizes, wanted = graph.tensor_bytes, frozenset(chosen)
    state = frozenset(graph.state_tensors)
    stays = state.union(graph.state_of)
    freed: dict[int, list[int]] = {k: [] for k in chosen}
    for i, k in enumerate(graph.node_of):
        if k in wanted and i not in stays:
            last = max((user for user in graph.users_of[i] if user in wanted), default=k)
            freed[last].append(i)
    live = sum(sizes[i] for i in state if graph.node_of[i] in wanted)
    profile = []
    for k in chosen:
        live += 0 if graph.nodes[k].is_state else graph.made_bytes[k]
        in_place = graph.shared_bytes(k, freed[k])
        profile.append(live + graph.nodes[k].workspace_bytes - in_place)
        live -= sum(sizes[i] for i in freed[k])
    return tuple(profile)


def checkpoint_all_peak_bytes(graph: Graph) -> int:
    """Return the peak when each node is computed once and each tensor kept to its last use [B]."""
    return max(checkpoint_all_profile(graph))


def inference_profile(graph: Graph) -> dict[int, int] | None:
    """Return the RAM in use at each node of the forward pass alone, as inference runs it [B].

    Each tensor is freed after its last use in the forward pass, which is every ``forward`` node and
    all that these read, directly or not: labels, which only the loss reads, are no part of it. None
    where the phases do not tell the forward pass from the rest of the training step: there is no
    ``forward`` node, or nothing but ``input`` and ``forward`` nodes.
    """
    forward = {k for k, node in enumerate(graph.nodes) if node.phase == Phase.FORWARD}
    if not forward or all(node.phase in (Phase.INPUT, Phase.FORWARD) for node in graph.nodes):
        return None
    waiting = list(forward)
    while waiting:
        read = {graph.node_of[i] for i in graph.inputs_of[waiting.pop()]} - forward
        forward |= read
        waiting.extend(read)
    chosen = sorted(forward)
    return dict(zip(chosen, _kept_to_last_use(graph, chosen), strict=True))


def articulation_points(graph: Graph, *, phases: Collection[str] | None = None) -> tuple[int, ...]:
    """Return the nodes across which nothing else is carried.

    Node `k` is one when no tensor made before it is read after it: its outputs alone are enough to
    go on from there. Segmenting methods cut at them (Chen et al., 2016, section 4). With `phases`
    only nodes of these and what they read count; ``{"input", "forward"}`` gives the cut points of
    the network itself, which its backward pass would hide.
    """
    chosen = [k for k, node in enumerate(graph.nodes) if phases is None or node.phase in phases]
    position_of = {k: position for position, k in enumerate(chosen)}
    opens = [0] * (len(chosen) + 1)
    for i, k in enumerate(graph.node_of):
        users = [position_of[user] for user in graph.users_of[i] if user in position_of]
        if k in position_of and users and users[-1] > position_of[k] + 1:
            opens[position_of[k] + 1] += 1
            opens[users[-1]] -= 1
    points = []
    carried = 0
    for position, k in enumerate(chosen):
        carried += opens[position]
        if carried == 0:
            points.append(k)
    return tuple(points)
