"""Products of matrices and vectors; losses; updates of state, the norm of gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.lowered.calls import Condition
from poetmodel.torch.lowering.operands import (
    Lowering,
    StridedView,
    copy,
    fill,
    lowers,
    named,
    only,
    operand,
    table,
    without,
    workspace,
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


def _add_product(
    op: Lowering, x: Any, a: StridedView, b: StridedView, beta: float, alpha: float
) -> None:
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


def _copy_rows(op: Lowering, out: StridedView, x: StridedView) -> None:
    """Fill a matrix; a bias is the same in all rows."""
    is_bias = len(x.shape) == 2 and x.strides[0] == 0 and out.strides[1] == 1  # noqa: PLR2004 - a matrix
    if is_bias:
        op.call("pm_fill_rows", out, x, *out.shape, out.strides[0], x.strides[1])
    else:
        copy(op, out, x)


def _as_column(look: StridedView) -> StridedView:
    """Return a vector as a matrix with one column."""
    return StridedView(
        buffer=look.buffer,
        offset=look.offset,
        shape=(*look.shape, 1),
        strides=(*look.strides, 0),
        type=look.type,
    )


def _turned(look: StridedView) -> StridedView:
    """Return matrices with rows and columns exchanged."""
    *batch, row, column = range(len(look.shape))
    return only(look, (*batch, column, row))


def _multiply(
    op: Lowering, out: StridedView, a: StridedView, b: StridedView, *, accumulate: bool = False
) -> None:
    """Compute a b, for each of a batch where there is one."""
    if out.shape[-1] == 1 < out.shape[-2] or (out.strides[-1] != 1 and out.shape[-1] > 1):
        # As many elements as may be are computed at once along a row.
        out, a, b = _turned(out), _turned(b), _turned(a)
    if out.strides[-1] != 1 and out.shape[-1] > 1:
        if accumulate:
            op.refuse(f"expected an output with rows or columns that lie in order, got {out}")
        product = workspace(op, out.shape)
        _multiply(op, product, a, b)
        copy(op, out, product)
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


# -- losses ------------------------------------------------------------------------------------

_NONE, _MEAN = 0, 1
"""How the losses of elements become one: they do not, or by their mean; else by their sum."""


def _summed(
    op: Lowering, kernel: str, operands: tuple[Any, ...], reduction: int, *numbers: float
) -> None:
    """Call a kernel that sums losses of elements: all of them, or each alone."""
    out = op.output()
    looks = [operand(op, argument) for argument in operands]
    shape = tuple(torch.broadcast_shapes(*(look.shape for look in looks)))
    looks = [look.broadcast(shape) for look in looks]
    every = range(len(shape))
    if reduction == _NONE:
        outer = table(op, out, *looks)
        inner = table(op, *(without(look, every) for look in looks))
    else:
        outer = table(op, out, *(without(look, every) for look in looks))
        inner = table(op, *looks)
    divisor = float(looks[0].elements) if reduction == _MEAN else 1.0
    op.call(kernel, out, *looks, outer, inner, *numbers, divisor)


def _loss_gradient(
    op: Lowering, kernel: str, operands: tuple[Any, ...], reduction: int, *numbers: float
) -> None:
    """Call a kernel that computes the gradient of each element."""
    out = op.output()
    looks = [operand(op, argument).broadcast(out.shape) for argument in operands]
    factor = 1.0 / max(1, out.elements) if reduction == _MEAN else 1.0
    op.call(kernel, out, *looks, table(op, out, *looks), *numbers, factor)
    op.elementwise = True


@lowers(aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default)
def _lower_loss(op: Lowering) -> None:
    x, y, reduction, *numbers = op.args
    _summed(op, f"pm_{named(op)}", (x, y), reduction, *map(float, numbers))


@lowers(
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
)
def _lower_loss_backward(op: Lowering) -> None:
    gradient, x, y, reduction, *numbers = op.args
    _loss_gradient(op, f"pm_{named(op)}", (gradient, x, y), reduction, *map(float, numbers))


@lowers(aten.binary_cross_entropy.default)
def _lower_binary_cross_entropy(op: Lowering) -> None:
    x, y, weight, reduction = op.args
    _summed(op, "pm_binary_cross_entropy", (x, y, _or_one(weight)), reduction)


@lowers(aten.binary_cross_entropy_backward.default)
def _lower_binary_cross_entropy_backward(op: Lowering) -> None:
    gradient, x, y, weight, reduction = op.args
    _loss_gradient(op, "pm_binary_cross_entropy_backward", (gradient, x, y), reduction)
    if weight is not None:
        out = op.output()
        factor = operand(op, weight).broadcast(out.shape)
        op.call("pm_mul", out, out, factor, table(op, out, out, factor))
        op.elementwise = False


@lowers(aten.binary_cross_entropy_with_logits.default)
def _lower_binary_cross_entropy_with_logits(op: Lowering) -> None:
    x, y, weight, positive, reduction = op.args
    operands = (x, y, _or_one(weight), _or_one(positive))
    _summed(op, "pm_binary_cross_entropy_with_logits", operands, reduction)


def _or_one(argument: Any) -> Any:
    return 1.0 if argument is None else argument


# -- of classes ---------------------------------------------------------------------------------


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _lower_nll_loss_forward(op: Lowering) -> None:
    x, target, weight, reduction, ignored = op.args
    x, target = op.value(x), op.value(target)
    out = op.output()
    total = op.output(1) if op.has_output(1) else workspace(op, ())
    classes = min(1, len(x.shape) - 1)
    places = without(x, (classes,))
    op.call(
        "pm_nll_loss",
        *(out, total, x, target, *_weight(op, weight)[:1]),
        table(op, out.broadcast(target.shape), places, target),
        *(x.strides[classes], *_weight(op, weight)[1:], ignored),
        *(int(reduction != _NONE or not target.shape), int(reduction == _MEAN)),
        within=(0, x.shape[classes]),
    )


@lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _lower_nll_loss_backward(op: Lowering) -> None:
    gradient, x, target, weight, reduction, ignored, total = op.args
    out, target, total = op.output(), op.value(target), op.value(total)
    gradient = op.value(gradient).broadcast(target.shape)
    classes = min(1, len(op.value(x).shape) - 1)
    fill(op, out, 0)
    op.call(
        "pm_nll_loss_backward",
        *(out, gradient, target, *_weight(op, weight)[:1], total),
        table(op, gradient, without(out, (classes,)), target),
        *(out.strides[classes], *_weight(op, weight)[1:], ignored, int(reduction == _MEAN)),
        within=(0, out.shape[classes]),
    )


def _weight(op: Lowering, weight: Any) -> tuple[StridedView | Argument, int]:
    """Return weights of classes and their step; a pointer that is not there where all are 1."""
    if weight is None:
        return 0, 0
    look = op.value(weight)
    return look, look.strides[0]


# -- updates -----------------------------------------------------------------------------------


@lowers(ParameterUpdate)
def _lower_parameter_update(op: Lowering) -> None:
    state, gradients, rate, *factors = op.args
    looks = [op.value(argument) for argument in state]
    _update(op, looks, gradient_of(op, gradients, looks[0], factors), rate)


def _update(op: Lowering, looks: Sequence[StridedView], gradient: StridedView, rate: Any) -> None:
    parameter = looks[0]
    moments = [look for look in looks if look.shape == parameter.shape]
    if not parameter.is_dense or not all(look.lies_like(parameter) for look in moments):
        op.refuse("expected a parameter without gaps, and moments that lie like it")
    rule = op.node.target.rule
    if type(rule) not in _UPDATES:
        op.refuse("there is no kernel for it in C; expected another optimizer")
    _UPDATES[type(rule)](op, rule, looks, gradient, op.learning_rate(rate))


@lowers(AccumulatingUpdate)
def _lower_accumulating_update(op: Lowering) -> None:
    state, gradients, rate, count, *factors = op.args
    *looks, total = map(op.value, state)
    gradient = sum_of_batches(op, total, gradients, count, factors)
    _update(op, looks, gradient, rate)
    fill(op, total, 0)


def sum_of_batches(
    op: Lowering, total: StridedView, gradients: Any, count: Any, factors: Sequence[Any]
) -> StridedView:
    """Add gradients to their sum; return that, clipped, for calls made after the last batch."""
    if not total.is_dense:
        op.refuse("expected a parameter without gaps")
    op.call("pm_accumulate", total, gradient_of(op, gradients, total, ()), total.elements)
    op.where = Condition(op.value(count).ref, op.node.target.batches - 1)
    summed_bytes, op.workspace_bytes = op.workspace_bytes, 0
    gradient = _of_looks(op, (total,), total, factors)
    op.workspace_bytes = max(op.workspace_bytes, summed_bytes)
    return gradient


@lowers(BatchCount)
def _lower_batch_count(op: Lowering) -> None:
    ((count,),) = op.args
    op.call("pm_count_to", op.value(count), 1, op.node.target.batches)


def _sgd(op: Lowering, rule: Sgd, state: Views, gradient: StridedView, rate: Rate) -> None:
    numbers = (rate, -1.0 if rule.maximize else 1.0, float(rule.weight_decay))
    if not rule.momentum:
        op.call("pm_sgd", *state, gradient, gradient.elements, *numbers)
        return
    more = (float(rule.momentum), 1.0 - rule.dampening)
    op.call("pm_momentum", *state, gradient, gradient.elements, int(rule.nesterov), *numbers, *more)


def _adam(op: Lowering, rule: Adam, state: Views, gradient: StridedView, rate: Rate) -> None:
    parameter, steps, *moments = state
    beta1, beta2 = map(float, rule.betas)
    op.call(
        "pm_amsgrad" if rule.amsgrad else "pm_adam",
        parameter, *moments, gradient, steps, gradient.elements, rate, *_decay(rule),
        1.0 - beta1, beta2, 1.0 - beta2, _log(beta1), _log(beta2), float(rule.eps),
    )  # fmt: skip
    op.call("pm_add_one", steps, 1)


def _nadam(op: Lowering, rule: NAdam, state: Views, gradient: StridedView, rate: Rate) -> None:
    parameter, steps, product, *moments = state
    beta1, beta2 = map(float, rule.betas)
    momentum = (beta1, rule.momentum_decay * math.log(NADAM_DECAY))
    op.call(
        "pm_nadam",
        parameter, *moments, gradient, steps, product, gradient.elements, rate, *_decay(rule),
        *momentum, 1.0 - beta1, beta2, 1.0 - beta2, _log(beta2), float(rule.eps),
    )  # fmt: skip
    op.call("pm_nadam_count", steps, product, 1, *momentum)


def _rmsprop(op: Lowering, rule: RmsProp, state: Views, gradient: StridedView, rate: Rate) -> None:
    parameter, steps, *moments = state
    momentum = (float(rule.momentum),) if rule.momentum > 0 else ()
    sign, decay, _ = _decay(rule)
    op.call(
        f"pm_rmsprop{'_momentum' if momentum else ''}{'_centered' if rule.centered else ''}",
        parameter, *moments, gradient, gradient.elements, rate, sign, decay,
        float(rule.alpha), 1.0 - rule.alpha, *momentum, float(rule.eps),
    )  # fmt: skip
    op.call("pm_add_one", steps, 1)


def _adagrad(op: Lowering, rule: Adagrad, state: Views, gradient: StridedView, rate: Rate) -> None:
    parameter, steps, total = state
    sign, decay, _ = _decay(rule)
    op.call(
        "pm_adagrad",
        parameter, total, gradient, steps, gradient.elements, rate, sign, decay,
        float(rule.lr_decay), float(rule.eps),
    )  # fmt: skip
    op.call("pm_add_one", steps, 1)


def _adamax(op: Lowering, rule: Adamax, state: Views, gradient: StridedView, rate: Rate) -> None:
    parameter, steps, *moments = state
    beta1, beta2 = map(float, rule.betas)
    sign, decay, _ = _decay(rule)
    op.call(
        "pm_adamax",
        parameter, *moments, gradient, steps, gradient.elements, rate, sign, decay,
        1.0 - beta1, beta2, _log(beta1), float(rule.eps),
    )  # fmt: skip
    op.call("pm_add_one", steps, 1)


def _radam(op: Lowering, rule: RAdam, state: Views, gradient: StridedView, rate: Rate) -> None:
    parameter, steps, *moments = state
    beta1, beta2 = map(float, rule.betas)
    most, scale = 2.0 / (1.0 - beta2) - 1.0, -2.0 / _log(beta2)
    op.call(
        "pm_radam",
        parameter, *moments, gradient, steps, gradient.elements, rate, *_decay(rule),
        1.0 - beta1, beta2, 1.0 - beta2, _log(beta1), _log(beta2), float(rule.eps),
        most, scale, most - scale, RADAM_MIN_LENGTH,
    )  # fmt: skip
    op.call("pm_add_one", steps, 1)


_UPDATES: Final[dict[type[Rule], Callable[..., None]]] = {
    Sgd: _sgd,
    Adam: _adam,
    AdamW: _adam,
    NAdam: _nadam,
    RmsProp: _rmsprop,
    Adagrad: _adagrad,
    Adamax: _adamax,
    RAdam: _radam,
}


def _decay(rule: Rule) -> tuple[float, float, float]:
    """Return the sign of the gradient, and the decay that is added to it or shrinks the weight."""
    sign, decay = -1.0 if rule.maximize else 1.0, float(rule.weight_decay)
    return (sign, 0.0, decay) if rule.decoupled_weight_decay else (sign, decay, 0.0)


def _log(number: float) -> float:
    return math.log(number) if number else -math.inf


def gradient_of(
    op: Lowering, gradients: Sequence[Any], parameter: StridedView, factors: Sequence[Any]
) -> StridedView:
    """Return the gradient as its parameter lies, summed and clipped; in workspace if need be."""
    return _of_looks(op, tuple(map(op.value, gradients)), parameter, factors)


def _of_looks(
    op: Lowering,
    gradients: Sequence[StridedView],
    parameter: StridedView,
    factors: Sequence[Any],
) -> StridedView:
    first, *more = gradients
    if not more and not factors and first.lies_like(parameter):
        return first
    gradient = replace(workspace(op, parameter.shape), strides=parameter.strides)
    _sum(op, gradient, first, more)
    for factor in factors:
        given = op.value(factor).broadcast(gradient.shape)
        op.call("pm_mul", gradient, gradient, given, table(op, gradient, gradient, given))
    return gradient


def _sum(op: Lowering, out: StridedView, first: StridedView, more: Sequence[StridedView]) -> None:
    copy(op, out, first)
    for other in more:
        op.call("pm_add", out, out, other, table(op, out, out, other), 1.0)


@lowers(BufferUpdate)
def _lower_buffer_update(op: Lowering) -> None:
    for state, value in zip(*op.args, strict=True):
        copy(op, op.value(state), op.value(value))


@lowers(GradientNorm)
def _lower_gradient_norm(op: Lowering) -> None:
    """Sum all squares, then compute the factor; gradients of one parameter are summed first."""
    out = op.output()
    fill(op, out, 0)
    needed_bytes = 0
    for gradients in op.args[0]:
        first, *more = map(op.value, gradients)
        op.workspace_bytes = 0  # each may have what the one before had
        if more:
            total = workspace(op, first.shape)
            _sum(op, total, first, more)
            first = total
        op.call("pm_square_sum", out, first, table(op, first))
        needed_bytes = max(needed_bytes, op.workspace_bytes)
    op.workspace_bytes = needed_bytes
    op.call("pm_clip_factor", out, float(op.node.target.max_norm))
