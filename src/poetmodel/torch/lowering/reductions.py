"""Operators that sum up dimensions or work on whole rows; batch, layer and group norm."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.lowered.calls import DataType
from poetmodel.torch.lowering.operands import (
    Lowering,
    copy,
    in_order,
    lowers,
    named,
    only,
    operand,
    table,
    without,
    wrapped,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.torch.lowering.operands import StridedView

aten: Final = torch.ops.aten


def _dimensions(look: StridedView, given: int | Sequence[int] | None) -> list[int]:
    """Return the reduced dimensions: all, if none is given."""
    rank = len(look.shape)
    if given is None or (not isinstance(given, int) and not given):
        return list(range(rank))
    numbers = [given] if isinstance(given, int) else given
    return sorted({wrapped(number, rank) for number in numbers})[: rank or 0]


def _reduce(
    op: Lowering,
    kernel: str,
    given: int | Sequence[int] | None,
    *numbers: float,
    position: int = 0,
) -> None:
    """Call a kernel for each element of an output, over what becomes that element."""
    out = op.output(position)
    real = not kernel.endswith("_int") and kernel != "pm_any"
    kind = DataType.REAL if real else out.type
    x = operand(op, op.args[0], kind)
    reduced = _dimensions(x, given)
    if len(out.shape) == len(x.shape):
        out = without(out, reduced)
    op.call(
        kernel,
        out,
        x,
        table(op, out, without(x, reduced)),
        table(op, only(x, reduced), in_order=True),
        *numbers,
    )


def _count(op: Lowering, given: int | Sequence[int] | None) -> int:
    """Return the number of elements that become one."""
    x = op.value(op.args[0])
    return math.prod(x.shape[k] for k in _dimensions(x, given))


@lowers(aten.sum.default, aten.sum.dim_IntList)
def _lower_sum(op: Lowering) -> None:
    given = op.args[1] if op.node.target is aten.sum.dim_IntList else None
    if op.output().type is DataType.INT32:
        _reduce(op, "pm_sum_int", given)
    else:
        _reduce(op, "pm_sum", given, 1.0)


@lowers(aten.mean.default, aten.mean.dim)
def _lower_mean(op: Lowering) -> None:
    given = op.args[1] if op.node.target is aten.mean.dim else None
    _reduce(op, "pm_sum", given, float(_count(op, given)))


@lowers(aten.prod.default, aten.prod.dim_int, aten.logsumexp.default)
def _lower_prod(op: Lowering) -> None:
    given = None if op.node.target is aten.prod.default else op.args[1]
    _reduce(op, f"pm_{named(op)}", given)


@lowers(aten.amax.default, aten.max.default, aten.amin.default, aten.min.default)
def _lower_amax(op: Lowering) -> None:
    sign = 1.0 if op.node.target in (aten.amax.default, aten.max.default) else -1.0
    _reduce(op, "pm_amax", op.args[1] if len(op.args) > 1 else None, sign)


@lowers(aten.max.dim, aten.min.dim)
def _lower_max(op: Lowering) -> None:
    sign = 1.0 if op.node.target is aten.max.dim else -1.0
    for position, kernel in enumerate(("pm_amax", "pm_argmax")):
        if op.has_output(position):
            _reduce(op, kernel, op.args[1], sign, position=position)


@lowers(aten.argmax.default, aten.argmin.default)
def _lower_argmax(op: Lowering) -> None:
    _reduce(op, "pm_argmax", op.args[1], 1.0 if op.node.target is aten.argmax.default else -1.0)


@lowers(*(getattr(n, kind) for n in (aten.any, aten.all) for kind in ("default", "dim", "dims")))
def _lower_any(op: Lowering) -> None:
    """All hold where there is not any that does not."""
    is_all = named(op) == "all"
    _reduce(op, "pm_any", op.args[1] if len(op.args) > 1 else None, int(is_all))
    if is_all:
        out = op.output()
        op.call("pm_logical", out, out, out, table(op, out, out, out), 0b0001)


@lowers(aten.var.correction, aten.std.correction, aten.var_mean.correction)
def _lower_var(op: Lowering) -> None:
    given, correction = op.args[1], op.args[2]
    count = _count(op, given)
    divisor = max(0.0, count - float(1 if correction is None else correction))
    is_deviation = int(op.node.target is aten.std.correction)
    if op.has_output(0):
        _reduce(op, "pm_var", given, is_deviation, float(count), divisor)
    if op.has_output(1):
        _reduce(op, "pm_sum", given, float(count), position=1)


@lowers(aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim)
def _lower_norm(op: Lowering) -> None:
    order = 2.0 if op.args[1] is None else float(op.args[1])
    given = op.args[2] if len(op.args) > 2 else None  # noqa: PLR2004 - norm.Scalar has two
    if order <= 0:
        op.refuse(f"expected a norm of an order above 0, got {order:g}")
    if order == 2:  # noqa: PLR2004 - the Euclidean norm
        _reduce(op, "pm_norm", given)
    else:
        _reduce(op, "pm_norm_of", given, order)


@lowers(aten._cdist_forward.default)
def _lower_cdist(op: Lowering) -> None:
    _distances(op, "pm_cdist", op.args[:2], op.args[2])


@lowers(aten._cdist_backward.default)
def _lower_cdist_backward(op: Lowering) -> None:
    gradient, x, y, order, distances = op.args
    _distances(op, "pm_cdist_backward", (gradient, x, y, distances), order, 1)


def _distances(op: Lowering, kernel: str, given: Sequence[Any], order: float, x: int = 0) -> None:
    """Call a kernel on all pairs of rows of two operands: `x`, and the next one."""
    if order not in (1, 2):
        op.refuse(f"expected distances of order 1 or 2, got {order:g}")
    looks = [in_order(op, op.value(value)) for value in given]
    *batch, rows, n = looks[x].shape
    *others, columns, _ = looks[x + 1].shape
    if batch != others:
        op.refuse(f"expected as many batches of one as of the other, got {batch} and {others}")
    op.call(kernel, op.output(), *looks, math.prod(batch), rows, columns, n, int(order))


# -- rows ---------------------------------------------------------------------------------------


def _on_rows(
    op: Lowering, kernel: str, operands: Sequence[Any], dimension: int, *numbers: int
) -> None:
    """Call a kernel on all rows along a dimension; it may write over what it reads."""
    looks = [op.output(), *(operand(op, argument) for argument in operands)]
    reduced = _dimensions(looks[0], dimension)
    size = math.prod(looks[0].shape[k] for k in reduced)
    steps = [look.strides[k] for look in looks for k in reduced] or [0] * len(looks)
    rows = [without(look, reduced) for look in looks]
    op.call(kernel, *looks, table(op, *rows), size, *steps, *numbers)
    op.elementwise = True


@lowers(aten._softmax.default, aten._safe_softmax.default)
def _lower_softmax(op: Lowering) -> None:
    is_safe = op.node.target is aten._safe_softmax.default
    _on_rows(op, "pm_softmax", op.args[:1], op.args[1], int(is_safe))


_ROWS: Final = {
    aten._log_softmax.default: ("pm_log_softmax", 1),
    aten._softmax_backward_data.default: ("pm_softmax_backward", 2),
    aten._log_softmax_backward_data.default: ("pm_log_softmax_backward", 2),
}
"""Kernel, and how many operands; the dimension comes after these."""


@lowers(*_ROWS)
def _lower_rows(op: Lowering) -> None:
    kernel, operands = _ROWS[op.node.target]
    _on_rows(op, kernel, op.args[:operands], op.args[operands])


@lowers(aten.cumsum.default)
def _lower_cumsum(op: Lowering) -> None:
    if op.output().type is not DataType.REAL:
        op.refuse("expected real numbers, got integers")
    _on_rows(op, "pm_cumsum", op.args[:1], op.args[1])


# -- norms -------------------------------------------------------------------------------------


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
        outputs = [_wanted(op, position) for position in (1, 2, 3, 4)]
        if outputs[3] and sizes[0] * sizes[2] == 1:
            op.refuse("a running variance needs more than one value for each channel")
        op.call(
            "pm_batch_norm", out, *outputs, x, w, bias, mean, variance, steps, *sizes,
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
    w, mean, scale = (_given(op, op.args[k]) for k in ((2, 5, 6) if training else (2, 3, 4)))
    dx = op.output() if op.has_output(0) else dy
    op.elementwise = op.has_output(0)
    if training:
        steps, sizes = _channels(op, dx, dy, x)
        op.call(
            "pm_batch_norm_backward", *(_wanted(op, position) for position in range(3)), dy, x,
            w, mean, scale, steps, *sizes, 1, float(epsilon),
        )  # fmt: skip
        return
    # One call for each, so that what reads the input goes where it is not wanted; dx may be dy.
    if op.has_output(1):
        steps, sizes = _channels(op, dy, dy, x)
        op.call(
            "pm_batch_norm_backward", 0, _wanted(op, 1), 0, dy, x, 0, mean, scale, steps, *sizes, 0,
            float(epsilon),
        )  # fmt: skip
    steps, sizes = _channels(op, dx, dy)
    for position, *outputs, weight in ((2, 0, _wanted(op, 2), 0), (0, _wanted(op, 0), 0, w)):
        if op.has_output(position):
            op.call(
                "pm_batch_norm_fixed_backward", *outputs, dy, weight, scale, steps, *sizes,
                float(epsilon),
            )  # fmt: skip


@lowers(aten.native_layer_norm.default)
def _layer_norm(op: Lowering) -> None:
    x, w, bias = op.value(op.args[0]), _given(op, op.args[2]), _given(op, op.args[3])
    out = op.output()
    op.elementwise = True
    steps, sizes = _rows(op, len(op.args[1]), out, x)
    outputs = [_wanted(op, position) for position in (1, 2)]
    op.call("pm_layer_norm", out, *outputs, x, w, bias, steps, *sizes, float(op.args[4]))


@lowers(aten.native_layer_norm_backward.default)
def _layer_norm_backward(op: Lowering) -> None:
    dy, x = op.value(op.args[0]), op.value(op.args[1])
    inner = len(op.args[2])
    mean, scale, w = (_given(op, argument) for argument in op.args[3:6])
    outputs = [_wanted(op, position) for position in range(3)]
    # The weights first: the gradient of x may take over the memory of dy.
    if outputs[1] or outputs[2]:
        steps, sizes = _rows(op, inner, dy, x)
        op.call("pm_layer_norm_dw", *outputs[1:], dy, x, mean, scale, steps, *sizes)
    if outputs[0]:
        op.elementwise = True
        steps, sizes = _rows(op, inner, op.output(), dy, x)
        op.call("pm_layer_norm_dx", outputs[0], dy, x, w, mean, scale, steps, *sizes)


@lowers(aten.native_group_norm.default)
def _group_norm(op: Lowering) -> None:
    x, w, bias = op.value(op.args[0]), _given(op, op.args[1]), _given(op, op.args[2])
    groups, epsilon = op.args[6:8]
    out = op.output()
    op.elementwise = True
    steps, sizes = _channels(op, out, x)
    outputs = [_wanted(op, position) for position in (1, 2)]
    op.call("pm_group_norm", out, *outputs, x, w, bias, steps, *sizes, groups, float(epsilon))


@lowers(aten.native_group_norm_backward.default)
def _group_norm_backward(op: Lowering) -> None:
    dy, x = op.value(op.args[0]), op.value(op.args[1])
    mean, scale, w = (_given(op, argument) for argument in op.args[2:5])
    groups = op.args[8]
    outputs = [_wanted(op, position) for position in range(3)]
    if outputs[1] or outputs[2]:
        steps, sizes = _channels(op, dy, x)
        op.call("pm_group_norm_dw", *outputs[1:], dy, x, mean, scale, steps, *sizes, groups)
    if outputs[0]:
        op.elementwise = True
        steps, sizes = _channels(op, op.output(), dy, x)
        op.call("pm_group_norm_dx", outputs[0], dy, x, w, mean, scale, steps, *sizes, groups)


def _given(op: Lowering, argument: Any) -> StridedView | int:
    """Return an operand with an element for each channel or row, or 0 where it is not there."""
    return _vector(op, None if argument is None else op.value(argument))


def _wanted(op: Lowering, position: int) -> StridedView | int:
    """Return an output, or 0 where the operation does not make it."""
    if not op.has_output(position):
        return 0
    return op.output(position) if position == 0 else _vector(op, op.output(position))


def _vector(op: Lowering, look: StridedView | None) -> StridedView | int:
    if look is None:
        return 0
    if not look.is_contiguous:
        op.refuse("statistics, weights and bias must lie in order")
    return look


def _channels(op: Lowering, *looks: StridedView) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """Return steps of batch, channels and places for each tensor, and how many there are."""
    batch, channels, *places = looks[0].shape
    steps = [(*look.strides[:2], _run(op, places, look.strides[2:])) for look in looks]
    return tuple(n for three in steps for n in three), (batch, channels, math.prod(places))


def _rows(
    op: Lowering, inner: int, *looks: StridedView
) -> tuple[tuple[int, ...], tuple[int, int, int]]:
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
    dimensions = [(size, step) for size, step in zip(sizes, strides, strict=True) if size > 1]
    if any(a != size * b for (_, a), (size, b) in pairwise(dimensions)):
        return None
    return dimensions[-1][1] if dimensions else 0


def _run(op: Lowering, sizes: Sequence[int], strides: Sequence[int]) -> int:
    step = _step(sizes, strides)
    if step is None:
        op.refuse(f"there is no kernel for a tensor with steps {tuple(strides)}; use .contiguous()")
    return step
