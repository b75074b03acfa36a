"""Lowerings of elementwise operators with broadcasting, copies, and random numbers.

Random masks are replayed within a step, as defined in ``pm_random.h``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import torch
from torch import fx

from poetmodel.lowered.calls import DataType
from poetmodel.torch.lowering.operands import (
    Lowering,
    StridedView,
    aten_name,
    convert_operand,
    copy,
    fill,
    lower_pointwise,
    lowers,
    positive_dimension,
    random_site,
    shape_table,
    slice_view,
)

aten: Final = torch.ops.aten


_KERNELS: Final[dict[Any, str]] = {
    aten.abs.default: "pm_abs",
    aten.sqrt.default: "pm_sqrt",
    aten.rsqrt.default: "pm_rsqrt",
    aten.reciprocal.default: "pm_reciprocal",
    aten.exp.default: "pm_exp",
    aten.expm1.default: "pm_expm1",
    aten.log.default: "pm_log",
    aten.log1p.default: "pm_log1p",
    aten.sin.default: "pm_sin",
    aten.cos.default: "pm_cos",
    aten.erf.default: "pm_erf",
    aten.tanh.default: "pm_tanh",
    aten.floor.default: "pm_floor",
    aten.ceil.default: "pm_ceil",
    aten.round.default: "pm_round",
    aten.sgn.default: "pm_sign",
    aten.sign.default: "pm_sign",
    aten.sigmoid.default: "pm_sigmoid",
    aten.silu.default: "pm_silu",
    aten.mish.default: "pm_mish",
    aten.hardswish.default: "pm_hardswish",
    aten.hardsigmoid.default: "pm_hardsigmoid",
    aten.log_sigmoid_forward.default: "pm_log_sigmoid",
    aten.maximum.default: "pm_maximum",
    aten.minimum.default: "pm_minimum",
    aten.clamp_min.Tensor: "pm_maximum",
    aten.clamp_max.Tensor: "pm_minimum",
    aten.xlogy.Tensor: "pm_xlogy",
    aten.sigmoid_backward.default: "pm_sigmoid_backward",
    aten.tanh_backward.default: "pm_tanh_backward",
    aten.silu_backward.default: "pm_silu_backward",
    aten.mish_backward.default: "pm_mish_backward",
    aten.hardswish_backward.default: "pm_hardswish_backward",
    aten.hardsigmoid_backward.default: "pm_hardsigmoid_backward",
    aten.log_sigmoid_backward.default: "pm_log_sigmoid_backward",
    aten._prelu_kernel.default: "pm_prelu",
    aten.lerp.Scalar: "pm_lerp",
    aten.lerp.Tensor: "pm_lerp",
    aten.threshold.default: "pm_threshold",
    aten.threshold_backward.default: "pm_threshold_backward",
    aten.hardtanh.default: "pm_clamp",
    aten.hardtanh_backward.default: "pm_hardtanh_backward",
    aten.leaky_relu.default: "pm_leaky_relu",
    aten.softplus.default: "pm_softplus",
    aten.softplus_backward.default: "pm_softplus_backward",
    aten.hardshrink.default: "pm_hardshrink",
    aten.softshrink.default: "pm_softshrink",
    aten.hardshrink_backward.default: "pm_shrink_backward",
    aten.softshrink_backward.default: "pm_shrink_backward",
    aten.addcmul.default: "pm_addcmul",
    aten.addcdiv.default: "pm_addcdiv",
    aten.leaky_relu_backward.default: "pm_leaky_relu_backward",
    aten.native_dropout_backward.default: "pm_mask_scale",
}
"""Kernel of each operator whose arguments are operands and constants of the kernel, in order."""


@lowers(*_KERNELS)
def _lower_by_table(op: Lowering) -> None:
    lower_pointwise(op, _KERNELS[op.node.target], *op.args)


_KERNELS_WITH_CONSTANTS: Final[dict[Any, tuple[str, tuple[float, ...]]]] = {
    aten.relu.default: ("pm_threshold", (0.0, 0.0)),
    aten.relu6.default: ("pm_clamp", (0.0, 6.0)),
}
"""Kernel and constants of each operator of one operand."""


@lowers(*_KERNELS_WITH_CONSTANTS)
def _lower_with_constants(op: Lowering) -> None:
    kernel, constants = _KERNELS_WITH_CONSTANTS[op.node.target]
    lower_pointwise(op, kernel, op.args[0], *constants)


# -- sums and products with numbers -----------------------------------------------------------


def _lower_affine(op: Lowering, x: Any, factor: float, shift: float) -> None:
    lower_pointwise(op, f"pm_affine{_number_suffix(op)}", x, factor, shift)


def _number_suffix(op: Lowering) -> str:
    """Return the suffix of kernels for an output of reals, or of integers."""
    return "" if op.output().type is DataType.REAL else DataType.INT32.suffix


@lowers(aten.neg.default)
def _lower_neg(op: Lowering) -> None:
    _lower_affine(op, op.args[0], -1, 0)


@lowers(aten.mul.Tensor, aten.mul.Scalar)
def _lower_mul(op: Lowering) -> None:
    x, y = op.args
    if isinstance(y, fx.Node):
        suffix = DataType.INT32.suffix if op.output().type is DataType.INT32 else ""
        lower_pointwise(op, f"pm_mul{suffix}", x, y)
    else:
        _lower_affine(op, x, y, 0)


@lowers(aten.div.Tensor, aten.div.Scalar)
def _lower_div(op: Lowering) -> None:
    kernel = "pm_div" if isinstance(op.args[1], fx.Node) else "pm_div_by"
    lower_pointwise(op, kernel, *op.args)


@lowers(aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar)
def _lower_add(op: Lowering) -> None:
    """Lower ``x + alpha * y`` or ``x - alpha * y`` of a tensor `x`, and a tensor or number `y`."""
    x, y, alpha = op.args
    if op.node.target in (aten.sub.Tensor, aten.sub.Scalar):
        alpha = -alpha
    if not isinstance(y, fx.Node):
        _lower_affine(op, x, 1, alpha * y)
    else:
        suffix = DataType.INT32.suffix if op.output().type is DataType.INT32 else ""
        lower_pointwise(op, f"pm_add{suffix}", x, y, alpha)


@lowers(aten.rsub.Scalar)
def _lower_rsub(op: Lowering) -> None:
    x, number, alpha = op.args
    _lower_affine(op, x, -alpha, number)


@lowers(aten.pow.Tensor_Scalar)
def _lower_pow(op: Lowering) -> None:
    """Lower a power with a constant exponent; 2 and `_POWER_KERNELS` have cheaper kernels."""
    x, exponent = op.args
    if exponent == 2:  # noqa: PLR2004 - a square needs no logarithm
        lower_pointwise(op, "pm_mul", x, x)
    elif exponent in _POWER_KERNELS:
        kernel, constants = _POWER_KERNELS[exponent]
        lower_pointwise(op, kernel, x, *constants)
    else:
        lower_pointwise(op, "pm_pow", x, exponent)


_POWER_KERNELS: Final[dict[float, tuple[str, tuple[float, ...]]]] = {
    1: ("pm_affine", (1.0, 0.0)),
    3: ("pm_cube", ()),
    0.5: ("pm_sqrt", ()),
    -0.5: ("pm_rsqrt", ()),
    -1: ("pm_reciprocal", ()),
}
"""Kernel and constants of each exponent, except 2, that needs no power function."""


# -- activations with other arguments -----------------------------------------------------------


@lowers(aten.gelu.default, aten.gelu_backward.default)
def _lower_gelu(op: Lowering) -> None:
    *operands, approximate = op.args
    suffix = "_backward" if len(operands) > 1 else ""
    approximation = "" if approximate == "none" else "_tanh"
    lower_pointwise(op, f"pm_gelu{approximation}{suffix}", *operands)


@lowers(aten.elu.default, aten.celu.default)
def _lower_elu(op: Lowering) -> None:
    """Lower elu, or celu as elu with a scale of 1 and an input scale of ``1 / alpha``."""
    if op.node.target is aten.celu.default:
        x, alpha = op.args
        scale, input_scale = 1.0, 1.0 / alpha
    else:
        x, alpha, scale, input_scale = op.args
    lower_pointwise(op, "pm_elu", x, alpha * scale, scale, input_scale)


@lowers(aten.elu_backward.default)
def _lower_elu_backward(op: Lowering) -> None:
    gradient, alpha, scale, input_scale, is_result, x = op.args
    constants = (is_result, alpha * scale, scale, input_scale)
    lower_pointwise(op, "pm_elu_backward", gradient, x, *constants)


@lowers(aten._prelu_kernel_backward.default)
def _lower_prelu_kernel_backward(op: Lowering) -> None:
    """Lower the gradients of the input and of each element's slope, not summed, in a call each."""
    gradient, x, slope = (op.value(argument) for argument in op.args)
    input_gradient, slope_gradient = op.output(0), op.output(1)
    slope = slope.broadcast(x.shape)
    op.call(
        "pm_prelu_backward",
        input_gradient,
        gradient,
        x,
        slope,
        shape_table(op, input_gradient, gradient, x, slope),
    )
    op.call(
        "pm_prelu_slope_backward",
        slope_gradient,
        gradient,
        x,
        shape_table(op, slope_gradient, gradient, x),
    )


