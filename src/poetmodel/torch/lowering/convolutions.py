"""Convolutions in one and two dimensions, transposed ones, and the parts of their gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from poetmodel.torch.lowering.operands import copy
from poetmodel.torch.lowering.registry import lowers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.torch.lowering.registry import Look, Lowering

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A convolution from x to y; a transposed one is the gradient of that from its y to its x."""

    x: Look
    w: Look
    y: Look
    shape: tuple[int, ...]
    """As the kernels take it: see ``pm_conv.h``."""

    @property
    def batch(self) -> int:
        return self.x.shape[0]

    @property
    def count(self) -> int:
        """How many output channels there are."""
        return self.shape[3]

    @property
    def is_depthwise(self) -> bool:
        """Whether an output channel sees one input channel, and not all."""
        return 1 < self.shape[0] == self.shape[-1]

    @property
    def is_plain(self) -> bool:
        """Whether the tensors lie in order, but for the batch of y."""
        return self.x.is_contiguous and self.w.is_contiguous and _is_plain_batch(self.y)


def _is_plain_batch(look: Look) -> bool:
    """Return whether each element of a batch lies in order."""
    one = replace(look, shape=look.shape[1:], strides=look.strides[1:])
    return one.is_contiguous


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
        _bias_gradient(op, op.output(2), dy)
    for position in (place for place in range(2) if wanted[place] and op.has_output(place)):
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


def _layer(op: Lowering, operands: Sequence[Look], geometry: Sequence[Any], groups: int) -> _Layer:
    x, w, y = operands
    dimensions = len(x.shape) - 2
    if dimensions not in (1, 2):
        op.refuse(f"expected one or two dimensions, got {dimensions}; there is no kernel for more")
    missing = 2 - dimensions
    steps = [
        [neutral] * missing + _pair(value, dimensions)
        for value, neutral in zip(geometry, (1, 0, 1), strict=True)
    ]
    sizes = [(*look.shape[:2], *[1] * missing, *look.shape[2:]) for look in (x, w, y)]
    shape = (*sizes[0][1:], *sizes[2][1:], *sizes[1][2:], *(n for two in steps for n in two))
    if shape[4:6] == (1, 1) and shape[1:3] == shape[6:8] and shape[10:12] == (0, 0) and groups == 1:
        # A window of the size of the image: a product with all of its elements.
        shape = (math.prod(shape[:3]), 1, 1, shape[3], *[1] * 6, 0, 0, 1, 1)
    return _Layer(x=x, w=w, y=y, shape=(*shape, groups))


def _pair(value: Sequence[int], dimensions: int) -> list[int]:
    return list(value) * dimensions if len(value) == 1 else list(value)


def _call(
    op: Lowering,
    kernel: str,
    pointers: Sequence[Look],
    layer: _Layer,
    *,
    bias: Look | None = None,
    accumulate: bool | None = None,
) -> None:
    """Call a kernel, or its sister for tensors that lie in another order."""
    given: list[Any] = [*pointers]
    if kernel == "pm_conv2d":
        given.append(0 if bias is None else _vector(op, bias))
    given.append(layer.shape)
    last = [] if accumulate is None else [int(accumulate)]
    if layer.is_plain:
        if layer.is_depthwise:
            kernel = kernel.replace("conv2d", "depthwise")
        step = layer.y.strides[0] if layer.batch > 1 else layer.y.elements
        op.call(kernel, *given, layer.batch, 0, layer.count, step, *last)
    else:
        strides = tuple(step for look in pointers for step in _four(look.strides))
        op.call(f"{kernel}_strided", *given, strides, layer.batch, 0, layer.count, *last)


def _bias_gradient(op: Lowering, out: Look, dy: Look) -> None:
    batch, count, height, width = _four(dy.shape, missing=1)
    op.call("pm_conv2d_db", _vector(op, out), dy, batch, count, height, width, *_four(dy.strides))


def _four(numbers: Sequence[int], *, missing: int = 0) -> tuple[int, ...]:
    """Return sizes or steps of two dimensions, where there may be one."""
    return (*numbers[:2], *[missing] * (4 - len(numbers)), *numbers[2:])


def _vector(op: Lowering, look: Look) -> Look:
    if not look.is_contiguous:
        op.refuse("a bias must lie in order")
    return look
