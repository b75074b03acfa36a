"""Lowerings of updates of state: gradients, their norm, and optimizers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.lowered.calls import Condition
from poetmodel.torch.lowering.operands import (
    Lowering,
    StridedView,
    allocate_workspace,
    copy,
    fill,
    lowers,
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

    from poetmodel.lowered.calls import ScaledLearningRate as Rate
    from poetmodel.torch.step.optimizers import Rule

    Views = Sequence[StridedView]


@lowers(ParameterUpdate)
def _lower_parameter_update(op: Lowering) -> None:
    state, gradients, rate, *clip_factors = op.args
    views = [op.value(argument) for argument in state]
    _lower_update(op, views, lower_gradient(op, gradients, views[0], clip_factors), rate)


def _lower_update(
    op: Lowering, views: Sequence[StridedView], gradient: StridedView, rate: Any
) -> None:
    """Add the calls of the operation's update rule; `views` are the parameter and its state."""
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
    """Lower an update by the sum of the gradients of its batches, which is then set to 0."""
    state, gradients, rate, count, *clip_factors = op.args
    *views, total = map(op.value, state)
    gradient = accumulate_gradient(op, total, gradients, count, clip_factors)
    _lower_update(op, views, gradient, rate)
    fill(op, total, 0)


def accumulate_gradient(
    op: Lowering, total: StridedView, gradients: Any, count: Any, clip_factors: Sequence[Any]
) -> StridedView:
    """Lower the addition of gradients to `total`, their sum over batches; return the clipped sum.

    Calls that clip, and all calls added later, are executed only for the last batch. The caller
    must set `total`, which is dense, to 0 after the update. With `clip_factors`, the result is a
    copy in workspace. `count` is the node of the number of earlier batches in `total`.
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
    """Add the call that counts a batch, from 0 again after the last batch of an update."""
    ((count,),) = op.args
    op.call("pm_count_to", op.value(count), 1, op.node.target.batches)


def _lower_sgd(op: Lowering, rule: Sgd, state: Views, gradient: StridedView, rate: Rate) -> None:
    """Add the call of SGD; `state` is the parameter and, with momentum, its momentum buffer."""
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
    """Add the call of RMSprop, of any variant, then the call that increments its step count."""
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
    """Add the call of Adagrad, then the call that increments its count of earlier steps."""
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
    """Add the call of Adamax, then the call that increments its count of earlier steps."""
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
    """Add the call of RAdam, then the call that increments its count of earlier steps."""
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

    Each of `clip_factors`, nodes, multiplies the sum. The result is in workspace, unless it is a
    single gradient without clipping in this layout.
    """
    return _lower_sum_and_clip(op, tuple(map(op.value, gradients)), parameter, clip_factors)


def _lower_sum_and_clip(
    op: Lowering,
    gradients: Sequence[StridedView],
    parameter: StridedView,
    clip_factors: Sequence[Any],
) -> StridedView:
    """Add calls that sum gradients and multiply the sum by clip factors; return the result."""
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
    """Lower the sum of squares of all gradients, and the clip factor, which overwrites the sum."""
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
