"""Counters: how often a call of a kernel repeats each unit of its work.

Units are blocks, rows, taps, elements. Names of units, such as ``4x4 step``, are keys of the table
of `poetmodel.lowered.instructions`. A counter adds to `counts` the units of the arguments of a
call, by parameter.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from operator import sub
from typing import TYPE_CHECKING, Any, Final

from poetmodel.lowered.calls import ConvolutionSizes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_BLOCK: Final = 4
"""Number of rows, columns, channels or pixels that kernels process at once."""
_INT8: Final = (-128, 127)
"""Minimum and maximum of an int8 element."""
_MAX_SUMMED: Final = 256
"""Maximum number of int8 elements whose sum fits in 16 bits."""
_SLIDING: Final = (3, 5)
"""Widths of windows that slide, as in ``pm_correlate.h``."""


# -- elements ------------------------------------------------------------------------------------


def count_elements(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count the elements and rows, executions of the innermost loop, of the table ``shape``."""
    sizes = _loop_sizes(arguments["shape"])
    counts.update(element=math.prod(sizes), row=math.prod(sizes[1:]))


def count_sequence(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count the ``n`` elements."""
    counts.update(element=arguments["n"])


def count_single(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count the call alone: all calls do the same work."""


def count_rows(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count ``m`` rows of ``n`` elements."""
    counts.update(row=arguments["m"], element=arguments["m"] * arguments["n"])


def count_vectors(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count ``outer`` times ``rows`` rows of ``size`` elements."""
    rows = arguments["outer"] * arguments["rows"]
    counts.update(row=rows, element=rows * arguments["size"])


def count_reduction(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count the results of the table ``outer``, and the rows and elements that they are made of."""
    n_outputs = math.prod(_loop_sizes(arguments["outer"]))
    if "inner" in arguments:
        inner_sizes = _loop_sizes(arguments["inner"])
    elif "n" in arguments:
        inner_sizes = [arguments["n"]]
    else:
        inner_sizes = [arguments["columns"], arguments["rows"]]
    counts.update(
        result=n_outputs,
        row=n_outputs * math.prod(inner_sizes[1:]),
        element=n_outputs * math.prod(inner_sizes),
    )


def _loop_sizes(shape: tuple[int, ...]) -> list[int]:
    """Return the sizes of a shape table, the innermost first, as in ``pm_each.h``."""
    rank, *sizes_and_strides = shape
    return sizes_and_strides[:: len(sizes_and_strides) // rank]


def count_planes(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count planes, their rows and elements and, if stated, elements of ``x`` and of windows.

    A plane is one channel of one sample. ``seen`` counts by `_sum_window_sizes`. With an argument
    ``plane``, the elements of a plane, count planes, elements, and the channels as ``result``.
    """
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
    if "rows" in arguments and ("row_step" in arguments or "divisor" in arguments):
        n_visited = [_sum_window_sizes(arguments, axis) for axis in ("row", "column")]
        counts.update(
            window_row=planes * arguments["width"] * n_visited[0],
            seen=planes * math.prod(n_visited),
        )


def _sum_window_sizes(arguments: Mapping[str, Any], axis: str) -> int:
    """Return the number of rows or columns that a window visits, summed over all windows."""
    window_limits, n_limits = arguments[f"{axis}s"], 2 if "row_step" in arguments else 3
    starts, ends, stride = (
        window_limits[::n_limits],
        window_limits[1::n_limits],
        arguments.get(f"{axis}_step", 1),
    )
    return sum(-(-(end - start) // stride) for start, end in zip(starts, ends, strict=True))


# -- products of matrices ------------------------------------------------------------------------


def count_product(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count the blocks of a matrix product, and the steps along `k` of each kind of block."""
    m, k, n, batch = (arguments.get(name, 1) for name in ("m", "k", "n", "batch"))
    if k == 1:
        name = "outer, added" if arguments.get("accumulate") else "outer"
        counts.update({f"{name} row": batch * m, name: batch * m * n})
        return
    order = _find_product_order(arguments)
    row_blocks, column_blocks = divmod(m, _BLOCK), divmod(n, _BLOCK)
    blocks = {
        "4x4": batch * row_blocks[0] * column_blocks[0],
        "1x4": batch * row_blocks[1] * column_blocks[0],
        "1x1": batch * m * column_blocks[1],
    }
    for name, n_blocks in blocks.items():
        counts[name] += n_blocks
        counts[f"{name} step" + (f" by {order}" if name != "1x1" else "")] += n_blocks * k


def _find_product_order(arguments: Mapping[str, Any]) -> str:
    """Return the order in which a product reads its factors, merging cases of ``pm_mm.h``."""
    if arguments["a_column"] == 1 and arguments["b_row"] == 1:
        return "rows"
    if arguments["b_column"] == 1:
        return "columns"
    return "steps"


# -- convolutions --------------------------------------------------------------------------------


def _find_taps_inside(start: int, size: int, n_taps: int, tap_stride: int) -> range:
    """Return the taps of a window from `start` that are inside the input, as ``pm_taps`` does."""
    taps_inside = [k for k in range(n_taps) if 0 <= start + k * tap_stride < size]
    return range(taps_inside[0], taps_inside[-1] + 1) if taps_inside else range(0)


class _Axis:
    """One axis of a correlation: position `k` reads taps from ``start + k * stride`` on.

    `tap_counts` has the number of taps inside the input for each output position; taps are
    `tap_stride` apart, and `window` is their number.
    """

    def __init__(
        self, n_positions: int, start: int, stride: int, size: int, n_taps: int, tap_stride: int
    ) -> None:
        self.stride, self.tap_stride, self.window = stride, tap_stride, n_taps
        self.tap_counts = [
            len(_find_taps_inside(start + k * stride, size, n_taps, tap_stride))
            for k in range(n_positions)
        ]


def _count_correlation(
    counts: Counter[str],
    down: _Axis,
    across: _Axis,
    channels: int,
    results: int,
    *,
    is_sliding: bool,
) -> None:
    """Count the blocks of ``pm_correlate``, the blocks' window rows and taps, and the lines.

    Units such as ``4x1`` are channels by positions; a line is an output row of four channels or
    one. ``sliding`` marks consecutive taps, ``4x4 by 2`` a stride. `channels` are summed, `results`
    computed. Only rows and taps inside the input count.
    """
    n_row_taps, n_positions = sum(down.tap_counts), len(down.tap_counts)
    whole_windows = [taps == across.window for taps in across.tap_counts]
    for n_blocks, has_four_channels in zip(divmod(results, _BLOCK), (True, False), strict=True):
        counts["line"] += n_blocks * n_positions
        position = 0
        while position < len(whole_windows) and n_blocks:
            has_four_positions = (
                across.stride in (1, 2)
                and len(whole_windows) - position >= _BLOCK
                and whole_windows[position]
                and whole_windows[position + 3]
            )
            name = f"{4 if has_four_channels else 1}x{4 if has_four_positions else 1}"
            if (
                has_four_channels
                and is_sliding
                and (not has_four_positions or (across.stride == 1 and across.window in _SLIDING))
            ):
                name += " sliding"
            elif has_four_positions:
                name += f" by {across.stride}"
            counts[name] += n_blocks * n_positions
            counts[f"{name} row"] += n_blocks * n_row_taps * channels
            counts[f"{name} tap"] += n_blocks * n_row_taps * channels * across.tap_counts[position]
            position += _BLOCK if has_four_positions else 1


def count_convolution(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count the units of `_count_correlation` for each sample and group of a convolution."""
    sizes = ConvolutionSizes(*arguments["shape"])
    channels = sizes.group_channels
    (height, rows, window_h, stride_h, pad_h, dilation_h), across_sizes = sizes.directions
    width, columns, window_w, stride_w, pad_w, dilation_w = across_sizes
    down_axis = _Axis(rows, -pad_h, stride_h, height, window_h, dilation_h)
    across_axis = _Axis(columns, -pad_w, stride_w, width, window_w, dilation_w)
    n_summed = channels
    if window_h == window_w == 1 and pad_h == pad_w == 0:
        # A pointwise convolution is a correlation whose taps are the channels.
        plane, n_summed = height * width, 1
        across_axis = _Axis(columns, 0, stride_w, channels * plane, channels, plane)
        if stride_h == stride_w == 1 and plane == sizes.out_plane:
            down_axis = _Axis(1, 0, 1, 1, 1, 1)
            across_axis = _Axis(plane, 0, 1, channels * plane, channels, plane)
    for results in _list_group_sizes(arguments["first"], arguments["count"], sizes.group_results):
        for _ in range(arguments["batch"]):
            _count_correlation(
                counts,
                down_axis,
                across_axis,
                n_summed,
                results,
                is_sliding=across_axis.tap_stride == 1,
            )


def _list_group_sizes(first: int, count: int, group_size: int) -> Iterator[int]:
    """Yield the number of the `count` channels from `first` on in each group that has some."""
    n_counted = 0
    while n_counted < count:
        n_channels = min(group_size - (first + n_counted) % group_size, count - n_counted)
        yield n_channels
        n_counted += n_channels


def count_input_gradient(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count the units of `_count_correlation` for an input gradient."""
    sizes = ConvolutionSizes(*arguments["shape"])
    channels, axes = sizes.group_channels, sizes.directions
    # The output padding of a transposed convolution can exceed the positions that windows reach.
    is_pointwise = all(
        window == 1 and padding == 0 and size <= n_positions * stride
        for size, n_positions, window, stride, padding, _ in axes
    )
    plane, out_plane = sizes.plane, sizes.out_plane
    for n_summed in _list_group_sizes(arguments["first"], arguments["count"], sizes.group_results):
        for _ in range(arguments["batch"]):
            if is_pointwise and all(axis[3] == 1 for axis in axes):
                axis_pairs = [
                    (
                        _Axis(1, 0, 1, 1, 1, 1),
                        _Axis(plane, 0, 1, n_summed * plane, n_summed, plane),
                        1,
                    )
                ]
            else:
                axis_pairs = [
                    (down, across, tap_distance)
                    for down, _ in _make_stride_phases(*axes[0])
                    for across, tap_distance in _make_stride_phases(*axes[1])
                ]
            for down, columns, tap_distance in axis_pairs:
                across, n_channels = columns, n_summed if down.window and columns.window else 0
                if is_pointwise and n_channels:
                    n_channels = 1
                    across = _Axis(
                        len(columns.tap_counts), 0, 1, n_summed * out_plane, n_summed, out_plane
                    )
                is_sliding = tap_distance == 1 and across.tap_stride == -1
                _count_correlation(
                    counts, down, across, n_channels, channels, is_sliding=is_sliding
                )


def _make_stride_phases(
    size: int, n_positions: int, window: int, stride: int, padding: int, dilation: int
) -> Iterator[tuple[_Axis, int]]:
    """Yield an axis and a tap distance for each phase of an input gradient's positions."""
    for i in range(min(stride, size)):
        tap = next(
            (t for t in range(min(window, stride)) if (i + padding - t * dilation) % stride == 0),
            -1,
        )
        tap_distance = stride // math.gcd(stride, dilation)
        taps = 0 if tap < 0 else -(-(window - tap) // tap_distance)
        start = 0 if tap < 0 else (i + padding - tap * dilation) // stride
        stride_of_taps = -(tap_distance * dilation) // stride
        yield (
            _Axis(-(-(size - i) // stride), start, 1, n_positions, taps, stride_of_taps),
            tap_distance,
        )


def _list_tap_counts(sizes: ConvolutionSizes) -> Iterator[tuple[int, int]]:
    """Yield for each tap the numbers of output rows and columns that read the input through it."""
    (height, rows, window_h, stride_h, pad_h, dilation_h), across = sizes.directions
    width, columns, window_w, stride_w, pad_w, dilation_w = across
    for row in range(window_h):
        n_rows = len(_find_taps_inside(row * dilation_h - pad_h, height, rows, stride_h))
        for column in range(window_w):
            yield (
                n_rows,
                len(_find_taps_inside(column * dilation_w - pad_w, width, columns, stride_w)),
            )


def count_weight_gradient(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count taps of each group (``tap``), and ``4x4``, ``1x4``, ``1x1`` blocks of weights per tap.

    Each block counts its output rows (``4x4 row``; contiguous rows are one) and elements (``4x4
    place``) of the batch. A tap of one element per channel counts single weights (``point``).
    """
    sizes, batch = ConvolutionSizes(*arguments["shape"]), arguments["batch"]
    channels = sizes.group_channels
    groups = list(_list_group_sizes(arguments["first"], arguments["count"], sizes.group_results))
    has_dense_rows = (
        sizes.out_width == sizes.width and sizes.stride_across == sizes.stride_down == 1
    )
    for rows, columns in _list_tap_counts(sizes):
        counts["tap"] += len(groups)
        if rows and columns == sizes.out_width and has_dense_rows:
            rows, columns = 1, rows * columns  # noqa: PLW2901 - the rows form one
        for results in groups:
            if batch == rows == columns == 1:
                counts.update(point=results * channels)
                continue
            n_blocks_of_four, n_single = divmod(results, _BLOCK)
            blocks_by_name = {
                "4x4": n_blocks_of_four * (channels // _BLOCK),
                "1x4": n_blocks_of_four * (channels % _BLOCK),
                "1x1": n_single * channels,
            }
            for name, n_blocks in blocks_by_name.items():
                counts[name] += n_blocks
                counts[f"{name} row"] += n_blocks * batch * (rows if columns else 0)
                counts[f"{name} place"] += n_blocks * batch * rows * columns


def count_depthwise(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count output elements (``cleared``), taps, and the rows and elements that each tap visits.

    3x3 windows with stride, padding and dilation 1 count rows and elements of planes instead.
    """
    sizes, planes = ConvolutionSizes(*arguments["shape"]), arguments["batch"] * arguments["count"]
    counts.update(cleared=planes * sizes.out_plane)
    if sizes[6:14] == (3, 3, 1, 1, 1, 1, 1, 1):
        counts.update({"3x3 row": planes * sizes.height, "3x3": planes * sizes.plane})
        return
    for rows, columns in _list_tap_counts(sizes):
        n_rows = planes * rows if columns else 0
        counts.update(tap=planes, row=n_rows, element=n_rows * columns)


def count_strided_convolution(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count output elements, taps, and the rows and elements that each tap visits."""
    sizes = ConvolutionSizes(*arguments["shape"])
    results = arguments["batch"] * arguments["count"]
    planes = results * sizes.group_channels
    counts.update(result=results * sizes.out_plane)
    for rows, columns in _list_tap_counts(sizes):
        counts.update(tap=planes, row=planes * rows, element=planes * rows * columns)


def count_distances(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count distances between vectors, and the `n` elements of each."""
    results = math.prod(arguments[name] for name in ("batches", "rows", "columns"))
    counts.update(result=results, element=results * arguments["n"])


def count_bags(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count result elements, and the elements of all vectors in the bags of an embedding bag."""
    counts.update(
        result=arguments["bags"] * arguments["n"], element=arguments["count"] * arguments["n"]
    )


# -- quantized layers ----------------------------------------------------------------------------


def _count_dot_products(counts: Counter[str], name: str, count: int, length: int) -> None:
    """Count the words and remaining elements of dot products of ``pm_q8_dots``."""
    words, n_rest = divmod(length, _BLOCK)
    counts.update({f"{name} word": count * words, f"{name} rest": count * n_rest})


def _count_clamped_results(
    counts: Counter[str], arguments: Mapping[str, Any], results: int
) -> None:
    """Count `results` outputs if they are clamped to other limits than those of int8."""
    if (arguments["low"], arguments["high"]) != _INT8:
        counts.update(limited=results)


def count_q8_elements(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count elements, and those that are clamped."""
    counts.update(element=arguments["n"])
    _count_clamped_results(counts, arguments, arguments["n"])


def count_q8_pool(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count output pixels, and the work on words of four channels and on single channels."""
    arguments = {"row_step": 1, "column_step": 1, "low": -128, "high": 127, **arguments}
    n_positions = arguments["batch"] * arguments["height"] * arguments["width"]
    rows = arguments["batch"] * _sum_window_sizes(arguments, "row")
    elements = rows * _sum_window_sizes(arguments, "column")
    channel_words, single_channels = divmod(arguments["channels"], _BLOCK)
    limit_lists = (arguments["rows"], arguments["columns"])
    largest_window = math.prod(max(map(sub, ends[1::2], ends[::2])) for ends in limit_lists)
    if "scale" in arguments and largest_window > _MAX_SUMMED:
        channel_words, single_channels = 0, arguments["channels"]
    counts.update(place=n_positions)
    for kind, count in (("4", channel_words), ("1", single_channels)):
        units = {"element": n_positions, "row": rows * arguments["width"], "seen": elements}
        counts.update({f"{kind} {unit}": count * number for unit, number in units.items()})
    _count_clamped_results(counts, arguments, n_positions * arguments["channels"])


def count_q8_pointwise(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count pairs of output channels, and their blocks by two pixels or one."""
    (result_pairs, single_results), (pixel_pairs, single_pixels) = (
        divmod(arguments["results"], 2),
        divmod(arguments["pixels"], 2),
    )
    blocks = {
        "2x2": result_pairs * pixel_pairs,
        "1x2": result_pairs * single_pixels + single_results * (pixel_pairs + single_pixels),
    }
    counts.update(pair=result_pairs)
    for name, count in blocks.items():
        counts[name] += count
        _count_dot_products(counts, name, count, arguments["in"])
    _count_clamped_results(counts, arguments, arguments["pixels"] * arguments["results"])


def _count_taps_in_image(sizes: ConvolutionSizes) -> list[list[int]]:
    """Return the number of taps in the image for each output row, and for each output column."""
    return [
        [
            len(_find_taps_inside(k * stride - padding, size, window, dilation))
            for k in range(n_positions)
        ]
        for size, n_positions, window, stride, padding, dilation in sizes.directions
    ]


def count_q8_convolution(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count the work on pairs of output channels; an odd last channel of a group counts as a pair.

    Units: ``2x2`` at two pixels with whole windows, ``1x2`` at single pixels with cut windows, each
    with dot products (``run``), their words of four elements (``word``) and left elements
    (``rest``); calls (``inside``) and rows (``line``) of whole windows, positions of cut ones
    (``place``), and outputs that are clamped to other limits than int8's (``limited``).
    """
    sizes = ConvolutionSizes(*arguments["shape"])
    n_pairs = arguments["batch"] * sizes.groups * -(-arguments["count"] // sizes.groups // 2)
    has_dense_rows = sizes.groups == sizes.dilation_across == 1
    row_taps, column_taps = _count_taps_in_image(sizes)
    rows_inside, columns_inside = (
        row_taps.count(sizes.window_height),
        column_taps.count(sizes.window_width),
    )
    counts.update(
        {
            "inside": n_pairs * (rows_inside * columns_inside > 0),
            "line": n_pairs * rows_inside * (columns_inside > 0),
        }
    )
    whole_windows = [(sizes.window_height, sizes.window_width)] * (
        rows_inside * -(-columns_inside // 2)
    )
    edge_windows = [window for window in product(row_taps, column_taps) if window != sizes[6:8]]
    counts.update(place=arguments["batch"] * len(edge_windows))
    for name, windows in (("2x2", whole_windows), ("1x2", edge_windows)):
        for (rows, columns), count in Counter(windows).items():
            n_sequences, length = (1, columns) if has_dense_rows else (columns, 1)
            n_all_sequences = n_pairs * count * rows * n_sequences
            counts.update({name: n_pairs * count, f"{name} run": n_all_sequences})
            _count_dot_products(counts, name, n_all_sequences, length * sizes.group_channels)
    _count_clamped_results(
        counts, arguments, arguments["batch"] * arguments["count"] * sizes.out_plane
    )


def count_q8_depthwise_convolution(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count words of four channels, at whole and at cut windows, and single channels.

    Units: ``3x3`` or ``whole``, ``edge`` (cut), ``1`` (single channels), all but ``3x3`` also with
    ``row`` and ``tap``; positions (``place``; ``made`` if computed one at a time); for each word,
    calls (``inside``) and rows (``line``) of whole windows.
    """
    sizes, batch = ConvolutionSizes(*arguments["shape"]), arguments["batch"]
    window, (channel_words, single_channels) = sizes[6:8], divmod(arguments["count"], _BLOCK)
    row_taps, column_taps = _count_taps_in_image(sizes)
    whole_kind = "3x3" if window == (3, 3) else "whole"
    for rows, columns in product(row_taps, column_taps):
        n_taps, is_whole_window = rows * columns, (rows, columns) == window
        n_by_kind = {whole_kind if is_whole_window else "edge": channel_words, "1": single_channels}
        counts.update(
            {"place": batch, "made": batch * (single_channels > 0 or not is_whole_window)}
        )
        for kind, count in n_by_kind.items():
            counts.update({kind: batch * count})
            if kind != "3x3":
                counts.update({f"{kind} row": batch * count * rows})
                counts.update({f"{kind} tap": batch * count * n_taps})
    n_lines = row_taps.count(window[0]) if window[1] in column_taps else 0
    counts.update(
        {"inside": batch * channel_words * (n_lines > 0), "line": batch * channel_words * n_lines}
    )
    _count_clamped_results(counts, arguments, batch * arguments["count"] * sizes.out_plane)


# -- the backward pass of quantized layers -------------------------------------------------------


def count_q8_sums(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count the start values of the sums of a layer, and the weights that are summed for them."""
    counts.update(result=arguments["n"], element=arguments["n"] * arguments["terms"])


def count_q8_update(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count weights, and rows of `inner` weights with one scale."""
    counts.update(row=arguments["count"] // arguments["inner"], element=arguments["count"])


def count_q8_pointwise_dx(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count ``4x4`` and ``1x4`` blocks (pixels by input channels), single elements, and results."""
    (pixel_blocks, single_pixels), (channel_blocks, single_channels) = (
        divmod(arguments["pixels"], _BLOCK),
        divmod(arguments["channels"], _BLOCK),
    )
    kinds = {
        "4x4": pixel_blocks * channel_blocks,
        "1x4": single_pixels * channel_blocks,
        "1": arguments["pixels"] * single_channels,
    }
    for kind, count in kinds.items():
        counts.update({kind: count, f"{kind} result": count * arguments["results"]})


def _find_q8_gradient_sizes(arguments: Mapping[str, Any]) -> tuple[ConvolutionSizes, int, int]:
    """Return the sizes of a layer, and the numbers of input pixels and tap visits of the batch."""
    sizes, batch = ConvolutionSizes(*arguments["shape"]), arguments["batch"]
    n_visits = sum(rows * columns for rows, columns in _list_tap_counts(sizes))
    return sizes, batch * sizes.plane, batch * n_visits


def count_q8_convolution_dx(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count input pixels, and the work on words of four input channels and on single channels.

    Words (``4``) and channels (``1``) count for each input pixel; each tap visit counts blocks of
    up to four output channels (``4 tap``, ``1 tap``) and output channels (``4 result``, ``1
    result``).
    """
    sizes, pixels, n_visits = _find_q8_gradient_sizes(arguments)
    groups, results = sizes.groups, arguments["results"] // sizes.groups
    counts.update(pixel=pixels)
    for name, n_units in zip(
        ("4", "1"), divmod(arguments["channels"] // groups, _BLOCK), strict=True
    ):
        n_taps, n_channels = n_visits * n_units * -(-results // _BLOCK), groups * n_units
        counts.update({name: pixels * n_channels, f"{name} tap": groups * n_taps})
        counts.update({f"{name} result": n_visits * n_channels * results})


def count_q8_depthwise_dx(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count input pixels, and elements and taps of words of four channels and single channels."""
    _, pixels, n_visits = _find_q8_gradient_sizes(arguments)
    counts.update(pixel=pixels)
    for name, count in zip(("4", "1"), divmod(arguments["count"], _BLOCK), strict=True):
        counts.update({name: pixels * count, f"{name} tap": n_visits * count})


def count_q8_pool_dx(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count input and output elements of the pooling, and the elements that its windows visit."""
    sizes, pixels, n_visits = _find_q8_gradient_sizes(arguments)
    counts.update(
        pixel=pixels,
        x=pixels * arguments["count"],
        element=arguments["batch"] * sizes.out_plane * arguments["count"],
        seen=n_visits * arguments["count"],
    )


def _count_q8_weight_blocks(
    counts: Counter[str], results: int, channels: int, n_rows: int, n_positions: int
) -> None:
    """Count blocks of weights: ``4x4``, ``4x1``, ``1x4`` and ``1x1`` (results by channels).

    Each block counts `n_rows` rows (``4x4 row``) and `n_positions` positions (``4x4 place``).
    """
    (result_blocks, single_results), (channel_blocks, single_channels) = (
        divmod(results, _BLOCK),
        divmod(channels, _BLOCK),
    )
    counts_by_kind = {
        "4x4": result_blocks * channel_blocks,
        "4x1": result_blocks * single_channels,
        "1x4": single_results * channel_blocks,
        "1x1": single_results * single_channels,
    }
    for kind, count in counts_by_kind.items():
        counts.update(
            {kind: count, f"{kind} row": count * n_rows, f"{kind} place": count * n_positions}
        )


def count_q8_pointwise_dw(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count weights and their blocks, each over all pixels."""
    counts.update(weight=arguments["count"])
    _count_q8_weight_blocks(
        counts, arguments["count"] // arguments["in"], arguments["in"], 1, arguments["pixels"]
    )


def count_q8_convolution_dw(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count weights (``weight``), taps of each group (``tap``), and the blocks of each tap."""
    sizes, batch = ConvolutionSizes(*arguments["shape"]), arguments["batch"]
    results = arguments["count"] // (sizes.group_channels * sizes.window)
    counts.update(weight=arguments["count"])
    for rows, columns in _list_tap_counts(sizes):
        counts.update(tap=sizes.groups)
        for _ in range(sizes.groups):
            n_rows = batch * rows if columns else 0
            shape = (results // sizes.groups, sizes.group_channels)
            _count_q8_weight_blocks(counts, *shape, n_rows, n_rows * columns)


def count_q8_depthwise_dw(counts: Counter[str], arguments: Mapping[str, Any]) -> None:
    """Count weights, taps and, for each tap, words of four channels and single channels."""
    sizes, batch = ConvolutionSizes(*arguments["shape"]), arguments["batch"]
    # Kernels that also update weights have all channels; their count is the number of weights.
    channels = sizes.channels if "w" in arguments else arguments["count"]
    counts.update(weight=channels * sizes.window)
    for rows, columns in _list_tap_counts(sizes):
        counts.update(tap=1)
        n_rows = batch * rows if columns else 0
        for name, n_units in zip(("4", "1"), divmod(channels, _BLOCK), strict=True):
            work = {name: 1, f"{name} row": n_rows, f"{name} place": n_rows * columns}
            counts.update({unit: n_units * n_per_unit for unit, n_per_unit in work.items()})
