"""Operators of one tensor, element by element: each is compared alone, and between two layers."""

import torch

aten = torch.ops.aten

NUMBERLESS = (
    "abs", "neg", "exp", "expm1", "sin", "cos", "erf", "tanh", "floor", "ceil", "round", "sgn",
    "sign", "sigmoid", "relu", "relu6", "silu", "mish", "gelu", "hardswish", "hardsigmoid",
)  # fmt: skip
UNARY = {name: (getattr(aten, name).default,) for name in NUMBERLESS} | {
    "gelu by tanh": (aten.gelu.default, {"approximate": "tanh"}),
    "hardtanh": (aten.hardtanh.default, -0.5, 3.0),
    "threshold": (aten.threshold.default, 0.5, -2.0),
    "leaky relu": (aten.leaky_relu.default, 0.2),
    "softplus": (aten.softplus.default, 1.5, 8.0),
    "hardshrink": (aten.hardshrink.default, 0.5),
    "softshrink": (aten.softshrink.default, 0.5),
    "elu": (aten.elu.default, 0.7),
    "selu": (aten.elu.default, 1.6732632423543772, 1.0507009873554805),
    "celu": (aten.celu.default, 0.7),
    "clamp": (aten.clamp.default, -1, 3.0),
    "clamp above": (aten.clamp.default, None, 0.5),
    "clamp_min": (aten.clamp_min.default, -0.5),
    "clamp_max": (aten.clamp_max.default, 0.5),
    "add a number": (aten.add.Tensor, 0.3),
    "add a multiple": (aten.add.Scalar, 0.3, 2.0),
    "subtract a number": (aten.sub.Tensor, 0.3),
    "subtract a multiple": (aten.sub.Scalar, 0.3, 2.0),
    "subtract from a number": (aten.rsub.Scalar, 0.3, 2.0),
    "multiply by a number": (aten.mul.Tensor, -1.7),
    "multiply by a scalar": (aten.mul.Scalar, -1.7),
    "divide by a number": (aten.div.Tensor, 7),
    "divide by a scalar": (aten.div.Scalar, 7),
    **{f"power {power}": (aten.pow.Tensor_Scalar, power) for power in (2, 3, 1.0)},
}
ABOVE_ZERO = {
    **{n: (getattr(aten, n).default,) for n in ("sqrt", "rsqrt", "reciprocal", "log", "log1p")},
    **{f"power {power}": (aten.pow.Tensor_Scalar, power) for power in (0.5, 1.3, -0.5, -1)},
}
"""Operator, and its arguments behind the tensor; keywords are last."""
