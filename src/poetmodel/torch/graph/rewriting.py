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

    OutputKey = tuple[int, int]


class Rewriter:
    """Writes operations to a new graph, where readers use the newest copy of a storage.

    Views are recreated from the newest copy. The wait for a collective is written before the first
    reader of its result, or right after the collective if that may still read its input.

    Parameters
    ----------
    keys_by_node : mapping
        (storage index, layout index) of each old node that is an output of an operation, no view.
    """

    def __init__(self, keys_by_node: Mapping[fx.Node, OutputKey]) -> None:
        """Begin an empty graph."""
        self.graph = fx.Graph()
        self._key_of = keys_by_node
        self._owners: dict[OutputKey, fx.Node] = {}
        self._output_keys: defaultdict[int, list[OutputKey]] = defaultdict(list)
        for node, key in keys_by_node.items():
            if key not in self._owners:
                self._owners[key] = node
                self._output_keys[key[0]].append(key)
        self._arguments: dict[fx.Node, fx.Node] = {}
        self._current: dict[OutputKey | fx.Node, fx.Node] = {}
        """Newest copy of each output; of outputs without storage by their old node."""
        self._views: dict[tuple[fx.Node, ...], fx.Node] = {}
        self._unfinished: set[OutputKey] = set()
        """Results of collectives without a written wait."""

    def add_placeholder(self, node: fx.Node) -> None:
        """Add a placeholder of the old graph to the new graph."""
        self._arguments[node] = self.graph.node_copy(node)

    def map_node(self, node: fx.Node) -> fx.Node:
        """Return the new graph's node for the value of an old node; writes views and waits."""
        if node in self._arguments:
            return self.map_argument(node)
        if is_wait(node.target):
            return self.map_node(node.all_input_nodes[0])
        key = self._key_of.get(node, node)
        if key in self._unfinished:
            self.write_wait(key)
        if key in self._current:
            return self.register_read(self._current[key])
        inputs = [self.map_node(source) for source in node.all_input_nodes]
        view = (node, *inputs)
        if view not in self._views:
            new_inputs = dict(zip(node.all_input_nodes, inputs, strict=True))
            self._views[view] = self.graph.node_copy(node, new_inputs.__getitem__)
        return self._views[view]

    def write_node(self, node: fx.Node, storage_indices: Iterable[int]) -> fx.Node:
        """Write an operation; its outputs become the newest copies of the storages."""
        new_node = self.register_new(self.graph.node_copy(node, self.map_node))
        kernel: Any = kernel_of(node)
        if (
            kernel is not node.target
        ):  # recreated from the new node, the kernel could differ: its inputs differ
            set_kernel(new_node, kernel)
        for storage_index in storage_indices:
            for key in self.output_keys(storage_index):
                owner = self._owners[key]
                self._current[key] = (
                    new_node
                    if owner is node
                    else self.register_new(self.graph.node_copy(owner, lambda _: new_node))
                )
                if is_collective(node.target):
                    self._unfinished.add(key)
                    if not copies_input(node.target):
                        self.write_wait(key)
        return new_node

    def write_wait(self, key: OutputKey) -> None:
        """Write the wait for a collective's result, which becomes the newest copy."""
        self._unfinished.remove(key)
        collective = self._current[key]
        target = torch.ops._c10d_functional.wait_tensor.default  # noqa: SLF001 - its only name
        wait = self.graph.call_function(target, (self.register_read(collective),))
        wait.meta["val"] = collective.meta["val"]
        self._current[key] = self.register_new(wait)

    def output_keys(self, storage_index: int) -> list[OutputKey]:
        """Return (storage index, layout index) of each layout of a storage."""
        return self._output_keys[storage_index]

    def map_argument(self, node: fx.Node) -> fx.Node:
        """Return the new graph's node for a placeholder of the old graph."""
        return self._arguments[node]

    def register_new(self, new_node: fx.Node) -> fx.Node:
        """Return a node that was just written; subclasses override this to register the node."""
        return new_node

    def register_read(self, new_node: fx.Node) -> fx.Node:
        """Return a node that is about to be read; subclasses override this to register the use."""
        return new_node
