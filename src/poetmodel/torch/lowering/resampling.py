"""Planes that are made larger: nearest neighbours, interpolation, padding; and their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from poetmodel.torch.lowering.operands import copy, fill, part, planes
from poetmodel.torch.lowering.registry import lowers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.torch.lowering.registry import Look, Lowering

aten = torch.ops.aten


@lowers(
    aten.upsample_nearest1d.default,
    aten.upsample_nearest2d.default,
    aten._upsample_nearest_exact1d.default,
    aten._upsample_nearest_exact2d.default,
)
def _nearest(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    _pick(op, out, x, _neighbours(op, x, out, op.args[2:]))


@lowers(
    aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d_backward.default,
    aten._upsample_nearest_exact1d_backward.default,
    aten._upsample_nearest_exact2d_backward.default,
)
def _nearest_backward(op: Lowering) -> None:
    dy, dx = op.value(op.args[0]), op.output()
    _pick_backward(op, dx, dy, _neighbours(op, dx, dy, op.args[3:]))


@lowers(aten.upsample_linear1d.default, aten.upsample_bilinear2d.default)
def _bilinear(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    steps, sizes = planes(out, x, along=_along(op))
    scales = _scales(x, out, aligned=op.args[2], factors=op.args[3:])
    of_x = _height_and_width(x, _along(op))
    aligned = int(op.args[2])
    op.call("pm_bilinear2d", out, x, steps, *sizes[:2], *of_x, *sizes[2:], aligned, *scales)


@lowers(aten.upsample_linear1d_backward.default, aten.upsample_bilinear2d_backward.default)
def _bilinear_backward(op: Lowering) -> None:
    dy, dx = op.value(op.args[0]), op.output()
    steps, sizes = planes(dx, dy, along=_along(op))
    scales = _scales(dx, dy, aligned=op.args[3], factors=op.args[4:])
    of_y = _height_and_width(dy, _along(op))
    op.call("pm_bilinear2d_backward", dx, dy, steps, *sizes, *of_y, int(op.args[3]), *scales)


@lowers(
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
)
def _pad(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    _pick(op, out, x, _padded(op, x, op.args[1]))


@lowers(
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
)
def _pad_backward(op: Lowering) -> None:
    dy, dx = op.value(op.args[0]), op.output()
    _pick_backward(op, dx, dy, _padded(op, dx, op.args[2]))


@lowers(aten.constant_pad_nd.default)
def _constant_pad(op: Lowering) -> None:
    x, out = op.value(op.args[0]), op.output()
    pads = list(zip(op.args[1][::2], op.args[1][1::2], strict=True))[::-1]
    if any(before > 0 or after > 0 for before, after in pads):
        fill(op, out, op.args[2])
    to = out
    for dimension, (before, after) in enumerate(pads, len(x.shape) - len(pads)):
        size = x.shape[dimension] + min(before, 0) + min(after, 0)
        x = part(x, dimension, max(-before, 0), size)
        to = part(to, dimension, max(before, 0), size)
    if x.elements:
        copy(op, to, x)


def _along(op: Lowering) -> int:
    """Return how many dimensions an operator works along: its name says it."""
    return 1 if "1d" in str(op.node.target) else 2


def _height_and_width(look: Look, along: int) -> tuple[int, int]:
    return (1, look.shape[-1]) if along == 1 else (look.shape[-2], look.shape[-1])


def _pick(op: Lowering, out: Look, x: Look, places: Sequence[tuple[int, ...]]) -> None:
    steps, sizes = planes(out, x, along=_along(op))
    op.call("pm_pick2d", out, x, *places, steps, *sizes)


def _pick_backward(op: Lowering, dx: Look, dy: Look, places: Sequence[tuple[int, ...]]) -> None:
    steps, sizes = planes(dx, dy, along=_along(op))
    of_y = _height_and_width(dy, _along(op))
    op.call("pm_pick2d_backward", dx, dy, *places, steps, *sizes, *of_y)


def _neighbours(
    op: Lowering, x: Look, out: Look, factors: Sequence[float | None]
) -> list[tuple[int, ...]]:
    """Return which rows and which columns are the nearest: those that PyTorch itself takes."""
    along = _along(op)
    exact = "exact" in str(op.node.target)
    pick = aten._upsample_nearest_exact1d if exact else aten.upsample_nearest1d
    found = []
    sizes = zip(x.shape[-along:], out.shape[-along:], factors, strict=True)
    for size, places, factor in sizes:
        numbers = torch.arange(size, dtype=torch.float32).view(1, 1, size)
        found.append(tuple(int(n) for n in pick(numbers, [places], factor).flatten().tolist()))
    return [(0,)] * (2 - along) + found


def _scales(x: Look, out: Look, *, aligned: bool, factors: Sequence[float | None]) -> list[float]:
    """Return how far apart in x neighbours of the result are, down and across."""
    along = len(factors)
    found = []
    for size, places, factor in zip(x.shape[-along:], out.shape[-along:], factors, strict=True):
        if aligned:
            found.append((size - 1) / (places - 1) if places > 1 else 0.0)
        else:
            found.append(1 / factor if factor else size / places)
    return [1.0] * (2 - along) + found


def _padded(op: Lowering, x: Look, pads: Sequence[int]) -> list[tuple[int, ...]]:
    """Return which rows and which columns of x those of the result are."""
    reflected = "reflection" in str(op.node.target)
    ends = list(zip(pads[::2], pads[1::2], strict=True))[::-1]
    found = []
    for size, (before, after) in zip(x.shape[-len(ends) :], ends, strict=True):
        places: list[int] = []
        for place in range(-before, size + after):
            if reflected:
                inside = abs(place)
                places.append(inside if inside < size else 2 * (size - 1) - inside)
            else:
                places.append(min(max(place, 0), size - 1))
        found.append(tuple(places))
    return [(0,)] * (2 - len(ends)) + found
