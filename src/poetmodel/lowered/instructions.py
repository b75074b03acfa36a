"""Instructions of kernels on a Cortex-M with an FPU, estimated: no emulator is needed for these.

A call is counted in what its kernel repeats: blocks, rows, taps, elements. A table has the
instructions of each of these, as ``bench/mcu/instructions.py`` finds them with an emulator.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from functools import cache
from importlib.resources import files
from itertools import product
from operator import sub
from typing import TYPE_CHECKING, Any, Final

from poetmodel.lowered.calls import Call, ConvolutionSizes, Ref
from poetmodel.lowered.kernels import parameter_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from poetmodel.graph import Node

TABLE: Final = "instructions.json"
"""The file beside this module."""
OTHER: Final = "other"
"""What the table calls kernels that it does not have."""
_BLOCK: Final = 4
"""Rows, columns, channels or places that kernels take at once."""
_INT8: Final = (-128, 127)
"""The limits of an element of int8."""
_MAX_SUMMED: Final = 256
"""Largest number of int8 elements whose sum fits in 16 bits."""
_SLIDING: Final = (3, 5)
"""Columns of the windows that slide: see ``pm_correlate.h``."""


@cache
def table() -> dict[str, dict[str, float]]:
    """Return for each kernel the instructions of what it repeats."""
    text = (files("poetmodel.lowered") / TABLE).read_text(encoding="utf-8")
    rows: dict[str, dict[str, float]] = json.loads(text)
    return rows


def counted_nodes(nodes: Iterable[Node], calls: Iterable[tuple[Call, ...]]) -> tuple[Node, ...]:
    """Return the nodes of a step with the estimated instructions of one computation of each."""
    return tuple(
        node if node.is_state else replace(node, instructions=instructions(node, of_node))
        for node, of_node in zip(nodes, calls, strict=True)
    )


def instructions(node: Node, calls: Iterable[Call]) -> int:
    """Return the estimated instructions of calls that compute a node."""
    return round(sum(map(call_instructions, computing(node, calls))))


def computing(node: Node, calls: Iterable[Call]) -> Iterator[Call]:
    """Yield the calls of a node, but for copies of what is changed in place."""
    return (call for call in calls if _copied(call) not in node.in_place)


def _copied(call: Call) -> tuple[str, str] | None:
    """Return the buffer that a call makes a copy in, and that of which."""
    match call:
        case Call(kernel, (Ref(to), Ref(of), *_)) if kernel.startswith("pm_copy"):
            return to, of
    return None


def call_instructions(call: Call) -> float:
    """Return the estimated instructions of a call."""
    name, counts = counted(call)
    known = table()
    weights = next(known[key] for key in (name, call.kernel, OTHER) if key in known)
    return sum(weights.get(what, 0.0) * count for what, count in counts.items())


def counted(call: Call) -> tuple[str, Counter[str]]:
    """Return what a call is in the table, and how often it does what its kernel repeats."""
    given = dict(zip(parameter_names(call.kernel), call.arguments, strict=True))
    counts = Counter({"call": 1})
    _COUNTS.get(call.kernel, _count_elements)(counts, given)
    decays = given.get("decay", 0.0) != 0 or given.get("sign", 1.0) != 1
    return f"{call.kernel}, decay" if decays else call.kernel, counts


# -- elements ------------------------------------------------------------------------------------


def _count_elements(counts: Counter[str], given: Mapping[str, Any]) -> None:
    """Count elements, rows of a shape table, and results that many elements become."""
    if "shape" in given:
        sizes = _sizes(given["shape"])
        counts.update(element=math.prod(sizes), row=math.prod(sizes[1:]))
    elif isinstance(given.get("outer"), tuple):
        results = math.prod(_sizes(given["outer"]))
        inner = _sizes(given["inner"]) if "inner" in given else _inside(given)
        counts.update(
            result=results, row=results * math.prod(inner[1:]), element=results * math.prod(inner)
        )
    elif "outer" in given:
        rows = given["outer"] * given["rows"]
        counts.update(row=rows, element=rows * given["size"])
    elif "batch" in given:
        _count_planes(counts, given)
    elif "m" in given:
        counts.update(row=given["m"], element=given["m"] * given["n"])
    else:
        counts.update(element=given.get("n", 1))


def _inside(given: Mapping[str, Any]) -> list[int]:
    return [given["n"]] if "n" in given else [given["columns"], given["rows"]]


def _sizes(shape: tuple[int, ...]) -> list[int]:
    """Return the sizes of a shape table, the innermost first: see ``pm_each.h``."""
    rank, *rest = shape
    return rest[:: len(rest) // rank]


def _count_planes(counts: Counter[str], given: Mapping[str, Any]) -> None:
    """Count planes, their places, and the elements that windows see."""
    planes = given["batch"] * given.get("channels", given.get("count", 1))
    counts.update(plane=planes)
    if "plane" in given:
        counts.update(result=given["channels"], element=planes * given["plane"])
        return
    counts.update(row=planes * given["height"], element=planes * given["height"] * given["width"])
    if "x_height" in given:
        counts.update(x=planes * given["x_height"] * given["x_width"])
    if "row_step" in given or "divisor" in given:
        seen = [_seen(given, way) for way in ("row", "column")]
        counts.update(window_row=planes * given["width"] * seen[0], seen=planes * math.prod(seen))


def _seen(given: Mapping[str, Any], way: str) -> int:
    """Return how many rows or columns all windows see: a list has their begins and ends."""
    windows, numbers = given[f"{way}s"], 2 if "row_step" in given else 3
    starts, ends, step = windows[::numbers], windows[1::numbers], given.get(f"{way}_step", 1)
    return sum(-(-(end - start) // step) for start, end in zip(starts, ends, strict=True))


# -- products of matrices ------------------------------------------------------------------------


def _count_product(counts: Counter[str], given: Mapping[str, Any]) -> None:
    m, k, n, batch = (given.get(name, 1) for name in ("m", "k", "n", "batch"))
    if k == 1:
        name = "outer, added" if given.get("accumulate") else "outer"
        counts.update({f"{name} row": batch * m, name: batch * m * n})
        return
    by = _lying(given)
    rows, columns = divmod(m, _BLOCK), divmod(n, _BLOCK)
    blocks = {
        "4x4": batch * rows[0] * columns[0],
        "1x4": batch * rows[1] * columns[0],
        "1x1": batch * m * columns[1],
    }
    for name, times in blocks.items():
        counts[name] += times
        counts[f"{name} step" + (f" by {by}" if name != "1x1" else "")] += times * k


def _lying(given: Mapping[str, Any]) -> str:
    """Return which way a product goes through its factors: see ``pm_mm.h``."""
    if given["a_column"] == 1 and given["b_row"] == 1:
        return "rows"
    if given["b_column"] == 1:
        return "columns"
    return "steps"


# -- convolutions --------------------------------------------------------------------------------


def _taps(position: int, size: int, taps: int, step: int) -> range:
    """Return which taps fall into the input: ``pm_taps``."""
    inside = [k for k in range(taps) if 0 <= position + k * step < size]
    return range(inside[0], inside[-1] + 1) if inside else range(0)


class _Line:
    """One direction of a correlation: places of the result, and the taps that each sees."""

    def __init__(
        self, places: int, start: int, step: int, size: int, taps: int, tap_step: int
    ) -> None:
        self.step, self.tap_step, self.window = step, tap_step, taps
        self.taps = [len(_taps(start + k * step, size, taps, tap_step)) for k in range(places)]


def _count_correlation(
    counts: Counter[str], down: _Line, across: _Line, channels: int, results: int, *, slides: bool
) -> None:
    """Count the sums of ``pm_correlate``: of four channels or one, at four places or one."""
    rows, places = sum(down.taps), len(down.taps)
    whole = [taps == across.window for taps in across.taps]
    for times, fours in zip(divmod(results, _BLOCK), (True, False), strict=True):
        counts["line"] += times * places
        k = 0
        while k < len(whole) and times:
            four = across.step in (1, 2) and len(whole) - k >= _BLOCK and whole[k] and whole[k + 3]
            name = f"{4 if fours else 1}x{4 if four else 1}"
            if fours and slides and (not four or (across.step == 1 and across.window in _SLIDING)):
                name += " sliding"
            elif four:
                name += f" by {across.step}"
            counts[name] += times * places
            counts[f"{name} row"] += times * rows * channels
            counts[f"{name} tap"] += times * rows * channels * across.taps[k]
            k += _BLOCK if four else 1


def _count_convolution(counts: Counter[str], given: Mapping[str, Any]) -> None:
    sizes = ConvolutionSizes(*given["shape"])
    channels = sizes.group_channels
    (height, rows, window_h, stride_h, pad_h, dilation_h), across = sizes.directions
    width, columns, window_w, stride_w, pad_w, dilation_w = across
    down = _Line(rows, -pad_h, stride_h, height, window_h, dilation_h)
    line = _Line(columns, -pad_w, stride_w, width, window_w, dilation_w)
    summed = channels
    if window_h == window_w == 1 and pad_h == pad_w == 0:
        # All channels are the taps of one window.
        plane, summed = height * width, 1
        line = _Line(columns, 0, stride_w, channels * plane, channels, plane)
        if stride_h == stride_w == 1:
            down = _Line(1, 0, 1, 1, 1, 1)
            line = _Line(plane, 0, 1, channels * plane, channels, plane)
    for results in _groups(given["first"], given["count"], sizes.group_results):
        for _ in range(given["batch"]):
            _count_correlation(counts, down, line, summed, results, slides=line.tap_step == 1)


def _groups(first: int, count: int, results: int) -> Iterator[int]:
    """Yield how many channels of a range each group has."""
    done = 0
    while done < count:
        now = min(results - (first + done) % results, count - done)
        yield now
        done += now


def _count_input_gradient(counts: Counter[str], given: Mapping[str, Any]) -> None:
    sizes = ConvolutionSizes(*given["shape"])
    channels, axes = sizes.group_channels, sizes.directions
    pointwise = all(axis[2] == 1 and axis[4] == 0 for axis in axes)
    plane, out_plane = sizes.plane, sizes.out_plane
    for summed in _groups(given["first"], given["count"], sizes.group_results):
        for _ in range(given["batch"]):
            if pointwise and all(axis[3] == 1 for axis in axes):
                lines = [
                    (_Line(1, 0, 1, 1, 1, 1), _Line(plane, 0, 1, summed * plane, summed, plane), 1)
                ]
            else:
                lines = [
                    (down, across, between)
                    for down, _ in _phases(*axes[0])
                    for across, between in _phases(*axes[1])
                ]
            for down, columns, between in lines:
                across, times = columns, summed if down.window and columns.window else 0
                if pointwise and times:
                    times = 1
                    across = _Line(len(columns.taps), 0, 1, summed * out_plane, summed, out_plane)
                slides = between == 1 and across.tap_step == -1
                _count_correlation(counts, down, across, times, channels, slides=slides)


def _phases(
    size: int, places: int, window: int, stride: int, pad: int, dilation: int
) -> Iterator[tuple[_Line, int]]:
    """Yield the places of the input that see the same taps, and how far apart these are."""
    for i in range(min(stride, size)):
        tap = next(
            (t for t in range(min(window, stride)) if (i + pad - t * dilation) % stride == 0), -1
        )
        between = stride // math.gcd(stride, dilation)
        taps = 0 if tap < 0 else -(-(window - tap) // between)
        start = 0 if tap < 0 else (i + pad - tap * dilation) // stride
        step = -(between * dilation) // stride
        yield _Line(-(-(size - i) // stride), start, 1, places, taps, step), between


def _windows(sizes: ConvolutionSizes) -> Iterator[tuple[int, int]]:
    """Yield for each tap of a window at how many rows and columns it falls into the image."""
    (height, rows, window_h, stride_h, pad_h, dilation_h), across = sizes.directions
    width, columns, window_w, stride_w, pad_w, dilation_w = across
    for h in range(window_h):
        down = len(_taps(h * dilation_h - pad_h, height, rows, stride_h))
        for v in range(window_w):
            yield down, len(_taps(v * dilation_w - pad_w, width, columns, stride_w))


def _count_weight_gradient(counts: Counter[str], given: Mapping[str, Any]) -> None:
    sizes, batch = ConvolutionSizes(*given["shape"]), given["batch"]
    channels = sizes.group_channels
    groups = list(_groups(given["first"], given["count"], sizes.group_results))
    in_line = sizes.out_width == sizes.width and sizes.stride_across == sizes.stride_down == 1
    for rows, columns in _windows(sizes):
        counts["tap"] += len(groups)
        if rows and columns == sizes.out_width and in_line:
            rows, columns = 1, rows * columns  # noqa: PLW2901 - one long row
        for results in groups:
            if batch == rows == columns == 1:
                counts.update(point=results * channels)
                continue
            fours, ones = divmod(results, _BLOCK)
            blocks = {
                "4x4": fours * (channels // _BLOCK),
                "1x4": fours * (channels % _BLOCK),
                "1x1": ones * channels,
            }
            for name, times in blocks.items():
                counts[name] += times
                counts[f"{name} row"] += times * batch * rows
                counts[f"{name} place"] += times * batch * rows * columns


def _count_depthwise(counts: Counter[str], given: Mapping[str, Any]) -> None:
    sizes, planes = ConvolutionSizes(*given["shape"]), given["batch"] * given["count"]
    counts.update(cleared=planes * sizes.out_plane)
    if sizes[6:14] == (3, 3, 1, 1, 1, 1, 1, 1):
        counts.update({"3x3 row": planes * sizes.height, "3x3": planes * sizes.plane})
        return
    for rows, columns in _windows(sizes):
        counts.update(tap=planes, row=planes * rows, element=planes * rows * columns)


def _count_strided(counts: Counter[str], given: Mapping[str, Any]) -> None:
    sizes = ConvolutionSizes(*given["shape"])
    results = given["batch"] * given["count"]
    planes = results * sizes.group_channels
    counts.update(result=results * sizes.out_plane)
    for rows, columns in _windows(sizes):
        counts.update(tap=planes, row=planes * rows, element=planes * rows * columns)


def _count_pairs(counts: Counter[str], given: Mapping[str, Any]) -> None:
    results = math.prod(given[name] for name in ("batches", "rows", "columns"))
    counts.update(result=results, element=results * given["n"])


def _count_bags(counts: Counter[str], given: Mapping[str, Any]) -> None:
    counts.update(result=given["bags"] * given["n"], element=given["count"] * given["n"])


# -- quantized layers ----------------------------------------------------------------------------


def _count_dots(counts: Counter[str], name: str, times: int, length: int) -> None:
    """Count sums of so many products, of several rows at once: ``pm_q8_dots``."""
    words, rest = divmod(length, _BLOCK)
    counts.update({f"{name} word": times * words, f"{name} rest": times * rest})


def _count_limited(counts: Counter[str], given: Mapping[str, Any], results: int) -> None:
    """Count the results that are brought within limits."""
    if (given["low"], given["high"]) != _INT8:
        counts.update(limited=results)


def _count_q8_elements(counts: Counter[str], given: Mapping[str, Any]) -> None:
    counts.update(element=given["n"])
    _count_limited(counts, given, given["n"])


def _count_q8_pool(counts: Counter[str], given: Mapping[str, Any]) -> None:
    """Count places, and the elements that their windows see, by words of four channels and rests.

    Means of more than 256 elements are summed one channel after the other.
    """
    given = {"row_step": 1, "column_step": 1, "low": -128, "high": 127, **given}
    places = given["batch"] * given["height"] * given["width"]
    rows = given["batch"] * _seen(given, "row")
    elements = rows * _seen(given, "column")
    words, rest = divmod(given["channels"], _BLOCK)
    lists = (given["rows"], given["columns"])
    largest = math.prod(max(map(sub, ends[1::2], ends[::2])) for ends in lists)
    if "scale" in given and largest > _MAX_SUMMED:
        words, rest = 0, given["channels"]
    counts.update(place=places)
    for name, times in (("4", words), ("1", rest)):
        seen = {"element": places, "row": rows * given["width"], "seen": elements}
        counts.update({f"{name} {what}": times * number for what, number in seen.items()})
    _count_limited(counts, given, places * given["channels"])


def _count_q8_pointwise(counts: Counter[str], given: Mapping[str, Any]) -> None:
    (pairs, one), (twos, last) = divmod(given["results"], 2), divmod(given["pixels"], 2)
    blocks = {"2x2": pairs * twos, "1x2": pairs * last + one * (twos + last)}
    counts.update(pair=pairs)
    for name, times in blocks.items():
        counts[name] += times
        _count_dots(counts, name, times, given["in"])
    _count_limited(counts, given, given["pixels"] * given["results"])


def _taps_seen(sizes: ConvolutionSizes) -> list[list[int]]:
    """Return how many taps each row of places sees, and each column of them."""
    return [
        [len(_taps(k * stride - pad, size, window, dilation)) for k in range(places)]
        for size, places, window, stride, pad, dilation in sizes.directions
    ]


def _count_q8_convolution(counts: Counter[str], given: Mapping[str, Any]) -> None:
    sizes = ConvolutionSizes(*given["shape"])
    pairs = given["batch"] * sizes.groups * -(-given["count"] // sizes.groups // 2)
    in_line = sizes.groups == sizes.dilation_across == 1
    down, across = _taps_seen(sizes)
    lines, places = down.count(sizes.window_height), across.count(sizes.window_width)
    counts.update({"inside": pairs * (lines * places > 0), "line": pairs * lines * (places > 0)})
    whole = [(sizes.window_height, sizes.window_width)] * (lines * -(-places // 2))
    edges = [seen for seen in product(down, across) if seen != sizes[6:8]]
    counts.update(place=given["batch"] * len(edges))
    for name, windows in (("2x2", whole), ("1x2", edges)):
        for (rows, columns), times in Counter(windows).items():
            runs, length = (1, columns) if in_line else (columns, 1)
            many = pairs * times * rows * runs
            counts.update({name: pairs * times, f"{name} run": many})
            _count_dots(counts, name, many, length * sizes.group_channels)
    _count_limited(counts, given, given["batch"] * given["count"] * sizes.out_plane)


def _count_q8_depthwise(counts: Counter[str], given: Mapping[str, Any]) -> None:
    sizes, batch = ConvolutionSizes(*given["shape"]), given["batch"]
    window, (fours, ones) = sizes[6:8], divmod(given["count"], _BLOCK)
    down, across = _taps_seen(sizes)
    name = "3x3" if window == (3, 3) else "whole"
    for rows, columns in product(down, across):
        taps, is_whole = rows * columns, (rows, columns) == window
        made = {name if is_whole else "edge": fours, "1": ones}
        counts.update({"place": batch, "made": batch * (ones > 0 or not is_whole)})
        for kind, times in made.items():
            counts.update({kind: batch * times})
            if kind != "3x3":
                counts.update({f"{kind} row": batch * times * rows})
                counts.update({f"{kind} tap": batch * times * taps})
    lines = down.count(window[0]) if window[1] in across else 0
    counts.update({"inside": batch * fours * (lines > 0), "line": batch * fours * lines})
    _count_limited(counts, given, batch * given["count"] * sizes.out_plane)


# -- the backward pass of quantized layers -------------------------------------------------------


def _count_q8_start(counts: Counter[str], given: Mapping[str, Any]) -> None:
    counts.update(result=given["n"], element=given["n"] * given["terms"])


def _count_q8_update(counts: Counter[str], given: Mapping[str, Any]) -> None:
    counts.update(row=given["count"] // given["inner"], element=given["count"])


def _count_q8_input_gradient(counts: Counter[str], given: Mapping[str, Any]) -> None:
    """Count blocks of 4 channels, of 4 pixels or one, and channels that are left."""
    (fours, pixels), (blocks, channels) = (
        divmod(given["pixels"], _BLOCK),
        divmod(given["channels"], _BLOCK),
    )
    kinds = {"4x4": fours * blocks, "1x4": pixels * blocks, "1": given["pixels"] * channels}
    for name, times in kinds.items():
        counts.update({name: times, f"{name} result": times * given["results"]})


def _q8_gradient_sizes(given: Mapping[str, Any]) -> tuple[ConvolutionSizes, int, int]:
    """Return the sizes of a layer, pixels of its inputs, and how often a tap sees one of them."""
    sizes, batch = ConvolutionSizes(*given["shape"]), given["batch"]
    seen = sum(rows * columns for rows, columns in _windows(sizes))
    return sizes, batch * sizes.plane, batch * seen


def _count_q8_convolution_dx(counts: Counter[str], given: Mapping[str, Any]) -> None:
    sizes, pixels, seen = _q8_gradient_sizes(given)
    groups, results = sizes.groups, given["results"] // sizes.groups
    counts.update(pixel=pixels)
    for name, times in zip(("4", "1"), divmod(given["channels"] // groups, _BLOCK), strict=True):
        taps, many = seen * times * -(-results // _BLOCK), groups * times
        counts.update({name: pixels * many, f"{name} tap": groups * taps})
        counts.update({f"{name} result": seen * many * results})


def _count_q8_depthwise_dx(counts: Counter[str], given: Mapping[str, Any]) -> None:
    _, pixels, seen = _q8_gradient_sizes(given)
    counts.update(pixel=pixels)
    for name, times in zip(("4", "1"), divmod(given["count"], _BLOCK), strict=True):
        counts.update({name: pixels * times, f"{name} tap": seen * times})


def _count_q8_pool_dx(counts: Counter[str], given: Mapping[str, Any]) -> None:
    sizes, pixels, seen = _q8_gradient_sizes(given)
    counts.update(
        pixel=pixels,
        x=pixels * given["count"],
        element=given["batch"] * sizes.out_plane * given["count"],
        seen=seen * given["count"],
    )


def _count_q8_products(
    counts: Counter[str], results: int, channels: int, rows: int, places: int
) -> None:
    """Count gradients of weights between some results and channels: ``pm_q8_dw``."""
    (fours, ones), (blocks, left) = divmod(results, _BLOCK), divmod(channels, _BLOCK)
    kinds = {
        "4x4": fours * blocks, "4x1": fours * left, "1x4": ones * blocks, "1x1": ones * left,
    }  # fmt: skip
    for name, times in kinds.items():
        counts.update({name: times, f"{name} row": times * rows, f"{name} place": times * places})


def _count_q8_weight_gradient(counts: Counter[str], given: Mapping[str, Any]) -> None:
    counts.update(weight=given["count"])
    _count_q8_products(counts, given["count"] // given["in"], given["in"], 1, given["pixels"])


def _count_q8_convolution_dw(counts: Counter[str], given: Mapping[str, Any]) -> None:
    sizes, batch = ConvolutionSizes(*given["shape"]), given["batch"]
    results = given["count"] // (sizes.group_channels * sizes.window)
    counts.update(weight=given["count"])
    for rows, columns in _windows(sizes):
        counts.update(tap=sizes.groups)
        for _ in range(sizes.groups):
            lines = batch * rows if columns else 0
            shape = (results // sizes.groups, sizes.group_channels)
            _count_q8_products(counts, *shape, lines, lines * columns)


def _count_q8_depthwise_dw(counts: Counter[str], given: Mapping[str, Any]) -> None:
    sizes, batch = ConvolutionSizes(*given["shape"]), given["batch"]
    # Kernels that update too have a number of weights, and all channels.
    channels = sizes.channels if "w" in given else given["count"]
    counts.update(weight=channels * sizes.window)
    for rows, columns in _windows(sizes):
        counts.update(tap=1)
        lines = batch * rows if columns else 0
        for name, times in zip(("4", "1"), divmod(channels, _BLOCK), strict=True):
            work = {name: 1, f"{name} row": lines, f"{name} place": lines * columns}
            counts.update({what: times * count for what, count in work.items()})


_COUNTS: Final[dict[str, Callable[[Counter[str], Mapping[str, Any]], None]]] = {
    "pm_mm": _count_product,
    "pm_mm_sgd": _count_product,
    "pm_bmm": _count_product,
    "pm_cdist": _count_pairs,
    "pm_cdist_backward": _count_pairs,
    "pm_embedding_bag": _count_bags,
    "pm_embedding_bag_backward": _count_bags,
    "pm_conv2d": _count_convolution,
    "pm_conv2d_dx": _count_input_gradient,
    "pm_conv2d_dw": _count_weight_gradient,
    "pm_conv2d_dw_sgd": _count_weight_gradient,
    "pm_depthwise": _count_depthwise,
    "pm_depthwise_dx": _count_depthwise,
    "pm_depthwise_dw": _count_depthwise,
    "pm_depthwise_dw_sgd": _count_depthwise,
    "pm_conv2d_strided": _count_strided,
    "pm_conv2d_dx_strided": _count_strided,
    "pm_conv2d_dw_strided": _count_strided,
    "pm_q8_pointwise": _count_q8_pointwise,
    "pm_q8_conv2d": _count_q8_convolution,
    "pm_q8_depthwise": _count_q8_depthwise,
    "pm_q8_add": _count_q8_elements,
    "pm_q8_average": _count_q8_pool,
    "pm_q8_maximum": _count_q8_pool,
    "pm_q8_start": _count_q8_start,
    "pm_q8_sgd": _count_q8_update,
    "pm_q8_stochastic": _count_q8_update,
    "pm_q8_pointwise_dx": _count_q8_input_gradient,
    "pm_q8_conv2d_dx": _count_q8_convolution_dx,
    "pm_q8_depthwise_dx": _count_q8_depthwise_dx,
    "pm_q8_average_dx": _count_q8_pool_dx,
    "pm_q8_maximum_dx": _count_q8_pool_dx,
    "pm_q8_pointwise_dw": _count_q8_weight_gradient,
    "pm_q8_pointwise_dw_sgd": _count_q8_weight_gradient,
    "pm_q8_pointwise_dw_stochastic": _count_q8_weight_gradient,
    "pm_q8_conv2d_dw": _count_q8_convolution_dw,
    "pm_q8_conv2d_dw_sgd": _count_q8_convolution_dw,
    "pm_q8_conv2d_dw_stochastic": _count_q8_convolution_dw,
    "pm_q8_depthwise_dw": _count_q8_depthwise_dw,
    "pm_q8_depthwise_dw_sgd": _count_q8_depthwise_dw,
    "pm_q8_depthwise_dw_stochastic": _count_q8_depthwise_dw,
}
