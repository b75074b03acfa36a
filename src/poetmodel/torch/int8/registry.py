"""What is known of operators beside their definition: their patterns, and their calls in C."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from poetmodel.torch.int8.reader import Reader
    from poetmodel.torch.lowering.operands import Lower

    Convert = Callable[[Reader, fx.Node], Any]

PATTERNS: Final[dict[Any, Convert]] = {}
"""Functions that convert a node to its value in `Reader.values`, by operator."""
LOWERINGS: Final[dict[str, Lower]] = {}
"""Functions that lower an operator to the call of its C kernel, by name as in `find_operator`."""


def converts(*targets: Any) -> Callable[[Convert], Convert]:
    """Return a decorator that registers a function in `PATTERNS` for some operators."""

    def register(convert: Convert) -> Convert:
        PATTERNS.update(dict.fromkeys(targets, convert))
        return convert

    return register


def lowers(*names: str) -> Callable[[Lower], Lower]:
    """Return a decorator that registers a function in `LOWERINGS` for some operators."""

    def register(lower: Lower) -> Lower:
        LOWERINGS.update(dict.fromkeys(names, lower))
        return lower

    return register
