"""Lowerings of matrix and vector products, losses, updates of state, and the norm of gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.lowered.calls import Condition
from poetmodel.torch.lowering.operands import (
    Lowering,
    StridedView,
    allocate_workspace,
    aten_name,
    convert_operand,
    copy,
    fill,
    lowers,
    remove_dimensions,
    select_dimensions,
    shape_table,
)
from poetmodel.torch.step.optimizers import (
    NADAM_DECAY,
    RADAM_MIN_LENGTH,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    RAdam,
    RmsProp,
    Sgd,
)
from poetmodel.torch.step.updates import (
    AccumulatingUpdate,
    BatchCount,
    BufferUpdate,
    GradientNorm,
    ParameterUpdate,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from poetmodel.lowered.calls import Argument
    from poetmodel.lowered.calls import ScaledLearningRate as Rate
    from poetmodel.torch.step.optimizers import Rule

    Views = Sequence[StridedView]

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
    """Lower ``beta * x + alpha * (a @ b)``: `x` is broadcast, and not added if `beta` is 0.

    If the output is a vector, it is the only column of the product. If both factors are 1, the
    product is added to a copy of `x` in the output, as by `_lower_product` with `accumulate`, which
    refuses some layouts.
    """
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
    """Add the call that copies a tensor to `out`.

    A bias, equal in all rows of a matrix, has its own kernel if each row of `out` is contiguous.
    """
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
    """Return matrices with rows and columns exchanged."""
    *batch, row, column = range(len(view.shape))
    return select_dimensions(view, (*batch, column, row))


def _lower_product(
    op: Lowering, out: StridedView, a: StridedView, b: StridedView, *, accumulate: bool = False
) -> None:
    """Lower the product of matrices, or of batches of matrices: ``a @ b``.

    The product overwrites `out`, or is added to `out` if `accumulate`. Kernels need an `out` with a
    single row, with stride 1 within columns, or with stride 1 within rows of more than one element.
    For another `out`, the product is computed in workspace and then copied, or refused with
    `accumulate`.
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


# -- losses ------------------------------------------------------------------------------------

_NO_REDUCTION, _MEAN_REDUCTION = 0, 1
"""PyTorch's numbers for two reductions of losses; the third reduction is the sum."""


