"""What must hold of every training graph, and how a fault is put into words."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from poetmodel.errors import shown
from poetmodel.graph.nodes import MAX_FLOPS, RESIDENT_KINDS, Node, Phase, Tensor
from poetmodel.units import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from poetmodel.graph.structure import Graph


def graph_faults(graph: Graph) -> Iterator[str]:
    """Yield every broken invariant of a graph, in words."""
    yield from _name_fault("name", graph.name)
    if not graph.nodes:
        yield "nodes: expected at least 1 node, got 0"
    if not _is_count(graph.batch_size, 1, MAX_BYTES):
        yield f"batch_size: expected an integer from 1 to 2^53, got {shown(graph.batch_size)}"
    yield from _name_fault("dtype", graph.dtype)
    for kind, size in graph.resident_bytes.items():
        if kind not in RESIDENT_KINDS:
            known = ", ".join(RESIDENT_KINDS)
            yield f"resident_bytes: unknown key {shown(kind)}; accepted are {known}"
        yield from _size_fault(f"resident_bytes.{kind}", size)
    for key in ("parameters", "forward_macs"):
        value = getattr(graph, key)
        if value is not None:
            yield from _count_fault(key, value)
    strangers = [k for k, node in enumerate(graph.nodes) if not _is_node(node)]
    if strangers:
        yield f"nodes[{strangers[0]}]: expected a Node, got {shown(graph.nodes[strangers[0]])}"
        return
    for k, node in enumerate(graph.nodes):
        yield from node_faults(node, place(k, node.name))
    yield from structure_faults(graph.nodes)


def place(k: int, name: object) -> str:
    """Return how messages call a node: ``nodes[3] ('conv1')``."""
    return f"nodes[{k}] ({shown(name)})" if isinstance(name, str) else f"nodes[{k}]"


def node_faults(node: Node, where: str) -> Iterator[str]:
    """Yield every fault that can be seen in one node alone; `where` starts each."""
    for key in ("name", "op"):
        yield from _name_fault(f"{where}.{key}", getattr(node, key))
    if node.phase not in tuple(Phase):
        yield f"{where}.phase: expected one of {', '.join(Phase)}, got {shown(node.phase)}"
    if not _is_tuple_of(str, node.inputs):
        yield f"{where}.inputs: expected a list of tensor names, got {_shown_items(node.inputs)}"
    yield from _output_faults(node, where)
    for key in ("workspace_bytes", "bytes_moved"):
        value = getattr(node, key)
        if value is not None or key == "workspace_bytes":
            yield from _size_fault(f"{where}.{key}", value)
    yield from _count_fault(f"{where}.flops", node.flops)
    for key in ("recomputable", "on_aux"):
        value = getattr(node, key)
        if not isinstance(value, bool):
            yield f"{where}.{key}: expected true or false, got {shown(value)}"


def _output_faults(node: Node, where: str) -> Iterator[str]:
    if not _is_tuple_of(object, node.outputs):
        yield f"{where}.outputs: expected a list of tensors, got {shown(node.outputs)}"
    elif not _is_tuple_of(Tensor, node.outputs):
        for j, output in enumerate(node.outputs):
            if not _is_tuple_of(Tensor, (output,)):
                yield f"{where}.outputs[{j}]: expected a tensor, got {shown(output)}"
    elif len(node.outputs) == 1 and node.outputs[0].name == node.name:
        yield from _size_fault(f"{where}.output_bytes", node.outputs[0].bytes)
    else:
        for j, tensor in enumerate(node.outputs):
            yield from _name_fault(f"{where}.outputs[{j}].name", tensor.name)
            yield from _size_fault(f"{where}.outputs[{j}].bytes", tensor.bytes)


def structure_faults(nodes: Sequence[Node]) -> Iterator[str]:
    """Yield names used twice, inputs that are unknown or come later, and a cycle."""
    yield from _repeated_names(nodes)
    maker: dict[str, int] = {}
    for k, node in enumerate(nodes):
        for name in _output_names(node) or ():
            maker.setdefault(name, k)
    # Only when every tensor has a usable name is it known that no node makes another.
    complete = all(_output_names(node) is not None for node in nodes)
    later = False
    for k, node in enumerate(nodes):
        where = f"{place(k, node.name)}.inputs"
        for name in _input_names(node):
            if name not in maker:
                if complete:
                    yield f"{where}: no node makes a tensor {shown(name)}"
            elif maker[name] >= k:
                later = True
                yield (
                    f"{where}: {shown(name)} is made by nodes[{maker[name]}], which does not "
                    "come before it; nodes must be in execution order"
                )
    if later:
        yield from _cycle_fault(nodes, maker)


def _repeated_names(nodes: Sequence[Node]) -> Iterator[str]:
    users: dict[object, int] = {}
    maker: dict[str, int] = {}
    for k, node in enumerate(nodes):
        where = place(k, node.name)
        again = is_text(node.name) and node.name in users
        if is_text(node.name):
            if again:
                yield f"{where}: its name is already used by nodes[{users[node.name]}]"
            users.setdefault(node.name, k)
        for name in _output_names(node) or ():
            if name in maker and not (again and name == node.name):
                yield (
                    f"{where}: its output tensor {shown(name)} is already an output of "
                    f"nodes[{maker[name]}]"
                )
            maker.setdefault(name, k)


def _output_names(node: Node) -> tuple[str, ...] | None:
    """Return the names of a node's tensors, or None where one is not usable."""
    if not _is_tuple_of(Tensor, node.outputs):
        return None
    names = tuple(tensor.name for tensor in node.outputs)
    return names if _is_tuple_of(str, names) else None


def _input_names(node: Node) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node.inputs)) if _is_tuple_of(str, node.inputs) else ()


def _cycle_fault(nodes: Sequence[Node], maker: Mapping[str, int]) -> Iterator[str]:
    import networkx as nx

    edges = nx.DiGraph()
    for k, node in enumerate(nodes):
        edges.add_edges_from((maker[name], k) for name in _input_names(node) if name in maker)
    try:
        cycle = nx.find_cycle(edges)
    except nx.NetworkXNoCycle:
        return
    path = " -> ".join(str(nodes[k].name) for k in (*(k for k, _ in cycle), cycle[0][0]))
    yield f"nodes: the graph has a cycle: {path}"


def _name_fault(where: str, value: object) -> Iterator[str]:
    if not is_text(value):
        yield f"{where}: expected a non-empty string, got {shown(value)}"
        return
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        yield f"{where}: expected characters that UTF-8 can hold, got {shown(value)}"


def _size_fault(where: str, value: object) -> Iterator[str]:
    if not _is_count(value, 0, MAX_BYTES):
        yield f"{where}: expected a whole number of bytes from 0 to 2^53, got {shown(value)}"


def _count_fault(where: str, value: object) -> Iterator[str]:
    if not _is_count(value, 0, MAX_FLOPS):
        yield f"{where}: expected an integer from 0 to 10^18, got {shown(value)}"


def is_text(value: object) -> TypeGuard[str]:
    """Return whether something is a string and not empty."""
    return isinstance(value, str) and bool(value)


def _is_count(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_node(value: object) -> bool:
    return isinstance(value, Node)


def _is_tuple_of(kind: type, value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, kind) for item in value)


def _shown_items(value: object) -> str:
    if not isinstance(value, tuple):
        return shown(value)
    return f"[{', '.join(shown(item) for item in value)}]"
