"""Elementwise operators: arithmetic, functions, activations, comparisons and logic."""

from __future__ import annotations

from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional

from poetmodel.torch.onnx.operators import (
    OnnxNode,
    floats,
    operands,
    operator,
    tensor,
    tensors,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def _register_fold(name: str, function: Callable[[Any, Any], torch.Tensor]) -> None:
    """Register an operator that applies a binary function to any number of inputs in turn."""
    operator(name)(lambda _, *values: reduce(function, tensors(*values)))


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
operator(*_FUNCTIONS)(lambda node, x: _FUNCTIONS[node.operator](tensor(x)))


def _divide(x: Any, y: Any) -> torch.Tensor:
    """Divide. Integers are rounded toward zero."""
    is_integer = not any(torch.is_tensor(v) and v.is_floating_point() for v in (x, y))
    result: torch.Tensor = torch.div(x, y, rounding_mode="trunc") if is_integer else x / y
    return result


def _on_tensors(function: Callable[..., torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
    """Return a function that converts both operands to tensors first."""
    return lambda x, y: function(*tensors(x, y))


_BINARY: Final[dict[str, Callable[[Any, Any], torch.Tensor]]] = {
    "Add": lambda x, y: x + y,
    "And": _on_tensors(torch.logical_and),
    "Div": _divide,
    "Equal": lambda x, y: x == y,
    "Greater": lambda x, y: x > y,
    "GreaterOrEqual": lambda x, y: x >= y,
    "Less": lambda x, y: x < y,
    "LessOrEqual": lambda x, y: x <= y,
    "Mul": lambda x, y: x * y,
    "Or": _on_tensors(torch.logical_or),
    "Pow": lambda x, y: x**y,
    "Sub": lambda x, y: x - y,
    "Xor": _on_tensors(torch.logical_xor),
}
operator(*_BINARY)(lambda node, x, y: _BINARY[node.operator](*operands(x, y)))
_register_fold("Max", torch.maximum)
_register_fold("Min", torch.minimum)
_register_fold("Sum", torch.add)


@operator("Mean")
def _mean(_: OnnxNode, *values: Any) -> torch.Tensor:
    return reduce(torch.add, tensors(*values)) / len(values)


@operator("Mod")
def _mod(node: OnnxNode, x: Any, y: Any) -> torch.Tensor:
    """Return the remainder: its sign is that of `x` if ``fmod`` is set, otherwise that of `y`."""
    x, y = tensors(x, y)
    return torch.fmod(x, y) if node.get("fmod", 0) else torch.remainder(x, y)


@operator("Where")
def _where(_: OnnxNode, condition: Any, x: Any, y: Any) -> torch.Tensor:
    """Return elements of `x` where `condition` is true, otherwise of `y`. Scalars stay numbers."""
    values = [tensor(v) if isinstance(v, tuple) else v for v in (x, y)]
    if not any(map(torch.is_tensor, values)):
        values = list(tensors(*values))
    condition = tensor(condition, next(filter(torch.is_tensor, values)))
    return torch.where(condition, *values)


@operator(
    "Cast",
    "CastLike",
    refuses="strings, complex and 8-bit floating-point numbers, unsigned integers above one byte",
)
def _cast(node: OnnxNode, x: Any, like: Any = None) -> Any:
    """Convert the type of elements.

    Conversions between floating-point types are omitted: all tensors compute in one type.
    """
    if node.operator == "Cast":
        dtype = _DTYPES.get(node.get("to"))
        if dtype is None:
            raise node.unsupported(f"its elements are of type {node.get('to')}; expected numbers")
    else:
        dtype = tensor(like).dtype
    if not torch.is_tensor(x):
        return _cast_numbers(x, dtype)
    if dtype.is_floating_point and x.is_floating_point():
        return x
    return x.to(torch.get_default_dtype() if dtype.is_floating_point else dtype)


def _cast_numbers(x: Any, dtype: torch.dtype) -> Any:
    """Convert numbers to Python's bool, float or int for a type of PyTorch."""
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
"""Types of PyTorch by their number in files. All floating-point types become float32."""


# -- activations -------------------------------------------------------------------------------


@operator("Clip")
def _clip(_: OnnxNode, x: Any, low: Any = None, high: Any = None) -> torch.Tensor:
    """Limit elements to a range. `hardtanh` is used if both limits are numbers."""
    x = tensor(x)
    low, high = (limit[0] if isinstance(limit, tuple) else limit for limit in (low, high))
    if low is None and high is None:
        return x
    if torch.is_tensor(low) or torch.is_tensor(high):
        low, high = tensors(low, high)
    elif x.is_floating_point() and low is not None and high is not None and low < high:
        return functional.hardtanh(x, low, high)  # its gradient is one operator
    result: torch.Tensor = torch.clamp(x, low, high)
    return result


def _register_activation(name: str, function: Callable[..., Any], **defaults: float) -> None:
    """Register an activation that passes its attributes to a function, with these defaults."""

    def run(node: OnnxNode, x: Any) -> torch.Tensor:
        result: torch.Tensor = function(
            tensor(x), *(node.get(key, value) for key, value in defaults.items())
        )
        return result

    operator(name)(run)


def _shrink(x: torch.Tensor, bias: float, threshold: float) -> torch.Tensor:
    """Move elements towards 0 by `bias`; elements between -`threshold` and `threshold` become 0."""
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
_register_activation("Shrink", _shrink, bias=0.0, lambd=0.5)
_register_activation("ThresholdedRelu", partial(functional.threshold, value=0.0), alpha=1.0)


@operator("Gelu")
def _gelu(node: OnnxNode, x: Any) -> torch.Tensor:
    result: torch.Tensor = functional.gelu(x, approximate=node.get("approximate", "none"))
    return result


@operator("PRelu", weights=(1,))
def _prelu(_: OnnxNode, x: Any, slope: Any) -> torch.Tensor:
    """Multiply negative elements by a slope, for example one slope per channel."""
    x, slope = tensors(x, slope)
    padded_shape = (1,) * (x.ndim - slope.ndim) + tuple(slope.shape)
    if slope.numel() == 1 or (x.ndim > 1 and padded_shape == (1, x.shape[1], *(1,) * (x.ndim - 2))):
        return functional.prelu(x, slope.reshape(-1))
    return torch.where(x < 0, slope * x, x)


@operator("Softmax", "LogSoftmax")
def _softmax(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    function = functional.softmax if node.operator == "Softmax" else functional.log_softmax
    return function(x, dim=node.get("axis", -1))


@operator("Dropout", numbers=(1, 2), first_output_only=True)
def _dropout(node: OnnxNode, x: torch.Tensor, ratio: Any = None, _: Any = None) -> Any:
    """Drop elements in training mode. The file's own training flag is ignored."""
    fraction = 0.5 if ratio is None else floats(node, ratio, "ratio")[0]
    return node.pad_outputs(functional.dropout(x, fraction, node.training))
