"""The network view: the blocks of a model from top to bottom, with what is decided on each."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

from poetmodel.graph import Graph, Node, Phase
from poetmodel.report.presenter import escaped
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


Path = tuple[str, ...]
"""The modules that a node is in, from the outside."""

BACK: Final = (Phase.BACKWARD, Phase.UPDATE)
"""The phases that stand on the backward side of their module."""
MOST: Final = 0.5
"""A module with more than this share of the nodes is no block: what is in it are blocks."""


def network_chart(graph: Graph, choices: Sequence[str]) -> dict[str, Any]:
    """Return the blocks of a model and their nodes, in order from inputs to loss.

    Forward and backward nodes of a module stand side by side. The order, and how far to the side
    each stands, is a layout in layers of the forward nodes: those of a block among each other, and
    the blocks.

    Parameters
    ----------
    graph : Graph
        Its nodes have the module in their names: ``layer1.0.conv1``, ``encoder.3/add``.
    choices : sequence of str
        The decision on each tensor, as a report calls it.

    Returns
    -------
    dict
        ``blocks``: each with ``name``, ``x`` (-1 to 1), ``sides`` (see `_side`, forward and
        backward) and ``rows``: name, x, forward nodes, backward nodes and sides of each row.
        ``outputs`` and ``reads``: tensors by node. ``choices`` and ``sizes``: of each tensor.
        ``most_bytes``: of one side of a block.
    """
    paths = [path_of(node) for node in graph.nodes]
    names = blocks_of(paths)
    members: defaultdict[str, list[int]] = defaultdict(list)
    for k, name in enumerate(names):
        members[name].append(k)
    blocks = list(members)
    number = {name: b for b, name in enumerate(blocks)}
    links = list(_links(graph))
    spots = arranged(range(len(blocks)), ((number[names[u]], number[names[v]]) for u, v in links))
    rows: list[dict[str, Any]] = []
    for b, x in spots.items():
        nodes = members[blocks[b]]
        inside = set(nodes)
        forward = [k for k in nodes if graph.nodes[k].phase not in BACK]
        order = arranged(forward, ((u, v) for u, v in links if u in inside and v in inside))
        backward = [k for k in nodes if graph.nodes[k].phase in BACK]
        rows.append(
            {
                "name": escaped(blocks[b]),
                "x": round(x, 3),
                "sides": [_side(graph, choices, side) for side in (forward, backward)],
                "rows": list(_rows(graph, choices, paths, order, backward, blocks[b])),
            }
        )
    return {
        "blocks": rows,
        "outputs": [list(outputs) for outputs in graph.outputs_of],
        "reads": [list(inputs) for inputs in graph.inputs_of],
        "choices": list(choices),
        "sizes": [format_bytes(size) for size in graph.tensor_bytes],
        "most_bytes": max((side["bytes"] for block in rows for side in block["sides"]), default=0),
    }


# -- which nodes are a block ------------------------------------------------------------------


def path_of(node: Node) -> Path:
    """Return the modules of a node, without what says that it is a gradient.

    ``fc1.grad_weight`` and ``grad.fc1`` are of ``fc1``, ``encoder.3/add#2`` of ``encoder.3``.
    """
    module, slash, _ = node.name.rpartition("/")
    parts = re.sub(r"#\d+$", "", module if slash else node.name).split(".")
    if node.phase in BACK and not slash:
        last = re.sub(r"_backward(_data)?$", "", parts.pop())
        parts = [part for part in (*parts, last) if not part.startswith("grad")] or [last]
    return tuple(parts)


def blocks_of(paths: Sequence[Path]) -> list[str]:
    """Return the block of each path: the outermost module that is not made of blocks.

    Modules with numbers are blocks (``block0``, ``layer1.0``, ``features.3``), and what holds them
    is not; neither is a module with most of the nodes.
    """
    made_of_blocks: set[Path] = set()
    for path in paths:
        first = next((i for i, part in enumerate(path) if part.isdigit()), 0)
        made_of_blocks.update(path[:i] for i in range(1, first + 1))
    while True:
        blocks = [_outermost(path, made_of_blocks) for path in paths]
        (most, count), *_ = Counter(blocks).most_common(1) or [((), 0)]
        children = {path[len(most)] for path in paths if path[: len(most)] == most != path}
        if count <= MOST * len(paths) or len(children) < 2:  # noqa: PLR2004
            return [".".join(path) for path in blocks]
        made_of_blocks.add(most)


def _outermost(path: Path, made_of_blocks: set[Path]) -> Path:
    prefixes = (path[:i] for i in range(1, len(path)))
    return next((prefix for prefix in prefixes if prefix not in made_of_blocks), path)


# -- where they stand -------------------------------------------------------------------------


def arranged(names: Iterable[int], links: Iterable[tuple[int, int]]) -> dict[int, float]:
    """Return things in an order from sources to sinks, each with its place to the side, -1 to 1.

    They are in layers by their distance to the sinks. Those on a cycle share a layer.
    """
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(names)
    graph.add_edges_from((u, v) for u, v in links if u != v)
    if not graph:
        return {}
    parts = nx.condensation(graph)
    for depth, layer in enumerate(nx.topological_generations(parts.reverse(copy=False))):
        for part in layer:
            for k in parts.nodes[part]["members"]:
                graph.nodes[k]["layer"] = -depth
    spots = nx.multipartite_layout(graph, subset_key="layer", align="horizontal")
    widest = max(abs(x) for x, _ in spots.values()) or 1.0
    order = sorted(graph, key=lambda k: (graph.nodes[k]["layer"], k))
    return {k: float(spots[k][0] / widest) for k in order}


def _links(graph: Graph) -> Iterator[tuple[int, int]]:
    """Yield pairs of forward nodes of which the second reads what the first makes."""
    forward = {k for k, node in enumerate(graph.nodes) if node.phase not in BACK}
    for k in sorted(forward):
        for i in graph.inputs_of[k]:
            if graph.node_of[i] in forward:
                yield graph.node_of[i], k


# -- what is shown of them --------------------------------------------------------------------


def _rows(
    graph: Graph,
    choices: Sequence[str],
    paths: Sequence[Path],
    order: Mapping[int, float],
    backward: Sequence[int],
    block: str,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each forward node of a block, and for backward nodes that belong to none."""
    pairs: defaultdict[int | None, list[int]] = defaultdict(list)
    for k in backward:
        pairs[_forward_of(graph, paths, order, k)].append(k)
    alone = [(k, None, [k]) for k in pairs[None]]
    for name, front, back in [*((k, k, pairs[k]) for k in order), *alone]:
        yield {
            "name": escaped(_within(graph.nodes[name].name, block)),
            "x": None if front is None else round(order[front], 3),
            "nodes": [[] if front is None else [front], back],
            "sides": [
                _side(graph, choices, side) for side in ([] if front is None else [front], back)
            ],
        }


