"""The state file of a compiled step: one or two generations of each tensor, and commit records.

With two generations, a step reads the current one and writes the next one to other slots. When the
medium has stored the new generation completely, a record with the slot of each tensor is written
over the record before the last. So the file contains an intact state at any time, even if the
process is killed.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from poetmodel.errors import InputError
from poetmodel.torch.errors import PageError
from poetmodel.torch.state.format import BLOCK_BYTES, Entry, Format, Record
from poetmodel.torch.state.memory import Pagemap
from poetmodel.torch.state.pages import (
    checksum,
    convert_page_errors,
    make_folder,
    read_checked,
    remove_abandoned,
)
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from poetmodel.torch.state.format import StateTensor
    from poetmodel.torch.state.memory import Memory
    from poetmodel.torch.step.state_keys import StateKey

PREFIX: Final = ".poetmodel-state-"
UNFINISHED: Final = ".new"
"""Suffix of files without an intact state."""
LARGE_BYTES: Final = 1 << 20
"""Writes of at least this size are flushed immediately and dropped from the file cache; smaller
ones are flushed at the commit, if there are two generations [B]."""

_CLOSE_HINT: Final = "close() moves the state to RAM"


class StateFile:
    """The state of one compiled step in a file in the user's folder, locked by its process.

    Between steps, the memory passed to `map` is a private mapping of a tensor's current generation:
    writes do not change the file. Before the next step, `write_mapped_changes` writes these changes
    to the next generation, and `commit` makes it current, so the file matches `record` between
    steps. Each read checks a checksum. With two `generations`, one is always complete; with one,
    each step overwrites it, and no state can be recovered.

    A new object removes unfinished files of killed processes. The file is removed when the object
    is deleted or the process exits normally.
    """

    def __init__(
        self,
        folder: str | Path,
        tensors: Mapping[StateKey, StateTensor],
        *,
        name: str = "",
        generations: int = 2,
        steps: int = 0,
        read_update_counts: Callable[[], tuple[int, ...]] = tuple,
    ) -> None:
        self.format = Format.from_tensors(tensors, name=name, generations=generations)
        self.record = Record(steps=steps)
        """The record of the current generation."""
        self._read_update_counts = read_update_counts
        self.written_bytes = self.read_bytes = 0
        """Bytes of tensors written and read so far, without padding [B]."""
        self._next_entries: dict[StateKey, Entry | None] = {}
        """Entries of the next generation that differ; None for a tensor that is absent in it."""
        self._memories: dict[StateKey, Memory] = {}
        """Each tracked memory."""
        self._mapped_slots: dict[StateKey, int | None] = {}
        """Slot to which each memory is mapped."""
        self._shows_uncommitted = False
        """Whether mappings show tensors written since the last commit."""
        self._is_closed = False
        self._create(folder)

    @property
    def bytes(self) -> int:
        """Size of the file [B]."""
        return self.format.bytes

    # -- the file --------------------------------------------------------------------------------

    def _create(self, folder: str | Path) -> None:
        """Create, lock and allocate the file, and write its header; no file remains on failure.

        Removes unfinished files of killed processes. Processes forked later close the file.
        """
        make_folder(folder)
        remove_abandoned(folder, f"{PREFIX}*{UNFINISHED}")
        try:
            descriptor, name = tempfile.mkstemp(prefix=PREFIX, suffix=UNFINISHED, dir=folder)
        except OSError as error:
            raise InputError(
                f"{folder}: no state file can be created here ({error.strerror or error})"
            ) from None
        self._process = os.getpid()
        self._descriptor = descriptor
        # A second descriptor: mappings, which forked processes inherit, would retain the lock.
        self._lock_descriptor = os.open(name, os.O_RDONLY)
        self._set_path(Path(name))
        try:
            fcntl.flock(self._lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._remove()
            raise InputError(
                f"{folder}: a state file cannot be locked here ({error.strerror or error})"
            ) from None
        try:
            os.posix_fallocate(descriptor, 0, self.bytes)
            os.pwrite(descriptor, self.format.header, 0)
        except OSError as error:
            self._remove()
            raise InputError(
                f"{folder}: not enough space for a state file of {format_bytes(self.bytes)} "
                f"({error.strerror or error}); free some space, or increase ram"
            ) from None
        os.register_at_fork(after_in_child=partial(_close_in_child, weakref.ref(self)))

    def _set_path(self, path: Path) -> None:
        """Set the path of the file, and register its removal when this object is deleted."""
        self.path = path
        descriptors = (self._descriptor, self._lock_descriptor)
        self._remove = weakref.finalize(self, _remove, descriptors, path, self._process)

    def _publish(self) -> None:
        """Remove `UNFINISHED` from the name, so that `recover` finds the file; flush the folder."""
        path = self.path.rename(self.path.with_suffix(""))
        self._remove.detach()
        self._set_path(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def check(self) -> None:
        """Raise `PageError` if the file was closed, removed, moved or truncated, or in a fork."""
        if self._process != os.getpid():
            raise PageError(
                f"{self.path}: the state is in a file of process {self._process}, but this is "
                f"process {os.getpid()}, forked from it; compile in the process that trains"
            )
        if self._is_closed:
            raise PageError(f"{self.path}: the step was closed; compile again")
        file_status = os.fstat(self._descriptor)
        if not file_status.st_nlink or not self.path.exists():
            raise PageError(f"{self.path}: the state file was removed or moved; {_CLOSE_HINT}")
        if file_status.st_size < self.bytes:
            raise PageError(
                f"{self.path}: the state file has {file_status.st_size:,} of {self.bytes:,} B: "
                "state is lost; load a checkpoint"
            )

    def close(self) -> None:
        """Move all mapped memory to RAM, at the same addresses, and remove the file.

        A forked process only stops using it. The file remains if a tensor cannot be read.
        """
        if self._is_closed or self._process != os.getpid():
            self._is_closed = True
            return
        for key, _ in self._live_memories():
            self.unmap(key)
        self._is_closed = True
        self._remove()

    def close_in_child(self) -> None:
        """Close the parent's file in a forked process, without removing it."""
        if self._remove.detach() is not None:
            os.close(self._descriptor)
            os.close(self._lock_descriptor)
        self._descriptor = self._lock_descriptor = -1
        self._is_closed = True

    # -- generations -----------------------------------------------------------------------------

    def contains(self, key: StateKey) -> bool:
        """Return whether the generation that mappings show contains a tensor."""
        return self._slot_to_map(key) is not None

    def has_checksum(self, key: StateKey, expected_checksum: int) -> bool:
        """Return whether a tensor is in the current generation with this checksum."""
        entry = self.record.entries.get(key)
        return entry is not None and entry.checksum == expected_checksum

    def read(self, key: StateKey, memory: memoryview) -> None:
        """Read a tensor of the current generation into `memory`; zeros if the tensor is absent.

        Includes changes made through a tracked memory (`map`).
        """
        entry = self.record.entries.get(key)
        if entry is None:
            np.frombuffer(memory, dtype=np.uint8)[:] = 0
            return
        offset, label = self.format.slot_offset(key, entry.slot), _label(key)
        read_checked(self.path, self._descriptor, memory, offset, entry.checksum, label)
        self.read_bytes += len(memory)
        mapped_memory = self._memories.get(key)
        if mapped_memory is not None:
            with Pagemap() as pages:
                mapped_memory.copy_written(pages, memory)

    def write(self, key: StateKey, memory: memoryview) -> None:
        """Write a tensor of the next generation, which `commit` makes current, from `memory`.

        With one generation, it overwrites the current value.
        """
        current_entry = self.record.entries.get(key)
        slot = 0 if current_entry is None else (current_entry.slot + 1) % self.format.generations
        offset = self.format.slot_offset(key, slot)
        with convert_page_errors(self.path, f"{_label(key)} could not be written"):
            self._write_padded(memory, offset)
            if len(memory) >= LARGE_BYTES:
                os.fdatasync(self._descriptor)
                os.posix_fadvise(self._descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)
        self._next_entries[key] = Entry(slot, checksum(memory))
        self.written_bytes += len(memory)

    def commit(self, *, steps: int = 0, absent: Iterable[StateKey] = ()) -> None:
        """Make the written tensors part of a new current generation, and map memories to it.

        The record has the state of PyTorch's random generator, and `steps` more training steps.
        With two generations, the medium has stored the generation on return. Tensors in
        `absent` are absent from now on. An `OSError` of a mapping or of the folder comes
        after the commit.
        """
        self._next_entries |= dict.fromkeys(absent)
        record = self._next_record(steps=steps)
        if self.format.generations > 1:
            with convert_page_errors(self.path, "the commit record could not be written"):
                self._write_record(record)
        new_entries, self.record, self._next_entries = self._next_entries, record, {}
        self._remap(new_entries)
        if self.format.generations > 1 and self.path.suffix == UNFINISHED:
            self._publish()

    def _next_record(self, *, steps: int) -> Record:
        """Return the record of the next generation, with the current state of the generator."""
        entries = {**self.record.entries, **self._next_entries}
        return Record(
            generation=self.record.generation + 1,
            steps=self.record.steps + steps,
            entries={key: entry for key, entry in entries.items() if entry is not None},
            random_state=torch.default_generator.get_state().numpy().tobytes(),
            update_counts=self._read_update_counts(),
        )

    def _write_record(self, record: Record) -> None:
        """Flush the tensors; overwrite the older record, and flush it; drop the file cache."""
        os.fdatasync(self._descriptor)
        self._write_padded(
            memoryview(record.to_bytes(self.format)), self.format.record_offset(record.generation)
        )
        os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def show_uncommitted(self) -> None:
        """Map memories to the tensors written since the last commit, until `rollback`."""
        self._shows_uncommitted = True
        self._remap(self._next_entries)

    @property
    def is_changed(self) -> bool:
        """Whether a tensor was written, and not discarded, or updates counted since the commit."""
        counts = self._read_update_counts()
        return bool(self._next_entries) or counts != self.record.update_counts

    def rollback(self) -> None:
        """Discard the tensors written since the last commit, and end `show_uncommitted`.

        With one generation, they remain, because they overwrote the old values.
        """
        discarded_entries = self._next_entries
        self.discard_written()
        self._shows_uncommitted = False
        self._remap(discarded_entries)

    def discard_written(self) -> None:
        """Discard the tensors written since the last commit, without changing mappings.

        With one generation they become current instead.
        """
        if self.format.generations == 1:
            self.record = self._next_record(steps=0)
        self._next_entries = {}

    def _write_padded(self, memory: memoryview, offset: int) -> None:
        """Write bytes at an offset, and zeros up to the block's end, to save reading that block."""
        padding, written_bytes = bytes(-len(memory) % BLOCK_BYTES), 0
        while written_bytes < len(memory):
            written_bytes += os.pwritev(
                self._descriptor, [memory[written_bytes:], padding], offset + written_bytes
            )

    # -- mappings --------------------------------------------------------------------------------

    def map(self, key: StateKey, memory: Memory) -> None:
        """Map memory, copy-on-write, to a tensor's current generation, also after each commit.

        The old content of the memory is lost, unless the tensor is absent: then it is not changed.
        """
        self._memories[key] = memory
        self._map(key, memory)

    def unmap(self, key: StateKey) -> None:
        """Move a tensor's memory to RAM with its value (zeros if absent), and untrack it."""
        memory = self._memories[key]
        memory.move_to_ram(partial(self.read, key))
        del self._memories[key]

    def untrack(self, key: StateKey) -> None:
        """Stop mapping the memory of a tensor again after commits; the current mapping remains."""
        self._memories.pop(key, None)

    def is_tracked(self, key: StateKey) -> bool:
        """Return whether commits map a tensor's memory again: after `map`."""
        return key in self._memories

    def _live_memories(self) -> list[tuple[StateKey, Memory]]:
        """Return (key, memory) of tracked memories; untrack those that no tensor uses."""
        for key in [key for key, memory in self._memories.items() if memory.is_lost]:
            self.untrack(key)
        return list(self._memories.items())

    def _remap(self, keys: Collection[StateKey]) -> None:
        """Map memories in `keys` and of changed slots again; writes through them are lost."""
        for key, memory in self._live_memories():
            if key in keys or self._mapped_slots[key] != self._slot_to_map(key):
                self._map(key, memory)

    def _map(self, key: StateKey, memory: Memory) -> None:
        slot = self._mapped_slots[key] = self._slot_to_map(key)
        if slot is not None:
            memory.map(self._descriptor, self.format.slot_offset(key, slot))

    def _slot_to_map(self, key: StateKey) -> int | None:
        """Return the slot to which a tensor's memory should be mapped; None if it is absent."""
        entry = self.record.entries.get(key)
        if self._shows_uncommitted:
            entry = self._next_entries.get(key, entry)
        return None if entry is None else entry.slot

    def write_mapped_changes(self) -> None:
        """Write changes made through mappings; drop from RAM memories that were only read.

        Changes are found in the system's page map, or without one by checksums.
        """
        with Pagemap() as pages:
            for key, memory in self._live_memories():
                if key in self._next_entries:
                    continue
                entry = self.record.entries.get(key)
                was_accessed, was_written = memory.read_access_flags(
                    pages, 0 if entry is None else entry.checksum
                )
                if was_written:
                    content = bytearray(self.format.tensors[key].bytes)
                    self.read(key, memoryview(content))
                    self.write(key, memoryview(content))
                elif was_accessed:
                    self._map(key, memory)


def _label(key: StateKey) -> str:
    """Return the quoted name of a tensor, for messages."""
    return f"tensor {key.name!r}"


def _remove(descriptors: tuple[int, ...], path: Path, process: int) -> None:
    """Remove the file and release its lock; no effect in a process that did not create it."""
    if os.getpid() == process:
        with suppress(OSError):
            path.unlink()
        for descriptor in descriptors:
            os.close(descriptor)


def _close_in_child(reference: weakref.ref[StateFile]) -> None:
    """Close the parent's file in a forked process, which would otherwise retain its lock."""
    file = reference()
    if file is not None:
        file.close_in_child()
