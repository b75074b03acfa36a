"""Programs of a step for a device, and where their data lies: slots, generations, samples."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.generation import GenerationLayout
from poetmodel.plan import Op
from poetmodel.plan.alignment import round_up
from poetmodel.schedule.machine import BEFORE

RECORD_SLOT: Final = "record of a generation"
"""Name of the first slot of a generation."""
SEAL_SLOT: Final = "seal of a generation"
"""Name of the last slot of a generation."""
NEARLY_FULL: Final = 0.9
"""Maximum fraction of the flash that program and storage use with more than two groups of
generations. A larger fraction causes a warning."""

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.device import Device
    from poetmodel.export.migration import Migration
    from poetmodel.export.options import ExportOptions
    from poetmodel.export.replay import Replay
    from poetmodel.lowered.calls import NamedTensor, Ref
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.plan import Plan
    from poetmodel.plan.arena import Arena


@dataclass(frozen=True, kw_only=True)
class Program:
    """The plan of a training step or of one of its forward passes, with addresses."""

    kind: str
    """``step``, ``inference`` or ``evaluation``."""
    step: LoweredStep
    """The lowered step; nodes of a forward pass that are `on_aux` read state from storage."""
    plan: Plan
    arena: Arena
    base_bytes: int = 0
    """Offset of the arena in RAM [B]: a forward pass leaves the state in RAM before it."""

    @property
    def end_bytes(self) -> int:
        """End of the arena in RAM [B]."""
        return self.base_bytes + self.arena.bytes


@dataclass(frozen=True, kw_only=True)
class StorageLayout:
    """Programs of a step for a device, and where their data lies; all that generated C states."""

    options: ExportOptions
    identity: str
    """Result of `step_identity` for the step before tiling."""
    programs: tuple[Program, ...]
    """The program of the step, then those of its exported forward passes."""
    ram_bytes: int
    """RAM limit of the step [B]; counts all uses of `Deployment.ram_map`."""
    replay: Replay | None
    """The storage for samples of latent replay, if requested."""
    migration: Migration | None
    """The state that the step copies from the storage of another step, if requested."""

    @property
    def step(self) -> LoweredStep:
        """The exported training step, in tiles if there are any."""
        return self.programs[0].step

    @property
    def plan(self) -> Plan:
        """The plan of the training step."""
        return self.programs[0].plan

    @property
    def arena(self) -> Arena:
        """The addresses of the training step."""
        return self.programs[0].arena

    @property
    def forward_passes(self) -> tuple[Program, ...]:
        """The programs of the exported forward passes in evaluation mode."""
        return self.programs[1:]

    @property
    def inference(self) -> Program | None:
        """The forward pass to the output, if exported."""
        return self._forward_pass("inference")

    @property
    def evaluation(self) -> Program | None:
        """The forward pass to the loss, if exported."""
        return self._forward_pass("evaluation")

    def _forward_pass(self, kind: str) -> Program | None:
        return next((program for program in self.forward_passes if program.kind == kind), None)

    @property
    def device(self) -> Device:
        """The device of the export."""
        return self.options.device

    @property
    def stack_bytes(self) -> int:
        """Reserved size of the stack [B]."""
        return self.options.stack_bytes

    @property
    def commit(self) -> bool:
        """Whether storage or flash holds generations of all replaced state, one always complete."""
        return self.options.commit and bool(self.step.graph.replacement_of)

    @property
    def commit_every(self) -> int:
        """Number of steps between two commits of state."""
        return self.options.commit_every

    @property
    def step_id(self) -> str:
        """Identity of the step: the first 8 hex digits of `identity`."""
        return self.identity[:8]

    @property
    def sample_id(self) -> str | None:
        """Identity of the samples: 8 hex digits of `front_identity`; None without `replay`."""
        return None if self.replay is None else self.replay.front.identify(self.step)[:8]

    @property
    def instance_id(self) -> str:
        """Identity of this copy of a step within a program: 8 hex digits, a hash of its prefix."""
        return sha256(self.options.prefix.encode()).hexdigest()[:8]

    @property
    def layout_id(self) -> str:
        """Identity of a generation's layout: 8 hex digits, a hash of its ordered state names."""
        return sha256(json.dumps(self.generation_names).encode()).hexdigest()[:8]

    def home_of(self, name: str) -> str:
        """Return the home of a state buffer: flash, ram, mapped or storage."""
        if name not in self.step.graph.tensor_index:
            return "flash"
        if name in self.resident_names:
            return "ram"
        return "mapped" if self.plan.memory_mapped else "storage"

    def field_values(self) -> dict[str, Any]:
        """Return the fields, for a value that states more about the same programs."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def slots(self) -> tuple[str, ...]:
        """Names of the slots: pages of the step and forward passes, then of one generation.

        Pages are paged-out tensors, gradients and state, in this order; a generation is a record,
        its state tensors and a seal. All generations have the same names; stored samples have no
        slot.
        """
        if not self.generation_names:
            return tuple(self._page_bytes)
        saved_names = (
            map(saved_slot_name, self.generation_names)
            if self.copies_to_flash
            else self.generation_names
        )
        return (*self._page_bytes, RECORD_SLOT, *saved_names, SEAL_SLOT)

    @cached_property
    def page_bytes(self) -> tuple[int, ...]:
        """Sizes of the slots outside of generations, each in separate erase blocks [B]."""
        return tuple(self._page_bytes.values())

    @cached_property
    def generation_bytes(self) -> tuple[int, ...]:
        """Sizes of the state tensors of `generation_names` [B]."""
        return tuple(self.step.buffers[name].bytes for name in self.generation_names)

    @cached_property
    def _page_bytes(self) -> dict[str, int]:
        """Sizes of the slots outside of generations, by name, in the order of `slots` [B]."""
        buffers = self.step.buffers
        pages = {
            page_slot_name(program, name): program.step.buffers[name].bytes
            for program in self.programs
            for name in _list_paged_out(program)
        }
        gradients = {
            gradient_slot_name(tensor): buffers[tensor.pieces[0].buffer].bytes
            for tensor in self.step.gradients
        }
        state = {
            name: buffers[name].bytes for name in self._state_names if self._has_page_slot(name)
        }
        return pages | gradients | state

    @cached_property
    def _state_names(self) -> tuple[str, ...]:
        graph = self.step.graph
        return tuple(graph.tensors[i].name for i in graph.state_tensors)

    def _has_page_slot(self, name: str) -> bool:
        """Return whether a state tensor has a slot outside of generations."""
        if self.rotating_state:
            return name not in self.rotating_state
        return name not in self.resident_names

    @cached_property
    def state_pieces(self) -> dict[Ref, int]:
        """The index of each piece of state in the table of pieces; the first of equal ones."""
        pieces = [piece for tensor in self.step.states for piece in tensor.pieces]
        return {pieces[k]: k for k in reversed(range(len(pieces)))}

    @cached_property
    def resident_names(self) -> frozenset[str]:
        """Names of the state tensors with their home in RAM."""
        return frozenset(self.step.graph.tensors[i].name for i in self.plan.resident or ())

    @cached_property
    def generation_names(self) -> tuple[str, ...]:
        """Names of the replaced state in each generation; empty without commits."""
        if not self.commit:
            return ()
        graph = self.step.graph
        replaced_names = {graph.tensors[old].name for old in graph.replacement_of}
        state_buffers = (ref.buffer for tensor in self.step.states for ref in tensor.pieces)
        ordered_names = (
            *self._written_state_names(),
            *(name for name in state_buffers if name in self.resident_names),
        )
        return tuple(dict.fromkeys(name for name in ordered_names if name in replaced_names))

    @property
    def stores_best(self) -> bool:
        """Whether two more generations are reserved for the state of ``pm_keep_best``."""
        return bool(self.generation_names) and self.evaluation is not None

    @property
    def counts_correct(self) -> bool:
        """Whether an evaluation counts correct classes in addition to the loss."""
        output = None if self.evaluation is None else self.evaluation.step.output
        return output is not None and math.prod(output.shape) > 1

    @property
    def copies_to_flash(self) -> bool:
        """Whether commits copy state to flash after a step, because storage is volatile."""
        return self.commit and self.device.is_volatile

    @cached_property
    def rotating_state(self) -> frozenset[str]:
        """Names of the state whose slots are in the generations on storage.

        A step writes state on storage directly to the next generation; a commit writes state in RAM
        there. Empty without commits, or if commits copy state to flash.
        """
        return frozenset(() if self.copies_to_flash else self.generation_names)

    def _written_state_names(self) -> Iterator[str]:
        """Yield the names of state on storage, once per write, in the order of a step's writes.

        For memory-mapped storage, yields all buffers that calls write except state in RAM: the
        caller drops activations.
        """
        graph = self.step.graph
        for op, i in self.plan.program:
            if op == Op.PAGE_OUT and i in graph.state_of and not self.plan.memory_mapped:
                yield graph.tensors[graph.state_of[i]].name
            if op == Op.COMPUTE and self.plan.memory_mapped:
                written_names = (ref.buffer for call in self.step.calls[i] for ref in call.writes)
                yield from (name for name in written_names if name not in self.resident_names)

    @property
    def layout(self) -> GenerationLayout:
        """Write units, erase blocks and checksums of generations, on storage or in flash."""
        return GenerationLayout.for_device(self.device, checksums=self.options.checksum)

    @property
    def page_layout(self) -> GenerationLayout:
        """Write units and erase blocks of pages, which are the slots outside of generations.

        Those of `layout`, but volatile storage has no erase blocks: there the write unit is the
        default, and the alignment of the arena is used as the size of an erase block.
        """
        if not self.device.is_volatile:
            return self.layout
        return GenerationLayout(erase_block_bytes=self.arena.alignment)

    @property
    def _page_storage_bytes(self) -> int:
        """Size of the erase blocks of the slots outside of generations [B]."""
        block = self.page_layout.erase_block_bytes
        return sum(round_up(size, block) for size in self.page_bytes)

    @property
    def generations_per_block(self) -> int:
        """Number of generations that share an erase block; 1 without commits or rated cycles."""
        causes_wear = self.generation_names and self._endurance_cycles is not None
        return self.layout.generations_per_block(self.generation_bytes) if causes_wear else 1

    @property
    def uses_storage(self) -> bool:
        """Whether the program needs a storage driver."""
        return bool(self.slots) or self.replay is not None

    @property
    def replay_bytes(self) -> int:
        """Size of the erase blocks of stored samples [B]."""
        return 0 if self.replay is None else self.replay.stored_bytes

    @property
    def _best_generation_bytes(self) -> int:
        """Size of the erase blocks of the best generation and of its next version [B]."""
        return 2 * self._generation_group_bytes if self.stores_best else 0

    @property
    def _generation_group_bytes(self) -> int:
        """Size of the erase blocks of one generation, or of the block that several share [B]."""
        return self.commit_erases * self.layout.erase_block_bytes

    @property
    def _endurance_cycles(self) -> float | None:
        """Rated erase cycles of storage, or of flash if `copies_to_flash`; None if not stated."""
        memory = self.device.flash if self.copies_to_flash else self.device.storage
        return None if memory is None else memory.endurance_cycles

    @property
    def min_stored_bytes(self) -> int:
        """Size of the erase blocks on storage with two groups of generations, if any [B]."""
        return self._stored_bytes(2 if self.generation_names else 0)

    @property
    def min_saved_bytes(self) -> int:
        """Size of the erase blocks in flash with two groups of generations [B]."""
        return self._saved_bytes(2 if self.generation_names else 0)

    def _saved_bytes(self, groups: int) -> int:
        """Return the bytes of erase blocks in flash; 0 unless commits copy state to flash."""
        if not self.copies_to_flash:
            return 0
        generations_bytes = groups * self._generation_group_bytes + self._best_generation_bytes
        return generations_bytes + self.replay_bytes

    def _stored_bytes(self, groups: int) -> int:
        """Return the bytes of erase blocks on storage with `groups` groups of generations.

        A group is `generations_per_block` generations. Only pages count if commits copy state to
        flash. At least the storage of the earlier step that is migrated, if any.
        """
        if self.copies_to_flash:
            return self._page_storage_bytes
        stored_generations_bytes = (
            groups * self._generation_group_bytes + self._best_generation_bytes
        )
        used_bytes = self._page_storage_bytes + stored_generations_bytes + self.replay_bytes
        return (
            used_bytes
            if self.migration is None
            else max(used_bytes, self.migration.source.stored_bytes)
        )

    @property
    def commit_bytes(self) -> int:
        """Bytes that one commit writes: record, state, checksums, seal [B]; 0 without commits."""
        return self.layout.size_bytes(self.generation_bytes) if self.generation_names else 0

    @property
    def commit_erases(self) -> int:
        """Maximum number of erases of a commit: all blocks of a generation, or its shared block."""
        return self.layout.n_blocks(self.generation_bytes) if self.generation_names else 0

    @property
    def page_writes(self) -> tuple[tuple[int, int], ...]:
        """Writes of one step outside of commits, for each page: (size of its tensor [B], number).

        Pages that the step does not write are omitted. Writes of forward passes are not counted.
        """
        graph, sizes = self.step.graph, self.step.graph.tensor_bytes
        page_outs = Counter(i for op, i in self.plan.program if op == Op.PAGE_OUT)
        rotating_tensors = {graph.tensor_index[name] for name in self.rotating_state}
        buffers = (self.step.buffers[tensor.pieces[0].buffer] for tensor in self.step.gradients)
        return (
            *(
                (sizes[i], count)
                for i, count in page_outs.items()
                if graph.state_of.get(i) not in rotating_tensors
            ),
            *((buffer.bytes, 1) for buffer in buffers),
        )

    @property
    def step_writes(self) -> tuple[tuple[int, float], ...]:
        """Mean writes of one step: (size [B], number); a commit counts 1 / `commit_every` times."""
        commit = (self.commit_bytes, 1 / self.commit_every)
        return (*self.page_writes, commit) if self.generation_names else self.page_writes

    @property
    def written_bytes(self) -> int:
        """Mean bytes that a step writes to storage, commits to flash included, rounded up [B]."""
        return math.ceil(sum(size * count for size, count in self.step_writes))

    @cached_property
    def resident_bytes(self) -> int:
        """Aligned size of the resident state, which is at the beginning of the arena [B]."""
        sizes, alignment = self.step.graph.tensor_bytes, self.arena.alignment
        resident_entries = [entry for entry in self.arena.offsets if entry.position == BEFORE]
        return max(
            (round_up(entry.offset + sizes[entry.index], alignment) for entry in resident_entries),
            default=0,
        )

    @property
    def arena_bytes(self) -> int:
        """Size of the arena, which the step and forward passes use at different times [B]."""
        return max(program.end_bytes for program in self.programs)


def _list_paged_out(program: Program) -> list[str]:
    """Return the names of paged-out tensors, in graph order, without replacements of state."""
    graph, instructions = program.step.graph, program.plan.program
    paged_tensors = {i for (op, i) in instructions if op == Op.PAGE_OUT and i not in graph.state_of}
    return [graph.tensors[i].name for i in sorted(paged_tensors)]


def page_slot_name(program: Program, name: str) -> str:
    """Return the name of the slot of a tensor that a program pages out."""
    return name if program.kind == "step" else f"{name} of the {program.kind}"


def saved_slot_name(name: str) -> str:
    """Return the name of the slot of a state tensor in a generation that is a copy in flash."""
    return f"{name} in flash"


def gradient_slot_name(tensor: NamedTensor) -> str:
    """Return the name of the slot of a gradient that the program returns."""
    return f"gradient of {tensor.name}"
