"""Estimated instructions of kernels on a Cortex-M with an FPU, without an emulator.

The repeated units of a kernel are counted for a call: blocks, rows, taps, elements. A table has the
instructions per unit, measured by ``bench/mcu/instructions.py`` with an emulator.
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
"""The table's file, in the folder of this module."""
OTHER: Final = "other"
"""The table's entry for kernels without an entry."""
_BLOCK: Final = 4
"""Number of rows, columns, channels or pixels that kernels process at once."""
_INT8: Final = (-128, 127)
"""Minimum and maximum of an int8 element."""
_MAX_SUMMED: Final = 256
"""Maximum number of int8 elements whose sum fits in 16 bits."""
_SLIDING: Final = (3, 5)
"""Widths of windows that slide, as in ``pm_correlate.h``."""


@cache
def table() -> dict[str, dict[str, float]]:
    """Return the instructions per repeated unit, by kernel."""
    text = (files("poetmodel.lowered") / TABLE).read_text(encoding="utf-8")
    rows: dict[str, dict[str, float]] = json.loads(text)
    return rows


def with_instructions(nodes: Iterable[Node], calls: Iterable[tuple[Call, ...]]) -> tuple[Node, ...]:
    """Return the nodes of a step with the estimated instructions of one computation each."""
    return tuple(
        node if node.is_state else replace(node, instructions=instructions(node, node_calls))
        for node, node_calls in zip(nodes, calls, strict=True)
    )


def instructions(node: Node, calls: Iterable[Call]) -> int:
    """Return the estimated instructions of the calls that compute a node."""
    return round(sum(map(call_instructions, computing_calls(node, calls))))


def computing_calls(node: Node, calls: Iterable[Call]) -> Iterator[Call]:
    """Yield the calls of a node, except copies of buffers that it modifies in place."""
    return (call for call in calls if _copy_buffers(call) not in node.in_place)


def _copy_buffers(call: Call) -> tuple[str, str] | None:
    """Return the target and the source of a copy; None for other calls."""
    match call:
        case Call(kernel, (Ref(to), Ref(of), *_)) if kernel.startswith("pm_copy"):
            return to, of
    return None


def call_instructions(call: Call) -> float:
    """Return the estimated instructions of a call."""
    name, counts = count_work(call)
    costs = table()
    weights = next(costs[key] for key in (name, call.kernel, OTHER) if key in costs)
    return sum(weights.get(unit, 0.0) * count for unit, count in counts.items())


def count_work(call: Call) -> tuple[str, Counter[str]]:
    """Return the table entry of a call, and the number of each repeated unit."""
    arguments = dict(zip(parameter_names(call.kernel), call.arguments, strict=True))
    counts = Counter({"call": 1})
    _COUNTS.get(call.kernel, _count_elements)(counts, arguments)
    decays = arguments.get("decay", 0.0) != 0 or arguments.get("sign", 1.0) != 1
    return f"{call.kernel}, decay" if decays else call.kernel, counts


# -- elements ------------------------------------------------------------------------------------


