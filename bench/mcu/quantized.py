"""Kernel calls of int8 layers on random data, and steps that consist of them.

Tests and measurements use them in place of layers of int8 networks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poetmodel.graph import Graph, Node, Phase, Tensor
from poetmodel.lowered.calls import Buffer, Call, ConvolutionSizes, DataType, NamedTensor, Ref
from poetmodel.lowered.kernels import parameter_names
from poetmodel.lowered.step import LoweredStep

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.lowered.calls import Argument

INT8: Final = (-128, 127)
"""Limits of int8."""
WAYS: Final = ("spread", "ties", "huge")
"""Ranges of results: slightly beyond int8; many between two bytes; most beyond floats."""
MOBILENET_BLOCKS: Final = (
    *((1, 8, 1, 1), (6, 8, 2, 2), (6, 16, 3, 2), (6, 24, 4, 2)),
    *((6, 32, 3, 1), (6, 56, 3, 2), (6, 112, 1, 1)),
)
"""Of MobileNetV2 with 0.35 of its channels: expansion, channels, how many blocks, first stride."""


def square(
    channels: int, results: int, size: int, window: int = 1, stride: int = 1, groups: int = 1
) -> ConvolutionSizes:
    """Return the sizes of a layer of square images, padded so that windows reach each element."""
    out, pad = -(-size // stride), window // 2
    windows = (window, window, stride, stride, pad, pad, 1, 1)
    return ConvolutionSizes(channels, size, size, results, out, out, *windows, groups)


def pool_sizes(
    channels: int, size: tuple[int, int], window: tuple[int, int], stride: int
) -> ConvolutionSizes:
    """Return the sizes of a pool without padding; `size` and `window` are height and width."""
    down, across = ((edge - part) // stride + 1 for edge, part in zip(size, window, strict=True))
    numbers = (*window, stride, stride, 0, 0, 1, 1)
    return ConvolutionSizes(channels, *size, channels, down, across, *numbers, channels)


def mobilenet_layers(size: int = 96) -> Iterator[tuple[str, ConvolutionSizes]]:
    """Yield kinds and sizes of the layers of MobileNetV2-0.35 up to its last block.

    A kind is the name of a kernel without ``pm_q8_``.
    """
    yield "conv2d", square(3, 16, size, 3, 2)
    size, channels = size // 2, 16
    blocks = [(wide, out, stride if not k else 1)
              for wide, out, count, stride in MOBILENET_BLOCKS for k in range(count)]  # fmt: skip
    for wide, results, stride in blocks[:-1]:
        inside = wide * channels
        if wide > 1:
            yield "pointwise", square(channels, inside, size)
        yield "depthwise", square(inside, inside, size, 3, stride, inside)
        size = -(-size // stride)
        yield "pointwise", square(inside, results, size)
        if stride == 1 and results == channels:
            yield "add", square(results, results, size)
        channels = results


class Layers:
    """Kernel calls on constants; the step returns their results as reals."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.buffers: dict[str, Buffer] = {}
        self.values: dict[str, np.ndarray] = {}
        self.calls: list[Call] = []

    def given(self, call: Call) -> dict[str, Any]:
        """Return the arguments of a call by parameter name, with constants as arrays."""
        taken = (self.values.get(a.buffer, a) if isinstance(a, Ref) else a for a in call.arguments)
        return dict(zip(parameter_names(call.kernel), taken, strict=True))

    # -- constants ---------------------------------------------------------------------------------

    def _constant(self, kind: DataType, values: np.ndarray) -> Ref:
        name = f"constant_{len(self.values)}"
        self.values[name] = values.ravel()
        self.buffers[name] = Buffer(elements=values.size, type=kind)
        return Ref(name)

    def _bytes(self, *shape: int) -> Ref:
        low = -128 if self.random.random() < 0.5 else -127
        return self._constant(DataType.INT8, self.random.integers(low, 128, shape, np.int8))

    def _real(self, values: np.ndarray) -> Ref:
        return self._constant(DataType.REAL, values.astype(np.float32))

    def _zero(self) -> int:
        return (*INT8, 0, int(self.random.integers(-127, 127)))[self.random.integers(4)]

    def _limits(self, zero: int) -> tuple[int, int]:
        low, high = sorted(map(int, self.random.integers(-128, 128, 2)))
        return (INT8, (zero, 127), (low, high))[self.random.integers(3)]

    def _numbers(self, way: str, spread: float, count: int) -> tuple[np.ndarray, np.ndarray, float]:
        """Return scales and biases for sums of a given spread, and the inverse output scale."""
        inverse = np.float32(self.random.uniform(0.1, 40))
        scales = self.random.uniform(0.3, 2, count) * 60 / (spread * inverse)
        biases = self.random.normal(0, 20, count) / inverse
        if way == "ties":
            inverse = np.float32(0.5)
            scales = np.exp2(-np.round(np.log2(spread / 64)) - self.random.integers(0, 2, count))
            biases = self.random.integers(-9, 9, count).astype(np.float64)
        elif way == "huge":
            inverse, scales = np.float32(1e20), scales * 10.0 ** self.random.integers(0, 36, count)
        return scales, biases, float(inverse)

    # -- calls -------------------------------------------------------------------------------------

    def call(self, kernel: str, elements: int, *arguments: Argument) -> Call:
        """Add a call with a number of results."""
        kind = DataType.REAL if kernel == "pm_q8_dequantize" else DataType.INT8
        name = f"result_{len(self.calls)}"
        self.buffers[name] = Buffer(elements=elements, type=kind)
        self.calls.append(Call(kernel, (Ref(name), *arguments)))
        return self.calls[-1]

    def layer(
        self,
        kernel: str,
        sizes: ConvolutionSizes,
        batch: int = 1,
        way: str = WAYS[0],
        limits: tuple[int, int] | None = None,
    ) -> Call:
        """Add a convolution by one of the three kernels."""
        terms, zero_x, zero = sizes.group_channels * sizes.window, self._zero(), self._zero()
        filters = self._bytes(sizes.results, terms)
        summed = self.values[filters.buffer].reshape(sizes.results, -1).sum(1, dtype=np.int32)
        if kernel == "pm_q8_depthwise":
            w = self.values[filters.buffer].reshape(sizes.results, terms)
            self.values[filters.buffer] = w.T.ravel()
        scales, biases, inverse = self._numbers(way, 6000 * math.sqrt(terms), sizes.results)
        constants = (
            self._bytes(batch, sizes.plane, sizes.channels),
            filters,
            self._constant(DataType.INT32, -zero_x * summed),
            self._real(scales),
            self._real(biases),
        )
        last = (inverse, zero, *(limits or self._limits(zero)))
        results = batch * sizes.results * sizes.out_plane
        if kernel == "pm_q8_pointwise":
            pixels = batch * sizes.plane
            shape: tuple[Argument, ...] = (pixels, sizes.channels, sizes.results, sizes.results)
        else:
            shape = (tuple(sizes), batch, sizes.results, zero_x)
        return self.call(kernel, results, *constants, *shape, *last)

    def add(self, n: int, way: str = WAYS[0], limits: tuple[int, int] | None = None) -> Call:
        """Add a sum of two tensors."""
        (a_scale, b_scale), _, inverse = self._numbers(way, 100, 2)
        zeros = [self._zero() for _ in range(3)]
        scaled = (float(np.float32(a_scale)), zeros[0], float(np.float32(b_scale)), zeros[1])
        last = (inverse, zeros[2], *(limits or self._limits(zeros[2])))
        return self.call("pm_q8_add", n, self._bytes(n), self._bytes(n), n, *scaled, *last)

    def pool(
        self,
        kernel: str,
        sizes: ConvolutionSizes,
        batch: int = 1,
        way: str = WAYS[0],
        limits: tuple[int, int] | None = None,
        *,
        same_scale: bool = False,
    ) -> Call:
        """Add a maximum or average pool.

        With `same_scale` means have scale and zero of the input, and windows must not be padded.
        """
        lists = []
        for size, places, window, stride, pad, dilation in sizes.directions:
            ends = []
            for first in range(-pad, places * stride - pad, stride):
                taps = [t for t in range(first, first + window * dilation, dilation)
                        if 0 <= t < size]  # fmt: skip
                ends += [taps[0], taps[-1] + 1] if taps else [0, 0]
            lists.append(tuple(ends))
        spatial = (sizes.out_height, sizes.out_width, sizes.height, sizes.width)
        shape = (batch, sizes.channels, *spatial, sizes.channels, sizes.channels)
        last: tuple[Argument, ...] = (sizes.dilation_down, sizes.dilation_across)
        if kernel == "pm_q8_average":
            (scale,), _, inverse = self._numbers(way, 70 * math.sqrt(sizes.window), 1)
            zero = self._zero()
            zero_x = zero if same_scale else self._zero()
            scale = 1 / (inverse * sizes.window) if same_scale else scale
            of_result = (float(np.float32(scale)), inverse, zero)
            last = (zero_x, *of_result, *(limits or self._limits(zero)))
        x = self._bytes(batch, sizes.plane, sizes.channels)
        return self.call(kernel, batch * sizes.channels * sizes.out_plane, x, *lists, *shape, *last)

    def quantize(self, batch: int, channels: int, plane: int, way: str = WAYS[0]) -> Call:
        """Add a quantization of reals; also of infinities and NaN if these are huge."""
        (scale,), _, inverse = self._numbers(way, 1, 1)
        count = batch * channels * plane
        values = self.random.normal(0, 1, count) * scale
        if way == "ties":
            values = self.random.integers(-400, 400, count)
        elif way == "huge":
            values[::5], values[1::5], values[2::5] = np.inf, -np.inf, np.nan
        numbers = (batch, channels, plane, inverse, self._zero())
        return self.call("pm_q8_quantize", count, self._real(values), *numbers)

    def lookup(self, batch: int, channels: int, plane: int) -> Call:
        """Add a conversion from bytes in the order of images, with a table for each channel."""
        values = self.random.integers(0, 256, batch * channels * plane, np.uint8)
        tables = self._constant(
            DataType.INT8, self.random.integers(-128, 128, (channels, 256), "i1")
        )
        steps = (channels * plane, plane, 1, 256)
        x = self._constant(DataType.UINT8, values)
        return self.call("pm_q8_lookup", values.size, x, tables, batch, channels, plane, *steps)

    def dequantize(self, batch: int, channels: int, plane: int) -> Call:
        """Add a conversion to real numbers."""
        count = batch * channels * plane
        scale = float(np.float32(self.random.uniform()))
        numbers = (batch, channels, plane, channels, scale, self._zero())
        return self.call("pm_q8_dequantize", count, self._bytes(count), *numbers)

    # -- steps -------------------------------------------------------------------------------------

    def step(self, *, handed: bool = True) -> LoweredStep:
        """Return a step that executes all calls and returns all results as reals, or only one.

        It has an input that nothing reads, and one of its constants as a state tensor.
        """
        nodes: list[Node] = []
        calls: list[Sequence[Call]] = []
        buffers = {"x": Buffer(elements=1, type=DataType.REAL), **self.buffers}
        out: list[NamedTensor] = []
        for k, call in enumerate(self.calls):
            (made, *_) = call.arguments
            if not isinstance(made, Ref):
                raise TypeError(made)
            buffer, found = buffers[made.buffer], made.buffer
            forward: dict[str, Any] = {"op": call.kernel, "phase": Phase.FORWARD}
            tensor = Tensor(name=found, bytes=buffer.bytes)
            nodes.append(Node(name=f"layer_{k}", outputs=(tensor,), **forward))
            calls.append((call,))
            if not handed and k + 1 < len(self.calls):
                continue
            if buffer.type is DataType.INT8:
                found = f"real_{k}"
                buffers[found] = Buffer(elements=buffer.elements, type=DataType.REAL)
                tensor = Tensor(name=found, bytes=buffers[found].bytes)
                inputs = (made.buffer,)
                nodes.append(Node(name=f"as_{found}", inputs=inputs, outputs=(tensor,), **forward))
                numbers = (1, buffer.elements, 1, buffer.elements, 1.0, 0)
                calls.append((Call("pm_q8_dequantize", (Ref(found), made, *numbers)),))
            pieces = (Ref(found),)
            shape = (buffer.elements,)
            out.append(NamedTensor(name=found, shape=shape, type=DataType.REAL, pieces=pieces))
        first, values = next(iter(self.values.items()))
        kind = self.buffers[first].type
        kept = NamedTensor(name="kept", shape=values.shape, type=kind, pieces=(Ref(first),))
        step = LoweredStep(
            graph=Graph(name="quantized", nodes=tuple(nodes)),
            calls=tuple(map(tuple, calls)),
            buffers=buffers,
            inputs=(NamedTensor(name="x", shape=(1,), type=DataType.REAL, pieces=(Ref("x"),)),),
            states=(kept,),
            gradients=tuple(out),
            loss=out[0].pieces[0],
            values=self.values,
        )
        return step.with_nodes(nodes, step.calls)
