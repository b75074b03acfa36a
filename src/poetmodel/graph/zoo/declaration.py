"""What an operator states about one use of it, and the shapes and sizes that it computes with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Final

from poetmodel.errors import GraphError, InputError
from poetmodel.graph.structure import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

ITEM_BYTES: Final[Mapping[str, int]] = {"float32": 4, "float16": 2, "int8": 1}
"""Element types of activations, parameters and their gradients, and their sizes [B]."""

FLOAT_BYTES: Final = 4
"""An element of what stays in single precision: statistics, the loss, optimizer moments [B]."""

INDEX_BYTES: Final = 4
"""A label or a token id [B]."""

MASK_BYTES: Final = 1
"""An element of a dropout mask [B]."""

_LARGEST_COUNT: Final = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """A name, a shape and an element type."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size [B]."""
        return self.size * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight(Array):
    """A trainable parameter tensor: resident, so no tensor of the graph.

    Two operators that name the same one share it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Value(Array):
    """A tensor of the graph, seen with one shape: batch first, channels before height and width.

    A view has the name of the tensor that it views.
    """

    differentiable: bool = True
    """Whether a gradient is wanted: true of everything computed with weights, not of samples."""

    def view(self, *shape: int) -> Value:
        """Return the same tensor with another shape; no node, no copy, and so for its gradient."""
        if prod(shape) != self.size:
            raise InputError(
                f"{self.name}: a view of shape {self.shape} cannot have the shape {shape}"
            )
        return replace(self, shape=shape)

    def flatten(self) -> Value:
        """Return the view with one row per sample."""
        return self.view(self.shape[0], prod(self.shape[1:]))

    def made(self, name: str, *shape: int, item_bytes: int | None = None) -> Value:
        """Return a new tensor, of this one's element type unless another size is given."""
        return Value(name=name, shape=shape, item_bytes=item_bytes or self.item_bytes)


def require_counts(**counts: object) -> None:
    """Raise with every option of a model that is no whole number from 1 to a million."""
    faults = [
        f"{name}: expected a whole number from 1 to {_LARGEST_COUNT}, got {count!r}"
        for name, count in counts.items()
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _LARGEST_COUNT
    ]
    if faults:
        raise GraphError(faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """One part of an operator's backward: the gradient of one input, or of its weights.

    Every part reads the gradient of the operator's result; that is not stated.
    """

    part: str
    """``input``, ``weight``, ``left``, ...: ends the names of the node and of its operation."""
    of: Value | None
    """The input that it is the gradient of; None for all weights of the operator together."""
    saved: tuple[Value, ...] = ()
    """Tensors of the forward pass that it reads."""
    flops: int = 0
    """Work [FLOP]."""
    workspace_bytes: int = 0
    """Memory only while it runs [B]."""
    weight_bytes_moved: int = 0
    """Traffic to the resident weights and to the buffer of their gradients [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One use of an operator: its forward node and its backward nodes."""

    name: str
    """Of the forward node."""
    op: str
    """Of the forward node; those of the backward nodes begin with it."""
    outputs: tuple[Value, ...]
    """The result first; only that has a gradient, the others are kept for the backward pass."""
    inputs: tuple[Value, ...] = ()
    weights: tuple[Weight, ...] = ()
    macs: int = 0
    """Multiply-accumulates of a convolution or matrix product; 2 FLOP each."""
    other_flops: int = 0
    """Work beside `macs` [FLOP]."""
    workspace_bytes: int = 0
    """Memory only while the forward node runs [B]."""
    weight_bytes_moved: int | None = None
    """Traffic of the forward node to its weights [B]; None: each is read once."""
    gradients: tuple[Gradient, ...] = ()
    """The parts of the backward in the order in which they are best computed."""
    passes: tuple[Value, ...] = ()
    """Inputs whose gradient is that of the result, unchanged: no node, no copy."""
    shared_flops: int = 0
    """What the parts of the backward do twice when they are separate nodes [FLOP]."""
    phase: Phase = Phase.FORWARD
    recomputable: bool = True
    """Whether the forward node gives the same again."""

    @property
    def flops(self) -> int:
        """Work of the forward node [FLOP]."""
        return 2 * self.macs + self.other_flops


def window_grid(
    name: str, image: Value, *, kernel: int, stride: int, padding: int
) -> tuple[int, int]:
    """Return height and width of what a window gives that slides over an image."""
    height, width = (side + 2 * padding - kernel for side in image.shape[2:])
    if min(height, width) < 0:
        size = "x".join(str(side) for side in image.shape[2:])
        raise InputError(
            f"{name}: a window of {kernel}x{kernel} does not fit its input of {size} with padding "
            f"{padding}; choose a larger image_size"
        )
    return height // stride + 1, width // stride + 1
