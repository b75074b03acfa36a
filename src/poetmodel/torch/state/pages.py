"""Pages: storages of tensors in a file, and transfers between RAM and file.

A `Memory` has one address, in RAM or as a private mapping of a file: tensors and views of the
memory show its current content in both cases. Writes to a private mapping do not change the file,
and the system records which pages were written.
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
"""Offsets of pages are multiples of this size, so that no block of the file cache contains two
pages [B]."""

PREFIX: Final = ".poetmodel-pages-"
"""Prefix of the names of page files."""

_LOCK_TIMEOUT_S: Final = 60.0
"""An unlocked file whose last change is older is abandoned: a process locks a new file much
earlier [s]."""
_WORD_BYTES: Final = 8
"""Size of the words that a checksum adds [B]."""
_ROW_WORDS: Final = ALIGNMENT_BYTES // _WORD_BYTES
"""Number of words in a block of a checksum."""
_TAIL_WEIGHTS: Final = np.arange(1, 2 * ALIGNMENT_BYTES, 2 * _WORD_BYTES, dtype=np.uint64)
"""Weights of the words of an incomplete block; twice the number of complete blocks is added."""


class ScratchFile:
    """A file in the user's folder, whose pages only the process that wrote them reads.

    A new object removes page files that killed processes have left. The file is removed when the
    object is deleted or the process exits normally. A page-out is ``pwrite`` and ``fdatasync``;
    page-outs and page-ins drop the copy in the file cache, so that a paged-out page takes no RAM.
    Each read checks a checksum.
    """

    bytes: int
    """Size of the file [B]."""

    def __init__(self, folder: str | Path) -> None:
        self.written_bytes = self.read_bytes = 0
        """Bytes of pages written and read so far [B]."""
        self._folder = folder
        self._create()

    def _create(self) -> None:
        """Create the file, and lock it if possible; remove abandoned page files from the folder."""
        folder = self._folder
        make_folder(folder)
        remove_abandoned(folder, f"{PREFIX}*")
        try:
            self._descriptor, name = tempfile.mkstemp(prefix=PREFIX, dir=folder)
        except OSError as error:
            raise InputError(
                f"{folder}: no page file can be created here ({error.strerror or error})"
            ) from None
        # On a file system without locks, other processes do not remove the file.
        with suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = Path(name)
        self.process = os.getpid()
        self._remove = weakref.finalize(self, _remove, self._descriptor, self.path, self.process)
        self._checksums: dict[int, int] = {}

    def _write_page(self, offset: int, memory: memoryview, page_name: str) -> None:
        """Write a page, called `page_name` in messages; return when the medium has stored it."""
        self._checksums[offset] = checksum(memory)
        with convert_page_errors(self.path, f"{page_name} could not be written"):
            write_page(self._descriptor, memory, offset)
        self.written_bytes += len(memory)

    def _read_page(self, offset: int, memory: memoryview, page_name: str) -> None:
        """Read a page, called `page_name` in messages, into `memory`, and check it."""
        read_checked(
            self.path, self._descriptor, memory, offset, self._checksums[offset], page_name
        )
        self.read_bytes += len(memory)


class PageFile(ScratchFile):
    """A page file of fixed size, with one page per storage."""

    def __init__(self, folder: str | Path, storages: Iterable[TensorStorage]) -> None:
        self.storages = {storage.index: storage for storage in storages}
        self.offsets: dict[int, int] = {}
        """Offset of the page of each storage in the file [B]."""
        self.bytes = 0
        for index, storage in self.storages.items():
            self.offsets[index] = round_up(self.bytes, ALIGNMENT_BYTES)
            self.bytes = self.offsets[index] + storage.bytes
        self._is_closed = False
        super().__init__(folder)

    def close(self) -> None:
        """Remove the file, so that `check` raises `PageError`. A forked process only closes it."""
        self._is_closed = True
        self._remove()

    def check(self) -> None:
        """Raise `PageError` if the file was closed; create a new, empty one in a forked process."""
        if self._is_closed:
            raise PageError(
                f"{self.path}: the step was closed, and its page file removed; compile again"
            )
        if self.process != os.getpid() or not self._remove.alive:
            self._remove()
            try:
                self._create()
            except InputError as error:
                raise PageError(str(error)) from None

    def write(self, index: int, memory: memoryview) -> None:
        """Write the page of a storage, and return when the medium has stored it."""
        self._write_page(self.offsets[index], memory, self._page_name(index))

    def read(self, index: int, memory: memoryview) -> None:
        """Read the page of a storage into `memory`, and check it."""
        self._read_page(self.offsets[index], memory, self._page_name(index))

    def _create(self) -> None:
        """Create the file as `ScratchFile` does, and allocate its full size."""
        super()._create()
        try:
            os.posix_fallocate(self._descriptor, 0, max(self.bytes, 1))
        except OSError as error:
            self._remove()
            raise InputError(
                f"{self._folder}: not enough space for a page file of {format_bytes(self.bytes)} "
                f"({error.strerror or error}); free some space, or page less"
            ) from None

    def _page_name(self, index: int) -> str:
        return f"tensor {self.storages[index].name!r}"


def write_page(descriptor: int, memory: memoryview, offset: int) -> None:
    """Write a page, flush it to the medium, and drop its copy in the file cache."""
    written_bytes = 0
    while written_bytes < len(memory):
        written_bytes += os.pwrite(descriptor, memory[written_bytes:], offset + written_bytes)
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)


def read_page(descriptor: int, memory: memoryview, offset: int) -> int:
    """Read from `offset` until `memory` is full or the file ends; return the bytes read [B]."""
    total_bytes = 0
    while total_bytes < len(memory):
        read_bytes = os.preadv(descriptor, [memory[total_bytes:]], offset + total_bytes)
        if read_bytes == 0:
            break
        total_bytes += read_bytes
    return total_bytes


def read_checked(
    path: Path,
    descriptor: int,
    memory: memoryview,
    offset: int,
    expected_checksum: int,
    page_name: str,
) -> None:
    """Read a page into `memory`, check it, and retain no copy in the file cache."""
    size = len(memory)
    with convert_page_errors(path, f"{page_name} could not be read"):
        read_bytes = read_page(descriptor, memory, offset)
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
    if read_bytes < size:
        raise PageError(
            f"{path}: {page_name}: only {read_bytes:,} of {size:,} B could be read; the file was "
            "truncated"
        )
    if checksum(memory) != expected_checksum:
        raise PageError(
            f"{path}: {page_name} does not match its checksum; the file was changed, or the "
            "medium is failing"
        )


@contextmanager
def convert_page_errors(path: Path, message: str) -> Iterator[None]:
    """Context manager that converts `OSError` to `PageError` with path, `message` and reason."""
    try:
        yield
    except OSError as error:
        raise PageError(f"{path}: {message}: {error.strerror or error}") from None


def make_folder(folder: str | Path) -> None:
    """Create a folder and its parents if missing; raise `InputError` if that fails."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: no file can have this name
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{folder}: no file can be created here ({reason})") from None


