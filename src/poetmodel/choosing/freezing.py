"""Steps that train only some parameters, derived from the step that trains all.

The graph of the step that trains all parameters contains all nodes of the other steps. To freeze a
parameter is to remove its update, and then all nodes and tensors that are no longer read; the
parameter becomes a constant.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from poetmodel.graph import Graph, Node, Phase
from poetmodel.lowered.instructions import estimate_instructions
from poetmodel.lowered.step import LoweredNode, defer_updates

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from poetmodel.lowered.calls import Call
    from poetmodel.lowered.step import LoweredStep

BUFFER_UPDATE: Final = "copy_"
"""Operator of updates of buffers, such as running statistics; they need no gradient."""
QUANTIZED_UPDATE: Final = "quantized_sgd"
"""Operator of updates of int8 weights, whose gradients belong to another parameter of the layer."""


@dataclass(frozen=True, kw_only=True)
class Freezable:
    """A step that trains all parameters, from which graphs that train fewer are derived."""

    step: LoweredStep
    """The lowered step that trains all parameters."""

    @cached_property
    def parameters(self) -> Mapping[str, tuple[str, ...]]:
        """For each trained parameter, the names of its tensor or tiles and of its optimizer state.

        Every int8 weight has the key ``WEIGHT_gradient``; its residual, if any, belongs to it.
        """
        updates = {
            str(tensor.replaces): node
            for node in self.graph.nodes
            if node.phase == Phase.UPDATE and node.op != BUFFER_UPDATE
            for tensor in node.outputs
        }
        state_names = {ref.buffer: state.name for state in self.step.states for ref in state.pieces}
        tensors: dict[str, tuple[str, ...]] = {}
        for state in self.step.states:  # parameters, then their optimizer state
            pieces = tuple(ref.buffer for ref in state.pieces)
            if updates.keys() >= set(pieces):
                first_update = updates[pieces[0]]
                name = state_names[str(first_update.outputs[0].replaces)]
                if first_update.op == QUANTIZED_UPDATE:
                    name = f"{name}_gradient"
                tensors[name] = (*tensors.get(name, ()), *pieces)
        return tensors

    @property
    def graph(self) -> Graph:
        """The graph that trains all parameters."""
        return self.step.graph

    def graph_for(self, names: Collection[str]) -> Graph:
        """Return the graph of the step that trains only the parameters `names`."""
        nodes = _capture_order(self.restricted_nodes(names))
        ordered = defer_updates((LoweredNode(node, ()) for node in nodes), self.step.loss.buffer)
        return replace(self.graph, nodes=tuple(operation.node for operation in ordered))

    def step_for(self, names: Collection[str]) -> LoweredStep:
        """Return the lowered step that trains only the parameters `names`, with its calls."""
        index_of = {node.name: k for k, node in enumerate(self.graph.nodes)}
        operations = []
        for node in _capture_order(self.restricted_nodes(names)):
            outputs = {tensor.name for tensor in node.outputs}
            calls = tuple(self._calls_for(index_of[node.name], outputs))
            operations.append(LoweredNode(node, calls))
        return self.step.with_operations(operations)

    def padded_graph(self, names: Collection[str]) -> Graph:
        """Return the graph that trains only parameters `names`; removed nodes become empty nodes.

        If the padded graph of a superset of `names` has a schedule within the limits, this graph
        has one, too. The position of a buffer's update depends on the nodes that remain, so updates
        of buffers are removed, and there are empty nodes at each possible position of an update.

        Notes
        -----
        Let A be a subset of B. A schedule of the graph that trains B is also one of the padded
        graph of B: each removed node has a stage without a computation, with the tensors of the
        next stage. Now remove from each relation the entries that are not in the padded graph of A.
        Each remaining node has its inputs, because the graph of A has all tensors that its nodes
        read. No step has more tensors in RAM, and no step is added, so RAM, time, energy and
        storage do not rise. Without the empty nodes stages would merge, and one stage computes no
        node twice.
        """
        retained_nodes = self._restrict_to(self.needed_nodes(names) - self.buffer_updates)
        padded_nodes: list[Node] = []
        for k, node in enumerate(self.graph.nodes):
            padded_nodes.append(retained_nodes.get(k) or _empty_node(node.name))
            padded_nodes += [
                _empty_node(f"{node.name}, {number}")
                for number in range(self._max_updates_after[k])
            ]
        return replace(self.graph, nodes=tuple(padded_nodes))

    def restricted_nodes(self, names: Collection[str]) -> tuple[Node, ...]:
        """Return the nodes of `graph_for(names)` in the order of the complete graph."""
        return tuple(self._restrict_to(self.needed_nodes(names)).values())

    def needed_nodes(self, names: Collection[str]) -> frozenset[int]:
        """Return the indices in `graph` of the nodes of a step that trains only `names`."""
        return self.common_nodes.union(*(self.nodes_needed_for[name] for name in names))

    @cached_property
    def nodes_needed_for(self) -> Mapping[str, frozenset[int]]:
        """For each parameter, its update nodes, their ancestors, and the replaced state nodes."""
        updates: dict[str, set[int]] = {name: set() for name in self.parameters}
        for k, name in self.updated_parameter_of.items():
            updates[name].add(k)
        return {name: self._ancestors(nodes) for name, nodes in updates.items()}

    @cached_property
    def common_nodes(self) -> frozenset[int]:
        """The nodes of every step: the loss, updates of buffers, and nodes that they need."""
        updates = {k for k in self.buffer_updates if not self._is_state(k)}
        return self._ancestors({self._loss_node} | updates)

    @property
    def _loss_node(self) -> int:
        return self.graph.node_of[self.graph.tensor_index[self.step.loss.buffer]]

    @cached_property
    def buffer_updates(self) -> frozenset[int]:
        """The nodes whose outputs replace buffers of the model, and the state nodes of these."""
        nodes = enumerate(self.graph.nodes)
        updates = {
            k
            for k, node in nodes
            if node.phase == Phase.UPDATE and k not in self.updated_parameter_of
        }
        return frozenset(updates | self._replaced_state(updates))

    @cached_property
    def _max_updates_after(self) -> Counter[int]:
        """For each node, an upper bound on the number of buffer updates directly after it."""
        graph = self.graph
        update_counts: Counter[int] = Counter()
        for u in self.buffer_updates:
            replacements = [i for i in graph.outputs_of[u] if i in graph.state_of]
            readers = {k for i in replacements for k in graph.users_of[graph.state_of[i]]}
            makers = {graph.node_of[i] for i in graph.inputs_of[u]}
            outputs = (i for k in readers - {u} for i in graph.outputs_of[k])
            users = {k for i in outputs for k in graph.users_of[i]}
            update_counts.update(readers | makers | users | {self._loss_node})
        return update_counts

    @cached_property
    def updated_parameter_of(self) -> Mapping[int, str]:
        """For each node that updates a parameter or its optimizer state, a key of `parameters`."""
        graph = self.graph
        parameter_of = {
            buffer: name for name, buffers in self.parameters.items() for buffer in buffers
        }
        replacements = ((new, graph.tensors[old].name) for old, new in graph.replacement_of.items())
        return {
            graph.node_of[new]: parameter_of[name]
            for new, name in replacements
            if name in parameter_of
        }

    def _ancestors(self, roots: Collection[int]) -> frozenset[int]:
        """Return the nodes `roots`, their ancestors except state, and state that these replace."""
        graph, found_nodes, unvisited_nodes = self.graph, set(roots), list(roots)
        while unvisited_nodes:
            for i in graph.inputs_of[unvisited_nodes.pop()]:
                k = graph.node_of[i]
                if k not in found_nodes and not self._is_state(k):
                    found_nodes.add(k)
                    unvisited_nodes.append(k)
        return frozenset(found_nodes | self._replaced_state(found_nodes))

    def _is_state(self, k: int) -> bool:
        return self.graph.nodes[k].is_state

    def _replaced_state(self, nodes: Collection[int]) -> set[int]:
        """Return the nodes of the state tensors that the outputs of `nodes` replace."""
        graph = self.graph
        outputs = (i for k in nodes for i in graph.outputs_of[k])
        return {graph.node_of[graph.state_of[i]] for i in outputs if i in graph.state_of}

    def _restrict_to(self, retained_nodes: Collection[int]) -> dict[int, Node]:
        """Return `retained_nodes` by index, without outputs and inputs that are not needed."""
        graph = self.graph
        nodes = {k: graph.nodes[k] for k in sorted(retained_nodes)}
        available_names = {tensor.name for node in nodes.values() for tensor in node.outputs}
        read_names = {name for node in nodes.values() for name in node.inputs} | {
            self.step.loss.buffer
        }
        restricted_nodes = {}
        for k, node in nodes.items():
            inputs, outputs, bytes_moved = node.inputs, node.outputs, node.bytes_moved
            instruction_count = node.instructions
            if node.phase == Phase.BACKWARD:
                outputs = tuple(tensor for tensor in outputs if tensor.name in read_names)
            if outputs != node.outputs:
                bytes_moved = bytes_moved and bytes_moved - node.output_bytes + sum(
                    tensor.bytes for tensor in outputs
                )
                read_outputs = {tensor.name for tensor in outputs}
                inputs = self.inputs_for(k, read_outputs)
                instruction_count = estimate_instructions(node, self._calls_for(k, read_outputs))
            output_names = {tensor.name for tensor in outputs}
            restricted_nodes[k] = replace(
                node,
                inputs=tuple(name for name in inputs if name in available_names),
                outputs=outputs,
                bytes_moved=bytes_moved,
                instructions=instruction_count,
                in_place=tuple(
                    (output_name, input_name)
                    for output_name, input_name in node.in_place
                    if output_name in output_names
                ),
            )
        return restricted_nodes

    def inputs_for(self, k: int, output_names: AbstractSet[str]) -> tuple[str, ...]:
        """Return the names of the inputs that node `k` reads to compute `output_names`."""
        read_names = {name for call in self._calls_for(k, output_names) for name in call.buffers}
        return tuple(name for name in self.graph.nodes[k].inputs if name in read_names)

    def _calls_for(self, k: int, output_names: AbstractSet[str]) -> list[Call]:
        """Return the calls of node `k` that access an output in `output_names`, or no output."""
        other_names = {tensor.name for tensor in self.graph.nodes[k].outputs}.difference(
            output_names
        )
        return [
            call
            for call in self.step.calls[k]
            if other_names.isdisjoint(call.buffers) or not output_names.isdisjoint(call.buffers)
        ]


def _empty_node(name: str) -> Node:
    """Return a node without inputs, outputs and cost, which has a stage of its own."""
    return Node(name=name, op="none", phase=Phase.BACKWARD)


def _capture_order(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yield nodes in the order of a capture.

    The update of a buffer follows the nodes that compute or read it; state precedes its first
    reader.
    """
    buffer_updates = [
        node for node in nodes if node.phase == Phase.UPDATE and node.op == BUFFER_UPDATE
    ]
    state_nodes = {node.outputs[0].name: node for node in nodes if node.is_state}
    state_order = {node.outputs[0].name: k for k, node in enumerate(nodes) if node.is_state}
    other_nodes = [node for node in nodes if not node.is_state and node not in buffer_updates]
    last_use: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for k, node in enumerate(other_nodes):
        last_use |= {tensor.name: k for tensor in node.outputs}
        last_use |= dict.fromkeys(node.inputs, k)
        for name in node.inputs:
            readers.setdefault(name, []).append(k)
    makers = {tensor.name: k for k, node in enumerate(other_nodes) for tensor in node.outputs}
    updates_after: dict[int, list[tuple[int, Node]]] = {}
    for node in buffer_updates:
        reader_positions = [
            k for tensor in node.outputs for k in readers.get(str(tensor.replaces), ())
        ]
        required_positions = [
            *reader_positions,
            *(makers[name] for name in node.inputs if name in makers),
        ]
        required_positions += [
            last_use[tensor.name] for k in reader_positions for tensor in other_nodes[k].outputs
        ]
        updates_after.setdefault(max(required_positions), []).append(
            (min(required_positions), node)
        )
    for k, node in enumerate(other_nodes):
        updates = sorted(updates_after.get(k, []), key=lambda pair: pair[0])
        for next_node in (node, *(update for _, update in updates)):
            state_reads = sorted(
                (name for name in next_node.inputs if name in state_nodes),
                key=state_order.__getitem__,
            )
            yield from map(state_nodes.pop, state_reads)
            yield next_node


def graph_signature(graph: Graph) -> list[tuple[Any, ...]]:
    """Return the properties of each node that affect schedules and costs, without names."""
    index = graph.tensor_index
    return [
        (
            node.op,
            node.phase,
            graph.inputs_of[k],
            [
                (tensor.bytes, None if tensor.replaces is None else index[tensor.replaces])
                for tensor in node.outputs
            ],
            node.workspace_bytes,
            node.flops,
            node.instructions,
            node.recomputable,
            node.bytes_moved,
            [(index[output_name], index[input_name]) for output_name, input_name in node.in_place],
        )
        for k, node in enumerate(graph.nodes)
    ]
