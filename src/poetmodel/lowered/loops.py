"""Kernel calls as nested loops over their tensors, and the shape tables that state loops."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from poetmodel.lowered.calls import Call, Ref

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from poetmodel.lowered.calls import Argument

    Numbers: TypeAlias = tuple[int, ...]

MAX_RANK: Final = 6
"""Maximum number of dimensions of a shape table, as ``PM_RANK`` in C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """A call as nested loops over its tensors, with strides [elements]."""

    call: Call
    sizes: Numbers
    """Number of iterations of each loop; loops of a shape table have its order, the innermost
    first."""
    refs: tuple[Ref, ...]
    """Pointers to the first element of each tensor, in the order of the arguments."""
    strides: tuple[Numbers, ...]
    """Strides of each tensor for each loop; 0 if the tensor lacks the dimension."""

    def index_of(self, parameter: str) -> int:
        """Return the index of the tensor to which a parameter of the call points."""
        return [*self.call.pointers].index(parameter)

    def strides_of(self, parameter: str) -> Numbers:
        """Return the strides of the tensor to which a parameter of the call points."""
        return self.strides[self.index_of(parameter)]

    def element_indices(self, index: int) -> np.ndarray:
        """Return the indices in the buffer of the elements that the loops visit in tensor `index`.

        The array has the shape of the loops, with 1 in place of sizes whose stride is 0.
        """
        indices = np.array(self.refs[index].offset)
        for size, stride in zip(self.sizes, self.strides[index], strict=True):
            indices = indices[..., None] + stride * np.arange(size if stride else 1)
        return indices

    def with_elements(self, index: int, buffer: str, element_indices: np.ndarray) -> Loops | None:
        """Return loops in which tensor `index` is replaced by elements of a buffer.

        `element_indices` has the shape that `Loops.element_indices` returns. None if no constant
        strides reach these elements.
        """
        first, strides = int(element_indices.flat[0]), []
        for dimension, stride in enumerate(self.strides[index]):
            indices = np.moveaxis(element_indices, dimension, 0).reshape(
                element_indices.shape[dimension], -1
            )[:, 0]
            strides.append(int(indices[1] - indices[0]) if len(indices) > 1 else stride)
        refs = (*self.refs[:index], Ref(buffer, first), *self.refs[index + 1 :])
        all_strides = (*self.strides[:index], tuple(strides), *self.strides[index + 1 :])
        loops = replace(self, refs=refs, strides=all_strides)
        return loops if (loops.element_indices(index) == element_indices).all() else None

    def select_iterations(
        self, dimension: int, phase: int, *, group_size: int, period: int
    ) -> Loops:
        """Return loops over iterations with ``(i // group_size) % period == phase``.

        Here `i` is the iteration of `dimension`, whose size must be a multiple of ``group_size *
        period``. It becomes two dimensions if several groups of several iterations are selected.
        """
        n_rounds = self.sizes[dimension] // (group_size * period)
        new_dimensions = [(group_size, 1)] if n_rounds == 1 else [(n_rounds, group_size * period)]
        if group_size > 1 and n_rounds > 1:
            new_dimensions.insert(0, (group_size, 1))
        refs = tuple(
            replace(ref, offset=ref.offset + phase * group_size * strides[dimension])
            for ref, strides in zip(self.refs, self.strides, strict=True)
        )
        strides = tuple(
            (
                *tensor_strides[:dimension],
                *(tensor_strides[dimension] * factor for _, factor in new_dimensions),
                *tensor_strides[dimension + 1 :],
            )
            for tensor_strides in self.strides
        )
        new_sizes = (size for size, _ in new_dimensions)
        sizes = (*self.sizes[:dimension], *new_sizes, *self.sizes[dimension + 1 :])
        return replace(self, sizes=sizes, refs=refs, strides=strides)


def table_columns(table: Argument) -> list[Numbers]:
    """Return the sizes, then each tensor's strides, of a shape table, innermost first."""
    if not isinstance(table, tuple):
        raise TypeError(table)
    rank, *sizes_and_strides = table
    width = len(sizes_and_strides) // rank
    return [tuple(sizes_and_strides[k::width]) for k in range(width)]


def merge_dimensions(columns: Sequence[Numbers]) -> list[list[int]]:
    """Return the rows of a shape table, dimensions of size 1 omitted, contiguous ones merged.

    `columns` are the sizes, the innermost first, then the strides of each tensor.
    """
    rows: list[list[int]] = []
    for size, *strides in zip(*columns, strict=True):
        if rows and strides == [rows[-1][0] * stride for stride in rows[-1][1:]]:
            rows[-1][0] *= size
        elif size != 1:
            rows.append([size, *strides])
    return rows


def make_shape_table(columns: Sequence[Numbers]) -> Numbers | None:
    """Return a shape table with merged dimensions; None if more than `MAX_RANK` are left.

    `columns` are the sizes, the innermost first, then the strides of each tensor. The table has the
    number of dimensions (at least 1), then the size and the strides of each.
    """
    rows = merge_dimensions(columns) or [[1] * len(columns)]
    return join_rows(rows) if len(rows) <= MAX_RANK else None


def join_rows(rows: Iterable[Sequence[int]]) -> Numbers:
    """Return the shape table of rows: their number, then the size and the strides of each."""
    all_rows = tuple(rows)
    return len(all_rows), *chain.from_iterable(all_rows)
