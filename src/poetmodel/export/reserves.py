"""RAM that an exported step uses outside of its arena."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from poetmodel.plan.alignment import round_up
from poetmodel.units import parse_size

if TYPE_CHECKING:
    from poetmodel.export.replay import Replay
    from poetmodel.lowered.step import LoweredStep

RUNTIME_BYTES: Final = 512
"""Reserved RAM of the C library, the page driver and ``pm_run`` [B]. The largest measured use on
Cortex-M cores was 172, without checksums of pages."""
STACK_BYTES: Final = 1536
"""Default size of the stack [B]. The largest measured stack on Cortex-M cores was between 1,280 and
1,408, for Adam with memory-mapped state."""
COMMIT_STACK_BYTES: Final = 2048
"""Default size of the stack with commits [B]: a U-Net with Adam needed 1,572."""
WORD_BYTES: Final = 4
"""Unit to which the size of each input of a batch is rounded up [B]."""


def input_bytes(step: LoweredStep) -> int:
    """Return the size of the inputs of a step, which stay in RAM, each rounded up to words [B]."""
    sizes = (step.buffers[tensor.pieces[0].buffer].bytes for tensor in step.inputs)
    return sum(round_up(size, WORD_BYTES) for size in sizes)


def output_bytes(step: LoweredStep) -> int:
    """Return the size of the output of the inference [B]; 0 if there is none."""
    output = None if step.inference is None else step.inference.output
    return 0 if output is None else math.prod(output.shape) * output.type.itemsize


def parse_stack(stack: str | int | None, *, commit: bool) -> int:
    """Parse the size of the stack [B]; None is `COMMIT_STACK_BYTES` or `STACK_BYTES`."""
    if stack is None:
        return COMMIT_STACK_BYTES if commit else STACK_BYTES
    return parse_size(stack, field="stack")


def reserved_bytes(step: LoweredStep, stack_bytes: int, replay: Replay | None = None) -> int:
    """Return the RAM outside of the arena [B]."""
    sample_bytes = 0 if replay is None else replay.ram_bytes
    return input_bytes(step) + output_bytes(step) + sample_bytes + stack_bytes + RUNTIME_BYTES
