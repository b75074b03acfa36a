"""Indices that kernels go by, such as labels and tokens: which elements, and their range."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from poetmodel.lowered.calls import Call, Ref
from poetmodel.lowered.kernels import parameter_names
from poetmodel.lowered.loops import merge_dimensions, table_columns

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from poetmodel.lowered.calls import Argument
    from poetmodel.lowered.loops import Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Indices:
    """Elements of a buffer that are indices."""

    ref: Ref
    shape: tuple[int, ...]
    """A shape table: see ``pm_each.h``. The same elements have the same one."""
    low: int
    high: int
    """What they are below."""
    ignored: int
    """What they may be besides; `low` where there is no such number."""

    def imply(self, others: Indices) -> bool:
        """Return whether others are in their range where these are."""
        same = (self.ref, self.shape) == (others.ref, others.shape)
        inside = others.low <= self.low and self.high <= others.high
        ignored = self.low <= self.ignored < self.high or self.ignored == others.ignored
        return same and inside and ignored


def indices_of(call: Call) -> Iterator[Indices]:
    """Yield the indices that a call goes by."""
    if call.within is None:
        return
    given = dict(zip(parameter_names(call.kernel), call.arguments, strict=True))
    index = given.get("index", given.get("target"))
    low, high = call.within
    match given:
        case {"count": int(count), "offset": offset, "offsets": int(offsets)}:  # bags
            yield from _indices(index, (count,), (1,), (low, high, low))
            yield from _indices(offset, (offsets,), (1,), (0, count + 1, 0))
        case {"shape": shape}:
            sizes, *steps = table_columns(shape)
            ignored = given.get("ignored")
            numbers = (low, high, ignored if isinstance(ignored, int) else low)
            yield from _indices(index, sizes, steps[-1], numbers)


def _indices(
    ref: Argument | None, sizes: Numbers, steps: Numbers, numbers: tuple[int, int, int]
) -> Iterator[Indices]:
    if isinstance(ref, Ref) and 0 not in sizes:
        first, shape = _elements(ref.offset, sizes, steps)
        low, high, ignored = numbers
        yield Indices(ref=Ref(ref.buffer, first), shape=shape, low=low, high=high, ignored=ignored)


def _elements(offset: int, sizes: Numbers, steps: Numbers) -> tuple[int, Numbers]:
    """Return the first element that loops touch, and their shape table in one order for all."""
    first = offset + sum((n - 1) * step for n, step in zip(sizes, steps, strict=True) if step < 0)
    loops = sorted((abs(step), n) for n, step in zip(sizes, steps, strict=True) if step and n > 1)
    rows = merge_dimensions([tuple(n for _, n in loops), tuple(step for step, _ in loops)]) or [
        [1, 0]
    ]
    return first, (len(rows), *(number for row in rows for number in row))


def traced(indices: Indices, makers: Mapping[str, Iterable[Call]]) -> Indices:
    """Return the elements that indices are copies of, all of which have been copied."""
    calls = list(makers.get(indices.ref.buffer, ()))
    match calls:
        case [Call(kernel="pm_copy_int", arguments=(Ref() as to, Ref() as of, tuple() as shape))]:
            sizes, new, old = table_columns(shape)
            if _elements(to.offset, sizes, new) == (indices.ref.offset, indices.shape):
                first, table = _elements(of.offset, sizes, old)
                source = replace(indices, ref=Ref(of.buffer, first), shape=table)
                return traced(source, makers)
    return indices
