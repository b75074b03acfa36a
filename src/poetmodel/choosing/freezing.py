"""Steps in which only some parameters are trained: what the updates of the others need is left out.

A step that was captured with all parameters has all nodes of those with few. To freeze a parameter
is to take out its update, and then what nothing reads any more; its value is a constant then.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from poetmodel.graph import Graph, Node, Phase
from poetmodel.lowered.instructions import instructions
from poetmodel.lowered.step import defer_updates

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from poetmodel.lowered.calls import Call
    from poetmodel.lowered.step import LoweredStep

BUFFER_UPDATE: Final = "copy_"
"""The operator of updates that no gradient has a part in: of running statistics."""
QUANTIZED_UPDATE: Final = "quantized_sgd"
"""The operator of updates of int8 weights, which another parameter of the layer stands for."""


@dataclass(frozen=True, kw_only=True)
class Freezable:
    """A step with the updates of all parameters, from whose graph those with few are made."""

    step: LoweredStep

    @cached_property
    def parameters(self) -> Mapping[str, tuple[str, ...]]:
        """The state tensors of each parameter: itself or its tiles, and what its update keeps.

        Int8 weights, and their residuals, are those of the parameter ``weight_gradient``.
        """
        updates = {
            str(tensor.replaces): node
            for node in self.graph.nodes
            if node.phase == Phase.UPDATE and node.op != BUFFER_UPDATE
            for tensor in node.outputs
        }
        state_names = {ref.buffer: state.name for state in self.step.states for ref in state.pieces}
        tensors: dict[str, tuple[str, ...]] = {}
        for state in self.step.states:  # parameters, then what an optimizer keeps of them
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
        """The graph in which all are trained."""
        return self.step.graph

    def trained(self, names: Collection[str]) -> Graph:
        """Return the graph of the step in which only these parameters are trained.

        It is that of a step that is captured so, but for names: see `shape_of`.
        """
        ordered = ((node, ()) for node in _in_order(self.restricted(names)))
        pairs = defer_updates(ordered, self.step.loss.buffer)
        return replace(self.graph, nodes=tuple(node for node, _ in pairs))

    def trained_step(self, names: Collection[str]) -> LoweredStep:
        """Return the step of `trained`, with the calls that it makes."""
        number = {node.name: k for k, node in enumerate(self.graph.nodes)}
        nodes = tuple(_in_order(self.restricted(names)))
        wanted = ((number[node.name], {t.name for t in node.outputs}) for node in nodes)
        return self.step.with_nodes(nodes, [tuple(self._calls_for(*each)) for each in wanted])

    def padded(self, names: Collection[str]) -> Graph:
        """Return a graph that has a schedule within limits if one of more parameters has one.

        Nodes that are left out are empty ones here, so that all such graphs have the same stages.
        Updates of buffers are left out, since these come earlier where fewer nodes follow: there is
        an empty node wherever one may come.

        Notes
        -----
        Let A be a part of B. Take a schedule of the graph that trains B. It is one of the padded
        graph of B: where a node is missing, a stage begins that computes nothing and holds what the
        next one begins with. Now leave out of each relation what is not in the padded graph of A.
        Each node that is left has its inputs, since the graph of A has all that its nodes read, and
        these are no other tensors than before. No step holds more, and none is added. So RAM, time,
        energy and storage are at most those of before, and the schedule is valid. Without the empty
        nodes this would not follow: stages would join, and one stage computes no node twice.
        """
        nodes = self._restricted(self.needed(names) - self.renewals)
        stages: list[Node] = []
        for k, node in enumerate(self.graph.nodes):
            stages.append(nodes.get(k) or _empty(node.name))
            stages += [_empty(f"{node.name}, {number}") for number in range(self._renewed_after[k])]
        return replace(self.graph, nodes=tuple(stages))

    def restricted(self, names: Collection[str]) -> tuple[Node, ...]:
        """Return the nodes of `trained` in the order of the whole graph."""
        return tuple(self._restricted(self.needed(names)).values())

    def needed(self, names: Collection[str]) -> frozenset[int]:
        """Return the nodes of a step that trains only these parameters, by their numbers here."""
        return self.always.union(*(self.needed_for[name] for name in names))

    @cached_property
    def needed_for(self) -> Mapping[str, frozenset[int]]:
        """For each parameter the nodes that its update needs, and the state that this replaces."""
        updates: dict[str, set[int]] = {name: set() for name in self.parameters}
        for k, name in self.owner.items():
            updates[name].add(k)
        return {name: self._ancestors(nodes) for name, nodes in updates.items()}

    @cached_property
    def always(self) -> frozenset[int]:
        """The nodes of every step: those that the loss needs, and new values of buffers."""
        renewals = {k for k in self.renewals if not self._is_state(k)}
        return self._ancestors({self._loss_node} | renewals)

    @property
    def _loss_node(self) -> int:
        return self.graph.node_of[self.graph.tensor_index[self.step.loss.buffer]]

    @cached_property
    def renewals(self) -> frozenset[int]:
        """The updates of buffers, and these."""
        nodes = enumerate(self.graph.nodes)
        updates = {k for k, node in nodes if node.phase == Phase.UPDATE and k not in self.owner}
        return frozenset(updates | self._replaced_by(updates))

    @cached_property
    def _renewed_after(self) -> Counter[int]:
        """How many updates of buffers may come after a node, by what of it is trained."""
        graph = self.graph
        places: Counter[int] = Counter()
        for u in self.renewals:
            read = [i for i in graph.outputs_of[u] if i in graph.state_of]
            readers = {k for i in read for k in graph.users_of[graph.state_of[i]]}
            makers = {graph.node_of[i] for i in graph.inputs_of[u]}
            outputs = (i for k in readers - {u} for i in graph.outputs_of[k])
            users = {k for i in outputs for k in graph.users_of[i]}
            places.update(readers | makers | users | {self._loss_node})
        return places

    @cached_property
    def owner(self) -> Mapping[int, str]:
        """For each update of a parameter the parameter."""
        graph = self.graph
        of = {buffer: name for name, buffers in self.parameters.items() for buffer in buffers}
        replaced = ((new, graph.tensors[old].name) for old, new in graph.replacement_of.items())
        return {graph.node_of[new]: of[name] for new, name in replaced if name in of}

    def _ancestors(self, roots: Collection[int]) -> frozenset[int]:
        """Return nodes and all that they need, and of state what they replace."""
        graph, reached, left = self.graph, set(roots), list(roots)
        while left:
            for i in graph.inputs_of[left.pop()]:
                k = graph.node_of[i]
                if k not in reached and not self._is_state(k):
                    reached.add(k)
                    left.append(k)
        return frozenset(reached | self._replaced_by(reached))

    def _is_state(self, k: int) -> bool:
        return self.graph.nodes[k].is_state

    def _replaced_by(self, nodes: Collection[int]) -> set[int]:
        """Return the state that some of the nodes replace."""
        graph = self.graph
        outputs = (i for k in nodes for i in graph.outputs_of[k])
        return {graph.node_of[graph.state_of[i]] for i in outputs if i in graph.state_of}

    def _restricted(self, kept: Collection[int]) -> dict[int, Node]:
        """Return the nodes that are kept, without what nothing makes or reads any more."""
        graph = self.graph
        nodes = {k: graph.nodes[k] for k in sorted(kept)}
        available = {tensor.name for node in nodes.values() for tensor in node.outputs}
        read = {name for node in nodes.values() for name in node.inputs} | {self.step.loss.buffer}
        restricted = {}
        for k, node in nodes.items():
            inputs, outputs, moved = node.inputs, node.outputs, node.bytes_moved
            count = node.instructions
            if node.phase == Phase.BACKWARD:
                outputs = tuple(tensor for tensor in outputs if tensor.name in read)
            if outputs != node.outputs:
                moved = moved and moved - node.output_bytes + sum(t.bytes for t in outputs)
                wanted = {tensor.name for tensor in outputs}
                inputs = self.read_for(k, wanted)
                count = instructions(node, self._calls_for(k, wanted))
            there = {tensor.name for tensor in outputs}
            restricted[k] = replace(
                node,
                inputs=tuple(name for name in inputs if name in available),
                outputs=outputs,
                bytes_moved=moved,
                instructions=count,
                in_place=tuple((y, x) for y, x in node.in_place if y in there),
            )
        return restricted

    def read_for(self, k: int, wanted: AbstractSet[str]) -> tuple[str, ...]:
        """Return the inputs that a node reads for some of its outputs."""
        named = {name for call in self._calls_for(k, wanted) for name in call.buffers}
        return tuple(name for name in self.graph.nodes[k].inputs if name in named)

    def _calls_for(self, k: int, wanted: AbstractSet[str]) -> list[Call]:
        """Return the calls of a node for some of its outputs, without those for others alone."""
        others = {tensor.name for tensor in self.graph.nodes[k].outputs}.difference(wanted)
        return [
            call
            for call in self.step.calls[k]
            if others.isdisjoint(call.buffers) or not wanted.isdisjoint(call.buffers)
        ]


def _empty(name: str) -> Node:
    """Return a node that computes nothing: a stage."""
    return Node(name=name, op="none", phase=Phase.BACKWARD)


def _in_order(nodes: Sequence[Node]) -> Iterator[Node]:
    """Yield nodes in the order of a capture.

    Buffers are renewed once nothing reads what their readers make; state comes in front of its
    first reader.
    """
    renewals = [node for node in nodes if node.phase == Phase.UPDATE and node.op == BUFFER_UPDATE]
    state = {node.outputs[0].name: node for node in nodes if node.is_state}
    number = {node.outputs[0].name: k for k, node in enumerate(nodes) if node.is_state}
    computed = [n for n in nodes if not n.is_state and n not in renewals]
    last: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    for k, node in enumerate(computed):
        last |= {tensor.name: k for tensor in node.outputs}
        last |= dict.fromkeys(node.inputs, k)
        for name in node.inputs:
            readers.setdefault(name, []).append(k)
    makers = {tensor.name: k for k, node in enumerate(computed) for tensor in node.outputs}
    after: dict[int, list[tuple[int, Node]]] = {}
    for node in renewals:
        ks = [k for t in node.outputs for k in readers.get(str(t.replaces), ())]
        waits = [*ks, *(makers[name] for name in node.inputs if name in makers)]
        waits += [last[tensor.name] for k in ks for tensor in computed[k].outputs]
        after.setdefault(max(waits), []).append((min(waits), node))
    for k, node in enumerate(computed):
        due = sorted(after.get(k, []), key=lambda pair: pair[0])
        for following in (node, *(renewal for _, renewal in due)):
            first = sorted(
                (name for name in following.inputs if name in state), key=number.__getitem__
            )
            yield from map(state.pop, first)
            yield following


def shape_of(graph: Graph) -> list[tuple[Any, ...]]:
    """Return all of a graph that schedules and costs depend on: its nodes, but for their names."""
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
