"""Tiles: what is larger than a size, parameters and activations alike, in slices of channels.

Operators that act on channels act on slices of them, one after the other. A convolution, or a
product with a weight, makes a slice of its results from all that it reads; what it sums over slices
of what it reads goes on from slice to slice. So every sum has the order, and the bits, of the step
that is not in tiles.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING, Final, TypeAlias

from poetmodel.export.fusing import fused, parted
from poetmodel.export.kernels import changed
from poetmodel.export.slices import Channels, Layout, View, channels_in
from poetmodel.export.step import WORKSPACE, Buffer, Call, DataType, LoweredStep, NamedTensor, Ref
from poetmodel.graph import Node, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np

    Range: TypeAlias = tuple[int, int]
    Axis: TypeAlias = tuple[str, bool]
    """A group, and whether its slices are results of a node, or what it reads or adds to."""

BLOCK: Final = 4
"""Channels that kernels take at once."""


def tiled(step: LoweredStep, tile_bytes: int) -> LoweredStep:
    """Return a step in which no tensor that can be in slices is larger than so many bytes.

    Tensors that operators take channel by channel are a group, and in the same slices: as few as
    there can be, of multiples of four channels. A group without a larger tensor stays whole, and so
    does what a kernel reads or writes that takes no ranges of channels.
    """
    whole, kept = parted(step), set(step.handed_out)
    while True:
        try:
            tiling = _Tiling(whole, tile_bytes, kept)
            return fused(tiling.step()) if tiling.slices else step
        except _Unsliceable as found:
            kept |= found.buffers


class _Unsliceable(Exception):  # noqa: N818 - no error: what is in the way stays whole
    """A node whose calls are not those of its slices."""

    def __init__(self, buffers: Iterable[str]) -> None:
        super().__init__()
        self.buffers = frozenset(buffers)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sliced:
    """A call whose tensors are in slices."""

    call: Call
    channels: Channels
    views: Mapping[int, tuple[str, int]]
    """Which tensors are in slices: their buffers, and the dimensions of their channels."""
    axes: Mapping[int, Axis]
    """What goes over each of these dimensions."""


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
        self._layouts: dict[str, Layout] = {}
        self._totals: dict[str, int] = {}
        self._find_layouts()
        self._is_free = self._free()
        self._groups = _Groups()
        self.slices = self._found()
        """The slices of each buffer that is in slices."""
        self._most: dict[str, int] = defaultdict(int)
        """Bytes of the largest buffer of each group."""
        for name in self.slices:
            group = self._groups.find(name)
            self._most[group] = max(self._most[group], self.whole.buffers[name].bytes)
        self._partials: dict[str, Buffer] = {}
        """What chains make before their last links."""
        self._sizes = {tensor.name: tensor.bytes for tensor in self.graph.tensors}
        for name, parts in self.slices.items():
            self._sizes.update((self._name(name, p), self._buffer(name, p).bytes) for p in parts)

    def shared_with(self, inference: LoweredStep) -> dict[str, tuple[Range, ...]]:
        """Return the slices of the state that an inference reads."""
        shared = self.slices.keys() & self.whole.values.keys() & inference.buffers.keys()
        return {name: self.slices[name] for name in shared}

    # -- which buffers have channels, and which of these are in slices -------------------------------

    def _find_layouts(self) -> None:
        """Find how channels lie, from the first dimensions of parameters on."""
        if self.beside is None:
            for value in self.whole.states:
                (first, *more), shape = value.pieces, value.shape
                whole = self.whole.buffers[first.buffer]
                plain = not more and value.strides is None and first.offset == 0
                if plain and shape and shape[0] > 1 and whole.elements % shape[0] == 0:
                    self._layouts[first.buffer] = Layout(shape[0], whole.elements // shape[0])
        else:
            known = self.beside._layouts.items()  # noqa: SLF001 - of the step that it belongs to
            self._layouts.update((name, layout) for name, layout in known if name in self._given)
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
            d = None
            if layout is not None and not ref.offset:
                split = channels.split(number, layout)
                d = split.dimension(number, layout)
            if layout is None or d is None:
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
                there = Layout(layout.channels, within * steps[d])
                total = channels.total(other, self.whole.buffers[of.buffer].elements)
                if total % there.span == 0:
                    self._layouts[of.buffer] = there
                    self._totals[of.buffer] = total

    def _total(self, name: str) -> int:
        """Return the elements of a buffer: bits, of a mask."""
        return self._totals.get(name, self.whole.buffers[name].elements)

    def _free(self) -> set[str]:
        """Return the buffers that may be in slices: those that each call takes channel by channel."""
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
                    raise _Unsliceable(stuck)
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
                    raise _Unsliceable({ref.buffer})
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
        cut = [names for names in links if large & {*map(self._groups.find, names)}]
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
            given = {self._given[name] for name in names if name in self._given}
            channels = self._layouts[names[0]].channels
            most = max(self.whole.buffers[name].bytes for name in names)
            if len(given) > 1:
                raise _Unsliceable(name for name in names if name in self._given)
            if given:
                yield from ((name, *given) for name in names)
            elif most > self._tile_bytes and channels > BLOCK:
                blocks = -(-channels // BLOCK)
                each = max(1, self._tile_bytes * channels // most // BLOCK)
                each = -(-blocks // -(-blocks // each)) * BLOCK
                if each < channels:
                    ranges = tuple(pairwise((*range(0, channels, each), channels)))
                    yield from ((name, ranges) for name in names)

    # -- the step ------------------------------------------------------------------------------------

    def step(self) -> LoweredStep:
        """Return the step in tiles."""
        whole, inference = self.whole, self.whole.inference
        made = [piece for k in range(len(self.graph.nodes)) for piece in self._pieces(k)]
        nodes = [(piece.node, piece.calls) for piece in _ordered(made)]
        if inference is not None:
            beside = _Tiling(inference, self._tile_bytes, self._kept, beside=self)
            inference = beside.step()
        return whole.with_nodes(
            (node for node, _ in nodes),
            (calls for _, calls in nodes),
            buffers={**dict(self._buffers()), **self._partials},
            states=tuple(map(self._value, whole.states)),
            values=dict(self._values()),
            inference=inference,
        )

    def _name(self, name: str, part: Range | None) -> str:
        return name if part is None else name + _text(part)

    def _bytes(self, name: str, part: Range | None) -> int:
        return self._buffer(name, part).bytes

    def _buffer(self, name: str, part: Range | None) -> Buffer:
        buffer = self.whole.buffers[name]
        if part is None:
            return buffer
        total = self._total(name)
        elements = total // self._layouts[name].channels * (part[1] - part[0])
        if total != buffer.elements:
            elements = -(-elements // (-(-total // buffer.elements)))
        return replace(buffer, elements=elements)

    def _buffers(self) -> Iterator[tuple[str, Buffer]]:
        for name, buffer in self.whole.buffers.items():
            for part in self.slices.get(name, ()):
                yield self._name(name, part), self._buffer(name, part)
            if name not in self.slices:
                yield name, buffer

    def _values(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, values in self.whole.values.items():
            step = self._layouts[name].step if name in self.slices else 0
            for first, end in self.slices.get(name, ()):
                yield self._name(name, (first, end)), values[first * step : end * step]
            if name not in self.slices:
                yield name, values

    def _value(self, value: NamedTensor) -> NamedTensor:
        name = value.pieces[0].buffer
        parts = self.slices.get(name)
        pieces = parts and tuple(Ref(self._name(name, part)) for part in parts)
        return replace(value, pieces=pieces) if pieces else value

    # -- nodes ---------------------------------------------------------------------------------------

    def _sliced(self, call: Call, channels: Channels | None) -> _Sliced | None:
        """Return what a call has in slices; None where that is nothing."""
        if channels is None or not self.slices.keys() & {*call.buffers}:
            return None
        split, dimensions = self._dimensions(channels)
        refs, written = split.loops.refs, changed(call)
        views, axes = {}, {}
        results = {d for number, d in dimensions.items() if refs[number] in written}
        for number, d in dimensions.items():
            name = refs[number].buffer
            if name in self.slices:
                views[number] = name, d
                axis = self._groups.find(name), d in results
                if axis in (of for other, of in axes.items() if other != d):
                    axis = axis[0], not axis[1]
                if axes.setdefault(d, axis)[0] != axis[0]:
                    raise _Unsliceable({name})
        return _Sliced(call=call, channels=split, views=views, axes=axes)

    def _pieces(self, k: int) -> Iterator[_Piece]:
        """Yield the nodes that take the place of a node, in their order."""
        node, calls = self.graph.nodes[k], self.whole.calls[k]
        if node.is_state and node.outputs[0].name in self.slices:
            name = node.outputs[0].name
            for part in self.slices[name]:
                tile = self._name(name, part)
                tensor = Tensor(name=tile, bytes=self._bytes(name, part))
                yield _Piece(k, replace(node, name=tile, outputs=(tensor,)), ())
            return
        sliced = [self._sliced(call, c) for call, c in zip(calls, self._channels[k], strict=True)]
        ranges: dict[Axis, tuple[Range, ...]] = {}
        for call in filter(None, sliced):
            for name, d in call.views.values():
                ranges[call.axes[d]] = self.slices[name]
        if not ranges:
            yield _Piece(k, node, calls)
            return
        yield from self._expanded(k, sliced, ranges)

    def _expanded(
        self, k: int, sliced: Sequence[_Sliced | None], ranges: Mapping[Axis, tuple[Range, ...]]
    ) -> Iterator[_Piece]:
        """Yield a node for each slice of results, and for each of what they are sums over."""
        node, calls = self.graph.nodes[k], self.whole.calls[k]
        stuck = _Unsliceable(n for call in calls for n in call.buffers if n in self.slices)
        axes = sorted(ranges, key=lambda axis: not axis[1])
        using = {a: [j for j, s in enumerate(sliced) if s and a in s.axes.values()] for a in axes}
        if any(js[-1] - js[0] >= len(js) for js in using.values()):
            raise stuck
        parts: list[tuple[dict[Axis, int], list[Call]]] = []
        for index in product(*(range(len(ranges[axis])) for axis in axes)):
            at, mine = dict(zip(axes, index, strict=True)), []
            for j, (call, own) in enumerate(zip(calls, sliced, strict=True)):
                others = (axis for axis in axes if own is None or axis not in own.axes.values())
                # What has no slices comes with the first one of what comes after it, or the last.
                if all(at[a] == (0 if j < using[a][0] else len(ranges[a]) - 1) for a in others):
                    part = {axis: ranges[axis][n] for axis, n in at.items()}
                    made = call if own is None else self._part(own, part)
                    if made is None:
                        raise stuck
                    mine.append(made)
            parts.append((at, mine))
        units = {
            self._name(name, part): (tensor, name, part)
            for tensor in node.outputs
            for name in [tensor.replaces or tensor.name]
            for part in self.slices.get(name, (None,))
        }
        writers = {unit: [len(parts) - 1] for unit in units}
        for unit in units:
            by = [p for p, (_, of) in enumerate(parts) if unit in _written(of)]
            writers[unit] = by or writers[unit]
            if len(by) > 1 and units[unit][0].replaces is not None:
                raise stuck

        def version(unit: str, p: int) -> str:
            """Return the name of a result after a part."""
            by = [q for q in writers[unit] if q <= p]
            if not by:
                raise stuck
            if by[-1] == writers[unit][-1]:
                return unit
            at, last = parts[by[-1]][0], parts[writers[unit][-1]][0]
            first = parts[writers[unit][0]][0]
            ends = (ranges[a][n][1] for a, n in at.items() if first[a] != last[a])
            return unit + "".join(f"[:{end}]" for end in ends)

        named = {name for call in calls for name in call.buffers}
        flops = _shares(node.flops, axes, ranges)
        for p, (at, mine) in enumerate(parts):
            written = [unit for unit in units if p in writers[unit]]
            now = {
                name: version(name, p)
                for call in mine
                for name in call.buffers
                if name in units and units[name][0].replaces is None
            }
            calls_now = [_renamed(call, now) for call in mine]
            pairs, outputs = [], []
            for unit in written:
                tensor, name, part = units[unit]
                new, buffer = now.get(unit, unit), self._buffer(name, part)
                if new != unit:
                    self._partials[new], self._sizes[new] = buffer, buffer.bytes
                if p != writers[unit][0]:
                    old = version(unit, p - 1)
                    copy = (Ref(new), Ref(old), (1, buffer.elements, 1, 1))
                    calls_now.insert(0, Call(f"pm_copy{_COPIES[buffer.type]}", copy))
                    pairs.append((new, old))
                elif writers[unit] == [p] and part is not None:
                    pairs += [
                        (unit, self._name(x, part))
                        for y, x in node.in_place
                        if y == name and self.slices.get(x) == self.slices[name]
                    ]
                replaced = None if tensor.replaces is None else unit
                called = new if replaced is None else f"{unit}+"
                outputs.append(
                    tensor
                    if part is None and new == unit
                    else Tensor(name=called, bytes=buffer.bytes, replaces=replaced)
                )
            read = {name for call in calls_now for name in call.buffers}
            inputs = [
                tile
                for name in node.inputs
                for tile in (self._name(name, part) for part in self.slices.get(name, (None,)))
                if tile in read or name not in named
            ]
            made = {tensor.name for tensor in outputs}
            inputs += [now[u] for u in now if now[u] not in made] + [old for _, old in pairs]
            inputs = list(dict.fromkeys(inputs))
            yield _Piece(
                k,
                replace(
                    node,
                    name=node.name + "".join(_text(ranges[a][n]) for a, n in at.items()),
                    inputs=tuple(inputs),
                    outputs=tuple(outputs),
                    flops=flops[p],
                    bytes_moved=self._moved(node, flops[p], inputs, outputs),
                    in_place=tuple(pairs),
                ),
                tuple(calls_now),
                *self._place(ranges, at),
            )

    def _part(self, own: _Sliced, part: Mapping[Axis, Range]) -> Call | None:
        """Return a call for some channels; None if there is none."""
        ranges, views, names = {}, {}, {}
        for number, (name, d) in own.views.items():
            layout, (first, end) = self._layouts[name], part[own.axes[d]]
            ranges[d] = first, end, layout.channels
            views[number] = View(layout=layout, dimension=d, first=first, count=end - first)
            names[number] = self._name(name, (first, end))
        call = own.channels.part(ranges, views)
        if call is None:
            return None
        refs = iter(range(len(call.arguments)))
        arguments = (
            Ref(names.get(next(refs), a.buffer), a.offset) if isinstance(a, Ref) else a
            for a in call.arguments
        )
        return replace(call, arguments=tuple(arguments))

    def _moved(
        self, node: Node, flops: int, inputs: Sequence[str], outputs: Sequence[Tensor]
    ) -> int | None:
        """Return the traffic of a slice of a node: its tensors, and what the node moves besides."""
        if node.bytes_moved is None:
            return None
        own = sum(self._sizes[name] for name in (*node.inputs, *(t.name for t in node.outputs)))
        beside = max(0, node.bytes_moved - own) * flops // max(1, node.flops)
        return beside + sum(map(self._sizes.__getitem__, inputs)) + sum(t.bytes for t in outputs)

    # -- the order -----------------------------------------------------------------------------------

    def _place(
        self, ranges: Mapping[Axis, tuple[Range, ...]], at: Mapping[Axis, int]
    ) -> tuple[str, int]:
        """Return the group whose slices come one after the other, the larger one, and the slice."""
        axis = max(ranges, key=lambda axis: (self._most[axis[0]], not axis[1]))
        return axis[0], at[axis]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A node of the step in tiles."""

    k: int
    """The node of the whole step."""
    node: Node
    calls: tuple[Call, ...]
    group: str = ""
    number: int = -1
    """Which slice of the group."""


