"""A file that has the state of a training run: two generations of each tensor, and commit records.

A step reads the current generation and writes the next one beside it. When all of that is on the
medium, a record says which of the two each tensor is in; it is written in the place of the record
before the last. So at every moment there is one whole state, whatever stops the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import torch

from poetmodel.errors import InputError
from poetmodel.torch.capturing.joint_graph import shown_path
from poetmodel.torch.errors import PageError
from poetmodel.torch.graph.profiles import TensorLayout
from poetmodel.torch.graph.step_graph import TensorStorage
from poetmodel.torch.state.pages import (
    ALIGNMENT_BYTES,
    PAGE_BYTES,
    Pagemap,
    checksum,
    make_folder,
    page_errors,
    read_checked,
    remove_left,
)
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from poetmodel.torch.state.pages import Memory

BLOCK_BYTES: Final = max(ALIGNMENT_BYTES, PAGE_BYTES)
"""Everything in the file begins at a multiple of this, so that it can be mapped [B]."""
RECORDS: Final = 2
"""Places for records, written in turn."""
ABSENT: Final = 255
"""In place of a slot: the tensor is not there yet, such as a moment before the first step."""

_MAGIC: Final = b"poetmodel state\n"
_VERSION: Final = 1
_DIGEST_BYTES: Final = 16
_HEADER: Final = struct.Struct(f"<{len(_MAGIC)}sQ{_DIGEST_BYTES}s")
_RECORD: Final = struct.Struct("<QQQQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """A tensor of a state file: what it is of a model or of its optimizer."""

    storage: TensorStorage
    """Its memory; the number is that in the file."""
    kind: str
    """``parameter``, ``buffer`` or ``moment``."""
    owner: str
    """Path of the parameter or buffer below the captured module; for a moment of its parameter."""
    key: str = ""
    """Key of a moment in ``optimizer.state``."""


def aligned(size_bytes: int) -> int:
    """Return the next multiple of a block [B]."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, kw_only=True)
class Format:
    """The tensors of a state file, and where it has them."""

    name: str
    """Identifier of the captured step."""
    generations: int
    """How many slots each tensor has: one or two."""
    tensors: tuple[StateTensor, ...]
    header: bytes = field(repr=False)
    """How it is written in the beginning of the file."""

    @classmethod
    def of(cls, tensors: Iterable[StateTensor], *, name: str, generations: int) -> Self:
        """Return the format for some tensors, with its header."""
        tensors = tuple(tensors)
        fields = {
            "version": _VERSION,
            "name": name,
            "generations": generations,
            "block_bytes": BLOCK_BYTES,
            "tensors": [_tensor_to_dict(tensor) for tensor in tensors],
        }
        text = json.dumps(fields, allow_nan=False).encode()
        begin = _HEADER.pack(_MAGIC, len(text), _digest(text))
        return cls(name=name, generations=generations, tensors=tensors, header=begin + text)

    @classmethod
    def parsed(cls, beginning: bytes) -> Self | None:
        """Return the format that the first bytes of a file tell, as many as `needed`.

        None if they tell none, or that of another version or host.
        """
        size = cls.needed(beginning)
        if size is None or len(beginning) < size:
            return None
        text = beginning[_HEADER.size : size]
        if _HEADER.unpack_from(beginning)[2] != _digest(text):
            return None
        fields = json.loads(text)
        if fields["version"] != _VERSION or fields["block_bytes"] != BLOCK_BYTES:
            return None
        tensors = tuple(_tensor_from_dict(k, tensor) for k, tensor in enumerate(fields["tensors"]))
        return cls(
            name=fields["name"],
            generations=fields["generations"],
            tensors=tensors,
            header=beginning[:size],
        )

    @staticmethod
    def needed(beginning: bytes) -> int | None:
        """Return the length of the header of a file that begins so; None if it is none [B]."""
        if len(beginning) < _HEADER.size:
            return None
        magic, size, _ = _HEADER.unpack_from(beginning)
        return _HEADER.size + int(size) if magic == _MAGIC else None

    def record_offset(self, generation: int) -> int:
        """Return the start of the record of a generation [B]."""
        return aligned(len(self.header)) + generation % RECORDS * aligned(self.record_bytes)

    @property
    def record_bytes(self) -> int:
        """Most bytes that a record takes [B]."""
        return _RECORD.size + 9 * len(self.tensors) + BLOCK_BYTES * 2 + _DIGEST_BYTES

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        """First byte of each tensor in its generation; last the size of a generation [B]."""
        sizes = (aligned(tensor.storage.bytes) for tensor in self.tensors)
        return tuple(accumulate(sizes, initial=0))

    @property
    def bytes(self) -> int:
        """Size of the file [B]."""
        return self.slot_offset(len(self.tensors), self.generations - 1)

    def slot_offset(self, position: int, slot: int) -> int:
        """Return the start of a slot of the tensor at a position [B].

        The first slots of all tensors lie together, and so do the second ones.
        """
        begin = self.record_offset(0) + RECORDS * aligned(self.record_bytes)
        return begin + slot * self._offsets[-1] + self._offsets[position]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One generation: the slot and the checksum of each tensor."""

    generation: int
    steps: int
    """Training steps that made it."""
    slots: tuple[int, ...]
    sums: tuple[int, ...]
    random: bytes = field(default=b"", repr=False)
    """The state of PyTorch's random generator after them."""

    @classmethod
    def blank(cls, count: int, *, steps: int) -> Self:
        """Return the content before anything was written."""
        return cls(generation=0, steps=steps, slots=(ABSENT,) * count, sums=(0,) * count)

    def to_bytes(self) -> bytes:
        """Return the text form."""
        count = len(self.slots)
        head = _RECORD.pack(self.generation, self.steps, count, len(self.random))
        body = head + bytes(self.slots) + struct.pack(f"<{count}Q", *self.sums) + self.random
        return body + _digest(body)

    @classmethod
    def parsed(cls, written: bytes) -> Self | None:
        """Return a record that was written; None if it is torn, or there is none."""
        if len(written) < _RECORD.size:
            return None
        generation, steps, count, random_bytes = _RECORD.unpack_from(written)
        sums_at = _RECORD.size + count
        random_at = sums_at + 8 * count
        end = random_at + random_bytes
        if written[end : end + _DIGEST_BYTES] != _digest(written[:end]):
            return None
        return cls(
            generation=generation,
            steps=steps,
            slots=tuple(written[_RECORD.size : sums_at]),
            sums=struct.unpack_from(f"<{count}Q", written, sums_at),
            random=written[random_at:end],
        )


