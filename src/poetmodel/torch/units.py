"""Units: the operations that make new memory, and the tensors that they make.

A tensor is one storage, whatever number of views look at it. A unit is an operation that makes at
least one. Views and the picking of one output of several are not scheduled: whoever reads a view
makes it again from the tensor behind it, so that letting a tensor go is letting one thing go.

Which outputs are new memory is seen in one run, by the identity of their storage: the schemas of
operators do not tell it reliably.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry

from poetmodel.graph import Phase
from poetmodel.torch.errors import RAISED, CaptureError
from poetmodel.torch.graph_signature import (
    ANNOTATION,
    BODY,
    InputKind,
    Joint,
    OutputKind,
    OutputSpec,
    in_module,
    shown_path,
)
from poetmodel.torch.interpreter import call, replay, storage_key, tensors_in
from poetmodel.torch.joint import LOSS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import fx


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one output of an operation lies in its storage."""

    position: int | None
    """Which output; None where the operation returns one tensor and no tuple."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Steps of the dimensions [elements]."""
    offset: int
    """First element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStorage:
    """A tensor of the training graph: one piece of memory that a unit makes."""

    index: int
    """Its number, as in the training graph."""
    name: str
    unit: int
    """The unit that makes it."""
    bytes: int
    layouts: tuple[Layout, ...]
    """The outputs of the unit that lie in it, nearly always one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What must be at hand to get the values of some nodes."""

    storages: tuple[int, ...]
    """Numbers of the storages behind them, ascending."""
    views: tuple[fx.Node, ...]
    """Nodes to run again, in order; none of them makes memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """An operation that is scheduled: one node of the training graph."""

    index: int
    """Its number, as in the training graph."""
    name: str
    """Unique: module path and operator, such as ``layer1.0.conv1/convolution``."""
    op: str
    """The operator, such as ``convolution``."""
    phase: Phase
    node: fx.Node
    reads: Reading
    storages: tuple[int, ...]
    """Numbers of what it makes."""
    random: bool
    """Whether it draws random numbers: saved and restored state makes it repeatable."""
    flops: int
    moved_bytes: int
    """Bytes that it reads, parameters too, and writes [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """When and from what a result is handed out."""

    result: OutputSpec
    reads: Reading
    after: int | None
    """The unit after which it is there; None where it is an argument or a view of one."""

    @property
    def held(self) -> bool:
        """Whether it is handed out at the end of the step, as the loss and new buffers are."""
        return self.result.kind is not OutputKind.GRADIENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The captured step as units and storages."""

    units: tuple[Unit, ...]
    """In the order of execution."""
    storages: tuple[TensorStorage, ...]
    """In the order of their units."""
    emissions: tuple[Emission, ...]
    """One per result, in the order of the results."""
    direct: Mapping[fx.Node, tuple[int, int]]
    """Nodes that stand for an output of a unit as it is: number of storage, number of layout."""


@dataclass(frozen=True, slots=True)
class _Made:
    """What one run showed of a node."""

    storages: tuple[tuple[int, tuple[Layout, ...]], ...]
    """Size and layouts of each new piece of memory."""
    flops: int
    moved_bytes: int


def find_units(joint: Joint) -> Units:
    """Find the units of a captured step, by running it once on the inputs of the capture.

    Raises `CaptureError` if an operation fails, or returns an input beside something new.
    """
    made = _observe(joint)
    labels = _labels(joint, made)
    order = {node: k for k, node in enumerate(joint.graph_module.graph.nodes)}
    storages: list[TensorStorage] = []
    direct: dict[fx.Node, tuple[int, int]] = {}

    def reading(nodes: Iterable[fx.Node]) -> Reading:
        numbers, views = _sources(joint.name, nodes, made, direct)
        return Reading(
            storages=tuple(sorted(numbers)), views=tuple(sorted(views, key=order.__getitem__))
        )

    units = []
    for index, (node, facts) in enumerate(made.items()):
        name, op, phase = labels[node]
        first = len(storages)
        for number, (size, layouts) in enumerate(facts.storages):
            for place, layout in enumerate(layouts):
                readers = [node]
                if layout.position is not None:
                    pick = (operator.getitem, layout.position)
                    readers = [user for user in node.users if (user.target, *user.args[1:]) == pick]
                direct.update(dict.fromkeys(readers, (len(storages), place)))
            storages.append(
                TensorStorage(
                    index=len(storages),
                    name=f"{name}:{number}" if len(facts.storages) > 1 else name,
                    unit=index,
                    bytes=size,
                    layouts=layouts,
                )
            )
        units.append(
            Unit(
                index=index,
                name=name,
                op=op,
                phase=phase,
                node=node,
                reads=reading(node.all_input_nodes),
                storages=tuple(range(first, len(storages))),
                random=torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()),
                flops=facts.flops,
                moved_bytes=facts.moved_bytes,
            )
        )
    emissions = []
    for result in joint.results:
        reads = reading((result.node,))
        after = max((storages[number].unit for number in reads.storages), default=None)
        emissions.append(Emission(result=result, reads=reads, after=after))
    return Units(
        units=tuple(units),
        storages=tuple(storages),
        emissions=tuple(emissions),
        direct=MappingProxyType(direct),
    )


