"""Patterns: convert PyTorch operators between dequantize and quantize to int8 layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.graph.operators import arguments_with_defaults
from poetmodel.torch.int8.front import QuantizedLayer
from poetmodel.torch.int8.levels import to_float32
from poetmodel.torch.int8.values import (
    INPUT,
    PaddedValue,
    PendingLayer,
    QuantizedValue,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, fx

    from poetmodel.torch.int8.levels import Levels
    from poetmodel.torch.int8.reader import Reader

    Convert = Callable[[Reader, fx.Node], Any]

PATTERNS: Final[dict[Any, Convert]] = {}
"""Functions that convert a node to its value in `Reader.values`, by operator."""

aten: Final = torch.ops.aten
_ROW_RANK = 2
"""Number of dimensions of a batch of flattened samples."""
_IMAGE_RANK = 4
"""Number of dimensions of a batch of images, and of the weight of its convolutions."""
_N_SIDES = 4
"""Number of sides of an image that a padding of rows and columns extends."""


def _register_conversion(*targets: Any) -> Callable[[Convert], Convert]:
    """Return a decorator that registers a function in `PATTERNS` for some operators."""

    def register(convert: Convert) -> Convert:
        PATTERNS.update(dict.fromkeys(targets, convert))
        return convert

    return register


@_register_conversion(
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.alias.default,
    aten.dropout.default,
)
def _convert_pass_through(reader: Reader, node: fx.Node) -> Any:
    """Return the value of the operand; refuse dropout in training mode."""
    if node.target is aten.dropout.default and arguments_with_defaults(node)[2]:
        reader.refuse(node, "it draws random numbers; call eval() before exporting the model")
    return reader.values[node.args[0]]


# -- convolutions and linear layers ------------------------------------------------------------


@_register_conversion(aten.conv2d.default, aten.conv2d.padding, aten.convolution.default)
def _convert_convolution(reader: Reader, node: fx.Node) -> PendingLayer:
    """Convert a convolution, with its padding and that of a `PaddedValue`, to a pending layer.

    A 1x1 convolution of one group becomes a linear layer at each pixel, one of single channels a
    depthwise layer.
    """
    x, weight, bias, stride, padding, dilation, *other_arguments = arguments_with_defaults(node)
    if node.target is aten.convolution.default:
        is_transposed, _, groups = other_arguments
        if is_transposed:
            reader.refuse(node, "transposed convolutions have no kernel in int8")
    else:
        (groups,) = other_arguments
    source, outer_padding = _split_padding(reader, node, x)
    int8_weight, scales, rescaling_constants = reader.read_weight_and_constants(
        node, weight, bias, source
    )
    if int8_weight.ndim != _IMAGE_RANK:
        reader.refuse(node, "expected a convolution of two dimensions, which has a kernel in int8")
    strides = _to_pair(stride)
    dilations = _to_pair(dilation)
    if isinstance(padding, str):
        total_padding = [
            dilation_step * (size - 1)
            for dilation_step, size in zip(dilations, int8_weight.shape[2:], strict=True)
        ]
        total_padding = total_padding if padding == "same" else [0, 0]
        node_padding = [pad for total in total_padding for pad in (total // 2, total - total // 2)]
    else:
        node_padding = [pad for pad in _to_pair(padding) for _ in range(2)]
    pads = tuple(inner + outer for inner, outer in zip(node_padding, outer_padding, strict=True))
    has_plain_window = not any(pads) and strides == (1, 1)
    window_arguments = (strides, pads, dilations)
    channels_last_weight = int8_weight.permute(0, 2, 3, 1).contiguous()
    if int8_weight.shape[2:] == (1, 1) and has_plain_window and groups == 1:
        return _make_linear_layer(
            node, source, channels_last_weight.flatten(1), scales, rescaling_constants
        )
    if groups > 1 and int8_weight.shape[1] == 1 and int8_weight.shape[0] == groups:
        operator, kernel_weight = "depthwise", int8_weight[:, 0].permute(1, 2, 0).contiguous()
        numbers: tuple[Any, ...] = (*window_arguments, source.levels.zero)
    else:
        operator, kernel_weight = "conv2d", channels_last_weight
        numbers = (*window_arguments, groups, source.levels.zero)

    constants = {"weight": kernel_weight, **rescaling_constants}

    def make_layer(levels: Levels) -> QuantizedLayer:
        """Return the convolution's int8 layer, whose result has the given levels."""
        return QuantizedLayer(
            operator,
            constants,
            (*numbers, *levels.rounding),
            weight_scale=scales,
            input_levels=source.levels,
        )

    return PendingLayer(node=node, inputs=(source,), make_layer=make_layer)