def _digest(text: bytes) -> bytes:
    return blake2b(text, digest_size=_DIGEST_BYTES).digest()


def _tensor_to_dict(tensor: StateTensor) -> dict[str, Any]:
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
    name = ".".join(filter(None, (shown_path(item["owner"]), item["key"])))
    storage = TensorStorage(
        index=index, name=name, operation=index, bytes=item["bytes"], layouts=layouts
    )
    return StateTensor(storage=storage, kind=item["kind"], owner=item["owner"], key=item["key"])


# -- the file ----------------------------------------------------------------------------------

PREFIX: Final = ".poetmodel-state-"
UNFINISHED: Final = ".new"
"""How the name of a file ends that has no whole state yet."""
LARGE_BYTES: Final = 1 << 20
"""Size from which data goes to the medium at once, and leaves RAM; the rest goes at the commit."""

_KEPT: Final = "close() brings the state back to RAM"


class StateFile:
    """The state of one training run in a file in the user's folder, locked by its process.

    Between steps the memory of a tensor, by `map`, is a private mapping of its current generation:
    who writes to it changes no file. `take_over` makes such changes a generation of their own,
    before the next step. So the file has what its record says, and every page is checked by it.

    With one generation a step writes over the only one, and there is nothing to recover.
    """

    def __init__(
        self,
        folder: str | Path,
        tensors: Iterable[StateTensor],
        *,
        name: str = "",
        generations: int = 2,
        steps: int = 0,
    ) -> None:
        self.format = Format.of(tensors, name=name, generations=generations)
        self.record = Record.blank(len(self.format.tensors), steps=steps)
        """Number of the current generation."""
        self.storages: dict[int, TensorStorage] = {}
        self._positions: dict[int, int] = {}
        for position, tensor in enumerate(self.format.tensors):
            self.storages[tensor.storage.index] = tensor.storage
            self._positions[tensor.storage.index] = position
        self.written_bytes = self.read_bytes = 0
        self._next: dict[int, tuple[int, int]] = {}
        """Slot and checksum of what the next generation has so far, by position."""
        self._memories: dict[int, Memory] = {}
        self._mapped: dict[int, int] = {}
        """Slot that each memory is a mapping of."""
        self._shown = False
        """Whether mappings are what no commit has made current yet."""
        self._closed = False
        self._make(folder)

    @property
    def bytes(self) -> int:
        """Size of the file [B]."""
        return self.format.bytes

    # -- the file --------------------------------------------------------------------------------

    def _make(self, folder: str | Path) -> None:
        make_folder(folder)
        remove_left(folder, f"{PREFIX}*{UNFINISHED}")
        try:
            descriptor, name = tempfile.mkstemp(prefix=PREFIX, suffix=UNFINISHED, dir=folder)
        except OSError as error:
            raise InputError(
                f"{folder}: no state file can be made here ({error.strerror or error})"
            ) from None
        self._process = os.getpid()
        self._descriptor = descriptor
        # Opened again: mappings, which forked processes have too, would hold on to a lock.
        self._lock = os.open(name, os.O_RDONLY)
        self._named(Path(name))
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(descriptor, 0, self.bytes)
            os.pwrite(descriptor, self.format.header, 0)
        except OSError as error:
            self._remove()
            raise InputError(
                f"{folder}: no room for a state file of {format_bytes(self.bytes)} "
                f"({error.strerror or error}); free some, or give more ram"
            ) from None
        os.register_at_fork(after_in_child=partial(_leave, weakref.ref(self)))

    def _named(self, path: Path) -> None:
        """Let the file at a path be the one that goes with this object."""
        self.path = path
        descriptors = (self._descriptor, self._lock)
        self._remove = weakref.finalize(self, _remove, descriptors, path, self._process)

    def _publish(self) -> None:
        """Give the file the name by which it is found; it has a whole state now."""
        self._remove.detach()
        path = self.path.rename(self.path.with_suffix(""))
        self._named(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def check(self) -> None:
        """Raise `PageError` unless the file is there, with its full size, and of this process."""
        if self._process != os.getpid():
            raise PageError(
                f"{self.path}: the state is in a file of process {self._process}, and this is "
                f"process {os.getpid()}, forked from it; compile in the process that trains"
            )
        if self._closed:
            raise PageError(f"{self.path}: the step was closed; compile again")
        there = os.fstat(self._descriptor)
        if not there.st_nlink or not self.path.exists():
            raise PageError(f"{self.path}: the state file was removed or moved; {_KEPT}")
        if there.st_size < self.bytes:
            raise PageError(
                f"{self.path}: the state file has {there.st_size:,} of {self.bytes:,} B: state is "
                "lost; load a checkpoint"
            )

    def close(self) -> None:
        """Bring what is mapped back to RAM, at the same addresses, and remove the file.

        What cannot be read is a `PageError`; the file stays then.
        """
        if self._closed or self._process != os.getpid():
            self._closed = True
            return
        for index, _ in self._living():
            self.unmap(index)
        self._closed = True
        self._remove()

    def leave(self) -> None:
        """In a forked process: let go of the file of its parent."""
        if self._remove.detach() is not None:
            os.close(self._descriptor)
            os.close(self._lock)
        self._descriptor = self._lock = -1
        self._closed = True

    # -- generations -----------------------------------------------------------------------------

    def contains(self, index: int) -> bool:
        """Whether the current generation has a tensor."""
        return self._slot(self._positions[index]) != ABSENT

    def has(self, index: int, total: int) -> bool:
        """Whether the current generation of a tensor has a checksum."""
        position = self._positions[index]
        return self.record.slots[position] != ABSENT and self.record.sums[position] == total

    def read(self, index: int, memory: memoryview) -> None:
        """Read what a tensor is now; zeros if it is not there.

        The file is checked to have what was written. What was changed through its mapping since
        the last step is in it.
        """
        position = self._positions[index]
        slot = self.record.slots[position]
        if slot == ABSENT:
            np.frombuffer(memory, dtype=np.uint8)[:] = 0
            return
        self._read(position, slot, self.record.sums[position], memory)
        mapped = self._memories.get(index)
        if mapped is not None:
            with Pagemap() as pages:
                mapped.copy_written(pages, memory)

    def _read(self, position: int, slot: int, expected: int, memory: memoryview) -> None:
        offset = self.format.slot_offset(position, slot)
        read_checked(self.path, self._descriptor, memory, offset, expected, self._page(position))
        self.read_bytes += len(memory)

    def write(self, index: int, memory: memoryview) -> None:
        """Write a tensor of the next generation; what is not written stays as it is."""
        position = self._positions[index]
        current = self.record.slots[position]
        slot = 0 if current == ABSENT else (current + 1) % self.format.generations
        offset = self.format.slot_offset(position, slot)
        with page_errors(self.path, f"{self._page(position)} could not be written"):
            self._put(memory, offset)
            if len(memory) >= LARGE_BYTES:
                os.fdatasync(self._descriptor)
                os.posix_fadvise(self._descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)
        self._next[position] = slot, checksum(memory)
        self.written_bytes += len(memory)

    def commit(self, *, steps: int = 0, absent: Iterable[int] = ()) -> None:
        """Make what was written the current generation, for good when this returns.

        Parameters
        ----------
        steps : int
            Training steps since the last commit.
        absent : iterable of int
            Tensors that are not there any more.
        """
        gone = {self._positions[index]: (ABSENT, 0) for index in absent}
        self._next |= gone
        record = self._following(steps=steps)
        if self.format.generations > 1:
            with page_errors(self.path, "the commit record could not be written"):
                self._commit(record)
        written, self.record, self._next = self._next, record, {}
        self._remap(written)
        if self.format.generations > 1 and self.path.suffix == UNFINISHED:
            self._publish()

    def _following(self, *, steps: int) -> Record:
        """Return the record of the next generation, as far as it is written."""
        pairs = list(zip(self.record.slots, self.record.sums, strict=True))
        for position, pair in self._next.items():
            pairs[position] = pair
        return Record(
            generation=self.record.generation + 1,
            steps=self.record.steps + steps,
            slots=tuple(slot for slot, _ in pairs),
            sums=tuple(total for _, total in pairs),
            random=torch.default_generator.get_state().numpy().tobytes(),
        )

    def _commit(self, record: Record) -> None:
        """Write a record once the medium has all that it speaks of."""
        os.fdatasync(self._descriptor)
        self._put(memoryview(record.to_bytes()), self.format.record_offset(record.generation))
        os.fdatasync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def show(self) -> None:
        """Let mappings be what was written since the last commit, until the next `rollback`."""
        self._shown = True
        self._remap(self._next)

    @property
    def is_changed(self) -> bool:
        """Whether something was written since the last commit."""
        return bool(self._next)

    def rollback(self) -> None:
        """Forget what was written since the last commit; with one generation, live with it."""
        forgotten = self._next
        self.drop_written()
        self._shown = False
        self._remap(forgotten)

    def drop_written(self) -> None:
        """Forget what was written since the last commit, and leave mappings as they are."""
        if self.format.generations == 1:
            self.record = self._following(steps=0)
        self._next = {}

    def _put(self, memory: memoryview, offset: int) -> None:
        """Write something, and zeros to the end of a page: no part of one has to be read first."""
        rest, done = bytes(-len(memory) % BLOCK_BYTES), 0
        while done < len(memory):
            done += os.pwritev(self._descriptor, [memory[done:], rest], offset + done)

    def _page(self, position: int) -> str:
        """Return the tensor at a position, for messages."""
        return f"tensor {self.format.tensors[position].storage.name!r}"

    # -- mappings --------------------------------------------------------------------------------

    def map(self, index: int, memory: Memory) -> None:
        """Let memory be the current generation of a tensor, from now on."""
        self._memories[index] = memory
        self._map(index, memory)

    def unmap(self, index: int) -> None:
        """Bring a tensor back to RAM, as it is now, at the same address."""
        memory = self._memories[index]
        memory.load(partial(self.read, index))
        del self._memories[index]

    def forget(self, index: int) -> None:
        """Let memory that is mapped be that of nobody."""
        self._memories.pop(index, None)

    def is_mapped(self, index: int) -> bool:
        """Whether a tensor lies in the file."""
        return index in self._memories

    def _living(self) -> list[tuple[int, Memory]]:
        """Return the memories that are mapped, and forget those whose storage has moved."""
        for index in [i for i, memory in self._memories.items() if memory.is_lost]:
            self.forget(index)
        return list(self._memories.items())

    def _remap(self, positions: Collection[int]) -> None:
        """Map those at some positions anew, and all that are not what is current."""
        for index, memory in self._living():
            position = self._positions[index]
            if position in positions or self._mapped[index] != self._slot(position):
                self._map(index, memory)

    def _map(self, index: int, memory: Memory) -> None:
        position = self._positions[index]
        slot = self._mapped[index] = self._slot(position)
        if slot != ABSENT:
            memory.map(self._descriptor, self.format.slot_offset(position, slot))

    def _slot(self, position: int) -> int:
        """Return the slot that mappings are to be of."""
        if self._shown and position in self._next:
            return self._next[position][0]
        return self.record.slots[position]

    def take_over(self) -> None:
        """Write what was changed through mappings, and let go of what was looked at.

        The changes are in the next generation then; a `commit` makes it the current one.
        """
        with Pagemap() as pages:
            for index, memory in self._living():
                position = self._positions[index]
                if position in self._next:
                    continue
                looked_at, changed = memory.look(pages, self.record.sums[position])
                if changed:
                    held = bytearray(self.storages[index].bytes)
                    self.read(index, memoryview(held))
                    self.write(index, memoryview(held))
                elif looked_at:
                    self._map(index, memory)


def _remove(descriptors: tuple[int, ...], path: Path, process: int) -> None:
    """Remove the file, and its lock with it, in the process that made it."""
    if os.getpid() == process:
        with suppress(OSError):
            path.unlink()
        for descriptor in descriptors:
            os.close(descriptor)


def _leave(reference: weakref.ref[StateFile]) -> None:
    """Let a forked process have no part in the file, lest it holds the lock of its parent."""
    file = reference()
    if file is not None:
        file.leave()
