"""Writing operations in any order, each any number of times, to a new FX graph."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from poetmodel.torch.graph.operators import (
    copies_input,
    is_collective,
    is_wait,
    kernel_of,
    set_kernel,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    Place = tuple[int, int]


class Rewriter:
    """Writes operations to a new graph, where readers use the newest copy of a storage.

    Views are recreated from the newest copy. The wait for a collective is written before the first
    reader of its result, or at once if the collective may still read its input.

    Parameters
    ----------
    direct : mapping
        (storage index, layout index) of each old node that is an output of an operation, no view.
    """

    def __init__(self, direct: Mapping[fx.Node, Place]) -> None:
        self.graph = fx.Graph()
        self._direct = direct
        self._shown: dict[Place, fx.Node] = {}
        self._places: defaultdict[int, list[Place]] = defaultdict(list)
        for node, place in direct.items():
            if place not in self._shown:
                self._shown[place] = node
                self._places[place[0]].append(place)
        self._arguments: dict[fx.Node, fx.Node] = {}
        self._current: dict[Place | fx.Node, fx.Node] = {}
        self._views: dict[tuple[fx.Node, ...], fx.Node] = {}
        self._unfinished: set[Place] = set()
        """Results of collectives without a written wait."""

    def give(self, node: fx.Node) -> None:
        """Add a placeholder of the old graph to the new graph."""
        self._arguments[node] = self.graph.node_copy(node)

    def value(self, node: fx.Node) -> fx.Node:
        """Return the new graph's node for the value of an old node; writes views and waits."""
        if node in self._arguments:
            return self.argument(node)
        if is_wait(node.target):
            return self.value(node.all_input_nodes[0])
        place = self._direct.get(node, node)
        if place in self._unfinished:
            self.wait(place)
        if place in self._current:
            return self.used(self._current[place])
        inputs = [self.value(source) for source in node.all_input_nodes]
        view = (node, *inputs)
        if view not in self._views:
            now = dict(zip(node.all_input_nodes, inputs, strict=True))
            self._views[view] = self.graph.node_copy(node, now.__getitem__)
        return self._views[view]

    def compute(self, node: fx.Node, numbers: Iterable[int]) -> fx.Node:
        """Write an operation, and make its outputs the newest copies of storages `numbers`."""
        new = self.add(self.graph.node_copy(node, self.value))
        kernel: Any = kernel_of(node)
        if kernel is not node.target:  # it may depend on the node's inputs, which change
            set_kernel(new, kernel)
        for number in numbers:
            for place in self.places(number):
                owner = self._shown[place]
                self._current[place] = (
                    new if owner is node else self.add(self.graph.node_copy(owner, lambda _: new))
                )
                if is_collective(node.target):
                    self._unfinished.add(place)
                    if not copies_input(node.target):
                        self.wait(place)
        return new

    def wait(self, place: Place) -> None:
        """Write the wait for a collective's result, which becomes the newest copy."""
        self._unfinished.remove(place)
        begun = self._current[place]
        target = torch.ops._c10d_functional.wait_tensor.default  # noqa: SLF001 - its only name
        waited = self.graph.call_function(target, (self.used(begun),))
        waited.meta["val"] = begun.meta["val"]
        self._current[place] = self.add(waited)

    def places(self, number: int) -> list[Place]:
        """Return (storage index, layout index) of each layout of a storage."""
        return self._places[number]

    def argument(self, node: fx.Node) -> fx.Node:
        """Return the new graph's node for a placeholder of the old graph."""
        return self._arguments[node]

    def add(self, new: fx.Node) -> fx.Node:
        """Return a node that was just written; a hook for subclasses to register it."""
        return new

    def used(self, new: fx.Node) -> fx.Node:
        """Return a node that is about to be read; a hook for subclasses to register the use."""
        return new
