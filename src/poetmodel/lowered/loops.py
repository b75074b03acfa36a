"""Kernel calls as nested loops over their tensors, and calls from modified loops.

This module supports only kernels that accept any offsets, sizes and strides: matrix products, sums,
copies and elementwise operators.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from poetmodel.lowered.calls import Call, Ref
from poetmodel.lowered.kernels import parameter_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from poetmodel.lowered.calls import Argument

    Numbers: TypeAlias = tuple[int, ...]

RANK: Final = 6
"""Maximum number of dimensions of a shape table: ``PM_RANK``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loops:
    """A call as nested loops over its tensors, with a step in each dimension [elements]."""

    call: Call
    sizes: Numbers
    """Number of iterations of each loop."""
    refs: tuple[Ref, ...]
    """Pointers to the first element of each tensor."""
    steps: tuple[Numbers, ...]
    """Steps of each tensor in each dimension."""

    def elements(self, number: int) -> np.ndarray:
        """Return the index of each element that the loops read or write in a tensor.

        Its shape is that of the loops, with 1 in place of sizes whose step is 0.
        """
        elements = np.array(self.refs[number].offset)
        for size, step in zip(self.sizes, self.steps[number], strict=True):
            elements = elements[..., None] + step * np.arange(size if step else 1)
        return elements

    def with_elements(self, number: int, buffer: str, elements: np.ndarray) -> Loops | None:
        """Return loops over other elements of tensor `number`.

        None if no constant steps reach them.
        """
        first, steps = int(elements.flat[0]), []
        for dimension, step in enumerate(self.steps[number]):
            line = np.moveaxis(elements, dimension, 0).reshape(elements.shape[dimension], -1)[:, 0]
            steps.append(int(line[1] - line[0]) if len(line) > 1 else step)
        refs = (*self.refs[:number], Ref(buffer, first), *self.refs[number + 1 :])
        all_steps = (*self.steps[:number], tuple(steps), *self.steps[number + 1 :])
        loops = replace(self, refs=refs, steps=all_steps)
        return loops if (loops.elements(number) == elements).all() else None

    def subset(self, dimension: int, number: int, *, rows: int, count: int) -> Loops:
        """Return loops over some iterations `i` of a dimension.

        These are the groups of `rows` iterations with ``(i // rows) % count == number``. The
        dimension becomes two dimensions if there are several groups of several iterations.
        """
        n_rounds = self.sizes[dimension] // (rows * count)
        replaced_dimensions = [(rows, 1)] if n_rounds == 1 else [(n_rounds, rows * count)]
        if rows > 1 and n_rounds > 1:
            replaced_dimensions.insert(0, (rows, 1))
        refs = tuple(
            replace(ref, offset=ref.offset + number * rows * steps[dimension])
            for ref, steps in zip(self.refs, self.steps, strict=True)
        )
        steps = tuple(
            (
                *tensor_steps[:dimension],
                *(tensor_steps[dimension] * factor for _, factor in replaced_dimensions),
                *tensor_steps[dimension + 1 :],
            )
            for tensor_steps in self.steps
        )
        new_sizes = (size for size, _ in replaced_dimensions)
        sizes = (*self.sizes[:dimension], *new_sizes, *self.sizes[dimension + 1 :])
        return replace(self, sizes=sizes, refs=refs, steps=steps)

    def as_call(self) -> Call | None:
        """Return the loops as a call; None if the kernel does not support them."""
        return _LOOP_KINDS[_loop_kind(self.call)][1](self)


def loops_of(call: Call) -> Loops | None:
    """Return a call as loops; None if its kernel is not supported or it has a condition."""
    kind = _loop_kind(call)
    return _LOOP_KINDS[kind][0](call) if kind in _LOOP_KINDS and call.where is None else None


def is_by_element(call: Call) -> bool:
    """Return whether a kernel is elementwise, so that its result may overwrite an input."""
    return _loop_kind(call) == "each"


