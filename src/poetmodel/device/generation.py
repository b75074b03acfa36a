"""Layout and size of one generation of committed state on storage.

Tensors, each rounded up to write units and followed by its checksum, are in the order in which a
step writes them, between a record and a seal. ``pm.h`` and ``port/pm_pages.h`` of an exported
folder compute the same layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from poetmodel.device.hardware import Device

RECORD_BYTES: Final = 32
"""Size of the record at the start of a generation [B]: ``src/pm_generation.h``."""
SEAL_BYTES: Final = 8
"""Size of the seal at the end of a generation [B], which is written last, in one write."""
CHECKSUM_BYTES: Final = 4
"""Size of a tensor's checksum [B]."""
DEFAULT_ERASE_BLOCK_BYTES: Final = 4096
"""Size of an erase block if the device states none [B]."""
MIN_WRITE_UNIT_BYTES: Final = 4
"""Minimum alignment of tensors, checksums, record and seal [B]."""


FLASH_PAGE_BYTES: Final = 256
"""Size of a page of usual NOR flash [B]; generations in one erase block share no page."""
WRITE_PADDING_BYTES: Final = 64
"""Spare bytes for each write (record, tensor, seal) of a generation that shares an erase block, for
drivers with larger write units [B]."""


@dataclass(frozen=True, slots=True)
class GenerationLayout:
    """Alignment and extra bytes of generations on storage."""

    write_unit_bytes: int = 1
    """Write unit of the storage [B]; at least `MIN_WRITE_UNIT_BYTES` are used."""
    erase_block_bytes: int = DEFAULT_ERASE_BLOCK_BYTES
    """Size of an erase block [B]; a generation begins at a multiple of it, unless several share a
    block."""
    checksums: bool = True
    """Whether a checksum follows each tensor."""

    @classmethod
    def for_device(cls, device: Device | None, *, checksums: bool = True) -> GenerationLayout:
        """Return the layout on a device: of flash if it takes commits, the default for None."""
        flash = None if device is None or not device.commits_to_flash else device.flash
        if flash is not None:
            return cls(flash.write_unit_bytes, flash.erase_block_bytes, checksums)
        storage = None if device is None else device.storage
        block_bytes = None if storage is None else storage.erase_block_bytes
        return cls(erase_block_bytes=block_bytes or DEFAULT_ERASE_BLOCK_BYTES, checksums=checksums)

    @property
    def record_and_seal_bytes(self) -> tuple[int, int]:
        """Storage of the record and of the seal, each of which is one write [B]."""
        return self._round_to_units(RECORD_BYTES), self._round_to_units(SEAL_BYTES)

    def stored_bytes(self, tensor_bytes: int) -> int:
        """Return the storage of a tensor of `tensor_bytes`, including its checksum [B]."""
        checksum_bytes = self._round_to_units(CHECKSUM_BYTES) if self.checksums else 0
        return self._round_to_units(tensor_bytes) + checksum_bytes

    def size_bytes(self, sizes: Iterable[int]) -> int:
        """Return the storage of a generation: record, tensors of `sizes`, and seal [B]."""
        return sum(self.record_and_seal_bytes) + sum(map(self.stored_bytes, sizes))

    def n_blocks(self, sizes: Iterable[int]) -> int:
        """Return the number of erase blocks of a generation with tensors of `sizes` [B]."""
        return -(-self.size_bytes(sizes) // self.erase_block_bytes)

    def generations_per_block(self, sizes: Sequence[int]) -> int:
        """Return the number of generations that can share an erase block: an even number, or 1.

        `sizes` are those of the tensors of a generation [B].

        A block is erased only before its first generation is written. The number is even because a
        double-precision build stores half as many generations in a block. ``PM_BLOCK_GENERATIONS``
        is this number, but at most half of ``PM_GENERATIONS``, rounded down to an even number, or
        1.
        """
        page_bytes = self._round_to_units(FLASH_PAGE_BYTES)
        size = self.size_bytes(sizes) + WRITE_PADDING_BYTES * (len(sizes) + 2)
        # As PM_PITCH_OF in pm.h, which gives a multiple of the page one more page.
        pitch_bytes = (size // page_bytes + 1) * page_bytes
        return max(1, self.erase_block_bytes // pitch_bytes // 2 * 2)

    def _round_to_units(self, size_bytes: int) -> int:
        unit = max(MIN_WRITE_UNIT_BYTES, self.write_unit_bytes)
        return -(-size_bytes // unit) * unit
