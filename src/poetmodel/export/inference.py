"""What an inference asks of the homes that a plan gives to state."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from poetmodel.export.step import Ref
from poetmodel.graph import Node, Phase, Tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from poetmodel.export.step import Call, Step


def reading_state(inference: Step, stored: Collection[str]) -> Step:
    """Return an inference in whose graph some state is a sample on storage.

    Each tensor of it has a node in front of its first reader. All other state is read where it is,
    like constants.
    """
    nodes: list[Node] = []
    calls: list[tuple[Call, ...]] = []
    there: set[str] = set()
    for node, made in zip(inference.graph.nodes, inference.calls, strict=True):
        named = (a.buffer for call in made for a in call.arguments if isinstance(a, Ref))
        read = [name for name in dict.fromkeys(named) if name in stored]
        nodes += _samples(inference, (name for name in read if name not in there))
        calls += [()] * (len(nodes) - len(calls))
        there.update(read)
        nodes.append(replace(node, inputs=(*node.inputs, *read)))
        calls.append(made)
    graph = replace(inference.graph, nodes=tuple(nodes))
    return replace(inference, graph=graph, calls=tuple(calls))


def _samples(inference: Step, names: Iterator[str]) -> Iterator[Node]:
    for name in names:
        tensor = Tensor(name=name, bytes=inference.buffers[name].bytes)
        yield Node(name=name, op="state", phase=Phase.INPUT, outputs=(tensor,), on_aux=True)
