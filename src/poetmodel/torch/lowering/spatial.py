"""Convolutions, pools, and planes that are made larger or padded; their gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from poetmodel.lowered.calls import ConvolutionSizes
from poetmodel.torch.lowering.operands import copy, fill, lowers, part, planes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.torch.lowering.operands import Lowering, StridedView

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A convolution from x to y; a transposed one is the gradient of that from its y to its x."""

    x: StridedView
    w: StridedView
    y: StridedView
    sizes: ConvolutionSizes

    @property
    def batch(self) -> int:
        return self.x.shape[0]

    @property
    def count(self) -> int:
        """How many output channels there are."""
        return self.sizes.results

    @property
    def is_plain(self) -> bool:
        """Whether the tensors lie in order, but for the batch of y."""
        sample = replace(self.y, shape=self.y.shape[1:], strides=self.y.strides[1:])
        return self.x.is_contiguous and self.w.is_contiguous and sample.is_contiguous


@lowers(aten.convolution.default)
def _convolution(op: Lowering) -> None:
    x, w = op.value(op.args[0]), op.value(op.args[1])
    bias = None if op.args[2] is None else op.value(op.args[2])
    transposed, y = op.args[6], op.output()
    layer = _layer(op, (y, w, x) if transposed else (x, w, y), op.args[3:6], op.args[8])
    if not transposed:
        _call(op, "pm_conv2d", (layer.y, layer.x, layer.w), layer, bias=bias)
        return
    if bias is not None:
        _vector(op, bias)
        places = len(y.shape) - 2
        shape, strides = (*bias.shape, *[1] * places), (*bias.strides, *[0] * places)
        copy(op, y, replace(bias, shape=shape, strides=strides))
    _call(op, "pm_conv2d_dx", (layer.x, layer.y, layer.w), layer, accumulate=bias is not None)


@lowers(aten.convolution_backward.default)
def _convolution_backward(op: Lowering) -> None:
    dy, x, w = (op.value(argument) for argument in op.args[:3])
    transposed, wanted = op.args[7], op.args[10]
    # PyTorch's kernel also returns what was not asked for.
    if wanted[2] and op.has_output(2):
        out = _vector(op, op.output(2))
        op.call("pm_conv2d_db", out, dy, *_four(dy.shape, missing=1), *_four(dy.strides))
    for position in (k for k in range(2) if wanted[k] and op.has_output(k)):
        out = op.output(position)
        mine = (x, out, dy) if position else (out, w, dy)
        operands = (mine[2], mine[1], mine[0]) if transposed else mine
        layer = _layer(op, operands, op.args[4:7], op.args[9])
        if position:
            _call(op, "pm_conv2d_dw", (layer.w, layer.x, layer.y), layer)
        elif transposed:
            _call(op, "pm_conv2d", (layer.y, layer.x, layer.w), layer)
        else:
            _call(op, "pm_conv2d_dx", (layer.x, layer.y, layer.w), layer, accumulate=False)


def _layer(
    op: Lowering, operands: Sequence[StridedView], geometry: Sequence[Any], groups: int
) -> _Layer:
    x, w, y = operands
    dimensions = len(x.shape) - 2
    if dimensions not in (1, 2):
        op.refuse(f"expected one or two dimensions, got {dimensions}; there is no kernel for more")
    missing = 2 - dimensions
    steps = [
        [neutral] * missing + _pair(value, dimensions)
        for value, neutral in zip(geometry, (1, 0, 1), strict=True)
    ]
    shapes = [(*look.shape[:2], *[1] * missing, *look.shape[2:]) for look in (x, w, y)]
    placed = [n for two in steps for n in two]
    listed = (*shapes[0][1:], *shapes[2][1:], *shapes[1][2:], *placed, groups)
    sizes = ConvolutionSizes(*listed)
    layer = _Layer(x=x, w=w, y=y, sizes=sizes)
    seen = sizes.out_plane == 1 and shapes[0][2:] == shapes[1][2:]
    padded = sizes.padding_down or sizes.padding_across
    if seen and not padded and groups == 1 and layer.is_plain:
        # A window of the size of the image: a product with all of its elements, as they lie.
        every = math.prod(shapes[0][1:])
        sizes = ConvolutionSizes(every, 1, 1, sizes.results, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1)
        layer = replace(layer, sizes=sizes)
    return layer


