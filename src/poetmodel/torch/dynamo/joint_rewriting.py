"""A program of the plan as a joint graph in its own order, for PyTorch to split in two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from poetmodel.graph import Phase
from poetmodel.plan import Op
from poetmodel.torch.dynamo import pages
from poetmodel.torch.dynamo.gradients import is_addition
from poetmodel.torch.graph.rewriting import Rewriter
from poetmodel.torch.graph.tensors import fake

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.plan import Program
    from poetmodel.torch.dynamo.joint_graph import JointGraph


class JointRewriter(Rewriter):
    """Makes a new joint graph of operations in the order of a program; views are made once a pass.

    What is paged in is the newest copy of its storage.
    """

    def __init__(self, joint: JointGraph, file: int) -> None:
        super().__init__(joint.direct)
        self.saved: dict[fx.Node, None] = {}
        """Values from the forward pass to the backward pass."""
        self._joint = joint
        self._file = file
        for node in joint.arguments:
            self.give(node)
        self._copies: dict[fx.Node, fx.Node] = {}
        """Arguments that are written at the end of the forward pass, as they were before."""
        self._tokens: dict[int, fx.Node] = {}
        self._forward: set[fx.Node] = set()
        self._is_backward = False
        self._early: list[Any] = []
        """Results of the forward pass."""
        self._first: fx.Node | None = None

    def rewrite(self, program: Program, turn: int | None = None) -> fx.Graph:
        """Return the graph of a program.

        The backward pass begins at the node `turn`, or else with its first operation.
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
        results = self._early + self._results(joint.results[joint.forward_outputs :])
        output = self.graph.output(tuple(results))
        output.meta = dict(joint.output.meta)
        self.graph.lint()
        return self.graph

    def _begin_backward(self) -> None:
        self._early = self._results(self._joint.results[: self._joint.forward_outputs])
        self._is_backward = True
        self._views.clear()

    def _compute(self, index: int) -> None:
        if index == len(self._joint.operations):  # the end
            return
        operation = self._joint.operations[index]
        if operation.phase is Phase.BACKWARD and not self._is_backward:
            self._begin_backward()
        new = self.compute(operation.node, operation.storages)
        # For outputs that are no new memory, and for gradients that were added to `.grad`.
        if isinstance(fake(operation.node), tuple | list) or is_addition(operation.node):
            self._current[operation.node] = new

    def _results(self, nodes: Sequence[Any]) -> list[Any]:
        return [self.value(node) if isinstance(node, fx.Node) else node for node in nodes]

    def _page_out(self, number: int) -> None:
        for place in self._unfinished.intersection(self.places(number)):
            self.wait(place)
        value = self._current[self.places(number)[0]]
        token = self.add(self.graph.call_function(pages.page_out, (self.used(value), self._file)))
        with fake(value).fake_mode:
            token.meta["val"] = torch.empty(1, dtype=torch.int64)
        self._tokens[number] = token

    def _page_in(self, number: int) -> None:
        first, *others = self.places(number)
        value = fake(self._current[first])
        arguments = (self.used(self._tokens[number]), value.dtype, self._file)
        new = self.add(self.graph.call_function(pages.page_in, arguments))
        new.meta["val"] = value
        self._current[first] = new
        for place in others:  # more outputs in this storage
            value = fake(self._current[place])
            layout = (value.size(), value.stride(), value.storage_offset())
            same = self.add(self.graph.call_function(torch.ops.aten.as_strided, (new, *layout)))
            same.meta["val"] = value
            self._current[place] = same

    def argument(self, node: fx.Node) -> fx.Node:
        """Return the node of an argument, or of its copy from before it was written."""
        new = self._arguments[node]
        if not self._is_backward:
            return new
        if node in self._joint.mutated:
            if node not in self._copies:
                with self.graph.inserting_before(self._first):
                    copy = self.graph.call_function(torch.ops.aten.clone.default, (new,))
                copy.meta["val"] = node.meta["val"]
                self._copies[node] = copy
                self._forward.add(copy)
            return self.used(self._copies[node])
        if node.op == "placeholder" and node not in self._joint.tangents:
            self.saved[new] = None
        return new

    def add(self, new: fx.Node) -> fx.Node:
        """Note what the forward pass makes."""
        self._first = self._first or new
        if not self._is_backward:
            self._forward.add(new)
        return new

    def used(self, new: fx.Node) -> fx.Node:
        """Note what the backward pass reads of the forward pass."""
        if self._is_backward and new in self._forward:
            self.saved[new] = None
        return new
