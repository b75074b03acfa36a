"""Int8 products: linear layers, 1x1 convolutions at each pixel, convolutions, and their calls."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.flop_counter import register_flop_formula

from poetmodel.lowered.calls import ConvolutionSizes
from poetmodel.torch.graph.operators import arguments_with_defaults
from poetmodel.torch.int8.front import QuantizedLayer
from poetmodel.torch.int8.operators import (
    IMAGE_NDIM,
    ROUNDING,
    WINDOW_SCHEMA,
    empty_windows,
    find_operator,
    register_operator,
    round_to_bytes,
    to_pair,
    window_elements,
)
from poetmodel.torch.int8.registry import converts, lowers
from poetmodel.torch.int8.values import PaddedValue, PendingLayer, QuantizedValue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, fx

    from poetmodel.torch.int8.levels import Levels
    from poetmodel.torch.int8.reader import Reader
    from poetmodel.torch.lowering.operands import Lowering, StridedView

aten: Final = torch.ops.aten
_ROW_RANK: Final = 2
"""Number of dimensions of a batch of flattened samples."""
_CONSTANTS: Final = "Tensor weight, Tensor initial_sum, Tensor scale, Tensor bias"
"""Schema of constants: weight in int8, initial sum in int32, scale and bias in float32. The
initial sum of an output is ``-zero_x * (sum of the weights of the output)``."""


# -- operators -------------------------------------------------------------------------------------


@register_operator(
    f"(Tensor x, {_CONSTANTS}, {ROUNDING}) -> Tensor",
    lambda x, w, *_: x.new_empty((*x.shape[:-1], w.shape[0])),
)
def q8_pointwise(
    x: Tensor, weight: Tensor, initial_sum: Tensor, scale: Tensor, bias: Tensor, *rounding: Any
) -> Tensor:
    """Return the results of a linear layer at each pixel.

    ``clamp(rint((acc * scale + bias) * inverse) + zero)``, with ``acc = initial_sum + sum of x *
    weight``.
    """
    _check_channels(x, weight.shape[1])
    total = x.double() @ weight.double().T
    return _requantize(total.to(torch.int32) + initial_sum, scale, bias, *rounding)


@register_operator(
    f"(Tensor x, {_CONSTANTS}, {WINDOW_SCHEMA}, int zero_x, {ROUNDING}) -> Tensor",
    lambda x, w, *arguments: empty_windows(x, w.shape[:2], arguments[3:6]),
)
def q8_depthwise(
    x: Tensor,
    weight: Tensor,
    initial_sum: Tensor,
    scale: Tensor,
    bias: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    zero_x: int,
    *rounding: Any,
) -> Tensor:
    """Return a convolution of each channel with its own window (rows, columns, channels).

    As `q8_pointwise`, with ``acc = sum of (x - zero_x) * weight``, in which padding counts as 0;
    `initial_sum` is not used.
    """
    del initial_sum  # only kernels that do not subtract zero_x need it
    _check_channels(x, weight.shape[2])
    centred_x = x.to(torch.int32) - zero_x
    sizes = tuple(weight.shape[:2])
    total = torch.zeros((), dtype=torch.int32)
    for (row, column), elements in window_elements(centred_x, sizes, stride, padding, dilation):
        total = total + elements * weight[row, column].to(torch.int32)
    return _requantize(total, scale, bias, *rounding)


@register_operator(
    f"(Tensor x, {_CONSTANTS}, {WINDOW_SCHEMA}, int groups, int zero_x, {ROUNDING}) -> Tensor",
    lambda x, w, *arguments: empty_windows(x, w.shape[1:3], arguments[3:6], w.shape[0]),
)
def q8_conv2d(
    x: Tensor,
    weight: Tensor,
    initial_sum: Tensor,
    scale: Tensor,
    bias: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    zero_x: int,
    *rounding: Any,
) -> Tensor:
    """Return the convolution of `x` (batch, rows, columns, channels), in this layout, in int8.

    `weight` has outputs, rows, columns, and channels of a group. The formula is that of
    `q8_depthwise`, with the sum over the window and the channels of the group.
    """
    del initial_sum
    centred_x = x.double() - zero_x
    outputs, height, width, channels = weight.shape
    _check_channels(x, groups * channels)
    grouped_weight = weight.double().reshape(groups, outputs // groups, height, width, channels)
    total = torch.zeros((), dtype=torch.float64)
    for (row, column), elements in window_elements(
        centred_x, (height, width), stride, padding, dilation
    ):
        grouped_elements = elements.unflatten(-1, (groups, channels))
        total = total + torch.einsum(
            "nhwgc,grc->nhwgr", grouped_elements, grouped_weight[:, :, row, column]
        )
    return _requantize(total.flatten(-2).to(torch.int32), scale, bias, *rounding)


def _check_channels(x: Tensor, expected_channels: int) -> None:
    """Raise `ValueError` unless the last dimension of `x` has `expected_channels`."""
    n_channels = x.shape[-1]
    torch._check_value(  # noqa: SLF001 - a ValueError, as PyTorch raises for shapes
        n_channels == expected_channels,
        lambda: f"quantized front: expected {expected_channels} channels, got {n_channels}",
    )


def _requantize(total: Tensor, scale: Tensor, bias: Tensor, *rounding: Any) -> Tensor:
    """Convert int32 sums to bytes: scale them, add the bias, round and clamp."""
    return round_to_bytes(total.float() * scale.float() + bias.float(), *rounding)


def _flop_formula(macs_per_output: Callable[[Sequence[int]], int]) -> Callable[..., int]:
    """Return a FLOP formula: 2 * output elements * `macs_per_output` of the weight's shape."""

    def flops(
        _: Any, weight: Sequence[int], *arguments: Any, out_shape: Any = None, **options: Any
    ) -> int:
        del arguments, options
        return int(2 * math.prod(out_shape) * macs_per_output(weight))

    return flops


