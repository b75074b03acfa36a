"""What an operator of PyTorch between a dequantize and a quantize becomes: one layer in int8."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.int8.front import QuantizedLayer
from poetmodel.torch.int8.levels import single
from poetmodel.torch.int8.values import INPUT, Bytes, Padded, Unfinished, arguments_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, fx

    from poetmodel.torch.int8.levels import Levels
    from poetmodel.torch.int8.reader import Reader

    Read = Callable[[Reader, fx.Node], Any]

READ: Final[dict[Any, Read]] = {}
"""How each operator is read."""

aten: Final = torch.ops.aten
_IMAGE = 4
"""Dimensions of batches of images, and of windows over them."""


def _reads(*targets: Any) -> Callable[[Read], Read]:
    """Return a decorator that registers how operators are read."""

    def register(read: Read) -> Read:
        READ.update(dict.fromkeys(targets, read))
        return read

    return register


@_reads(
    aten.clone.default,
    aten.contiguous.default,
    aten.detach.default,
    aten.alias.default,
    aten.dropout.default,
)
def _same(reader: Reader, node: fx.Node) -> Any:
    if node.target is aten.dropout.default and arguments_of(node)[2]:
        reader.refuse(node, "it draws random numbers; call eval() before the model is exported")
    return reader.values[node.args[0]]


# -- convolutions and linear layers ------------------------------------------------------------


@_reads(aten.conv2d.default, aten.conv2d.padding, aten.convolution.default)
def _convolution(reader: Reader, node: fx.Node) -> Unfinished:
    x, weight, bias, stride, padding, dilation, *more = arguments_of(node)
    if node.target is aten.convolution.default:
        transposed, _, groups = more
        if transposed:
            reader.refuse(node, "transposed convolutions have no kernel in int8")
    else:
        (groups,) = more
    source, around = _padded(reader, node, x)
    raw, after = reader.linear(node, weight, bias, source)
    if raw.ndim != _IMAGE:
        reader.refuse(node, "expected a convolution of two dimensions, which has a kernel in int8")
    down, across = _pair(stride)
    apart = _pair(dilation)
    if isinstance(padding, str):
        wide = [d * (n - 1) for d, n in zip(apart, raw.shape[2:], strict=True)]
        wide = wide if padding == "same" else [0, 0]
        own = [half for n in wide for half in (n // 2, n - n // 2)]
    else:
        own = [n for n in _pair(padding) for _ in range(2)]
    pads = tuple(a + b for a, b in zip(own, around, strict=True))
    plain = not any(pads) and (down, across) == (1, 1)
    geometry = ((down, across), pads, apart)
    last = raw.permute(0, 2, 3, 1).contiguous()
    if raw.shape[2:] == (1, 1) and plain and groups == 1:
        return _product(reader, node, source, last.flatten(1), after)
    if groups > 1 and raw.shape[1] == 1 and raw.shape[0] == groups:
        operator, constant = "depthwise", raw[:, 0].permute(1, 2, 0).contiguous()
        numbers: tuple[Any, ...] = (*geometry, source.levels.zero)
    else:
        operator, constant = "conv2d", last
        numbers = (*geometry, groups, source.levels.zero)

    constants = {"weight": constant, **after}
    _, scales = reader.weight(node, weight)

    def make(levels: Levels) -> QuantizedLayer:
        return QuantizedLayer(
            operator,
            constants,
            (*numbers, *levels.ending),
            weight_scale=scales.float(),
            input_levels=source.levels,
        )

    return Unfinished(node=node, takes=(source,), make=make)


@_reads(aten.linear.default)
def _linear(reader: Reader, node: fx.Node) -> Unfinished:
    x, weight, bias = arguments_of(node)
    source = reader.quantized(node, x)
    raw, after = reader.linear(node, weight, bias, source)
    if source.planes:
        # The elements of a sample lie with the channels last.
        raw = raw.unflatten(1, source.planes).permute(0, 2, 3, 1).flatten(1)
    return _product(reader, node, source, raw.contiguous(), after, flattens=bool(source.planes))


def _product(
    reader: Reader,
    node: fx.Node,
    source: Bytes,
    weight: Tensor,
    after: dict[str, Tensor],
    *,
    flattens: bool = False,
) -> Unfinished:
    _, scales = reader.weight(node, arguments_of(node)[1])

    def make(levels: Levels) -> QuantizedLayer:
        return QuantizedLayer(
            "pointwise",
            {"weight": weight, **after},
            levels.ending,
            flattens=flattens,
            weight_scale=scales.float(),
            input_levels=source.levels,
        )

    return Unfinished(node=node, takes=(source,), make=make)


@_reads(aten.constant_pad_nd.default, aten.pad.default)
def _pad(reader: Reader, node: fx.Node) -> Padded:
    x, pads, *more = arguments_of(node)
    value = more[-1] or 0
    mode = more[0] if node.target is aten.pad.default else "constant"
    if value != 0 or mode != "constant" or len(pads) != _IMAGE or min(pads) < 0:
        reader.refuse(node, "expected zeros around rows and columns, for a convolution")
    left, right, above, below = pads
    of = INPUT if reader.values.get(x) == INPUT else reader.quantized(node, x)
    return Padded(of=of, padding=(above, below, left, right))


def _padded(reader: Reader, node: fx.Node, x: Any) -> tuple[Bytes, tuple[int, int, int, int]]:
    """Return what a convolution is of, and zeros around that."""
    value = reader.values.get(x)
    if isinstance(value, Padded) and isinstance(value.of, Bytes):
        return value.of, value.padding
    return reader.quantized(node, x), (0, 0, 0, 0)


# -- activations -------------------------------------------------------------------------------


@_reads(aten.relu.default, aten.relu_.default)
def _relu(reader: Reader, node: fx.Node) -> Unfinished:
    return reader.clamped(node, 0.0, math.inf)


@_reads(
    aten.hardtanh.default,
    aten.hardtanh_.default,
    aten.clamp.default,
    aten.clamp_.default,
    aten.clamp_min.default,
)
def _clamp(reader: Reader, node: fx.Node) -> Unfinished:
    low, high = (*arguments_of(node)[1:], None)[:2]
    return reader.clamped(
        node, -math.inf if low is None else float(low), math.inf if high is None else float(high)
    )


@_reads(aten.relu6.default)
def _relu6(reader: Reader, node: fx.Node) -> Unfinished:
    return reader.clamped(node, 0.0, 6.0)


# -- sums, pools and shapes --------------------------------------------------------------------


@_reads(aten.add.Tensor, aten.add_.Tensor)
def _add(reader: Reader, node: fx.Node) -> Unfinished:
    first, second, factor = (*node.args, node.kwargs.get("alpha", 1))[:3]
    sources = tuple(reader.quantized(node, operand) for operand in (first, second))
    if factor != 1 or sources[0].planes != sources[1].planes:
        reader.refuse(node, "expected the sum of two quantized tensors of one shape")
    given = tuple(n for one in sources for n in (single(one.levels.scale), one.levels.zero))

    def make(levels: Levels) -> QuantizedLayer:
        return QuantizedLayer("add", {}, (*given, *levels.ending))

    return Unfinished(node=node, takes=sources, make=make, planes=sources[0].planes)


@_reads(aten.max_pool2d.default)
def _maximum(reader: Reader, node: fx.Node) -> Any:
    x, window, stride, padding, dilation, ceil = arguments_of(node)
    source = reader.quantized(node, x)
    if ceil:
        reader.refuse(node, "ceil_mode has no kernel in int8")
    size = _pair(window)
    layer = QuantizedLayer(
        "maximum",
        {},
        (size, _pair(stride) if stride else size, _around(_pair(padding)), _pair(dilation)),
    )
    return reader.done(node, layer, source)


@_reads(aten.avg_pool2d.default)
def _average(reader: Reader, node: fx.Node) -> Unfinished:
    x, window, stride, padding, ceil, included, divisor = arguments_of(node)
    size, pads = _pair(window), _pair(padding)
    if ceil or divisor is not None or (any(pads) and not included):
        reader.refuse(
            node,
            "ceil_mode, divisor_override, and count_include_pad=False with padding have no "
            "kernel in int8",
        )
    return _mean(reader, node, x, (size, _pair(stride) if stride else size, _around(pads)))


@_reads(aten.adaptive_avg_pool2d.default)
def _adaptive(reader: Reader, node: fx.Node) -> Unfinished:
    x, sizes = arguments_of(node)
    if _pair(sizes) != (1, 1):
        reader.refuse(node, f"expected the mean of whole planes, got {list(_pair(sizes))} places")
    return _mean(reader, node, x)


@_reads(aten.mean.dim)
def _mean_of_planes(reader: Reader, node: fx.Node) -> Unfinished:
    x, dimensions, keeps, _ = arguments_of(node)
    if sorted(d % _IMAGE for d in dimensions or ()) != [2, 3]:
        reader.refuse(node, f"expected the mean over rows and columns, got that over {dimensions}")
    return _mean(reader, node, x, flattens=not keeps)


def _mean(
    reader: Reader,
    node: fx.Node,
    x: Any,
    geometry: tuple[Sequence[int], ...] | None = None,
    *,
    flattens: bool = False,
) -> Unfinished:
    """Return a mean of windows, or of whole planes."""
    source = reader.quantized(node, x)
    if geometry is None:
        height, width = reader.shape(node, x)[2:]
        geometry = ((height, width), (height, width), (0, 0, 0, 0))
    factor = single(source.levels.scale / math.prod(geometry[0]))

    def make(levels: Levels) -> QuantizedLayer:
        return QuantizedLayer(
            "average", {}, (*geometry, factor, source.levels.zero, *levels.ending)
        )

    planes = (reader.shape(node, x)[1], 1, 1) if flattens else ()
    return Unfinished(node=node, takes=(source,), make=make, planes=planes)


@_reads(aten.flatten.using_ints, aten.view.default, aten.reshape.default)
def _flat(reader: Reader, node: fx.Node) -> Any:
    source = reader.quantized(node, node.args[0])
    shape, result = reader.shape(node, node.args[0]), tuple(node.meta["val"].shape)
    if result == shape:
        return source
    if len(result) != 2 or len(shape) != _IMAGE or result[0] != shape[0]:  # noqa: PLR2004
        reader.refuse(node, "expected one row of each sample, as flatten(1) gives")
    return replace(source, planes=shape[1:])


def _pair(value: Any) -> tuple[int, int]:
    numbers = list(value) if isinstance(value, list | tuple) else [value]
    return (int(numbers[0]), int(numbers[-1]))


def _around(pads: tuple[int, int]) -> tuple[int, int, int, int]:
    return (pads[0], pads[0], pads[1], pads[1])
