"""An FX graph as Python code without branches that deletes each value after its last use."""

from __future__ import annotations

import math
from operator import attrgetter, getitem
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import fx

from poetmodel.torch.graph.operators import kernel_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


class PythonFunction(NamedTuple):
    """A function that executes a graph, and its source."""

    source: str
    call: Callable[..., Any]


def compile_graph(
    graph: fx.Graph,
    *,
    name: str = "graph",
    n_separate_arguments: int | None = None,
    module: torch.nn.Module | None = None,
) -> PythonFunction:
    """Compile a graph to a Python function ``step(arguments, ...)``, where `arguments` is a list.

    The list has the values of the placeholders; the function clears it and deletes each value after
    its last use. With `n_separate_arguments`, the last placeholders are parameters of their own,
    and the list is not cleared. `module` has the attributes of ``get_attr`` nodes, read once.
    `name` is that of the code in tracebacks.
    """
    writer = _PythonWriter(module)
    last_reader = {
        source_node: node for node in graph.nodes for source_node in node.all_input_nodes
    }
    placeholder_nodes = [node for node in graph.nodes if node.op == "placeholder"]
    n_listed = len(placeholder_nodes) - (n_separate_arguments or 0)
    list_names = [node.name for node in placeholder_nodes[:n_listed]]
    lines = [f"({', '.join(list_names)},) = arguments"] if list_names else []
    if n_separate_arguments is None:
        unread_names = [node.name for node in placeholder_nodes if node not in last_reader]
        lines += ["arguments.clear()", *_del_statements(unread_names)]
    retained_nodes = set() if n_separate_arguments is None else set(placeholder_nodes)
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {writer.format_expression(node.args[0])}")
        elif node.op != "placeholder":
            lines.append(f"{node.name} = {writer.format_operation(node)}")
            dead_names = [
                source_node.name
                for source_node in node.all_input_nodes
                if last_reader[source_node] is node and source_node not in retained_nodes
            ]
            lines += _del_statements(
                dead_names if node in last_reader else [*dead_names, node.name]
            )
    parameters = ", ".join(["arguments", *(node.name for node in placeholder_nodes[n_listed:])])
    source = f"def step({parameters}):\n    " + "\n    ".join(lines)
    code = compile(source, f"<poetmodel {name}>", "exec")
    exec(code, writer.constants)  # noqa: S102 - written here, from names and literals only
    return PythonFunction(source, writer.constants["step"])


def _del_statements(names: Sequence[str]) -> list[str]:
    return [f"del {', '.join(names)}"] if names else []


class _PythonWriter:
    """Writes nodes as Python expressions; `constants` has kernels and values without a literal."""

    def __init__(self, module: torch.nn.Module | None) -> None:
        self.constants: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._module = module

    def format_operation(self, node: fx.Node) -> str:
        """Return the Python expression that computes a node; register its kernel and constants."""
        if node.op == "get_attr":
            return self._register_constant(attrgetter(str(node.target))(self._module))
        arguments = [self.format_expression(value) for value in node.args]
        arguments += [
            f"{key}={self.format_expression(value)}" for key, value in node.kwargs.items()
        ]
        if node.op == "call_method":
            method = "" if node.target == "__call__" else f".{node.target}"
            return f"{arguments[0]}{method}({', '.join(arguments[1:])})"
        if node.target is getitem:
            return f"{arguments[0]}[{arguments[1]}]"
        return f"{self._register_constant(kernel_of(node))}({', '.join(arguments)})"

    def format_expression(self, value: Any) -> str:
        """Return the Python expression of an argument: a name, a literal or a constant's name."""
        if isinstance(value, fx.Node):
            return str(value.name)
        if isinstance(value, list | tuple) and type(value).__module__ != "torch":
            items = "".join(f"{self.format_expression(item)}, " for item in value)
            return f"[{items}]" if isinstance(value, list) else f"({items})"
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return repr(value)
        if type(value) is float and math.isfinite(value):
            return repr(value)
        return self._register_constant(value)

    def _register_constant(self, value: Any) -> str:
        """Register a value as a constant; return its name, in upper case unlike those of nodes."""
        name = self._names.setdefault(id(value), f"C{len(self._names)}")
        self.constants[name] = value
        return name


def make_boxed_function(module: fx.GraphModule, _: object = None) -> Callable[[list[Any]], Any]:
    """Compile a graph to a function with PyTorch's boxed calling convention, for AOTAutograd."""
    call = compile_graph(module.graph, module=module).call
    call._boxed_call = True  # type: ignore[attr-defined] # noqa: SLF001 - PyTorch reads it
    return call
