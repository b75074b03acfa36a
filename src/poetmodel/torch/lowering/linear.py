"""Lowerings of matrix and vector products."""

from __future__ import annotations

from typing import Any, Final

import torch

from poetmodel.torch.lowering.operands import (
    Lowering,
    StridedView,
    allocate_workspace,
    convert_operand,
    copy,
    lowers,
    select_dimensions,
    shape_table,
)

aten: Final = torch.ops.aten


@lowers(aten.mm.default, aten.bmm.default)
def _lower_mm(op: Lowering) -> None:
    a, b = map(op.value, op.args)
    _lower_product(op, op.output(), a, b)


@lowers(aten.addmm.default, aten.baddbmm.default)
def _lower_addmm(op: Lowering) -> None:
    x, a, b, beta, alpha = op.args
    _lower_sum_with_product(op, x, op.value(a), op.value(b), beta, alpha)


@lowers(aten.mv.default)
def _lower_mv(op: Lowering) -> None:
    a, b = map(op.value, op.args)
    _lower_product(op, _to_column(op.output()), a, _to_column(b))


@lowers(aten.addmv.default)
def _lower_addmv(op: Lowering) -> None:
    x, a, b, beta, alpha = op.args
    _lower_sum_with_product(op, x, op.value(a), _to_column(op.value(b)), beta, alpha)


@lowers(aten.dot.default)
def _lower_dot(op: Lowering) -> None:
    a, b = map(op.value, op.args)
    out = op.output()
    _lower_product(op, _to_column(out.broadcast((1,))), _transpose(_to_column(a)), _to_column(b))


def _lower_sum_with_product(
    op: Lowering, x: Any, a: StridedView, b: StridedView, beta: float, alpha: float
) -> None:
    """Lower ``beta * x + alpha * (a @ b)``: `x` is broadcast, and not added if `beta` is 0."""
    out = op.output()
    product = _to_column(out) if len(out.shape) < len(a.shape) else out
    addend = convert_operand(op, x).broadcast(out.shape)
    if beta == alpha == 1:
        _lower_row_copy(op, out, addend)
        _lower_product(op, product, a, b, accumulate=True)
        return
    _lower_product(op, product, a, b)
    if alpha != 1:
        op.call("pm_affine", out, out, shape_table(op, out, out), float(alpha), 0.0)
    if beta != 0:
        op.call("pm_add", out, out, addend, shape_table(op, out, out, addend), float(beta))


def _lower_row_copy(op: Lowering, out: StridedView, x: StridedView) -> None:
    is_bias = len(x.shape) == 2 and x.strides[0] == 0 and out.strides[1] == 1  # noqa: PLR2004 - a matrix
    if is_bias:
        op.call("pm_fill_rows", out, x, *out.shape, out.strides[0], x.strides[1])
    else:
        copy(op, out, x)


def _to_column(view: StridedView) -> StridedView:
    """Return a vector as a matrix with one column; the stride between columns is 0."""
    return StridedView(
        buffer=view.buffer,
        offset=view.offset,
        shape=(*view.shape, 1),
        strides=(*view.strides, 0),
        type=view.type,
    )


def _transpose(view: StridedView) -> StridedView:
    *batch, row, column = range(len(view.shape))
    return select_dimensions(view, (*batch, column, row))


def _lower_product(
    op: Lowering, out: StridedView, a: StridedView, b: StridedView, *, accumulate: bool = False
) -> None:
    """Lower the product of matrices, or of batches of matrices: ``a @ b``.

    Kernels need an `out` with one row, or stride 1 within columns or rows of several elements. For
    another `out`, the product is copied from workspace, or refused with `accumulate`.
    """
    if out.shape[-1] == 1 < out.shape[-2] or (out.strides[-1] != 1 and out.shape[-1] > 1):
        # Kernels compute several elements of a row at once, so that long rows are faster.
        out, a, b = _transpose(out), _transpose(b), _transpose(a)
    if out.strides[-1] != 1 and out.shape[-1] > 1:
        if accumulate:
            op.refuse(f"expected an output with contiguous rows or columns, got {out}")
        product = allocate_workspace(op, out.shape)
        _lower_product(op, product, a, b)
        copy(op, out, product)
        return
    m, k, n = *a.shape[-2:], b.shape[-1]
    strides = [(view.strides[-2], view.strides[-1]) for view in (a, b)]
    if len(out.shape) == 2 or out.shape[0] == 1:  # noqa: PLR2004 - a matrix
        op.call(
            "pm_mm", out, a, b, m, k, n, out.strides[-2], *strides[0], *strides[1], int(accumulate)
        )
        return
    batch_strides = [view.strides[0] for view in (out, a, b)]
    op.call(
        "pm_bmm",
        *(out, a, b),
        *(out.shape[0], m, k, n),
        *(batch_strides[0], out.strides[-2]),
        *(batch_strides[1], *strides[0]),
        *(batch_strides[2], *strides[1]),
        int(accumulate),
    )