@lowers(aten.glu.default)
def _lower_glu(op: Lowering) -> None:
    x, gate = _split_halves(op.value(op.args[0]), op.args[1])
    out = op.output()
    op.call("pm_glu", out, x, gate, shape_table(op, out, x, gate))


@lowers(aten.glu_backward.default)
def _lower_glu_backward(op: Lowering) -> None:
    """Lower the gradient of the input: one call for each half along the operator's dimension."""
    gradient, x_and_gate, dimension = op.args
    gradient = op.value(gradient)
    x, gate = _split_halves(op.value(x_and_gate), dimension)
    x_gradient, gate_gradient = _split_halves(op.output(), dimension)
    op.call("pm_glu", x_gradient, gradient, gate, shape_table(op, x_gradient, gradient, gate))
    table = shape_table(op, gate_gradient, gradient, x, gate)
    op.call("pm_glu_gate_backward", gate_gradient, gradient, x, gate, table)


def _split_halves(view: StridedView, dimension: int) -> tuple[StridedView, StridedView]:
    dimension = positive_dimension(dimension, len(view.shape))
    size = view.shape[dimension] // 2
    return slice_view(view, dimension, 0, size), slice_view(view, dimension, size, size)


@lowers(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
def _lower_clamp(op: Lowering) -> None:
    """Lower a clamp to constant limits; refuse integers. Sets `op.can_overwrite_operand`."""
    low = None if op.node.target is aten.clamp_max.default else op.args[1]
    high = None if op.node.target is aten.clamp_min.default else op.args[-1]
    if op.output().type is not DataType.REAL:
        op.refuse("expected real numbers, got integers")
    constants = (-math.inf if low is None else low, math.inf if high is None else high)
    lower_pointwise(op, "pm_clamp", op.args[0], *constants)


# -- truth values -------------------------------------------------------------------------------

_LESS, _EQUAL, _GREATER, _UNORDERED = 1, 2, 4, 8
"""Bits of relations between two numbers; NaN is unordered."""

_COMPARISON_RELATIONS: Final = {
    "lt": _LESS,
    "le": _LESS | _EQUAL,
    "eq": _EQUAL,
    "ne": _LESS | _GREATER | _UNORDERED,
    "ge": _EQUAL | _GREATER,
    "gt": _GREATER,
}
"""Relations for which each comparison is true."""


def _lower_comparison(op: Lowering, x: Any, y: Any, relations: int) -> None:
    """Lower a comparison of two tensors, or of a tensor with a number.

    An element is true if one of the relations in the bits of `relations`, such as `_LESS`, holds.
    Integers and truth values are compared as integers, unless the other operand is real.
    """
    operand_types = [
        op.value(argument).type for argument in (x, y) if isinstance(argument, fx.Node)
    ]
    is_real = DataType.REAL in operand_types or isinstance(y, float)
    suffix = (DataType.REAL if is_real else DataType.INT32).suffix
    if isinstance(y, fx.Node):
        lower_pointwise(op, f"pm_compare{suffix}", x, y, relations)
    else:
        lower_pointwise(op, f"pm_compare{suffix}_to", x, relations, y)
    op.can_overwrite_operand = False  # elements of operands are larger


@lowers(
    *(
        getattr(getattr(aten, name), overload)
        for name in _COMPARISON_RELATIONS
        for overload in ("Tensor", "Scalar")
    )
)
def _lower_relation(op: Lowering) -> None:
    _lower_comparison(op, op.args[0], op.args[1], _COMPARISON_RELATIONS[aten_name(op)])


@lowers(aten.isnan.default)
def _lower_isnan(op: Lowering) -> None:
    _lower_comparison(op, op.args[0], op.args[0], _UNORDERED)


_TRUTH_TABLES: Final = {
    aten.logical_and.default: 0b1000,
    aten.bitwise_and.Tensor: 0b1000,
    aten.logical_or.default: 0b1110,
    aten.bitwise_or.Tensor: 0b1110,
    aten.logical_xor.default: 0b0110,
    aten.bitwise_xor.Tensor: 0b0110,
    aten.logical_not.default: 0b0001,
    aten.bitwise_not.default: 0b0001,
}
"""Truth table of each operator: bit 2x + y is the result for the operands x and y."""


@lowers(*_TRUTH_TABLES)
def _lower_logical(op: Lowering) -> None:
    out = op.output()
    if out.type is not DataType.UINT8 or op.returns_bytes:
        op.refuse("expected truth values, got integers")
    lower_pointwise(op, "pm_logical", op.args[0], op.args[-1], _TRUTH_TABLES[op.node.target])


@lowers(aten.where.self)
def _lower_where(op: Lowering) -> None:
    _lower_selection(op, *op.args)


@lowers(aten.masked_fill.Tensor)
def _lower_masked_fill(op: Lowering) -> None:
    x, mask, value = op.args
    _lower_selection(op, mask, value, x)


def _lower_selection(op: Lowering, condition: Any, x: Any, y: Any) -> None:
    """Lower a selection of elements: of `x` where `condition` is true, otherwise of `y`."""
    lower_pointwise(op, f"pm_where{op.output().type.suffix}", condition, x, y)


@lowers(aten.masked_fill.Scalar)
def _lower_masked_fill_scalar(op: Lowering) -> None:
    x, mask, value = op.args
    if op.output().type is DataType.REAL:
        lower_pointwise(op, "pm_masked_fill", x, mask, value)
    else:
        _lower_selection(op, mask, value, x)


# -- copies -------------------------------------------------------------------------------------


@lowers(
    aten.clone.default,
    aten.contiguous.default,
    aten._to_copy.default,
    aten.lift_fresh_copy.default,
    aten._unsafe_view.default,
    aten.view_copy.default,
)
def _lower_clone(op: Lowering) -> None:
    """Lower a copy, perhaps to another type; another shape needs contiguous tensors."""
    out, x = op.output(), op.value(op.args[0])
    if out.shape != x.shape:
        if not (out.is_contiguous and x.is_contiguous):
            op.refuse("expected contiguous operands, because their shapes differ")
        x = replace(x, shape=out.shape, strides=out.strides)
    copy(op, out, x)
    op.can_overwrite_operand = True


@lowers(aten.copy.default)
def _lower_copy(op: Lowering) -> None:
    copy(op, op.output(), op.value(op.args[1]))
    op.can_overwrite_operand = True


# -- dropout -----------------------------------------------------------------------------------


def _drop_threshold(dropped_ratio: float) -> int:
    """Return the number below which an element's 24 random bits set the element to 0."""
    return round(dropped_ratio * 2**24)


@lowers(aten.native_dropout.default)
def _lower_native_dropout(op: Lowering) -> None:
    """Lower a dropout with its mask; without random numbers, a copy and a mask of ones."""
    x, ratio, train = op.args
    x, out, mask = op.value(x), op.output(0), op.output(1)
    op.can_overwrite_operand = True
    if train is False or ratio == 0:
        copy(op, out, x)
        fill(op, mask, 1)
        return
    factor = 0.0 if ratio == 1 else 1.0 / (1.0 - ratio)
    table = shape_table(op, out, mask, x)
    op.call("pm_dropout", out, mask, x, table, random_site(op.node), _drop_threshold(ratio), factor)


@lowers(aten.bernoulli.p)
def _lower_bernoulli(op: Lowering) -> None:
    out = op.output()
    threshold = _drop_threshold(1.0 - op.args[1])
    op.call("pm_bernoulli", out, out.elements, random_site(op.node), threshold)


# -- random numbers other than dropout ------------------------------------------------------------


_RANDOM_KERNELS: Final = {
    aten.randn.default: "pm_normal",
    aten.randn_like.default: "pm_normal",
    aten.rand.default: "pm_uniform",
    aten.rand_like.default: "pm_uniform",
    aten.normal_functional.default: "pm_normal",
}
"""Kernel of each operator that `_lower_random` lowers."""


@lowers(*_RANDOM_KERNELS)
def _lower_random(op: Lowering) -> None:
    """Lower an operator of random numbers: normal ones, or uniform ones from 0 to below 1."""
    has_parameters = op.node.target is aten.normal_functional.default
    _lower_random_numbers(
        op,
        _RANDOM_KERNELS[op.node.target],
        *(map(float, op.args[1:3]) if has_parameters else (0.0, 1.0)),
    )


@lowers(aten.uniform.default)
def _lower_uniform(op: Lowering) -> None:
    low, high = op.args[1:3]
    _lower_random_numbers(op, "pm_uniform", float(low), float(high) - float(low))


@lowers(
    aten.normal.float_float,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.normal.Tensor_Tensor,
)
def _lower_normal(op: Lowering) -> None:
    out = op.output()
    _lower_random_numbers(op, "pm_normal", 0.0, 1.0)
    deviation, mean = (convert_operand(op, value).broadcast(out.shape) for value in op.args[1::-1])
    op.call("pm_mul", out, out, deviation, shape_table(op, out, out, deviation))
    op.call("pm_add", out, out, mean, shape_table(op, out, out, mean), 1.0)


def _lower_random_numbers(op: Lowering, kernel: str, *constants: Any) -> None:
    """Add the call that fills the output with random numbers, in the order of its memory."""
    out = op.output()
    if not out.is_dense:
        op.refuse("expected a dense output")
    op.call(kernel, out, out.elements, random_site(op.node), *constants)
