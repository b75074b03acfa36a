"""Bit masks for the backward pass of partly trained networks.

The gradients of ReLU and ReLU6 are multiplied by 0 or 1, like those of dropout. One bit per element
suffices, so a packed mask is saved in place of the activation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poetmodel.graph.zoo.declaration import Declaration, Gradient, Value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ON_OFF_ACTIVATIONS: Final = ("relu", "relu6")
"""Operators whose derivative is 0 or 1 at each element."""
_BITS_PER_BYTE: Final = 8


def values_with_gradient(recorded: Sequence[Declaration]) -> frozenset[str]:
    """Return the names of values that need a gradient: those computed with trained weights."""
    names: set[str] = set()
    for use in recorded:
        trained = any(not isinstance(part.target, Value) for part in use.parts)
        if trained or any(value.name in names for value in use.inputs):
            names.add(use.outputs[0].name)
    return frozenset(names)


def save_bit_masks(recorded: Sequence[Declaration]) -> list[Declaration]:
    """Return the operators with bit masks saved wherever no gradient reads the values themselves.

    The mask of an activation is made by a node right after it. If a gradient of weights reads the
    activation, its values are kept anyway, and no mask is added. Dropout masks are packed into
    bits.
    """
    packed_masks = {
        use.outputs[0].name: _bit_mask(use.outputs[0].name, use.outputs[0])
        for use in recorded
        if use.op == "dropout_mask"
    }
    differentiated = values_with_gradient(recorded)
    readers: dict[str, set[str]] = {}
    for use in recorded:
        for part in _needed_gradients(use, differentiated):
            for value in part.saved:
                readers.setdefault(value.name, set()).add(use.name)
    return [
        operator
        for use in recorded
        for operator in _with_activation_mask(
            _pack_dropout_mask(use, packed_masks), readers.get(use.outputs[0].name)
        )
    ]


def _needed_gradients(use: Declaration, differentiated: frozenset[str]) -> Iterator[Gradient]:
    for part in use.parts:
        if not isinstance(part.target, Value) or part.target.name in differentiated:
            yield part


def _bit_mask(name: str, values: Value) -> Value:
    return values.new_value(name, -(-values.size // _BITS_PER_BYTE), item_bytes=1)


def _pack_dropout_mask(use: Declaration, packed_masks: dict[str, Value]) -> Declaration:
    """Return the operator with packed dropout masks among its inputs and outputs."""
    return replace(
        use,
        inputs=tuple(packed_masks.get(value.name, value) for value in use.inputs),
        outputs=tuple(packed_masks.get(value.name, value) for value in use.outputs),
        parts=tuple(
            replace(part, saved=tuple(packed_masks.get(value.name, value) for value in part.saved))
            for part in use.parts
        ),
    )


def _with_activation_mask(use: Declaration, readers: set[str] | None) -> Iterator[Declaration]:
    """Yield an operator, followed by the node of its mask if it needs one.

    An activation needs one if only its own backward node (`readers`) reads its result.
    """
    if use.op not in _ON_OFF_ACTIVATIONS or readers != {use.name}:
        yield use
        return
    result = use.outputs[0]
    mask = _bit_mask(f"{result.name}.mask", result)
    yield replace(use, parts=tuple(replace(part, saved=(mask,)) for part in use.parts))
    yield Declaration(
        name=mask.name, op="mask", inputs=(result,), outputs=(mask,), other_flops=result.size
    )
