"""What is known of operators beside their definition: their patterns, and their calls in C."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from poetmodel.torch.graph.operators import register_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from poetmodel.torch.lowering.operands import Lower

    Convert = Callable[[Any, fx.Node], Any]

PATTERNS: Final[dict[Any, Convert]] = {}
"""Functions of a `Reader` and a node that return its value for `Reader.values`, by operator."""
converts: Final = register_in(PATTERNS)
LOWERINGS: Final[dict[str, Lower]] = {}
"""Functions that lower an operator to the call of its C kernel, by name as in `find_operator`."""
lowers: Final = register_in(LOWERINGS)
