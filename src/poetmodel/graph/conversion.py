"""Conversion of graphs to and from `networkx.DiGraph`, without loss.

The key of a node is its name. Its attributes are its keys in a graph file (``op``, ``phase``,
``inputs``, ``output_bytes`` or ``outputs``, ``flops``, ...) and ``index``, its position in
execution order. An edge points from the node that makes tensors to a node that reads them. Its
``tensors`` are their names: two nodes have one edge for all tensors between them. The digraph's own
attributes are those of the graph (``name``, ``batch_size``, ...).
"""

from __future__ import annotations

from numbers import Integral
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import GraphError, join_names, quote
from poetmodel.graph.io import FORMAT, VERSIONS
from poetmodel.graph.validation import cycle_faults

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    import networkx

    from poetmodel.graph.node import Node

_NODE_DEFAULTS: Final = {"op": "op", "phase": "forward"}
"""Values of node attributes that a user's digraph may omit."""


def to_networkx(document: Mapping[str, Any], nodes: Iterable[Node]) -> networkx.DiGraph[Any]:
    """Convert a graph to a `networkx.DiGraph`; `Graph.from_networkx` converts it back.

    `document` is the content of the graph's file with all defaults, and `nodes` are the graph's
    nodes. The nodes of the digraph are in execution order; their keys are their names.
    """
    import networkx as nx

    graph_attributes = {
        key: value for key, value in document.items() if key not in ("format", "version", "nodes")
    }
    digraph = nx.DiGraph(**graph_attributes)
    for index, item in enumerate(document["nodes"]):
        attributes = {key: value for key, value in item.items() if key != "name"}
        digraph.add_node(item["name"], index=index, **attributes)
    maker_of: dict[str, str] = {}
    for node in nodes:
        tensors_of_maker: dict[str, list[str]] = {}
        for name in dict.fromkeys(node.inputs):
            tensors_of_maker.setdefault(maker_of[name], []).append(name)
        for maker, tensors in tensors_of_maker.items():
            digraph.add_edge(maker, node.name, tensors=tuple(tensors))
        maker_of |= {tensor.name: node.name for tensor in node.outputs}
    return digraph


def digraph_to_dict(digraph: networkx.DiGraph[Any]) -> dict[str, Any]:
    """Convert a digraph to the content of a graph file, not validated, in topological order.

    Nodes need ``output_bytes`` or ``outputs``; the other keys of a graph file are optional
    attributes. A node without ``inputs`` reads the ``tensors`` of its edges in the order of their
    addition, or else every output of the predecessor. Ties follow ``index`` if every node has an
    integer there, else the order of addition. Raises `GraphError` for a cycle or contradictory
    edges.
    """
    import networkx as nx

    if not isinstance(digraph, nx.DiGraph) or digraph.is_multigraph():
        raise GraphError(f"expected a networkx.DiGraph, got a {type(digraph).__name__}")
    faults = [f"digraph: {fault}" for fault in cycle_faults(digraph, str)]
    if faults:
        raise GraphError(faults)
    position_of = {key: position for position, key in enumerate(digraph)}
    indices = nx.get_node_attributes(digraph, "index")
    if len(indices) == len(position_of) and all(map(_is_integer, indices.values())):
        position_of = indices
    items: dict[Hashable, dict[str, Any]] = {}
    for key in nx.lexicographical_topological_sort(digraph, key=position_of.__getitem__):
        items[key] = item = {
            "name": str(key),
            **_NODE_DEFAULTS,
            **_to_json_value(dict(digraph.nodes[key])),
        }
        item.pop("index", None)
        incoming_edges = [(maker, digraph.edges[maker, key]) for maker in digraph.predecessors(key)]
        faults += [
            f"digraph: edge ({quote(maker)}, {quote(key)}).tensors: expected a list of tensor "
            f"names, got {quote(edge['tensors'])}"
            for maker, edge in incoming_edges
            if not isinstance(edge.get("tensors", ()), list | tuple)
        ]
        edge_inputs = [
            name
            for maker, edge in incoming_edges
            if isinstance(edge.get("tensors", ()), list | tuple)
            for name in _to_json_value(edge.get("tensors", _output_names(items[maker])))
        ]
        inputs = item.setdefault("inputs", edge_inputs)
        input_names = set(map(str, inputs if isinstance(inputs, list) else edge_inputs))
        differing_names = sorted(input_names.symmetric_difference(map(str, edge_inputs)))
        if differing_names:
            faults.append(
                f"digraph: node {quote(item['name'])}: inputs and edges differ in "
                f"{join_names(differing_names)}; list the same tensors in both"
            )
    if faults:
        raise GraphError(faults)
    attributes = {
        key: value
        for key, value in digraph.graph.items()
        if not (isinstance(value, str) and not value)
    }
    format_keys = {"format": FORMAT, "version": VERSIONS[-1], "name": "graph"}
    return {**format_keys, **_to_json_value(attributes), "nodes": list(items.values())}


def _to_json_value(value: Any) -> Any:
    """Convert tuples to lists and NumPy integers to int, recursively, as JSON requires."""
    if isinstance(value, list | tuple):
        return [_to_json_value(item) for item in value]
    if isinstance(value, dict):
        return {key: _to_json_value(item) for key, item in value.items()}
    return int(value) if _is_integer(value) else value


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _output_names(item: Mapping[str, Any]) -> list[object]:
    """Return the names of the outputs in a node's file entry, None for a missing name."""
    outputs = item.get("outputs")
    if not isinstance(outputs, list):
        return [item["name"]]
    return [output.get("name") for output in outputs if isinstance(output, dict)]