def _pair(value: Sequence[int], dimensions: int) -> list[int]:
    return list(value) * dimensions if len(value) == 1 else list(value)


def _call(
    op: Lowering,
    kernel: str,
    pointers: Sequence[StridedView],
    layer: _Layer,
    *,
    bias: StridedView | None = None,
    accumulate: bool | None = None,
) -> None:
    """Call a kernel, or its sister for tensors that lie in another order."""
    given: list[Any] = [*pointers]
    if kernel == "pm_conv2d":
        given.append(0 if bias is None else _vector(op, bias))
    given.append(tuple(layer.sizes))
    last = [] if accumulate is None else [int(accumulate)]
    if layer.is_plain:
        if 1 < layer.sizes.channels == layer.sizes.groups:
            kernel = kernel.replace("conv2d", "depthwise")
        elif kernel == "pm_conv2d":
            last = [0]
        step = layer.y.strides[0] if layer.batch > 1 else layer.y.elements
        op.call(kernel, *given, layer.batch, 0, layer.count, step, *last)
    else:
        strides = tuple(step for look in pointers for step in _four(look.strides))
        op.call(f"{kernel}_strided", *given, strides, layer.batch, 0, layer.count, *last)


def _four(numbers: Sequence[int], *, missing: int = 0) -> tuple[int, ...]:
    """Return sizes or steps of two dimensions, where there may be one."""
    return (*numbers[:2], *[missing] * (4 - len(numbers)), *numbers[2:])


def _vector(op: Lowering, look: StridedView) -> StridedView:
    if not look.is_contiguous:
        op.refuse("a bias must lie in order")
    return look


# -- pools -------------------------------------------------------------------------------------


@lowers(aten.max_pool2d_with_indices.default)
def _max_pool(op: Lowering) -> None:
    x = op.value(op.args[0])
    windows, stride, padding, dilation = (_of_planes(argument) for argument in op.args[1:5])
    bounds = [
        max_windows(*numbers)
        for numbers in zip(
            x.shape[-2:], op.output().shape[-2:], windows, stride or windows, padding, dilation,
            strict=True,
        )
    ]  # fmt: skip
    if any(begin >= end for side in bounds for begin, end in side):
        op.refuse("a window has no element of the image: its maximum is -inf, and has no gradient")
    _call_max_pool(op, x, bounds, dilation)


@lowers(aten.adaptive_max_pool2d.default)
def _adaptive_max_pool(op: Lowering) -> None:
    x = op.value(op.args[0])
    bounds = [
        [window[:2] for window in _adaptive_windows(*sizes)]
        for sizes in zip(x.shape[-2:], op.output().shape[-2:], strict=True)
    ]
    _call_max_pool(op, x, bounds, [1, 1])


def _call_max_pool(
    op: Lowering, x: StridedView, bounds: Sequence[Sequence[Sequence[int]]], dilation: Sequence[int]
) -> None:
    out = op.output()
    indices = op.output(1) if op.has_output(1) else None
    steps, sizes = planes(out, indices or out, x)
    op.call(
        "pm_max_pool2d", out, indices or 0, x, *map(flat, bounds), steps, *sizes, x.shape[-1],
        *dilation,
    )  # fmt: skip


@lowers(aten.max_pool2d_with_indices_backward.default, aten.adaptive_max_pool2d_backward.default)
def _max_pool_backward(op: Lowering) -> None:
    dy, indices, dx = op.value(op.args[0]), op.value(op.args[-1]), op.output()
    steps, sizes = planes(dx, dy, indices)
    op.call("pm_max_pool2d_backward", dx, dy, indices, steps, *sizes, *dy.shape[-2:])


