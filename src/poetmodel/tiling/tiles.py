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
from poetmodel.lowered.kernels import written_refs
from poetmodel.lowered.tables import LOOKUP
from poetmodel.plan.alignment import round_up
from poetmodel.tiling.pieces import (
    Expansion,
    Piece,
    SlicedCall,
    Slices,
    UnsliceableError,
    order_pieces,
)
from poetmodel.tiling.slices import ChannelLayout, Channels, channels_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from poetmodel.lowered.step import LoweredStep
    from poetmodel.tiling.pieces import Axis, Range

BLOCK: Final = 4
"""Number of channels that kernels compute together."""
MIN_TILE_BYTES: Final = 4 * BLOCK
"""Size of the smallest slice of real numbers: one element per channel of a block [B]."""


def tile_step(step: LoweredStep, tile_bytes: int) -> LoweredStep:
    """Return a step in which no tensor that can be divided is larger than `tile_bytes`.

    Tensors that operators process channel by channel form a group with the same slices. Groups have
    the fewest slices possible. Every slice except the last has a multiple of four channels; slices
    of byte inputs have any number. A group without a larger tensor stays undivided, and so do the
    tensors of kernels without ranges of channels.
    """
    (tiles,) = (tiles for _, tiles in distinct_tilings(step, (tile_bytes,)))
    return tiles


def distinct_tilings(step: LoweredStep, sizes: Iterable[int]) -> Iterator[tuple[int, LoweredStep]]:
    """Yield each size [B] with the step in tiles of that size, without repeated tilings.

    Skips a size whose slices are those of an earlier size.
    """
    split_step = split_fused_updates(step)
    identities: list[object] = []
    for tile_bytes in sizes:
        undivided_buffers = set(step.returned_buffers)
        while True:
            try:
                tiling = _Tiling(split_step, tile_bytes, undivided_buffers)
                if tiling.identity in identities:
                    break
                identities.append(tiling.identity)
                yield tile_bytes, fuse_updates(tiling.step()) if tiling.slices else step
            except UnsliceableError as error:
                undivided_buffers |= error.buffers
            else:
                break


def min_tiled_bytes(step: LoweredStep, *, alignment: int, in_place: bool, resident: bool) -> int:
    """Return a lower bound on the RAM of a step in tiles of any size [B].

    A call needs at least the smallest slice of each tensor. Only calls of the forward pass count,
    because fused updates have other gradients. State needs no RAM if it is read `in_place` on
    storage; all state is in RAM if it is `resident`. Sizes are rounded up to the alignment.
    """
    tiling = _Tiling(split_fused_updates(step), 0, set(step.returned_buffers))
    graph = tiling.graph
    state = {graph.tensors[i].name for i in graph.state_tensors}
    excluded = state if in_place or resident else set()
    bound = 0
    for node, calls in zip(graph.nodes, tiling.whole.calls, strict=True):
        if node.phase != Phase.FORWARD:
            continue
        excluded_names = {new for new, _ in node.in_place} | excluded
        for call in calls:
            names = {name for name in call.buffers if name in graph.tensor_index} - excluded_names
            sizes = (round_up(tiling.min_slice_bytes(name), alignment) for name in names)
            bound = max(bound, sum(sizes))
    return bound + (graph.state_bytes if resident else 0)


class _Groups:
    """Disjoint sets of buffers with the same slices."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def find(self, name: str) -> str:
        """Return the representative of a buffer's group."""
        while (of := self._of.setdefault(name, name)) != name:
            self._of[name] = self._of[of]
            name = of
        return name

    def join(self, names: Iterable[str]) -> None:
        """Merge the groups of some buffers."""
        representatives = [*map(self.find, names)]
        self._of.update((name, representatives[0]) for name in representatives[1:])


