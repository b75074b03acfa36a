"""Modules of a quantized front: the front, and its layers, which call int8 operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from poetmodel.torch.errors import CaptureError
from poetmodel.torch.int8.differentiation import apply_with_proxies
from poetmodel.torch.int8.operators import find_operator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from poetmodel.torch.int8.levels import Levels


class QuantizedLayer(nn.Module):  # type: ignore[misc, unused-ignore]
    """An int8 operator with its constant tensors (buffers) and numeric arguments.

    `name` is without ``q8_``; `numbers` are the arguments after the tensors. `flattens`: the
    elements of each sample are flattened first. `weight_scale` is per output.
    """

    def __init__(
        self,
        name: str,
        constants: Mapping[str, torch.Tensor],
        numbers: Sequence[Any],
        *,
        flattens: bool = False,
        weight_scale: torch.Tensor | None = None,
        input_levels: Levels | None = None,
    ) -> None:
        super().__init__()
        self.weight_scale = weight_scale
        self.input_levels = input_levels
        self.operator = name
        self.numbers = tuple(numbers)
        self.flattens = flattens
        self.constant_names = tuple(constants)
        """Names of the buffers of the constants."""
        for key, tensor in constants.items():
            self.register_buffer(key, tensor)

    def forward(
        self, *inputs: torch.Tensor, proxies: Sequence[torch.Tensor | None] | None = None
    ) -> Any:
        """Return the result of the operator; with `proxies`, (result, proxy of the result).

        A proxy is a tensor without memory that has the gradient of the real value.
        """
        if proxies is not None:
            return apply_with_proxies(self, inputs, proxies)
        if self.flattens:
            inputs = tuple(x.flatten(1) for x in inputs)
        constants = (getattr(self, name) for name in self.constant_names)
        result: torch.Tensor = find_operator(self.operator)(*inputs, *constants, *self.numbers)
        return result

    def extra_repr(self) -> str:
        """Return the name of the operator."""
        return self.operator


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Connections of a layer: value 0 is the front's input, value n the n-th layer's result."""

    layer: str
    """Name of the layer."""
    inputs: tuple[int, ...]
    """Indices of the input values."""
    node: str = ""
    """Name of the last node of the converted module with the same quantized value; "" for none."""


class QuantizedFront(nn.Module):  # type: ignore[misc, unused-ignore]
    """Frozen int8 layers of a model, with real input and output, without parameters.

    Create it with `poetmodel.torch.quantized`. Its results are equal after ``train()`` and
    ``eval()``. If the model is converted to double, the layers still compute in int8.

    `layers` are the layers by name, and `wires` their connections in execution order.
    """

    def __init__(
        self,
        layers: Mapping[str, QuantizedLayer],
        wires: Sequence[Wire],
        *,
        has_flat_result: bool = False,
    ) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.wires = tuple(wires)
        self.has_flat_result = has_flat_result
        """Whether each sample of the result is flattened to one row."""
        self.replaced_parameters: tuple[torch.Tensor, ...] = ()
        """Parameters of the converted module that this front replaces in a capture."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of a batch, in the type of `x`.

        Raises
        ------
        CaptureError
            If gradients are on and the input requires a gradient, which a front cannot compute.
        ValueError
            If a layer gets another number of channels than that of its weight.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise CaptureError(
                "a quantized front has no gradient, but its input requires one: it must be the "
                "first part of the model; freeze the layers before it (requires_grad_(False))"
            )
        result = self.execute_layers(x.float(), lambda layer, layer_inputs: layer(*layer_inputs))
        return (result.flatten(1) if self.has_flat_result else result).to(x.dtype)

    def execute_layers(
        self, input_value: Any, call_layer: Callable[[nn.Module, list[Any]], Any]
    ) -> Any:
        """Execute all layers in order, and return the value of the last one.

        `call_layer` computes the value of a layer from the list of its input values.
        """
        values = [input_value]
        for wire in self.wires:
            layer = self.get_submodule(wire.layer)
            values.append(call_layer(layer, [values[index] for index in wire.inputs]))
        return values[-1]


def replaced_parameter_ids(model: nn.Module) -> set[int]:
    """Return the ids of all parameters that the quantized fronts of a model replace."""
    fronts = (module for module in model.modules() if isinstance(module, QuantizedFront))
    return {id(parameter) for front in fronts for parameter in front.replaced_parameters}