def _observe(joint: Joint) -> dict[fx.Node, _Made]:
    """Run the step once; return what was seen of the nodes that make memory."""
    made: dict[fx.Node, _Made] = {}

    def execute(node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        try:
            value = call(node, arguments, keywords)
        except RAISED as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise CaptureError(
                f"{joint.name}: {node.target}{in_module(node)} fails on the example inputs with "
                f"{type(error).__name__}: {reason}; try one ordinary training step first"
            ) from error
        if node.target is not operator.getitem:
            facts = _facts(node, arguments, keywords, value)
            if facts.storages:
                made[node] = facts
        return value

    replay(joint, execute)
    return made


def _facts(
    node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any], value: Any
) -> _Made:
    inputs = tensors_in((arguments, keywords))
    there = {storage_key(tensor) for tensor in inputs}
    single = not isinstance(value, tuple | list)
    sizes: dict[int, int] = {}
    layouts: dict[int, list[Layout]] = {}
    for place, output in enumerate((value,) if single else value):
        if not isinstance(output, torch.Tensor) or storage_key(output) in there:
            continue
        key = storage_key(output)
        sizes[key] = output.untyped_storage().nbytes()
        layouts.setdefault(key, []).append(
            Layout(
                position=None if single else place,
                dtype=output.dtype,
                shape=tuple(output.shape),
                stride=tuple(output.stride()),
                offset=output.storage_offset(),
            )
        )
    read_bytes = sum(
        # At most a storage for each of its views.
        min(tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size())
        for tensor in inputs
    )
    return _Made(
        storages=tuple((sizes[key], tuple(found)) for key, found in layouts.items()),
        flops=_flops(node, arguments, keywords, value) if sizes else 0,
        moved_bytes=read_bytes + sum(sizes.values()),
    )


def _flops(node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any], value: Any) -> int:
    """Return the FLOP of one operation.

    Convolutions, matrix products and attention as ``torch.utils.flop_counter`` counts them. It
    knows nothing else; any other operation counts one FLOP per element of its largest operand, so
    that devices without a memory bandwidth do not take it for free.
    """
    if is_counted(node):
        formula = flop_registry[node.target.overloadpacket]
        return int(formula(*arguments, **keywords, out_val=value))
    sizes = [tensor.numel() for tensor in tensors_in((arguments, keywords, value))]
    return max(sizes, default=0)


def is_counted(node: fx.Node) -> bool:
    """Return whether an operation is a convolution, matrix product or attention."""
    return getattr(node.target, "overloadpacket", None) in flop_registry


def _sources(
    name: str,
    nodes: Iterable[fx.Node],
    made: Mapping[fx.Node, _Made],
    direct: Mapping[fx.Node, tuple[int, int]],
) -> tuple[set[int], set[fx.Node]]:
    """Follow values back to the storages behind them; return their numbers, and views between."""
    storages: set[int] = set()
    views: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node in direct:
            storages.add(direct[node][0])
        elif node not in views and node.op == "call_function":
            if node.target is operator.getitem and node.args[0] in made:
                raise CaptureError(
                    f"{name}: {node.args[0].target} returns one of its inputs "
                    "beside something new, and cannot be scheduled; leave it out of the step"
                )
            views.add(node)
            pending.extend(node.all_input_nodes)
    return storages, views


# -- names and phases ---------------------------------------------------------------------------


def _labels(joint: Joint, nodes: Iterable[fx.Node]) -> dict[fx.Node, tuple[str, str, Phase]]:
    """Return name, operator and phase of some operations of a captured step.

    A backward operation belongs to the module of the forward operation whose sequence number it
    carries. A sum of gradients carries none of its own: it belongs to the innermost module that
    holds all that it adds.
    """
    paths = _all_paths(joint)
    backward = _behind_tangents(joint)
    seen: Counter[str] = Counter()
    found = {}
    for node in nodes:
        path = paths.get(node, BODY)
        phase = Phase.FORWARD if path.partition(".")[0] == BODY else Phase.LOSS
        if _is_tagged_backward(node) or node in backward:
            phase = Phase.BACKWARD
        packet = getattr(node.target, "overloadpacket", node.target)
        op = str(getattr(packet, "__name__", packet))
        module = shown_path(path) if path else LOSS
        name = f"{module}/{op}" if module else op
        seen[name] += 1
        if seen[name] > 1:
            name = f"{name}#{seen[name]}"
        found[node] = (name, op, phase)
    return found


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
    found = {argument.node for argument in joint.of(InputKind.TANGENT)}
    for node in joint.graph_module.graph.nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _is_tagged_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("partitioner_tag") == "is_backward")