@lowers(aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default)
def _mean_pool(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    bounds, divisor = _mean_bounds(op.args[1:], x, out)
    steps, sizes = planes(out, x)
    op.call("pm_mean_pool2d", out, x, *bounds, steps, *sizes, divisor)


@lowers(aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d_backward.default)
def _mean_pool_backward(op: Lowering) -> None:
    dy, dx = op.value(op.args[0]), op.output()
    bounds, divisor = _mean_bounds(op.args[2:], dx, dy)
    steps, sizes = planes(dx, dy)
    op.call("pm_mean_pool2d_backward", dx, dy, *bounds, steps, *sizes, *dy.shape[-2:], divisor)


def _mean_bounds(
    arguments: Sequence[Any], x: StridedView, out: StridedView
) -> tuple[list[tuple[int, ...]], int]:
    """Return the windows of rows and of columns, and what divides sums: 0 for the lengths.

    Of each window begin, end, and the length that is counted. Without sizes of windows among the
    arguments they adapt to the output.
    """
    if len(arguments) <= 1:
        sides = zip(x.shape[-2:], out.shape[-2:], strict=True)
        return [flat(_adaptive_windows(*sizes)) for sizes in sides], 0
    windows, stride, padding = (_of_planes(argument) for argument in arguments[:3])
    count_padding = arguments[4]
    bounds = []
    for size, places, window, step, pad in zip(
        x.shape[-2:], out.shape[-2:], windows, stride or windows, padding, strict=True
    ):
        starts = [k * step - pad for k in range(places)]
        ends = [min(start + window, size + pad) for start in starts]
        inside = [(max(s, 0), min(e, size)) for s, e in zip(starts, ends, strict=True)]
        lengths = [e - s for s, e in (zip(starts, ends, strict=True) if count_padding else inside)]
        bounds.append(flat([(*i, length) for i, length in zip(inside, lengths, strict=True)]))
    return bounds, arguments[5] or 0


def _adaptive_windows(size: int, places: int) -> list[tuple[int, int, int]]:
    """Return begin, end and length of each window."""
    starts = [k * size // places for k in range(places)]
    ends = [-(-(k + 1) * size // places) for k in range(places)]
    return [(start, end, end - start) for start, end in zip(starts, ends, strict=True)]


def max_windows(
    size: int, places: int, window: int, stride: int, padding: int, dilation: int
) -> list[tuple[int, int]]:
    """Return begin and end of each window; it begins in the image."""
    starts = [k * stride - padding for k in range(places)]
    ends = [min(start + (window - 1) * dilation + 1, size) for start in starts]
    inside = [start + max(0, -(start // dilation)) * dilation for start in starts]
    return list(zip(inside, ends, strict=True))


def _of_planes(argument: Any) -> list[int]:
    """Return a number for rows and one for columns; a list of one stands for both."""
    numbers = [argument] if isinstance(argument, int) else list(argument)
    return numbers * 2 if len(numbers) == 1 else numbers


def flat(windows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the numbers of windows as one list."""
    return tuple(number for window in windows for number in window)


# -- resampling, padding -----------------------------------------------------------------------


@lowers(
    aten.upsample_nearest1d.default,
    aten.upsample_nearest2d.default,
    aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact2d.default,
)
def _nearest(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    _pick(op, out, x, _neighbours(op, x, out, op.args[2:]))


@lowers(
    aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten._upsample_nearest_exact1d_backward.default,
    aten._upsample_nearest_exact2d_backward.default,
)
def _nearest_backward(op: Lowering) -> None:
    dy, dx = op.value(op.args[0]), op.output()
    _pick_backward(op, dx, dy, _neighbours(op, dx, dy, op.args[3:]))


@lowers(aten.upsample_linear1d.default, aten.upsample_bilinear2d.default)
def _bilinear(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    steps, sizes = planes(out, x, along=_along(op))
    scales = _scales(x, out, aligned=op.args[2], factors=op.args[3:])
    of_x = _height_and_width(x, _along(op))
    aligned = int(op.args[2])
    op.call("pm_bilinear2d", out, x, steps, *sizes[:2], *of_x, *sizes[2:], aligned, *scales)


@lowers(aten.upsample_linear1d_backward.default, aten.upsample_bilinear2d_backward.default)
def _bilinear_backward(op: Lowering) -> None:
    dy, dx = op.value(op.args[0]), op.output()
    steps, sizes = planes(dx, dy, along=_along(op))
    scales = _scales(dx, dy, aligned=op.args[3], factors=op.args[4:])
    of_y = _height_and_width(dy, _along(op))
    op.call("pm_bilinear2d_backward", dx, dy, steps, *sizes, *of_y, int(op.args[3]), *scales)


@lowers(
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
)
def _pad(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    _pick(op, out, x, _padded(op, x, op.args[1]))


@lowers(
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
)
def _pad_backward(op: Lowering) -> None:
    dy, dx = op.value(op.args[0]), op.output()
    _pick_backward(op, dx, dy, _padded(op, dx, op.args[2]))


@lowers(aten.constant_pad_nd.default)
def _constant_pad(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    pads = list(zip(op.args[1][::2], op.args[1][1::2], strict=True))[::-1]
    if any(before > 0 or after > 0 for before, after in pads):
        fill(op, out, op.args[2])
    to = out
    for dimension, (before, after) in enumerate(pads, len(x.shape) - len(pads)):
        size = x.shape[dimension] + min(before, 0) + min(after, 0)
        x = part(x, dimension, max(-before, 0), size)
        to = part(to, dimension, max(before, 0), size)
    if x.elements:
        copy(op, to, x)


def _along(op: Lowering) -> int:
    """Return the number of spatial dimensions of an operator, from its name."""
    return 1 if "1d" in str(op.node.target) else 2


def _height_and_width(look: StridedView, along: int) -> tuple[int, int]:
    return (1, look.shape[-1]) if along == 1 else (look.shape[-2], look.shape[-1])


def _pick(
    op: Lowering, out: StridedView, x: StridedView, places: Sequence[tuple[int, ...]]
) -> None:
    steps, sizes = planes(out, x, along=_along(op))
    op.call("pm_pick2d", out, x, *places, steps, *sizes)


def _pick_backward(
    op: Lowering, dx: StridedView, dy: StridedView, places: Sequence[tuple[int, ...]]
) -> None:
    steps, sizes = planes(dx, dy, along=_along(op))
    of_y = _height_and_width(dy, _along(op))
    op.call("pm_pick2d_backward", dx, dy, *places, steps, *sizes, *of_y)


def _neighbours(
    op: Lowering, x: StridedView, out: StridedView, factors: Sequence[float | None]
) -> list[tuple[int, ...]]:
    """Return the nearest rows and columns, those that PyTorch takes."""
    along = _along(op)
    exact = "exact" in str(op.node.target)
    pick = aten._upsample_nearest_exact1d if exact else aten.upsample_nearest1d
    neighbours = []
    sizes = zip(x.shape[-along:], out.shape[-along:], factors, strict=True)
    for size, places, factor in sizes:
        numbers = torch.arange(size, dtype=torch.float32).view(1, 1, size)
        neighbours.append(tuple(int(n) for n in pick(numbers, [places], factor).flatten().tolist()))
    return [(0,)] * (2 - along) + neighbours


def _scales(
    x: StridedView, out: StridedView, *, aligned: bool, factors: Sequence[float | None]
) -> list[float]:
    """Return the distances in x between neighbours of the result, down and across."""
    along = len(factors)
    scales = []
    for size, places, factor in zip(x.shape[-along:], out.shape[-along:], factors, strict=True):
        if aligned:
            scales.append((size - 1) / (places - 1) if places > 1 else 0.0)
        else:
            scales.append(1 / factor if factor else size / places)
    return [1.0] * (2 - along) + scales


def _padded(op: Lowering, x: StridedView, pads: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the rows and columns of x for those of the result."""
    reflected = "reflection" in str(op.node.target)
    ends = list(zip(pads[::2], pads[1::2], strict=True))[::-1]
    sources = []
    for size, (before, after) in zip(x.shape[-len(ends) :], ends, strict=True):
        places: list[int] = []
        for k in range(-before, size + after):
            if reflected:
                inside = abs(k)
                places.append(inside if inside < size else 2 * (size - 1) - inside)
            else:
                places.append(min(max(k, 0), size - 1))
        sources.append(tuple(places))
    return [(0,)] * (2 - len(ends)) + sources
