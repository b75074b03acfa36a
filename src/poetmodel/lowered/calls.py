"""Kernel calls, their arguments, and the buffers and tensors that arguments refer to."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, Self, TypeAlias

from poetmodel.lowered.kernels import find_kernel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WORKSPACE: Final = "@workspace"
"""The buffer name that represents the workspace of the calling node."""


_OBJECT_OF_FILES: Final = {"strict": True, "extra": "forbid"}
"""Settings of pydantic for classes of step files: exact types, and no unknown keys."""


class DataType(StrEnum):
    """Element types of exported code."""

    file_dtype: str
    """NumPy type of elements in files: little-endian, with their size on the device."""
    c_name: str
    """Name of the type in C."""
    word: str
    """Name of the type in the names of kernels that convert it."""
    suffix: str
    """Suffix of the names of kernels that exist for each type."""
    macro: str
    """Name of the type in macros of exported code, such as ``PM_CONSTANT_REALS``."""
    text: str
    """Elements of the type in messages."""

    @property
    def itemsize(self) -> int:
        """Size of an element on the device [B]."""
        return int(self.file_dtype[-1])

    @property
    def copy_kernel(self) -> str:
        """Name of the kernel that copies elements."""
        return f"pm_copy{self.suffix}"

    @property
    def numpy_name(self) -> str:
        """Name of the type in NumPy."""
        return "float32" if self is DataType.REAL else str(self)

    def __new__(cls, value: str, *facts: str) -> Self:
        """Make a member with its facts, in the order of their declaration."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.file_dtype, member.c_name, member.word, *others = facts
        member.suffix, member.macro, member.text = others
        return member

    REAL = "real", "<f4", "pm_real", "real", "", "REALS", "real numbers"
    """``pm_real``: float on the device, double in builds that check results."""
    INT32 = "int32", "<i4", "int32_t", "int", "_int", "INTS", "integers"
    UINT8 = "uint8", "u1", "uint8_t", "byte", "_byte", "BYTES", "truth values"
    """Truth values and bytes."""
    INT8 = "int8", "i1", "int8_t", "int8", "_int8", "INT8S", "quantized values"
    """Quantized values, as in ``pm_q8.h``."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A pointer to an element of a buffer."""

    __pydantic_config__: ClassVar = _OBJECT_OF_FILES

    buffer: str
    offset: int = 0
    """Index of the element."""


@dataclass(frozen=True, slots=True)
class ScaledLearningRate:
    """The learning rate argument of the step, times a factor."""

    factor: float = 1.0


Argument: TypeAlias = Ref | ScaledLearningRate | int | float | tuple[int, ...]
"""An argument of a kernel: a pointer, a learning rate, a number, or a list of integers.

The number 0 is a null pointer if the parameter is a pointer."""


