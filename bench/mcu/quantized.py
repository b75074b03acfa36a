"""Kernel calls of int8 layers on random data, and steps that consist of these calls.

Tests and measurements use them in place of captured int8 networks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from poetmodel.graph import Graph, Node, Phase, Tensor
from poetmodel.lowered.calls import Buffer, Call, ConvolutionSizes, DataType, NamedTensor, Ref
from poetmodel.lowered.catalogue import CATALOGUE
from poetmodel.lowered.forms import ELEMENTWISE, ProductForm
from poetmodel.lowered.kernels import find_kernel
from poetmodel.lowered.step import LoweredStep

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from poetmodel.lowered.calls import Argument
    from poetmodel.lowered.kernels import Parameter

ALIGNMENT: Final = 16
"""Multiple of elements of recorded results: smaller ones would not fit between aligned ones."""
INT8: Final = (-128, 127)
"""Limits of int8."""
WAYS: Final = ("spread", "ties", "huge")
"""Distributions of results: slightly beyond int8; many halfway between two bytes; most beyond the
range of floats."""
MOBILENET_BLOCKS: Final = (
    *((1, 8, 1, 1), (6, 8, 2, 2), (6, 16, 3, 2), (6, 24, 4, 2)),
    *((6, 32, 3, 1), (6, 56, 3, 2), (6, 112, 1, 1)),
)
"""Blocks of MobileNetV2 of width 0.35: expansion, channels, number, and stride of the first."""


def square_sizes(
    channels: int, results: int, size: int, window: int = 1, stride: int = 1, groups: int = 1
) -> ConvolutionSizes:
    """Return the sizes of a layer of square images, padded so that only the stride reduces them."""
    out, pad = -(-size // stride), window // 2
    windows = (window, window, stride, stride, pad, pad, 1, 1)
    return ConvolutionSizes(channels, size, size, results, out, out, *windows, groups)


def pool_sizes(
    channels: int, size: tuple[int, int], window: tuple[int, int], stride: int
) -> ConvolutionSizes:
    """Return the sizes of a pool without padding; `size` and `window` are (height, width)."""
    down, across = (
        (side - window_side) // stride + 1 for side, window_side in zip(size, window, strict=True)
    )
    numbers = (*window, stride, stride, 0, 0, 1, 1)
    return ConvolutionSizes(channels, *size, channels, down, across, *numbers, channels)


def list_mobilenet_layers(size: int = 96) -> Iterator[tuple[str, ConvolutionSizes]]:
    """Yield kinds and sizes of the layers of MobileNetV2-0.35 up to its last block.

    A kind is the name of a kernel without ``pm_q8_``.
    """
    yield "conv2d", square_sizes(3, 16, size, 3, 2)
    size, channels = size // 2, 16
    blocks = [(wide, out, stride if not k else 1)
              for wide, out, count, stride in MOBILENET_BLOCKS for k in range(count)]  # fmt: skip
    for wide, results, stride in blocks[:-1]:
        expanded = wide * channels
        if wide > 1:
            yield "pointwise", square_sizes(channels, expanded, size)
        yield "depthwise", square_sizes(expanded, expanded, size, 3, stride, expanded)
        size = -(-size // stride)
        yield "pointwise", square_sizes(expanded, results, size)
        if stride == 1 and results == channels:
            yield "add", square_sizes(results, results, size)
        channels = results


def is_over_elements(kernel: str) -> bool:
    """Return whether a kernel has one result of as many elements as ``n`` or ``shape`` states."""
    form, parameters = CATALOGUE[kernel].form, find_kernel(kernel).parameters
    has_elements = form is ELEMENTWISE or (isinstance(form, ProductForm) and form.free == {"n"})
    return has_elements and [parameter.is_written for parameter in parameters].count(True) == 1


def _pointed_type(parameter: Parameter) -> DataType:
    """Return the type of the elements that a parameter points to."""
    return next(kind for kind in DataType if kind.c_name in parameter.type.split())


class Layers:
    """A list of kernel calls on random constants, drawn from `seed`.

    `buffers` and `values` are those of constants and results, by name. Methods ``add_…`` append a
    call and return it.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.buffers: dict[str, Buffer] = {}
        self.values: dict[str, np.ndarray] = {}
        self.calls: list[Call] = []

    def named_arguments(self, call: Call) -> dict[str, Any]:
        """Return the arguments of a call by parameter name, constants as arrays."""
        return {
            name: self.values.get(argument.buffer, argument)
            if isinstance(argument, Ref)
            else argument
            for name, argument in call.named_arguments.items()
        }

    # -- constants ---------------------------------------------------------------------------------

    def _add_constant(self, kind: DataType, values: np.ndarray) -> Ref:
        name = f"constant_{len(self.values)}"
        self.values[name] = values.ravel()
        self.buffers[name] = Buffer(elements=values.size, type=kind)
        return Ref(name)

    def _draw_bytes(self, *shape: int) -> Ref:
        low = -128 if self.random.random() < 0.5 else -127
        return self._add_constant(DataType.INT8, self.random.integers(low, 128, shape, np.int8))

    def _add_reals(self, values: np.ndarray) -> Ref:
        return self._add_constant(DataType.REAL, values.astype(np.float32))

    def _draw_zero(self) -> int:
        return (*INT8, 0, int(self.random.integers(-127, 127)))[self.random.integers(4)]

    def _draw_limits(self, zero: int) -> tuple[int, int]:
        low, high = sorted(map(int, self.random.integers(-128, 128, 2)))
        return (INT8, (zero, 127), (low, high))[self.random.integers(3)]

    def _draw_scales(
        self, way: str, spread: float, count: int
    ) -> tuple[np.ndarray, np.ndarray, float]:
        """Draw scales and biases for `count` sums of a spread, and the inverse output scale.

        `way` is one of `WAYS`.
        """
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

    def add_call(self, kernel: str, elements: int, *arguments: Argument) -> Call:
        """Add a call of a kernel, with a buffer of `elements` results as its first argument."""
        kind = _pointed_type(find_kernel(kernel).parameters[0])
        name = f"result_{len(self.calls)}"
        self.buffers[name] = Buffer(elements=elements, type=kind)
        self.calls.append(Call(kernel, (Ref(name), *arguments)))
        return self.calls[-1]

    def add_elements(
        self,
        kernel: str,
        n: int,
        *,
        rows: int = 1,
        way: str = WAYS[0],
        limits: tuple[int, int] | None = None,
    ) -> Call:
        """Add a call of a kernel over elements: `rows` rows of `n`, apart if it has a shape.

        All further arguments follow from the prototype: random tensors, zeros and scales; limits
        are drawn by default if the kernel has an ``inverse``, otherwise they limit nothing.
        """
        _, *inputs = find_kernel(kernel).parameters
        tensors = [
            parameter
            for parameter in inputs
            if parameter.type.endswith("*") and parameter.name != "shape"
        ]
        strides = (1,) * (1 + len(tensors))
        row = (rows, *(2 * n for _ in strides)) if rows > 1 else ()
        numbers: dict[str, Argument] = {"n": rows * n, "low": INT8[0], "high": INT8[1]}
        if any(parameter.name == "inverse" for parameter in inputs):
            numbers |= self._draw_levels(inputs, way, limits)
        numbers["shape"] = (1 + bool(row), n, *strides, *row)
        elements = n if rows == 1 else 2 * rows * n
        arguments: list[Argument] = [
            self._draw_elements(_pointed_type(parameter), elements)
            if parameter in tensors
            else numbers.get(parameter.name, 0.5 if parameter.type == "pm_real" else 0)
            for parameter in inputs
        ]
        return self.add_call(kernel, elements, *arguments)

    def _draw_levels(
        self, inputs: Sequence[Parameter], way: str, limits: tuple[int, int] | None
    ) -> dict[str, Argument]:
        """Draw the scales, zeros and limits of the tensors of a kernel that returns int8."""
        names = [parameter.name for parameter in inputs]
        scale_names = [name for name in names if "scale" in name]
        scales, _, inverse = self._draw_scales(way, 100, len(scale_names))
        zeros = {name: self._draw_zero() for name in names if "zero" in name}
        low, high = limits or self._draw_limits(zeros["zero"])
        rounded = zip(scale_names, map(float, scales.astype(np.float32)), strict=True)
        return {**dict(rounded), **zeros, "inverse": inverse, "low": low, "high": high}

    def add_recorded(self, call: Call, values: Mapping[str, np.ndarray]) -> Call:
        """Add a call with one result, and with the given values of the buffers that it reads."""
        (result,) = call.writes
        kinds = {
            argument.buffer: _pointed_type(parameter)
            for argument, parameter in zip(
                call.arguments, find_kernel(call.kernel).parameters, strict=True
            )
            if isinstance(argument, Ref)
        }
        names = {
            name: self._add_constant(kind, values[name].astype(kind.numpy_name)).buffer
            for name, kind in kinds.items()
            if name != result.buffer
        }
        _, *inputs = call.with_buffers(names).arguments
        elements = values[result.buffer].size - result.offset
        return self.add_call(call.kernel, elements + -elements % ALIGNMENT, *inputs)

    def _draw_elements(self, kind: DataType, n: int) -> Ref:
        """Draw numbers of a type; integers and truth values are 0 or 1."""
        if kind is DataType.REAL:
            return self._add_reals(self.random.normal(0, 1, n))
        if kind is DataType.INT8:
            return self._draw_bytes(n)
        return self._add_constant(kind, self.random.integers(0, 2, n).astype(kind.numpy_name))

    def add_convolution(
        self,
        kernel: str,
        sizes: ConvolutionSizes,
        batch: int = 1,
        way: str = WAYS[0],
        limits: tuple[int, int] | None = None,
    ) -> Call:
        """Add a call of ``pm_q8_conv2d``, ``pm_q8_depthwise`` or ``pm_q8_pointwise``.

        By default, the limits of results are drawn.
        """
        terms, zero_x, zero = (
            sizes.group_channels * sizes.window,
            self._draw_zero(),
            self._draw_zero(),
        )
        filters = self._draw_bytes(sizes.results, terms)
        weight_sums = self.values[filters.buffer].reshape(sizes.results, -1).sum(1, dtype=np.int32)
        if kernel == "pm_q8_depthwise":
            weights = self.values[filters.buffer].reshape(sizes.results, terms)
            self.values[filters.buffer] = weights.T.ravel()
        scales, biases, inverse = self._draw_scales(way, 6000 * math.sqrt(terms), sizes.results)
        constants = (
            self._draw_bytes(batch, sizes.plane, sizes.channels),
            filters,
            self._add_constant(DataType.INT32, -zero_x * weight_sums),
            self._add_reals(scales),
            self._add_reals(biases),
        )
        output_arguments = (inverse, zero, *(limits or self._draw_limits(zero)))
        results = batch * sizes.results * sizes.out_plane
        if kernel == "pm_q8_pointwise":
            pixels = batch * sizes.plane
            shape: tuple[Argument, ...] = (pixels, sizes.channels, sizes.results, sizes.results)
        else:
            shape = (tuple(sizes), batch, sizes.results, zero_x)
        return self.add_call(kernel, results, *constants, *shape, *output_arguments)

    def add_pool(
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

        With `same_scale`, means have scale and zero of the input; windows must not be padded then.
        Limits are ignored by maximum pools.
        """
        window_bounds = []
        for size, count, window, stride, pad, dilation in sizes.directions:
            bounds = []
            for begin in range(-pad, count * stride - pad, stride):
                covered = [index for index in range(begin, begin + window * dilation, dilation)
                        if 0 <= index < size]  # fmt: skip
                bounds += [covered[0], covered[-1] + 1] if covered else [0, 0]
            window_bounds.append(tuple(bounds))
        spatial = (sizes.out_height, sizes.out_width, sizes.height, sizes.width)
        shape = (batch, sizes.channels, *spatial, sizes.channels, sizes.channels)
        last_arguments: tuple[Argument, ...] = (sizes.dilation_down, sizes.dilation_across)
        if kernel == "pm_q8_average":
            (scale,), _, inverse = self._draw_scales(way, 70 * math.sqrt(sizes.window), 1)
            zero = self._draw_zero()
            zero_x = zero if same_scale else self._draw_zero()
            scale = 1 / (inverse * sizes.window) if same_scale else scale
            result_scales = (float(np.float32(scale)), inverse, zero)
            last_arguments = (zero_x, *result_scales, *(limits or self._draw_limits(zero)))
        x = self._draw_bytes(batch, sizes.plane, sizes.channels)
        return self.add_call(
            kernel,
            batch * sizes.channels * sizes.out_plane,
            x,
            *window_bounds,
            *shape,
            *last_arguments,
        )

    def add_quantization(self, batch: int, channels: int, plane: int, way: str = WAYS[0]) -> Call:
        """Add a quantization of reals, for the way ``huge`` with infinities and NaN."""
        (scale,), _, inverse = self._draw_scales(way, 1, 1)
        count = batch * channels * plane
        values = self.random.normal(0, 1, count) * scale
        if way == "ties":
            values = self.random.integers(-400, 400, count)
        elif way == "huge":
            values[::5], values[1::5], values[2::5] = np.inf, -np.inf, np.nan
        numbers = (batch, channels, plane, inverse, self._draw_zero())
        return self.add_call("pm_q8_quantize", count, self._add_reals(values), *numbers)

    def add_lookup(self, batch: int, channels: int, plane: int) -> Call:
        """Add a conversion of byte images by a lookup table for each channel."""
        values = self.random.integers(0, 256, batch * channels * plane, np.uint8)
        tables = self._add_constant(
            DataType.INT8, self.random.integers(-128, 128, (channels, 256), "i1")
        )
        steps = (channels * plane, plane, 1, 256)
        x = self._add_constant(DataType.UINT8, values)
        return self.add_call("pm_q8_lookup", values.size, x, tables, batch, channels, plane, *steps)

    def add_dequantization(self, batch: int, channels: int, plane: int) -> Call:
        """Add a conversion of int8 to real numbers."""
        count = batch * channels * plane
        scale = float(np.float32(self.random.uniform()))
        numbers = (batch, channels, plane, channels, scale, self._draw_zero())
        return self.add_call("pm_q8_dequantize", count, self._draw_bytes(count), *numbers)

    # -- steps -------------------------------------------------------------------------------------

    def build_step(self, *, returns_all: bool = True) -> LoweredStep:
        """Return a step that executes all calls and returns their results as reals.

        Without `returns_all`, only the last result is returned. The step has an input without a
        reader, and its state is one of the constants.
        """
        nodes: list[Node] = []
        calls: list[Sequence[Call]] = []
        buffers = {"x": Buffer(elements=1, type=DataType.REAL), **self.buffers}
        outputs: list[NamedTensor] = []
        for k, call in enumerate(self.calls):
            (result, *_) = call.arguments
            if not isinstance(result, Ref):
                raise TypeError(result)
            buffer, result_name = buffers[result.buffer], result.buffer
            forward: dict[str, Any] = {"op": call.kernel, "phase": Phase.FORWARD}
            tensor = Tensor(name=result_name, bytes=buffer.bytes)
            nodes.append(Node(name=f"layer_{k}", outputs=(tensor,), **forward))
            calls.append((call,))
            if not returns_all and k + 1 < len(self.calls):
                continue
            if buffer.type is not DataType.REAL:
                result_name = f"real_{k}"
                buffers[result_name] = Buffer(elements=buffer.elements, type=DataType.REAL)
                tensor = Tensor(name=result_name, bytes=buffers[result_name].bytes)
                inputs = (result.buffer,)
                nodes.append(
                    Node(name=f"as_{result_name}", inputs=inputs, outputs=(tensor,), **forward)
                )
                conversion = f"pm_{buffer.type.word}_to_real"
                arguments: tuple[Argument, ...] = ((1, buffer.elements, 1, 1),)
                if buffer.type is DataType.INT8:
                    conversion = "pm_q8_dequantize"
                    arguments = (1, buffer.elements, 1, buffer.elements, 1.0, 0)
                calls.append((Call(conversion, (Ref(result_name), result, *arguments)),))
            pieces = (Ref(result_name),)
            shape = (buffer.elements,)
            outputs.append(
                NamedTensor(name=result_name, shape=shape, type=DataType.REAL, pieces=pieces)
            )
        first, values = next(iter(self.values.items()))
        state_type = self.buffers[first].type
        state = NamedTensor(name="kept", shape=values.shape, type=state_type, pieces=(Ref(first),))
        step = LoweredStep(
            graph=Graph(name="quantized", nodes=tuple(nodes)),
            calls=tuple(map(tuple, calls)),
            buffers=buffers,
            inputs=(NamedTensor(name="x", shape=(1,), type=DataType.REAL, pieces=(Ref("x"),)),),
            states=(state,),
            gradients=tuple(outputs),
            loss=outputs[0].pieces[0],
            values=self.values,
        )
        return step.edit({})
