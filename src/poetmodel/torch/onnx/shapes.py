"""ONNX operators that read shapes, move, select or write elements, or create tensors."""

from __future__ import annotations

from math import prod
from typing import Any, Final

import torch
from torch.nn import functional

from poetmodel.torch.onnx.operators import (
    OnnxNode,
    flatten_numbers,
    read_axes,
    read_axis,
    register_operator,
    select_positions,
    shape_of,
    to_integers,
    to_number_list,
    to_tensor,
    to_tensors,
)


@register_operator("Shape")
def _read_shape(node: OnnxNode, x: Any) -> tuple[int, ...]:
    return shape_of(x)[node.get("start", 0) : node.get("end")]


@register_operator("Size")
def _count_input_elements(_: OnnxNode, x: Any) -> int:
    return prod(shape_of(x))


@register_operator("Reshape", numbers=(1,))
def _reshape(node: OnnxNode, x: Any, shape: Any) -> torch.Tensor:
    """Reshape; a size of 0 copies the size of the input's axis, unless ``allowzero`` is set."""
    x = to_tensor(x)
    sizes = to_integers(node, shape, "shape")
    if not node.get("allowzero", 0):
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


@register_operator("Flatten")
def _flatten(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    """Reshape to a matrix: rows are the axes before ``axis``, columns the axes from it on."""
    axis = node.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(prod(x.shape[:axis]), prod(x.shape[axis:]))


@register_operator("Squeeze", numbers=(1,))
def _squeeze(node: OnnxNode, x: Any, axes: Any = None) -> torch.Tensor:
    """Remove the given axes, by default all axes of size 1."""
    x = to_tensor(x)
    removed_axes = read_axes(node, axes, rank=x.ndim)
    removed_axes = (
        [axis for axis, size in enumerate(x.shape) if size == 1]
        if removed_axes is None
        else removed_axes
    )
    return x.reshape([size for axis, size in enumerate(x.shape) if axis not in removed_axes])


@register_operator("Unsqueeze", numbers=(1,))
def _unsqueeze(node: OnnxNode, x: Any, axes: Any) -> torch.Tensor:
    """Insert axes of size 1; `axes` are their positions in the result."""
    x = to_tensor(x)
    new_axes = read_axes(node, axes, rank=x.ndim + len(to_integers(node, axes, "axes"))) or []
    sizes = list(x.shape)
    for axis in sorted(new_axes):
        sizes.insert(axis, 1)
    return x.reshape(sizes)


@register_operator("Transpose")
def _transpose(node: OnnxNode, x: Any) -> torch.Tensor:
    x = to_tensor(x)
    return x.permute(node.get("perm", tuple(range(x.ndim))[::-1]))


@register_operator("Expand", numbers=(1,))
def _expand(node: OnnxNode, x: Any, shape: Any) -> torch.Tensor:
    x = to_tensor(x)
    return x.expand(torch.broadcast_shapes(x.shape, to_integers(node, shape, "shape")))


@register_operator("Tile", numbers=(1,))
def _tile(node: OnnxNode, x: Any, repeats: Any) -> torch.Tensor:
    return to_tensor(x).repeat(to_integers(node, repeats, "repeats"))


@register_operator("Concat")
def _concat(node: OnnxNode, *values: Any) -> torch.Tensor:
    pieces = to_tensors(*values)
    return torch.cat(pieces, read_axis(node, pieces[0].ndim))


@register_operator("Split", numbers=(1,))
def _split_axis(
    node: OnnxNode, x: torch.Tensor, sizes: Any = None
) -> tuple[torch.Tensor, ...] | torch.Tensor:
    """Split an axis into the given sizes, by default into one piece for each output of the node."""
    axis = read_axis(node, x.ndim)
    if sizes is None:
        size = -(-x.shape[axis] // node.output_count)
        last_size = x.shape[axis] - size * (node.output_count - 1)
        piece_sizes = [*[size] * (node.output_count - 1), last_size]
    else:
        piece_sizes = to_integers(node, sizes, "sizes")
    pieces: tuple[torch.Tensor, ...] = torch.split(x, piece_sizes, axis)
    return pieces if node.output_count > 1 else pieces[0]


# PyTorch's exporter writes a split as a sequence if the exporter's optimizer is off.


@register_operator("SplitToSequence", numbers=(1,))
def _split_to_sequence(node: OnnxNode, x: torch.Tensor, sizes: Any = None) -> list[torch.Tensor]:
    """Split an axis by sizes, one size, or singly; ``keepdims`` 0 removes the axis of singles."""
    axis = read_axis(node, x.ndim)
    if sizes is None:
        pieces = torch.split(x, 1, axis)
        return list(
            pieces if node.get("keepdims", 1) else (piece.squeeze(axis) for piece in pieces)
        )
    split_sizes = to_integers(node, sizes, "sizes")
    return list(torch.split(x, split_sizes if isinstance(sizes, tuple) else split_sizes[0], axis))


@register_operator("SequenceConstruct")
def _make_sequence(_: OnnxNode, *values: Any) -> list[torch.Tensor]:
    return list(to_tensors(*values))


@register_operator("SequenceAt", numbers=(1,))
def _select_sequence_element(
    node: OnnxNode, values: list[torch.Tensor], position: Any
) -> torch.Tensor:
    return values[to_integers(node, position, "position")[0]]


@register_operator("ConcatFromSequence")
def _concat_sequence(node: OnnxNode, values: list[torch.Tensor]) -> torch.Tensor:
    function = torch.stack if node.get("new_axis", 0) else torch.cat
    return function(values, node.get("axis"))


@register_operator("Slice", numbers=(1, 2, 3, 4))
def _slice(node: OnnxNode, x: Any, *bounds: Any) -> torch.Tensor:
    """Slice by starts, ends, axes (default: the first) and steps (1); negative steps reverse."""
    x = to_tensor(x)
    starts, ends, *options = (
        None if value is None else to_integers(node, value, name)
        for value, name in zip(bounds, ("starts", "ends", "axes", "steps"), strict=False)
    )
    axes, steps = [*options, None, None][:2]
    assert starts is not None and ends is not None  # noqa: S101, PT018 - ONNX requires both
    axes = list(range(len(starts))) if axes is None else axes
    for axis, start, end, step in zip(axes, starts, ends, steps or [1] * len(axes), strict=True):
        x = _slice_axis(x, axis % x.ndim, slice(start, end, step))
    return x


def _slice_axis(x: torch.Tensor, axis: int, bounds: slice) -> torch.Tensor:
    """Slice one axis by Python's rules for `bounds`, which are clipped to the axis.

    A negative step flips the axis first: PyTorch slices with positive steps only.
    """
    positions = range(*bounds.indices(x.shape[axis]))
    if positions.step > 0:
        leading_slices = [slice(None)] * axis
        return x[
            (
                *leading_slices,
                slice(positions.start, max(positions.stop, positions.start), positions.step),
            )
        ]
    if not positions:
        return x.narrow(axis, 0, 0)
    reversed_slice = x.narrow(axis, positions[-1], positions[0] - positions[-1] + 1).flip(axis)
    return (
        reversed_slice
        if positions.step == -1
        else _slice_axis(reversed_slice, axis, slice(None, None, -positions.step))
    )


@register_operator("Trilu", numbers=(1,))
def _select_triangle(node: OnnxNode, x: Any, diagonal: Any = None) -> torch.Tensor:
    (offset,) = [0] if diagonal is None else to_integers(node, diagonal, "diagonal")
    return (torch.triu if node.get("upper", 1) else torch.tril)(to_tensor(x), offset)


@register_operator("DepthToSpace")
def _move_channels_to_space(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    """Move groups of channels into square blocks of pixels, by ``mode``: DCR (default) or CRD."""
    n, channels, height, width = x.shape
    size = node.get("blocksize")
    output_channels = channels // size**2
    if node.get("mode", "DCR") == "DCR":
        blocks = x.reshape(n, size, size, output_channels, height, width).permute(0, 3, 4, 1, 5, 2)
    else:
        blocks = x.reshape(n, output_channels, size, size, height, width).permute(0, 1, 4, 2, 5, 3)
    return blocks.reshape(n, output_channels, height * size, width * size)


@register_operator("SpaceToDepth")
def _move_space_to_channels(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    """Move square blocks of pixels into channels: the inverse of ``DepthToSpace`` in mode DCR."""
    n, channels, height, width = x.shape
    size = node.get("blocksize")
    blocks = x.reshape(n, channels, height // size, size, width // size, size)
    return blocks.permute(0, 3, 5, 1, 2, 4).reshape(
        n, channels * size**2, height // size, width // size
    )


@register_operator(
    "Pad",
    numbers=(1, 2, 3),
    unsupported_features=(
        "`mode` wrap; reflect and edge except on the length of a signal, or height and width of an "
        "image"
    ),
)
def _pad(node: OnnxNode, x: Any, pads: Any, value: Any = None, axes: Any = None) -> torch.Tensor:
    """Pad axes with a constant, by reflection, or by repeating the edges.

    `pads` has the padding before each of `axes`, then that after each. Negative padding crops, and
    is supported only with a constant.
    """
    x = to_tensor(x)
    widths = to_integers(node, pads, "pads")
    padded_axes = read_axes(node, axes, rank=x.ndim)
    padded_axes = list(range(x.ndim)) if padded_axes is None else padded_axes
    widths_by_axis = {
        axis: (widths[index], widths[index + len(padded_axes)])
        for index, axis in enumerate(padded_axes)
    }
    axis_widths = [widths_by_axis.get(axis, (0, 0)) for axis in range(x.ndim)]
    while axis_widths and axis_widths[0] == (0, 0):
        axis_widths = axis_widths[1:]
    widths = [width for pair in reversed(axis_widths) for width in pair]
    mode = node.get("mode", "constant")
    if not widths:
        return x
    if mode == "constant":
        fill_value = 0.0 if value is None else to_number_list(node, value, "value")[0]
        return functional.pad(x, widths, value=fill_value)
    if x.ndim == 4 and len(widths) == 2:  # noqa: PLR2004
        widths += [0, 0]  # PyTorch pads images on height and width together
    padded_count = len(widths) // 2
    is_supported = (
        min(widths) >= 0
        and x.ndim in (padded_count + 1, padded_count + 2)
        and padded_count <= _MAX_PADDED_AXES
    )
    if mode not in _MODES or not is_supported:
        raise node.unsupported_error(
            f"its mode is {mode}; expected constant, or reflect or edge on the length "
            "of a signal, or height and width of an image"
        )
    return functional.pad(x, widths, mode=_MODES[mode])


_MAX_PADDED_AXES: Final = 2
"""Maximum number of axes padded by reflection or edges, as in C kernels."""
_MODES: Final = {"reflect": "reflect", "edge": "replicate"}
"""Mode of PyTorch's `pad` for each mode of ONNX."""


# -- indices -----------------------------------------------------------------------------------


def _positive_indices(indices: torch.Tensor, size: int) -> torch.Tensor:
    """Return indices from 0: adds `size` to negative ones, which count from the end."""
    return torch.where(indices < 0, indices + size, indices)


@register_operator("Gather", weights=(0,))
def _gather(node: OnnxNode, x: Any, indices: Any) -> torch.Tensor:
    """Select slices of an axis by index. Indices are numbers or a tensor.

    Negative indices count from the end, except in a tensor that selects rows of a floating-point
    matrix: there PyTorch raises an error.
    """
    x = to_tensor(x)
    axis = read_axis(node, x.ndim)
    size = x.shape[axis]
    if not torch.is_tensor(indices):
        outside = [index for index in flatten_numbers(indices) if not -size <= index < size]
        if outside:
            raise node.unsupported_error(
                f"expected indices from {-size} to {size - 1} for axis {axis} of {size} elements, "
                f"got {outside[0]}; correct the file"
            )
    if isinstance(indices, int):
        return x.select(axis, indices % size)
    if torch.is_tensor(indices):
        if axis == 0 and x.ndim == 2 and x.is_floating_point():  # noqa: PLR2004
            return functional.embedding(indices, x)
        return x[(*[slice(None)] * axis, indices.to(torch.int64))]
    selected_slices = select_positions(
        x, axis, [index % size for index in flatten_numbers(indices)]
    )
    return selected_slices.reshape(*x.shape[:axis], *shape_of(indices), *x.shape[axis + 1 :])


@register_operator("GatherElements")
def _gather_elements(node: OnnxNode, x: Any, indices: Any) -> torch.Tensor:
    x, indices = to_tensors(x, indices)
    axis = read_axis(node, x.ndim)
    return torch.gather(x, axis, _positive_indices(indices.to(torch.int64), x.shape[axis]))


@register_operator("GatherND", unsupported_features="`batch_dims`")
def _gather_nd(node: OnnxNode, x: Any, indices: Any) -> torch.Tensor:
    """Select elements or slices by index tuples, which are in the last dimension of `indices`."""
    if node.get("batch_dims", 0):
        raise node.unsupported_error("batch_dims is not 0, which is not supported")
    x, indices = to_tensors(x, indices)
    gathered: torch.Tensor = x[tuple(indices.to(torch.int64).unbind(-1))]
    return gathered


@register_operator("ScatterElements")
def _scatter_elements(node: OnnxNode, x: Any, indices: Any, updates: Any) -> torch.Tensor:
    """Return a copy of `x` with updates written, or reduced, at indices along an axis."""
    x, indices, updates = to_tensors(x, indices, updates)
    axis = read_axis(node, x.ndim)
    targets = _positive_indices(indices.to(torch.int64), x.shape[axis])
    reduction = node.get("reduction", "none")
    if reduction == "none":
        return torch.scatter(x, axis, targets, updates)
    if reduction == "add":
        return torch.scatter_add(x, axis, targets, updates)
    return torch.scatter_reduce(x, axis, targets, updates, _SCATTER_REDUCTIONS[reduction])


_SCATTER_REDUCTIONS: Final = {"mul": "prod", "max": "amax", "min": "amin"}
"""Reduction of PyTorch's `scatter_reduce` for each reduction of ONNX."""


@register_operator("ScatterND", unsupported_features="`reduction` max, min and mul")
def _scatter_nd(node: OnnxNode, x: Any, indices: Any, updates: Any) -> torch.Tensor:
    """Return a copy of `x` with updates written or added at index tuples."""
    reduction = node.get("reduction", "none")
    if reduction not in ("none", "add"):
        raise node.unsupported_error(f"reduction is {reduction!r}; expected none or add")
    x, indices, updates = to_tensors(x, indices, updates)
    targets = tuple(indices.to(torch.int64).unbind(-1))
    return torch.index_put(x, targets, updates, accumulate=reduction == "add")


@register_operator("OneHot", numbers=(1, 2))
def _make_one_hot(node: OnnxNode, indices: Any, depth: Any, values: Any) -> torch.Tensor:
    """Return a tensor with a new axis: ``values[1]`` at each index, ``values[0]`` elsewhere."""
    (size,) = to_integers(node, depth, "depth")
    off_value, on_value = to_number_list(node, values, "values")
    indices = to_tensor(indices)
    axis = node.get("axis", -1) % (indices.ndim + 1)
    positions = torch.arange(size, device=indices.device)
    positions = positions.reshape([size if k == axis else 1 for k in range(indices.ndim + 1)])
    is_selected = _positive_indices(indices, size).unsqueeze(axis) == positions
    return torch.where(is_selected, *to_tensors(on_value, off_value))


# -- new tensors -------------------------------------------------------------------------------


@register_operator("ConstantOfShape", numbers=(0,))
def _fill_shape(node: OnnxNode, shape: Any) -> torch.Tensor:
    """Return a tensor of a shape, filled with the attribute ``value``, by default 0."""
    from onnx import numpy_helper

    value = node.get("value")
    fill_value = 0.0 if value is None else numpy_helper.to_array(value).item()
    return torch.full(to_integers(node, shape, "shape"), fill_value)


@register_operator("Range", numbers=(0, 1, 2))
def _make_range(node: OnnxNode, *limits: Any) -> torch.Tensor:
    return torch.arange(*(to_number_list(node, limit, "range")[0] for limit in limits))
