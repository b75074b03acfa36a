"""An export: its programs and their C, with the usage of RAM, flash and storage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Self

from poetmodel.errors import quote
from poetmodel.export.flash import program_sizes
from poetmodel.export.reserves import RUNTIME_BYTES, input_bytes, output_bytes, reserved_bytes
from poetmodel.export.source import Source
from poetmodel.export.storage import NEARLY_FULL, StorageLayout
from poetmodel.units import brief, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.result import SolveResult
    from poetmodel.solver.tile_trials import TileTrial

MAX_GENERATIONS: Final = 4096
"""Maximum number of generations that take turns: a restart reads the record of each."""


@dataclass(frozen=True, kw_only=True)
class Build(StorageLayout):
    """Programs with their C, and their use of flash and storage."""

    source: Source
    """The generated C."""

    @classmethod
    def from_layout(cls, layout: StorageLayout) -> Self:
        """Generate the C of a layout."""
        return cls(**layout.field_values(), source=Source(layout))

    @cached_property
    def program_bytes(self) -> Mapping[str, int]:
        """Flash usage by use, without storage [B]."""
        return program_sizes(self.source)

    @cached_property
    def generations(self) -> int:
        """Number of generations that take turns; 0 without commits, 2 without rated erase cycles.

        Otherwise as many as fit, in groups of `generations_per_block`, from two groups (also if
        these do not fit) up to `MAX_GENERATIONS`. Program and storage use at most `NEARLY_FULL` of
        the flash.
        """
        if not self.generation_names:
            return 0
        if self._endurance_cycles is None:
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
    def _generation_groups(self) -> int:
        """Number of groups of `generations_per_block` generations."""
        return self.generations // self.generations_per_block

    @property
    def saved_bytes(self) -> int:
        """Size of the erase blocks of generations, also the best, and samples in flash [B].

        0 unless commits copy state to flash.
        """
        return self._saved_bytes(self._generation_groups)

    @property
    def stored_bytes(self) -> int:
        """Size of the erase blocks on storage [B].

        Samples and generations count unless they are in flash. At least the storage of the earlier
        step that is migrated, if any.
        """
        return self._stored_bytes(self._generation_groups)

    @property
    def steps_until_worn(self) -> float | None:
        """Number of steps until the first block reaches its rated erase cycles; None if none does.

        It is None, too, if the rated erase cycles are unknown.

        Drivers do no wear levelling: each page stays in the same blocks, and generations take
        turns. Writes of samples and of the best generation are not counted.
        """
        if self._endurance_cycles is None:
            return None
        steps_per_erase = [1 / count for _, count in self.page_writes if not self.copies_to_flash]
        if self.generation_names:
            steps_per_erase.append(self.generations * self.commit_every)
        return self._endurance_cycles * min(steps_per_erase) if steps_per_erase else None

    def flash_map(self) -> dict[str, int]:
        """Return the bytes of each use of the device's flash; their sum is its size [B].

        ``free`` is negative if the uses exceed the size. Empty if the device states no flash.
        """
        if self.device.flash is None:
            return {}
        in_flash = self.device.stores_in_flash
        storage_bytes = self.stored_bytes if in_flash else self.saved_bytes
        sizes = {**self.program_bytes, "storage": storage_bytes}
        return sizes | {"free": self.device.flash.size_bytes - sum(sizes.values())}


@dataclass(frozen=True, kw_only=True)
class Deployment(Build):
    """An exported step, with its plan, offsets, limits and options."""

    result: SolveResult
    """Result of the solve of the step."""
    tile_bytes: int | None
    """Maximum size of a tile [B]; None for a step without tiles."""
    tile_trials: tuple[TileTrial, ...]
    """Trials of tile sizes for ``auto``, that of `tile_bytes` included; empty if no trial compared
    sizes."""

    def __repr__(self) -> str:
        instructions = f"{len(self.plan.program)} instructions"
        return brief(
            self, quote(self.step.graph.name), f"{format_bytes(self.ram_bytes)} RAM", instructions
        )

    def ram_map(self) -> dict[str, int]:
        """Return the bytes of each use of RAM, and ``free``; their sum is the RAM limit [B]."""
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
