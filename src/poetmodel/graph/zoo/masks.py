"""Bit masks for the backward pass of partly trained networks.

The backward pass of ReLU and ReLU6 multiplies each element of the gradient by 0 or 1, that of
dropout by 0 or a constant. One bit per element suffices, so a packed mask is saved instead of the
activation or the mask of one byte per element.
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


def values_with_gradient(declarations: Sequence[Declaration]) -> frozenset[str]:
    """Return the names of values that need a gradient: results that depend on trained weights."""
    names: set[str] = set()
    for declaration in declarations:
        trains_weight = any(not isinstance(part.target, Value) for part in declaration.parts)
        if trains_weight or any(value.name in names for value in declaration.inputs):
            names.add(declaration.outputs[0].name)
    return frozenset(names)


def save_bit_masks(declarations: Sequence[Declaration]) -> list[Declaration]:
    """Return the operators with bit masks saved for the backward pass.

    Every dropout mask is packed. A ReLU or ReLU6 gets a mask if no other gradient reads its result.
    """
    packed_masks = {
        declaration.outputs[0].name: _make_bit_mask(
            declaration.outputs[0].name, declaration.outputs[0]
        )
        for declaration in declarations
        if declaration.op == "dropout_mask"
    }
    differentiable_names = values_with_gradient(declarations)
    readers: dict[str, set[str]] = {}
    for declaration in declarations:
        for part in needed_gradients(declaration, differentiable_names):
            for value in part.saved:
                readers.setdefault(value.name, set()).add(declaration.name)
    return [
        changed_declaration
        for declaration in declarations
        for changed_declaration in _add_activation_mask(
            _pack_dropout_mask(declaration, packed_masks), readers.get(declaration.outputs[0].name)
        )
    ]


def needed_gradients(
    declaration: Declaration, differentiable_names: frozenset[str]
) -> Iterator[Gradient]:
    """Yield the parts for weights, and for inputs named in `differentiable_names`."""
    for part in declaration.parts:
        if not isinstance(part.target, Value) or part.target.name in differentiable_names:
            yield part


def _make_bit_mask(name: str, values: Value) -> Value:
    """Return a mask of one bit for each element of `values`, in whole bytes."""
    return values.new_value(name, -(-values.size // _BITS_PER_BYTE), item_bytes=1)


def _pack_dropout_mask(declaration: Declaration, packed_masks: dict[str, Value]) -> Declaration:
    """Return the operator with the masks of `packed_masks`, by name, in place of unpacked ones."""
    return replace(
        declaration,
        inputs=tuple(packed_masks.get(value.name, value) for value in declaration.inputs),
        outputs=tuple(packed_masks.get(value.name, value) for value in declaration.outputs),
        parts=tuple(
            replace(part, saved=tuple(packed_masks.get(value.name, value) for value in part.saved))
            for part in declaration.parts
        ),
    )


def _add_activation_mask(
    declaration: Declaration, reader_names: set[str] | None
) -> Iterator[Declaration]:
    """Yield the operator, whose gradients read a mask if possible, then the mask's operator.

    `reader_names` are the operators whose backward nodes read its result.
    """
    if declaration.op not in _ON_OFF_ACTIVATIONS or reader_names != {declaration.name}:
        yield declaration
        return
    result = declaration.outputs[0]
    mask = _make_bit_mask(f"{result.name}.mask", result)
    yield replace(
        declaration, parts=tuple(replace(part, saved=(mask,)) for part in declaration.parts)
    )
    yield Declaration(
        name=mask.name, op="mask", inputs=(result,), outputs=(mask,), other_flops=result.size
    )
