"""Operations that replace state: steps of optimizers, running statistics; the norm of gradients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from poetmodel.torch.lowering.operands import copy, fill, table, workspace
from poetmodel.torch.lowering.registry import Look, lowers
from poetmodel.torch.optimizers import Adam
from poetmodel.torch.updates import BufferUpdate, GradientNorm, ParameterUpdate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.export.step import LearningRate
    from poetmodel.torch.lowering.registry import Lowering
    from poetmodel.torch.optimizers import Sgd


@lowers(ParameterUpdate)
def _lower_parameter_update(op: Lowering) -> None:
    state, gradients, rate, *factors = op.args
    looks = [op.value(each) for each in state]
    parameter = looks[0]
    moments = [look for look in looks if look.shape == parameter.shape]
    if not parameter.is_dense or not all(look.lies_like(parameter) for look in moments):
        op.refuse("expected a parameter without gaps, and moments that lie like it")
    gradient = _gradient(op, gradients, parameter, factors)
    rule = op.node.target.rule
    step = _adam if isinstance(rule, Adam) else _sgd
    step(op, rule, looks, gradient, op.learning_rate(rate))


def _sgd(
    op: Lowering, rule: Sgd, looks: Sequence[Look], gradient: Look, rate: LearningRate
) -> None:
    numbers = (rate, -1.0 if rule.maximize else 1.0, float(rule.weight_decay))
    if not rule.momentum:
        op.call("pm_sgd", *looks, gradient, gradient.elements, *numbers)
        return
    more = (float(rule.momentum), 1.0 - rule.dampening)
    op.call("pm_momentum", *looks, gradient, gradient.elements, int(rule.nesterov), *numbers, *more)


def _adam(
    op: Lowering, rule: Adam, looks: Sequence[Look], gradient: Look, rate: LearningRate
) -> None:
    parameter, steps, *moments = looks
    beta1, beta2 = map(float, rule.betas)
    decay = float(rule.weight_decay)
    added, shrunk = (0.0, decay) if rule.decoupled else (decay, 0.0)
    op.call(
        "pm_amsgrad" if rule.amsgrad else "pm_adam",
        parameter,
        *moments,
        gradient,
        steps,
        gradient.elements,
        rate,
        -1.0 if rule.maximize else 1.0,
        added,
        shrunk,
        *(1.0 - beta1, beta2, 1.0 - beta2, _log(beta1), _log(beta2), float(rule.eps)),
    )
    op.call("pm_add_one", steps, 1)


def _log(number: float) -> float:
    return math.log(number) if number else -math.inf


def _gradient(
    op: Lowering, gradients: Sequence[Any], parameter: Look, factors: Sequence[Any]
) -> Look:
    """Return the gradient as its parameter lies, summed and clipped; in workspace if need be."""
    first, *more = map(op.value, gradients)
    if not more and not factors and first.lies_like(parameter):
        return first
    found = replace(workspace(op, parameter.shape), strides=parameter.strides)
    _sum(op, found, first, more)
    for factor in factors:
        given = op.value(factor).broadcast(found.shape)
        op.call("pm_mul", found, found, given, table(op, found, found, given))
    return found


def _sum(op: Lowering, out: Look, first: Look, more: Sequence[Look]) -> None:
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
