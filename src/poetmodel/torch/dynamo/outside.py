"""What is between the forward and the backward pass of a compiled function: RAM, and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.dynamo.joint_graph import TANGENTS, sizes_of
from poetmodel.torch.dynamo.planning import Outside
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.graph.tensors import HeapWatch, profiler_is_on

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    Compiler = Callable[..., Callable[[list[Any]], Any]]


class Remeasured:
    """A compiled graph that is planned again with what its first step takes outside of it.

    The measurement ends with the next step: autograd gives a profiler that ends in a backward pass
    back when that ends.

    Parameters
    ----------
    again : callable
        Compiles the graph anew, told what was measured and the arguments.
    """

    def __init__(self, again: Callable[[Outside, Sequence[Any]], Callable[..., Any]]) -> None:
        self.compiled: Callable[..., Any]
        """Runs the graph by its plan."""
        self._again: Callable[[Outside, Sequence[Any]], Callable[..., Any]] | None = again
        self._watch: HeapWatch | None = None
        self._tangents_bytes = 0

    def __call__(self, *arguments: Any) -> Any:
        """Run the forward pass, and measure what follows in the first step."""
        found = self.measured()
        if self._again is not None and found is not None:
            self.compiled = self._again(found, arguments)
            self._again = None
        if self._again is not None and torch.is_grad_enabled() and not profiler_is_on():
            self._watch = HeapWatch()
            _WATCHING.append(self)
        results = self.compiled(*arguments)
        if self._watch is not None:
            self._watch.mark()
        return results

    def watched(self, compiler: Compiler) -> Compiler:
        """Return a compiler of the backward pass, where what is measured ends."""

        def compiled(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
            nodes = module.graph.find_nodes(op="placeholder")
            tangents = [node for node in nodes if str(node.target).startswith(TANGENTS)]
            self._tangents_bytes = sum(sizes_of(tangents).values())
            run = compiler(module, inputs)

            def backward(arguments: list[Any]) -> Any:
                if self._watch is not None:
                    self._watch.mark()
                return run(arguments)

            backward._boxed_call = True  # type: ignore[attr-defined] # noqa: SLF001 - as PyTorch's
            return backward

        return compiled

    def measured(self) -> Outside | None:
        """End a measurement, and return what was found; None where nobody went back."""
        watch, self._watch = self._watch, None
        if watch is None:
            return None
        _WATCHING.remove(self)
        _, *parts = watch.end()
        if len(parts) < 2:  # noqa: PLR2004 - a forward pass, and no backward pass
            return None
        levels = parts[0]
        rest_bytes = max(0, levels[-1] - self._tangents_bytes)
        return Outside(peak_bytes=max(levels), rest_bytes=rest_bytes)


class LossOnly:
    """A graph whose results lead back only where they are numbers, if one of them is.

    Parameters
    ----------
    module : torch.fx.GraphModule
        As Dynamo captured it; it is changed.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._cut: list[int] = []
        """Positions of results without a way back."""
        (output,) = module.graph.find_nodes(op="output")
        results = list(output.args[0])
        values = (getattr(node, "meta", {}).get("example_value") for node in results)
        back = {
            k: value
            for k, value in enumerate(values)
            if isinstance(value, torch.Tensor) and value.requires_grad
        }
        if all(value.numel() != 1 for value in back.values()):
            return
        self._cut = [k for k, value in back.items() if value.numel() != 1]
        with module.graph.inserting_before(output):
            for k in self._cut:
                results[k] = module.graph.call_method("detach", (results[k],))
                results[k].meta["example_value"] = back[k].detach()
        output.args = (tuple(results),)
        module.recompile()

    def __call__(self, compile_: Callable[[fx.GraphModule], Any]) -> Callable[..., Any]:
        """Return the compiled graph, where a gradient that reaches other results is an error."""
        compiled = compile_(self._module)
        if not self._cut:
            return compiled  # type: ignore[no-any-return]

        def run(*arguments: Any) -> Any:
            results = compiled(*arguments)
            if torch.is_grad_enabled():
                for k in self._cut:
                    results[k].requires_grad_().register_hook(_refuse)
            return results

        return run


def _refuse(gradient: torch.Tensor) -> None:
    raise CaptureError(
        f"loss_only: a gradient of shape {tuple(gradient.shape)} reached a result that is not the "
        "loss; leave loss_only out, or compute with that result in the compiled function"
    )


_WATCHING: Final[list[Remeasured]] = []


def abandon() -> None:
    """End what is measured now: a graph that is compiled needs the profiler, and a later step."""
    for graph in tuple(_WATCHING):
        graph.measured()
