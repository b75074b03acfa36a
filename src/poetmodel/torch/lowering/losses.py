"""Losses and their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.lowering.operands import fill, operand, table, without, workspace
from poetmodel.torch.lowering.registry import Look, Lowering, lowers

if TYPE_CHECKING:
    from poetmodel.export.step import Argument

aten: Final = torch.ops.aten
_NONE, _MEAN = 0, 1
"""How the losses of elements become one: they do not, or by their mean; else by their sum."""


def _summed(
    op: Lowering, kernel: str, operands: tuple[Any, ...], reduction: int, *numbers: float
) -> None:
    """Call a kernel that sums losses of elements: all of them, or each alone."""
    out = op.output()
    looks = [operand(op, each) for each in operands]
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


def _gradient(
    op: Lowering, kernel: str, operands: tuple[Any, ...], reduction: int, *numbers: float
) -> None:
    """Call a kernel that computes the gradient of each element."""
    out = op.output()
    looks = [operand(op, each).broadcast(out.shape) for each in operands]
    factor = 1.0 / max(1, out.elements) if reduction == _MEAN else 1.0
    op.call(kernel, out, *looks, table(op, out, *looks), *numbers, factor)
    op.elementwise = True


@lowers(aten.mse_loss.default)
def _lower_mse_loss(op: Lowering) -> None:
    _summed(op, "pm_mse_loss", op.args[:2], op.args[2])


@lowers(aten.mse_loss_backward.default)
def _lower_mse_loss_backward(op: Lowering) -> None:
    _gradient(op, "pm_mse_loss_backward", op.args[:3], op.args[3])


@lowers(aten.smooth_l1_loss.default, aten.huber_loss.default)
def _lower_smooth_l1_loss(op: Lowering) -> None:
    name = op.node.target._schema.name.removeprefix("aten::")
    _summed(op, f"pm_{name}", op.args[:2], op.args[2], float(op.args[3]))


@lowers(aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default)
def _lower_smooth_l1_loss_backward(op: Lowering) -> None:
    name = op.node.target._schema.name.removeprefix("aten::")
    _gradient(op, f"pm_{name}", op.args[:3], op.args[3], float(op.args[4]))


@lowers(aten.binary_cross_entropy.default)
def _lower_binary_cross_entropy(op: Lowering) -> None:
    x, y, weight, reduction = op.args
    _summed(op, "pm_binary_cross_entropy", (x, y, _or_one(weight)), reduction)


@lowers(aten.binary_cross_entropy_backward.default)
def _lower_binary_cross_entropy_backward(op: Lowering) -> None:
    gradient, x, y, weight, reduction = op.args
    _gradient(op, "pm_binary_cross_entropy_backward", (gradient, x, y), reduction)
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
    )


def _weight(op: Lowering, weight: Any) -> tuple[Look | Argument, int]:
    """Return weights of classes and their step; a pointer that is not there where all are 1."""
    if weight is None:
        return 0, 0
    look = op.value(weight)
    return look, look.strides[0]
