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
    merge_dimensions,
    named_arguments,
    pointer_names,
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
    """Convert loops to a pool; None if the images of a batch are not contiguous."""
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
    """Convert loops to a sum; None if the loops cannot be merged to one contiguous loop."""
    rows = merge_dimensions((loops.sizes, *loops.steps)) or [[1, *(1 for _ in loops.refs)]]
    ((size, *steps), *other_rows) = rows
    return None if other_rows or {*steps} != {1} else with_arguments(loops, {"n": size})


def _read_quantize(call: Call) -> Loops:
    """Convert a quantization or table lookup to loops over batch, channels and pixels."""
    arguments = named_arguments(call)
    batch, channels, plane = (arguments[name] for name in ("batch", "channels", "plane"))
    out_steps = _pixel_steps(plane, channels)
    if "image_step" in arguments:
        x_steps = tuple(arguments[f"{name}_step"] for name in ("image", "channel", "element"))
    else:
        x_steps = (channels * plane, plane, 1)
    steps = {"out": out_steps, "x": x_steps, "table": (0, arguments.get("table_step", 0), 0)}
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


# -- gradients -------------------------------------------------------------------------------------


def _read_pointwise_dx(call: Call) -> Loops:
    """Convert the input gradient of a linear layer to loops over pixels, outputs and inputs."""
    arguments = named_arguments(call)
    steps = {
        "out": (arguments["out_step"], 0, 1),
        "gradient": (arguments["gradient_step"], 1, 0),
        "w": (0, arguments["in"], 1),
        "scale": (0, 1, 0),
    }
    return loops_by_name(call, tuple(arguments[name] for name in _POINTWISE), steps)


def _write_pointwise_dx(loops: Loops) -> Call | None:
    """Convert loops to the input gradient of a linear layer; None for other loops."""
    if len(loops.sizes) != len(_POINTWISE):
        return None
    (out_step, *_), (gradient_step, *_), *_ = loops.steps
    sizes = dict(zip(_POINTWISE, loops.sizes, strict=True))
    return with_arguments(loops, {**sizes, "out_step": out_step, "gradient_step": gradient_step})


def _read_convolution_dx(call: Call) -> Loops | None:
    """Convert the input gradient of a convolution to loops; None for grouped convolutions.

    The loops are over batch, output channels, input channels and pixels.
    """
    arguments = named_arguments(call)
    sizes = ConvolutionSizes(*arguments["shape"])
    if sizes.groups != 1:
        return None
    image_step, _, pixel_step = _pixel_steps(sizes.plane, arguments["out_step"])
    gradient_step, _, gradient_pixel_step = _pixel_steps(
        sizes.out_plane, arguments["gradient_step"]
    )
    steps = {
        "out": (image_step, 0, 1, pixel_step),
        "gradient": (gradient_step, 1, 0, gradient_pixel_step),
        "w": (0, sizes.channels * sizes.window, 1, 0),
        "scale": (0, 1, 0, 0),
    }
    return loops_by_name(
        call, (arguments["batch"], arguments["results"], arguments["channels"], 0), steps
    )


def _write_convolution_dx(loops: Loops) -> Call | None:
    """Convert loops to the input gradient of a convolution; None for unsupported strides."""
    sizes = ConvolutionSizes(*named_arguments(loops.call)["shape"])
    pixel_step, gradient_pixel_step = (
        _pixel_step(loops, 0, sizes.plane),
        _pixel_step(loops, 1, sizes.out_plane),
    )
    if pixel_step is None or gradient_pixel_step is None or len(loops.sizes) != len(_CONVOLUTION):
        return None
    _, results, channels, _ = loops.sizes
    steps = {"out_step": pixel_step, "gradient_step": gradient_pixel_step}
    return with_arguments(loops, {**steps, "results": results, "channels": channels})


