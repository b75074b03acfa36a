"""Which ATen operator becomes which kernel calls; one small function for each lowers it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from poetmodel.export.step import Argument, Call, DataType, LearningRate, Ref
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.graph_signature import in_module

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import fx

    Lower = Callable[["Lowering"], None]

_TYPES: Final = {
    torch.float32: DataType.REAL,
    torch.int64: DataType.INT32,
    torch.int32: DataType.INT32,
    torch.bool: DataType.UINT8,
    torch.uint8: DataType.UINT8,
}

_LOWERED: Final[dict[Any, Lower]] = {}
"""What lowers each operator."""


def lowers(*operators: Any) -> Callable[[Lower], Lower]:
    """Register a function as what lowers some operators."""

    def register(function: Lower) -> Lower:
        _LOWERED.update(dict.fromkeys(operators, function))
        return function

    return register


def lowering_of(target: Any) -> Lower | None:
    """Return what lowers an operator, or an operation that PyTorch has none for."""
    return _LOWERED.get(target) or _LOWERED.get(type(target))


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """A tensor, or a view of one: which elements of a buffer it has, and in which order."""

    buffer: str
    offset: int
    """The first element."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Steps of the dimensions [elements]."""
    type: DataType

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def ref(self) -> Ref:
        """The pointer to its first element."""
        return Ref(self.buffer, self.offset)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after the other, the last dimension first."""
        return self.strides == contiguous_strides(self.shape) or all(
            size == 1 or own == step
            for size, own, step in zip(
                self.shape, self.strides, contiguous_strides(self.shape), strict=True
            )
        )

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill one piece of memory, in whatever order of dimensions."""
        return sum(
            (size - 1) * step for size, step in zip(self.shape, self.strides, strict=True)
        ) == self.elements - 1 and 0 not in (
            step for size, step in zip(self.shape, self.strides, strict=True) if size > 1
        )

    def lies_like(self, other: Look) -> bool:
        """Return whether two looks have their elements in the same order of memory."""
        return self.shape == other.shape and all(
            size == 1 or mine == theirs
            for size, mine, theirs in zip(self.shape, self.strides, other.strides, strict=True)
        )

    def broadcast(self, shape: tuple[int, ...]) -> Look:
        """Return the look of a larger shape, with steps of 0 where it repeats."""
        extra = len(shape) - len(self.shape)
        own = zip(shape[extra:], self.shape, self.strides, strict=True)
        strides = (*[0] * extra, *(0 if have != want else step for want, have, step in own))
        return Look(
            buffer=self.buffer, offset=self.offset, shape=shape, strides=strides, type=self.type
        )


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the steps of dimensions that lie in order [elements]."""
    steps = [1]
    for size in reversed(shape[1:]):
        steps.append(steps[-1] * max(size, 1))
    return tuple(reversed(steps))[: len(shape)] if shape else ()


def data_type(dtype: torch.dtype) -> DataType | None:
    """Return the type of exported elements; None for a type that is not supported."""
    return _TYPES.get(dtype)


class Lowering:
    """One operation that is being lowered: its operands, and the calls made so far."""

    def __init__(
        self,
        node: fx.Node,
        look: Callable[[fx.Node], Look],
        outputs: Mapping[int, Look],
        *,
        rates: Mapping[fx.Node, float] | None = None,
    ) -> None:
        self.node = node
        self.args: tuple[Any, ...] = _with_defaults(node)
        """The arguments in the order of the schema, defaults filled in."""
        self.calls: list[Call] = []
        self.workspace_bytes = 0
        self.elementwise = False
        """Whether each element of the output is computed from those at its place, so that it may
        take over the memory of an operand that lies alike."""
        self._look = look
        self._outputs = outputs
        self._rates = rates or {}

    def value(self, argument: Any) -> Look:
        """Return the look of an operand."""
        return self._look(argument)

    def learning_rate(self, argument: Any) -> LearningRate:
        """Return the learning rate that an update is given, as a multiple of the first group's."""
        return LearningRate(self._rates.get(argument, 1.0))

    def output(self, position: int = 0) -> Look:
        """Return the look of an output; a single tensor is the output 0."""
        return self._outputs[position]

    def has_output(self, position: int) -> bool:
        """Return whether the operation makes such an output, and with elements."""
        return position in self._outputs

    def call(self, kernel: str, *arguments: Argument | Look) -> None:
        """Add a call; a look stands for the pointer to its first element."""
        found = tuple(a.ref if isinstance(a, Look) else a for a in arguments)
        self.calls.append(Call(kernel, found))

    def refuse(self, reason: str) -> NoReturn:
        """Raise `CaptureError` with operator, module and reason."""
        raise CaptureError(f"{self.node.target}{in_module(self.node)}: {reason}")


def _with_defaults(node: fx.Node) -> tuple[Any, ...]:
    schema = getattr(node.target, "_schema", None)
    found: list[Any] = list(node.args)
    if schema is None:
        return tuple(found)
    for argument in schema.arguments[len(found) :]:
        value = argument.default_value if argument.has_default_value() else None
        found.append(node.kwargs.get(argument.name, value))
    return tuple(found)
