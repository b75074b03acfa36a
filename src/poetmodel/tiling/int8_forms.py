"""Int8 kernels: convert their calls to loops over channels, and loops to calls.

Pixels are a dimension of size 0 with the stride from one pixel to the next: slices have fewer
channels per pixel. If an undivided result is computed slice by slice, its pixels are farther apart
than the slice's channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from poetmodel.lowered.calls import ConvolutionSizes
from poetmodel.lowered.loops import (
    Loops,
    call_refs,
    loops_by_name,
    merged,
    named_arguments,
    with_arguments,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.lowered.calls import Call
    from poetmodel.lowered.loops import Numbers

    LoopFormat: TypeAlias = tuple[Callable[[Call], Loops | None], Callable[[Loops], Call | None]]
    """Functions that convert a call to loops, and loops to a call."""

_PER_CHANNEL: Final = ("start", "scale", "bias")
"""Tensors of a layer with one number per output channel."""


def _pixel_steps(size: int, step: int, *, channel: int = 1) -> Numbers:
    """Return the strides of batch, channels and pixels of images with `size` pixels."""
    return size * step, channel, step


def _pixel_step(loops: Loops, number: int, size: int) -> int | None:
    """Return the stride of the pixels of a tensor; None if its images are not contiguous."""
    batch, *_, pixel = loops.steps[number]
    return pixel if loops.sizes[0] == 1 or batch == size * pixel else None


# -- convolutions ------------------------------------------------------------------------------


def _read_pointwise(call: Call) -> Loops:
    """Convert a linear layer to loops over pixels, output and input channels."""
    arguments = named_arguments(call)
    results, channels = arguments["results"], arguments["in"]
    steps = {"out": (arguments["out_step"], 1, 0), "x": (channels, 0, 1), "w": (0, channels, 1)}
    sizes = (arguments["pixels"], results, channels)
    return loops_by_name(call, sizes, {**steps, **dict.fromkeys(_PER_CHANNEL, (0, 1, 0))})


def _write_pointwise(loops: Loops) -> Call | None:
    """Convert loops to a linear layer; None if input channels are divided."""
    if len(loops.sizes) != len(_POINTWISE):
        return None
    (out_step, *_), (in_step, *_), *_ = loops.steps
    pixels, results, channels = loops.sizes
    if in_step != channels:
        return None
    return with_arguments(loops, {"pixels": pixels, "results": results, "out_step": out_step})


def _read_convolution(call: Call) -> Loops | None:
    """Convert a convolution to loops over batch, output channels, input channels and pixels.

    None for grouped convolutions.
    """
    arguments = named_arguments(call)
    sizes, batch = ConvolutionSizes(*arguments["shape"]), arguments["batch"]
    if sizes.groups != 1:
        return None
    filters = sizes.channels * sizes.window
    batch_step, channel_step, pixel_step = _pixel_steps(sizes.out_plane, sizes.results)
    steps = {
        "out": (batch_step, channel_step, 0, pixel_step),
        "x": (sizes.plane * sizes.channels, 0, 1, sizes.channels),
        "w": (0, filters, 1, 0),
        **dict.fromkeys(_PER_CHANNEL, (0, 1, 0, 0)),
    }
    return loops_by_name(call, (batch, arguments["count"], sizes.channels, 0), steps)


def _write_convolution(loops: Loops) -> Call | None:
    """Convert loops to a convolution; None if its strides are not supported."""
    sizes = ConvolutionSizes(*named_arguments(loops.call)["shape"])
    out_step, x_step = _pixel_step(loops, 0, sizes.out_plane), _pixel_step(loops, 1, sizes.plane)
    if out_step is None or x_step != sizes.channels or len(loops.sizes) != len(_CONVOLUTION):
        return None
    shape = tuple(sizes._replace(results=out_step))
    return with_arguments(loops, {"shape": shape, "count": loops.sizes[1]})


def _read_depthwise(call: Call) -> Loops:
    """Convert a depthwise convolution to loops over batch, channels and pixels."""
    arguments = named_arguments(call)
    sizes, batch, count = (
        ConvolutionSizes(*arguments["shape"]),
        arguments["batch"],
        arguments["count"],
    )
    steps = {
        "out": _pixel_steps(sizes.out_plane, sizes.results),
        "x": _pixel_steps(sizes.plane, sizes.channels),
        **dict.fromkeys(("w", *_PER_CHANNEL), (0, 1, 0)),
    }
    return loops_by_name(call, (batch, count, 0), steps)


def _write_depthwise(loops: Loops) -> Call | None:
    """Convert loops to a depthwise convolution; None if pixels are not contiguous."""
    arguments = named_arguments(loops.call)
    sizes = ConvolutionSizes(*arguments["shape"])
    out_step, x_step = _pixel_step(loops, 0, sizes.out_plane), _pixel_step(loops, 1, sizes.plane)
    if out_step is None or x_step is None or len(loops.sizes) != len(_PIXELS):
        return None
    count, weight_channels = loops.sizes[1], sizes.filter or arguments["count"]
    filter_step = 0 if weight_channels == count else weight_channels
    new_sizes = sizes._replace(channels=x_step, results=out_step, groups=count, filter=filter_step)
    return with_arguments(loops, {"shape": tuple(new_sizes), "count": count})


# -- pools, sums, conversions ------------------------------------------------------------------


def _read_pool(call: Call) -> Loops:
    """Convert a pool to loops over batch, channels and pixels."""
    arguments = named_arguments(call)
    steps = {
        "out": _pixel_steps(arguments["height"] * arguments["width"], arguments["out_step"]),
        "x": _pixel_steps(arguments["x_height"] * arguments["x_width"], arguments["x_step"]),
    }
    return loops_by_name(call, (arguments["batch"], arguments["channels"], 0), steps)


def _write_pool(loops: Loops) -> Call | None:
    """Convert loops to a pool; None if pixels are not contiguous."""
    arguments = named_arguments(loops.call)
    out_step = _pixel_step(loops, 0, arguments["height"] * arguments["width"])
    x_step = _pixel_step(loops, 1, arguments["x_height"] * arguments["x_width"])
    if out_step is None or x_step is None or len(loops.sizes) != len(_PIXELS):
        return None
    changes = {"channels": loops.sizes[1], "out_step": out_step, "x_step": x_step}
    return with_arguments(loops, changes)


def _read_sum(call: Call) -> Loops:
    """Convert a sum of two tensors to one loop over all elements."""
    refs = call_refs(call)
    size = named_arguments(call)["n"]
    return Loops(call=call, sizes=(size,), refs=refs, steps=((1,),) * len(refs))


def _write_sum(loops: Loops) -> Call | None:
    """Convert loops to a sum; None if they cannot be merged to one contiguous loop."""
    rows = merged((loops.sizes, *loops.steps)) or [[1, *(1 for _ in loops.refs)]]
    ((size, *steps), *others) = rows
    return None if others or {*steps} != {1} else with_arguments(loops, {"n": size})


def _read_quantize(call: Call) -> Loops:
    """Convert a quantization or table lookup to loops over batch, channels and pixels."""
    arguments = named_arguments(call)
    batch, channels, plane = (arguments[name] for name in ("batch", "channels", "plane"))
    out = _pixel_steps(plane, channels)
    if "image_step" in arguments:
        x = tuple(arguments[f"{name}_step"] for name in ("image", "channel", "element"))
    else:
        x = (channels * plane, plane, 1)
    steps = {"out": out, "x": x, "table": (0, arguments.get("table_step", 0), 0)}
    return loops_by_name(call, (batch, channels, int(plane == 1)), steps)


def _write_quantize(loops: Loops) -> Call | None:
    """Convert loops to a quantization or lookup; None if its strides are not supported."""
    arguments = named_arguments(loops.call)
    batch, channels, *pixels = loops.sizes
    if len(pixels) != 1 or _pixel_step(loops, 0, arguments["plane"]) != channels:
        return None
    names = ("image_step", "channel_step", "element_step")
    steps = dict(zip(names, loops.steps[1], strict=True))
    if names[0] not in arguments:
        if batch > 1 and steps[names[0]] != channels * arguments["plane"]:
            return None
        steps = {}
    return with_arguments(loops, {"channels": channels, **steps})


def _read_dequantize(call: Call) -> Loops:
    """Convert a dequantization to loops over batch, channels and pixels."""
    arguments = named_arguments(call)
    batch, channels, plane = (arguments[name] for name in ("batch", "channels", "plane"))
    steps = {"out": (channels * plane, plane, 1), "x": _pixel_steps(plane, arguments["x_step"])}
    return loops_by_name(call, (batch, channels, int(plane == 1)), steps)


def _write_dequantize(loops: Loops) -> Call | None:
    """Convert loops to a dequantization; None if its strides are not supported."""
    plane, (batch, channels, *pixels) = named_arguments(loops.call)["plane"], loops.sizes
    x_step = _pixel_step(loops, 1, plane)
    is_contiguous = batch == 1 or loops.steps[0][0] == channels * plane
    if x_step is None or not is_contiguous or len(pixels) != 1:
        return None
    return with_arguments(loops, {"channels": channels, "x_step": x_step})


_POINTWISE: Final = ("pixels", "results", "channels")
_CONVOLUTION: Final = ("batch", "results", "channels", "pixels")
_PIXELS: Final = ("batch", "channels", "pixels")
"""Names of the dimensions of loops."""
INT8_PRODUCTS: Final = ("pm_q8_pointwise", "pm_q8_conv2d")
"""Kernels each of whose results depends on all channels that are read."""
INT8_LOOP_FORMATS: Final[
    dict[str, tuple[Callable[[Call], Loops | None], Callable[[Loops], Call | None]]]
] = {
    "pm_q8_pointwise": (_read_pointwise, _write_pointwise),
    "pm_q8_conv2d": (_read_convolution, _write_convolution),
    "pm_q8_depthwise": (_read_depthwise, _write_depthwise),
    "pm_q8_average": (_read_pool, _write_pool),
    "pm_q8_maximum": (_read_pool, _write_pool),
    "pm_q8_add": (_read_sum, _write_sum),
    "pm_q8_quantize": (_read_quantize, _write_quantize),
    "pm_q8_lookup": (_read_quantize, _write_quantize),
    "pm_q8_dequantize": (_read_dequantize, _write_dequantize),
}
