"""Which parameters may be split into tiles: all that reads, makes or replaces them takes ranges."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from poetmodel.export.ranges import Range, by_element, in_range
from poetmodel.export.step import Call, Ref, Step
from poetmodel.graph import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.export.step import Buffer


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


def tileable(step: Step, tile_bytes: int) -> Iterator[Tileable]:
    """Yield the parameters that are larger than a tile and whose every reader takes ranges."""
    graph = step.graph
    values = {value.pieces[0].buffer: value for value in step.states if len(value.pieces) == 1}
    kept = {step.loss.buffer, *(ref.buffer for v in step.gradients for ref in v.pieces)}
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
        gradients = [n for n in node.inputs if n not in replaced and n in graph.tensor_index]
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
    each = max(1, tile_bytes // (buffer.bytes // shape[0]))
    ends = [*range(0, shape[0], each), shape[0]]
    return tuple(pairwise(ends))


def _splits(step: Step, parameter: Tileable) -> bool:
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
    for call in (each for calls in _inferring(step) for each in calls):
        named = [a.buffer for a in call.arguments if isinstance(a, Ref) and a.buffer in whole]
        if named and not parts_of(call, named[0], parameter):
            return False
    return _updates_by_element(step, parameter, whole)


def _inferring(step: Step) -> tuple[tuple[Call, ...], ...]:
    """Return the calls of the inference of a step, if it has one."""
    return () if step.inference is None else step.inference.calls


def _updates_by_element(step: Step, p: Tileable, whole: set[str]) -> bool:
    """Return whether an update has calls over all elements, then calls for its counters alone."""
    counted: set[str] = set()
    tiles = {name: p.tile(name, 0) for name in whole}
    for call in step.calls[p.updates]:
        names = {a.buffer for a in call.arguments if isinstance(a, Ref)}
        if names <= set(p.counters):
            counted |= names
        elif (
            counted
            or by_element(call, tiles, p.range(0)) is None
            or any(name not in whole and step.buffers[name].elements != 1 for name in names)
        ):
            return False
    return counted == set(p.counters)


def parts_of(call: Call, name: str, p: Tileable) -> tuple[Call, ...]:
    """Return a call as one for each tile; nothing where it cannot be split."""
    found = [in_range(call, name, p.tile(name, k), p.range(k)) for k in range(len(p.rows))]
    return tuple(part for part in found if part is not None) if None not in found else ()
