"""Kernels that can compute ranges of channels: convert their calls to loops, and loops to calls.

Here, a channel of an image is a plane; for int8 kernels, in `int8_forms`, channels are the last
dimension of each pixel.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Final

from poetmodel.lowered.calls import ConvolutionSizes
from poetmodel.lowered.loops import (
    Loops,
    call_to_loops,
    make_loops,
    make_shape_table,
    table_columns,
    with_arguments,
)  # fmt: skip
from poetmodel.tiling.int8_forms import INT8_LOOP_FORMATS, INT8_PRODUCT_KERNELS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from poetmodel.lowered.calls import Argument, Call
    from poetmodel.lowered.loops import Numbers
    from poetmodel.tiling.int8_forms import LoopFormat


def call_to_channel_loops(call: Call) -> Loops | None:
    """Return a call as loops over channels; None if its kernel cannot compute ranges of channels.

    Also None if `_read_convolution`, or the function of the kernel in `int8_forms`, returns None.
    The condition of the call is ignored, and may be absent from the call of the loops.
    """
    loop_format = _loop_format(call)
    return (
        _LOOP_FORMATS[loop_format][0](call)
        if loop_format
        else call_to_loops(replace(call, condition=None))
    )


def channel_loops_to_call(loops: Loops) -> Call | None:
    """Return the call that executes loops; None if the kernel cannot execute them.

    If the kernel has an argument ``batch``, sets it to the size of the first loop, which is over
    the batch.
    """
    loop_format = _loop_format(loops.call)
    call = _LOOP_FORMATS[loop_format][1](loops) if loop_format else loops.to_call()
    if call is None or "batch" not in call:
        return call
    return with_arguments(replace(loops, call=call), {"batch": loops.sizes[0]})


def is_weight_name(parameter: str) -> bool:
    """Return whether a parameter has the name of a convolution's weights or their gradient.

    These names are ``w`` and ``dw``.
    """
    return _ROLES.get(parameter) == "w"


def _loop_format(call: Call) -> str:
    """Return the key of a call in `_LOOP_FORMATS`: its kernel, or the kind of its kernel.

    Return "" for calls that `call_to_loops` converts, or that have no loops.
    """
    parameters = [*call.named_arguments]
    if call.kernel in INT8_LOOP_FORMATS:
        return call.kernel
    if call.kernel in _PLANE_KERNELS:
        return "planes"
    if call.kernel in _CONVOLUTIONS or call.kernel == "pm_conv2d_db":
        return _CONVOLUTIONS.get(call.kernel, call.kernel)
    if "bits" in parameters and "shape" in parameters:
        return "bits"
    return (
        "update"
        if {"gradient", "n"} <= {*parameters} and not _NON_UPDATE_PARAMETERS & {*parameters}
        else ""
    )


def contiguous_strides(sizes: Sequence[int]) -> list[int]:
    """Return the strides of elements that are contiguous in the order of loops, innermost first."""
    return [prod(sizes[:k]) for k in range(len(sizes))]


# -- updates and masks -----------------------------------------------------------------------------


def _read_update(call: Call) -> Loops:
    """Convert an update of state, or a sum of gradients, to one loop over all elements."""
    size = call.named_arguments["n"]
    names = list(call.pointers)
    strides = tuple((int(name not in _SCALAR_PARAMETERS),) for name in names)
    return Loops(call=call, sizes=(size,), refs=call.refs, strides=strides)


def _write_update(loops: Loops) -> Call | None:
    """Convert loops to an update; None if there are several loops."""
    return with_arguments(loops, {"n": loops.sizes[0]}) if len(loops.sizes) == 1 else None


def _read_bits(call: Call) -> Loops:
    """Convert a call with a mask to the loops of its shape table.

    Strides of the mask are in bits. The bits are contiguous, in the order of the loops.
    """
    sizes, *strides = table_columns(call.named_arguments["shape"])
    strides.insert(list(call.pointers).index("bits"), tuple(contiguous_strides(sizes)))
    return Loops(call=call, sizes=sizes, refs=call.refs, strides=tuple(strides))


def _write_bits(loops: Loops) -> Call | None:
    """Convert loops to a call that reads or writes a mask, by setting its shape table.

    None if the loops, after merging, exceed the rank of a shape table. The strides of the mask are
    not checked.
    """
    pairs = zip(list(loops.call.pointers), loops.strides, strict=True)
    table = make_shape_table((loops.sizes, *(strides for name, strides in pairs if name != "bits")))
    return None if table is None else with_arguments(loops, {"shape": table})


# -- planes ----------------------------------------------------------------------------------------


def _read_planes(call: Call) -> Loops:
    """Convert a call on planes to loops over batch and channels, and dimensions within a plane.

    Dimensions within a plane have size 0, because only their strides matter.
    """
    arguments, names = call.named_arguments, _PLANE_KERNELS[call.kernel]
    stride_list = arguments["steps"]
    n_dimensions = len(stride_list) // len(names)
    strides = {
        name: stride_list[k * n_dimensions : (k + 1) * n_dimensions] for k, name in enumerate(names)
    }
    other_strides = {name: (0, 1, *[0] * (n_dimensions - 2)) for name in list(call.pointers)}
    return make_loops(
        call,
        (arguments["batch"], arguments["channels"], *[0] * (n_dimensions - 2)),
        other_strides | strides,
    )


def _write_planes(loops: Loops) -> Call | None:
    """Convert loops to a call on planes; None unless they are as many as those of `loops.call`.

    That call has in ``steps`` one stride per loop and tensor of `_PLANE_KERNELS`, so loops with a
    split dimension do not fit. Sets ``steps``, and ``channels`` to the size of the second loop.
    """
    strided_names, stride_list = (
        _PLANE_KERNELS[loops.call.kernel],
        list(loops.call.named_arguments["steps"]),
    )
    n_dimensions = len(stride_list) // len(strided_names)
    for name, strides in zip(list(loops.call.pointers), loops.strides, strict=True):
        if name in strided_names:
            stride_list[
                strided_names.index(name) * n_dimensions : (strided_names.index(name) + 1)
                * n_dimensions
            ] = strides
    if len(loops.sizes) != n_dimensions:
        return None
    return with_arguments(loops, {"steps": tuple(stride_list), "channels": loops.sizes[1]})


def _read_bias_gradient(call: Call) -> Loops:
    """Convert the gradient of a bias to loops over batch, channels, rows and columns.

    Rows and columns have size 0, because `_write_bias_gradient` sets only their strides.
    """
    arguments = call.named_arguments
    strides = tuple(arguments[f"{name}_step"] for name in ("dy", "channel", "row", "column"))
    sizes = (arguments["batch"], arguments["count"], 0, 0)
    return make_loops(call, sizes, {"db": (0, 1, 0, 0), "dy": strides})


def _write_bias_gradient(loops: Loops) -> Call | None:
    """Convert loops over batch, channels, rows and columns to the gradient of a bias.

    Sets ``count`` and the strides, but not ``batch``. None unless there are four loops.
    """
    if len(loops.sizes) != len(_BIAS_GRADIENT_DIMENSIONS):
        return None
    names = ("dy_step", "channel_step", "row_step", "column_step")
    return with_arguments(
        loops, {"count": loops.sizes[1], **dict(zip(names, loops.strides[1], strict=True))}
    )


# -- convolutions: loops over the batch, output channels, input channels, rows and columns ---------


def _read_convolution(call: Call) -> Loops | None:
    """Convert a convolution to loops over batch, output and input channels, rows and columns.

    Input channels are one iteration if the convolution is depthwise. Rows and columns have size 0,
    because only their strides matter. None for grouped convolutions, unless depthwise with one
    result per channel, and for calls whose ``first`` and ``count`` select some output channels.
    """
    arguments = call.named_arguments
    sizes = ConvolutionSizes(*arguments["shape"])
    is_depthwise = "depthwise" in call.kernel
    if sizes.groups != (sizes.channels if is_depthwise else 1) or arguments["first"]:
        return None
    if arguments["count"] != sizes.results or (is_depthwise and sizes.results != sizes.channels):
        return None
    if "strides" in arguments:
        stride_list = arguments["strides"]
        strides_of_tensors = [stride_list[k : k + 4] for k in (0, 4, 8)]
    else:
        out_batch = arguments.get("out_step", arguments.get("dy_step"))
        strides_by_role = {
            "x": (sizes.channels * sizes.plane, sizes.plane, 0, 0),
            "y": (out_batch, sizes.out_plane, 0, 0),
            "w": (sizes.filter or sizes.group_channels * sizes.window, sizes.window, 0, 0),
        }
        strides_of_tensors = [strides_by_role[_ROLES[name]] for name in [*arguments][:3]]
    strides = {"bias": (0, 1, 0, 0, 0)}
    for name, (outer_stride, channel_stride, *spatial_strides) in zip(
        arguments, strides_of_tensors, strict=False
    ):
        role = _ROLES[name]
        if role == "y" or (role == "x" and is_depthwise):
            strides[name] = (outer_stride, channel_stride, 0, *spatial_strides)
        elif role == "x":
            strides[name] = (outer_stride, 0, channel_stride, *spatial_strides)
        else:
            strides[name] = (
                0,
                outer_stride,
                0 if is_depthwise else channel_stride,
                *spatial_strides,
            )
    batch, channels = arguments["batch"], 1 if is_depthwise else sizes.channels
    return make_loops(call, (batch, sizes.results, channels, 0, 0), strides)


def _write_convolution(loops: Loops) -> Call | None:
    """Convert loops to a convolution.

    None unless there are five loops. Also None if consecutive input images, or gradients of these,
    are not adjacent in memory, unless the kernel has an argument ``strides``.
    """
    if len(loops.sizes) != len(_CONVOLUTION_DIMENSIONS):
        return None
    call, arguments = loops.call, loops.call.named_arguments
    old_sizes, is_depthwise = (
        ConvolutionSizes(*arguments["shape"]),
        "depthwise" in loops.call.kernel,
    )
    batch, results, channels, _, _ = loops.sizes
    strides = {
        _ROLES[name]: tensor_strides
        for name, tensor_strides in zip(list(call.pointers), loops.strides, strict=True)
        if name in _ROLES
    }
    changes: dict[str, Argument] = {"count": results}
    if "strides" in arguments:
        names = [name for name in list(call.pointers) if name in _ROLES]
        changes["strides"] = tuple(
            stride
            for name in names
            for stride in _convolution_strides(strides[_ROLES[name]], _ROLES[name])
        )
    else:
        if is_depthwise:
            channels = results
        if batch > 1 and "x" in strides and strides["x"][0] != channels * old_sizes.plane:
            return None
        changes["out_step" if "out_step" in arguments else "dy_step"] = strides["y"][0]
    stride = strides["w"][1] if "w" in strides else 0
    filter_stride = (
        0
        if stride in (0, channels * old_sizes.window) or is_depthwise or "strides" in arguments
        else stride
    )
    groups = channels if is_depthwise else 1
    new_sizes = old_sizes._replace(
        channels=channels, results=results, groups=groups, filter=filter_stride
    )
    return with_arguments(loops, {**changes, "shape": tuple(new_sizes)})


def _convolution_strides(strides: Numbers, role: str) -> Numbers:
    """Return the four strides of a tensor in the argument ``strides``, from its strides in loops.

    The loops are those of `_CONVOLUTION_DIMENSIONS`; `role` is "x", "y" or "w". The first two of
    the returned strides are batch and channel of an image, or output and input channel of weights;
    rows and columns follow.
    """
    batch, results, channels, *spatial_strides = strides
    return {"y": (batch, results), "x": (batch, channels), "w": (results, channels)}[role] + (
        *spatial_strides,
    )


_BIAS_GRADIENT_DIMENSIONS: Final = ("batch", "channels", "rows", "columns")
_CONVOLUTION_DIMENSIONS: Final = ("batch", "results", "channels", "rows", "columns")
"""Dimensions of the loops of, in order, bias gradients and convolutions."""
_ROLES: Final = {"out": "y", "dy": "y", "x": "x", "dx": "x", "w": "w", "dw": "w"}
"""Roles of parameters of convolutions: ``x`` input, ``y`` output, ``w`` weights, or gradients of
these."""
_CONVOLUTIONS: Final = {
    f"pm_{kind}{direction}{suffix}": "convolution"
    for kind, suffix in (("conv2d", ""), ("conv2d", "_strided"), ("depthwise", ""))
    for direction in ("", "_dx", "_dw")
}
"""Key in `_LOOP_FORMATS` of each kernel of a convolution for real numbers, except
``pm_conv2d_db``."""
PRODUCT_KERNELS: Final = frozenset(
    ("pm_mm", *INT8_PRODUCT_KERNELS, *(name for name in _CONVOLUTIONS if "conv2d" in name))
)
"""Kernels of matrix products, linear layers and non-depthwise convolutions, and of their input and
weight gradients."""
SUMMED_DIMENSIONS: Final = {
    "pm_mm": 1, "pm_conv2d": 2, "pm_conv2d_dx": 1, "pm_conv2d_dx_strided": 1,
    "pm_q8_pointwise_dx": 1, "pm_q8_conv2d_dx": 1,
}  # fmt: skip
"""Dimension that a kernel sums over and that can be divided, by kernel.

