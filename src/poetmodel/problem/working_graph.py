"""The working graph: a graph without state, for all decisions except homes of state."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from poetmodel.graph import Graph, Node, Phase

if TYPE_CHECKING:
    from collections.abc import Collection


def make_working_graph(
    graph: Graph, *, read_in_place: bool, resident: Collection[int] = ()
) -> Graph:
    """Return a graph without state, with the same indices of nodes and tensors.

    A state tensor becomes a sample on storage, its node the first read. Replacements, which use its
    memory, have 0 bytes; so does state that is read in place (memory-mapped storage) or `resident`.
    Callers count the RAM of resident state, and the transfers that it saves, separately.
    """
    if not graph.state_tensors:
        return graph
    omitted_names = {
        graph.tensors[i].name for i in (graph.state_tensors if read_in_place else resident)
    }
    values = {field.name: getattr(graph, field.name) for field in fields(graph)}
    return Graph.from_valid(
        **values | {"nodes": tuple(_working_node(node, omitted_names) for node in graph.nodes)}
    )


def _working_node(node: Node, omitted_names: set[str]) -> Node:
    """Return a node of the working graph: a state node becomes an input, a sample on storage.

    Replacements and `omitted_names` have 0 bytes; no node reads `omitted_names`.
    """
    outputs = tuple(
        replace(output, replaces=None, bytes=0)
        if output.replaces is not None or output.name in omitted_names
        else output
        for output in node.outputs
    )
    if node.is_state:
        return replace(node, phase=Phase.INPUT, on_aux=True, outputs=outputs)
    inputs = tuple(name for name in node.inputs if name not in omitted_names)
    return replace(node, inputs=inputs, outputs=outputs)
