"""Pages: storages of tensors in a file, and transfers between RAM and file."""

from __future__ import annotations

import ctypes
import fcntl
import os
import tempfile
import time
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from poetmodel.errors import InputError
from poetmodel.plan.alignment import round_up
from poetmodel.torch.errors import PageError
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from poetmodel.torch.graph.step_graph import TensorStorage
    from poetmodel.torch.step.state_keys import StateKey

ALIGNMENT_BYTES: Final = 4096
"""Offsets of pages are multiples of this size, so that no block of the file cache contains two
pages [B]."""

PREFIX: Final = ".poetmodel-pages-"
"""Prefix of the names of page files."""

_LOCK_TIMEOUT_S: Final = 60.0
"""An unlocked file whose last change is older is abandoned: a process locks a new file much
earlier [s]."""
_CHANGED: Final = " does not match its checksum"
_WORD_BYTES: Final = 8
"""Size of the words that a checksum adds [B]."""
_ROW_WORDS: Final = ALIGNMENT_BYTES // _WORD_BYTES
"""Number of words in a block of a checksum."""
_TAIL_WEIGHTS: Final = np.arange(1, 2 * ALIGNMENT_BYTES, 2 * _WORD_BYTES, dtype=np.uint64)
"""Weights of the words of an incomplete block; twice the number of complete blocks is added."""


class Slot(NamedTuple):
    """Where a page is: at an offset of the file of the process that wrote it [B]."""

    process: int
    offset: int


class ScratchFile:
    """A file of slots in the user's folder, whose pages only the process that wrote them reads.

    Slots for pages of `sizes_bytes` are allocated at once, so that a full disk is noticed before
    the first step; further ones as needed. A free slot is reused for pages of equal size, in units
    of 4096 B. A page-out is ``pwrite`` and ``fdatasync``; page-outs and page-ins drop the copy in
    the file cache, so that a paged-out page takes no RAM. Each read checks a checksum.

    A new object removes page files that killed processes have left. A forked process creates a file
    of its own. The file is removed when the object is closed or deleted, or the process exits
    normally.
    """

    bytes: int
    """Size of the file [B]."""

    def __init__(self, folder: str | Path, sizes_bytes: Iterable[int] = ()) -> None:
        self.written_bytes = self.read_bytes = 0
        """Bytes of pages written and read so far [B]."""
        self._folder = folder
        self._first_sizes = tuple(map(_slot_bytes, sizes_bytes))
        self._locks: dict[int, Lock] = {}
        """Locks of `write`, by process ID: at a fork, a thread of the parent may hold the lock."""
        self._is_closed = False
        self._create()

    def _create(self) -> None:
        """Create the file with its first slots, and lock it if possible; remove abandoned files."""
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
        self._free_slots: dict[int, list[int]] = {}
        """File offsets of free slots, by size [B]."""
        self.bytes = 0
        try:
            for size in self._first_sizes:
                self._free_slots.setdefault(size, []).append(self._grow(size))
        except OSError as error:
            self._remove()
            size_text = format_bytes(sum(self._first_sizes))
            raise InputError(
                f"{folder}: not enough space for a page file of {size_text} "
                f"({error.strerror or error}); free some space, or page less"
            ) from None

    def _grow(self, size_bytes: int) -> int:
        """Allocate space at the end of the file; return its offset [B]."""
        offset = self.bytes
        os.posix_fallocate(self._descriptor, offset, size_bytes)
        self.bytes += size_bytes
        return offset

    def close(self) -> None:
        """Remove the file, so that `check` raises `PageError`. A forked process only closes it."""
        self._is_closed = True
        self._remove()

    def check(self) -> None:
        """Raise `PageError` if the file was closed; create a new, empty one in a forked process."""
        with self._locks.setdefault(os.getpid(), Lock()):
            self._check()

    def _check(self) -> None:
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

    def write(self, memory: memoryview, page_name: str = "a page") -> Slot:
        """Write a page, called `page_name` in messages; return when the medium has stored it."""
        process = os.getpid()
        size = _slot_bytes(len(memory))
        # Steps in several threads may write at the same time.
        with self._locks.setdefault(process, Lock()):
            self._check()
            slots = self._free_slots.setdefault(size, [])
            with convert_page_errors(self.path, f"{page_name} could not be written"):
                offset = slots.pop() if slots else self._grow(size)
        try:
            self._checksums[offset] = checksum(memory)
            with convert_page_errors(self.path, f"{page_name} could not be written"):
                write_page(self._descriptor, memory, offset)
        except BaseException:
            slots.append(offset)
            raise
        self.written_bytes += len(memory)
        return Slot(process, offset)

    def read(self, slot: Slot, memory: memoryview, page_name: str = "a page") -> None:
        """Read a page, called `page_name` in messages, into `memory`, and check it."""
        if slot.process != os.getpid():
            raise PageError(
                f"{self.path}: a step that began before this process was forked can be completed "
                "only by the process that began it"
            )
        expected_checksum = self._checksums[slot.offset]
        read_checked(self.path, self._descriptor, memory, slot.offset, expected_checksum, page_name)
        self.read_bytes += len(memory)

    def free(self, slot: Slot, size_bytes: int) -> None:
        """Let other pages use a slot, in the process that wrote it.

        `self.process` is not compared: another thread of a forked process may be changing it.
        """
        if slot.process == os.getpid():
            self._free_slots[_slot_bytes(size_bytes)].append(slot.offset)


