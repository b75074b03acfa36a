"""Which ATen operator becomes which kernel calls, and what kernels are told about tensors.

One small function for each operator lowers it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch import fx

from poetmodel.lowered.calls import (
    WORKSPACE,
    Argument,
    Call,
    Condition,
    DataType,
    Ref,
    ScaledLearningRate,
)
from poetmodel.lowered.kernels import kernel_names, parameters
from poetmodel.lowered.loops import RANK, merged
from poetmodel.torch.capturing.joint_graph import location_suffix
from poetmodel.torch.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Lower = Callable[["Lowering"], None]
    Part = Callable[["StridedView", int], "StridedView"]

_TYPES: Final = {
    torch.float32: DataType.REAL,
    torch.int64: DataType.INT32,
    torch.int32: DataType.INT32,
    torch.bool: DataType.UINT8,
    torch.uint8: DataType.UINT8,
    torch.int8: DataType.INT8,
}

_LOWERED: Final[dict[Any, Lower]] = {}
"""Lowering of each operator."""


def lowers(*operators: Any) -> Callable[[Lower], Lower]:
    """Register a function as what lowers some operators."""

    def register(function: Lower) -> Lower:
        _LOWERED.update(dict.fromkeys(operators, function))
        return function

    return register


def lowering_of(target: Any) -> Lower | None:
    """Return the lowering of an operator, or of an operation that PyTorch has no operator for."""
    return _LOWERED.get(target) or _LOWERED.get(type(target))


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedView:
    """A tensor, or a view of one: which elements of a buffer it has, and in which order."""

    buffer: str
    offset: int
    """The first element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Steps of the dimensions [elements]."""
    type: DataType

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def ref(self) -> Ref:
        """The pointer to its first element."""
        return Ref(self.buffer, self.offset)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after the other, the last dimension first."""
        return self.strides == contiguous_strides(self.shape) or all(
            size == 1 or own == step
            for size, own, step in zip(
                self.shape, self.strides, contiguous_strides(self.shape), strict=True
            )
        )

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill one piece of memory, in whatever order of dimensions."""
        return sum(
            (size - 1) * step for size, step in zip(self.shape, self.strides, strict=True)
        ) == self.elements - 1 and 0 not in (
            step for size, step in zip(self.shape, self.strides, strict=True) if size > 1
        )

    def lies_like(self, other: StridedView) -> bool:
        """Whether two looks have their elements in the same order of memory."""
        return self.shape == other.shape and all(
            size == 1 or mine == theirs
            for size, mine, theirs in zip(self.shape, self.strides, other.strides, strict=True)
        )

    def broadcast(self, shape: tuple[int, ...]) -> StridedView:
        """Return the look of a larger shape, with steps of 0 where it repeats."""
        extra = len(shape) - len(self.shape)
        own = zip(shape[extra:], self.shape, self.strides, strict=True)
        strides = (*[0] * extra, *(0 if have != want else step for want, have, step in own))
        return StridedView(
            buffer=self.buffer, offset=self.offset, shape=shape, strides=strides, type=self.type
        )


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the steps of dimensions that lie in order [elements]."""
    steps = [1]
    for size in reversed(shape[1:]):
        steps.append(steps[-1] * max(size, 1))
    return tuple(reversed(steps))[: len(shape)] if shape else ()


def data_type(dtype: torch.dtype) -> DataType | None:
    """Return the type of exported elements; None for a type that is not supported."""
    return _TYPES.get(dtype)


