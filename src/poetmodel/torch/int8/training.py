"""Layers in int8 that train: forward as a quantized front, backward in float32.

Eager PyTorch with these modules is the definition. Forward saves int8 tensors alone. The gradient
of a weight belongs to a parameter without memory, `TrainedLayer.weight_gradient`; `QuantizedSGD`
subtracts it from the bytes of the weight.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from poetmodel.errors import InputError
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.int8.front import QuantizedFront, QuantizedLayer
from poetmodel.torch.int8.gradients import (
    STEPS,
    split_16_bits,
    update_16_bits,
    update_stochastic,
)
from poetmodel.torch.int8.operators import operator

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDINGS: Final = ("16 bits", "stochastic")
"""Ways to keep changes of a weight that are below a step of a byte."""


class TrainedLayer(QuantizedLayer):
    """A convolution or linear layer in int8 whose weights and biases train.

    Parameters
    ----------
    layer : QuantizedLayer
        A frozen layer with weights.
    rounding : str
        One of `ROUNDINGS`: ``16 bits`` keeps another int8 for each weight, ``stochastic`` none.
    headroom : float
        Factor by which the weights may grow: the scales of the weights are those of `layer` times
        this.
    """

    def __init__(self, layer: QuantizedLayer, *, rounding: str, headroom: float) -> None:
        if layer.weight_scale is None or layer.input_levels is None:
            raise InputError(f"{layer.operator}: it has no weights to train")
        # The same real weights, on coarser scales.
        whole = torch.round(layer.weight.double() * (STEPS / headroom))
        weight, residual = split_16_bits(whole)
        tensors = {"weight": weight, "scale": layer.scale * headroom}
        super().__init__(
            layer.operator,
            tensors,
            layer.numbers,
            flattens=layer.flattens,
            input_levels=layer.input_levels,
        )
        self.rounding = rounding
        del self.weight_scale
        self.register_buffer("weight_scale", layer.weight_scale * headroom)
        if rounding == ROUNDINGS[0]:
            self.register_buffer("residual", residual)
        self.bias = nn.Parameter(layer.bias.clone())
        self.weight_gradient = nn.Parameter(torch.zeros(()).expand(weight.shape))
        """Stands for the real weights: has their shape and gradient, and no memory."""

    def forward(self, *given: Tensor) -> Tensor:
        """Return the int8 result of an int8 input."""
        return _call(self, [(x, None) for x in given])[0]

    def extra_repr(self) -> str:
        """Return the operator and the rounding."""
        return f"{self.operator}, {self.rounding}"

    def update(self, gradient: Tensor, lr: float, *, weight_decay: float = 0.0) -> None:
        """Take a step of gradient descent with the weights, in place.

        `gradient` is that of the real weights, with the shape of `weight`.
        """
        residual = self.residual if self.rounding == ROUNDINGS[0] else None
        subtract_gradient(
            self.weight, residual, gradient, self.weight_scale, lr, weight_decay=weight_decay
        )

    def real_weight(self) -> Tensor:
        """Return the real weights, with the shape of `weight`."""
        residual = self.residual if self.rounding == ROUNDINGS[0] else None
        return real_weight(self.weight, residual, self.weight_scale)


def subtract_gradient(
    weight: Tensor,
    residual: Tensor | None,
    gradient: Tensor,
    weight_scale: Tensor,
    lr: float,
    *,
    weight_decay: float,
) -> None:
    """Take a step of gradient descent with int8 weights, in place.

    ``change = (gradient + weight_decay * real weight) * lr / scale``, in steps of a byte; see
    `update_16_bits`, and `update_stochastic` for weights without a residual.
    """
    if weight_decay:
        gradient = gradient + real_weight(weight, residual, weight_scale) * weight_decay
    change = gradient * lr / by_result(weight_scale, weight)
    if residual is None:
        update_stochastic(weight, torch.rand(change.shape), change)
    else:
        update_16_bits(weight, residual, change)


def real_weight(weight: Tensor, residual: Tensor | None, weight_scale: Tensor) -> Tensor:
    """Return the real numbers that int8 weights stand for."""
    whole = weight.to(torch.int32) * STEPS
    if residual is not None:
        whole = whole + residual
    return whole.float() * (by_result(weight_scale, weight) / STEPS)


def trained_layers(model: nn.Module) -> dict[int, TrainedLayer]:
    """Return the int8 layers of a model that train, by the identity of `weight_gradient`."""
    layers = (module for module in model.modules() if isinstance(module, TrainedLayer))
    return {id(layer.weight_gradient): layer for layer in layers}


def by_result(values: Tensor, weight: Tensor) -> Tensor:
    """Return a number for each result in a shape that broadcasts with a weight."""
    depthwise = weight.ndim == 3  # noqa: PLR2004 - rows, columns, channels
    return values if depthwise else values.view(-1, *[1] * (weight.ndim - 1))


# -- forward and backward of a layer ---------------------------------------------------------------
# A value is int8, and beside it is a tensor of zeros without memory, whose gradient is that of the
# real value: integers have none.


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
        ctx: Any, layer: QuantizedLayer, first: Tensor, second: Tensor | None, *given: Tensor
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


# -- networks --------------------------------------------------------------------------------------


class QuantizedNetwork(QuantizedFront):
    """A network in int8, or its beginning, of which some layers train.

    `poetmodel.torch.quantized` makes it with `train`. It takes and returns real numbers; gradients
    end at its first trained layer. `QuantizedSGD` is its optimizer.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the results of a batch.

        Raises
        ------
        CaptureError
            If the input requires a gradient.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise CaptureError(
                "a quantized network has no gradient with respect to its input, which requires "
                "one; freeze what is in front of it (requires_grad_(False))"
            )
        values: list[tuple[Tensor, Tensor | None]] = [(x.float(), None)]
        for wire in self.wires:
            layer = self.get_submodule(wire.layer)
            values.append(_call(layer, [values[number] for number in wire.takes]))
        result = values[-1][0]
        return (result.flatten(1) if self.flat else result).to(x.dtype)

    def trained_layers(self) -> dict[str, TrainedLayer]:
        """Return the layers that train, by name, in the order of the network."""
        layers = {wire.layer: self.get_submodule(wire.layer) for wire in self.wires}
        return {name: layer for name, layer in layers.items() if isinstance(layer, TrainedLayer)}


