"""Read and write graph files (``*.graph.json``), and make the canonical JSON that is hashed.

Notes
-----
A node with one tensor of the node's own name can be written with ``output_bytes`` or with
``outputs``. Both are the same `Graph`. Files and hashes use the shorter key, ``output_bytes``,
whenever it is sufficient, so both variants have the same hash. Canonical JSON includes optional
keys with default values, except ``bytes_moved``, ``parameters``, ``forward_macs``, ``in_place`` and
``replaces``, which appear only if set; ``kernels`` and ``instructions`` never appear. A node that
holds state has none of the keys in `STATE_DEFAULTS`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import GraphError, InputError, convert_errors, quote
from poetmodel.files import parse_json, read_text, write_text
from poetmodel.graph.node import Node, Tensor
from poetmodel.graph.validation import GRAPH_KEYS, STATE_DEFAULTS, structure_faults, value_faults
from poetmodel.headers import (
    THIS_VERSION,
    WRITTEN_BY,
    check_version,
    ignored_keys_note,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

_LOG: Final = logging.getLogger(__name__)

FORMAT: Final = "poetmodel-graph"
"""Value of ``format`` in graph files."""
STEP_FORMAT: Final = "poetmodel-step"
"""Format of step files (captured and compiled steps), which contain the graph of their kernels."""
VERSIONS: Final = (1, 2)
"""Versions of the format; version 2 is written only for graphs with state or in-place operators."""

_NODE_DEFAULTS: Final[Mapping[str, Any]] = {
    field.name: field.default
    for field in fields(Node)
    if field.name not in ("name", "op", "phase", "inputs", "outputs", "in_place")
}
"""Optional keys of a node, except ``in_place``, with their defaults."""


def graph_defaults(graph_type: type[Any]) -> dict[str, Any]:
    """Return the optional keys of a graph file with their defaults, from the fields of `Graph`."""
    return {
        field.name: field.default if field.default is not MISSING else {}
        for field in fields(graph_type)
        if field.name not in ("name", "nodes")
    }


def read_document(path: str | Path) -> tuple[object, str, list[str]]:
    """Read the JSON of a graph file or step file, without validating it.

    Returns the content (of a step file, its graph), the source for messages, and a message per
    duplicate key. Drops unknown top-level keys of a graph file, with a warning. Raises `GraphError`
    if the file cannot be read or is not JSON.
    """
    with convert_errors(GraphError):
        text = read_text(path)
    faults: list[str] = []
    with convert_errors(GraphError, str(path)):
        document = parse_json(text, expected=FORMAT, faults=faults)
    if not isinstance(document, dict):
        return document, str(path), faults
    if document.get("format") == STEP_FORMAT:
        return graph_of_step(document), f"{path}: graph", faults
    unknown_keys = [key for key in document if key not in GRAPH_KEYS]
    if unknown_keys and not any(_format_faults(document)):
        _LOG.warning("%s: %s", path, ignored_keys_note(unknown_keys, document))
        document = {key: document[key] for key in document if key in GRAPH_KEYS}
    return document, str(path), faults


def graph_of_step(document: Mapping[str, Any]) -> object:
    """Return the graph in the content of a step file, with the writer of the file for messages."""
    graph = document.get("graph")
    if not isinstance(graph, dict) or document.get(WRITTEN_BY) is None:
        return graph
    return {WRITTEN_BY: document[WRITTEN_BY]} | graph


def write_document(document: Mapping[str, Any], path: str | Path) -> None:
    """Write the content of a graph file (`Graph.to_dict`) and its writer; see `write_text`."""
    header = {"format": FORMAT, "version": document["version"], WRITTEN_BY: THIS_VERSION}
    write_text(path, render_document({**header, **document}))


def render_document(document: Mapping[str, Any]) -> str:
    """Return the text of a graph file with this content, one node per line."""
    head = [f"{_to_json(key)}: {_to_json(document[key])}" for key in document if key != "nodes"]
    lines = ",\n".join(f"  {_to_json(node)}" for node in document["nodes"])
    return "{" + ",\n ".join(head) + f',\n "nodes": [\n{lines}\n]}}\n'


def node_to_dict(node: Node, *, defaults: bool) -> dict[str, Any]:
    """Return a node's entry in a graph file; see `Graph.to_dict` for `defaults`."""
    item: dict[str, Any] = {
        "name": node.name,
        "op": node.op,
        "phase": str(node.phase),
        "inputs": list(node.inputs),
    }
    if node.has_one_size:
        item["output_bytes"] = node.outputs[0].bytes
    else:
        item["outputs"] = [_tensor_to_dict(output) for output in node.outputs]
    if node.in_place:
        item["in_place"] = dict(node.in_place)
    if node.is_state:
        return item | optional_keys(node, STATE_DEFAULTS, defaults=False)
    return item | optional_keys(node, _NODE_DEFAULTS, defaults=defaults)


def _tensor_to_dict(tensor: Tensor) -> dict[str, Any]:
    item: dict[str, Any] = {"name": tensor.name, "bytes": tensor.bytes}
    return item if tensor.replaces is None else item | {"replaces": tensor.replaces}


def optional_keys(
    owner: object, default_of: Mapping[str, Any], *, defaults: bool
) -> dict[str, Any]:
    """Return the attributes of `owner`, by name, that differ from their defaults in `default_of`.

    With `defaults`, include attributes equal to their defaults, unless the default is None.
    """
    values = ((key, getattr(owner, key), default) for key, default in default_of.items())
    return {
        key: value
        for key, value, default in values
        if value != default or (defaults and default is not None)
    }


def parse_graph_fields(document: object, *, source: str, faults: Iterable[str]) -> dict[str, Any]:
    """Validate the content of a graph file and return the fields of its `Graph`, by name.

    `GraphError` has `faults` and all invalid keys and values, else all errors between nodes.
    """
    if not isinstance(document, dict):
        raise GraphError(
            f"{source}: expected a {FORMAT} file (a JSON object), got {quote(document)}"
        )
    # For a file of another format, report only that, not each of its keys as unknown.
    messages = list(_format_faults(document)) or [*faults, *value_faults(document)]
    nodes = () if messages else tuple(map(_parse_node, document["nodes"]))
    messages = messages or structure_faults(nodes, version=document["version"])
    if messages:
        raise GraphError(messages).with_prefix(source)
    graph_fields = {
        key: value
        for key, value in document.items()
        if key not in ("format", "version", WRITTEN_BY)
    }
    return graph_fields | {"nodes": nodes}


def _format_faults(document: dict[str, Any]) -> Iterator[str]:
    """Yield messages on an unknown format or version of a graph file."""
    try:
        check_version(document, VERSIONS)
    except InputError as error:
        yield from error.faults
        return
    for key, choices in (("format", (FORMAT,)), ("version", VERSIONS)):
        value = document.get(key)
        if value not in choices or isinstance(value, bool | float):
            yield f"{key}: expected {' or '.join(map(json.dumps, choices))}, got {quote(value)}"


def _parse_node(item: dict[str, Any]) -> Node:
    """Return the node of a valid entry; a tensor of ``output_bytes`` has the node's name."""
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
    """Return the canonical JSON that a graph's hash is computed from: sorted keys, no spaces.

    Deletes ``kernels`` and ``instructions`` from `document`: graphs that differ in these are equal.
    """
    document.pop("kernels", None)
    for node in document["nodes"]:
        node.pop("instructions", None)
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