@_register_conversion(aten.linear.default)
def _convert_linear(reader: Reader, node: fx.Node) -> PendingLayer:
    """Convert a linear layer; the weight of a flattened image is reordered to channels last."""
    x, weight, bias = arguments_with_defaults(node)
    if len(reader.read_shape(node, x)) != _ROW_RANK:
        reader.refuse(node, "only rows have a kernel in int8; flatten each sample first")
    source = reader.read_quantized(node, x)
    int8_weight, scales, rescaling_constants = reader.read_weight_and_constants(
        node, weight, bias, source
    )
    if source.flattened_shape:
        # The elements of a flattened sample are in channels-last order.
        int8_weight = (
            int8_weight.unflatten(1, source.flattened_shape).permute(0, 2, 3, 1).flatten(1)
        )
    return _make_linear_layer(
        node,
        source,
        int8_weight.contiguous(),
        scales,
        rescaling_constants,
        flattens=bool(source.flattened_shape),
    )


def _make_linear_layer(
    node: fx.Node,
    source: QuantizedValue,
    weight: Tensor,
    scales: Tensor,
    rescaling_constants: dict[str, Tensor],
    *,
    flattens: bool = False,
) -> PendingLayer:
    """Return the pending layer of a linear layer, or of a 1x1 convolution at each pixel."""

    def make_layer(levels: Levels) -> QuantizedLayer:
        """Return the int8 linear layer, whose result has the given levels."""
        return QuantizedLayer(
            "pointwise",
            {"weight": weight, **rescaling_constants},
            levels.rounding,
            flattens=flattens,
            weight_scale=scales,
            input_levels=source.levels,
        )

    return PendingLayer(node=node, inputs=(source,), make_layer=make_layer)


@_register_conversion(aten.constant_pad_nd.default, aten.pad.default)
def _convert_padding(reader: Reader, node: fx.Node) -> PaddedValue:
    """Convert a padding of rows and columns with zeros to a padded value; refuse the rest."""
    x, pads, *options = arguments_with_defaults(node)
    value = options[-1] or 0
    mode = options[0] if node.target is aten.pad.default else "constant"
    if value != 0 or mode != "constant" or len(pads) != _N_SIDES or min(pads) < 0:
        reader.refuse(node, "expected padding of rows and columns with zeros, before a convolution")
    left, right, above, below = pads
    operand = INPUT if reader.values.get(x) == INPUT else reader.read_quantized(node, x)
    return PaddedValue(value=operand, padding=(above, below, left, right))


def _split_padding(
    reader: Reader, node: fx.Node, x: Any
) -> tuple[QuantizedValue, tuple[int, int, int, int]]:
    """Return a convolution's quantized input without padding, and its `PaddedValue.padding`."""
    value = reader.values.get(x)
    if isinstance(value, PaddedValue) and isinstance(value.value, QuantizedValue):
        return value.value, value.padding
    return reader.read_quantized(node, x), (0, 0, 0, 0)


# -- activations -------------------------------------------------------------------------------


@_register_conversion(aten.relu.default, aten.relu_.default)
def _convert_relu(reader: Reader, node: fx.Node) -> PendingLayer:
    return reader.clamp_operand(node, 0.0, math.inf)


@_register_conversion(
    aten.hardtanh.default,
    aten.hardtanh_.default,
    aten.clamp.default,
    aten.clamp_.default,
    aten.clamp_min.default,
)
def _convert_clamp(reader: Reader, node: fx.Node) -> PendingLayer:
    low, high = (*arguments_with_defaults(node)[1:], None)[:2]
    return reader.clamp_operand(
        node, -math.inf if low is None else float(low), math.inf if high is None else float(high)
    )


@_register_conversion(aten.relu6.default)
def _convert_relu6(reader: Reader, node: fx.Node) -> PendingLayer:
    return reader.clamp_operand(node, 0.0, 6.0)


# -- sums, pools and shapes --------------------------------------------------------------------