def _loop_kind(call: Call) -> str:
    """Return the key in `_LOOP_KINDS` of a call's kernel; "" if the kernel is not supported."""
    if call.kernel in _LOOP_KINDS:
        return call.kernel
    refs = [a for a in call.arguments if isinstance(a, Ref)]
    names, other_arguments = parameter_names(call.kernel), call.arguments[len(refs) + 1 :]
    table = call.arguments[len(refs)] if len(call.arguments) > len(refs) else None
    if names[len(refs) : len(refs) + 1] != ("shape",) or not isinstance(table, tuple):
        return ""
    is_shape_table = 1 <= table[0] <= RANK and len(table) == 1 + table[0] * (1 + len(refs))
    return "each" if is_shape_table and all(isinstance(a, float) for a in other_arguments) else ""


def _int_arguments(arguments: Iterable[Argument]) -> list[int]:
    return [a for a in arguments if isinstance(a, int)]


def call_refs(call: Call) -> tuple[Ref, ...]:
    """Return the pointers of a call, in order."""
    return tuple(a for a in call.arguments if isinstance(a, Ref))


def pointer_names(call: Call) -> list[str]:
    """Return the parameter names of a call's pointers that are not null."""
    pairs = zip(parameter_names(call.kernel), call.arguments, strict=True)
    return [name for name, a in pairs if isinstance(a, Ref)]


def with_arguments(loops: Loops, changes: Mapping[str, Argument]) -> Call:
    """Return the call of loops with their pointers, and other arguments replaced by name."""
    refs = iter(loops.refs)
    names = parameter_names(loops.call.kernel)
    arguments = tuple(
        next(refs) if isinstance(a, Ref) else changes.get(name, a)
        for name, a in zip(names, loops.call.arguments, strict=True)
    )
    return replace(loops.call, arguments=arguments)


def named_arguments(call: Call) -> dict[str, Any]:
    """Return the arguments of a call by the names of its kernel's parameters."""
    return dict(zip(parameter_names(call.kernel), call.arguments, strict=True))


def loops_by_name(call: Call, sizes: Numbers, steps: Mapping[str, Numbers]) -> Loops:
    """Return loops with the given sizes, and the steps of each pointer by name."""
    pointer_steps = tuple(steps[name] for name in pointer_names(call))
    return Loops(call=call, sizes=sizes, refs=call_refs(call), steps=pointer_steps)


def table_columns(table: Argument) -> list[Numbers]:
    """Return the sizes, then the steps of each tensor, of a shape table as in ``pm_each.h``."""
    if not isinstance(table, tuple):
        raise TypeError(table)
    rank, *sizes_and_steps = table
    width = len(sizes_and_steps) // rank
    return [tuple(sizes_and_steps[k::width]) for k in range(width)]


def merge_dimensions(columns: Sequence[Numbers]) -> list[list[int]]:
    """Return the rows of a shape table without dimensions of size 1, contiguous dimensions merged.

    Two dimensions are merged if one step of the outer loop continues the inner loop, in all
    tensors.
    """
    rows: list[list[int]] = []
    for size, *steps in zip(*columns, strict=True):
        if rows and steps == [rows[-1][0] * step for step in rows[-1][1:]]:
            rows[-1][0] *= size
        elif size != 1:
            rows.append([size, *steps])
    return rows


def shape_table(columns: Sequence[Numbers]) -> Numbers | None:
    """Return a shape table with merged dimensions; None if it has more than `RANK`."""
    rows = merge_dimensions(columns) or [[1] * len(columns)]
    return (len(rows), *(n for row in rows for n in row)) if len(rows) <= RANK else None


def _read_each(call: Call) -> Loops:
    refs = call_refs(call)
    sizes, *steps = table_columns(call.arguments[len(refs)])
    return Loops(call=call, sizes=sizes, refs=refs, steps=tuple(steps))


