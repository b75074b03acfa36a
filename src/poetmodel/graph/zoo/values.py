"""What operators compute with: shapes and sizes, no numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from poetmodel.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

ITEM_BYTES: Final[Mapping[str, int]] = MappingProxyType({"float32": 4, "float16": 2, "int8": 1})
"""Element types of activations, parameters and their gradients, and their sizes [B]."""

FLOAT_BYTES: Final = 4
"""An element of what stays in single precision: statistics, the loss, optimizer moments [B]."""

INDEX_BYTES: Final = 4
"""A label or a token id [B]."""

MASK_BYTES: Final = 1
"""An element of a dropout mask [B]."""

_LARGEST_COUNT: Final = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor of the graph, seen with one shape."""

    name: str
    """Name of the tensor; a view has the name of the tensor that it views."""
    shape: tuple[int, ...]
    """Batch first; channels before height and width."""
    item_bytes: int
    """Size of an element [B]."""
    differentiable: bool = True
    """Whether a gradient is wanted: true of everything computed with weights, not of samples."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size [B]."""
        return self.size * self.item_bytes

    def view(self, *shape: int) -> Value:
        """Return the same tensor with another shape; no node, no copy, and so for its gradient."""
        if prod(shape) != self.size:
            msg = f"{self.name}: a view of shape {self.shape} cannot have the shape {shape}"
            raise InputError(msg)
        return replace(self, shape=shape)

    def flatten(self) -> Value:
        """Return the view with one row per sample."""
        return self.view(self.shape[0], prod(self.shape[1:]))

    def made(self, name: str, *shape: int, item_bytes: int | None = None) -> Value:
        """Return a new tensor, of this one's element type unless another size is given."""
        return Value(name=name, shape=shape, item_bytes=item_bytes or self.item_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A trainable parameter tensor; resident, so no tensor of the graph."""

    name: str
    """Unique in the model; two operators that name the same one share it."""
    shape: tuple[int, ...]
    """As stored."""
    item_bytes: int
    """Size of an element [B]."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size [B]."""
        return self.size * self.item_bytes


def require_counts(**counts: int) -> None:
    """Raise unless every number is a whole one from 1 to a million.

    Parameters
    ----------
    **counts : int
        Options of a model, by name.

    Raises
    ------
    InputError
        With every option that is none.
    """
    faults = [
        f"{name}: expected a whole number from 1 to {_LARGEST_COUNT}, got {count!r}"
        for name, count in counts.items()
        if not _is_count(count)
    ]
    if faults:
        raise InputError(faults)


def _is_count(count: object) -> bool:
    if isinstance(count, bool) or not isinstance(count, int):
        return False
    return 1 <= count <= _LARGEST_COUNT
