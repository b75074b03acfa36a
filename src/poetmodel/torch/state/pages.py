"""Pages: storages of tensors that lie in a file, and their way there and back.

Memory of a tensor may stay at one address for its life, in RAM or as a private mapping of a file:
whoever holds the tensor, or a view of it, sees what is there now, wherever that is. What is written
to a private mapping stays in the process: the file is as before, and the system knows which pages
were written.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import tempfile
import time
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import numpy as np
import torch

from poetmodel.errors import InputError
from poetmodel.plan.alignment import round_up
from poetmodel.torch.errors import PageError
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from poetmodel.torch.graph.step_graph import TensorStorage

ALIGNMENT_BYTES: Final = 4096
"""Every page begins at a multiple of this, so that the copies of one never hold part of another."""

PREFIX: Final = ".poetmodel-pages-"
"""How the names of page files begin."""

_SETTLED_S: Final = 60.0
"""After so long whoever made a file has locked it [s]."""
_WORD_BYTES: Final = 8
_ROW_WORDS: Final = ALIGNMENT_BYTES // _WORD_BYTES
_TAIL_WEIGHTS: Final = np.arange(1, 2 * ALIGNMENT_BYTES, 2 * _WORD_BYTES, dtype=np.uint64)


class ScratchFile:
    """A file in the user's folder whose pages are read again by the process that wrote them.

    The folder is made if it is not there. The file is removed with the object. Each page is read
    back against its checksum.

    A page-out is ``pwrite`` and ``fdatasync``, after which the copy in the file cache is dropped
    (``POSIX_FADV_DONTNEED``); a page-in drops it too. So a page that is out takes no RAM.
    """

    bytes: int
    """Size of the file [B]."""

    def __init__(self, folder: str | Path) -> None:
        self.written_bytes = self.read_bytes = 0
        self._folder = folder
        self._make()

    def _make(self) -> None:
        folder = self._folder
        make_folder(folder)
        remove_left(folder, f"{PREFIX}*")
        try:
            self._descriptor, name = tempfile.mkstemp(prefix=PREFIX, dir=folder)
        except OSError as error:
            raise InputError(
                f"{folder}: no page file can be made here ({error.strerror or error})"
            ) from None
        with suppress(OSError):  # where files cannot be locked, nobody removes those of others
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = Path(name)
        self.process = os.getpid()
        self._remove = weakref.finalize(self, _remove, self._descriptor, self.path, self.process)
        self._sums: dict[int, int] = {}

    def _write(self, offset: int, memory: memoryview, page: str) -> None:
        """Write a page, and return when the medium has it; messages call it `page`."""
        self._sums[offset] = checksum(memory)
        with page_errors(self.path, f"{page} could not be written"):
            write_page(self._descriptor, memory, offset)
        self.written_bytes += len(memory)

    def _read(self, offset: int, memory: memoryview, page: str) -> None:
        """Read a page, and check that it is what was written."""
        read_checked(self.path, self._descriptor, memory, offset, self._sums[offset], page)
        self.read_bytes += len(memory)


class PageFile(ScratchFile):
    """A file of its full size from the beginning; one page per storage."""

    def __init__(self, folder: str | Path, storages: Iterable[TensorStorage]) -> None:
        self.storages = {storage.index: storage for storage in storages}
        self.offsets: dict[int, int] = {}
        """First byte in the file of each storage, by its number."""
        self.bytes = 0
        for index, storage in self.storages.items():
            self.offsets[index] = round_up(self.bytes, ALIGNMENT_BYTES)
            self.bytes = self.offsets[index] + storage.bytes
        self._closed = False
        super().__init__(folder)

    def close(self) -> None:
        """Remove the file; no step can run any more."""
        self._closed = True
        self._remove()

    def check(self) -> None:
        """Raise `PageError` if it was closed; a forked process makes a file of its own."""
        if self._closed:
            raise PageError(
                f"{self.path}: the step was closed, and its page file removed; compile again"
            )
        if self.process != os.getpid():
            self._remove()
            try:
                self._make()
            except InputError as error:
                raise PageError(str(error)) from None

    def write(self, index: int, memory: memoryview) -> None:
        """Write the page of a storage, and return when the medium has it."""
        self._write(self.offsets[index], memory, self._named(index))

    def read(self, index: int, memory: memoryview) -> None:
        """Read the page of a storage, and check that it is what was written."""
        self._read(self.offsets[index], memory, self._named(index))

    def _make(self) -> None:
        super()._make()
        try:
            os.posix_fallocate(self._descriptor, 0, max(self.bytes, 1))
        except OSError as error:
            self._remove()
            raise InputError(
                f"{self._folder}: no room for a page file of {format_bytes(self.bytes)} "
                f"({error.strerror or error}); free some, or page less"
            ) from None

    def _named(self, index: int) -> str:
        return f"tensor {self.storages[index].name!r}"


def write_page(descriptor: int, memory: memoryview, offset: int) -> None:
    """Write a page, return when the medium has it, and drop its copy in the file cache."""
    done = 0
    while done < len(memory):
        done += os.pwrite(descriptor, memory[done:], offset + done)
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)


def read_page(descriptor: int, memory: memoryview, offset: int) -> int:
    """Read a page; return how much of it there is [B]."""
    done = 0
    while done < len(memory):
        got = os.preadv(descriptor, [memory[done:]], offset + done)
        if got == 0:
            break
        done += got
    return done


def read_checked(
    path: Path, descriptor: int, memory: memoryview, offset: int, total: int, page: str
) -> None:
    """Read a page without a copy in the file cache; raise `PageError` unless it has a checksum."""
    size = len(memory)
    with page_errors(path, f"{page} could not be read"):
        done = read_page(descriptor, memory, offset)
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
    if done < size:
        raise PageError(
            f"{path}: {page}: only {done:,} of {size:,} B could be read; the file was cut"
        )
    if checksum(memory) != total:
        raise PageError(
            f"{path}: {page} is not what was written; something changed the file, or the medium "
            "is failing"
        )


@contextmanager
def page_errors(path: Path, fault: str) -> Iterator[None]:
    """Turn what the system refuses into a `PageError`."""
    try:
        yield
    except OSError as error:
        raise PageError(f"{path}: {fault}: {error.strerror or error}") from None


def make_folder(folder: str | Path) -> None:
    """Make the folder for pages if it is not there; raise `InputError` if that fails."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{folder}: no page file can be made here ({reason})") from None


