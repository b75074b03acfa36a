"""What goes into a captured training step and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.fx import Node as FxNode


class Source(StrEnum):
    """Where the value of an argument comes from."""

    PARAMETER = "parameter"
    """A parameter of the module or of the loss."""
    BUFFER = "buffer"
    """A buffer, such as the running mean of a batch norm."""
    INPUT = "input"
    """A tensor that the step is called with."""
    TANGENT = "tangent"
    """The gradient that the backward pass starts from: ones, of the shape of the loss."""
    CONSTANT = "constant"
    """A tensor that the module's code holds on to."""


class Purpose(StrEnum):
    """What a result is for."""

    LOSS = "loss"
    """The loss."""
    GRADIENT = "gradient"
    """The gradient of an argument; accumulated into its ``.grad``."""
    MUTATION = "mutation"
    """The new value of a buffer or input, due in it once, at the end of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """A value that is there before the step begins and stays for all of it."""

    source: Source
    """Where it comes from."""
    node: FxNode
    """Its placeholder (for a constant: the node that fetches it)."""
    target: str
    """Path below the captured module, such as ``model.conv1.weight``; empty for others."""
    name: str
    """For people: the path below the user's module, or ``inputs[0]``."""
    position: int | None
    """For an input its place among the flat inputs; None for others."""
    bytes: int
    """Size of its storage [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A value that the step hands out."""

    purpose: Purpose
    """What it is for."""
    node: FxNode
    """The node whose value it is; may be a view, or an argument's own node."""
    of: Argument | None
    """The argument whose gradient or new value it is; None for the loss."""

    @property
    def name(self) -> str:
        """What it is, for people: ``loss``, ``gradient of conv1.weight``."""
        return str(self.purpose) if self.of is None else f"{self.purpose} of {self.of.name}"
