"""Nodes of a training graph and the tensors that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from poetmodel.errors import quote
from poetmodel.units import brief, format_bytes


class Phase(StrEnum):
    """Phase of the training step that a node belongs to."""

    INPUT = "input"
    """Provides a sample or a label."""
    FORWARD = "forward"
    """Forward pass."""
    LOSS = "loss"
    """Computes the loss."""
    BACKWARD = "backward"
    """Backward pass: computes gradients of inputs or weights."""
    UPDATE = "update"
    """Updates parameters, optimizer state or buffers, such as running statistics."""
    STATE = "state"
    """Holds a state tensor, whose value outlives the step; has no computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One output of a node."""

    name: str
    """Unique among all tensors of the graph."""
    bytes: int
    """Size [B], 0 to 2^53."""
    replaces: str | None = None
    """Name of the state tensor that this output replaces, in the same memory; None for other
    outputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One execution of an operator; `Graph` validates its fields."""

    name: str
    """Unique among all nodes of the graph."""
    op: str
    """The operator, such as ``conv2d``."""
    phase: str
    """A member of `Phase`."""
    inputs: tuple[str, ...] = ()
    """Names of the tensors that the node reads; a repeated name counts once."""
    outputs: tuple[Tensor, ...] = ()
    """The tensors that the node makes; may be empty."""
    workspace_bytes: int = 0
    """Memory that the operator needs only during its execution [B]."""
    flops: int = 0
    """Floating-point operations of one execution (1 multiply-accumulate = 2 FLOP)."""
    recomputable: bool = True
    """Whether a schedule may compute the node more than once."""
    on_aux: bool = False
    """Whether the node's tensors are on auxiliary storage when the training step begins (a sample
    on the SD card)."""
    bytes_moved: int | None = None
    """Memory traffic of one execution [B]; None means the bytes of its inputs and outputs."""
    instructions: int | None = None
    """Estimated instructions of one execution of exported C on a Cortex-M with an FPU; None for
    other kernels. Excluded from `Graph.sha256`."""
    in_place: tuple[tuple[str, str], ...] = ()
    """Pairs (output, input) in which the output may overwrite the input; a mapping is also
    accepted."""

    def __post_init__(self) -> None:
        """Sort in-place pairs of a tuple or mapping; make state nodes not recomputable."""
        pairs: object = self.in_place
        if isinstance(pairs, Mapping):
            pairs = tuple(pairs.items())
        # Other values stay unchanged, so that validation reports them.
        if isinstance(pairs, tuple) and all(map(is_pair_of_names, pairs)):
            object.__setattr__(self, "in_place", tuple(sorted(pairs)))
        if self.is_state and self.recomputable is True:
            object.__setattr__(self, "recomputable", False)

    @property
    def is_state(self) -> bool:
        """Whether the node holds a state tensor, without a computation."""
        return self.phase == Phase.STATE

    @property
    def needs_version_2(self) -> bool:
        """Whether a graph file with this node needs format version 2.

        It does if the node holds state, makes a replacement of state, or has in-place pairs.
        """
        return (
            self.is_state
            or self.in_place != ()
            or any(tensor.replaces is not None for tensor in self.outputs)
        )

    @property
    def has_one_size(self) -> bool:
        """Whether ``output_bytes`` in a graph file describes the outputs completely."""
        return (
            len(self.outputs) == 1
            and self.outputs[0].name == self.name
            and self.outputs[0].replaces is None
        )

    def __repr__(self) -> str:
        counts = f"reads {len(self.inputs)}, makes {format_bytes(self.output_bytes)}"
        return brief(self, quote(self.name), f"{self.op}, {self.phase}, {counts}")

    @property
    def output_bytes(self) -> int:
        """Size of all outputs together [B]."""
        return sum(tensor.bytes for tensor in self.outputs)


def is_pair_of_names(pair: object) -> bool:
    """Return whether a value is a pair of strings."""
    match pair:
        case (str(), str()):
            return isinstance(pair, tuple)
    return False


def operation(
    name: str,
    *,
    output_bytes: int,
    op: str = "op",
    phase: str = "forward",
    inputs: tuple[str, ...] | list[str] = (),
    **attributes: Any,
) -> Node:
    """Return a new `Node` with one output tensor of the node's own name.

    Parameters
    ----------
    name : str
        Name of the node and of its tensor.
    output_bytes : int
        Size of the tensor [B].
    op, phase, inputs, **attributes
        As the fields of `Node`.
    """
    outputs = (Tensor(name=name, bytes=output_bytes),)
    return Node(name=name, op=op, phase=phase, inputs=tuple(inputs), outputs=outputs, **attributes)