def remove_left(folder: str | Path, pattern: str) -> None:
    """Remove files that killed processes have left; a running one has locked its own."""
    for path in Path(folder).glob(pattern):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if time.time() - os.fstat(descriptor).st_mtime > _SETTLED_S:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            finally:
                os.close(descriptor)


def _remove(descriptor: int, path: Path, process: int) -> None:
    """Close the file; remove it in the process that made it, and not in forked ones."""
    os.close(descriptor)
    if os.getpid() == process:
        with suppress(OSError):
            path.unlink()


class Pageable(Protocol):
    """A file with a page for each of some storages."""

    storages: dict[int, TensorStorage]

    def write(self, index: int, memory: memoryview) -> None:
        """Write the page of a storage."""

    def read(self, index: int, memory: memoryview) -> None:
        """Read the page of a storage."""


class Pages:
    """Pager of a program.

    State has its pages in a file of its own; `homes` has the number there of state and of what
    replaces it.
    """

    def __init__(
        self,
        file: PageFile | None,
        *,
        state: Pageable | None = None,
        homes: Mapping[int, int] | None = None,
    ) -> None:
        self._file = file
        self._state = state
        self._homes = homes or {}

    def out(self, index: int, tensor: torch.Tensor) -> None:
        """Write the storage behind a tensor."""
        file, number = self._place(index)
        file.write(number, bytes_of(tensor.untyped_storage()))

    def into(self, index: int) -> Any:
        """Read a storage; return the tensors in it, one or a tuple."""
        file, number = self._place(index)
        storage, tensors = blank(file.storages[number])
        file.read(number, bytes_of(storage))
        return tensors

    def _place(self, index: int) -> tuple[Any, int]:
        """Return the file of a page, and its number there."""
        number = self._homes.get(index)
        return (self._file, index) if number is None else (self._state, number)


