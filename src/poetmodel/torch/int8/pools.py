"""Int8 pools: means and maxima of windows, and their calls."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.lowered.calls import flatten_windows, max_pool_window_bounds
from poetmodel.torch.graph.operators import arguments_with_defaults
from poetmodel.torch.int8.front import QuantizedLayer
from poetmodel.torch.int8.levels import to_float32
from poetmodel.torch.int8.operators import (
    IMAGE_NDIM,
    MIN_BYTE,
    ROUNDING,
    WINDOW_SCHEMA,
    empty_windows,
    register_operator,
    repeat_per_side,
    round_to_bytes,
    to_pair,
    window_elements,
)
from poetmodel.torch.int8.registry import converts, lowers
from poetmodel.torch.int8.values import PendingLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, fx

    from poetmodel.torch.int8.levels import Levels
    from poetmodel.torch.int8.reader import Reader
    from poetmodel.torch.lowering.operands import Lowering, StridedView

aten: Final = torch.ops.aten

# -- operators -------------------------------------------------------------------------------------


def _empty_average(x: Tensor, window: Sequence[int], *window_arguments: Any) -> Tensor:
    if tuple(window) == (1, 1):
        return x.new_empty(x.shape)
    return empty_windows(x, window, (*window_arguments[:2], (1, 1)))


@register_operator(
    "(Tensor x, int[] window, int[] stride, int[] padding, float factor, int zero_x, "
    f"{ROUNDING}) -> Tensor",
    _empty_average,
)
def q8_average(
    x: Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    factor: float,
    zero_x: int,
    *rounding: Any,
) -> Tensor:
    """Return means of windows: ``clamp(rint((sum of (x - zero_x)) * factor * inverse) + zero)``.

    `factor` is the scale of x over the elements of a window, padding included. A window of one
    element requantizes each pixel.
    """
    centred_x = x.to(torch.int32) - zero_x
    if tuple(window) == (1, 1):
        return round_to_bytes(centred_x.float() * factor, *rounding)
    total = torch.zeros((), dtype=torch.int32)
    for _, elements in window_elements(centred_x, window, stride, padding, (1, 1)):
        total = total + elements
    return round_to_bytes(total.float() * factor, *rounding)


@register_operator(
    f"(Tensor x, int[] window, {WINDOW_SCHEMA}) -> Tensor",
    lambda x, window, *arguments: empty_windows(x, window, arguments[:3]),
)
def q8_maximum(
    x: Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return the maximum of each window; padding counts as -128."""
    maximum = torch.full((), MIN_BYTE, dtype=torch.int8)
    for _, elements in window_elements(
        x, window, stride, padding, dilation, padding_value=MIN_BYTE
    ):
        maximum = torch.maximum(maximum, elements)
    return maximum


# -- patterns --------------------------------------------------------------------------------------


@converts(aten.max_pool2d.default)
def _convert_max_pool(reader: Reader, node: fx.Node) -> Any:
    """Add the layer of a max pool; return its value, which has the levels of the input."""
    x, window, stride, padding, dilation, uses_ceil = arguments_with_defaults(node)
    source = reader.read_quantized(node, x)
    if uses_ceil:
        reader.refuse(node, "ceil_mode has no kernel in int8")
    size = to_pair(window)
    layer = QuantizedLayer(
        "maximum",
        {},
        (
            size,
            to_pair(stride) if stride else size,
            repeat_per_side(to_pair(padding)),
            to_pair(dilation),
        ),
    )
    return reader.add_layer_with_input_levels(node, layer, source)


@converts(aten.avg_pool2d.default)
def _convert_mean_pool(reader: Reader, node: fx.Node) -> PendingLayer:
    """Convert a mean pool whose windows all have the same number of elements."""
    x, window, stride, padding, uses_ceil, includes_padding, divisor = arguments_with_defaults(node)
    size, pads = to_pair(window), to_pair(padding)
    strides = to_pair(stride) if stride else size
    if size == (1, 1) and (strides != size or any(pads)):
        reader.refuse(node, "a window of one pixel with stride or padding has no kernel in int8")
    if uses_ceil or divisor is not None or (any(pads) and not includes_padding):
        reader.refuse(
            node,
            "ceil_mode, divisor_override, and count_include_pad=False with padding have no "
            "kernel in int8",
        )
    return _make_mean_layer(reader, node, x, (size, strides, repeat_per_side(pads)))


