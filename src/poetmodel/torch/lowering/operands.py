"""What kernels are told about tensors: shape tables, operands of one type, workspace."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from torch import fx

from poetmodel.export.step import WORKSPACE, DataType
from poetmodel.torch.lowering.registry import Look, contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from poetmodel.export.step import Argument
    from poetmodel.torch.lowering.registry import Lowering

    Part = Callable[[Look, int], Look]

_RANK: Final = 6
"""``PM_RANK`` of ``pm_each.h``."""

SUFFIX: Final = {DataType.REAL: "", DataType.INT32: "_int", DataType.UINT8: "_byte"}
"""What the name of a kernel ends with where there is one for each type."""

_WORDS: Final = {DataType.REAL: "real", DataType.INT32: "int", DataType.UINT8: "byte"}


def table(op: Lowering, *looks: Look, in_order: bool = False) -> tuple[int, ...]:
    """Return the shape table of looks of one shape, as ``pm_each.h`` says.

    Dimensions that lie one in the other in all looks are merged. They are sorted by the steps of
    the first look, the largest outermost, unless the elements are wanted `in_order`.
    """
    places = range(len(looks[0].shape))
    found = [
        (looks[0].shape[k], *(look.strides[k] for look in looks))
        for k in places
        if looks[0].shape[k] != 1
    ]
    if not in_order:
        found.sort(key=lambda dimension: -abs(dimension[1]))
    merged: list[tuple[int, ...]] = []
    for dimension in reversed(found):
        inner = merged[-1] if merged else None
        if inner and all(o == i * inner[0] for o, i in zip(dimension[1:], inner[1:], strict=True)):
            merged[-1] = (dimension[0] * inner[0], *inner[1:])
        else:
            merged.append(dimension)
    if any(size == 0 for size, *_ in merged):
        merged = []
        return (1, 0, *(0 for _ in looks))
    if len(merged) > _RANK:
        op.refuse(f"expected at most {_RANK} dimensions that lie apart, got {len(merged)}")
    merged = merged or [(1, *(0 for _ in looks))]
    return (len(merged), *(number for dimension in merged for number in dimension))


def part(look: Look, dimension: int, start: int, size: int, step: int = 1) -> Look:
    """Return some of the elements of a look along a dimension."""
    stride = look.strides[dimension]
    return replace(
        look,
        offset=look.offset + start * stride,
        shape=_with(look.shape, dimension, size),
        strides=_with(look.strides, dimension, stride * step),
    )


def without(look: Look, dimensions: Iterable[int]) -> Look:
    """Return the look of a tensor's first element along some dimensions."""
    kept = [k for k in range(len(look.shape)) if k not in set(dimensions)]
    return only(look, kept)


def only(look: Look, dimensions: Sequence[int]) -> Look:
    """Return a look with some of its dimensions, in the order given."""
    return replace(
        look,
        shape=tuple(look.shape[k] for k in dimensions),
        strides=tuple(look.strides[k] for k in dimensions),
    )


def repeated(look: Look, dimension: int) -> Look:
    """Return a look that has the same element all along a dimension."""
    return replace(look, strides=_with(look.strides, dimension, 0))


def _with(numbers: tuple[int, ...], place: int, number: int) -> tuple[int, ...]:
    return (*numbers[:place], number, *numbers[place + 1 :])


def wrapped(dimension: int, rank: int) -> int:
    """Return a dimension counted from the first one."""
    return dimension % rank if rank else 0


def workspace(op: Lowering, shape: tuple[int, ...], kind: DataType = DataType.REAL) -> Look:
    """Return a tensor of 4-byte elements in the workspace of an operation."""
    offset = op.workspace_bytes // 4
    op.workspace_bytes += 4 * math.prod(shape)
    return Look(
        buffer=WORKSPACE, offset=offset, shape=shape, strides=contiguous_strides(shape), type=kind
    )


def operand(op: Lowering, argument: Any, kind: DataType = DataType.REAL) -> Look:
    """Return an operand as a tensor of a type: numbers and other types go through workspace."""
    if not isinstance(argument, fx.Node):
        found = workspace(op, (), kind)
        number = float(argument) if kind is DataType.REAL else int(argument)
        op.call(f"pm_fill{SUFFIX[kind]}", found, 1, number)
        return found
    look = op.value(argument)
    if look.type is kind:
        return look
    if kind is DataType.UINT8:
        op.refuse(f"expected truth values, got elements of type {look.type}")
    found = workspace(op, look.shape, kind)
    copy(op, found, look)
    return found


def copy(op: Lowering, out: Look, x: Look) -> None:
    """Add a call that copies a tensor, changing its type where they differ."""
    x = x.broadcast(out.shape)
    if out.type is x.type:
        op.call(f"pm_copy{SUFFIX[x.type]}", out, x, table(op, out, x))
    else:
        op.call(f"pm_{_WORDS[x.type]}_to_{_WORDS[out.type]}", out, x, table(op, out, x))


def fill(op: Lowering, out: Look, number: float) -> None:
    """Add a call that gives a dense tensor one value."""
    if not out.is_dense:
        op.refuse("expected an output without gaps")
    value: Argument = float(number) if out.type is DataType.REAL else int(number)
    op.call(f"pm_fill{SUFFIX[out.type]}", out, out.elements, value)


def planes(*looks: Look, along: int = 2) -> tuple[tuple[int, ...], tuple[int, int, int, int]]:
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
