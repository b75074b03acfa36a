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
    lowers,
    positive_dimension,
    random_site,
    shape_table,
    slice_view,
)

aten: Final = torch.ops.aten


def lower_pointwise(
    op: Lowering, kernel: str, *operands: Any, constants: tuple[float, ...] = ()
) -> None:
    """Add the call of a kernel of reals for all elements of the output.

    Operands become reals, and are broadcast; an output of another type is refused. Sets
    `op.can_overwrite_operand`. `constants` are the arguments of the kernel after the shape table.
    """
    out = op.output()
    views = [convert_operand(op, argument).broadcast(out.shape) for argument in operands]
    op.call(kernel, out, *views, shape_table(op, out, *views), *constants)
    op.can_overwrite_operand = True


_ELEMENTWISE_KERNELS: Final[dict[Any, tuple[str, int, tuple[float, ...]]]] = {
    aten.abs.default: ("pm_abs", 1, ()),
    aten.sqrt.default: ("pm_sqrt", 1, ()),
    aten.rsqrt.default: ("pm_rsqrt", 1, ()),
    aten.reciprocal.default: ("pm_reciprocal", 1, ()),
    aten.exp.default: ("pm_exp", 1, ()),
    aten.expm1.default: ("pm_expm1", 1, ()),
    aten.log.default: ("pm_log", 1, ()),
    aten.log1p.default: ("pm_log1p", 1, ()),
    aten.sin.default: ("pm_sin", 1, ()),
    aten.cos.default: ("pm_cos", 1, ()),
    aten.erf.default: ("pm_erf", 1, ()),
    aten.tanh.default: ("pm_tanh", 1, ()),
    aten.floor.default: ("pm_floor", 1, ()),
    aten.ceil.default: ("pm_ceil", 1, ()),
    aten.round.default: ("pm_round", 1, ()),
    aten.sgn.default: ("pm_sign", 1, ()),
    aten.sign.default: ("pm_sign", 1, ()),
    aten.neg.default: ("pm_affine", 1, (-1.0, 0.0)),
    aten.sigmoid.default: ("pm_sigmoid", 1, ()),
    aten.relu.default: ("pm_threshold", 1, (0.0, 0.0)),
    aten.relu6.default: ("pm_clamp", 1, (0.0, 6.0)),
    aten.silu.default: ("pm_silu", 1, ()),
    aten.mish.default: ("pm_mish", 1, ()),
    aten.hardswish.default: ("pm_hardswish", 1, ()),
    aten.hardsigmoid.default: ("pm_hardsigmoid", 1, ()),
    aten.log_sigmoid_forward.default: ("pm_log_sigmoid", 1, ()),
    aten.mul.Tensor: ("pm_mul", 2, ()),
    aten.mul.Scalar: ("pm_mul", 2, ()),
    aten.div.Tensor: ("pm_div", 2, ()),
    aten.div.Scalar: ("pm_div", 2, ()),
    aten.maximum.default: ("pm_maximum", 2, ()),
    aten.minimum.default: ("pm_minimum", 2, ()),
    aten.clamp_min.Tensor: ("pm_maximum", 2, ()),
    aten.clamp_max.Tensor: ("pm_minimum", 2, ()),
    aten.xlogy.Tensor: ("pm_xlogy", 2, ()),
    aten.sigmoid_backward.default: ("pm_sigmoid_backward", 2, ()),
    aten.tanh_backward.default: ("pm_tanh_backward", 2, ()),
    aten.silu_backward.default: ("pm_silu_backward", 2, ()),
    aten.mish_backward.default: ("pm_mish_backward", 2, ()),
    aten.hardswish_backward.default: ("pm_hardswish_backward", 2, ()),
    aten.hardsigmoid_backward.default: ("pm_hardsigmoid_backward", 2, ()),
    aten.log_sigmoid_backward.default: ("pm_log_sigmoid_backward", 2, ()),
    aten._prelu_kernel.default: ("pm_prelu", 2, ()),
    aten.lerp.Scalar: ("pm_lerp", 3, ()),
    aten.lerp.Tensor: ("pm_lerp", 3, ()),
}
"""Kernel, number of operands, and constant arguments of each operator."""


