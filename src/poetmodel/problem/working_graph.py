"""The graph as schedules act on it, once the homes of state are a decision of their own."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from poetmodel.graph import Graph, Node, Phase

if TYPE_CHECKING:
    from collections.abc import Collection


def working_graph(graph: Graph, *, read_in_place: bool, resident: Collection[int] = ()) -> Graph:
    """Return a graph without state, with the same positions of nodes and tensors.

    Parameters
    ----------
    graph : Graph
        A graph that may have state.
    read_in_place : bool
        Whether the core reads state where it lies on storage (memory-mapped storage).
    resident : collection of int
        State that is in RAM throughout.

    Notes
    -----
    State is like a sample that lies on storage: the step of its node is its first read. What
    replaces it takes its room, and no bytes of its own. State that is read in place or resident
    takes no RAM, and nothing waits for it. What resident state takes, and what it saves, is counted
    apart.
    """
    if not graph.state_tensors:
        return graph
    absent = {graph.tensors[i].name for i in (graph.state_tensors if read_in_place else resident)}
    values = {field.name: getattr(graph, field.name) for field in fields(graph)}
    return Graph.from_valid(**values | {"nodes": tuple(_act(node, absent) for node in graph.nodes)})


def _act(node: Node, absent: set[str]) -> Node:
    outputs = tuple(
        replace(output, replaces=None, bytes=0)
        if output.replaces is not None or output.name in absent
        else output
        for output in node.outputs
    )
    if node.is_state:
        return replace(node, phase=Phase.INPUT, on_aux=True, outputs=outputs)
    inputs = tuple(name for name in node.inputs if name not in absent)
    return replace(node, inputs=inputs, outputs=outputs)
