"""An FX graph as Python, without loops or branches, in which each value dies at its last use."""

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
    """A graph as a function."""

    source: str
    call: Callable[..., Any]


def python_function(
    graph: fx.Graph,
    *,
    name: str = "graph",
    named: int | None = None,
    module: torch.nn.Module | None = None,
) -> PythonFunction:
    """Return a graph as a function of the list of its arguments.

    Parameters
    ----------
    graph : torch.fx.Graph
        Its nodes are called by `kernel_of`.
    name : str
        Its name in tracebacks.
    named : int, optional
        How many of its last placeholders are parameters of their own, and no part of the list. If
        it is given, the caller keeps the values in the list; else they are taken out of it, and die
        at their last use like all others.
    module : torch.nn.Module, optional
        Has the attributes that the graph gets.
    """
    words = _Words(module)
    last = {source: node for node in graph.nodes for source in node.all_input_nodes}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    count = len(placeholders) - (named or 0)
    listed = [node.name for node in placeholders[:count]]
    lines = [f"({', '.join(listed)},) = arguments"] if listed else []
    if named is None:
        unread = [node.name for node in placeholders if node not in last]
        lines += ["arguments.clear()", *_deleted(unread)]
    kept = set() if named is None else set(placeholders)
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {words.word(node.args[0])}")
        elif node.op != "placeholder":
            lines.append(f"{node.name} = {words.call(node)}")
            dead = [s.name for s in node.all_input_nodes if last[s] is node and s not in kept]
            lines += _deleted(dead if node in last else [*dead, node.name])
    head = ", ".join(["arguments", *(node.name for node in placeholders[count:])])
    source = f"def step({head}):\n    " + "\n    ".join(lines)
    code = compile(source, f"<poetmodel {name}>", "exec")
    exec(code, words.constants)  # noqa: S102 - made here, of nothing but names and numbers
    return PythonFunction(source, words.constants["step"])


def _deleted(names: Sequence[str]) -> list[str]:
    return [f"del {', '.join(names)}"] if names else []


class _Words:
    """Nodes and their arguments as Python."""

    def __init__(self, module: torch.nn.Module | None) -> None:
        self.constants: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._module = module

    def call(self, node: fx.Node) -> str:
        """Return the expression that computes a node."""
        if node.op == "get_attr":
            return self._constant(attrgetter(str(node.target))(self._module))
        words = [self.word(value) for value in node.args]
        words += [f"{key}={self.word(value)}" for key, value in node.kwargs.items()]
        if node.op == "call_method":
            method = "" if node.target == "__call__" else f".{node.target}"
            return f"{words[0]}{method}({', '.join(words[1:])})"
        if node.target is getitem:
            return f"{words[0]}[{words[1]}]"
        return f"{self._constant(kernel_of(node))}({', '.join(words)})"

    def word(self, value: Any) -> str:
        """Return an argument of an operation."""
        if isinstance(value, fx.Node):
            return str(value.name)
        if isinstance(value, list | tuple) and type(value).__module__ != "torch":
            words = "".join(f"{self.word(item)}, " for item in value)
            return f"[{words}]" if isinstance(value, list) else f"({words})"
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return repr(value)
        if type(value) is float and math.isfinite(value):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        """Return the name of a value that no source can spell; nodes have names in lower case."""
        name = self._names.setdefault(id(value), f"C{len(self._names)}")
        self.constants[name] = value
        return name


def boxed(module: fx.GraphModule, _: object = None) -> Callable[[list[Any]], Any]:
    """Return a graph as the function that a compiler of AOTAutograd returns."""
    call = python_function(module.graph, module=module).call
    call._boxed_call = True  # type: ignore[attr-defined] # noqa: SLF001 - PyTorch asks for it
    return call
