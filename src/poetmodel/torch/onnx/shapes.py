"""Operators that move elements, choose them, or make them from numbers."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn import functional

from poetmodel.torch.onnx.operators import (
    OnnxNode,
    axes_of,
    axis_of,
    flat,
    index_select,
    operator,
    real,
    shape_of,
    tensor,
    tensors,
    volume,
    whole,
)


@operator("Shape")
def _shape(node: OnnxNode, x: Any) -> tuple[int, ...]:
    return shape_of(x)[node.get("start", 0) : node.get("end")]


@operator("Size")
def _size(_: OnnxNode, x: Any) -> int:
    return volume(shape_of(x))


@operator("Reshape", numbers=(1,))
def _reshape(node: OnnxNode, x: Any, shape: Any) -> torch.Tensor:
    x = tensor(x)
    sizes = whole(node, shape, "shape")
    if not node.get("allowzero", 0):
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


@operator("Flatten")
def _flatten(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    axis = node.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(volume(x.shape[:axis]), volume(x.shape[axis:]))


@operator("Squeeze", numbers=(1,))
def _squeeze(node: OnnxNode, x: Any, axes: Any = None) -> torch.Tensor:
    x = tensor(x)
    over = axes_of(node, axes, rank=x.ndim)
    over = [axis for axis, size in enumerate(x.shape) if size == 1] if over is None else over
    return x.reshape([size for axis, size in enumerate(x.shape) if axis not in over])


@operator("Unsqueeze", numbers=(1,))
def _unsqueeze(node: OnnxNode, x: Any, axes: Any) -> torch.Tensor:
    x = tensor(x)
    over = axes_of(node, axes, rank=x.ndim + len(whole(node, axes, "axes"))) or []
    sizes = list(x.shape)
    for axis in sorted(over):
        sizes.insert(axis, 1)
    return x.reshape(sizes)


@operator("Transpose")
def _transpose(node: OnnxNode, x: Any) -> torch.Tensor:
    x = tensor(x)
    return x.permute(node.get("perm", tuple(range(x.ndim))[::-1]))


@operator("Expand", numbers=(1,))
def _expand(node: OnnxNode, x: Any, shape: Any) -> torch.Tensor:
    x = tensor(x)
    return x.expand(torch.broadcast_shapes(x.shape, whole(node, shape, "shape")))


@operator("Tile", numbers=(1,))
def _tile(node: OnnxNode, x: Any, repeats: Any) -> torch.Tensor:
    return tensor(x).repeat(whole(node, repeats, "repeats"))


@operator("Concat")
def _concat(node: OnnxNode, *values: Any) -> torch.Tensor:
    pieces = tensors(*values)
    return torch.cat(pieces, axis_of(node, pieces[0].ndim))


@operator("Split", numbers=(1,))
def _split(
    node: OnnxNode, x: torch.Tensor, sizes: Any = None
) -> tuple[torch.Tensor, ...] | torch.Tensor:
    axis = axis_of(node, x.ndim)
    if sizes is None:
        part = -(-x.shape[axis] // node.wanted)
        rest = x.shape[axis] - part * (node.wanted - 1)
        parts = [*[part] * (node.wanted - 1), rest]
    else:
        parts = whole(node, sizes, "sizes")
    pieces: tuple[torch.Tensor, ...] = torch.split(x, parts, axis)
    return pieces if node.wanted > 1 else pieces[0]


# PyTorch's exporter writes a split as a sequence, unless it is asked to optimize.


@operator("SplitToSequence", numbers=(1,))
def _split_to_sequence(node: OnnxNode, x: torch.Tensor, sizes: Any = None) -> list[torch.Tensor]:
    axis = axis_of(node, x.ndim)
    if sizes is None:
        parts = torch.split(x, 1, axis)
        return list(parts if node.get("keepdims", 1) else (part.squeeze(axis) for part in parts))
    given = whole(node, sizes, "sizes")
    return list(torch.split(x, given if isinstance(sizes, tuple) else given[0], axis))


@operator("SequenceConstruct")
def _sequence(_: OnnxNode, *values: Any) -> list[torch.Tensor]:
    return list(tensors(*values))


@operator("SequenceAt", numbers=(1,))
def _at(node: OnnxNode, values: list[torch.Tensor], position: Any) -> torch.Tensor:
    return values[whole(node, position, "position")[0]]


@operator("ConcatFromSequence")
def _concat_sequence(node: OnnxNode, values: list[torch.Tensor]) -> torch.Tensor:
    function = torch.stack if node.get("new_axis", 0) else torch.cat
    return function(values, node.get("axis"))


@operator("Slice", numbers=(1, 2, 3, 4))
def _slice(node: OnnxNode, x: Any, *given: Any) -> torch.Tensor:
    x = tensor(x)
    starts, ends, *rest = (
        None if value is None else whole(node, value, what)
        for value, what in zip(given, ("starts", "ends", "axes", "steps"), strict=False)
    )
    axes, steps = [*rest, None, None][:2]
    assert starts is not None and ends is not None  # noqa: S101, PT018 - ONNX has checked it
    axes = list(range(len(starts))) if axes is None else axes
    for axis, start, end, step in zip(axes, starts, ends, steps or [1] * len(axes), strict=True):
        x = _sliced(x, axis % x.ndim, slice(start, end, step))
    return x


def _sliced(x: torch.Tensor, axis: int, part: slice) -> torch.Tensor:
    places = range(*part.indices(x.shape[axis]))
    if places.step > 0:
        at = [slice(None)] * axis
        return x[(*at, slice(places.start, max(places.stop, places.start), places.step))]
    if not places:
        return x.narrow(axis, 0, 0)
    kept = x.narrow(axis, places[-1], places[0] - places[-1] + 1).flip(axis)
    return kept if places.step == -1 else _sliced(kept, axis, slice(None, None, -places.step))


@operator("Trilu", numbers=(1,))
def _trilu(node: OnnxNode, x: Any, diagonal: Any = None) -> torch.Tensor:
    (k,) = [0] if diagonal is None else whole(node, diagonal, "diagonal")
    return (torch.triu if node.get("upper", 1) else torch.tril)(tensor(x), k)


@operator("DepthToSpace")
def _depth_to_space(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    n, channels, height, width = x.shape
    size = node.get("blocksize")
    inner = channels // size**2
    if node.get("mode", "DCR") == "DCR":
        parts = x.reshape(n, size, size, inner, height, width).permute(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(n, inner, size, size, height, width).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(n, inner, height * size, width * size)


@operator("SpaceToDepth")
def _space_to_depth(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    n, channels, height, width = x.shape
    size = node.get("blocksize")
    parts = x.reshape(n, channels, height // size, size, width // size, size)
    return parts.permute(0, 3, 5, 1, 2, 4).reshape(
        n, channels * size**2, height // size, width // size
    )


@operator(
    "Pad",
    numbers=(1, 2, 3),
    refuses="`mode` wrap; reflect and edge, but on one or two last axes of a signal or an image",
)
def _pad(node: OnnxNode, x: Any, pads: Any, value: Any = None, axes: Any = None) -> torch.Tensor:
    x = tensor(x)
    widths = whole(node, pads, "pads")
    over = axes_of(node, axes, rank=x.ndim)
    over = list(range(x.ndim)) if over is None else over
    of = {axis: (widths[k], widths[k + len(over)]) for k, axis in enumerate(over)}
    given = [of.get(axis, (0, 0)) for axis in range(x.ndim)]
    while given and given[0] == (0, 0):
        given = given[1:]
    widths = [width for pair in reversed(given) for width in pair]
    mode = node.get("mode", "constant")
    if not widths:
        return x
    if mode == "constant":
        fill = 0.0 if value is None else real(node, value, "value")[0]
        return functional.pad(x, widths, value=fill)
    spatial = len(widths) // 2
    known = min(widths) >= 0 and x.ndim in (spatial + 1, spatial + 2) and spatial <= _MOST_PADDED
    if mode not in _MODES or not known:
        raise node.refused(f"its mode is {mode}; expected constant, or edges of lines and images")
    return functional.pad(x, widths, mode=_MODES[mode])


_MOST_PADDED: Final = 2
"""Dimensions that PyTorch pads by the elements of a tensor, and C has kernels for."""
_MODES: Final = {"reflect": "reflect", "edge": "replicate"}


# -- by index ----------------------------------------------------------------------------------


def _from_the_front(indices: torch.Tensor, size: int) -> torch.Tensor:
    return torch.where(indices < 0, indices + size, indices)


@operator("Gather", weights=(0,))
def _gather(node: OnnxNode, x: Any, indices: Any) -> torch.Tensor:
    x = tensor(x)
    axis = axis_of(node, x.ndim)
    size = x.shape[axis]
    if isinstance(indices, int):
        return x.select(axis, indices % size)
    if torch.is_tensor(indices):
        if axis == 0 and x.ndim == 2 and x.is_floating_point():  # noqa: PLR2004
            return functional.embedding(indices, x)
        return x[(*[slice(None)] * axis, indices.to(torch.int64))]
    picked = index_select(x, axis, [index % size for index in flat(indices)])
    return picked.reshape(*x.shape[:axis], *shape_of(indices), *x.shape[axis + 1 :])


@operator("GatherElements")
def _gather_elements(node: OnnxNode, x: Any, indices: Any) -> torch.Tensor:
    x, indices = tensors(x, indices)
    axis = axis_of(node, x.ndim)
    return torch.gather(x, axis, _from_the_front(indices.to(torch.int64), x.shape[axis]))


@operator("GatherND", refuses="`batch_dims`")
def _gather_nd(node: OnnxNode, x: Any, indices: Any) -> torch.Tensor:
    if node.get("batch_dims", 0):
        raise node.refused("batch_dims is not 0, which is not known")
    x, indices = tensors(x, indices)
    gathered: torch.Tensor = x[tuple(indices.to(torch.int64).unbind(-1))]
    return gathered


@operator("ScatterElements")
def _scatter_elements(node: OnnxNode, x: Any, indices: Any, updates: Any) -> torch.Tensor:
    x, indices, updates = tensors(x, indices, updates)
    axis = axis_of(node, x.ndim)
    at = _from_the_front(indices.to(torch.int64), x.shape[axis])
    kind = node.get("reduction", "none")
    if kind == "none":
        return torch.scatter(x, axis, at, updates)
    if kind == "add":
        return torch.scatter_add(x, axis, at, updates)
    return torch.scatter_reduce(x, axis, at, updates, _REDUCED[kind])


_REDUCED: Final = {"mul": "prod", "max": "amax", "min": "amin"}


@operator("ScatterND", refuses="`reduction` max, min and mul")
def _scatter_nd(node: OnnxNode, x: Any, indices: Any, updates: Any) -> torch.Tensor:
    kind = node.get("reduction", "none")
    if kind not in ("none", "add"):
        raise node.refused(f"reduction is {kind!r}; expected none or add")
    x, indices, updates = tensors(x, indices, updates)
    at = tuple(indices.to(torch.int64).unbind(-1))
    return torch.index_put(x, at, updates, accumulate=kind == "add")


@operator("OneHot", numbers=(1, 2))
def _one_hot(node: OnnxNode, indices: Any, depth: Any, values: Any) -> torch.Tensor:
    (size,) = whole(node, depth, "depth")
    off, on = real(node, values, "values")
    indices = tensor(indices)
    axis = node.get("axis", -1) % (indices.ndim + 1)
    places = torch.arange(size, device=indices.device)
    places = places.reshape([size if k == axis else 1 for k in range(indices.ndim + 1)])
    hit = _from_the_front(indices, size).unsqueeze(axis) == places
    return torch.where(hit, *tensors(on, off))


# -- from numbers ------------------------------------------------------------------------------


@operator("ConstantOfShape", numbers=(0,))
def _filled(node: OnnxNode, shape: Any) -> torch.Tensor:
    from onnx import numpy_helper

    value = node.get("value")
    fill = 0.0 if value is None else numpy_helper.to_array(value).item()
    return torch.full(whole(node, shape, "shape"), fill)


@operator("Range", numbers=(0, 1, 2))
def _range(node: OnnxNode, *limits: Any) -> torch.Tensor:
    return torch.arange(*(real(node, limit, "range")[0] for limit in limits))
