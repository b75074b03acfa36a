"""Layers in int8: each operator of a quantized front becomes one call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from poetmodel.lowered.calls import ConvolutionSizes
from poetmodel.torch.int8.operators import operator
from poetmodel.torch.lowering.operands import in_order, lowers
from poetmodel.torch.lowering.spatial import flat, max_windows

if TYPE_CHECKING:
    from poetmodel.torch.lowering.operands import Lowering, StridedView


@lowers(operator("quantize"))
def _quantize(op: Lowering) -> None:
    x = in_order(op, op.value(op.args[0]))
    op.call("pm_q8_quantize", op.output(), x, *_images(x.shape, 1), *op.args[1:])


@lowers(operator("dequantize"))
def _dequantize(op: Lowering) -> None:
    x = op.value(op.args[0])
    batch, channels, plane = _images(x.shape, -1)
    numbers = (batch, channels, plane, channels)
    op.call("pm_q8_dequantize", op.output(), x, *numbers, *op.args[1:])


@lowers(operator("pointwise"))
def _pointwise(op: Lowering) -> None:
    x, *constants = map(op.value, op.args[:5])
    pixels = math.prod(x.shape[:-1])
    results, channels = constants[0].shape
    numbers = (pixels, channels, results, results)
    op.call("pm_q8_pointwise", op.output(), x, *constants, *numbers, *op.args[5:])


@lowers(operator("depthwise"), operator("conv2d"))
def _convolution(op: Lowering) -> None:
    x, weight, *constants = map(op.value, op.args[:5])
    out = op.output()
    stride, padding, dilation, *numbers = op.args[5:]
    depthwise = op.node.target is operator("depthwise")
    groups = out.shape[3] if depthwise else numbers.pop(0)
    window = weight.shape[:2] if depthwise else weight.shape[1:3]
    listed = (*_image(x), *_image(out), *window, *stride, *padding[::2], *dilation, groups)
    sizes = ConvolutionSizes(*listed)
    kernel = "pm_q8_depthwise" if depthwise else "pm_q8_conv2d"
    op.call(kernel, out, x, weight, *constants, tuple(sizes), x.shape[0], out.shape[3], *numbers)


@lowers(operator("add"))
def _add(op: Lowering) -> None:
    a, b = map(op.value, op.args[:2])
    op.elementwise = True
    op.call("pm_q8_add", op.output(), a, b, a.elements, *op.args[2:])


@lowers(operator("average"))
def _average(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    window, stride, padding, factor, *numbers = op.args[1:]
    sides = _sides(x, out, window, stride, padding, (1, 1))
    zero_x, *ending = numbers
    op.elementwise = tuple(window) == (1, 1)
    op.call("pm_q8_average", out, x, *sides, *_sizes(out, x), zero_x, factor, *ending)


@lowers(operator("maximum"))
def _maximum(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    window, stride, padding, dilation = op.args[1:]
    sides = _sides(x, out, window, stride, padding, dilation)
    op.call("pm_q8_maximum", out, x, *sides, *_sizes(out, x), *dilation)


def _images(shape: tuple[int, ...], channels: int) -> tuple[int, int, int]:
    """Return how many images a batch has, their channels, and the size of a plane."""
    if len(shape) == 1:
        return 1, shape[0], 1
    batch, every = shape[0], math.prod(shape[1:])
    return batch, shape[channels], every // max(1, shape[channels])


def _image(look: StridedView) -> tuple[int, ...]:
    """Return channels, height and width."""
    return look.shape[3], look.shape[1], look.shape[2]


def _four(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return batch, height, width and channels of what may have no places."""
    batch, *places, channels = shape
    height, width = places or (1, 1)
    return batch, height, width, channels


def _sizes(out: StridedView, x: StridedView) -> tuple[int, ...]:
    batch, height, width, channels = _four(out.shape)
    return batch, channels, height, width, *_four(x.shape)[1:3], channels, channels


def _sides(
    x: StridedView, out: StridedView, window: Any, stride: Any, padding: Any, dilation: Any
) -> list[tuple[int, ...]]:
    """Return where the windows of all rows, and of all columns, begin and end in the image."""
    sides = zip(
        _four(x.shape)[1:3], _four(out.shape)[1:3], window, stride, padding[::2], dilation,
        strict=True,
    )  # fmt: skip
    return [flat(max_windows(*numbers)) for numbers in sides]
