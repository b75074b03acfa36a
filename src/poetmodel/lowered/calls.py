"""Calls of kernels: their arguments, and the buffers and tensors that they name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

WORKSPACE: Final = "@workspace"
"""The buffer that stands for the workspace of the node that names it."""


class DataType(StrEnum):
    """The types of elements in exported code."""

    REAL = "real"
    """``pm_real``: float, or double in the build that checks."""
    INT32 = "int32"
    UINT8 = "uint8"
    """Truth values, and bytes."""
    INT8 = "int8"
    """What is quantized: see ``pm_q8.h``."""

    @property
    def itemsize(self) -> int:
        """Size of an element in the build for the device [B]."""
        return int(self.stored[-1])

    @property
    def stored(self) -> str:
        """How NumPy names it in files: little-endian, in the size of the build for the device."""
        return {
            DataType.REAL: "<f4",
            DataType.INT32: "<i4",
            DataType.UINT8: "u1",
            DataType.INT8: "i1",
        }[self]

    @property
    def c_name(self) -> str:
        """How C names it."""
        return {
            DataType.REAL: "pm_real",
            DataType.INT32: "int32_t",
            DataType.UINT8: "uint8_t",
            DataType.INT8: "int8_t",
        }[self]


@dataclass(frozen=True, slots=True)
class Ref:
    """A pointer into a buffer."""

    buffer: str
    offset: int = 0
    """Which element it points to."""


@dataclass(frozen=True, slots=True)
class ScaledLearningRate:
    """The learning rate that the step is called with, times a number."""

    factor: float = 1.0


Argument: TypeAlias = Ref | ScaledLearningRate | int | float | tuple[int, ...]
"""What a kernel takes: a pointer, a number, or a list of sizes or strides."""


class ConvolutionSizes(NamedTuple):
    """The list of sizes that kernels of convolutions take: ``shape`` of ``pm_conv.h``."""

    channels: int
    """Of the input."""
    height: int
    width: int
    results: int
    """Channels of the output."""
    out_height: int
    out_width: int
    window_height: int
    window_width: int
    stride_down: int
    stride_across: int
    padding_down: int
    padding_across: int
    dilation_down: int
    dilation_across: int
    groups: int
    filter: int = 0
    """Elements of the weights from one output channel to the next; 0 where there are no others."""

    @property
    def group_channels(self) -> int:
        """Input channels of a group."""
        return self.channels // self.groups

    @property
    def group_results(self) -> int:
        """Output channels of a group."""
        return self.results // self.groups

    @property
    def plane(self) -> int:
        """Elements of a channel of the input."""
        return self.height * self.width

    @property
    def out_plane(self) -> int:
        """Elements of a channel of the output."""
        return self.out_height * self.out_width

    @property
    def window(self) -> int:
        """Elements of a window."""
        return self.window_height * self.window_width

    @property
    def directions(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Size, places, window, stride, padding and dilation: down, and across."""
        spatial = self[1:3] + self[4:14]
        return spatial[::2], spatial[1::2]


@dataclass(frozen=True, slots=True)
class Condition:
    """That an integer is a number."""

    counter: Ref
    value: int


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a kernel."""

    kernel: str
    """The name of a function, and of the file in ``c/kernels`` that has it."""
    arguments: tuple[Argument, ...]
    where: Condition | None = None
    """When it is made; None where it always is."""
    within: tuple[int, int] | None = None
    """From where on, and below what, the indices must be that it goes by; None where it has none,
    or where they always are."""

    @property
    def buffers(self) -> tuple[str, ...]:
        """The buffers that it names, each once."""
        named = [a.buffer for a in self.arguments if isinstance(a, Ref)]
        return tuple(dict.fromkeys([*named, *([self.where.counter.buffer] if self.where else [])]))

    def renamed(self, names: Mapping[str, str]) -> Call:
        """Return the call with pointers to other buffers, which have these names."""
        arguments = (
            Ref(names.get(a.buffer, a.buffer), a.offset) if isinstance(a, Ref) else a
            for a in self.arguments
        )
        return replace(self, arguments=tuple(arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Elements of one type that lie one after the other."""

    elements: int
    type: DataType

    @property
    def bytes(self) -> int:
        """Size in the build for the device [B]."""
        return self.elements * self.type.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A tensor that users see by name: an input, a state tensor, a gradient."""

    name: str
    shape: tuple[int, ...]
    type: DataType
    pieces: tuple[Ref, ...]
    """Where it is, in the order of its elements: one buffer, or one for each tile."""
    strides: tuple[int, ...] | None = None
    """Steps of its dimensions in its only piece [elements]; None where it lies in order."""

    @property
    def elements(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)
