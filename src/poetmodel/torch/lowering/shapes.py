"""Lowerings of operators that concatenate, slice, rearrange, create or index tensors."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from poetmodel.lowered.calls import DataType
from poetmodel.torch.lowering.operands import (
    Lowering,
    StridedView,
    allocate_workspace,
    convert_operand,
    copy,
    fill,
    lowers,
    make_contiguous,
    positive_dimension,
    remove_dimensions,
    repeat_element,
    shape_table,
    slice_view,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

aten: Final = torch.ops.aten
_MAX_MODE: Final = 2
"""PyTorch's number of the mode ``max`` of an ``EmbeddingBag``."""

# -- slices and rearrangements ------------------------------------------------------------------


@lowers(aten.cat.default)
def _lower_cat(op: Lowering) -> None:
    """Lower a concatenation to copies of tensors to slices of the output.

    Tensors of shape (0,) are skipped: PyTorch accepts them beside tensors of any shape.
    """
    out = op.output()
    pieces = [op.value(argument) for argument in op.args[0]]
    pieces = [piece for piece in pieces if piece.shape != (0,)]
    dimension = positive_dimension(op.args[1], len(out.shape))
    start = 0
    for piece in pieces:
        size = piece.shape[dimension]
        copy(op, slice_view(out, dimension, start, size), piece)
        start += size


@lowers(aten.stack.default)
def _lower_stack(op: Lowering) -> None:
    out = op.output()
    dimension = positive_dimension(op.args[1], len(out.shape))
    for index, piece in enumerate(op.args[0]):
        copy(op, _select_index(out, dimension, index), op.value(piece))


def _select_index(view: StridedView, dimension: int, index: int) -> StridedView:
    """Return a view at one index, negative from the end, of a dimension, without the dimension."""
    index = index % view.shape[dimension]
    return remove_dimensions(slice_view(view, dimension, index, 1), (dimension,))


def _slice_dimension(
    view: StridedView, dimension: int, start: int | None, end: int | None, step: int
) -> StridedView:
    """Return a slice of a view along a dimension, by Python's rules for start, end and step."""
    dimension = positive_dimension(dimension, len(view.shape))
    positions = range(*slice(start, end, step).indices(view.shape[dimension]))
    return slice_view(view, dimension, positions.start, len(positions), step)


@lowers(aten.slice_backward.default)
def _lower_slice_backward(op: Lowering) -> None:
    gradient, _, dimension, start, end, step = op.args
    fill(op, op.output(), 0)
    copy(op, _slice_dimension(op.output(), dimension, start, end, step), op.value(gradient))


@lowers(aten.select_backward.default)
def _lower_select_backward(op: Lowering) -> None:
    """Lower to a fill with 0 and a copy of the gradient to the selected index."""
    gradient, _, dimension, index = op.args
    out = op.output()
    fill(op, out, 0)
    copy(
        op,
        _select_index(out, positive_dimension(dimension, len(out.shape)), index),
        op.value(gradient),
    )


@lowers(aten.slice_scatter.default)
def _lower_slice_scatter(op: Lowering) -> None:
    x, y, dimension, start, end, step = op.args
    copy(op, op.output(), op.value(x))
    copy(op, _slice_dimension(op.output(), dimension, start, end, step), op.value(y))


@lowers(aten.select_scatter.default)
def _lower_select_scatter(op: Lowering) -> None:
    x, y, dimension, index = op.args
    out = op.output()
    copy(op, out, op.value(x))
    copy(op, _select_index(out, positive_dimension(dimension, len(out.shape)), index), op.value(y))


@lowers(aten.repeat.default)
def _lower_repeat(op: Lowering) -> None:
    """Lower a repetition to one copy of the input for each position in the output."""
    x, out = op.value(op.args[0]), op.output()
    x = x.broadcast((1,) * (len(out.shape) - len(x.shape)) + x.shape)
    positions = product(*(range(count) for count in op.args[1]))
    for position in positions:
        piece = out
        for dimension, index in enumerate(position):
            size = x.shape[dimension]
            piece = slice_view(piece, dimension, index * size, size)
        copy(op, piece, x)


