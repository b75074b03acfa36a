"""Int8 layers: each operator of their forward and backward passes becomes one kernel call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from poetmodel.lowered.calls import ConvolutionSizes
from poetmodel.torch.int8.operators import find_operator
from poetmodel.torch.lowering.linear import accumulate_gradient, gradient_of
from poetmodel.torch.lowering.operands import as_contiguous, fill, lowers
from poetmodel.torch.lowering.spatial import flatten_windows, max_windows
from poetmodel.torch.step.updates import QuantizedUpdate

if TYPE_CHECKING:
    from poetmodel.torch.lowering.operands import Lowering, StridedView

_DEPTHWISE: Final = 3
"""Number of dimensions of a depthwise convolution's weight: rows, columns, channels."""


@lowers(find_operator("quantize"))
def _quantize(op: Lowering) -> None:
    x = as_contiguous(op, op.value(op.args[0]))
    op.call("pm_q8_quantize", op.output(), x, *_image_sizes(x.shape, 1), *op.args[1:])


@lowers(find_operator("dequantize"))
def _dequantize(op: Lowering) -> None:
    x = op.value(op.args[0])
    batch, channels, plane = _image_sizes(x.shape, -1)
    numbers = (batch, channels, plane, channels)
    op.call("pm_q8_dequantize", op.output(), x, *numbers, *op.args[1:])


@lowers(find_operator("pointwise"))
def _pointwise(op: Lowering) -> None:
    x, *constants = map(op.value, op.args[:5])
    pixels = math.prod(x.shape[:-1])
    results, channels = constants[0].shape
    numbers = (pixels, channels, results, results)
    op.call("pm_q8_pointwise", op.output(), x, *constants, *numbers, *op.args[5:])


@lowers(find_operator("depthwise"), find_operator("conv2d"))
def _convolution(op: Lowering) -> None:
    """Lower an int8 convolution; a depthwise one has its own kernel."""
    x, weight, *constants = map(op.value, op.args[:5])
    out = op.output()
    stride, padding, dilation, *numbers = op.args[5:]
    is_depthwise = op.node.target is find_operator("depthwise")
    groups = out.shape[3] if is_depthwise else numbers.pop(0)
    window = weight.shape[:2] if is_depthwise else weight.shape[1:3]
    sizes = _convolution_sizes(x, out, window, stride, padding, dilation, groups)
    kernel = "pm_q8_depthwise" if is_depthwise else "pm_q8_conv2d"
    op.call(kernel, out, x, weight, *constants, sizes, x.shape[0], out.shape[3], *numbers)


@lowers(find_operator("add"))
def _add(op: Lowering) -> None:
    a, b = map(op.value, op.args[:2])
    op.is_elementwise = True
    op.call("pm_q8_add", op.output(), a, b, a.elements, *op.args[2:])


