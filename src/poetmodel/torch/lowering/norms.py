"""Batch, layer and group norm, and their gradients."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from poetmodel.torch.lowering.operands import copy
from poetmodel.torch.lowering.registry import lowers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.torch.lowering.registry import Look, Lowering

aten = torch.ops.aten


@lowers(
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
)
def _batch_norm(op: Lowering) -> None:
    x, w, bias = op.value(op.args[0]), _given(op, op.args[1]), _given(op, op.args[2])
    form = op.node.target._schema.overload_name or op.node.target._schema.name
    training = not form.endswith("no_training") and op.args[-3]
    known = [None, None] if form == "no_stats" else [op.value(a) for a in op.args[3:5]]
    mean, variance = (_vector(op, look) for look in known)
    momentum, epsilon = op.args[-2:]
    out = op.output()
    op.elementwise = True
    steps, sizes = _channels(op, out, x)
    if training:
        made = [_wanted(op, position) for position in (1, 2, 3, 4)]
        if made[3] and sizes[0] * sizes[2] == 1:
            op.refuse("a running variance needs more than one value for each channel")
        op.call(
            "pm_batch_norm", out, *made, x, w, bias, mean, variance, steps, *sizes,
            float(momentum), float(epsilon),
        )  # fmt: skip
        return
    op.call("pm_batch_norm_fixed", out, x, w, bias, mean, variance, steps, *sizes, float(epsilon))
    for position, look in enumerate(known, 3):
        if look is not None and op.has_output(position):
            copy(op, op.output(position), look)


@lowers(aten.native_batch_norm_backward.default)
def _batch_norm_backward(op: Lowering) -> None:
    dy, x = op.value(op.args[0]), op.value(op.args[1])
    training, epsilon = op.args[7:9]
    mean, scale = op.args[5:7] if training else op.args[3:5]
    dx = op.output() if op.has_output(0) else dy
    op.elementwise = op.has_output(0)
    steps, sizes = _channels(op, dx, dy, x)
    op.call(
        "pm_batch_norm_backward", *(_wanted(op, position) for position in range(3)), dy, x,
        _given(op, op.args[2]), _given(op, mean), _given(op, scale), steps, *sizes,
        int(training), float(epsilon),
    )  # fmt: skip


@lowers(aten.native_layer_norm.default)
def _layer_norm(op: Lowering) -> None:
    x, w, bias = op.value(op.args[0]), _given(op, op.args[2]), _given(op, op.args[3])
    out = op.output()
    op.elementwise = True
    steps, sizes = _rows(op, len(op.args[1]), out, x)
    made = [_wanted(op, position) for position in (1, 2)]
    op.call("pm_layer_norm", out, *made, x, w, bias, steps, *sizes, float(op.args[4]))


@lowers(aten.native_layer_norm_backward.default)
def _layer_norm_backward(op: Lowering) -> None:
    dy, x = op.value(op.args[0]), op.value(op.args[1])
    inner = len(op.args[2])
    mean, scale, w = (_given(op, argument) for argument in op.args[3:6])
    made = [_wanted(op, position) for position in range(3)]
    # The weights first: the gradient of x may take over the memory of dy.
    if made[1] or made[2]:
        steps, sizes = _rows(op, inner, dy, x)
        op.call("pm_layer_norm_dw", *made[1:], dy, x, mean, scale, steps, *sizes)
    if made[0]:
        op.elementwise = True
        steps, sizes = _rows(op, inner, op.output(), dy, x)
        op.call("pm_layer_norm_dx", made[0], dy, x, w, mean, scale, steps, *sizes)


@lowers(aten.native_group_norm.default)
def _group_norm(op: Lowering) -> None:
    x, w, bias = op.value(op.args[0]), _given(op, op.args[1]), _given(op, op.args[2])
    groups, epsilon = op.args[6:8]
    out = op.output()
    op.elementwise = True
    steps, sizes = _channels(op, out, x)
    made = [_wanted(op, position) for position in (1, 2)]
    op.call("pm_group_norm", out, *made, x, w, bias, steps, *sizes, groups, float(epsilon))


@lowers(aten.native_group_norm_backward.default)
def _group_norm_backward(op: Lowering) -> None:
    dy, x = op.value(op.args[0]), op.value(op.args[1])
    mean, scale, w = (_given(op, argument) for argument in op.args[2:5])
    groups = op.args[8]
    made = [_wanted(op, position) for position in range(3)]
    if made[1] or made[2]:
        steps, sizes = _channels(op, dy, x)
        op.call("pm_group_norm_dw", *made[1:], dy, x, mean, scale, steps, *sizes, groups)
    if made[0]:
        op.elementwise = True
        steps, sizes = _channels(op, op.output(), dy, x)
        op.call("pm_group_norm_dx", made[0], dy, x, w, mean, scale, steps, *sizes, groups)


def _given(op: Lowering, argument: Any) -> Look | int:
    """Return an operand with an element for each channel or row, or 0 where it is not there."""
    return _vector(op, None if argument is None else op.value(argument))


def _wanted(op: Lowering, position: int) -> Look | int:
    """Return an output, or 0 where the operation does not make it."""
    if not op.has_output(position):
        return 0
    return op.output(position) if position == 0 else _vector(op, op.output(position))


def _vector(op: Lowering, look: Look | None) -> Look | int:
    if look is None:
        return 0
    if not look.is_contiguous:
        op.refuse("statistics, weights and bias must lie in order")
    return look


def _channels(op: Lowering, *looks: Look) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """Return steps of batch, channels and places for each tensor, and how many there are."""
    batch, channels, *places = looks[0].shape
    steps = [(*look.strides[:2], _run(op, places, look.strides[2:])) for look in looks]
    return tuple(n for three in steps for n in three), (batch, channels, math.prod(places))


def _rows(op: Lowering, inner: int, *looks: Look) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """Return steps of outer runs, rows and elements for each tensor, and how many there are."""
    split = len(looks[0].shape) - inner
    sizes, own = looks[0].shape[:split], looks[0].shape[split:]
    # The rows are all dimensions that follow each other in every tensor; one more may be outside.
    for cut in (0, max(split - 1, 0), min(split, 1)):
        if all(
            _step(sizes[:cut], look.strides[:cut]) is not None
            and _step(sizes[cut:], look.strides[cut:split]) is not None
            for look in looks
        ):
            break
    outer, rows = sizes[:cut], sizes[cut:]
    steps = [
        (
            _run(op, outer, look.strides[:cut]),
            _run(op, rows, look.strides[cut:split]),
            _run(op, own, look.strides[split:]),
        )
        for look in looks
    ]
    counts = (math.prod(outer), math.prod(rows), math.prod(own))
    return tuple(n for three in steps for n in three), counts


def _step(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return the step from one element to the next; None where it is not always the same."""
    found = [(size, step) for size, step in zip(sizes, strides, strict=True) if size > 1]
    if any(a != size * b for (_, a), (size, b) in pairwise(found)):
        return None
    return found[-1][1] if found else 0


def _run(op: Lowering, sizes: Sequence[int], strides: Sequence[int]) -> int:
    step = _step(sizes, strides)
    if step is None:
        op.refuse(f"there is no kernel for a tensor with steps {tuple(strides)}; use .contiguous()")
    return step