def _count_elements(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count elements, rows of a shape table, and outputs of reductions."""
    if "shape" in arguments:
        sizes = _sizes(arguments["shape"])
        counts.update(element=math.prod(sizes), row=math.prod(sizes[1:]))
    elif isinstance(arguments.get("outer"), tuple):
        results = math.prod(_sizes(arguments["outer"]))
        inner = _sizes(arguments["inner"]) if "inner" in arguments else _inner_sizes(arguments)
        counts.update(
            result=results, row=results * math.prod(inner[1:]), element=results * math.prod(inner)
        )
    elif "outer" in arguments:
        rows = arguments["outer"] * arguments["rows"]
        counts.update(row=rows, element=rows * arguments["size"])
    elif "batch" in arguments:
        _count_planes(counts, arguments)
    elif "m" in arguments:
        counts.update(row=arguments["m"], element=arguments["m"] * arguments["n"])
    else:
        counts.update(element=arguments.get("n", 1))


def _inner_sizes(arguments: Mapping[str, Any]) -> list[int]:
    """Return the sizes of the reduced dimensions, the innermost first."""
    return [arguments["n"]] if "n" in arguments else [arguments["columns"], arguments["rows"]]


def _sizes(shape: tuple[int, ...]) -> list[int]:
    """Return the sizes of a shape table, the innermost first, as in ``pm_each.h``."""
    rank, *sizes_and_steps = shape
    return sizes_and_steps[:: len(sizes_and_steps) // rank]


def _count_planes(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count planes, their elements, and the elements that windows visit."""
    planes = arguments["batch"] * arguments.get("channels", arguments.get("count", 1))
    counts.update(plane=planes)
    if "plane" in arguments:
        counts.update(result=arguments["channels"], element=planes * arguments["plane"])
        return
    counts.update(
        row=planes * arguments["height"], element=planes * arguments["height"] * arguments["width"]
    )
    if "x_height" in arguments:
        counts.update(x=planes * arguments["x_height"] * arguments["x_width"])
    if "row_step" in arguments or "divisor" in arguments:
        n_visited = [_n_visited(arguments, axis) for axis in ("row", "column")]
        counts.update(
            window_row=planes * arguments["width"] * n_visited[0],
            seen=planes * math.prod(n_visited),
        )


def _n_visited(arguments: Mapping[str, Any], axis: str) -> int:
    """Return the number of rows or columns that all windows visit.

    `arguments` have a list of the limits of each window.
    """
    limits, n_limits = arguments[f"{axis}s"], 2 if "row_step" in arguments else 3
    starts, ends, step = limits[::n_limits], limits[1::n_limits], arguments.get(f"{axis}_step", 1)
    return sum(-(-(end - start) // step) for start, end in zip(starts, ends, strict=True))


# -- products of matrices ------------------------------------------------------------------------


def _count_product(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count the blocks of a matrix product and the steps of each kind of block."""
    m, k, n, batch = (arguments.get(name, 1) for name in ("m", "k", "n", "batch"))
    if k == 1:
        name = "outer, added" if arguments.get("accumulate") else "outer"
        counts.update({f"{name} row": batch * m, name: batch * m * n})
        return
    by = _product_order(arguments)
    rows, columns = divmod(m, _BLOCK), divmod(n, _BLOCK)
    blocks = {
        "4x4": batch * rows[0] * columns[0],
        "1x4": batch * rows[1] * columns[0],
        "1x1": batch * m * columns[1],
    }
    for name, times in blocks.items():
        counts[name] += times
        counts[f"{name} step" + (f" by {by}" if name != "1x1" else "")] += times * k


def _product_order(arguments: Mapping[str, Any]) -> str:
    """Return the order in which a product reads its factors, as in ``pm_mm.h``."""
    if arguments["a_column"] == 1 and arguments["b_row"] == 1:
        return "rows"
    if arguments["b_column"] == 1:
        return "columns"
    return "steps"


# -- convolutions --------------------------------------------------------------------------------


def _taps(position: int, size: int, taps: int, step: int) -> range:
    """Return the taps of a window that fall into the input, as ``pm_taps`` does."""
    taps_inside = [k for k in range(taps) if 0 <= position + k * step < size]
    return range(taps_inside[0], taps_inside[-1] + 1) if taps_inside else range(0)


class _Axis:
    """One axis of a correlation.

    `taps` has the number of taps inside the input for each output position.
    """

    def __init__(
        self, places: int, start: int, step: int, size: int, taps: int, tap_step: int
    ) -> None:
        """Count the taps inside the input for each of `places` output positions.

        Position `k` reads from ``start + k * step`` on, its taps `tap_step` apart; the input has
        `size` elements.
        """
        self.step, self.tap_step, self.window = step, tap_step, taps
        self.taps = [len(_taps(start + k * step, size, taps, tap_step)) for k in range(places)]


def _count_correlation(
    counts: Counter[str], down: _Axis, across: _Axis, channels: int, results: int, *, slides: bool
) -> None:
    """Count the sums of ``pm_correlate``: of four channels or one, at four positions or one."""
    rows, places = sum(down.taps), len(down.taps)
    is_whole = [taps == across.window for taps in across.taps]
    for times, fours in zip(divmod(results, _BLOCK), (True, False), strict=True):
        counts["line"] += times * places
        k = 0
        while k < len(is_whole) and times:
            is_four = (
                across.step in (1, 2)
                and len(is_whole) - k >= _BLOCK
                and is_whole[k]
                and is_whole[k + 3]
            )
            name = f"{4 if fours else 1}x{4 if is_four else 1}"
            if (
                fours
                and slides
                and (not is_four or (across.step == 1 and across.window in _SLIDING))
            ):
                name += " sliding"
            elif is_four:
                name += f" by {across.step}"
            counts[name] += times * places
            counts[f"{name} row"] += times * rows * channels
            counts[f"{name} tap"] += times * rows * channels * across.taps[k]
            k += _BLOCK if is_four else 1


def _count_convolution(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count a convolution as correlations of its groups.

    A pointwise convolution is one whose taps are its channels.
    """
    sizes = ConvolutionSizes(*arguments["shape"])
    channels = sizes.group_channels
    (height, rows, window_h, stride_h, pad_h, dilation_h), across = sizes.directions
    width, columns, window_w, stride_w, pad_w, dilation_w = across
    down = _Axis(rows, -pad_h, stride_h, height, window_h, dilation_h)
    line = _Axis(columns, -pad_w, stride_w, width, window_w, dilation_w)
    n_summed = channels
    if window_h == window_w == 1 and pad_h == pad_w == 0:
        # A pointwise convolution is a correlation whose taps are the channels.
        plane, n_summed = height * width, 1
        line = _Axis(columns, 0, stride_w, channels * plane, channels, plane)
        if stride_h == stride_w == 1:
            down = _Axis(1, 0, 1, 1, 1, 1)
            line = _Axis(plane, 0, 1, channels * plane, channels, plane)
    for results in _group_sizes(arguments["first"], arguments["count"], sizes.group_results):
        for _ in range(arguments["batch"]):
            _count_correlation(counts, down, line, n_summed, results, slides=line.tap_step == 1)


def _group_sizes(first: int, count: int, results: int) -> Iterator[int]:
    """Yield the number of channels of each group among `count` channels from `first` on."""
    n_done = 0
    while n_done < count:
        n_channels = min(results - (first + n_done) % results, count - n_done)
        yield n_channels
        n_done += n_channels


def _count_input_gradient(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count an input gradient as correlations, one for each phase of the stride."""
    sizes = ConvolutionSizes(*arguments["shape"])
    channels, axes = sizes.group_channels, sizes.directions
    pointwise = all(axis[2] == 1 and axis[4] == 0 for axis in axes)
    plane, out_plane = sizes.plane, sizes.out_plane
    for n_summed in _group_sizes(arguments["first"], arguments["count"], sizes.group_results):
        for _ in range(arguments["batch"]):
            if pointwise and all(axis[3] == 1 for axis in axes):
                lines = [
                    (
                        _Axis(1, 0, 1, 1, 1, 1),
                        _Axis(plane, 0, 1, n_summed * plane, n_summed, plane),
                        1,
                    )
                ]
            else:
                lines = [
                    (down, across, tap_distance)
                    for down, _ in _phases(*axes[0])
                    for across, tap_distance in _phases(*axes[1])
                ]
            for down, columns, tap_distance in lines:
                across, times = columns, n_summed if down.window and columns.window else 0
                if pointwise and times:
                    times = 1
                    across = _Axis(
                        len(columns.taps), 0, 1, n_summed * out_plane, n_summed, out_plane
                    )
                slides = tap_distance == 1 and across.tap_step == -1
                _count_correlation(counts, down, across, times, channels, slides=slides)


def _phases(
    size: int, places: int, window: int, stride: int, pad: int, dilation: int
) -> Iterator[tuple[_Axis, int]]:
    """Yield (axis of input positions that share taps, distance of these taps) for each phase."""
    for i in range(min(stride, size)):
        tap = next(
            (t for t in range(min(window, stride)) if (i + pad - t * dilation) % stride == 0), -1
        )
        tap_distance = stride // math.gcd(stride, dilation)
        taps = 0 if tap < 0 else -(-(window - tap) // tap_distance)
        start = 0 if tap < 0 else (i + pad - tap * dilation) // stride
        step = -(tap_distance * dilation) // stride
        yield _Axis(-(-(size - i) // stride), start, 1, places, taps, step), tap_distance


def _tap_counts(sizes: ConvolutionSizes) -> Iterator[tuple[int, int]]:
    """Yield the numbers of rows and columns at which each tap of a window is in the image."""
    (height, rows, window_h, stride_h, pad_h, dilation_h), across = sizes.directions
    width, columns, window_w, stride_w, pad_w, dilation_w = across
    for h in range(window_h):
        down = len(_taps(h * dilation_h - pad_h, height, rows, stride_h))
        for v in range(window_w):
            yield down, len(_taps(v * dilation_w - pad_w, width, columns, stride_w))


def _count_weight_gradient(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count the blocks of 4x4, 1x4 and 1x1 weights per tap, with their rows and elements."""
    sizes, batch = ConvolutionSizes(*arguments["shape"]), arguments["batch"]
    channels = sizes.group_channels
    groups = list(_group_sizes(arguments["first"], arguments["count"], sizes.group_results))
    in_line = sizes.out_width == sizes.width and sizes.stride_across == sizes.stride_down == 1
    for rows, columns in _tap_counts(sizes):
        counts["tap"] += len(groups)
        if rows and columns == sizes.out_width and in_line:
            rows, columns = 1, rows * columns  # noqa: PLW2901 - one long row
        for results in groups:
            if batch == rows == columns == 1:
                counts.update(point=results * channels)
                continue
            n_fours, n_single = divmod(results, _BLOCK)
            blocks = {
                "4x4": n_fours * (channels // _BLOCK),
                "1x4": n_fours * (channels % _BLOCK),
                "1x1": n_single * channels,
            }
            for name, times in blocks.items():
                counts[name] += times
                counts[f"{name} row"] += times * batch * rows
                counts[f"{name} place"] += times * batch * rows * columns


def _count_depthwise(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count the elements that each tap visits.

    Windows of 3x3 with stride 1 are a case of their own.
    """
    sizes, planes = ConvolutionSizes(*arguments["shape"]), arguments["batch"] * arguments["count"]
    counts.update(cleared=planes * sizes.out_plane)
    if sizes[6:14] == (3, 3, 1, 1, 1, 1, 1, 1):
        counts.update({"3x3 row": planes * sizes.height, "3x3": planes * sizes.plane})
        return
    for rows, columns in _tap_counts(sizes):
        counts.update(tap=planes, row=planes * rows, element=planes * rows * columns)


def _count_strided(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    sizes = ConvolutionSizes(*arguments["shape"])
    results = arguments["batch"] * arguments["count"]
    planes = results * sizes.group_channels
    counts.update(result=results * sizes.out_plane)
    for rows, columns in _tap_counts(sizes):
        counts.update(tap=planes, row=planes * rows, element=planes * rows * columns)


def _count_pairs(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    results = math.prod(arguments[name] for name in ("batches", "rows", "columns"))
    counts.update(result=results, element=results * arguments["n"])


def _count_bags(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    counts.update(
        result=arguments["bags"] * arguments["n"], element=arguments["count"] * arguments["n"]
    )


# -- quantized layers ----------------------------------------------------------------------------


def _count_dots(counts: Counter[str], name: str, times: int, length: int) -> None:
    """Count products of length `length`, summed for several rows at once: ``pm_q8_dots``."""
    words, n_rest = divmod(length, _BLOCK)
    counts.update({f"{name} word": times * words, f"{name} rest": times * n_rest})


def _count_clamped(counts: Counter[str], arguments: Mapping[str, Any], results: int) -> None:
    """Count the outputs that are clamped to limits."""
    if (arguments["low"], arguments["high"]) != _INT8:
        counts.update(limited=results)


def _count_q8_elements(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    counts.update(element=arguments["n"])
    _count_clamped(counts, arguments, arguments["n"])


def _count_q8_pool(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count output pixels and visited elements, in words of four channels and single channels.

    Means of more than 256 elements are summed by single channels.
    """
    arguments = {"row_step": 1, "column_step": 1, "low": -128, "high": 127, **arguments}
    places = arguments["batch"] * arguments["height"] * arguments["width"]
    rows = arguments["batch"] * _n_visited(arguments, "row")
    elements = rows * _n_visited(arguments, "column")
    channel_words, single_channels = divmod(arguments["channels"], _BLOCK)
    lists = (arguments["rows"], arguments["columns"])
    largest = math.prod(max(map(sub, ends[1::2], ends[::2])) for ends in lists)
    if "scale" in arguments and largest > _MAX_SUMMED:
        channel_words, single_channels = 0, arguments["channels"]
    counts.update(place=places)
    for name, times in (("4", channel_words), ("1", single_channels)):
        units = {"element": places, "row": rows * arguments["width"], "seen": elements}
        counts.update({f"{name} {unit}": times * number for unit, number in units.items()})
    _count_clamped(counts, arguments, places * arguments["channels"])


def _count_q8_pointwise(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count products of two outputs by two pixels, and of the rest by one."""
    (result_pairs, single_results), (pixel_pairs, single_pixels) = (
        divmod(arguments["results"], 2),
        divmod(arguments["pixels"], 2),
    )
    blocks = {
        "2x2": result_pairs * pixel_pairs,
        "1x2": result_pairs * single_pixels + single_results * (pixel_pairs + single_pixels),
    }
    counts.update(pair=result_pairs)
    for name, times in blocks.items():
        counts[name] += times
        _count_dots(counts, name, times, arguments["in"])
    _count_clamped(counts, arguments, arguments["pixels"] * arguments["results"])


def _taps_in_image(sizes: ConvolutionSizes) -> list[list[int]]:
    """Return the number of taps in the image for each output row, and for each output column."""
    return [
        [len(_taps(k * stride - pad, size, window, dilation)) for k in range(places)]
        for size, places, window, stride, pad, dilation in sizes.directions
    ]


def _count_q8_convolution(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count pairs of outputs: two pixels at once inside the image, single pixels at its edges."""
    sizes = ConvolutionSizes(*arguments["shape"])
    pairs = arguments["batch"] * sizes.groups * -(-arguments["count"] // sizes.groups // 2)
    in_line = sizes.groups == sizes.dilation_across == 1
    down, across = _taps_in_image(sizes)
    rows_inside, columns_inside = down.count(sizes.window_height), across.count(sizes.window_width)
    counts.update(
        {
            "inside": pairs * (rows_inside * columns_inside > 0),
            "line": pairs * rows_inside * (columns_inside > 0),
        }
    )
    whole_windows = [(sizes.window_height, sizes.window_width)] * (
        rows_inside * -(-columns_inside // 2)
    )
    edge_windows = [window for window in product(down, across) if window != sizes[6:8]]
    counts.update(place=arguments["batch"] * len(edge_windows))
    for name, windows in (("2x2", whole_windows), ("1x2", edge_windows)):
        for (rows, columns), times in Counter(windows).items():
            runs, length = (1, columns) if in_line else (columns, 1)
            n_runs = pairs * times * rows * runs
            counts.update({name: pairs * times, f"{name} run": n_runs})
            _count_dots(counts, name, n_runs, length * sizes.group_channels)
    _count_clamped(counts, arguments, arguments["batch"] * arguments["count"] * sizes.out_plane)


def _count_q8_depthwise(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count words of four channels and single channels, for whole and for cut windows."""
    sizes, batch = ConvolutionSizes(*arguments["shape"]), arguments["batch"]
    window, (channel_words, single_channels) = sizes[6:8], divmod(arguments["count"], _BLOCK)
    down, across = _taps_in_image(sizes)
    name = "3x3" if window == (3, 3) else "whole"
    for rows, columns in product(down, across):
        taps, is_whole = rows * columns, (rows, columns) == window
        n_by_kind = {name if is_whole else "edge": channel_words, "1": single_channels}
        counts.update({"place": batch, "made": batch * (single_channels > 0 or not is_whole)})
        for kind, times in n_by_kind.items():
            counts.update({kind: batch * times})
            if kind != "3x3":
                counts.update({f"{kind} row": batch * times * rows})
                counts.update({f"{kind} tap": batch * times * taps})
    lines = down.count(window[0]) if window[1] in across else 0
    counts.update(
        {"inside": batch * channel_words * (lines > 0), "line": batch * channel_words * lines}
    )
    _count_clamped(counts, arguments, batch * arguments["count"] * sizes.out_plane)


# -- the backward pass of quantized layers -------------------------------------------------------


def _count_q8_start(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    counts.update(result=arguments["n"], element=arguments["n"] * arguments["terms"])


def _count_q8_update(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    counts.update(row=arguments["count"] // arguments["inner"], element=arguments["count"])


def _count_q8_input_gradient(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count blocks of four channels by four pixels or one, and single channels."""
    (fours, pixels), (blocks, channels) = (
        divmod(arguments["pixels"], _BLOCK),
        divmod(arguments["channels"], _BLOCK),
    )
    kinds = {"4x4": fours * blocks, "1x4": pixels * blocks, "1": arguments["pixels"] * channels}
    for name, times in kinds.items():
        counts.update({name: times, f"{name} result": times * arguments["results"]})


def _q8_gradient_sizes(arguments: Mapping[str, Any]) -> tuple[ConvolutionSizes, int, int]:
    """Return the sizes of a layer, and its numbers of input pixels and of visits by taps.

    Each tap visits an input pixel once for each output position that reads the pixel through the
    tap.
    """
    sizes, batch = ConvolutionSizes(*arguments["shape"]), arguments["batch"]
    n_visits = sum(rows * columns for rows, columns in _tap_counts(sizes))
    return sizes, batch * sizes.plane, batch * n_visits


def _count_q8_convolution_dx(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count input pixels, and the products of words of four channels and of single channels."""
    sizes, pixels, n_visits = _q8_gradient_sizes(arguments)
    groups, results = sizes.groups, arguments["results"] // sizes.groups
    counts.update(pixel=pixels)
    for name, n_per_group in zip(
        ("4", "1"), divmod(arguments["channels"] // groups, _BLOCK), strict=True
    ):
        taps, n_channels = n_visits * n_per_group * -(-results // _BLOCK), groups * n_per_group
        counts.update({name: pixels * n_channels, f"{name} tap": groups * taps})
        counts.update({f"{name} result": n_visits * n_channels * results})


def _count_q8_depthwise_dx(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    _, pixels, n_visits = _q8_gradient_sizes(arguments)
    counts.update(pixel=pixels)
    for name, times in zip(("4", "1"), divmod(arguments["count"], _BLOCK), strict=True):
        counts.update({name: pixels * times, f"{name} tap": n_visits * times})


def _count_q8_pool_dx(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count input pixels, output elements, and the elements that windows visit."""
    sizes, pixels, n_visits = _q8_gradient_sizes(arguments)
    counts.update(
        pixel=pixels,
        x=pixels * arguments["count"],
        element=arguments["batch"] * sizes.out_plane * arguments["count"],
        seen=n_visits * arguments["count"],
    )


def _count_q8_products(
    counts: Counter[str], results: int, channels: int, rows: int, places: int
) -> None:
    """Count the products of weight gradients between outputs and input channels: ``pm_q8_dw``."""
    (result_blocks, results_left), (channel_blocks, channels_left) = (
        divmod(results, _BLOCK),
        divmod(channels, _BLOCK),
    )
    kinds = {
        "4x4": result_blocks * channel_blocks,
        "4x1": result_blocks * channels_left,
        "1x4": results_left * channel_blocks,
        "1x1": results_left * channels_left,
    }
    for name, times in kinds.items():
        counts.update({name: times, f"{name} row": times * rows, f"{name} place": times * places})


def _count_q8_weight_gradient(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    counts.update(weight=arguments["count"])
    _count_q8_products(
        counts, arguments["count"] // arguments["in"], arguments["in"], 1, arguments["pixels"]
    )


def _count_q8_convolution_dw(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count the weights, and the products of each tap and group."""
    sizes, batch = ConvolutionSizes(*arguments["shape"]), arguments["batch"]
    results = arguments["count"] // (sizes.group_channels * sizes.window)
    counts.update(weight=arguments["count"])
    for rows, columns in _tap_counts(sizes):
        counts.update(tap=sizes.groups)
        for _ in range(sizes.groups):
            lines = batch * rows if columns else 0
            shape = (results // sizes.groups, sizes.group_channels)
            _count_q8_products(counts, *shape, lines, lines * columns)


def _count_q8_depthwise_dw(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count the weights, and the products of each tap by words of four channels."""
    sizes, batch = ConvolutionSizes(*arguments["shape"]), arguments["batch"]
    # Kernels that update too have a number of weights, and all channels.
    channels = sizes.channels if "w" in arguments else arguments["count"]
    counts.update(weight=channels * sizes.window)
    for rows, columns in _tap_counts(sizes):
        counts.update(tap=1)
        lines = batch * rows if columns else 0
        for name, times in zip(("4", "1"), divmod(channels, _BLOCK), strict=True):
            work = {name: 1, f"{name} row": lines, f"{name} place": lines * columns}
            counts.update({unit: times * count for unit, count in work.items()})


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