class Lowering:
    """One operation that is being lowered: its operands, and the calls made so far."""

    def __init__(
        self,
        node: fx.Node,
        look: Callable[[fx.Node], StridedView],
        outputs: Mapping[int, StridedView],
        *,
        rates: Mapping[fx.Node, float] | None = None,
    ) -> None:
        self.node = node
        self.args: tuple[Any, ...] = _with_defaults(node)
        """The arguments in the order of the schema, defaults filled in."""
        self.calls: list[Call] = []
        self.where: Condition | None = None
        """When the calls that follow are made."""
        self.workspace_bytes = 0
        self.elementwise = False
        """Whether each element of the output is computed from those at its place, so that it may
        take over the memory of an operand that lies alike."""
        self._look = look
        self._outputs = outputs
        self._rates = rates or {}

    def value(self, argument: Any) -> StridedView:
        """Return the look of an operand."""
        return self._look(argument)

    def learning_rate(self, argument: Any) -> ScaledLearningRate:
        """Return the learning rate that an update is given, as a multiple of the first group's."""
        return ScaledLearningRate(self._rates.get(argument, 1.0))

    def output(self, position: int = 0) -> StridedView:
        """Return the look of an output; a single tensor is the output 0."""
        return self._outputs[position]

    def has_output(self, position: int) -> bool:
        """Whether the operation makes such an output, and with elements."""
        return position in self._outputs

    @property
    def makes_bytes(self) -> bool:
        """Whether its result has bytes, which are stored as truth values are."""
        return getattr(self.node.meta.get("val"), "dtype", None) is torch.uint8

    def call(
        self, kernel: str, *arguments: Argument | StridedView, within: tuple[int, int] | None = None
    ) -> None:
        """Add a call; a look stands for the pointer to its first element."""
        if kernel not in kernel_names():
            self.refuse("has no kernel for elements of this type")
        for argument, wanted in zip(arguments, parameters(kernel), strict=True):
            if isinstance(argument, StridedView) and argument.type.c_name not in wanted:
                kinds = (_NOUNS[kind] for kind in DataType if kind.c_name in wanted)
                self.refuse(f"expected {next(kinds, wanted)}, got {_NOUNS[argument.type]}")
        values = tuple(a.ref if isinstance(a, StridedView) else a for a in arguments)
        self.calls.append(Call(kernel, values, self.where, within))

    def refuse(self, reason: str) -> NoReturn:
        """Raise `CaptureError` with operator, module and reason."""
        raise CaptureError(f"{self.node.target}{location_suffix(self.node)}: {reason}")


def _with_defaults(node: fx.Node) -> tuple[Any, ...]:
    schema = getattr(node.target, "_schema", None)
    arguments: list[Any] = list(node.args)
    if schema is None:
        return tuple(arguments)
    for argument in schema.arguments[len(arguments) :]:
        value = argument.default_value if argument.has_default_value() else None
        arguments.append(node.kwargs.get(argument.name, value))
    return tuple(arguments)


def named(op: Lowering) -> str:
    """Return the name of an operator of PyTorch, without its overload."""
    name: str = op.node.target._schema.name
    return name.removeprefix("aten::")


# -- what kernels are told about tensors -------------------------------------------------------

SUFFIX: Final = {
    DataType.REAL: "",
    DataType.INT32: "_int",
    DataType.UINT8: "_byte",
    DataType.INT8: "_int8",
}
"""Ending of a kernel's name if there is one for each type."""

_WORDS: Final = {
    DataType.REAL: "real",
    DataType.INT32: "int",
    DataType.UINT8: "byte",
    DataType.INT8: "int8",
}
_NOUNS: Final = {
    DataType.REAL: "real numbers",
    DataType.INT32: "integers",
    DataType.UINT8: "truth values",
    DataType.INT8: "quantized values",
}


def table(op: Lowering, *looks: StridedView, in_order: bool = False) -> tuple[int, ...]:
    """Return the shape table of looks of one shape, as ``pm_each.h`` says.

    Dimensions that lie one in the other in all looks are merged. They are sorted by the steps of
    the first look, the largest outermost, unless the elements are wanted `in_order`.
    """
    places = range(len(looks[0].shape))
    dimensions = [
        (looks[0].shape[k], *(look.strides[k] for look in looks))
        for k in places
        if looks[0].shape[k] != 1
    ]
    if not in_order:
        dimensions.sort(key=lambda dimension: -abs(dimension[1]))
    if any(size == 0 for size, *_ in dimensions):
        return (1, 0, *(0 for _ in looks))
    rows = merged(list(zip(*reversed(dimensions), strict=True))) or [[1, *(0 for _ in looks)]]
    if len(rows) > RANK:
        op.refuse(f"expected at most {RANK} dimensions that lie apart, got {len(rows)}")
    return (len(rows), *(number for row in rows for number in row))


def part(look: StridedView, dimension: int, start: int, size: int, step: int = 1) -> StridedView:
    """Return some of the elements of a look along a dimension."""
    stride = look.strides[dimension]
    return replace(
        look,
        offset=look.offset + start * stride,
        shape=_with(look.shape, dimension, size),
        strides=_with(look.strides, dimension, stride * step),
    )


