"""A step on a device: its schedule, its program, its addresses, and what takes the rest of RAM."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Final

from poetmodel.errors import shown
from poetmodel.plan import Op
from poetmodel.plan.arena import ALIGNMENT, aligned
from poetmodel.schedule.machine import BEFORE
from poetmodel.units import brief, format_bytes

RUNTIME_BYTES: Final = 512
"""What the C library, the page driver and `pm_run` may take of RAM [B]: 172 were the most that was
measured on Cortex-M cores, checksums of pages aside."""
STACK_BYTES: Final = 1536
"""What is reserved for the stack unless another size is wanted [B]. Cortex-M cores needed between
1,280 and 1,408 at most: for Adam with state that is read in place."""
BLOCK_BYTES: Final = 4096
"""What most flash erases at a time [B]."""
CHECKSUM_BYTES: Final = 35
"""What the checksum of a page takes at most, with the gap before it [B]: ``port/pm_pages.h``."""
RECORD_BYTES: Final = 16
"""Size of the record of a commit [B]: ``src/pm_commit.c``."""

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.device import Device
    from poetmodel.export.step import LoweredStep, NamedTensor
    from poetmodel.plan import Plan
    from poetmodel.plan.arena import Arena
    from poetmodel.result import SolveResult


class WeightsFormat(StrEnum):
    """How an exported folder has the values that state begins with, and constants."""

    C = "c"
    """As an array of C, which any build takes."""
    BINARY = "binary"
    """As a file beside, which the assembler includes: for weights that a compiler reads slowly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """The forward pass in evaluation mode as it is exported."""

    step: LoweredStep
    """It reads from storage the state that has its home there: nodes that are `on_aux`."""
    plan: Plan
    arena: Arena
    """Its addresses, which begin where the state in RAM ends."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What is exported: a step, and the decisions about it."""

    step: LoweredStep
    plan: Plan
    arena: Arena
    ram_bytes: int
    """All of the RAM that the step may take, stack and input buffers included [B]."""
    stack_bytes: int
    """What is reserved for the stack [B]."""
    device: Device | None = None
    result: SolveResult | None = None
    commit: bool = False
    """Whether storage has two generations of all state, of which one is always whole."""
    inference: Inference | None = None
    """The forward pass in evaluation mode, where it was asked for."""
    prefix: str = "pm"
    """What all names of C begin with."""
    weights: WeightsFormat = WeightsFormat.C
    shared_kernels: str | None = None
    """The folder of kernels that steps share, from the folder of this one on; None: it has all."""
    flash_map: Mapping[str, int] = field(default_factory=dict)
    """What takes how much of the flash of the device [B]; nothing where its size is not known."""

    def __repr__(self) -> str:
        instructions = f"{len(self.plan.program)} instructions"
        return brief(
            self, shown(self.step.graph.name), f"{format_bytes(self.ram_bytes)} RAM", instructions
        )

    @cached_property
    def slots(self) -> tuple[str, ...]:
        """What is kept on storage, by slot: tensors paged out, gradients, state, in this order."""
        return tuple(self._slot_bytes)

    @cached_property
    def slot_bytes(self) -> tuple[int, ...]:
        """The size of each slot in the build for the device [B]."""
        return tuple(self._slot_bytes.values())

    @cached_property
    def _slot_bytes(self) -> dict[str, int]:
        buffers = self.step.buffers
        paged = {name: buffers[name].bytes for name in _paged_out(self.step, self.plan)}
        more = {}
        if self.inference is not None:
            step = self.inference.step
            names = _paged_out(step, self.inference.plan)
            more = {inference_slot(name): step.buffers[name].bytes for name in names}
        handed_out = {
            gradient_slot(value): buffers[value.pieces[0].buffer].bytes
            for value in self.step.gradients
        }
        state = {name: buffers[name].bytes for name in self.stored_state}
        return paged | more | handed_out | state

    @property
    def pages(self) -> tuple[int, ...]:
        """The sizes of all pages on storage: slots, and what commits have beside them [B]."""
        state = len(self.stored_state)
        again = self.slot_bytes[len(self.slots) - state :] if self.commit else ()
        records = (RECORD_BYTES,) * 2 if self.commit else ()
        return (*self.slot_bytes, *again, *records)

    @property
    def stored_bytes(self) -> int:
        """What storage takes in blocks of flash, with checksums and the records of commits [B]."""
        sizes = (size + CHECKSUM_BYTES for size in self.pages)
        return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes)

    @property
    def writes(self) -> tuple[tuple[int, int], ...]:
        """What a step writes to storage: sizes [B], and how often; what commits write too."""
        sizes = self.step.graph.tensor_bytes
        paged = Counter(i for op, i in self.plan.program if op == Op.PAGE_OUT)
        buffers = (self.step.buffers[value.pieces[0].buffer] for value in self.step.gradients)
        pages = [
            *((sizes[i], times) for i, times in paged.items()),
            *((b.bytes, 1) for b in buffers),
        ]
        if self.commit:
            pages += [*((sizes[i], 1) for i in self.plan.resident or ()), (RECORD_BYTES, 1)]
        return tuple(pages)

    @cached_property
    def stored_state(self) -> tuple[str, ...]:
        """The state tensors that have a slot: with commits all, else those on storage."""
        graph = self.step.graph
        resident = () if self.commit else self.plan.resident or ()
        return tuple(graph.tensors[i].name for i in graph.state_tensors if i not in resident)

    @cached_property
    def resident_bytes(self) -> int:
        """Where the state in RAM ends, which lies at the bottom of the arena [B]."""
        sizes, alignment = self.step.graph.tensor_bytes, self.arena.alignment
        resident = [entry for entry in self.arena.offsets if entry.position == BEFORE]
        return max(
            (aligned(entry.offset + sizes[entry.index], alignment) for entry in resident), default=0
        )

    @property
    def arena_bytes(self) -> int:
        """The size of the arena, in which a step and an inference run at different times [B]."""
        more = 0 if self.inference is None else self.resident_bytes + self.inference.arena.bytes
        return max(self.arena.bytes, more)

    def ram_map(self) -> dict[str, int]:
        """Return what takes how much of the RAM of the build for the device [B]."""
        step, resident = self.step, self.plan.resident or ()
        state = sum(step.graph.tensor_bytes[i] for i in resident)
        outputs = {} if self.inference is None else {"outputs": output_bytes(step)}
        return {
            "state in the arena": state,
            "the rest of the arena": self.arena_bytes - state,
            "inputs": input_bytes(step),
            **outputs,
            "stack": self.stack_bytes,
            "runtime": RUNTIME_BYTES,
            "free": self.ram_bytes - self.arena_bytes - reserved_bytes(step, self.stack_bytes),
        }


