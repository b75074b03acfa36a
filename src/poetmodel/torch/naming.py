"""Readable names: the module an operation belongs to, its operator, and its phase."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from poetmodel.graph import Phase
from poetmodel.torch.annotation import ANNOTATION, BODY
from poetmodel.torch.joint import LOSS
from poetmodel.torch.roles import Source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import fx

    from poetmodel.torch.joint import Joint


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What people call an operation."""

    name: str
    """Unique: module path and operator, such as ``layer1.0.conv1/convolution``."""
    op: str
    """The operator, such as ``convolution``."""
    module: str
    """Path of the module below the user's; empty for the user's module itself."""
    phase: Phase
    """Forward, loss or backward."""


def labels(joint: Joint, nodes: Sequence[fx.Node]) -> Mapping[fx.Node, Label]:
    """Return the labels of some operations of a captured step.

    Notes
    -----
    A backward operation belongs to the module of the forward operation whose sequence number it
    carries. A sum of gradients carries none of its own: it belongs to the innermost module that
    holds all that it adds.
    """
    paths = _all_paths(joint)
    backward = _behind_tangents(joint)
    seen: Counter[str] = Counter()
    found = {}
    for node in nodes:
        path = paths.get(node)
        phase = _phase(node, path, backward)
        module = _shown(path)
        op = operator_name(node)
        name = f"{module}/{op}" if module else op
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name}#{seen[name]}"
        found[node] = Label(name=name, op=op, module=module, phase=phase)
    return found


def operator_name(node: fx.Node) -> str:
    """Return the operator of a node without its namespace and overload: ``convolution``."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def _all_paths(joint: Joint) -> dict[fx.Node, str]:
    """Return the path of the module of each operation, where it is known."""
    by_number: dict[int, str] = {}
    found: dict[fx.Node, str] = {}
    for node in joint.graph_module.graph.nodes:
        path = node.meta.get("custom", {}).get(ANNOTATION)
        number = node.meta.get("seq_nr")
        if path is None and node.meta.get("is_gradient_acc", False):
            path = _common([found[source] for source in node.all_input_nodes if source in found])
        elif path is None:
            path = by_number.get(number)
        elif number is not None and not _is_tagged_backward(node):
            by_number.setdefault(number, path)
        if path is not None:
            found[node] = path
    return found


def _common(paths: Sequence[str]) -> str | None:
    """Return the innermost module that holds all of some modules."""
    parts = [path.split(".") for path in paths]
    shared = [names[0] for names in zip(*parts, strict=False) if len(set(names)) == 1]
    return ".".join(shared) or None


def _behind_tangents(joint: Joint) -> frozenset[fx.Node]:
    """Return the nodes that depend on the gradient that the backward pass starts from."""
    found = {argument.node for argument in joint.of(Source.TANGENT)}
    for node in joint.graph_module.graph.nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _is_tagged_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def _phase(node: fx.Node, path: str | None, backward: frozenset[fx.Node]) -> Phase:
    if _is_tagged_backward(node) or node in backward:
        return Phase.BACKWARD
    in_body = path is None or path == BODY or path.startswith(f"{BODY}.")
    return Phase.FORWARD if in_body else Phase.LOSS


def _shown(path: str | None) -> str:
    if path is None or path == BODY:
        return ""
    return LOSS if path == "" else path.removeprefix(f"{BODY}.")
