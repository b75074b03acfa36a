"""Lowerings of losses and their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.lowering.operands import (
    Lowering,
    StridedView,
    allocate_workspace,
    aten_name,
    convert_operand,
    fill,
    lower_pointwise,
    lowers,
    remove_dimensions,
    shape_table,
)

if TYPE_CHECKING:
    from poetmodel.lowered.calls import Argument

aten: Final = torch.ops.aten

_NO_REDUCTION, _MEAN_REDUCTION = 0, 1
"""PyTorch's numbers for two reductions of losses; the third reduction is the sum."""


def _lower_reduced_loss(
    op: Lowering, kernel: str, operands: tuple[Any, ...], reduction: int, *constants: float
) -> None:
    """Add the call of a kernel for the sum or mean of losses, or one loss per element.

    `reduction` is PyTorch's number; `constants` are the kernel's arguments between the shape tables
    and the divisor of the sum. Operands are broadcast, and converted to real numbers.
    """
    out = op.output()
    views = [convert_operand(op, argument) for argument in operands]
    shape = tuple(torch.broadcast_shapes(*(view.shape for view in views)))
    views = [view.broadcast(shape) for view in views]
    all_dimensions = range(len(shape))
    if reduction == _NO_REDUCTION:
        outer_table = shape_table(op, out, *views)
        inner_table = shape_table(op, *(remove_dimensions(view, all_dimensions) for view in views))
    else:
        outer_table = shape_table(
            op, out, *(remove_dimensions(view, all_dimensions) for view in views)
        )
        inner_table = shape_table(op, *views)
    divisor = float(views[0].elements) if reduction == _MEAN_REDUCTION else 1.0
    op.call(kernel, out, *views, outer_table, inner_table, *constants, divisor)


def _lower_loss_gradient(
    op: Lowering, kernel: str, operands: tuple[Any, ...], reduction: int, *constants: float
) -> None:
    """Add the call of a kernel for the gradient of a loss with respect to each element.

    The gradient of the loss is the first operand. `reduction` is PyTorch's number; `constants` are
    the kernel's arguments between the shape table and the factor of the gradient.
    """
    factor = 1.0 / max(1, op.output().elements) if reduction == _MEAN_REDUCTION else 1.0
    lower_pointwise(op, kernel, *operands, *constants, factor)


@lowers(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default)
def _lower_loss(op: Lowering) -> None:
    x, y, reduction, *constants = op.args
    _lower_reduced_loss(op, f"pm_{aten_name(op)}", (x, y), reduction, *map(float, constants))


@lowers(
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
)
def _lower_loss_backward(op: Lowering) -> None:
    gradient, x, y, reduction, *constants = op.args
    _lower_loss_gradient(
        op, f"pm_{aten_name(op)}", (gradient, x, y), reduction, *map(float, constants)
    )


@lowers(aten.binary_cross_entropy.default)
def _lower_binary_cross_entropy(op: Lowering) -> None:
    x, y, weight, reduction = op.args
    _lower_reduced_loss(op, "pm_binary_cross_entropy", (x, y, _weight_or_one(weight)), reduction)


@lowers(aten.binary_cross_entropy_backward.default)
def _lower_binary_cross_entropy_backward(op: Lowering) -> None:
    """Lower the gradient of the loss, multiplied by the weight if the loss has one."""
    gradient, x, y, weight, reduction = op.args
    _lower_loss_gradient(op, "pm_binary_cross_entropy_backward", (gradient, x, y), reduction)
    if weight is not None:
        out = op.output()
        factor = convert_operand(op, weight).broadcast(out.shape)
        op.call("pm_mul", out, out, factor, shape_table(op, out, out, factor))
        op.can_overwrite_operand = False


@lowers(aten.binary_cross_entropy_with_logits.default)
def _lower_binary_cross_entropy_with_logits(op: Lowering) -> None:
    x, y, weight, positive_weight, reduction = op.args
    operands = (x, y, _weight_or_one(weight), _weight_or_one(positive_weight))
    _lower_reduced_loss(op, "pm_binary_cross_entropy_with_logits", operands, reduction)


def _weight_or_one(weight: Any) -> Any:
    return 1.0 if weight is None else weight


# -- classification losses ----------------------------------------------------------------------


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _lower_nll_loss_forward(op: Lowering) -> None:
    """Lower the negative log likelihood loss and its second output, the targets' total weight."""
    x, target, weight, reduction, ignored_class = op.args
    x, target = op.value(x), op.value(target)
    out = op.output()
    total_weight = op.output(1) if op.has_output(1) else allocate_workspace(op, ())
    class_dimension = min(1, len(x.shape) - 1)
    x_without_classes = remove_dimensions(x, (class_dimension,))
    class_weights, class_weight_stride = _class_weights(op, weight)
    op.call(
        "pm_nll_loss",
        *(out, total_weight, x, target, class_weights),
        shape_table(op, out.broadcast(target.shape), x_without_classes, target),
        *(x.strides[class_dimension], class_weight_stride, ignored_class),
        *(int(reduction != _NO_REDUCTION or not target.shape), int(reduction == _MEAN_REDUCTION)),
        index_range=(0, x.shape[class_dimension]),
    )


@lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _lower_nll_loss_backward(op: Lowering) -> None:
    """Lower the loss's gradient: fill with 0, then write the elements of the target classes."""
    gradient, x, target, weight, reduction, ignored_class, total_weight = op.args
    out, target, total_weight = op.output(), op.value(target), op.value(total_weight)
    gradient = op.value(gradient).broadcast(target.shape)
    class_dimension = min(1, len(op.value(x).shape) - 1)
    class_weights, class_weight_stride = _class_weights(op, weight)
    fill(op, out, 0)
    op.call(
        "pm_nll_loss_backward",
        *(out, gradient, target, class_weights, total_weight),
        shape_table(op, gradient, remove_dimensions(out, (class_dimension,)), target),
        *(
            out.strides[class_dimension],
            class_weight_stride,
            ignored_class,
            int(reduction == _MEAN_REDUCTION),
        ),
        index_range=(0, out.shape[class_dimension]),
    )


def _class_weights(op: Lowering, weight: Any) -> tuple[StridedView | Argument, int]:
    """Return (view of the weights of classes, its stride), without conversion; (0, 0) for None."""
    if weight is None:
        return 0, 0
    view = op.value(weight)
    return view, view.strides[0]
