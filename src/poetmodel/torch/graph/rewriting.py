"""Rewriting of an FX graph: operations in another order, each any number of times."""

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
    `keys_by_node` has (storage index, layout index) of each old node that is an output, no view.
    """

    def __init__(self, keys_by_node: Mapping[fx.Node, OutputKey]) -> None:
        self.graph = fx.Graph()
        self._keys_by_node = keys_by_node
        self._first_nodes: dict[OutputKey, fx.Node] = {}
        """First old node of each output, by the output's key."""
        self._output_keys: defaultdict[int, list[OutputKey]] = defaultdict(list)
        for node, key in keys_by_node.items():
            if key not in self._first_nodes:
                self._first_nodes[key] = node
                self._output_keys[key[0]].append(key)
        self._placeholders: dict[fx.Node, fx.Node] = {}
        self._newest: dict[OutputKey | fx.Node, fx.Node] = {}
        """Newest copy of each output by its key; subclasses also use old nodes as keys."""
        self._views: dict[tuple[fx.Node, ...], fx.Node] = {}
        """New nodes of views, by (old node of the view, new nodes of its inputs)."""
        self._awaited_keys: set[OutputKey] = set()
        """Keys of results of collectives whose wait is not written yet."""

    def add_placeholder(self, node: fx.Node) -> None:
        """Add a placeholder or ``get_attr`` node of the old graph to the new graph."""
        self._placeholders[node] = self.graph.node_copy(node)

    def map_node(self, node: fx.Node) -> fx.Node:
        """Return the new node for an old value (newest copy); adds missing views and waits."""
        if node in self._placeholders:
            return self.map_placeholder(node)
        if is_wait(node.target):
            return self.map_node(node.all_input_nodes[0])
        key = self._keys_by_node.get(node, node)
        if key in self._awaited_keys:
            self.write_wait(key)
        if key in self._newest:
            return self.register_read(self._newest[key])
        new_sources = [self.map_node(source) for source in node.all_input_nodes]
        view_key = (node, *new_sources)
        if view_key not in self._views:
            new_inputs = dict(zip(node.all_input_nodes, new_sources, strict=True))
            self._views[view_key] = self.graph.node_copy(node, new_inputs.__getitem__)
        return self._views[view_key]

    def write_node(self, node: fx.Node, storage_indices: Iterable[int]) -> fx.Node:
        """Write a node, its views and waits; outputs of `storage_indices` become newest copies."""
        new_node = self.register_write(self.graph.node_copy(node, self.map_node))
        kernel: Any = kernel_of(node)
        if kernel is not node.target:
            # The inputs of the new node differ, and so could a kernel made from it.
            set_kernel(new_node, kernel)
        for storage_index in storage_indices:
            for key in self.output_keys(storage_index):
                first_node = self._first_nodes[key]
                self._newest[key] = (
                    new_node
                    if first_node is node
                    else self.register_write(self.graph.node_copy(first_node, lambda _: new_node))
                )
                if is_collective(node.target):
                    self._awaited_keys.add(key)
                    if not copies_input(node.target):
                        self.write_wait(key)
        return new_node

    def write_wait(self, key: OutputKey) -> None:
        """Write the wait for a collective's result; it becomes the newest copy of that output."""
        self._awaited_keys.remove(key)
        collective = self._newest[key]
        target = torch.ops._c10d_functional.wait_tensor.default  # noqa: SLF001 - its only name
        wait = self.graph.call_function(target, (self.register_read(collective),))
        wait.meta["val"] = collective.meta["val"]
        self._newest[key] = self.register_write(wait)

    def output_keys(self, storage_index: int) -> list[OutputKey]:
        """Return the keys (storage index, layout index) of a storage's outputs that have a node."""
        return self._output_keys[storage_index]

    def map_placeholder(self, node: fx.Node) -> fx.Node:
        """Return the new graph's node for a node that `add_placeholder` has added."""
        return self._placeholders[node]

    def register_write(self, new_node: fx.Node) -> fx.Node:
        """Return a node that was just written; subclasses override this to register it."""
        return new_node

    def register_read(self, new_node: fx.Node) -> fx.Node:
        """Return a node that is about to be read; subclasses override this to register the use."""
        return new_node
