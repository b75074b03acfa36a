"""Graphs to and from `networkx.DiGraph`, without loss.

In the digraph a node is keyed by its name and carries, as attributes, the keys it has in a graph
file (``op``, ``phase``, ``inputs``, ``output_bytes`` or ``outputs``, ``flops``, ...) and ``index``,
its place in the execution order. An edge leads from the node that makes a tensor to a node that
reads it and carries ``tensors``, their names: two nodes have one edge, however many tensors they
share. The graph's own attributes (``name``, ``batch_size``, ...) are those of the digraph.
"""

from __future__ import annotations

from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import GraphError, shown
from poetmodel.graph.io import FORMAT, VERSIONS, graph_from_dict, graph_to_dict
from poetmodel.graph.validation import cycle_fault

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    import networkx

    from poetmodel.graph.structure import Graph

_PLAIN_NODE: Final = {"op": "op", "phase": "forward"}
"""Attributes that a user's digraph may leave out."""


def to_networkx(graph: Graph) -> networkx.DiGraph[Any]:
    """Return the graph as a `networkx.DiGraph`; `from_networkx` gives the same graph back.

    Its nodes are keyed by name and come in execution order.

    Examples
    --------
    >>> from poetmodel.graph import Graph, operation
    >>> pair = Graph(name="pair", nodes=(operation("a", output_bytes=8),
    ...                                  operation("b", output_bytes=4, inputs=("a",))))
    >>> to_networkx(pair).edges["a", "b"]["tensors"]
    ('a',)
    """
    import networkx as nx

    document = graph_to_dict(graph, defaults=True)
    attributes = {k: v for k, v in document.items() if k not in ("format", "version", "nodes")}
    digraph = nx.DiGraph(**attributes)
    for index, item in enumerate(document["nodes"]):
        digraph.add_node(item.pop("name"), index=index, **item)
    for k, node in enumerate(graph.nodes):
        shared: dict[int, list[str]] = {}
        for i in graph.inputs_of[k]:
            shared.setdefault(graph.node_of[i], []).append(graph.tensors[i].name)
        for maker, tensors in shared.items():
            digraph.add_edge(graph.nodes[maker].name, node.name, tensors=tuple(tensors))
    return digraph


def from_networkx(digraph: networkx.DiGraph[Any]) -> Graph:
    """Make a graph from a `networkx.DiGraph`, of `to_networkx` or of your own.

    Parameters
    ----------
    digraph : networkx.DiGraph
        Each node needs ``output_bytes`` or ``outputs``; all other keys of a graph file are optional
        attributes. A node's name is the text of its key. Without ``inputs`` a node reads what its
        predecessors make, in the order in which their edges were added: the ``tensors`` of the
        edge, which need not be given where the predecessor has one output.

    Returns
    -------
    Graph
        Nodes in the order of ``index`` where every node has one, else in the topological order that
        keeps to the order in which the nodes were added as far as it can.

    Raises
    ------
    GraphError
        If the digraph has a cycle (named), has attributes that a graph cannot hold, says two
        things about the inputs of a node, or gives no valid graph: with every fault.
    """
    import networkx as nx

    if not isinstance(digraph, nx.DiGraph) or digraph.is_multigraph():
        raise GraphError(f"expected a networkx.DiGraph, got a {type(digraph).__name__}")
    keys = _execution_order(digraph)
    names = {key: str(key) for key in keys}
    attributes = {key: _plain(dict(digraph.nodes[key])) for key in keys}
    outputs = {key: _output_names(names[key], attributes[key]) for key in keys}
    faults: list[str] = []
    nodes = []
    for key in keys:
        item = {"name": names[key], **_PLAIN_NODE, **attributes[key]}
        item.pop("index", None)
        read, edge_faults = _edge_tensors(digraph, key, outputs)
        faults += edge_faults
        if "inputs" not in item:
            item["inputs"] = read
        elif not edge_faults and isinstance(item["inputs"], list):
            faults += _disagreement(names[key], item["inputs"], read)
        nodes.append(item)
    if faults:
        raise GraphError(faults)
    own = {key: value for key, value in digraph.graph.items() if value != ""}
    kind = {"format": FORMAT, "version": VERSIONS[-1], "name": "graph"}
    return graph_from_dict({**kind, **_plain(own), "nodes": nodes}, source="digraph")


def _execution_order(digraph: networkx.DiGraph[Any]) -> list[Hashable]:
    import networkx as nx

    given = {key: index for key, index in digraph.nodes(data="index") if index is not None}
    if given and len(given) < len(digraph):
        missing = next(key for key in digraph if key not in given)
        raise GraphError(
            f"digraph: node {shown(missing)} has no index, but others do; give all or none"
        )
    cycles = [f"digraph: {fault}" for fault in cycle_fault(digraph, str)]
    if cycles:
        raise GraphError(cycles)
    if not given:
        added = {key: position for position, key in enumerate(digraph)}
        return list(nx.lexicographical_topological_sort(digraph, key=added.__getitem__))
    wrong = [key for key, index in given.items() if not _is_integer(index)]
    if wrong:
        index = shown(given[wrong[0]])
        raise GraphError(
            f"digraph: node {shown(wrong[0])}: index: expected an integer, got {index}"
        )
    order = sorted(given, key=given.__getitem__)
    for first, second in pairwise(order):
        if given[first] == given[second]:
            raise GraphError(
                f"digraph: nodes {shown(first)} and {shown(second)} have the same index "
                f"{given[first]}"
            )
    return order


def _plain(value: Any) -> Any:
    """Return a value as JSON would hold it: lists for tuples, int for NumPy's integers."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return int(value) if _is_integer(value) else value


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _output_names(name: str, attributes: Mapping[str, Any]) -> list[object]:
    """Return the names of a node's tensors; faults in them are found when the graph is made."""
    outputs = attributes.get("outputs")
    if not isinstance(outputs, list):
        return [name]
    return [output.get("name") for output in outputs if isinstance(output, dict)]


def _edge_tensors(
    digraph: networkx.DiGraph[Any], key: Hashable, outputs: Mapping[Hashable, list[object]]
) -> tuple[list[object], list[str]]:
    """Return the inputs of a node by its edges, and every fault of them."""
    read: list[object] = []
    faults: list[str] = []
    for maker in digraph.predecessors(key):
        where = f"digraph: edge {shown(maker)} -> {shown(key)}"
        edge = dict(digraph.edges[maker, key])
        tensors = edge.pop("tensors", None)
        if edge:
            faults.append(f"{where}: unknown attribute {shown(next(iter(edge)))}; use tensors")
        if tensors is None:
            tensors = outputs[maker]
            if len(tensors) != 1:
                faults.append(
                    f"{where}: {shown(maker)} has {len(tensors)} outputs; name those that are "
                    "read in the attribute tensors"
                )
        elif not isinstance(tensors, list | tuple):
            faults.append(f"{where}: tensors: expected a list of names, got {shown(tensors)}")
            continue
        strangers = [name for name in tensors if name not in outputs[maker]]
        if strangers:
            faults.append(f"{where}: tensors: {shown(maker)} does not make {shown(strangers[0])}")
        read += tensors
    return read, faults


def _disagreement(name: str, inputs: list[object], read: list[object]) -> Iterator[str]:
    """Yield the first input of a node that no edge brings, and the first that it lacks."""
    where = f"digraph: node {shown(name)}: inputs"
    for item in [item for item in inputs if item not in read][:1]:
        yield f"{where} name {shown(item)}, but no edge brings it; add the edge"
    for item in [item for item in read if item not in inputs][:1]:
        yield f"{where} lack {shown(item)}, which an edge brings; add it to them"
