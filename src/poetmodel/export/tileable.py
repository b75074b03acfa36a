"""Parameters in tiles: which may be split, and the calls of kernels for a tile of a weight."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Final

from poetmodel.export.step import Call, ConvolutionSizes, LoweredStep, Ref, ScaledLearningRate
from poetmodel.graph import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from poetmodel.export.step import Argument, Buffer

    Rule = Callable[[list[Argument], int, "Range"], bool]

BLOCK: Final = 4
"""Channels that kernels take at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tileable:
    """A parameter that is split, and the nodes that this is about."""

    states: tuple[str, ...]
    """It and its moments, alike in shape."""
    counters: tuple[str, ...]
    """What its update replaces beside them: single numbers."""
    gradient: str
    makes: int
    """The node that makes the gradient."""
    updates: int
    """The node that replaces the states."""
    rows: tuple[tuple[int, int], ...]
    """The channels of each tile: first, and after the last."""
    row_elements: int

    def tile(self, name: str, number: int) -> str:
        """Return the name of a tile of what has this name."""
        first, end = self.rows[number]
        return f"{name}[{first}:{end}]"

    def share(self, whole: int, number: int) -> int:
        """Return the share of a tile in an amount; those of all tiles add up to it."""
        first, end = self.rows[number]
        channels = self.rows[-1][1]
        return whole * end // channels - whole * first // channels

    def range(self, number: int) -> Range:
        """Return the channels of a tile."""
        first, end = self.rows[number]
        return Range(
            first=first, count=end - first, channels=self.rows[-1][1], row=self.row_elements
        )

    def elements(self, number: int) -> int:
        """Return how many elements a tile has."""
        first, end = self.rows[number]
        return (end - first) * self.row_elements


def tileable(step: LoweredStep, tile_bytes: int) -> Iterator[Tileable]:
    """Yield the parameters that are larger than a tile and whose every reader takes ranges."""
    graph = step.graph
    values = {value.pieces[0].buffer: value for value in step.states if len(value.pieces) == 1}
    kept = step.handed_out
    for k, node in enumerate(graph.nodes):
        if node.phase != Phase.UPDATE or node.workspace_bytes or node.in_place:
            continue
        replaced = [tensor.replaces for tensor in node.outputs if tensor.replaces is not None]
        single = [name for name in replaced if step.buffers[name].elements == 1]
        states = [name for name in replaced if name not in single]
        if len(replaced) != len(node.outputs) or not states:
            continue
        shapes = {values[name].shape if name in values else None for name in states}
        shape = shapes.pop()
        rows = () if shape is None or shapes else _rows(step.buffers[states[0]], shape, tile_bytes)
        others = (n for n in node.inputs if n not in replaced and n in graph.tensor_index)
        counters = {call.where.counter.buffer for call in step.calls[k] if call.where}
        gradients = [name for name in others if name not in counters]
        if not rows or len(gradients) != 1 or gradients[0] in kept:
            continue
        i = graph.tensor_index[gradients[0]]
        parameter = Tileable(
            states=tuple(states),
            counters=tuple(single),
            gradient=gradients[0],
            makes=graph.node_of[i],
            updates=k,
            rows=rows,
            row_elements=step.buffers[states[0]].elements // rows[-1][1],
        )
        if graph.users_of[i] == (k,) and _splits(step, parameter):
            yield parameter


