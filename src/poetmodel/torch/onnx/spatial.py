"""Operators over space: convolutions, pooling, and other sizes of images."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional

from poetmodel.torch.onnx.operators import (
    OnnxNode,
    axes_of,
    index_select,
    operator,
    real,
    tensor,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONVOLUTIONS: Final = (functional.conv1d, functional.conv2d, functional.conv3d)
_TRANSPOSED: Final = (
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)
_MAXIMA: Final = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_MEANS: Final = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


class _Window:
    """The window of a node: its size, strides, dilations, and the padding before and after."""

    def __init__(self, node: OnnxNode, x: torch.Tensor, size: tuple[int, ...]) -> None:
        self.size = size
        self.strides: tuple[int, ...] = tuple(node.get("strides", (1,) * len(size)))
        self.dilations: tuple[int, ...] = tuple(node.get("dilations", (1,) * len(size)))
        self.lengths: tuple[int, ...] = tuple(x.shape[2:])
        self.stated_pads = self._pads(node)
        """Padding that the node asks for, without elements that ``ceil_mode`` adds."""
        self.pads = self.stated_pads
        if node.get("ceil_mode", 0):
            self.pads = [
                (before, self._after(axis, before, after))
                for axis, (before, after) in enumerate(self.pads)
            ]

    def _pads(self, node: OnnxNode) -> list[tuple[int, int]]:
        auto, count = node.get("auto_pad", "NOTSET"), len(self.size)
        if auto.startswith("SAME"):
            upper = auto == "SAME_UPPER"
            return [_halves(self._total(axis), small_first=upper) for axis in range(count)]
        given = (0,) * 2 * count if auto == "VALID" else node.get("pads", (0,) * 2 * count)
        return list(zip(given[:count], given[count:], strict=True))

    def _total(self, axis: int) -> int:
        """Return the padding of an axis whose outputs are as many as its strides."""
        step, length = self.strides[axis], self.lengths[axis]
        return max(0, (-(-length // step) - 1) * step + self.reach(axis) - length)

    def reach(self, axis: int) -> int:
        """Return the number of elements of an axis under the window."""
        return self.dilations[axis] * (self.size[axis] - 1) + 1

    def transposed(self, axis: int) -> int:
        """Return the length of an axis after a transposed convolution without padding."""
        return self.strides[axis] * (self.lengths[axis] - 1) + self.reach(axis)

    def means(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of the elements under each window, of a tensor that has its padding."""
        axes = len(self.size)
        if set(self.dilations) == {1}:
            return _MEANS[axes - 1](x, self.size, self.strides)
        rows = x.reshape(-1, 1, *x.shape[2:])  # a convolution for each channel
        shares = x.new_full((1, 1, *self.size), 1 / math.prod(self.size))
        means = _CONVOLUTIONS[axes - 1](rows, shares, None, self.strides, 0, self.dilations)
        return means.reshape(*x.shape[:2], *means.shape[2:])

    def _after(self, axis: int, before: int, after: int) -> int:
        """Return the padding after an axis with which rounding down gives what rounding up gave.

        A window that would begin in that padding is left out, as PyTorch and ONNX do.
        """
        step, length = self.strides[axis], self.lengths[axis]
        count = -(-(length + before + after - self.reach(axis)) // step) + 1
        if (count - 1) * step >= length + before:
            count -= 1
        return (count - 1) * step + self.reach(axis) - length - before

    @property
    def symmetric(self) -> tuple[int, ...] | None:
        """The padding of each axis where both sides have the same."""
        if any(before != after for before, after in self.pads):
            return None
        return tuple(before for before, _ in self.pads)


def _padded(
    x: torch.Tensor, pads: Sequence[tuple[int, int]], *, value: float = 0.0
) -> torch.Tensor:
    """Return a tensor with padding before and after its last axes; negative padding cuts."""
    widths = [width for pair in reversed(pads) for width in pair]
    return functional.pad(x, widths, value=value) if any(widths) else x


@operator("Conv", weights=(1, 2))
def _convolution(node: OnnxNode, x: torch.Tensor, w: Any, b: Any = None) -> torch.Tensor:
    w = tensor(w, x)
    window = _Window(node, x, tuple(w.shape[2:]))
    pads = window.symmetric
    if pads is None:
        x, pads = _padded(x, window.pads), (0,) * len(window.size)
    return _CONVOLUTIONS[len(pads) - 1](
        x, w, _bias(b, x), window.strides, pads, window.dilations, node.get("group", 1)
    )


def _bias(b: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Return a bias; one that the file states as zeros is none."""
    if isinstance(b, tuple):
        return torch.tensor(b, dtype=x.dtype, device=x.device) if any(b) else None
    return None if b is None else b.contiguous()


@operator("ConvTranspose", weights=(1, 2))
def _transposed(node: OnnxNode, x: torch.Tensor, w: Any, b: Any = None) -> torch.Tensor:
    w = tensor(w, x)
    size = tuple(w.shape[2:])
    count = len(size)
    window = _Window(node, x, size)
    more = tuple(node.get("output_padding", (0,) * count))
    pads, auto = window.pads, node.get("auto_pad", "NOTSET")
    lengths = node.get("output_shape")
    if lengths is None and auto.startswith("SAME"):
        lengths = [n * step for n, step in zip(x.shape[2:], window.strides, strict=True)]
    if lengths is not None:
        upper = auto == "SAME_UPPER"
        totals = [window.transposed(axis) + more[axis] - lengths[axis] for axis in range(count)]
        pads = [_halves(total, small_first=upper) for total in totals]
    group, function = node.get("group", 1), _TRANSPOSED[count - 1]
    bias, strides, dilations = _bias(b, x), window.strides, window.dilations
    low, high = tuple(before for before, _ in pads), tuple(after for _, after in pads)
    if low == high and min(low) >= 0:
        return function(x, w, bias, strides, low, more, group, dilations)
    whole_ = function(x, w, None, strides, 0, more, group, dilations)
    y = _padded(whole_, [(-before, -after) for before, after in pads])
    return y if bias is None else y + bias.reshape(-1, *(1,) * count)


def _halves(total: int, *, small_first: bool) -> tuple[int, int]:
    """Return the padding before and after an axis; a negative total makes its end longer."""
    if total < 0:
        return 0, total
    small, large = total // 2, total - total // 2
    return (small, large) if small_first else (large, small)


@operator("MaxPool", first_output_only=True)
def _max_pool(node: OnnxNode, x: torch.Tensor) -> Any:
    size = tuple(node.get("kernel_shape"))
    window = _Window(node, x, size)
    pads = window.symmetric
    if pads is None or any(2 * pad > k for pad, k in zip(pads, size, strict=True)):
        x, pads = _padded(x, window.pads, value=-math.inf), (0,) * len(size)
    function = _MAXIMA[len(size) - 1]
    return node.only_first(function(x, size, window.strides, pads, window.dilations))


@operator("AveragePool")
def _average_pool(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    size = tuple(node.get("kernel_shape"))
    window = _Window(node, x, size)
    counted, pads = bool(node.get("count_include_pad", 0)), window.symmetric
    small = pads is not None and all(2 * pad <= k for pad, k in zip(pads, size, strict=True))
    if small and set(window.dilations) == {1}:
        function = _MEANS[len(size) - 1]
        return function(x, size, window.strides, pads, count_include_pad=counted)
    means = window.means(_padded(x, window.pads))
    if counted and window.pads == window.stated_pads:
        return means
    is_counted = torch.ones_like(x[:1, :1])
    if counted:  # padding that ceil_mode adds counts in no mean
        is_counted = _padded(is_counted, window.stated_pads, value=1.0)
    missing = [
        (before - (first if counted else 0), after - (last if counted else 0))
        for (before, after), (first, last) in zip(window.pads, window.stated_pads, strict=True)
    ]
    return means / window.means(_padded(is_counted, missing))


@operator("LpPool")
def _lp_pool(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    """Return the norm of each window; the gradient of a window of zeros is 0."""
    size, p = tuple(node.get("kernel_shape")), node.get("p", 2)
    window = _Window(node, x, size)
    total = window.means(_padded(x.abs() ** p, window.pads)) * math.prod(size)
    is_zero = total == 0
    return torch.where(is_zero, 0.0, torch.where(is_zero, 1.0, total) ** (1 / p))


@operator("GlobalAveragePool")
def _global_average(_: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    return x.mean(tuple(range(2, x.ndim)), keepdim=True)


@operator("GlobalMaxPool")
def _global_maximum(_: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    return x.amax(tuple(range(2, x.ndim)), keepdim=True)


# -- other sizes -------------------------------------------------------------------------------


_COORDINATES: Final = (
    "align_corners", "asymmetric", "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel",
    "tf_crop_and_resize",
)  # fmt: skip


@operator("Resize", numbers=(1, 2, 3))
def _resize(
    node: OnnxNode, x: torch.Tensor, roi: Any = None, scales: Any = None, sizes: Any = None
) -> torch.Tensor:
    """Resize by PyTorch's operator where it does the same, else axis by axis."""
    resized = [_ResizedAxis(node, n) for n in x.shape]
    axes = axes_of(node, None, rank=x.ndim)
    axes = list(range(x.ndim)) if axes is None else axes
    if node.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        ends = real(node, roi, "roi")
        for k, axis in enumerate(axes):
            resized[axis].crop = (ends[k], ends[k + len(axes)])
    if sizes is None:
        for axis, factor in zip(axes, real(node, scales, "scales"), strict=True):
            resized[axis].scale(factor)
    else:
        _fit(node, [resized[axis] for axis in axes], whole(node, sizes, "sizes"))
    by_pytorch = _by_pytorch(node, x, resized)
    if by_pytorch is not None:
        return by_pytorch
    for axis, resizing in enumerate(resized):
        if resizing.changes:
            x = resizing.resize(x, axis)
    return x


def _fit(node: OnnxNode, axes: list[_ResizedAxis], lengths: list[int]) -> None:
    """Scale axes to their lengths, or all by one factor if they keep the aspect ratio."""
    factors = [length / axis.size for axis, length in zip(axes, lengths, strict=True)]
    policy = node.get("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        factors = [(min if policy == "not_larger" else max)(factors)] * len(axes)
        lengths = [
            math.floor(axis.size * factor + 0.5) for axis, factor in zip(axes, factors, strict=True)
        ]
    for axis, factor, length in zip(axes, factors, lengths, strict=True):
        axis.scale(factor, length)


class _ResizedAxis:
    """An axis of the input of a Resize, and the elements that each result is a mean of.

    It follows the specification of ONNX's operator Resize (onnx.ai/onnx/operators).
    """

    def __init__(self, node: OnnxNode, size: int) -> None:
        self.size = self.length = size
        """Number of elements before and after."""
        self.factor = 1.0
        self.crop = (0.0, 1.0)
        """First and last place of the result, as fractions of the axis."""
        self.node = node
        self.mode: str = node.get("mode", "nearest")
        self.coordinates: str = node.get("coordinate_transformation_mode", "half_pixel")
        if self.coordinates not in _COORDINATES:
            raise node.refused(f"{self.coordinates} is not known; expected half_pixel")

    def scale(self, factor: float, length: int | None = None) -> None:
        """Set the factor, and the length, which is that of the factor by default."""
        self.factor = factor
        self.length = math.floor(self.size * factor) if length is None else length

    @property
    def changes(self) -> bool:
        """Whether the result is another than the input."""
        return (self.factor, self.length, self.crop) != (1.0, self.size, (0.0, 1.0))

    @property
    def is_exact(self) -> bool:
        """Whether the length is the size times the factor, without rounding."""
        return self.factor == self.length / self.size

    def resize(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        """Return a tensor with its axis of this number resized."""
        places = self._places()
        windows = [self._window(place) for place in places]
        shape = [-1 if k == axis else 1 for k in range(x.ndim)]

        def column(values: list[Any]) -> torch.Tensor:
            return torch.tensor(values, dtype=x.dtype, device=x.device).reshape(shape)

        parts = []
        for taps in zip(*windows, strict=True):
            part = index_select(x, axis, [min(max(at, 0), self.size - 1) for at, _ in taps])
            weights = [weight for _, weight in taps]
            if any(weights):
                parts.append(part if set(weights) == {1.0} else part * column(weights))
        y = sum(parts[1:], start=parts[0])
        outside = [self.coordinates == _CROPPED and not 0 <= at <= self.size - 1 for at in places]
        if any(outside):
            value = self.node.get("extrapolation_value", 0.0)
            y = torch.where(column(outside) != 0, value, y)
        return y

    def _places(self) -> list[float]:
        """Return the place of each result among the elements of the input."""
        last, wanted = self.size - 1, self.size * self.factor
        if self.coordinates in ("align_corners", _CROPPED):
            first, end = self.crop if self.coordinates == _CROPPED else (0.0, 1.0)
            if wanted == 1:
                return [(first + end) / 2 * last if self.coordinates == _CROPPED else 0.0]
            step = (end - first) * last / (wanted - 1)
            return [first * last + k * step for k in range(self.length)]
        if self.coordinates == "asymmetric":
            return [k / self.factor for k in range(self.length)]
        if self.coordinates == "pytorch_half_pixel" and wanted == 1:
            return [-0.5]
        offset = 0.0
        if self.coordinates == "half_pixel_symmetric":
            offset = self.size / 2 * (1 - self.length / wanted)
        return [offset + (k + 0.5) / self.factor - 0.5 for k in range(self.length)]

    def _window(self, place: float) -> list[tuple[int, float]]:
        """Return the elements that a result is the mean of, with their weights."""
        if self.mode == "nearest":
            return [(_nearest(self.node, place), 1.0)]
        reach = 1 if self.mode == "linear" else 2
        narrow = min(self.factor, 1.0) if self.node.get("antialias", 0) else 1.0
        low = math.ceil(place) - 1
        first = math.floor(-reach / narrow) + 1
        found = [
            (low + k, self._weight((low + k - place) * narrow)) for k in range(first, 2 - first)
        ]
        if self.node.get("exclude_outside", 0):
            found = [(at, weight if 0 <= at < self.size else 0.0) for at, weight in found]
        total = sum(weight for _, weight in found)
        return [(at, weight / total) for at, weight in found]

    def _weight(self, distance: float) -> float:
        """Return the weight of an element by its distance: of a triangle, or of Keys' cubic."""
        x, a = abs(distance), self.node.get("cubic_coeff_a", -0.75)
        if self.mode == "linear":
            return max(1.0 - x, 0.0)
        if x <= 1:
            return float(((a + 2) * x - (a + 3)) * x * x + 1)
        return float(((a * x - 5 * a) * x + 8 * a) * x - 4 * a) if x < 2 else 0.0  # noqa: PLR2004


_CROPPED: Final = "tf_crop_and_resize"


def _nearest(node: OnnxNode, place: float) -> int:
    """Return the index of the element nearest to a place."""
    mode = node.get("nearest_mode", "round_prefer_floor")
    if mode in ("floor", "ceil"):
        return math.floor(place) if mode == "floor" else math.ceil(place)
    return math.ceil(place - 0.5) if mode == "round_prefer_floor" else math.floor(place + 0.5)


def _by_pytorch(node: OnnxNode, x: torch.Tensor, axes: list[_ResizedAxis]) -> torch.Tensor | None:
    """Return the result of `functional.interpolate`; None if it would compute something else."""
    lengths, factors = [axis.length for axis in axes], [axis.factor for axis in axes]
    special = node.get("antialias", 0) or node.get("exclude_outside", 0)
    named = _INTERPOLATIONS.get((node.get("mode", "nearest"), x.ndim))
    if special or named is None or any(axis.changes for axis in axes[:2]):
        return None
    if not all(axis.is_exact for axis in axes):
        return None
    how = axes[0].coordinates
    if named == "nearest":
        rounding = node.get("nearest_mode", "round_prefer_floor")
        whole_ = how.endswith("half_pixel") and all(map(float.is_integer, factors))
        same = rounding == "floor" if how == "asymmetric" else whole_ and "round" in rounding
        return functional.interpolate(x, lengths[2:], mode="nearest") if same else None
    halves = how == "half_pixel" or (how == "pytorch_half_pixel" and min(lengths[2:]) > 1)
    own = node.get("cubic_coeff_a", -0.75) == -0.75  # noqa: PLR2004 - PyTorch's own
    if not (halves or how == "align_corners") or not own:
        return None
    return functional.interpolate(x, lengths[2:], mode=named, align_corners=how == "align_corners")


_INTERPOLATIONS: Final = {
    **{("nearest", rank): "nearest" for rank in (3, 4, 5)},
    ("linear", 3): "linear",
    ("linear", 4): "bilinear",
    ("linear", 5): "trilinear",
    ("cubic", 4): "bicubic",
}
"""The mode of `functional.interpolate`, by mode and rank."""
