"""Calls of kernels for some channels of their tensors: loops over channels, and parts of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.lowered.calls import Call, Ref
from poetmodel.lowered.kernels import written_refs
from poetmodel.lowered.loops import Loops, call_refs, pointer_names
from poetmodel.tiling.forms import PRODUCTS, SUMMED, is_weight, read_loops, steps_of, write_call

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from poetmodel.lowered.loops import Numbers


BYTE: Final = 8
"""Bits of a mask in one of its elements."""


class ChannelLayout(NamedTuple):
    """How the channels of a buffer lie: elements of the first, then of the next, and again."""

    channels: int
    step: int
    """Elements from one channel to the next; bits of a mask."""

    @property
    def span(self) -> int:
        """Elements of all channels, one after the other."""
        return self.channels * self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Some of the channels of a buffer, which a call goes through: those that are there."""

    layout: ChannelLayout
    dimension: int
    """Of the loops."""
    first: int
    """The channel that is there first."""
    count: int


@dataclass(frozen=True, slots=True)
class Channels:
    """The loops of a call, and how they can be parted."""

    loops: Loops

    @property
    def sums(self) -> Mapping[int, int]:
        """Dimensions that are summed over, each with the argument that says that sums go on."""
        kernel = self.loops.call.kernel
        last = len(self.loops.call.arguments) - 1
        return {SUMMED[kernel]: last} if kernel in SUMMED else {}

    @property
    def is_product(self) -> bool:
        """Whether results are of all channels that are read: it has weights, or another factor."""
        return self.loops.call.kernel in PRODUCTS

    def is_weight(self, number: int, *, is_state: bool) -> bool:
        """Return whether a tensor of a product is its weights, or their gradient."""
        own = pointer_names(self.loops.call)[number]
        return self.is_product and (is_state if own in ("a", "b") else is_weight(own))

    @property
    def bits(self) -> int | None:
        """Which tensor has bits, in the order of the loops."""
        names = pointer_names(self.loops.call)
        return names.index("bits") if "bits" in names else None

    def total(self, number: int, elements: int) -> int:
        """Return how many elements a tensor has: bits, of a mask."""
        return prod(self.loops.sizes) if number == self.bits else elements

    def summed_layouts(self, names: Collection[str]) -> Iterator[tuple[str, ChannelLayout]]:
        """Yield how the channels of some buffers lie, which are summed over."""
        for ref, steps in zip(self.loops.refs, self.loops.steps, strict=True):
            for d in self.sums:
                if ref.buffer in names and not ref.offset and steps[d]:
                    yield ref.buffer, ChannelLayout(self.loops.sizes[d], steps[d])

    def dimension(self, number: int, layout: ChannelLayout) -> int | None:
        """Return which dimension is the channels of a tensor, and nothing else, or within one."""
        pairs = enumerate(zip(self.loops.sizes, self.loops.steps[number], strict=True))
        for d, (size, step) in pairs:
            if step > 0 and size * step == layout.span and layout.step % step == 0:
                return d
        return None

    def split(self, number: int, layout: ChannelLayout) -> Channels:
        """Return loops in which the channels of a tensor are a dimension, if they can be."""
        loops = self.loops
        for d, (size, step) in enumerate(zip(loops.sizes, loops.steps[number], strict=True)):
            if step and layout.step % step == 0 and size * step > layout.span:
                inside = layout.span // step
                if size % inside == 0:
                    return Channels(loops.subset(d, 0, rows=inside, count=1))
        return self

    def may_part(self, dimension: int) -> bool:
        """Return whether parts of a dimension, one after the other, do what all of it does."""
        if dimension in self.sums:
            return True
        written = written_refs(self.loops.call)
        return all(
            self.loops.steps[number][dimension]
            for number, ref in enumerate(call_refs(self.loops.call))
            if ref in written
        )

    def part(
        self, ranges: Mapping[int, tuple[int, int, int]], views: Mapping[int, View]
    ) -> Call | None:
        """Return the call for channels, of so many, in some dimensions; None if there is none.

        Tensors are whole, but for those that `views` has.
        """
        loops, sizes = self.loops, list(self.loops.sizes)
        for d, (first, end, channels) in ranges.items():
            sizes[d] = sizes[d] // channels * (end - first)
        refs, all_steps = [], []
        for number, (ref, steps) in enumerate(zip(loops.refs, loops.steps, strict=True)):
            view, offset = views.get(number), ref.offset
            new = steps if view is None else self._steps_in(steps, view)
            if new is None:
                return None
            for d, (first, _, channels) in ranges.items():
                there = view.first if view is not None and view.dimension == d else 0
                offset += (first - there) * (loops.sizes[d] // channels) * new[d]
            if number == self.bits:
                inside = zip(sizes, new, steps_of(sizes), strict=True)
                if offset % BYTE or any(n > 1 and step != one for n, step, one in inside):
                    return None
                offset //= BYTE
            refs.append(Ref(ref.buffer, offset))
            all_steps.append(new)
        goes_on = [self.sums[d] for d, (first, _, _) in ranges.items() if first and d in self.sums]
        made = replace(loops, sizes=tuple(sizes), refs=tuple(refs), steps=tuple(all_steps))
        call = write_call(made)
        if call is None:
            return None
        arguments = [1 if k in goes_on else a for k, a in enumerate(call.arguments)]
        return replace(call, arguments=tuple(arguments))

    def _steps_in(self, steps: Numbers, view: View) -> Numbers | None:
        """Return the steps in a slice; None where some go past channels that are not in it."""
        new, layout = list(steps), view.layout
        for d, step in enumerate(steps):
            if d == view.dimension or step < layout.step:
                continue
            if step % layout.span == 0:
                new[d] = step // layout.channels * view.count
            elif self.loops.sizes[d] != 1:
                return None
        return tuple(new)


def channels_in(call: Call) -> Channels | None:
    """Return the loops of a call; None of a kernel that takes no ranges."""
    loops = None if call.within is not None else read_loops(call)
    return None if loops is None else Channels(replace(loops, call=call))
