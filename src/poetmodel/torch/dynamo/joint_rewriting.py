"""Writing a plan's program as a joint graph in its order, which PyTorch then splits."""

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
    """Writes the operations of a program to a new joint graph; views are written once per pass.

    A page-in is the newest copy of its storage.
    """

    def __init__(self, joint: JointGraph, file: int) -> None:
        """Begin a graph with the arguments of `joint`. `file` is the number of the `SlotFile`."""
        super().__init__(joint.output_keys)
        self.saved: dict[fx.Node, None] = {}
        """Values of the forward pass that the backward pass reads."""
        self._joint = joint
        self._file = file
        for node in joint.arguments:
            self.add_placeholder(node)
        self._copies: dict[fx.Node, fx.Node] = {}
        """Copies of arguments before the forward pass writes them."""
        self._tokens: dict[int, fx.Node] = {}
        """Token of the last page-out of each storage, by storage index."""
        self._forward: set[fx.Node] = set()
        self._is_backward = False
        self._forward_results: list[Any] = []
        """Results of the forward pass."""
        self._first_written: fx.Node | None = None
        """The first operation of the new graph, before which copies of arguments are inserted."""

    def rewrite(self, program: Program, turn: int | None = None) -> fx.Graph:
        """Return the graph of a program; call this once.

        The backward pass begins at node `turn` of the plan, or with its first operation.
        """
        joint = self._joint
        for op, node in program:
            if op == Op.COMPUTE and node == turn:
                self._begin_backward()
            elif op == Op.COMPUTE:
                self._compute(node - (turn is not None and node > turn))
            elif op == Op.PAGE_OUT:
                self._page_out(node)
            elif op == Op.PAGE_IN:
                self._page_in(node)
        if not self._is_backward:
            self._begin_backward()
        results = self._forward_results + self._results(joint.results[joint.forward_outputs :])
        output = self.graph.output(tuple(results))
        output.meta = dict(joint.output.meta)
        self.graph.lint()
        return self.graph

    def _begin_backward(self) -> None:
        """Write the results of the forward pass; later nodes belong to the backward pass."""
        self._forward_results = self._results(self._joint.results[: self._joint.forward_outputs])
        self._is_backward = True
        self._views.clear()

    def _compute(self, index: int) -> None:
        """Write operation `index`; begin the backward pass before its first operation."""
        if index == len(self._joint.operations):  # the node for the results
            return
        operation = self._joint.operations[index]
        if operation.phase is Phase.BACKWARD and not self._is_backward:
            self._begin_backward()
        new_node = self.write_node(operation.node, operation.storages)
        # For outputs that are no new memory, and for additions to `.grad`.
        if isinstance(fake_value(operation.node), tuple | list) or is_addition(operation.node):
            self._newest[operation.node] = new_node

    def _results(self, nodes: Sequence[Any]) -> list[Any]:
        return [self.map_node(node) if isinstance(node, fx.Node) else node for node in nodes]

    def _page_out(self, number: int) -> None:
        """Write a page-out of a storage, whose token a later page-in reads."""
        for key in self._awaited_keys.intersection(self.output_keys(number)):
            self.write_wait(key)
        value = self._newest[self.output_keys(number)[0]]
        token = self.register_write(
            self.graph.call_function(pages.page_out, (self.register_read(value), self._file))
        )
        with fake_value(value).fake_mode:
            token.meta["val"] = torch.empty(1, dtype=torch.int64)
        self._tokens[number] = token

    def _page_in(self, number: int) -> None:
        """Write a page-in of a storage, and views for its further layouts."""
        first_key, *other_keys = self.output_keys(number)
        value = fake_value(self._newest[first_key])
        arguments = (self.register_read(self._tokens[number]), value.dtype, self._file)
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
        """Return the node of an argument.

        In the backward pass this is a copy for arguments that the forward pass overwrites.
        """
        new_node = self._placeholders[node]
        if not self._is_backward:
            return new_node
        if node in self._joint.mutated:
            if node not in self._copies:
                with self.graph.inserting_before(self._first_written):
                    copy = self.graph.call_function(torch.ops.aten.clone.default, (new_node,))
                copy.meta["val"] = node.meta["val"]
                self._copies[node] = copy
                self._forward.add(copy)
            return self.register_read(self._copies[node])
        if node.op == "placeholder" and node not in self._joint.tangents:
            self.saved[new_node] = None
        return new_node

    def register_write(self, new_node: fx.Node) -> fx.Node:
        """Register a new node, during the forward pass as a part of it; return the node."""
        self._first_written = self._first_written or new_node
        if not self._is_backward:
            self._forward.add(new_node)
        return new_node

    def register_read(self, new_node: fx.Node) -> fx.Node:
        """Register a forward node that the backward pass reads as saved; return the node."""
        if self._is_backward and new_node in self._forward:
            self.saved[new_node] = None
        return new_node
