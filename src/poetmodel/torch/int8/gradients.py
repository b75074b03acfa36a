"""Operators of the backward pass of layers in int8: their definition.

Gradients are float32 in the order batch, rows, columns, channels. They are those of real values:
of ``(byte - zero) * scale`` for activations, of ``byte * scale`` for weights. Rounding passes a
gradient on; a byte at a limit of its layer has none. The order of sums of real numbers is that of
PyTorch: sums of whole numbers below 2^24 are exact, and have the same bits in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import pad

from poetmodel.torch.int8.operators import WINDOW, as_operator, windows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_DEPTHWISE: Final = 3
"""Dimensions of the weight of a depthwise convolution: rows, columns, channels."""
_CONVOLVED: Final = f"{WINDOW}, int groups"
"""Arguments of the gradients of a convolution."""


@as_operator("(Tensor gradient, Tensor y, int low, int high) -> Tensor")
def q8_mask(gradient: Tensor, y: Tensor, low: int, high: int) -> Tensor:
    """Return the gradient where the result `y` is between its limits, and 0 elsewhere."""
    return torch.where((y > low) & (y < high), gradient, 0.0)


@as_operator("(Tensor weight, int zero_x) -> Tensor")
def q8_start(weight: Tensor, zero_x: int) -> Tensor:
    """Return ``-zero_x * (sum of the weights of a result)``, in int32."""
    of_result = weight.flatten(0, 1).T if weight.ndim == _DEPTHWISE else weight.flatten(1)
    return of_result.sum(1, dtype=torch.int32) * -zero_x


@as_operator("(Tensor gradient, Tensor weight, Tensor weight_scale) -> Tensor")
def q8_pointwise_input_gradient(gradient: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Return the gradient of the input of a linear layer: ``(gradient * scale) @ weight``."""
    return (gradient * weight_scale) @ weight.float()


@as_operator("(Tensor gradient, Tensor x, float scale_x, int zero_x) -> Tensor")
def q8_pointwise_weight_gradient(
    gradient: Tensor, x: Tensor, scale_x: float, zero_x: int
) -> Tensor:
    """Return the gradient of the weight of a linear layer, by results and channels."""
    of_x = (x.to(torch.int32) - zero_x).float()
    return (gradient.flatten(0, -2).T @ of_x.flatten(0, -2)) * scale_x


@as_operator(
    f"(Tensor gradient, Tensor weight, Tensor weight_scale, int[] image, {_CONVOLVED}) -> Tensor"
)
def q8_convolution_input_gradient(
    gradient: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    image: Sequence[int],
    *geometry: Any,
) -> Tensor:
    """Return the gradient of the input of a convolution, `image` rows and columns.

    The transposed convolution of ``gradient * scale`` with the weight. `weight` is in the order of
    `q8_conv2d`, or of `q8_depthwise` if it has three dimensions.
    """
    _, padding, _, groups = geometry
    filters = _filters(weight).float()
    channels = filters.shape[1] * groups
    above, below, left, right = padding
    padded = (image[0] + above + below, image[1] + left + right)
    like = gradient.new_empty((1,)).expand(gradient.shape[0], channels, *padded)
    whole = _convolution_gradient(gradient * weight_scale, like, filters, geometry, 0)
    inner = whole[:, :, above : above + image[0], left : left + image[1]]
    return _channels_last(inner)


@as_operator(
    f"(Tensor gradient, Tensor x, float scale_x, int zero_x, int[] window, {_CONVOLVED}) -> Tensor"
)
def q8_convolution_weight_gradient(
    gradient: Tensor, x: Tensor, scale_x: float, zero_x: int, window: Sequence[int], *geometry: Any
) -> Tensor:
    """Return the gradient of the weight of a convolution, in the order of `q8_conv2d`.

    The correlation of ``x - zero_x`` with the gradient, times the scale of x.
    """
    filters = _filter_gradient(gradient, x, zero_x, window, geometry) * scale_x
    return filters.permute(0, 2, 3, 1).contiguous()


@as_operator(
    f"(Tensor gradient, Tensor x, float scale_x, int zero_x, int[] window, {WINDOW}) -> Tensor"
)
def q8_depthwise_weight_gradient(
    gradient: Tensor, x: Tensor, scale_x: float, zero_x: int, window: Sequence[int], *geometry: Any
) -> Tensor:
    """Return the same of a depthwise convolution, in the order of `q8_depthwise`."""
    geometry = (*geometry, x.shape[3])
    filters = _filter_gradient(gradient, x, zero_x, window, geometry) * scale_x
    return filters[:, 0].permute(1, 2, 0).contiguous()


