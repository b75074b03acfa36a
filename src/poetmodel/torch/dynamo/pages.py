"""Pages of compiled graphs: operators that write and read a file of slots.

Steps may overlap, so each page is written to a free slot instead of a fixed one. Its token, a
tensor of 8 bytes with the process and the slot, is saved by autograd; the slot is freed when the
token is deleted.
"""

from __future__ import annotations

import os
import weakref
from itertools import count
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.plan.alignment import round_up
from poetmodel.torch.errors import PageError
from poetmodel.torch.state.pages import ALIGNMENT_BYTES, ScratchFile, bytes_of, convert_page_errors

if TYPE_CHECKING:
    from pathlib import Path

_FILE_NUMBERS: Final = count()
"""Numbers of the files, in the order of their construction."""
_FILE_BY_NUMBER: Final[weakref.WeakValueDictionary[int, SlotFile]] = weakref.WeakValueDictionary()
"""Existing files, by number; operators of a graph have the number as an argument."""
_MAX_SLOTS: Final = 1 << 40
"""A token is the process ID times this number, plus the file offset divided by the alignment."""


class SlotFile(ScratchFile):
    """A file of slots; a free slot is reused for pages of equal size, in units of 4096 B.

    A forked process creates a file of its own when it first writes.
    """

    def __init__(self, folder: str | Path) -> None:
        self._locks: dict[int, Lock] = {}
        """Locks of `write`, by process ID: at a fork, a thread of the parent may hold the lock."""
        super().__init__(folder)
        self.number = next(_FILE_NUMBERS)
        _FILE_BY_NUMBER[self.number] = self

    def _create(self) -> None:
        """Create the file, without slots; raise `InputError` if it cannot be created."""
        super()._create()
        self.bytes = 0
        """Size of the file [B]."""
        self._free_slots: dict[int, list[int]] = {}
        """File offsets of free slots, by size [B]."""
        self.layouts: dict[int, tuple[Any, ...]] = {}
        """Storage bytes, offset, shape and strides of the tensor in each slot, by file offset."""

    def write(self, memory: memoryview) -> int:
        """Write a page; return its file offset after the medium has stored the page."""
        process = os.getpid()
        size = round_up(len(memory), ALIGNMENT_BYTES)
        # Steps in several threads may write at the same time.
        with self._locks.setdefault(process, Lock()):
            if self.process != process:
                self._create()
            slots = self._free_slots.setdefault(size, [])
            with convert_page_errors(self.path, "a page could not be written"):
                if not slots:
                    os.posix_fallocate(self._descriptor, self.bytes, size)
                    slots.append(self.bytes)
                    self.bytes += size
                offset = slots.pop()
        try:
            self._write_page(offset, memory, "a page")
        except BaseException:
            slots.append(offset)
            raise
        return offset

    def check_process(self, process: int) -> None:
        """Raise `PageError` unless `process`, which wrote a page, is the current one."""
        if process != os.getpid():
            raise PageError(
                f"{self.path}: a step that began before this process was forked can be completed "
                "only by the process that began it"
            )

    def read(self, offset: int, memory: memoryview) -> None:
        """Read the page at `offset` into `memory`, and verify its checksum."""
        self._read_page(offset, memory, "a page")

    def free_slot(self, offset: int, size_bytes: int, process: int) -> None:
        """Register a slot as free, if `process`, which wrote it, is the current one.

        `self.process` is not compared: another thread of a forked process may be changing it.
        """
        if process == os.getpid():
            self._free_slots[round_up(size_bytes, ALIGNMENT_BYTES)].append(offset)


def page_out(tensor: torch.Tensor, file_number: int) -> torch.Tensor:
    """Write a storage to file `file_number`; return the slot's token, whose deletion frees it."""
    file, size = _FILE_BY_NUMBER[file_number], tensor.untyped_storage().nbytes()
    offset = file.write(bytes_of(tensor.untyped_storage()))
    file.layouts[offset] = (size, tensor.storage_offset(), tensor.shape, tensor.stride())
    process = os.getpid()
    token = torch.tensor([process * _MAX_SLOTS + offset // ALIGNMENT_BYTES], device="cpu")
    finalizer = weakref.finalize(token.untyped_storage(), file.free_slot, offset, size, process)
    finalizer.atexit = False
    return token


def page_in(token: torch.Tensor, dtype: torch.dtype, file_number: int) -> torch.Tensor:
    """Read the tensor in the token's slot into new memory, with its original strides.

    They may differ from those that PyTorch predicts, because kernels choose them.
    """
    file = _FILE_BY_NUMBER[file_number]
    process, slot = divmod(int(token), _MAX_SLOTS)
    file.check_process(process)
    offset = slot * ALIGNMENT_BYTES
    size, *layout = file.layouts[offset]
    storage = torch.UntypedStorage(size)
    file.read(offset, bytes_of(storage))
    return torch.empty(0, dtype=dtype).set_(storage, *layout)
