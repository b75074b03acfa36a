"""Declarations: one use of an operator, with its arrays, work, weights and gradients."""

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
"""Element sizes of activations, parameters and their gradients, by type [B]."""

FLOAT_BYTES: Final = 4
"""Element size of statistics, the loss and optimizer moments, always single precision [B]."""

INDEX_BYTES: Final = 4
"""Size of a label, a token id, or a position in a pooling window of more than 256 elements [B]."""

MASK_BYTES: Final = 1
"""Element size of a dropout mask that is not packed [B]."""

_MAX_COUNT: Final = 10**6
"""Maximum of sizes and counts that users set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """An array with a name, a shape and an element size."""

    name: str
    """Name of the tensor; views and uses of a weight share it."""
    shape: tuple[int, ...]
    """Size of each dimension."""
    item_bytes: int
    """Size of an element [B]."""

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
    """A parameter tensor, or a statistic that outlives the step; equal names share one weight.

    State tensors in graphs with state; else parameters are resident bytes.
    """

    trainable: bool = True
    """Whether the weight is a parameter; False for a running statistic."""

    def split_into_tiles(self, max_bytes: int) -> tuple[Weight, ...]:
        """Return tiles ``.0``, ``.1`` … of at most `max_bytes` [B]: whole output channels.

        One channel may exceed `max_bytes`. A weight that fits is returned alone, unchanged.
        """
        channels = self.shape[0]
        if self.bytes <= max_bytes or channels == 1:
            return (self,)
        channels_per_tile = max(1, max_bytes // (self.bytes // channels))
        return tuple(
            replace(
                self,
                name=f"{self.name}.{number}",
                shape=(min(channels_per_tile, channels - first_channel), *self.shape[1:]),
            )
            for number, first_channel in enumerate(range(0, channels, channels_per_tile))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Value(Array):
    """A tensor of the graph with a shape, images in NCHW; a view has the name of its tensor."""

    def view(self, *shape: int) -> Value:
        """Return a view with another shape: the same tensor, without a node or a copy."""
        if prod(shape) != self.size:
            raise InputError(
                f"{self.name}: a view of shape {self.shape} cannot have the shape {shape}"
            )
        return replace(self, shape=shape)

    def flatten(self) -> Value:
        """Return a view with one row per sample."""
        return self.view(self.shape[0], prod(self.shape[1:]))

    def new_value(self, name: str, *shape: int, item_bytes: int | None = None) -> Value:
        """Return a new tensor with a name and shape, by default with this tensor's `item_bytes`."""
        return Value(name=name, shape=shape, item_bytes=item_bytes or self.item_bytes)


def require_rate(rate: object) -> None:
    """Raise `GraphError`, an `InputError`, unless a rate of dropout is a number in [0, 1)."""
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise GraphError(f"dropout: expected a number from 0 to below 1, got {rate!r}")


