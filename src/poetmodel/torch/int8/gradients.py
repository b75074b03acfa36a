"""Operators of the backward pass of int8 layers, and updates of int8 weights: their definition.

Gradients are float32, those of activations in the order batch, rows, columns, channels. They are
gradients with respect to real values: ``(byte - zero) * scale`` for activations, ``byte * scale``
for weights. Rounding passes gradients through unchanged; a byte at a limit of its layer has the
gradient 0. Real numbers are summed in PyTorch's order: sums of integers below 2^24 are exact, with
the same bits in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import pad

from poetmodel.torch.int8.operators import (
    DEPTHWISE_NDIM,
    WINDOW_SCHEMA,
    channels_first,
    channels_last,
    register_operator,
    window_elements,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_CONVOLUTION_SCHEMA: Final = f"{WINDOW_SCHEMA}, int groups"
"""Schema of the last arguments of a convolution's gradients: window and groups."""


@register_operator("(Tensor gradient, Tensor y, int low, int high) -> Tensor")
def q8_mask(gradient: Tensor, y: Tensor, low: int, high: int) -> Tensor:
    """Return the gradient where the result `y` is strictly between its limits, and 0 elsewhere."""
    return torch.where((y > low) & (y < high), gradient, 0.0)


@register_operator("(Tensor weight, int zero_x) -> Tensor")
def q8_start(weight: Tensor, zero_x: int) -> Tensor:
    """Return ``-zero_x * (sum of the weights of the output)`` for each output channel, in int32."""
    output_weights = weight.flatten(0, 1).T if weight.ndim == DEPTHWISE_NDIM else weight.flatten(1)
    return output_weights.sum(1, dtype=torch.int32) * -zero_x


