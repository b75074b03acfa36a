"""The file of values that a step begins with, and where each lies in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from poetmodel.export.step import DataType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.export.step import Step

ALIGNMENT: Final = 16
"""Where a buffer begins in the file is a multiple of this [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Constants and the first values of state, one after the other.

    Reals are little-endian floats, integers 32 bits, truth values bytes. All reals come first, so
    that one index counts them.
    """

    data: bytes = field(repr=False)
    offsets: Mapping[str, int]
    """Where each buffer begins [B]."""
    reals: int
    """How many elements of reals there are, gaps included."""

    @classmethod
    def of(cls, step: Step) -> Weights:
        """Return the file of a step and its inference: what kernels read, and what state holds."""
        parts = (step,) if step.inference is None else (step, step.inference)
        stored = [(part, name, values) for part in parts for name, values in part.values.items()]
        data, offsets, reals = bytearray(), {}, 0
        for kind in DataType:
            for part, name, values in stored:
                if part.buffers[name].type is kind:
                    offsets[name] = len(data)
                    data += values.astype(kind.stored).tobytes()
                    data += bytes(-len(data) % ALIGNMENT)
            if kind is DataType.REAL:
                reals = len(data) // kind.itemsize
        return cls(data=bytes(data), offsets=offsets, reals=reals)