def require_counts(**counts: object) -> None:
    """Raise `GraphError` unless all arguments are integers from 1 to a million; list all others."""
    faults = [
        f"{name}: expected a whole number from 1 to {_MAX_COUNT}, got {count!r}"
        for name, count in counts.items()
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MAX_COUNT
    ]
    if faults:
        raise GraphError(faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """One part of an operator's backward pass: the gradient of one input or weight.

    It also reads the gradient of the operator's result, which is not listed.
    """

    suffix: str
    """``input``, ``weight``, ``left``, ...: end of the name of a node that computes only this part,
    without `TapeOptions.fused_backward`.

    For a tile, it ends in the tile's number: ``weight.2``. `Node.op` ends in `kind`."""
    target: Value | Weight | None
    """Input or weight that has this gradient; None for all weights of the operator together."""
    saved: tuple[Value, ...] = ()
    """Tensors of the forward pass that this part reads."""
    reads: tuple[Weight, ...] = ()
    """Weights that this part reads."""
    flops: int = 0
    """Work [FLOP]."""
    shared_flops: tuple[tuple[str, int], ...] = ()
    """FLOP saved if one node also computes another part, as pairs (`kind` of that part, FLOP)."""
    workspace_bytes: int = 0
    """Memory needed only during its execution [B]."""
    accumulation_bytes_moved: int | None = None
    """Traffic of adding the gradient to its buffer [B]; None if the gradient is written once.

    For all weights together, the sum of `weight_bytes_moved`."""
    in_place: bool = False
    """Whether this part may overwrite the first tensor that it reads.

    That is the incoming gradient; for a loss, the first saved tensor."""

    @property
    def kind(self) -> str:
        """`suffix` without the number of a tile."""
        return self.suffix.partition(".")[0]

    @property
    def weight_bytes_moved(self) -> int:
        """Traffic to weights and to the buffer of their gradients [B]."""
        written_bytes = self.target.bytes if isinstance(self.target, Weight) else 0
        if self.accumulation_bytes_moved is not None:
            written_bytes = self.accumulation_bytes_moved
        return written_bytes + sum(weight.bytes for weight in self.reads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One use of an operator: its forward node and its backward nodes."""

    name: str
    """Name of the forward node."""
    op: str
    """Operator of the forward node; prefix of the operators of the backward nodes."""
    outputs: tuple[Value, ...]
    """Result first; only the result has a gradient. The backward pass reads the other outputs."""
    inputs: tuple[Value, ...] = ()
    """Values that the forward node reads."""
    weights: tuple[Weight, ...] = ()
    """Parameters and statistics that the forward node reads."""
    macs: int = 0
    """Multiply-accumulates of a convolution or matrix product; 2 FLOP each."""
    other_flops: int = 0
    """Work in addition to `macs` [FLOP]."""
    workspace_bytes: int = 0
    """Memory needed only during the forward node [B]."""
    weight_bytes_moved: int | None = None
    """Traffic of the forward node to its weights [B]; None if each is read once."""
    parts: tuple[Gradient, ...] = ()
    """The parts of the backward pass, one for each input, and each weight or tile, that has a
    gradient, except inputs in `same_gradient_inputs`. Graphs without state use `gradients`."""
    is_one_kernel: bool = False
    """Whether the operator is a norm: with state in the graph, one node computes all parts, because
    they need the same sums."""
    same_gradient_inputs: tuple[Value, ...] = ()
    """Inputs whose gradient equals that of the result: no node, no copy."""
    in_place: Value | None = None
    """The output that may overwrite the first input; None if no output may."""
    running_statistics: tuple[Weight, ...] = ()
    """Running statistics, updated from the batch statistics (all outputs except the result).

    Empty for operators without them."""
    untrained_variant: Declaration | None = None
    """Declaration that replaces this one if the graph contains state and the first weight is not
    trained; None for operators that stay the same."""
    phase: Phase = Phase.FORWARD
    """Phase of the forward node: forward pass or loss."""
    recomputable: bool = True
    """Whether executing the forward node again gives the same values."""

    @property
    def flops(self) -> int:
        """Work of the forward node [FLOP]."""
        return 2 * self.macs + self.other_flops

    @property
    def gradients(self) -> tuple[Gradient, ...]:
        """Parts of the backward pass for graphs without state: one part for all weights together.

        It precedes those of the inputs, so that an input that only it reads can be freed early.
        """
        weight_parts = [part for part in self.parts if isinstance(part.target, Weight)]
        value_parts = [part for part in self.parts if not isinstance(part.target, Weight)]
        if not weight_parts:
            return tuple(value_parts)
        weights_part = Gradient(
            suffix="weight",
            target=None,
            saved=tuple(dict.fromkeys(value for part in weight_parts for value in part.saved)),
            flops=sum(part.flops for part in weight_parts),
            workspace_bytes=max(part.workspace_bytes for part in weight_parts),
            accumulation_bytes_moved=sum(part.weight_bytes_moved for part in weight_parts),
        )
        weight_suffixes = {part.suffix for part in weight_parts}
        shared_flops = [
            (
                (
                    "weight",
                    sum(flops for name, flops in part.shared_flops if name in weight_suffixes),
                ),
            )
            for part in value_parts
        ]
        return (
            weights_part,
            *(
                replace(part, shared_flops=pairs)
                for part, pairs in zip(value_parts, shared_flops, strict=True)
            ),
        )


def window_output_size(
    name: str,
    image: Value,
    *,
    kernel: int | tuple[int, int],
    stride: int,
    padding: int | Literal["same"],
) -> tuple[int, int]:
    """Return height and width of the output of a window that slides over an image.

    Padding ``"same"``: the size divided by `stride`, rounded up, as in Keras. Other padding is
    added on all sides, and only whole windows count; without one, `InputError` is raised.
    """
    height, width = image.shape[2:]
    if padding == "same":
        return -(-height // stride), -(-width // stride)
    window_sides = (kernel, kernel) if isinstance(kernel, int) else kernel
    last_row, last_column = (
        side + 2 * padding - window
        for side, window in zip((height, width), window_sides, strict=True)
    )
    if min(last_row, last_column) < 0:
        size, window = ("x".join(map(str, shape)) for shape in (image.shape[2:], window_sides))
        raise InputError(
            f"{name}: a window of {window} does not fit its input of {size} with padding "
            f"{padding}; choose a larger image_size"
        )
    return last_row // stride + 1, last_column // stride + 1
