"""Instructions of programs that a device executes."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    """Kinds of instruction."""

    COMPUTE = "compute"
    """Execute a node; for state on storage that is not read in place, start its first read."""
    PAGE_IN = "page_in"
    """Start a transfer of a tensor from storage to RAM."""
    PAGE_OUT = "page_out"
    """Start a transfer of a tensor from RAM to storage."""
    WAIT = "wait"
    """Stall the core until the transfer of a tensor is complete."""
    FREE = "free"
    """Free the RAM of a tensor."""


class Instruction(NamedTuple):
    """One instruction of a program."""

    op: Op
    """Kind of the instruction."""
    index: int  # type: ignore[assignment] # Hides tuple.index.
    """Index of a node for ``compute``, of a tensor otherwise."""


Program = tuple[Instruction, ...]
"""Instructions in the order in which the core issues them."""
