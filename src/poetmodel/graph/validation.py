"""Validation of training graphs, from files and from Python, with a message for each error."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poetmodel.errors import quote
from poetmodel.files import format_location, unknown_key_message
from poetmodel.graph.node import Node, Phase, Tensor, is_pair_of_names
from poetmodel.headers import WRITTEN_BY, describe_writer
from poetmodel.units import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import networkx


class _Rule(NamedTuple):
    """Condition on the value of a key, with a description of valid values for messages."""

    accepts: Callable[[Any], bool]
    expected: str
    show: Callable[[Any], str] = quote
    """Formats an invalid value."""

    def fault(self, value: object) -> str | None:
        """Return a message if `value` is invalid."""
        if not self.accepts(value):
            return f"expected {self.expected}, got {self.show(value)}"
        if self is _NAME and _SURROGATE.search(str(value)):
            return f"expected characters that UTF-8 can encode, got {quote(value)}"
        return None


def _integer_rule(minimum: int, maximum: int, expected: str) -> _Rule:
    """Return a rule that accepts integers from `minimum` to `maximum`, but no bool."""
    # bool is a subclass of int.
    return _Rule(
        lambda value: (
            isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum
        ),
        expected,
    )


_NAME: Final = _Rule(lambda value: isinstance(value, str) and value != "", "a non-empty string")
_SIZE: Final = _integer_rule(0, MAX_BYTES, "a whole number of bytes from 0 to 2^53")
_COUNT: Final = _integer_rule(0, 10**18, "an integer from 0 to 10^18")
_FLAG: Final = _Rule(lambda value: isinstance(value, bool), "true or false")
_OBJECT: Final = _Rule(lambda value: isinstance(value, dict), "an object")
_PHASES: Final = frozenset(Phase)
_PHASE: Final = _Rule(
    lambda value: isinstance(value, str) and value in _PHASES, f"one of {', '.join(Phase)}"
)


def _names_rule(sequence: type[list[Any] | tuple[Any, ...]]) -> _Rule:
    """Return the rule of a list of names, which is a tuple in a `Node`."""
    return _Rule(
        lambda value: isinstance(value, sequence) and all(isinstance(name, str) for name in value),
        "a list of tensor names",
        lambda value: (
            f"[{', '.join(map(quote, value))}]" if isinstance(value, sequence) else quote(value)
        ),
    )


_PAIRS: Final = _Rule(
    lambda value: isinstance(value, dict) and all(isinstance(name, str) for name in value.values()),
    "an object that maps names of outputs to names of inputs",
)

_TENSOR_KEYS: Final = {"name": _NAME, "bytes": _SIZE, "replaces": _NAME}
_NODE_KEYS: Final = {
    "name": _NAME,
    "op": _NAME,
    "phase": _PHASE,
    "inputs": _names_rule(list),
    "output_bytes": _SIZE,
    "outputs": _Rule(lambda value: isinstance(value, list), "a list of tensors"),
    "workspace_bytes": _SIZE,
    "flops": _COUNT,
    "recomputable": _FLAG,
    "on_aux": _FLAG,
    "bytes_moved": _SIZE,
    "instructions": _COUNT,
    "in_place": _PAIRS,
}
_NODE_HEAD: Final = {key: _NODE_KEYS[key] for key in ("name", "op", "phase")} | {
    "inputs": _names_rule(tuple)
}
_OUTPUTS: Final = _NODE_KEYS["outputs"]._replace(accepts=lambda value: isinstance(value, tuple))
_NODE_TAIL: Final = {
    key: _NODE_KEYS[key]
    for key in ("workspace_bytes", "flops", "recomputable", "on_aux", "bytes_moved", "instructions")
} | {
    "in_place": _PAIRS._replace(
        accepts=lambda value: (
            isinstance(value, tuple)
            and all(map(is_pair_of_names, value))
            and len(dict(value)) == len(value)
        )
    )
}
"""Rules of the fields of a `Node` before and after its outputs."""
_MAY_BE_NONE: Final = dict.fromkeys(
    ("bytes_moved", "instructions", "replaces", "parameters", "forward_macs", "kernels")
)
"""Fields that may be None."""
_RESIDENT_KEYS: Final = dict.fromkeys(("parameters", "gradients", "optimizer"), _SIZE)
GRAPH_KEYS: Final = {
    "format": _NAME,
    "version": _integer_rule(1, 2, "1 or 2"),
    WRITTEN_BY: _NAME,
    "name": _NAME,
    "batch_size": _integer_rule(1, MAX_BYTES, "an integer from 1 to 2^53"),
    "dtype": _NAME,
    "resident_bytes": _OBJECT,
    "parameters": _COUNT,
    "forward_macs": _COUNT,
    "kernels": _Rule(lambda value: value in ("pytorch", "exported"), "pytorch or exported"),
    "nodes": _Rule(lambda value: isinstance(value, list), "a list"),
}
"""Rules of the keys at the top level of a graph file."""
_GRAPH_FIELDS: Final = {
    key: GRAPH_KEYS[key]
    for key in ("name", "batch_size", "dtype", "parameters", "forward_macs", "kernels")
}
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
"""Characters that UTF-8 cannot encode."""
_REQUIRED: Final = frozenset({"name", "bytes", "op", "phase", "inputs", "nodes"})
"""Keys without a default, of all objects of a graph file.

