"""Activations in the backward pass of a partly trained network: bits, not values.

ReLU and ReLU6 pass a gradient or not, and dropout keeps an element or drops it: a bit says which.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poetmodel.graph.zoo.declaration import Declaration, Gradient, Value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PASSING: Final = ("relu", "relu6")
"""Operators whose gradient asks of each element whether it passes."""
_BITS: Final = 8
"""In a byte."""


def differentiable(recorded: Sequence[Declaration]) -> frozenset[str]:
    """Return the tensors whose gradients are wanted: all that is computed with trained weights."""
    wanted: set[str] = set()
    for use in recorded:
        trained = any(not isinstance(part.of, Value) for part in use.parts)
        if trained or any(value.name in wanted for value in use.inputs):
            wanted.add(use.outputs[0].name)
    return frozenset(wanted)


def masked(recorded: Sequence[Declaration]) -> list[Declaration]:
    """Return operators that save bits where no gradient reads the values.

    The mask of an activation is a node of its own, right after it. Where a gradient of weights
    reads the values, these are kept anyway, and there is no mask.
    """
    drawn = {
        use.outputs[0].name: _bits(use.outputs[0].name, use.outputs[0])
        for use in recorded
        if use.op == "dropout_mask"
    }
    wanted = differentiable(recorded)
    readers: dict[str, set[str]] = {}
    for use in recorded:
        for part in _wanted(use, wanted):
            for value in part.saved:
                readers.setdefault(value.name, set()).add(use.name)
    return [
        operator
        for use in recorded
        for operator in _with_mask(_packed(use, drawn), readers.get(use.outputs[0].name))
    ]


def _wanted(use: Declaration, values: frozenset[str]) -> Iterator[Gradient]:
    for part in use.parts:
        if not isinstance(part.of, Value) or part.of.name in values:
            yield part


def _bits(name: str, of: Value) -> Value:
    return of.made(name, -(-of.size // _BITS), item_bytes=1)


def _packed(use: Declaration, drawn: dict[str, Value]) -> Declaration:
    """Return an operator whose masks of dropout are bits."""
    return replace(
        use,
        inputs=tuple(drawn.get(value.name, value) for value in use.inputs),
        outputs=tuple(drawn.get(value.name, value) for value in use.outputs),
        parts=tuple(
            replace(part, saved=tuple(drawn.get(value.name, value) for value in part.saved))
            for part in use.parts
        ),
    )


def _with_mask(use: Declaration, readers: set[str] | None) -> Iterator[Declaration]:
    """Yield an operator and, if it is an activation that alone saves its result, its mask."""
    if use.op not in _PASSING or readers != {use.name}:
        yield use
        return
    result = use.outputs[0]
    mask = _bits(f"{result.name}.mask", result)
    yield replace(use, parts=tuple(replace(part, saved=(mask,)) for part in use.parts))
    yield Declaration(
        name=mask.name, op="mask", inputs=(result,), outputs=(mask,), other_flops=result.size
    )