@_register_conversion(aten.add.Tensor, aten.add_.Tensor)
def _convert_add(reader: Reader, node: fx.Node) -> PendingLayer:
    """Convert a sum of two quantized values of equal shape, without a factor ``alpha``."""
    x, y, factor = (*node.args, node.kwargs.get("alpha", 1))[:3]
    sources = tuple(reader.read_quantized(node, operand) for operand in (x, y))
    has_one_shape = reader.read_shape(node, x) == reader.read_shape(node, y)
    if factor != 1 or not has_one_shape or sources[0].flattened_shape != sources[1].flattened_shape:
        reader.refuse(node, "expected the sum of two quantized tensors of one shape, with alpha=1")
    input_scales_and_zeros = tuple(
        number
        for source in sources
        for number in (to_float32(source.levels.scale), source.levels.zero)
    )

    def make_layer(levels: Levels) -> QuantizedLayer:
        return QuantizedLayer("add", {}, (*input_scales_and_zeros, *levels.rounding))

    return PendingLayer(
        node=node, inputs=sources, make_layer=make_layer, flattened_shape=sources[0].flattened_shape
    )


@_register_conversion(aten.max_pool2d.default)
def _convert_max_pool(reader: Reader, node: fx.Node) -> Any:
    """Add the layer of a max pool; return its value, which has the levels of the input."""
    x, window, stride, padding, dilation, uses_ceil = arguments_with_defaults(node)
    source = reader.read_quantized(node, x)
    if uses_ceil:
        reader.refuse(node, "ceil_mode has no kernel in int8")
    size = _to_pair(window)
    layer = QuantizedLayer(
        "maximum",
        {},
        (
            size,
            _to_pair(stride) if stride else size,
            _repeat_per_side(_to_pair(padding)),
            _to_pair(dilation),
        ),
    )
    return reader.add_layer_with_input_levels(node, layer, source)


@_register_conversion(aten.avg_pool2d.default)
def _convert_mean_pool(reader: Reader, node: fx.Node) -> PendingLayer:
    """Convert a mean pool whose windows all have the same number of elements."""
    x, window, stride, padding, uses_ceil, includes_padding, divisor = arguments_with_defaults(node)
    size, pads = _to_pair(window), _to_pair(padding)
    strides = _to_pair(stride) if stride else size
    if size == (1, 1) and (strides != size or any(pads)):
        reader.refuse(node, "a window of one pixel with stride or padding has no kernel in int8")
    if uses_ceil or divisor is not None or (any(pads) and not includes_padding):
        reader.refuse(
            node,
            "ceil_mode, divisor_override, and count_include_pad=False with padding have no "
            "kernel in int8",
        )
    return _make_mean_layer(reader, node, x, (size, strides, _repeat_per_side(pads)))


@_register_conversion(aten.adaptive_avg_pool2d.default)
def _convert_global_mean(reader: Reader, node: fx.Node) -> PendingLayer:
    x, sizes = arguments_with_defaults(node)
    if _to_pair(sizes) != (1, 1):
        reader.refuse(node, f"expected the mean of all pixels, got {list(_to_pair(sizes))} outputs")
    return _make_mean_layer(reader, node, x)


@_register_conversion(aten.mean.dim)
def _convert_mean(reader: Reader, node: fx.Node) -> PendingLayer:
    """Convert a mean over rows and columns; without ``keepdim``, to one row per sample."""
    x, dimensions, keeps_dimensions, _ = arguments_with_defaults(node)
    rank = len(reader.read_shape(node, x))
    pixel_dimensions = sorted(dimension % _IMAGE_RANK for dimension in dimensions or ())
    if rank != _IMAGE_RANK or pixel_dimensions != [2, 3]:
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


@_register_conversion(aten.flatten.using_ints, aten.view.default, aten.reshape.default)
def _convert_flatten(reader: Reader, node: fx.Node) -> Any:
    """Convert a reshape of images to one row per sample, or of any tensor to its own shape.

    Adds no layer: a linear layer after the reshape reorders its own weight (`flattened_shape`).
    """
    source = reader.read_quantized(node, node.args[0])
    shape, new_shape = reader.read_shape(node, node.args[0]), tuple(node.meta["val"].shape)
    if new_shape == shape:
        return source
    if len(new_shape) != 2 or len(shape) != _IMAGE_RANK or new_shape[0] != shape[0]:  # noqa: PLR2004
        reader.refuse(node, "expected one row per sample, as from flatten(1)")
    return replace(source, flattened_shape=shape[1:])


def _to_pair(value: Any) -> tuple[int, int]:
    sizes = list(value) if isinstance(value, list | tuple) else [value]
    return (int(sizes[0]), int(sizes[-1]))


def _repeat_per_side(pads: tuple[int, int]) -> tuple[int, int, int, int]:
    return (pads[0], pads[0], pads[1], pads[1])