class _Tiling:
    """A step divided into tiles, or an inference whose state has the slices of another tiling."""

    def __init__(
        self,
        step: LoweredStep,
        tile_bytes: int,
        kept: set[str],
        *,
        beside: _Tiling | None = None,
    ) -> None:
        """Divide `step` into tiles of at most `tile_bytes`, except the buffers `kept`.

        For an inference, `beside` is the tiling of the training step whose state it reads.
        """
        self.whole, self.graph, self.beside = step, step.graph, beside
        self._undivided, self._tile_bytes = kept, tile_bytes
        self._fixed_slices = {} if beside is None else beside.shared_with(step)
        """Slices of state that the tiling `beside` has determined."""
        self._channels = [[channels_of(call) for call in calls] for calls in step.calls]
        self._layouts: dict[str, ChannelLayout] = {}
        self._totals: dict[str, int] = {}
        calls = (call for of_node in step.calls for call in of_node if call.kernel == LOOKUP)
        self._converted = {ref.buffer for call in calls for ref in written_refs(call)}
        """Byte inputs, converted to real numbers."""
        self._find_layouts()
        self._sliceable = self._find_sliceable()
        self._groups = _Groups()
        self.slices = self._find_slices()
        """The slices of each divided buffer."""

    @property
    def identity(self) -> object:
        """A key of the tiling: equal keys give equal steps."""
        groups = {name: self._groups.find(name) for name in self.slices}
        return self.slices, groups, frozenset(self._undivided)

    def min_slice_bytes(self, name: str) -> int:
        """Return the size of the smallest possible first slice of a buffer [B]."""
        size = self.whole.buffers[name].bytes
        if name not in self._sliceable:
            return size
        block = 1 if name in self._converted else BLOCK
        return size * min(block, channels := self._layouts[name].channels) // channels

    def shared_with(self, inference: LoweredStep) -> dict[str, tuple[Range, ...]]:
        """Return the slices of the state that an inference reads."""
        state_names = self.slices.keys() & self.whole.values.keys() & inference.buffers.keys()
        return {name: self.slices[name] for name in state_names}

    # -- buffers with channels, and those that are divided -----------------------------------------

    def _find_layouts(self) -> None:
        """Find the channels of buffers, starting from parameters' first dimensions and inputs."""
        if self.beside is None:
            for value in self.whole.states:
                (first, *other_pieces), shape = value.pieces, value.shape
                buffer = self.whole.buffers[first.buffer]
                is_plain = not other_pieces and value.strides is None and first.offset == 0
                if is_plain and shape and shape[0] > 1 and buffer.elements % shape[0] == 0:
                    self._layouts[first.buffer] = ChannelLayout(
                        shape[0], buffer.elements // shape[0]
                    )
        else:
            fixed_layouts = self.beside._layouts.items()  # noqa: SLF001 - of the step that it belongs to
            states = {ref.buffer for value in self.beside.whole.states for ref in value.pieces}
            self._layouts.update((name, layout) for name, layout in fixed_layouts if name in states)
        for channels in (c for of_node in self._channels for c in of_node if c is not None):
            self._layouts.update(channels.summed_layouts(self._converted))
        # Products last: if both factors have channels, results have those of the weights.
        all_channels = [c for of_node in self._channels for c in of_node if c is not None]
        for calls in ([c for c in all_channels if not c.is_product], all_channels):
            old_count = -1
            while old_count != len(self._layouts):
                old_count = len(self._layouts)
                for channels in calls:
                    self._propagate_layouts(channels)

    def _propagate_layouts(self, channels: Channels) -> None:
        """Find the layouts of tensors that a call processes together with one of known layout."""
        refs = channels.loops.refs
        for number, ref in enumerate(refs):
            layout = self._layouts.get(ref.buffer)
            if layout is None or ref.offset:
                continue
            split = channels.split(number, layout)
            d = split.dimension(number, layout)
            if d is None:
                continue
            inner_size = split.loops.sizes[d] // layout.channels
            for other_number, (other_ref, steps) in enumerate(
                zip(refs, split.loops.steps, strict=True)
            ):
                if (
                    not steps[d]
                    or other_ref.offset
                    or other_ref.buffer in self._layouts
                    or other_ref.buffer == WORKSPACE
                ):
                    continue
                other_layout = ChannelLayout(layout.channels, inner_size * steps[d])
                total = channels.element_count(
                    other_number, self.whole.buffers[other_ref.buffer].elements
                )
                if total % other_layout.span == 0:
                    self._layouts[other_ref.buffer] = other_layout
                    self._totals[other_ref.buffer] = total

    def _find_sliceable(self) -> set[str]:
        """Return the buffers that may be divided: every call can process ranges of their channels.

        Raises `UnsliceableError` if that excludes state with fixed slices.
        """
        sliceable = {
            name
            for name in self._layouts
            if (name in self.graph.tensor_index) and name not in self._undivided
        }
        fixed_names = set(self._fixed_slices)
        for node, calls, channels_of_calls in zip(
            self.graph.nodes, self.whole.calls, self._channels, strict=True
        ):
            for call, channels in zip(calls, channels_of_calls, strict=True):
                if channels is None or node.workspace_bytes:
                    unsliceable = set(call.buffers)
                else:
                    unsliceable = {
                        ref.buffer
                        for number, ref in enumerate(channels.loops.refs)
                        if ref.buffer in sliceable | fixed_names
                        and not self._can_slice(channels, number, ref)
                    }
                    unsliceable |= set() if call.where is None else {call.where.counter.buffer}
                if fixed_names & unsliceable:
                    raise UnsliceableError(unsliceable)
                sliceable -= unsliceable
        affected_states = (
            v for v in self.whole.states if any(ref.buffer in sliceable for ref in v.pieces)
        )
        for value in affected_states:
            name = value.pieces[0].buffer
            is_single = len(value.pieces) == 1 and value.strides is None
            if not is_single or self._layouts[name].span != self.whole.buffers[name].elements:
                sliceable -= {ref.buffer for ref in value.pieces}
        return sliceable | fixed_names

    def _can_slice(self, channels: Channels, number: int, ref: Ref) -> bool:
        layout = self._layouts[ref.buffer]
        split = channels.split(number, layout)
        d = split.dimension(number, layout)
        return d is not None and not ref.offset and split.can_slice(d)

    def _dimensions(self, channels: Channels) -> tuple[Channels, dict[int, int]]:
        """Return loops with a dimension for the channels of each sliceable tensor.

        The dict maps the position of each of these tensors to its dimension.
        """
        for number, ref in enumerate(channels.loops.refs):
            if ref.buffer in self._sliceable:
                channels = channels.split(number, self._layouts[ref.buffer])
        dimensions = {}
        for number, ref in enumerate(channels.loops.refs):
            if ref.buffer in self._sliceable:
                d = channels.dimension(number, self._layouts[ref.buffer])
                if d is None:
                    raise UnsliceableError({ref.buffer})
                dimensions[number] = d
        return channels, dimensions

    def _find_slices(self) -> dict[str, tuple[Range, ...]]:
        """Return the slices of buffers in groups with a large tensor, and of their weights."""
        product_groups, weight_buffers = [], set()
        states = {ref.buffer for value in self.whole.states for ref in value.pieces}
        for channels in (c for of_node in self._channels for c in of_node if c is not None):
            split, dimensions = self._dimensions(channels)
            names_by_dimension: dict[int, list[str]] = defaultdict(list)
            for number, d in dimensions.items():
                name = split.loops.refs[number].buffer
                names_by_dimension[d].append(name)
                if split.is_weight(number, is_state=name in states):
                    weight_buffers.add(name)
            if split.is_product:
                product_groups += [names for names in names_by_dimension.values() if len(names) > 1]
            else:
                for names in names_by_dimension.values():
                    self._groups.join(names)
        weight_groups = {self._groups.find(name) for name in weight_buffers}
        for names in product_groups:
            self._groups.join(n for n in names if self._groups.find(n) not in weight_groups)
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
        return self.whole.buffers[name].bytes > self._tile_bytes

    def _divide_groups(self) -> Iterator[tuple[str, tuple[Range, ...]]]:
        """Yield the slices of each group with a tensor that is too large, or with fixed slices."""
        members = defaultdict(list)
        for name in sorted(self._sliceable):
            members[self._groups.find(name)].append(name)
        for names in members.values():
            block = 1 if self._converted.issuperset(names) else BLOCK
            fixed_ranges = {
                self._fixed_slices[name] for name in names if name in self._fixed_slices
            }
            channels = self._layouts[names[0]].channels
            largest_bytes = max(self.whole.buffers[name].bytes for name in names)
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

    def step(self) -> LoweredStep:
        """Return the step in tiles, with its inference and evaluation."""
        undivided_step = self.whole
        slices = Slices(
            whole=undivided_step, layouts=self._layouts, totals=self._totals, ranges_of=self.slices
        )
        unordered_pieces = [
            piece for k in range(len(self.graph.nodes)) for piece in self._pieces(slices, k)
        ]
        pieces = order_pieces(unordered_pieces)
        inference, evaluation = (
            None if forward_pass is None else self._tile_forward_pass(forward_pass)
            for forward_pass in (undivided_step.inference, undivided_step.evaluation)
        )
        return undivided_step.with_nodes(
            (piece.node for piece in pieces),
            (piece.calls for piece in pieces),
            buffers=slices.buffers(),
            states=tuple(map(slices.divide_tensor, undivided_step.states)),
            values=dict(slices.values()),
            inference=inference,
            evaluation=evaluation,
        )

    def _tile_forward_pass(self, forward_pass: LoweredStep) -> LoweredStep:
        """Return a forward pass in tiles, whose state has the slices of this step."""
        return _Tiling(forward_pass, self._tile_bytes, self._undivided, beside=self).step()

    def _pieces(self, slices: Slices, k: int) -> Iterator[Piece]:
        """Yield the pieces that replace a node, in order."""
        node, calls = self.graph.nodes[k], self.whole.calls[k]
        if node.is_state and node.outputs[0].name in self.slices:
            for tile in slices.names(node.outputs[0].name):
                tensor = Tensor(name=tile, bytes=slices.bytes(tile))
                yield Piece(k=k, node=replace(node, name=tile, outputs=(tensor,)), calls=())
            return
        sliced = [
            self._slice_call(call, c) for call, c in zip(calls, self._channels[k], strict=True)
        ]
        ranges: dict[Axis, tuple[Range, ...]] = {}
        for call in filter(None, sliced):
            ranges.update((call.axes[d], self.slices[name]) for name, d in call.views.values())
        if ranges:
            yield from Expansion(slices, k, sliced, ranges).pieces()
        else:
            yield Piece(k=k, node=node, calls=calls)

    def _slice_call(self, call: Call, channels: Channels | None) -> SlicedCall | None:
        """Return a call with its divided tensors; None if none of its tensors is divided.

        Raises `UnsliceableError` if one dimension would need the slices of several groups.
        """
        if channels is None or not self.slices.keys() & {*call.buffers}:
            return None
        split, dimensions = self._dimensions(channels)
        refs, written_pointers = split.loops.refs, written_refs(call)
        views: dict[int, tuple[str, int]] = {}
        axes: dict[int, Axis] = {}
        result_dimensions = {
            d for number, d in dimensions.items() if refs[number] in written_pointers
        }
        for number, d in dimensions.items():
            name = refs[number].buffer
            if name in self.slices:
                views[number] = name, d
                axis = self._groups.find(name), d in result_dimensions
                if axis in (
                    other_axis
                    for other_dimension, other_axis in axes.items()
                    if other_dimension != d
                ):
                    axis = axis[0], not axis[1]
                if axes.setdefault(d, axis)[0] != axis[0]:
                    raise UnsliceableError({name})
        return SlicedCall(channels=split, views=views, axes=axes)
