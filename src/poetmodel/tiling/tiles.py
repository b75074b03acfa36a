"""Tiles: parameters and activations larger than a given size, divided into slices of channels.

Operators on single channels are executed slice by slice. A convolution, or a product with a weight,
computes one slice of its results from all of its input; sums over a divided input continue from
slice to slice. So every sum has the order, and the bits, of the undivided step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from poetmodel.graph import Phase, Tensor
from poetmodel.lowered.calls import WORKSPACE, Call, Ref
from poetmodel.lowered.fusing import fuse_updates, split_fused_updates
from poetmodel.lowered.step import LoweredNode
from poetmodel.lowered.tables import LOOKUP_KERNEL
from poetmodel.plan.alignment import round_up
from poetmodel.tiling.pieces import (
    Expansion,
    Piece,
    SlicedCall,
    Slices,
    UnsliceableError,
    order_pieces,
)
from poetmodel.tiling.slices import ChannelLayout, ChannelLoops, parse_channel_loops

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from poetmodel.lowered.step import LoweredStep
    from poetmodel.tiling.pieces import Axis, Range

BLOCK: Final = 4
"""Number of channels that kernels compute together."""
MIN_TILE_BYTES: Final = 4 * BLOCK
"""Size of the smallest slice of real numbers: one element per channel of a block [B]."""


def tile_step(step: LoweredStep, tile_bytes: int) -> LoweredStep:
    """Return a step with tensors divided into slices of at most `tile_bytes`, where possible.

    Tensors that operators process channel by channel form a group with the same, fewest slices.
    Every slice but the last has a multiple of four channels, even if four are larger than
    `tile_bytes` (byte inputs: any number). Returns `step` itself if no tensor is divided.
    """
    (tiled_step,) = (tiled_step for _, tiled_step in make_distinct_tilings(step, (tile_bytes,)))
    return tiled_step


def make_distinct_tilings(
    step: LoweredStep, sizes: Iterable[int]
) -> Iterator[tuple[int, LoweredStep]]:
    """Yield (size [B], step in tiles of that size), in the order of `sizes`.

    Skips a size whose tiling has the slices, groups and undivided buffers of an earlier size.
    Yields `step` itself for a size at which no tensor is divided.
    """
    split_step = split_fused_updates(step)
    identities: list[object] = []
    for tile_bytes in sizes:
        undivided_buffers = set(step.returned_buffers)
        while True:
            try:
                tiling = _make_tiling(split_step, tile_bytes, undivided_buffers)
                if tiling.identity in identities:
                    break
                identities.append(tiling.identity)
                yield tile_bytes, fuse_updates(tiling.make_step()) if tiling.slice_ranges else step
            except UnsliceableError as error:
                undivided_buffers |= error.buffers
            else:
                break


def min_tiled_bytes(
    step: LoweredStep, *, alignment: int, reads_in_place: bool, is_resident: bool
) -> int:
    """Return a lower bound on the RAM of a step in tiles of any size [B].

    A call needs at least the smallest slice of each tensor. Only calls of the forward pass count,
    because updates may be fused with their gradients. With `is_resident`, all state is added.
    """
    tiling = _make_tiling(split_fused_updates(step), 0, set(step.returned_buffers))
    graph = tiling.graph
    state_names = {graph.tensors[i].name for i in graph.state_tensors}
    excluded_state = state_names if reads_in_place or is_resident else set()
    bound = 0
    for node, calls in tiling.undivided_step.operations:
        if node.phase != Phase.FORWARD:
            continue
        excluded_names = {new_name for new_name, _ in node.in_place} | excluded_state
        for call in calls:
            names = {name for name in call.buffers if name in graph.tensor_index} - excluded_names
            sizes = (round_up(tiling.min_slice_bytes(name), alignment) for name in names)
            bound = max(bound, sum(sizes))
    return bound + (graph.state_bytes if is_resident else 0)


def _make_tiling(step: LoweredStep, tile_bytes: int, undivided_names: set[str]) -> _Tiling:
    """Return a tiling with `undivided_names`, to which each `UnsliceableError` adds buffers."""
    while True:
        try:
            return _Tiling(step, tile_bytes, undivided_names)
        except UnsliceableError as error:
            undivided_names |= error.buffers


class _BufferGroups:
    """Disjoint sets of buffers with the same slices."""

    def __init__(self) -> None:
        self._parent_of: dict[str, str] = {}

    def find(self, name: str) -> str:
        """Return the representative of a buffer's group; add a new buffer as a group of its own."""
        while (parent := self._parent_of.setdefault(name, name)) != name:
            self._parent_of[name] = self._parent_of[parent]
            name = parent
        return name

    def join(self, names: Iterable[str]) -> None:
        """Merge the groups of some buffers; the representative is that of the first buffer."""
        representatives = [*map(self.find, names)]
        self._parent_of.update((name, representatives[0]) for name in representatives[1:])


