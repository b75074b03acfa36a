"""Operators on int8 activations (batch, rows, columns, channels): their definition.

If PyTorch computes a sum in its own order, the summands are integers in float64, whose 32-bit sums
are exact in any order. Real numbers are float32 (a scalar combined with a float32 tensor becomes
float32, too), and each operation on them rounds: there are no fused multiply-adds.
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
"""Namespace of these operators in PyTorch."""

_ROUNDING: Final = "float inverse, int zero, int low, int high"
"""Schema of the last arguments of operators that round their result: 1 / scale, zero point, and
limits of the bytes."""
_CONSTANTS: Final = "Tensor weight, Tensor initial_sum, Tensor scale, Tensor bias"
"""Schema of constants: weight in int8, initial sum in int32, scale and bias in float32. The
initial sum of an output is ``-zero_x * (sum of the weights of the output)``."""
WINDOW_SCHEMA: Final = "int[] stride, int[] padding, int[] dilation"
"""Schema of a window's arguments: numbers for rows and columns; four of padding: above, below,
left, right."""
DEPTHWISE_NDIM: Final = 3
"""Number of dimensions of a depthwise convolution's weight: rows, columns, channels."""
_MIN_BYTE, _MAX_BYTE = -128, 127


def find_operator(name: str) -> Any:
    """Return the operator ``q8_{name}``, in the overload that captured graphs contain."""
    return getattr(torch.ops.poetmodel, f"q8_{name}").default


def register_operator(schema: str) -> Callable[[Any], Any]:
    """Register the decorated function as a PyTorch operator of the same name with `schema`."""

    def register(function: Any) -> Any:
        name = f"{NAMESPACE}::{function.__name__}"
        return torch.library.custom_op(name, function, mutates_args=(), schema=schema)

    return register


@register_operator("(Tensor x, float inverse, int zero) -> Tensor")
def q8_quantize(x: Tensor, inverse: float, zero: int) -> Tensor:
    """Return ``clamp(rint(x * inverse) + zero)`` in int8 (batch, rows, columns, channels).

    `x` is real (batch, channels, rows, columns); rows and columns may be missing.
    """
    return _round_to_bytes(channels_last(x), inverse, zero, _MIN_BYTE, _MAX_BYTE)


@register_operator("(Tensor x, float scale, int zero) -> Tensor")
def q8_dequantize(x: Tensor, scale: float, zero: int) -> Tensor:
    """Return ``(x - zero) * scale`` in float32, in the order batch, channels, rows, columns."""
    real = (x.to(torch.int32) - zero).float() * scale
    return channels_first(real).contiguous()


@register_operator(f"(Tensor x, {_CONSTANTS}, {_ROUNDING}) -> Tensor")
def q8_pointwise(
    x: Tensor, weight: Tensor, initial_sum: Tensor, scale: Tensor, bias: Tensor, *rounding: Any
) -> Tensor:
    """Return the results of a linear layer at each pixel.

    ``clamp(rint((acc * scale + bias) * inverse) + zero)``, with ``acc = initial_sum + sum of x *
    weight``.
    """
    _check_channels(x, weight.shape[1])
    total = x.double() @ weight.double().T
    return _requantize(total.to(torch.int32) + initial_sum, scale, bias, *rounding)


@register_operator(f"(Tensor x, {_CONSTANTS}, {WINDOW_SCHEMA}, int zero_x, {_ROUNDING}) -> Tensor")
def q8_depthwise(
    x: Tensor,
    weight: Tensor,
    initial_sum: Tensor,
    scale: Tensor,
    bias: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    zero_x: int,
    *rounding: Any,
) -> Tensor:
    """Return a convolution of each channel with its own window (rows, columns, channels).

    As `q8_pointwise`, with ``acc = sum of (x - zero_x) * weight``, in which padding counts as 0;
    `initial_sum` is not used.
    """
    del initial_sum  # only kernels that do not subtract zero_x need it
    _check_channels(x, weight.shape[2])
    centred_x = x.to(torch.int32) - zero_x
    sizes = tuple(weight.shape[:2])
    total = torch.zeros((), dtype=torch.int32)
    for (row, column), elements in window_elements(centred_x, sizes, stride, padding, dilation):
        total = total + elements * weight[row, column].to(torch.int32)
    return _requantize(total, scale, bias, *rounding)


