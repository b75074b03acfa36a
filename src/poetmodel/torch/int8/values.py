"""Values of nodes during the conversion of a module: quantized, padded, or not quantized yet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from poetmodel.torch.int8.front import QuantizedLayer
    from poetmodel.torch.int8.levels import Levels

INPUT: Final = "input"
"""The value of the front's input before it is quantized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedValue:
    """A quantized value: the layer that computes it, and its levels."""

    layer_number: int
    """Number of the layer, counted from 1."""
    levels: Levels
    flattened_shape: tuple[int, ...] = ()
    """Channels, rows and columns of a sample before it was flattened; empty if it was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingLayer:
    """An operator whose result is not quantized yet, so that its layer is not created yet."""

    node: fx.Node
    """Node of the operator."""
    inputs: tuple[QuantizedValue, ...]
    make_layer: Callable[[Levels], QuantizedLayer | None]
    """Returns the layer whose result has the given levels; None if the input already has them, or
    has the same scale and zero with narrower limits."""
    clamp: tuple[float, float] = (-math.inf, math.inf)
    """Real limits of the result, set by the activations after the operator."""
    flattened_shape: tuple[int, ...] = ()
    """As in `QuantizedValue`, for the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedValue:
    """A value padded with zeros, which become its zero point when it is quantized."""

    value: QuantizedValue | str
    """The value without padding; `INPUT` for an input that is not quantized yet."""
    padding: tuple[int, int, int, int]
    """Numbers of zeros above, below, left and right."""
