"""An exported step: plan, offsets, slots on storage, and usage of RAM, flash and storage."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Final

from poetmodel.device.generation import GenerationLayout
from poetmodel.errors import quote
from poetmodel.plan import Op
from poetmodel.plan.alignment import round_up
from poetmodel.schedule.machine import BEFORE
from poetmodel.units import brief, format_bytes, parse_size

RUNTIME_BYTES: Final = 512
"""Reserved RAM of the C library, the page driver and ``pm_run`` [B]. The largest measured use on
Cortex-M cores was 172, without checksums of pages."""
STACK_BYTES: Final = 1536
"""Default size of the stack [B]. The largest measured stack on Cortex-M cores was between 1,280 and
1,408, for Adam with memory-mapped state."""
COMMIT_STACK_BYTES: Final = 2048
"""Default size of the stack with commits [B]: a U-Net with Adam needed 1,572."""
RECORD_SLOT: Final = "record of a generation"
"""Name of the first slot of a generation."""
SEAL_SLOT: Final = "seal of a generation"
"""Name of the last slot of a generation."""
WORD_BYTES: Final = 4
"""Unit to which the size of each input of a batch is rounded up [B]."""
NEARLY_FULL: Final = 0.9
"""Maximum fraction of the flash that program and storage use with more than two groups of
generations. A larger fraction causes a warning."""
MAX_GENERATIONS: Final = 4096
"""Maximum number of generations that take turns: a restart reads the record of each."""

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
    """Format of the initial values of state and of the constants in an exported folder."""

    C = "c"
    """An array in C, for any build system."""
    BINARY = "binary"
    """A binary file that the assembler includes: faster to build if the weights are large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPass:
    """An exported forward pass in evaluation mode."""

    kind: str
    """``inference`` or ``evaluation``."""
    step: LoweredStep
    """The lowered forward pass; nodes that are `on_aux` read state from storage."""
    plan: Plan
    arena: Arena
    """Offsets relative to the end of the state in RAM."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """A step to export, with its plan, offsets, limits and options."""

    step: LoweredStep
    """The exported step; in tiles if `tile_bytes` is not None."""
    identity: str
    """Result of `step_identity` for the step before tiling."""
    plan: Plan
    arena: Arena
    """Offsets of the plan."""
    ram_bytes: int
    """RAM limit of the step [B]; counts all uses of `ram_map`."""
    stack_bytes: int
    """Reserved size of the stack [B]."""
    tile_bytes: int | None = None
    """Maximum size of a tile [B]; None for a step without tiles."""
    tile_trials: tuple[TileTrial, ...] = ()
    """Trials of tile sizes for ``auto``, that of `tile_bytes` included; empty if no trial compared
    sizes."""
    device: Device | None = None
    result: SolveResult | None = None
    """Result of the solve of the step; None before the solve."""
    commit: bool = False
    """Whether storage or flash holds generations of all replaced state, one always complete."""
    commit_every: int = 1
    """Number of steps between two commits of state."""
    checksum: bool = True
    """Whether committed state has checksums."""
    inference: ForwardPass | None = None
    """The forward pass to the output, if requested."""
    evaluation: ForwardPass | None = None
    """The forward pass to the loss, if requested."""
    replay: Replay | None = None
    """The storage for samples of latent replay, if requested."""
    migration: Migration | None = None
    """The state that the step copies from the storage of another step, if requested."""
    prefix: str = "pm"
    """Prefix of all names in C."""
    weights: WeightsFormat = WeightsFormat.C
    """Format of initial values and constants."""
    shared_kernels: str | None = None
    """Path of the folder of shared kernels, relative to the exported folder; None if the exported
    folder has all kernels of the step."""
    program_bytes: Mapping[str, int] = field(default_factory=dict)
    """Flash usage by use, a result of `program_sizes`, without storage [B]; empty until counted."""

    def __repr__(self) -> str:
        instructions = f"{len(self.plan.program)} instructions"
        return brief(
            self, quote(self.step.graph.name), f"{format_bytes(self.ram_bytes)} RAM", instructions
        )

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
        pages = {name: buffers[name].bytes for name in _list_paged_out(self.step, self.plan)}
        pass_pages = {
            pass_slot_name(forward_pass.kind, name): forward_pass.step.buffers[name].bytes
            for forward_pass in self.forward_passes
            for name in _list_paged_out(forward_pass.step, forward_pass.plan)
        }
        gradients = {
            gradient_slot_name(tensor): buffers[tensor.pieces[0].buffer].bytes
            for tensor in self.step.gradients
        }
        state = {
            name: buffers[name].bytes for name in self._state_names if self._has_page_slot(name)
        }
        return pages | pass_pages | gradients | state

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
        return self.commit and self.device is not None and self.device.is_volatile

    @cached_property
    def rotating_state(self) -> frozenset[str]:
        """Names of the state whose slots are in the generations on storage.

        A step writes state on storage directly to the next generation; a commit writes state in RAM
        there. Empty without commits, or if commits copy state to flash.
        """
        return frozenset(() if self.copies_to_flash else self.generation_names)

    def _written_state_names(self) -> Iterator[str]:
        """Yield the names of state on storage, once per write, in the order of a step's writes.

        For memory-mapped storage, yields all buffers that calls write but state in RAM; the caller
        drops activations.
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
        return GenerationLayout.for_device(self.device, checksums=self.checksum)

    @property
    def page_layout(self) -> GenerationLayout:
        """Write units and erase blocks of pages, which are the slots outside of generations.

        Those of `layout`, but volatile storage has no erase blocks: there the write unit is the
        default, and the alignment of the arena is used as the size of an erase block.
        """
        if self.device is None or not self.device.is_volatile:
            return self.layout
        return GenerationLayout(erase_block_bytes=self.arena.alignment)

    @property
    def _page_storage_bytes(self) -> int:
        """Size of the erase blocks of the slots outside of generations [B]."""
        block = self.page_layout.erase_block_bytes
        return sum(round_up(size, block) for size in self.page_bytes)

    @property
    def generations(self) -> int:
        """Number of generations that take turns; 0 without commits, 2 without rated erase cycles.

        Otherwise as many as fit, in groups of `generations_per_block`, from two groups (also if
        these do not fit) up to `MAX_GENERATIONS`. Program and storage use at most `NEARLY_FULL` of
        the flash.
        """
        if not self.generation_names:
            return 0
        if self.device is None or self._endurance_cycles is None:
            return 2
        flash, other_bytes = (
            self.device.flash,
            0 if self.copies_to_flash else self._page_storage_bytes,
        )
        other_bytes += self._best_generation_bytes + self.replay_bytes
        free_bytes = (self.device.aux_bytes or 0) - other_bytes
        if flash is not None and self.device.commits_to_flash:
            max_flash_bytes = int(NEARLY_FULL * flash.size_bytes) - sum(self.program_bytes.values())
            free_bytes = min(
                flash.storage_bytes - other_bytes if self.copies_to_flash else free_bytes,
                max_flash_bytes - other_bytes,
            )
        per_block = self.generations_per_block
        return (
            max(2, min(free_bytes // self._generation_group_bytes, MAX_GENERATIONS // per_block))
            * per_block
        )

    @property
    def generations_per_block(self) -> int:
        """Number of generations that share an erase block; 1 without commits or rated cycles."""
        causes_wear = self.generation_names and self._endurance_cycles is not None
        return self.layout.generations_per_block(self.generation_bytes) if causes_wear else 1

    @property
    def _generation_groups(self) -> int:
        """Number of groups of `generations_per_block` generations."""
        return self.generations // self.generations_per_block

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
        if self.device is None:
            return None
        memory = self.device.flash if self.copies_to_flash else self.device.storage
        return None if memory is None else memory.endurance_cycles

    @property
    def saved_bytes(self) -> int:
        """Size of the erase blocks of generations, also the best, and samples in flash [B].

        0 unless commits copy state to flash.
        """
        if not self.copies_to_flash:
            return 0
        return (
            self._generation_groups * self._generation_group_bytes
            + self._best_generation_bytes
            + self.replay_bytes
        )

    @property
    def stored_bytes(self) -> int:
        """Size of the erase blocks on storage [B].

        Samples and generations count unless they are in flash. At least the storage of the earlier
        step that is migrated, if any.
        """
        return self._stored_bytes(self._generation_groups)

    @property
    def min_stored_bytes(self) -> int:
        """The value of `stored_bytes` with at most two groups of generations [B]."""
        return self._stored_bytes(min(self._generation_groups, 2))

    def _stored_bytes(self, groups: int) -> int:
        """Return the bytes of erase blocks on storage with `groups` groups of generations.

        Only pages count if commits copy state to flash. At least the storage of the earlier step
        that is migrated, if any.
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
            else max(used_bytes, self.migration.source["stored_bytes"])
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

    @property
    def steps_until_worn(self) -> float | None:
        """Number of steps until the first block reaches its rated erase cycles; None if none does.

        Drivers do no wear levelling: each page stays in the same blocks, and generations take
        turns. Writes of samples and of the best generation are not counted.
        """
        if self._endurance_cycles is None:
            return None
        steps_per_erase = [1 / count for _, count in self.page_writes if not self.copies_to_flash]
        if self.generation_names:
            steps_per_erase.append(self.generations * self.commit_every)
        return self._endurance_cycles * min(steps_per_erase) if steps_per_erase else None

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
        return max(self.arena.bytes, 0, *map(self.pass_arena_bytes, self.forward_passes))

    def pass_arena_bytes(self, forward_pass: ForwardPass) -> int:
        """Return the arena size for the state in RAM and a forward pass [B]."""
        return self.resident_bytes + forward_pass.arena.bytes

    @property
    def forward_passes(self) -> tuple[ForwardPass, ...]:
        """The exported forward passes in evaluation mode."""
        return tuple(
            forward_pass
            for forward_pass in (self.inference, self.evaluation)
            if forward_pass is not None
        )

    def flash_map(self) -> dict[str, int]:
        """Return the bytes of each use of the device's flash; their sum is its size [B]."""
        if self.device is None or self.device.flash is None:
            return {}
        in_flash = self.device.stores_in_flash
        storage_bytes = self.stored_bytes if in_flash else self.saved_bytes
        sizes = {**self.program_bytes, "storage": storage_bytes}
        return sizes | {"free": self.device.flash.size_bytes - sum(sizes.values())}

    def ram_map(self) -> dict[str, int]:
        """Return the bytes of each use of RAM; their sum is the RAM limit [B]."""
        step, resident_tensors = self.step, self.plan.resident or ()
        state_bytes = sum(step.graph.tensor_bytes[i] for i in resident_tensors)
        optional_bytes = {} if self.inference is None else {"outputs": output_bytes(step)}
        if self.replay is not None:
            optional_bytes["stored samples"] = self.replay.ram_bytes
        return {
            "state in the arena": state_bytes,
            "the rest of the arena": self.arena_bytes - state_bytes,
            "inputs": input_bytes(step),
            **optional_bytes,
            "stack": self.stack_bytes,
            "runtime": RUNTIME_BYTES,
            "free": self.ram_bytes
            - self.arena_bytes
            - reserved_bytes(step, self.stack_bytes, self.replay),
        }


def _list_paged_out(step: LoweredStep, plan: Plan) -> list[str]:
    """Return the names of tensors that a plan pages out, in graph order, without replacements."""
    graph = step.graph
    paged_tensors = {i for (op, i) in plan.program if op == Op.PAGE_OUT and i not in graph.state_of}
    return [graph.tensors[i].name for i in sorted(paged_tensors)]


def pass_slot_name(kind: str, name: str) -> str:
    """Return the name of the slot of a tensor that a forward pass pages out."""
    return f"{name} of the {kind}"


def saved_slot_name(name: str) -> str:
    """Return the name of the slot of a state tensor in a generation that is a copy in flash."""
    return f"{name} in flash"


def gradient_slot_name(tensor: NamedTensor) -> str:
    """Return the name of the slot of a gradient that the program returns."""
    return f"gradient of {tensor.name}"


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