def _rows(buffer: Buffer, shape: tuple[int, ...], tile_bytes: int) -> tuple[tuple[int, int], ...]:
    if prod(shape) != buffer.elements or buffer.bytes <= tile_bytes or shape[0] == 1:
        return ()
    rows = max(1, tile_bytes // (buffer.bytes // shape[0]))
    rows -= rows % BLOCK if rows > BLOCK else 0
    ends = [*range(0, shape[0], rows), shape[0]]
    return tuple(pairwise(ends))


def _splits(step: LoweredStep, parameter: Tileable) -> bool:
    """Return whether every call that names a parameter, or its gradient, can be split."""
    graph = step.graph
    maker = graph.nodes[parameter.makes]
    whole = {*parameter.states, parameter.gradient}
    if len(maker.outputs) != 1 or maker.in_place or not maker.recomputable:
        return False
    if any(graph.nodes[graph.node_of[i]].is_state for i in graph.inputs_of[parameter.makes]):
        return False
    if step.buffers[parameter.gradient].elements != step.buffers[parameter.states[0]].elements:
        return False
    for k, calls in enumerate(step.calls):
        for call in calls:
            named = [a.buffer for a in call.arguments if isinstance(a, Ref) and a.buffer in whole]
            if k == parameter.makes and parameter.gradient not in named:
                return False
            if k != parameter.updates and named and not parts_of(call, named[0], parameter):
                return False
    for call in (inferring for calls in _inferring(step) for inferring in calls):
        named = [a.buffer for a in call.arguments if isinstance(a, Ref) and a.buffer in whole]
        if named and not parts_of(call, named[0], parameter):
            return False
    return _updates_by_element(step, parameter, whole)


def _inferring(step: LoweredStep) -> tuple[tuple[Call, ...], ...]:
    """Return the calls of the inference of a step, if it has one."""
    return () if step.inference is None else step.inference.calls


def _updates_by_element(step: LoweredStep, p: Tileable, whole: set[str]) -> bool:
    """Return whether an update has calls over all elements, then calls for its counters alone."""
    counted: set[str] = set()
    tiles = {name: p.tile(name, 0) for name in whole}
    for call in step.calls[p.updates]:
        names = {a.buffer for a in call.arguments if isinstance(a, Ref)}
        if names <= set(p.counters):
            counted |= names
        elif (
            names & counted
            or by_element(call, tiles, p.range(0)) is None
            or any(name not in whole and step.buffers[name].elements != 1 for name in names)
        ):
            return False
    return counted == set(p.counters)


def parts_of(call: Call, name: str, p: Tileable) -> tuple[Call, ...]:
    """Return a call as one for each tile; nothing where it cannot be split."""
    parts = [in_range(call, name, p.tile(name, k), p.range(k)) for k in range(len(p.rows))]
    return tuple(part for part in parts if part is not None) if None not in parts else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Some of the output channels of a weight, its first dimension."""

    first: int
    count: int
    channels: int
    """Of the whole weight."""
    row: int
    """Elements of one channel."""


def in_range(call: Call, whole: str, tile: str, part: Range) -> Call | None:
    """Return the part of a call that is about one tile of a weight, or of its gradient.

    The parts of all tiles, in order, do together what the call does. There is none where the kernel
    takes no ranges, or where the call is about something else than the weight as it lies.
    """
    rule = _RULES.get(call.kernel)
    places = [k for k, a in enumerate(call.arguments) if isinstance(a, Ref) and a.buffer == whole]
    if rule is None or len(places) != 1 or call.arguments[places[0]] != Ref(whole):
        return None
    arguments = list(call.arguments)
    if not rule(arguments, places[0], part):
        return None
    arguments[places[0]] = Ref(tile)
    return replace(call, arguments=tuple(arguments))


def by_element(call: Call, tiles: Mapping[str, str], part: Range) -> Call | None:
    """Return the part of an update that is about one tile; `tiles` has its names for the whole.

    Kernels of updates take pointers, then the count of elements, then numbers. All pointers are to
    so many elements, or to single numbers that all parts read.
    """
    refs = [a for a in call.arguments if isinstance(a, Ref)]
    count, *numbers = call.arguments[len(refs) :] or (0,)
    plain = all(isinstance(a, int | float | ScaledLearningRate) for a in numbers)
    whole = all(ref.offset == 0 for ref in refs)
    if not plain or not whole or count != part.channels * part.row:
        return None
    renamed = (Ref(tiles.get(ref.buffer, ref.buffer)) for ref in refs)
    return replace(call, arguments=(*renamed, part.count * part.row, *numbers))


def _advance(arguments: list[Argument], position: int, elements: int) -> None:
    """Let a pointer point to a later element; one that is not there is a number, and stays."""
    ref = arguments[position]
    if isinstance(ref, Ref):
        arguments[position] = Ref(ref.buffer, ref.offset + elements)


# -- convolutions --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Convolution:
    """Where a kernel has what it takes: three tensors, sizes, batch, first channel and count.

    Strided ones have the steps of the three tensors, four each, after the sizes.
    """

    weight: int
    """The weight, or its gradient."""
    result: int
    """The tensor that has the channels too: the output of the layer, or its gradient."""
    sizes: int
    bias: int | None = None
    strided: bool = False
    sums: bool = False
    """Whether it sums over the channels; the last argument then says that it goes on."""

    def __call__(self, arguments: list[Argument], position: int, part: Range) -> bool:
        """Restrict the arguments to a range; return False where that cannot be."""
        listed, first = arguments[self.sizes], self.sizes + 2 + self.strided
        all_channels = arguments[first : first + 2] == [0, part.channels]
        if position != self.weight or not isinstance(listed, tuple) or not all_channels:
            return False
        sizes = ConvolutionSizes(*listed)
        step = sizes.out_plane
        if self.strided:
            steps = arguments[self.sizes + 1]
            if not isinstance(steps, tuple) or steps[4 * self.weight] != part.row:
                return False
            step = steps[4 * self.result + 1]
        if sizes.groups != 1 or sizes.results != part.channels:
            return False
        _advance(arguments, self.result, part.first * step)
        if self.bias is not None:
            _advance(arguments, self.bias, part.first)
        arguments[first : first + 2] = [part.first, part.count]
        if self.sums and part.first:
            arguments[-1] = 1
        return True


# -- products of matrices ------------------------------------------------------------------------

_M, _K, _N, _OUT_ROW, _A_ROW, _A_COLUMN, _B_ROW, _B_COLUMN, _ACCUMULATE = range(3, 12)
"""Places in the arguments of ``pm_mm``, after out, a and b."""


def _product(arguments: list[Argument], position: int, part: Range) -> bool:
    """Restrict a product, of which the weight is a factor or the result, to a range."""
    given = arguments

    def is_whole(size: int, step: int) -> bool:
        return given[size] == part.channels and given[step] == part.row

    def moved(size: int, other: int, step: Argument) -> bool:
        if isinstance(step, int):
            _advance(given, other, part.first * step)
            given[size] = part.count
        return isinstance(step, int)

    match position:
        case 0 if is_whole(_M, _OUT_ROW):
            return moved(_M, 1, given[_A_ROW])
        case 1 if is_whole(_M, _A_ROW):
            return moved(_M, 0, given[_OUT_ROW])
        case 2 if is_whole(_N, _B_COLUMN):
            return moved(_N, 0, 1)
        case 1 | 2 if is_whole(_K, _A_COLUMN if position == 1 else _B_ROW):
            if part.first:
                given[_ACCUMULATE] = 1
            return moved(_K, 3 - position, given[_B_ROW if position == 1 else _A_COLUMN])
    return False


_RULES: Final[dict[str, Rule]] = {
    "pm_conv2d": _Convolution(weight=2, result=0, sizes=4, bias=3),
    "pm_conv2d_strided": _Convolution(weight=2, result=0, sizes=4, bias=3, strided=True),
    "pm_conv2d_dw": _Convolution(weight=0, result=2, sizes=3),
    "pm_conv2d_dw_strided": _Convolution(weight=0, result=2, sizes=3, strided=True),
    "pm_conv2d_dx": _Convolution(weight=2, result=1, sizes=3, sums=True),
    "pm_conv2d_dx_strided": _Convolution(weight=2, result=1, sizes=3, strided=True, sums=True),
    "pm_mm": _product,
}
"""For each kernel what restricts its arguments, given where the weight is among them."""