@lowers(*_ELEMENTWISE_KERNELS)
def _lower_elementwise(op: Lowering) -> None:
    """Lower an operator by `_ELEMENTWISE_KERNELS`; set `op.can_overwrite_operand`."""
    kernel, operand_count, constants = _ELEMENTWISE_KERNELS[op.node.target]
    arguments = op.args[:operand_count]
    if kernel in ("pm_mul", "pm_div") and not isinstance(arguments[1], fx.Node):
        x, number = arguments
        if kernel == "pm_mul":
            return _lower_affine(op, x, number, 0)
        return lower_pointwise(op, "pm_div_by", x, constants=(float(number),))
    if kernel == "pm_mul" and op.output().type is DataType.INT32:
        return _lower_integer_pointwise(op, "pm_mul_int", *arguments)
    if kernel == "pm_affine" and op.output().type is DataType.INT32:
        return _lower_affine(op, arguments[0], -1, 0)
    return lower_pointwise(op, kernel, *arguments, constants=constants)


_KERNELS_WITH_CONSTANTS: Final[dict[Any, tuple[str, int]]] = {
    aten.threshold.default: ("pm_threshold", 1),
    aten.threshold_backward.default: ("pm_threshold_backward", 2),
    aten.hardtanh.default: ("pm_clamp", 1),
    aten.hardtanh_backward.default: ("pm_hardtanh_backward", 2),
    aten.leaky_relu.default: ("pm_leaky_relu", 1),
    aten.softplus.default: ("pm_softplus", 1),
    aten.softplus_backward.default: ("pm_softplus_backward", 2),
    aten.hardshrink.default: ("pm_hardshrink", 1),
    aten.softshrink.default: ("pm_softshrink", 1),
    aten.hardshrink_backward.default: ("pm_shrink_backward", 2),
    aten.softshrink_backward.default: ("pm_shrink_backward", 2),
    aten.addcmul.default: ("pm_addcmul", 3),
    aten.addcdiv.default: ("pm_addcdiv", 3),
}
"""Kernel and number of operands of each operator; its other arguments are constants."""


@lowers(*_KERNELS_WITH_CONSTANTS)
def _lower_with_constants(op: Lowering) -> None:
    kernel, operand_count = _KERNELS_WITH_CONSTANTS[op.node.target]
    constants = tuple(map(float, op.args[operand_count:]))
    lower_pointwise(op, kernel, *op.args[:operand_count], constants=constants)


# -- sums and products with numbers -----------------------------------------------------------


def _lower_affine(op: Lowering, x: Any, factor: float, shift: float) -> None:
    if op.output().type is DataType.REAL:
        return lower_pointwise(op, "pm_affine", x, constants=(float(factor), float(shift)))
    return _lower_integer_pointwise(op, "pm_affine_int", x, constants=(int(factor), int(shift)))


def _lower_integer_pointwise(
    op: Lowering, kernel: str, *operands: Any, constants: tuple[int, ...] = ()
) -> None:
    """Add the call of a kernel of integers for all elements; set `op.can_overwrite_operand`.

    Operands become integers, and are broadcast; an output of another type is refused. `constants`
    are the arguments of the kernel after the shape table.
    """
    out = op.output()
    views = [
        convert_operand(op, argument, DataType.INT32).broadcast(out.shape) for argument in operands
    ]
    op.call(kernel, out, *views, shape_table(op, out, *views), *constants)
    op.can_overwrite_operand = True


@lowers(aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar)
def _lower_add(op: Lowering) -> None:
    """Lower ``x + alpha * y`` or ``x - alpha * y`` of a tensor `x`, and a tensor or number `y`."""
    x, y, alpha = op.args
    if op.node.target in (aten.sub.Tensor, aten.sub.Scalar):
        alpha = -alpha
    if not isinstance(y, fx.Node):
        _lower_affine(op, x, 1, alpha * y)
    elif op.output().type is DataType.INT32:
        _lower_integer_pointwise(op, "pm_add_int", x, y, constants=(int(alpha),))
    else:
        lower_pointwise(op, "pm_add", x, y, constants=(float(alpha),))


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
        lower_pointwise(op, kernel, x, constants=constants)
    else:
        lower_pointwise(op, "pm_pow", x, constants=(float(exponent),))


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
    lower_pointwise(
        op, "pm_elu", x, constants=(float(alpha * scale), float(scale), float(input_scale))
    )


