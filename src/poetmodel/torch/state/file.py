"""The state file of a compiled step: one or two generations of each tensor, and commit records.

With two generations, a step reads the current one and writes the next one to other slots. When the
medium has stored the new generation completely, a record with the slot of each tensor is written
over the record before the last. So the file contains an intact state at any time, even if the
process is killed.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import tempfile
import weakref
from base64 import b64decode, b64encode
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import torch

from poetmodel.errors import InputError
from poetmodel.torch.capturing.joint_graph import format_path
from poetmodel.torch.errors import PageError
from poetmodel.torch.graph.profiles import TensorLayout
from poetmodel.torch.graph.step_graph import TensorStorage
from poetmodel.torch.state.memory import PAGE_BYTES, Pagemap
from poetmodel.torch.state.pages import (
    ALIGNMENT_BYTES,
    checksum,
    convert_page_errors,
    make_folder,
    read_checked,
    remove_abandoned,
)
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from poetmodel.torch.state.memory import Memory

BLOCK_BYTES: Final = max(ALIGNMENT_BYTES, PAGE_BYTES)
"""All offsets in the file are multiples of this size, so that they can be mapped [B]."""
RECORD_COUNT: Final = 2
"""Number of positions for records, which are written in turn."""
ABSENT: Final = 255
"""Slot number of a tensor that is absent, such as a moment before the first step."""

_MAGIC: Final = b"poetmodel state\n"
_VERSION: Final = 3
_DIGEST_BYTES: Final = 16
_PREFIX: Final = struct.Struct(f"<{len(_MAGIC)}sQ{_DIGEST_BYTES}s")
"""What precedes the JSON of a header or record: magic bytes, its length, and its digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor in a state file, and its name in the model or optimizer."""

    storage: TensorStorage
    """Size and layouts of the tensor's memory. ``index`` identifies the tensor in a `StateFile`; in
    a parsed `Format` it is the tensor's position."""
    kind: str
    """``parameter``, ``buffer`` or ``moment``."""
    owner: str
    """Path of the parameter or buffer below the captured module; for a moment, of its parameter."""
    key: str = ""
    """Key of a moment in ``optimizer.state``."""


