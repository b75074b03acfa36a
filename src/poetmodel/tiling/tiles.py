"""Tiles: what is larger than a size, parameters and activations alike, in slices of channels.

Operators that act on channels act on slices of them, one after the other. A convolution, or a
product with a weight, makes a slice of its results from all that it reads; what it sums over slices
of what it reads goes on from slice to slice. So every sum has the order, and the bits, of the step
that is not in tiles.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from poetmodel.graph import Phase, Tensor
from poetmodel.lowered.calls import WORKSPACE, Call, Ref
from poetmodel.lowered.fusing import fused, parted
from poetmodel.lowered.kernels import changed
from poetmodel.lowered.tables import LOOKUP
from poetmodel.plan.alignment import round_up
from poetmodel.tiling.pieces import Expansion, Piece, SlicedCall, Slices, UnsliceableError, ordered
from poetmodel.tiling.slices import ChannelLayout, Channels, channels_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from poetmodel.lowered.step import LoweredStep
    from poetmodel.tiling.pieces import Axis, Range

BLOCK: Final = 4
"""Channels that kernels take at once."""
MIN_TILE_BYTES: Final = 4 * BLOCK
"""The size of the smallest slice of real numbers: one element of each channel of a block [B]."""


def tiled(step: LoweredStep, tile_bytes: int) -> LoweredStep:
    """Return a step in which no tensor that can be in slices is larger than so many bytes.

    Tensors that operators take channel by channel are a group, and in the same slices: as few as
    there can be, of multiples of four channels; of an input of bytes single ones. A group without a
    larger tensor stays whole, and so does what a kernel reads or writes that takes no ranges of
    channels.
    """
    (found,) = (tiles for _, tiles in different_tiles(step, (tile_bytes,)))
    return found


def different_tiles(step: LoweredStep, sizes: Iterable[int]) -> Iterator[tuple[int, LoweredStep]]:
    """Yield each size [B] with the step that is `tiled` with it, unless the slices are known.

    A size whose slices are those of an earlier size is left out.
    """
    whole = parted(step)
    known: list[object] = []
    for tile_bytes in sizes:
        kept = set(step.handed_out)
        while True:
            try:
                tiling = _Tiling(whole, tile_bytes, kept)
                if tiling.identity in known:
                    break
                known.append(tiling.identity)
                yield tile_bytes, fused(tiling.step()) if tiling.slices else step
            except UnsliceableError as found:
                kept |= found.buffers
            else:
                break


def tiled_floor_bytes(step: LoweredStep, *, alignment: int, in_place: bool, resident: bool) -> int:
    """Return a lower bound of the RAM that any tiles of a step need [B].

    A call takes at least the smallest slice of each tensor. Calls of the forward pass count alone,
    since fused updates have other gradients. State takes none if it is read `in_place` on storage,
    and all of it is in RAM if it is `resident`. Sizes are rounded up to the alignment.
    """
    tiling = _Tiling(parted(step), 0, set(step.handed_out))
    graph = tiling.graph
    state = {graph.tensors[i].name for i in graph.state_tensors}
    apart = state if in_place or resident else set()
    least = 0
    for node, calls in zip(graph.nodes, tiling.whole.calls, strict=True):
        if node.phase != Phase.FORWARD:
            continue
        over = {new for new, _ in node.in_place} | apart
        for call in calls:
            names = {name for name in call.buffers if name in graph.tensor_index} - over
            sizes = (round_up(tiling.min_slice_bytes(name), alignment) for name in names)
            least = max(least, sum(sizes))
    return least + (graph.state_bytes if resident else 0)


class _Groups:
    """Buffers that are in the same slices."""

    def __init__(self) -> None:
        self._of: dict[str, str] = {}

    def find(self, name: str) -> str:
        while (of := self._of.setdefault(name, name)) != name:
            self._of[name] = self._of[of]
            name = of
        return name

    def join(self, names: Iterable[str]) -> None:
        found = [*map(self.find, names)]
        self._of.update((name, found[0]) for name in found[1:])


class _Tiling:
    """A step that is split into tiles, or an inference beside one whose state is."""

    def __init__(
        self,
        step: LoweredStep,
        tile_bytes: int,
        kept: set[str],
        *,
        beside: _Tiling | None = None,
    ) -> None:
        self.whole, self.graph, self.beside = step, step.graph, beside
        self._kept, self._tile_bytes = kept, tile_bytes
        self._given = {} if beside is None else beside.shared_with(step)
        """The slices of state that is not of this graph."""
        self._channels = [[channels_in(call) for call in calls] for calls in step.calls]
        self._layouts: dict[str, ChannelLayout] = {}
        self._totals: dict[str, int] = {}
        calls = (call for of_node in step.calls for call in of_node if call.kernel == LOOKUP)
        self._converted = {ref.buffer for call in calls for ref in changed(call)}
        """Inputs of bytes, as real numbers."""
        self._find_layouts()
        self._is_free = self._free()
        self._groups = _Groups()
        self.slices = self._found()
        """The slices of each buffer that is in slices."""

    @property
    def identity(self) -> object:
        """What the step in tiles depends on: equal ones make equal steps."""
        groups = {name: self._groups.find(name) for name in self.slices}
        return self.slices, groups, frozenset(self._kept)

    def min_slice_bytes(self, name: str) -> int:
        """Return the size of the smallest first slice that a buffer can have [B]."""
        size = self.whole.buffers[name].bytes
        if name not in self._is_free:
            return size
        block = 1 if name in self._converted else BLOCK
        return size * min(block, channels := self._layouts[name].channels) // channels

    def shared_with(self, inference: LoweredStep) -> dict[str, tuple[Range, ...]]:
        """Return the slices of the state that an inference reads."""
        shared = self.slices.keys() & self.whole.values.keys() & inference.buffers.keys()
        return {name: self.slices[name] for name in shared}

    # -- which buffers have channels, and which of these are in slices -----------------------------

    def _find_layouts(self) -> None:
        """Find how channels lie, from the first dimensions of parameters, and from inputs, on."""
        if self.beside is None:
            for value in self.whole.states:
                (first, *more), shape = value.pieces, value.shape
                whole = self.whole.buffers[first.buffer]
                plain = not more and value.strides is None and first.offset == 0
                if plain and shape and shape[0] > 1 and whole.elements % shape[0] == 0:
                    self._layouts[first.buffer] = ChannelLayout(
                        shape[0], whole.elements // shape[0]
                    )
        else:
            known = self.beside._layouts.items()  # noqa: SLF001 - of the step that it belongs to
            states = {ref.buffer for value in self.beside.whole.states for ref in value.pieces}
            self._layouts.update((name, layout) for name, layout in known if name in states)
        for channels in (c for of_node in self._channels for c in of_node if c is not None):
            self._layouts.update(channels.summed_layouts(self._converted))
        # Products come last: of two factors that have channels a result has those of its weights.
        found = [c for of_node in self._channels for c in of_node if c is not None]
        for calls in ([c for c in found if not c.is_product], found):
            before = -1
            while before != len(self._layouts):
                before = len(self._layouts)
                for channels in calls:
                    self._spread(channels)

    def _spread(self, channels: Channels) -> None:
        """Find the layouts of what a call takes together with what has a known one."""
        refs = channels.loops.refs
        for number, ref in enumerate(refs):
            layout = self._layouts.get(ref.buffer)
            if layout is None or ref.offset:
                continue
            split = channels.split(number, layout)
            d = split.dimension(number, layout)
            if d is None:
                continue
            within = split.loops.sizes[d] // layout.channels
            for other, (of, steps) in enumerate(zip(refs, split.loops.steps, strict=True)):
                if (
                    not steps[d]
                    or of.offset
                    or of.buffer in self._layouts
                    or of.buffer == WORKSPACE
                ):
                    continue
                there = ChannelLayout(layout.channels, within * steps[d])
                total = channels.total(other, self.whole.buffers[of.buffer].elements)
                if total % there.span == 0:
                    self._layouts[of.buffer] = there
                    self._totals[of.buffer] = total

    def _free(self) -> set[str]:
        """Return the buffers that may be in slices: each call takes their channels by ranges."""
        free = {
            name
            for name in self._layouts
            if (name in self.graph.tensor_index) and name not in self._kept
        }
        theirs = set(self._given)
        for node, calls, found in zip(
            self.graph.nodes, self.whole.calls, self._channels, strict=True
        ):
            for call, channels in zip(calls, found, strict=True):
                if channels is None or node.workspace_bytes:
                    stuck = set(call.buffers)
                else:
                    stuck = {
                        ref.buffer
                        for number, ref in enumerate(channels.loops.refs)
                        if ref.buffer in free | theirs and not self._takes(channels, number, ref)
                    }
                    stuck |= set() if call.where is None else {call.where.counter.buffer}
                if theirs & stuck:
                    raise UnsliceableError(stuck)
                free -= stuck
        lying = (v for v in self.whole.states if any(ref.buffer in free for ref in v.pieces))
        for value in lying:
            name = value.pieces[0].buffer
            alone = len(value.pieces) == 1 and value.strides is None
            if not alone or self._layouts[name].span != self.whole.buffers[name].elements:
                free -= {ref.buffer for ref in value.pieces}
        return free | theirs

    def _takes(self, channels: Channels, number: int, ref: Ref) -> bool:
        layout = self._layouts[ref.buffer]
        split = channels.split(number, layout)
        d = split.dimension(number, layout)
        return d is not None and not ref.offset and split.may_part(d)

    def _dimensions(self, channels: Channels) -> tuple[Channels, dict[int, int]]:
        """Return loops with dimensions for the channels of all that may be in slices."""
        for number, ref in enumerate(channels.loops.refs):
            if ref.buffer in self._is_free:
                channels = channels.split(number, self._layouts[ref.buffer])
        found = {}
        for number, ref in enumerate(channels.loops.refs):
            if ref.buffer in self._is_free:
                d = channels.dimension(number, self._layouts[ref.buffer])
                if d is None:
                    raise UnsliceableError({ref.buffer})
                found[number] = d
        return channels, found

    def _found(self) -> dict[str, tuple[Range, ...]]:
        """Return slices: of groups with a tensor that is too large, and of their weights."""
        links, sources = [], set()
        states = {ref.buffer for value in self.whole.states for ref in value.pieces}
        for channels in (c for of_node in self._channels for c in of_node if c is not None):
            split, dimensions = self._dimensions(channels)
            together: dict[int, list[str]] = defaultdict(list)
            for number, d in dimensions.items():
                name = split.loops.refs[number].buffer
                together[d].append(name)
                if split.is_weight(number, is_state=name in states):
                    sources.add(name)
            if split.is_product:
                links += [names for names in together.values() if len(names) > 1]
            else:
                for names in together.values():
                    self._groups.join(names)
        weights = {self._groups.find(name) for name in sources}
        for names in links:
            self._groups.join(n for n in names if self._groups.find(n) not in weights)
        large = {self._groups.find(name) for name in self._is_free if self._is_large(name)}
        large -= weights
        cut = [
            names
            for names in links
            # Slices of shared state are given, such as those of weights and bias of a layer.
            if large & {*map(self._groups.find, names)} or len(self._given.keys() & names) > 1
        ]
        for names in cut:
            self._groups.join(names)
        return dict(self._slices())

    def _is_large(self, name: str) -> bool:
        return self.whole.buffers[name].bytes > self._tile_bytes

    def _slices(self) -> Iterator[tuple[str, tuple[Range, ...]]]:
        members = defaultdict(list)
        for name in sorted(self._is_free):
            members[self._groups.find(name)].append(name)
        for names in members.values():
            block = 1 if self._converted.issuperset(names) else BLOCK
            given = {self._given[name] for name in names if name in self._given}
            channels = self._layouts[names[0]].channels
            most = max(self.whole.buffers[name].bytes for name in names)
            if len(given) > 1:
                raise UnsliceableError(name for name in names if name in self._given)
            if given:
                (ranges,) = given
                yield from ((name, ranges) for name in names)
            elif most > self._tile_bytes and channels > block:
                blocks = -(-channels // block)
                each = max(1, self._tile_bytes * channels // most // block)
                each = -(-blocks // -(-blocks // each)) * block
                if each < channels:
                    ranges = tuple(pairwise((*range(0, channels, each), channels)))
                    yield from ((name, ranges) for name in names)

    # -- the step ----------------------------------------------------------------------------------

    def step(self) -> LoweredStep:
        """Return the step in tiles."""
        whole = self.whole
        slices = Slices(whole=whole, layouts=self._layouts, totals=self._totals, of=self.slices)
        made = [piece for k in range(len(self.graph.nodes)) for piece in self._pieces(slices, k)]
        pieces = ordered(made)
        inference, evaluation = (
            None if part is None else self._beside(part)
            for part in (whole.inference, whole.evaluation)
        )
        return whole.with_nodes(
            (piece.node for piece in pieces),
            (piece.calls for piece in pieces),
            buffers=slices.buffers(),
            states=tuple(map(slices.value, whole.states)),
            values=dict(slices.values()),
            inference=inference,
            evaluation=evaluation,
        )

    def _beside(self, part: LoweredStep) -> LoweredStep:
        """Return a forward pass that reads the state of the step in its slices."""
        return _Tiling(part, self._tile_bytes, self._kept, beside=self).step()

    def _pieces(self, slices: Slices, k: int) -> Iterator[Piece]:
        """Yield the nodes that take the place of a node, in their order."""
        node, calls = self.graph.nodes[k], self.whole.calls[k]
        if node.is_state and node.outputs[0].name in self.slices:
            for tile in slices.names(node.outputs[0].name):
                tensor = Tensor(name=tile, bytes=slices.bytes(tile))
                yield Piece(k=k, node=replace(node, name=tile, outputs=(tensor,)), calls=())
            return
        sliced = [self._sliced(call, c) for call, c in zip(calls, self._channels[k], strict=True)]
        ranges: dict[Axis, tuple[Range, ...]] = {}
        for call in filter(None, sliced):
            ranges.update((call.axes[d], self.slices[name]) for name, d in call.views.values())
        if ranges:
            yield from Expansion(slices, k, sliced, ranges).pieces()
        else:
            yield Piece(k=k, node=node, calls=calls)

    def _sliced(self, call: Call, channels: Channels | None) -> SlicedCall | None:
        """Return what a call has in slices; None where that is nothing."""
        if channels is None or not self.slices.keys() & {*call.buffers}:
            return None
        split, dimensions = self._dimensions(channels)
        refs, written = split.loops.refs, changed(call)
        views: dict[int, tuple[str, int]] = {}
        axes: dict[int, Axis] = {}
        results = {d for number, d in dimensions.items() if refs[number] in written}
        for number, d in dimensions.items():
            name = refs[number].buffer
            if name in self.slices:
                views[number] = name, d
                axis = self._groups.find(name), d in results
                if axis in (of for other, of in axes.items() if other != d):
                    axis = axis[0], not axis[1]
                if axes.setdefault(d, axis)[0] != axis[0]:
                    raise UnsliceableError({name})
        return SlicedCall(channels=split, views=views, axes=axes)
