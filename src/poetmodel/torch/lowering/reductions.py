"""Operators that sum up dimensions, and those that work on whole rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.export.step import DataType
from poetmodel.torch.lowering.operands import only, operand, table, without, wrapped
from poetmodel.torch.lowering.registry import Lowering, lowers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.torch.lowering.registry import Look

aten: Final = torch.ops.aten


def _dimensions(look: Look, given: int | Sequence[int] | None) -> list[int]:
    """Return which dimensions are reduced: all, where none is given."""
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
    """Return how many elements become one."""
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


@lowers(aten.prod.default, aten.prod.dim_int)
def _lower_prod(op: Lowering) -> None:
    _reduce(op, "pm_prod", op.args[1] if op.node.target is aten.prod.dim_int else None)


@lowers(aten.logsumexp.default)
def _lower_logsumexp(op: Lowering) -> None:
    _reduce(op, "pm_logsumexp", op.args[1])


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


@lowers(aten.any.default, aten.any.dim, aten.any.dims)
def _lower_any(op: Lowering) -> None:
    _reduce(op, "pm_any", op.args[1] if len(op.args) > 1 else None, 0)


@lowers(aten.all.default, aten.all.dim, aten.all.dims)
def _lower_all(op: Lowering) -> None:
    """All hold where there is not any that does not."""
    _reduce(op, "pm_any", op.args[1] if len(op.args) > 1 else None, 1)
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


@lowers(aten.linalg_vector_norm.default)
def _lower_linalg_vector_norm(op: Lowering) -> None:
    order, given = op.args[1], op.args[2]
    if order != 2:  # noqa: PLR2004 - the Euclidean norm
        op.refuse(f"expected the norm of order 2, got {order}")
    _reduce(op, "pm_norm", given)


# -- rows ---------------------------------------------------------------------------------------


def _on_rows(
    op: Lowering, kernel: str, operands: Sequence[Any], dimension: int, *numbers: int
) -> None:
    """Call a kernel on all rows along a dimension; it may write over what it reads."""
    looks = [op.output(), *(operand(op, each) for each in operands)]
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


@lowers(aten._log_softmax.default)
def _lower_log_softmax(op: Lowering) -> None:
    _on_rows(op, "pm_log_softmax", op.args[:1], op.args[1])


@lowers(aten._softmax_backward_data.default)
def _lower_softmax_backward_data(op: Lowering) -> None:
    _on_rows(op, "pm_softmax_backward", op.args[:2], op.args[2])


@lowers(aten._log_softmax_backward_data.default)
def _lower_log_softmax_backward_data(op: Lowering) -> None:
    _on_rows(op, "pm_log_softmax_backward", op.args[:2], op.args[2])


@lowers(aten.cumsum.default)
def _lower_cumsum(op: Lowering) -> None:
    if op.output().type is not DataType.REAL:
        op.refuse("expected real numbers, got integers")
    _on_rows(op, "pm_cumsum", op.args[:1], op.args[1])
