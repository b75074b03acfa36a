"""Loops of kernel calls over channels, and the calls for slices of channels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

from poetmodel.lowered.calls import Call, Ref
from poetmodel.lowered.catalogue import find_form, read_loops, write_loops
from poetmodel.lowered.forms import MASK

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from poetmodel.lowered.loops import Loops, Numbers


MASK_BITS: Final = 8
"""Number of bits in each element of a mask."""


class ChannelLayout(NamedTuple):
    """The layout of channels in a buffer: `stride` elements of each channel in turn, repeated."""

    channels: int
    stride: int
    """Elements of one channel before the next channel; for masks, bits."""

    @property
    def span(self) -> int:
        """Elements of one sequence of all channels."""
        return self.channels * self.stride


class ChannelRange(NamedTuple):
    """Some of the channels of an undivided tensor: from `first` to before `end` of `n_channels`."""

    first: int
    end: int
    n_channels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The slice of a buffer that a call uses."""

    layout: ChannelLayout
    dimension: int
    """Loop dimension that is over the channels of the slice."""
    first_channel: int
    """First channel of the slice."""
    n_channels: int
    """Number of channels of the slice."""


@dataclass(frozen=True, slots=True)
class ChannelLoops:
    """The loops of a call that can be divided into calls for slices of channels."""

    loops: Loops

    @property
    def summed_dimension(self) -> int | None:
        """The dimension that is summed and can be divided; None for a kernel without one."""
        form = find_form(self.loops.call)
        return None if form is None or form.sum is None else form.sum[0]

    @property
    def is_product(self) -> bool:
        """Whether the kernel is a matrix product, a convolution or its ``dx`` or ``dw``."""
        form = find_form(self.loops.call)
        return form is not None and form.is_product

    def is_weight(self, index: int, *, is_state: bool) -> bool:
        """Return whether tensor `index` is the parameter ``w`` or ``dw`` of a product.

        Either factor of a matrix product is a weight if it is state. `index` counts the tensors of
        the call, without null pointers.
        """
        name = [*self.loops.call.pointers][index]
        return self.is_product and (is_state if name in ("a", "b") else name in ("w", "dw"))

    @property
    def mask_index(self) -> int | None:
        """Index of the mask, whose bits have the order of the loops; None if there is no mask."""
        names = [*self.loops.call.pointers]
        return names.index(MASK) if MASK in names else None

    def count_elements(self, index: int, elements: int) -> int:
        """Return the number of elements of tensor `index` of a buffer; for masks, of bits."""
        return prod(self.loops.sizes) if index == self.mask_index else elements

    def find_summed_layouts(self, names: Collection[str]) -> Iterator[tuple[str, ChannelLayout]]:
        """Yield (buffer, layout) for each buffer in `names` over whose channels the call sums."""
        for ref, strides in zip(self.loops.refs, self.loops.strides, strict=True):
            d = self.summed_dimension
            if d is not None and ref.buffer in names and not ref.offset and strides[d]:
                yield ref.buffer, ChannelLayout(self.loops.sizes[d], strides[d])

    def find_dimension(self, index: int, layout: ChannelLayout) -> int | None:
        """Return the first loop dimension over the channels of tensor `index`; None without one.

        The loop may also include elements within a channel.
        """
        pairs = enumerate(zip(self.loops.sizes, self.loops.strides[index], strict=True))
        for d, (size, stride) in pairs:
            if stride > 0 and size * stride == layout.span and layout.stride % stride == 0:
                return d
        return None

    def split_dimension(self, index: int, layout: ChannelLayout) -> ChannelLoops:
        """Return loops with a dimension over the channels of tensor `index`, or `self`."""
        loops = self.loops
        for d, (size, stride) in enumerate(zip(loops.sizes, loops.strides[index], strict=True)):
            if stride and layout.stride % stride == 0 and size * stride > layout.span:
                inner_size = layout.span // stride
                if size % inner_size == 0:
                    return ChannelLoops(
                        loops.select_iterations(d, 0, group_size=inner_size, period=1)
                    )
        return self

    def can_slice(self, dimension: int) -> bool:
        """Return whether a dimension is summed, or every written tensor has a stride in it."""
        if dimension == self.summed_dimension:
            return True
        written_pointers = self.loops.call.writes
        return all(
            self.loops.strides[index][dimension]
            for index, ref in enumerate(self.loops.call.refs)
            if ref in written_pointers
        )

    def slice_call(
        self, ranges: Mapping[int, ChannelRange], views: Mapping[int, View]
    ) -> Call | None:
        """Return the call for `ranges` by dimension; None if the kernel cannot execute it.

        `views` has the slices by tensor index.
        """
        loops, sizes = self.loops, list(self.loops.sizes)
        for d, channels in ranges.items():
            sizes[d] = sizes[d] // channels.n_channels * (channels.end - channels.first)
        refs, all_strides = [], []
        for index, (ref, strides) in enumerate(zip(loops.refs, loops.strides, strict=True)):
            view, offset = views.get(index), ref.offset
            new_strides = strides if view is None else self._slice_strides(strides, view)
            if new_strides is None:
                return None
            for d, channels in ranges.items():
                slice_start = view.first_channel if view is not None and view.dimension == d else 0
                channel_size = loops.sizes[d] // channels.n_channels
                offset += (channels.first - slice_start) * channel_size * new_strides[d]
            if index == self.mask_index:
                if offset % MASK_BITS:
                    return None
                offset //= MASK_BITS
            refs.append(Ref(ref.buffer, offset))
            all_strides.append(new_strides)
        sliced_loops = replace(
            loops, sizes=tuple(sizes), refs=tuple(refs), strides=tuple(all_strides)
        )
        call, form = write_loops(sliced_loops), find_form(loops.call)
        if call is None or form is None or form.sum is None:
            return call
        d, adds = form.sum
        return call.with_arguments(**{adds: 1}) if d in ranges and ranges[d].first else call

    def _slice_strides(self, strides: Numbers, view: View) -> Numbers | None:
        """Convert strides of the undivided tensor to its slice `view`; None if impossible."""
        new_strides, layout = list(strides), view.layout
        for d, stride in enumerate(strides):
            if d == view.dimension or stride < layout.stride:
                continue
            if stride % layout.span == 0:
                new_strides[d] = stride // layout.channels * view.n_channels
            elif self.loops.sizes[d] != 1:
                return None
        return tuple(new_strides)


def parse_channel_loops(call: Call) -> ChannelLoops | None:
    """Convert a call to loops; None if it has an index range, or no form as loops over channels."""
    loops = None if call.index_range is not None else read_loops(call)
    return None if loops is None else ChannelLoops(loops)
