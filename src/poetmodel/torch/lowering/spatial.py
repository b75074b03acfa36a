"""Lowerings of convolutions, pooling, upsampling, padding, and their gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from poetmodel.lowered.calls import (
    ConvolutionSizes,
    flatten_windows,
    max_pool_window_bounds,
)
from poetmodel.torch.lowering.operands import copy, fill, lowers, plane_layout, slice_view

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.torch.lowering.operands import Lowering, StridedView

aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class _Convolution:
    """The operands of a convolution from x to y with weight w, and its sizes.

    For a transposed convolution, x is the output and y the input, because it computes x from y like
    the input gradient of a convolution from x to y.
    """

    x: StridedView
    w: StridedView
    y: StridedView
    sizes: ConvolutionSizes

    @property
    def batch(self) -> int:
        """Number of samples."""
        return self.x.shape[0]

    @property
    def output_channels(self) -> int:
        """Number of channels of y."""
        return self.sizes.results

    @property
    def has_contiguous_samples(self) -> bool:
        """Whether the tensors are contiguous, except for the batch dimension of y."""
        sample = replace(self.y, shape=self.y.shape[1:], strides=self.y.strides[1:])
        return self.x.is_contiguous and self.w.is_contiguous and sample.is_contiguous


@lowers(aten.convolution.default)
def _lower_convolution(op: Lowering) -> None:
    """Lower a convolution; a transposed one with a bias adds to an output that has the bias."""
    x, w = op.value(op.args[0]), op.value(op.args[1])
    bias = None if op.args[2] is None else op.value(op.args[2])
    transposed, y = op.args[6], op.output()
    convolution = _make_convolution(
        op, (y, w, x) if transposed else (x, w, y), op.args[3:6], op.args[8]
    )
    if not transposed:
        _call_convolution(
            op, "pm_conv2d", (convolution.y, convolution.x, convolution.w), convolution, bias=bias
        )
        return
    if bias is not None:
        _check_bias(op, bias)
        spatial_rank = len(y.shape) - 2
        shape, strides = (*bias.shape, *[1] * spatial_rank), (*bias.strides, *[0] * spatial_rank)
        copy(op, y, replace(bias, shape=shape, strides=strides))
    _call_convolution(
        op,
        "pm_conv2d_dx",
        (convolution.x, convolution.y, convolution.w),
        convolution,
        accumulate=bias is not None,
    )


@lowers(aten.convolution_backward.default)
def _lower_convolution_backward(op: Lowering) -> None:
    """Lower each requested gradient that is an output to a call: bias, then input, then weight."""
    dy, x, w = (op.value(argument) for argument in op.args[:3])
    transposed, output_mask = op.args[7], op.args[10]
    # The mask is checked, too: PyTorch's kernel also returns gradients that were not requested.
    if output_mask[2] and op.has_output(2):
        out = _check_bias(op, op.output(2))
        op.call(
            "pm_conv2d_db",
            out,
            dy,
            *_insert_missing_dimension(dy.shape, missing_value=1),
            *_insert_missing_dimension(dy.strides),
        )
    for position in (index for index in range(2) if output_mask[index] and op.has_output(index)):
        out = op.output(position)
        direct_operands = (x, out, dy) if position else (out, w, dy)
        operands = (
            (direct_operands[2], direct_operands[1], direct_operands[0])
            if transposed
            else direct_operands
        )
        convolution = _make_convolution(op, operands, op.args[4:7], op.args[9])
        if position:
            _call_convolution(
                op, "pm_conv2d_dw", (convolution.w, convolution.x, convolution.y), convolution
            )
        elif transposed:
            _call_convolution(
                op, "pm_conv2d", (convolution.y, convolution.x, convolution.w), convolution
            )
        else:
            _call_convolution(
                op,
                "pm_conv2d_dx",
                (convolution.x, convolution.y, convolution.w),
                convolution,
                accumulate=False,
            )


def _make_convolution(
    op: Lowering, operands: Sequence[StridedView], window_arguments: Sequence[Any], groups: int
) -> _Convolution:
    """Return a convolution's operands and sizes; refuse all but one or two spatial dimensions.

    `operands` are x, w and y; `window_arguments` are stride, padding and dilation. A window that
    covers the image of one group makes a matrix product: input elements are channels of a pixel.
    """
    x, w, y = operands
    spatial_rank = len(x.shape) - 2
    if spatial_rank not in (1, 2):
        op.refuse(
            f"expected one or two spatial dimensions, got {spatial_rank}; "
            "there is no kernel for more"
        )
    missing_rank = 2 - spatial_rank
    parameters = [
        [neutral_number] * missing_rank + _repeat_per_dimension(value, spatial_rank)
        for value, neutral_number in zip(window_arguments, (1, 0, 1), strict=True)
    ]
    shapes = [(*view.shape[:2], *[1] * missing_rank, *view.shape[2:]) for view in (x, w, y)]
    flat_parameters = [n for pair in parameters for n in pair]
    size_list = (*shapes[0][1:], *shapes[2][1:], *shapes[1][2:], *flat_parameters, groups)
    sizes = ConvolutionSizes(*size_list)
    convolution = _Convolution(x=x, w=w, y=y, sizes=sizes)
    covers_image = sizes.out_plane == 1 and shapes[0][2:] == shapes[1][2:]
    is_padded = sizes.padding_down or sizes.padding_across
    if covers_image and not is_padded and groups == 1 and convolution.has_contiguous_samples:
        sizes = sizes._replace(
            channels=math.prod(shapes[0][1:]),
            height=1, width=1, window_height=1, window_width=1,
            stride_down=1, stride_across=1, dilation_down=1, dilation_across=1,
        )  # fmt: skip
        convolution = replace(convolution, sizes=sizes)
    return convolution


def _repeat_per_dimension(value: Sequence[int], spatial_rank: int) -> list[int]:
    """Return a parameter for each dimension; a single number applies to all dimensions."""
    return list(value) * spatial_rank if len(value) == 1 else list(value)


def _call_convolution(
    op: Lowering,
    kernel: str,
    operands: Sequence[StridedView],
    convolution: _Convolution,
    *,
    bias: StridedView | None = None,
    accumulate: bool | None = None,
) -> None:
    """Add the call of `kernel`, or of its variant for depthwise convolutions or for any strides.

    `operands` are the output and the inputs of the kernel. `accumulate`: whether ``pm_conv2d_dx``
    adds to its output; None for other kernels. Only ``pm_conv2d`` and its variants have a `bias`.
    """
    arguments: list[Any] = [*operands]
    if kernel == "pm_conv2d":
        arguments.append(0 if bias is None else _check_bias(op, bias))
    arguments.append(tuple(convolution.sizes))
    last_arguments = [] if accumulate is None else [int(accumulate)]
    if convolution.has_contiguous_samples:
        if 1 < convolution.sizes.channels == convolution.sizes.groups:
            kernel = kernel.replace("conv2d", "depthwise")
        elif kernel == "pm_conv2d":
            last_arguments = [0]  # no accumulation
        step = convolution.y.strides[0] if convolution.batch > 1 else convolution.y.elements
        op.call(
            kernel,
            *arguments,
            convolution.batch,
            0,
            convolution.output_channels,
            step,
            *last_arguments,
        )
    else:
        strides = tuple(
            step for view in operands for step in _insert_missing_dimension(view.strides)
        )
        op.call(
            f"{kernel}_strided",
            *arguments,
            strides,
            convolution.batch,
            0,
            convolution.output_channels,
            *last_arguments,
        )


def _insert_missing_dimension(numbers: Sequence[int], *, missing_value: int = 0) -> tuple[int, ...]:
    """Return four sizes or strides; insert a value for rows if there is one spatial dimension."""
    return (*numbers[:2], *[missing_value] * (4 - len(numbers)), *numbers[2:])


def _check_bias(op: Lowering, view: StridedView) -> StridedView:
    """Return a bias or its gradient; refuse one that is not contiguous."""
    if not view.is_contiguous:
        op.refuse("a bias and its gradient must be contiguous")
    return view


# -- pools -------------------------------------------------------------------------------------


@lowers(aten.max_pool2d_with_indices.default)
def _lower_max_pool(op: Lowering) -> None:
    """Lower a max pool; refuse windows that contain only padding."""
    x = op.value(op.args[0])
    window_sizes, stride, padding, dilation = (_to_pair(argument) for argument in op.args[1:5])
    bounds = [
        max_pool_window_bounds(*numbers)
        for numbers in zip(
            x.shape[-2:], op.output().shape[-2:], window_sizes, stride or window_sizes, padding,
            dilation,
            strict=True,
        )
    ]  # fmt: skip
    if any(begin >= end for axis_bounds in bounds for begin, end in axis_bounds):
        op.refuse("a window contains only padding: its maximum is -inf, and has no gradient")
    _call_max_pool(op, x, bounds, dilation)


@lowers(aten.adaptive_max_pool2d.default)
def _lower_adaptive_max_pool(op: Lowering) -> None:
    x = op.value(op.args[0])
    bounds = [
        [window[:2] for window in _adaptive_window_bounds(*sizes)]
        for sizes in zip(x.shape[-2:], op.output().shape[-2:], strict=True)
    ]
    _call_max_pool(op, x, bounds, [1, 1])


def _call_max_pool(
    op: Lowering, x: StridedView, bounds: Sequence[Sequence[Sequence[int]]], dilation: Sequence[int]
) -> None:
    """Add the call of the max pool kernel, which also writes indices if they are an output."""
    out = op.output()
    indices = op.output(1) if op.has_output(1) else None
    strides, sizes = plane_layout(out, indices or out, x)
    op.call(
        "pm_max_pool2d", out, indices or 0, x, *map(flatten_windows, bounds), strides, *sizes,
        x.shape[-1],
        *dilation,
    )  # fmt: skip


@lowers(aten.max_pool2d_with_indices_backward.default, aten.adaptive_max_pool2d_backward.default)
def _lower_max_pool_backward(op: Lowering) -> None:
    dy, indices, dx = op.value(op.args[0]), op.value(op.args[-1]), op.output()
    strides, sizes = plane_layout(dx, dy, indices)
    op.call("pm_max_pool2d_backward", dx, dy, indices, strides, *sizes, *dy.shape[-2:])


@lowers(aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default)
def _lower_mean_pool(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    bounds, divisor = _mean_pool_window_bounds(op.args[1:], x, out)
    strides, sizes = plane_layout(out, x)
    op.call("pm_mean_pool2d", out, x, *bounds, strides, *sizes, divisor)


@lowers(aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d_backward.default)
def _lower_mean_pool_backward(op: Lowering) -> None:
    dy, dx = op.value(op.args[0]), op.output()
    bounds, divisor = _mean_pool_window_bounds(op.args[2:], dx, dy)
    strides, sizes = plane_layout(dx, dy)
    op.call("pm_mean_pool2d_backward", dx, dy, *bounds, strides, *sizes, *dy.shape[-2:], divisor)


def _mean_pool_window_bounds(
    arguments: Sequence[Any], x: StridedView, out: StridedView
) -> tuple[list[tuple[int, ...]], int]:
    """Return (windows along rows and along columns, divisor of sums) of a mean pool.

    Windows are flat: begin, end and counted length (with padding) of each. For a divisor of 0, each
    sum is divided by the product of the counted lengths of its window.
    """
    if len(arguments) <= 1:
        dimensions = zip(x.shape[-2:], out.shape[-2:], strict=True)
        return [flatten_windows(_adaptive_window_bounds(*sizes)) for sizes in dimensions], 0
    window_sizes, stride, padding = (_to_pair(argument) for argument in arguments[:3])
    count_padding = arguments[4]
    bounds = []
    for size, output_size, window_size, step, pad in zip(
        x.shape[-2:], out.shape[-2:], window_sizes, stride or window_sizes, padding, strict=True
    ):
        starts = [k * step - pad for k in range(output_size)]
        ends = [min(start + window_size, size + pad) for start in starts]
        clipped = [(max(start, 0), min(end, size)) for start, end in zip(starts, ends, strict=True)]
        lengths = [
            end - start
            for start, end in (zip(starts, ends, strict=True) if count_padding else clipped)
        ]
        bounds.append(
            flatten_windows(
                [(*window, length) for window, length in zip(clipped, lengths, strict=True)]
            )
        )
    return bounds, arguments[5] or 0


def _adaptive_window_bounds(size: int, output_size: int) -> list[tuple[int, int, int]]:
    """Return begin, end and length of the window of each output, for an adaptive pool."""
    starts = [k * size // output_size for k in range(output_size)]
    ends = [-(-(k + 1) * size // output_size) for k in range(output_size)]
    return [(start, end, end - start) for start, end in zip(starts, ends, strict=True)]


def _to_pair(argument: Any) -> list[int]:
    """Return the numbers for rows and columns; [] for a stride that the call omits."""
    numbers = [argument] if isinstance(argument, int) else list(argument)
    return numbers * 2 if len(numbers) == 1 else numbers


# -- resampling, padding -----------------------------------------------------------------------


@lowers(
    aten.upsample_nearest1d.default,
    aten.upsample_nearest2d.default,
    aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact2d.default,
)
def _lower_nearest(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    _call_pick(op, out, x, _nearest_sources(op, x, out, op.args[2:]))


@lowers(
    aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten._upsample_nearest_exact1d_backward.default,
    aten._upsample_nearest_exact2d_backward.default,
)
def _lower_nearest_backward(op: Lowering) -> None:
    dy, dx = op.value(op.args[0]), op.output()
    _call_pick_backward(op, dx, dy, _nearest_sources(op, dx, dy, op.args[3:]))


@lowers(aten.upsample_linear1d.default, aten.upsample_bilinear2d.default)
def _lower_bilinear(op: Lowering) -> None:
    """Lower bilinear interpolation, or linear interpolation as that of a single row."""
    x, out = op.value(op.args[0]), op.output()
    strides, sizes = plane_layout(out, x, plane_dimensions=_spatial_rank(op))
    distances = _source_distances(x, out, align_corners=op.args[2], factors=op.args[3:])
    x_sizes = _height_and_width(x, _spatial_rank(op))
    align_corners = int(op.args[2])
    op.call(
        "pm_bilinear2d",
        out,
        x,
        strides,
        *sizes[:2],
        *x_sizes,
        *sizes[2:],
        align_corners,
        *distances,
    )


@lowers(aten.upsample_linear1d_backward.default, aten.upsample_bilinear2d_backward.default)
def _lower_bilinear_backward(op: Lowering) -> None:
    """Lower to one call; the kernel sets the gradient to 0 before it adds."""
    dy, dx = op.value(op.args[0]), op.output()
    strides, sizes = plane_layout(dx, dy, plane_dimensions=_spatial_rank(op))
    distances = _source_distances(dx, dy, align_corners=op.args[3], factors=op.args[4:])
    y_sizes = _height_and_width(dy, _spatial_rank(op))
    op.call(
        "pm_bilinear2d_backward", dx, dy, strides, *sizes, *y_sizes, int(op.args[3]), *distances
    )


@lowers(
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
)
def _lower_padding(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    _call_pick(op, out, x, _padding_sources(op, x, op.args[1]))


@lowers(
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
)
def _lower_padding_backward(op: Lowering) -> None:
    dy, dx = op.value(op.args[0]), op.output()
    _call_pick_backward(op, dx, dy, _padding_sources(op, dx, op.args[2]))


@lowers(aten.constant_pad_nd.default)
def _lower_constant_padding(op: Lowering) -> None:
    """Lower constant padding: fill the output, then copy the input; negative padding crops."""
    x, out = op.value(op.args[0]), op.output()
    pads = list(zip(op.args[1][::2], op.args[1][1::2], strict=True))[::-1]
    if any(pad_before > 0 or pad_after > 0 for pad_before, pad_after in pads):
        fill(op, out, op.args[2])
    target = out
    for dimension, (pad_before, pad_after) in enumerate(pads, len(x.shape) - len(pads)):
        size = x.shape[dimension] + min(pad_before, 0) + min(pad_after, 0)
        x = slice_view(x, dimension, max(-pad_before, 0), size)
        target = slice_view(target, dimension, max(pad_before, 0), size)
    if x.elements:
        copy(op, target, x)


def _spatial_rank(op: Lowering) -> int:
    """Return the number of spatial dimensions of an operator, from its name."""
    return 1 if "1d" in str(op.node.target) else 2


def _height_and_width(view: StridedView, spatial_rank: int) -> tuple[int, int]:
    return (1, view.shape[-1]) if spatial_rank == 1 else (view.shape[-2], view.shape[-1])


def _call_pick(
    op: Lowering, out: StridedView, x: StridedView, sources: Sequence[tuple[int, ...]]
) -> None:
    """Add the call that copies to `out` the elements of `x` in the rows and columns `sources`."""
    strides, sizes = plane_layout(out, x, plane_dimensions=_spatial_rank(op))
    op.call("pm_pick2d", out, x, *sources, strides, *sizes)


def _call_pick_backward(
    op: Lowering, dx: StridedView, dy: StridedView, sources: Sequence[tuple[int, ...]]
) -> None:
    """Add the call that sets `dx` to 0, then adds `dy` at the rows and columns `sources`."""
    strides, sizes = plane_layout(dx, dy, plane_dimensions=_spatial_rank(op))
    y_sizes = _height_and_width(dy, _spatial_rank(op))
    op.call("pm_pick2d_backward", dx, dy, *sources, strides, *sizes, *y_sizes)


def _nearest_sources(
    op: Lowering, x: StridedView, out: StridedView, factors: Sequence[float | None]
) -> list[tuple[int, ...]]:
    """Return the source row of each output row of an upsampling, and likewise of columns.

    `factors` are the scale factors of the call, or None for each that it omits.
    """
    spatial_rank = _spatial_rank(op)
    is_exact = "exact" in str(op.node.target)
    upsample = aten._upsample_nearest_exact1d if is_exact else aten.upsample_nearest1d
    neighbours = []
    sizes = zip(x.shape[-spatial_rank:], out.shape[-spatial_rank:], factors, strict=True)
    for size, output_size, factor in sizes:
        positions = torch.arange(size, dtype=torch.float32).view(1, 1, size)
        neighbours.append(
            tuple(int(n) for n in upsample(positions, [output_size], factor).flatten().tolist())
        )
    return [(0,)] * (2 - spatial_rank) + neighbours


def _source_distances(
    x: StridedView, out: StridedView, *, align_corners: bool, factors: Sequence[float | None]
) -> list[float]:
    """Return the distance in `x` between neighbouring outputs, for rows and columns.

    `factors` are those of the call, or None for each that it omits.
    """
    spatial_rank = len(factors)
    distances = []
    for size, output_size, factor in zip(
        x.shape[-spatial_rank:], out.shape[-spatial_rank:], factors, strict=True
    ):
        if align_corners:
            distances.append((size - 1) / (output_size - 1) if output_size > 1 else 0.0)
        else:
            distances.append(1 / factor if factor else size / output_size)
    return [1.0] * (2 - spatial_rank) + distances


def _padding_sources(op: Lowering, x: StridedView, pads: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the source row of each row, and column of each column, of a padded result.

    `pads` has the widths before and after each dimension of `x`, the last first.
    """
    is_reflection = "reflection" in str(op.node.target)
    widths = list(zip(pads[::2], pads[1::2], strict=True))[::-1]
    sources = []
    for size, (pad_before, pad_after) in zip(x.shape[-len(widths) :], widths, strict=True):
        positions: list[int] = []
        for position in range(-pad_before, size + pad_after):
            if is_reflection:
                distance = abs(position)
                positions.append(distance if distance < size else 2 * (size - 1) - distance)
            else:
                positions.append(min(max(position, 0), size - 1))
        sources.append(tuple(positions))
    return [(0,)] * (2 - len(widths)) + sources
