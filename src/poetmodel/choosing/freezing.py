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
from poetmodel.lowered.step import defer_updates

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from poetmodel.lowered.calls import Call
    from poetmodel.lowered.step import LoweredStep

BUFFER_UPDATE: Final = "copy_"
"""Operator of updates without a gradient, such as those of running statistics."""
QUANTIZED_UPDATE: Final = "quantized_sgd"
"""Operator of updates of int8 weights, whose gradients belong to another parameter of the layer."""


@dataclass(frozen=True, kw_only=True)
class Freezable:
    """A step that updates all parameters, and the graphs derived from it that train fewer."""

    step: LoweredStep

    @cached_property
    def parameters(self) -> Mapping[str, tuple[str, ...]]:
        """The state tensors of each parameter: its tiles or itself, and its optimizer state.

        Int8 weights and their residuals belong to the parameter ``weight_gradient``.
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
                update = updates[pieces[0]]
                name = state_names[str(update.outputs[0].replaces)]
                if update.op == QUANTIZED_UPDATE:
                    name = f"{name}_gradient"
                tensors[name] = (*tensors.get(name, ()), *pieces)
        return tensors

    @property
    def graph(self) -> Graph:
        """The graph that trains all parameters."""
        return self.step.graph

    def graph_for(self, names: Collection[str]) -> Graph:
        """Return the graph of the step that trains only these parameters.

        It equals the graph of a step that was captured with only these parameters trained, except
        for names: see `graph_signature`.
        """
        ordered = ((node, ()) for node in _capture_order(self.restricted(names)))
        pairs = defer_updates(ordered, self.step.loss.buffer)
        return replace(self.graph, nodes=tuple(node for node, _ in pairs))

    def step_for(self, names: Collection[str]) -> LoweredStep:
        """Return the step of `graph_for`, with its calls."""
        number = {node.name: k for k, node in enumerate(self.graph.nodes)}
        nodes = tuple(_capture_order(self.restricted(names)))
        outputs_by_node = ((number[node.name], {t.name for t in node.outputs}) for node in nodes)
        return self.step.with_nodes(
            nodes, [tuple(self._calls_for(*each)) for each in outputs_by_node]
        )

    def padded_graph(self, names: Collection[str]) -> Graph:
        """Return a graph with removed nodes replaced by empty ones.

        A padded graph has a schedule within the limits if the padded graph of any superset of these
        parameters has one, because all such graphs have the same stages. Updates of buffers are
        removed, because they come earlier if fewer nodes follow: there is an empty node at each
        possible position.

        Notes
        -----
        Let A be a subset of B. Take a schedule of the graph that trains B. It is also a schedule of
        the padded graph of B: at each removed node, a stage begins that computes nothing and has
        the tensors of the next stage. Now remove from each relation the entries that are not in the
        padded graph of A. Each remaining node has its inputs, because the graph of A has all
        tensors that its nodes read, and these are the same as before. No step has more tensors in
        RAM, and no step is added. So RAM, time, energy and storage are at most as before, and the
        schedule is valid. Without the empty nodes this would not follow: stages would merge, and
        one stage computes no node twice.
        """
        nodes = self._remove_others(self.needed(names) - self.buffer_updates)
        stages: list[Node] = []
        for k, node in enumerate(self.graph.nodes):
            stages.append(nodes.get(k) or _empty_node(node.name))
            stages += [
                _empty_node(f"{node.name}, {number}")
                for number in range(self._max_updates_after[k])
            ]
        return replace(self.graph, nodes=tuple(stages))

    def restricted(self, names: Collection[str]) -> tuple[Node, ...]:
        """Return the nodes of `graph_for` in the order of the complete graph."""
        return tuple(self._remove_others(self.needed(names)).values())

    def needed(self, names: Collection[str]) -> frozenset[int]:
        """Return the indices of the nodes of a step that trains only these parameters."""
        return self.always.union(*(self.needed_for[name] for name in names))

    @cached_property
    def needed_for(self) -> Mapping[str, frozenset[int]]:
        """For each parameter, the nodes that its update needs, and the state that they replace."""
        updates: dict[str, set[int]] = {name: set() for name in self.parameters}
        for k, name in self.owner.items():
            updates[name].add(k)
        return {name: self._ancestors(nodes) for name, nodes in updates.items()}

    @cached_property
    def always(self) -> frozenset[int]:
        """The nodes of every step: those on which the loss depends, and updates of buffers."""
        renewals = {k for k in self.buffer_updates if not self._is_state(k)}
        return self._ancestors({self._loss_node} | renewals)

    @property
    def _loss_node(self) -> int:
        return self.graph.node_of[self.graph.tensor_index[self.step.loss.buffer]]

    @cached_property
    def buffer_updates(self) -> frozenset[int]:
        """The nodes that update buffers of the model, and the state nodes of these buffers."""
        nodes = enumerate(self.graph.nodes)
        updates = {k for k, node in nodes if node.phase == Phase.UPDATE and k not in self.owner}
        return frozenset(updates | self._replaced_state(updates))

    @cached_property
    def _max_updates_after(self) -> Counter[int]:
        """For each node, the maximum number of buffer updates directly after it."""
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
    def owner(self) -> Mapping[int, str]:
        """The parameter of each node that updates one."""
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
        """Return `roots`, their ancestors except state, and the state nodes that these replace."""
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
        """Return the state nodes that some nodes replace."""
        graph = self.graph
        outputs = (i for k in nodes for i in graph.outputs_of[k])
        return {graph.node_of[graph.state_of[i]] for i in outputs if i in graph.state_of}

    def _remove_others(self, kept_nodes: Collection[int]) -> dict[int, Node]:
        """Return the `kept_nodes` by index, without missing inputs and without unread gradients."""
        graph = self.graph
        nodes = {k: graph.nodes[k] for k in sorted(kept_nodes)}
        available = {tensor.name for node in nodes.values() for tensor in node.outputs}
        read_names = {name for node in nodes.values() for name in node.inputs} | {
            self.step.loss.buffer
        }
        restricted = {}
        for k, node in nodes.items():
            inputs, outputs, bytes_moved = node.inputs, node.outputs, node.bytes_moved
            instruction_count = node.instructions
            if node.phase == Phase.BACKWARD:
                outputs = tuple(tensor for tensor in outputs if tensor.name in read_names)
            if outputs != node.outputs:
                bytes_moved = bytes_moved and bytes_moved - node.output_bytes + sum(
                    t.bytes for t in outputs
                )
                wanted_outputs = {tensor.name for tensor in outputs}
                inputs = self.inputs_for(k, wanted_outputs)
                instruction_count = estimate_instructions(node, self._calls_for(k, wanted_outputs))
            output_names = {tensor.name for tensor in outputs}
            restricted[k] = replace(
                node,
                inputs=tuple(name for name in inputs if name in available),
                outputs=outputs,
                bytes_moved=bytes_moved,
                instructions=instruction_count,
                in_place=tuple((y, x) for y, x in node.in_place if y in output_names),
            )
        return restricted

    def inputs_for(self, k: int, output_names: AbstractSet[str]) -> tuple[str, ...]:
        """Return the inputs that node `k` reads to compute the outputs with these names."""
        read_names = {name for call in self._calls_for(k, output_names) for name in call.buffers}
        return tuple(name for name in self.graph.nodes[k].inputs if name in read_names)

    def _calls_for(self, k: int, output_names: AbstractSet[str]) -> list[Call]:
        """Return the calls of node `k` without those that only compute outputs with other names."""
        other_names = {tensor.name for tensor in self.graph.nodes[k].outputs}.difference(
            output_names
        )
        return [
            call
            for call in self.step.calls[k]
            if other_names.isdisjoint(call.buffers) or not output_names.isdisjoint(call.buffers)
        ]


def _empty_node(name: str) -> Node:
    """Return a node that computes nothing, to begin a stage."""
    return Node(name=name, op="none", phase=Phase.BACKWARD)


def _capture_order(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yield nodes in the order of a capture.

    Buffers are updated after the last read of all outputs of their readers; state precedes its
    first reader.
    """
    buffer_updates = [
        node for node in nodes if node.phase == Phase.UPDATE and node.op == BUFFER_UPDATE
    ]
    state = {node.outputs[0].name: node for node in nodes if node.is_state}
    state_order = {node.outputs[0].name: k for k, node in enumerate(nodes) if node.is_state}
    other_nodes = [n for n in nodes if not n.is_state and n not in buffer_updates]
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
        reader_positions = [k for t in node.outputs for k in readers.get(str(t.replaces), ())]
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
        for next_node in (node, *(renewal for _, renewal in updates)):
            state_reads = sorted(
                (name for name in next_node.inputs if name in state), key=state_order.__getitem__
            )
            yield from map(state.pop, state_reads)
            yield next_node


def graph_signature(graph: Graph) -> list[tuple[Any, ...]]:
    """Return all properties of a graph that affect schedules and costs: its nodes without names."""
    index = graph.tensor_index
    return [
        (
            node.op,
            node.phase,
            graph.inputs_of[k],
            [(t.bytes, None if t.replaces is None else index[t.replaces]) for t in node.outputs],
            node.workspace_bytes,
            node.flops,
            node.instructions,
            node.recomputable,
            node.bytes_moved,
            [(index[y], index[x]) for y, x in node.in_place],
        )
        for k, node in enumerate(graph.nodes)
    ]
