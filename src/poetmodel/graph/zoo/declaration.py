"""Statements of an operator about one use of it, and the shapes and sizes that it computes with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Final

from poetmodel.errors import GraphError, InputError
from poetmodel.graph.node import Phase

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Literal

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
    """A parameter tensor, or a statistic that outlives the step.

    Two operators that name the same one share it. Without state in the graph it is resident and no
    tensor; otherwise it is a state tensor.
    """

    trainable: bool = True
    """Whether it is a parameter; a running statistic is none."""

    def tiles(self, largest: int) -> tuple[Weight, ...]:
        """Return it in tiles of whole output channels, the first dimension, none over `largest` B.

        A channel that is larger is a tile of its own.
        """
        channels = self.shape[0]
        if self.bytes <= largest or channels == 1:
            return (self,)
        channels_per_tile = max(1, largest // (self.bytes // channels))
        return tuple(
            replace(
                self,
                name=f"{self.name}.{number}",
                shape=(min(channels_per_tile, channels - first), *self.shape[1:]),
            )
            for number, first in enumerate(range(0, channels, channels_per_tile))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Value(Array):
    """A tensor of the graph, seen with one shape: batch first, channels before height and width.

    A view has the name of the tensor that it views.
    """

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
    """One part of an operator's backward: the gradient of one input, or of a weight.

    Every part reads the gradient of the operator's result; that is not stated.
    """

    part: str
    """``input``, ``weight``, ``left``, ...: ends the names of the node and of its operation.

    That of a tile ends in the tile's number, ``weight.2``.
    """
    of: Value | Weight | None
    """Weight that it is the gradient of; None for all weights of the operator together."""
    saved: tuple[Value, ...] = ()
    """Tensors of the forward pass that it reads."""
    reads: tuple[Weight, ...] = ()
    """Weights that it reads."""
    flops: int = 0
    """Work [FLOP]."""
    spared: tuple[tuple[str, int], ...] = ()
    """FLOP saved in one node with another part, by the name of that [FLOP]."""
    workspace_bytes: int = 0
    """Memory only while it runs [B]."""
    added_bytes_moved: int | None = None
    """Traffic of adding the gradient to its buffer [B]; None: it is written once."""
    in_place: bool = False
    """Whether it may take over the memory of what it reads first.

    That is the arriving gradient, and of a loss the first tensor saved.
    """

    @property
    def kind(self) -> str:
        """The part without the number of a tile."""
        return self.part.partition(".")[0]

    @property
    def weight_bytes_moved(self) -> int:
        """Traffic to the weights and to the buffer of their gradients [B]."""
        written = self.of.bytes if isinstance(self.of, Weight) else 0
        if self.added_bytes_moved is not None:
            written = self.added_bytes_moved
        return written + sum(weight.bytes for weight in self.reads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One use of an operator: its forward node and its backward nodes."""

    name: str
    """Name of the forward node."""
    op: str
    """Name of the forward node; those of the backward nodes begin with it."""
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
    parts: tuple[Gradient, ...] = ()
    """The parts of the backward, one for each input and weight that has a gradient."""
    joint: bool = False
    """Whether the parts need each other's sums, so that one kernel makes them all."""
    passes: tuple[Value, ...] = ()
    """Inputs whose gradient is that of the result, unchanged: no node, no copy."""
    in_place: Value | None = None
    """The output that may take over the memory of the first input."""
    running: tuple[Weight, ...] = ()
    """Running statistics that the statistics of the batch, all outputs but the result, renew."""
    evaluated: Declaration | None = None
    """Replacement if its first weight is not trained."""
    phase: Phase = Phase.FORWARD
    recomputable: bool = True
    """Whether the forward node gives the same again."""

    @property
    def flops(self) -> int:
        """Work of the forward node [FLOP]."""
        return 2 * self.macs + self.other_flops

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """The parts of the backward with those of all weights as one, in the best order.

        The weights come first, after which the input may go.
        """
        of_weights = [part for part in self.parts if isinstance(part.of, Weight)]
        of_values = [part for part in self.parts if not isinstance(part.of, Weight)]
        if not of_weights:
            return tuple(of_values)
        together = Gradient(
            part="weight",
            of=None,
            saved=tuple(dict.fromkeys(value for part in of_weights for value in part.saved)),
            flops=sum(part.flops for part in of_weights),
            workspace_bytes=max(part.workspace_bytes for part in of_weights),
            added_bytes_moved=sum(part.weight_bytes_moved for part in of_weights),
        )
        names = {part.part for part in of_weights}
        spared = [
            (("weight", sum(flops for name, flops in part.spared if name in names)),)
            for part in of_values
        ]
        return (
            together,
            *(replace(part, spared=less) for part, less in zip(of_values, spared, strict=True)),
        )


def window_grid(
    name: str,
    image: Value,
    *,
    kernel: int | tuple[int, int],
    stride: int,
    padding: int | Literal["same"],
) -> tuple[int, int]:
    """Return height and width of what a window gives that slides over an image.

    Padding ``"same"`` is as much as leaves one position for every `stride` pixels, as in Keras.
    """
    height, width = image.shape[2:]
    if padding == "same":
        return -(-height // stride), -(-width // stride)
    sides = (kernel, kernel) if isinstance(kernel, int) else kernel
    height, width = (
        side + 2 * padding - window for side, window in zip((height, width), sides, strict=True)
    )
    if min(height, width) < 0:
        size, window = ("x".join(map(str, shape)) for shape in (image.shape[2:], sides))
        raise InputError(
            f"{name}: a window of {window} does not fit its input of {size} with padding "
            f"{padding}; choose a larger image_size"
        )
    return height // stride + 1, width // stride + 1
