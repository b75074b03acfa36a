"""Pools: largest elements and means of windows, fixed and adaptive, and their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from poetmodel.torch.lowering.operands import planes
from poetmodel.torch.lowering.registry import lowers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.torch.lowering.registry import Look, Lowering

aten = torch.ops.aten


@lowers(aten.max_pool2d_with_indices.default)
def _max_pool(op: Lowering) -> None:
    x = op.value(op.args[0])
    windows, stride, padding, dilation = (_pair(argument) for argument in op.args[1:5])
    bounds = [
        _max_windows(*numbers)
        for numbers in zip(
            x.shape[-2:], op.output().shape[-2:], windows, stride or windows, padding, dilation,
            strict=True,
        )
    ]  # fmt: skip
    _call_max_pool(op, x, bounds, dilation)


@lowers(aten.adaptive_max_pool2d.default)
def _adaptive_max_pool(op: Lowering) -> None:
    x = op.value(op.args[0])
    bounds = [
        [window[:2] for window in _adaptive_windows(*sizes)]
        for sizes in zip(x.shape[-2:], op.output().shape[-2:], strict=True)
    ]
    _call_max_pool(op, x, bounds, [1, 1])


def _call_max_pool(
    op: Lowering, x: Look, bounds: Sequence[Sequence[Sequence[int]]], dilation: Sequence[int]
) -> None:
    out = op.output()
    indices = op.output(1) if op.has_output(1) else None
    steps, sizes = planes(out, indices or out, x)
    op.call(
        "pm_max_pool2d", out, indices or 0, x, *map(_flat, bounds), steps, *sizes, x.shape[-1],
        *dilation,
    )  # fmt: skip


@lowers(aten.max_pool2d_with_indices_backward.default, aten.adaptive_max_pool2d_backward.default)
def _max_pool_backward(op: Lowering) -> None:
    dy, indices, dx = op.value(op.args[0]), op.value(op.args[-1]), op.output()
    steps, sizes = planes(dx, dy, indices)
    op.call("pm_max_pool2d_backward", dx, dy, indices, steps, *sizes, *dy.shape[-2:])


@lowers(aten.avg_pool2d.default)
def _mean_pool(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    _call_mean_pool(op, out, x, _mean_bounds(op.args[1:6], x, out), op.args[6])


@lowers(aten.avg_pool2d_backward.default)
def _mean_pool_backward(op: Lowering) -> None:
    dy, dx = op.value(op.args[0]), op.output()
    _call_mean_backward(op, dx, dy, _mean_bounds(op.args[2:7], dx, dy), op.args[7])


@lowers(aten._adaptive_avg_pool2d.default)
def _adaptive_mean_pool(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    _call_mean_pool(op, out, x, _adaptive_bounds(x, out), None)


@lowers(aten._adaptive_avg_pool2d_backward.default)
def _adaptive_mean_pool_backward(op: Lowering) -> None:
    dy, dx = op.value(op.args[0]), op.output()
    _call_mean_backward(op, dx, dy, _adaptive_bounds(dx, dy), None)


def _call_mean_pool(
    op: Lowering, out: Look, x: Look, bounds: Sequence[tuple[int, ...]], divisor: int | None
) -> None:
    steps, sizes = planes(out, x)
    op.call("pm_mean_pool2d", out, x, *bounds, steps, *sizes, divisor or 0)


def _call_mean_backward(
    op: Lowering, dx: Look, dy: Look, bounds: Sequence[tuple[int, ...]], divisor: int | None
) -> None:
    steps, sizes = planes(dx, dy)
    shape = dy.shape[-2:]
    op.call("pm_mean_pool2d_backward", dx, dy, *bounds, steps, *sizes, *shape, divisor or 0)


def _mean_bounds(arguments: Sequence[Any], x: Look, out: Look) -> list[tuple[int, ...]]:
    """Return the windows of rows and of columns: begin, end, and the length that is counted."""
    windows, stride, padding = (_pair(argument) for argument in arguments[:3])
    count_padding = arguments[4]
    found = []
    for size, places, window, step, pad in zip(
        x.shape[-2:], out.shape[-2:], windows, stride or windows, padding, strict=True
    ):
        starts = [place * step - pad for place in range(places)]
        ends = [min(start + window, size + pad) for start in starts]
        inside = [(max(s, 0), min(e, size)) for s, e in zip(starts, ends, strict=True)]
        lengths = [e - s for s, e in (zip(starts, ends, strict=True) if count_padding else inside)]
        found.append(_flat([(*i, length) for i, length in zip(inside, lengths, strict=True)]))
    return found


def _adaptive_bounds(x: Look, out: Look) -> list[tuple[int, ...]]:
    sizes = zip(x.shape[-2:], out.shape[-2:], strict=True)
    return [_flat(_adaptive_windows(size, places)) for size, places in sizes]


def _adaptive_windows(size: int, places: int) -> list[tuple[int, int, int]]:
    """Return begin, end and length of each window."""
    starts = [place * size // places for place in range(places)]
    ends = [-(-(place + 1) * size // places) for place in range(places)]
    return [(start, end, end - start) for start, end in zip(starts, ends, strict=True)]


def _max_windows(
    size: int, places: int, window: int, stride: int, padding: int, dilation: int
) -> list[tuple[int, int]]:
    """Return begin and end of each window; it begins in the image."""
    starts = [place * stride - padding for place in range(places)]
    ends = [min(start + (window - 1) * dilation + 1, size) for start in starts]
    inside = [start + max(0, -(start // dilation)) * dilation for start in starts]
    return list(zip(inside, ends, strict=True))


def _pair(argument: Any) -> list[int]:
    """Return a number for rows and one for columns; a list of one stands for both."""
    numbers = [argument] if isinstance(argument, int) else list(argument)
    return numbers * 2 if len(numbers) == 1 else numbers


def _flat(windows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(number for window in windows for number in window)
