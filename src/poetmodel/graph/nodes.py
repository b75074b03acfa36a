"""One operator execution of a training graph, and the tensors it makes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from poetmodel.errors import shown
from poetmodel.units import brief, format_bytes


class Phase(StrEnum):
    """The part of a training step that an operation belongs to."""

    INPUT = "input"
    """Reads a sample or a label."""
    FORWARD = "forward"
    """Forward pass."""
    LOSS = "loss"
    """Computes the loss."""
    BACKWARD = "backward"
    """Backward pass: gradients of inputs or weights."""
    UPDATE = "update"
    """Optimizer step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One output of an operation."""

    name: str
    """Unique among all tensors of the graph."""
    bytes: int
    """Size [B], 0 to 2^53."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator execution."""

    name: str
    """Unique among all nodes of the graph."""
    op: str
    """The operator, such as ``conv2d``."""
    phase: str
    """One of `Phase`."""
    inputs: tuple[str, ...] = ()
    """Names of the tensors it reads; a name that comes twice counts once."""
    outputs: tuple[Tensor, ...] = ()
    """The tensors it makes, none, one or several."""
    workspace_bytes: int = 0
    """Memory needed only while it runs [B]."""
    flops: int = 0
    """Floating-point operations (1 MAC = 2 FLOP)."""
    recomputable: bool = True
    """Whether it may be computed more than once."""
    on_aux: bool = False
    """Whether its tensors lie on auxiliary storage from the start (a sample on the SD card)."""
    bytes_moved: int | None = None
    """Memory traffic of one execution [B]; None means the bytes of its inputs and outputs."""

    def __repr__(self) -> str:
        counts = f"reads {len(self.inputs)}, makes {format_bytes(self.output_bytes)}"
        return brief(self, shown(self.name), f"{self.op}, {self.phase}, {counts}")

    @property
    def output_bytes(self) -> int:
        """Bytes of all its outputs together [B]."""
        return sum(tensor.bytes for tensor in self.outputs)


def operation(
    name: str,
    *,
    output_bytes: int,
    op: str = "op",
    phase: str = "forward",
    inputs: tuple[str, ...] | list[str] = (),
    **attributes: Any,
) -> Node:
    """Make a node with one output tensor of the node's own name.

    Parameters
    ----------
    name : str
        Name of the node and of its tensor.
    output_bytes : int
        Size of the tensor [B].
    op, phase, inputs, **attributes
        As the fields of `Node`.

    Returns
    -------
    Node
        The node.
    """
    outputs = (Tensor(name=name, bytes=output_bytes),)
    return Node(name=name, op=op, phase=phase, inputs=tuple(inputs), outputs=outputs, **attributes)
