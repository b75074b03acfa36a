"""Operators that put tensors together or take them apart, make new ones, or follow indices."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from poetmodel.lowered.calls import DataType
from poetmodel.torch.lowering.operands import (
    SUFFIX,
    Lowering,
    StridedView,
    copy,
    fill,
    in_order,
    lowers,
    operand,
    part,
    repeated,
    table,
    without,
    workspace,
    wrapped,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

aten: Final = torch.ops.aten
_MAXIMUM: Final = 2
"""How PyTorch numbers the maximum among the modes of an ``EmbeddingBag``."""

# -- pieces -------------------------------------------------------------------------------------


@lowers(aten.cat.default)
def _lower_cat(op: Lowering) -> None:
    out = op.output()
    pieces = [op.value(argument) for argument in op.args[0]]
    pieces = [piece for piece in pieces if piece.shape != (0,)]
    dimension = wrapped(op.args[1], len(out.shape))
    start = 0
    for piece in pieces:
        size = piece.shape[dimension]
        copy(op, part(out, dimension, start, size), piece)
        start += size


@lowers(aten.stack.default)
def _lower_stack(op: Lowering) -> None:
    out = op.output()
    dimension = wrapped(op.args[1], len(out.shape))
    for index, piece in enumerate(op.args[0]):
        copy(op, _selected(out, dimension, index), op.value(piece))


def _selected(look: StridedView, dimension: int, index: int) -> StridedView:
    index = index % look.shape[dimension]
    return without(part(look, dimension, index, 1), (dimension,))


def _sliced(
    look: StridedView, dimension: int, start: int | None, end: int | None, step: int
) -> StridedView:
    dimension = wrapped(dimension, len(look.shape))
    places = range(*slice(start, end, step).indices(look.shape[dimension]))
    return part(look, dimension, places.start, len(places), step)


@lowers(aten.slice_backward.default)
def _lower_slice_backward(op: Lowering) -> None:
    gradient, _, dimension, start, end, step = op.args
    fill(op, op.output(), 0)
    copy(op, _sliced(op.output(), dimension, start, end, step), op.value(gradient))


@lowers(aten.select_backward.default)
def _lower_select_backward(op: Lowering) -> None:
    gradient, _, dimension, index = op.args
    out = op.output()
    fill(op, out, 0)
    copy(op, _selected(out, wrapped(dimension, len(out.shape)), index), op.value(gradient))


@lowers(aten.slice_scatter.default)
def _lower_slice_scatter(op: Lowering) -> None:
    x, y, dimension, start, end, step = op.args
    copy(op, op.output(), op.value(x))
    copy(op, _sliced(op.output(), dimension, start, end, step), op.value(y))


@lowers(aten.select_scatter.default)
def _lower_select_scatter(op: Lowering) -> None:
    x, y, dimension, index = op.args
    out = op.output()
    copy(op, out, op.value(x))
    copy(op, _selected(out, wrapped(dimension, len(out.shape)), index), op.value(y))


@lowers(aten.repeat.default)
def _lower_repeat(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    x = x.broadcast((1,) * (len(out.shape) - len(x.shape)) + x.shape)
    places = product(*(range(count) for count in op.args[1]))
    for indices in places:
        piece = out
        for dimension, index in enumerate(indices):
            size = x.shape[dimension]
            piece = part(piece, dimension, index * size, size)
        copy(op, piece, x)


@lowers(aten.flip.default)
def _lower_flip(op: Lowering) -> None:
    x = op.value(op.args[0])
    for dimension in op.args[1]:
        at = wrapped(dimension, len(x.shape))
        x = part(x, at, x.shape[at] - 1, x.shape[at], -1)
    copy(op, op.output(), x)


@lowers(aten.roll.default)
def _lower_roll(op: Lowering) -> None:
    x, shifts, dimensions = op.args
    x, out = op.value(x), op.output()
    if not dimensions:
        if not (x.is_contiguous and out.is_contiguous):
            op.refuse("expected a tensor that lies in order, for a roll of all its elements")
        x, out = (replace(look, shape=(look.elements,), strides=(1,)) for look in (x, out))
        dimensions = [0]
    pieces = [(x, out)]
    for shift, dimension in zip(shifts, dimensions, strict=True):
        pieces = [half for pair in pieces for half in _rolled(*pair, shift, dimension)]
    for source, piece in pieces:
        if source.elements:
            copy(op, piece, source)


def _rolled(
    x: StridedView, out: StridedView, shift: int, dimension: int
) -> list[tuple[StridedView, StridedView]]:
    dimension = wrapped(dimension, len(x.shape))
    size = x.shape[dimension]
    shift = shift % size if size else 0
    return [
        (part(x, dimension, 0, size - shift), part(out, dimension, shift, size - shift)),
        (part(x, dimension, size - shift, shift), part(out, dimension, 0, shift)),
    ]


@lowers(aten.tril.default, aten.triu.default)
def _lower_tril(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    *_, row, column = range(len(x.shape))
    if x.type is DataType.INT32:
        op.refuse("expected real numbers or truth values, got integers")
    matrices = [without(look, (row, column)) for look in (out, x)]
    steps = [look.strides[k] for look in (out, x) for k in (row, column)]
    is_lower = int(op.node.target is aten.tril.default)
    numbers = (x.shape[row], x.shape[column], *steps, op.args[1], is_lower)
    op.call(f"pm_triangle{SUFFIX[x.type]}", out, x, table(op, *matrices), *numbers)
    op.elementwise = True


# -- new tensors --------------------------------------------------------------------------------


_CONSTANTS: Final = {
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.zero.default: 0,
    aten.ones.default: 1,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
}
_NUMBER_AT: Final = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.fill.Scalar: 1,
    aten.new_full.default: 2,
    aten.scalar_tensor.default: 0,
}
"""The argument that all elements are."""


@lowers(*_CONSTANTS, *_NUMBER_AT)
def _lower_full(op: Lowering) -> None:
    position = _NUMBER_AT.get(op.node.target)
    number = _CONSTANTS[op.node.target] if position is None else op.args[position]
    fill(op, op.output(), number)


@lowers(aten.fill.Tensor)
def _lower_fill(op: Lowering) -> None:
    copy(op, op.output(), op.value(op.args[1]))


@lowers(aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)
def _lower_empty(op: Lowering) -> None:
    """Leave what is there."""
    del op


@lowers(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _lower_arange(op: Lowering) -> None:
    out = op.output()
    start = 0 if op.node.target is aten.arange.default else op.args[0]
    step = op.args[2] if op.node.target is aten.arange.start_step else 1
    kind = float if out.type is DataType.REAL else int
    op.call(f"pm_arange{SUFFIX[out.type]}", out, out.elements, kind(start), kind(step))


# -- indices -----------------------------------------------------------------------------------


def _gather(
    op: Lowering,
    x: StridedView,
    index: StridedView,
    step: int,
    size: int,
    *,
    below_zero: bool = False,
) -> None:
    """Copy what indices say from x, which has the place of the output's elements besides."""
    out = op.output()
    if x.type is DataType.UINT8:
        op.refuse("expected numbers, got truth values")
    op.call(
        f"pm_gather{SUFFIX[x.type]}",
        *(out, x, index, table(op, out, x, index), step, size),
        within=_within(size, below_zero=below_zero),
    )


