"""The captured graph, run node by node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from poetmodel.torch.kernels import kernel_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from poetmodel.torch.joint import Joint

    Execute = Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any]


def call(node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Return what the operation of a node makes of its arguments."""
    return kernel_of(node)(*arguments, **keywords)


def replay(joint: Joint, execute: Execute = call) -> tuple[Any, ...]:
    """Run every operation once, in the order of the graph, on the inputs of the capture.

    Values are let go after their last use. The state of the random generator is put back.

    Parameters
    ----------
    joint : Joint
        The captured step.
    execute : callable
        Gets each node with its arguments and returns its value; by default `call`.

    Returns
    -------
    tuple
        Values of ``joint.results``, in order.
    """
    import torch
    from torch.fx.node import map_arg

    graph = joint.graph_module.graph
    last_reader: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            last_reader[source] = node
    dying: dict[fx.Node, list[fx.Node]] = {}
    for source, reader in last_reader.items():
        dying.setdefault(reader, []).append(source)
    values: dict[fx.Node, Any] = {a.node: _detached(joint.value(a)) for a in joint.arguments}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for node in graph.nodes:
            if node.op == "call_function":
                arguments = map_arg(node.args, values.__getitem__)
                keywords = map_arg(node.kwargs, values.__getitem__)
                values[node] = execute(node, arguments, keywords)
                del arguments, keywords
            if node.op == "output":
                return tuple(values[result.node] for result in joint.results)
            for source in dying.get(node, ()):
                del values[source]
            if node not in last_reader and node.op == "call_function":
                del values[node]
    return ()


def _detached(value: Any) -> Any:
    return value.detach() if hasattr(value, "detach") else value
