"""Int8 kernels: convert their calls to loops over channels, and loops to calls.

Loops that begin with a batch dimension end with a dimension of pixels. Its size is 0, because only
its stride matters: slices have fewer channels per pixel. If an undivided result is computed slice
by slice, the stride is larger than the channels of the slice. In quantizations, lookups and
dequantizations of images of one pixel, the size is 1.

The images of a batch are called adjacent if their stride is the stride of pixels times the number
of pixels, or if the batch has one image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from poetmodel.lowered.calls import ConvolutionSizes
from poetmodel.lowered.loops import (
    Loops,
    make_loops,
    merge_dimensions,
    with_arguments,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.lowered.calls import Call
    from poetmodel.lowered.loops import Numbers

    LoopFormat: TypeAlias = tuple[Callable[[Call], Loops | None], Callable[[Loops], Call | None]]
    """Functions that convert a call to loops over channels, and loops to a call."""

_PER_CHANNEL_PARAMETERS: Final = ("start", "scale", "bias")
"""Parameters of a layer with one number per output channel."""


def _image_strides(n_pixels: int, pixel_stride: int) -> Numbers:
    """Return the strides of batch, channels and pixels of images with channels last."""
    return n_pixels * pixel_stride, 1, pixel_stride


def _pixel_stride(loops: Loops, index: int, n_pixels: int) -> int | None:
    """Return the stride of pixels of tensor `index`; None if its images are not adjacent."""
    batch_stride, *_, pixel_stride = loops.strides[index]
    return pixel_stride if loops.sizes[0] == 1 or batch_stride == n_pixels * pixel_stride else None


# -- convolutions ------------------------------------------------------------------------------


def _read_linear_layer(call: Call) -> Loops:
    """Convert a linear layer to loops over pixels, output and input channels."""
    arguments = call.named_arguments
    results, channels = arguments["results"], arguments["in"]
    strides = {"out": (arguments["out_step"], 1, 0), "x": (channels, 0, 1), "w": (0, channels, 1)}
    sizes = (arguments["pixels"], results, channels)
    return make_loops(call, sizes, {**strides, **dict.fromkeys(_PER_CHANNEL_PARAMETERS, (0, 1, 0))})


def _write_linear_layer(loops: Loops) -> Call | None:
    """Convert loops to a linear layer.

    None unless there are three loops, and the stride of input pixels is the number of input
    channels.
    """
    if len(loops.sizes) != len(_LINEAR_DIMENSIONS):
        return None
    (out_stride, *_), (in_stride, *_), *_ = loops.strides
    pixels, results, channels = loops.sizes
    if in_stride != channels:
        return None
    return with_arguments(loops, {"pixels": pixels, "results": results, "out_step": out_stride})


def _read_convolution(call: Call) -> Loops | None:
    """Convert a convolution to loops over batch, output channels, input channels and pixels.

    None for grouped convolutions.
    """
    arguments = call.named_arguments
    sizes, batch = ConvolutionSizes(*arguments["shape"]), arguments["batch"]
    if sizes.groups != 1:
        return None
    filters = sizes.channels * sizes.window
    batch_stride, channel_stride, pixel_stride = _image_strides(sizes.out_plane, sizes.results)
    strides = {
        "out": (batch_stride, channel_stride, 0, pixel_stride),
        "x": (sizes.plane * sizes.channels, 0, 1, sizes.channels),
        "w": (0, filters, 1, 0),
        **dict.fromkeys(_PER_CHANNEL_PARAMETERS, (0, 1, 0, 0)),
    }
    return make_loops(call, (batch, arguments["count"], sizes.channels, 0), strides)


def _write_convolution(loops: Loops) -> Call | None:
    """Convert loops to a convolution.

    None unless there are four loops, the images of inputs and outputs are adjacent, and the stride
    of input pixels is the number of input channels.
    """
    sizes = ConvolutionSizes(*loops.call.named_arguments["shape"])
    out_stride, x_stride = (
        _pixel_stride(loops, 0, sizes.out_plane),
        _pixel_stride(loops, 1, sizes.plane),
    )
    if (
        out_stride is None
        or x_stride != sizes.channels
        or len(loops.sizes) != len(_CONVOLUTION_DIMENSIONS)
    ):
        return None
    shape = tuple(sizes._replace(results=out_stride))
    return with_arguments(loops, {"shape": shape, "count": loops.sizes[1]})


def _read_depthwise_convolution(call: Call) -> Loops:
    """Convert a depthwise convolution to loops over batch, channels and pixels.

    There is no loop over the window. Never returns None.
    """
    arguments = call.named_arguments
    sizes, batch, count = (
        ConvolutionSizes(*arguments["shape"]),
        arguments["batch"],
        arguments["count"],
    )
    strides = {
        "out": _image_strides(sizes.out_plane, sizes.results),
        "x": _image_strides(sizes.plane, sizes.channels),
        **dict.fromkeys(("w", *_PER_CHANNEL_PARAMETERS), (0, 1, 0)),
    }
    return make_loops(call, (batch, count, 0), strides)


def _write_depthwise_convolution(loops: Loops) -> Call | None:
    """Convert loops to a depthwise convolution.

    None unless there are three loops (batch, channels, pixels), and the images of inputs and
    outputs are adjacent: a single image, or a stride of images that is the stride of pixels times
    the number of pixels.
    """
    arguments = loops.call.named_arguments
    sizes = ConvolutionSizes(*arguments["shape"])
    out_stride, x_stride = (
        _pixel_stride(loops, 0, sizes.out_plane),
        _pixel_stride(loops, 1, sizes.plane),
    )
    if out_stride is None or x_stride is None or len(loops.sizes) != len(_IMAGE_DIMENSIONS):
        return None
    count, weight_channels = loops.sizes[1], sizes.filter or arguments["count"]
    filter_stride = 0 if weight_channels == count else weight_channels
    new_sizes = sizes._replace(
        channels=x_stride, results=out_stride, groups=count, filter=filter_stride
    )
    return with_arguments(loops, {"shape": tuple(new_sizes), "count": count})


# -- pools, sums, conversions ------------------------------------------------------------------


def _read_pool(call: Call) -> Loops:
    """Convert a pool to three loops, over batch, channels and pixels; the last has size 0."""
    arguments = call.named_arguments
    strides = {
        "out": _image_strides(arguments["height"] * arguments["width"], arguments["out_step"]),
        "x": _image_strides(arguments["x_height"] * arguments["x_width"], arguments["x_step"]),
    }
    return make_loops(call, (arguments["batch"], arguments["channels"], 0), strides)


def _write_pool(loops: Loops) -> Call | None:
    """Convert loops to a pool.

    None unless there are three loops, and the images of inputs and outputs are adjacent.
    """
    arguments = loops.call.named_arguments
    out_stride = _pixel_stride(loops, 0, arguments["height"] * arguments["width"])
    x_stride = _pixel_stride(loops, 1, arguments["x_height"] * arguments["x_width"])
    if out_stride is None or x_stride is None or len(loops.sizes) != len(_IMAGE_DIMENSIONS):
        return None
    changes = {"channels": loops.sizes[1], "out_step": out_stride, "x_step": x_stride}
    return with_arguments(loops, changes)


def _read_sum(call: Call) -> Loops:
    """Convert a sum of two tensors to one loop over all elements."""
    refs = call.refs
    size = call.named_arguments["n"]
    return Loops(call=call, sizes=(size,), refs=refs, strides=((1,),) * len(refs))


def _write_sum(loops: Loops) -> Call | None:
    """Convert loops to a sum; None if the loops cannot be merged to one contiguous loop."""
    rows = merge_dimensions((loops.sizes, *loops.strides)) or [[1, *(1 for _ in loops.refs)]]
    ((size, *strides), *other_rows) = rows
    return None if other_rows or {*strides} != {1} else with_arguments(loops, {"n": size})


def _read_quantization(call: Call) -> Loops:
    """Convert a quantization or table lookup to loops over batch, channels and pixels.

    Results have channels last. Inputs have contiguous planes, or the strides in the arguments
    ``image_step``, ``channel_step`` and ``element_step``.
    """
    arguments = call.named_arguments
    batch, channels, plane = (arguments[name] for name in ("batch", "channels", "plane"))
    out_strides = _image_strides(plane, channels)
    if "image_step" in arguments:
        x_strides = tuple(arguments[f"{name}_step"] for name in ("image", "channel", "element"))
    else:
        x_strides = (channels * plane, plane, 1)
    strides = {"out": out_strides, "x": x_strides, "table": (0, arguments.get("table_step", 0), 0)}
    return make_loops(call, (batch, channels, int(plane == 1)), strides)


def _write_quantization(loops: Loops) -> Call | None:
    """Convert loops to a quantization or lookup.

    None unless there are three loops, the images of outputs are adjacent, and the stride of their
    pixels is the number of channels. Also None if there are several input images that are not
    contiguous, unless the kernel has an argument ``image_step``.
    """
    arguments = loops.call.named_arguments
    batch, channels, *pixels = loops.sizes
    if len(pixels) != 1 or _pixel_stride(loops, 0, arguments["plane"]) != channels:
        return None
    names = ("image_step", "channel_step", "element_step")
    strides = dict(zip(names, loops.strides[1], strict=True))
    if names[0] not in arguments:
        if batch > 1 and strides[names[0]] != channels * arguments["plane"]:
            return None
        strides = {}
    return with_arguments(loops, {"channels": channels, **strides})


def _read_dequantization(call: Call) -> Loops:
    """Convert a dequantization to loops over batch, channels and pixels.

    Inputs have channels last, with the stride ``x_step`` of pixels; results have contiguous planes.
    The loop over pixels has size 1 for images of one pixel, otherwise 0, because only its strides
    matter.
    """
    arguments = call.named_arguments
    batch, channels, plane = (arguments[name] for name in ("batch", "channels", "plane"))
    strides = {"out": (channels * plane, plane, 1), "x": _image_strides(plane, arguments["x_step"])}
    return make_loops(call, (batch, channels, int(plane == 1)), strides)


def _write_dequantization(loops: Loops) -> Call | None:
    """Convert loops to a dequantization.

    None unless there are three loops and, of several images, each begins where the last one ends:
    the stride of images is the number of pixels times the stride of pixels in the input, and times
    the channels in the output.
    """
    plane, (batch, channels, *pixels) = loops.call.named_arguments["plane"], loops.sizes
    x_stride = _pixel_stride(loops, 1, plane)
    is_contiguous = batch == 1 or loops.strides[0][0] == channels * plane
    if x_stride is None or not is_contiguous or len(pixels) != 1:
        return None
    return with_arguments(loops, {"channels": channels, "x_step": x_stride})


# -- gradients -------------------------------------------------------------------------------------


def _read_linear_dx(call: Call) -> Loops:
    """Convert the gradient of a linear layer's input to loops.

    They are over pixels (input vectors), outputs of the layer and inputs of the layer.
    """
    arguments = call.named_arguments
    strides = {
        "out": (arguments["out_step"], 0, 1),
        "gradient": (arguments["gradient_step"], 1, 0),
        "w": (0, arguments["in"], 1),
        "scale": (0, 1, 0),
    }
    return make_loops(call, tuple(arguments[name] for name in _LINEAR_DIMENSIONS), strides)


def _write_linear_dx(loops: Loops) -> Call | None:
    """Convert loops to the input gradient of a linear layer; None unless there are three loops."""
    if len(loops.sizes) != len(_LINEAR_DIMENSIONS):
        return None
    (out_stride, *_), (gradient_stride, *_), *_ = loops.strides
    sizes = dict(zip(_LINEAR_DIMENSIONS, loops.sizes, strict=True))
    return with_arguments(
        loops, {**sizes, "out_step": out_stride, "gradient_step": gradient_stride}
    )


def _read_convolution_dx(call: Call) -> Loops | None:
    """Convert the input gradient of a convolution to loops; None for grouped convolutions.

    The loops are over batch, output channels, input channels and pixels.
    """
    arguments = call.named_arguments
    sizes = ConvolutionSizes(*arguments["shape"])
    if sizes.groups != 1:
        return None
    image_stride, _, pixel_stride = _image_strides(sizes.plane, arguments["out_step"])
    gradient_stride, _, gradient_pixel_stride = _image_strides(
        sizes.out_plane, arguments["gradient_step"]
    )
    strides = {
        "out": (image_stride, 0, 1, pixel_stride),
        "gradient": (gradient_stride, 1, 0, gradient_pixel_stride),
        "w": (0, sizes.channels * sizes.window, 1, 0),
        "scale": (0, 1, 0, 0),
    }
    return make_loops(
        call, (arguments["batch"], arguments["results"], arguments["channels"], 0), strides
    )


def _write_convolution_dx(loops: Loops) -> Call | None:
    """Convert loops to the input gradient of a convolution.

    None unless there are four loops, and the images of both gradients are adjacent.
    """
    sizes = ConvolutionSizes(*loops.call.named_arguments["shape"])
    pixel_stride, gradient_pixel_stride = (
        _pixel_stride(loops, 0, sizes.plane),
        _pixel_stride(loops, 1, sizes.out_plane),
    )
    if (
        pixel_stride is None
        or gradient_pixel_stride is None
        or len(loops.sizes) != len(_CONVOLUTION_DIMENSIONS)
    ):
        return None
    _, results, channels, _ = loops.sizes
    strides = {"out_step": pixel_stride, "gradient_step": gradient_pixel_stride}
    return with_arguments(loops, {**strides, "results": results, "channels": channels})


def _read_linear_dw(call: Call) -> Loops:
    """Convert the weight gradient of a linear layer to loops over pixels, outputs and inputs."""
    arguments = call.named_arguments
    channels, gradient_pixel_stride = arguments["in"], arguments["results"]
    strides = {
        "out": (0, channels, 1),
        "gradient": (gradient_pixel_stride, 1, 0),
        "x": (channels, 0, 1),
    }
    sizes = (arguments["pixels"], arguments["count"] // channels, channels)
    return make_loops(call, sizes, strides)


def _write_linear_dw(loops: Loops) -> Call | None:
    """Convert loops to the weight gradient of a linear layer.

    None unless there are three loops, and input channels are undivided.
    """
    if len(loops.sizes) != len(_LINEAR_DIMENSIONS):
        return None
    (_, weight_stride, _), (gradient_pixel_stride, *_), (pixel_stride, *_) = loops.strides
    _, results, channels = loops.sizes
    if not weight_stride == pixel_stride == channels:
        return None
    return with_arguments(loops, {"results": gradient_pixel_stride, "count": results * channels})


def _read_convolution_dw(call: Call) -> Loops | None:
    """Convert the weight gradient of a convolution to loops; None for grouped convolutions.

    The loops are over batch, output channels, input channels and pixels.
    """
    arguments = call.named_arguments
    sizes = ConvolutionSizes(*arguments["shape"])
    if sizes.groups != 1:
        return None
    filters = sizes.channels * sizes.window
    gradient_stride, _, gradient_pixel_stride = _image_strides(sizes.out_plane, sizes.results)
    image_stride, _, pixel_stride = _image_strides(sizes.plane, sizes.channels)
    strides = {
        "out": (0, filters, 1, 0),
        "gradient": (gradient_stride, 1, 0, gradient_pixel_stride),
        "x": (image_stride, 0, 1, pixel_stride),
    }
    return make_loops(
        call, (arguments["batch"], arguments["count"] // filters, sizes.channels, 0), strides
    )


def _write_convolution_dw(loops: Loops) -> Call | None:
    """Convert loops to the weight gradient of a convolution.

    None unless there are four loops, as in `_read_convolution_dw`, the images of inputs and
    gradients are adjacent, and loops, inputs and result have all input channels of the layer.
    """
    sizes = ConvolutionSizes(*loops.call.named_arguments["shape"])
    filters = sizes.channels * sizes.window
    gradient_pixel_stride, pixel_stride = (
        _pixel_stride(loops, 1, sizes.out_plane),
        _pixel_stride(loops, 2, sizes.plane),
    )
    if gradient_pixel_stride is None or len(loops.sizes) != len(_CONVOLUTION_DIMENSIONS):
        return None
    _, results, channels, _ = loops.sizes
    if (pixel_stride, channels, loops.strides[0][1]) != (sizes.channels, sizes.channels, filters):
        return None
    shape = tuple(sizes._replace(results=gradient_pixel_stride))
    return with_arguments(loops, {"shape": shape, "count": results * filters})


def _read_channel_gradient(call: Call) -> Loops:
    """Convert a gradient of a depthwise layer or a pool to loops.

    The loops are over batch, channels, window elements and pixels.
    """
    arguments = call.named_arguments
    sizes, batch, count = (
        ConvolutionSizes(*arguments["shape"]),
        arguments["batch"],
        arguments["count"],
    )
    weight_strides = (0, 1, sizes.filter or count, 0)
    image_strides, gradient_strides = (
        _tap_strides(sizes.plane, sizes.channels),
        _tap_strides(sizes.out_plane, sizes.results),
    )
    strides = {
        "out": weight_strides if _computes_weight_gradient(call) else image_strides,
        "gradient": gradient_strides,
        "x": _tap_strides(sizes.plane, arguments["x_step"])
        if "x_step" in arguments
        else image_strides,
        "y": _tap_strides(sizes.out_plane, arguments["y_step"])
        if "y_step" in arguments
        else gradient_strides,
        "w": weight_strides,
        "scale": (0, 1, 0, 0),
    }
    return make_loops(call, (batch, count, sizes.window, 0), strides)


def _tap_strides(n_pixels: int, pixel_stride: int) -> Numbers:
    """Return the strides of batch, channels, window elements and pixels of an image."""
    return n_pixels * pixel_stride, 1, 0, pixel_stride


def _write_channel_gradient(loops: Loops) -> Call | None:
    """Convert loops to a gradient of the input or the weights of a depthwise layer, or of a pool.

    None unless there are four loops, and the images of each tensor except weights, their gradient
    and scales are adjacent: a single image, or a stride of images that is the stride of pixels
    times the number of pixels.
    """
    arguments, names = loops.call.named_arguments, list(loops.call.pointers)
    sizes, count = ConvolutionSizes(*arguments["shape"]), loops.sizes[1]
    if len(loops.sizes) != len(_CONVOLUTION_DIMENSIONS):
        return None
    weight_name = "out" if _computes_weight_gradient(loops.call) else "w"
    strides, filter_stride = {}, count
    for index, name in enumerate(names):
        if name == weight_name:
            filter_stride = loops.strides[index][2]
        elif name != "scale":
            plane = sizes.out_plane if name in ("gradient", "y") else sizes.plane
            stride = _pixel_stride(loops, index, plane)
            if stride is None:
                return None
            strides[name] = stride
    new_sizes = sizes._replace(
        channels=strides["x" if weight_name == "out" else "out"],
        results=strides["gradient"],
        groups=count,
        filter=0 if filter_stride == count else filter_stride,
    )
    changes = {f"{name}_step": strides[name] for name in ("x", "y") if f"{name}_step" in arguments}
    return with_arguments(loops, {**changes, "shape": tuple(new_sizes), "count": count})


def _computes_weight_gradient(call: Call) -> bool:
    """Return whether a gradient of a depthwise layer or a pool is the weight gradient."""
    return call.kernel == "pm_q8_depthwise_dw"


def _read_weight_sums(call: Call) -> Loops:
    """Convert ``pm_q8_start``, sums of weights per output, to loops over outputs and weights."""
    arguments = call.named_arguments
    sizes, strides = (arguments["n"], arguments["terms"]), (arguments["next"], arguments["step"])
    return make_loops(call, sizes, {"out": (1, 0), "w": strides})


def _write_weight_sums(loops: Loops) -> Call | None:
    """Convert loops to ``pm_q8_start``; None unless there are two loops and sums are contiguous."""
    if len(loops.sizes) != len(_ROW_DIMENSIONS) or loops.strides[0] != (1, 0):
        return None
    (count, terms), (next_stride, stride) = loops.sizes, loops.strides[1]
    return with_arguments(loops, {"n": count, "terms": terms, "next": next_stride, "step": stride})


def _read_update(call: Call) -> Loops | None:
    """Convert an update of int8 weights to loops over outputs and weights of an output.

    None for an update of only some weights, and for weights of a depthwise convolution with several
    window elements, because these have channels last.
    """
    arguments = call.named_arguments
    sizes = results, inner = arguments["results"], arguments["inner"]
    if arguments["first"] or results * inner != arguments["count"]:
        return None
    strides = dict.fromkeys(("w", "residual", "gradient"), (inner, 1))
    return make_loops(call, sizes, {**strides, "scale": (1, 0)})


def _write_update(loops: Loops) -> Call | None:
    """Convert loops to an update of int8 weights.

    If the kernel has an argument ``before``, adds to it the number of weights between the first
    output of `loops.call` and that of `loops`. None unless there are two loops, and all tensors
    except ``scale`` are contiguous.
    """
    arguments, names = loops.call.named_arguments, list(loops.call.pointers)
    results, inner = arguments["results"], arguments["inner"]
    strides = {
        name: stride for name, stride in zip(names, loops.strides, strict=True) if name != "scale"
    }
    if len(loops.sizes) != len(_ROW_DIMENSIONS) or {*strides.values()} != {(inner, 1)}:
        return None
    results, scale_index = loops.sizes[0], names.index("scale")
    changes = {"results": results, "count": results * inner}
    if "before" in arguments:
        moved_outputs = loops.refs[scale_index].offset - loops.call.refs[scale_index].offset
        changes["before"] = arguments["before"] + moved_outputs * inner
    return with_arguments(loops, changes)


_LINEAR_DIMENSIONS: Final = ("pixels", "results", "channels")
_CONVOLUTION_DIMENSIONS: Final = ("batch", "results", "channels", "pixels")
_IMAGE_DIMENSIONS: Final = ("batch", "channels", "pixels")
_ROW_DIMENSIONS: Final = ("results", "weights")
"""Dimensions of the loops of, in order, linear layers, convolutions, other images, and rows of
weights. Gradients of depthwise layers and pools have as many dimensions as convolutions."""
INT8_PRODUCT_KERNELS: Final = tuple(
    f"pm_q8_{kind}{direction}"
    for kind in ("pointwise", "conv2d")
    for direction in ("", "_dx", "_dw")
)
"""Kernels of linear layers and non-depthwise convolutions, and their input and weight gradients."""
INT8_LOOP_FORMATS: Final[
    dict[str, tuple[Callable[[Call], Loops | None], Callable[[Loops], Call | None]]]
] = {
    "pm_q8_pointwise": (_read_linear_layer, _write_linear_layer),
    "pm_q8_conv2d": (_read_convolution, _write_convolution),
    "pm_q8_depthwise": (_read_depthwise_convolution, _write_depthwise_convolution),
    "pm_q8_average": (_read_pool, _write_pool),
    "pm_q8_maximum": (_read_pool, _write_pool),
    "pm_q8_add": (_read_sum, _write_sum),
    "pm_q8_quantize": (_read_quantization, _write_quantization),
    "pm_q8_lookup": (_read_quantization, _write_quantization),
    "pm_q8_dequantize": (_read_dequantization, _write_dequantization),
    "pm_q8_pointwise_dx": (_read_linear_dx, _write_linear_dx),
    "pm_q8_conv2d_dx": (_read_convolution_dx, _write_convolution_dx),
    "pm_q8_pointwise_dw": (_read_linear_dw, _write_linear_dw),
    "pm_q8_conv2d_dw": (_read_convolution_dw, _write_convolution_dw),
    "pm_q8_depthwise_dx": (_read_channel_gradient, _write_channel_gradient),
    "pm_q8_depthwise_dw": (_read_channel_gradient, _write_channel_gradient),
    "pm_q8_average_dx": (_read_channel_gradient, _write_channel_gradient),
    "pm_q8_maximum_dx": (_read_channel_gradient, _write_channel_gradient),
    "pm_q8_start": (_read_weight_sums, _write_weight_sums),
    "pm_q8_sgd": (_read_update, _write_update),
    "pm_q8_stochastic": (_read_update, _write_update),
}
"""Functions that convert the calls of each int8 kernel to loops, and loops to calls."""