@lowers(aten.elu_backward.default)
def _lower_elu_backward(op: Lowering) -> None:
    gradient, alpha, scale, input_scale, is_result, x = op.args
    constants = (int(is_result), float(alpha * scale), float(scale), float(input_scale))
    lower_pointwise(op, "pm_elu_backward", gradient, x, constants=constants)


@lowers(aten.leaky_relu_backward.default)
def _lower_leaky_relu_backward(op: Lowering) -> None:
    gradient, x, slope, _ = op.args
    lower_pointwise(op, "pm_leaky_relu_backward", gradient, x, constants=(float(slope),))


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
    constants = (
        -math.inf if low is None else float(low),
        math.inf if high is None else float(high),
    )
    if op.output().type is not DataType.REAL:
        op.refuse("expected real numbers, got integers")
    lower_pointwise(op, "pm_clamp", op.args[0], constants=constants)


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
    out = op.output()
    operand_types = [
        op.value(argument).type for argument in (x, y) if isinstance(argument, fx.Node)
    ]
    is_real = DataType.REAL in operand_types or isinstance(y, float)
    kind = DataType.REAL if is_real else DataType.INT32
    kernel = f"pm_compare{kind.suffix}"
    views = [convert_operand(op, x, kind).broadcast(out.shape)]
    constants: tuple[float, ...] = ()
    if isinstance(y, fx.Node):
        views.append(convert_operand(op, y, kind).broadcast(out.shape))
    else:
        kernel += "_to"
        constants = (float(y) if is_real else int(y),)
    op.call(kernel, out, *views, shape_table(op, out, *views), relations, *constants)


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
    x, y = op.args[0], op.args[-1]
    views = [
        convert_operand(op, argument, DataType.UINT8).broadcast(out.shape) for argument in (x, y)
    ]
    op.call("pm_logical", out, *views, shape_table(op, out, *views), _TRUTH_TABLES[op.node.target])
    op.can_overwrite_operand = True


@lowers(aten.where.self)
def _lower_where(op: Lowering) -> None:
    _lower_selection(op, *op.args)


@lowers(aten.masked_fill.Tensor)
def _lower_masked_fill(op: Lowering) -> None:
    x, mask, value = op.args
    _lower_selection(op, mask, value, x)


def _lower_selection(op: Lowering, condition: Any, x: Any, y: Any) -> None:
    """Lower a selection of elements: of `x` where `condition` is true, otherwise of `y`."""
    out = op.output()
    views = [
        convert_operand(op, condition, DataType.UINT8),
        *(convert_operand(op, argument, out.type) for argument in (x, y)),
    ]
    views = [view.broadcast(out.shape) for view in views]
    op.call(f"pm_where{out.type.suffix}", out, *views, shape_table(op, out, *views))
    op.can_overwrite_operand = True


@lowers(aten.masked_fill.Scalar)
def _lower_masked_fill_scalar(op: Lowering) -> None:
    x, mask, value = op.args
    if op.output().type is not DataType.REAL:
        return _lower_selection(op, mask, value, x)
    return _lower_with_mask(op, "pm_masked_fill", x, mask, value)


@lowers(aten.native_dropout_backward.default)
def _lower_native_dropout_backward(op: Lowering) -> None:
    _lower_with_mask(op, "pm_mask_scale", *op.args)


def _lower_with_mask(op: Lowering, kernel: str, x: Any, mask: Any, number: float) -> None:
    """Lower an operator of a tensor, a mask and a number, the kernel's last argument."""
    out = op.output()
    views = [convert_operand(op, x), convert_operand(op, mask, DataType.UINT8)]
    views = [view.broadcast(out.shape) for view in views]
    op.call(kernel, out, *views, shape_table(op, out, *views), float(number))
    op.can_overwrite_operand = True


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
