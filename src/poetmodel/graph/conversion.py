"""Graphs to and from `networkx.DiGraph`, without loss.

In the digraph a node is keyed by its name and carries, as attributes, the keys it has in a graph
file (``op``, ``phase``, ``inputs``, ``output_bytes`` or ``outputs``, ``flops``, ...) and ``index``,
its place in the execution order. An edge leads from the node that makes a tensor to a node that
reads it and carries ``tensors``, their names: two nodes have one edge, however many tensors they
share. The graph's own attributes (``name``, ``batch_size``, ...) are those of the digraph.
"""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import GraphError, listed, shown
from poetmodel.graph.io import FORMAT, VERSIONS
from poetmodel.graph.validation import cycle_fault

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    import networkx

    from poetmodel.graph.node import Node

_PLAIN_NODE: Final = {"op": "op", "phase": "forward"}
"""Attributes that a user's digraph may leave out."""


def to_networkx(document: Mapping[str, Any], nodes: Iterable[Node]) -> networkx.DiGraph[Any]:
    """Return a graph as a `networkx.DiGraph`; `Graph.from_networkx` returns the same graph.

    `document` is the content of its file, with all defaults. The nodes of the digraph are keyed by
    name and in execution order.

    Examples
    --------
    >>> from poetmodel.graph import Graph, operation
    >>> pair = Graph(name="pair", nodes=(operation("a", output_bytes=8),
    ...                                  operation("b", output_bytes=4, inputs=("a",))))
    >>> pair.to_networkx().edges["a", "b"]["tensors"]
    ('a',)
    """
    import networkx as nx

    attributes = {k: v for k, v in document.items() if k not in ("format", "version", "nodes")}
    digraph = nx.DiGraph(**attributes)
    for index, item in enumerate(document["nodes"]):
        attributes = {key: value for key, value in item.items() if key != "name"}
        digraph.add_node(item["name"], index=index, **attributes)
    maker_of: dict[str, str] = {}
    for node in nodes:
        shared: dict[str, list[str]] = {}
        for name in dict.fromkeys(node.inputs):
            shared.setdefault(maker_of[name], []).append(name)
        for maker, tensors in shared.items():
            digraph.add_edge(maker, node.name, tensors=tuple(tensors))
        maker_of |= {tensor.name: node.name for tensor in node.outputs}
    return digraph


def digraph_to_dict(digraph: networkx.DiGraph[Any]) -> dict[str, Any]:
    """Return a `networkx.DiGraph`, of `to_networkx` or of your own, as the content of a graph file.

    Parameters
    ----------
    digraph : networkx.DiGraph
        Each node needs ``output_bytes`` or ``outputs``; all other keys of a graph file are optional
        attributes. A node's name is the text of its key. Without ``inputs`` a node reads what its
        predecessors make, in the order in which their edges were added: the ``tensors`` of the
        edge, or else all that the predecessor makes.

    Returns
    -------
    dict
        Nodes in the topological order that keeps to ``index``, where every node has one, or else to
        the order in which the nodes were added, as far as it can.

    Raises
    ------
    GraphError
        If the digraph has a cycle (named), has attributes that a graph cannot hold, says two
        things about the inputs of a node: with every fault.
    """
    import networkx as nx

    if not isinstance(digraph, nx.DiGraph) or digraph.is_multigraph():
        raise GraphError(f"expected a networkx.DiGraph, got a {type(digraph).__name__}")
    faults = [f"digraph: {fault}" for fault in cycle_fault(digraph, str)]
    if faults:
        raise GraphError(faults)
    order = {key: position for position, key in enumerate(digraph)}
    given = nx.get_node_attributes(digraph, "index")
    if len(given) == len(order) and all(map(_is_integer, given.values())):
        order = given
    items: dict[Hashable, dict[str, Any]] = {}
    for key in nx.lexicographical_topological_sort(digraph, key=order.__getitem__):
        items[key] = item = {"name": str(key), **_PLAIN_NODE, **_plain(dict(digraph.nodes[key]))}
        item.pop("index", None)
        edges = ((maker, digraph.edges[maker, key]) for maker in digraph.predecessors(key))
        read = [
            name
            for maker, edge in edges
            for name in _plain(edge.get("tensors", _output_names(items[maker])))
        ]
        inputs = item.setdefault("inputs", read)
        said = set(map(str, inputs if isinstance(inputs, list) else read))
        differing = sorted(said.symmetric_difference(map(str, read)))
        if differing:
            faults.append(
                f"digraph: node {shown(item['name'])}: inputs and edges differ in "
                f"{listed(differing)}; say the same in both"
            )
    if faults:
        raise GraphError(faults)
    own = {key: value for key, value in digraph.graph.items() if value != ""}
    kind = {"format": FORMAT, "version": VERSIONS[-1], "name": "graph"}
    return {**kind, **_plain(own), "nodes": list(items.values())}


def _plain(value: Any) -> Any:
    """Return a value as JSON would hold it: lists for tuples, int for NumPy's integers."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return int(value) if _is_integer(value) else value


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _output_names(item: Mapping[str, Any]) -> list[object]:
    """Return the names of a node's tensors; faults in them are found when the graph is made."""
    outputs = item.get("outputs")
    if not isinstance(outputs, list):
        return [item["name"]]
    return [output.get("name") for output in outputs if isinstance(output, dict)]