@lowers(find_operator("average"))
def _average(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    window, stride, padding, factor, *numbers = op.args[1:]
    sides = _window_bounds(x, out, window, stride, padding, (1, 1))
    zero_x, *ending = numbers
    op.is_elementwise = tuple(window) == (1, 1)
    op.call("pm_q8_average", out, x, *sides, *_pool_sizes(out, x), zero_x, factor, *ending)


@lowers(find_operator("maximum"))
def _maximum(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    window, stride, padding, dilation = op.args[1:]
    sides = _window_bounds(x, out, window, stride, padding, dilation)
    op.call("pm_q8_maximum", out, x, *sides, *_pool_sizes(out, x), *dilation)


# -- gradients -------------------------------------------------------------------------------------


@lowers(find_operator("mask"))
def _mask(op: Lowering) -> None:
    gradient, y = as_contiguous(op, op.value(op.args[0])), op.value(op.args[1])
    op.is_elementwise = True
    elements = (1, y.elements, 1, 1, 1)
    limits = map(float, op.args[2:])
    op.call("pm_q8_mask", op.output(), gradient, y, elements, *limits)


@lowers(find_operator("start"))
def _start(op: Lowering) -> None:
    weight, out = op.value(op.args[0]), op.output()
    terms = weight.elements // max(1, out.elements)
    by_channel = weight.shape[-1] == out.elements and len(weight.shape) == _DEPTHWISE
    steps = (1, out.elements) if by_channel else (terms, 1)
    op.call("pm_q8_start", out, weight, out.elements, terms, *steps, op.args[1])


@lowers(find_operator("pointwise_input_gradient"))
def _pointwise_input_gradient(op: Lowering) -> None:
    gradient, weight, scale = map(op.value, op.args)
    results, channels = weight.shape
    numbers = (math.prod(gradient.shape[:-1]), channels, channels, results, channels, results, 0)
    op.call("pm_q8_pointwise_dx", op.output(), gradient, weight, scale, *numbers)


@lowers(find_operator("pointwise_weight_gradient"))
def _pointwise_weight_gradient(op: Lowering) -> None:
    gradient, x = map(op.value, op.args[:2])
    out, sizes = op.output(), (math.prod(x.shape[:-1]), x.shape[-1], gradient.shape[-1])
    op.call("pm_q8_pointwise_dw", out, gradient, x, *sizes, *op.args[2:], out.elements)


@lowers(find_operator("convolution_input_gradient"))
def _convolution_input_gradient(op: Lowering) -> None:
    """Lower the gradient of a convolution's input."""
    gradient, weight, scale = map(op.value, op.args[:3])
    out, (_, *geometry) = op.output(), op.args[3:]
    is_depthwise = len(weight.shape) == _DEPTHWISE
    window = weight.shape[:2] if is_depthwise else weight.shape[1:3]
    sizes = _convolution_sizes(out, gradient, window, *geometry)
    channels, results = out.shape[3], gradient.shape[3]
    numbers = (channels,) if is_depthwise else (channels, results, channels, results, 0)
    kernel = "pm_q8_depthwise_dx" if is_depthwise else "pm_q8_conv2d_dx"
    op.call(kernel, out, gradient, weight, scale, sizes, out.shape[0], *numbers)


@lowers(find_operator("convolution_weight_gradient"), find_operator("depthwise_weight_gradient"))
def _convolution_weight_gradient(op: Lowering) -> None:
    """Lower the gradient of a convolution's weight."""
    gradient, x = map(op.value, op.args[:2])
    scale_x, zero_x, window, stride, padding, dilation, *groups = op.args[2:]
    is_depthwise = op.node.target is find_operator("depthwise_weight_gradient")
    number = x.shape[3] if is_depthwise else groups[0]
    sizes = _convolution_sizes(x, gradient, window, stride, padding, dilation, number)
    kernel = "pm_q8_depthwise_dw" if is_depthwise else "pm_q8_conv2d_dw"
    out = op.output()
    count = x.shape[3] if is_depthwise else out.elements
    op.call(kernel, out, gradient, x, sizes, x.shape[0], scale_x, zero_x, count)


@lowers(find_operator("average_gradient"))
def _average_gradient(op: Lowering) -> None:
    gradient, out = op.value(op.args[0]), op.output()
    window, stride, padding = op.args[2:]
    sizes = _convolution_sizes(out, gradient, window, stride, padding, (1, 1), out.shape[3])
    op.call("pm_q8_average_dx", out, gradient, sizes, out.shape[0], out.shape[3])


@lowers(find_operator("maximum_gradient"))
def _maximum_gradient(op: Lowering) -> None:
    gradient, x, y = map(op.value, op.args[:3])
    window, stride, padding, dilation = op.args[3:]
    sizes = _convolution_sizes(x, y, window, stride, padding, dilation, x.shape[3])
    numbers = (x.shape[0], *[x.shape[3]] * 3)
    op.call("pm_q8_maximum_dx", op.output(), gradient, x, y, sizes, *numbers)


@lowers(QuantizedUpdate)
def _update(op: Lowering) -> None:
    """Lower the update of an int8 weight, by 16-bit or stochastic rounding.

    With several batches per update, gradients are summed, and the sum is set to 0 after the update.
    """
    state, gradients, scale, rate, *others = op.args
    update = op.node.target
    weight, *scales = map(op.value, state)
    gradient_sum = scales.pop() if update.batches > 1 else None
    if gradient_sum is None:
        gradient = gradient_of(op, gradients, weight, others)
    else:
        gradient = accumulate_gradient(op, gradient_sum, gradients, others[0], others[1:])
    is_depthwise = len(weight.shape) == _DEPTHWISE
    results = weight.shape[-1 if is_depthwise else 0]
    inner = 1 if is_depthwise else weight.elements // max(1, results)
    rule, draws = update.settings, update.next_draws()
    numbers: tuple[int, ...] = (results, inner, 0, weight.elements)
    if draws is not None:
        signed_seed = draws.seed - (draws.seed >> 31 << 32)
        numbers += (draws.site, signed_seed, draws.update, update.batches, 0)
    kernel = "pm_q8_sgd" if draws is None else "pm_q8_stochastic"
    rate_numbers = (
        op.learning_rate(rate),
        -1.0 if rule.maximize else 1.0,
        float(rule.weight_decay),
    )
    op.call(kernel, weight, *scales, gradient, op.value(scale), *numbers, *rate_numbers)
    if gradient_sum is not None:
        fill(op, gradient_sum, 0)


# -- sizes -----------------------------------------------------------------------------------------


def _convolution_sizes(
    x: StridedView, out: StridedView, window: Any, stride: Any, padding: Any, dilation: Any,
    groups: int,
) -> tuple[int, ...]:  # fmt: skip
    """Return the sizes of a convolution or a pool as a kernel argument: see `ConvolutionSizes`."""
    spatial = (*window, *stride, *padding[::2], *dilation, groups)
    size_list = (*_channels_first(x), *_channels_first(out), *spatial)
    return tuple(ConvolutionSizes(*size_list))


def _image_sizes(shape: tuple[int, ...], channels: int) -> tuple[int, int, int]:
    """Return the number of images in a batch, their channels, and the elements of a plane."""
    if len(shape) == 1:
        return 1, shape[0], 1
    batch, every = shape[0], math.prod(shape[1:])
    return batch, shape[channels], every // max(1, shape[channels])


def _channels_first(view: StridedView) -> tuple[int, ...]:
    """Return channels, height and width of a batch of images."""
    return view.shape[3], view.shape[1], view.shape[2]


def _image_shape(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return batch, height, width and channels.

    Height and width are 1 without spatial dimensions.
    """
    batch, *spatial, channels = shape
    height, width = spatial or (1, 1)
    return batch, height, width, channels


def _pool_sizes(out: StridedView, x: StridedView) -> tuple[int, ...]:
    batch, height, width, channels = _image_shape(out.shape)
    return batch, channels, height, width, *_image_shape(x.shape)[1:3], channels, channels


def _window_bounds(
    x: StridedView, out: StridedView, window: Any, stride: Any, padding: Any, dilation: Any
) -> list[tuple[int, ...]]:
    """Return begin and end of each window in the image: for all rows, and for all columns."""
    dimensions = zip(
        _image_shape(x.shape)[1:3], _image_shape(out.shape)[1:3], window, stride, padding[::2],
        dilation,
        strict=True,
    )  # fmt: skip
    return [flatten_windows(max_windows(*numbers)) for numbers in dimensions]
