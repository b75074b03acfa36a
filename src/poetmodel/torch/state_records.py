"""What a state file says of itself: its tensors, where they lie, and which slots are current."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from poetmodel.torch.graph_signature import shown_path
from poetmodel.torch.mapped_memory import PAGE_BYTES
from poetmodel.torch.pages import ALIGNMENT_BYTES
from poetmodel.torch.units import Layout, TensorStorage

if TYPE_CHECKING:
    from collections.abc import Iterable

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
    """Of a moment: its key in ``optimizer.state``."""


def aligned(size_bytes: int) -> int:
    """Return the next multiple of a block [B]."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, kw_only=True)
class Format:
    """The tensors of a state file, and where it has them."""

    name: str
    """Of the captured step."""
    generations: int
    """How many slots each tensor has: one or two."""
    tensors: tuple[StateTensor, ...]
    header: bytes = field(repr=False)
    """How it is written in the beginning of the file."""

    @classmethod
    def of(cls, tensors: Iterable[StateTensor], *, name: str, generations: int) -> Self:
        """Return the format for some tensors, with its header."""
        found = tuple(tensors)
        told = {
            "version": _VERSION,
            "name": name,
            "generations": generations,
            "block_bytes": BLOCK_BYTES,
            "tensors": [_tensor_to_dict(tensor) for tensor in found],
        }
        text = json.dumps(told, allow_nan=False).encode()
        begin = _HEADER.pack(_MAGIC, len(text), _digest(text))
        return cls(name=name, generations=generations, tensors=found, header=begin + text)

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
        told = json.loads(text)
        if told["version"] != _VERSION or told["block_bytes"] != BLOCK_BYTES:
            return None
        tensors = tuple(_tensor_from_dict(k, each) for k, each in enumerate(told["tensors"]))
        return cls(
            name=told["name"],
            generations=told["generations"],
            tensors=tensors,
            header=beginning[:size],
        )

    @staticmethod
    def needed(beginning: bytes) -> int | None:
        """Return how long the header of a file is that begins so; None if it is none [B]."""
        if len(beginning) < _HEADER.size:
            return None
        magic, size, _ = _HEADER.unpack_from(beginning)
        return _HEADER.size + int(size) if magic == _MAGIC else None

    def record_offset(self, generation: int) -> int:
        """Return where the record of a generation begins [B]."""
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

    def slot_offset(self, place: int, slot: int) -> int:
        """Return where a slot of the tensor at a place begins [B].

        The first slots of all tensors lie together, and so do the second ones.
        """
        begin = self.record_offset(0) + RECORDS * aligned(self.record_bytes)
        return begin + slot * self._offsets[-1] + self._offsets[place]


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
        """Return what there is before anything was written."""
        return cls(generation=0, steps=steps, slots=(ABSENT,) * count, sums=(0,) * count)

    def to_bytes(self) -> bytes:
        """Return how it is written."""
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


def _tensor_from_dict(index: int, told: dict[str, Any]) -> StateTensor:
    layouts = tuple(
        Layout(
            position=None,
            dtype=getattr(torch, layout["dtype"]),
            shape=tuple(layout["shape"]),
            stride=tuple(layout["stride"]),
            offset=layout["offset"],
        )
        for layout in told["layouts"]
    )
    name = ".".join(filter(None, (shown_path(told["owner"]), told["key"])))
    storage = TensorStorage(
        index=index, name=name, unit=index, bytes=told["bytes"], layouts=layouts
    )
    return StateTensor(storage=storage, kind=told["kind"], owner=told["owner"], key=told["key"])
