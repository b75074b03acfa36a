"""Lowerings of int8 conversions, of the backward pass of int8 layers, and of updates of weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from poetmodel.torch.int8.operators import DEPTHWISE_NDIM, find_operator
from poetmodel.torch.int8.products import convolution_sizes
from poetmodel.torch.int8.registry import LOWERINGS
from poetmodel.torch.lowering.operands import fill, lowers, make_contiguous
from poetmodel.torch.lowering.updates import accumulate_gradient, lower_gradient
from poetmodel.torch.step.updates import QuantizedUpdate

if TYPE_CHECKING:
    from poetmodel.torch.lowering.operands import Lowering

for name, lower in LOWERINGS.items():
    lowers(find_operator(name))(lower)


@lowers(find_operator("quantize"))
def _lower_quantize(op: Lowering) -> None:
    x = make_contiguous(op, op.value(op.args[0]))
    op.call("pm_q8_quantize", op.output(), x, *_batch_sizes(x.shape, 1), *op.args[1:])


@lowers(find_operator("dequantize"))
def _lower_dequantize(op: Lowering) -> None:
    x = op.value(op.args[0])
    batch, channels, plane_elements = _batch_sizes(x.shape, -1)
    sizes = (batch, channels, plane_elements, channels)
    op.call("pm_q8_dequantize", op.output(), x, *sizes, *op.args[1:])


# -- gradients -------------------------------------------------------------------------------------


@lowers(find_operator("mask"))
def _lower_mask(op: Lowering) -> None:
    """Lower the mask of a gradient: 0 unless the int8 result is strictly between its limits."""
    gradient, y = make_contiguous(op, op.value(op.args[0])), op.value(op.args[1])
    op.can_overwrite_operand = True
    table = (1, y.elements, 1, 1, 1)
    limits = map(float, op.args[2:])
    op.call("pm_q8_mask", op.output(), gradient, y, table, *limits)


@lowers(find_operator("start"))
def _lower_start(op: Lowering) -> None:
    """Lower the initial sum of each output, from a weight and the zero of the layer's input."""
    weight, out = op.value(op.args[0]), op.output()
    summand_count = weight.elements // max(1, out.elements)
    is_depthwise = weight.shape[-1] == out.elements and len(weight.shape) == DEPTHWISE_NDIM
    strides = (1, out.elements) if is_depthwise else (summand_count, 1)
    op.call("pm_q8_start", out, weight, out.elements, summand_count, *strides, op.args[1])


@lowers(find_operator("pointwise_input_gradient"))
def _lower_pointwise_input_gradient(op: Lowering) -> None:
    """Lower the gradient of the input of an int8 linear layer or 1x1 convolution."""
    gradient, weight, scale = map(op.value, op.args)
    output_channels, channels = weight.shape
    sizes = (
        math.prod(gradient.shape[:-1]),
        channels,
        channels,
        output_channels,
        channels,
        output_channels,
        0,
    )
    op.call("pm_q8_pointwise_dx", op.output(), gradient, weight, scale, *sizes)


@lowers(find_operator("pointwise_weight_gradient"))
def _lower_pointwise_weight_gradient(op: Lowering) -> None:
    gradient, x = map(op.value, op.args[:2])
    out, sizes = op.output(), (math.prod(x.shape[:-1]), x.shape[-1], gradient.shape[-1])
    op.call("pm_q8_pointwise_dw", out, gradient, x, *sizes, *op.args[2:], out.elements)


@lowers(find_operator("convolution_input_gradient"))
def _lower_convolution_input_gradient(op: Lowering) -> None:
    """Lower the gradient of an int8 convolution's input; a depthwise one has its own kernel."""
    gradient, weight, scale = map(op.value, op.args[:3])
    out, (_, *window_arguments) = op.output(), op.args[3:]
    is_depthwise = len(weight.shape) == DEPTHWISE_NDIM
    window = weight.shape[:2] if is_depthwise else weight.shape[1:3]
    sizes = convolution_sizes(out, gradient, window, *window_arguments)
    channels, output_channels = out.shape[3], gradient.shape[3]
    kernel_constants = (
        (channels,) if is_depthwise else (channels, output_channels, channels, output_channels, 0)
    )
    kernel = "pm_q8_depthwise_dx" if is_depthwise else "pm_q8_conv2d_dx"
    op.call(kernel, out, gradient, weight, scale, sizes, out.shape[0], *kernel_constants)


