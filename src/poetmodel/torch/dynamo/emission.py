"""A program of the plan as a joint graph in its own order, for PyTorch to split in two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from poetmodel.plan import Op
from poetmodel.torch.dynamo import pages
from poetmodel.torch.dynamo.operations import Operation, Operations, fake, storage_of

if TYPE_CHECKING:
    from collections.abc import Sequence


class Emitter:
    """Makes a new graph of operations in the order of a program.

    Where a storage is made again, or paged in, later readers take the newest copy. Views are made
    again from the copy that is there, once in each pass.
    """

    def __init__(self, operations: Operations, file: int) -> None:
        self.graph = fx.Graph()
        self.saved: dict[fx.Node, None] = {}
        """Values from the forward pass to the backward pass."""
        self._operations = operations
        self._file = file
        self._arguments = {node: self.graph.node_copy(node) for node in operations.arguments}
        self._copies: dict[fx.Node, fx.Node] = {}
        """Arguments that are written at the end of the forward pass, as they were before."""
        self._current: dict[int | fx.Node, fx.Node] = {}
        """The newest copy of each storage, and of each operation with several results."""
        self._tokens: dict[int, fx.Node] = {}
        self._views: dict[tuple[fx.Node, ...], fx.Node] = {}
        self._forward: set[fx.Node] = set()
        self._is_backward = False
        self._first: fx.Node | None = None

    def emit(self, program: Sequence[tuple[Op, Operation | int]]) -> fx.Graph:
        """Return the graph of a program."""
        stated = self._operations
        results: list[Any] = []
        for op, item in program:
            if isinstance(item, Operation):
                if item.is_backward and not self._is_backward:
                    results = self._results(stated.results[: stated.forward_outputs])
                    self._is_backward = True
                    self._views.clear()
                self._compute(item)
            elif op == Op.PAGE_OUT:
                self._page_out(item)
            else:
                self._page_in(item)
        if not self._is_backward:
            results = self._results(stated.results[: stated.forward_outputs])
            self._is_backward = True
        results += self._results(stated.results[stated.forward_outputs :])
        output = self.graph.output(tuple(results))
        output.meta = dict(stated.output.meta)
        self.graph.lint()
        return self.graph

    def _results(self, nodes: Sequence[Any]) -> list[Any]:
        return [self._value(node) if isinstance(node, fx.Node) else node for node in nodes]

    def _compute(self, operation: Operation) -> None:
        new = self._add(self.graph.node_copy(operation.node, self._value))
        if operation.node in self._operations.tuples:
            self._current[operation.node] = new
        for key in operation.makes:
            owner = self._operations.owner[key]
            if owner is operation.node:
                self._current[key] = new
            elif owner is not None:
                self._current[key] = self._add(self.graph.node_copy(owner, lambda _: new))

    def _page_out(self, key: int) -> None:
        arguments = (self._used(self._current[key]), self._file)
        token = self._add(self.graph.call_function(pages.page_out, arguments))
        with fake(self._current[key]).fake_mode:
            token.meta["val"] = torch.empty(1, dtype=torch.int64)
        self._tokens[key] = token

    def _page_in(self, key: int) -> None:
        value = fake(self._current[key])
        arguments = (self._used(self._tokens[key]), value.dtype, self._file)
        new = self._add(self.graph.call_function(pages.page_in, arguments))
        new.meta["val"] = value
        self._current[key] = new

    def _value(self, node: fx.Node) -> fx.Node:
        """Return the node of the new graph for a node of the old one."""
        stated = self._operations
        if node in self._arguments:
            return self._argument(node)
        if node in stated.tuples:
            return self._used(self._current[node])
        key = storage_of(node)
        if key is not None and stated.owner.get(key) is node:
            return self._used(self._current[key])
        inputs = [self._value(source) for source in node.all_input_nodes]
        view = (node, *inputs)
        if view not in self._views:
            now = dict(zip(node.all_input_nodes, inputs, strict=True))
            self._views[view] = self.graph.node_copy(node, now.__getitem__)
        return self._views[view]

    def _argument(self, node: fx.Node) -> fx.Node:
        new = self._arguments[node]
        if not self._is_backward:
            return new
        if node in self._operations.mutated:
            if node not in self._copies:
                with self.graph.inserting_before(self._first):
                    copy = self.graph.call_function(torch.ops.aten.clone.default, (new,))
                copy.meta["val"] = node.meta["val"]
                self._copies[node] = copy
                self._forward.add(copy)
            return self._used(self._copies[node])
        if node.op == "placeholder" and node not in self._operations.tangents:
            self.saved[new] = None
        return new

    def _add(self, new: fx.Node) -> fx.Node:
        self._first = self._first or new
        if not self._is_backward:
            self._forward.add(new)
        return new

    def _used(self, new: fx.Node) -> fx.Node:
        if self._is_backward and new in self._forward:
            self.saved[new] = None
        return new
