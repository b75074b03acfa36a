"""Rewrites of a captured graph before it is lowered: one operation becomes several."""

from __future__ import annotations

from operator import getitem
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.capturing.signature import InputKind

if TYPE_CHECKING:
    from torch import fx

    from poetmodel.torch.capturing.signature import Joint

_BIAS: Final = 2
"""Which result of a convolution's backward is the gradient of its bias."""


def split_convolutions(joint: Joint) -> None:
    """Let the gradients of input, weight and bias of a convolution be operations of their own.

    PyTorch computes all three together; a schedule that recomputes one would compute all, and no
    gradient could go before the others are there. That of the input comes first, so that the
    weight may be updated after the others. That of the bias is a sum: PyTorch's kernel makes that
    of the weight beside it, even where nobody wants it.
    """
    aten = torch.ops.aten
    graph = joint.graph_module.graph
    for node in graph.find_nodes(
        op="call_function", target=aten.convolution_backward.default, sort=True
    ):
        for position in (0, 1, _BIAS):
            picks = [user for user in node.users if user.target is getitem]
            picks = [user for user in picks if user.args[1] == position]
            if position == _BIAS:
                for user in picks:
                    _sum_over_places(user, node)
            elif picks:
                part = _part(graph, node, position)
                for user in picks:
                    user.args = (part, position)
        graph.erase_node(node)


def divide_loss(joint: Joint, by: int) -> None:
    """Let gradients be those of the loss divided by a number; the loss stays as it is."""
    graph = joint.graph_module.graph
    first = next(node for node in graph.nodes if node.op == "call_function")
    for argument in joint.of(InputKind.TANGENT):
        with graph.inserting_before(first):
            share = graph.call_function(torch.ops.aten.div.Scalar, (argument.node, float(by)))
        share.meta = dict(argument.node.meta)
        argument.node.replace_all_uses_with(
            share, delete_user_cb=lambda user, own=share: user is not own
        )


def _sum_over_places(user: fx.Node, node: fx.Node) -> None:
    """Let what took the gradient of the bias compute it."""
    gradient = node.args[0]
    dimensions = gradient.meta["val"].ndim
    user.target = torch.ops.aten.sum.dim_IntList
    user.args = (gradient, [0, *range(2, dimensions)])
    user.meta = {**node.meta, "val": user.meta["val"]}


def _part(graph: fx.Graph, node: fx.Node, position: int) -> fx.Node:
    mask = [k == position for k in range(3)]
    arguments: tuple[Any, ...] = (*node.args[:-1], mask)
    with graph.inserting_before(node):
        part = graph.call_function(node.target, arguments)
    part.meta = {key: value for key, value in node.meta.items() if key != "val"}
    values = node.meta["val"]
    part.meta["val"] = tuple(value if k == position else None for k, value in enumerate(values))
    return part
