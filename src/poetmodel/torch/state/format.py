"""The format of a state file: a header with its tensors, and commit records.

Header and record are JSON after a prefix with magic bytes, length and digest.
"""

from __future__ import annotations

import json
import struct
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import torch
from pydantic import TypeAdapter

from poetmodel.torch.graph.profiles import TensorLayout  # noqa: TC001 - pydantic reads it
from poetmodel.torch.state.memory import PAGE_BYTES
from poetmodel.torch.state.pages import ALIGNMENT_BYTES
from poetmodel.torch.step.state_keys import StateKey

if TYPE_CHECKING:
    from collections.abc import Mapping

BLOCK_BYTES: Final = max(ALIGNMENT_BYTES, PAGE_BYTES)
"""All offsets in the file are multiples of this size, so that they can be mapped [B]."""
RECORD_COUNT: Final = 2
"""Number of positions for records, which are written in turn."""

_MAGIC: Final = b"poetmodel state\n"
_VERSION: Final = 4
_DIGEST_BYTES: Final = 16
_PREFIX: Final = struct.Struct(f"<{len(_MAGIC)}sQ{_DIGEST_BYTES}s")
"""What precedes the JSON of a header or record: magic bytes, its length, and its digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTensor:
    """Size and layout of a tensor in a state file."""

    bytes: int
    layout: TensorLayout

    def allocate(self) -> torch.Tensor:
        """Return a tensor with this layout in new memory."""
        return self.layout.tensor_in(torch.UntypedStorage(self.bytes))


_TENSORS: Final = TypeAdapter(list[tuple[StateKey, StateTensor]])


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
    tensors: Mapping[StateKey, StateTensor]
    header: bytes = field(repr=False)
    """The encoded header of the file."""

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[StateKey, StateTensor], *, name: str, generations: int
    ) -> Self:
        """Return the format of a file for `tensors`, in their order, with the encoded header."""
        fields = {
            "version": _VERSION,
            "name": name,
            "generations": generations,
            "block_bytes": BLOCK_BYTES,
            "tensors": _TENSORS.dump_python(list(tensors.items()), mode="json"),
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
        return cls(
            name=fields["name"],
            generations=fields["generations"],
            tensors=dict(_TENSORS.validate_python(fields["tensors"])),
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

    @property
    def bytes(self) -> int:
        """Size of the file [B]."""
        return self._first_slot_offset + self.generations * self._slots_bytes

    def slot_offset(self, key: StateKey, slot: int) -> int:
        """Return the offset of a slot of a tensor [B].

        The first slots of all tensors are contiguous, and the second slots follow.
        """
        return self._first_slot_offset + slot * self._slots_bytes + self._offsets[key]

    @property
    def _first_slot_offset(self) -> int:
        return self.record_offset(0) + RECORD_COUNT * align_to_block(self.record_bytes)

    @cached_property
    def _offsets(self) -> dict[StateKey, int]:
        """Offset of each tensor's slot among the slots of one number [B]."""
        sizes = (align_to_block(tensor.bytes) for tensor in self.tensors.values())
        return dict(zip(self.tensors, accumulate(sizes, initial=0), strict=False))

    @cached_property
    def _slots_bytes(self) -> int:
        """Size of the slots of one number [B]."""
        return sum(align_to_block(tensor.bytes) for tensor in self.tensors.values())


class Entry(NamedTuple):
    """Where a generation has a tensor."""

    slot: int
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A commit record of one generation."""

    generation: int = 0
    steps: int
    """Number of training steps before this generation was written."""
    entries: Mapping[StateKey, Entry] = field(default_factory=dict)
    """The tensors of the generation; others are absent, such as a moment before the first step."""
    random_state: bytes = field(default=b"", repr=False)
    """State of PyTorch's random generator after these steps."""
    update_counts: tuple[int, ...] = ()
    """``updates`` of each parameter group that counts them."""

    def to_bytes(self, file_format: Format) -> bytes:
        """Return the encoded record, with the entries in the order of the header's tensors."""
        return encode(
            {
                "generation": self.generation,
                "steps": self.steps,
                "entries": [self.entries.get(key) for key in file_format.tensors],
                "random_state": b64encode(self.random_state).decode(),
                "update_counts": self.update_counts,
            }
        )

    @classmethod
    def parse(cls, encoded: bytes, file_format: Format) -> Self | None:
        """Parse a record; return None if it is incomplete or damaged."""
        fields = decode(encoded)
        if fields is None:
            return None
        entries = zip(file_format.tensors, fields["entries"], strict=True)
        return cls(
            generation=fields["generation"],
            steps=fields["steps"],
            entries={key: Entry(*entry) for key, entry in entries if entry is not None},
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