def alignment_on(device: Device | None) -> int:
    """Return what offsets on a device are multiples of [B].

    Where DMA moves memory behind a data cache that is a cache line too: a line that holds a part
    of what is moved and a part of something else cannot be cleaned or discarded.
    """
    return ALIGNMENT if device is None else max(ALIGNMENT, device.dma_line_bytes)


def _paged_out(step: LoweredStep, plan: Plan) -> list[str]:
    """Return the tensors that a program pages out, but for new state."""
    graph = step.graph
    out = {i for (op, i) in plan.program if op == Op.PAGE_OUT and i not in graph.state_of}
    return [graph.tensors[i].name for i in sorted(out)]


def inference_slot(name: str) -> str:
    """Return what the slot of a tensor that an inference pages out is called."""
    return f"{name} of the inference"


def gradient_slot(value: NamedTensor) -> str:
    """Return what the slot of a gradient that is handed out is called."""
    return f"gradient of {value.name}"


def input_bytes(step: LoweredStep) -> int:
    """Return the size of a batch, which is in RAM for all of a step [B]."""
    return sum(step.buffers[value.pieces[0].buffer].bytes for value in step.inputs)


def output_bytes(step: LoweredStep) -> int:
    """Return the size of what an inference writes for its caller [B]."""
    output = None if step.inference is None else step.inference.output
    return 0 if output is None else prod(output.shape) * output.type.itemsize


def reserved_bytes(step: LoweredStep, stack_bytes: int) -> int:
    """Return what a step takes of RAM beside its arena [B]."""
    return input_bytes(step) + output_bytes(step) + stack_bytes + RUNTIME_BYTES