def _slot_bytes(size_bytes: int) -> int:
    return round_up(max(size_bytes, 1), ALIGNMENT_BYTES)


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


def find_read_fault(
    descriptor: int, memory: memoryview, offset: int, expected_checksum: int
) -> str:
    """Read a page into `memory`, and retain no copy in the file cache; return the fault or ""."""
    size = len(memory)
    try:
        read_bytes = read_page(descriptor, memory, offset)
        os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        return f" could not be read: {error.strerror or error}"
    if read_bytes < size:
        return f": only {read_bytes:,} of {size:,} B could be read; the file was truncated"
    return "" if checksum(memory) == expected_checksum else _CHANGED


def read_checked(
    path: Path,
    descriptor: int,
    memory: memoryview,
    offset: int,
    expected_checksum: int,
    page_name: str,
) -> None:
    """Read a page into `memory`, and check it; raise `PageError` with path and `page_name`."""
    fault = find_read_fault(descriptor, memory, offset, expected_checksum)
    if fault:
        hint = "; the file was changed, or the medium is failing" if fault == _CHANGED else ""
        raise PageError(f"{path}: {page_name}{fault}{hint}")


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


class StatePages(Protocol):
    """A file with one page for each state tensor."""

    def write(self, key: StateKey, memory: memoryview) -> None:
        """Write the page of a tensor."""

    def read(self, key: StateKey, memory: memoryview) -> None:
        """Read the page of a tensor into `memory`."""


class Pages:
    """Pager of one execution of a program, by the indices of `storages`.

    `state_file` has the pages of the storages in `state_keys`, `scratch_file` all others.
    """

    def __init__(
        self,
        storages: Sequence[TensorStorage],
        scratch_file: ScratchFile | None,
        *,
        state_file: StatePages | None = None,
        state_keys: Mapping[int, StateKey] = MappingProxyType({}),
    ) -> None:
        self._storages = storages
        self._scratch_file: Any = scratch_file
        self._state_file: Any = state_file
        self._state_keys = state_keys
        self._slots: dict[int, Slot] = {}

    def page_out(self, index: int, tensor: torch.Tensor) -> None:
        """Write the storage of a tensor to the page of storage `index`."""
        memory = bytes_of(tensor.untyped_storage())
        if index in self._state_keys:
            self._state_file.write(self._state_keys[index], memory)
            return
        self._free(index)
        self._slots[index] = self._scratch_file.write(memory, self._page_name(index))

    def page_in(self, index: int) -> Any:
        """Read the page of storage `index` into new memory; return its tensor or tensors."""
        storage = torch.UntypedStorage(self._storages[index].bytes)
        if index in self._state_keys:
            self._state_file.read(self._state_keys[index], bytes_of(storage))
        else:
            self._scratch_file.read(self._slots[index], bytes_of(storage), self._page_name(index))
        tensors = tuple(layout.tensor_in(storage) for layout in self._storages[index].layouts)
        return tensors[0] if len(tensors) == 1 else tensors

    def close(self) -> None:
        """Free the slots of all pages."""
        for index in list(self._slots):
            self._free(index)

    def _free(self, index: int) -> None:
        slot = self._slots.pop(index, None)
        if slot is not None:
            self._scratch_file.free(slot, self._storages[index].bytes)

    def _page_name(self, index: int) -> str:
        return f"tensor {self._storages[index].name!r}"


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