def align_to_block(size_bytes: int) -> int:
    """Round a size up to a multiple of a block [B]."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, kw_only=True)
class Format:
    """The tensors of a state file, and the layout of the file."""

    name: str
    """Name of the captured step."""
    generations: int
    """Number of slots of each tensor: one or two."""
    tensors: tuple[StateTensor, ...]
    header: bytes = field(repr=False)
    """The encoded header of the file."""

    @classmethod
    def from_tensors(cls, tensors: Iterable[StateTensor], *, name: str, generations: int) -> Self:
        """Return the format of a file for `tensors`, in their order, with the encoded header."""
        tensors = tuple(tensors)
        fields = {
            "version": _VERSION,
            "name": name,
            "generations": generations,
            "block_bytes": BLOCK_BYTES,
            "tensors": [_tensor_to_dict(tensor) for tensor in tensors],
        }
        return cls(name=name, generations=generations, tensors=tensors, header=encode(fields))

    @classmethod
    def parse(cls, first_bytes: bytes) -> Self | None:
        """Parse a file's header; None if damaged, cut, or of another system or newer version.

        Raises `OlderVersionError` for a file of an older version.
        """
        fields = decode(first_bytes)
        if fields is None:
            return None
        if fields["version"] < _VERSION:
            raise OlderVersionError(
                "was written by an older version of poetmodel: load it with that version's "
                "recover, and save model and optimizer with torch.save, or delete the file"
            )
        if fields["version"] != _VERSION or fields["block_bytes"] != BLOCK_BYTES:
            return None
        tensors = tuple(
            _tensor_from_dict(index, item) for index, item in enumerate(fields["tensors"])
        )
        return cls(
            name=fields["name"],
            generations=fields["generations"],
            tensors=tensors,
            header=first_bytes[: encoded_bytes(first_bytes)],
        )

    def record_offset(self, generation: int) -> int:
        """Return the offset of the record of a generation [B]."""
        return align_to_block(len(self.header)) + generation % RECORD_COUNT * align_to_block(
            self.record_bytes
        )

    @property
    def record_bytes(self) -> int:
        """Maximum size of a record [B].

        Three blocks are for the state of PyTorch's random generator (7 KiB) and update counts.
        """
        return 32 * len(self.tensors) + 3 * BLOCK_BYTES

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """Offset of each tensor's slot among the slots of one number, then their size [B]."""
        sizes = (align_to_block(tensor.storage.bytes) for tensor in self.tensors)
        return tuple(accumulate(sizes, initial=0))

    @property
    def bytes(self) -> int:
        """Size of the file [B]."""
        return self.slot_offset(len(self.tensors), self.generations - 1)

    def slot_offset(self, position: int, slot: int) -> int:
        """Return the offset of a slot of the tensor at a position [B].

        The first slots of all tensors are contiguous, and the second slots follow.
        """
        first_slot_offset = self.record_offset(0) + RECORD_COUNT * align_to_block(self.record_bytes)
        return first_slot_offset + slot * self._offsets[-1] + self._offsets[position]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A commit record of one generation: the slot and the checksum of each tensor."""

    generation: int
    steps: int
    """Number of training steps before this generation was written."""
    slots: tuple[int, ...]
    """Slot of each tensor in the order of `Format.tensors`, `ABSENT` for an absent tensor."""
    checksums: tuple[int, ...]
    random_state: bytes = field(default=b"", repr=False)
    """State of PyTorch's random generator after these steps."""
    update_counts: tuple[int, ...] = ()
    """``updates`` of each parameter group that counts them."""

    @classmethod
    def with_absent_tensors(cls, count: int, *, steps: int) -> Self:
        """Return the first record of a file, in which all `count` tensors are absent."""
        return cls(generation=0, steps=steps, slots=(ABSENT,) * count, checksums=(0,) * count)

    def to_bytes(self) -> bytes:
        """Return the encoded record, without padding."""
        return encode(asdict(self) | {"random_state": b64encode(self.random_state).decode()})

    @classmethod
    def parse(cls, encoded: bytes) -> Self | None:
        """Parse a record; return None if it is incomplete or damaged."""
        fields = decode(encoded)
        if fields is None:
            return None
        return cls(
            generation=fields["generation"],
            steps=fields["steps"],
            slots=tuple(fields["slots"]),
            checksums=tuple(fields["checksums"]),
            random_state=b64decode(fields["random_state"]),
            update_counts=tuple(fields["update_counts"]),
        )


class OlderVersionError(Exception):
    """A file was written by an older version; the message says how to finish with it."""


def encode(fields: Mapping[str, Any]) -> bytes:
    """Return a header or record: JSON after its `_PREFIX`."""
    content = json.dumps(fields, allow_nan=False).encode()
    return _PREFIX.pack(_MAGIC, len(content), _digest(content)) + content


def decode(encoded: bytes) -> dict[str, Any] | None:
    """Return the fields of the header or record at the beginning; None if it is damaged or cut."""
    size = encoded_bytes(encoded)
    if size is None or len(encoded) < size:
        return None
    content = encoded[_PREFIX.size : size]
    if _PREFIX.unpack_from(encoded)[2] != _digest(content):
        return None
    fields: dict[str, Any] = json.loads(content)
    return fields


def encoded_bytes(first_bytes: bytes) -> int | None:
    """Return the length of a header or record [B]; None without a whole prefix."""
    if len(first_bytes) < _PREFIX.size:
        return None
    magic, size, _ = _PREFIX.unpack_from(first_bytes)
    return _PREFIX.size + int(size) if magic == _MAGIC else None


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _tensor_to_dict(tensor: StateTensor) -> dict[str, Any]:
    """Return the header's JSON object of a tensor: kind, owner, key, bytes and layouts."""
    return {
        "kind": tensor.kind,
        "owner": tensor.owner,
        "key": tensor.key,
        "bytes": tensor.storage.bytes,
        "layouts": [
            {
                "dtype": str(layout.dtype).removeprefix("torch."),
                "shape": layout.shape,
                "stride": layout.stride,
                "offset": layout.offset,
            }
            for layout in tensor.storage.layouts
        ],
    }