@lowers(find_operator("convolution_weight_gradient"), find_operator("depthwise_weight_gradient"))
def _lower_convolution_weight_gradient(op: Lowering) -> None:
    """Lower the gradient of an int8 convolution's weight; a depthwise one has its own kernel."""
    gradient, x = map(op.value, op.args[:2])
    scale_x, zero_x, window, stride, padding, dilation, *stated_groups = op.args[2:]
    is_depthwise = op.node.target is find_operator("depthwise_weight_gradient")
    groups = x.shape[3] if is_depthwise else stated_groups[0]
    sizes = convolution_sizes(x, gradient, window, stride, padding, dilation, groups)
    kernel = "pm_q8_depthwise_dw" if is_depthwise else "pm_q8_conv2d_dw"
    out = op.output()
    result_count = x.shape[3] if is_depthwise else out.elements
    op.call(kernel, out, gradient, x, sizes, x.shape[0], scale_x, zero_x, result_count)


@lowers(find_operator("average_gradient"))
def _lower_average_gradient(op: Lowering) -> None:
    gradient, out = op.value(op.args[0]), op.output()
    window, stride, padding = op.args[2:]
    sizes = convolution_sizes(out, gradient, window, stride, padding, (1, 1), out.shape[3])
    op.call("pm_q8_average_dx", out, gradient, sizes, out.shape[0], out.shape[3])


@lowers(find_operator("maximum_gradient"))
def _lower_maximum_gradient(op: Lowering) -> None:
    gradient, x, y = map(op.value, op.args[:3])
    window, stride, padding, dilation = op.args[3:]
    sizes = convolution_sizes(x, y, window, stride, padding, dilation, x.shape[3])
    counts = (x.shape[0], *[x.shape[3]] * 3)
    op.call("pm_q8_maximum_dx", op.output(), gradient, x, y, sizes, *counts)


@lowers(QuantizedUpdate)
def _lower_quantized_update(op: Lowering) -> None:
    """Lower the update of an int8 weight, by 16-bit or stochastic rounding.

    With several batches per update, the last one updates the weight by the clipped sum of
    gradients, and sets the sum to 0.
    """
    state, gradients, scale, rate, *optional_operands = op.args
    update = op.node.target
    weight, *other_state = map(op.value, state)
    gradient_sum = other_state.pop() if update.batches > 1 else None
    if gradient_sum is None:
        gradient = lower_gradient(op, gradients, weight, optional_operands)
    else:
        gradient = accumulate_gradient(
            op, gradient_sum, gradients, optional_operands[0], optional_operands[1:]
        )
    is_depthwise = len(weight.shape) == DEPTHWISE_NDIM
    output_channels = weight.shape[-1 if is_depthwise else 0]
    elements_per_output = 1 if is_depthwise else weight.elements // max(1, output_channels)
    settings, draws = update.settings, update.next_draws()
    kernel_constants: tuple[int, ...] = (output_channels, elements_per_output, 0, weight.elements)
    if draws is not None:
        signed_seed = draws.seed - (draws.seed >> 31 << 32)
        kernel_constants += (draws.site, signed_seed, draws.update, update.batches, 0)
    kernel = "pm_q8_sgd" if draws is None else "pm_q8_stochastic"
    rate_constants = (
        op.learning_rate(rate),
        -1.0 if settings.maximize else 1.0,
        float(settings.weight_decay),
    )
    op.call(
        kernel, weight, *other_state, gradient, op.value(scale), *kernel_constants, *rate_constants
    )
    if gradient_sum is not None:
        fill(op, gradient_sum, 0)


# -- sizes -----------------------------------------------------------------------------------------


def _batch_sizes(shape: tuple[int, ...], channel_dimension: int) -> tuple[int, int, int]:
    """Return the number of images in a batch, their channels, and the elements of a channel."""
    if len(shape) == 1:
        return 1, shape[0], 1
    batch, image_elements = shape[0], math.prod(shape[1:])
    return (
        batch,
        shape[channel_dimension],
        image_elements // max(1, shape[channel_dimension]),
    )
