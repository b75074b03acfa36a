"""Writing of a joint graph in the order of a plan's program; PyTorch then splits the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from poetmodel.graph import Phase
from poetmodel.plan import Op
from poetmodel.torch.dynamo import pages
from poetmodel.torch.dynamo.gradients import is_addition
from poetmodel.torch.graph.rewriting import Rewriter
from poetmodel.torch.graph.tensors import fake_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.plan import Program
    from poetmodel.torch.dynamo.joint_graph import JointGraph


class JointRewriter(Rewriter):
    """Writes operations of a plan's program to a new joint graph; pages are in `file_number`."""

    def __init__(self, joint: JointGraph, file_number: int) -> None:
        super().__init__(joint.step_graph.output_keys)
        self.saved_nodes: dict[fx.Node, None] = {}
        """Arguments and forward nodes that the backward pass reads, as an ordered set."""
        self._joint = joint
        self._file_number = file_number
        for node in joint.arguments:
            self.add_placeholder(node)
        self._argument_copies: dict[fx.Node, fx.Node] = {}
        """Copy of each argument that the forward pass overwrites, for the backward pass."""
        self._tokens: dict[int, fx.Node] = {}
        """Node of the token of the last page-out of each storage, by storage index."""
        self._forward_nodes: set[fx.Node] = set()
        self._is_backward = False
        self._forward_results: list[Any] = []
        """Results of the forward pass."""
        self._first_node: fx.Node | None = None
        """First node of the new graph that is no argument; copies are inserted before it."""

    def rewrite(self, program: Program, inserted_node: int | None = None) -> fx.Graph:
        """Write a program, fill `saved_nodes`, and return the graph; call this once.

        `inserted_node` of the plan's graph is no operation and begins the backward pass; without
        it, the first backward operation does. Waits and frees are omitted.
        """
        joint = self._joint
        for op, node in program:
            if op == Op.COMPUTE and node == inserted_node:
                self._begin_backward()
            elif op == Op.COMPUTE:
                self._compute(node - (inserted_node is not None and node > inserted_node))
            elif op == Op.PAGE_OUT:
                self._page_out(node)
            elif op == Op.PAGE_IN:
                self._page_in(node)
        if not self._is_backward:
            self._begin_backward()
        results = self._forward_results + self._map_results(joint.results[joint.forward_outputs :])
        output = self.graph.output(tuple(results))
        output.meta = dict(joint.output.meta)
        self.graph.lint()
        return self.graph

    def _begin_backward(self) -> None:
        """Write views and waits that forward results need; later nodes are of the backward pass."""
        self._forward_results = self._map_results(
            self._joint.results[: self._joint.forward_outputs]
        )
        self._is_backward = True
        self._views.clear()

    def _compute(self, index: int) -> None:
        """Write operation `index`; the first backward one begins the backward pass."""
        if index == len(self._joint.step_graph.operations):  # the node for the results
            return
        operation = self._joint.step_graph.operations[index]
        if operation.phase is Phase.BACKWARD and not self._is_backward:
            self._begin_backward()
        new_node = self.write_node(operation.node, operation.storages)
        # Tuples and additions to `.grad` have no output key, and are found by the old node.
        if isinstance(fake_value(operation.node), tuple | list) or is_addition(operation.node):
            self._newest[operation.node] = new_node

    def _map_results(self, results: Sequence[Any]) -> list[Any]:
        """Return the new nodes of results; values that are no nodes stay unchanged."""
        return [
            self.map_node(result) if isinstance(result, fx.Node) else result for result in results
        ]

    def _page_out(self, number: int) -> None:
        """Write the pending waits for collectives in storage `number`, then its page-out."""
        for key in self._awaited_keys.intersection(self.output_keys(number)):
            self.write_wait(key)
        value = self._newest[self.output_keys(number)[0]]
        token = self.register_write(
            self.graph.call_function(pages.page_out, (self.register_read(value), self._file_number))
        )
        with fake_value(value).fake_mode:
            token.meta["val"] = torch.empty(1, dtype=torch.int64)
        self._tokens[number] = token

    def _page_in(self, number: int) -> None:
        """Write a page-in of storage `number`; its outputs become views of the page-in."""
        first_key, *other_keys = self.output_keys(number)
        value = fake_value(self._newest[first_key])
        arguments = (self.register_read(self._tokens[number]), self._file_number)
        page = self.register_write(self.graph.call_function(pages.page_in, arguments))
        page.meta["val"] = value
        self._newest[first_key] = page
        for key in other_keys:  # further outputs in this storage
            value = fake_value(self._newest[key])
            layout = (value.size(), value.stride(), value.storage_offset())
            view = self.register_write(
                self.graph.call_function(torch.ops.aten.as_strided, (page, *layout))
            )
            view.meta["val"] = value
            self._newest[key] = view

    def map_placeholder(self, node: fx.Node) -> fx.Node:
        """Return the new node of an argument; in the backward pass, register it as saved.

        If the forward pass overwrites it, the backward pass gets a copy from before.
        """
        new_node = self._placeholders[node]
        if not self._is_backward:
            return new_node
        if node in self._joint.overwritten_arguments:
            if node not in self._argument_copies:
                with self.graph.inserting_before(self._first_node):
                    argument_copy = self.graph.call_function(
                        torch.ops.aten.clone.default, (new_node,)
                    )
                argument_copy.meta["val"] = node.meta["val"]
                self._argument_copies[node] = argument_copy
                self._forward_nodes.add(argument_copy)
            return self.register_read(self._argument_copies[node])
        if node.op == "placeholder" and node not in self._joint.tangents:
            self.saved_nodes[new_node] = None
        return new_node

    def register_write(self, new_node: fx.Node) -> fx.Node:
        """Register a new node, also as a forward node before the backward pass; return it."""
        self._first_node = self._first_node or new_node
        if not self._is_backward:
            self._forward_nodes.add(new_node)
        return new_node

    def register_read(self, new_node: fx.Node) -> fx.Node:
        """Return a node that is read; register a forward node as saved if backward reads it."""
        if self._is_backward and new_node in self._forward_nodes:
            self.saved_nodes[new_node] = None
        return new_node