@converts(aten.adaptive_avg_pool2d.default)
def _convert_global_mean(reader: Reader, node: fx.Node) -> PendingLayer:
    x, sizes = arguments_with_defaults(node)
    if to_pair(sizes) != (1, 1):
        reader.refuse(node, f"expected the mean of all pixels, got {list(to_pair(sizes))} outputs")
    return _make_mean_layer(reader, node, x)


@converts(aten.mean.dim)
def _convert_mean(reader: Reader, node: fx.Node) -> PendingLayer:
    """Convert a mean over rows and columns; without ``keepdim``, to one row per sample."""
    x, dimensions, keeps_dimensions, _ = arguments_with_defaults(node)
    rank = len(reader.read_shape(node, x))
    pixel_dimensions = sorted(dimension % IMAGE_NDIM for dimension in dimensions or ())
    if rank != IMAGE_NDIM or pixel_dimensions != [2, 3]:
        reader.refuse(
            node,
            "expected the mean over rows and columns of images, got dimensions "
            f"{dimensions} of a tensor of rank {rank}",
        )
    return _make_mean_layer(reader, node, x, flattens=not keeps_dimensions)


def _make_mean_layer(
    reader: Reader,
    node: fx.Node,
    x: Any,
    window_arguments: tuple[Sequence[int], ...] | None = None,
    *,
    flattens: bool = False,
) -> PendingLayer:
    """Return a pending mean: of windows (size, strides, padding), or of all pixels if None."""
    source = reader.read_quantized(node, x)
    if window_arguments is None:
        height, width = reader.read_shape(node, x)[2:]
        window_arguments = ((height, width), (height, width), (0, 0, 0, 0))
    factor = to_float32(source.levels.scale / math.prod(window_arguments[0]))

    def make_layer(levels: Levels) -> QuantizedLayer:
        return QuantizedLayer(
            "average", {}, (*window_arguments, factor, source.levels.zero, *levels.rounding)
        )

    flattened_shape = (reader.read_shape(node, x)[1], 1, 1) if flattens else ()
    return PendingLayer(
        node=node, inputs=(source,), make_layer=make_layer, flattened_shape=flattened_shape
    )


# -- calls -----------------------------------------------------------------------------------------


@lowers("average")
def _lower_average(op: Lowering) -> None:
    """Lower int8 means of windows; means of one element each may overwrite the operand."""
    x, out = op.value(op.args[0]), op.output()
    window, stride, padding, factor, *constants = op.args[1:]
    window_bounds = _window_bounds(x, out, window, stride, padding, (1, 1))
    zero_x, *rounding = constants
    op.can_overwrite_operand = tuple(window) == (1, 1)
    op.call(
        "pm_q8_average", out, x, *window_bounds, *_pool_sizes(out, x), zero_x, factor, *rounding
    )


@lowers("maximum")
def _lower_maximum(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    window, stride, padding, dilation = op.args[1:]
    window_bounds = _window_bounds(x, out, window, stride, padding, dilation)
    op.call("pm_q8_maximum", out, x, *window_bounds, *_pool_sizes(out, x), *dilation)


def _image_shape(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return batch, height, width and channels; height and width are 1 for a batch of rows."""
    batch, *height_and_width, channels = shape
    height, width = height_and_width or (1, 1)
    return batch, height, width, channels


def _pool_sizes(out: StridedView, x: StridedView) -> tuple[int, ...]:
    """Return the size arguments of a pool: sizes of output and input, and strides of pixels."""
    batch, height, width, channels = _image_shape(out.shape)
    return batch, channels, height, width, *_image_shape(x.shape)[1:3], channels, channels


def _window_bounds(
    x: StridedView, out: StridedView, window: Any, stride: Any, padding: Any, dilation: Any
) -> list[tuple[int, ...]]:
    """Return begin and end of each window, clipped to the image, along rows and along columns."""
    dimensions = zip(
        _image_shape(x.shape)[1:3], _image_shape(out.shape)[1:3], window, stride, padding[::2],
        dilation,
        strict=True,
    )  # fmt: skip
    return [flatten_windows(max_pool_window_bounds(*numbers)) for numbers in dimensions]