`parse_graph_fields` checks that ``format`` and ``version`` are present."""


def value_faults(document: Mapping[str, Any]) -> list[str]:
    """Return a message for each unknown or missing key and invalid value of a graph file."""
    faults: list[str] = []

    writer = f"; {describe_writer(document)}" if WRITTEN_BY in document else ""

    def check(item: object, rules: Mapping[str, _Rule], *path: str | int) -> None:
        """Add a message for each invalid key and value of `item`, which is at `path`."""
        for key_path, message in _key_faults(item, rules):
            is_unknown = key_path and key_path[-1] not in rules
            faults.append(
                f"{format_location((*path, *key_path), document)}: {message}"
                f"{writer if is_unknown else ''}"
            )

    check(document, GRAPH_KEYS)
    if isinstance(document.get("resident_bytes"), dict):
        check(document["resident_bytes"], _RESIDENT_KEYS, "resident_bytes")
    nodes = document.get("nodes")
    for k, node in enumerate(nodes if isinstance(nodes, list) else ()):
        check(node, _NODE_KEYS, "nodes", k)
        if not isinstance(node, dict):
            continue
        if ("outputs" in node) == ("output_bytes" in node):
            found_keys = "both" if "outputs" in node else "neither"
            label = format_location(("nodes", k), document)
            faults.append(f"{label}: expected output_bytes or outputs, got {found_keys}")
        outputs = node.get("outputs")
        for j, output in enumerate(outputs if isinstance(outputs, list) else ()):
            check(output, _TENSOR_KEYS, "nodes", k, "outputs", j)
    return faults


def _key_faults(item: object, rules: Mapping[str, _Rule]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (key path, message) for each unknown key, missing key and invalid value of `item`."""
    if not isinstance(item, dict):
        yield (), f"expected an object, got {quote(item)}"
        return
    yield from (((key,), unknown_key_message(key, rules)) for key in item if key not in rules)
    for key, rule in rules.items():
        if key not in item and key not in _REQUIRED:
            continue
        if (message := rule.fault(item.get(key))) is not None:
            yield (key,), message


def field_faults(
    graph: object, nodes: Sequence[object], resident_bytes: Mapping[str, object]
) -> list[str]:
    """Return a message for each invalid value of a `Graph`, as `value_faults` does for its file."""
    faults = [
        f"{key}: {message}"
        for key, message in _attribute_faults(graph, _GRAPH_FIELDS, _MAY_BE_NONE)
    ]
    faults += [
        f"{format_location(('resident_bytes', *path))}: {message}"
        for path, message in _key_faults(dict(resident_bytes), _RESIDENT_KEYS)
    ]
    for k, node in enumerate(nodes):
        if not isinstance(node, Node):
            faults.append(f"nodes[{k}]: expected a Node, got {quote(node)}")
            continue
        for path, message in _node_field_faults(node):
            name: object = node.name
            label = f" ({quote(name)})" if isinstance(name, str) else ""
            faults.append(f"nodes[{k}]{label}.{path}: {message}")
    return faults


def _node_field_faults(node: Node) -> Iterator[tuple[str, str]]:
    """Yield (location, message) for each invalid value of a node."""
    outputs: object = node.outputs
    tensors: tuple[object, ...] = outputs if isinstance(outputs, tuple) else ()
    has_one_size = len(tensors) == 1 and isinstance(tensors[0], Tensor) and node.has_one_size
    yield from _attribute_faults(node, _NODE_HEAD, {})
    size_key, size_rule, value = (
        ("output_bytes", _SIZE, node.outputs[0].bytes)
        if has_one_size
        else ("outputs", _OUTPUTS, outputs)
    )
    if (message := size_rule.fault(value)) is not None:
        yield size_key, message
    yield from _attribute_faults(
        node, _NODE_TAIL, STATE_DEFAULTS if node.is_state else _MAY_BE_NONE
    )
    for j, tensor in enumerate(() if has_one_size else tensors):
        if not isinstance(tensor, Tensor):
            yield f"outputs[{j}]", f"expected a Tensor, got {quote(tensor)}"
            continue
        for key, message in _attribute_faults(tensor, _TENSOR_KEYS, _MAY_BE_NONE):
            yield f"outputs[{j}].{key}", message


