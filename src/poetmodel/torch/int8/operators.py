"""Operators on int8 activations in the order batch, rows, columns, channels: their definition.

Where PyTorch computes a sum in an order of its own, the summands are whole numbers in float64,
whose sums of 32 bits are exact in any order. Real numbers are float32 (a scalar that meets a
tensor of float32 becomes one too), and each operation on them rounds: nothing is contracted.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import pad
from torch.utils.flop_counter import register_flop_formula

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

NAMESPACE: Final = "poetmodel"

_ENDING: Final = "float inverse, int zero, int low, int high"
"""The arguments of an operator that rounds for its result: 1 / scale, zero, and its limits."""
_CONSTANTS: Final = "Tensor weight, Tensor start, Tensor scale, Tensor bias"
"""Int8, int32, and two of float32: `start` is the sum of the products of a zero, negated."""
WINDOW: Final = "int[] stride, int[] padding, int[] dilation"
"""Two numbers, down and across; of padding four: above, below, on the left, on the right."""
_LOWEST, _HIGHEST = -128, 127


def operator(name: str) -> Any:
    """Return the operator ``q8_NAME`` as a captured graph names it."""
    return getattr(torch.ops.poetmodel, f"q8_{name}").default


def as_operator(schema: str) -> Callable[[Any], Any]:
    """Return a decorator that makes a function PyTorch's operator of its name."""

    def register(function: Any) -> Any:
        name = f"{NAMESPACE}::{function.__name__}"
        return torch.library.custom_op(name, function, mutates_args=(), schema=schema)

    return register


@as_operator("(Tensor x, float inverse, int zero) -> Tensor")
def q8_quantize(x: Tensor, inverse: float, zero: int) -> Tensor:
    """Return ``clamp(rint(x * inverse) + zero)`` of real channels, rows and columns."""
    return _rounded(_channels_last(x), inverse, zero, _LOWEST, _HIGHEST)


@as_operator("(Tensor x, float scale, int zero) -> Tensor")
def q8_dequantize(x: Tensor, scale: float, zero: int) -> Tensor:
    """Return ``(x - zero) * scale``, in the order channels, rows, columns."""
    real = (x.to(torch.int32) - zero).float() * scale
    return _channels_first(real).contiguous()


@as_operator(f"(Tensor x, {_CONSTANTS}, {_ENDING}) -> Tensor")
def q8_pointwise(
    x: Tensor, weight: Tensor, start: Tensor, scale: Tensor, bias: Tensor, *ending: Any
) -> Tensor:
    """Return the results of a linear layer at each place.

    ``acc = start + sum of x * weight``, then ``rint((acc * scale + bias) * inverse) + zero``.
    """
    _check_channels(x, weight.shape[1])
    total = x.double() @ weight.double().T
    return _requantized(total.to(torch.int32) + start, scale, bias, *ending)


@as_operator(f"(Tensor x, {_CONSTANTS}, {WINDOW}, int zero_x, {_ENDING}) -> Tensor")
def q8_depthwise(
    x: Tensor,
    weight: Tensor,
    start: Tensor,
    scale: Tensor,
    bias: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    zero_x: int,
    *ending: Any,
) -> Tensor:
    """Return a convolution of each channel with its own window; `weight` has rows, columns, it.

    ``acc = sum of (x - zero_x) * weight``; what is outside of x counts 0.
    """
    del start  # what a kernel begins with that subtracts no zero
    _check_channels(x, weight.shape[2])
    of_x = x.to(torch.int32) - zero_x
    sizes = tuple(weight.shape[:2])
    total = torch.zeros((), dtype=torch.int32)
    for (row, column), seen in windows(of_x, sizes, stride, padding, dilation):
        total = total + seen * weight[row, column].to(torch.int32)
    return _requantized(total, scale, bias, *ending)