def _tensor_from_dict(index: int, item: dict[str, Any]) -> StateTensor:
    """Parse a tensor from a JSON object of `_tensor_to_dict`; `index` is that of its storage."""
    layouts = tuple(
        TensorLayout(
            position=None,
            dtype=getattr(torch, layout["dtype"]),
            shape=tuple(layout["shape"]),
            stride=tuple(layout["stride"]),
            offset=layout["offset"],
        )
        for layout in item["layouts"]
    )
    name = ".".join(filter(None, (format_path(item["owner"]), item["key"])))
    storage = TensorStorage(
        index=index, name=name, operation=index, bytes=item["bytes"], layouts=layouts
    )
    return StateTensor(storage=storage, kind=item["kind"], owner=item["owner"], key=item["key"])


# -- the file ----------------------------------------------------------------------------------

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
        tensors: Iterable[StateTensor],
        *,
        name: str = "",
        generations: int = 2,
        steps: int = 0,
        read_update_counts: Callable[[], tuple[int, ...]] = tuple,
    ) -> None:
        self.format = Format.from_tensors(tensors, name=name, generations=generations)
        self.record = Record.with_absent_tensors(len(self.format.tensors), steps=steps)
        """The record of the current generation."""
        self._read_update_counts = read_update_counts
        self.storages: dict[int, TensorStorage] = {}
        """Storage of each tensor, by the index of the storage."""
        self._positions: dict[int, int] = {}
        """Position of each tensor in the format, by the index of its storage."""
        for position, tensor in enumerate(self.format.tensors):
            self.storages[tensor.storage.index] = tensor.storage
            self._positions[tensor.storage.index] = position
        self.written_bytes = self.read_bytes = 0
        """Bytes of tensors written and read so far, without padding [B]."""
        self._next_entries: dict[int, tuple[int, int]] = {}
        """(slot, checksum) of each tensor already written for the next generation, by position."""
        self._memories: dict[int, Memory] = {}
        """Each tracked memory, by the index of its tensor."""
        self._mapped_slots: dict[int, int] = {}
        """Slot to which each memory is mapped, by the index of its tensor."""
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
        for index, _ in self._live_memories():
            self.unmap(index)
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

    def contains(self, index: int) -> bool:
        """Return whether the generation that mappings show contains a tensor."""
        return self._slot_to_map(self._positions[index]) != ABSENT

    def has_checksum(self, index: int, expected_checksum: int) -> bool:
        """Return whether a tensor is in the current generation with this checksum."""
        position = self._positions[index]
        return (
            self.record.slots[position] != ABSENT
            and self.record.checksums[position] == expected_checksum
        )

    def read(self, index: int, memory: memoryview) -> None:
        """Read a tensor of the current generation into `memory`; zeros if the tensor is absent.

        Includes changes made through a tracked memory (`map`).
        """
        position = self._positions[index]
        slot = self.record.slots[position]
        if slot == ABSENT:
            np.frombuffer(memory, dtype=np.uint8)[:] = 0
            return
        self._read_slot(position, slot, self.record.checksums[position], memory)
        mapped_memory = self._memories.get(index)
        if mapped_memory is not None:
            with Pagemap() as pages:
                mapped_memory.copy_written(pages, memory)

    def _read_slot(
        self, position: int, slot: int, expected_checksum: int, memory: memoryview
    ) -> None:
        """Fill `memory` from a slot of the tensor at `position`; count its size in `read_bytes`."""
        offset = self.format.slot_offset(position, slot)
        read_checked(
            self.path,
            self._descriptor,
            memory,
            offset,
            expected_checksum,
            self._tensor_label(position),
        )
        self.read_bytes += len(memory)

    def write(self, index: int, memory: memoryview) -> None:
        """Write a tensor of the next generation, which `commit` makes current, from `memory`.

        With one generation, it overwrites the current value.
        """
        position = self._positions[index]
        current_slot = self.record.slots[position]
        slot = 0 if current_slot == ABSENT else (current_slot + 1) % self.format.generations
        offset = self.format.slot_offset(position, slot)
        with convert_page_errors(self.path, f"{self._tensor_label(position)} could not be written"):
            self._write_padded(memory, offset)
            if len(memory) >= LARGE_BYTES:
                os.fdatasync(self._descriptor)
                os.posix_fadvise(self._descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)
        self._next_entries[position] = slot, checksum(memory)
        self.written_bytes += len(memory)

    def commit(self, *, steps: int = 0, absent_indices: Iterable[int] = ()) -> None:
        """Make the written tensors part of a new current generation, and map memories to it.

        The record has the state of PyTorch's random generator, and `steps` more training steps.
        With two generations, the medium has stored the generation on return. Tensors of
        `absent_indices` are absent from now on. An `OSError` of a mapping or of the folder comes
        after the commit.
        """
        absent_slots = {self._positions[index]: (ABSENT, 0) for index in absent_indices}
        self._next_entries |= absent_slots
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
        entries = list(zip(self.record.slots, self.record.checksums, strict=True))
        for position, entry in self._next_entries.items():
            entries[position] = entry
        return Record(
            generation=self.record.generation + 1,
            steps=self.record.steps + steps,
            slots=tuple(slot for slot, _ in entries),
            checksums=tuple(value for _, value in entries),
            random_state=torch.default_generator.get_state().numpy().tobytes(),
            update_counts=self._read_update_counts(),
        )

    def _write_record(self, record: Record) -> None:
        """Flush the tensors; overwrite the older record, and flush it; drop the file cache."""
        os.fdatasync(self._descriptor)
        self._write_padded(
            memoryview(record.to_bytes()), self.format.record_offset(record.generation)
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

    def _tensor_label(self, position: int) -> str:
        """Return the quoted name of the tensor at a position, for messages."""
        return f"tensor {self.format.tensors[position].storage.name!r}"

    # -- mappings --------------------------------------------------------------------------------

    def map(self, index: int, memory: Memory) -> None:
        """Map memory, copy-on-write, to a tensor's current generation, also after each commit.

        The old content of the memory is lost, unless the tensor is absent: then it is not changed.
        """
        self._memories[index] = memory
        self._map(index, memory)

    def unmap(self, index: int) -> None:
        """Move a tensor's memory to RAM with its value (zeros if absent), and untrack it."""
        memory = self._memories[index]
        memory.move_to_ram(partial(self.read, index))
        del self._memories[index]

    def untrack(self, index: int) -> None:
        """Stop mapping the memory of a tensor again after commits; the current mapping remains."""
        self._memories.pop(index, None)

    def is_tracked(self, index: int) -> bool:
        """Return whether commits map a tensor's memory again: after `map`."""
        return index in self._memories

    def _live_memories(self) -> list[tuple[int, Memory]]:
        """Return (index, memory) of tracked memories; untrack those that no tensor uses."""
        for index in [i for i, memory in self._memories.items() if memory.is_lost]:
            self.untrack(index)
        return list(self._memories.items())

    def _remap(self, positions: Collection[int]) -> None:
        """Map memories at `positions` and of changed slots again; writes through them are lost."""
        for index, memory in self._live_memories():
            position = self._positions[index]
            if position in positions or self._mapped_slots[index] != self._slot_to_map(position):
                self._map(index, memory)

    def _map(self, index: int, memory: Memory) -> None:
        position = self._positions[index]
        slot = self._mapped_slots[index] = self._slot_to_map(position)
        if slot != ABSENT:
            memory.map(self._descriptor, self.format.slot_offset(position, slot))

    def _slot_to_map(self, position: int) -> int:
        """Return the slot to which a tensor's memory should be mapped."""
        if self._shows_uncommitted and position in self._next_entries:
            return self._next_entries[position][0]
        return self.record.slots[position]

    def write_mapped_changes(self) -> None:
        """Write changes made through mappings; drop from RAM memories that were only read.

        Changes are found in the system's page map, or without one by checksums.
        """
        with Pagemap() as pages:
            for index, memory in self._live_memories():
                position = self._positions[index]
                if position in self._next_entries:
                    continue
                was_accessed, was_written = memory.read_access_flags(
                    pages, self.record.checksums[position]
                )
                if was_written:
                    content = bytearray(self.storages[index].bytes)
                    self.read(index, memoryview(content))
                    self.write(index, memoryview(content))
                elif was_accessed:
                    self._map(index, memory)


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
