"""Nodes of a step in tiles: what takes the place of a node, and in which order all of them go."""

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
    """A group, and whether its slices are results of a node, or what it reads or adds to."""


class UnsliceableError(Exception):
    """A node whose calls are not those of its slices: what is in the way stays whole."""

    def __init__(self, buffers: Iterable[str]) -> None:
        super().__init__()
        self.buffers = frozenset(buffers)


@dataclass(frozen=True, kw_only=True)
class Slices:
    """The buffers of a step that are in slices of channels."""

    whole: LoweredStep
    layouts: Mapping[str, ChannelLayout]
    totals: Mapping[str, int]
    """Of masks: how many bits they have."""
    of: Mapping[str, tuple[Range, ...]]
    """The first channel of each slice, and the one after its last."""
    partials: dict[str, Buffer] = field(default_factory=dict)
    """What chains make before their last links."""

    def parts(self, name: str) -> tuple[Range | None, ...]:
        """Return the slices of a buffer; None for one that is whole."""
        return self.of.get(name, (None,))

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names of the slices of a buffer, or that of a whole buffer."""
        return self._names.get(name, (name,))

    @cached_property
    def _names(self) -> dict[str, tuple[str, ...]]:
        return {
            name: tuple(self.name(name, part) for part in parts) for name, parts in self.of.items()
        }

    def name(self, name: str, part: Range | None) -> str:
        """Return what a slice is called."""
        return name if part is None else name + _text(part)

    def buffer(self, name: str, part: Range | None) -> Buffer:
        """Return the buffer of a slice."""
        whole = self.whole.buffers[name]
        if part is None:
            return whole
        total = self.totals.get(name, whole.elements)
        elements = total // self.layouts[name].channels * (part[1] - part[0])
        if total != whole.elements:
            elements = -(-elements // BYTE)
        return replace(whole, elements=elements)

    def buffers(self) -> dict[str, Buffer]:
        """Return all buffers of the step in tiles."""
        split = ((n, part) for n in self.whole.buffers for part in self.parts(n))
        return {self.name(n, part): self.buffer(n, part) for n, part in split} | self.partials

    def values(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the values of state and constants, by the names of slices."""
        for name, values in self.whole.values.items():
            for part in self.parts(name):
                step = self.layouts[name].step if part else 0
                yield (
                    self.name(name, part),
                    values[part[0] * step : part[1] * step] if part else values,
                )

    def value(self, value: NamedTensor) -> NamedTensor:
        """Return a tensor that users see, in slices if its buffer is."""
        name = value.pieces[0].buffer
        return (
            replace(value, pieces=tuple(map(Ref, self.names(name)))) if name in self.of else value
        )

    @cached_property
    def _sizes(self) -> dict[str, int]:
        sizes = {tensor.name: tensor.bytes for tensor in self.whole.graph.tensors}
        for name, parts in self.of.items():
            sizes.update((self.name(name, part), self.buffer(name, part).bytes) for part in parts)
        return sizes

    def bytes(self, name: str) -> int:
        """Return the size of a tensor, a slice, or a link of a chain [B]."""
        return self.partials[name].bytes if name in self.partials else self._sizes[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedCall:
    """A call some of whose tensors are in slices."""

    channels: Channels
    views: Mapping[int, tuple[str, int]]
    """Which tensors are in slices: their buffers, and the dimensions of their channels."""
    axes: Mapping[int, Axis]
    """What goes over each of these dimensions."""

    def part(self, slices: Slices, of: Mapping[Axis, Range]) -> Call | None:
        """Return the call for some channels; None if there is none."""
        ranges, views, names = {}, {}, {}
        for number, (name, d) in self.views.items():
            layout, (first, end) = slices.layouts[name], of[self.axes[d]]
            ranges[d] = first, end, layout.channels
            views[number] = View(layout=layout, dimension=d, first=first, count=end - first)
            names[number] = slices.name(name, (first, end))
        call = self.channels.part(ranges, views)
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
    """The node of the whole step."""
    node: Node
    calls: tuple[Call, ...]
    group: str = ""
    number: int = -1
    """Which slice of the group."""


@dataclass(frozen=True, slots=True)
class _PieceCalls:
    """What a node computes for a slice on each of its axes."""

    at: Mapping[Axis, int]
    calls: tuple[Call, ...]

    @property
    def written(self) -> set[str]:
        return {ref.buffer for call in self.calls for ref in written_refs(call)}


class Expansion:
    """The nodes that take the place of one whose tensors are in slices.

    There is one for each slice of results, and for each of what they are sums over. Those that
    write to the same tensor are a chain, in which each goes on in the memory of the one before.
    """

    def __init__(
        self,
        slices: Slices,
        k: int,
        sliced: Sequence[SlicedCall | None],
        ranges: Mapping[Axis, tuple[Range, ...]],
    ) -> None:
        self._slices, self._k, self._sliced, self._ranges = slices, k, sliced, ranges
        self._node, self._calls = slices.whole.graph.nodes[k], slices.whole.calls[k]
        self._axes = sorted(ranges, key=lambda axis: not axis[1])
        self._parts = list(self._made_parts())
        self._units = {
            slices.name(name, part): (tensor, name, part)
            for tensor in self._node.outputs
            for name in [tensor.replaces or tensor.name]
            for part in slices.parts(name)
        }
        """The slices of results: tensors of the whole step, their buffers and channels."""
        self._writers = self._found_writers()
        """The parts that write to each."""

    @property
    def _stuck(self) -> UnsliceableError:
        named = {name for call in self._calls for name in call.buffers}
        return UnsliceableError(named & self._slices.of.keys())

    def _made_parts(self) -> Iterator[_PieceCalls]:
        using = {
            axis: [j for j, call in enumerate(self._sliced) if call and axis in call.axes.values()]
            for axis in self._axes
        }
        if any(js[-1] - js[0] >= len(js) for js in using.values()):
            raise self._stuck
        for index in product(*(range(len(self._ranges[axis])) for axis in self._axes)):
            at, calls = dict(zip(self._axes, index, strict=True)), []
            of = {axis: self._ranges[axis][n] for axis, n in at.items()}
            for j, (call, own) in enumerate(zip(self._calls, self._sliced, strict=True)):
                others = at.keys() - (own.axes.values() if own else ())
                # What has no slices comes with the first of those of what follows, or the last.
                last = {axis: len(self._ranges[axis]) - 1 for axis in others}
                if all(at[axis] == (0 if j < using[axis][0] else last[axis]) for axis in others):
                    made = own.part(self._slices, of) if own else call
                    if made is None:
                        raise self._stuck
                    calls.append(made)
            yield _PieceCalls(at, tuple(calls))

    def _found_writers(self) -> dict[str, list[int]]:
        writers: dict[str, list[int]] = {unit: [] for unit in self._units}
        for p, part in enumerate(self._parts):
            for unit in part.written & writers.keys():
                writers[unit].append(p)
        if any(len(ps) > 1 and self._units[u][0].replaces is not None for u, ps in writers.items()):
            raise self._stuck
        return {unit: parts or [len(self._parts) - 1] for unit, parts in writers.items()}

    def _version(self, unit: str, p: int) -> str:
        """Return the name of a result after a part."""
        writers = self._writers[unit]
        before = [q for q in writers if q <= p]
        if not before:
            raise self._stuck
        if before[-1] == writers[-1]:
            return unit
        first, here, last = (self._parts[q].at for q in (writers[0], before[-1], writers[-1]))
        ends = (self._ranges[a][n][1] for a, n in here.items() if first[a] != last[a])
        return unit + "".join(f"[:{end}]" for end in ends)

    def pieces(self) -> Iterator[Piece]:
        """Yield the nodes, in their order."""
        # The group whose slices come one after the other is the larger one.
        group = max(self._axes, key=lambda axis: (self._largest(axis), not axis[1]))
        flops = _shares(self._node.flops, [self._ranges[axis] for axis in self._axes])
        for p, part in enumerate(self._parts):
            node, calls = self._piece(p, flops[p])
            yield Piece(k=self._k, node=node, calls=calls, group=group[0], number=part.at[group])

    def _largest(self, axis: Axis) -> int:
        """Return the size of the largest tensor on an axis [B]."""
        calls = [call for call in self._sliced if call]
        named = (n for c in calls for n, d in c.views.values() if c.axes[d] == axis)
        return max(self._slices.whole.buffers[name].bytes for name in named)

    def _piece(self, p: int, flops: int) -> tuple[Node, tuple[Call, ...]]:
        node, part = self._node, self._parts[p]
        now = {
            name: self._version(name, p)
            for call in part.calls
            for name in call.buffers
            if name in self._units and self._units[name][0].replaces is None
        }
        calls = [call.with_buffers(now) for call in part.calls]
        pairs, outputs = [], []
        for unit in (unit for unit, writers in self._writers.items() if p in writers):
            tensor, name, of = self._units[unit]
            new, buffer = now.get(unit, unit), self._slices.buffer(name, of)
            if new != unit:
                self._slices.partials[new] = buffer
            if p != self._writers[unit][0]:
                old = self._version(unit, p - 1)
                copy = (Ref(new), Ref(old), (1, buffer.elements, 1, 1))
                calls.insert(0, Call(f"pm_copy{_COPIES[buffer.type]}", copy))
                pairs.append((new, old))
            elif self._writers[unit] == [p] and of is not None:
                pairs += self._taken_over(name, of)
            outputs.append(_output(tensor, new, unit, buffer.bytes))
        inputs = self._inputs(calls)
        made = {tensor.name for tensor in outputs}
        inputs += [now[unit] for unit in now if now[unit] not in made]
        inputs = list(dict.fromkeys((*inputs, *(old for _, old in pairs))))
        label = "".join(_text(self._ranges[axis][n]) for axis, n in part.at.items())
        moved = self._moved(flops, inputs, outputs)
        return replace(
            node,
            name=node.name + label,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            flops=flops,
            bytes_moved=moved,
            in_place=tuple(pairs),
        ), tuple(calls)

    def _taken_over(self, name: str, part: Range) -> list[tuple[str, str]]:
        """Return the slice of a result with that of an input whose memory it may take over."""
        slices = self._slices
        return [
            (slices.name(name, part), slices.name(x, part))
            for y, x in self._node.in_place
            if y == name and slices.of.get(x) == slices.of[name]
        ]

    def _inputs(self, calls: Iterable[Call]) -> list[str]:
        """Return what calls read of the inputs of the node, and what none of its calls names."""
        read = {name for call in calls for name in call.buffers}
        named = {name for call in self._calls for name in call.buffers}
        return [
            tile
            for name in self._node.inputs
            for tile in self._slices.names(name)
            if tile in read or name not in named
        ]

    def _moved(self, flops: int, inputs: Sequence[str], outputs: Sequence[Tensor]) -> int | None:
        """Return the traffic of a part: its tensors, and a share of what the node moves besides."""
        node, size = self._node, self._slices.bytes
        if node.bytes_moved is None:
            return None
        own = sum(map(size, node.inputs)) + sum(tensor.bytes for tensor in node.outputs)
        beside = max(0, node.bytes_moved - own) * flops // max(1, node.flops)
        return beside + sum(map(size, inputs)) + sum(tensor.bytes for tensor in outputs)


def _output(tensor: Tensor, new: str, unit: str, size: int) -> Tensor:
    """Return a result: of the whole step, a slice of it, or what a link of a chain makes."""
    if tensor.replaces is None:
        return Tensor(name=new, bytes=size)
    name = tensor.name if unit == tensor.replaces else f"{unit}+"
    return Tensor(name=name, bytes=size, replaces=unit)


def _shares(whole: int, axes: Iterable[Sequence[Range]]) -> list[int]:
    """Return the shares of parts in an amount, which add up to it."""
    shares = [whole]
    for ranges in axes:
        channels = ranges[-1][1]
        shares = [
            share * end // channels - share * first // channels
            for share in shares
            for first, end in ranges
        ]
    return shares


def _text(part: Range) -> str:
    return f"[{part[0]}:{part[1]}]"


# -- the order -------------------------------------------------------------------------------------


def ordered(pieces: Sequence[Piece]) -> list[Piece]:
    """Return nodes in an order in which runs of operators on a group go slice by slice.

    State comes before its first reader, and what replaces it after all others.
    """
    keys = _keys(pieces)
    makers = {t.name: p for p, piece in enumerate(pieces) for t in piece.node.outputs}
    after, left = _dependencies(pieces, makers)
    states = {p for p, piece in enumerate(pieces) if piece.node.is_state}
    ready = [keys[p] for p in range(len(pieces)) if not left[p] and p not in states]
    heapq.heapify(ready)
    order: dict[int, None] = {}
    while ready:
        p = heapq.heappop(ready)[-1]
        read = (makers[name] for name in pieces[p].node.inputs if name in makers)
        order.update(dict.fromkeys(q for q in read if q in states))
        order[p] = None
        for q in after[p]:
            left[q] -= 1
            if not left[q]:
                heapq.heappush(ready, keys[q])
    order.update(dict.fromkeys(range(len(pieces))))
    return [pieces[p] for p in order]


def _keys(pieces: Sequence[Piece]) -> list[tuple[int, ...]]:
    """Return what nodes are ordered by: runs of one group, its slices, then as they come."""
    run, group = 0, ""
    keys: list[tuple[int, ...]] = []
    for p, piece in enumerate(pieces):
        if piece.group and piece.group != group:
            run, group = run + 1, piece.group
        keys.append((run, piece.number, piece.k, p))
    return keys


def _dependencies(
    pieces: Sequence[Piece], makers: Mapping[str, int]
) -> tuple[Mapping[int, set[int]], list[int]]:
    """Return what comes after each node, state aside, and how many come before each."""
    readers = defaultdict(set)
    for p, piece in enumerate(pieces):
        for name in piece.node.inputs:
            readers[name].add(p)
    after: dict[int, set[int]] = defaultdict(set)
    left = [0] * len(pieces)
    for p, piece in enumerate(pieces):
        before = {makers[name] for name in piece.node.inputs if name in makers}
        replaced = (t.replaces for t in piece.node.outputs if t.replaces is not None)
        before.update(q for name in replaced for q in readers[name])
        for q in before - {p}:
            if not pieces[q].node.is_state:
                after[q].add(p)
                left[p] += 1
    return after, left


_COPIES: Final = {
    DataType.REAL: "", DataType.INT32: "_int", DataType.UINT8: "_byte", DataType.INT8: "_int8",
}  # fmt: skip
"""The ends of the names of kernels that copy."""
