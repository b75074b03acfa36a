"""Calls of kernels on some channels of their tensors: loops over channels, and slices of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.lowered.calls import Call, Ref
from poetmodel.lowered.kernels import written_refs
from poetmodel.lowered.loops import Loops, call_refs, pointer_names
from poetmodel.tiling.forms import (
    PRODUCTS,
    SUMMED,
    contiguous_steps,
    is_weight,
    read_loops,
    write_call,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from poetmodel.lowered.loops import Numbers


BYTE: Final = 8
"""Bits of a mask in each of its elements."""


class ChannelLayout(NamedTuple):
    """The layout of channels in a buffer: consecutive elements of each channel, repeated."""

    channels: int
    step: int
    """Elements from one channel to the next; for masks, bits."""

    @property
    def span(self) -> int:
        """Elements of all channels."""
        return self.channels * self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The slice of a buffer that a call uses."""

    layout: ChannelLayout
    dimension: int
    """Dimension of the loops over the channels of the slice."""
    first: int
    """First channel of the slice."""
    count: int


@dataclass(frozen=True, slots=True)
class Channels:
    """The loops of a call, which can be divided into slices of channels."""

    loops: Loops

    @property
    def sums(self) -> Mapping[int, int]:
        """Position of the argument that continues a sum, by dimension that the kernel sums over."""
        kernel = self.loops.call.kernel
        last = len(self.loops.call.arguments) - 1
        return {SUMMED[kernel]: last} if kernel in SUMMED else {}

    @property
    def is_product(self) -> bool:
        """Whether results depend on all channels of an input: it has weights, or two factors."""
        return self.loops.call.kernel in PRODUCTS

    def is_weight(self, number: int, *, is_state: bool) -> bool:
        """Return whether a tensor of a product is its weight, or the gradient of its weight."""
        pointer_name = pointer_names(self.loops.call)[number]
        return self.is_product and (
            is_state if pointer_name in ("a", "b") else is_weight(pointer_name)
        )

    @property
    def bits(self) -> int | None:
        """Position of the tensor of bits, which has the order of the loops; None without one."""
        names = pointer_names(self.loops.call)
        return names.index("bits") if "bits" in names else None

    def element_count(self, number: int, elements: int) -> int:
        """Return the number of elements of a tensor; for masks, of bits."""
        return prod(self.loops.sizes) if number == self.bits else elements

    def summed_layouts(self, names: Collection[str]) -> Iterator[tuple[str, ChannelLayout]]:
        """Yield (buffer, layout) for each buffer in `names` over whose channels the call sums."""
        for ref, steps in zip(self.loops.refs, self.loops.steps, strict=True):
            for d in self.sums:
                if ref.buffer in names and not ref.offset and steps[d]:
                    yield ref.buffer, ChannelLayout(self.loops.sizes[d], steps[d])

    def dimension(self, number: int, layout: ChannelLayout) -> int | None:
        """Return the loop dimension over the channels of tensor `number`; None if there is none.

        The loop may also step within channels: its size is then a multiple of the number of
        channels.
        """
        pairs = enumerate(zip(self.loops.sizes, self.loops.steps[number], strict=True))
        for d, (size, step) in pairs:
            if step > 0 and size * step == layout.span and layout.step % step == 0:
                return d
        return None

    def split(self, number: int, layout: ChannelLayout) -> Channels:
        """Return loops in which one dimension is over the channels of tensor `number`.

        Divides a loop over channels and outer dimensions, such as the batch. Returns the same loops
        if that is not needed or not possible.
        """
        loops = self.loops
        for d, (size, step) in enumerate(zip(loops.sizes, loops.steps[number], strict=True)):
            if step and layout.step % step == 0 and size * step > layout.span:
                inner_size = layout.span // step
                if size % inner_size == 0:
                    return Channels(loops.subset(d, 0, rows=inner_size, count=1))
        return self

    def can_slice(self, dimension: int) -> bool:
        """Return whether a dimension can be computed slice by slice.

        The kernel must sum over the dimension, or every written tensor must have it.
        """
        if dimension in self.sums:
            return True
        written_pointers = written_refs(self.loops.call)
        return all(
            self.loops.steps[number][dimension]
            for number, ref in enumerate(call_refs(self.loops.call))
            if ref in written_pointers
        )

    def slice_call(
        self, ranges: Mapping[int, tuple[int, int, int]], views: Mapping[int, View]
    ) -> Call | None:
        """Return the call for ranges (first, end, channels) of dimensions; None if impossible.

        Tensors in `views` are slices; all other tensors are undivided.
        """
        loops, sizes = self.loops, list(self.loops.sizes)
        for d, (first, end, channels) in ranges.items():
            sizes[d] = sizes[d] // channels * (end - first)
        refs, all_steps = [], []
        for number, (ref, steps) in enumerate(zip(loops.refs, loops.steps, strict=True)):
            view, offset = views.get(number), ref.offset
            new_steps = steps if view is None else self._slice_steps(steps, view)
            if new_steps is None:
                return None
            for d, (first, _, channels) in ranges.items():
                view_first = view.first if view is not None and view.dimension == d else 0
                offset += (first - view_first) * (loops.sizes[d] // channels) * new_steps[d]
            if number == self.bits:
                remaining_steps = zip(sizes, new_steps, contiguous_steps(sizes), strict=True)
                if offset % BYTE or any(
                    n > 1 and step != dense for n, step, dense in remaining_steps
                ):
                    return None
                offset //= BYTE
            refs.append(Ref(ref.buffer, offset))
            all_steps.append(new_steps)
        continued_sums = [
            self.sums[d] for d, (first, _, _) in ranges.items() if first and d in self.sums
        ]
        sliced_loops = replace(loops, sizes=tuple(sizes), refs=tuple(refs), steps=tuple(all_steps))
        call = write_call(sliced_loops)
        if call is None:
            return None
        arguments = [1 if k in continued_sums else a for k, a in enumerate(call.arguments)]
        return replace(call, arguments=tuple(arguments))

    def _slice_steps(self, steps: Numbers, view: View) -> Numbers | None:
        """Return the strides in a slice; None if a stride crosses channels outside the slice."""
        new_steps, layout = list(steps), view.layout
        for d, step in enumerate(steps):
            if d == view.dimension or step < layout.step:
                continue
            if step % layout.span == 0:
                new_steps[d] = step // layout.channels * view.count
            elif self.loops.sizes[d] != 1:
                return None
        return tuple(new_steps)


def channels_of(call: Call) -> Channels | None:
    """Return the loops of a call as `Channels`; None if its kernel has no ranges of channels."""
    loops = None if call.within is not None else read_loops(call)
    return None if loops is None else Channels(replace(loops, call=call))