@lowers(aten.flip.default)
def _lower_flip(op: Lowering) -> None:
    """Lower to one copy, from a view with negative strides."""
    x = op.value(op.args[0])
    for dimension in op.args[1]:
        flipped_dimension = positive_dimension(dimension, len(x.shape))
        x = slice_view(
            x, flipped_dimension, x.shape[flipped_dimension] - 1, x.shape[flipped_dimension], -1
        )
    copy(op, op.output(), x)


@lowers(aten.roll.default)
def _lower_roll(op: Lowering) -> None:
    """Lower a roll to one copy per slice; each rolled dimension divides every slice in two."""
    x, shifts, dimensions = op.args
    x, out = op.value(x), op.output()
    if not dimensions:
        if not (x.is_contiguous and out.is_contiguous):
            op.refuse("expected a contiguous tensor for a roll of all its elements")
        x, out = (replace(view, shape=(view.elements,), strides=(1,)) for view in (x, out))
        dimensions = [0]
    pieces = [(x, out)]
    for shift, dimension in zip(shifts, dimensions, strict=True):
        pieces = [
            roll_piece for pair in pieces for roll_piece in _roll_slices(*pair, shift, dimension)
        ]
    for source, piece in pieces:
        if source.elements:
            copy(op, piece, source)


def _roll_slices(
    x: StridedView, out: StridedView, shift: int, dimension: int
) -> list[tuple[StridedView, StridedView]]:
    """Return the (source, destination) pairs, maybe empty, of beginning and end of a roll."""
    dimension = positive_dimension(dimension, len(x.shape))
    size = x.shape[dimension]
    shift = shift % size if size else 0
    return [
        (
            slice_view(x, dimension, 0, size - shift),
            slice_view(out, dimension, shift, size - shift),
        ),
        (slice_view(x, dimension, size - shift, shift), slice_view(out, dimension, 0, shift)),
    ]


@lowers(aten.tril.default, aten.triu.default)
def _lower_triangle(op: Lowering) -> None:
    """Lower ``tril`` or ``triu``: elements outside of the triangle of each matrix become 0."""
    x, out = op.value(op.args[0]), op.output()
    *_, row, column = range(len(x.shape))
    if x.type is DataType.INT32:
        op.refuse("expected real numbers or truth values, got integers")
    matrices = [remove_dimensions(view, (row, column)) for view in (out, x)]
    strides = [view.strides[k] for view in (out, x) for k in (row, column)]
    is_lower = int(op.node.target is aten.tril.default)
    constants = (x.shape[row], x.shape[column], *strides, op.args[1], is_lower)
    op.call(f"pm_triangle{x.type.suffix}", out, x, shape_table(op, *matrices), *constants)
    op.can_overwrite_operand = True


# -- new tensors --------------------------------------------------------------------------------


_FILL_NUMBERS: Final = {
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.zero.default: 0,
    aten.ones.default: 1,
    aten.ones_like.default: 1,
    aten.new_ones.default: 1,
}
"""Number that fills the result of each operator."""
_FILL_ARGUMENTS: Final = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.fill.Scalar: 1,
    aten.new_full.default: 2,
    aten.scalar_tensor.default: 0,
}
"""Position of the argument whose number fills the result, for each operator."""


@lowers(*_FILL_NUMBERS, *_FILL_ARGUMENTS)
def _lower_full(op: Lowering) -> None:
    position = _FILL_ARGUMENTS.get(op.node.target)
    number = _FILL_NUMBERS[op.node.target] if position is None else op.args[position]
    fill(op, op.output(), number)


@lowers(aten.fill.Tensor)
def _lower_fill(op: Lowering) -> None:
    copy(op, op.output(), op.value(op.args[1]))


@lowers(aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)
def _lower_empty(op: Lowering) -> None:
    """Add no call, because the elements of a tensor from ``empty`` are undefined."""
    del op


