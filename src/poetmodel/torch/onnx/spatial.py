"""Operators over space: convolutions, pooling, and other sizes of images."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch.nn import functional

from poetmodel.torch.onnx.operators import (
    OnnxNode,
    axes_of,
    operator,
    real,
    tensor,
    whole,
)

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
        self.pads = self._pads(node)
        if node.get("ceil_mode", 0):
            self.pads = [
                (before, self._after(axis, before, after))
                for axis, (before, after) in enumerate(self.pads)
            ]

    def _pads(self, node: OnnxNode) -> list[tuple[int, int]]:
        auto, count = node.get("auto_pad", "NOTSET"), len(self.size)
        if auto.startswith("SAME"):
            totals = [self._total(axis) for axis in range(count)]
            small = [total // 2 for total in totals]
            pairs = [(low, total - low) for low, total in zip(small, totals, strict=True)]
            return pairs if auto == "SAME_UPPER" else [(high, low) for low, high in pairs]
        given = (0,) * 2 * count if auto == "VALID" else node.get("pads", (0,) * 2 * count)
        return list(zip(given[:count], given[count:], strict=True))

    def _total(self, axis: int) -> int:
        """Return the padding of an axis whose outputs are as many as its strides."""
        step, length = self.strides[axis], self.lengths[axis]
        return max(0, (-(-length // step) - 1) * step + self.reach(axis) - length)

    def reach(self, axis: int) -> int:
        """Return the number of elements of an axis under the window."""
        return self.dilations[axis] * (self.size[axis] - 1) + 1

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

    def padded(self, x: torch.Tensor, value: float = 0.0) -> torch.Tensor:
        """Return a tensor with the padding; elements go where it is negative."""
        flat = [width for pair in reversed(self.pads) for width in pair]
        return functional.pad(x, flat, value=value) if any(flat) else x


@operator("Conv", weights=(1, 2))
def _convolution(node: OnnxNode, x: torch.Tensor, w: Any, b: Any = None) -> torch.Tensor:
    w = tensor(w, x)
    window = _Window(node, x, tuple(w.shape[2:]))
    pads = window.symmetric
    if pads is None:
        x, pads = window.padded(x), (0,) * len(window.size)
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
    if node.get("output_shape") or node.get("auto_pad", "NOTSET").startswith("SAME"):
        raise node.refused("output_shape and auto_pad are not known; expected pads")
    pads = window.pads
    group, function = node.get("group", 1), _TRANSPOSED[count - 1]
    bias, strides, dilations = _bias(b, x), window.strides, window.dilations
    low, high = tuple(before for before, _ in pads), tuple(after for _, after in pads)
    if low == high and min(low) >= 0:
        return function(x, w, bias, strides, low, more, group, dilations)
    whole_ = function(x, w, bias, strides, 0, more, group, dilations)
    return functional.pad(whole_, [-width for pair in reversed(pads) for width in pair])


@operator("MaxPool")
def _max_pool(node: OnnxNode, x: torch.Tensor) -> Any:
    size = tuple(node.get("kernel_shape"))
    window = _Window(node, x, size)
    pads = window.symmetric
    if pads is None or any(2 * pad > k for pad, k in zip(pads, size, strict=True)):
        x, pads = window.padded(x, -math.inf), (0,) * len(size)
    function = _MAXIMA[len(size) - 1]
    return node.only_first(function(x, size, window.strides, pads, window.dilations))


@operator("AveragePool")
def _average_pool(node: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    size = tuple(node.get("kernel_shape"))
    window = _Window(node, x, size)
    if any(step != 1 for step in window.dilations):
        raise node.refused(f"dilations are {window.dilations}; expected 1")
    function = _MEANS[len(size) - 1]
    counted, pads = bool(node.get("count_include_pad", 0)), window.symmetric
    if pads is not None and not any(2 * pad > k for pad, k in zip(pads, size, strict=True)):
        return function(x, size, window.strides, pads, count_include_pad=counted)
    if counted and node.get("ceil_mode", 0):
        raise node.refused("ceil_mode counts its padding, which is not known; leave one out")
    means = function(window.padded(x), size, window.strides)
    if counted:
        return means
    return means / function(window.padded(torch.ones_like(x[:1, :1])), size, window.strides)


@operator("GlobalAveragePool")
def _global_average(_: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    return x.mean(tuple(range(2, x.ndim)), keepdim=True)


@operator("GlobalMaxPool")
def _global_maximum(_: OnnxNode, x: torch.Tensor) -> torch.Tensor:
    return x.amax(tuple(range(2, x.ndim)), keepdim=True)


# -- other sizes -------------------------------------------------------------------------------


_UNKNOWN: Final = ("antialias", "exclude_outside", "keep_aspect_ratio_policy")
_COORDINATES: Final = ("align_corners", "asymmetric", "half_pixel", "pytorch_half_pixel")


@operator("Resize", numbers=(1, 2, 3))
def _resize(
    node: OnnxNode, x: torch.Tensor, _: Any = None, scales: Any = None, sizes: Any = None
) -> torch.Tensor:
    """Resize by PyTorch's operator, where it does the same."""
    mode = node.get("mode", "nearest")
    how = node.get("coordinate_transformation_mode", "half_pixel")
    unknown = [name for name in _UNKNOWN if node.get(name, "stretch") not in (0, "stretch")]
    if unknown or how not in _COORDINATES:
        raise node.refused(f"{', '.join(unknown) or how} is not known; leave it out")
    factors = _factors(node, x, scales, sizes)
    lengths = [math.floor(size * f) for size, f in zip(x.shape, factors, strict=True)]
    if sizes is not None:
        given = whole(node, sizes, "sizes")
        for axis, length in zip(_axes(node, x, given), given, strict=True):
            lengths[axis] = length
    if mode == "cubic":
        return _cubic(node, x, lengths, how)
    resized = _by_pytorch(node, x, lengths, factors) if x.ndim > 2 else None  # noqa: PLR2004
    if resized is None:
        raise node.refused(
            f"{mode} from {list(x.shape)} to {lengths} with {how} is not known; expected whole "
            "factors, or what torch.nn.Upsample does"
        )
    return resized


