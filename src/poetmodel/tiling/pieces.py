"""Nodes of a step in tiles: the pieces that replace a node, and the order of all pieces."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Final, TypeAlias

from poetmodel.graph import Node, Tensor
from poetmodel.lowered.calls import Buffer, Call, DataType, NamedTensor, Ref
from poetmodel.lowered.kernels import written_refs
from poetmodel.tiling.slices import BYTE, ChannelLayout, View

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np

    from poetmodel.lowered.step import LoweredStep
    from poetmodel.tiling.slices import Channels

    Range: TypeAlias = tuple[int, int]
    Axis: TypeAlias = tuple[str, bool]
    """A group of buffers, and whether its slices are results of a node, or tensors that it reads or
    accumulates."""


class UnsliceableError(Exception):
    """A node's calls cannot be divided into calls for slices; `buffers` must stay undivided."""

    def __init__(self, buffers: Iterable[str]) -> None:
        super().__init__()
        self.buffers = frozenset(buffers)


@dataclass(frozen=True, kw_only=True)
class Slices:
    """The buffers of a step that are divided into slices of channels."""

    whole: LoweredStep
    layouts: Mapping[str, ChannelLayout]
    totals: Mapping[str, int]
    """Numbers of elements of buffers; of masks, numbers of bits."""
    ranges_of: Mapping[str, tuple[Range, ...]]
    """First and end channel of each slice of a buffer."""
    partials: dict[str, Buffer] = field(default_factory=dict)
    """Buffers of partial results of chains (see `Expansion`), by name."""

    def ranges(self, name: str) -> tuple[Range | None, ...]:
        """Return the channel ranges of a buffer's slices; (None,) if it is not divided."""
        return self.ranges_of.get(name, (None,))

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names of the slices of a buffer, or its own name."""
        return self._names.get(name, (name,))

    @cached_property
    def _names(self) -> dict[str, tuple[str, ...]]:
        return {
            name: tuple(self.slice_name(name, channel_range) for channel_range in ranges)
            for name, ranges in self.ranges_of.items()
        }

    def slice_name(self, name: str, channel_range: Range | None) -> str:
        """Return the name of a slice; the buffer's own name for None."""
        return name if channel_range is None else name + _range_text(channel_range)

    def buffer(self, name: str, channel_range: Range | None) -> Buffer:
        """Return the buffer of a slice."""
        undivided_buffer = self.whole.buffers[name]
        if channel_range is None:
            return undivided_buffer
        total = self.totals.get(name, undivided_buffer.elements)
        elements = total // self.layouts[name].channels * (channel_range[1] - channel_range[0])
        if total != undivided_buffer.elements:
            elements = -(-elements // BYTE)
        return replace(undivided_buffer, elements=elements)

    def buffers(self) -> dict[str, Buffer]:
        """Return all buffers of the step in tiles, by name."""
        split = ((n, channel_range) for n in self.whole.buffers for channel_range in self.ranges(n))
        return {
            self.slice_name(n, channel_range): self.buffer(n, channel_range)
            for n, channel_range in split
        } | self.partials

    def values(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the values of state and constants, by the names of slices."""
        for name, values in self.whole.values.items():
            for channel_range in self.ranges(name):
                step = self.layouts[name].step if channel_range else 0
                yield (
                    self.slice_name(name, channel_range),
                    values[channel_range[0] * step : channel_range[1] * step]
                    if channel_range
                    else values,
                )

    def divide_tensor(self, value: NamedTensor) -> NamedTensor:
        """Return a named tensor, with the slices of its buffer as pieces if it is divided."""
        name = value.pieces[0].buffer
        return (
            replace(value, pieces=tuple(map(Ref, self.names(name))))
            if name in self.ranges_of
            else value
        )

    @cached_property
    def _sizes(self) -> dict[str, int]:
        sizes = {tensor.name: tensor.bytes for tensor in self.whole.graph.tensors}
        for name, ranges in self.ranges_of.items():
            sizes.update(
                (self.slice_name(name, channel_range), self.buffer(name, channel_range).bytes)
                for channel_range in ranges
            )
        return sizes

    def bytes(self, name: str) -> int:
        """Return the size of a tensor, a slice, or a partial result [B]."""
        return self.partials[name].bytes if name in self.partials else self._sizes[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedCall:
    """A call with divided tensors."""

    channels: Channels
    views: Mapping[int, tuple[str, int]]
    """Buffer and channel dimension of each divided tensor, by its position among the pointers."""
    axes: Mapping[int, Axis]
    """The axis of each channel dimension in `views`."""

    def call_for(self, slices: Slices, of: Mapping[Axis, Range]) -> Call | None:
        """Return the call for some channels on each axis; None if the kernel cannot execute it."""
        ranges, views, names = {}, {}, {}
        for number, (name, d) in self.views.items():
            layout, (first, end) = slices.layouts[name], of[self.axes[d]]
            ranges[d] = first, end, layout.channels
            views[number] = View(layout=layout, dimension=d, first=first, count=end - first)
            names[number] = slices.slice_name(name, (first, end))
        call = self.channels.slice_call(ranges, views)
        if call is None:
            return None
        numbers = iter(range(len(call.arguments)))
        arguments = (
            Ref(names.get(next(numbers), a.buffer), a.offset) if isinstance(a, Ref) else a
            for a in call.arguments
        )
        return replace(call, arguments=tuple(arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A node of the step in tiles."""

    k: int
    """Index of the node in the undivided step."""
    node: Node
    calls: tuple[Call, ...]
    group: str = ""
    number: int = -1
    """Index of the slice in the group; -1 without one."""


@dataclass(frozen=True, slots=True)
class _PieceCalls:
    """The calls of a node for one slice on each of its axes."""

    at: Mapping[Axis, int]
    calls: tuple[Call, ...]

    @property
    def written(self) -> set[str]:
        return {ref.buffer for call in self.calls for ref in written_refs(call)}


class Expansion:
    """The pieces that replace a node with divided tensors.

    There is one piece for each slice of results, combined with each slice of the channels over
    which they sum. Pieces that write the same tensor are a chain: each piece continues the sums of
    the piece before, in the same memory.
    """

    def __init__(
        self,
        slices: Slices,
        k: int,
        sliced: Sequence[SlicedCall | None],
        ranges: Mapping[Axis, tuple[Range, ...]],
    ) -> None:
        """Make the calls of the pieces of node `k`.

        `sliced` has the divided tensors of each call, None for calls without any; `ranges` has the
        slices of each axis. Raises `UnsliceableError` if the calls cannot be divided.
        """
        self._slices, self._k, self._sliced, self._ranges = slices, k, sliced, ranges
        self._node, self._calls = slices.whole.graph.nodes[k], slices.whole.calls[k]
        self._axes = sorted(ranges, key=lambda axis: not axis[1])
        self._piece_calls = list(self._make_piece_calls())
        self._result_slices = {
            slices.slice_name(name, channel_range): (tensor, name, channel_range)
            for tensor in self._node.outputs
            for name in [tensor.replaces or tensor.name]
            for channel_range in slices.ranges(name)
        }
        """For each slice of results: the tensor of the undivided step, its buffer and its
        channels."""
        self._writers = self._find_writers()
        """Indices of the pieces that write each slice of results."""

    @property
    def _unsliceable_error(self) -> UnsliceableError:
        buffers = {name for call in self._calls for name in call.buffers}
        return UnsliceableError(buffers & self._slices.ranges_of.keys())

    def _make_piece_calls(self) -> Iterator[_PieceCalls]:
        """Yield the calls of each piece; raise `UnsliceableError` if a call cannot be divided."""
        calls_of_axis = {
            axis: [j for j, call in enumerate(self._sliced) if call and axis in call.axes.values()]
            for axis in self._axes
        }
        if any(
            call_indices[-1] - call_indices[0] >= len(call_indices)
            for call_indices in calls_of_axis.values()
        ):
            raise self._unsliceable_error
        for index in product(*(range(len(self._ranges[axis])) for axis in self._axes)):
            slice_indices, calls = dict(zip(self._axes, index, strict=True)), []
            ranges = {axis: self._ranges[axis][n] for axis, n in slice_indices.items()}
            for j, (call, sliced_call) in enumerate(zip(self._calls, self._sliced, strict=True)):
                unused_axes = slice_indices.keys() - (
                    sliced_call.axes.values() if sliced_call else ()
                )
                # Calls without slices are in the first piece before divided calls, else in the last
                last_indices = {axis: len(self._ranges[axis]) - 1 for axis in unused_axes}
                if all(
                    slice_indices[axis] == (0 if j < calls_of_axis[axis][0] else last_indices[axis])
                    for axis in unused_axes
                ):
                    slice_call = sliced_call.call_for(self._slices, ranges) if sliced_call else call
                    if slice_call is None:
                        raise self._unsliceable_error
                    calls.append(slice_call)
            yield _PieceCalls(slice_indices, tuple(calls))

    def _find_writers(self) -> dict[str, list[int]]:
        """Return the indices of the pieces that write each slice of results.

        A slice that no piece writes belongs to the last piece. Raises `UnsliceableError` if several
        pieces write one slice of state.
        """
        writers: dict[str, list[int]] = {result_slice: [] for result_slice in self._result_slices}
        for p, piece in enumerate(self._piece_calls):
            for result_slice in piece.written & writers.keys():
                writers[result_slice].append(p)
        if any(
            len(ps) > 1 and self._result_slices[u][0].replaces is not None
            for u, ps in writers.items()
        ):
            raise self._unsliceable_error
        return {
            result_slice: pieces or [len(self._piece_calls) - 1]
            for result_slice, pieces in writers.items()
        }

    def _version(self, result_slice: str, p: int) -> str:
        """Return the name of a result slice after piece `p`: its own name after its last writer.

        Before that, it is the name of a partial result. Raises `UnsliceableError` if no piece up to
        `p` writes the slice.
        """
        writers = self._writers[result_slice]
        writers_so_far = [q for q in writers if q <= p]
        if not writers_so_far:
            raise self._unsliceable_error
        if writers_so_far[-1] == writers[-1]:
            return result_slice
        first, current, last = (
            self._piece_calls[q].at for q in (writers[0], writers_so_far[-1], writers[-1])
        )
        range_ends = (self._ranges[a][n][1] for a, n in current.items() if first[a] != last[a])
        return result_slice + "".join(f"[:{end}]" for end in range_ends)

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces in order."""
        # Pieces with the same slice of the larger group are consecutive.
        group = max(self._axes, key=lambda axis: (self._largest_bytes(axis), not axis[1]))
        flops = _divide_proportionally(
            self._node.flops, [self._ranges[axis] for axis in self._axes]
        )
        for p, piece in enumerate(self._piece_calls):
            node, calls = self._make_piece(p, flops[p])
            yield Piece(k=self._k, node=node, calls=calls, group=group[0], number=piece.at[group])

    def _largest_bytes(self, axis: Axis) -> int:
        """Return the size of the largest tensor on an axis [B]."""
        calls = [call for call in self._sliced if call]
        names = (n for c in calls for n, d in c.views.values() if c.axes[d] == axis)
        return max(self._slices.whole.buffers[name].bytes for name in names)

    def _make_piece(self, p: int, flops: int) -> tuple[Node, tuple[Call, ...]]:
        """Return the node and the calls of a piece.

        In a chain, each piece except the first begins with a copy of the previous partial result.
        Adds the buffers of partial results to `Slices.partials`.
        """
        node, piece = self._node, self._piece_calls[p]
        versions = {
            name: self._version(name, p)
            for call in piece.calls
            for name in call.buffers
            if name in self._result_slices and self._result_slices[name][0].replaces is None
        }
        calls = [call.with_buffers(versions) for call in piece.calls]
        in_place_pairs, outputs = [], []
        for result_slice in (
            result_slice for result_slice, writers in self._writers.items() if p in writers
        ):
            tensor, name, channel_range = self._result_slices[result_slice]
            new_name, buffer = (
                versions.get(result_slice, result_slice),
                self._slices.buffer(name, channel_range),
            )
            if new_name != result_slice:
                self._slices.partials[new_name] = buffer
            if p != self._writers[result_slice][0]:
                old_name = self._version(result_slice, p - 1)
                copy = (Ref(new_name), Ref(old_name), (1, buffer.elements, 1, 1))
                calls.insert(0, Call(f"pm_copy{_COPY_SUFFIXES[buffer.type]}", copy))
                in_place_pairs.append((new_name, old_name))
            elif self._writers[result_slice] == [p] and channel_range is not None:
                in_place_pairs += self._in_place_slices(name, channel_range)
            outputs.append(_output_tensor(tensor, new_name, result_slice, buffer.bytes))
        inputs = self._piece_inputs(calls)
        output_names = {tensor.name for tensor in outputs}
        inputs += [
            versions[result_slice]
            for result_slice in versions
            if versions[result_slice] not in output_names
        ]
        inputs = list(dict.fromkeys((*inputs, *(old_name for _, old_name in in_place_pairs))))
        range_label = "".join(_range_text(self._ranges[axis][n]) for axis, n in piece.at.items())
        bytes_moved = self._piece_traffic(flops, inputs, outputs)
        return replace(
            node,
            name=node.name + range_label,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            flops=flops,
            bytes_moved=bytes_moved,
            in_place=tuple(in_place_pairs),
        ), tuple(calls)

    def _in_place_slices(self, name: str, channel_range: Range) -> list[tuple[str, str]]:
        """Return the (output, input) pair if the output may overwrite this slice, else []."""
        slices = self._slices
        return [
            (slices.slice_name(name, channel_range), slices.slice_name(x, channel_range))
            for y, x in self._node.in_place
            if y == name and slices.ranges_of.get(x) == slices.ranges_of[name]
        ]

    def _piece_inputs(self, calls: Iterable[Call]) -> list[str]:
        """Return the inputs of a piece, in slices.

        These are the inputs that `calls` read, and the inputs of the node that no call of the node
        reads.
        """
        read_names = {name for call in calls for name in call.buffers}
        call_names = {name for call in self._calls for name in call.buffers}
        return [
            tile
            for name in self._node.inputs
            for tile in self._slices.names(name)
            if tile in read_names or name not in call_names
        ]

    def _piece_traffic(
        self, flops: int, inputs: Sequence[str], outputs: Sequence[Tensor]
    ) -> int | None:
        """Return the memory traffic of a piece [B]; None if the operator states none.

        That is the bytes of the piece's tensors, plus the piece's fraction of the operator's other
        traffic, in proportion to FLOP.
        """
        node, size = self._node, self._slices.bytes
        if node.bytes_moved is None:
            return None
        tensor_traffic = sum(map(size, node.inputs)) + sum(tensor.bytes for tensor in node.outputs)
        other_traffic = max(0, node.bytes_moved - tensor_traffic) * flops // max(1, node.flops)
        return other_traffic + sum(map(size, inputs)) + sum(tensor.bytes for tensor in outputs)


def _output_tensor(tensor: Tensor, new_name: str, result_slice: str, size: int) -> Tensor:
    """Return an output of a piece: a tensor, a slice of it, or a partial result of a chain."""
    if tensor.replaces is None:
        return Tensor(name=new_name, bytes=size)
    name = tensor.name if result_slice == tensor.replaces else f"{result_slice}+"
    return Tensor(name=name, bytes=size, replaces=result_slice)


def _divide_proportionally(total: int, axes: Iterable[Sequence[Range]]) -> list[int]:
    """Divide an amount in proportion to the channels of slices; the results add up to it."""
    amounts = [total]
    for ranges in axes:
        channels = ranges[-1][1]
        amounts = [
            amount * end // channels - amount * first // channels
            for amount in amounts
            for first, end in ranges
        ]
    return amounts


def _range_text(channel_range: Range) -> str:
    """Return a channel range as text for names."""
    return f"[{channel_range[0]}:{channel_range[1]}]"


# -- the order -------------------------------------------------------------------------------------


def order_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """Order pieces so that sequences of operators on one group are executed slice by slice.

    State precedes its first reader, and replacements of state follow all other readers.
    """
    sort_keys = _sort_keys(pieces)
    makers = {t.name: p for p, piece in enumerate(pieces) for t in piece.node.outputs}
    successors, open_dependencies = _dependencies(pieces, makers)
    states = {p for p, piece in enumerate(pieces) if piece.node.is_state}
    ready = [
        sort_keys[p] for p in range(len(pieces)) if not open_dependencies[p] and p not in states
    ]
    heapq.heapify(ready)
    order: dict[int, None] = {}
    while ready:
        p = heapq.heappop(ready)[-1]
        read = (makers[name] for name in pieces[p].node.inputs if name in makers)
        order.update(dict.fromkeys(q for q in read if q in states))
        order[p] = None
        for q in successors[p]:
            open_dependencies[q] -= 1
            if not open_dependencies[q]:
                heapq.heappush(ready, sort_keys[q])
    order.update(dict.fromkeys(range(len(pieces))))
    return [pieces[p] for p in order]


def _sort_keys(pieces: Sequence[Piece]) -> list[tuple[int, ...]]:
    """Return sort keys of pieces: sequences of one group, their slices, then the original order."""
    sequence, group = 0, ""
    keys: list[tuple[int, ...]] = []
    for p, piece in enumerate(pieces):
        if piece.group and piece.group != group:
            sequence, group = sequence + 1, piece.group
        keys.append((sequence, piece.number, piece.k, p))
    return keys


def _dependencies(
    pieces: Sequence[Piece], makers: Mapping[str, int]
) -> tuple[Mapping[int, set[int]], list[int]]:
    """Return the successors of each piece, and its number of predecessors, without state."""
    readers = defaultdict(set)
    for p, piece in enumerate(pieces):
        for name in piece.node.inputs:
            readers[name].add(p)
    successors: dict[int, set[int]] = defaultdict(set)
    predecessor_counts = [0] * len(pieces)
    for p, piece in enumerate(pieces):
        predecessors = {makers[name] for name in piece.node.inputs if name in makers}
        replaced_state = (t.replaces for t in piece.node.outputs if t.replaces is not None)
        predecessors.update(q for name in replaced_state for q in readers[name])
        for q in predecessors - {p}:
            if not pieces[q].node.is_state:
                successors[q].add(p)
                predecessor_counts[p] += 1
    return successors, predecessor_counts


_COPY_SUFFIXES: Final = {
    DataType.REAL: "", DataType.INT32: "_int", DataType.UINT8: "_byte", DataType.INT8: "_int8",
}  # fmt: skip
"""Suffixes of copy kernels."""
