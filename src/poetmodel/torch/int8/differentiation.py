"""Layers in int8 with gradients: what autograd records of them.

A value is int8, and beside it is a tensor of zeros without memory, whose gradient is that of the
real value: integers have none. Forward saves int8 tensors alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from poetmodel.torch.int8.operators import operator

if TYPE_CHECKING:
    from collections.abc import Sequence


def differentiable(
    layer: Any, given: Sequence[Tensor], reals: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Return the result of a layer, and the stand-in of its real value.

    `layer` is a `poetmodel.torch.int8.front.QuantizedLayer`, which calls this. `reals` are the
    stand-ins of what it takes; None where nothing before it trains.
    """
    if layer.flattens:
        given = [x.flatten(1) for x in given]
        reals = [None if real is None else real.flatten(1) for real in reals]
    first, *others = [
        _zeros(x) if real is None else real for x, real in zip(given, reals, strict=True)
    ]
    if layer.weight_scale is None:
        second = others[0] if others else None
        result: tuple[Tensor, Tensor] = _Unweighted.apply(layer, first, second, *given)
        return result
    constants = (layer.weight, layer.scale, layer.weight_scale)
    weight_gradient = getattr(layer, "weight_gradient", None)
    made: tuple[Tensor, Tensor] = _Weighted.apply(
        layer, first, weight_gradient, layer.bias, *given, *constants
    )
    return made


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(()).expand(like.shape)


class _Weighted(Function):  # type: ignore[misc, unused-ignore]
    """A layer with weights."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: Any,
        real: Tensor,
        weight_gradient: Tensor | None,
        bias: Tensor,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        weight_scale: Tensor,
    ) -> tuple[Tensor, Tensor]:
        del real, weight_gradient
        start = operator("start")(weight, layer.input_levels.zero)
        y = operator(layer.operator)(x, weight, start, scale, bias, *layer.numbers)
        ctx.save_for_backward(x, y, weight, weight_scale)
        ctx.layer = layer
        ctx.mark_non_differentiable(y)
        ctx.set_materialize_grads(True)
        return y, _zeros(y)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, _: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, y, weight, weight_scale = ctx.saved_tensors
        layer = ctx.layer
        levels, (*geometry, _, _, low, high) = layer.input_levels, layer.numbers
        gradient = operator("mask")(gradient.contiguous(), y, low, high)
        of_input, of_weight, of_bias = ctx.needs_input_grad[1:4]
        real = real_weight = None
        if layer.operator == "pointwise":
            if of_input:
                real = operator("pointwise_input_gradient")(gradient, weight, weight_scale)
            if of_weight:
                real_weight = operator("pointwise_weight_gradient")(
                    gradient, x, levels.scale, levels.zero
                )
        else:
            depthwise = layer.operator == "depthwise"
            groups = x.shape[3] if depthwise else geometry[3]
            window = weight.shape[:2] if depthwise else weight.shape[1:3]
            placed = (*geometry[:3], groups)
            if of_input:
                real = operator("convolution_input_gradient")(
                    gradient, weight, weight_scale, x.shape[1:3], *placed
                )
            if of_weight:
                kind = "depthwise" if depthwise else "convolution"
                real_weight = operator(f"{kind}_weight_gradient")(
                    gradient, x, levels.scale, levels.zero, window, *placed[: 3 + (not depthwise)]
                )
        bias = gradient.flatten(0, -2).sum(0) if of_bias else None
        return None, real, real_weight, bias, None, None, None, None


class _Unweighted(Function):  # type: ignore[misc, unused-ignore]
    """A sum, a mean, a maximum, or the end of the network."""

    @staticmethod
    def forward(
        ctx: Any, layer: Any, first: Tensor, second: Tensor | None, *given: Tensor
    ) -> tuple[Tensor, Tensor]:
        del first, second
        y = operator(layer.operator)(*given, *layer.numbers)
        ctx.layer = layer
        ctx.image = given[0].shape[1:3]
        saved = {"maximum": (given[0], y), "dequantize": ()}
        ctx.save_for_backward(*saved.get(layer.operator, (y,)))
        if layer.operator == "dequantize":
            return y, y.new_zeros(())
        ctx.mark_non_differentiable(y)
        return y, _zeros(y)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, real: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer, nothing = ctx.layer, (None,) * len(ctx.needs_input_grad[3:])
        if layer.operator == "dequantize":
            order = (0, *range(2, real.ndim), 1)
            return None, real.permute(order).contiguous(), None, *nothing
        gradient = gradient.contiguous()
        if layer.operator == "maximum":
            x, y = ctx.saved_tensors
            mine = operator("maximum_gradient")(gradient, x, y, *layer.numbers)
            return None, mine, None, *nothing
        (y,) = ctx.saved_tensors
        low, high = layer.numbers[-2:]
        gradient = operator("mask")(gradient, y, low, high)
        if layer.operator == "add":
            both = (gradient if wanted else None for wanted in ctx.needs_input_grad[1:3])
            return None, *both, *nothing
        window, stride, padding = layer.numbers[:3]
        if tuple(window) != (1, 1):
            gradient = operator("average_gradient")(gradient, ctx.image, window, stride, padding)
        return None, gradient, None, *nothing