register_flop_formula(find_operator("pointwise").overloadpacket)(
    _flop_formula(lambda weight: weight[1])
)
register_flop_formula(find_operator("depthwise").overloadpacket)(
    _flop_formula(lambda weight: weight[0] * weight[1])
)
register_flop_formula(find_operator("conv2d").overloadpacket)(
    _flop_formula(lambda weight: math.prod(weight[1:]))
)


# -- patterns --------------------------------------------------------------------------------------


@converts(aten.conv2d.default, aten.conv2d.padding, aten.convolution.default)
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
    if int8_weight.ndim != IMAGE_NDIM:
        reader.refuse(node, "expected a convolution of two dimensions, which has a kernel in int8")
    strides = to_pair(stride)
    dilations = to_pair(dilation)
    if isinstance(padding, str):
        total_padding = [
            dilation_step * (size - 1)
            for dilation_step, size in zip(dilations, int8_weight.shape[2:], strict=True)
        ]
        total_padding = total_padding if padding == "same" else [0, 0]
        node_padding = [pad for total in total_padding for pad in (total // 2, total - total // 2)]
    else:
        node_padding = [pad for pad in to_pair(padding) for _ in range(2)]
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


@converts(aten.linear.default)
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


def _split_padding(
    reader: Reader, node: fx.Node, x: Any
) -> tuple[QuantizedValue, tuple[int, int, int, int]]:
    """Return a convolution's quantized input without padding, and its `PaddedValue.padding`."""
    value = reader.values.get(x)
    if isinstance(value, PaddedValue) and isinstance(value.value, QuantizedValue):
        return value.value, value.padding
    return reader.read_quantized(node, x), (0, 0, 0, 0)


# -- calls -----------------------------------------------------------------------------------------


@lowers("pointwise")
def _lower_pointwise(op: Lowering) -> None:
    x, *constants = map(op.value, op.args[:5])
    pixels = math.prod(x.shape[:-1])
    output_channels, channels = constants[0].shape
    sizes = (pixels, channels, output_channels, output_channels)
    op.call("pm_q8_pointwise", op.output(), x, *constants, *sizes, *op.args[5:])


@lowers("depthwise", "conv2d")
def _lower_convolution(op: Lowering) -> None:
    """Lower an int8 convolution; a depthwise one has its own kernel."""
    x, weight, *constants = map(op.value, op.args[:5])
    out = op.output()
    stride, padding, dilation, *last_arguments = op.args[5:]
    is_depthwise = op.node.target is find_operator("depthwise")
    groups = out.shape[3] if is_depthwise else last_arguments.pop(0)
    window = weight.shape[:2] if is_depthwise else weight.shape[1:3]
    sizes = convolution_sizes(x, out, window, stride, padding, dilation, groups)
    kernel = "pm_q8_depthwise" if is_depthwise else "pm_q8_conv2d"
    op.call(kernel, out, x, weight, *constants, sizes, x.shape[0], out.shape[3], *last_arguments)


def convolution_sizes(
    x: StridedView, out: StridedView, window: Any, stride: Any, padding: Any, dilation: Any,
    groups: int,
) -> tuple[int, ...]:  # fmt: skip
    """Return the `ConvolutionSizes` of a convolution or pool (channels last), without the batch."""
    window_sizes = (*window, *stride, *padding[::2], *dilation, groups)
    size_list = (*_image_sizes(x), *_image_sizes(out), *window_sizes)
    return tuple(ConvolutionSizes(*size_list))


def _image_sizes(view: StridedView) -> tuple[int, ...]:
    """Return channels, rows and columns."""
    return view.shape[3], view.shape[1], view.shape[2]
