"""Kernels of layers in int8: their calls as loops over channels, and the calls of other loops.

Pixels are a dimension of size 0, whose steps are from one to the next: slices have fewer channels
in each. A result that is whole is made slice by slice, and so its pixels lie further apart.
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
    pointers,
    with_arguments,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.lowered.calls import Call
    from poetmodel.lowered.loops import Numbers

    Form: TypeAlias = tuple[Callable[[Call], Loops | None], Callable[[Loops], Call | None]]
    """What reads a call as loops, and what writes loops as a call."""

_NUMBERS: Final = ("start", "scale", "bias")
"""What layers have for each result."""


def _pixels(size: int, step: int, *, channel: int = 1) -> Numbers:
    """Return the steps of a batch, its channels and its pixels, of which an image has `size`."""
    return size * step, channel, step


def _pixel_step(loops: Loops, number: int, size: int) -> int | None:
    """Return the step of the pixels of a tensor; None if images of `size` pixels lie otherwise."""
    batch, *_, pixel = loops.steps[number]
    return pixel if loops.sizes[0] == 1 or batch == size * pixel else None


# -- convolutions ------------------------------------------------------------------------------


def _read_pointwise(call: Call) -> Loops:
    given = named_arguments(call)
    results, channels = given["results"], given["in"]
    steps = {"out": (given["out_step"], 1, 0), "x": (channels, 0, 1), "w": (0, channels, 1)}
    sizes = (given["pixels"], results, channels)
    return loops_by_name(call, sizes, {**steps, **dict.fromkeys(_NUMBERS, (0, 1, 0))})


def _write_pointwise(loops: Loops) -> Call | None:
    if len(loops.sizes) != len(_POINTWISE):
        return None
    (out_step, *_), (in_step, *_), *_ = loops.steps
    pixels, results, channels = loops.sizes
    if in_step != channels:
        return None
    return with_arguments(loops, {"pixels": pixels, "results": results, "out_step": out_step})


def _read_convolution(call: Call) -> Loops | None:
    given = named_arguments(call)
    sizes, batch = ConvolutionSizes(*given["shape"]), given["batch"]
    if sizes.groups != 1:
        return None
    filters = sizes.channels * sizes.window
    out, one, pixel = _pixels(sizes.out_plane, sizes.results)
    steps = {
        "out": (out, one, 0, pixel),
        "x": (sizes.plane * sizes.channels, 0, 1, sizes.channels),
        "w": (0, filters, 1, 0),
        **dict.fromkeys(_NUMBERS, (0, 1, 0, 0)),
    }
    return loops_by_name(call, (batch, given["count"], sizes.channels, 0), steps)


def _write_convolution(loops: Loops) -> Call | None:
    sizes = ConvolutionSizes(*named_arguments(loops.call)["shape"])
    out_step, x_step = _pixel_step(loops, 0, sizes.out_plane), _pixel_step(loops, 1, sizes.plane)
    if out_step is None or x_step != sizes.channels or len(loops.sizes) != len(_CONVOLUTION):
        return None
    shape = tuple(sizes._replace(results=out_step))
    return with_arguments(loops, {"shape": shape, "count": loops.sizes[1]})


def _read_depthwise(call: Call) -> Loops:
    given = named_arguments(call)
    sizes, batch, count = ConvolutionSizes(*given["shape"]), given["batch"], given["count"]
    steps = {
        "out": _pixels(sizes.out_plane, sizes.results),
        "x": _pixels(sizes.plane, sizes.channels),
        **dict.fromkeys(("w", *_NUMBERS), (0, 1, 0)),
    }
    return loops_by_name(call, (batch, count, 0), steps)


def _write_depthwise(loops: Loops) -> Call | None:
    given = named_arguments(loops.call)
    sizes = ConvolutionSizes(*given["shape"])
    out_step, x_step = _pixel_step(loops, 0, sizes.out_plane), _pixel_step(loops, 1, sizes.plane)
    if out_step is None or x_step is None or len(loops.sizes) != len(_PIXELS):
        return None
    count, of_weights = loops.sizes[1], sizes.filter or given["count"]
    own = 0 if of_weights == count else of_weights
    made = sizes._replace(channels=x_step, results=out_step, groups=count, filter=own)
    return with_arguments(loops, {"shape": tuple(made), "count": count})


# -- pools, sums, conversions ------------------------------------------------------------------


def _read_pool(call: Call) -> Loops:
    given = named_arguments(call)
    steps = {
        "out": _pixels(given["height"] * given["width"], given["out_step"]),
        "x": _pixels(given["x_height"] * given["x_width"], given["x_step"]),
    }
    return loops_by_name(call, (given["batch"], given["channels"], 0), steps)


def _write_pool(loops: Loops) -> Call | None:
    given = named_arguments(loops.call)
    out_step = _pixel_step(loops, 0, given["height"] * given["width"])
    x_step = _pixel_step(loops, 1, given["x_height"] * given["x_width"])
    if out_step is None or x_step is None or len(loops.sizes) != len(_PIXELS):
        return None
    changes = {"channels": loops.sizes[1], "out_step": out_step, "x_step": x_step}
    return with_arguments(loops, changes)


def _read_sum(call: Call) -> Loops:
    refs = call_refs(call)
    size = named_arguments(call)["n"]
    return Loops(call=call, sizes=(size,), refs=refs, steps=((1,),) * len(refs))


def _write_sum(loops: Loops) -> Call | None:
    rows = merged((loops.sizes, *loops.steps)) or [[1, *(1 for _ in loops.refs)]]
    ((size, *steps), *others) = rows
    return None if others or {*steps} != {1} else with_arguments(loops, {"n": size})


def _read_quantize(call: Call) -> Loops:
    given = named_arguments(call)
    batch, channels, plane = (given[name] for name in ("batch", "channels", "plane"))
    out = _pixels(plane, channels)
    if "image_step" in given:
        x = tuple(given[f"{name}_step"] for name in ("image", "channel", "element"))
    else:
        x = (channels * plane, plane, 1)
    steps = {"out": out, "x": x, "table": (0, given.get("table_step", 0), 0)}
    return loops_by_name(call, (batch, channels, int(plane == 1)), steps)


def _write_quantize(loops: Loops) -> Call | None:
    given = named_arguments(loops.call)
    batch, channels, *pixels = loops.sizes
    if len(pixels) != 1 or _pixel_step(loops, 0, given["plane"]) != channels:
        return None
    names = ("image_step", "channel_step", "element_step")
    steps = dict(zip(names, loops.steps[1], strict=True))
    if names[0] not in given:
        if batch > 1 and steps[names[0]] != channels * given["plane"]:
            return None
        steps = {}
    return with_arguments(loops, {"channels": channels, **steps})


def _read_dequantize(call: Call) -> Loops:
    given = named_arguments(call)
    batch, channels, plane = (given[name] for name in ("batch", "channels", "plane"))
    steps = {"out": (channels * plane, plane, 1), "x": _pixels(plane, given["x_step"])}
    return loops_by_name(call, (batch, channels, int(plane == 1)), steps)


def _write_dequantize(loops: Loops) -> Call | None:
    plane, (batch, channels, *pixels) = named_arguments(loops.call)["plane"], loops.sizes
    x_step = _pixel_step(loops, 1, plane)
    is_in_order = batch == 1 or loops.steps[0][0] == channels * plane
    if x_step is None or not is_in_order or len(pixels) != 1:
        return None
    return with_arguments(loops, {"channels": channels, "x_step": x_step})


# -- gradients -------------------------------------------------------------------------------------


def _read_pointwise_dx(call: Call) -> Loops:
    given = named_arguments(call)
    steps = {
        "out": (given["out_step"], 0, 1),
        "gradient": (given["gradient_step"], 1, 0),
        "w": (0, given["in"], 1),
        "scale": (0, 1, 0),
    }
    return loops_by_name(call, tuple(given[name] for name in _POINTWISE), steps)


def _write_pointwise_dx(loops: Loops) -> Call | None:
    if len(loops.sizes) != len(_POINTWISE):
        return None
    (out_step, *_), (gradient_step, *_), *_ = loops.steps
    sizes = dict(zip(_POINTWISE, loops.sizes, strict=True))
    return with_arguments(loops, {**sizes, "out_step": out_step, "gradient_step": gradient_step})


def _read_convolution_dx(call: Call) -> Loops | None:
    given = named_arguments(call)
    sizes = ConvolutionSizes(*given["shape"])
    if sizes.groups != 1:
        return None
    image, _, pixel = _pixels(sizes.plane, given["out_step"])
    of_gradient, _, place = _pixels(sizes.out_plane, given["gradient_step"])
    steps = {
        "out": (image, 0, 1, pixel),
        "gradient": (of_gradient, 1, 0, place),
        "w": (0, sizes.channels * sizes.window, 1, 0),
        "scale": (0, 1, 0, 0),
    }
    return loops_by_name(call, (given["batch"], given["results"], given["channels"], 0), steps)


def _write_convolution_dx(loops: Loops) -> Call | None:
    sizes = ConvolutionSizes(*named_arguments(loops.call)["shape"])
    pixel, place = _pixel_step(loops, 0, sizes.plane), _pixel_step(loops, 1, sizes.out_plane)
    if pixel is None or place is None or len(loops.sizes) != len(_CONVOLUTION):
        return None
    _, results, channels, _ = loops.sizes
    steps = {"out_step": pixel, "gradient_step": place}
    return with_arguments(loops, {**steps, "results": results, "channels": channels})


def _read_pointwise_dw(call: Call) -> Loops:
    given = named_arguments(call)
    channels, place = given["in"], given["results"]
    steps = {"out": (0, channels, 1), "gradient": (place, 1, 0), "x": (channels, 0, 1)}
    sizes = (given["pixels"], given["count"] // channels, channels)
    return loops_by_name(call, sizes, steps)


def _write_pointwise_dw(loops: Loops) -> Call | None:
    if len(loops.sizes) != len(_POINTWISE):
        return None
    (_, row, _), (place, *_), (pixel, *_) = loops.steps
    _, results, channels = loops.sizes
    if not row == pixel == channels:
        return None
    return with_arguments(loops, {"results": place, "count": results * channels})


def _read_convolution_dw(call: Call) -> Loops | None:
    given = named_arguments(call)
    sizes = ConvolutionSizes(*given["shape"])
    if sizes.groups != 1:
        return None
    filters = sizes.channels * sizes.window
    of_gradient, _, place = _pixels(sizes.out_plane, sizes.results)
    image, _, pixel = _pixels(sizes.plane, sizes.channels)
    steps = {
        "out": (0, filters, 1, 0), "gradient": (of_gradient, 1, 0, place), "x": (image, 0, 1, pixel)
    }  # fmt: skip
    return loops_by_name(
        call, (given["batch"], given["count"] // filters, sizes.channels, 0), steps
    )


def _write_convolution_dw(loops: Loops) -> Call | None:
    sizes = ConvolutionSizes(*named_arguments(loops.call)["shape"])
    filters = sizes.channels * sizes.window
    place, pixel = _pixel_step(loops, 1, sizes.out_plane), _pixel_step(loops, 2, sizes.plane)
    if place is None or len(loops.sizes) != len(_CONVOLUTION):
        return None
    _, results, channels, _ = loops.sizes
    if (pixel, channels, loops.steps[0][1]) != (sizes.channels, sizes.channels, filters):
        return None
    shape = tuple(sizes._replace(results=place))
    return with_arguments(loops, {"shape": shape, "count": results * filters})


def _read_channelwise(call: Call) -> Loops:
    """Return the loops of a gradient with independent channels: of a depthwise layer or a pool."""
    given = named_arguments(call)
    sizes, batch, count = ConvolutionSizes(*given["shape"]), given["batch"], given["count"]
    weights = (0, 1, sizes.filter or count, 0)
    image, of_gradient = _taps(sizes.plane, sizes.channels), _taps(sizes.out_plane, sizes.results)
    steps = {
        "out": weights if _makes_weights(call) else image,
        "gradient": of_gradient,
        "x": _taps(sizes.plane, given["x_step"]) if "x_step" in given else image,
        "y": _taps(sizes.out_plane, given["y_step"]) if "y_step" in given else of_gradient,
        "w": weights,
        "scale": (0, 1, 0, 0),
    }
    return loops_by_name(call, (batch, count, sizes.window, 0), steps)


def _taps(size: int, step: int) -> Numbers:
    """Return the steps of a batch, its channels, taps and pixels, of which an image has `size`."""
    return size * step, 1, 0, step


def _write_channelwise(loops: Loops) -> Call | None:
    given, names = named_arguments(loops.call), pointers(loops.call)
    sizes, count = ConvolutionSizes(*given["shape"]), loops.sizes[1]
    if len(loops.sizes) != len(_CONVOLUTION):
        return None
    weights = "out" if _makes_weights(loops.call) else "w"
    steps, own = {}, count
    for number, name in enumerate(names):
        if name == weights:
            own = loops.steps[number][2]
        elif name != "scale":
            plane = sizes.out_plane if name in ("gradient", "y") else sizes.plane
            step = _pixel_step(loops, number, plane)
            if step is None:
                return None
            steps[name] = step
    made = sizes._replace(
        channels=steps["x" if weights == "out" else "out"],
        results=steps["gradient"],
        groups=count,
        filter=0 if own == count else own,
    )
    changes = {f"{name}_step": steps[name] for name in ("x", "y") if f"{name}_step" in given}
    return with_arguments(loops, {**changes, "shape": tuple(made), "count": count})


def _makes_weights(call: Call) -> bool:
    return call.kernel == "pm_q8_depthwise_dw"


def _read_start(call: Call) -> Loops:
    given = named_arguments(call)
    sizes, steps = (given["n"], given["terms"]), (given["next"], given["step"])
    return loops_by_name(call, sizes, {"out": (1, 0), "w": steps})


def _write_start(loops: Loops) -> Call | None:
    if len(loops.sizes) != len(_ROWS) or loops.steps[0] != (1, 0):
        return None
    (count, terms), (following, step) = loops.sizes, loops.steps[1]
    return with_arguments(loops, {"n": count, "terms": terms, "next": following, "step": step})


def _read_update(call: Call) -> Loops | None:
    given = named_arguments(call)
    sizes = results, inner = given["results"], given["inner"]
    if given["first"] or results * inner != given["count"]:
        return None  # weights of a depthwise convolution have their channels last
    steps = dict.fromkeys(("w", "residual", "gradient"), (inner, 1))
    return loops_by_name(call, sizes, {**steps, "scale": (1, 0)})


def _write_update(loops: Loops) -> Call | None:
    given, names = named_arguments(loops.call), pointers(loops.call)
    results, inner = given["results"], given["inner"]
    steps = {name: step for name, step in zip(names, loops.steps, strict=True) if name != "scale"}
    if len(loops.sizes) != len(_ROWS) or {*steps.values()} != {(inner, 1)}:
        return None
    results, at = loops.sizes[0], names.index("scale")
    changes = {"results": results, "count": results * inner}
    if "before" in given:
        moved = loops.refs[at].offset - call_refs(loops.call)[at].offset
        changes["before"] = given["before"] + moved * inner
    return with_arguments(loops, changes)


_POINTWISE: Final = ("pixels", "results", "channels")
_CONVOLUTION: Final = ("batch", "results", "channels", "pixels")
_PIXELS: Final = ("batch", "channels", "pixels")
_ROWS: Final = ("results", "weights")
"""Dimensions of loops."""
INT8_PRODUCTS: Final = tuple(
    f"pm_q8_{kind}{made}" for kind in ("pointwise", "conv2d") for made in ("", "_dx", "_dw")
)
"""Each of their results is of all channels that are read."""
INT8_FORMS: Final[
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
