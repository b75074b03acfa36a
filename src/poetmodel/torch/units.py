"""Units: the operations that make new memory, and the tensors that they make.

A tensor is one storage, whatever number of views look at it. A unit is an operation that makes at
least one. Views and the picking of one output of several are not scheduled: whoever reads a view
makes it again from the tensor behind it, so that letting a tensor go is letting one thing go.

Which outputs are new memory is seen in one run, by the identity of their storage: the schemas of
operators do not tell it reliably.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from poetmodel.torch.annotation import in_module
from poetmodel.torch.failures import RAISED, CaptureError
from poetmodel.torch.measures import flops_of, moved_bytes, storage_key, tensors_in
from poetmodel.torch.naming import Label, labels
from poetmodel.torch.replay import call, replay

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch
    from torch import fx

    from poetmodel.torch.joint import Joint
    from poetmodel.torch.roles import Argument, Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one output of an operation lies in its storage."""

    position: int | None
    """Which output; None where the operation returns one tensor and no tuple."""
    dtype: torch.dtype
    """Element type."""
    shape: tuple[int, ...]
    """Sizes of the dimensions [elements]."""
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
    """As in the training graph."""
    unit: int
    """The unit that makes it."""
    bytes: int
    """Size [B]."""
    layouts: tuple[Layout, ...]
    """The outputs of the unit that lie in it, nearly always one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What must be at hand to get the values of some nodes."""

    storages: tuple[int, ...]
    """Numbers of the storages behind them, ascending."""
    arguments: tuple[Argument, ...]
    """Arguments behind them."""
    views: tuple[fx.Node, ...]
    """Nodes to run anew, in order; none of them makes memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """An operation that is scheduled: one node of the training graph."""

    index: int
    """Its number, as in the training graph."""
    label: Label
    """Name, operator, module and phase."""
    node: fx.Node
    """The operation."""
    reads: Reading
    """What its arguments are made of."""
    storages: tuple[int, ...]
    """Numbers of what it makes."""
    random: bool
    """Whether it draws random numbers: saved and restored state makes it repeatable."""
    flops: int
    """Floating-point operations."""
    moved_bytes: int
    """Bytes that it reads, parameters too, and writes [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """When and from what a result is handed out."""

    result: Result
    """What it is."""
    reads: Reading
    """What its value is made of."""
    after: int | None
    """The unit after which it is there; None where it is an argument or a view of one."""


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
    borrowed: frozenset[int | None]
    """Positions of outputs in memory that was there before."""
    flops: int
    moved_bytes: int


def find_units(joint: Joint) -> Units:
    """Find the units of a captured step, by running it once.

    Parameters
    ----------
    joint : Joint
        The captured step; runs on the inputs and the device that it was captured with.

    Raises
    ------
    CaptureError
        If an operation returns one of its inputs beside something new.
    """
    made = _observe(joint)
    labelled = labels(joint, tuple(made))
    numbers = {node: index for index, node in enumerate(made)}
    storages: list[TensorStorage] = []
    direct: dict[fx.Node, tuple[int, int]] = {}
    outputs: list[tuple[int, ...]] = []
    for node, facts in made.items():
        first = len(storages)
        names = _storage_names(labelled[node].name, len(facts.storages))
        for name, (size, layouts) in zip(names, facts.storages, strict=True):
            for place, layout in enumerate(layouts):
                for reader in _standing_for(node, layout.position):
                    direct[reader] = (len(storages), place)
            storages.append(
                TensorStorage(
                    index=len(storages),
                    name=name,
                    unit=numbers[node],
                    bytes=size,
                    layouts=layouts,
                )
            )
        outputs.append(tuple(range(first, len(storages))))
    tracer = _Tracer(joint, made, direct)
    units = tuple(
        Unit(
            index=numbers[node],
            label=labelled[node],
            node=node,
            reads=tracer.reading(node.all_input_nodes),
            storages=outputs[numbers[node]],
            random=_is_random(node),
            flops=facts.flops,
            moved_bytes=facts.moved_bytes,
        )
        for node, facts in made.items()
    )
    emissions = tuple(_emission(result, tracer, storages) for result in joint.results)
    return Units(
        units=units,
        storages=tuple(storages),
        emissions=emissions,
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
            msg = (
                f"{joint.name}: {node.target}{in_module(node)} fails on the example inputs with "
                f"{type(error).__name__}: {reason}; try one ordinary training step first"
            )
            raise CaptureError(msg) from error
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
    borrowed: set[int | None] = set()
    for place, output in enumerate((value,) if single else value):
        if not hasattr(output, "untyped_storage"):
            continue
        position, key = None if single else place, storage_key(output)
        if key in there:
            borrowed.add(position)
            continue
        sizes[key] = output.untyped_storage().nbytes()
        layouts.setdefault(key, []).append(
            Layout(
                position=position,
                dtype=output.dtype,
                shape=tuple(output.shape),
                stride=tuple(output.stride()),
                offset=output.storage_offset(),
            )
        )
    return _Made(
        storages=tuple((sizes[key], tuple(found)) for key, found in layouts.items()),
        borrowed=frozenset(borrowed),
        flops=flops_of(node, arguments, keywords, value) if sizes else 0,
        moved_bytes=moved_bytes(inputs) + sum(sizes.values()),
    )


def _storage_names(name: str, count: int) -> tuple[str, ...]:
    return (name,) if count == 1 else tuple(f"{name}:{place}" for place in range(count))


def _standing_for(node: fx.Node, position: int | None) -> Iterable[fx.Node]:
    """Yield the nodes whose value is one output of a node."""
    if position is None:
        return (node,)
    return tuple(
        user for user in node.users if user.target is operator.getitem and user.args[1] == position
    )


def _is_random(node: fx.Node) -> bool:
    import torch

    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


class _Tracer:
    """Follows values back through views to the storages and arguments behind them."""

    def __init__(
        self,
        joint: Joint,
        made: Mapping[fx.Node, _Made],
        direct: Mapping[fx.Node, tuple[int, int]],
    ) -> None:
        self._joint = joint
        self._made = made
        self._direct = direct
        self._arguments = {argument.node: argument for argument in joint.arguments}
        self._order = {node: k for k, node in enumerate(joint.graph_module.graph.nodes)}

    def reading(self, nodes: Iterable[fx.Node]) -> Reading:
        """Return what the values of some nodes are made of."""
        storages: set[int] = set()
        arguments: dict[fx.Node, Argument] = {}
        views: set[fx.Node] = set()
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if node in self._direct:
                storages.add(self._direct[node][0])
            elif node in self._arguments:
                arguments[node] = self._arguments[node]
            elif node not in views and node.op == "call_function":
                self._check(node)
                views.add(node)
                pending.extend(node.all_input_nodes)
        return Reading(
            storages=tuple(sorted(storages)),
            arguments=tuple(
                arguments[node] for node in sorted(arguments, key=self._order.__getitem__)
            ),
            views=tuple(sorted(views, key=self._order.__getitem__)),
        )

    def _check(self, node: fx.Node) -> None:
        if node.target is operator.getitem and node.args[0] in self._made:
            msg = (
                f"{self._joint.name}: {node.args[0].target} returns one of its inputs beside "
                "something new, and cannot be scheduled; leave it out of the step"
            )
            raise CaptureError(msg)


def _emission(result: Result, tracer: _Tracer, storages: list[TensorStorage]) -> Emission:
    reads = tracer.reading((result.node,))
    makers = [storages[index].unit for index in reads.storages]
    return Emission(result=result, reads=reads, after=max(makers, default=None))
