"""Operators that read and write where indices say."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from poetmodel.export.step import DataType
from poetmodel.torch.lowering.operands import (
    SUFFIX,
    copy,
    fill,
    operand,
    repeated,
    table,
    without,
    workspace,
    wrapped,
)
from poetmodel.torch.lowering.registry import Look, Lowering, lowers

if TYPE_CHECKING:
    from collections.abc import Sequence

aten: Final = torch.ops.aten


def _gather(op: Lowering, x: Look, index: Look, step: int, size: int) -> None:
    """Copy what indices say from x, which has the place of the output's elements besides."""
    out = op.output()
    if x.type is DataType.UINT8:
        op.refuse("expected numbers, got truth values")
    op.call(f"pm_gather{SUFFIX[x.type]}", out, x, index, table(op, out, x, index), step, size)


def _scatter(
    op: Lowering, out: Look, x: Look, index: Look, *numbers: int, accumulate: bool = False
) -> None:
    """Write x where indices say; `numbers` are step, size, and for sums the index to skip."""
    if x.type is not DataType.REAL:
        op.refuse("expected real numbers")
    kernel = "pm_scatter_add" if accumulate else "pm_scatter"
    op.call(kernel, out, x, index, table(op, x, out, index), *numbers)


@lowers(aten.embedding.default)
def _lower_embedding(op: Lowering) -> None:
    _index(op, op.value(op.args[0]), [op.args[1]])


@lowers(aten.embedding_dense_backward.default)
def _lower_embedding_dense_backward(op: Lowering) -> None:
    gradient, indices, count, padding, by_frequency = op.args
    if by_frequency:
        op.refuse("scale_grad_by_freq=True has no kernel; leave it out")
    out, gradient, index = op.output(), op.value(gradient), op.value(indices)
    fill(op, out, 0)
    there = _spread(without(out, (0,)), 0, gradient.shape, len(index.shape))
    index = _along(index, gradient.shape, 0)
    _scatter(op, there, gradient, index, out.strides[0], count, padding, accumulate=True)


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def _lower_index(op: Lowering) -> None:
    _index(op, op.value(op.args[0]), op.args[1])


@lowers(aten.index_select.default)
def _lower_index_select(op: Lowering) -> None:
    x, dimension, index = op.args
    x = op.value(x)
    _index(op, x, [*[None] * wrapped(dimension, len(x.shape)), index])


def _index(op: Lowering, x: Look, indices: Sequence[Any]) -> None:
    there, index, step, size = _indexed(op, x, indices, op.output().shape)
    _gather(op, there, index, step, size)


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def _lower_index_put(op: Lowering) -> None:
    x, indices, values, accumulate = op.args
    out = op.output()
    copy(op, out, op.value(x))
    given = [op.value(each) for each in indices if each is not None]
    common = tuple(torch.broadcast_shapes(*(look.shape for look in given)))
    kept = [out.shape[k] for k in range(len(out.shape)) if not _is_index(indices, k)]
    first = _first(indices)
    shape = (*kept[:first], *common, *kept[first:])
    there, index, step, size = _indexed(op, out, indices, shape)
    # No index is as large as the size; of several that were made one, none is below 0.
    skipped = ((size or -1),) if accumulate else ()
    values = operand(op, values).broadcast(shape)
    _scatter(op, there, values, index, step, size, *skipped, accumulate=accumulate)


def _is_index(indices: Sequence[Any], dimension: int) -> bool:
    return dimension < len(indices) and indices[dimension] is not None


def _first(indices: Sequence[Any]) -> int:
    """Return where the dimensions of the indices come: in place of theirs, or before all others."""
    used = [k for k, each in enumerate(indices) if each is not None]
    return used[0] if used[-1] - used[0] + 1 == len(used) else 0


def _indexed(
    op: Lowering, x: Look, indices: Sequence[Any], shape: tuple[int, ...]
) -> tuple[Look, Look, int, int]:
    """Return x and its index in the shape of what is indexed, and step and size of the index."""
    used = [k for k, each in enumerate(indices) if each is not None]
    looks = [op.value(indices[k]) for k in used]
    if any(look.type is not DataType.INT32 for look in looks):
        op.refuse("expected integers as indices; truth values make tensors of unknown size")
    step, size = x.strides[used[0]], x.shape[used[0]]
    index = looks[0]
    if len(used) > 1:
        common = tuple(torch.broadcast_shapes(*(look.shape for look in looks)))
        index = workspace(op, common, DataType.INT32)
        fill(op, index, 0)
        for k, look in zip(used, looks, strict=True):
            given = look.broadcast(common)
            op.call(
                "pm_add_index",
                *(index, given, table(op, index, given)),
                *(x.strides[k], x.shape[k]),
            )
        step, size = 1, 0
    first = _first(indices)
    there = _spread(without(x, used), first, shape, len(index.shape))
    return there, _along(index, shape, first), step, size


def _spread(kept: Look, first: int, shape: tuple[int, ...], rank: int) -> Look:
    """Return a look in the shape of what is indexed, without steps where an index chooses."""
    strides = (*kept.strides[:first], *[0] * rank, *kept.strides[first:])
    return replace(kept, shape=shape, strides=strides)


def _along(index: Look, shape: tuple[int, ...], first: int) -> Look:
    """Return an index in the shape of what is indexed; its dimensions begin at `first`."""
    after = len(shape) - first - len(index.shape)
    return replace(index, shape=shape, strides=(*[0] * first, *index.strides, *[0] * after))


# -- indices along a dimension ------------------------------------------------------------------


@lowers(aten.gather.default)
def _lower_gather(op: Lowering) -> None:
    x, dimension, index, _ = op.args
    x, index = op.value(x), op.value(index)
    there, step, size = _beside(x, dimension, index.shape)
    _gather(op, there, index, step, size)


@lowers(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def _lower_scatter(op: Lowering) -> None:
    x, dimension, index, values = op.args
    out, index = op.output(), op.value(index)
    copy(op, out, op.value(x))
    there, step, size = _beside(out, dimension, index.shape)
    given = operand(op, values)
    number = not isinstance(values, fx.Node)
    given = given.broadcast(index.shape) if number else replace(given, shape=index.shape)
    accumulate = op.node.target is aten.scatter_add.default
    skipped = (size,) if accumulate else ()
    _scatter(op, there, given, index, step, size, *skipped, accumulate=accumulate)


def _beside(x: Look, dimension: int, shape: tuple[int, ...]) -> tuple[Look, int, int]:
    """Return x in the shape of an index along a dimension, and step and size of the index."""
    if not x.shape:
        return replace(x, shape=shape), 0, 1
    dimension = wrapped(dimension, len(x.shape))
    there = replace(repeated(x, dimension), shape=shape)
    return there, x.strides[dimension], x.shape[dimension]
