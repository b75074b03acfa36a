"""ONNX operators over space: convolutions, pooling, and resizing."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional

from poetmodel.torch.onnx.operators import (
    OnnxNode,
    read_axes,
    register_operator,
    select_positions,
    to_integers,
    to_number_list,
    to_tensor,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONVOLUTIONS: Final = (functional.conv1d, functional.conv2d, functional.conv3d)
_TRANSPOSED_CONVOLUTIONS: Final = (
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)
_MAX_POOLS: Final = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_MEAN_POOLS: Final = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


class _Window:
    """The window of a convolution or pool: size, strides, dilations, and padding."""

    def __init__(self, node: OnnxNode, x: torch.Tensor, size: tuple[int, ...]) -> None:
        self.size = size
        self.strides: tuple[int, ...] = tuple(node.get("strides", (1,) * len(size)))
        self.dilations: tuple[int, ...] = tuple(node.get("dilations", (1,) * len(size)))
        self.lengths: tuple[int, ...] = tuple(x.shape[2:])
        """Sizes of the input's spatial axes."""
        self.attribute_pads = self._read_pads(node)
        """Padding before and after each axis by the attributes, before ``ceil_mode`` changes it."""
        self.pads = self.attribute_pads
        """Padding before and after each axis. After an axis, ``ceil_mode`` may increase or decrease
        it; negative padding crops."""
        if node.get("ceil_mode", 0):
            self.pads = [
                (pad_before, self._padding_after(axis, pad_before, pad_after))
                for axis, (pad_before, pad_after) in enumerate(self.pads)
            ]

    def _read_pads(self, node: OnnxNode) -> list[tuple[int, int]]:
        """Return (padding before, after) of each axis by ``auto_pad`` or ``pads``, by default 0."""
        auto_pad, rank = node.get("auto_pad", "NOTSET"), len(self.size)
        if auto_pad.startswith("SAME"):
            is_upper = auto_pad == "SAME_UPPER"
            return [
                _split_padding(self._same_padding(axis), small_first=is_upper)
                for axis in range(rank)
            ]
        pads = (0,) * 2 * rank if auto_pad == "VALID" else node.get("pads", (0,) * 2 * rank)
        return list(zip(pads[:rank], pads[rank:], strict=True))

    def _same_padding(self, axis: int) -> int:
        """Return the total padding of an axis for ceil(length / stride) outputs."""
        stride, length = self.strides[axis], self.lengths[axis]
        return max(0, (-(-length // stride) - 1) * stride + self.span(axis) - length)

    def span(self, axis: int) -> int:
        """Return the number of elements of an axis that the window spans."""
        return self.dilations[axis] * (self.size[axis] - 1) + 1

    def transposed_length(self, axis: int) -> int:
        """Return the length of an axis after a transposed convolution without any padding."""
        return self.strides[axis] * (self.lengths[axis] - 1) + self.span(axis)

    def compute_window_means(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of each window; `x` already contains its padding, which counts."""
        rank = len(self.size)
        if set(self.dilations) == {1}:
            return _MEAN_POOLS[rank - 1](x, self.size, self.strides)
        channel_images = x.reshape(-1, 1, *x.shape[2:])  # one convolution per channel
        weights = x.new_full((1, 1, *self.size), 1 / math.prod(self.size))
        means = _CONVOLUTIONS[rank - 1](
            channel_images, weights, None, self.strides, 0, self.dilations
        )
        return means.reshape(*x.shape[:2], *means.shape[2:])

    def _padding_after(self, axis: int, pad_before: int, pad_after: int) -> int:
        """Return the padding after an axis for ``ceil_mode``, negative if no window reads the end.

        A window that would begin beyond the end of the axis is left out, as in PyTorch and ONNX.
        """
        stride, length = self.strides[axis], self.lengths[axis]
        count = -(-(length + pad_before + pad_after - self.span(axis)) // stride) + 1
        if (count - 1) * stride >= length + pad_before:
            count -= 1
        return (count - 1) * stride + self.span(axis) - length - pad_before

    @property
    def symmetric_pads(self) -> tuple[int, ...] | None:
        """The padding before and after each axis; None if these differ for an axis."""
        if any(pad_before != pad_after for pad_before, pad_after in self.pads):
            return None
        return tuple(pad_before for pad_before, _ in self.pads)


def _pad_axes(
    x: torch.Tensor, pads: Sequence[tuple[int, int]], *, value: float = 0.0
) -> torch.Tensor:
    """Pad the last axes before and after; negative padding crops."""
    widths = [width for pair in reversed(pads) for width in pair]
    return functional.pad(x, widths, value=value) if any(widths) else x


@register_operator("Conv", weights=(1, 2))
def _compute_convolution(node: OnnxNode, x: torch.Tensor, w: Any, b: Any = None) -> torch.Tensor:
    """Compute a convolution; apply asymmetric padding to the input first."""
    w = to_tensor(w, x)
    window = _Window(node, x, tuple(w.shape[2:]))
    pads = window.symmetric_pads
    if pads is None:
        x, pads = _pad_axes(x, window.pads), (0,) * len(window.size)
    return _CONVOLUTIONS[len(pads) - 1](
        x, w, _convert_bias(b, x), window.strides, pads, window.dilations, node.get("group", 1)
    )


def _convert_bias(b: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Return a bias as a contiguous tensor; None if there is none or its numbers are all 0."""
    if isinstance(b, tuple):
        return torch.tensor(b, dtype=x.dtype, device=x.device) if any(b) else None
    return None if b is None else b.contiguous()


@register_operator("ConvTranspose", weights=(1, 2))
def _compute_transposed_convolution(
    node: OnnxNode, x: torch.Tensor, w: Any, b: Any = None
) -> torch.Tensor:
    """Compute a transposed convolution; asymmetric padding crops or extends the result."""
    w = to_tensor(w, x)
    size = tuple(w.shape[2:])
    rank = len(size)
    window = _Window(node, x, size)
    output_padding = tuple(node.get("output_padding", (0,) * rank))
    pads, auto_pad = window.pads, node.get("auto_pad", "NOTSET")
    lengths = node.get("output_shape")
    if lengths is None and auto_pad.startswith("SAME"):
        lengths = [n * stride for n, stride in zip(x.shape[2:], window.strides, strict=True)]
    if lengths is not None:
        is_upper = auto_pad == "SAME_UPPER"
        totals = [
            window.transposed_length(axis) + output_padding[axis] - lengths[axis]
            for axis in range(rank)
        ]
        pads = [_split_padding(total, small_first=is_upper) for total in totals]
    group, function = node.get("group", 1), _TRANSPOSED_CONVOLUTIONS[rank - 1]
    bias, strides, dilations = _convert_bias(b, x), window.strides, window.dilations
    pads_before, pads_after = (
        tuple(pad_before for pad_before, _ in pads),
        tuple(pad_after for _, pad_after in pads),
    )
    if pads_before == pads_after and min(pads_before) >= 0:
        return function(x, w, bias, strides, pads_before, output_padding, group, dilations)
    uncropped = function(x, w, None, strides, 0, output_padding, group, dilations)
    y = _pad_axes(uncropped, [(-pad_before, -pad_after) for pad_before, pad_after in pads])
    return y if bias is None else y + bias.reshape(-1, *(1,) * rank)


def _split_padding(total: int, *, small_first: bool) -> tuple[int, int]:
    """Split an axis' padding into (before, after); before is smaller if `small_first`."""
    if total < 0:
        return 0, total
    small, large = total // 2, total - total // 2
    return (small, large) if small_first else (large, small)


@register_operator("MaxPool", first_output_only=True)
def _compute_max_pool(node: OnnxNode, x: torch.Tensor) -> Any:
    """Compute the maximum of each window; if the node has more outputs, they are None."""
    size = tuple(node.get("kernel_shape"))
    window = _Window(node, x, size)
    pads = window.symmetric_pads
    if pads is None or any(2 * pad > length for pad, length in zip(pads, size, strict=True)):
        minimum = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
        x, pads = _pad_axes(x, window.pads, value=minimum), (0,) * len(size)
    function = _MAX_POOLS[len(size) - 1]
    return node.pad_outputs(function(x, size, window.strides, pads, window.dilations))


@register_operator("AveragePool")
def _compute_mean_pool(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    """Compute window means; ``count_include_pad`` counts padding, except that of ``ceil_mode``."""
    size = tuple(node.get("kernel_shape"))
    window = _Window(node, x, size)
    counts_padding, pads = bool(node.get("count_include_pad", 0)), window.symmetric_pads
    has_uncounted_pads = not counts_padding or window.pads != window.attribute_pads
    fits_pytorch = (
        pads is not None
        and all(2 * pad <= length for pad, length in zip(pads, size, strict=True))
        and not (counts_padding and has_uncounted_pads)  # PyTorch counts all or no padding
    )
    if fits_pytorch and set(window.dilations) == {1}:
        function = _MEAN_POOLS[len(size) - 1]
        return function(x, size, window.strides, pads, count_include_pad=counts_padding)
    means = window.compute_window_means(_pad_axes(x, window.pads))
    if not has_uncounted_pads:
        return means
    counted_mask = torch.ones_like(x[:1, :1])
    if counts_padding:  # padding from ceil_mode is not counted
        counted_mask = _pad_axes(counted_mask, window.attribute_pads, value=1.0)
    uncounted_pads = [
        (
            pad_before - (attribute_before if counts_padding else 0),
            pad_after - (attribute_after if counts_padding else 0),
        )
        for (pad_before, pad_after), (attribute_before, attribute_after) in zip(
            window.pads, window.attribute_pads, strict=True
        )
    ]
    return means / window.compute_window_means(_pad_axes(counted_mask, uncounted_pads))


@register_operator("LpPool")
def _compute_lp_pool(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    """Compute the p-norm of each window. The gradient of a window of zeros is 0."""
    size, p = tuple(node.get("kernel_shape")), node.get("p", 2)
    window = _Window(node, x, size)
    total = window.compute_window_means(_pad_axes(x.abs() ** p, window.pads)) * math.prod(size)
    is_zero = total == 0
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, total) ** (1 / p))


@register_operator("GlobalAveragePool")
def _compute_global_mean(_: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    return x.mean(tuple(range(2, x.ndim)), keepdim=True)


@register_operator("GlobalMaxPool")
def _compute_global_maximum(_: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    return x.amax(tuple(range(2, x.ndim)), keepdim=True)


# -- resizing ----------------------------------------------------------------------------------


_CROPPED: Final = "tf_crop_and_resize"
"""The coordinate transformation that resizes a crop of the input."""
_COORDINATES: Final = (
    "align_corners", "asymmetric", "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel",
    _CROPPED,
)  # fmt: skip
"""Supported values of ``coordinate_transformation_mode``."""


@register_operator("Resize", numbers=(1, 2, 3))
def _resize(
    node: OnnxNode, x: torch.Tensor, roi: Any = None, scales: Any = None, sizes: Any = None
) -> torch.Tensor:
    """Resize with PyTorch's operator if it has the result of ONNX, otherwise axis by axis.

    Except for ``nearest``, integers are interpolated in float32 and rounded half to even.
    """
    resized_axes = [_ResizedAxis(node, size) for size in x.shape]
    axes = read_axes(node, None, rank=x.ndim)
    axes = list(range(x.ndim)) if axes is None else axes
    if node.get("coordinate_transformation_mode") == _CROPPED:
        roi_values = to_number_list(node, roi, "roi")
        for index, axis in enumerate(axes):
            resized_axes[axis].crop = (roi_values[index], roi_values[index + len(axes)])
    if sizes is None:
        for axis, factor in zip(axes, to_number_list(node, scales, "scales"), strict=True):
            resized_axes[axis].set_factor(factor)
    else:
        _set_lengths(node, [resized_axes[axis] for axis in axes], to_integers(node, sizes, "sizes"))
    if x.is_floating_point() or node.get("mode", "nearest") == "nearest":
        return _resize_axes(node, x, resized_axes)
    return _convert_to_integers(_resize_axes(node, x.to(torch.float32), resized_axes), x.dtype)


def _resize_axes(node: OnnxNode, x: torch.Tensor, axes: list[_ResizedAxis]) -> torch.Tensor:
    """Return `x` resized by `_try_interpolate` or, if that is None, axis by axis."""
    interpolated = _try_interpolate(node, x, axes)
    if interpolated is not None:
        return interpolated
    for axis, resized_axis in enumerate(axes):
        if resized_axis.is_resized:
            x = resized_axis.resize(x, axis)
    return x


def _convert_to_integers(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round half to even, and limit to the range of types with less than 32 bits."""
    limits = torch.iinfo(dtype)
    x = x.round()
    return (x.clamp(limits.min, limits.max) if limits.bits < 32 else x).to(dtype)  # noqa: PLR2004


def _set_lengths(node: OnnxNode, axes: list[_ResizedAxis], lengths: list[int]) -> None:
    """Set factor and length of each axis from the output lengths.

    Unless ``keep_aspect_ratio_policy`` is ``stretch``, all axes get one factor.
    """
    factors = [length / axis.size for axis, length in zip(axes, lengths, strict=True)]
    policy = node.get("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        factors = [(min if policy == "not_larger" else max)(factors)] * len(axes)
        lengths = [
            math.floor(axis.size * factor + 0.5) for axis, factor in zip(axes, factors, strict=True)
        ]
    for axis, factor, length in zip(axes, factors, lengths, strict=True):
        axis.set_factor(factor, length)


class _ResizedAxis:
    """One axis of a Resize (onnx.ai/onnx/operators), with `size` elements in the input.

    Computes the input elements and weights of each output element.
    """

    def __init__(self, node: OnnxNode, size: int) -> None:
        self.size = self.length = size
        """Number of elements of the input; `length` is that of the output."""
        self.factor = 1.0
        """Size of the output over the size of the input, before rounding."""
        self.crop = (0.0, 1.0)
        """Positions of the output's ends in the input: 0 is the first element, 1 the last."""
        self.node = node
        self.mode: str = node.get("mode", "nearest")
        self.coordinates: str = node.get("coordinate_transformation_mode", "half_pixel")
        if self.coordinates not in _COORDINATES:
            raise node.unsupported_error(
                f"{self.coordinates} is not supported; expected a mode of ONNX, such as half_pixel"
            )

    def set_factor(self, factor: float, length: int | None = None) -> None:
        """Set the factor and the output length, by default size times factor, rounded down."""
        self.factor = factor
        self.length = math.floor(self.size * factor) if length is None else length

    @property
    def is_resized(self) -> bool:
        """Whether the output may differ from the input."""
        return (self.factor, self.length, self.crop) != (1.0, self.size, (0.0, 1.0))

    @property
    def is_exact(self) -> bool:
        """Whether the output length is size times factor, without rounding."""
        return self.factor == self.length / self.size

    def resize(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """Return `x` with dimension `axis` resized.

        ``tf_crop_and_resize`` gives ``extrapolation_value`` to elements outside of the input.
        """
        positions = self._source_positions()
        windows = [self._taps(position) for position in positions]
        shape = [-1 if k == axis else 1 for k in range(x.ndim)]

        def reshape_along_axis(values: list[Any]) -> torch.Tensor:
            return torch.tensor(values, dtype=x.dtype, device=x.device).reshape(shape)

        terms = []
        for taps in zip(*windows, strict=True):
            elements = select_positions(
                x, axis, [min(max(position, 0), self.size - 1) for position, _ in taps]
            )
            weights = [weight for _, weight in taps]
            if any(weights):
                terms.append(
                    elements if set(weights) == {1.0} else elements * reshape_along_axis(weights)
                )
        y = sum(terms[1:], start=terms[0])
        is_outside = [
            self.coordinates == _CROPPED and not 0 <= position <= self.size - 1
            for position in positions
        ]
        if any(is_outside):
            value = self.node.get("extrapolation_value", 0.0)
            value = value if x.is_floating_point() else round(value)
            y = torch.where(reshape_along_axis(is_outside) != 0, value, y)
        return y

    def _source_positions(self) -> list[float]:
        """Return the unclamped position of each output element in the input, fractional."""
        last_index, exact_length = self.size - 1, self.size * self.factor
        if self.coordinates in ("align_corners", _CROPPED):
            first, last = self.crop if self.coordinates == _CROPPED else (0.0, 1.0)
            if exact_length == 1:
                return [(first + last) / 2 * last_index if self.coordinates == _CROPPED else 0.0]
            step = (last - first) * last_index / (exact_length - 1)
            return [first * last_index + k * step for k in range(self.length)]
        if self.coordinates == "asymmetric":
            return [k / self.factor for k in range(self.length)]
        if self.coordinates == "pytorch_half_pixel" and exact_length == 1:
            return [-0.5]
        offset = 0.0
        if self.coordinates == "half_pixel_symmetric":
            offset = self.size / 2 * (1 - self.length / exact_length)
        return [offset + (k + 0.5) / self.factor - 0.5 for k in range(self.length)]

    def _taps(self, position: float) -> list[tuple[int, float]]:
        """Return the taps of an output element: (index, weight) pairs, of weights that sum to 1.

        Indices may be outside of the axis; the caller clamps them.
        """
        if self.mode == "nearest":
            return [(_round_position(self.node, position), 1.0)]
        reach = 1 if self.mode == "linear" else 2
        scale = min(self.factor, 1.0) if self.node.get("antialias", 0) else 1.0
        index_before = math.ceil(position) - 1
        first = math.floor(-reach / scale) + 1
        taps = [
            (index_before + k, self._weight((index_before + k - position) * scale))
            for k in range(first, 2 - first)
        ]
        if self.node.get("exclude_outside", 0):
            taps = [(index, weight if 0 <= index < self.size else 0.0) for index, weight in taps]
        total = sum(weight for _, weight in taps)
        return [(index, weight / total) for index, weight in taps]

    def _weight(self, distance: float) -> float:
        """Return the weight of an element by its distance: linear interpolation or Keys' cubic."""
        x, a = abs(distance), self.node.get("cubic_coeff_a", -0.75)
        if self.mode == "linear":
            return max(1.0 - x, 0.0)
        if x <= 1:
            return float(((a + 2) * x - (a + 3)) * x * x + 1)
        return float(((a * x - 5 * a) * x + 8 * a) * x - 4 * a) if x < 2 else 0.0  # noqa: PLR2004


def _round_position(node: OnnxNode, position: float) -> int:
    """Round a position to an index by the node's ``nearest_mode``."""
    mode = node.get("nearest_mode", "round_prefer_floor")
    if mode in ("floor", "ceil"):
        return math.floor(position) if mode == "floor" else math.ceil(position)
    return math.ceil(position - 0.5) if mode == "round_prefer_floor" else math.floor(position + 0.5)


def _try_interpolate(
    node: OnnxNode, x: torch.Tensor, axes: list[_ResizedAxis]
) -> torch.Tensor | None:
    """Return the result of `functional.interpolate`, or None if ONNX's result may differ."""
    if not x.is_floating_point() and x.dtype is not torch.uint8:
        return None
    lengths, factors = [axis.length for axis in axes], [axis.factor for axis in axes]
    has_special_weights = node.get("antialias", 0) or node.get("exclude_outside", 0)
    mode = _INTERPOLATIONS.get((node.get("mode", "nearest"), x.ndim))
    if has_special_weights or mode is None or any(axis.is_resized for axis in axes[:2]):
        return None
    if not all(axis.is_exact for axis in axes):
        return None
    coordinates = axes[0].coordinates
    if mode == "nearest":
        rounding = node.get("nearest_mode", "round_prefer_floor")
        is_integer = coordinates.endswith("half_pixel") and all(map(float.is_integer, factors))
        is_equal = (
            rounding == "floor"
            if coordinates == "asymmetric"
            else is_integer and "round" in rounding
        )
        return functional.interpolate(x, lengths[2:], mode="nearest") if is_equal else None
    is_half_pixel = coordinates == "half_pixel" or (
        coordinates == "pytorch_half_pixel" and min(lengths[2:]) > 1
    )
    is_default_cubic = node.get("cubic_coeff_a", -0.75) == -0.75  # noqa: PLR2004 - as in PyTorch
    if not (is_half_pixel or coordinates == "align_corners") or not is_default_cubic:
        return None
    return functional.interpolate(
        x, lengths[2:], mode=mode, align_corners=coordinates == "align_corners"
    )


_INTERPOLATIONS: Final = {
    **{("nearest", rank): "nearest" for rank in (3, 4, 5)},
    ("linear", 3): "linear",
    ("linear", 4): "bilinear",
    ("linear", 5): "trilinear",
    ("cubic", 4): "bicubic",
}
"""Mode of `functional.interpolate`, by ONNX's mode and the rank of the input."""
