"""ONNX operators on elements (arithmetic, comparisons, casts, activations), softmax, dropout."""

from __future__ import annotations

from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional

from poetmodel.torch.onnx.operators import (
    OnnxNode,
    register_operator,
    to_number_list,
    to_operands,
    to_tensor,
    to_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def _register_fold(name: str, function: Callable[[Any, Any], torch.Tensor]) -> None:
    """Register an operator that applies a binary function to any number of inputs in turn."""
    register_operator(name)(lambda _, *values: reduce(function, to_tensors(*values)))


_FUNCTIONS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": functional.hardswish,
    "Identity": lambda x: x,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": functional.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": functional.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": functional.softplus,
    "Softsign": lambda x: x / (1 + x.abs()),
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
register_operator(*_FUNCTIONS)(lambda node, x: _FUNCTIONS[node.operator](to_tensor(x)))


def _divide(x: Any, y: Any) -> torch.Tensor:
    """Return the quotient, rounded toward zero if no operand is a floating-point tensor."""
    is_integer = not any(torch.is_tensor(v) and v.is_floating_point() for v in (x, y))
    result: torch.Tensor = torch.div(x, y, rounding_mode="trunc") if is_integer else x / y
    return result


def _make_tensor_function(
    function: Callable[..., torch.Tensor],
) -> Callable[[Any, Any], torch.Tensor]:
    """Return a function that converts two operands to tensors and calls `function` with them."""
    return lambda x, y: function(*to_tensors(x, y))


def _power(x: Any, y: Any) -> torch.Tensor:
    """Return the power, truncated to integers if the base is an integer tensor."""
    result: torch.Tensor = x**y
    is_integer = torch.is_tensor(x) and not x.is_floating_point()
    return result.to(x.dtype) if is_integer else result


_BINARY_FUNCTIONS: Final[dict[str, Callable[[Any, Any], torch.Tensor]]] = {
    "Add": lambda x, y: x + y,
    "And": _make_tensor_function(torch.logical_and),
    "Div": _divide,
    "Equal": lambda x, y: x == y,
    "Greater": lambda x, y: x > y,
    "GreaterOrEqual": lambda x, y: x >= y,
    "Less": lambda x, y: x < y,
    "LessOrEqual": lambda x, y: x <= y,
    "Mul": lambda x, y: x * y,
    "Or": _make_tensor_function(torch.logical_or),
    "Pow": _power,
    "Sub": lambda x, y: x - y,
    "Xor": _make_tensor_function(torch.logical_xor),
}
register_operator(*_BINARY_FUNCTIONS)(
    lambda node, x, y: _BINARY_FUNCTIONS[node.operator](*to_operands(x, y))
)
_register_fold("Max", torch.maximum)
_register_fold("Min", torch.minimum)
_register_fold("Sum", torch.add)


@register_operator("Mean")
def _compute_mean(_: OnnxNode, *values: Any) -> torch.Tensor:
    return reduce(torch.add, to_tensors(*values)) / len(values)


@register_operator("Mod")
def _compute_remainder(node: OnnxNode, x: Any, y: Any) -> torch.Tensor:
    """Return the remainder: its sign is that of `x` if ``fmod`` is set, otherwise that of `y`."""
    x, y = to_tensors(x, y)
    return torch.fmod(x, y) if node.get("fmod", 0) else torch.remainder(x, y)


@register_operator("Where")
def _select(_: OnnxNode, condition: Any, x: Any, y: Any) -> torch.Tensor:
    """Return elements of `x` where `condition` is true, otherwise of `y`."""
    values = [to_tensor(v) if isinstance(v, tuple) else v for v in (x, y)]
    if not any(map(torch.is_tensor, values)):
        values = list(to_tensors(*values))
    condition = to_tensor(condition, next(filter(torch.is_tensor, values)))
    return torch.where(condition, *values)


@register_operator(
    "Cast",
    "CastLike",
    unsupported_features=(
        "strings, complex and 8-bit floating-point numbers, unsigned integers above one byte"
    ),
)
def _cast(node: OnnxNode, x: Any, type_tensor: Any = None) -> Any:
    """Convert a tensor, or numbers, to the type of the attribute ``to`` or of `type_tensor`.

    A floating-point type stands for PyTorch's default one; it leaves floating-point tensors alone.
    """
    if node.operator == "Cast":
        code = node.get("to")
        dtype = _DTYPES.get(code)
        if dtype is None:
            from onnx import TensorProto

            name_of = {number: name for name, number in TensorProto.DataType.items()}
            raise node.unsupported_error(
                f"it casts to ONNX type {code} ({name_of.get(code, 'unknown')}); "
                f"expected one of {', '.join(name_of[number] for number in _DTYPES)}"
            )
    else:
        dtype = to_tensor(type_tensor).dtype
    if not torch.is_tensor(x):
        return _cast_numbers(x, dtype)
    if dtype.is_floating_point and x.is_floating_point():
        return x
    return x.to(torch.get_default_dtype() if dtype.is_floating_point else dtype)


def _cast_numbers(x: Any, dtype: torch.dtype) -> Any:
    """Convert a number, or each number of a nested tuple, to Python's bool, float or int."""
    if isinstance(x, tuple):
        return tuple(_cast_numbers(item, dtype) for item in x)
    convert: Callable[[Any], Any] = int
    if dtype.is_floating_point or dtype is torch.bool:
        convert = bool if dtype is torch.bool else float
    return convert(x)


_DTYPES: Final[dict[int, torch.dtype]] = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float32,
    11: torch.float32,
    16: torch.float32,
}
"""Types of PyTorch by the number of the type in ONNX files. All floating-point types stand for
PyTorch's default floating-point type."""


