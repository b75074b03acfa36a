"""Operators of one element at a time: arithmetic, functions, activations, truth values."""

from __future__ import annotations

from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional

from poetmodel.torch.onnx.operators import (
    OnnxNode,
    operands,
    operator,
    real,
    tensor,
    tensors,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def _folded(name: str, function: Callable[[Any, Any], torch.Tensor]) -> None:
    """Register an operator of any number of inputs."""
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


def _divided(x: Any, y: Any) -> torch.Tensor:
    """Divide; whole numbers are cut toward zero."""
    whole = not any(torch.is_tensor(v) and v.is_floating_point() for v in (x, y))
    result: torch.Tensor = torch.div(x, y, rounding_mode="trunc") if whole else x / y
    return result


def _truth(function: Callable[..., torch.Tensor]) -> Callable[[Any, Any], torch.Tensor]:
    return lambda x, y: function(*tensors(x, y))


_BINARY: Final[dict[str, Callable[[Any, Any], torch.Tensor]]] = {
    "Add": lambda x, y: x + y,
    "And": _truth(torch.logical_and),
    "Div": _divided,
    "Equal": lambda x, y: x == y,
    "Greater": lambda x, y: x > y,
    "GreaterOrEqual": lambda x, y: x >= y,
    "Less": lambda x, y: x < y,
    "LessOrEqual": lambda x, y: x <= y,
    "Mul": lambda x, y: x * y,
    "Or": _truth(torch.logical_or),
    "Pow": lambda x, y: x**y,
    "Sub": lambda x, y: x - y,
    "Xor": _truth(torch.logical_xor),
}
operator(*_BINARY)(lambda node, x, y: _BINARY[node.operator](*operands(x, y)))
_folded("Max", torch.maximum)
_folded("Min", torch.minimum)
_folded("Sum", torch.add)


@operator("Mean")
def _mean(_: OnnxNode, *values: Any) -> torch.Tensor:
    return reduce(torch.add, tensors(*values)) / len(values)


@operator("Mod")
def _mod(node: OnnxNode, x: Any, y: Any) -> torch.Tensor:
    x, y = tensors(x, y)
    return torch.fmod(x, y) if node.get("fmod", 0) else torch.remainder(x, y)


@operator("Where")
def _where(_: OnnxNode, condition: Any, x: Any, y: Any) -> torch.Tensor:
    values = [tensor(v) if isinstance(v, tuple) else v for v in (x, y)]
    if not any(map(torch.is_tensor, values)):
        values = list(tensors(*values))
    condition = tensor(condition, next(filter(torch.is_tensor, values)))
    return torch.where(condition, *values)


@operator(
    "Cast",
    "CastLike",
    refuses="texts, complex and 8-bit floating numbers, unsigned integers of more than a byte",
)
def _cast(node: OnnxNode, x: Any, like: Any = None) -> Any:
    """Change the type; floating numbers keep theirs, since all computing is in one."""
    if node.operator == "Cast":
        kind = _KINDS.get(node.get("to"))
        if kind is None:
            raise node.refused(f"it makes elements of type {node.get('to')}; expected numbers")
    else:
        kind = tensor(like).dtype
    if not torch.is_tensor(x):
        return _cast_numbers(x, kind)
    if kind.is_floating_point and x.is_floating_point():
        return x
    return x.to(torch.get_default_dtype() if kind.is_floating_point else kind)


def _cast_numbers(x: Any, kind: torch.dtype) -> Any:
    if isinstance(x, tuple):
        return tuple(_cast_numbers(part, kind) for part in x)
    convert: Callable[[Any], Any] = int
    if kind.is_floating_point or kind is torch.bool:
        convert = bool if kind is torch.bool else float
    return convert(x)


_KINDS: Final[dict[int, torch.dtype]] = {
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
"""Types by their number in files; every floating one is computed in float32."""


# -- activations -------------------------------------------------------------------------------


@operator("Clip")
def _clip(_: OnnxNode, x: Any, low: Any = None, high: Any = None) -> torch.Tensor:
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


def _with_numbers(name: str, function: Callable[..., Any], **defaults: float) -> None:
    """Register an activation whose attributes are the further arguments of a function."""

    def run(node: OnnxNode, x: Any) -> torch.Tensor:
        result: torch.Tensor = function(
            tensor(x), *(node.get(key, value) for key, value in defaults.items())
        )
        return result

    operator(name)(run)


def _shrink(x: torch.Tensor, bias: float, least: float) -> torch.Tensor:
    return torch.where(x < -least, x + bias, torch.where(x > least, x - bias, 0.0))


_with_numbers("Celu", functional.celu, alpha=1.0)
_with_numbers("Elu", functional.elu, alpha=1.0)
_with_numbers("HardSigmoid", lambda x, a, b: torch.clamp(a * x + b, 0.0, 1.0), alpha=0.2, beta=0.5)
_with_numbers("LeakyRelu", functional.leaky_relu, alpha=0.01)
_with_numbers(
    "Selu", lambda x, a, gamma: gamma * functional.elu(x, a),
    alpha=1.6732631921768188, gamma=1.0507010221481323,
)  # fmt: skip
_with_numbers("Shrink", _shrink, bias=0.0, lambd=0.5)
_with_numbers("ThresholdedRelu", partial(functional.threshold, value=0.0), alpha=1.0)


@operator("Gelu")
def _gelu(node: OnnxNode, x: Any) -> torch.Tensor:
    result: torch.Tensor = functional.gelu(x, approximate=node.get("approximate", "none"))
    return result


@operator("PRelu", weights=(1,))
def _prelu(_: OnnxNode, x: Any, slope: Any) -> torch.Tensor:
    x, slope = tensors(x, slope)
    over = (1,) * (x.ndim - slope.ndim) + tuple(slope.shape)
    if slope.numel() == 1 or (x.ndim > 1 and over == (1, x.shape[1], *(1,) * (x.ndim - 2))):
        return functional.prelu(x, slope.reshape(-1))
    return torch.where(x < 0, slope * x, x)


@operator("Softmax", "LogSoftmax")
def _softmax(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    function = functional.softmax if node.operator == "Softmax" else functional.log_softmax
    return function(x, dim=node.get("axis", -1))


@operator("Dropout", numbers=(1, 2), first_output_only=True)
def _dropout(node: OnnxNode, x: torch.Tensor, ratio: Any = None, _: Any = None) -> Any:
    """Drop elements while the module trains; what the file says of its mode is not for training."""
    share = 0.5 if ratio is None else real(node, ratio, "ratio")[0]
    return node.only_first(functional.dropout(x, share, node.training))