def _axes(node: OnnxNode, x: torch.Tensor, given: list[Any]) -> list[int]:
    axes = axes_of(node, None, rank=x.ndim)
    return list(range(x.ndim))[: len(given)] if axes is None else axes


def _factors(node: OnnxNode, x: torch.Tensor, scales: Any, sizes: Any) -> list[float]:
    """Return the growth factor of each axis."""
    factors = [1.0] * x.ndim
    if sizes is None:
        given = real(node, scales, "scales")
        for axis, factor in zip(_axes(node, x, given), given, strict=True):
            factors[axis] = factor
        return factors
    lengths = whole(node, sizes, "sizes")
    for axis, length in zip(_axes(node, x, lengths), lengths, strict=True):
        factors[axis] = length / x.shape[axis]
    return factors


def _by_pytorch(
    node: OnnxNode, x: torch.Tensor, lengths: list[int], factors: list[float]
) -> torch.Tensor | None:
    """Return the result of `functional.interpolate`; None if it would compute something else."""
    plain = list(x.shape[:2]) == lengths[:2] and all(
        length == size * factor
        for length, size, factor in zip(lengths, x.shape, factors, strict=True)
    )
    how = node.get("coordinate_transformation_mode", "half_pixel")
    if not plain:
        return None
    if node.get("mode", "nearest") == "nearest":
        rounding = node.get("nearest_mode", "round_prefer_floor")
        whole_ = how.endswith("half_pixel") and all(f.is_integer() for f in map(float, factors))
        same = rounding == "floor" if how == "asymmetric" else whole_ and "round" in rounding
        return functional.interpolate(x, lengths[2:], mode="nearest") if same else None
    named = {3: "linear", 4: "bilinear", 5: "trilinear"}.get(x.ndim)
    halves = how == "half_pixel" or (how == "pytorch_half_pixel" and min(lengths[2:]) > 1)
    if named is None or not (halves or how == "align_corners"):
        return None
    return functional.interpolate(x, lengths[2:], mode=named, align_corners=how == "align_corners")


def _cubic(node: OnnxNode, x: torch.Tensor, lengths: list[int], how: str) -> torch.Tensor:
    known = node.get("cubic_coeff_a", -0.75) == -0.75  # noqa: PLR2004 - PyTorch's own
    if x.ndim != 4 or how not in ("half_pixel", "align_corners") or not known:  # noqa: PLR2004
        raise node.refused(f"cubic with {how} is known for images and cubic_coeff_a -0.75 alone")
    return functional.interpolate(
        x, lengths[2:], mode="bicubic", align_corners=how == "align_corners"
    )
