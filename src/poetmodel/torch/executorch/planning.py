"""An edge program as a training graph, and again as a program in the order of a plan."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from poetmodel.graph import Graph, Node, Phase, Tensor
from poetmodel.plan.arena import ALIGNMENT, aligned
from poetmodel.torch.capturing.replay import flops_of, tensors_in
from poetmodel.torch.dynamo.operations import fake, node_names, operator_name
from poetmodel.torch.dynamo.planning import RESULTS
from poetmodel.torch.executorch.edge import is_view, operator_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.export import ExportedProgram

    Key = tuple[fx.Node, int]
    """Node that makes memory, and the number of its output."""


@dataclass(frozen=True, kw_only=True)
class Captured:
    """An edge program as a training graph."""

    graph: Graph
    """Sizes are as in the arena: multiples of the alignment. Inputs are its first nodes: they are
    in the arena from the beginning to their last use."""
    operations: Mapping[str, fx.Node]
    """The node of the edge program for each node of the graph, but for inputs and the end."""
    resident_bytes: int
    """Bytes in the arena throughout: parameters that are trained, and buffers that change [B]."""


def captured(program: ExportedProgram, *, name: str) -> Captured:
    """Return the training graph of an edge program."""
    inputs, resident = _arguments(program)
    nodes = list(program.graph.nodes)
    output = nodes[-1]
    calls = [n for n in nodes if n.op == "call_function" and not is_view(n) and not _is_item(n)]
    names = dict(zip((*inputs, *calls), (*_names(inputs), *node_names(calls)), strict=True))
    tensors = {
        (node, number): Tensor(
            name=f"{named}:{number}" if isinstance(fake(node), tuple | list) else named,
            bytes=_arena_bytes(value),
        )
        for node, named in names.items()
        for number, value in enumerate(_values(node))
        if isinstance(value, torch.Tensor)
    }
    loss = next(
        result
        for result, spec in zip(output.args[0], program.graph_signature.output_specs, strict=True)
        if spec.kind == OutputKind.LOSS_OUTPUT
    )
    forward = set(nodes[: nodes.index(_base(loss)[0]) + 1])

    def node_of(node: fx.Node) -> Node:
        sources = dict.fromkeys(map(_base, node.all_input_nodes))
        arguments, keywords = fx.node.map_arg((node.args, node.kwargs), fake)
        is_call = node.op == "call_function"
        moved = tensors_in([arguments, keywords, fake(node)]) if is_call else ()
        return Node(
            name=names.get(node, RESULTS),
            op=operator_name(node) if is_call else node.op,
            phase=Phase.FORWARD if node in forward else Phase.BACKWARD,
            inputs=tuple(tensors[source].name for source in sources if source in tensors),
            outputs=tuple(tensor for (maker, _), tensor in tensors.items() if maker is node),
            flops=flops_of(operator_of(node), arguments, keywords, fake(node)) if is_call else 0,
            bytes_moved=sum(value.nbytes for value in moved),
            recomputable=is_call and not _is_random(node),
        )

    return Captured(
        graph=Graph(name=name, nodes=tuple(map(node_of, (*inputs, *calls, output)))),
        operations={names[node]: node for node in calls},
        resident_bytes=sum(_arena_bytes(fake(node)) for node in resident),
    )


def _arguments(program: ExportedProgram) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the arguments of a program that are inputs, and those that are there throughout."""
    signature = program.graph_signature
    trained = {
        spec.target
        for spec in signature.output_specs
        if spec.kind == OutputKind.GRADIENT_TO_PARAMETER
    }
    changed = set(signature.buffers_to_mutate.values())
    arguments = program.graph.find_nodes(op="placeholder")
    kinds = {spec.arg.name: (spec.kind, spec.target) for spec in signature.input_specs}
    inputs = [node for node in arguments if kinds[node.name][0] == InputKind.USER_INPUT]
    resident = [
        node
        for node in arguments
        if kinds[node.name] in {(InputKind.PARAMETER, path) for path in trained}
        or kinds[node.name] in {(InputKind.BUFFER, path) for path in changed}
    ]
    return inputs, resident


def _names(inputs: Sequence[fx.Node]) -> list[str]:
    return [f"inputs[{number}]" for number in range(len(inputs))]


def _values(node: fx.Node) -> Sequence[Any]:
    """Return the output of a node, as the capture predicts it."""
    value = fake(node)
    return value if isinstance(value, tuple | list) else (value,)


def _arena_bytes(value: torch.Tensor) -> int:
    return aligned(value.nbytes, ALIGNMENT)


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(operator_of(node), "tags", ())


def _base(node: fx.Node) -> Key:
    """Return the node that made a node's memory, and which of its outputs that is."""
    while is_view(node):
        node = node.args[0]
    return (node.args[0], node.args[1]) if _is_item(node) else (node, 0)


class InOrder(PassBase):  # type: ignore[misc, unused-ignore]
    """Puts operations into the order of a plan; what is computed twice is there twice.

    Views are made again where they are read. An item of a result follows the result directly: one
    that came later would keep all others.
    """

    def __init__(self, order: Iterable[str], operations: Mapping[str, fx.Node]) -> None:
        super().__init__()
        self._order = [operations[name].name for name in order if name in operations]

    def call(self, module: fx.GraphModule) -> PassResult:
        """Replace the graph of a module."""
        old, new = module.graph, fx.Graph()
        nodes = {node.name: node for node in old.nodes}
        latest: dict[fx.Node, fx.Node] = {}
        shown: dict[tuple[fx.Node, fx.Node], fx.Node] = {}

        def current(node: fx.Node) -> fx.Node:
            if not (is_view(node) or _is_item(node)):
                return latest[node]
            source = current(node.args[0])
            if (node, source) not in shown:
                shown[node, source] = new.node_copy(node, lambda _: source)
            return shown[node, source]

        for node in old.nodes:
            if node.op in ("placeholder", "get_attr"):
                latest[node] = new.node_copy(node)
        for name in self._order:
            node = nodes[name]
            latest[node] = new.node_copy(node, current)
            for user in node.users:
                if _is_item(user):
                    current(user)
        new.node_copy(old.output_node(), current)
        module.graph = new
        module.recompile()
        return PassResult(module, modified=True)