@register_operator("(Tensor gradient, Tensor weight, Tensor weight_scale) -> Tensor")
def q8_pointwise_input_gradient(gradient: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Return the gradient of a linear layer's input: ``(gradient * weight_scale) @ weight``."""
    return (gradient * weight_scale) @ weight.float()


@register_operator("(Tensor gradient, Tensor x, float scale_x, int zero_x) -> Tensor")
def q8_pointwise_weight_gradient(
    gradient: Tensor, x: Tensor, scale_x: float, zero_x: int
) -> Tensor:
    """Return the gradient of a linear layer's weight (outputs, channels), in float32.

    The sum of ``gradient * (x - zero_x) * scale_x`` over samples and pixels, channels last.
    """
    centred_x = (x.to(torch.int32) - zero_x).float()
    return (gradient.flatten(0, -2).T @ centred_x.flatten(0, -2)) * scale_x


@register_operator(
    "(Tensor gradient, Tensor weight, Tensor weight_scale, int[] input_size, "
    f"{_CONVOLUTION_SCHEMA}) -> Tensor"
)
def q8_convolution_input_gradient(
    gradient: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    input_size: Sequence[int],
    *window_arguments: Any,
) -> Tensor:
    """Return the gradient of a convolution's input, of `input_size` (rows, columns).

    The transposed convolution of ``gradient * weight_scale`` with `weight`, without the padding.
    """
    _, padding, _, groups = window_arguments
    filters = _pytorch_weight(weight).float()
    channels = filters.shape[1] * groups
    above, below, left, right = padding
    padded_size = (input_size[0] + above + below, input_size[1] + left + right)
    input_shape_only = gradient.new_empty((1,)).expand(gradient.shape[0], channels, *padded_size)
    padded_gradient = _convolution_gradient(
        gradient * weight_scale, input_shape_only, filters, window_arguments, 0
    )
    cropped = padded_gradient[:, :, above : above + input_size[0], left : left + input_size[1]]
    return channels_last(cropped).contiguous()


@register_operator(
    "(Tensor gradient, Tensor x, float scale_x, int zero_x, int[] window, "
    f"{_CONVOLUTION_SCHEMA}) -> Tensor"
)
def q8_convolution_weight_gradient(
    gradient: Tensor,
    x: Tensor,
    scale_x: float,
    zero_x: int,
    window: Sequence[int],
    *window_arguments: Any,
) -> Tensor:
    """Return the gradient of a weight (outputs, rows, columns, channels of a group).

    The correlation of ``x - zero_x`` with `gradient`, times the scale of x.
    """
    filters = _filter_gradient(gradient, x, zero_x, window, window_arguments) * scale_x
    return filters.permute(0, 2, 3, 1).contiguous()


@register_operator(
    "(Tensor gradient, Tensor x, float scale_x, int zero_x, int[] window, "
    f"{WINDOW_SCHEMA}) -> Tensor"
)
def q8_depthwise_weight_gradient(
    gradient: Tensor,
    x: Tensor,
    scale_x: float,
    zero_x: int,
    window: Sequence[int],
    *window_arguments: Any,
) -> Tensor:
    """Return the gradient of a depthwise convolution's weight (rows, columns, channels)."""
    window_arguments = (*window_arguments, x.shape[3])
    filters = _filter_gradient(gradient, x, zero_x, window, window_arguments) * scale_x
    return filters[:, 0].permute(1, 2, 0).contiguous()


@register_operator(
    "(Tensor gradient, int[] input_size, int[] window, int[] stride, int[] padding) -> Tensor"
)
def q8_average_gradient(
    gradient: Tensor,
    input_size: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    """Return the gradient of a mean pool's input; the part of the padding is dropped."""
    element_gradient = gradient / (window[0] * window[1])
    return _scatter_windows(element_gradient, None, input_size, window, stride, padding, (1, 1))


@register_operator(
    f"(Tensor gradient, Tensor x, Tensor y, int[] window, {WINDOW_SCHEMA}) -> Tensor"
)
def q8_maximum_gradient(
    gradient: Tensor,
    x: Tensor,
    y: Tensor,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return the gradient of a max pool's input, in float32; `y` are the maxima.

    The first largest element of each window, by rows, gets its gradient; padding never does.
    """
    unassigned_mask = torch.ones(y.shape, dtype=torch.bool)
    selections = []
    padding_value = -129  # below all bytes, so that no element of the padding is selected
    x_16 = x.to(torch.int16)
    for _, elements in window_elements(
        x_16, window, stride, padding, dilation, padding_value=padding_value
    ):
        selection = unassigned_mask & (elements == y)
        unassigned_mask = unassigned_mask & ~selection
        selections.append(selection)
    return _scatter_windows(gradient, selections, x.shape[1:3], window, stride, padding, dilation)


def _scatter_windows(
    gradient: Tensor,
    selections: Sequence[Tensor] | None,
    input_size: Sequence[int],
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return the gradient of an image: for each element the sum over its windows.

    `selections` has a mask of windows for each position in a window, by rows; None selects all.
    """
    batch, height, width, channels = gradient.shape
    above, below, left, right = padding
    rows, columns = input_size[0] + above + below, input_size[1] + left + right
    total = gradient.new_zeros((batch, rows, columns, channels))
    for position in range(window[0] * window[1]):
        row, column = divmod(position, window[1])
        window_gradient = (
            gradient if selections is None else torch.where(selections[position], gradient, 0.0)
        )
        first_row, first_column = row * dilation[0], column * dilation[1]
        total[
            :,
            first_row : first_row + (height - 1) * stride[0] + 1 : stride[0],
            first_column : first_column + (width - 1) * stride[1] + 1 : stride[1],
        ] += window_gradient
    return total[:, above : above + input_size[0], left : left + input_size[1]].contiguous()


# -- updates ---------------------------------------------------------------------------------------

INT16_STEPS: Final = 256
"""Number of steps of a 16-bit weight in one step of an int8 weight."""
MAX_WEIGHT: Final = 127
"""Maximum of trained int8 weights; their minimum is -127."""


def update_16_bits(weight: Tensor, residual: Tensor, change: Tensor) -> None:
    """Subtract `change` from 16-bit weights ``256 * weight + residual``, in place.

    ``w16 = clamp(rint(w16 - 256 * change), -127 * 256, 127 * 256)``, ``weight = (w16 + 128) >> 8``.
    NaN in `change`, which is in int8 steps, counts as 0.
    """
    weight_16 = weight.to(torch.int32) * INT16_STEPS + residual
    max_weight = MAX_WEIGHT * INT16_STEPS
    new_weight_16 = torch.round(weight_16.float() - change.nan_to_num(0.0) * INT16_STEPS).clamp(
        -max_weight, max_weight
    )
    for old, new in zip((weight, residual), split_16_bits(new_weight_16), strict=True):
        old.copy_(new)


def split_16_bits(weight_16: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 tensors (weight, residual) such that ``weight_16 = 256 * weight + residual``."""
    weight_16 = weight_16.to(torch.int32)
    weight = (weight_16 + INT16_STEPS // 2) >> 8
    return weight.to(torch.int8), (weight_16 - weight * INT16_STEPS).to(torch.int8)


def update_stochastic(weight: Tensor, random_numbers: Tensor, change: Tensor) -> None:
    """Subtract `change` from 8-bit weights, with stochastic rounding, in place.

    ``weight = clamp(floor(weight - change + r), -127, 127)`` with r in [0, 1). NaN counts as 0.
    """
    new_weight = torch.floor(weight.float() - change.nan_to_num(0.0) + random_numbers)
    weight.copy_(new_weight.clamp(-MAX_WEIGHT, MAX_WEIGHT))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingDraws:
    """Random numbers for the stochastic rounding of one update of one weight tensor.

    Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): element
    e has word e % 4 of the block with the counter ``(e // 4, site, 1, 0)`` (dropout has 0 as third
    word) and the key ``(update, seed)``.
    """

    update: int
    """Number of earlier updates of the optimizer."""
    site: int
    """Index of the layer among the optimizer's trained int8 layers, in the model's order."""
    seed: int = 0

    def draw_uniform(self, weight: Tensor, *, first: int = 0) -> Tensor:
        """Return a float32 number in [0, 1) for each weight: the upper 24 bits of its own word.

        `first` is the index of the first element if `weight` is a slice of its tensor.
        """
        first_block, end_block = first // 4, -(-(first + weight.numel()) // 4)
        words = _philox_words(
            first_block, end_block, (self.site, _ROUNDING_WORD, 0), self.update, self.seed
        ).flatten()
        weight_words = words[first - 4 * first_block :][: weight.numel()]
        return ((weight_words >> 8).float() * 2.0**-24).view(weight.shape).to(weight.device)


_ROUNDING_WORD: Final = 1
"""Third word of the counters of stochastic rounding."""
_WORD_MASK: Final = 0xFFFFFFFF
"""Mask of the lower 32 bits."""


def _philox_words(first_block: int, end_block: int, counter: Sequence[int], *key: int) -> Tensor:
    """Return a row of four 32-bit words (int64) for each block in a range.

    `counter` has the three words of the counter after the block number, `key` the two of the key.
    """
    words = torch.zeros((end_block - first_block, 4), dtype=torch.int64)
    words[:, 0] = torch.arange(first_block, end_block)
    words[:, 1:] = torch.tensor(counter)
    keys = [number & _WORD_MASK for number in key]
    for _ in range(10):
        # Products wrap at 64 bits; masking gives the upper half of unsigned products.
        first_product, second_product = words[:, 0] * 0xD2511F53, words[:, 2] * 0xCD9E8D57
        words = torch.stack(
            (
                (second_product >> 32) & _WORD_MASK ^ words[:, 1] ^ keys[0],
                second_product & _WORD_MASK,
                (first_product >> 32) & _WORD_MASK ^ words[:, 3] ^ keys[1],
                first_product & _WORD_MASK,
            ),
            dim=1,
        )
        keys = [(keys[0] + 0x9E3779B9) & _WORD_MASK, (keys[1] + 0xBB67AE85) & _WORD_MASK]
    return words


def _convolution_gradient(
    gradient: Tensor,
    x: Tensor,
    filters: Tensor,
    window_arguments: Sequence[Any],
    gradient_index: int,
) -> Tensor:
    """Return a gradient of a convolution: of the padded input `x` (0), or of the filters (1)."""
    stride, _, dilation, groups = window_arguments
    result: Tensor = torch.ops.aten.convolution_backward(
        channels_first(gradient).contiguous(), x, filters, bias_sizes=None, stride=stride,
        padding=[0, 0], dilation=dilation, transposed=False, output_padding=[0, 0], groups=groups,
        output_mask=[gradient_index == 0, gradient_index == 1, False],
    )[gradient_index]  # fmt: skip
    return result


def _filter_gradient(
    gradient: Tensor, x: Tensor, zero_x: int, window: Sequence[int], window_arguments: Sequence[Any]
) -> Tensor:
    """Return the correlation of ``x - zero_x`` with the gradient, in PyTorch's order of weights."""
    _, padding, _, groups = window_arguments
    above, below, left, right = padding
    centred_x = pad((x.to(torch.int32) - zero_x).float(), (0, 0, left, right, above, below))
    shape = (gradient.shape[3], x.shape[3] // groups, *window)
    weight_shape_only = gradient.new_empty((1,)).expand(shape)
    return _convolution_gradient(
        gradient, channels_first(centred_x).contiguous(), weight_shape_only, window_arguments, 1
    )


def _pytorch_weight(weight: Tensor) -> Tensor:
    if weight.ndim == DEPTHWISE_NDIM:
        return weight.permute(2, 0, 1)[:, None]
    return weight.permute(0, 3, 1, 2)


# -- shapes for fake tensors -------------------------------------------------------------------


def _empty_float32(x: Tensor, shape: Sequence[Any]) -> Tensor:
    return torch.empty(tuple(shape), dtype=torch.float32, device=x.device)


q8_mask.register_fake(lambda gradient, *_: torch.empty_like(gradient))
q8_start.register_fake(
    lambda w, *_: w.new_empty((w.shape[2 if w.ndim == DEPTHWISE_NDIM else 0],), dtype=torch.int32)
)
q8_pointwise_input_gradient.register_fake(
    lambda g, w, *_: _empty_float32(g, (*g.shape[:-1], w.shape[1]))
)
q8_pointwise_weight_gradient.register_fake(
    lambda g, x, *_: _empty_float32(g, (g.shape[-1], x.shape[-1]))
)
q8_convolution_input_gradient.register_fake(
    lambda g, w, _, input_size, *window_arguments: _empty_float32(
        g,
        (
            g.shape[0],
            *input_size,
            w.shape[2] if w.ndim == DEPTHWISE_NDIM else w.shape[3] * window_arguments[3],
        ),
    )
)
q8_convolution_weight_gradient.register_fake(
    lambda g, x, _scale, _zero, window, *window_arguments: _empty_float32(
        g, (g.shape[3], *window, x.shape[3] // window_arguments[3])
    )
)
q8_depthwise_weight_gradient.register_fake(
    lambda g, x, _scale, _zero, window, *_: _empty_float32(g, (*window, x.shape[3]))
)
q8_average_gradient.register_fake(
    lambda g, input_size, *_: _empty_float32(g, (g.shape[0], *input_size, g.shape[3]))
)
q8_maximum_gradient.register_fake(lambda g, x, *_: _empty_float32(g, x.shape))
