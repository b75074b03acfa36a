"""Values of a converted module while it is read: quantized, padded, or not quantized yet."""

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
"""The value of what a front is given, before it is quantized."""


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
