"""Kernels of quantized layers, compared with definitions in NumPy."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kit.digits import build_and_run
from kit.kernel_calls import Memory
from kit.programs import require_programs
from kit.rotation import mark_seeds_except
from mcu.quantized import (
    INT8,
    WAYS,
    Layers,
    is_over_elements,
    list_mobilenet_layers,
    pool_sizes,
    square_sizes,
)
from poetmodel.errors import InputError
from poetmodel.export import board
from poetmodel.export.board import Target
from poetmodel.export.exporting import export_step
from poetmodel.export.flash import code_bytes, table_bytes
from poetmodel.export.measuring import measure_emulated
from poetmodel.graph import Graph
from poetmodel.lowered.calls import ConvolutionSizes, DataType
from poetmodel.lowered.catalogue import CATALOGUE
from poetmodel.lowered.instructions import count_work, estimate_call_instructions
from poetmodel.lowered.io import load_step, save_step
from poetmodel.lowered.kernels import find_kernel
from poetmodel.lowered.step import ALIGNMENT
from poetmodel.tiling.choice import divide_step

CONVOLUTIONS = ("pm_q8_conv2d", "pm_q8_depthwise", "pm_q8_pointwise")
POOLS = ("pm_q8_average", "pm_q8_maximum")
ELEMENTS = tuple(
    name
    for name in sorted(CATALOGUE)
    if is_over_elements(name) and "inverse" in find_kernel(name).index_of
)
OTHERS = ("pm_q8_quantize", "pm_q8_dequantize", "pm_q8_lookup")
KERNELS = (*CONVOLUTIONS, *POOLS, *ELEMENTS, *OTHERS)
WITHOUT_SCALES = ("pm_q8_maximum", "pm_q8_lookup")
FLOAT = np.float32


# -- what they are ---------------------------------------------------------------------------------
def element(y, zero, low=INT8[0], high=INT8[1]):
    """Return real numbers in steps of a scale as elements: to even, within limits, NaN as 0."""
    assert y.dtype == FLOAT
    steps = np.nan_to_num(np.rint(y), nan=0.0, posinf=1e9, neginf=-1e9).astype(np.float64)
    return np.clip(steps + zero, low, high).astype(np.int8)


def seen(x, sizes):
    """Yield the inputs of each output of images of [batch, rows, columns, channels], tap by tap."""
    (_, rows, height, down, top, far), (_, columns, width, across, left, wide) = sizes.directions
    images = x.reshape(-1, sizes.height, sizes.width, sizes.channels)
    after = (rows * down + height * far, columns * across + width * wide)
    padded = np.pad(images, ((0, 0), (top, after[0]), (left, after[1]), (0, 0)))
    for h, v in product(range(height), range(width)):
        lines = padded[:, h * far + down * np.arange(rows)]
        yield lines[:, :, v * wide + across * np.arange(columns)]


def sums(x, w, sizes, zero_x):
    """Return the sums of a convolution, whose weights are [group, result, tap, channel]."""
    total = 0
    for tap, part in enumerate(seen(x.astype(np.int64) - zero_x, sizes)):
        grouped = part.reshape(*part.shape[:3], sizes.groups, -1)
        total = total + np.einsum("bijgc,goc->bijgo", grouped, w[:, :, tap].astype(np.int64))
    return total.reshape(-1, sizes.results)


def of_products(total, scale, bias, inverse, zero, low, high):
    """Return the elements of sums of products."""
    product = total.astype(FLOAT) * scale
    return element((product + bias) * FLOAT(inverse), zero, low, high)


def conv2d(*, x, w, shape, zero_x, start, batch, count, **last):
    """Return a convolution."""
    sizes = ConvolutionSizes(*shape)
    filters = w.reshape(sizes.groups, sizes.group_results, sizes.window, sizes.group_channels)
    assert (len(x), count) == (batch * sizes.plane * sizes.channels, sizes.results)
    assert (start == -zero_x * filters.sum((2, 3), dtype=np.int64).ravel()).all()
    return of_products(sums(x, filters, sizes, zero_x), **last)


def depthwise(*, w, shape, **others):
    """Return a convolution that sees one channel; its weights lie with the channels last."""
    filters = w.reshape(-1, shape[0]).T
    return conv2d(w=filters, shape=shape, **others)


def pointwise(*, x, w, start, pixels, results, out_step, **last):
    """Return a linear layer of pixels; its initial sums follow from the zero of x."""
    channels = last.pop("in")
    assert out_step == results
    total = x.reshape(pixels, channels).astype(np.int64) @ w.reshape(results, -1).T + start
    return of_products(total, **last)


def add(*, a, a_zero, a_scale, b, b_zero, b_scale, inverse, **last):
    """Return a sum."""
    parts = (a - FLOAT(a_zero)) * FLOAT(a_scale), (b - FLOAT(b_zero)) * FLOAT(b_scale)
    return element((parts[0] + parts[1]) * FLOAT(inverse), **last)


def windows(x, given, row_step=1, column_step=1):
    """Yield the elements of each window of a pool, of each image and channel."""
    shape = (given["batch"], given["x_height"], given["x_width"], given["channels"])
    for image in x.reshape(shape):
        for i, j in np.ndindex(given["height"], given["width"]):
            row, column = given["rows"][2 * i :], given["columns"][2 * j :]
            window = image[row[0] : row[1] : row_step, column[0] : column[1] : column_step]
            yield window.reshape(-1, given["channels"])


def average(*, x, zero_x, scale, inverse, zero, low, high, **given):
    """Return means."""
    totals = [(window.astype(np.int64) - zero_x).sum(0) for window in windows(x, given)]
    y = np.array(totals).astype(FLOAT) * FLOAT(scale) * FLOAT(inverse)
    return element(y, zero, low, high)


def maximum(*, x, row_step, column_step, **given):
    """Return the maximum; that of no element is the smallest number."""
    found = windows(x, given, row_step, column_step)
    return np.array([window.max(0, initial=INT8[0]) for window in found])


def quantize(*, x, batch, channels, plane, inverse, zero):
    """Return real numbers as elements, channels last."""
    lying = x.reshape(batch, channels, plane).swapaxes(1, 2)
    return element(lying * FLOAT(inverse), zero)


def dequantize(*, x, batch, channels, plane, x_step, scale, zero):
    """Return the real values of elements, in the layout of images."""
    lying = x.reshape(batch, plane, x_step).swapaxes(1, 2)[:, :channels]
    return (lying - FLOAT(zero)) * FLOAT(scale)


def lookup(*, x, table, batch, channels, plane, **steps):
    """Return the table's results for bytes, in the layout of images, channels last."""
    assert steps == {
        "image_step": channels * plane, "channel_step": plane, "element_step": 1, "table_step": 256
    }  # fmt: skip
    lying = x.reshape(batch, channels, plane).swapaxes(1, 2)
    return np.take_along_axis(table.reshape(channels, 256).T, lying.reshape(-1, channels), 0)


