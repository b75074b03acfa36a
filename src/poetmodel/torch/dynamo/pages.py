"""Pages of compiled graphs: operators that write and read a file of slots.

Several steps may be under way at once, so a page has no place of its own: it takes a free slot, and
its token, a tensor of 8 bytes that autograd saves, gives it back when it dies.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import weakref
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.errors import InputError
from poetmodel.torch.errors import PageError
from poetmodel.torch.state.pages import (
    ALIGNMENT_BYTES,
    PREFIX,
    bytes_of,
    checksum,
    make_folder,
    read_page,
    remove_left,
    write_page,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_NUMBERS: Final = count()
_FILES: Final[weakref.WeakValueDictionary[int, SlotFile]] = weakref.WeakValueDictionary()


class SlotFile:
    """A file in the user's folder that grows with what is paged out at once.

    It is removed with the object. Each slot is read back against its checksum. A forked process
    makes a file of its own.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = folder
        self.written_bytes = self.read_bytes = 0
        self._make()
        self.number = next(_NUMBERS)
        _FILES[self.number] = self

    def _make(self) -> None:
        folder = self._folder
        make_folder(folder)
        remove_left(folder, f"{PREFIX}*")
        try:
            self._descriptor, self.path = tempfile.mkstemp(prefix=PREFIX, dir=folder)
        except OSError as error:
            raise InputError(
                f"{folder}: no page file can be made here ({error.strerror or error})"
            ) from None
        with suppress(OSError):  # where files cannot be locked, nobody removes those of others
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.process = os.getpid()
        weakref.finalize(self, _remove, self._descriptor, self.path, self.process)
        self.bytes = 0
        self._lock = Lock()
        self._free: dict[int, list[int]] = {}
        self._sums: dict[int, int] = {}
        self.layouts: dict[int, tuple[Any, ...]] = {}
        """Storage bytes, first element, shape and stride of the tensor in each slot."""

    def write(self, memory: memoryview) -> int:
        """Write a page into a free slot, and return where that is when the medium has it."""
        if self.process != os.getpid():
            self._make()
        size = _slot_bytes(len(memory))
        slots = self._free.setdefault(size, [])
        with self._told("a page could not be written"):
            with self._lock:  # several threads may run steps
                if not slots:
                    os.posix_fallocate(self._descriptor, self.bytes, size)
                    slots.append(self.bytes)
                    self.bytes += size
                offset = slots.pop()
            write_page(self._descriptor, memory, offset)
        self._sums[offset] = checksum(memory)
        self.written_bytes += len(memory)
        return offset

    def check(self) -> None:
        """Raise `PageError` in a process that was forked since a page was written."""
        if self.process != os.getpid():
            raise PageError(
                f"{self.path}: a step that began before this process was forked ends only in the "
                "process that began it"
            )

    def read(self, offset: int, memory: memoryview) -> None:
        """Read a page, and check that it is what was written."""
        with self._told("a page could not be read"):
            done = read_page(self._descriptor, memory, offset)
            os.posix_fadvise(self._descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)
        if done < len(memory):
            raise PageError(
                f"{self.path}: only {done:,} of {len(memory):,} B of a page could be read; the "
                "file was cut"
            )
        if checksum(memory) != self._sums[offset]:
            raise PageError(
                f"{self.path}: a page is not what was written; something changed the file, or the "
                "medium is failing"
            )
        self.read_bytes += len(memory)

    def give_back(self, offset: int, size_bytes: int, process: int) -> None:
        """Let a slot be written again, in the process that wrote it."""
        if process == self.process:
            self._free[_slot_bytes(size_bytes)].append(offset)

    @contextmanager
    def _told(self, fault: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PageError(f"{self.path}: {fault}: {error.strerror or error}") from None


def _slot_bytes(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _remove(descriptor: int, path: str, process: int) -> None:
    """Close the file; remove it in the process that made it, and not in forked ones."""
    os.close(descriptor)
    if os.getpid() == process:
        with suppress(OSError):
            Path(path).unlink()


def page_out(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Write the storage of a tensor to a file, and return the token of its slot."""
    file, size = _FILES[number], tensor.untyped_storage().nbytes()
    offset = file.write(bytes_of(tensor.untyped_storage()))
    file.layouts[offset] = (size, tensor.storage_offset(), tensor.shape, tensor.stride())
    token = torch.tensor([offset], device="cpu")
    finish = weakref.finalize(token.untyped_storage(), file.give_back, offset, size, file.process)
    finish.atexit = False
    return token


def page_in(token: torch.Tensor, dtype: torch.dtype, number: int) -> torch.Tensor:
    """Read a page into new memory, and return the tensor in it, as it lay.

    Kernels do not always make what PyTorch predicts.
    """
    file, offset = _FILES[number], int(token)
    file.check()
    size, *layout = file.layouts[offset]
    storage = torch.UntypedStorage(size)
    file.read(offset, bytes_of(storage))
    return torch.empty(0, dtype=dtype).set_(storage, *layout)