def _call(
    layer: nn.Module, given: list[tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None]:
    """Return the int8 result of a layer, and its real stand-in if something before it trains."""
    trains = isinstance(layer, TrainedLayer)
    if not trains and all(real is None for _, real in given):
        return layer(*(x for x, _ in given)), None
    if layer.flattens:
        given = [(x.flatten(1), None if real is None else real.flatten(1)) for x, real in given]
    bytes_ = [x for x, _ in given]
    reals = [_zeros(x) if real is None else real for x, real in given]
    if layer.weight_scale is not None:
        made: tuple[Tensor, Tensor] = _Weighted.apply(
            layer,
            reals[0],
            layer.weight_gradient if trains else None,
            layer.bias,
            bytes_[0],
            layer.weight,
            layer.scale,
            layer.weight_scale,
        )
        return made
    second = reals[1] if len(reals) > 1 else None
    result: tuple[Tensor, Tensor] = _Unweighted.apply(layer, reals[0], second, *bytes_)
    return result


class QuantizedSGD(torch.optim.SGD):  # type: ignore[misc, unused-ignore]
    """Gradient descent for models with trained int8 layers.

    The weights of these layers follow the definition of quantization-aware scaling; all other
    parameters that require gradients, biases among them, follow ``torch.optim.SGD``.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    lr : float
        Learning rate.
    weight_decay : float, optional
        Factor of the real weights that is added to the gradients.

    Raises
    ------
    InputError
        If the learning rate or the weight decay is negative or not finite.
    """

    def __init__(self, model: nn.Module, lr: float, *, weight_decay: float = 0.0) -> None:
        for name, number in (("lr", lr), ("weight_decay", weight_decay)):
            if not (math.isfinite(number) and number >= 0):
                raise InputError(f"{name}: expected a number from 0, got {number}")
        self._layers = trained_layers(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        super().__init__(trained, lr=lr, weight_decay=weight_decay)

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with all parameters that have a gradient; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, decay = float(group["lr"]), group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                layer = self._layers.get(id(parameter))
                if layer is not None:
                    layer.update(parameter.grad, lr, weight_decay=decay)
                    continue
                gradient = parameter.grad
                if decay:
                    gradient = gradient.add(parameter, alpha=decay)
                parameter.add_(gradient, alpha=-lr)
        return loss