# -- activations -------------------------------------------------------------------------------


@register_operator("Clip")
def _clip(_: OnnxNode, x: Any, low: Any = None, high: Any = None) -> torch.Tensor:
    """Limit elements to a range, by `hardtanh` if possible; None is no limit."""
    x = to_tensor(x)
    low, high = (limit[0] if isinstance(limit, tuple) else limit for limit in (low, high))
    if low is None and high is None:
        return x
    if torch.is_tensor(low) or torch.is_tensor(high):
        low, high = to_tensors(low, high)
    elif x.is_floating_point() and low is not None and high is not None and low < high:
        return functional.hardtanh(x, low, high)  # its gradient is one operator
    result: torch.Tensor = torch.clamp(x, low, high)
    return result


def _register_activation(name: str, function: Callable[..., Any], **defaults: float) -> None:
    """Register an activation: `function` of the input and, by position, of `defaults`."""

    def compute(node: OnnxNode, x: Any) -> torch.Tensor:
        result: torch.Tensor = function(
            to_tensor(x), *(node.get(key, value) for key, value in defaults.items())
        )
        return result

    register_operator(name)(compute)


def _shrink_towards_zero(x: torch.Tensor, bias: float, threshold: float) -> torch.Tensor:
    """Move elements towards 0 by `bias`; those from -`threshold` to `threshold` become 0."""
    return torch.where(x < -threshold, x + bias, torch.where(x > threshold, x - bias, 0.0))


_register_activation("Celu", functional.celu, alpha=1.0)
_register_activation("Elu", functional.elu, alpha=1.0)
_register_activation(
    "HardSigmoid", lambda x, a, b: torch.clamp(a * x + b, 0.0, 1.0), alpha=0.2, beta=0.5
)
_register_activation("LeakyRelu", functional.leaky_relu, alpha=0.01)
_register_activation(
    "Selu", lambda x, a, gamma: gamma * functional.elu(x, a),
    alpha=1.6732631921768188, gamma=1.0507010221481323,
)  # fmt: skip
_register_activation("Shrink", _shrink_towards_zero, bias=0.0, lambd=0.5)
_register_activation("ThresholdedRelu", partial(functional.threshold, value=0.0), alpha=1.0)


@register_operator("Gelu")
def _compute_gelu(node: OnnxNode, x: Any) -> torch.Tensor:
    result: torch.Tensor = functional.gelu(x, approximate=node.get("approximate", "none"))
    return result


@register_operator("PRelu", weights=(1,))
def _compute_prelu(_: OnnxNode, x: Any, slope: Any) -> torch.Tensor:
    """Multiply negative elements by a slope, which is broadcast: for example one per channel."""
    x, slope = to_tensors(x, slope)
    padded_shape = (1,) * (x.ndim - slope.ndim) + tuple(slope.shape)
    if slope.numel() == 1 or (x.ndim > 1 and padded_shape == (1, x.shape[1], *(1,) * (x.ndim - 2))):
        return functional.prelu(x, slope.reshape(-1))
    return torch.where(x < 0, slope * x, x)


@register_operator("Softmax", "LogSoftmax")
def _compute_softmax(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    function = functional.softmax if node.operator == "Softmax" else functional.log_softmax
    return function(x, dim=node.get("axis", -1))


@register_operator("Dropout", numbers=(1, 2), first_output_only=True)
def _drop_elements(node: OnnxNode, x: torch.Tensor, ratio: Any = None, _: Any = None) -> Any:
    """Apply dropout in training mode of the module; the training flag in the file is ignored."""
    dropped_ratio = 0.5 if ratio is None else to_number_list(node, ratio, "ratio")[0]
    return node.pad_outputs(functional.dropout(x, dropped_ratio, node.training))