def blank(page: TensorStorage) -> tuple[torch.UntypedStorage, Any]:
    """Return new memory for a page, and the tensors that lie in it, one or a tuple."""
    storage = torch.UntypedStorage(page.bytes)
    tensors = tuple(
        torch.empty(0, dtype=layout.dtype).set_(storage, layout.offset, layout.shape, layout.stride)
        for layout in page.layouts
    )
    return storage, tensors[0] if len(tensors) == 1 else tensors


def bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """Return the memory of a storage; valid as long as the storage is."""
    array = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(array).cast("B")


def checksum(memory: memoryview) -> int:
    """Return a sum that changes with any one word of a page, and when blocks change places.

    Words of 8 B are summed by blocks of 4 KiB, and the sums with odd weights, all modulo 2^64; that
    takes as long as reading the memory once, a fifth of the time of a CRC.

    Examples
    --------
    >>> checksum(memoryview(bytes(8))), checksum(memoryview(bytes(7) + b"x"))
    (0, 8646911284551352320)
    """
    blocks, rest = divmod(len(memory), ALIGNMENT_BYTES)
    total = 0
    if blocks:
        whole = memory[: blocks * ALIGNMENT_BYTES]
        words = np.frombuffer(whole, dtype=np.uint64).reshape(-1, _ROW_WORDS)
        sums = words.sum(axis=1, dtype=np.uint64)
        total = int(sums @ np.arange(1, 2 * blocks, 2, dtype=np.uint64))
    if rest:
        last = bytes(memory[-rest:]) + bytes(-rest % _WORD_BYTES)
        words = np.frombuffer(last, dtype=np.uint64)
        total += int(words @ (_TAIL_WEIGHTS[: len(words)] + np.uint64(2 * blocks)))
    return total % 2**64


# -- memory at one address ---------------------------------------------------------------------

PAGE_BYTES: Final = mmap.PAGESIZE
"""Granularity of the system's mappings [B]."""

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
        self._span = round_up(size_bytes, PAGE_BYTES)
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
        """Whether a tensor lies in it."""
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
        """Whether it was read or written since it was mapped, and whether it was written.

        `total` is the checksum of what the file has, for systems that do not tell.
        """
        entries = pages.entries(self._address, self._span)
        if entries is None:
            return True, checksum(bytes_of(self.storage)) != total
        return bool(np.any(entries & _THERE)), bool(np.any(_written(entries)))

    def copy_written(self, pages: Pagemap, memory: memoryview) -> None:
        """Copy what was written to it since it was mapped to the same places in other memory."""
        own = bytes_of(self.storage)
        entries = pages.entries(self._address, self._span)
        if entries is None:
            memory[:] = own
            return
        for page in np.flatnonzero(_written(entries)):
            part = slice(page * PAGE_BYTES, (page + 1) * PAGE_BYTES)
            memory[part] = own[part]


def _written(entries: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return the pages of a private mapping that are no longer those of the file."""
    written: NDArray[np.bool_] = ((entries & _THERE) != 0) & ((entries & _OF_FILE) == 0)
    return written


class Pagemap:
    """The system's view of this process's pages; use it in a ``with`` block."""

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
        content = b""
        with suppress(OSError):  # some systems let it be opened, and refuse to read it
            content = os.pread(self._descriptor, size, address // PAGE_BYTES * _ENTRY_BYTES)
        return np.frombuffer(content, dtype=np.uint64) if len(content) == size else None
