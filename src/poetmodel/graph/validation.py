"""What must hold of every training graph, in a file or made in Python, and its faults in words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poetmodel.data import place, unknown_key
from poetmodel.errors import shown
from poetmodel.graph.structure import Phase
from poetmodel.units import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import networkx


class _Rule(NamedTuple):
    """What the value of a key must be."""

    accepts: Callable[[Any], bool]
    expected: str


def _whole(least: int, most: int, expected: str) -> _Rule:
    # A truth value is an int, but its type is not int.
    return _Rule(
        lambda value: (
            isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
        ),
        expected,
    )


_NAME: Final = _Rule(lambda value: isinstance(value, str) and value != "", "a non-empty string")
_SIZE: Final = _whole(0, MAX_BYTES, "a whole number of bytes from 0 to 2^53")
_COUNT: Final = _whole(0, 10**18, "an integer from 0 to 10^18")
_FLAG: Final = _Rule(lambda value: isinstance(value, bool), "true or false")
_OBJECT: Final = _Rule(lambda value: isinstance(value, dict), "an object")
_PHASE: Final = _Rule(
    lambda value: isinstance(value, str) and value in frozenset(Phase), f"one of {', '.join(Phase)}"
)
_NAMES: Final = _Rule(
    lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "a list of tensor names",
)

_TENSOR_KEYS: Final = {"name": _NAME, "bytes": _SIZE}
_NODE_KEYS: Final = {
    "name": _NAME,
    "op": _NAME,
    "phase": _PHASE,
    "inputs": _NAMES,
    "output_bytes": _SIZE,
    "outputs": _Rule(lambda value: isinstance(value, list), "a list of tensors"),
    "workspace_bytes": _SIZE,
    "flops": _COUNT,
    "recomputable": _FLAG,
    "on_aux": _FLAG,
    "bytes_moved": _SIZE,
}
_RESIDENT_KEYS: Final = dict.fromkeys(("parameters", "gradients", "optimizer"), _SIZE)
_GRAPH_KEYS: Final = {
    "format": _NAME,
    "version": _whole(1, 1, "1"),
    "name": _NAME,
    "batch_size": _whole(1, MAX_BYTES, "an integer from 1 to 2^53"),
    "dtype": _NAME,
    "resident_bytes": _OBJECT,
    "parameters": _COUNT,
    "forward_macs": _COUNT,
    "nodes": _Rule(lambda value: isinstance(value, list), "a list"),
}
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
"""The characters that UTF-8 cannot hold."""
_REQUIRED: Final = frozenset({"name", "bytes", "op", "phase", "inputs", "nodes"})


def graph_faults(document: Mapping[str, Any]) -> list[str]:
    """Return every fault of a graph, given as a file holds it."""
    faults: list[str] = []

    def check(item: object, rules: Mapping[str, _Rule], *path: str | int) -> None:
        for key_path, words in _key_faults(item, rules):
            faults.append(f"{place((*path, *key_path), document)}: {words}")

    check(document, _GRAPH_KEYS)
    if isinstance(document.get("resident_bytes"), dict):
        check(document["resident_bytes"], _RESIDENT_KEYS, "resident_bytes")
    nodes = document.get("nodes")
    if not isinstance(nodes, list):
        return faults
    for k, node in enumerate(nodes):
        check(node, _NODE_KEYS, "nodes", k)
        outputs = node.get("outputs") if isinstance(node, dict) else None
        for j, output in enumerate(outputs if isinstance(outputs, list) else ()):
            check(output, _TENSOR_KEYS, "nodes", k, "outputs", j)
    return [*faults, *_structure_faults(nodes)]


def _key_faults(item: object, rules: Mapping[str, _Rule]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield unknown keys, missing keys and wrong values of one object, each with its key."""
    if not isinstance(item, dict):
        yield (), f"expected an object, got {shown(item)}"
        return
    yield from (((key,), unknown_key(key, rules)) for key in item if key not in rules)
    for key, rule in rules.items():
        if key not in item and key not in _REQUIRED:
            continue
        value = item.get(key)
        if not rule.accepts(value):
            got = shown(value)
            if rule is _NAMES and isinstance(value, list):
                got = f"[{', '.join(map(shown, value))}]"
            yield (key,), f"expected {rule.expected}, got {got}"
        elif rule is _NAME and _SURROGATE.search(str(value)):
            yield (key,), f"expected characters that UTF-8 can hold, got {shown(value)}"


