"""The module that a quantized front becomes: calls of our operators, and nothing that trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poetmodel.torch.errors import CaptureError
from poetmodel.torch.int8.differentiation import differentiable
from poetmodel.torch.int8.operators import operator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from poetmodel.torch.int8.levels import Levels


class QuantizedLayer(nn.Module):  # type: ignore[misc, unused-ignore]
    """An operator on int8 tensors, with the constants and the numbers that it takes."""

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, torch.Tensor],
        numbers: Sequence[Any],
        *,
        flattens: bool = False,
        weight_scale: torch.Tensor | None = None,
        input_levels: Levels | None = None,
    ) -> None:
        super().__init__()
        self.weight_scale = weight_scale
        """Scale of the weights of each result; None for layers without weights."""
        self.input_levels = input_levels
        """Levels of the input of a layer with weights."""
        self.operator = name
        """Its name, without ``q8_``."""
        self.numbers = tuple(numbers)
        self.flattens = flattens
        """Whether it takes all elements of a sample as its channels."""
        self.tensors = tuple(tensors)
        for key, tensor in tensors.items():
            self.register_buffer(key, tensor)

    def forward(
        self, *given: torch.Tensor, reals: Sequence[torch.Tensor | None] | None = None
    ) -> Any:
        """Return the result of the operator of one or two tensors.

        With stand-ins for their real values, such as a trained layer returns, beside its own.
        """
        if reals is not None:
            return differentiable(self, given, reals)
        if self.flattens:
            given = tuple(x.flatten(1) for x in given)
        constants = (getattr(self, name) for name in self.tensors)
        result: torch.Tensor = operator(self.operator)(*given, *constants, *self.numbers)
        return result

    def extra_repr(self) -> str:
        """Return the operator."""
        return self.operator


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """A layer by its name, and which values it takes: 0 is the input, n the n-th layer's result."""

    layer: str
    takes: tuple[int, ...]
    node: str = ""
    """The last node of the converted module that has the same value, quantized."""


class QuantizedFront(nn.Module):  # type: ignore[misc, unused-ignore]
    """A frozen part of a model in int8: it takes and returns real numbers, and has no parameters.

    `poetmodel.torch.quantized` makes it. ``train()`` and ``eval()`` change nothing about it, and a
    model in double has the same front.
    """

    def __init__(
        self, layers: Mapping[str, QuantizedLayer], wires: Sequence[Wire], *, flat: bool = False
    ) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.wires = tuple(wires)
        self.flat = flat
        """Whether each sample of the result is one row."""
        self.stands_for: tuple[torch.Tensor, ...] = ()
        """The parameters of the module that a capture has this in place of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of a batch.

        Raises
        ------
        CaptureError
            If the input requires a gradient: no gradient goes through what is quantized.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise CaptureError(
                "a quantized front has no gradient, and its input requires one: it must be the "
                "first part of the model; freeze what is in front of it (requires_grad_(False))"
            )
        result = self.values(x.float(), lambda layer, given: layer(*given))
        return (result.flatten(1) if self.flat else result).to(x.dtype)

    def values(self, given: Any, call: Callable[[nn.Module, list[Any]], Any]) -> Any:
        """Return the value of the last layer; `call` makes a layer's of those that it takes."""
        values = [given]
        for wire in self.wires:
            layer = self.get_submodule(wire.layer)
            values.append(call(layer, [values[number] for number in wire.takes]))
        return values[-1]


def stood_for(model: nn.Module) -> set[int]:
    """Return the identities of the parameters that quantized fronts of a model stand for."""
    fronts = (module for module in model.modules() if isinstance(module, QuantizedFront))
    return {id(parameter) for front in fronts for parameter in front.stands_for}
