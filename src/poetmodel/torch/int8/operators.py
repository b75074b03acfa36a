"""Operators on int8 activations (batch, rows, columns, channels): their definition.

If PyTorch computes a sum in its own order, the summands are integers in float64, whose 32-bit sums
are exact in any order. Real numbers are float32 (a scalar combined with a float32 tensor becomes
float32, too), and each operation on them rounds: there are no fused multiply-adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

NAMESPACE: Final = "poetmodel"
"""Namespace of these operators in PyTorch."""

ROUNDING: Final = "float inverse, int zero, int low, int high"
"""Schema of the last arguments of operators that round their result: 1 / scale, zero point, and
limits of the bytes."""
WINDOW_SCHEMA: Final = "int[] stride, int[] padding, int[] dilation"
"""Schema of a window's arguments: numbers for rows and columns; four of padding: above, below,
left, right."""
DEPTHWISE_NDIM: Final = 3
"""Number of dimensions of a depthwise convolution's weight: rows, columns, channels."""
IMAGE_NDIM: Final = 4
"""Number of dimensions of a batch of images, and of the weight of its convolutions."""
MIN_BYTE: Final = -128
MAX_BYTE: Final = 127


def find_operator(name: str) -> Any:
    """Return the operator ``q8_{name}``, in the overload that captured graphs contain."""
    return getattr(torch.ops.poetmodel, f"q8_{name}").default


def register_operator(
    schema: str, fake: Callable[..., Tensor] | None = None
) -> Callable[[Any], Any]:
    """Register the decorated function as a PyTorch operator of the same name with `schema`.

    `fake` returns an empty result, for fake tensors; None lets the function itself do so.
    """

    def register(function: Any) -> Any:
        name = f"{NAMESPACE}::{function.__name__}"
        operator = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        if fake is not None:
            operator.register_fake(fake)
        return operator

    return register


def _empty_quantized(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(channels_last(x).shape, dtype=torch.int8, device=x.device)


@register_operator("(Tensor x, float inverse, int zero) -> Tensor", _empty_quantized)
def q8_quantize(x: Tensor, inverse: float, zero: int) -> Tensor:
    """Return ``clamp(rint(x * inverse) + zero)`` in int8 (batch, rows, columns, channels).

    `x` is real (batch, channels, rows, columns); rows and columns may be missing.
    """
    return round_to_bytes(channels_last(x), inverse, zero, MIN_BYTE, MAX_BYTE)


def _empty_dequantized(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(channels_first(x).shape, dtype=torch.float32, device=x.device)


@register_operator("(Tensor x, float scale, int zero) -> Tensor", _empty_dequantized)
def q8_dequantize(x: Tensor, scale: float, zero: int) -> Tensor:
    """Return ``(x - zero) * scale`` in float32, in the order batch, channels, rows, columns."""
    real = (x.to(torch.int32) - zero).float() * scale
    return channels_first(real).contiguous()


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


def round_to_bytes(real: Tensor, inverse: float, zero: int, low: int, high: int) -> Tensor:
    """Quantize real numbers to bytes from `low` to `high`. NaN counts as the number 0."""
    rounded = torch.round(real * inverse).nan_to_num(0.0)
    return (rounded + zero).clamp(low, high).to(torch.int8).contiguous()


def channels_last(x: Tensor) -> Tensor:
    """Return a view with the second dimension last."""
    return x.permute(0, *range(2, x.ndim), 1) if x.ndim > 1 else x


def channels_first(x: Tensor) -> Tensor:
    """Return a view with the last dimension second."""
    return x.permute(0, x.ndim - 1, *range(1, x.ndim - 1)) if x.ndim > 1 else x


def empty_windows(
    x: Tensor, window: Sequence[int], window_arguments: Sequence[Any], channels: int = 0
) -> Tensor:
    """Return an empty output of a window operator, with `channels`, or those of `x` if 0."""
    output_size = _output_size(x, window, *window_arguments)
    return x.new_empty((x.shape[0], *output_size, channels or x.shape[3]))


def to_pair(value: Any) -> tuple[int, int]:
    """Return the numbers for rows and columns of one number or a list."""
    sizes = list(value) if isinstance(value, list | tuple) else [value]
    return (int(sizes[0]), int(sizes[-1]))


def repeat_per_side(pads: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the padding above, below, left and right."""
    return (pads[0], pads[0], pads[1], pads[1])