def _attribute_faults(
    owner: object, rules: Mapping[str, _Rule], defaults: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield (name, message) for each invalid attribute that is not equal to its default."""
    for key, rule in rules.items():
        value = getattr(owner, key)
        if key in defaults and value == defaults[key]:
            continue
        if (message := rule.fault(value)) is not None:
            yield key, message


def structure_faults(nodes: Sequence[Node], *, version: int = 2) -> list[str]:
    """Return a message per contradiction between valid nodes of a file in format `version`."""
    version_2_nodes = [k for k, node in enumerate(nodes) if node.needs_version_2]
    faults = [] if nodes else ["nodes: expected at least 1 node, got 0"]
    if version == 1:
        for k in version_2_nodes:
            keys = ", ".join(_version_2_keys(nodes[k]))
            faults.append(f'{_node_label(nodes, k)}: {keys}: needs "version": 2, the file says 1')
    maker_of: dict[str, int] = {}
    faults += _repeated_name_faults(nodes, maker_of)
    faults += _order_faults(nodes, maker_of)
    return faults + (list(_state_faults(nodes, maker_of)) if version_2_nodes else [])


def _order_faults(nodes: Sequence[Node], maker_of: Mapping[str, int]) -> Iterator[str]:
    """Yield a message for each input that no earlier node makes, and for one cycle."""
    edges = []
    for k, node in enumerate(nodes):
        for name in dict.fromkeys(node.inputs):
            if name not in maker_of:
                yield f"{_node_label(nodes, k)}.inputs: no node makes a tensor {quote(name)}"
                continue
            edges.append((maker_of[name], k))
            if maker_of[name] >= k:
                yield (
                    f"{_node_label(nodes, k)}.inputs: {quote(name)} is made by "
                    f"nodes[{maker_of[name]}], which does not come before it; nodes must be in "
                    "execution order"
                )
    if any(writer >= reader for writer, reader in edges):
        import networkx as nx

        faults = cycle_faults(nx.DiGraph(edges), lambda k: nodes[k].name)
        yield from (f"nodes: {fault}" for fault in faults)


def _repeated_name_faults(nodes: Sequence[Node], maker_of: dict[str, int]) -> Iterator[str]:
    """Yield a message per duplicate name of a node or tensor; fill `maker_of` (tensor: node)."""
    first_node_of: dict[str, int] = {}
    for k, node in enumerate(nodes):
        is_repeated = node.name in first_node_of
        if is_repeated:
            yield (
                f"{_node_label(nodes, k)}: its name is already used by "
                f"nodes[{first_node_of[node.name]}]"
            )
        first_node_of.setdefault(node.name, k)
        for name in (tensor.name for tensor in node.outputs):
            if name in maker_of and not (is_repeated and name == node.name):
                yield (
                    f"{_node_label(nodes, k)}: its output tensor {quote(name)} is already an "
                    f"output of nodes[{maker_of[name]}]"
                )
            maker_of.setdefault(name, k)


def cycle_faults(digraph: networkx.DiGraph[Any], name_of: Callable[[Any], object]) -> Iterator[str]:
    """Yield one message that names the nodes of a cycle, if there is one."""
    import networkx as nx

    try:
        cycle = nx.find_cycle(digraph)
    except nx.NetworkXNoCycle:
        return
    path = " -> ".join(str(name_of(key)) for key in (*(key for key, _ in cycle), cycle[0][0]))
    yield f"the graph has a cycle: {path}"


# -- state tensors and in-place operators ------------------------------------------------------

STATE_DEFAULTS: Final[Mapping[str, Any]] = {
    "workspace_bytes": 0,
    "flops": 0,
    "recomputable": False,
    "on_aux": False,
    "bytes_moved": None,
    "instructions": None,
}
"""Attributes of every node that holds state, without a computation; graph files omit them."""


def _replacement_pairs(node: Node) -> list[tuple[Tensor, str]]:
    """Return the outputs of a node that replace a state tensor, each with that tensor's name."""
    return [(tensor, tensor.replaces) for tensor in node.outputs if tensor.replaces is not None]


def _version_2_keys(node: Node) -> Iterator[str]:
    """Yield the keys of a node whose values need version 2 of graph files."""
    if node.is_state:
        yield "phase"
    if node.in_place != ():
        yield "in_place"
    if _replacement_pairs(node):
        yield "outputs.replaces"


def _state_faults(nodes: Sequence[Node], maker_of: Mapping[str, int]) -> Iterator[str]:
    """Yield a message for each violated rule of state, replacements and in-place pairs."""
    replacer_of: dict[str, int] = {}
    for k, node in enumerate(nodes):
        if node.is_state:
            yield from _state_node_faults(nodes, k)
        yield from _replacement_faults(nodes, k, maker_of, replacer_of)
        yield from _in_place_faults(nodes, k, maker_of)
    replacements = {
        tensor.name for node in nodes if not node.is_state for tensor, _ in _replacement_pairs(node)
    }
    for k, node in enumerate(nodes):
        for name in dict.fromkeys(node.inputs):
            label = f"{_node_label(nodes, k)}.inputs: {quote(name)}"
            if name in replacements:
                yield f"{label} replaces a state tensor, and no node may read it in the same step"
            elif replacer_of.get(name, k) < k:
                yield (
                    f"{label} is read after {_node_label(nodes, replacer_of[name])} has replaced "
                    "it; the node that replaces a state tensor must be its last reader"
                )


def _state_node_faults(nodes: Sequence[Node], k: int) -> Iterator[str]:
    """Yield a message for each violated rule of node `k`, which holds state."""
    node, label = nodes[k], _node_label(nodes, k)
    for key, default in STATE_DEFAULTS.items():
        if getattr(node, key) != default:
            yield f"{label}.{key}: a node of phase state computes nothing; leave the key out"
    if node.inputs:
        yield f"{label}.inputs: a node of phase state reads nothing; expected []"
    if len(node.outputs) != 1:
        yield f"{label}.outputs: a node of phase state has 1 output, got {len(node.outputs)}"


def _replacement_faults(
    nodes: Sequence[Node], k: int, maker_of: Mapping[str, int], replacer_of: dict[str, int]
) -> Iterator[str]:
    """Yield a message per violated rule of node `k`'s replacements; fill `replacer_of` by state."""
    node, label = nodes[k], _node_label(nodes, k)
    replacement_pairs = _replacement_pairs(node)
    if replacement_pairs and node.is_state:
        yield f"{label}.outputs: a node of phase state replaces nothing; leave replaces out"
        return
    for tensor, name in replacement_pairs:
        message = f"{label}.outputs: {quote(tensor.name)} replaces {quote(name)}"
        old_maker = maker_of.get(name)
        if old_maker is None:
            yield f"{message}, which no node makes"
            continue
        if not nodes[old_maker].is_state:
            maker_name = _node_label(nodes, old_maker)
            yield f"{message}, which is no state tensor: {maker_name} is not of phase state"
            continue
        if name not in node.inputs:
            yield f"{message}, which the node does not read; add it to inputs"
        old_bytes = next(state.bytes for state in nodes[old_maker].outputs if state.name == name)
        if old_bytes != tensor.bytes:
            yield f"{message}, but they differ in bytes: {tensor.bytes} and {old_bytes}"
        if name in replacer_of:
            yield f"{message}, which {_node_label(nodes, replacer_of[name])} replaces already"
        replacer_of.setdefault(name, k)
    if replacement_pairs and node.recomputable:
        yield (
            f"{label}.recomputable: expected false, since the node replaces "
            f"{quote(replacement_pairs[0][1])}; a state tensor is updated once"
        )
    if replacement_pairs and node.on_aux:
        yield (
            f"{label}.on_aux: expected false, since the node replaces "
            f"{quote(replacement_pairs[0][1])}: its value is not on storage when the step begins"
        )


def _in_place_faults(nodes: Sequence[Node], k: int, maker_of: Mapping[str, int]) -> Iterator[str]:
    """Yield a message for each violated rule of the in-place pairs of node `k`."""
    node, label = nodes[k], f"{_node_label(nodes, k)}.in_place"
    outputs = [tensor.name for tensor in node.outputs]
    replacements = {tensor.name for tensor, _ in _replacement_pairs(node)}
    output_by_input: dict[str, str] = {}
    for output, name in node.in_place:
        if output not in outputs:
            yield f"{label}: {quote(output)} is no output of the node"
        elif output in replacements:
            yield f"{label}: {quote(output)} replaces a state tensor, in whose memory it is written"
        if name not in node.inputs:
            yield f"{label}: {quote(name)} is no input of the node"
        elif nodes[maker_of.get(name, k)].is_state:
            yield f"{label}: {quote(name)} is a state tensor; only its replacement may overwrite it"
        if name in output_by_input:
            yield f"{label}: {quote(output_by_input[name])} overwrites {quote(name)} already"
        output_by_input.setdefault(name, output)


def _node_label(nodes: Sequence[Node], k: int) -> str:
    return f"nodes[{k}] ({quote(nodes[k].name)})"