def _lower_reduced_loss(
    op: Lowering, kernel: str, operands: tuple[Any, ...], reduction: int, *constants: float
) -> None:
    """Add the call of a kernel for the sum or mean of losses, or one loss per element.

    Operands are converted to real numbers, and broadcast to one shape. `reduction` is PyTorch's
    number; `constants` are the arguments of the kernel between the shape tables and the divisor of
    the sum: the number of losses for a mean, otherwise 1.
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

    Operands, the gradient of the loss first, are converted to real numbers, and broadcast to the
    output. `reduction` is PyTorch's number; `constants` are the arguments of the kernel between the
    shape table and the factor of the gradient: for a mean 1 / elements of the output, otherwise 1.
    Sets `op.can_overwrite_operand`.
    """
    out = op.output()
    views = [convert_operand(op, argument).broadcast(out.shape) for argument in operands]
    factor = 1.0 / max(1, out.elements) if reduction == _MEAN_REDUCTION else 1.0
    op.call(kernel, out, *views, shape_table(op, out, *views), *constants, factor)
    op.can_overwrite_operand = True


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
    """Lower the gradient of the loss, multiplied by the weight if the loss has one.

    Sets `op.can_overwrite_operand` only without a weight.
    """
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
    """Lower the negative log likelihood loss and its second output, the targets' total weight.

    This weight is 0 if the losses of a batch are not reduced. It is in workspace if the second
    output does not exist.
    """
    x, target, weight, reduction, ignored_class = op.args
    x, target = op.value(x), op.value(target)
    out = op.output()
    total_weight = op.output(1) if op.has_output(1) else allocate_workspace(op, ())
    class_dimension = min(1, len(x.shape) - 1)
    x_without_classes = remove_dimensions(x, (class_dimension,))
    op.call(
        "pm_nll_loss",
        *(out, total_weight, x, target, *_class_weights(op, weight)[:1]),
        shape_table(op, out.broadcast(target.shape), x_without_classes, target),
        *(x.strides[class_dimension], *_class_weights(op, weight)[1:], ignored_class),
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
    fill(op, out, 0)
    op.call(
        "pm_nll_loss_backward",
        *(out, gradient, target, *_class_weights(op, weight)[:1], total_weight),
        shape_table(op, gradient, remove_dimensions(out, (class_dimension,)), target),
        *(
            out.strides[class_dimension],
            *_class_weights(op, weight)[1:],
            ignored_class,
            int(reduction == _MEAN_REDUCTION),
        ),
        index_range=(0, out.shape[class_dimension]),
    )


def _class_weights(op: Lowering, weight: Any) -> tuple[StridedView | Argument, int]:
    """Return (view of the weights of classes, its stride), without conversion.

    Returns (0, 0) if `weight` is None: with a null pointer as weights, all weights are 1.
    """
    if weight is None:
        return 0, 0
    view = op.value(weight)
    return view, view.strides[0]


# -- updates -----------------------------------------------------------------------------------


@lowers(ParameterUpdate)
def _lower_parameter_update(op: Lowering) -> None:
    state, gradients, rate, *clip_factors = op.args
    views = [op.value(argument) for argument in state]
    _lower_update(op, views, lower_gradient(op, gradients, views[0], clip_factors), rate)


def _lower_update(
    op: Lowering, views: Sequence[StridedView], gradient: StridedView, rate: Any
) -> None:
    """Add the calls of the operation's update rule; `views` are the parameter and its state.

    `rate` is the operation's argument for the learning rate. Refuses (`op.refuse`) parameters that
    are not dense, state of the parameter's shape in another layout, and rules without a kernel.
    """
    parameter = views[0]
    same_shape_views = [view for view in views if view.shape == parameter.shape]
    if not parameter.is_dense or not all(
        view.has_layout_of(parameter) for view in same_shape_views
    ):
        op.refuse("expected a dense parameter, and moments in its layout")
    rule = op.node.target.rule
    if type(rule) not in _UPDATES:
        op.refuse("there is no kernel for it in C; expected another optimizer")
    _UPDATES[type(rule)](op, rule, views, gradient, op.learning_rate(rate))


@lowers(AccumulatingUpdate)
def _lower_accumulating_update(op: Lowering) -> None:
    state, gradients, rate, count, *clip_factors = op.args
    *views, total = map(op.value, state)
    gradient = accumulate_gradient(op, total, gradients, count, clip_factors)
    _lower_update(op, views, gradient, rate)
    fill(op, total, 0)


def accumulate_gradient(
    op: Lowering, total: StridedView, gradients: Any, count: Any, clip_factors: Sequence[Any]
) -> StridedView:
    """Lower the addition of gradients to `total`, their sum over batches; return the clipped sum.

    The result is a copy in workspace, multiplied by each of `clip_factors`; without factors, it is
    `total` itself. In both cases, sets the condition of the operation: the calls that clip, and all
    calls added later, are executed only for the last batch of an accumulation. `count` is the node
    of the number of earlier batches in `total`. The caller must set `total` to 0 after the update.
    Refuses a `total` that is not dense.
    """
    if not total.is_dense:
        op.refuse("expected a dense parameter")
    op.call("pm_accumulate", total, lower_gradient(op, gradients, total, ()), total.elements)
    op.condition = Condition(op.value(count).ref, op.node.target.batches - 1)
    sum_workspace_bytes, op.workspace_bytes = op.workspace_bytes, 0
    gradient = _lower_sum_and_clip(op, (total,), total, clip_factors)
    op.workspace_bytes = max(op.workspace_bytes, sum_workspace_bytes)
    return gradient


@lowers(BatchCount)
def _lower_batch_count(op: Lowering) -> None:
    ((count,),) = op.args
    op.call("pm_count_to", op.value(count), 1, op.node.target.batches)


def _lower_sgd(op: Lowering, rule: Sgd, state: Views, gradient: StridedView, rate: Rate) -> None:
    """Add the call of SGD, with or without momentum."""
    constants = (rate, -1.0 if rule.maximize else 1.0, float(rule.weight_decay))
    if not rule.momentum:
        op.call("pm_sgd", *state, gradient, gradient.elements, *constants)
        return
    momentum_constants = (float(rule.momentum), 1.0 - rule.dampening)
    op.call(
        "pm_momentum",
        *state,
        gradient,
        gradient.elements,
        int(rule.nesterov),
        *constants,
        *momentum_constants,
    )


def _lower_adam(op: Lowering, rule: Adam, state: Views, gradient: StridedView, rate: Rate) -> None:
    """Add the call of Adam or AMSGrad, then the call that increments its count of earlier steps."""
    parameter, step_count, *moments = state
    beta1, beta2 = map(float, rule.betas)
    op.call(
        "pm_amsgrad" if rule.amsgrad else "pm_adam",
        parameter, *moments, gradient, step_count, gradient.elements, rate, *_decay_constants(rule),
        1.0 - beta1, beta2, 1.0 - beta2, _safe_log(beta1), _safe_log(beta2), float(rule.eps),
    )  # fmt: skip
    op.call("pm_add_one", step_count, 1)


def _lower_nadam(
    op: Lowering, rule: NAdam, state: Views, gradient: StridedView, rate: Rate
) -> None:
    """Add the call of NAdam, then the call that updates its step count and momentum product."""
    parameter, step_count, product, *moments = state
    beta1, beta2 = map(float, rule.betas)
    momentum_constants = (beta1, rule.momentum_decay * math.log(NADAM_DECAY))
    op.call(
        "pm_nadam",
        parameter, *moments, gradient, step_count, product, gradient.elements, rate,
        *_decay_constants(rule),
        *momentum_constants, 1.0 - beta1, beta2, 1.0 - beta2, _safe_log(beta2), float(rule.eps),
    )  # fmt: skip
    op.call("pm_nadam_count", step_count, product, 1, *momentum_constants)


def _lower_rmsprop(
    op: Lowering, rule: RmsProp, state: Views, gradient: StridedView, rate: Rate
) -> None:
    """Add the call of RMSprop, then the call that increments its step count.

    Momentum and centring have kernels of their own.
    """
    parameter, step_count, *moments = state
    momentum_constants = (float(rule.momentum),) if rule.momentum > 0 else ()
    sign, decay, _ = _decay_constants(rule)
    op.call(
        "pm_rmsprop"
        f"{'_momentum' if momentum_constants else ''}{'_centered' if rule.centered else ''}",
        parameter, *moments, gradient, gradient.elements, rate, sign, decay,
        float(rule.alpha), 1.0 - rule.alpha, *momentum_constants, float(rule.eps),
    )  # fmt: skip
    op.call("pm_add_one", step_count, 1)


def _lower_adagrad(
    op: Lowering, rule: Adagrad, state: Views, gradient: StridedView, rate: Rate
) -> None:
    """Add the call of Adagrad, then the call that increments its step count."""
    parameter, step_count, total = state
    sign, decay, _ = _decay_constants(rule)
    op.call(
        "pm_adagrad",
        parameter, total, gradient, step_count, gradient.elements, rate, sign, decay,
        float(rule.lr_decay), float(rule.eps),
    )  # fmt: skip
    op.call("pm_add_one", step_count, 1)


def _lower_adamax(
    op: Lowering, rule: Adamax, state: Views, gradient: StridedView, rate: Rate
) -> None:
    """Add the call of Adamax, then the call that increments its step count."""
    parameter, step_count, *moments = state
    beta1, beta2 = map(float, rule.betas)
    sign, decay, _ = _decay_constants(rule)
    op.call(
        "pm_adamax",
        parameter, *moments, gradient, step_count, gradient.elements, rate, sign, decay,
        1.0 - beta1, beta2, _safe_log(beta1), float(rule.eps),
    )  # fmt: skip
    op.call("pm_add_one", step_count, 1)


def _lower_radam(
    op: Lowering, rule: RAdam, state: Views, gradient: StridedView, rate: Rate
) -> None:
    """Add the call of RAdam, then the call that increments its step count."""
    parameter, step_count, *moments = state
    beta1, beta2 = map(float, rule.betas)
    max_length, scale = 2.0 / (1.0 - beta2) - 1.0, -2.0 / _safe_log(beta2)
    op.call(
        "pm_radam",
        parameter, *moments, gradient, step_count, gradient.elements, rate, *_decay_constants(rule),
        1.0 - beta1, beta2, 1.0 - beta2, _safe_log(beta1), _safe_log(beta2), float(rule.eps),
        max_length, scale, max_length - scale, RADAM_MIN_LENGTH,
    )  # fmt: skip
    op.call("pm_add_one", step_count, 1)


_UPDATES: Final[dict[type[Rule], Callable[..., None]]] = {
    Sgd: _lower_sgd,
    Adam: _lower_adam,
    AdamW: _lower_adam,
    NAdam: _lower_nadam,
    RmsProp: _lower_rmsprop,
    Adagrad: _lower_adagrad,
    Adamax: _lower_adamax,
    RAdam: _lower_radam,
}
"""The function that adds the calls of each update rule."""


def _decay_constants(rule: Rule) -> tuple[float, float, float]:
    """Return (sign of the gradient, decay added to the gradient, decay that scales the weight)."""
    sign, decay = -1.0 if rule.maximize else 1.0, float(rule.weight_decay)
    return (sign, 0.0, decay) if rule.decoupled_weight_decay else (sign, decay, 0.0)


def _safe_log(number: float) -> float:
    """Return the logarithm of a number; -inf for 0."""
    return math.log(number) if number else -math.inf


def lower_gradient(
    op: Lowering, gradients: Sequence[Any], parameter: StridedView, clip_factors: Sequence[Any]
) -> StridedView:
    """Add calls that sum and clip gradients; return the result in the layout of the parameter.

    `gradients` and `clip_factors` are nodes; each factor multiplies the sum. The result is in
    workspace, unless a single gradient without clipping already has this layout.
    """
    return _lower_sum_and_clip(op, tuple(map(op.value, gradients)), parameter, clip_factors)


def _lower_sum_and_clip(
    op: Lowering,
    gradients: Sequence[StridedView],
    parameter: StridedView,
    clip_factors: Sequence[Any],
) -> StridedView:
    """Add calls that sum gradients and multiply the sum by clip factors; return the result.

    The result is a tensor in workspace, in the parameter's layout. Without factors, a single
    gradient that already has this layout is returned without calls.
    """
    first_gradient, *other_gradients = gradients
    if not other_gradients and not clip_factors and first_gradient.has_layout_of(parameter):
        return first_gradient
    gradient = replace(allocate_workspace(op, parameter.shape), strides=parameter.strides)
    _lower_sum(op, gradient, first_gradient, other_gradients)
    for clip_factor in clip_factors:
        factor_view = op.value(clip_factor).broadcast(gradient.shape)
        op.call(
            "pm_mul",
            gradient,
            gradient,
            factor_view,
            shape_table(op, gradient, gradient, factor_view),
        )
    return gradient


def _lower_sum(
    op: Lowering, out: StridedView, first_tensor: StridedView, other_tensors: Sequence[StridedView]
) -> None:
    copy(op, out, first_tensor)
    for other_tensor in other_tensors:
        op.call("pm_add", out, out, other_tensor, shape_table(op, out, out, other_tensor), 1.0)


@lowers(BufferUpdate)
def _lower_buffer_update(op: Lowering) -> None:
    for state, value in zip(*op.args, strict=True):
        copy(op, op.value(state), op.value(value))


@lowers(GradientNorm)
def _lower_gradient_norm(op: Lowering) -> None:
    """Lower the sum of squares of all gradients, and the clip factor, which overwrites the sum.

    Several gradients of one parameter are summed first.
    """
    out = op.output()
    fill(op, out, 0)
    max_workspace_bytes = 0
    for gradients in op.args[0]:
        gradient, *other_gradients = map(op.value, gradients)
        op.workspace_bytes = 0  # gradients reuse the same workspace
        if other_gradients:
            total = allocate_workspace(op, gradient.shape)
            _lower_sum(op, total, gradient, other_gradients)
            gradient = total
        op.call("pm_square_sum", out, gradient, shape_table(op, gradient))
        max_workspace_bytes = max(max_workspace_bytes, op.workspace_bytes)
    op.workspace_bytes = max_workspace_bytes
    op.call("pm_clip_factor", out, float(op.node.target.max_norm))
