"""Products of matrices and vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.lowering.operands import copy, only, operand, table, workspace
from poetmodel.torch.lowering.registry import Look, lowers

if TYPE_CHECKING:
    from poetmodel.torch.lowering.registry import Lowering

aten: Final = torch.ops.aten


@lowers(aten.mm.default, aten.bmm.default)
def _lower_mm(op: Lowering) -> None:
    a, b = map(op.value, op.args)
    _multiply(op, op.output(), a, b)


@lowers(aten.addmm.default, aten.baddbmm.default)
def _lower_addmm(op: Lowering) -> None:
    x, a, b, beta, alpha = op.args
    _add_product(op, x, op.value(a), op.value(b), beta, alpha)


@lowers(aten.mv.default)
def _lower_mv(op: Lowering) -> None:
    a, b = map(op.value, op.args)
    _multiply(op, _as_column(op.output()), a, _as_column(b))


@lowers(aten.addmv.default)
def _lower_addmv(op: Lowering) -> None:
    x, a, b, beta, alpha = op.args
    _add_product(op, x, op.value(a), _as_column(op.value(b)), beta, alpha)


@lowers(aten.dot.default)
def _lower_dot(op: Lowering) -> None:
    a, b = map(op.value, op.args)
    out = op.output()
    _multiply(op, _as_column(out.broadcast((1,))), _turned(_as_column(a)), _as_column(b))


def _add_product(op: Lowering, x: Any, a: Look, b: Look, beta: float, alpha: float) -> None:
    """Compute beta x + alpha a b."""
    out = op.output()
    product = _as_column(out) if len(out.shape) < len(a.shape) else out
    added = operand(op, x).broadcast(out.shape)
    if beta == alpha == 1:
        _copy_rows(op, out, added)
        _multiply(op, product, a, b, accumulate=True)
        return
    _multiply(op, product, a, b)
    if alpha != 1:
        op.call("pm_affine", out, out, table(op, out, out), float(alpha), 0.0)
    if beta != 0:
        op.call("pm_add", out, out, added, table(op, out, out, added), float(beta))


def _copy_rows(op: Lowering, out: Look, x: Look) -> None:
    """Fill a matrix; a bias is the same in all rows."""
    is_bias = len(x.shape) == 2 and x.strides[0] == 0 and out.strides[1] == 1  # noqa: PLR2004 - a matrix
    if is_bias:
        op.call("pm_fill_rows", out, x, *out.shape, out.strides[0], x.strides[1])
    else:
        copy(op, out, x)


def _as_column(look: Look) -> Look:
    """Return a vector as a matrix with one column."""
    return Look(
        buffer=look.buffer,
        offset=look.offset,
        shape=(*look.shape, 1),
        strides=(*look.strides, 0),
        type=look.type,
    )


def _turned(look: Look) -> Look:
    """Return matrices with rows and columns exchanged."""
    *batch, row, column = range(len(look.shape))
    return only(look, (*batch, column, row))


def _multiply(op: Lowering, out: Look, a: Look, b: Look, *, accumulate: bool = False) -> None:
    """Compute a b, for each of a batch where there is one."""
    if out.shape[-1] == 1 < out.shape[-2] or (out.strides[-1] != 1 and out.shape[-1] > 1):
        # As many elements as may be are computed at once along a row.
        out, a, b = _turned(out), _turned(b), _turned(a)
    if out.strides[-1] != 1 and out.shape[-1] > 1:
        if accumulate:
            op.refuse(f"expected an output with rows or columns that lie in order, got {out}")
        found = workspace(op, out.shape)
        _multiply(op, found, a, b)
        copy(op, out, found)
        return
    m, k, n = *a.shape[-2:], b.shape[-1]
    steps = [(look.strides[-2], look.strides[-1]) for look in (a, b)]
    if len(out.shape) == 2 or out.shape[0] == 1:  # noqa: PLR2004 - a matrix
        op.call("pm_mm", out, a, b, m, k, n, out.strides[-2], *steps[0], *steps[1], int(accumulate))
        return
    batch = [look.strides[0] for look in (out, a, b)]
    op.call(
        "pm_bmm",
        *(out, a, b),
        *(out.shape[0], m, k, n),
        *(batch[0], out.strides[-2]),
        *(batch[1], *steps[0]),
        *(batch[2], *steps[1]),
        int(accumulate),
    )
