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
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from poetmodel.errors import PoetModelError
from poetmodel.graph import Phase
from poetmodel.torch.capturing.joint import LOSS
from poetmodel.torch.capturing.replay import (
    Sampler,
    Workspaces,
    call,
    flops_of,
    replay,
    storage_key,
    tensors_in,
)
from poetmodel.torch.capturing.signature import (
    ANNOTATION,
    BODY,
    InputKind,
    Joint,
    OutputKind,
    OutputSpec,
    in_module,
    shown_path,
)
from poetmodel.torch.errors import RAISED, CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import fx

    from poetmodel.torch.capturing.replay import Execute


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
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
class Made:
    """Outputs of one operation, as seen in a run."""

    sizes_bytes: tuple[int, ...]
    """Size of each new storage [B]."""
    outputs: tuple[tuple[int, TensorLayout], ...]
    """Storage of each new output among these, and its layout."""
    flops: int
    moved_bytes: int
    workspace_bytes: int
    """Workspace while it runs [B]."""
    gradient_fits: tuple[bool, bool] | None = None
    """Whether the gradient of an update has the parameter's layout and fills its memory."""

    def to_list(self) -> list[Any]:
        """Return it as plain values."""
        outputs = [
            [
                number,
                layout.position,
                str(layout.dtype).removeprefix("torch."),
                list(layout.shape),
                list(layout.stride),
                layout.offset,
            ]
            for number, layout in self.outputs
        ]
        fits = None if self.gradient_fits is None else list(self.gradient_fits)
        counts = [self.flops, self.moved_bytes, self.workspace_bytes]
        return [list(self.sizes_bytes), outputs, *counts, fits]

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Made:
        """Return the object that `to_list` made plain values of."""
        sizes, outputs, flops, moved_bytes, workspace_bytes, fits = values
        layouts = (
            TensorLayout(
                position=position,
                dtype=getattr(torch, dtype),
                shape=tuple(shape),
                stride=tuple(stride),
                offset=offset,
            )
            for _, position, dtype, shape, stride, offset in outputs
        )
        numbers = (output[0] for output in outputs)
        return cls(
            sizes_bytes=tuple(sizes),
            outputs=tuple(zip(numbers, layouts, strict=True)),
            flops=flops,
            moved_bytes=moved_bytes,
            workspace_bytes=workspace_bytes,
            gradient_fits=None if fits is None else (fits[0], fits[1]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStorage:
    """A tensor of the training graph: one piece of memory that a unit makes."""

    index: int
    """Its number, as in the training graph."""
    name: str
    unit: int
    """The unit that makes it."""
    bytes: int
    layouts: tuple[TensorLayout, ...]
    """The outputs of the unit that lie in it, nearly always one."""
    replaces: int | None = None
    """The state that it is the next value of, and in whose memory it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Sources of the values of some nodes."""

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
    workspace_bytes: int = 0
    """Workspace while it runs; 0 also if that was not measured [B]."""
    in_place: tuple[tuple[int, int], ...] = ()
    """Output that may take over the memory of an input: numbers of both."""

    @property
    def is_source(self) -> bool:
        """Whether it stands for what is there before the step: state, or an input."""
        return self.phase in (Phase.STATE, Phase.INPUT)


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


class Units:
    """A captured step as units and storages, found by running it once on the inputs of the capture.

    A backward operation belongs to the module of the forward operation whose sequence number it
    carries. A sum of gradients carries none of its own: it belongs to the innermost module that
    holds all that it adds. Raises `CaptureError` if an operation fails, or returns an input beside
    something new. What is `known` of an earlier capture of the same graph spares the run.
    Workspaces are 0 unless they are `measured`.
    """

    def __init__(
        self, joint: Joint, *, known: Mapping[int, Made] | None = None, measured: bool = True
    ) -> None:
        self._joint = joint
        self._order = {node: k for k, node in enumerate(joint.graph_module.graph.nodes)}
        self._paths = _all_paths(joint)
        self._backward = _behind_tangents(joint)
        self._seen: Counter[str] = Counter()
        self._makers: set[fx.Node] = set()
        self.units: list[Unit] = []
        """In the order of execution."""
        self.storages: list[TensorStorage] = []
        """In the order of their units."""
        self.direct: dict[fx.Node, tuple[int, int]] = {}
        """Nodes that stand for an output of a unit as it is: number of storage, and of layout."""
        self.made: dict[int, Made] = {}
        """Outputs of the operations, by their place in the captured graph."""
        self._done: set[fx.Node] = set()
        self._begin()
        if known is None:
            self._run(measured=measured)
        else:
            nodes = list(joint.graph_module.graph.nodes)
            for index, observed in known.items():
                self._add(nodes[index], observed)
        self._end()
        self.emissions: list[Emission] = []
        """One per result, in the order in which they come; those of arguments at the end."""
        for result in joint.results:
            reads = self.reading((result.node,))
            after = max((self.storages[number].unit for number in reads.storages), default=None)
            self.emissions.append(Emission(result=result, reads=reads, after=after))
        self.emissions.sort(key=lambda e: len(self.units) if e.after is None else e.after)

    def _run(self, *, measured: bool) -> None:
        """Run the step, with equal operations computed once."""
        workspaces = Workspaces()
        compute: Execute = workspaces if measured else call
        sampler = Sampler(self._joint, compute)
        try:
            replay(self._joint, partial(self._execute, sampler, sampler.like, workspaces))
        except CaptureError:
            if not sampler.like:
                raise
            # It may have failed on the outputs of others.
            replay(self._joint, partial(self._execute, compute, {}, workspaces))

    def _begin(self) -> None:
        """Do what comes before the operations."""

    def _end(self) -> None:
        """Do what comes after the operations, and before their results are looked for."""

    def _execute(
        self,
        compute: Execute,
        like: Mapping[fx.Node, fx.Node],
        workspaces: Workspaces,
        node: fx.Node,
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        try:
            value = compute(node, arguments, keywords)
        except PoetModelError:
            raise
        except RAISED as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise CaptureError(
                f"{self._joint.name}: {node.target}{in_module(node)} fails on the example inputs "
                f"with {type(error).__name__}: {reason}; try one ordinary training step first"
            ) from error
        if node.target is not operator.getitem and node not in self._done:
            if node in like:  # what it makes is not there
                observed = self.made.get(self._order[like[node]])
            else:
                observed = self._observe(node, arguments, keywords, value)
            if observed is not None:
                size = workspaces.sizes_bytes.get(like.get(node, node), 0)
                observed = replace(observed, workspace_bytes=size)
                self._add(node, observed)
                self.made[self._order[node]] = observed
            self._done.add(node)
        return value

    def _observe(
        self, node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any], value: Any
    ) -> Made | None:
        """Return the output of an operation, if it is anything new."""
        inputs = tensors_in((arguments, keywords))
        there = {storage_key(tensor) for tensor in inputs}
        single = not isinstance(value, tuple | list)
        sizes: dict[int, int] = {}
        outputs: list[tuple[int, TensorLayout]] = []
        for position, output in enumerate((value,) if single else value):
            if not isinstance(output, torch.Tensor) or storage_key(output) in there:
                continue
            key = storage_key(output)
            sizes[key] = output.untyped_storage().nbytes()
            layout = TensorLayout(
                position=None if single else position,
                dtype=output.dtype,
                shape=tuple(output.shape),
                stride=tuple(output.stride()),
                offset=output.storage_offset(),
            )
            outputs.append((list(sizes).index(key), layout))
        if not sizes:
            return None
        read_bytes = sum(
            # At most a storage for each of its views.
            min(tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size())
            for tensor in inputs
        )
        return Made(
            sizes_bytes=tuple(sizes.values()),
            outputs=tuple(outputs),
            flops=flops_of(node.target, arguments, keywords, value),
            moved_bytes=read_bytes + sum(sizes.values()),
            workspace_bytes=0,
        )

    def _add(self, node: fx.Node, observed: Made) -> None:
        """Add a unit with what it makes."""
        first = len(self.storages)
        layouts: list[list[TensorLayout]] = [[] for _ in observed.sizes_bytes]
        for number, layout in observed.outputs:
            pick = (operator.getitem, layout.position)
            picked = [user for user in node.users if (user.target, *user.args[1:]) == pick]
            here = (first + number, len(layouts[number]))
            self.direct.update(dict.fromkeys([node] if layout.position is None else picked, here))
            layouts[number].append(layout)
        name, op, phase = self._label(node)
        for number, size_bytes in enumerate(observed.sizes_bytes):
            self.storages.append(
                TensorStorage(
                    index=first + number,
                    name=f"{name}:{number}" if len(layouts) > 1 else name,
                    unit=len(self.units),
                    bytes=size_bytes,
                    layouts=tuple(layouts[number]),
                )
            )
        self._makers.add(node)
        self.units.append(
            Unit(
                index=len(self.units),
                name=name,
                op=op,
                phase=phase,
                node=node,
                reads=self.reading(node.all_input_nodes),
                storages=tuple(range(first, len(self.storages))),
                random=torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()),
                flops=observed.flops,
                moved_bytes=observed.moved_bytes,
                workspace_bytes=observed.workspace_bytes,
            )
        )

    def _label(self, node: fx.Node) -> tuple[str, str, Phase]:
        """Return name, operator and phase of an operation."""
        path = self._paths.get(node, BODY)
        phase = Phase.FORWARD if path.partition(".")[0] == BODY else Phase.LOSS
        if _is_tagged_backward(node) or node in self._backward:
            phase = Phase.BACKWARD
        packet = getattr(node.target, "overloadpacket", node.target)
        op = str(getattr(packet, "__name__", packet))
        module = shown_path(path) if path else LOSS
        name = f"{module}/{op}" if module else op
        self._seen[name] += 1
        count = self._seen[name]
        return f"{name}#{count}" if count > 1 else name, op, phase

    def reading(self, nodes: Iterable[fx.Node]) -> Reading:
        """Follow values back to the storages behind them, and the views between."""
        storages: set[int] = set()
        views: set[fx.Node] = set()
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if node in self.direct:
                storages.add(self.direct[node][0])
            elif node not in views and node.op == "call_function":
                if node.target is operator.getitem and node.args[0] in self._makers:
                    raise CaptureError(
                        f"{self._joint.name}: {node.args[0].target} returns one of its inputs "
                        "beside something new, and cannot be scheduled; leave it out of the step"
                    )
                views.add(node)
                pending.extend(node.all_input_nodes)
        order = sorted(views, key=self._order.__getitem__)
        return Reading(storages=tuple(sorted(storages)), views=tuple(order))


# -- names and phases ---------------------------------------------------------------------------


def _all_paths(joint: Joint) -> dict[fx.Node, str]:
    """Return the path of the module of each operation, where it is known."""
    by_number: dict[int, str] = {}
    paths: dict[fx.Node, str] = {}
    for node in joint.graph_module.graph.nodes:
        path = node.meta.get("custom", {}).get(ANNOTATION)
        number = node.meta.get("seq_nr")
        if path is None and node.meta.get("is_gradient_acc", False):
            path = _common([paths[source] for source in node.all_input_nodes if source in paths])
        elif path is None:
            path = by_number.get(number)
        elif number is not None and not _is_tagged_backward(node):
            by_number.setdefault(number, path)
        if path is not None:
            paths[node] = path
    return paths


def _common(paths: Sequence[str]) -> str | None:
    """Return the innermost module that holds all of some modules."""
    parts = [path.split(".") for path in paths]
    shared = [names[0] for names in zip(*parts, strict=False) if len(set(names)) == 1]
    return ".".join(shared) or None


def _behind_tangents(joint: Joint) -> frozenset[fx.Node]:
    """Return the nodes that depend on the gradient that the backward pass starts from."""
    reached = {argument.node for argument in joint.of(InputKind.TANGENT)}
    for node in joint.graph_module.graph.nodes:
        if any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return frozenset(reached)


def _is_tagged_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("partitioner_tag") == "is_backward")