class _Tiling:
    """A step divided into tiles of at most `tile_bytes` where possible; see `tile_step`.

    A forward pass has the slices of `training_tiling`, that of the training step whose state it
    reads. `UnsliceableError` names further buffers that must stay undivided.
    """

    def __init__(
        self,
        step: LoweredStep,
        tile_bytes: int,
        undivided_names: set[str],
        *,
        training_tiling: _Tiling | None = None,
    ) -> None:
        self.undivided_step, self.graph, self.training_tiling = step, step.graph, training_tiling
        self._undivided_names, self._tile_bytes = undivided_names, tile_bytes
        self._fixed_slices = {} if training_tiling is None else training_tiling.shared_slices(step)
        """Slices of state that `training_tiling` has determined."""
        self._channel_loops = [
            [parse_channel_loops(call) for call in calls] for calls in step.calls
        ]
        self._all_loops = [
            loops for node_calls in self._channel_loops for loops in node_calls if loops is not None
        ]
        self._layouts: dict[str, ChannelLayout] = {}
        self._element_counts: dict[str, int] = {}
        calls = (
            call for node_calls in step.calls for call in node_calls if call.kernel == LOOKUP_KERNEL
        )
        self._converted_buffers = {ref.buffer for call in calls for ref in call.writes}
        """Buffers of byte inputs after their conversion to real numbers."""
        self._find_layouts()
        self._sliceable = self._find_sliceable()
        self._groups = _BufferGroups()
        self.slice_ranges = self._find_slices()
        """Channel ranges of the slices of each divided buffer."""

    @property
    def identity(self) -> object:
        """Slices, groups and undivided buffers; tilings with equal identities make equal steps."""
        groups = {name: self._groups.find(name) for name in self.slice_ranges}
        return self.slice_ranges, groups, frozenset(self._undivided_names)

    def min_slice_bytes(self, name: str) -> int:
        """Return the size of the smallest possible slice of a buffer, except a last one [B]."""
        size = self.undivided_step.buffers[name].bytes
        if name not in self._sliceable:
            return size
        block = 1 if name in self._converted_buffers else BLOCK
        channels = self._layouts[name].channels
        return size * min(block, channels) // channels

    def shared_slices(self, forward_pass: LoweredStep) -> dict[str, tuple[Range, ...]]:
        """Return the slices of divided state whose buffer a forward pass also has, by buffer."""
        state_names = (
            self.slice_ranges.keys()
            & self.undivided_step.values.keys()
            & forward_pass.buffers.keys()
        )
        return {name: self.slice_ranges[name] for name in state_names}

    # -- layouts of channels, and slices -----------------------------------------------------------

    def _find_layouts(self) -> None:
        """Fill `_layouts`, first for state and summed byte inputs, then for tensors of their calls.

        Skips state that is not one dense piece from the start of a buffer, or has one channel.
        State of a forward pass has the layouts of its training step.
        """
        if self.training_tiling is None:
            for tensor in self.undivided_step.states:
                (first, *other_pieces), shape = tensor.pieces, tensor.shape
                buffer = self.undivided_step.buffers[first.buffer]
                is_plain = not other_pieces and tensor.strides is None and first.offset == 0
                if is_plain and shape and shape[0] > 1 and buffer.elements % shape[0] == 0:
                    self._layouts[first.buffer] = ChannelLayout(
                        shape[0], buffer.elements // shape[0]
                    )
        else:
            fixed_layouts = self.training_tiling._layouts.items()  # noqa: SLF001 - same class
            state_buffers = {
                ref.buffer
                for tensor in self.training_tiling.undivided_step.states
                for ref in tensor.pieces
            }
            self._layouts.update(
                (name, layout) for name, layout in fixed_layouts if name in state_buffers
            )
        for channel_loops in self._all_loops:
            self._layouts.update(channel_loops.find_summed_layouts(self._converted_buffers))
        # Products are last: if both factors have a layout, results have that of the weights.
        for loops_of_calls in (
            [loops for loops in self._all_loops if not loops.is_product],
            self._all_loops,
        ):
            old_count = -1
            while old_count != len(self._layouts):
                old_count = len(self._layouts)
                for channel_loops in loops_of_calls:
                    self._propagate_layouts(channel_loops)

    def _propagate_layouts(self, channel_loops: ChannelLoops) -> None:
        """Add the layouts of a call's tensors that follow from its tensors with a known layout.

        Known layouts do not change. The caller repeats this for all calls until no layout is new.
        """
        refs = channel_loops.loops.refs
        for index, ref in enumerate(refs):
            layout = self._layouts.get(ref.buffer)
            if layout is None or ref.offset:
                continue
            split_loops = channel_loops.split_dimension(index, layout)
            d = split_loops.find_dimension(index, layout)
            if d is None:
                continue
            inner_size = split_loops.loops.sizes[d] // layout.channels
            for other_index, (other_ref, strides) in enumerate(
                zip(refs, split_loops.loops.strides, strict=True)
            ):
                if (
                    not strides[d]
                    or other_ref.offset
                    or other_ref.buffer in self._layouts
                    or other_ref.buffer == WORKSPACE
                ):
                    continue
                other_layout = ChannelLayout(layout.channels, inner_size * strides[d])
                total = channel_loops.count_elements(
                    other_index, self.undivided_step.buffers[other_ref.buffer].elements
                )
                if total % other_layout.span == 0:
                    self._layouts[other_ref.buffer] = other_layout
                    self._element_counts[other_ref.buffer] = total

    def _find_sliceable(self) -> set[str]:
        """Return the buffers that may be divided: every call can process ranges of their channels.

        Excludes counters of conditions, and includes buffers with fixed slices. Raises
        `UnsliceableError` if a call excludes state with fixed slices.
        """
        sliceable = {
            name
            for name in self._layouts
            if name in self.graph.tensor_index and name not in self._undivided_names
        }
        fixed_names = set(self._fixed_slices)
        for (node, calls), loops_of_calls in zip(
            self.undivided_step.operations, self._channel_loops, strict=True
        ):
            for call, channel_loops in zip(calls, loops_of_calls, strict=True):
                if channel_loops is None or node.workspace_bytes:
                    unsliceable = set(call.buffers)
                else:
                    unsliceable = {
                        ref.buffer
                        for index, ref in enumerate(channel_loops.loops.refs)
                        if ref.buffer in sliceable | fixed_names
                        and not self._can_slice(channel_loops, index, ref)
                    }
                    unsliceable |= (
                        set() if call.condition is None else {call.condition.counter.buffer}
                    )
                if fixed_names & unsliceable:
                    raise UnsliceableError(unsliceable)
                sliceable -= unsliceable
        affected_states = (
            tensor
            for tensor in self.undivided_step.states
            if any(ref.buffer in sliceable for ref in tensor.pieces)
        )
        for tensor in affected_states:
            name = tensor.pieces[0].buffer
            is_one_piece = len(tensor.pieces) == 1 and tensor.strides is None
            if (
                not is_one_piece
                or self._layouts[name].span != self.undivided_step.buffers[name].elements
            ):
                sliceable -= {ref.buffer for ref in tensor.pieces}
        return sliceable | fixed_names

    def _can_slice(self, channel_loops: ChannelLoops, index: int, ref: Ref) -> bool:
        """Return whether a loop over the channels of tensor `index` exists and can be sliced."""
        layout = self._layouts[ref.buffer]
        split_loops = channel_loops.split_dimension(index, layout)
        d = split_loops.find_dimension(index, layout)
        return d is not None and not ref.offset and split_loops.can_slice(d)

    def _split_dimensions(self, channel_loops: ChannelLoops) -> tuple[ChannelLoops, dict[int, int]]:
        """Return loops with dimensions over channels of sliceable tensors, and those by tensor."""
        for index, ref in enumerate(channel_loops.loops.refs):
            if ref.buffer in self._sliceable:
                channel_loops = channel_loops.split_dimension(index, self._layouts[ref.buffer])
        dimensions = {}
        for index, ref in enumerate(channel_loops.loops.refs):
            if ref.buffer in self._sliceable:
                d = channel_loops.find_dimension(index, self._layouts[ref.buffer])
                if d is None:
                    raise UnsliceableError({ref.buffer})
                dimensions[index] = d
        return channel_loops, dimensions

    def _find_slices(self) -> dict[str, tuple[Range, ...]]:
        """Join buffers to groups; return the slices of each buffer of a divided group.

        Buffers with channels in one loop of a call join one group; in a product, groups with
        weights join only if another buffer of the loop is above `tile_bytes`, or fixed slices
        require it.
        """
        product_groups, weight_buffers = [], set()
        state_buffers = {
            ref.buffer for tensor in self.undivided_step.states for ref in tensor.pieces
        }
        for channel_loops in self._all_loops:
            split_loops, dimensions = self._split_dimensions(channel_loops)
            names_by_dimension: dict[int, list[str]] = defaultdict(list)
            for index, d in dimensions.items():
                name = split_loops.loops.refs[index].buffer
                names_by_dimension[d].append(name)
                if split_loops.is_weight(index, is_state=name in state_buffers):
                    weight_buffers.add(name)
            if split_loops.is_product:
                product_groups += [names for names in names_by_dimension.values() if len(names) > 1]
            else:
                for names in names_by_dimension.values():
                    self._groups.join(names)
        weight_groups = {self._groups.find(name) for name in weight_buffers}
        for names in product_groups:
            self._groups.join(
                name for name in names if self._groups.find(name) not in weight_groups
            )
        large_groups = {self._groups.find(name) for name in self._sliceable if self._is_large(name)}
        large_groups -= weight_groups
        divided_products = [
            names
            for names in product_groups
            # Slices of shared state are fixed, such as those of a layer's weight and bias.
            if large_groups & {*map(self._groups.find, names)}
            or len(self._fixed_slices.keys() & names) > 1
        ]
        for names in divided_products:
            self._groups.join(names)
        return dict(self._divide_groups())

    def _is_large(self, name: str) -> bool:
        return self.undivided_step.buffers[name].bytes > self._tile_bytes

    def _divide_groups(self) -> Iterator[tuple[str, tuple[Range, ...]]]:
        """Yield (buffer, slices) of groups with fixed slices or a tensor above `tile_bytes`."""
        members = defaultdict(list)
        for name in sorted(self._sliceable):
            members[self._groups.find(name)].append(name)
        for names in members.values():
            block = 1 if self._converted_buffers.issuperset(names) else BLOCK
            fixed_ranges = {
                self._fixed_slices[name] for name in names if name in self._fixed_slices
            }
            channels = self._layouts[names[0]].channels
            largest_bytes = max(self.undivided_step.buffers[name].bytes for name in names)
            if len(fixed_ranges) > 1:
                raise UnsliceableError(name for name in names if name in self._fixed_slices)
            if fixed_ranges:
                (ranges,) = fixed_ranges
                yield from ((name, ranges) for name in names)
            elif largest_bytes > self._tile_bytes and channels > block:
                blocks = -(-channels // block)
                slice_channels = max(1, self._tile_bytes * channels // largest_bytes // block)
                slice_channels = -(-blocks // -(-blocks // slice_channels)) * block
                if slice_channels < channels:
                    ranges = tuple(pairwise((*range(0, channels, slice_channels), channels)))
                    yield from ((name, ranges) for name in names)

    # -- the step ----------------------------------------------------------------------------------

    def make_step(self) -> LoweredStep:
        """Return the step in tiles, with inference and evaluation in tiles if it has them."""
        undivided_step = self.undivided_step
        slices = Slices(
            undivided_step=undivided_step,
            layouts=self._layouts,
            element_counts=self._element_counts,
            ranges_of=self.slice_ranges,
        )
        unordered_pieces = [
            piece for k in range(len(self.graph.nodes)) for piece in self._make_pieces(slices, k)
        ]
        pieces = order_pieces(unordered_pieces)
        inference, evaluation = (
            None if forward_pass is None else self._tile_forward_pass(forward_pass)
            for forward_pass in (undivided_step.inference, undivided_step.evaluation)
        )
        return undivided_step.with_operations(
            [LoweredNode(piece.node, piece.calls) for piece in pieces],
            buffers=slices.all_buffers(),
            states=tuple(map(slices.divide_tensor, undivided_step.states)),
            values=dict(slices.slice_values()),
            inference=inference,
            evaluation=evaluation,
        )

    def _tile_forward_pass(self, forward_pass: LoweredStep) -> LoweredStep:
        """Return a forward pass in tiles, with the same slices of state as this step."""
        return _Tiling(
            forward_pass, self._tile_bytes, self._undivided_names, training_tiling=self
        ).make_step()

    def _make_pieces(self, slices: Slices, k: int) -> Iterator[Piece]:
        """Yield the pieces, in order, that replace node `k`; one piece if no tensor is divided."""
        node, calls = self.graph.nodes[k], self.undivided_step.calls[k]
        if node.is_state and node.outputs[0].name in self.slice_ranges:
            for slice_name in slices.slice_names(node.outputs[0].name):
                tensor = Tensor(name=slice_name, bytes=slices.size_bytes(slice_name))
                yield Piece(
                    node_index=k, node=replace(node, name=slice_name, outputs=(tensor,)), calls=()
                )
            return
        sliced_calls = [
            self._slice_call(call, loops)
            for call, loops in zip(calls, self._channel_loops[k], strict=True)
        ]
        ranges: dict[Axis, tuple[Range, ...]] = {}
        for call in filter(None, sliced_calls):
            ranges.update(
                (call.axes[d], self.slice_ranges[name]) for name, d in call.views.values()
            )
        if ranges:
            yield from Expansion(slices, k, sliced_calls, ranges).make_pieces()
        else:
            yield Piece(node_index=k, node=node, calls=calls)

    def _slice_call(self, call: Call, channel_loops: ChannelLoops | None) -> SlicedCall | None:
        """Return a call with its divided tensors; None if it has no loops or no divided tensor."""
        if channel_loops is None or not self.slice_ranges.keys() & {*call.buffers}:
            return None
        split_loops, dimensions = self._split_dimensions(channel_loops)
        refs, written_pointers = split_loops.loops.refs, call.writes
        views: dict[int, tuple[str, int]] = {}
        axes: dict[int, Axis] = {}
        result_dimensions = {
            d for index, d in dimensions.items() if refs[index] in written_pointers
        }
        for index, d in dimensions.items():
            name = refs[index].buffer
            if name in self.slice_ranges:
                views[index] = name, d
                axis = self._groups.find(name), d in result_dimensions
                if axis in (
                    other_axis
                    for other_dimension, other_axis in axes.items()
                    if other_dimension != d
                ):
                    axis = axis[0], not axis[1]
                if axes.setdefault(d, axis)[0] != axis[0]:
                    raise UnsliceableError({name})
        return SlicedCall(channel_loops=split_loops, views=views, axes=axes)