def _forward_of(graph: Graph, paths: Sequence[Path], forward: Iterable[int], k: int) -> int | None:
    """Return the forward node of the same module that a backward node belongs to, if one does."""
    near = [j for j in forward if paths[j] == paths[k]]
    operator = _operator(graph.nodes[k].name)
    same = [j for j in near if operator and operator in _operator(graph.nodes[j].name)]
    for candidates in (near, same):
        if len(candidates) == 1:
            return candidates[0]
    return None


def _operator(name: str) -> str:
    """Return the operator in the name of a traced node, without what makes it a backward one."""
    _, slash, operator = name.rpartition("/")
    return re.sub(r"#\d+$", "", operator).split("_backward")[0] if slash else ""


def _within(name: str, block: str) -> str:
    rest = name.removeprefix(block).lstrip("./")
    return rest if name.startswith(block) and rest else name


def _side(graph: Graph, choices: Sequence[str], nodes: Iterable[int]) -> dict[str, Any]:
    """Return the bytes that nodes make, in words too, and how much of them by decision."""
    parts: Counter[str] = Counter()
    for k in nodes:
        for i in graph.outputs_of[k]:
            parts[choices[i]] += graph.tensor_bytes[i]
    total = parts.total()
    words = ", ".join(f"{choice} {format_bytes(n)}" for choice, n in parts.most_common() if n)
    return {
        "bytes": total,
        "text": format_bytes(total) if total else "",
        "parts": [[choice, size] for choice, size in parts.items() if size],
        "words": words,
    }
