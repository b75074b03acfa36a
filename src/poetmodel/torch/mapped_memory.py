"""Memory of a tensor at one address for its life: in RAM, or a private mapping of a file.

Whoever holds the tensor, or a view of it, sees what is there now, wherever that is. What is written
to a private mapping stays in the process: the file is as before, and the system knows which pages
were written.
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

from poetmodel.torch.pages import bytes_of, checksum

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

PAGE_BYTES: Final = mmap.PAGESIZE
"""What the system maps at once [B]."""

# From the headers of Linux; Python's `mmap` cannot say at which address.
_FIXED: Final = 0x10
_NO_RESERVE: Final = 0x4000
_MOVE_TO: Final = 1 | 2
_FAILED: Final = ctypes.c_void_p(-1).value

_ENTRY_BYTES: Final = 8
_THERE: Final = np.uint64(3 << 62)
"""In RAM, or swapped out."""
_OF_FILE: Final = np.uint64(1 << 61)


def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_int64)
    library.mmap.restype = pointer
    library.mremap.argtypes = (pointer, size, size, number, pointer)
    library.mremap.restype = pointer
    library.munmap.argtypes = (pointer, size)
    return library


def _checked(address: int | None) -> int:
    if address is None or address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return address


def _map(address: int | None, span: int, flags: int, descriptor: int = -1, offset: int = 0) -> int:
    access, kept = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _NO_RESERVE
    return _checked(_library().mmap(address, span, access, kept | flags, descriptor, offset))


def _unmap(address: int, span: int) -> None:
    _library().munmap(address, span)


def release_memory() -> None:
    """Give back to the system what is free in the heap, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Memory:
    """Memory of some bytes, at least one; in RAM and zero in the beginning."""

    def __init__(self, size_bytes: int) -> None:
        self._span = -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        self._address = _map(None, self._span, mmap.MAP_ANONYMOUS)
        array = (ctypes.c_char * size_bytes).from_address(self._address)
        # The storage holds the array, and every tensor in it the storage.
        weakref.finalize(array, _unmap, self._address, self._span).atexit = False
        self.storage = torch.frombuffer(array, dtype=torch.uint8).untyped_storage()
        self.is_mapped = False
        """Whether it is a mapping of a file."""

    @property
    def is_lost(self) -> bool:
        """Whether its storage has moved elsewhere, as by ``share_memory_``; nobody has it then."""
        return bool(self.storage.data_ptr() != self._address)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in it."""
        return not self.is_lost and bool(tensor.untyped_storage().data_ptr() == self._address)

    def map(self, descriptor: int, offset: int) -> None:
        """Let it be what a file has there; drop what was in its place."""
        _map(self._address, self._span, _FIXED, descriptor, offset)
        self.is_mapped = True

    def load(self, fill: Callable[[memoryview], None]) -> None:
        """Let it be RAM again, with what `fill` writes; if that fails nothing has changed."""
        size = self.storage.nbytes()
        new = _map(None, self._span, mmap.MAP_ANONYMOUS)
        try:
            array = (ctypes.c_char * size).from_address(new)
            fill(memoryview(array).cast("B"))
            library = _library()
            _checked(library.mremap(new, self._span, self._span, _MOVE_TO, self._address))
        except BaseException:
            _unmap(new, self._span)
            raise
        self.is_mapped = False

    def look(self, pages: Pagemap, total: int) -> tuple[bool, bool]:
        """Return whether it was read or written since it was mapped, and whether it was written.

        `total` is the checksum of what the file has, for systems that do not tell.
        """
        found = pages.entries(self._address, self._span)
        if found is None:
            return True, checksum(bytes_of(self.storage)) != total
        return bool(np.any(found & _THERE)), bool(np.any(_written(found)))

    def copy_written(self, pages: Pagemap, memory: memoryview) -> None:
        """Copy what was written to it since it was mapped to the same places in other memory."""
        own = bytes_of(self.storage)
        found = pages.entries(self._address, self._span)
        if found is None:
            memory[:] = own
            return
        for page in np.flatnonzero(_written(found)):
            part = slice(page * PAGE_BYTES, (page + 1) * PAGE_BYTES)
            memory[part] = own[part]


def _written(entries: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which pages of a private mapping are no longer those of the file."""
    found: NDArray[np.bool_] = ((entries & _THERE) != 0) & ((entries & _OF_FILE) == 0)
    return found


class Pagemap:
    """What the system tells of the pages of this process; use it in a ``with`` block."""

    def __enter__(self) -> Self:
        self._descriptor: int | None = None
        with suppress(OSError):
            self._descriptor = os.open("/proc/self/pagemap", os.O_RDONLY)
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def entries(self, address: int, span: int) -> NDArray[np.uint64] | None:
        """Return an entry for each page of some memory; None where the system does not tell."""
        if self._descriptor is None:
            return None
        size = span // PAGE_BYTES * _ENTRY_BYTES
        found = b""
        with suppress(OSError):  # some systems let it be opened, and refuse to read it
            found = os.pread(self._descriptor, size, address // PAGE_BYTES * _ENTRY_BYTES)
        return np.frombuffer(found, dtype=np.uint64) if len(found) == size else None