def _within(size: int, *, below_zero: bool) -> tuple[int, int] | None:
    """Return the range of an index; nothing where several were made one, of no such size."""
    return (-size if below_zero else 0, size) if size else None


def _scatter(
    op: Lowering,
    out: StridedView,
    x: StridedView,
    index: StridedView,
    *numbers: int,
    accumulate: bool = False,
    below_zero: bool = False,
) -> None:
    """Write x where indices say; `numbers` are step, size, and for sums the index to skip."""
    if x.type is not DataType.REAL:
        op.refuse("expected real numbers")
    kernel = "pm_scatter_add" if accumulate else "pm_scatter"
    within = _within(numbers[1], below_zero=below_zero)
    op.call(kernel, out, x, index, table(op, x, out, index), *numbers, within=within)


@lowers(aten.embedding.default)
def _lower_embedding(op: Lowering) -> None:
    _index(op, op.value(op.args[0]), [op.args[1]], below_zero=False)


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


@lowers(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def _lower_embedding_bag(op: Lowering) -> None:
    w, *bags, by_frequency, mode, sparse, weights, _, padding = op.args
    _refuse_of_bags(op, by_frequency, sparse)
    out, w = op.output(), op.value(w)
    if not w.is_contiguous:
        op.refuse("expected a table whose rows lie in order")
    most: StridedView | int = op.output(3) if mode == _MAXIMUM and op.has_output(3) else 0
    numbers = (*out.shape, mode, padding)
    _bags(op, "pm_embedding_bag", (out, most, w), bags, weights, numbers, rows=w.shape[0])


@lowers(aten._embedding_bag_backward.default)
def _lower_embedding_bag_backward(op: Lowering) -> None:
    gradient, *bags, _, _, most, _, by_frequency, mode, sparse, weights, padding = op.args
    _refuse_of_bags(op, by_frequency, sparse)
    dw, gradient = op.output(), in_order(op, op.value(gradient))
    fill(op, dw, 0)
    chosen: StridedView | int = op.value(most) if mode == _MAXIMUM else 0
    numbers, tensors = (*gradient.shape, mode, padding), (dw, gradient, chosen)
    _bags(op, "pm_embedding_bag_backward", tensors, bags, weights, numbers, rows=dw.shape[0])


def _refuse_of_bags(op: Lowering, by_frequency: bool, sparse: bool) -> None:  # noqa: FBT001
    for name, given in (("scale_grad_by_freq", by_frequency), ("sparse", sparse)):
        if given:
            op.refuse(f"{name}=True has no kernel; leave it out")


def _bags(
    op: Lowering,
    kernel: str,
    tensors: Sequence[StridedView | int],
    bags: Sequence[Any],
    weights: Any,
    numbers: Sequence[int],
    *,
    rows: int,
) -> None:
    """Call a kernel on bags: indices, where each begins; `numbers` of bags, columns, and others."""
    index, offset = (in_order(op, op.value(tensor)) for tensor in bags)
    factors: StridedView | int = 0 if weights is None else in_order(op, op.value(weights))
    count, *others = numbers
    sizes = (count, offset.elements, index.elements, *others)
    op.call(kernel, *tensors, index, offset, factors, *sizes, within=(0, rows))


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def _lower_index(op: Lowering) -> None:
    _index(op, op.value(op.args[0]), op.args[1])


@lowers(aten.index_select.default)
def _lower_index_select(op: Lowering) -> None:
    x, dimension, index = op.args
    x = op.value(x)
    _index(op, x, [*[None] * wrapped(dimension, len(x.shape)), index], below_zero=False)


def _index(
    op: Lowering, x: StridedView, indices: Sequence[Any], *, below_zero: bool = True
) -> None:
    there, index, step, size = _indexed(op, x, indices, op.output().shape)
    _gather(op, there, index, step, size, below_zero=below_zero)


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def _lower_index_put(op: Lowering) -> None:
    x, indices, values, accumulate = op.args
    out = op.output()
    copy(op, out, op.value(x))
    given = [op.value(argument) for argument in indices if argument is not None]
    common = tuple(torch.broadcast_shapes(*(look.shape for look in given)))
    used = {k for k, argument in enumerate(indices) if argument is not None}
    kept = [size for k, size in enumerate(out.shape) if k not in used]
    first = _first(indices)
    shape = (*kept[:first], *common, *kept[first:])
    there, index, step, size = _indexed(op, out, indices, shape)
    # No index is as large as the size; of several that were made one, none is below 0.
    skipped = ((size or -1),) if accumulate else ()
    values = operand(op, values).broadcast(shape)
    numbers = (step, size, *skipped)
    _scatter(op, there, values, index, *numbers, accumulate=accumulate, below_zero=True)


def _first(indices: Sequence[Any]) -> int:
    """Return the position of the indices' dimensions: in place of theirs, or before all others."""
    used = [k for k, argument in enumerate(indices) if argument is not None]
    return used[0] if used[-1] - used[0] + 1 == len(used) else 0


def _indexed(
    op: Lowering, x: StridedView, indices: Sequence[Any], shape: tuple[int, ...]
) -> tuple[StridedView, StridedView, int, int]:
    """Return x and its index in the shape of what is indexed, and step and size of the index."""
    used = [k for k, argument in enumerate(indices) if argument is not None]
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
                within=_within(x.shape[k], below_zero=True),
            )
        step, size = 1, 0
    first = _first(indices)
    there = _spread(without(x, used), first, shape, len(index.shape))
    return there, _along(index, shape, first), step, size


def _spread(kept: StridedView, first: int, shape: tuple[int, ...], rank: int) -> StridedView:
    """Return a look in the shape of what is indexed, without steps where an index chooses."""
    strides = (*kept.strides[:first], *[0] * rank, *kept.strides[first:])
    return replace(kept, shape=shape, strides=strides)


def _along(index: StridedView, shape: tuple[int, ...], first: int) -> StridedView:
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


def _beside(x: StridedView, dimension: int, shape: tuple[int, ...]) -> tuple[StridedView, int, int]:
    """Return x in the shape of an index along a dimension, and step and size of the index."""
    if not x.shape:
        return replace(x, shape=shape), 0, 1
    dimension = wrapped(dimension, len(x.shape))
    there = replace(repeated(x, dimension), shape=shape)
    return there, x.strides[dimension], x.shape[dimension]
