"""Checkpoints in a graph of Dynamo: called once, because a schedule decides what is recomputed."""

from __future__ import annotations

import operator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from poetmodel.torch.capturing.front_private import CHECKPOINT, example_value, set_grad_enabled

if TYPE_CHECKING:
    from collections.abc import Sequence

_NORMS: Final = {torch.batch_norm: 5, torch.nn.functional.batch_norm: 5,
                 torch.instance_norm: 5, torch.nn.functional.instance_norm: 5}  # fmt: skip
"""Functions of norms: position of the argument that says whether statistics are updated."""
_STATISTICS: Final = {
    torch.batch_norm: (3, 4),
    torch.instance_norm: (3, 4),
    torch.nn.functional.batch_norm: (1, 2),
    torch.nn.functional.instance_norm: (1, 2),
}
"""Positions of running mean and variance among the arguments."""


def inline_checkpoints(graph_module: fx.GraphModule, tensors: Sequence[torch.Tensor]) -> None:
    """Replace each checkpoint in a graph with inputs `tensors` by the operations in it.

    Eager mode executes a checkpointed function again, which updates the statistics of a norm once
    more: so a norm that has a gradient updates them here once for each checkpoint around it.
    """
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    parameters = {
        node
        for node, tensor in zip(placeholders, tensors, strict=True)
        if isinstance(tensor, torch.nn.Parameter)
    }
    while nodes := [n for n in graph_module.graph.nodes if n.target is CHECKPOINT]:
        for node in nodes:
            _inline(graph_module, node, parameters)


def _inline(graph_module: fx.GraphModule, node: fx.Node, parameters: set[fx.Node]) -> None:
    """Replace one checkpoint; repeat the updates of statistics in it.

    As in eager mode, a reentrant one trains nothing if no input but its parameters has a gradient.
    """
    graph = graph_module.graph
    body_node, *operands = node.args
    body: Any = attrgetter(str(body_node.target))(graph_module)
    mapped: dict[fx.Node, Any] = dict(
        zip(body.graph.find_nodes(op="placeholder"), operands, strict=True)
    )
    results: Any = ()
    trains_nothing = node.kwargs.get("use_reentrant") is True and not any(
        getattr(example_value(operand), "requires_grad", False)
        for operand in operands
        if isinstance(operand, fx.Node) and operand not in parameters
    )
    with graph.inserting_before(node):
        if trains_nothing:
            graph.call_function(set_grad_enabled, (False,))
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                continue
            if inner.op == "output":
                results = fx.node.map_arg(inner.args[0], mapped.__getitem__)
                break
            if inner.op == "get_attr":
                name = f"{body_node.target}_{inner.target}".replace(".", "_")
                setattr(graph_module, name, attrgetter(str(inner.target))(body))
                mapped[inner] = graph.get_attr(name)
                mapped[inner].meta = dict(inner.meta)
                continue
            mapped[inner] = graph.node_copy(inner, mapped.__getitem__)
            if not trains_nothing:
                _repeat_changes(graph, inner, mapped)
        if trains_nothing:
            graph.call_function(set_grad_enabled, (True,))
    _replace_results(node, results)
    graph.erase_node(node)
    if not body_node.users:
        graph.erase_node(body_node)


def _repeat_changes(graph: fx.Graph, inner: fx.Node, mapped: dict[fx.Node, Any]) -> None:
    """Repeat what a norm changes in its second pass: its statistics, and its number of batches."""
    if _updates_statistics(inner):
        _repeat_update(graph, mapped[inner])
    elif inner.target == "add_" and inner.args[0].op == "placeholder":
        graph.node_copy(inner, mapped.__getitem__)


def _replace_results(node: fx.Node, results: Any) -> None:
    """Replace the items of a checkpoint's result by the nodes that compute them."""
    if not isinstance(results, list | tuple):
        node.replace_all_uses_with(results)
        return
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])
            user.graph.erase_node(user)


def _updates_statistics(node: fx.Node) -> bool:
    """Return whether a node is a norm that updates statistics, and has a gradient."""
    if node.target not in _NORMS:
        return False
    value = example_value(node)
    mean = _argument(node, _STATISTICS[node.target][0], "running_mean")
    training = _argument(node, 5, _training_name(node))
    return bool(mean is not None and training and getattr(value, "requires_grad", False))


def _training_name(node: fx.Node) -> str:
    return "use_input_stats" if "instance" in str(node.target) else "training"


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _repeat_update(graph: fx.Graph, norm: fx.Node) -> None:
    """Call a norm once more without gradients, for its statistics."""
    graph.call_function(set_grad_enabled, (False,))
    repeated = graph.call_function(norm.target, norm.args, norm.kwargs)
    repeated.meta = dict(norm.meta)
    graph.call_function(set_grad_enabled, (True,))
