"""Graphs run node by node, with eager's kernels; every value dies at its last use."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from torch import fx

from poetmodel.torch.dynamo.operations import function_of

if TYPE_CHECKING:
    from collections.abc import Callable


def interpreted(module: fx.GraphModule, _: object = None) -> Callable[[list[Any]], Any]:
    """Return a function that runs a graph and takes its arguments out of the list they come in.

    Of an operation with several results those that somebody reads are taken out at once.
    """
    nodes = list(module.graph.nodes)
    last = {source: node for node in nodes for source in node.all_input_nodes}
    dying: dict[fx.Node, list[fx.Node]] = {}
    for source, node in last.items():
        if node.op != "output":
            dying.setdefault(node, []).append(source)
    for node in nodes:
        if node not in last and node.op == "call_function":
            dying.setdefault(node, []).append(node)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    constants = {
        node: operator.attrgetter(str(node.target))(module)
        for node in nodes
        if node.op == "get_attr"
    }
    steps = [
        (node, function_of(node), dying.get(node, ()))
        for node in nodes
        if node.op == "call_function"
    ]
    (output,) = (node for node in nodes if node.op == "output")

    def run(arguments: list[Any]) -> Any:
        values = dict(zip(placeholders, arguments, strict=True))
        arguments.clear()
        for node in placeholders:
            if node not in last:
                del values[node]
        values |= constants
        value_of = values.__getitem__
        for node, function, dead in steps:
            values[node] = function(
                *fx.node.map_arg(node.args, value_of), **fx.node.map_arg(node.kwargs, value_of)
            )
            for source in dead:
                del values[source]
        return fx.node.map_arg(output.args[0], value_of)

    run._boxed_call = True  # type: ignore[attr-defined] # noqa: SLF001 - PyTorch asks for it
    return run
