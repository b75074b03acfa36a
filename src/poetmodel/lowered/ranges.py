"""Requirements of a step on its inputs: ranges of indices such as labels, and finite numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from poetmodel.lowered.calls import Call, DataType, Ref
from poetmodel.lowered.catalogue import CATALOGUE, read_loops
from poetmodel.lowered.instructions import estimate_call_instructions
from poetmodel.lowered.loops import join_rows, merge_dimensions, table_columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from poetmodel.lowered.calls import Argument, NamedTensor
    from poetmodel.lowered.loops import Numbers
    from poetmodel.lowered.step import LoweredStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Indices:
    """Elements of a buffer that a kernel uses as indices."""

    ref: Ref
    shape: tuple[int, ...]
    """Canonical shape table (``pm_each.h``) of the elements from `ref` on.

    Equal tables access the same elements. The converse is false: loops that access an element
    twice may have another table than loops that access the same elements once."""
    low: int
    """Smallest permitted index."""
    high: int
    """Exclusive upper bound of the indices."""
    ignored: int
    """One more permitted index; `low` if there is none."""

    def implies(self, other: Indices) -> bool:
        """Return whether valid indices certainly imply that `other` indices are valid."""
        has_same_elements = (self.ref, self.shape) == (other.ref, other.shape)
        is_inside = other.low <= self.low and self.high <= other.high
        permits_ignored = self.low <= self.ignored < self.high or self.ignored == other.ignored
        return has_same_elements and is_inside and permits_ignored


def find_index_operands(call: Call) -> Iterator[Indices]:
    """Yield the nonempty index operands of a call; none if the call has no `index_range`.

    The start offsets of embedding bags are included; their `high` is the number of indices plus 1.
    """
    if call.index_range is None:
        return
    arguments = call.named_arguments
    index = arguments[CATALOGUE[call.kernel].index or ""]
    low, high = call.index_range
    match arguments:
        case {"count": int(count), "offset": bag_start, "offsets": int(bag_count)}:
            # Embedding bags: indices, and the start offset of each bag.
            yield from _make_canonical_indices(index, (count,), (1,), (low, high, low))
            yield from _make_canonical_indices(bag_start, (bag_count,), (1,), (0, count + 1, 0))
        case {"shape": shape}:
            sizes, *strides = table_columns(shape)
            ignored = arguments.get("ignored")
            index_range = (low, high, ignored if isinstance(ignored, int) else low)
            yield from _make_canonical_indices(index, sizes, strides[-1], index_range)


def _make_canonical_indices(
    ref: Argument | None, sizes: Numbers, strides: Numbers, index_range: tuple[int, int, int]
) -> Iterator[Indices]:
    """Yield the `Indices` of loops from `ref` on, if any; `index_range` is (low, high, ignored)."""
    if isinstance(ref, Ref) and 0 not in sizes:
        first, shape = _find_canonical_elements(ref.offset, sizes, strides)
        low, high, ignored = index_range
        yield Indices(ref=Ref(ref.buffer, first), shape=shape, low=low, high=high, ignored=ignored)


def _find_canonical_elements(offset: int, sizes: Numbers, strides: Numbers) -> tuple[int, Numbers]:
    """Return (lowest element, canonical shape table) of the elements that loops access.

    Strides of the table are positive and ascending, without sizes of 1 or strides of 0; contiguous
    dimensions are merged. If none is left, the table has one of size 1 and stride 0.
    """
    first = offset + sum(
        (size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if stride < 0
    )
    loops = sorted(
        (abs(stride), size)
        for size, stride in zip(sizes, strides, strict=True)
        if stride and size > 1
    )
    rows = merge_dimensions(
        [tuple(size for _, size in loops), tuple(stride for stride, _ in loops)]
    ) or [[1, 0]]
    return first, join_rows(rows)


def trace_copies(indices: Indices, writers: Mapping[str, Iterable[Call]]) -> Indices:
    """Return the original source of copied indices, following chains of copies.

    The permitted range stays. `writers` has, by buffer, the calls that read or write the buffer in
    the node that computes it.
    """
    calls = list(writers.get(indices.ref.buffer, ()))
    loops = read_loops(calls[0]) if len(calls) == 1 and calls[0].is_copy else None
    if loops is None:
        return indices
    copied, (first, table) = (
        _find_canonical_elements(loops.call[name].offset, loops.sizes, loops.strides_of(name))
        for name in ("out", "x")
    )
    if copied != (indices.ref.offset, indices.shape):
        return indices
    original = replace(indices, ref=Ref(loops.call["x"].buffer, first), shape=table)
    return trace_copies(original, writers)


def find_input_indices(step: LoweredStep) -> Iterator[tuple[Indices, Indices]]:
    """Yield (operand, its source in an input) for indices that are inputs of the step or copies."""
    input_names = {tensor.pieces[0].buffer for tensor in step.inputs}
    writers = {
        tensor.name: [call for call in calls if tensor.name in call.buffers]
        for node, calls in step.operations
        for tensor in node.outputs
    }
    for call in chain.from_iterable(step.calls):
        for indices in find_index_operands(call):
            source = trace_copies(indices, writers)
            if source.ref.buffer in input_names:
                yield indices, source


def find_real_inputs(step: LoweredStep) -> Iterator[NamedTensor]:
    """Yield the real inputs that the calls of a step read: they must be finite."""
    read_names = {name for calls in step.calls for call in calls for name in call.buffers}
    for tensor in step.inputs:
        if tensor.type is DataType.REAL and tensor.pieces[0].buffer in read_names:
            yield tensor


def number_check_instructions(step: LoweredStep) -> int:
    """Return the estimated instructions of checks that inputs are finite; no node includes them."""
    checks = (
        Call.by_name("pm_finite", x=Ref(tensor.pieces[0].buffer), n=tensor.elements)
        for tensor in find_real_inputs(step)
    )
    return round(sum(map(estimate_call_instructions, checks)))
