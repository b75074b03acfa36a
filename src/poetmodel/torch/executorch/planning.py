"""An edge program as a training graph, and with its operations in the order of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from poetmodel.graph import Graph, Phase
from poetmodel.plan.alignment import ALIGNMENT, round_up
from poetmodel.torch.executorch.edge import is_view, operator_of
from poetmodel.torch.graph.operators import flops_of, is_random
from poetmodel.torch.graph.profiles import OpProfile, TensorLayout
from poetmodel.torch.graph.rewriting import Rewriter
from poetmodel.torch.graph.step_graph import GraphReader
from poetmodel.torch.graph.tensors import fake_value, tensors_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.export import ExportedProgram

    from poetmodel.torch.graph.step_graph import StepGraph


@dataclass(frozen=True, slots=True)
class EdgeGraph:
    """The operations of an edge program, as `read_edge` finds them."""

    step_graph: StepGraph
    resident_bytes: int
    """Size of trained parameters and changed buffers, which stay in the arena throughout [B]."""
    graph: Graph
    """The training graph without `resident_bytes`; its end node reads all results."""


def read_edge(program: ExportedProgram, *, name: str) -> EdgeGraph:
    """Return the operations of an edge program, without its views.

    Sizes are multiples of the alignment, as in the arena. User inputs are operations at the
    beginning, because they are in the arena until their last use.
    """
    input_nodes, resident_nodes = _split_arguments(program)
    nodes = list(program.graph.nodes)
    forward_nodes = set(nodes[: nodes.index(_loss_node(program)) + 1])
    reader = GraphReader(
        program.graph,
        name=name,
        phase_of=lambda node: Phase.FORWARD if node in forward_nodes else Phase.BACKWARD,
    )
    for index, node in enumerate(input_nodes):
        value = fake_value(node)
        reader.add_source(
            node,
            name=f"inputs[{index}]",
            op=node.op,
            layout=TensorLayout.from_tensor(value),
            size_bytes=round_up(value.nbytes, ALIGNMENT),
        )
    calls = [node for node in nodes if node.op == "call_function" and node.target is not getitem]
    step_graph = reader.read({node: _make_profile(node) for node in calls if not is_view(node)})
    graph_nodes = [
        step_graph.training_node(
            operation,
            recomputable=operation.node not in input_nodes
            and not is_random(operator_of(operation.node)),
        )
        for operation in step_graph.operations
    ]
    results = step_graph.find_reads(program.graph.output_node().all_input_nodes)
    return EdgeGraph(
        step_graph=step_graph,
        resident_bytes=sum(round_up(fake_value(node).nbytes, ALIGNMENT) for node in resident_nodes),
        graph=Graph(name=name, nodes=(*graph_nodes, step_graph.results_node(results.storages))),
    )


def _make_profile(node: fx.Node) -> OpProfile:
    """Return a node's profile; output bytes are rounded up to `ALIGNMENT`, moved bytes are not."""
    value = fake_value(node)
    is_single = not isinstance(value, tuple | list)
    tensors = [
        (None if is_single else position, output)
        for position, output in enumerate((value,) if is_single else value)
        if isinstance(output, torch.Tensor)
    ]
    sizes = tuple(round_up(tensor.nbytes, ALIGNMENT) for _, tensor in tensors)
    layouts = (TensorLayout.from_tensor(tensor, position) for position, tensor in tensors)
    arguments, keywords = fx.node.map_arg((node.args, node.kwargs), fake_value)
    return OpProfile(
        sizes_bytes=sizes,
        outputs=tuple(enumerate(layouts)),
        flops=flops_of(operator_of(node), arguments, keywords, value),
        moved_bytes=sum(tensor.nbytes for tensor in tensors_in([arguments, keywords, value])),
    )


def _loss_node(program: ExportedProgram) -> fx.Node:
    """Return the node that computes the loss; the result itself may be a view or item of it."""
    results = program.graph.output_node().args[0]
    specs = program.graph_signature.output_specs
    loss: Any = next(
        result
        for result, spec in zip(results, specs, strict=True)
        if spec.kind == OutputKind.LOSS_OUTPUT
    )
    while is_view(loss) or loss.target is getitem:
        loss = loss.args[0]
    return loss


def _split_arguments(program: ExportedProgram) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return (user inputs, trained parameters and changed buffers, which stay in the arena)."""
    signature = program.graph_signature
    trained_parameters = {
        spec.target
        for spec in signature.output_specs
        if spec.kind == OutputKind.GRADIENT_TO_PARAMETER
    }
    changed_buffers = set(signature.buffers_to_mutate.values())
    placeholders = program.graph.find_nodes(op="placeholder")
    arguments_by_name = {spec.arg.name: (spec.kind, spec.target) for spec in signature.input_specs}
    input_nodes = [
        node for node in placeholders if arguments_by_name[node.name][0] == InputKind.USER_INPUT
    ]
    resident_nodes = [
        node
        for node in placeholders
        if arguments_by_name[node.name]
        in {(InputKind.PARAMETER, path) for path in trained_parameters}
        or arguments_by_name[node.name] in {(InputKind.BUFFER, path) for path in changed_buffers}
    ]
    return input_nodes, resident_nodes


class ReorderOperations(PassBase):  # type: ignore[misc, unused-ignore]
    """Graph pass that puts operations into the order of a plan, with a copy for each recomputation.

    `order` has an index in `step_graph` per computation. Views are written before their first
    reader. Items of an operation with several outputs directly follow it, because a later item
    would keep all others in memory.
    """

    def __init__(self, step_graph: StepGraph, order: Sequence[int]) -> None:
        super().__init__()
        self._step_graph = step_graph
        self._order = [i for i in order if i < len(step_graph.operations)]  # without the end node

    def call(self, module: fx.GraphModule) -> PassResult:
        """Replace the module's graph by one in the order of the plan, with its recomputations."""
        old_graph = module.graph
        nodes = {node.name: node for node in old_graph.nodes}
        output_keys = {
            nodes[node.name]: value for node, value in self._step_graph.output_keys.items()
        }
        rewriter = Rewriter(output_keys)
        for node in old_graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                rewriter.add_placeholder(node)
        for index in self._order:
            operation = self._step_graph.operations[index]
            if operation.node.op == "call_function":
                rewriter.write_node(nodes[operation.node.name], operation.storages)
        rewriter.graph.node_copy(old_graph.output_node(), rewriter.map_node)
        module.graph = rewriter.graph
        module.recompile()
        return PassResult(module, modified=True)
