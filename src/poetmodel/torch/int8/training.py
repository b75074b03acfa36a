"""Layers in int8 that train: forward as a quantized front, backward in float32.

Eager PyTorch with these modules is the definition. Forward saves int8 tensors alone. The gradient
of a weight belongs to a parameter without memory, `TrainedLayer.weight_gradient`; `QuantizedSGD`
subtracts it from the bytes of the weight.
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
from poetmodel.torch.int8.differentiation import differentiable
from poetmodel.torch.int8.front import QuantizedFront, QuantizedLayer
from poetmodel.torch.int8.gradients import (
    STEPS,
    RoundingDraws,
    split_16_bits,
    update_16_bits,
    update_stochastic,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROUNDINGS: Final = ("16 bits", "stochastic")
"""Ways to keep changes of a weight that are below a step of a byte."""
_SEEDS: Final = 2**32
"""Number of seeds of stochastic rounding."""
_DEPTHWISE: Final = 3
"""Dimensions of the weight of a depthwise convolution: rows, columns, channels."""
_PART: Final = 8192
"""Weights that are updated at a time, if rows of them are not larger."""


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
        _watch_optimizers(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _watch_optimizers(self)

    def forward(self, *given: Tensor, reals: Sequence[Tensor | None] | None = None) -> Any:
        """Return the int8 result of an int8 input; with the stand-in of its own for `reals`."""
        result, real = differentiable(self, given, reals or (None,))
        return result if reals is None else (result, real)

    def extra_repr(self) -> str:
        """Return the operator and the rounding."""
        return f"{self.operator}, {self.rounding}"

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The tensors that an update of the weights replaces: weight, and residual if any."""
        return (self.weight, self.residual) if self.rounding == ROUNDINGS[0] else (self.weight,)

    def real_weight(self) -> Tensor:
        """Return the real weights, with the shape of `weight`."""
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
    """Take a step of gradient descent with int8 weights, in place.

    ``change = (gradient + weight_decay * real weight) * lr / scale``, in steps of a byte; see
    `update_16_bits` and, for a state without a residual, `update_stochastic`, which needs `draws`.
    """
    if len(state) == 1 and draws is None:
        raise InputError("draws: expected those of an update, which stochastic rounding needs")
    weight = state[0]
    rows = max(1, _PART * len(weight) // max(1, weight.numel()))
    for first in range(0, len(weight), rows):  # so that what it needs beside them is small
        part = slice(first, first + rows)
        scale = weight_scale if weight.ndim == _DEPTHWISE else weight_scale[part]
        weights = [tensor[part] for tensor in state]
        change = -gradient[part] if maximize else gradient[part]
        if weight_decay:
            change = change + real_weight(weights, scale) * weight_decay
        change = change * lr / by_result(scale, weight)
        if len(weights) > 1:
            update_16_bits(weights[0], weights[1], change)
        elif draws is not None:
            elements = first * weight[0].numel()
            update_stochastic(weights[0], draws.uniform(weights[0], first=elements), change)


def real_weight(state: Sequence[Tensor], weight_scale: Tensor) -> Tensor:
    """Return the real numbers that int8 weights, and their residuals if any, stand for."""
    weight, *residuals = state
    whole = weight.to(torch.int32) * STEPS
    for residual in residuals:
        whole = whole + residual
    return whole.float() * (by_result(weight_scale, weight) / STEPS)


def trained_layers(model: nn.Module) -> dict[int, TrainedLayer]:
    """Return the int8 layers of a model that train, by the identity of `weight_gradient`."""
    layers = (module for module in model.modules() if isinstance(module, TrainedLayer))
    return {id(layer.weight_gradient): layer for layer in layers}


def by_result(values: Tensor, weight: Tensor) -> Tensor:
    """Return a number for each result in a shape that broadcasts with a weight."""
    return values if weight.ndim == _DEPTHWISE else values.view(-1, *[1] * (weight.ndim - 1))


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
        result, _ = self.values((x.float(), None), _call)
        return (result.flatten(1) if self.flat else result).to(x.dtype)

    def trained_layers(self) -> dict[str, TrainedLayer]:
        """Return the layers that train, by name, in the order of the network."""
        layers = {wire.layer: self.get_submodule(wire.layer) for wire in self.wires}
        return {name: layer for name, layer in layers.items() if isinstance(layer, TrainedLayer)}


def _call(
    layer: nn.Module, given: list[tuple[Tensor, Tensor | None]]
) -> tuple[Tensor, Tensor | None]:
    """Return the int8 result of a layer, and its real stand-in if something before it trains."""
    bytes_, reals = zip(*given, strict=True)
    if not isinstance(layer, TrainedLayer) and all(real is None for real in reals):
        return layer(*bytes_), None
    made: tuple[Tensor, Tensor] = layer(*bytes_, reals=reals)
    return made


_LAYERS: Final[WeakSet[TrainedLayer]] = WeakSet()
"""All int8 layers of the process that train."""


def _watch_optimizers(layer: TrainedLayer) -> None:
    """Register a layer, and a hook that refuses its parameters in optimizers of PyTorch."""
    _LAYERS.add(layer)
    _register_check()


@cache
def _register_check() -> None:
    register_optimizer_step_pre_hook(_check_optimizer)


def _check_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise `InputError` if another optimizer than `QuantizedSGD` has int8 weights."""
    if isinstance(optimizer, QuantizedSGD):
        return
    stand_ins = {id(layer.weight_gradient) for layer in _LAYERS}
    groups = optimizer.param_groups
    if any(id(parameter) in stand_ins for group in groups for parameter in group["params"]):
        raise InputError(
            f"optimizer: {type(optimizer).__name__} cannot update int8 weights: use "
            "poetmodel.torch.QuantizedSGD(model, lr=...), which updates all other parameters too"
        )


class QuantizedSGD(torch.optim.SGD):  # type: ignore[misc, unused-ignore]
    """Gradient descent for models with trained int8 layers.

    The weights of these layers follow the definition of quantization-aware scaling; all other
    parameters that require gradients, biases among them, follow ``torch.optim.SGD``.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    lr : float, optional
        Learning rate.
    weight_decay : float, optional
        Factor of the real weights that is added to the gradients.
    seed : int, optional
        Seed of stochastic rounding, from 0 to below 2^32; exported code has it too. Random
        numbers follow from it, the number of the update, which parameter groups count as
        ``updates``, the layer and the element; no other generator is read or changed.

    Raises
    ------
    InputError
        If the learning rate or the weight decay is negative or not finite, or the seed is no such
        number.
    """

    def __init__(
        self, model: nn.Module, lr: float = 1e-3, *, weight_decay: float = 0.0, seed: int = 0
    ) -> None:
        for name, number in (("lr", lr), ("weight_decay", weight_decay)):
            if not (math.isfinite(number) and number >= 0):
                raise InputError(f"{name}: expected a number from 0, got {number}")
        if type(seed) is not int or not 0 <= seed < _SEEDS:
            raise InputError(f"seed: expected a whole number from 0 to below 2^32, got {seed!r}")
        self._layers = list(trained_layers(model).values())
        trained = [p for p in model.parameters() if p.requires_grad]
        super().__init__(trained, lr=lr, weight_decay=weight_decay)
        self.defaults.update(updates=0, seed=seed)
        for group in self.param_groups:
            group.update(updates=0, seed=seed)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_layers": self._layers}

    def sites(self) -> dict[int, int]:
        """Return the numbers of its int8 layers, by the identity of `weight_gradient`."""
        return {id(layer.weight_gradient): k for k, layer in enumerate(self._layers)}

    def draws(self, group: int, site: int) -> RoundingDraws:
        """Return the random numbers of the next update of a layer in a parameter group."""
        settings = self.param_groups[group]
        return RoundingDraws(update=settings["updates"], site=site, seed=settings["seed"])

    def count_update(self) -> None:
        """Add one to the number of updates of each parameter group."""
        for group in self.param_groups:
            group["updates"] += 1

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with all parameters that have a gradient; return the closure's loss.

        Raises
        ------
        InputError
            If a parameter group has a momentum.
        """
        if any(group["momentum"] for group in self.param_groups):
            raise InputError("momentum: int8 weights are trained by SGD without momentum; set it 0")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        sites = self.sites()
        for number, group in enumerate(self.param_groups):
            lr = float(group["lr"])
            settings = {"weight_decay": group["weight_decay"], "maximize": group["maximize"]}
            given = [p for p in group["params"] if p.grad is not None]
            for parameter in (p for p in given if id(p) in sites):
                site = sites[id(parameter)]
                layer, draws = self._layers[site], self.draws(number, site)
                subtract_gradient(
                    layer.state, parameter.grad, layer.weight_scale, lr, draws=draws, **settings
                )
            real = [p for p in given if id(p) not in sites]
            sgd(
                real,
                [p.grad for p in real],
                [None] * len(real),
                lr=lr,
                momentum=0.0,
                dampening=0.0,
                nesterov=False,
                **settings,
            )
        self.count_update()
        return loss