If the last argument of these kernels is 1, they add to earlier sums."""
_PLANE_KERNELS: Final = {
    "pm_batch_norm": ("out", "x"),
    "pm_batch_norm_backward": ("dx", "dy", "x"),
    "pm_batch_norm_fixed": ("out", "x"),
    "pm_batch_norm_fixed_backward": ("dx", "dy"),
    "pm_mean_pool2d": ("out", "x"),
    "pm_mean_pool2d_backward": ("dx", "dy"),
    "pm_max_pool2d": ("out", "indices", "x"),
    "pm_max_pool2d_backward": ("dx", "dy", "indices"),
    "pm_max_pool2d_places": ("out", "places", "x"),
    "pm_max_pool2d_places_backward": ("dx", "dy", "places"),
    "pm_pick2d": ("out", "x"),
    "pm_pick2d_backward": ("dx", "dy"),
    "pm_bilinear2d": ("out", "x"),
    "pm_bilinear2d_backward": ("dx", "dy"),
}
"""Kernels on planes, with the parameters whose strides are in ``steps``; other tensors have one
number per channel."""
_SCALAR_PARAMETERS: Final = frozenset(("steps", "product"))
"""Parameters of updates that point to one element."""
_NON_UPDATE_PARAMETERS: Final = frozenset(("outer", "bags", "batches"))
"""Parameters that no update has."""
_LOOP_FORMATS: Final[Mapping[str, LoopFormat]] = {
    "update": (_read_update, _write_update),
    "bits": (_read_bits, _write_bits),
    "planes": (_read_planes, _write_planes),
    "pm_conv2d_db": (_read_bias_gradient, _write_bias_gradient),
    "convolution": (_read_convolution, _write_convolution),
    **INT8_LOOP_FORMATS,
}
"""Functions that convert calls to loops, and loops to calls, by kind of kernel or by kernel."""