@as_operator("(Tensor gradient, int[] image, int[] window, int[] stride, int[] padding) -> Tensor")
def q8_average_gradient(
    gradient: Tensor,
    image: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """Return the gradient of the input of means of windows: each element gets its share."""
    shared = gradient / (window[0] * window[1])
    return _scattered(shared, None, image, window, stride, padding, (1, 1))


@as_operator(f"(Tensor gradient, Tensor x, Tensor y, int[] window, {WINDOW}) -> Tensor")
def q8_maximum_gradient(
    gradient: Tensor,
    x: Tensor,
    y: Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return the gradient of the input of maxima `y`: the first largest element gets it."""
    free = torch.ones(y.shape, dtype=torch.bool)
    chosen = []
    outside = -129  # no byte, so that nothing outside of x is chosen
    of_x = x.to(torch.int16)
    for _, seen in windows(of_x, window, stride, padding, dilation, outside=outside):
        first = free & (seen == y)
        free = free & ~first
        chosen.append(first)
    return _scattered(gradient, chosen, x.shape[1:3], window, stride, padding, dilation)


def _scattered(
    gradient: Tensor,
    chosen: Sequence[Tensor] | None,
    image: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return the sums, by element, of the gradients of the windows that have chosen it."""
    batch, height, width, channels = gradient.shape
    above, below, left, right = padding
    rows, columns = image[0] + above + below, image[1] + left + right
    total = gradient.new_zeros((batch, rows, columns, channels))
    for number in range(window[0] * window[1]):
        row, column = divmod(number, window[1])
        part = gradient if chosen is None else torch.where(chosen[number], gradient, 0.0)
        begin, first = row * dilation[0], column * dilation[1]
        total[
            :,
            begin : begin + (height - 1) * stride[0] + 1 : stride[0],
            first : first + (width - 1) * stride[1] + 1 : stride[1],
        ] += part
    return total[:, above : above + image[0], left : left + image[1]].contiguous()


# -- updates ---------------------------------------------------------------------------------------

STEPS: Final = 256
"""Parts of a step of a byte that 16 bits of a weight count."""
MAX_WEIGHT: Final = 127
"""Largest weight; the least one is its negative."""


def update_16_bits(weight: Tensor, residual: Tensor, change: Tensor) -> None:
    """Subtract from weights of 16 bits, in place: each is ``256 * weight + residual``.

    `change` is in steps of a byte: gradient times learning rate through the scale of the weight.
    ``w16 = clamp(rint(w16 - 256 * change))``, ``weight = (w16 + 128) >> 8``. A change that is no
    number counts 0.
    """
    whole = weight.to(torch.int32) * STEPS + residual
    most = MAX_WEIGHT * STEPS
    moved = torch.round(whole.float() - change.nan_to_num(0.0) * STEPS).clamp(-most, most)
    for old, new in zip((weight, residual), split_16_bits(moved), strict=True):
        old.copy_(new)


def split_16_bits(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights of 16 bits as two int8: 256 times the first, plus the second."""
    whole = whole.to(torch.int32)
    high = (whole + STEPS // 2) >> 8
    return high.to(torch.int8), (whole - high * STEPS).to(torch.int8)


def update_stochastic(weight: Tensor, draws: Tensor, change: Tensor) -> None:
    """Subtract from weights of 8 bits, in place: ``clamp(floor((weight - change) + draws))``.

    `draws` are uniform from 0 to below 1, multiples of 2^-24. A change that is no number counts 0.
    """
    moved = torch.floor(weight.float() - change.nan_to_num(0.0) + draws)
    weight.copy_(moved.clamp(-MAX_WEIGHT, MAX_WEIGHT))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingDraws:
    """Random numbers of one update of one weight, for stochastic rounding.

    The generator is Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
    SC 2011), as for the dropout of exported code, with counters of its own: element e, in the order
    of memory, has word e % 4 of the block with the counter ``(e / 4, site, 1, 0)`` and the key
    ``(update, seed)``. Dropout has 0 for the third word of its counters.
    """

    update: int
    """Updates of the optimizer before this one."""
    site: int
    """Number of the layer among the trained int8 layers of the optimizer, in the model's order."""
    seed: int = 0

    def uniform(self, weight: Tensor, *, first: int = 0) -> Tensor:
        """Return a number for each weight: the upper 24 bits of its word, times 2^-24.

        `first` is the number of the first one, where these are a part of the weights.
        """
        begin, end = first // 4, -(-(first + weight.numel()) // 4)
        words = _philox(begin, end, (self.site, _ROUNDING, 0), self.update, self.seed).flatten()
        chosen = words[first - 4 * begin :][: weight.numel()]
        return ((chosen >> 8).float() * 2.0**-24).view(weight.shape).to(weight.device)


_ROUNDING: Final = 1
"""Third word of the counters of stochastic rounding."""
_WORD: Final = 0xFFFFFFFF


def _philox(begin: int, end: int, counter: Sequence[int], *key: int) -> Tensor:
    """Return four words of 32 bits for each block; `counter` has the words after its number."""
    words = torch.zeros((end - begin, 4), dtype=torch.int64)
    words[:, 0] = torch.arange(begin, end)
    words[:, 1:] = torch.tensor(counter)
    keys = [number & _WORD for number in key]
    for _ in range(10):
        # Products wrap at 64 bits, whose upper half is that of unsigned numbers once masked.
        first, second = words[:, 0] * 0xD2511F53, words[:, 2] * 0xCD9E8D57
        words = torch.stack(
            (
                (second >> 32) & _WORD ^ words[:, 1] ^ keys[0],
                second & _WORD,
                (first >> 32) & _WORD ^ words[:, 3] ^ keys[1],
                first & _WORD,
            ),
            dim=1,
        )
        keys = [(keys[0] + 0x9E3779B9) & _WORD, (keys[1] + 0xBB67AE85) & _WORD]
    return words


def _convolution_gradient(
    gradient: Tensor, x: Tensor, filters: Tensor, geometry: Sequence[Any], wanted: int
) -> Tensor:
    """Return the gradient of the padded input `x` (0) or of the filters (1).

    Of the `wanted` one only the shape is read.
    """
    stride, _, dilation, groups = geometry
    result: Tensor = torch.ops.aten.convolution_backward(
        _channels_first(gradient), x, filters, bias_sizes=None, stride=stride, padding=[0, 0],
        dilation=dilation, transposed=False, output_padding=[0, 0], groups=groups,
        output_mask=[wanted == 0, wanted == 1, False],
    )[wanted]  # fmt: skip
    return result


def _filter_gradient(
    gradient: Tensor, x: Tensor, zero_x: int, window: Sequence[int], geometry: Sequence[Any]
) -> Tensor:
    """Return the correlation of ``x - zero_x`` with the gradient, as PyTorch orders weights."""
    _, padding, _, groups = geometry
    above, below, left, right = padding
    of_x = pad((x.to(torch.int32) - zero_x).float(), (0, 0, left, right, above, below))
    shape = (gradient.shape[3], x.shape[3] // groups, *window)
    like = gradient.new_empty((1,)).expand(shape)
    return _convolution_gradient(gradient, _channels_first(of_x), like, geometry, 1)


def _filters(weight: Tensor) -> Tensor:
    """Return the weight of a convolution as PyTorch orders it."""
    if weight.ndim == _DEPTHWISE:
        return weight.permute(2, 0, 1)[:, None]
    return weight.permute(0, 3, 1, 2)


def _channels_first(x: Tensor) -> Tensor:
    return x.permute(0, 3, 1, 2).contiguous()


def _channels_last(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous()


# -- what PyTorch needs to know of them --------------------------------------------------------


def _real(x: Tensor, shape: Sequence[Any]) -> Tensor:
    return torch.empty(tuple(shape), dtype=torch.float32, device=x.device)


q8_mask.register_fake(lambda gradient, *_: torch.empty_like(gradient))
q8_start.register_fake(
    lambda w, *_: w.new_empty((w.shape[2 if w.ndim == _DEPTHWISE else 0],), dtype=torch.int32)
)
q8_pointwise_input_gradient.register_fake(lambda g, w, *_: _real(g, (*g.shape[:-1], w.shape[1])))
q8_pointwise_weight_gradient.register_fake(lambda g, x, *_: _real(g, (g.shape[-1], x.shape[-1])))
q8_convolution_input_gradient.register_fake(
    lambda g, w, _, image, *geometry: _real(
        g, (g.shape[0], *image, w.shape[2] if w.ndim == _DEPTHWISE else w.shape[3] * geometry[3])
    )
)
q8_convolution_weight_gradient.register_fake(
    lambda g, x, _scale, _zero, window, *geometry: _real(
        g, (g.shape[3], *window, x.shape[3] // geometry[3])
    )
)
q8_depthwise_weight_gradient.register_fake(
    lambda g, x, _scale, _zero, window, *_: _real(g, (*window, x.shape[3]))
)
q8_average_gradient.register_fake(lambda g, image, *_: _real(g, (g.shape[0], *image, g.shape[3])))
q8_maximum_gradient.register_fake(lambda g, x, *_: _real(g, x.shape))