@register_operator(
    f"(Tensor x, {_CONSTANTS}, {WINDOW_SCHEMA}, int groups, int zero_x, {_ROUNDING}) -> Tensor"
)
def q8_conv2d(
    x: Tensor,
    weight: Tensor,
    initial_sum: Tensor,
    scale: Tensor,
    bias: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    zero_x: int,
    *rounding: Any,
) -> Tensor:
    """Return the convolution of `x` (batch, rows, columns, channels), in this layout, in int8.

    `weight` has outputs, rows, columns, and channels of a group. The formula is that of
    `q8_depthwise`, with the sum over the window and the channels of the group.
    """
    del initial_sum
    centred_x = x.double() - zero_x
    outputs, height, width, channels = weight.shape
    _check_channels(x, groups * channels)
    grouped_weight = weight.double().reshape(groups, outputs // groups, height, width, channels)
    total = torch.zeros((), dtype=torch.float64)
    for (row, column), elements in window_elements(
        centred_x, (height, width), stride, padding, dilation
    ):
        grouped_elements = elements.unflatten(-1, (groups, channels))
        total = total + torch.einsum(
            "nhwgc,grc->nhwgr", grouped_elements, grouped_weight[:, :, row, column]
        )
    return _requantize(total.flatten(-2).to(torch.int32), scale, bias, *rounding)


@register_operator(
    f"(Tensor a, Tensor b, float scale_a, int zero_a, float scale_b, int zero_b, {_ROUNDING})"
    " -> Tensor"
)
def q8_add(
    a: Tensor,
    b: Tensor,
    scale_a: float,
    zero_a: int,
    scale_b: float,
    zero_b: int,
    *rounding: Any,
) -> Tensor:
    """Return the sum of two tensors.

    ``clamp(rint(((a - zero_a) * scale_a + (b - zero_b) * scale_b) * inverse) + zero)``.
    """
    real_a = (a.to(torch.int32) - zero_a).float() * scale_a
    real_b = (b.to(torch.int32) - zero_b).float() * scale_b
    return _round_to_bytes(real_a + real_b, *rounding)


@register_operator(
    "(Tensor x, int[] window, int[] stride, int[] padding, float factor, int zero_x, "
    f"{_ROUNDING}) -> Tensor"
)
def q8_average(
    x: Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    factor: float,
    zero_x: int,
    *rounding: Any,
) -> Tensor:
    """Return means of windows: ``clamp(rint((sum of (x - zero_x)) * factor * inverse) + zero)``.

    `factor` is the scale of x over the elements of a window, padding included. A window of one
    element requantizes each pixel.
    """
    centred_x = x.to(torch.int32) - zero_x
    if tuple(window) == (1, 1):
        return _round_to_bytes(centred_x.float() * factor, *rounding)
    total = torch.zeros((), dtype=torch.int32)
    for _, elements in window_elements(centred_x, window, stride, padding, (1, 1)):
        total = total + elements
    return _round_to_bytes(total.float() * factor, *rounding)


@register_operator(f"(Tensor x, int[] window, {WINDOW_SCHEMA}) -> Tensor")
def q8_maximum(
    x: Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return the maximum of each window; padding counts as -128."""
    maximum = torch.full((), _MIN_BYTE, dtype=torch.int8)
    for _, elements in window_elements(
        x, window, stride, padding, dilation, padding_value=_MIN_BYTE
    ):
        maximum = torch.maximum(maximum, elements)
    return maximum


def window_elements(
    x: Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *,
    padding_value: int = 0,
) -> Iterator[tuple[tuple[int, int], Tensor]]:
    """Yield each (row, column) in a window, by rows, with the elements of all windows there."""
    height, width = _output_size(x, window, stride, padding, dilation)
    above, below, left, right = padding
    x = pad(x, (0, 0, left, right, above, below), value=padding_value)
    for row in range(window[0]):
        rows = x[:, row * dilation[0] :: stride[0]][:, :height]
        for column in range(window[1]):
            yield (row, column), rows[:, :, column * dilation[1] :: stride[1]][:, :, :width]


def _output_size(
    x: Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, int]:
    """Return (rows, columns): the numbers of window positions along height and along width.

    `x` has channels last; `padding` is (above, below, left, right).
    """
    rows, columns = (
        (x.shape[1 + i] + sum(padding[2 * i : 2 * i + 2]) - dilation[i] * (window[i] - 1) - 1)
        // stride[i]
        + 1
        for i in range(2)
    )
    return int(rows), int(columns)


def _check_channels(x: Tensor, expected_channels: int) -> None:
    """Raise `ValueError` unless the last dimension of `x` has `expected_channels`."""
    n_channels = x.shape[-1]
    torch._check_value(  # noqa: SLF001 - a ValueError, as PyTorch raises for shapes
        n_channels == expected_channels,
        lambda: f"quantized front: expected {expected_channels} channels, got {n_channels}",
    )


def _requantize(total: Tensor, scale: Tensor, bias: Tensor, *rounding: Any) -> Tensor:
    """Convert int32 sums to bytes: scale them, add the bias, round and clamp."""
    return _round_to_bytes(total.float() * scale.float() + bias.float(), *rounding)


def _round_to_bytes(real: Tensor, inverse: float, zero: int, low: int, high: int) -> Tensor:
    """Quantize real numbers to bytes from `low` to `high`. NaN counts as the number 0."""
    rounded = torch.round(real * inverse).nan_to_num(0.0)
    return (rounded + zero).clamp(low, high).to(torch.int8).contiguous()


def channels_last(x: Tensor) -> Tensor:
    """Return a view with the second dimension last."""
    return x.permute(0, *range(2, x.ndim), 1) if x.ndim > 1 else x


def channels_first(x: Tensor) -> Tensor:
    """Return a view with the last dimension second."""
    return x.permute(0, x.ndim - 1, *range(1, x.ndim - 1)) if x.ndim > 1 else x


# -- shapes for fake tensors -------------------------------------------------------------------


def _empty_output(
    x: Tensor, window: Sequence[int], window_arguments: Sequence[Any], channels: int = 0
) -> Tensor:
    """Return an empty output of a window operator, with `channels`, or those of `x` if 0."""
    output_size = _output_size(x, window, *window_arguments)
    return x.new_empty((x.shape[0], *output_size, channels or x.shape[3]))


def _empty_quantized(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(channels_last(x).shape, dtype=torch.int8, device=x.device)


def _empty_dequantized(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(channels_first(x).shape, dtype=torch.float32, device=x.device)


def _empty_average(x: Tensor, window: Sequence[int], *window_arguments: Any) -> Tensor:
    if tuple(window) == (1, 1):
        return x.new_empty(x.shape)
    return _empty_output(x, window, (*window_arguments[:2], (1, 1)))


q8_quantize.register_fake(_empty_quantized)
q8_dequantize.register_fake(_empty_dequantized)
q8_pointwise.register_fake(lambda x, w, *_: x.new_empty((*x.shape[:-1], w.shape[0])))
q8_depthwise.register_fake(lambda x, w, *arguments: _empty_output(x, w.shape[:2], arguments[3:6]))
q8_conv2d.register_fake(
    lambda x, w, *arguments: _empty_output(x, w.shape[1:3], arguments[3:6], w.shape[0])
)
q8_add.register_fake(lambda a, *_: a.new_empty(a.shape))
q8_average.register_fake(_empty_average)
q8_maximum.register_fake(lambda x, window, *arguments: _empty_output(x, window, arguments[:3]))


def _flop_formula(macs_per_output: Callable[[Sequence[int]], int]) -> Callable[..., int]:
    """Return a FLOP formula: 2 * output elements * `macs_per_output` of the weight's shape."""

    def flops(
        _: Any, weight: Sequence[int], *arguments: Any, out_shape: Any = None, **options: Any
    ) -> int:
        del arguments, options
        return int(2 * math.prod(out_shape) * macs_per_output(weight))

    return flops


register_flop_formula(find_operator("pointwise").overloadpacket)(
    _flop_formula(lambda weight: weight[1])
)
register_flop_formula(find_operator("depthwise").overloadpacket)(
    _flop_formula(lambda weight: weight[0] * weight[1])
)
register_flop_formula(find_operator("conv2d").overloadpacket)(
    _flop_formula(lambda weight: math.prod(weight[1:]))
)
