"""Calls of kernels for some channels of their tensors: loops over channels, and parts of them.

Those of int8 have none: their channels lie last, so that slices of these would lie apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poetmodel.lowered.calls import Call, ConvolutionSizes, Ref
from poetmodel.lowered.kernels import changed, parameter_names
from poetmodel.lowered.loops import Loops, call_refs, columns_of, loops_of, shape_table

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from poetmodel.lowered.calls import Argument
    from poetmodel.lowered.loops import Numbers


class ChannelLayout(NamedTuple):
    """How the channels of a buffer lie: elements of the first, then of the next, and again."""

    channels: int
    step: int
    """Elements from one channel to the next; bits of a mask."""

    @property
    def span(self) -> int:
        """Elements of all channels, one after the other."""
        return self.channels * self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Some of the channels of a buffer, which a call goes through: those that are there."""

    layout: ChannelLayout
    dimension: int
    """Of the loops."""
    first: int
    """The channel that is there first."""
    count: int


@dataclass(frozen=True, slots=True)
class Channels:
    """The loops of a call, and how they can be parted."""

    loops: Loops

    @property
    def sums(self) -> Mapping[int, int]:
        """Dimensions that are summed over, each with the argument that says that sums go on."""
        kernel = self.loops.call.kernel
        last = len(self.loops.call.arguments) - 1
        return {_SUMMED[kernel]: last} if kernel in _SUMMED else {}

    @property
    def is_product(self) -> bool:
        """Whether results are of all channels that are read: it has weights, or another factor."""
        kernel = self.loops.call.kernel
        return kernel == "pm_mm" or (kernel in _CONVOLUTIONS and "conv2d" in kernel)

    def is_weight(self, number: int, *, is_state: bool) -> bool:
        """Return whether a tensor of a product is its weights, or their gradient."""
        own = _pointers(self.loops.call)[number]
        return self.is_product and (_ROLES.get(own) == "w" if own not in ("a", "b") else is_state)

    @property
    def bits(self) -> int | None:
        """Which tensor has bits, in the order of the loops."""
        names = _pointers(self.loops.call)
        return names.index("bits") if "bits" in names else None

    def total(self, number: int, elements: int) -> int:
        """Return how many elements a tensor has: bits, of a mask."""
        return prod(self.loops.sizes) if number == self.bits else elements

    def summed_layouts(self, names: Collection[str]) -> Iterator[tuple[str, ChannelLayout]]:
        """Yield how the channels of some buffers lie, which are summed over."""
        for ref, steps in zip(self.loops.refs, self.loops.steps, strict=True):
            for d in self.sums:
                if ref.buffer in names and not ref.offset and steps[d]:
                    yield ref.buffer, ChannelLayout(self.loops.sizes[d], steps[d])

    def dimension(self, number: int, layout: ChannelLayout) -> int | None:
        """Return which dimension is the channels of a tensor, and nothing else, or within one."""
        pairs = enumerate(zip(self.loops.sizes, self.loops.steps[number], strict=True))
        for d, (size, step) in pairs:
            if step > 0 and size * step == layout.span and layout.step % step == 0:
                return d
        return None

    def split(self, number: int, layout: ChannelLayout) -> Channels:
        """Return loops in which the channels of a tensor are a dimension, if they can be."""
        loops = self.loops
        for d, (size, step) in enumerate(zip(loops.sizes, loops.steps[number], strict=True)):
            if step and layout.step % step == 0 and size * step > layout.span:
                inside = layout.span // step
                if size % inside == 0:
                    return Channels(loops.part(d, 0, rows=inside, count=1))
        return self

    def may_part(self, dimension: int) -> bool:
        """Return whether parts of a dimension, one after the other, do what all of it does."""
        if dimension in self.sums:
            return True
        written = changed(self.loops.call)
        return all(
            self.loops.steps[number][dimension]
            for number, ref in enumerate(call_refs(self.loops.call))
            if ref in written
        )

    def part(
        self, ranges: Mapping[int, tuple[int, int, int]], views: Mapping[int, View]
    ) -> Call | None:
        """Return the call for channels, of so many, in some dimensions; None if there is none.

        Tensors are whole, but for those that `views` has.
        """
        loops, sizes = self.loops, list(self.loops.sizes)
        for d, (first, end, channels) in ranges.items():
            sizes[d] = sizes[d] // channels * (end - first)
        refs, all_steps = [], []
        for number, (ref, steps) in enumerate(zip(loops.refs, loops.steps, strict=True)):
            view, offset = views.get(number), ref.offset
            new = steps if view is None else self._steps_in(steps, view)
            if new is None:
                return None
            for d, (first, _, channels) in ranges.items():
                there = view.first if view is not None and view.dimension == d else 0
                offset += (first - there) * (loops.sizes[d] // channels) * new[d]
            if number == self.bits:
                inside = zip(sizes, new, _steps(sizes), strict=True)
                if offset % BYTE or any(n > 1 and step != one for n, step, one in inside):
                    return None
                offset //= BYTE
            refs.append(Ref(ref.buffer, offset))
            all_steps.append(new)
        goes_on = [self.sums[d] for d, (first, _, _) in ranges.items() if first and d in self.sums]
        made = replace(loops, sizes=tuple(sizes), refs=tuple(refs), steps=tuple(all_steps))
        write = _FORMS[_form(loops.call)][1] if _form(loops.call) else Loops.as_call
        call = write(made)
        if call is None:
            return None
        arguments = [1 if k in goes_on else a for k, a in enumerate(call.arguments)]
        return replace(call, arguments=tuple(arguments))

    def _steps_in(self, steps: Numbers, view: View) -> Numbers | None:
        """Return the steps in a slice; None where some go past channels that are not in it."""
        new, layout = list(steps), view.layout
        for d, step in enumerate(steps):
            if d == view.dimension or step < layout.step:
                continue
            if step % layout.span == 0:
                new[d] = step // layout.channels * view.count
            elif self.loops.sizes[d] != 1:
                return None
        return tuple(new)


def channels_in(call: Call) -> Channels | None:
    """Return the loops of a call; None of a kernel that takes no ranges."""
    form = _form(call)
    if call.within is not None:
        return None
    loops = _FORMS[form][0](call) if form else loops_of(replace(call, where=None))
    return None if loops is None else Channels(replace(loops, call=call))


def _form(call: Call) -> str:
    """Return what reads and writes a call; nothing where `loops_of` does."""
    names = parameter_names(call.kernel)
    if call.kernel in _PLANES:
        return "planes"
    if call.kernel in _CONVOLUTIONS or call.kernel == "pm_conv2d_db":
        return _CONVOLUTIONS.get(call.kernel, call.kernel)
    if "bits" in names and "shape" in names:
        return "bits"
    return "update" if {"gradient", "n"} <= {*names} and not _OTHERS & {*names} else ""


def _pointers(call: Call) -> list[str]:
    """Return the names of the pointers of a call, those that are not null."""
    pairs = zip(parameter_names(call.kernel), call.arguments, strict=True)
    return [name for name, a in pairs if isinstance(a, Ref)]


def _steps(sizes: Sequence[int]) -> list[int]:
    """Return the steps of what lies in the order of loops."""
    return [prod(sizes[:k]) for k in range(len(sizes))]


def _with(loops: Loops, changes: Mapping[str, Argument]) -> Call:
    """Return a call with other arguments, by name; its pointers are those of the loops."""
    refs = iter(loops.refs)
    names = parameter_names(loops.call.kernel)
    arguments = tuple(
        next(refs) if isinstance(a, Ref) else changes.get(name, a)
        for name, a in zip(names, loops.call.arguments, strict=True)
    )
    return replace(loops.call, arguments=arguments)


def _given(call: Call) -> dict[str, Any]:
    return dict(zip(parameter_names(call.kernel), call.arguments, strict=True))


def _loops(call: Call, sizes: Numbers, steps: Mapping[str, Numbers]) -> Loops:
    """Return loops whose steps are given by the names of pointers."""
    own = tuple(steps[name] for name in _pointers(call))
    return Loops(call=call, sizes=sizes, refs=call_refs(call), steps=own)


# -- updates and masks -----------------------------------------------------------------------------


def _read_update(call: Call) -> Loops:
    size = _given(call)["n"]
    names = _pointers(call)
    steps = tuple((int(name not in _NUMBERS),) for name in names)
    return Loops(call=call, sizes=(size,), refs=call_refs(call), steps=steps)


def _write_update(loops: Loops) -> Call | None:
    return _with(loops, {"n": loops.sizes[0]}) if len(loops.sizes) == 1 else None


def _read_bits(call: Call) -> Loops:
    sizes, *steps = columns_of(_given(call)["shape"])
    steps.insert(_pointers(call).index("bits"), tuple(_steps(sizes)))
    return Loops(call=call, sizes=sizes, refs=call_refs(call), steps=tuple(steps))


def _write_bits(loops: Loops) -> Call | None:
    pairs = zip(_pointers(loops.call), loops.steps, strict=True)
    table = shape_table((loops.sizes, *(steps for name, steps in pairs if name != "bits")))
    return None if table is None else _with(loops, {"shape": table})


# -- planes ----------------------------------------------------------------------------------------


def _read_planes(call: Call) -> Loops:
    given, names = _given(call), _PLANES[call.kernel]
    listed = given["steps"]
    width = len(listed) // len(names)
    steps = {name: listed[k * width : (k + 1) * width] for k, name in enumerate(names)}
    others = {name: (0, 1, *[0] * (width - 2)) for name in _pointers(call)}
    return _loops(call, (given["batch"], given["channels"], *[0] * (width - 2)), others | steps)


def _write_planes(loops: Loops) -> Call | None:
    names, listed = _PLANES[loops.call.kernel], list(_given(loops.call)["steps"])
    width = len(listed) // len(names)
    for name, steps in zip(_pointers(loops.call), loops.steps, strict=True):
        if name in names:
            listed[names.index(name) * width : (names.index(name) + 1) * width] = steps
    if len(loops.sizes) != width:
        return None
    return _with(loops, {"steps": tuple(listed), "channels": loops.sizes[1]})


def _read_bias_gradient(call: Call) -> Loops:
    given = _given(call)
    steps = tuple(given[f"{name}_step"] for name in ("dy", "channel", "row", "column"))
    sizes = (given["batch"], given["count"], 0, 0)
    return _loops(call, sizes, {"db": (0, 1, 0, 0), "dy": steps})


def _write_bias_gradient(loops: Loops) -> Call | None:
    names = ("dy_step", "channel_step", "row_step", "column_step")
    return _with(loops, {"count": loops.sizes[1], **dict(zip(names, loops.steps[1], strict=True))})


# -- convolutions: loops over the batch, output channels, input channels, rows and columns ---------


def _read_convolution(call: Call) -> Loops | None:
    given = _given(call)
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
    return _loops(call, (batch, sizes.results, channels, 0, 0), steps)


def _write_convolution(loops: Loops) -> Call | None:
    call, given = loops.call, _given(loops.call)
    old, depthwise = ConvolutionSizes(*given["shape"]), "depthwise" in loops.call.kernel
    batch, results, channels, *_ = loops.sizes
    steps = {_ROLES[n]: s for n, s in zip(_pointers(call), loops.steps, strict=True) if n in _ROLES}
    changes: dict[str, Argument] = {"count": results}
    if "strides" in given:
        names = [name for name in _pointers(call) if name in _ROLES]
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
    return _with(loops, {**changes, "shape": tuple(made)})


def _four(steps: Numbers, role: str) -> Numbers:
    batch, results, channels, *rest = steps
    return {"y": (batch, results), "x": (batch, channels), "w": (results, channels)}[role] + (
        *rest,
    )


BYTE: Final = 8
"""Bits of a mask in one of its elements."""
_ROLES: Final = {"out": "y", "dy": "y", "x": "x", "dx": "x", "w": "w", "dw": "w"}
"""What the pointers of convolutions are: input, output, weights."""
_CONVOLUTIONS: Final = {
    f"pm_{kind}{what}{order}": "convolution"
    for kind, order in (("conv2d", ""), ("conv2d", "_strided"), ("depthwise", ""))
    for what in ("", "_dx", "_dw")
}
_SUMMED: Final = {"pm_mm": 1, "pm_conv2d": 2, "pm_conv2d_dx": 1, "pm_conv2d_dx_strided": 1}
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
_FORMS: Final[dict[str, tuple[Callable[..., Loops | None], Callable[[Loops], Call | None]]]] = {
    "update": (_read_update, _write_update),
    "bits": (_read_bits, _write_bits),
    "planes": (_read_planes, _write_planes),
    "pm_conv2d_db": (_read_bias_gradient, _write_bias_gradient),
    "convolution": (_read_convolution, _write_convolution),
}