def without(look: StridedView, dimensions: Iterable[int]) -> StridedView:
    """Return the look of a tensor's first element along some dimensions."""
    kept = [k for k in range(len(look.shape)) if k not in set(dimensions)]
    return only(look, kept)


def only(look: StridedView, dimensions: Sequence[int]) -> StridedView:
    """Return a look with some of its dimensions, in the order given."""
    return replace(
        look,
        shape=tuple(look.shape[k] for k in dimensions),
        strides=tuple(look.strides[k] for k in dimensions),
    )


def repeated(look: StridedView, dimension: int) -> StridedView:
    """Return a look that has the same element all along a dimension."""
    return replace(look, strides=_with(look.strides, dimension, 0))


def _with(numbers: tuple[int, ...], index: int, number: int) -> tuple[int, ...]:
    return (*numbers[:index], number, *numbers[index + 1 :])


def wrapped(dimension: int, rank: int) -> int:
    """Return a dimension counted from the first one."""
    return dimension % rank if rank else 0


def workspace(op: Lowering, shape: tuple[int, ...], kind: DataType = DataType.REAL) -> StridedView:
    """Return a tensor of 4-byte elements in the workspace of an operation."""
    offset = op.workspace_bytes // 4
    op.workspace_bytes += 4 * math.prod(shape)
    return StridedView(
        buffer=WORKSPACE, offset=offset, shape=shape, strides=contiguous_strides(shape), type=kind
    )


def operand(op: Lowering, argument: Any, kind: DataType = DataType.REAL) -> StridedView:
    """Return an operand as a tensor of a type: numbers and other types go through workspace."""
    if not isinstance(argument, fx.Node):
        scalar = workspace(op, (), kind)
        number = float(argument) if kind is DataType.REAL else int(argument)
        op.call(f"pm_fill{SUFFIX[kind]}", scalar, 1, number)
        return scalar
    look = op.value(argument)
    if look.type is kind:
        return look
    if kind is DataType.UINT8:
        op.refuse(f"expected truth values, got elements of type {look.type}")
    converted = workspace(op, look.shape, kind)
    copy(op, converted, look)
    return converted


def random_site(node: fx.Node) -> int:
    """Return the position of a node among the random operators of its graph."""
    seeded = torch.Tag.nondeterministic_seeded
    sites = [other for other in node.graph.nodes if seeded in getattr(other.target, "tags", ())]
    return sites.index(node)


def copy(op: Lowering, out: StridedView, x: StridedView) -> None:
    """Add a call that copies a tensor, changing its type where they differ."""
    x = x.broadcast(out.shape)
    if out.type is x.type:
        op.call(f"pm_copy{SUFFIX[x.type]}", out, x, table(op, out, x))
    elif out.type is DataType.UINT8 and op.makes_bytes:
        op.refuse("expected truth values: numbers have no kernel that makes bytes of them")
    else:
        op.call(f"pm_{_WORDS[x.type]}_to_{_WORDS[out.type]}", out, x, table(op, out, x))


def in_order(op: Lowering, look: StridedView) -> StridedView:
    """Return a tensor whose elements lie in order: a copy in workspace if need be."""
    if look.is_contiguous:
        return look
    ordered = workspace(op, look.shape, look.type)
    copy(op, ordered, look)
    return ordered


def fill(op: Lowering, out: StridedView, number: float) -> None:
    """Add a call that gives a dense tensor one value."""
    if not out.is_dense:
        op.refuse("expected an output without gaps")
    value: Argument = float(number) if out.type is DataType.REAL else int(number)
    op.call(f"pm_fill{SUFFIX[out.type]}", out, out.elements, value)


def planes(
    *looks: StridedView, along: int = 2
) -> tuple[tuple[int, ...], tuple[int, int, int, int]]:
    """Return the steps of batch, channels, rows and columns of each look, and the first's sizes.

    `along` of the last dimensions make the planes; batch and channels may be missing.
    """
    steps: list[int] = []
    sizes: list[tuple[int, ...]] = []
    for look in looks:
        missing = along + 2 - len(look.shape)
        outside = len(look.shape) - along
        gap = 2 - along
        shape = [1] * missing + list(look.shape[:outside]) + [1] * gap + list(look.shape[outside:])
        own = [0] * missing + list(look.strides[:outside]) + [0] * gap
        steps += own + list(look.strides[outside:])
        sizes.append(tuple(shape))
    return tuple(steps), sizes[0]  # type: ignore[return-value]
