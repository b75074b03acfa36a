"""What an operator states about one use of it, from which the tape makes the nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from poetmodel.graph.structure import Phase

if TYPE_CHECKING:
    from poetmodel.graph.zoo.values import Value, Weight


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
    """Tensors that the forward node reads."""
    weights: tuple[Weight, ...] = ()
    """Weights that the forward node reads."""
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
    """Of the forward node."""
    recomputable: bool = True
    """Whether the forward node gives the same again."""

    @property
    def flops(self) -> int:
        """Work of the forward node [FLOP]."""
        return 2 * self.macs + self.other_flops
