"""Lowerings of reductions, distances, operators on rows, and batch, layer and group norm."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.lowered.calls import DataType
from poetmodel.torch.lowering.operands import (
    Lowering,
    aten_name,
    convert_operand,
    copy,
    lowers,
    make_contiguous,
    positive_dimension,
    remove_dimensions,
    select_dimensions,
    shape_table,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.torch.lowering.operands import StridedView

aten: Final = torch.ops.aten


def _reduced_dimensions(view: StridedView, dimensions: int | Sequence[int] | None) -> list[int]:
    """Return the ascending dimensions to reduce; all if `dimensions` is None or empty."""
    rank = len(view.shape)
    if dimensions is None or (not isinstance(dimensions, int) and not dimensions):
        return list(range(rank))
    indices = [dimensions] if isinstance(dimensions, int) else dimensions
    return sorted({positive_dimension(number, rank) for number in indices})[:rank]


def _lower_reduction(
    op: Lowering,
    kernel: str,
    dimensions: int | Sequence[int] | None,
    *constants: float,
    output_position: int = 0,
) -> None:
    """Add the call of a kernel that reduces the first operand to output `output_position`.

    Reduces all dimensions if `dimensions` is None or empty. `constants` are the kernel's last
    arguments. ``pm_any`` and ``_int`` kernels have the output's type, the rest are real.
    """
    out = op.output(output_position)
    is_real = not kernel.endswith("_int") and kernel != "pm_any"
    kind = DataType.REAL if is_real else out.type
    x = convert_operand(op, op.args[0], kind)
    reduced_dimensions = _reduced_dimensions(x, dimensions)
    if len(out.shape) == len(x.shape):
        out = remove_dimensions(out, reduced_dimensions)
    op.call(
        kernel,
        out,
        x,
        shape_table(op, out, remove_dimensions(x, reduced_dimensions)),
        shape_table(op, select_dimensions(x, reduced_dimensions), preserve_order=True),
        *constants,
    )


def _count_reduced_elements(op: Lowering, dimensions: int | Sequence[int] | None) -> int:
    """Return the number of elements of the first operand that are reduced to one element."""
    x = op.value(op.args[0])
    return math.prod(x.shape[i] for i in _reduced_dimensions(x, dimensions))


@lowers(aten.sum.default, aten.sum.dim_IntList)
def _lower_sum(op: Lowering) -> None:
    dimensions = op.args[1] if op.node.target is aten.sum.dim_IntList else None
    if op.output().type is DataType.INT32:
        _lower_reduction(op, "pm_sum_int", dimensions)
    else:
        _lower_reduction(op, "pm_sum", dimensions, 1.0)


@lowers(aten.mean.default, aten.mean.dim)
def _lower_mean(op: Lowering) -> None:
    dimensions = op.args[1] if op.node.target is aten.mean.dim else None
    _lower_reduction(op, "pm_sum", dimensions, float(_count_reduced_elements(op, dimensions)))


@lowers(aten.prod.default, aten.prod.dim_int, aten.logsumexp.default)
def _lower_prod_or_logsumexp(op: Lowering) -> None:
    dimensions = None if op.node.target is aten.prod.default else op.args[1]
    _lower_reduction(op, f"pm_{aten_name(op)}", dimensions)


@lowers(aten.amax.default, aten.max.default, aten.amin.default, aten.min.default)
def _lower_extremum(op: Lowering) -> None:
    sign = 1.0 if op.node.target in (aten.amax.default, aten.max.default) else -1.0
    _lower_reduction(op, "pm_amax", op.args[1] if len(op.args) > 1 else None, sign)


@lowers(aten.max.dim, aten.min.dim)
def _lower_extremum_with_index(op: Lowering) -> None:
    """Lower ``max`` or ``min`` along a dimension: values and indices, each if it is an output."""
    sign = 1.0 if op.node.target is aten.max.dim else -1.0
    for position, kernel in enumerate(("pm_amax", "pm_argmax")):
        if op.has_output(position):
            _lower_reduction(op, kernel, op.args[1], sign, output_position=position)


@lowers(aten.argmax.default, aten.argmin.default)
def _lower_extremum_index(op: Lowering) -> None:
    _lower_reduction(
        op, "pm_argmax", op.args[1], 1.0 if op.node.target is aten.argmax.default else -1.0
    )


@lowers(
    *(
        getattr(packet, overload)
        for packet in (aten.any, aten.all)
        for overload in ("default", "dim", "dims")
    )
)
def _lower_any(op: Lowering) -> None:
    """Lower ``any``; ``all`` is the negation of ``any`` of the negated elements."""
    is_all = aten_name(op) == "all"
    _lower_reduction(op, "pm_any", op.args[1] if len(op.args) > 1 else None, int(is_all))
    if is_all:
        out = op.output()
        op.call("pm_logical", out, out, out, shape_table(op, out, out, out), 0b0001)


@lowers(aten.var.correction, aten.std.correction, aten.var_mean.correction)
def _lower_var(op: Lowering) -> None:
    """Lower a variance or standard deviation and, as second output of ``var_mean``, the mean."""
    dimensions, correction = op.args[1], op.args[2]
    count = _count_reduced_elements(op, dimensions)
    divisor = max(0.0, count - float(1 if correction is None else correction))
    is_deviation = int(op.node.target is aten.std.correction)
    if op.has_output(0):
        _lower_reduction(op, "pm_var", dimensions, is_deviation, float(count), divisor)
    if op.has_output(1):
        _lower_reduction(op, "pm_sum", dimensions, float(count), output_position=1)


@lowers(aten.linalg_vector_norm.default, aten.norm.Scalar, aten.norm.ScalarOpt_dim)
def _lower_norm(op: Lowering) -> None:
    """Lower a vector norm of an order above 0, also infinity; 2 for None. Refuse other orders."""
    order = 2.0 if op.args[1] is None else float(op.args[1])
    dimensions = op.args[2] if len(op.args) > 2 else None  # noqa: PLR2004 - norm.Scalar has two
    if order <= 0:
        op.refuse(f"expected a norm of an order above 0, got {order:g}")
    if order == 2:  # noqa: PLR2004 - the Euclidean norm
        _lower_reduction(op, "pm_norm", dimensions)
    else:
        _lower_reduction(op, "pm_norm_of", dimensions, order)


@lowers(aten._cdist_forward.default)
def _lower_cdist(op: Lowering) -> None:
    _call_on_row_pairs(op, "pm_cdist", op.args[:2], op.args[2])


@lowers(aten._cdist_backward.default)
def _lower_cdist_backward(op: Lowering) -> None:
    gradient, x, y, order, distances = op.args
    _call_on_row_pairs(op, "pm_cdist_backward", (gradient, x, y, distances), order, 1)


def _call_on_row_pairs(
    op: Lowering, kernel: str, operands: Sequence[Any], order: float, first_index: int = 0
) -> None:
    """Add one call of a kernel on all pairs of a row of one operand and a row of the next one.

    `first_index` is the index of the first of these two in `operands`. Refuses an `order` other
    than 1 and 2, and different batch dimensions.
    """
    if order not in (1, 2):
        op.refuse(f"expected distances of order 1 or 2, got {order:g}")
    views = [make_contiguous(op, op.value(value)) for value in operands]
    *batch, rows, n = views[first_index].shape
    *other_batch, columns, _ = views[first_index + 1].shape
    if batch != other_batch:
        op.refuse(f"expected equal batch dimensions, got {batch} and {other_batch}")
    op.call(kernel, op.output(), *views, math.prod(batch), rows, columns, n, int(order))


# -- rows ---------------------------------------------------------------------------------------


def _call_on_rows(
    op: Lowering, kernel: str, operands: Sequence[Any], dimension: int, *constants: int
) -> None:
    """Add the call of a kernel on all rows along a dimension; set `op.can_overwrite_operand`.

    All `operands` have the shape of the output. `constants` are the last arguments of the kernel.
    """
    views = [op.output(), *(convert_operand(op, argument) for argument in operands)]
    row_dimensions = _reduced_dimensions(views[0], dimension)
    size = math.prod(views[0].shape[i] for i in row_dimensions)
    strides = [view.strides[i] for view in views for i in row_dimensions] or [0] * len(views)
    rows = [remove_dimensions(view, row_dimensions) for view in views]
    op.call(kernel, *views, shape_table(op, *rows), size, *strides, *constants)
    op.can_overwrite_operand = True


@lowers(aten._softmax.default, aten._safe_softmax.default)
def _lower_softmax(op: Lowering) -> None:
    is_safe = op.node.target is aten._safe_softmax.default
    _call_on_rows(op, "pm_softmax", op.args[:1], op.args[1], int(is_safe))


_ROW_KERNELS: Final = {
    aten._log_softmax.default: ("pm_log_softmax", 1),
    aten._softmax_backward_data.default: ("pm_softmax_backward", 2),
    aten._log_softmax_backward_data.default: ("pm_log_softmax_backward", 2),
}
"""Kernel and number of operands of each operator, whose next argument is the dimension."""


@lowers(*_ROW_KERNELS)
def _lower_rows(op: Lowering) -> None:
    kernel, operand_count = _ROW_KERNELS[op.node.target]
    _call_on_rows(op, kernel, op.args[:operand_count], op.args[operand_count])


@lowers(aten.cumsum.default)
def _lower_cumsum(op: Lowering) -> None:
    """Lower a cumulative sum of real numbers; refuse results of other types."""
    if op.output().type is not DataType.REAL:
        op.refuse("expected real numbers, got integers")
    _call_on_rows(op, "pm_cumsum", op.args[:1], op.args[1])


# -- norms -------------------------------------------------------------------------------------

# Norms and their gradients set `can_overwrite_operand`: the first output may overwrite an operand
# of its layout.


@lowers(
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
)
def _lower_batch_norm(op: Lowering) -> None:
    """Lower a batch norm: by statistics of the batch in training mode, otherwise by fixed ones."""
    x, w, bias = (
        op.value(op.args[0]),
        _optional_operand(op, op.args[1]),
        _optional_operand(op, op.args[2]),
    )
    variant = op.node.target._schema.overload_name or op.node.target._schema.name
    is_training = not variant.endswith("no_training") and op.args[-3]
    statistics = (
        [None, None] if variant == "no_stats" else [op.value(argument) for argument in op.args[3:5]]
    )
    mean, variance = (_require_contiguous(op, view) for view in statistics)
    momentum, epsilon = op.args[-2:]
    out = op.output()
    op.can_overwrite_operand = True
    strides, sizes = _channel_layout(op, out, x)
    if is_training:
        outputs = [_optional_output(op, position) for position in (1, 2, 3, 4)]
        if outputs[3] and sizes[0] * sizes[2] == 1:
            op.refuse("a running variance needs more than one value for each channel")
        op.call(
            "pm_batch_norm", out, *outputs, x, w, bias, mean, variance, strides, *sizes,
            float(momentum), float(epsilon),
        )  # fmt: skip
        return
    op.call("pm_batch_norm_fixed", out, x, w, bias, mean, variance, strides, *sizes, float(epsilon))
    for position, view in enumerate(statistics, 3):
        if view is not None and op.has_output(position):
            copy(op, op.output(position), view)


@lowers(aten.native_batch_norm_backward.default)
def _lower_batch_norm_backward(op: Lowering) -> None:
    """Lower the gradients of a batch norm that are outputs: of input, weight and bias."""
    dy, x = op.value(op.args[0]), op.value(op.args[1])
    is_training, epsilon = op.args[7:9]
    # `scale` is the reciprocal standard deviation in training mode, otherwise the variance.
    w, mean, scale = (
        _optional_operand(op, op.args[i]) for i in ((2, 5, 6) if is_training else (2, 3, 4))
    )
    dx = op.output() if op.has_output(0) else dy
    op.can_overwrite_operand = op.has_output(0)
    if is_training:
        strides, sizes = _channel_layout(op, dx, dy, x)
        op.call(
            "pm_batch_norm_backward", *(_optional_output(op, position) for position in range(3)),
            dy, x,
            w, mean, scale, strides, *sizes, 1, float(epsilon),
        )  # fmt: skip
        return
    # One call for each gradient: those of x and bias do not read x, and dx may overwrite dy.
    if op.has_output(1):
        strides, sizes = _channel_layout(op, dy, dy, x)
        op.call(
            "pm_batch_norm_backward", 0, _optional_output(op, 1), 0, dy, x, 0, mean, scale, strides,
            *sizes, 0,
            float(epsilon),
        )  # fmt: skip
    strides, sizes = _channel_layout(op, dx, dy)
    for position, *outputs, weight in (
        (2, 0, _optional_output(op, 2), 0),
        (0, _optional_output(op, 0), 0, w),
    ):
        if op.has_output(position):
            op.call(
                "pm_batch_norm_fixed_backward", *outputs, dy, weight, scale, strides, *sizes,
                float(epsilon),
            )  # fmt: skip


@lowers(aten.native_layer_norm.default)
def _lower_layer_norm(op: Lowering) -> None:
    """Lower a layer norm, with mean and reciprocal standard deviation if they are outputs."""
    x, w, bias = (
        op.value(op.args[0]),
        _optional_operand(op, op.args[2]),
        _optional_operand(op, op.args[3]),
    )
    out = op.output()
    op.can_overwrite_operand = True
    strides, sizes = _row_layout(op, len(op.args[1]), out, x)
    outputs = [_optional_output(op, position) for position in (1, 2)]
    op.call("pm_layer_norm", out, *outputs, x, w, bias, strides, *sizes, float(op.args[4]))


@lowers(aten.native_layer_norm_backward.default)
def _lower_layer_norm_backward(op: Lowering) -> None:
    """Lower the gradients of a layer norm that are outputs: of weight and bias, then input."""
    dy, x = op.value(op.args[0]), op.value(op.args[1])
    inner_rank = len(op.args[2])
    mean, scale, w = (_optional_operand(op, argument) for argument in op.args[3:6])
    outputs = [_optional_output(op, position) for position in range(3)]
    # Gradients of weight and bias first, because the gradient of x may overwrite dy.
    if outputs[1] or outputs[2]:
        strides, sizes = _row_layout(op, inner_rank, dy, x)
        op.call("pm_layer_norm_dw", *outputs[1:], dy, x, mean, scale, strides, *sizes)
    if outputs[0]:
        op.can_overwrite_operand = True
        strides, sizes = _row_layout(op, inner_rank, op.output(), dy, x)
        op.call("pm_layer_norm_dx", outputs[0], dy, x, w, mean, scale, strides, *sizes)


@lowers(aten.native_group_norm.default)
def _lower_group_norm(op: Lowering) -> None:
    """Lower a group norm, with mean and reciprocal standard deviation if they are outputs."""
    x, w, bias = (
        op.value(op.args[0]),
        _optional_operand(op, op.args[1]),
        _optional_operand(op, op.args[2]),
    )
    groups, epsilon = op.args[6:8]
    out = op.output()
    op.can_overwrite_operand = True
    strides, sizes = _channel_layout(op, out, x)
    outputs = [_optional_output(op, position) for position in (1, 2)]
    op.call("pm_group_norm", out, *outputs, x, w, bias, strides, *sizes, groups, float(epsilon))


@lowers(aten.native_group_norm_backward.default)
def _lower_group_norm_backward(op: Lowering) -> None:
    """Lower the gradients of a group norm that are outputs: of weight and bias, then input."""
    dy, x = op.value(op.args[0]), op.value(op.args[1])
    mean, scale, w = (_optional_operand(op, argument) for argument in op.args[2:5])
    groups = op.args[8]
    outputs = [_optional_output(op, position) for position in range(3)]
    if outputs[1] or outputs[2]:
        strides, sizes = _channel_layout(op, dy, x)
        op.call("pm_group_norm_dw", *outputs[1:], dy, x, mean, scale, strides, *sizes, groups)
    if outputs[0]:
        op.can_overwrite_operand = True
        strides, sizes = _channel_layout(op, op.output(), dy, x)
        op.call("pm_group_norm_dx", outputs[0], dy, x, w, mean, scale, strides, *sizes, groups)


def _optional_operand(op: Lowering, argument: Any) -> StridedView | int:
    """Return a contiguous operand, or a null pointer (0) for None; refuse other operands."""
    return _require_contiguous(op, None if argument is None else op.value(argument))


def _optional_output(op: Lowering, position: int) -> StridedView | int:
    """Return the output at a position, or a null pointer (0) if there is none."""
    if not op.has_output(position):
        return 0
    return op.output(position) if position == 0 else _require_contiguous(op, op.output(position))


def _require_contiguous(op: Lowering, view: StridedView | None) -> StridedView | int:
    """Return a contiguous view, or a null pointer (0) for None; refuse other views."""
    if view is None:
        return 0
    if not view.is_contiguous:
        op.refuse("statistics, weights and bias must be contiguous")
    return view


def _channel_layout(
    op: Lowering, *views: StridedView
) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """Return (strides of batch, channels and pixels for each tensor, sizes of these three).

    The strides of all tensors are one tuple. Refuses dimensions of pixels that cannot be merged.
    """
    batch, channels, *pixels = views[0].shape
    strides = [(*view.strides[:2], _require_stride(op, pixels, view.strides[2:])) for view in views]
    return tuple(stride for view_strides in strides for stride in view_strides), (
        batch,
        channels,
        math.prod(pixels),
    )


def _row_layout(
    op: Lowering, inner_rank: int, *views: StridedView
) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """Return (strides of outer dimensions, rows and elements for each tensor, sizes of these).

    The strides are one tuple. The elements of a row are the last `inner_rank` dimensions; the
    leading ones are merged into rows, or divided into outer dimensions and rows.
    """
    leading_rank = len(views[0].shape) - inner_rank
    leading_sizes, inner_sizes = views[0].shape[:leading_rank], views[0].shape[leading_rank:]
    # Rows are merged from all leading dimensions, from the last one, or from all except the first.
    for cut in (0, max(leading_rank - 1, 0), min(leading_rank, 1)):
        if all(
            _merged_stride(leading_sizes[:cut], view.strides[:cut]) is not None
            and _merged_stride(leading_sizes[cut:], view.strides[cut:leading_rank]) is not None
            for view in views
        ):
            break
    outer_sizes, row_sizes = leading_sizes[:cut], leading_sizes[cut:]
    strides = [
        (
            _require_stride(op, outer_sizes, view.strides[:cut]),
            _require_stride(op, row_sizes, view.strides[cut:leading_rank]),
            _require_stride(op, inner_sizes, view.strides[leading_rank:]),
        )
        for view in views
    ]
    counts = (math.prod(outer_sizes), math.prod(row_sizes), math.prod(inner_sizes))
    return tuple(stride for view_strides in strides for stride in view_strides), counts


def _merged_stride(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return the stride of dimensions merged into one; None if they cannot be merged."""
    dimensions = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]
    if any(outer != size * inner for (_, outer), (size, inner) in pairwise(dimensions)):
        return None
    return dimensions[-1][1] if dimensions else 0


def _require_stride(op: Lowering, sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the stride of merged dimensions; refuse tensors whose dimensions cannot be merged."""
    stride = _merged_stride(sizes, strides)
    if stride is None:
        op.refuse(f"there is no kernel for strides {tuple(strides)}; use .contiguous()")
    return stride