class ConvolutionSizes(NamedTuple):
    """The list of sizes of a convolution kernel: ``shape`` in ``pm_conv.h``."""

    channels: int
    """Channels of the input."""
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
    """Elements of the weights from one output channel to the next; 0 if the weights have a dense
    layout."""

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
        """Elements of an input channel."""
        return self.height * self.width

    @property
    def out_plane(self) -> int:
        """Elements of an output channel."""
        return self.out_height * self.out_width

    @property
    def window(self) -> int:
        """Elements of a window."""
        return self.window_height * self.window_width

    @property
    def filter_step(self) -> int:
        """Elements of the weights from one output channel to the next, also of a dense layout."""
        return self.filter or self.group_channels * self.window

    @property
    def directions(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Input and output size, window, stride, padding, dilation of each axis, vertical first."""
        spatial = self[1:3] + self[4:14]
        return spatial[::2], spatial[1::2]


def max_pool_window_bounds(
    size: int, output_size: int, window_size: int, stride: int, padding: int, dilation: int
) -> list[tuple[int, int]]:
    """Return begin and end of each output's window along one dimension of an image.

    Begin is the first element in the image, in steps of `dilation`; end is at most `size`. A window
    that contains only padding has no element: its end is not above its begin.
    """
    starts = [k * stride - padding for k in range(output_size)]
    ends = [min(start + (window_size - 1) * dilation + 1, size) for start in starts]
    first_elements = [start + max(0, -(start // dilation)) * dilation for start in starts]
    return list(zip(first_elements, ends, strict=True))


def flatten_windows(windows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the numbers of all windows as one tuple."""
    return tuple(number for window in windows for number in window)


@dataclass(frozen=True, slots=True)
class Condition:
    """The condition that an integer counter equals a value."""

    __pydantic_config__: ClassVar = _OBJECT_OF_FILES

    counter: Ref
    value: int


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a kernel."""

    kernel: str
    """Name of the C function, and of its file in ``c/kernels``."""
    arguments: tuple[Argument, ...]
    condition: Condition | None = None
    """The kernel is called only if this condition is true; None if it is always called."""
    index_range: tuple[int, int] | None = None
    """Lower and exclusive upper limit of the indices in the index tensors that the kernel reads;
    None if it reads no index tensors, or if all indices are always in range."""

    @classmethod
    def by_name(cls, kernel: str, /, **arguments: Any) -> Call:
        """Return a call of a kernel with arguments by the names of its parameters."""
        if arguments.keys() != find_kernel(kernel).index_of.keys():
            raise KeyError(kernel, *arguments)
        return cls(kernel, tuple(arguments[name] for name in find_kernel(kernel).index_of))

    def __getitem__(self, parameter: str) -> Any:
        """Return the argument of a parameter."""
        return self.arguments[find_kernel(self.kernel).index_of[parameter]]

    def __contains__(self, parameter: object) -> bool:
        """Return whether the kernel has a parameter of this name."""
        return parameter in find_kernel(self.kernel).index_of

    @property
    def is_copy(self) -> bool:
        """Whether the call copies the elements of a tensor."""
        return any(self.kernel == kind.copy_kernel for kind in DataType)

    @property
    def named_arguments(self) -> dict[str, Any]:
        """The arguments by the names of the kernel's parameters."""
        return dict(zip(find_kernel(self.kernel).index_of, self.arguments, strict=True))

    def with_arguments(self, **changes: Argument) -> Call:
        """Return the call with other arguments for some parameters."""
        arguments, index_of = list(self.arguments), find_kernel(self.kernel).index_of
        for name, argument in changes.items():
            arguments[index_of[name]] = argument
        return replace(self, arguments=tuple(arguments))

    @property
    def pointers(self) -> dict[str, Ref]:
        """The pointers that are not null, by parameter, in order; of the workspace, too."""
        pairs = self.named_arguments.items()
        return {name: argument for name, argument in pairs if isinstance(argument, Ref)}

    @property
    def refs(self) -> tuple[Ref, ...]:
        """The pointers that are not null, in order; those of the workspace are included."""
        return tuple(argument for argument in self.arguments if isinstance(argument, Ref))

    @property
    def writes(self) -> tuple[Ref, ...]:
        """The pointers of `refs` through which the kernel may write."""
        pairs = zip(self.arguments, find_kernel(self.kernel).parameters, strict=True)
        return tuple(
            argument
            for argument, parameter in pairs
            if isinstance(argument, Ref) and parameter.is_written
        )

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers in arguments and condition, each once; `WORKSPACE` included."""
        counters = () if self.condition is None else (self.condition.counter,)
        return tuple(dict.fromkeys(ref.buffer for ref in (*self.refs, *counters)))

    def with_buffers(self, names: Mapping[str, str]) -> Call:
        """Return the call with buffers renamed, old name to new, but not those in its condition."""
        arguments = (
            Ref(names.get(argument.buffer, argument.buffer), argument.offset)
            if isinstance(argument, Ref)
            else argument
            for argument in self.arguments
        )
        return replace(self, arguments=tuple(arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Contiguous elements of one type."""

    __pydantic_config__: ClassVar = _OBJECT_OF_FILES

    elements: int
    type: DataType

    @property
    def bytes(self) -> int:
        """Size on the device [B]."""
        return self.elements * self.type.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A tensor that users access by name: an input, a state tensor, a gradient, an output."""

    __pydantic_config__: ClassVar = _OBJECT_OF_FILES

    name: str
    shape: tuple[int, ...]
    type: DataType
    pieces: tuple[Ref, ...]
    """Pointers to the elements in order: one for the whole tensor, or one for each tile."""
    strides: tuple[int, ...] | None = None
    """Strides in the only piece [elements]; None for a dense layout."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)