def expected(layers, call):
    """Return the expected result of a call."""
    given = layers.named_arguments(call)
    del given["out"]
    if call.kernel in ELEMENTS:
        assert given.pop("n", None) or given.pop("shape")
    with np.errstate(over="ignore", invalid="ignore"):
        return globals()[call.kernel.removeprefix("pm_q8_")](**given).ravel()


# -- calls -----------------------------------------------------------------------------------------
def geometry(random, *, pool):
    """Return size, outputs, window, stride, padding and dilation; some windows are all padding."""
    number = lambda low, high: int(random.integers(low, high + 1))  # noqa: E731
    size, window, stride, dilation = number(1, 9), number(1, 4), number(1, 3), number(1, 2)
    padding = number(0, window // 2 if pool else 3)
    fit = (size + 2 * padding - dilation * (window - 1) - 1) // stride + 1
    return size, max(1, fit + number(-1, 1)), window, stride, padding, dilation


def some(layers, kernel, way):
    """Add a call of a kernel, of random shape, and return it."""
    number = lambda high: int(layers.random.integers(1, high + 1))  # noqa: E731
    if kernel in ELEMENTS:
        return layers.add_elements(kernel, number(40), way=way)
    if kernel == "pm_q8_quantize":
        return layers.add_quantization(number(3), number(5), number(20), way)
    if kernel == "pm_q8_lookup":
        return layers.add_lookup(number(3), number(5), number(20))
    if kernel == "pm_q8_dequantize":
        return layers.add_dequantization(number(3), number(5), number(20))
    if kernel == "pm_q8_pointwise":
        return layers.add_convolution(
            kernel, square_sizes(number(40), number(9), number(3)), number(2), way
        )
    groups = number(3)
    channels, results = groups * number(9), groups * number(6)
    if kernel != "pm_q8_conv2d":
        groups = results = channels = number(13)
    both = [geometry(layers.random, pool=kernel in POOLS) for _ in range(2)]
    spatial = list(zip(*both, strict=True))
    rest = (number for pair in spatial[2:] for number in pair)
    sizes = ConvolutionSizes(channels, *spatial[0], results, *spatial[1], *rest, groups)
    make = layers.add_pool if kernel in POOLS else layers.add_convolution
    return make(kernel, sizes, number(2), way)


CASES = [(k, way) for k in KERNELS for way in WAYS if way == WAYS[0] or k not in WITHOUT_SCALES]


@pytest.mark.parametrize(
    ("kernel", "way"),
    mark_seeds_except(CASES, {c for c in CASES if WAYS[0] in c or "pm_q8_conv2d" in c}, CASES),
)
def test_kernels_are_what_is_stated(kernel, way):
    """Results are equal, for any shapes, zeros, limits, and no other memory is written."""
    layers = Layers(seed=len(kernel + way))
    varied = set()
    for _ in range(60):
        call = some(layers, kernel, way)
        memory = Memory(layers.buffers)
        for name, values in layers.values.items():
            memory[name][...] = values
        memory.execute([call])
        found = memory[call.arguments[0].buffer]
        np.testing.assert_array_equal(
            found, expected(layers, call), str(layers.named_arguments(call))
        )
        varied.update(found.tolist())
        layers.buffers.clear()
        layers.values.clear()
    assert len(varied) > 100 or kernel == "pm_q8_dequantize" or way == "huge"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return layers of every kernel, and the folder of their step."""
    layers = Layers(seed=1)
    for kernel, way in CASES:
        for _ in range(6):
            some(layers, kernel, way)
    layers.add_convolution("pm_q8_conv2d", square_sizes(3, 8, 12, 3, 2))
    layers.add_convolution("pm_q8_depthwise", square_sizes(16, 16, 9, 3, 1, 16), 2)
    layers.add_convolution("pm_q8_depthwise", square_sizes(20, 20, 9, 5, 2, 20))
    layers.add_convolution("pm_q8_pointwise", square_sizes(64, 24, 5))
    # As many elements as 16 bits can sum at their lowest, and more.
    for size in (16, 17):
        call = layers.add_pool("pm_q8_average", pool_sizes(6, (size, size), (size, size), 1))
        layers.named_arguments(call)["x"].fill(INT8[0])
    folder = tmp_path_factory.mktemp("quantized")
    with pytest.MonkeyPatch.context() as patched:  # constants stand for inputs, NaN among them
        patched.setattr("poetmodel.export.exporting.check_values", lambda _: None)
        export_step(layers.build_step(), folder, ram="100%", paging=False, gap=0.5)
    return layers, folder


TARGETS = [Target.HOST, Target.HOST_DOUBLE, Target.M3, Target.M4, Target.M7]


@pytest.mark.parametrize(
    "target", mark_seeds_except(TARGETS, {Target.HOST, Target.M4}, slow=TARGETS)
)
def test_bytes_are_the_same_everywhere(exported, target):
    """In float and in double, with a unit for floats or none, with SIMD or without."""
    require_programs(target)
    layers, folder = exported
    kind = "<f8" if target is Target.HOST_DOUBLE else "<f4"
    done = build_and_run(folder, target, inputs=bytes(np.dtype(kind).itemsize), steps=1)
    found = np.frombuffer(done.state, kind)
    for call in layers.calls:
        wanted = expected(layers, call)
        own, found = found[: len(wanted)], found[len(wanted) :]
        np.testing.assert_array_equal(own, wanted, call.kernel)
    assert not len(found)


# -- what they cost --------------------------------------------------------------------------------
def test_work_is_counted_as_it_is_done():
    """In blocks of two results of two pixels, of four channels; and apart at the edges of images.

    Of 9 pixels and 5 results, 4 pairs by 2 go at once; a last pixel by 2 pairs, and a last result
    by 5 pairs of pixels, the last of them one pixel. Of 5 x 5 places 3 x 3 see whole windows.
    """
    layers = Layers()
    found = count_work(
        layers.add_convolution("pm_q8_pointwise", square_sizes(11, 5, 3), limits=INT8)
    )[1]
    assert found == {
        "call": 1, "pair": 2,
        "2x2": 8, "2x2 word": 8 * 2, "2x2 rest": 8 * 3,
        "1x2": 7, "1x2 word": 7 * 2, "1x2 rest": 7 * 3,
    }  # fmt: skip
    found = count_work(
        layers.add_convolution("pm_q8_depthwise", square_sizes(9, 9, 5, 3, 1, 9), limits=(0, 9))
    )[1]
    taps = 12 * 6 + 4 * 4
    assert found == {
        "call": 1, "place": 25, "made": 25, "inside": 2, "line": 2 * 3, "3x3": 2 * 9,
        "edge": 2 * 16, "edge row": 2 * (4 * 2 + 6 * 2 + 6 * 3), "edge tap": 2 * taps,
        "1": 25, "1 row": 5 * (3 * 3 + 2 * 2), "1 tap": 81 + taps, "limited": 9 * 25,
    }  # fmt: skip


def test_pools_are_counted_by_words():
    """Nine channels are two words and a byte; windows above 256 elements are summed by bytes."""
    layers = Layers()
    found = count_work(layers.add_pool("pm_q8_maximum", square_sizes(9, 9, 5, 3, 1, 9)))[1]
    assert found == {
        "call": 1, "place": 25,
        "4 element": 2 * 25, "4 row": 2 * 13 * 5, "4 seen": 2 * 13 * 13,
        "1 element": 25, "1 row": 13 * 5, "1 seen": 13 * 13,
    }  # fmt: skip
    wide = pool_sizes(4, (17, 17), (17, 17), 1)
    assert not count_work(layers.add_pool("pm_q8_average", wide))[1]["4 seen"]
    assert count_work(layers.add_pool("pm_q8_maximum", wide))[1]["4 seen"] == 289


MOST = {Target.M4: 33e6, Target.M3: 138e6}
"""Instructions of the front of MobileNetV2-0.35 on images of 96 x 96."""
WIDE_PER_MAC = 1.8


@pytest.mark.parametrize("core", mark_seeds_except(MOST, (), MOST))
def test_a_front_is_quick(core):
    """A front needs a fraction of the instructions of floats; estimates are near the emulator's."""
    require_programs(core)
    layers = Layers()
    for kind, sizes in list_mobilenet_layers():
        if kind == "add":
            layers.add_elements("pm_q8_add", sizes.results * sizes.plane, limits=INT8)
        else:
            layers.add_convolution(f"pm_q8_{kind}", sizes, limits=INT8)
    layers.add_convolution("pm_q8_pointwise", square_sizes(128, 128, 6), limits=INT8)
    step = layers.build_step(returns_all=False)
    found = measure_emulated(step, device="nrf52840", core=core).instructions
    *front, wide = (found[f"layer_{k}"] for k in range(len(layers.calls)))
    assert sum(front) <= MOST[core]
    if core is Target.M4:
        assert wide <= WIDE_PER_MAC * 36 * 128 * 128
        estimates = [estimate_call_instructions(call) for call in layers.calls]
        assert sum(estimates[:-1]) == pytest.approx(sum(front), rel=0.03)
        assert estimates == pytest.approx([*front, wide], rel=0.1)


@pytest.mark.slow
def test_flash_is_estimated(exported, monkeypatch):
    """Kernels, weights that lie as bytes, and the program: within a tenth."""
    require_programs(*board.list_required_programs(Target.M4, emulate=False))
    from mcu.code_sizes import measure_step_bytes

    monkeypatch.setattr("poetmodel.export.exporting.check_values", lambda _: None)
    layers, folder = exported
    step = layers.build_step()
    made = export_step(step, folder, ram="100%", paging=False, gap=0.5)
    estimate = code_bytes(made.source) + table_bytes(made.source)
    assert estimate == pytest.approx(measure_step_bytes(folder).total(), rel=0.1)
    sizes = {name: layers.buffers[name].bytes for name in layers.values}
    rounding = ALIGNMENT * len(sizes)
    assert 0 <= len(made.source.weights.data) - sum(sizes.values()) <= rounding


# -- steps of them ---------------------------------------------------------------------------------
def every_layer():
    """Return layers of every kernel."""
    layers = Layers(seed=2)
    layers.add_convolution("pm_q8_conv2d", square_sizes(3, 16, 24, 3, 2))
    layers.add_convolution("pm_q8_depthwise", square_sizes(16, 16, 24, 3, 1, 16))
    layers.add_convolution("pm_q8_pointwise", square_sizes(16, 32, 12))
    for kernel in ELEMENTS:
        layers.add_elements(kernel, 3300)
    for kernel in POOLS:
        layers.add_pool(kernel, square_sizes(16, 16, 24, 2, 2, 16))
    layers.add_quantization(1, 16, 250)
    layers.add_dequantization(1, 16, 250)
    layers.add_lookup(1, 16, 250)
    return layers


@pytest.mark.parametrize("tile", ["none", "1KiB"])
def test_files_give_layers_back(tile, tmp_path):
    """Whole or in tiles, with their constants."""
    step = divide_step(every_layer().build_step(), tile)
    save_step(step, tmp_path / "a.step.json")
    again = load_step(tmp_path / "a.step.json")
    assert (again.graph, again.calls, again.buffers) == (step.graph, step.calls, step.buffers)
    for name, values in step.values.items():
        np.testing.assert_array_equal(again.values[name], values)


def test_bytes_are_not_taken_for_others(tmp_path):
    """A file whose kernel reads int8 where it has truth values is refused, and the other way."""
    step = every_layer().build_step()
    ((name, buffer), *_) = [
        each for each in step.buffers.items() if each[1].type is DataType.INT8
    ]  # fmt: skip
    wrong = replace(step, buffers={**step.buffers, name: replace(buffer, type=DataType.UINT8)})
    save_step(wrong, tmp_path / "wrong.step.json")
    with pytest.raises(InputError, match=r"expected (const )?int8_t \*, got buffer"):
        load_step(tmp_path / "wrong.step.json")


@pytest.mark.parametrize("target", [Target.HOST, pytest.param(Target.M4, marks=pytest.mark.slow)])
def test_inference_computes_them_too(target, tmp_path):
    """It reads the constants of the step."""
    require_programs(target)
    layers = every_layer()
    step = layers.build_step(returns_all=False)
    (*others, last) = step.graph.nodes
    nodes = (*others, replace(last, outputs=()))
    (result,) = step.gradients
    inference = replace(
        step,
        graph=Graph(name="forward", nodes=nodes),
        gradients=(),
        states=(),
        values={},
        output=replace(result, name="output"),
    )
    export_step(replace(step, inference=inference), tmp_path, ram="100%", infer=True, gap=0.5)
    words = (f"infer={tmp_path / 'out.bin'}",)
    build_and_run(tmp_path, target, inputs=bytes(4), steps=1, words=words)
    found = np.frombuffer((tmp_path / "out.bin").read_bytes(), "<f4")
    np.testing.assert_array_equal(found, expected(layers, layers.calls[-1]))