def _ordered(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Return nodes in an order in which runs of operators on a group go slice by slice.

    State comes before its first reader, and what replaces it after all others.
    """
    run, group = 0, ""
    keys = {}
    for p, piece in enumerate(sorted(pieces, key=lambda piece: piece.k)):
        if piece.group and piece.group != group:
            run, group = run + 1, piece.group
        keys[p] = run, piece.number, piece.k, p
    makers = {t.name: p for p, piece in enumerate(pieces) for t in piece.node.outputs}
    readers = defaultdict(set)
    for p, piece in enumerate(pieces):
        for name in piece.node.inputs:
            readers[name].add(p)
    after: dict[int, set[int]] = defaultdict(set)
    for p, piece in enumerate(pieces):
        before = {makers[name] for name in piece.node.inputs if name in makers}
        for tensor in piece.node.outputs:
            before |= readers[tensor.replaces] if tensor.replaces else set()
        for q in before - {p}:
            if not pieces[q].node.is_state:
                after[q].add(p)
    left = dict.fromkeys(range(len(pieces)), 0)
    for following in after.values():
        for p in following:
            left[p] += 1
    ready = [keys[p] for p in left if not left[p] and not pieces[p].node.is_state]
    heapq.heapify(ready)
    order: dict[int, None] = {}
    while ready:
        p = heapq.heappop(ready)[-1]
        state = (makers[name] for name in pieces[p].node.inputs if name in makers)
        order.update(dict.fromkeys(q for q in state if pieces[q].node.is_state))
        order[p] = None
        for q in after[p]:
            left[q] -= 1
            if not left[q]:
                heapq.heappush(ready, keys[q])
    order.update(dict.fromkeys(left))
    return [pieces[p] for p in order]


def _written(calls: Iterable[Call]) -> set[str]:
    return {ref.buffer for call in calls for ref in changed(call)}


def _renamed(call: Call, names: Mapping[str, str]) -> Call:
    arguments = (
        Ref(names.get(a.buffer, a.buffer), a.offset) if isinstance(a, Ref) else a
        for a in call.arguments
    )
    return replace(call, arguments=tuple(arguments))


def _shares(
    whole: int, axes: Sequence[Axis], ranges: Mapping[Axis, tuple[Range, ...]]
) -> list[int]:
    """Return the shares of parts in an amount, which add up to it."""
    shares = [whole]
    for axis in axes:
        channels = ranges[axis][-1][1]
        shares = [
            share * end // channels - share * first // channels
            for share in shares
            for first, end in ranges[axis]
        ]
    return shares


def _text(part: Range) -> str:
    return f"[{part[0]}:{part[1]}]"


_COPIES: Final = {DataType.REAL: "", DataType.INT32: "_int", DataType.UINT8: "_byte"}
"""The ends of the names of kernels that copy."""
