"""A step on a device: its schedule, its program, its addresses, and what takes the rest of RAM."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Final

from poetmodel.device.generation import GenerationLayout
from poetmodel.errors import shown
from poetmodel.lowered.kernels import changed
from poetmodel.plan import Op
from poetmodel.plan.alignment import round_up
from poetmodel.schedule.machine import BEFORE
from poetmodel.units import brief, format_bytes, parse_size

RUNTIME_BYTES: Final = 512
"""What the C library, the page driver and `pm_run` may take of RAM [B]: 172 were the most that was
measured on Cortex-M cores, checksums of pages aside."""
STACK_BYTES: Final = 1536
"""What is reserved for the stack unless another size is wanted [B]. Cortex-M cores needed between
1,280 and 1,408 at most: for Adam with state that is read in place."""
COMMIT_STACK_BYTES: Final = 2048
"""The same where state is committed [B]: a U-Net with Adam needed 1,572."""
RECORD_SLOT: Final = "record of a generation"
"""Name of the slot in which a generation begins."""
SEAL_SLOT: Final = "seal of a generation"
"""Name of the slot in which it ends."""
WORD_BYTES: Final = 4
"""Each input of a batch begins at a multiple of this [B]."""
NEARLY_FULL: Final = 0.9
"""Share of the flash that generations leave free where two fit, and above which there is a
warning."""
MOST_GENERATIONS: Final = 4096
"""How many generations of state rotate at most: after a restart the record of each is read."""

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from poetmodel.device import Device
    from poetmodel.export.migration import Migration
    from poetmodel.export.replay import Replay
    from poetmodel.lowered.calls import NamedTensor
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.plan import Plan
    from poetmodel.plan.arena import Arena
    from poetmodel.result import SolveResult
    from poetmodel.solver.tile_trials import TileTrial


class WeightsFormat(StrEnum):
    """How an exported folder has the values that state begins with, and constants."""

    C = "c"
    """As an array of C, which any build takes."""
    BINARY = "binary"
    """As a file beside, which the assembler includes: for weights that a compiler reads slowly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """A forward pass in evaluation mode as it is exported."""

    kind: str
    """``inference`` or ``evaluation``."""
    step: LoweredStep
    """It reads from storage the state that has its home there: nodes that are `on_aux`."""
    plan: Plan
    arena: Arena
    """Its addresses, which begin where the state in RAM ends."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What is exported: a step, and the decisions about it."""

    step: LoweredStep
    identity: str
    """What `step_identity` returns for the step before it was cut into tiles."""
    plan: Plan
    arena: Arena
    ram_bytes: int
    """All of the RAM that the step may take, stack and input buffers included [B]."""
    stack_bytes: int
    """What is reserved for the stack [B]."""
    tile_bytes: int | None = None
    """The size of the tiles that the step is in [B]; None where it is whole."""
    tile_trials: tuple[TileTrial, ...] = ()
    """Sizes of tiles that were tried for ``auto``; empty where there was no choice."""
    device: Device | None = None
    result: SolveResult | None = None
    commit: bool = False
    """Whether storage has generations of all state that is replaced, of which one is always
    whole."""
    commit_every: int = 1
    """In each how many steps state is committed."""
    checksum: bool = True
    """Whether committed state has checksums on storage."""
    inference: ForwardPass | None = None
    """The forward pass in evaluation mode, where it was asked for."""
    evaluation: ForwardPass | None = None
    """The same to the loss, where it was asked for."""
    replay: Replay | None = None
    """The storage of samples for steps behind the frozen front, where it was asked for."""
    migration: Migration | None = None
    """What it takes over of the state of another step, where that was asked for."""
    prefix: str = "pm"
    """What all names of C begin with."""
    weights: WeightsFormat = WeightsFormat.C
    shared_kernels: str | None = None
    """The folder of kernels that steps share, from the folder of this one on; None: it has all."""
    program: Mapping[str, int] = field(default_factory=dict)
    """What takes how much of flash beside storage: code, constants, first weights [B]."""

    def __repr__(self) -> str:
        instructions = f"{len(self.plan.program)} instructions"
        return brief(
            self, shown(self.step.graph.name), f"{format_bytes(self.ram_bytes)} RAM", instructions
        )

    @cached_property
    def slots(self) -> tuple[str, ...]:
        """What is kept on storage, by slot: tensors paged out, gradients, state, in this order.

        The state of a generation is between its record and its seal.
        """
        if not self.generation:
            return tuple(self._page_bytes)
        saved = map(saved_slot, self.generation) if self.saves else self.generation
        return (*self._page_bytes, RECORD_SLOT, *saved, SEAL_SLOT)

    @cached_property
    def page_bytes(self) -> tuple[int, ...]:
        """The sizes of the first slots, which are in blocks of their own [B]."""
        return tuple(self._page_bytes.values())

    @cached_property
    def generation_bytes(self) -> tuple[int, ...]:
        """The sizes of the tensors of one generation, which are the last slots [B]."""
        return tuple(self.step.buffers[name].bytes for name in self.generation)

    @cached_property
    def _page_bytes(self) -> dict[str, int]:
        buffers = self.step.buffers
        paged = {name: buffers[name].bytes for name in _paged_out(self.step, self.plan)}
        more = {
            pass_slot(each.kind, name): each.step.buffers[name].bytes
            for each in self.passes
            for name in _paged_out(each.step, each.plan)
        }
        handed_out = {
            gradient_slot(value): buffers[value.pieces[0].buffer].bytes
            for value in self.step.gradients
        }
        state = {name: buffers[name].bytes for name in self._state if self._has_slot(name)}
        return paged | more | handed_out | state

    @cached_property
    def _state(self) -> tuple[str, ...]:
        graph = self.step.graph
        return tuple(graph.tensors[i].name for i in graph.state_tensors)

    def _has_slot(self, name: str) -> bool:
        """Return whether a state tensor has a slot of its own: with commits one that stays so."""
        if self.rotating:
            return name not in self.rotating
        return name not in self.resident_names

    @cached_property
    def resident_names(self) -> frozenset[str]:
        """The state that has its home in RAM."""
        return frozenset(self.step.graph.tensors[i].name for i in self.plan.resident or ())

    @cached_property
    def generation(self) -> tuple[str, ...]:
        """The state that each commit writes, in the order in which a step does: storage first."""
        if not self.commit:
            return ()
        graph = self.step.graph
        replaced = {graph.tensors[old].name for old in graph.replacement_of}
        pieces = (ref.buffer for value in self.step.states for ref in value.pieces)
        order = (*self._written(), *(name for name in pieces if name in self.resident_names))
        return tuple(dict.fromkeys(name for name in order if name in replaced))

    @property
    def keeps_best(self) -> bool:
        """Whether two more generations hold the best state, where evaluations find it."""
        return bool(self.generation) and self.evaluation is not None

    @property
    def counts_correct(self) -> bool:
        """Whether an evaluation counts correct classes beside the loss."""
        output = None if self.evaluation is None else self.evaluation.step.output
        return output is not None and math.prod(output.shape) > 1

    @property
    def saves(self) -> bool:
        """Whether commits copy state to flash at the end of a step, as storage forgets it."""
        return self.commit and self.device is not None and self.device.is_volatile

    @cached_property
    def rotating(self) -> frozenset[str]:
        """The state that each step writes to the next of the places that generations have."""
        return frozenset(() if self.saves else self.generation)

    def _written(self) -> Iterator[str]:
        """Yield state that has its home on storage when it is written there."""
        graph = self.step.graph
        for op, i in self.plan.program:
            if op == Op.PAGE_OUT and i in graph.state_of and not self.plan.memory_mapped:
                yield graph.tensors[graph.state_of[i]].name
            if op == Op.COMPUTE and self.plan.memory_mapped:
                named = (ref.buffer for call in self.step.calls[i] for ref in changed(call))
                yield from (name for name in named if name not in self.resident_names)

    @property
    def layout(self) -> GenerationLayout:
        """How generations are written, on storage or in flash."""
        return GenerationLayout.for_device(self.device, checksums=self.checksum)

    @property
    def page_layout(self) -> GenerationLayout:
        """How pages are written: memory that forgets has no blocks."""
        if self.device is None or not self.device.is_volatile:
            return self.layout
        return GenerationLayout(erase_block_bytes=self.arena.alignment)

    @property
    def _paged_bytes(self) -> int:
        block = self.page_layout.erase_block_bytes
        return sum(round_up(size, block) for size in self.page_bytes)

    @property
    def generations(self) -> int:
        """How many generations of state take turns: two, or all that storage has room for."""
        if not self.generation:
            return 0
        if self.device is None or self._endurance_cycles is None:
            return 2
        flash, beside = self.device.flash, 0 if self.saves else self._paged_bytes
        beside += self._best_bytes + self.replay_bytes
        room = (self.device.aux_bytes or 0) - beside
        if flash is not None and self.device.commits_to_flash:
            most = int(NEARLY_FULL * flash.size_bytes) - sum(self.program.values())
            room = min(flash.storage_bytes if self.saves else room, most - beside)
        shared = self.generations_in_block
        return max(2, min(room // self._erased_bytes, MOST_GENERATIONS // shared)) * shared

    @property
    def generations_in_block(self) -> int:
        """How many generations share an erase block, where a commit wears one; else 1."""
        worn = self.generation and self._endurance_cycles is not None
        return self.layout.generations_per_block(self.generation_bytes) if worn else 1

    @property
    def _generations_apart(self) -> int:
        """How many of the generations share no erase block."""
        return self.generations // self.generations_in_block

    @property
    def uses_storage(self) -> bool:
        """Whether the program needs a driver of storage."""
        return bool(self.slots) or self.replay is not None

    @property
    def replay_bytes(self) -> int:
        """The blocks of stored samples [B]."""
        return 0 if self.replay is None else self.replay.stored_bytes

    @property
    def _best_bytes(self) -> int:
        """The blocks of the best generation and of the one that takes its place [B]."""
        return 2 * self._erased_bytes if self.keeps_best else 0

    @property
    def _erased_bytes(self) -> int:
        """The blocks of one generation [B]."""
        return self.commit_erases * self.layout.erase_block_bytes

    @property
    def _endurance_cycles(self) -> float | None:
        """How often each block endures to be erased that generations, or else pages, lie in."""
        if self.device is None:
            return None
        worn = self.device.flash if self.saves else self.device.storage
        return None if worn is None else worn.endurance_cycles

    @property
    def saved_bytes(self) -> int:
        """What generations take of flash in its blocks, where storage forgets [B]."""
        if not self.saves:
            return 0
        return self._generations_apart * self._erased_bytes + self._best_bytes + self.replay_bytes

    @property
    def stored_bytes(self) -> int:
        """What storage takes in its blocks: pages, and all generations [B]."""
        return self._stored_bytes(self._generations_apart)

    @property
    def least_stored_bytes(self) -> int:
        """The same with two generations, where there are any [B]."""
        return self._stored_bytes(min(self._generations_apart, 2))

    def _stored_bytes(self, generations: int) -> int:
        if self.saves:
            return self._paged_bytes
        kept = generations * self._erased_bytes + self._best_bytes
        own = self._paged_bytes + kept + self.replay_bytes
        return own if self.migration is None else max(own, self.migration.source["stored_bytes"])

    @property
    def commit_bytes(self) -> int:
        """What one commit writes: record, state, checksums, seal [B]."""
        return self.layout.size_bytes(self.generation_bytes) if self.generation else 0

    @property
    def commit_erases(self) -> int:
        """How many blocks a commit erases at most: of generations in one block, one erases it."""
        return self.layout.blocks(self.generation_bytes) if self.generation else 0

    @property
    def page_writes(self) -> tuple[tuple[int, int], ...]:
        """What a step writes beside commits: sizes of pages [B], and how often each."""
        graph, sizes = self.step.graph, self.step.graph.tensor_bytes
        paged = Counter(i for op, i in self.plan.program if op == Op.PAGE_OUT)
        homes = {graph.tensor_index[name] for name in self.rotating}
        buffers = (self.step.buffers[value.pieces[0].buffer] for value in self.step.gradients)
        return (
            *((sizes[i], n) for i, n in paged.items() if graph.state_of.get(i) not in homes),
            *((b.bytes, 1) for b in buffers),
        )

    @property
    def writes(self) -> tuple[tuple[int, float], ...]:
        """What a step writes to storage: sizes [B], and how often; of a commit its share."""
        commit = (self.commit_bytes, 1 / self.commit_every)
        return (*self.page_writes, commit) if self.generation else self.page_writes

    @property
    def written_bytes(self) -> int:
        """What a step writes to storage, in the mean [B]."""
        return math.ceil(sum(size * times for size, times in self.writes))

    @property
    def steps_until_worn(self) -> float | None:
        """How many steps the storage endures as its drivers write it, which level nothing.

        Each page keeps its blocks, and generations take turns. None where the device states no
        endurance, or nothing is written.
        """
        if self._endurance_cycles is None:
            return None
        turns = [1 / times for _, times in self.page_writes if not self.saves]
        if self.generation:
            turns.append(self.generations * self.commit_every)
        return self._endurance_cycles * min(turns) if turns else None

    @cached_property
    def resident_bytes(self) -> int:
        """Where the state in RAM ends, which lies at the bottom of the arena [B]."""
        sizes, alignment = self.step.graph.tensor_bytes, self.arena.alignment
        resident = [entry for entry in self.arena.offsets if entry.position == BEFORE]
        return max(
            (round_up(entry.offset + sizes[entry.index], alignment) for entry in resident),
            default=0,
        )

    @property
    def arena_bytes(self) -> int:
        """The size of the arena, in which a step and forward passes run at different times [B]."""
        return max(self.arena.bytes, 0, *map(self.pass_bytes, self.passes))

    def pass_bytes(self, each: ForwardPass) -> int:
        """Return what the state in RAM and a forward pass take of the arena [B]."""
        return self.resident_bytes + each.arena.bytes

    @property
    def passes(self) -> tuple[ForwardPass, ...]:
        """The forward passes in evaluation mode that are exported."""
        return tuple(each for each in (self.inference, self.evaluation) if each is not None)

    def flash_map(self) -> dict[str, int]:
        """Return what takes how much of the flash of the device [B]; nothing where it has none."""
        if self.device is None or self.device.flash is None:
            return {}
        in_flash = self.device.stores_in_flash
        stored = self.stored_bytes if in_flash else self.saved_bytes
        sizes = {**self.program, "storage": stored}
        return sizes | {"free": self.device.flash.size_bytes - sum(sizes.values())}

    def ram_map(self) -> dict[str, int]:
        """Return what takes how much of the RAM of the build for the device [B]."""
        step, resident = self.step, self.plan.resident or ()
        state = sum(step.graph.tensor_bytes[i] for i in resident)
        outputs = {} if self.inference is None else {"outputs": output_bytes(step)}
        if self.replay is not None:
            outputs["stored samples"] = self.replay.ram_bytes
        return {
            "state in the arena": state,
            "the rest of the arena": self.arena_bytes - state,
            "inputs": input_bytes(step),
            **outputs,
            "stack": self.stack_bytes,
            "runtime": RUNTIME_BYTES,
            "free": self.ram_bytes
            - self.arena_bytes
            - reserved_bytes(step, self.stack_bytes, self.replay),
        }


def _paged_out(step: LoweredStep, plan: Plan) -> list[str]:
    """Return the tensors that a program pages out, but for new state."""
    graph = step.graph
    out = {i for (op, i) in plan.program if op == Op.PAGE_OUT and i not in graph.state_of}
    return [graph.tensors[i].name for i in sorted(out)]


def pass_slot(kind: str, name: str) -> str:
    """Return what the slot of a tensor that a forward pass pages out is called."""
    return f"{name} of the {kind}"


def saved_slot(name: str) -> str:
    """Return what the slot of a tensor in a generation is called that storage has another of."""
    return f"{name} in flash"


def gradient_slot(value: NamedTensor) -> str:
    """Return what the slot of a gradient that is handed out is called."""
    return f"gradient of {value.name}"


def input_bytes(step: LoweredStep) -> int:
    """Return the size of a batch, which is in RAM for all of a step [B]."""
    sizes = (step.buffers[value.pieces[0].buffer].bytes for value in step.inputs)
    return sum(round_up(size, WORD_BYTES) for size in sizes)


def output_bytes(step: LoweredStep) -> int:
    """Return the size of what an inference writes for its caller [B]."""
    output = None if step.inference is None else step.inference.output
    return 0 if output is None else math.prod(output.shape) * output.type.itemsize


def stack_bytes(stack: str | int | None, *, commit: bool) -> int:
    """Return what to reserve for the stack, as wanted or by default [B]."""
    if stack is None:
        return COMMIT_STACK_BYTES if commit else STACK_BYTES
    return parse_size(stack, field="stack")


def reserved_bytes(step: LoweredStep, stack_bytes: int, replay: Replay | None = None) -> int:
    """Return what a step takes of RAM beside its arena [B]."""
    stored = 0 if replay is None else replay.ram_bytes
    return input_bytes(step) + output_bytes(step) + stored + stack_bytes + RUNTIME_BYTES
