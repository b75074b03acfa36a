"""Patterns: convert a PyTorch operator between dequantize and quantize to one int8 layer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.int8.front import QuantizedLayer
from poetmodel.torch.int8.levels import to_float32
from poetmodel.torch.int8.values import (
    INPUT,
    PaddedValue,
    PendingLayer,
    QuantizedValue,
    arguments_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, fx

    from poetmodel.torch.int8.levels import Levels
    from poetmodel.torch.int8.reader import Reader

    Read = Callable[[Reader, fx.Node], Any]

PATTERNS: Final[dict[Any, Read]] = {}
"""The function that converts each operator."""

aten: Final = torch.ops.aten
_IMAGE_RANK = 4
"""Number of dimensions of batches of images, and of their weights."""


def _converts(*targets: Any) -> Callable[[Read], Read]:
    """Return a decorator that registers the conversion of operators."""

    def register(convert: Read) -> Read:
        PATTERNS.update(dict.fromkeys(targets, convert))
        return convert

    return register


@_converts(
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.alias.default,
    aten.dropout.default,
)
def _pass_through(reader: Reader, node: fx.Node) -> Any:
    """Return the value of the operand; refuse dropout in training mode."""
    if node.target is aten.dropout.default and arguments_of(node)[2]:
        reader.refuse(node, "it draws random numbers; call eval() before exporting the model")
    return reader.values[node.args[0]]


# -- convolutions and linear layers ------------------------------------------------------------


@_converts(aten.conv2d.default, aten.conv2d.padding, aten.convolution.default)
def _convolution(reader: Reader, node: fx.Node) -> PendingLayer:
    """Convert a convolution; a 1x1 convolution becomes a linear layer at each pixel."""
    x, weight, bias, stride, padding, dilation, *more = arguments_of(node)
    if node.target is aten.convolution.default:
        transposed, _, groups = more
        if transposed:
            reader.refuse(node, "transposed convolutions have no kernel in int8")
    else:
        (groups,) = more
    source, outer_padding = _split_padding(reader, node, x)
    weight_bytes, constants_after = reader.weight_and_constants(node, weight, bias, source)
    if weight_bytes.ndim != _IMAGE_RANK:
        reader.refuse(node, "expected a convolution of two dimensions, which has a kernel in int8")
    down, across = _pair(stride)
    dilations = _pair(dilation)
    if isinstance(padding, str):
        total_padding = [
            d * (n - 1) for d, n in zip(dilations, weight_bytes.shape[2:], strict=True)
        ]
        total_padding = total_padding if padding == "same" else [0, 0]
        node_padding = [half for n in total_padding for half in (n // 2, n - n // 2)]
    else:
        node_padding = [n for n in _pair(padding) for _ in range(2)]
    pads = tuple(a + b for a, b in zip(node_padding, outer_padding, strict=True))
    is_plain = not any(pads) and (down, across) == (1, 1)
    geometry = ((down, across), pads, dilations)
    channels_last = weight_bytes.permute(0, 2, 3, 1).contiguous()
    if weight_bytes.shape[2:] == (1, 1) and is_plain and groups == 1:
        return _linear_layer(reader, node, source, channels_last.flatten(1), constants_after)
    if groups > 1 and weight_bytes.shape[1] == 1 and weight_bytes.shape[0] == groups:
        operator, constant = "depthwise", weight_bytes[:, 0].permute(1, 2, 0).contiguous()
        numbers: tuple[Any, ...] = (*geometry, source.levels.zero)
    else:
        operator, constant = "conv2d", channels_last
        numbers = (*geometry, groups, source.levels.zero)

    constants = {"weight": constant, **constants_after}
    _, scales = reader.weight(node, weight)

    def make_layer(levels: Levels) -> QuantizedLayer:
        """Return the layer for the levels of its result."""
        return QuantizedLayer(
            operator,
            constants,
            (*numbers, *levels.ending),
            weight_scale=scales.float(),
            input_levels=source.levels,
        )

    return PendingLayer(node=node, inputs=(source,), make_layer=make_layer)


@_converts(aten.linear.default)
def _linear(reader: Reader, node: fx.Node) -> PendingLayer:
    """Convert a linear layer; the weight of a flattened image is reordered to channels last."""
    x, weight, bias = arguments_of(node)
    source = reader.quantized(node, x)
    weight_bytes, constants_after = reader.weight_and_constants(node, weight, bias, source)
    if source.planes:
        # The elements of a flattened sample are in channels-last order.
        weight_bytes = weight_bytes.unflatten(1, source.planes).permute(0, 2, 3, 1).flatten(1)
    return _linear_layer(
        reader,
        node,
        source,
        weight_bytes.contiguous(),
        constants_after,
        flattens=bool(source.planes),
    )


def _linear_layer(
    reader: Reader,
    node: fx.Node,
    source: QuantizedValue,
    weight: Tensor,
    constants_after: dict[str, Tensor],
    *,
    flattens: bool = False,
) -> PendingLayer:
    """Return a pending linear layer, or 1x1 convolution, with its weight and constants."""
    _, scales = reader.weight(node, arguments_of(node)[1])

    def make_layer(levels: Levels) -> QuantizedLayer:
        """Return the layer for the levels of its result."""
        return QuantizedLayer(
            "pointwise",
            {"weight": weight, **constants_after},
            levels.ending,
            flattens=flattens,
            weight_scale=scales.float(),
            input_levels=source.levels,
        )

    return PendingLayer(node=node, inputs=(source,), make_layer=make_layer)


@_converts(aten.constant_pad_nd.default, aten.pad.default)
def _pad(reader: Reader, node: fx.Node) -> PaddedValue:
    """Convert a padding with zeros to a padded value; refuse other paddings."""
    x, pads, *more = arguments_of(node)
    value = more[-1] or 0
    mode = more[0] if node.target is aten.pad.default else "constant"
    if value != 0 or mode != "constant" or len(pads) != _IMAGE_RANK or min(pads) < 0:
        reader.refuse(node, "expected padding of rows and columns with zeros, before a convolution")
    left, right, above, below = pads
    padded_value = INPUT if reader.values.get(x) == INPUT else reader.quantized(node, x)
    return PaddedValue(value=padded_value, padding=(above, below, left, right))


def _split_padding(
    reader: Reader, node: fx.Node, x: Any
) -> tuple[QuantizedValue, tuple[int, int, int, int]]:
    """Return the quantized input of a convolution, and the zeros padded around it."""
    value = reader.values.get(x)
    if isinstance(value, PaddedValue) and isinstance(value.value, QuantizedValue):
        return value.value, value.padding
    return reader.quantized(node, x), (0, 0, 0, 0)


# -- activations -------------------------------------------------------------------------------


@_converts(aten.relu.default, aten.relu_.default)
def _relu(reader: Reader, node: fx.Node) -> PendingLayer:
    return reader.add_clamp(node, 0.0, math.inf)


@_converts(
    aten.hardtanh.default,
    aten.hardtanh_.default,
    aten.clamp.default,
    aten.clamp_.default,
    aten.clamp_min.default,
)
def _clamp(reader: Reader, node: fx.Node) -> PendingLayer:
    low, high = (*arguments_of(node)[1:], None)[:2]
    return reader.add_clamp(
        node, -math.inf if low is None else float(low), math.inf if high is None else float(high)
    )


@_converts(aten.relu6.default)
def _relu6(reader: Reader, node: fx.Node) -> PendingLayer:
    return reader.add_clamp(node, 0.0, 6.0)


# -- sums, pools and shapes --------------------------------------------------------------------


@_converts(aten.add.Tensor, aten.add_.Tensor)
def _add(reader: Reader, node: fx.Node) -> PendingLayer:
    """Convert a sum of two quantized values of the same shape; refuse a factor."""
    first, second, factor = (*node.args, node.kwargs.get("alpha", 1))[:3]
    sources = tuple(reader.quantized(node, operand) for operand in (first, second))
    if factor != 1 or sources[0].planes != sources[1].planes:
        reader.refuse(node, "expected the sum of two quantized tensors of one shape")
    input_levels = tuple(
        n for source in sources for n in (to_float32(source.levels.scale), source.levels.zero)
    )

    def make_layer(levels: Levels) -> QuantizedLayer:
        return QuantizedLayer("add", {}, (*input_levels, *levels.ending))

    return PendingLayer(node=node, inputs=sources, make_layer=make_layer, planes=sources[0].planes)


@_converts(aten.max_pool2d.default)
def _maximum(reader: Reader, node: fx.Node) -> Any:
    """Add a max pool, whose result has the levels of its input."""
    x, window, stride, padding, dilation, ceil = arguments_of(node)
    source = reader.quantized(node, x)
    if ceil:
        reader.refuse(node, "ceil_mode has no kernel in int8")
    size = _pair(window)
    layer = QuantizedLayer(
        "maximum",
        {},
        (size, _pair(stride) if stride else size, _both_sides(_pair(padding)), _pair(dilation)),
    )
    return reader.add_same_levels(node, layer, source)


@_converts(aten.avg_pool2d.default)
def _average(reader: Reader, node: fx.Node) -> PendingLayer:
    """Convert a mean pool; refuse options without an int8 kernel."""
    x, window, stride, padding, ceil, includes_padding, divisor = arguments_of(node)
    size, pads = _pair(window), _pair(padding)
    if ceil or divisor is not None or (any(pads) and not includes_padding):
        reader.refuse(
            node,
            "ceil_mode, divisor_override, and count_include_pad=False with padding have no "
            "kernel in int8",
        )
    return _mean_layer(
        reader, node, x, (size, _pair(stride) if stride else size, _both_sides(pads))
    )


@_converts(aten.adaptive_avg_pool2d.default)
def _global_average(reader: Reader, node: fx.Node) -> PendingLayer:
    x, sizes = arguments_of(node)
    if _pair(sizes) != (1, 1):
        reader.refuse(node, f"expected the mean of all pixels, got {list(_pair(sizes))} outputs")
    return _mean_layer(reader, node, x)


@_converts(aten.mean.dim)
def _mean_over_pixels(reader: Reader, node: fx.Node) -> PendingLayer:
    x, dimensions, keeps, _ = arguments_of(node)
    if sorted(d % _IMAGE_RANK for d in dimensions or ()) != [2, 3]:
        reader.refuse(node, f"expected the mean over rows and columns, got dimensions {dimensions}")
    return _mean_layer(reader, node, x, flattens=not keeps)


def _mean_layer(
    reader: Reader,
    node: fx.Node,
    x: Any,
    geometry: tuple[Sequence[int], ...] | None = None,
    *,
    flattens: bool = False,
) -> PendingLayer:
    """Return a pending mean of windows, or of all pixels without a `geometry`."""
    source = reader.quantized(node, x)
    if geometry is None:
        height, width = reader.shape(node, x)[2:]
        geometry = ((height, width), (height, width), (0, 0, 0, 0))
    factor = to_float32(source.levels.scale / math.prod(geometry[0]))

    def make_layer(levels: Levels) -> QuantizedLayer:
        return QuantizedLayer(
            "average", {}, (*geometry, factor, source.levels.zero, *levels.ending)
        )

    planes = (reader.shape(node, x)[1], 1, 1) if flattens else ()
    return PendingLayer(node=node, inputs=(source,), make_layer=make_layer, planes=planes)


@_converts(aten.flatten.using_ints, aten.view.default, aten.reshape.default)
def _flatten(reader: Reader, node: fx.Node) -> Any:
    """Convert a reshape to one row per sample; the following linear layer reorders its weight."""
    source = reader.quantized(node, node.args[0])
    shape, result = reader.shape(node, node.args[0]), tuple(node.meta["val"].shape)
    if result == shape:
        return source
    if len(result) != 2 or len(shape) != _IMAGE_RANK or result[0] != shape[0]:  # noqa: PLR2004
        reader.refuse(node, "expected one row per sample, as from flatten(1)")
    return replace(source, planes=shape[1:])


def _pair(value: Any) -> tuple[int, int]:
    sizes = list(value) if isinstance(value, list | tuple) else [value]
    return (int(sizes[0]), int(sizes[-1]))


def _both_sides(pads: tuple[int, int]) -> tuple[int, int, int, int]:
    return (pads[0], pads[0], pads[1], pads[1])