@as_operator(f"(Tensor x, {_CONSTANTS}, {WINDOW}, int groups, int zero_x, {_ENDING}) -> Tensor")
def q8_conv2d(
    x: Tensor,
    weight: Tensor,
    start: Tensor,
    scale: Tensor,
    bias: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    zero_x: int,
    *ending: Any,
) -> Tensor:
    """Return a convolution; `weight` has results, rows, columns, channels of a group."""
    del start
    of_x = x.double() - zero_x
    count, height, width, channels = weight.shape
    _check_channels(x, groups * channels)
    of_w = weight.double().reshape(groups, count // groups, height, width, channels)
    total = torch.zeros((), dtype=torch.float64)
    for (row, column), seen in windows(of_x, (height, width), stride, padding, dilation):
        grouped = seen.unflatten(-1, (groups, channels))
        total = total + torch.einsum("nhwgc,grc->nhwgr", grouped, of_w[:, :, row, column])
    return _requantized(total.flatten(-2).to(torch.int32), scale, bias, *ending)


@as_operator(
    f"(Tensor a, Tensor b, float scale_a, int zero_a, float scale_b, int zero_b, {_ENDING})"
    " -> Tensor"
)
def q8_add(
    a: Tensor,
    b: Tensor,
    scale_a: float,
    zero_a: int,
    scale_b: float,
    zero_b: int,
    *ending: Any,
) -> Tensor:
    """Return ``rint(((a - zero_a) * scale_a + (b - zero_b) * scale_b) * inverse) + zero``."""
    first = (a.to(torch.int32) - zero_a).float() * scale_a
    second = (b.to(torch.int32) - zero_b).float() * scale_b
    return _rounded(first + second, *ending)


@as_operator(
    "(Tensor x, int[] window, int[] stride, int[] padding, float factor, int zero_x, "
    f"{_ENDING}) -> Tensor"
)
def q8_average(
    x: Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    factor: float,
    zero_x: int,
    *ending: Any,
) -> Tensor:
    """Return means of windows: ``rint((sum of (x - zero_x)) * factor * inverse) + zero``.

    `factor` is the scale of x through the elements of the window, those outside of x included. A
    window of one element, at each place, gives other scales and limits to x.
    """
    of_x = x.to(torch.int32) - zero_x
    if tuple(window) == (1, 1):
        return _rounded(of_x.float() * factor, *ending)
    total = torch.zeros((), dtype=torch.int32)
    for _, seen in windows(of_x, window, stride, padding, (1, 1)):
        total = total + seen
    return _rounded(total.float() * factor, *ending)


@as_operator(f"(Tensor x, int[] window, {WINDOW}) -> Tensor")
def q8_maximum(
    x: Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return the largest elements in windows."""
    total = torch.full((), _LOWEST, dtype=torch.int8)
    for _, seen in windows(x, window, stride, padding, dilation, outside=_LOWEST):
        total = torch.maximum(total, seen)
    return total


def windows(
    x: Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *,
    outside: int = 0,
) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Yield each place of a window, and the elements that it is on."""
    height, width = _places(x, window, stride, padding, dilation)
    above, below, left, right = padding
    x = pad(x, (0, 0, left, right, above, below), value=outside)
    for row in range(window[0]):
        rows = x[:, row * dilation[0] :: stride[0]][:, :height]
        for column in range(window[1]):
            yield (row, column), rows[:, :, column * dilation[1] :: stride[1]][:, :, :width]


def _places(
    x: Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, int]:
    """Return how many places a window has in each direction."""
    rows, columns = (
        (x.shape[1 + k] + sum(padding[2 * k : 2 * k + 2]) - dilation[k] * (window[k] - 1) - 1)
        // stride[k]
        + 1
        for k in range(2)
    )
    return int(rows), int(columns)


def _check_channels(x: Tensor, expected: int) -> None:
    got = x.shape[-1]
    torch._check_value(  # noqa: SLF001 - a ValueError, as PyTorch raises for shapes
        got == expected, lambda: f"quantized front: expected {expected} channels, got {got}"
    )


def _requantized(total: Tensor, scale: Tensor, bias: Tensor, *ending: Any) -> Tensor:
    return _rounded(total.float() * scale.float() + bias.float(), *ending)


def _rounded(real: Tensor, inverse: float, zero: int, low: int, high: int) -> Tensor:
    """Return bytes: a number of any size is clamped, and what is no number counts 0."""
    whole = torch.round(real * inverse).nan_to_num(0.0)
    return (whole + zero).clamp(low, high).to(torch.int8).contiguous()


def _channels_last(x: Tensor) -> Tensor:
    return x.permute(0, *range(2, x.ndim), 1) if x.ndim > 1 else x


def _channels_first(x: Tensor) -> Tensor:
    return x.permute(0, x.ndim - 1, *range(1, x.ndim - 1)) if x.ndim > 1 else x


# -- what PyTorch needs to know of them --------------------------------------------------------


def _placed(x: Tensor, window: Sequence[int], geometry: Sequence[Any], channels: int = 0) -> Tensor:
    """Return a tensor for the results of a window, of as many channels as x has or of others."""
    places = _places(x, window, *geometry)
    return x.new_empty((x.shape[0], *places, channels or x.shape[3]))


def _quantized(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(_channels_last(x).shape, dtype=torch.int8, device=x.device)


def _dequantized(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(_channels_first(x).shape, dtype=torch.float32, device=x.device)


def _averaged(x: Tensor, window: Sequence[int], *others: Any) -> Tensor:
    if tuple(window) == (1, 1):
        return x.new_empty(x.shape)
    return _placed(x, window, (*others[:2], (1, 1)))


q8_quantize.register_fake(_quantized)
q8_dequantize.register_fake(_dequantized)
q8_pointwise.register_fake(lambda x, w, *_: x.new_empty((*x.shape[:-1], w.shape[0])))
q8_depthwise.register_fake(lambda x, w, *others: _placed(x, w.shape[:2], others[3:6]))
q8_conv2d.register_fake(lambda x, w, *others: _placed(x, w.shape[1:3], others[3:6], w.shape[0]))
q8_add.register_fake(lambda a, *_: a.new_empty(a.shape))
q8_average.register_fake(_averaged)
q8_maximum.register_fake(lambda x, window, *others: _placed(x, window, others[:3]))


def _flops(of_weight: Callable[[Sequence[int]], int]) -> Callable[..., int]:
    """Return a formula: two FLOP for each product and its sum, so many for each result."""

    def flops(
        _: Any, weight: Sequence[int], *others: Any, out_shape: Any = None, **more: Any
    ) -> int:
        del others, more
        return int(2 * math.prod(out_shape) * of_weight(weight))

    return flops


register_flop_formula(operator("pointwise").overloadpacket)(_flops(lambda weight: weight[1]))
register_flop_formula(operator("depthwise").overloadpacket)(
    _flops(lambda weight: weight[0] * weight[1])
)
register_flop_formula(operator("conv2d").overloadpacket)(
    _flops(lambda weight: math.prod(weight[1:]))
)
