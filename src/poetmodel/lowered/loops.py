"""Kernel calls as nested loops over their tensors, and calls from modified loops.

This module converts only kernels that accept any offsets and sizes, and nearly any strides: matrix
products, sums, fills, copies and elementwise operators.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from poetmodel.lowered.calls import Call, Ref

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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

        `element_indices` has the shape of the result of the method `element_indices`. Returns None
        if no constant strides reach these elements.
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
        """Return loops over the iterations with ``(i // group_size) % period == phase``.

        Here `i` is the iteration of `dimension`. If several groups of several iterations are
        selected, `dimension` becomes two dimensions: the iterations in a group, then the groups.
        Its size must be a multiple of ``group_size * period``.
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

    def to_call(self) -> Call | None:
        """Return the call that executes the loops; None if the kernel does not support them.

        Raises `KeyError` for a kernel that `call_to_loops` does not support.
        """
        return _CONVERTERS[_loop_kind(self.call)][1](self)


def call_to_loops(call: Call) -> Loops | None:
    """Return a call as loops; None if the call is not supported or has a condition."""
    kind = _loop_kind(call)
    return _CONVERTERS[kind][0](call) if kind in _CONVERTERS and call.condition is None else None


def is_elementwise(call: Call) -> bool:
    """Return whether a call is elementwise: pointers, one shape table, then only real numbers.

    Its result may overwrite an input that it reads with the strides of the result.
    """
    return _loop_kind(call) == "each"


def _loop_kind(call: Call) -> str:
    """Return a call's key in `_CONVERTERS`, or "" if it has none.

    The key is the call's kernel if that is a key, else ``each`` if the call is elementwise by its
    arguments (`is_elementwise`), whichever kernel it calls.
    """
    if call.kernel in _CONVERTERS:
        return call.kernel
    refs = [argument for argument in call.arguments if isinstance(argument, Ref)]
    names, other_arguments = [*call.named_arguments], call.arguments[len(refs) + 1 :]
    table = call.arguments[len(refs)] if len(call.arguments) > len(refs) else None
    if names[len(refs) : len(refs) + 1] != ["shape"] or not isinstance(table, tuple):
        return ""
    is_shape_table = 1 <= table[0] <= MAX_RANK and len(table) == 1 + table[0] * (1 + len(refs))
    return (
        "each"
        if is_shape_table and all(isinstance(argument, float) for argument in other_arguments)
        else ""
    )


def _int_arguments(arguments: Iterable[Argument]) -> list[int]:
    return [argument for argument in arguments if isinstance(argument, int)]


def with_arguments(loops: Loops, changes: Mapping[str, Argument]) -> Call:
    """Return `loops.call` with the pointers of `loops`, and with the arguments in `changes`.

    `changes` has arguments other than pointers by parameter name. Arguments without an entry are
    unchanged, even if the sizes or strides of `loops` differ.
    """
    refs = iter(loops.refs)
    arguments = tuple(
        next(refs) if isinstance(argument, Ref) else changes.get(name, argument)
        for name, argument in loops.call.named_arguments.items()
    )
    return replace(loops.call, arguments=arguments)


def make_loops(call: Call, sizes: Numbers, strides: Mapping[str, Numbers]) -> Loops:
    """Return loops over a call with the given sizes, and strides by the name of the pointer."""
    pointer_strides = tuple(strides[name] for name in list(call.pointers))
    return Loops(call=call, sizes=sizes, refs=call.refs, strides=pointer_strides)


def table_columns(table: Argument) -> list[Numbers]:
    """Return the sizes, then the strides of each tensor, of a shape table as in ``pm_each.h``.

    Each is a tuple over the dimensions, the innermost first. Raises `TypeError` if the argument is
    no tuple.
    """
    if not isinstance(table, tuple):
        raise TypeError(table)
    rank, *sizes_and_strides = table
    width = len(sizes_and_strides) // rank
    return [tuple(sizes_and_strides[k::width]) for k in range(width)]


def merge_dimensions(columns: Sequence[Numbers]) -> list[list[int]]:
    """Return the rows of a shape table without dimensions of size 1, contiguous dimensions merged.

    `columns` are the sizes, the innermost first, then the strides of each tensor. A row has the
    size and the strides of one dimension. Two dimensions are merged if the outer loop continues the
    inner loop in all tensors. Returns [] if all sizes are 1.
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
    number of dimensions, then the size and the strides of each dimension, the innermost first. If
    all sizes are 1, the table has one dimension.
    """
    rows = merge_dimensions(columns) or [[1] * len(columns)]
    return (
        (len(rows), *(number for row in rows for number in row)) if len(rows) <= MAX_RANK else None
    )


def _read_elementwise(call: Call) -> Loops:
    refs = call.refs
    sizes, *strides = table_columns(call.arguments[len(refs)])
    return Loops(call=call, sizes=sizes, refs=refs, strides=tuple(strides))


def _write_elementwise(loops: Loops) -> Call | None:
    """Return the call of elementwise loops, with contiguous dimensions merged.

    None if more than `MAX_RANK` dimensions are left.
    """
    table, count = make_shape_table((loops.sizes, *loops.strides)), len(loops.refs)
    other_arguments = loops.call.arguments[count + 1 :]
    return (
        None
        if table is None
        else replace(loops.call, arguments=(*loops.refs, table, *other_arguments))
    )


def _read_product(call: Call) -> Loops:
    m, k, n, out_row, a_row, a_column, b_row, b_column, _ = _int_arguments(call.arguments)
    strides = (out_row, 0, 1), (a_row, a_column, 0), (0, b_row, b_column)
    return Loops(call=call, sizes=(m, k, n), refs=call.refs, strides=strides)


def _write_product(loops: Loops) -> Call | None:
    """Return the ``pm_mm`` call of a product's loops; None if one call cannot compute them.

    One call computes three loops, those of `_PRODUCT_DIMENSIONS`, if the output's rows have
    contiguous elements or a single one.
    """
    if len(loops.sizes) != len(_PRODUCT_DIMENSIONS) or (
        loops.strides[0][2] != 1 and loops.sizes[2] > 1
    ):
        return None
    (out_row, _, _), (a_row, a_column, _), (_, b_row, b_column) = loops.strides
    sizes_and_strides = (*loops.sizes, out_row, a_row, a_column, b_row, b_column)
    return replace(
        loops.call, arguments=(*loops.refs, *sizes_and_strides, loops.call.arguments[-1])
    )


def _read_sum(call: Call) -> Loops:
    """Convert a sum to loops over the outputs and the summed elements."""
    sizes, out_strides, x_strides = table_columns(call.arguments[2])
    summed_sizes, summed_strides = table_columns(call.arguments[3])
    strides = (*out_strides, *(0 for _ in summed_sizes)), (*x_strides, *summed_strides)
    return Loops(call=call, sizes=(*sizes, *summed_sizes), refs=call.refs, strides=strides)


def _write_sum(loops: Loops) -> Call | None:
    """Return the call of a sum's loops; those whose output stride is 0 are summed.

    None if more than `MAX_RANK` dimensions are left in either of the two shape tables.
    """
    rows = list(zip(loops.sizes, *loops.strides, strict=True))
    outer_table = make_shape_table(
        tuple(zip(*(row for row in rows if row[1]), strict=True)) or ((1,),) * 3
    )
    summed_rows = [(size, x_stride) for size, out_stride, x_stride in rows if not out_stride]
    inner_table = make_shape_table(tuple(zip(*summed_rows, strict=True)) or ((1,),) * 2)
    if outer_table is None or inner_table is None:
        return None
    return replace(
        loops.call, arguments=(*loops.refs, outer_table, inner_table, *loops.call.arguments[4:])
    )


def _read_fill(call: Call) -> Loops:
    return Loops(
        call=call, sizes=(_int_arguments(call.arguments)[0],), refs=call.refs, strides=((1,),)
    )


def _write_fill(loops: Loops) -> Call | None:
    """Return the call of a fill's loops; None unless the elements are contiguous."""
    match make_shape_table((loops.sizes, *loops.strides)):
        case (1, count, 1):
            return replace(loops.call, arguments=(*loops.refs, count, *loops.call.arguments[2:]))
    return None


def _read_filled_rows(call: Call) -> Loops:
    m, n, row, stride = _int_arguments(call.arguments)
    return Loops(call=call, sizes=(m, n), refs=call.refs, strides=((row, 1), (0, stride)))


def _write_filled_rows(loops: Loops) -> Call | None:
    """Return the ``pm_fill_rows`` call of its loops, which write the same values to each row.

    None unless there are two loops (`_FILLED_ROW_DIMENSIONS`), and the output's rows have
    contiguous elements or a single one.
    """
    if len(loops.sizes) != len(_FILLED_ROW_DIMENSIONS) or (
        loops.strides[0][1] != 1 and loops.sizes[1] > 1
    ):
        return None
    (row, _), (_, stride) = loops.strides
    return replace(loops.call, arguments=(*loops.refs, *loops.sizes, row, stride))


_PRODUCT_DIMENSIONS: Final = ("m", "k", "n")
"""Dimensions of a matrix product, in the order of its loops; `k` is summed."""
_FILLED_ROW_DIMENSIONS: Final = ("m", "n")
"""Dimensions of the output of ``pm_fill_rows``: rows and columns."""

_CONVERTERS: Final = {
    "each": (_read_elementwise, _write_elementwise),
    "pm_mm": (_read_product, _write_product),
    "pm_sum": (_read_sum, _write_sum),
    "pm_fill": (_read_fill, _write_fill),
    "pm_fill_rows": (_read_filled_rows, _write_filled_rows),
}
"""Functions that convert calls to loops and back, by kernel; ``each`` for kernels with one shape
table."""
