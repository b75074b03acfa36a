"""Graph files: ``*.graph.json`` in and out, and the canonical form that is hashed.

What a key must look like is checked in one place, `poetmodel.graph.invariants`, for files and for
graphs made in Python alike; this module adds what only a file can get wrong: syntax, unknown,
missing and repeated keys, lists and objects in the wrong place.

Notes
-----
A node whose one tensor has the node's own name can be spelled with ``output_bytes`` or with
``outputs``; both spellings are the same `Graph`. Written, and hashed, is the shorter one,
``output_bytes``, wherever it says everything, so that both hash alike. The canonical form fills in
every key that has a default; the keys without one (``bytes_moved``, ``parameters``,
``forward_macs``) appear only where they are set.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from poetmodel.data import parse_json, read_text, write_text
from poetmodel.errors import GraphError, InputError, shown
from poetmodel.graph.invariants import node_faults, place
from poetmodel.graph.nodes import Node, Tensor
from poetmodel.graph.structure import Graph

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

FORMAT: Final = "poetmodel-graph"
VERSION: Final = 1

_GRAPH_DEFAULTS: Final[Mapping[str, Any]] = {
    "batch_size": 1,
    "dtype": "float32",
    "resident_bytes": {},
}
_GRAPH_OPTIONAL: Final = ("parameters", "forward_macs")
_GRAPH_KEYS: Final = ("format", "version", "name", *_GRAPH_DEFAULTS, *_GRAPH_OPTIONAL, "nodes")
_NODE_DEFAULTS: Final[Mapping[str, Any]] = {
    "workspace_bytes": 0,
    "flops": 0,
    "recomputable": True,
    "on_aux": False,
}
_NODE_REQUIRED: Final = ("name", "op", "phase", "inputs")
_NODE_OPTIONAL: Final = ("bytes_moved",)
_NODE_KEYS: Final = (
    *_NODE_REQUIRED,
    "output_bytes",
    "outputs",
    *_NODE_DEFAULTS,
    *_NODE_OPTIONAL,
)
_OUTPUT_KEYS: Final = ("name", "bytes")
_STAND_IN: Final = Node(name="stand-in", op="none", phase="forward")
"""Takes the place of nodes that cannot be read, so that the rest of the graph is still checked."""


class _Object(dict[str, Any]):
    """A JSON object that remembers which keys came twice."""

    repeated: tuple[str, ...] = ()

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        if len(self) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            self.repeated = tuple(key for key, count in counts.items() if count > 1)


def load_graph(path: str | Path) -> Graph:
    """Read a ``*.graph.json`` file.

    Parameters
    ----------
    path : str or Path
        The file.

    Returns
    -------
    Graph
        What it describes.

    Raises
    ------
    GraphError
        If the file is missing or is no such file; with every fault found in it, each with its
        place.
    """
    try:
        text = read_text(path)
    except InputError as error:
        raise GraphError(error.faults) from None
    return graph_from_dict(_parse(text, source=str(path)), source=str(path))


def save_graph(graph: Graph, path: str | Path) -> None:
    """Write a ``*.graph.json`` file: one node per line, defaults left out.

    Raises
    ------
    InputError
        If the file cannot be written; nothing is then changed.
    """
    document = graph_to_dict(graph)
    nodes = document.pop("nodes")
    head = [f"{_compact(key)}: {_compact(value)}" for key, value in document.items()]
    lines = ",\n".join(f"  {_compact(node)}" for node in nodes)
    write_text(path, "{" + ",\n ".join(head) + f',\n "nodes": [\n{lines}\n]}}\n')


def graph_to_dict(graph: Graph, *, defaults: bool = False) -> dict[str, Any]:
    """Return the graph as a file holds it.

    Parameters
    ----------
    graph : Graph
        The graph.
    defaults : bool
        Whether to write keys that have their default value.

    Returns
    -------
    dict
        Made of what JSON knows only; nothing in it is shared with the graph.
    """
    document: dict[str, Any] = {"format": FORMAT, "version": VERSION, "name": graph.name}
    settings = {key: getattr(graph, key) for key in _GRAPH_DEFAULTS}
    settings["resident_bytes"] = dict(graph.resident_bytes)
    document |= _chosen(settings, _GRAPH_DEFAULTS, defaults=defaults)
    document |= _set(graph, _GRAPH_OPTIONAL)
    document["nodes"] = [node_to_dict(node, defaults=defaults) for node in graph.nodes]
    return document


def node_to_dict(node: Node, *, defaults: bool = False) -> dict[str, Any]:
    """Return one node as a file holds it; see `graph_to_dict`."""
    item: dict[str, Any] = {
        "name": node.name,
        "op": node.op,
        "phase": str(node.phase),
        "inputs": list(node.inputs),
    }
    if len(node.outputs) == 1 and node.outputs[0].name == node.name:
        item["output_bytes"] = node.outputs[0].bytes
    else:
        item["outputs"] = [{"name": t.name, "bytes": t.bytes} for t in node.outputs]
    settings = {key: getattr(node, key) for key in _NODE_DEFAULTS}
    return item | _chosen(settings, _NODE_DEFAULTS, defaults=defaults) | _set(node, _NODE_OPTIONAL)


def graph_from_dict(document: object, *, source: str = "graph") -> Graph:
    """Make a graph from what a file holds.

    Parameters
    ----------
    document : object
        As `graph_to_dict` returns it.
    source : str
        Where it comes from; starts every message.

    Returns
    -------
    Graph
        The graph.

    Raises
    ------
    GraphError
        With every fault found, each with its place.
    """
    if not isinstance(document, dict):
        msg = f"{source}: expected a {FORMAT} file (a JSON object), got {shown(document)}"
        raise GraphError(msg)
    # A file of another kind would otherwise be answered with a list of all its keys.
    faults = list(_kind_faults(document))
    if not faults:
        graph, faults = _read_graph(document)
        if graph is not None and not faults:
            return graph
    raise GraphError(f"{source}: {fault}" for fault in faults)


def canonical_json(graph: Graph) -> str:
    """Return the one text that stands for a graph: defaults filled in, keys sorted, no spaces.

    Encoded as UTF-8 it is what `graph_sha256` hashes.
    """
    document = graph_to_dict(graph, defaults=True)
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def graph_sha256(graph: Graph) -> str:
    """Return the SHA-256 of the canonical JSON, hexadecimal."""
    return hashlib.sha256(canonical_json(graph).encode("utf-8")).hexdigest()


# -- text to objects ---------------------------------------------------------------------------


def _parse(text: str, *, source: str) -> object:
    try:
        return parse_json(
            text, expected=FORMAT, hook=_Object, largest="; sizes are at most 2^53 bytes"
        )
    except InputError as error:
        raise GraphError(error.faults).within(source) from None


# -- objects to nodes --------------------------------------------------------------------------


def _kind_faults(document: dict[str, Any]) -> Iterator[str]:
    for key, wanted in (("format", FORMAT), ("version", VERSION)):
        value = document.get(key)
        if value != wanted or isinstance(value, bool | float):
            yield f"{key}: expected {json.dumps(wanted)}, got {shown(value)}"


def _read_graph(document: dict[str, Any]) -> tuple[Graph | None, list[str]]:
    """Return the graph, as far as it can be made, and every fault."""
    faults = list(_key_faults(document, _GRAPH_KEYS, ""))
    settings = {key: document.get(key, value) for key, value in _GRAPH_DEFAULTS.items()}
    settings |= {key: document.get(key) for key in ("name", *_GRAPH_OPTIONAL)}
    faults += _null_faults(document, _GRAPH_OPTIONAL, "")
    resident = settings["resident_bytes"]
    if isinstance(resident, dict):
        faults += _repeated(resident, "resident_bytes.")
    else:
        faults.append(f"resident_bytes: expected an object, got {shown(resident)}")
        settings["resident_bytes"] = {}
    nodes, shape_faults = _read_nodes(document.get("nodes"))
    faults += shape_faults
    whole = isinstance(document.get("nodes"), list) and len(nodes) == len(document["nodes"])
    graph = None
    try:
        graph = Graph(nodes=tuple(nodes.values()) if whole else (_STAND_IN,), **settings)
    except GraphError as error:
        faults += error.faults
    if not whole:  # What the nodes say of each other means nothing then.
        for k, node in nodes.items():
            faults += node_faults(node, place(k, node.name))
    return graph, faults


def _read_nodes(items: object) -> tuple[dict[int, Node], list[str]]:
    """Return the nodes by position, as far as they are objects, and the faults of their shape."""
    if not isinstance(items, list):
        return {}, [f"nodes: expected a list, got {shown(items)}"]
    nodes: dict[int, Node] = {}
    faults: list[str] = []
    for k, item in enumerate(items):
        if isinstance(item, dict):
            where = place(k, item.get("name"))
            faults += _key_faults(item, _NODE_KEYS, f"{where}.")
            faults += _null_faults(item, _NODE_OPTIONAL, f"{where}.")
            outputs, output_faults = _read_outputs(item, where)
            faults += output_faults
            nodes[k] = _read_node(item, outputs)
        else:
            faults.append(f"nodes[{k}]: expected an object, got {shown(item)}")
    return nodes, faults


def _read_node(item: dict[str, Any], outputs: Any) -> Node:
    settings = {key: item.get(key, value) for key, value in _NODE_DEFAULTS.items()}
    settings |= {key: item.get(key) for key in (*_NODE_REQUIRED, *_NODE_OPTIONAL)}
    if isinstance(settings["inputs"], list):
        settings["inputs"] = tuple(settings["inputs"])
    return Node(outputs=outputs, **settings)


def _read_outputs(item: dict[str, Any], where: str) -> tuple[Any, list[str]]:
    """Return the tensors of a node; what is not a list of them is left to the invariants."""
    faults = []
    if ("outputs" in item) == ("output_bytes" in item):
        got = "both" if "outputs" in item else "neither"
        faults.append(f"{where}: expected output_bytes or outputs, got {got}")
    if "outputs" not in item:
        return (Tensor(name=item.get("name"), bytes=item.get("output_bytes", 0)),), faults  # type: ignore[arg-type]
    listed = item["outputs"]
    if not isinstance(listed, list):
        return listed, faults
    tensors: list[Any] = []
    for j, output in enumerate(listed):
        if isinstance(output, dict):
            faults += _key_faults(output, _OUTPUT_KEYS, f"{where}.outputs[{j}].")
            tensors.append(Tensor(name=output.get("name"), bytes=output.get("bytes")))  # type: ignore[arg-type]
        else:
            tensors.append(output)
    return tuple(tensors), faults


def _key_faults(item: dict[str, Any], known: Sequence[str], where: str) -> Iterator[str]:
    """Yield unknown and repeated keys of one object."""
    yield from _repeated(item, where)
    for key in item:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"accepted are {', '.join(known)}"
            yield f"{where}{key}: unknown key; {hint}"


def _repeated(item: dict[str, Any], where: str) -> list[str]:
    repeated = item.repeated if isinstance(item, _Object) else ()
    return [f"{where}{key}: the key comes twice" for key in repeated]


def _null_faults(item: dict[str, Any], keys: Iterable[str], where: str) -> list[str]:
    """Return the keys that may be left out but not be null, which in Python are None."""
    return [
        f"{where}{key}: expected a whole number, got null; leave the key out"
        for key in keys
        if key in item and item[key] is None
    ]


def _chosen(
    settings: Mapping[str, Any], standard: Mapping[str, Any], *, defaults: bool
) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if defaults or value != standard[key]}


def _set(owner: object, keys: Iterable[str]) -> dict[str, Any]:
    values = {key: getattr(owner, key) for key in keys}
    return {key: value for key, value in values.items() if value is not None}


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
