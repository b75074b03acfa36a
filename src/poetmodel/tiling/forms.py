"""Kernels that take ranges of channels: their calls as loops, and the calls of other loops.

Channels of real numbers lie one after the other; those of int8 lie last, in pixels.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Final

from poetmodel.lowered.calls import ConvolutionSizes
from poetmodel.lowered.kernels import parameter_names
from poetmodel.lowered.loops import (
    Loops,
    call_refs,
    columns_of,
    loops_by_name,
    loops_of,
    named_arguments,
    pointers,
    shape_table,
    with_arguments,
)  # fmt: skip
from poetmodel.tiling.int8_forms import INT8_FORMS, INT8_PRODUCTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from poetmodel.lowered.calls import Argument, Call
    from poetmodel.lowered.loops import Numbers
    from poetmodel.tiling.int8_forms import Form


def read_loops(call: Call) -> Loops | None:
    """Return a call as loops over channels; None of a kernel that takes no ranges."""
    form = _form(call)
    return _FORMS[form][0](call) if form else loops_of(replace(call, where=None))


def write_call(loops: Loops) -> Call | None:
    """Return the call of loops; None where its kernel cannot go so."""
    form = _form(loops.call)
    return _FORMS[form][1](loops) if form else loops.as_call()


def is_weight(pointer: str) -> bool:
    """Return whether a kernel calls its weights, or their gradient, by this name."""
    return _ROLES.get(pointer) == "w"


def _form(call: Call) -> str:
    """Return what reads and writes a call; nothing where `loops_of` does."""
    names = parameter_names(call.kernel)
    if call.kernel in INT8_FORMS:
        return call.kernel
    if call.kernel in _PLANES:
        return "planes"
    if call.kernel in _CONVOLUTIONS or call.kernel == "pm_conv2d_db":
        return _CONVOLUTIONS.get(call.kernel, call.kernel)
    if "bits" in names and "shape" in names:
        return "bits"
    return "update" if {"gradient", "n"} <= {*names} and not _OTHERS & {*names} else ""


def steps_of(sizes: Sequence[int]) -> list[int]:
    """Return the steps of what lies in the order of loops."""
    return [prod(sizes[:k]) for k in range(len(sizes))]


# -- updates and masks -----------------------------------------------------------------------------


def _read_update(call: Call) -> Loops:
    size = named_arguments(call)["n"]
    names = pointers(call)
    steps = tuple((int(name not in _NUMBERS),) for name in names)
    return Loops(call=call, sizes=(size,), refs=call_refs(call), steps=steps)


def _write_update(loops: Loops) -> Call | None:
    return with_arguments(loops, {"n": loops.sizes[0]}) if len(loops.sizes) == 1 else None


def _read_bits(call: Call) -> Loops:
    sizes, *steps = columns_of(named_arguments(call)["shape"])
    steps.insert(pointers(call).index("bits"), tuple(steps_of(sizes)))
    return Loops(call=call, sizes=sizes, refs=call_refs(call), steps=tuple(steps))


def _write_bits(loops: Loops) -> Call | None:
    pairs = zip(pointers(loops.call), loops.steps, strict=True)
    table = shape_table((loops.sizes, *(steps for name, steps in pairs if name != "bits")))
    return None if table is None else with_arguments(loops, {"shape": table})


# -- planes ----------------------------------------------------------------------------------------


def _read_planes(call: Call) -> Loops:
    given, names = named_arguments(call), _PLANES[call.kernel]
    listed = given["steps"]
    width = len(listed) // len(names)
    steps = {name: listed[k * width : (k + 1) * width] for k, name in enumerate(names)}
    others = {name: (0, 1, *[0] * (width - 2)) for name in pointers(call)}
    return loops_by_name(
        call, (given["batch"], given["channels"], *[0] * (width - 2)), others | steps
    )


def _write_planes(loops: Loops) -> Call | None:
    names, listed = _PLANES[loops.call.kernel], list(named_arguments(loops.call)["steps"])
    width = len(listed) // len(names)
    for name, steps in zip(pointers(loops.call), loops.steps, strict=True):
        if name in names:
            listed[names.index(name) * width : (names.index(name) + 1) * width] = steps
    if len(loops.sizes) != width:
        return None
    return with_arguments(loops, {"steps": tuple(listed), "channels": loops.sizes[1]})


def _read_bias_gradient(call: Call) -> Loops:
    given = named_arguments(call)
    steps = tuple(given[f"{name}_step"] for name in ("dy", "channel", "row", "column"))
    sizes = (given["batch"], given["count"], 0, 0)
    return loops_by_name(call, sizes, {"db": (0, 1, 0, 0), "dy": steps})


def _write_bias_gradient(loops: Loops) -> Call | None:
    names = ("dy_step", "channel_step", "row_step", "column_step")
    return with_arguments(
        loops, {"count": loops.sizes[1], **dict(zip(names, loops.steps[1], strict=True))}
    )


# -- convolutions: loops over the batch, output channels, input channels, rows and columns ---------


def _read_convolution(call: Call) -> Loops | None:
    given = named_arguments(call)
    sizes = ConvolutionSizes(*given["shape"])
    depthwise = "depthwise" in call.kernel
    if sizes.groups != (sizes.channels if depthwise else 1) or given["first"]:
        return None
    if given["count"] != sizes.results or (depthwise and sizes.results != sizes.channels):
        return None
    if "strides" in given:
        listed = given["strides"]
        four = [listed[k : k + 4] for k in (0, 4, 8)]
    else:
        out_batch = given.get("out_step", given.get("dy_step"))
        lines = {
            "x": (sizes.channels * sizes.plane, sizes.plane, 0, 0),
            "y": (out_batch, sizes.out_plane, 0, 0),
            "w": (sizes.filter or sizes.group_channels * sizes.window, sizes.window, 0, 0),
        }
        four = [lines[_ROLES[name]] for name in parameter_names(call.kernel)[:3]]
    steps = {"bias": (0, 1, 0, 0, 0)}
    for name, (first, second, *rest) in zip(parameter_names(call.kernel), four, strict=False):
        role = _ROLES[name]
        if role == "y" or (role == "x" and depthwise):
            steps[name] = (first, second, 0, *rest)
        elif role == "x":
            steps[name] = (first, 0, second, *rest)
        else:
            steps[name] = (0, first, 0 if depthwise else second, *rest)
    batch, channels = given["batch"], 1 if depthwise else sizes.channels
    return loops_by_name(call, (batch, sizes.results, channels, 0, 0), steps)


def _write_convolution(loops: Loops) -> Call | None:
    call, given = loops.call, named_arguments(loops.call)
    old, depthwise = ConvolutionSizes(*given["shape"]), "depthwise" in loops.call.kernel
    batch, results, channels, *_ = loops.sizes
    steps = {_ROLES[n]: s for n, s in zip(pointers(call), loops.steps, strict=True) if n in _ROLES}
    changes: dict[str, Argument] = {"count": results}
    if "strides" in given:
        names = [name for name in pointers(call) if name in _ROLES]
        changes["strides"] = tuple(
            step for name in names for step in _four(steps[_ROLES[name]], _ROLES[name])
        )
    else:
        if depthwise:
            channels = results
        if batch > 1 and "x" in steps and steps["x"][0] != channels * old.plane:
            return None
        changes["out_step" if "out_step" in given else "dy_step"] = steps["y"][0]
    step = steps["w"][1] if "w" in steps else 0
    own = 0 if step in (0, channels * old.window) or depthwise or "strides" in given else step
    groups = channels if depthwise else 1
    made = old._replace(channels=channels, results=results, groups=groups, filter=own)
    return with_arguments(loops, {**changes, "shape": tuple(made)})


def _four(steps: Numbers, role: str) -> Numbers:
    batch, results, channels, *rest = steps
    return {"y": (batch, results), "x": (batch, channels), "w": (results, channels)}[role] + (
        *rest,
    )


_ROLES: Final = {"out": "y", "dy": "y", "x": "x", "dx": "x", "w": "w", "dw": "w"}
"""What the pointers of convolutions are: input, output, weights."""
_CONVOLUTIONS: Final = {
    f"pm_{kind}{what}{order}": "convolution"
    for kind, order in (("conv2d", ""), ("conv2d", "_strided"), ("depthwise", ""))
    for what in ("", "_dx", "_dw")
}
PRODUCTS: Final = frozenset(
    ("pm_mm", *INT8_PRODUCTS, *(name for name in _CONVOLUTIONS if "conv2d" in name))
)
"""Kernels each of whose results is of all channels that are read."""
SUMMED: Final = {
    "pm_mm": 1, "pm_conv2d": 2, "pm_conv2d_dx": 1, "pm_conv2d_dx_strided": 1,
    "pm_q8_pointwise_dx": 1, "pm_q8_conv2d_dx": 1,
}  # fmt: skip
"""Dimensions that kernels sum over and that can be parted; their last argument lets sums go on."""
_PLANES: Final = {
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
"""Kernels that act on channels: whose steps ``steps`` has; all else has a number a channel."""
_NUMBERS: Final = frozenset(("steps", "product"))
"""Single numbers that updates read."""
_OTHERS: Final = frozenset(("outer", "bags", "batches"))
"""What kernels take that are no updates."""
_FORMS: Final[Mapping[str, Form]] = {
    "update": (_read_update, _write_update),
    "bits": (_read_bits, _write_bits),
    "planes": (_read_planes, _write_planes),
    "pm_conv2d_db": (_read_bias_gradient, _write_bias_gradient),
    "convolution": (_read_convolution, _write_convolution),
    **INT8_FORMS,
}
