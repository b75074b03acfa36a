"""Memory at one address: in RAM, or as a private mapping of a file.

Tensors and views of the memory show its current content in both cases. Writes to a private mapping
do not change the file, and the system records which pages were written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import torch

from poetmodel.plan.alignment import round_up
from poetmodel.torch.state.pages import bytes_of, checksum

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

PAGE_BYTES: Final = mmap.PAGESIZE
"""Granularity of the system's mappings [B]."""

# Constants of Linux headers, because Python's `mmap` does not accept an address.
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MREMAP_FLAGS: Final = 1 | 2  # MREMAP_MAYMOVE and MREMAP_FIXED
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_ENTRY_BYTES: Final = 8
"""Size of an entry of the page map [B]."""
_PRESENT_BITS: Final = np.uint64(3 << 62)
"""Bits of a page map entry that are set for pages in RAM or swap."""
_FILE_PAGE_BIT: Final = np.uint64(1 << 61)
"""Bit of a page map entry that is set for unwritten pages of a file."""


def _c_library() -> Any:
    """Return the C library, with the types of mmap, mremap and munmap set."""
    library = ctypes.CDLL(None, use_errno=True)
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes = (pointer, size, integer, integer, integer, ctypes.c_int64)
    library.mmap.restype = pointer
    library.mremap.argtypes = (pointer, size, size, integer, pointer)
    library.mremap.restype = pointer
    library.munmap.argtypes = (pointer, size)
    return library


def _check_address(address: int | None) -> int:
    """Return the address of a mapping; raise `OSError` if the call failed."""
    if address is None or address == _MAP_FAILED:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number))
    return address


def _map(
    address: int | None, span_bytes: int, flags: int, descriptor: int = -1, offset: int = 0
) -> int:
    """Map memory privately at `address`, or at a free address; return the address."""
    access, mode = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_NORESERVE
    return _check_address(
        _c_library().mmap(address, span_bytes, access, mode | flags, descriptor, offset)
    )


def _unmap(address: int, span_bytes: int) -> None:
    _c_library().munmap(address, span_bytes)


def release_memory() -> None:
    """Return free memory of the heap to the system, if the C library supports it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Memory:
    """A block of memory at a fixed address, initially zeros in RAM.

    The memory is freed when neither this object nor a tensor uses it.
    """

    def __init__(self, size_bytes: int) -> None:
        self._span_bytes = round_up(size_bytes, PAGE_BYTES)
        self._address = _map(None, self._span_bytes, mmap.MAP_ANONYMOUS)
        array = (ctypes.c_char * size_bytes).from_address(self._address)
        # The storage references the array, and each tensor references the storage.
        weakref.finalize(array, _unmap, self._address, self._span_bytes).atexit = False
        self.storage = torch.frombuffer(array, dtype=torch.uint8).untyped_storage()
        self.is_mapped = False
        """Whether the memory is a mapping of a file."""

    @property
    def is_lost(self) -> bool:
        """Whether PyTorch has moved the storage to other memory, such as by ``share_memory_``."""
        return bool(self.storage.data_ptr() != self._address)

    def is_memory_of(self, tensor: torch.Tensor) -> bool:
        """Return whether the storage of a tensor is this memory."""
        return not self.is_lost and bool(tensor.untyped_storage().data_ptr() == self._address)

    def map(self, descriptor: int, offset: int) -> None:
        """Map the memory to an offset of a file; the old content of the memory is lost."""
        _map(self._address, self._span_bytes, _MAP_FIXED, descriptor, offset)
        self.is_mapped = True

    def move_to_ram(self, fill: Callable[[memoryview], None]) -> None:
        """Move the memory to RAM, at the same address, with the content that `fill` writes.

        If `fill` or the system fails, the memory is unchanged.
        """
        size = self.storage.nbytes()
        new_address = _map(None, self._span_bytes, mmap.MAP_ANONYMOUS)
        try:
            array = (ctypes.c_char * size).from_address(new_address)
            fill(memoryview(array).cast("B"))
            library = _c_library()
            _check_address(
                library.mremap(
                    new_address, self._span_bytes, self._span_bytes, _MREMAP_FLAGS, self._address
                )
            )
        except BaseException:
            _unmap(new_address, self._span_bytes)
            raise
        self.is_mapped = False

    def read_access_flags(self, pages: Pagemap, file_checksum: int) -> tuple[bool, bool]:
        """Return (whether the memory was accessed, whether it was written) since it was mapped.

        Without page information, the first is always True, and `file_checksum` decides the second.
        """
        entries = pages.read_entries(self._address, self._span_bytes)
        if entries is None:
            return True, checksum(bytes_of(self.storage)) != file_checksum
        return bool(np.any(entries & _PRESENT_BITS)), bool(np.any(_written_pages(entries)))

    def copy_written(self, pages: Pagemap, memory: memoryview) -> None:
        """Copy the pages written since the memory was mapped to the same offsets of `memory`."""
        content = bytes_of(self.storage)
        entries = pages.read_entries(self._address, self._span_bytes)
        if entries is None:
            memory[:] = content
            return
        for page_index in np.flatnonzero(_written_pages(entries)):
            page_range = slice(page_index * PAGE_BYTES, (page_index + 1) * PAGE_BYTES)
            memory[page_range] = content[page_range]


def _written_pages(entries: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return for each page of a private mapping whether it was written."""
    is_written: NDArray[np.bool_] = ((entries & _PRESENT_BITS) != 0) & (
        (entries & _FILE_PAGE_BIT) == 0
    )
    return is_written


class Pagemap:
    """The system's page map of this process. Use the object in a ``with`` block."""

    def __enter__(self) -> Self:
        self._descriptor: int | None = None
        with suppress(OSError):
            self._descriptor = os.open("/proc/self/pagemap", os.O_RDONLY)
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def read_entries(self, address: int, span_bytes: int) -> NDArray[np.uint64] | None:
        """Return the page map's entry of each page of a memory range; None if it is refused."""
        if self._descriptor is None:
            return None
        entries_bytes = span_bytes // PAGE_BYTES * _ENTRY_BYTES
        content = b""
        with suppress(OSError):  # some systems permit opening, but not reading
            content = os.pread(
                self._descriptor, entries_bytes, address // PAGE_BYTES * _ENTRY_BYTES
            )
        return np.frombuffer(content, dtype=np.uint64) if len(content) == entries_bytes else None
