"""Operators that put tensors together or take them apart, and those that make new ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Final

import torch

from poetmodel.export.step import DataType
from poetmodel.torch.lowering.operands import (
    SUFFIX,
    copy,
    fill,
    part,
    table,
    without,
    wrapped,
)
from poetmodel.torch.lowering.registry import Look, Lowering, lowers

aten: Final = torch.ops.aten

# -- pieces -------------------------------------------------------------------------------------


@lowers(aten.cat.default)
def _lower_cat(op: Lowering) -> None:
    out = op.output()
    pieces = [op.value(each) for each in op.args[0]]
    pieces = [piece for piece in pieces if piece.shape != (0,)]
    dimension = wrapped(op.args[1], len(out.shape))
    start = 0
    for piece in pieces:
        size = piece.shape[dimension]
        copy(op, part(out, dimension, start, size), piece)
        start += size


@lowers(aten.stack.default)
def _lower_stack(op: Lowering) -> None:
    out = op.output()
    dimension = wrapped(op.args[1], len(out.shape))
    for place, piece in enumerate(op.args[0]):
        copy(op, _selected(out, dimension, place), op.value(piece))


def _selected(look: Look, dimension: int, index: int) -> Look:
    index = index % look.shape[dimension]
    return without(part(look, dimension, index, 1), (dimension,))


def _sliced(look: Look, dimension: int, start: int | None, end: int | None, step: int) -> Look:
    dimension = wrapped(dimension, len(look.shape))
    places = range(*slice(start, end, step).indices(look.shape[dimension]))
    return part(look, dimension, places.start, len(places), step)


@lowers(aten.slice_backward.default)
def _lower_slice_backward(op: Lowering) -> None:
    gradient, _, dimension, start, end, step = op.args
    fill(op, op.output(), 0)
    copy(op, _sliced(op.output(), dimension, start, end, step), op.value(gradient))


@lowers(aten.select_backward.default)
def _lower_select_backward(op: Lowering) -> None:
    gradient, _, dimension, index = op.args
    out = op.output()
    fill(op, out, 0)
    copy(op, _selected(out, wrapped(dimension, len(out.shape)), index), op.value(gradient))


@lowers(aten.slice_scatter.default)
def _lower_slice_scatter(op: Lowering) -> None:
    x, y, dimension, start, end, step = op.args
    copy(op, op.output(), op.value(x))
    copy(op, _sliced(op.output(), dimension, start, end, step), op.value(y))


@lowers(aten.select_scatter.default)
def _lower_select_scatter(op: Lowering) -> None:
    x, y, dimension, index = op.args
    out = op.output()
    copy(op, out, op.value(x))
    copy(op, _selected(out, wrapped(dimension, len(out.shape)), index), op.value(y))


@lowers(aten.unfold_backward.default)
def _lower_unfold_backward(op: Lowering) -> None:
    """Sum the windows' gradients, one place in all windows after the other."""
    gradient, _, dimension, size, step = op.args
    out, gradient = op.output(), op.value(gradient)
    dimension = wrapped(dimension, len(out.shape))
    last = len(gradient.shape) - 1
    fill(op, out, 0)
    for place in range(size):
        window = part(out, dimension, place, gradient.shape[dimension], step)
        given = _selected(gradient, last, place)
        op.call("pm_add", window, window, given, table(op, window, window, given), 1.0)


@lowers(aten.repeat.default)
def _lower_repeat(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    x = x.broadcast((1,) * (len(out.shape) - len(x.shape)) + x.shape)
    places = product(*(range(count) for count in op.args[1]))
    for place in places:
        piece = out
        for dimension, index in enumerate(place):
            size = x.shape[dimension]
            piece = part(piece, dimension, index * size, size)
        copy(op, piece, x)


@lowers(aten.flip.default)
def _lower_flip(op: Lowering) -> None:
    x = op.value(op.args[0])
    for dimension in op.args[1]:
        at = wrapped(dimension, len(x.shape))
        x = part(x, at, x.shape[at] - 1, x.shape[at], -1)
    copy(op, op.output(), x)


@lowers(aten.roll.default)
def _lower_roll(op: Lowering) -> None:
    x, shifts, dimensions = op.args
    x, out = op.value(x), op.output()
    if not dimensions:
        if not (x.is_contiguous and out.is_contiguous):
            op.refuse("expected a tensor that lies in order, for a roll of all its elements")
        x, out = (replace(each, shape=(each.elements,), strides=(1,)) for each in (x, out))
        dimensions = [0]
    pieces = [(x, out)]
    for shift, dimension in zip(shifts, dimensions, strict=True):
        pieces = [half for pair in pieces for half in _rolled(*pair, shift, dimension)]
    for source, piece in pieces:
        if source.elements:
            copy(op, piece, source)


def _rolled(x: Look, out: Look, shift: int, dimension: int) -> list[tuple[Look, Look]]:
    dimension = wrapped(dimension, len(x.shape))
    size = x.shape[dimension]
    shift = shift % size if size else 0
    return [
        (part(x, dimension, 0, size - shift), part(out, dimension, shift, size - shift)),
        (part(x, dimension, size - shift, shift), part(out, dimension, 0, shift)),
    ]


@lowers(aten.tril.default, aten.triu.default)
def _lower_tril(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    *_, row, column = range(len(x.shape))
    if x.type is DataType.INT32:
        op.refuse("expected real numbers or truth values, got integers")
    matrices = [without(look, (row, column)) for look in (out, x)]
    steps = [look.strides[k] for look in (out, x) for k in (row, column)]
    is_lower = int(op.node.target is aten.tril.default)
    numbers = (x.shape[row], x.shape[column], *steps, op.args[1], is_lower)
    op.call(f"pm_triangle{SUFFIX[x.type]}", out, x, table(op, *matrices), *numbers)
    op.elementwise = True


# -- new tensors --------------------------------------------------------------------------------


@lowers(
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.zero.default,
)
def _lower_zeros(op: Lowering) -> None:
    fill(op, op.output(), 0)


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def _lower_ones(op: Lowering) -> None:
    fill(op, op.output(), 1)


@lowers(
    aten.full.default,
    aten.full_like.default,
    aten.fill.Scalar,
)
def _lower_full(op: Lowering) -> None:
    fill(op, op.output(), op.args[1])


@lowers(aten.new_full.default)
def _lower_new_full(op: Lowering) -> None:
    fill(op, op.output(), op.args[2])


@lowers(aten.scalar_tensor.default)
def _lower_scalar_tensor(op: Lowering) -> None:
    fill(op, op.output(), op.args[0])


@lowers(aten.fill.Tensor)
def _lower_fill(op: Lowering) -> None:
    copy(op, op.output(), op.value(op.args[1]))


@lowers(aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)
def _lower_empty(op: Lowering) -> None:
    """Leave what is there."""
    del op


@lowers(aten.arange.default, aten.arange.start, aten.arange.start_step)
def _lower_arange(op: Lowering) -> None:
    out = op.output()
    start = 0 if op.node.target is aten.arange.default else op.args[0]
    step = op.args[2] if op.node.target is aten.arange.start_step else 1
    kind = float if out.type is DataType.REAL else int
    op.call(f"pm_arange{SUFFIX[out.type]}", out, out.elements, kind(start), kind(step))
