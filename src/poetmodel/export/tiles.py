"""Parameters in tiles: pieces along the output channels, each a state tensor of its own.

A tile has a gradient of its own and an update of its own, so that no node of the step needs a
weight and its gradient whole. The kernels of layers take ranges of channels; what they sum over
the channels of the output goes on from tile to tile, in the order of one call over all.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

from poetmodel.export.fusing import fused, parted
from poetmodel.export.step import Call, LoweredStep, NamedTensor, Ref
from poetmodel.export.tileable import Tileable, by_element, parts_of, tileable
from poetmodel.graph import Node, Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np

    from poetmodel.export.step import Buffer

_COUNT_FLOPS: Final = 1
"""FLOP to count a step."""


def tiled(step: LoweredStep, tile_bytes: int) -> LoweredStep:
    """Return a step with every larger parameter that it trains in tiles, and its moments likewise.

    A tile is whole output channels, the first dimension, and at most `tile_bytes` unless one
    channel is more. A parameter stays whole where something reads it that takes no range of
    channels: an embedding, a weight that layers share, a depthwise convolution, a gradient that is
    clipped.

    A node that reads a parameter reads all of its tiles, one call for each. Where such nodes alone
    need the most RAM, each becomes a chain of nodes that read one tile each, and write on in the
    memory of the result so far.
    """
    whole = parted(step)
    parameters = tuple(tileable(whole, tile_bytes))
    if not parameters:
        return step
    tiling = _Tiling(whole, parameters)
    in_tiles = tiling.step()
    largest = tiling.largest_readers(in_tiles)
    return fused(_Tiling(whole, parameters, chained=largest).step() if largest else in_tiles)


class _Tiling:
    """A step that is split into tiles."""

    def __init__(
        self, step: LoweredStep, parameters: Sequence[Tileable], *, chained: Mapping[int, str] = {}
    ) -> None:
        self.whole = step
        self.chained = chained
        """Nodes that become chains, each with the parameter that it reads."""
        self.graph = step.graph
        self.parameters = parameters
        self.of = {name: p for p in parameters for name in p.states}
        """The parameter that each split state tensor belongs to."""
        self._of_gradient = {p.gradient: p for p in parameters}
        self._moved = {
            self.graph.node_of[self.graph.tensor_index[name]]
            for p in parameters
            for name in (*p.states, *p.counters)
            if self.graph.users_of[self.graph.tensor_index[name]] == (p.updates,)
        }
        """State that only an update reads: it is put in front of the update of its tile."""
        self._first = {
            k
            for k, name in chained.items()
            if self.graph.users_of[self.graph.tensor_index[name]][0] == k
        }
        """Chains that are first readers of a parameter: each tile comes in front of its link."""

    def step(self) -> LoweredStep:
        """Return the step in tiles."""
        nodes = list(self._nodes())
        whole = self.whole
        return whole.with_nodes(
            (node for node, _ in nodes),
            (calls for _, calls in nodes),
            buffers=dict((*self._buffers(whole.buffers), *self._partials())),
            states=tuple(map(self._value, whole.states)),
            values=dict(self._values()),
            inference=None if whole.inference is None else self._inference(whole.inference),
        )

    def _inference(self, whole: LoweredStep) -> LoweredStep:
        """Return an inference that reads the tiles of the step."""
        split = (
            tuple(part for call in calls for part in self._split(call)) for calls in whole.calls
        )
        buffers = dict(self._buffers(whole.buffers))
        return whole.with_nodes(whole.graph.nodes, split, buffers=buffers)

    def largest_readers(self, in_tiles: LoweredStep) -> dict[int, str]:
        """Return the nodes that need more than all those that read no parameter in tiles.

        `made` is the step in tiles without chains.
        """
        whole, sizes = (
            self.graph,
            dict(zip(in_tiles.graph.node_index, in_tiles.graph.step_bytes, strict=True)),
        )
        readers = {k: name for name in self.of for k in self._chainable(name)}
        names = {whole.nodes[k].name for k in readers}
        most = max(size for name, size in sizes.items() if name not in names)
        return {k: name for k, name in readers.items() if sizes[whole.nodes[k].name] > most}

    def _chainable(self, name: str) -> Iterator[int]:
        """Yield the readers of a parameter of which each tile may be a node of its own."""
        for k in self.graph.users_of[self.graph.tensor_index[name]]:
            node, calls = self.graph.nodes[k], self.whole.calls[k]
            named = [a.buffer for c in calls for a in c.arguments if isinstance(a, Ref)]
            split = [buffer for buffer in named if buffer in self.of]
            plain = node.recomputable and len(node.outputs) == 1 and not node.in_place
            if plain and split == [name]:
                yield k

    @cached_property
    def _after(self) -> Mapping[int, list[Tileable]]:
        """After which node gradient and update of each tile come: one after the other."""
        graph = self.graph
        parameters: dict[int, list[Tileable]] = {}
        for p in self.parameters:
            index = [graph.tensor_index[name] for name in p.states]
            readers = {k for i in index for k in graph.users_of[i]} - {p.updates}
            made_by = {graph.node_of[i] for i in graph.inputs_of[p.makes]}
            counted = {
                graph.node_of[graph.tensor_index[call.where.counter.buffer]]
                for call in self.whole.calls[p.updates]
                if call.where is not None
            }
            last = max({*readers, *made_by, *counted})
            parameters.setdefault(last, []).append(p)
        return parameters

    def _nodes(self) -> Iterator[tuple[Node, tuple[Call, ...]]]:
        left_out = {k for p in self.parameters for k in (p.makes, p.updates)} | self._moved
        for k, node in enumerate(self.graph.nodes):
            after = self._after.get(k, [])
            if k in self.chained:
                last = self.of[self.chained[k]]
                yield from self._chain(k, last if last in after else None)
                after = [p for p in after if p is not last]
            elif k not in left_out:
                yield from self._kept(node, self.whole.calls[k])
            for p in after:
                for number in range(len(p.rows)):
                    yield from self._update_of(p, number)
                yield from self._counted(p)

    def _chain(self, k: int, last: Tileable | None) -> Iterator[tuple[Node, tuple[Call, ...]]]:
        """Yield a node for each tile, and its update after it where this is its `last` reader."""
        node, name = self.graph.nodes[k], self.chained[k]
        p, (result,) = self.of[name], node.outputs
        before = ""
        for number, calls in enumerate(self._links(k)):
            if k in self._first:
                yield self._state(self._state_node(name), name, number), ()
            output = self._partial(result.name, p, number)
            named = {a.buffer for c in calls for a in c.arguments if isinstance(a, Ref)}
            known = (*node.inputs, p.tile(name, number), before)
            link = replace(
                node,
                name=p.tile(node.name, number),
                inputs=tuple(buffer for buffer in known if buffer in named),
                outputs=(replace(result, name=output),),
                flops=p.share(node.flops, number),
                bytes_moved=None,
                in_place=((output, before),) if before else (),
            )
            yield link, calls
            before = output
            if p is last:
                yield from self._update_of(p, number)
        if p is last:
            yield from self._counted(p)

    def _links(self, k: int) -> Iterator[tuple[Call, ...]]:
        """Yield the calls for each tile of a chain; all but the first go on with what is there."""
        name, calls = self.chained[k], self.whole.calls[k]
        p, output_name = self.of[name], self.graph.nodes[k].outputs[0].name
        (position,) = (j for j, call in enumerate(calls) if _names(call, name))
        parts = parts_of(calls[position], name, p)
        for number, part in enumerate(parts):
            output = self._partial(output_name, p, number)
            mine = [*calls[:position]] if number == 0 else []
            if number:
                elements = self.whole.buffers[output_name].elements
                before = Ref(self._partial(output_name, p, number - 1))
                mine.append(Call("pm_copy", (Ref(output), before, (1, elements, 1, 1))))
            mine += [part, *(calls[position + 1 :] if part is parts[-1] else ())]
            yield tuple(
                Call(
                    call.kernel,
                    tuple(
                        Ref(output, a.offset)
                        if isinstance(a, Ref) and a.buffer == output_name
                        else a
                        for a in call.arguments
                    ),
                )
                for call in mine
            )

    def _partial(self, name: str, p: Tileable, number: int) -> str:
        """Return the name of the result of a chain after a tile."""
        end = p.rows[number][1]
        return name if end == p.rows[-1][1] else f"{name}[:{end}]"

    def _kept(self, node: Node, calls: tuple[Call, ...]) -> Iterator[tuple[Node, tuple[Call, ...]]]:
        if node.is_state and node.outputs[0].name in self.of:
            name = node.outputs[0].name
            if name in map(self.chained.get, self._first):
                return
            for number in range(len(self.of[name].rows)):
                yield self._state(node, name, number), ()
            return
        inputs = tuple(tile for name in node.inputs for tile in self._tiles(name))
        split = tuple(part for call in calls for part in self._split(call))
        yield replace(node, inputs=inputs), split

    def _tiles(self, name: str) -> tuple[str, ...]:
        parameter = self.of.get(name)
        if parameter is None:
            return (name,)
        return tuple(parameter.tile(name, number) for number in range(len(parameter.rows)))

    def _split(self, call: Call) -> tuple[Call, ...]:
        for argument in call.arguments:
            if isinstance(argument, Ref) and argument.buffer in self.of:
                return parts_of(call, argument.buffer, self.of[argument.buffer])
        return (call,)

    def _state(self, node: Node, name: str, number: int) -> Node:
        tile, size = self._named(name, number)
        return replace(node, name=tile, outputs=(Tensor(name=tile, bytes=size),))

    def _named(self, name: str, number: int) -> tuple[str, int]:
        """Return name and size of a tile."""
        parameter = self.of[name]
        itemsize = self.whole.buffers[name].type.itemsize
        return parameter.tile(name, number), parameter.elements(number) * itemsize

    # -- gradients and updates ---------------------------------------------------------------------

    def _update_of(self, p: Tileable, number: int) -> Iterator[tuple[Node, tuple[Call, ...]]]:
        """Yield the gradient of a tile, and its update with the state that only this reads."""
        maker, update = self.graph.nodes[p.makes], self.graph.nodes[p.updates]
        size, mine = maker.outputs[0].bytes, p.share(maker.outputs[0].bytes, number)
        gradient = replace(
            maker,
            name=p.tile(maker.name, number),
            outputs=(Tensor(name=p.tile(p.gradient, number), bytes=mine),),
            flops=p.share(maker.flops, number),
            bytes_moved=None
            if maker.bytes_moved is None
            else max(0, maker.bytes_moved - size + mine),
        )
        makers = self.whole.calls[p.makes]
        yield gradient, tuple(parts_of(call, p.gradient, p)[number] for call in makers)
        for name in p.counters if number == 0 else ():
            yield self._state_node(name), ()
        for name in p.states:
            node = self._state_node(name)
            if self.graph.node_index[node.name] in self._moved:
                yield self._state(node, name, number), ()
        tiles = {name: p.tile(name, number) for name in (*p.states, p.gradient)}
        parts = [
            by_element(call, tiles, p.range(number))
            for call in self.whole.calls[p.updates]
            if not self._counts(call, p)
        ]
        yield self._update(p, update, number), tuple(part for part in parts if part is not None)

    def _counted(self, p: Tileable) -> Iterator[tuple[Node, tuple[Call, ...]]]:
        """Yield what counts the steps of a parameter, after all of its tiles."""
        once = tuple(call for call in self.whole.calls[p.updates] if self._counts(call, p))
        if once:
            yield self._count(p, self.graph.nodes[p.updates], once), once

    def _state_node(self, name: str) -> Node:
        """Return the node that holds a state tensor."""
        return self.graph.nodes[self.graph.node_of[self.graph.tensor_index[name]]]

    def _counts(self, call: Call, p: Tileable) -> bool:
        names = {a.buffer for a in call.arguments if isinstance(a, Ref)}
        return names <= set(p.counters)

    def _update(self, p: Tileable, update: Node, number: int) -> Node:
        split = {*p.states, p.gradient}
        outputs = []
        for tensor in update.outputs:
            if tensor.replaces in self.of:
                tile, size = self._named(tensor.replaces, number)
                outputs.append(Tensor(name=f"{tile}+", bytes=size, replaces=tile))
        return replace(
            update,
            name=p.tile(update.name, number),
            inputs=tuple(p.tile(n, number) if n in split else n for n in update.inputs),
            outputs=tuple(outputs),
            flops=p.share(update.flops, number),
            bytes_moved=None if update.bytes_moved is None else p.share(update.bytes_moved, number),
        )

    def _count(self, p: Tileable, update: Node, calls: tuple[Call, ...]) -> Node:
        outputs = tuple(tensor for tensor in update.outputs if tensor.replaces in p.counters)
        return replace(
            update,
            name=f"{update.name}[count]",
            inputs=tuple(dict.fromkeys(name for call in calls for name in call.buffers)),
            outputs=outputs,
            flops=_COUNT_FLOPS,
            bytes_moved=None,
        )

    # -- buffers and values ------------------------------------------------------------------------

    def _pieces(self, name: str) -> Iterator[tuple[str, slice]]:
        """Yield the tiles of a buffer, if it is split, each with the elements that it has."""
        p = self.of.get(name) or self._of_gradient.get(name)
        if p is not None:
            for number, (first, end) in enumerate(p.rows):
                yield p.tile(name, number), slice(first * p.row_elements, end * p.row_elements)

    def _buffers(self, whole: Mapping[str, Buffer]) -> Iterator[tuple[str, Buffer]]:
        for name, buffer in whole.items():
            pieces = list(self._pieces(name))
            for tile, part in pieces:
                yield tile, replace(buffer, elements=part.stop - part.start)
            if not pieces:
                yield name, buffer

    def _partials(self) -> Iterator[tuple[str, Buffer]]:
        """Yield what chains make before their last links."""
        for k, parameter in self.chained.items():
            p, output_name = self.of[parameter], self.graph.nodes[k].outputs[0].name
            for number in range(len(p.rows) - 1):
                yield self._partial(output_name, p, number), self.whole.buffers[output_name]

    def _values(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, values in self.whole.values.items():
            pieces = list(self._pieces(name))
            yield from ((tile, values[part]) for tile, part in pieces)
            if not pieces:
                yield name, values

    def _value(self, value: NamedTensor) -> NamedTensor:
        (first, *more) = value.pieces
        if more or first.buffer not in self.of:
            return value
        return replace(value, pieces=tuple(map(Ref, self._tiles(first.buffer))))


def _names(call: Call, name: str) -> bool:
    return any(isinstance(a, Ref) and a.buffer == name for a in call.arguments)