def _write_each(loops: Loops) -> Call | None:
    table, count = shape_table((loops.sizes, *loops.steps)), len(loops.refs)
    other_arguments = loops.call.arguments[count + 1 :]
    return (
        None
        if table is None
        else replace(loops.call, arguments=(*loops.refs, table, *other_arguments))
    )


def _read_product(call: Call) -> Loops:
    m, k, n, out_row, a_row, a_column, b_row, b_column, _ = _int_arguments(call.arguments)
    steps = (out_row, 0, 1), (a_row, a_column, 0), (0, b_row, b_column)
    return Loops(call=call, sizes=(m, k, n), refs=call_refs(call), steps=steps)


def _write_product(loops: Loops) -> Call | None:
    if len(loops.sizes) != len(_PRODUCT) or (loops.steps[0][2] != 1 and loops.sizes[2] > 1):
        return None
    (out_row, _, _), (a_row, a_column, _), (_, b_row, b_column) = loops.steps
    sizes_and_steps = (*loops.sizes, out_row, a_row, a_column, b_row, b_column)
    return replace(loops.call, arguments=(*loops.refs, *sizes_and_steps, loops.call.arguments[-1]))


def _read_sum(call: Call) -> Loops:
    """Return a sum as loops over the outputs and the summed elements."""
    sizes, out_steps, x_steps = table_columns(call.arguments[2])
    summed_sizes, summed_steps = table_columns(call.arguments[3])
    steps = (*out_steps, *(0 for _ in summed_sizes)), (*x_steps, *summed_steps)
    return Loops(call=call, sizes=(*sizes, *summed_sizes), refs=call_refs(call), steps=steps)


def _write_sum(loops: Loops) -> Call | None:
    """Return the loops of a sum as a call; None if a shape table is too large."""
    rows = list(zip(loops.sizes, *loops.steps, strict=True))
    outer_table = shape_table(
        tuple(zip(*(row for row in rows if row[1]), strict=True)) or ((1,),) * 3
    )
    summed_rows = [(size, x_step) for size, out_step, x_step in rows if not out_step]
    inner_table = shape_table(tuple(zip(*summed_rows, strict=True)) or ((1,),) * 2)
    if outer_table is None or inner_table is None:
        return None
    return replace(
        loops.call, arguments=(*loops.refs, outer_table, inner_table, *loops.call.arguments[4:])
    )


def _read_fill(call: Call) -> Loops:
    return Loops(
        call=call, sizes=(_int_arguments(call.arguments)[0],), refs=call_refs(call), steps=((1,),)
    )


def _write_fill(loops: Loops) -> Call | None:
    match shape_table((loops.sizes, *loops.steps)):
        case (1, elements, 1):
            return replace(loops.call, arguments=(*loops.refs, elements, *loops.call.arguments[2:]))
    return None


def _read_rows(call: Call) -> Loops:
    m, n, row, step = _int_arguments(call.arguments)
    return Loops(call=call, sizes=(m, n), refs=call_refs(call), steps=((row, 1), (0, step)))


def _write_rows(loops: Loops) -> Call | None:
    if len(loops.sizes) != len(_ROWS) or (loops.steps[0][1] != 1 and loops.sizes[1] > 1):
        return None
    (row, _), (_, step) = loops.steps
    return replace(loops.call, arguments=(*loops.refs, *loops.sizes, row, step))


_PRODUCT: Final = ("m", "k", "n")
"""Dimensions of a matrix product."""
_ROWS: Final = ("m", "n")
"""Dimensions of filled rows."""

_LOOP_KINDS: Final = {
    "each": (_read_each, _write_each),
    "pm_mm": (_read_product, _write_product),
    "pm_sum": (_read_sum, _write_sum),
    "pm_fill": (_read_fill, _write_fill),
    "pm_fill_rows": (_read_rows, _write_rows),
}
"""Functions that convert calls to loops and back, by kernel; ``each`` for kernels with one shape
table."""
