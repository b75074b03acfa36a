"""Trainable int8 layers: forward like a quantized front, backward in float32.

Eager PyTorch with these modules defines results and updates. The forward pass saves only int8
tensors, and the scales of weights. The gradient of a weight belongs to a parameter without memory,
`TrainedLayer.weight_gradient`; `QuantizedSGD` uses this gradient to update the weight's bytes.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.sgd import sgd

from poetmodel.errors import InputError
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.int8.differentiation import apply_with_proxies
from poetmodel.torch.int8.front import QuantizedFront, QuantizedLayer
from poetmodel.torch.int8.gradients import (
    INT16_STEPS,
    RoundingDraws,
    split_16_bits,
    update_16_bits,
    update_stochastic,
)
from poetmodel.torch.int8.operators import DEPTHWISE_NDIM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROUNDINGS: Final = ("16 bits", "stochastic")
"""Options for weight changes below one int8 step."""
_SEED_LIMIT: Final = 2**32
"""Seeds of stochastic rounding are below this number."""
_UPDATE_BLOCK: Final = 8192
"""Maximum number of weights updated at a time, unless one row is larger."""


class TrainedLayer(QuantizedLayer):
    """A copy of an int8 convolution or linear layer whose weights and biases train.

    `rounding`: ``16 bits`` stores another int8 for each weight, ``stochastic`` does not. `headroom`
    multiplies the scales of the weights, which may grow by this factor.
    """

    def __init__(self, layer: QuantizedLayer, *, rounding: str, headroom: float) -> None:
        if layer.weight_scale is None or layer.input_levels is None:
            raise InputError(f"{layer.operator}: it has no weights to train")
        # The same real weights up to rounding, on coarser scales.
        weight_16 = torch.round(layer.weight.double() * (INT16_STEPS / headroom))
        weight, residual = split_16_bits(weight_16)
        constants = {"weight": weight, "scale": layer.scale * headroom}
        super().__init__(
            layer.operator,
            constants,
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
        """Parameter that represents the real weights: with their shape and gradient, but without
        memory."""
        _register_layer(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _register_layer(self)

    def forward(self, *inputs: Tensor, proxies: Sequence[Tensor | None] | None = None) -> Any:
        """Return the int8 result of an int8 input; with `proxies`, (result, its proxy)."""
        result, proxy = apply_with_proxies(self, inputs, proxies or (None,))
        return result if proxies is None else (result, proxy)

    def extra_repr(self) -> str:
        """Return the name of the operator and the rounding."""
        return f"{self.operator}, {self.rounding}"

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The tensors that an update of the weights changes: weight, and residual if any."""
        return (self.weight, self.residual) if self.rounding == ROUNDINGS[0] else (self.weight,)

    def real_weight(self) -> Tensor:
        """Return the real weights, in the shape of `weight`."""
        return real_weight(self.state, self.weight_scale)