def _structure_faults(nodes: Sequence[Any]) -> Iterator[str]:
    """Yield ambiguous outputs, names used twice, inputs that are unknown or come later, a cycle."""
    if not nodes:
        yield "nodes: expected at least 1 node, got 0"
    for k, node in enumerate(nodes):
        if isinstance(node, dict) and ("outputs" in node) == ("output_bytes" in node):
            got = "both" if "outputs" in node else "neither"
            yield f"{_place(nodes, k)}: expected output_bytes or outputs, got {got}"
    outputs = [_output_names(node) for node in nodes]
    maker: dict[str, int] = {}
    yield from _repeated_names(nodes, outputs, maker)
    edges = []
    for k, node in enumerate(nodes):
        for name in _input_names(node):
            if name in maker:
                edges.append((maker[name], k))
                if maker[name] >= k:
                    yield (
                        f"{_place(nodes, k)}.inputs: {shown(name)} is made by nodes[{maker[name]}],"
                        " which does not come before it; nodes must be in execution order"
                    )
            # Only when every tensor has a usable name is it known that no node makes another.
            elif None not in outputs:
                yield f"{_place(nodes, k)}.inputs: no node makes a tensor {shown(name)}"
    if any(made >= read for made, read in edges):
        import networkx as nx

        found = cycle_fault(nx.DiGraph(edges), lambda k: nodes[k].get("name"))
        yield from (f"nodes: {fault}" for fault in found)


def _repeated_names(
    nodes: Sequence[Any], outputs: Sequence[tuple[str, ...] | None], maker: dict[str, int]
) -> Iterator[str]:
    """Yield names used twice, and put the first node of each tensor into `maker`."""
    first: dict[object, int] = {}
    for k, node in enumerate(nodes):
        own = node.get("name") if isinstance(node, dict) else None
        repeated = own in first if isinstance(own, str) and own else False
        if repeated:
            yield f"{_place(nodes, k)}: its name is already used by nodes[{first[own]}]"
        elif isinstance(own, str):
            first[own] = k
        for name in outputs[k] or ():
            if name in maker and not (repeated and name == own):
                yield (
                    f"{_place(nodes, k)}: its output tensor {shown(name)} is already an output of "
                    f"nodes[{maker[name]}]"
                )
            maker.setdefault(name, k)


def cycle_fault(digraph: networkx.DiGraph[Any], name: Callable[[Any], object]) -> Iterator[str]:
    """Yield a cycle of a digraph, where it has one, by the names of its keys."""
    import networkx as nx

    try:
        cycle = nx.find_cycle(digraph)
    except nx.NetworkXNoCycle:
        return
    path = " -> ".join(str(name(key)) for key in (*(key for key, _ in cycle), cycle[0][0]))
    yield f"the graph has a cycle: {path}"


def _output_names(node: Any) -> tuple[str, ...] | None:
    """Return the names of a node's tensors, or None where one is not usable."""
    if not isinstance(node, dict):
        return None
    outputs = node.get("outputs", [node])
    if not isinstance(outputs, list):
        return None
    names = [output.get("name") if isinstance(output, dict) else None for output in outputs]
    return tuple(names) if all(isinstance(name, str) for name in names) else None  # type: ignore[arg-type]


def _input_names(node: Any) -> tuple[str, ...]:
    """Return the names of a node's inputs, each once; none where one is not usable."""
    inputs = node.get("inputs") if isinstance(node, dict) else None
    if not isinstance(inputs, list) or not all(isinstance(name, str) for name in inputs):
        return ()
    return tuple(dict.fromkeys(inputs))


def _place(nodes: Sequence[Any], k: int) -> str:
    return place(("nodes", k), {"nodes": nodes})
