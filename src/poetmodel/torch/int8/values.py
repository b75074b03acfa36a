"""Values of a converted module during conversion: quantized, padded, or not quantized yet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from poetmodel.torch.int8.front import QuantizedLayer
    from poetmodel.torch.int8.levels import Levels

INPUT: Final = "input"
"""The value of the front's input before it is quantized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedValue:
    """A quantized value: the number of the layer that computes it, and its levels."""

    number: int
    levels: Levels
    planes: tuple[int, ...] = ()
    """Channels, rows and columns of a flattened sample; empty if it is not flattened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingLayer:
    """An operator whose result is not quantized yet, so that its layer is not created yet."""

    node: fx.Node
    inputs: tuple[QuantizedValue, ...]
    make_layer: Callable[[Levels], QuantizedLayer | None]
    """Returns the layer for the levels of its result; None if the input already has these
    levels."""
    clamp: tuple[float, float] = (-math.inf, math.inf)
    planes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedValue:
    """A value padded with zeros, which become its zero point when it is quantized."""

    value: QuantizedValue | str
    """The value; ``input`` until it is quantized."""
    padding: tuple[int, int, int, int]


def arguments_of(node: fx.Node) -> list[Any]:
    """Return the arguments of a node in the order of its operator's schema, with defaults."""
    arguments = list(node.args)
    for argument in node.target._schema.arguments[len(arguments) :]:  # noqa: SLF001
        default = argument.default_value if argument.has_default_value() else None
        arguments.append(node.kwargs.get(argument.name, default))
    return arguments