@lowers(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _lower_arange(op: Lowering) -> None:
    """Lower to one call. Start and step are truncated to integers if the result has integers."""
    out = op.output()
    start = 0 if op.node.target is aten.arange.default else op.args[0]
    step = op.args[2] if op.node.target is aten.arange.start_step else 1
    number_type = float if out.type is DataType.REAL else int
    op.call(f"pm_arange{out.type.suffix}", out, out.elements, number_type(start), number_type(step))


# -- indices -----------------------------------------------------------------------------------


def _call_gather(
    op: Lowering,
    x: StridedView,
    index: StridedView,
    stride: int,
    size: int,
    *,
    allow_negative: bool = False,
) -> None:
    """Add the call that copies the elements of `x` at indices to the output.

    `x` and `index` have the shape of the output; with stride 0 in `x`, the index alone selects.
    `size` is 0 for an index that combines dimensions. `allow_negative` only changes
    `Call.index_range`: the kernel always counts negative indices from the end.
    """
    out = op.output()
    if x.type is DataType.UINT8:
        op.refuse("expected real numbers or integers, got truth values or bytes")
    op.call(
        f"pm_gather{x.type.suffix}",
        *(out, x, index, shape_table(op, out, x, index), stride, size),
        index_range=_index_range(size, allow_negative=allow_negative),
    )


def _index_range(size: int, *, allow_negative: bool) -> tuple[int, int] | None:
    """Return (minimum, maximum + 1) of valid indices; None for `size` 0, as of combined indices."""
    return (-size if allow_negative else 0, size) if size else None


def _call_scatter(
    op: Lowering,
    out: StridedView,
    x: StridedView,
    index: StridedView,
    *numbers: int,
    accumulate: bool = False,
    allow_negative: bool = False,
) -> None:
    """Add the call that writes `x` to `out` at indices, or adds `x` if `accumulate`.

    As in `_call_gather`, with stride 0 in `out`. `numbers` are stride and size of the indexed
    dimension and, if `accumulate`, the index to skip.
    """
    if x.type is not DataType.REAL:
        op.refuse("expected real numbers")
    kernel = "pm_scatter_add" if accumulate else "pm_scatter"
    index_range = _index_range(numbers[1], allow_negative=allow_negative)
    op.call(
        kernel, out, x, index, shape_table(op, x, out, index), *numbers, index_range=index_range
    )


@lowers(aten.embedding.default)
def _lower_embedding(op: Lowering) -> None:
    _lower_indexing(op, op.value(op.args[0]), [op.args[1]], allow_negative=False)


@lowers(aten.embedding_dense_backward.default)
def _lower_embedding_dense_backward(op: Lowering) -> None:
    """Lower the gradient of a table: fill with 0, then add gradients to the rows at the indices."""
    gradient, indices, row_count, padding_index, scales_by_frequency = op.args
    if scales_by_frequency:
        op.refuse("scale_grad_by_freq=True has no kernel; leave it out")
    out, gradient, index = op.output(), op.value(gradient), op.value(indices)
    fill(op, out, 0)
    targets = _expand_view(remove_dimensions(out, (0,)), 0, gradient.shape, len(index.shape))
    index = _expand_index(index, gradient.shape, 0)
    _call_scatter(
        op, targets, gradient, index, out.strides[0], row_count, padding_index, accumulate=True
    )


@lowers(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def _lower_embedding_bag(op: Lowering) -> None:
    """Lower sums, means or maxima of bags of rows of a table.

    In mode ``max``, the fourth output has the row of each maximum; -1 for a bag without indices
    other than the padding index. Refuses ``scale_grad_by_freq`` and ``sparse``.
    """
    w, *bags, scales_by_frequency, mode, is_sparse, weights, _, padding_index = op.args
    _check_bag_options(op, scales_by_frequency, is_sparse)
    out, w = op.output(), op.value(w)
    if not w.is_contiguous:
        op.refuse("expected a contiguous table")
    max_indices: StridedView | int = op.output(3) if mode == _MAX_MODE and op.has_output(3) else 0
    sizes = (*out.shape, mode, padding_index)
    _call_on_bags(
        op, "pm_embedding_bag", (out, max_indices, w), bags, weights, sizes, row_count=w.shape[0]
    )


@lowers(aten._embedding_bag_backward.default)
def _lower_embedding_bag_backward(op: Lowering) -> None:
    """Lower the gradient of a table: fill with 0, then add the gradients of all bags."""
    (
        gradient,
        *bags,
        _,
        _,
        max_indices,
        _,
        scales_by_frequency,
        mode,
        is_sparse,
        weights,
        padding_index,
    ) = op.args
    _check_bag_options(op, scales_by_frequency, is_sparse)
    dw, gradient = op.output(), make_contiguous(op, op.value(gradient))
    fill(op, dw, 0)
    max_view: StridedView | int = op.value(max_indices) if mode == _MAX_MODE else 0
    sizes, tensors = (*gradient.shape, mode, padding_index), (dw, gradient, max_view)
    _call_on_bags(
        op, "pm_embedding_bag_backward", tensors, bags, weights, sizes, row_count=dw.shape[0]
    )


def _check_bag_options(op: Lowering, scales_by_frequency: bool, is_sparse: bool) -> None:  # noqa: FBT001
    """Refuse the options ``scale_grad_by_freq`` and ``sparse`` of an ``EmbeddingBag``."""
    for name, is_set in (("scale_grad_by_freq", scales_by_frequency), ("sparse", is_sparse)):
        if is_set:
            op.refuse(f"{name}=True has no kernel; leave it out")


def _call_on_bags(
    op: Lowering,
    kernel: str,
    tensors: Sequence[StridedView | int],
    bags: Sequence[Any],
    weights: Any,
    sizes: Sequence[int],
    *,
    row_count: int,
) -> None:
    """Add the call of a kernel on bags of indices into a table with `row_count` rows.

    `bags` are the indices, and the position of each bag's first index. `sizes` are the number of
    bags, columns of the table, mode and padding index.
    """
    indices, offsets = (make_contiguous(op, op.value(tensor)) for tensor in bags)
    weight_view: StridedView | int = (
        0 if weights is None else make_contiguous(op, op.value(weights))
    )
    bag_count, *other_sizes = sizes
    all_sizes = (bag_count, offsets.elements, indices.elements, *other_sizes)
    op.call(kernel, *tensors, indices, offsets, weight_view, *all_sizes, index_range=(0, row_count))


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def _lower_index(op: Lowering) -> None:
    _lower_indexing(op, op.value(op.args[0]), op.args[1])


@lowers(aten.index_select.default)
def _lower_index_select(op: Lowering) -> None:
    x, dimension, index = op.args
    x = op.value(x)
    _lower_indexing(
        op, x, [*[None] * positive_dimension(dimension, len(x.shape)), index], allow_negative=False
    )


def _lower_indexing(
    op: Lowering, x: StridedView, indices: Sequence[Any], *, allow_negative: bool = True
) -> None:
    """Lower indexing to a gather; `indices` has None for dimensions without an index."""
    source, index, stride, size = _combine_indices(op, x, indices, op.output().shape)
    _call_gather(op, source, index, stride, size, allow_negative=allow_negative)


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def _lower_index_put(op: Lowering) -> None:
    """Lower to a copy of the tensor, and a scatter that writes or adds values at indices."""
    x, indices, values, accumulate = op.args
    out = op.output()
    copy(op, out, op.value(x))
    index_views = [op.value(argument) for argument in indices if argument is not None]
    index_shape = tuple(torch.broadcast_shapes(*(view.shape for view in index_views)))
    indexed_dimensions = {
        dimension for dimension, argument in enumerate(indices) if argument is not None
    }
    unindexed_sizes = [
        size for dimension, size in enumerate(out.shape) if dimension not in indexed_dimensions
    ]
    first_index_dimension = _index_position(indices)
    shape = (
        *unindexed_sizes[:first_index_dimension],
        *index_shape,
        *unindexed_sizes[first_index_dimension:],
    )
    targets, index, stride, size = _combine_indices(op, out, indices, shape)
    # No index is skipped: valid ones are below the size, combined ones are not negative.
    skipped_index = ((size or -1),) if accumulate else ()
    values = convert_operand(op, values).broadcast(shape)
    index_numbers = (stride, size, *skipped_index)
    _call_scatter(
        op, targets, values, index, *index_numbers, accumulate=accumulate, allow_negative=True
    )


def _index_position(indices: Sequence[Any]) -> int:
    """Return the position of the index dimensions in the result of indexing, as in PyTorch."""
    dimensions = [dimension for dimension, argument in enumerate(indices) if argument is not None]
    return dimensions[0] if dimensions[-1] - dimensions[0] + 1 == len(dimensions) else 0


def _combine_indices(
    op: Lowering, x: StridedView, indices: Sequence[Any], shape: tuple[int, ...]
) -> tuple[StridedView, StridedView, int, int]:
    """Return (view of `x`, index, stride, size) for a gather or scatter of this `shape`.

    Elements are at ``index * stride``; negative indices count from `size`. Several indices are
    combined in workspace into one of offsets, none negative: stride 1, size 0.
    """
    dimensions = [dimension for dimension, argument in enumerate(indices) if argument is not None]
    views = [op.value(indices[dimension]) for dimension in dimensions]
    if any(view.type is not DataType.INT32 for view in views):
        op.refuse("expected integers as indices; truth values make tensors of unknown size")
    stride, size = x.strides[dimensions[0]], x.shape[dimensions[0]]
    index = views[0]
    if len(dimensions) > 1:
        index_shape = tuple(torch.broadcast_shapes(*(view.shape for view in views)))
        index = allocate_workspace(op, index_shape, DataType.INT32)
        fill(op, index, 0)
        for dimension, view in zip(dimensions, views, strict=True):
            broadcast_view = view.broadcast(index_shape)
            op.call(
                "pm_add_index",
                *(index, broadcast_view, shape_table(op, index, broadcast_view)),
                *(x.strides[dimension], x.shape[dimension]),
                index_range=_index_range(x.shape[dimension], allow_negative=True),
            )
        stride, size = 1, 0
    first_index_dimension = _index_position(indices)
    source = _expand_view(
        remove_dimensions(x, dimensions), first_index_dimension, shape, len(index.shape)
    )
    return source, _expand_index(index, shape, first_index_dimension), stride, size


def _expand_view(
    view: StridedView, first_index_dimension: int, shape: tuple[int, ...], index_rank: int
) -> StridedView:
    """Return a view, which lacks indexed dimensions, in the shape of the result of indexing."""
    strides = (
        *view.strides[:first_index_dimension],
        *[0] * index_rank,
        *view.strides[first_index_dimension:],
    )
    return replace(view, shape=shape, strides=strides)


def _expand_index(
    index: StridedView, shape: tuple[int, ...], first_index_dimension: int
) -> StridedView:
    """Return an index in `shape`, that of the result of indexing; new dimensions have stride 0."""
    trailing_rank = len(shape) - first_index_dimension - len(index.shape)
    return replace(
        index,
        shape=shape,
        strides=(*[0] * first_index_dimension, *index.strides, *[0] * trailing_rank),
    )


# -- indices along a dimension ------------------------------------------------------------------


@lowers(aten.gather.default)
def _lower_gather(op: Lowering) -> None:
    x, dimension, index, _ = op.args
    x, index = op.value(x), op.value(index)
    source, stride, size = _view_along_dimension(x, dimension, index.shape)
    _call_gather(op, source, index, stride, size)


@lowers(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def _lower_scatter(op: Lowering) -> None:
    """Lower to a copy of the tensor, and a scatter (an addition for ``scatter_add``) to it."""
    x, dimension, index, values = op.args
    out, index = op.output(), op.value(index)
    copy(op, out, op.value(x))
    targets, stride, size = _view_along_dimension(out, dimension, index.shape)
    value_view = convert_operand(op, values)
    is_number = not isinstance(values, fx.Node)
    value_view = (
        value_view.broadcast(index.shape) if is_number else replace(value_view, shape=index.shape)
    )
    accumulate = op.node.target is aten.scatter_add.default
    skipped_index = (size,) if accumulate else ()
    _call_scatter(
        op, targets, value_view, index, stride, size, *skipped_index, accumulate=accumulate
    )


def _view_along_dimension(
    x: StridedView, dimension: int, shape: tuple[int, ...]
) -> tuple[StridedView, int, int]:
    """Return (view with stride 0 in the dimension, its stride, its size) for an index."""
    if not x.shape:
        return replace(x, shape=shape, strides=(0,) * len(shape)), 0, 1
    dimension = positive_dimension(dimension, len(x.shape))
    source = replace(repeat_element(x, dimension), shape=shape)
    return source, x.strides[dimension], x.shape[dimension]