def remove_abandoned(folder: str | Path, pattern: str) -> None:
    """Remove files in `folder` that match `pattern` and that killed processes have left.

    Locked files remain, and those changed in the last `_LOCK_TIMEOUT_S`.
    """
    for path in Path(folder).glob(pattern):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if time.time() - os.fstat(descriptor).st_mtime > _LOCK_TIMEOUT_S:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
            finally:
                os.close(descriptor)


def _remove(descriptor: int, path: Path, process: int) -> None:
    """Close a page file; `process`, which created the file, also removes it from `path`."""
    os.close(descriptor)
    if os.getpid() == process:
        with suppress(OSError):
            path.unlink()


class Pageable(Protocol):
    """A file with one page for each of its storages."""

    storages: dict[int, TensorStorage]

    def write(self, index: int, memory: memoryview) -> None:
        """Write the page of a storage."""

    def read(self, index: int, memory: memoryview) -> None:
        """Read the page of a storage into `memory`."""


class Pages:
    """Pager of a program: `state` has the pages of state on storage, `file` all others.

    `file_numbers` maps storage indices of state tensors to their numbers in `state`.
    """

    def __init__(
        self,
        file: PageFile | None,
        *,
        state: Pageable | None = None,
        file_numbers: Mapping[int, int] | None = None,
    ) -> None:
        self._file = file
        self._state = state
        self._file_numbers = file_numbers or {}

    def page_out(self, index: int, tensor: torch.Tensor) -> None:
        """Write the storage of a tensor to the page of storage `index`."""
        file, page_number = self._find_page(index)
        file.write(page_number, bytes_of(tensor.untyped_storage()))

    def page_in(self, index: int) -> Any:
        """Read the page of storage `index` into new memory; return its tensor or tensors."""
        file, page_number = self._find_page(index)
        storage, tensors = allocate_page(file.storages[page_number])
        file.read(page_number, bytes_of(storage))
        return tensors

    def _find_page(self, index: int) -> tuple[Any, int]:
        """Return (file of a storage's page, number of the page in that file)."""
        page_number = self._file_numbers.get(index)
        return (self._file, index) if page_number is None else (self._state, page_number)


def allocate_page(page: TensorStorage) -> tuple[torch.UntypedStorage, Any]:
    """Allocate memory for a page; return (storage, its tensor or a tuple of its tensors)."""
    storage = torch.UntypedStorage(page.bytes)
    tensors = tuple(
        torch.empty(0, dtype=layout.dtype).set_(storage, layout.offset, layout.shape, layout.stride)
        for layout in page.layouts
    )
    return storage, tensors[0] if len(tensors) == 1 else tensors


def bytes_of(storage: torch.UntypedStorage) -> memoryview:
    """Return a writable view of the memory of a storage; it is valid while the storage exists."""
    array = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    return memoryview(array).cast("B")


def checksum(memory: memoryview) -> int:
    """Return a checksum that differs if one word does, and almost always if blocks are exchanged.

    The sum of the blocks' sums times odd weights, modulo 2^64. Blocks have 4 KiB; the order of the
    8 B words in a complete block does not count. It takes as long as reading the memory once, a
    fifth of the time of a CRC.

    Examples
    --------
    >>> checksum(memoryview(bytes(8))), checksum(memoryview(bytes(7) + b"x"))
    (0, 8646911284551352320)
    """
    n_blocks, tail_bytes = divmod(len(memory), ALIGNMENT_BYTES)
    total = 0
    if n_blocks:
        complete_blocks = memory[: n_blocks * ALIGNMENT_BYTES]
        words = np.frombuffer(complete_blocks, dtype=np.uint64).reshape(-1, _ROW_WORDS)
        sums = words.sum(axis=1, dtype=np.uint64)
        total = int(sums @ np.arange(1, 2 * n_blocks, 2, dtype=np.uint64))
    if tail_bytes:
        padded_tail = bytes(memory[-tail_bytes:]) + bytes(-tail_bytes % _WORD_BYTES)
        words = np.frombuffer(padded_tail, dtype=np.uint64)
        total += int(words @ (_TAIL_WEIGHTS[: len(words)] + np.uint64(2 * n_blocks)))
    return total % 2**64


# -- memory at one address ---------------------------------------------------------------------

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
