"""Operators that draw random numbers, but for dropout: normal and uniform ones."""

from __future__ import annotations

from typing import Any, Final

import torch

from poetmodel.torch.lowering.operands import Lowering, lowers, operand, random_site, table

aten: Final = torch.ops.aten


@lowers(aten.randn.default, aten.randn_like.default)
def _lower_randn(op: Lowering) -> None:
    _draw(op, "pm_normal", 0.0, 1.0)


@lowers(aten.rand.default, aten.rand_like.default)
def _lower_rand(op: Lowering) -> None:
    _draw(op, "pm_uniform", 0.0, 1.0)


@lowers(aten.uniform.default)
def _lower_uniform(op: Lowering) -> None:
    first, end = op.args[1:3]
    _draw(op, "pm_uniform", float(first), float(end) - float(first))


@lowers(aten.normal_functional.default)
def _lower_normal_functional(op: Lowering) -> None:
    mean, deviation = op.args[1:3]
    _draw(op, "pm_normal", float(mean), float(deviation))


@lowers(
    aten.normal.float_float,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.normal.Tensor_Tensor,
)
def _lower_normal(op: Lowering) -> None:
    out = op.output()
    _draw(op, "pm_normal", 0.0, 1.0)
    deviation, mean = (operand(op, value).broadcast(out.shape) for value in op.args[1::-1])
    op.call("pm_mul", out, out, deviation, table(op, out, out, deviation))
    op.call("pm_add", out, out, mean, table(op, out, out, mean), 1.0)


def _draw(op: Lowering, kernel: str, *numbers: Any) -> None:
    """Fill the output with numbers, in the order of its memory."""
    out = op.output()
    if not out.is_dense:
        op.refuse("expected an output without gaps")
    op.call(kernel, out, out.elements, random_site(op.node), *numbers)
