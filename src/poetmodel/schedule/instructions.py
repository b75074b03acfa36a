"""The instructions of a device: what a program is made of."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    """Kinds of instruction."""

    COMPUTE = "compute"
    """Run a node; for state on storage, start to read it for the first time."""
    PAGE_IN = "page_in"
    """Start to move a tensor from storage to RAM."""
    PAGE_OUT = "page_out"
    """Start to move a tensor from RAM to storage."""
    WAIT = "wait"
    """Hold the core until the transfer of a tensor is done."""
    FREE = "free"
    """Give the RAM of a tensor back."""


class Instruction(NamedTuple):
    """One step of a program."""

    op: Op
    """Kind of instruction."""
    index: int  # type: ignore[assignment] # takes the place of the search method of tuples
    """A node's index for ``compute``, a tensor's number otherwise."""


Program = tuple[Instruction, ...]