def _read_pointwise_dw(call: Call) -> Loops:
    """Convert the weight gradient of a linear layer to loops over pixels, outputs and inputs."""
    arguments = named_arguments(call)
    channels, gradient_pixel_step = arguments["in"], arguments["results"]
    steps = {
        "out": (0, channels, 1),
        "gradient": (gradient_pixel_step, 1, 0),
        "x": (channels, 0, 1),
    }
    sizes = (arguments["pixels"], arguments["count"] // channels, channels)
    return loops_by_name(call, sizes, steps)


def _write_pointwise_dw(loops: Loops) -> Call | None:
    """Convert loops to the weight gradient of a linear layer; None if inputs are divided."""
    if len(loops.sizes) != len(_POINTWISE):
        return None
    (_, weight_step, _), (gradient_pixel_step, *_), (pixel_step, *_) = loops.steps
    _, results, channels = loops.sizes
    if not weight_step == pixel_step == channels:
        return None
    return with_arguments(loops, {"results": gradient_pixel_step, "count": results * channels})


def _read_convolution_dw(call: Call) -> Loops | None:
    """Convert the weight gradient of a convolution to loops; None for grouped convolutions.

    The loops are over batch, output channels, input channels and pixels.
    """
    arguments = named_arguments(call)
    sizes = ConvolutionSizes(*arguments["shape"])
    if sizes.groups != 1:
        return None
    filters = sizes.channels * sizes.window
    gradient_step, _, gradient_pixel_step = _pixel_steps(sizes.out_plane, sizes.results)
    image_step, _, pixel_step = _pixel_steps(sizes.plane, sizes.channels)
    steps = {
        "out": (0, filters, 1, 0),
        "gradient": (gradient_step, 1, 0, gradient_pixel_step),
        "x": (image_step, 0, 1, pixel_step),
    }
    return loops_by_name(
        call, (arguments["batch"], arguments["count"] // filters, sizes.channels, 0), steps
    )


def _write_convolution_dw(loops: Loops) -> Call | None:
    """Convert loops to the weight gradient of a convolution; None if inputs are divided."""
    sizes = ConvolutionSizes(*named_arguments(loops.call)["shape"])
    filters = sizes.channels * sizes.window
    gradient_pixel_step, pixel_step = (
        _pixel_step(loops, 1, sizes.out_plane),
        _pixel_step(loops, 2, sizes.plane),
    )
    if gradient_pixel_step is None or len(loops.sizes) != len(_CONVOLUTION):
        return None
    _, results, channels, _ = loops.sizes
    if (pixel_step, channels, loops.steps[0][1]) != (sizes.channels, sizes.channels, filters):
        return None
    shape = tuple(sizes._replace(results=gradient_pixel_step))
    return with_arguments(loops, {"shape": shape, "count": results * filters})


def _read_channelwise(call: Call) -> Loops:
    """Convert a gradient of a depthwise layer or a pool to loops.

    The loops are over batch, channels, window elements and pixels; channels are independent.
    """
    arguments = named_arguments(call)
    sizes, batch, count = (
        ConvolutionSizes(*arguments["shape"]),
        arguments["batch"],
        arguments["count"],
    )
    weight_steps = (0, 1, sizes.filter or count, 0)
    image_steps, gradient_steps = (
        _tap_steps(sizes.plane, sizes.channels),
        _tap_steps(sizes.out_plane, sizes.results),
    )
    steps = {
        "out": weight_steps if _computes_weight_gradient(call) else image_steps,
        "gradient": gradient_steps,
        "x": _tap_steps(sizes.plane, arguments["x_step"]) if "x_step" in arguments else image_steps,
        "y": _tap_steps(sizes.out_plane, arguments["y_step"])
        if "y_step" in arguments
        else gradient_steps,
        "w": weight_steps,
        "scale": (0, 1, 0, 0),
    }
    return loops_by_name(call, (batch, count, sizes.window, 0), steps)


def _tap_steps(size: int, step: int) -> Numbers:
    """Return the strides of batch, channels, window elements and pixels of an image."""
    return size * step, 1, 0, step


def _write_channelwise(loops: Loops) -> Call | None:
    """Convert loops to a gradient of a depthwise layer or a pool; None for unsupported strides."""
    arguments, names = named_arguments(loops.call), pointer_names(loops.call)
    sizes, count = ConvolutionSizes(*arguments["shape"]), loops.sizes[1]
    if len(loops.sizes) != len(_CONVOLUTION):
        return None
    weight_name = "out" if _computes_weight_gradient(loops.call) else "w"
    steps, filter_step = {}, count
    for number, name in enumerate(names):
        if name == weight_name:
            filter_step = loops.steps[number][2]
        elif name != "scale":
            plane = sizes.out_plane if name in ("gradient", "y") else sizes.plane
            step = _pixel_step(loops, number, plane)
            if step is None:
                return None
            steps[name] = step
    new_sizes = sizes._replace(
        channels=steps["x" if weight_name == "out" else "out"],
        results=steps["gradient"],
        groups=count,
        filter=0 if filter_step == count else filter_step,
    )
    changes = {f"{name}_step": steps[name] for name in ("x", "y") if f"{name}_step" in arguments}
    return with_arguments(loops, {**changes, "shape": tuple(new_sizes), "count": count})


def _computes_weight_gradient(call: Call) -> bool:
    """Return whether a call computes the gradient of a weight."""
    return call.kernel == "pm_q8_depthwise_dw"


def _read_start(call: Call) -> Loops:
    """Convert the sums of weights per output to loops over outputs and weights."""
    arguments = named_arguments(call)
    sizes, steps = (arguments["n"], arguments["terms"]), (arguments["next"], arguments["step"])
    return loops_by_name(call, sizes, {"out": (1, 0), "w": steps})


def _write_start(loops: Loops) -> Call | None:
    """Convert loops to the sums of weights per output; None for other loops."""
    if len(loops.sizes) != len(_ROWS) or loops.steps[0] != (1, 0):
        return None
    (count, terms), (next_step, step) = loops.sizes, loops.steps[1]
    return with_arguments(loops, {"n": count, "terms": terms, "next": next_step, "step": step})


def _read_update(call: Call) -> Loops | None:
    """Convert an update of int8 weights to loops over outputs and weights; None if depthwise."""
    arguments = named_arguments(call)
    sizes = results, inner = arguments["results"], arguments["inner"]
    if arguments["first"] or results * inner != arguments["count"]:
        return None  # weights of a depthwise convolution have channels last
    steps = dict.fromkeys(("w", "residual", "gradient"), (inner, 1))
    return loops_by_name(call, sizes, {**steps, "scale": (1, 0)})


def _write_update(loops: Loops) -> Call | None:
    """Convert loops to an update of int8 weights; None if the weights of an output are divided."""
    arguments, names = named_arguments(loops.call), pointer_names(loops.call)
    results, inner = arguments["results"], arguments["inner"]
    steps = {name: step for name, step in zip(names, loops.steps, strict=True) if name != "scale"}
    if len(loops.sizes) != len(_ROWS) or {*steps.values()} != {(inner, 1)}:
        return None
    results, scale_index = loops.sizes[0], names.index("scale")
    changes = {"results": results, "count": results * inner}
    if "before" in arguments:
        moved_outputs = loops.refs[scale_index].offset - call_refs(loops.call)[scale_index].offset
        changes["before"] = arguments["before"] + moved_outputs * inner
    return with_arguments(loops, changes)


_POINTWISE: Final = ("pixels", "results", "channels")
_CONVOLUTION: Final = ("batch", "results", "channels", "pixels")
_PIXELS: Final = ("batch", "channels", "pixels")
_ROWS: Final = ("results", "weights")
"""Dimensions of loops."""
INT8_PRODUCTS: Final = tuple(
    f"pm_q8_{kind}{made}" for kind in ("pointwise", "conv2d") for made in ("", "_dx", "_dw")
)
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
    "pm_q8_pointwise_dx": (_read_pointwise_dx, _write_pointwise_dx),
    "pm_q8_conv2d_dx": (_read_convolution_dx, _write_convolution_dx),
    "pm_q8_pointwise_dw": (_read_pointwise_dw, _write_pointwise_dw),
    "pm_q8_conv2d_dw": (_read_convolution_dw, _write_convolution_dw),
    "pm_q8_depthwise_dx": (_read_channelwise, _write_channelwise),
    "pm_q8_depthwise_dw": (_read_channelwise, _write_channelwise),
    "pm_q8_average_dx": (_read_channelwise, _write_channelwise),
    "pm_q8_maximum_dx": (_read_channelwise, _write_channelwise),
    "pm_q8_start": (_read_start, _write_start),
    "pm_q8_sgd": (_read_update, _write_update),
    "pm_q8_stochastic": (_read_update, _write_update),
}
