"""Autograd functions of int8 layers.

Integers have no gradient in PyTorch. So each int8 value is accompanied by a float tensor of zeros
without memory (its *proxy*), whose gradient is that of the real value. The forward pass saves only
int8 tensors, and the scales of weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from poetmodel.errors import InputError
from poetmodel.torch.int8.operators import find_operator

if TYPE_CHECKING:
    from collections.abc import Sequence

_UNWEIGHTED: Final = ("add", "average", "dequantize", "maximum")
"""Operators without weights whose gradient is known; `_WEIGHTED` are those with weights."""
_WEIGHTED: Final = ("conv2d", "depthwise", "pointwise")


def apply_with_proxies(
    layer: Any, inputs: Sequence[Tensor], proxies: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Compute a layer with autograd; return its result and the proxy of the real result.

    A proxy is zeros without memory whose gradient is that of the real value; None in `proxies`
    stands for an input that depends on no layer that trains.
    """
    weight_gradient = getattr(layer, "weight_gradient", None)
    if weight_gradient is not None or any(proxy is not None for proxy in proxies):
        _check_gradient(layer)
    if layer.flattens:
        inputs = [x.flatten(1) for x in inputs]
        proxies = [None if proxy is None else proxy.flatten(1) for proxy in proxies]
    first_proxy, *other_proxies = [
        _zero_proxy(x) if proxy is None else proxy for x, proxy in zip(inputs, proxies, strict=True)
    ]
    if layer.weight_scale is None:
        second_proxy = other_proxies[0] if other_proxies else None
        result: tuple[Tensor, Tensor] = _UnweightedFunction.apply(
            layer, first_proxy, second_proxy, *inputs
        )
        return result
    constants = (layer.weight, layer.scale, layer.weight_scale)
    weighted_result: tuple[Tensor, Tensor] = _WeightedFunction.apply(
        layer, first_proxy, weight_gradient, layer.bias, *inputs, *constants
    )
    return weighted_result


def _check_gradient(layer: Any) -> None:
    known_operators = _UNWEIGHTED if layer.weight_scale is None else _WEIGHTED
    if layer.operator not in known_operators:
        raise InputError(
            f"int8 layer {layer.operator!r} has no gradient, so neither it nor a layer before it "
            f"can be trained; known are {', '.join(known_operators)}"
        )


def _zero_proxy(x: Tensor) -> Tensor:
    """Return a proxy: zeros in the shape of a tensor, without memory for the elements."""
    return torch.zeros(()).expand(x.shape)


class _WeightedFunction(Function):  # type: ignore[misc, unused-ignore]
    """Autograd function of a convolution or linear layer."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: Any,
        input_proxy: Tensor,
        weight_gradient: Tensor | None,
        bias: Tensor,
        x: Tensor,
        weight: Tensor,
        scale: Tensor,
        weight_scale: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Compute the layer, save the tensors for the gradient, and return (int8 result, proxy)."""
        del input_proxy, weight_gradient
        initial_sum = find_operator("start")(weight, layer.input_levels.zero)
        y = find_operator(layer.operator)(x, weight, initial_sum, scale, bias, *layer.numbers)
        ctx.save_for_backward(x, y, weight, weight_scale)
        ctx.layer = layer
        ctx.mark_non_differentiable(y)
        return y, _zero_proxy(y)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, _: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input proxy, weight and bias."""
        x, y, weight, weight_scale = ctx.saved_tensors
        layer = ctx.layer
        levels, (*window_arguments, _, _, low, high) = layer.input_levels, layer.numbers
        gradient = find_operator("mask")(gradient.contiguous(), y, low, high)
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[1:4]
        input_gradient = weight_gradient = None
        if layer.operator == "pointwise":
            if needs_input:
                input_gradient = find_operator("pointwise_input_gradient")(
                    gradient, weight, weight_scale
                )
            if needs_weight:
                weight_gradient = find_operator("pointwise_weight_gradient")(
                    gradient, x, levels.scale, levels.zero
                )
        else:
            is_depthwise = layer.operator == "depthwise"
            groups = x.shape[3] if is_depthwise else window_arguments[3]
            window = weight.shape[:2] if is_depthwise else weight.shape[1:3]
            conv_arguments = (*window_arguments[:3], groups)
            if needs_input:
                input_gradient = find_operator("convolution_input_gradient")(
                    gradient, weight, weight_scale, x.shape[1:3], *conv_arguments
                )
            if needs_weight:
                convolution_kind = "depthwise" if is_depthwise else "convolution"
                weight_gradient = find_operator(f"{convolution_kind}_weight_gradient")(
                    gradient,
                    x,
                    levels.scale,
                    levels.zero,
                    window,
                    *conv_arguments[: 3 + (not is_depthwise)],
                )
        bias_gradient = gradient.flatten(0, -2).sum(0) if needs_bias else None
        return None, input_gradient, weight_gradient, bias_gradient, None, None, None, None


class _UnweightedFunction(Function):  # type: ignore[misc, unused-ignore]
    """Autograd function of a layer without weights: sum, mean, maximum, or final dequantization."""

    @staticmethod
    def forward(
        ctx: Any, layer: Any, first_proxy: Tensor, second_proxy: Tensor | None, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the layer, save what the gradient needs, and return (result, proxy)."""
        del first_proxy, second_proxy
        y = find_operator(layer.operator)(*inputs, *layer.numbers)
        ctx.layer = layer
        ctx.input_size = inputs[0].shape[1:3]
        saved_by_operator = {"maximum": (inputs[0], y), "dequantize": ()}
        ctx.save_for_backward(*saved_by_operator.get(layer.operator, (y,)))
        if layer.operator == "dequantize":
            return y, y.new_zeros(())
        ctx.mark_non_differentiable(y)
        return y, _zero_proxy(y)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, output_gradient: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the one or two input proxies."""
        layer, no_gradients = ctx.layer, (None,) * len(ctx.needs_input_grad[3:])
        if layer.operator == "dequantize":
            channels_last = (0, *range(2, output_gradient.ndim), 1)
            return None, output_gradient.permute(channels_last).contiguous(), None, *no_gradients
        gradient = gradient.contiguous()
        if layer.operator == "maximum":
            x, y = ctx.saved_tensors
            input_gradient = find_operator("maximum_gradient")(gradient, x, y, *layer.numbers)
            return None, input_gradient, None, *no_gradients
        (y,) = ctx.saved_tensors
        low, high = layer.numbers[-2:]
        gradient = find_operator("mask")(gradient, y, low, high)
        if layer.operator == "add":
            proxy_gradients = (
                gradient if is_needed else None for is_needed in ctx.needs_input_grad[1:3]
            )
            return None, *proxy_gradients, *no_gradients
        window, stride, padding = layer.numbers[:3]
        if tuple(window) != (1, 1):
            gradient = find_operator("average_gradient")(
                gradient, ctx.input_size, window, stride, padding
            )
        return None, gradient, None, *no_gradients
