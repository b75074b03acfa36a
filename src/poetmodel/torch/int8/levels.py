"""What quantized values stand for, and operators on them whose result is not quantized yet."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from poetmodel.torch.int8.front import QuantizedLayer


INPUT: Final = "input"
"""The value of what a front is given, before it is quantized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """What bytes stand for: ``(byte - zero) * scale``, and which bytes there may be."""

    scale: float
    zero: int
    low: int
    high: int

    @property
    def inverse(self) -> float:
        """1 / scale in float32, as PyTorch has it."""
        return single(1.0 / self.scale)

    def of(self, real: float) -> int:
        """Return the byte of a number, which may lie outside of the limits."""
        return round(float(np.rint(np.float32(real) * np.float32(self.inverse)))) + self.zero

    def within(self, clamp: tuple[float, float]) -> Levels:
        """Return the same with the limits that an activation sets."""
        low, high = (self.of(x) if math.isfinite(x) else x for x in clamp)
        return replace(self, low=int(max(self.low, low)), high=int(min(self.high, high)))

    @property
    def ending(self) -> tuple[float, int, int, int]:
        """The arguments for its result of an operator that rounds."""
        return self.inverse, self.zero, self.low, self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """A quantized value: which layer makes it, and what its bytes stand for."""

    number: int
    levels: Levels
    planes: tuple[int, ...] = ()
    """Channels, rows and columns of a sample that is one row, where there are several places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """An operator whose result is not quantized yet."""

    node: fx.Node
    takes: tuple[Bytes, ...]
    make: Callable[[Levels], QuantizedLayer | None]
    """Given the levels of its result; None where its input is that already."""
    clamp: tuple[float, float] = (-math.inf, math.inf)
    planes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """A value with zeros around it, which are its zero once it is quantized."""

    of: Bytes | str
    """The value; ``input`` until that is quantized."""
    padding: tuple[int, int, int, int]


def arguments_of(node: fx.Node) -> list[Any]:
    """Return the arguments of a node in the order of its operator's schema."""
    arguments = list(node.args)
    for argument in node.target._schema.arguments[len(arguments) :]:  # noqa: SLF001
        default = argument.default_value if argument.has_default_value() else None
        arguments.append(node.kwargs.get(argument.name, default))
    return arguments


def single(number: float) -> float:
    """Return a number of float32."""
    return float(np.float32(number))
