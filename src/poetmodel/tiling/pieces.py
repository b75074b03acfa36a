"""Nodes of a step in tiles: the pieces that replace each node, and the order of all pieces."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

from poetmodel.graph import Node, Tensor
from poetmodel.lowered.calls import Buffer, Call, NamedTensor, Ref
from poetmodel.tiling.slices import MASK_BITS, ChannelLayout, ChannelRange, View

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np

    from poetmodel.lowered.step import LoweredStep
    from poetmodel.tiling.slices import ChannelLoops

    Range: TypeAlias = tuple[int, int]
    """(first channel, end channel) of a slice; the end is exclusive."""
    Axis: TypeAlias = tuple[str, bool]
    """(representative of a group of buffers, whether the slices are those of a node's results).

    The second value is False for other tensors and for a summed dimension. If two dimensions of a
    call would have the same axis, the second value is inverted for the second dimension."""


class UnsliceableError(Exception):
    """Raised if calls cannot be divided into calls for slices; `buffers` must stay undivided."""

    def __init__(self, buffers: Iterable[str]) -> None:
        super().__init__()
        self.buffers = frozenset(buffers)


@dataclass(frozen=True, kw_only=True)
class Slices:
    """The buffers of a step, some of which are divided into slices of channels."""

    undivided_step: LoweredStep
    layouts: Mapping[str, ChannelLayout]
    """Layout of the channels of each buffer that has channels."""
    element_counts: Mapping[str, int]
    """Number of elements by buffer, of bits for a mask; without an entry, that of the buffer."""
    ranges_of: Mapping[str, tuple[Range, ...]]
    """Channel range of each slice, by divided buffer."""
    partial_results: dict[str, Buffer] = field(default_factory=dict)
    """Buffers of partial results of chains (see `Expansion`), by name."""

    def slice_ranges(self, name: str) -> tuple[Range | None, ...]:
        """Return the channel ranges of the slices of a buffer; (None,) if it is not divided."""
        return self.ranges_of.get(name, (None,))

    def slice_names(self, name: str) -> tuple[str, ...]:
        """Return the names of the slices of a buffer; its own name if it is not divided."""
        return self._slice_names.get(name, (name,))

    @cached_property
    def _slice_names(self) -> dict[str, tuple[str, ...]]:
        return {
            name: tuple(self.slice_name(name, channel_range) for channel_range in slice_ranges)
            for name, slice_ranges in self.ranges_of.items()
        }

    def slice_name(self, name: str, channel_range: Range | None) -> str:
        """Return the name of a slice; the name of the whole buffer for None."""
        return name if channel_range is None else name + _format_range(channel_range)

    def slice_buffer(self, name: str, channel_range: Range | None) -> Buffer:
        """Return the buffer (number of elements, type) of a slice; the whole buffer for None.

        The bits of a mask are rounded up to whole elements of `MASK_BITS` bits.
        """
        undivided_buffer = self.undivided_step.buffers[name]
        if channel_range is None:
            return undivided_buffer
        n_elements = self.element_counts.get(name, undivided_buffer.elements)
        elements = n_elements // self.layouts[name].channels * (channel_range[1] - channel_range[0])
        if n_elements != undivided_buffer.elements:
            elements = -(-elements // MASK_BITS)
        return replace(undivided_buffer, elements=elements)

    def all_buffers(self) -> dict[str, Buffer]:
        """Return the buffers of the step in tiles by name: undivided, slices, `partial_results`."""
        named_ranges = (
            (name, channel_range)
            for name in self.undivided_step.buffers
            for channel_range in self.slice_ranges(name)
        )
        return {
            self.slice_name(name, channel_range): self.slice_buffer(name, channel_range)
            for name, channel_range in named_ranges
        } | self.partial_results

    def slice_values(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, values) of each slice or buffer of state and constants; slices are views."""
        for name, values in self.undivided_step.values.items():
            for channel_range in self.slice_ranges(name):
                stride = self.layouts[name].stride if channel_range else 0
                yield (
                    self.slice_name(name, channel_range),
                    values[channel_range[0] * stride : channel_range[1] * stride]
                    if channel_range
                    else values,
                )

    def divide_tensor(self, tensor: NamedTensor) -> NamedTensor:
        """Return a named tensor, or a copy with slices as pieces if its first buffer is divided."""
        name = tensor.pieces[0].buffer
        return (
            replace(tensor, pieces=tuple(map(Ref, self.slice_names(name))))
            if name in self.ranges_of
            else tensor
        )

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Size of each tensor of the undivided step and of each slice, by name [B]."""
        sizes = {tensor.name: tensor.bytes for tensor in self.undivided_step.graph.tensors}
        for name, slice_ranges in self.ranges_of.items():
            sizes.update(
                (self.slice_name(name, channel_range), self.slice_buffer(name, channel_range).bytes)
                for channel_range in slice_ranges
            )
        return sizes

    def size_bytes(self, name: str) -> int:
        """Return the size of a tensor, a slice, or a partial result [B]."""
        return (
            self.partial_results[name].bytes if name in self.partial_results else self._sizes[name]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedCall:
    """A call with divided tensors."""

    channel_loops: ChannelLoops
    views: Mapping[int, tuple[str, int]]
    """Buffer and channel dimension of each divided tensor, by its position among the pointers."""
    axes: Mapping[int, Axis]
    """Axis of each channel dimension in `views`, by dimension."""

    def make_call(self, slices: Slices, ranges_of_axes: Mapping[Axis, Range]) -> Call | None:
        """Return the call for one range of channels per axis; None if the kernel cannot do it.

        For later ranges of a summed dimension, the call continues the sum.
        """
        ranges, new_views, slice_names = {}, {}, {}
        for index, (name, d) in self.views.items():
            layout, (first, end) = slices.layouts[name], ranges_of_axes[self.axes[d]]
            ranges[d] = ChannelRange(first, end, layout.channels)
            new_views[index] = View(
                layout=layout, dimension=d, first_channel=first, n_channels=end - first
            )
            slice_names[index] = slices.slice_name(name, (first, end))
        call = self.channel_loops.slice_call(ranges, new_views)
        if call is None:
            return None
        indices = iter(range(len(call.arguments)))
        arguments = (
            Ref(slice_names.get(next(indices), argument.buffer), argument.offset)
            if isinstance(argument, Ref)
            else argument
            for argument in call.arguments
        )
        return replace(call, arguments=tuple(arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A node of the step in tiles."""

    node_index: int
    """Index of the node in the undivided step."""
    node: Node
    calls: tuple[Call, ...]
    group: str = ""
    """Group of buffers by whose slices pieces are ordered; "" if there is none."""
    slice_index: int = -1
    """Index of the slice in the group; -1 if there is no group."""


@dataclass(frozen=True, slots=True)
class _PieceCalls:
    """The calls of a node for one slice on each of its axes."""

    slice_indices: Mapping[Axis, int]
    calls: tuple[Call, ...]

    @property
    def written_buffers(self) -> set[str]:
        """Names of the buffers that the calls write."""
        return {ref.buffer for call in self.calls for ref in call.writes}


class Expansion:
    """The pieces that replace a node, one per combination of slices of results and operands.

    Pieces that write the same slice of results are a chain: each copies the result of the piece
    before, which the copy may overwrite, and continues its sums. `UnsliceableError` means that the
    calls cannot be divided, or that several pieces write one slice of state.
    """

    def __init__(
        self,
        slices: Slices,
        node_index: int,
        sliced_calls: Sequence[SlicedCall | None],
        ranges: Mapping[Axis, tuple[Range, ...]],
    ) -> None:
        self._slices, self._node_index, self._sliced_calls, self._ranges = (
            slices,
            node_index,
            sliced_calls,
            ranges,
        )
        self._node, self._calls = (
            slices.undivided_step.graph.nodes[node_index],
            slices.undivided_step.calls[node_index],
        )
        self._axes = sorted(ranges, key=lambda axis: not axis[1])
        self._piece_calls = list(self._make_piece_calls())
        self._result_slices = {
            slices.slice_name(name, channel_range): (tensor, name, channel_range)
            for tensor in self._node.outputs
            for name in [tensor.replaces or tensor.name]
            for channel_range in slices.slice_ranges(name)
        }
        """For each slice of results: the tensor of the undivided step, its buffer (that of the
        state, for a replacement) and its channels (None if undivided)."""
        self._writers = self._find_writers()
        """Indices of the pieces that write each slice of results, ascending."""

    @property
    def _unsliceable_error(self) -> UnsliceableError:
        """Exception with all divided buffers that the calls of the node use."""
        buffers = {name for call in self._calls for name in call.buffers}
        return UnsliceableError(buffers & self._slices.ranges_of.keys())

    def _make_piece_calls(self) -> Iterator[_PieceCalls]:
        """Yield the calls of each piece, one piece per combination of slices on the axes.

        Slices on the last axis vary fastest, those on the axes of results slowest. A call without
        an axis is executed once for the axis: first if it precedes the calls with the axis, else
        last.
        """
        calls_of_axis = {
            axis: [
                j
                for j, call in enumerate(self._sliced_calls)
                if call and axis in call.axes.values()
            ]
            for axis in self._axes
        }
        if any(
            call_indices[-1] - call_indices[0] >= len(call_indices)
            for call_indices in calls_of_axis.values()
        ):
            raise self._unsliceable_error
        for index in product(*(range(len(self._ranges[axis])) for axis in self._axes)):
            slice_indices, calls = dict(zip(self._axes, index, strict=True)), []
            ranges = {
                axis: self._ranges[axis][position] for axis, position in slice_indices.items()
            }
            for j, (call, sliced_call) in enumerate(
                zip(self._calls, self._sliced_calls, strict=True)
            ):
                unused_axes = slice_indices.keys() - (
                    sliced_call.axes.values() if sliced_call else ()
                )
                last_indices = {axis: len(self._ranges[axis]) - 1 for axis in unused_axes}
                if all(
                    slice_indices[axis] == (0 if j < calls_of_axis[axis][0] else last_indices[axis])
                    for axis in unused_axes
                ):
                    slice_call = (
                        sliced_call.make_call(self._slices, ranges) if sliced_call else call
                    )
                    if slice_call is None:
                        raise self._unsliceable_error
                    calls.append(slice_call)
            yield _PieceCalls(slice_indices, tuple(calls))

    def _find_writers(self) -> dict[str, list[int]]:
        """Return the ascending indices of pieces that write each result slice; the last if none."""
        writers: dict[str, list[int]] = {result_slice: [] for result_slice in self._result_slices}
        for piece_index, piece in enumerate(self._piece_calls):
            for result_slice in piece.written_buffers & writers.keys():
                writers[result_slice].append(piece_index)
        if any(
            len(piece_indices) > 1 and self._result_slices[result_slice][0].replaces is not None
            for result_slice, piece_indices in writers.items()
        ):
            raise self._unsliceable_error
        return {
            result_slice: piece_indices or [len(self._piece_calls) - 1]
            for result_slice, piece_indices in writers.items()
        }

    def _versioned_name(self, result_slice: str, piece_index: int) -> str:
        """Return the name of a result slice after a piece: ``SLICE[:END]`` for a partial result."""
        writers = self._writers[result_slice]
        writers_so_far = [writer for writer in writers if writer <= piece_index]
        if not writers_so_far:
            raise self._unsliceable_error
        if writers_so_far[-1] == writers[-1]:
            return result_slice
        first, latest, last = (
            self._piece_calls[writer].slice_indices
            for writer in (writers[0], writers_so_far[-1], writers[-1])
        )
        range_ends = (
            self._ranges[axis][position][1]
            for axis, position in latest.items()
            if first[axis] != last[axis]
        )
        return result_slice + "".join(f"[:{end}]" for end in range_ends)

    def make_pieces(self) -> Iterator[Piece]:
        """Yield the pieces of the node, those of a chain in the order of the chain.

        Group and slice index are those of the divided tensor with the largest undivided size. Adds
        the buffers of partial results to `Slices.partial_results`.
        """
        # `order_pieces` orders by one axis. Of equal sizes, an axis of results is the last choice.
        ordering_axis = max(self._axes, key=lambda axis: (self._largest_bytes(axis), not axis[1]))
        flops = _divide_proportionally(
            self._node.flops, [self._ranges[axis] for axis in self._axes]
        )
        for piece_index, piece in enumerate(self._piece_calls):
            node, calls = self._make_piece(piece_index, flops[piece_index])
            yield Piece(
                node_index=self._node_index,
                node=node,
                calls=calls,
                group=ordering_axis[0],
                slice_index=piece.slice_indices[ordering_axis],
            )

    def _largest_bytes(self, axis: Axis) -> int:
        """Return the undivided size of the largest tensor on an axis [B]."""
        calls = [call for call in self._sliced_calls if call]
        names = (name for call in calls for name, d in call.views.values() if call.axes[d] == axis)
        return max(self._slices.undivided_step.buffers[name].bytes for name in names)

    def _make_piece(self, piece_index: int, flops: int) -> tuple[Node, tuple[Call, ...]]:
        """Return the node and the calls of a piece; `flops` are the FLOP of the piece.

        In a chain, each piece except the first begins with a copy of the previous partial result.
        Adds the buffers of partial results to `Slices.partial_results`.
        """
        node, piece = self._node, self._piece_calls[piece_index]
        versioned_names = {
            name: self._versioned_name(name, piece_index)
            for call in piece.calls
            for name in call.buffers
            if name in self._result_slices and self._result_slices[name][0].replaces is None
        }
        calls = [call.with_buffers(versioned_names) for call in piece.calls]
        in_place_pairs, outputs = [], []
        for result_slice, writers in self._writers.items():
            if piece_index not in writers:
                continue
            tensor, name, channel_range = self._result_slices[result_slice]
            new_name = versioned_names.get(result_slice, result_slice)
            buffer = self._slices.slice_buffer(name, channel_range)
            if new_name != result_slice:
                self._slices.partial_results[new_name] = buffer
            if piece_index != writers[0]:
                old_name = self._versioned_name(result_slice, piece_index - 1)
                copy_arguments = (Ref(new_name), Ref(old_name), (1, buffer.elements, 1, 1))
                calls.insert(0, Call(buffer.type.copy_kernel, copy_arguments))
                in_place_pairs.append((new_name, old_name))
            elif writers == [piece_index] and channel_range is not None:
                in_place_pairs += self._find_in_place_slices(name, channel_range)
            outputs.append(_make_output_tensor(tensor, new_name, result_slice, buffer.bytes))
        output_names = {tensor.name for tensor in outputs}
        read_results = (name for name in versioned_names.values() if name not in output_names)
        old_names = (old_name for _, old_name in in_place_pairs)
        inputs = list(dict.fromkeys((*self._find_piece_inputs(calls), *read_results, *old_names)))
        range_label = "".join(
            _format_range(self._ranges[axis][position])
            for axis, position in piece.slice_indices.items()
        )
        bytes_moved = self._estimate_piece_traffic(flops, inputs, outputs)
        return replace(
            node,
            name=node.name + range_label,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            flops=flops,
            bytes_moved=bytes_moved,
            in_place=tuple(in_place_pairs),
        ), tuple(calls)

    def _find_in_place_slices(self, name: str, channel_range: Range) -> list[tuple[str, str]]:
        """Return an (output slice, input slice) pair per input that output `name` may overwrite."""
        slices = self._slices
        return [
            (slices.slice_name(name, channel_range), slices.slice_name(input_name, channel_range))
            for output_name, input_name in self._node.in_place
            if output_name == name and slices.ranges_of.get(input_name) == slices.ranges_of[name]
        ]

    def _find_piece_inputs(self, calls: Iterable[Call]) -> list[str]:
        """Return the inputs of a piece, as slices of the inputs of the node."""
        read_names = {name for call in calls for name in call.buffers}
        call_names = {name for call in self._calls for name in call.buffers}
        return [
            slice_name
            for name in self._node.inputs
            for slice_name in self._slices.slice_names(name)
            if slice_name in read_names or name not in call_names
        ]

    def _estimate_piece_traffic(
        self, flops: int, inputs: Sequence[str], outputs: Sequence[Tensor]
    ) -> int | None:
        """Return the memory traffic of a piece [B]; None if the node states none."""
        node, size_bytes = self._node, self._slices.size_bytes
        if node.bytes_moved is None:
            return None
        tensor_traffic = sum(map(size_bytes, node.inputs)) + sum(
            tensor.bytes for tensor in node.outputs
        )
        other_traffic = max(0, node.bytes_moved - tensor_traffic) * flops // max(1, node.flops)
        return (
            other_traffic + sum(map(size_bytes, inputs)) + sum(tensor.bytes for tensor in outputs)
        )


def _make_output_tensor(tensor: Tensor, new_name: str, result_slice: str, size: int) -> Tensor:
    """Return an output of a piece: a tensor, a slice of it, or a partial result of a chain."""
    if tensor.replaces is None:
        return Tensor(name=new_name, bytes=size)
    name = tensor.name if result_slice == tensor.replaces else f"{result_slice}+"
    return Tensor(name=name, bytes=size, replaces=result_slice)


def _divide_proportionally(total: int, axes: Iterable[Sequence[Range]]) -> list[int]:
    """Divide `total` by channels among the combinations of slices, the last axis fastest."""
    amounts = [total]
    for ranges in axes:
        channels = ranges[-1][1]
        amounts = [
            amount * end // channels - amount * first // channels
            for amount in amounts
            for first, end in ranges
        ]
    return amounts


def _format_range(channel_range: Range) -> str:
    return f"[{channel_range[0]}:{channel_range[1]}]"


# -- the order -------------------------------------------------------------------------------------


def order_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """Return pieces in a topological order that executes operators on one group slice by slice.

    State directly precedes its first reader; state without a reader is last. A replacement of state
    follows all other readers of this state.
    """
    sort_keys = _make_sort_keys(pieces)
    producers = {
        tensor.name: piece_index
        for piece_index, piece in enumerate(pieces)
        for tensor in piece.node.outputs
    }
    successors, n_open_predecessors = _find_dependencies(pieces, producers)
    states = {piece_index for piece_index, piece in enumerate(pieces) if piece.node.is_state}
    ready = [
        sort_keys[piece_index]
        for piece_index in range(len(pieces))
        if not n_open_predecessors[piece_index] and piece_index not in states
    ]
    heapq.heapify(ready)
    order: dict[int, None] = {}
    while ready:
        piece_index = heapq.heappop(ready)[-1]
        read_pieces = (
            producers[name] for name in pieces[piece_index].node.inputs if name in producers
        )
        order.update(dict.fromkeys(producer for producer in read_pieces if producer in states))
        order[piece_index] = None
        for successor in successors[piece_index]:
            n_open_predecessors[successor] -= 1
            if not n_open_predecessors[successor]:
                heapq.heappush(ready, sort_keys[successor])
    order.update(dict.fromkeys(range(len(pieces))))
    return [pieces[piece_index] for piece_index in order]


def _make_sort_keys(pieces: Sequence[Piece]) -> list[tuple[int, ...]]:
    """Return the sort key of each piece: the indices of its sequence, its slice, its node, itself.

    A sequence has consecutive pieces of one group. A piece without a group belongs to the sequence
    of the piece before, with slice index -1.
    """
    sequence_index, group = 0, ""
    keys: list[tuple[int, ...]] = []
    for piece_index, piece in enumerate(pieces):
        if piece.group and piece.group != group:
            sequence_index, group = sequence_index + 1, piece.group
        keys.append((sequence_index, piece.slice_index, piece.node_index, piece_index))
    return keys


def _find_dependencies(
    pieces: Sequence[Piece], producers: Mapping[str, int]
) -> tuple[Mapping[int, set[int]], list[int]]:
    """Return the successors of each piece, and its number of predecessors that are not state."""
    readers = defaultdict(set)
    for piece_index, piece in enumerate(pieces):
        for name in piece.node.inputs:
            readers[name].add(piece_index)
    successors: dict[int, set[int]] = defaultdict(set)
    n_predecessors = [0] * len(pieces)
    for piece_index, piece in enumerate(pieces):
        predecessors = {producers[name] for name in piece.node.inputs if name in producers}
        replaced_state = (
            tensor.replaces for tensor in piece.node.outputs if tensor.replaces is not None
        )
        predecessors.update(reader for name in replaced_state for reader in readers[name])
        for predecessor in predecessors - {piece_index}:
            if not pieces[predecessor].node.is_state:
                successors[predecessor].add(piece_index)
                n_predecessors[piece_index] += 1
    return successors, n_predecessors
