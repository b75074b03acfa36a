"""Where the tensors of one generation of committed state lie on storage, and what they take.

They lie back to back in the order in which a step writes them, between a record and a seal.
``port/pm_pages.h`` of an exported folder calculates the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from poetmodel.device.hardware import Device

RECORD_BYTES: Final = 32
"""Size of the record in which a generation begins [B]: ``src/pm_record.h``."""
SEAL_BYTES: Final = 8
"""Size of the seal in which it ends, which a power cut leaves as it was or makes whole [B]."""
SUM_BYTES: Final = 4
"""Size of a tensor's checksum [B]."""
BLOCK_BYTES: Final = 4096
"""Usual erase block of flash [B]."""
LEAST_UNIT_BYTES: Final = 4
"""Tensors, sums and records begin at multiples of this at least [B]."""


PAGE_BYTES: Final = 256
"""Generations in one erase block share no multiple of this, a page of usual NOR flash [B]."""
PADDING_BYTES: Final = 64
"""Room left for each slot of such a generation, for a driver that finds larger write units [B]."""


@dataclass(frozen=True, slots=True)
class GenerationLayout:
    """How storage is written: in which units, in which blocks, and with what beside tensors."""

    write_unit_bytes: int = 1
    """Write unit of the storage [B]."""
    erase_block_bytes: int = BLOCK_BYTES
    """Erase block, at which a generation begins [B]."""
    checksums: bool = True
    """Whether each tensor is followed by its checksum."""

    @classmethod
    def on(cls, device: Device | None, *, checksums: bool = True) -> GenerationLayout:
        """Return the layout where a device keeps generations: in its flash, else on its storage."""
        flash = None if device is None or not device.commits_to_flash else device.flash
        if flash is not None:
            return cls(flash.write_unit_bytes, flash.erase_block_bytes, checksums)
        storage = None if device is None else device.storage
        block_bytes = None if storage is None else storage.erase_block_bytes
        return cls(erase_block_bytes=block_bytes or BLOCK_BYTES, checksums=checksums)

    @property
    def end_bytes(self) -> tuple[int, int]:
        """Storage of the record and of the seal, each of which is a write of its own [B]."""
        return self._in_units(RECORD_BYTES), self._in_units(SEAL_BYTES)

    def padded(self, size_bytes: int) -> int:
        """Return the storage of a tensor of some bytes, its checksum included [B]."""
        more = self._in_units(SUM_BYTES) if self.checksums else 0
        return self._in_units(size_bytes) + more

    def size_bytes(self, sizes: Iterable[int]) -> int:
        """Return the storage of a generation: record, tensors of these sizes, and seal [B]."""
        return sum(self.end_bytes) + sum(map(self.padded, sizes))

    def blocks(self, sizes: Iterable[int]) -> int:
        """Return the number of blocks in a generation, all of which a commit erases."""
        return -(-self.size_bytes(sizes) // self.erase_block_bytes)

    def in_one_block(self, sizes: Sequence[int]) -> int:
        """Return the number of generations that can share an erase block: even, or 1.

        Two such blocks keep the newest one, as a block is erased before its first generation only.
        ``PM_BLOCK_GENERATIONS`` of an exported folder is the same.
        """
        unit = max(LEAST_UNIT_BYTES, self.write_unit_bytes)
        step = (PAGE_BYTES - 1 + unit) // unit * unit
        size = self.size_bytes(sizes) + PADDING_BYTES * (len(sizes) + 2)
        return max(1, self.erase_block_bytes // ((size + step) // step * step) // 2 * 2)

    def _in_units(self, size_bytes: int) -> int:
        unit = max(LEAST_UNIT_BYTES, self.write_unit_bytes)
        return -(-size_bytes // unit) * unit