def subtract_gradient(
    state: Sequence[Tensor],
    gradient: Tensor,
    weight_scale: Tensor,
    lr: float,
    *,
    weight_decay: float = 0.0,
    maximize: bool = False,
    draws: RoundingDraws | None = None,
) -> None:
    """Subtract a multiple of the gradient from int8 weights, in place.

    ``change = (gradient + weight_decay * real weight) * lr / scale``, in int8 steps; `maximize`
    negates only `gradient`. A `state` without a residual needs `draws`.
    """
    if len(state) == 1 and draws is None:
        raise InputError("draws: stochastic rounding needs the random numbers of an update")
    weight = state[0]
    block_rows = max(1, _UPDATE_BLOCK * len(weight) // max(1, weight.numel()))
    for first_row in range(0, len(weight), block_rows):  # blocks limit temporary memory
        block = slice(first_row, first_row + block_rows)
        scale = weight_scale if weight.ndim == DEPTHWISE_NDIM else weight_scale[block]
        block_state = [tensor[block] for tensor in state]
        change = -gradient[block] if maximize else gradient[block]
        if weight_decay:
            change = change + real_weight(block_state, scale) * weight_decay
        change = change * lr / broadcast_per_output(scale, weight)
        if len(block_state) > 1:
            update_16_bits(block_state[0], block_state[1], change)
        elif draws is not None:
            first_element = first_row * weight[0].numel()
            update_stochastic(
                block_state[0], draws.draw_uniform(block_state[0], first=first_element), change
            )


def real_weight(state: Sequence[Tensor], weight_scale: Tensor) -> Tensor:
    """Return the real numbers that int8 weights, with their residuals if any, represent."""
    weight, *residuals = state
    weight_16 = weight.to(torch.int32) * INT16_STEPS
    for residual in residuals:
        weight_16 = weight_16 + residual
    return weight_16.float() * (broadcast_per_output(weight_scale, weight) / INT16_STEPS)


def trained_layers(model: nn.Module) -> dict[int, TrainedLayer]:
    """Return the trainable int8 layers of a model, by the id of `weight_gradient`."""
    layers = (module for module in model.modules() if isinstance(module, TrainedLayer))
    return {id(layer.weight_gradient): layer for layer in layers}


def broadcast_per_output(values: Tensor, weight: Tensor) -> Tensor:
    """Return `values`, one number per output, in a shape that broadcasts with a weight."""
    return values if weight.ndim == DEPTHWISE_NDIM else values.view(-1, *[1] * (weight.ndim - 1))


# -- networks --------------------------------------------------------------------------------------


class QuantizedNetwork(QuantizedFront):
    """An int8 network, or the first part of a network, in which some layers train.

    Create it with `poetmodel.torch.quantized(front, ..., train=...)`. Its input and output are
    real; gradients end at its first trained layer. `QuantizedSGD` is its optimizer.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the results of a batch, in the type of `x`.

        Raises
        ------
        CaptureError
            If the input requires a gradient, and gradients are enabled.
        ValueError
            If a layer gets another number of channels than that of its weight.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise CaptureError(
                "a quantized network has no gradient with respect to its input, which requires "
                "one; freeze the layers before it (requires_grad_(False))"
            )
        result, _ = self.execute_layers((x.float(), None), _call_with_proxy)
        return (result.flatten(1) if self.has_flat_result else result).to(x.dtype)

    def trained_layers(self) -> dict[str, TrainedLayer]:
        """Return the layers that train, by name, in execution order."""
        layers = {wire.layer: self.get_submodule(wire.layer) for wire in self.wires}
        return {name: layer for name, layer in layers.items() if isinstance(layer, TrainedLayer)}


def _call_with_proxy(
    layer: nn.Module, pairs: list[tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None]:
    """Call a layer on (input, proxy or None) pairs; return such a pair of the result."""
    inputs, proxies = zip(*pairs, strict=True)
    if not isinstance(layer, TrainedLayer) and all(proxy is None for proxy in proxies):
        return layer(*inputs), None
    result: tuple[Tensor, Tensor] = layer(*inputs, proxies=proxies)
    return result


_TRAINED_LAYERS: Final[WeakSet[TrainedLayer]] = WeakSet()
"""All trained int8 layers of the process that still exist."""


def _register_layer(layer: TrainedLayer) -> None:
    """Register a layer, and `_check_optimizer` before each step of any optimizer."""
    _TRAINED_LAYERS.add(layer)
    _register_check()


@cache
def _register_check() -> None:
    """Register `_check_optimizer`; further calls have no effect, because of the cache."""
    register_optimizer_step_pre_hook(_check_optimizer)


def _check_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Refuse, before a step, a `weight_gradient` in any optimizer but `QuantizedSGD`."""
    if isinstance(optimizer, QuantizedSGD):
        return
    weight_gradient_ids = {id(layer.weight_gradient) for layer in _TRAINED_LAYERS}
    groups = optimizer.param_groups
    if any(
        id(parameter) in weight_gradient_ids for group in groups for parameter in group["params"]
    ):
        raise InputError(
            f"optimizer: {type(optimizer).__name__} cannot update int8 weights: use "
            "poetmodel.torch.QuantizedSGD(model, lr=...), which updates all other parameters too"
        )


class QuantizedSGD(torch.optim.SGD):  # type: ignore[misc, unused-ignore]
    """Gradient descent for models with trained int8 layers.

    The weights of these layers follow quantization-aware scaling (Lin et al., "On-device training
    under 256KB memory", NeurIPS 2022), as defined by `subtract_gradient`; all other trained
    parameters, including biases, follow ``torch.optim.SGD``.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    lr : float, optional
        Learning rate.
    weight_decay : float, optional
        Factor of the parameters, or real weights, that are added to the gradients.
    seed : int, optional
        Seed of stochastic rounding, from 0 to below 2^32; exported code has the same seed. Random
        numbers depend on the seed, the number of the update (``updates`` of the parameter groups),
        the layer and the element; PyTorch's generators are neither read nor changed.

    Raises
    ------
    InputError
        If the learning rate or the weight decay is negative or not finite, or the seed is no
        integer in its range.
    ValueError
        If no parameter of the model requires a gradient.
    """

    def __init__(
        self, model: nn.Module, lr: float = 1e-3, *, weight_decay: float = 0.0, seed: int = 0
    ) -> None:
        for name, number in (("lr", lr), ("weight_decay", weight_decay)):
            if not (math.isfinite(number) and number >= 0):
                raise InputError(f"{name}: expected a number from 0, got {number}")
        if type(seed) is not int or not 0 <= seed < _SEED_LIMIT:
            raise InputError(f"seed: expected a whole number from 0 to below 2^32, got {seed!r}")
        self._layers = list(trained_layers(model).values())
        trained_parameters = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        super().__init__(trained_parameters, lr=lr, weight_decay=weight_decay)
        self.defaults.update(updates=0, seed=seed)
        for group in self.param_groups:
            group.update(updates=0, seed=seed)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_layers": self._layers}

    def sites(self) -> dict[int, int]:
        """Return the index of each trained int8 layer, by the id of `weight_gradient`."""
        return {id(layer.weight_gradient): i for i, layer in enumerate(self._layers)}

    def draws(self, group_index: int, site: int) -> RoundingDraws:
        """Return the random numbers for the next update of the layer with index `site`.

        `group_index` is the index of the layer's parameter group.
        """
        settings = self.param_groups[group_index]
        return RoundingDraws(update=settings["updates"], site=site, seed=settings["seed"])

    def count_update(self) -> None:
        """Add 1 to the number of updates of each parameter group."""
        for group in self.param_groups:
            group["updates"] += 1

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update int8 weights by quantized SGD, and other parameters by plain SGD.

        Only parameters with a gradient are updated; gradients are not cleared. Then adds 1 to
        ``updates`` of all parameter groups. Returns the loss of the closure; None without a
        closure.

        Raises
        ------
        InputError
            If a parameter group has momentum; the closure is then not called.
        """
        if any(group["momentum"] for group in self.param_groups):
            raise InputError(
                "momentum: int8 weights are trained by SGD without momentum; set it to 0"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        sites = self.sites()
        for group_index, group in enumerate(self.param_groups):
            lr = float(group["lr"])
            settings = {"weight_decay": group["weight_decay"], "maximize": group["maximize"]}
            parameters_with_gradient = [
                parameter for parameter in group["params"] if parameter.grad is not None
            ]
            for parameter in (
                candidate for candidate in parameters_with_gradient if id(candidate) in sites
            ):
                site = sites[id(parameter)]
                layer, draws = self._layers[site], self.draws(group_index, site)
                subtract_gradient(
                    layer.state, parameter.grad, layer.weight_scale, lr, draws=draws, **settings
                )
            float_parameters = [
                parameter for parameter in parameters_with_gradient if id(parameter) not in sites
            ]
            sgd(
                float_parameters,
                [parameter.grad for parameter in float_parameters],
                [None] * len(float_parameters),
                lr=lr,
                momentum=0.0,
                dampening=0.0,
                nesterov=False,
                **settings,
            )
        self.count_update()
        return loss
