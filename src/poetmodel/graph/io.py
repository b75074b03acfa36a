"""Graph files: ``*.graph.json`` in and out, and the canonical form that is hashed.

Notes
-----
A node whose one tensor has the node's own name can be spelled with ``output_bytes`` or with
``outputs``; both spellings are the same `Graph`. Written, and hashed, is the shorter one,
``output_bytes``, wherever it says everything, so that both hash alike. The canonical form fills in
every key that has a default; the keys without one (``bytes_moved``, ``parameters``,
``forward_macs``, ``in_place``, ``replaces``) appear only where they are set, and ``kernels`` and
``instructions`` never do. A node that holds state has none of the keys that such a node must not
give.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import GraphError, raised_as, shown
from poetmodel.files import parse_json, read_text, write_text
from poetmodel.graph.node import Node, Tensor
from poetmodel.graph.validation import STATE_DEFAULTS, structure_faults, value_faults

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

FORMAT: Final = "poetmodel-graph"
STEP_FORMAT: Final = "poetmodel-step"
"""The files of captured and of compiled steps, which hold the graph of their kernels."""
VERSIONS: Final = (1, 2)
"""Version 2 has state tensors and in-place operators; it is written only where one is used."""

_NODE_DEFAULTS: Final[Mapping[str, Any]] = {
    field.name: field.default
    for field in fields(Node)
    if field.name not in ("name", "op", "phase", "inputs", "outputs", "in_place")
}


def graph_defaults(kind: type[Any]) -> dict[str, Any]:
    """Return the keys of a graph file that have a default, with it."""
    return {
        field.name: field.default if field.default is not MISSING else {}
        for field in fields(kind)
        if field.name not in ("name", "nodes")
    }


def read_document(path: str | Path) -> tuple[object, str, list[str]]:
    """Read a graph file.

    Returns
    -------
    document : object
        Its content; of a step file, that of the graph of its kernels.
    source : str
        Where the document is, for messages.
    faults : list of str
        Keys that the file repeats.
    """
    with raised_as(GraphError):
        text = read_text(path)
    repeated: list[str] = []
    with raised_as(GraphError, str(path)):
        document = parse_json(text, expected=FORMAT, repeated=repeated)
    if isinstance(document, dict) and document.get("format") == STEP_FORMAT:
        return document.get("graph"), f"{path}: graph", repeated
    return document, str(path), repeated


def write_document(document: Mapping[str, Any], path: str | Path) -> None:
    """Write the document of a graph, one node per line."""
    nodes = document["nodes"]
    rest = ((key, value) for key, value in document.items() if key != "nodes")
    head = [f"{_compact(key)}: {_compact(value)}" for key, value in rest]
    lines = ",\n".join(f"  {_compact(node)}" for node in nodes)
    write_text(path, "{" + ",\n ".join(head) + f',\n "nodes": [\n{lines}\n]}}\n')


def node_to_dict(node: object, *, defaults: bool = False) -> object:
    """Return one node as a file holds it; see `Graph.to_dict`.

    What breaks an invariant is returned as it is, so that `value_faults` finds it.
    """
    if not isinstance(node, Node):
        return _alien(node)
    phase: object = node.phase
    inputs: object = node.inputs
    outputs: object = node.outputs
    item: dict[str, Any] = {
        "name": node.name,
        "op": node.op,
        "phase": str(phase) if isinstance(phase, str) else phase,
        "inputs": list(inputs) if isinstance(inputs, tuple) else _alien(inputs),
    }
    if not isinstance(outputs, tuple):
        item["outputs"] = _alien(outputs)
    elif len(outputs) == 1 and _is_own_tensor(node, outputs[0]):
        item["output_bytes"] = outputs[0].bytes
    else:
        item["outputs"] = [
            _tensor_to_dict(output) if isinstance(output, Tensor) else _alien(output)
            for output in outputs
        ]
    if node.in_place:
        item["in_place"] = _in_place_to_dict(node.in_place)
    if node.is_state:
        return item | settings_of(node, STATE_DEFAULTS, defaults=False)
    return item | settings_of(node, _NODE_DEFAULTS, defaults=defaults)


def _is_own_tensor(node: Node, output: object) -> bool:
    """Whether ``output_bytes`` says everything about the one output of a node."""
    return isinstance(output, Tensor) and output.name == node.name and output.replaces is None


def _tensor_to_dict(tensor: Tensor) -> dict[str, Any]:
    item: dict[str, Any] = {"name": tensor.name, "bytes": tensor.bytes}
    return item if tensor.replaces is None else item | {"replaces": tensor.replaces}


def _in_place_to_dict(pairs: object) -> object:
    """Return pairs of names as an object, or what a file could not hold."""
    if not isinstance(pairs, tuple) or not all(
        isinstance(pair, tuple) and [*map(type, pair)] == [str, str] for pair in pairs
    ):
        return _alien(pairs) if isinstance(pairs, list | dict) else (pairs,)
    pairing = dict(pairs)
    return pairing if len(pairing) == len(pairs) else pairs


def _alien(value: object) -> object:
    """Return a value of a class that a graph refuses: a tuple for a list or a dict of the file."""
    return tuple(value) if isinstance(value, list | dict) else value


def settings_of(owner: object, standard: Mapping[str, Any], *, defaults: bool) -> dict[str, Any]:
    """Return the values of keys that have a default, of those without one only what is set."""
    values = ((key, getattr(owner, key), default) for key, default in standard.items())
    return {
        key: value
        for key, value, default in values
        if value != default or (defaults and default is not None)
    }


def graph_fields(document: object, *, source: str, faults: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a graph that the content of a file states; see `Graph.from_dict`."""
    if not isinstance(document, dict):
        raise GraphError(
            f"{source}: expected a {FORMAT} file (a JSON object), got {shown(document)}"
        )
    # A file of another kind would otherwise be answered with a list of all its keys.
    messages = list(_kind_faults(document)) or [*faults, *value_faults(document)]
    nodes = () if messages else tuple(map(_read_node, document["nodes"]))
    messages = messages or structure_faults(nodes, version=document["version"])
    if messages:
        raise GraphError(messages).within(source)
    stated = {key: value for key, value in document.items() if key not in ("format", "version")}
    return stated | {"nodes": nodes}


def _kind_faults(document: dict[str, Any]) -> Iterator[str]:
    for key, wanted in (("format", (FORMAT,)), ("version", VERSIONS)):
        value = document.get(key)
        if value not in wanted or isinstance(value, bool | float):
            yield f"{key}: expected {' or '.join(map(json.dumps, wanted))}, got {shown(value)}"


def _read_node(item: dict[str, Any]) -> Node:
    outputs = item.get("outputs")
    if outputs is None:
        outputs = [{"name": item["name"], "bytes": item["output_bytes"]}]
    return Node(
        name=item["name"],
        op=item["op"],
        phase=item["phase"],
        inputs=tuple(item["inputs"]),
        outputs=tuple(Tensor(**output) for output in outputs),
        in_place=tuple(item.get("in_place", {}).items()),
        **{key: item[key] for key in _NODE_DEFAULTS if key in item},
    )


def canonical_json(document: dict[str, Any]) -> str:
    """Return the text that a graph is hashed by: its document with all defaults, keys sorted.

    `document` is from `Graph.to_dict`, and changed: whose kernels compute the graph, and how many
    instructions these run, is left out.
    """
    document.pop("kernels", None)
    for node in document["nodes"]:
        node.pop("instructions", None)
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
