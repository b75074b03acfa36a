"""Between the forward and the backward pass of a compiled function: RAM, and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.dynamo.joint_graph import TANGENTS, storage_sizes
from poetmodel.torch.dynamo.planning import Outside
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.graph.tensors import HeapWatch, is_profiler_on

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    Compiler = Callable[..., Callable[[list[Any]], Any]]


class RemeasuredGraph:
    """A compiled graph that is planned again with the memory measured in its first step.

    The measurement ends with the next step, because a profiler that ends inside a backward pass
    would be restored by autograd at the end of the pass.

    Parameters
    ----------
    compile_again : callable
        Compiles the graph again, given the measured memory and the arguments.
    """

    def __init__(
        self, compile_again: Callable[[Outside, Sequence[Any]], Callable[..., Any]]
    ) -> None:
        """Begin without a compiled graph, which the back end sets."""
        self.compiled: Callable[..., Any]
        """Executes the graph by its plan."""
        self._compile_again: Callable[..., Callable[..., Any]] | None = compile_again
        self._watch: HeapWatch | None = None
        self._tangents_bytes = 0

    def __call__(self, *arguments: Any) -> Any:
        """Execute the forward pass; in the first step start to measure the memory after the pass.

        The next call ends the measurement, and compiles the graph again with its result.
        """
        measured_memory = self.end_measurement()
        if self._compile_again is not None and measured_memory is not None:
            self.compiled = self._compile_again(measured_memory, arguments)
            self._compile_again = None
        if self._compile_again is not None and torch.is_grad_enabled() and not is_profiler_on():
            self._watch = HeapWatch()
            _WATCHING.append(self)
        results = self.compiled(*arguments)
        if self._watch is not None:
            self._watch.start_section()
        return results

    def mark_backward(self, compiler: Compiler) -> Compiler:
        """Return a compiler of the backward pass, which ends the measured section."""

        def compiled(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
            """Compile the backward graph, and start a section when it runs."""
            nodes = module.graph.find_nodes(op="placeholder")
            tangents = [node for node in nodes if str(node.target).startswith(TANGENTS)]
            self._tangents_bytes = sum(storage_sizes(tangents).values())
            run = compiler(module, inputs)

            def backward(arguments: list[Any]) -> Any:
                if self._watch is not None:
                    self._watch.start_section()
                return run(arguments)

            backward._boxed_call = True  # type: ignore[attr-defined] # noqa: SLF001 - as PyTorch's
            return backward

        return compiled

    def end_measurement(self) -> Outside | None:
        """End a measurement, and return its result; None without a backward pass."""
        watch, self._watch = self._watch, None
        if watch is None:
            return None
        _WATCHING.remove(self)
        _, *sections = watch.end()
        if len(sections) < 2:  # noqa: PLR2004 - a forward pass, and no backward pass
            return None
        levels = sections[0]
        rest_bytes = max(0, levels[-1] - self._tangents_bytes)
        return Outside(peak_bytes=max(levels), rest_bytes=rest_bytes)


class LossOnly:
    """Detaches the results of a graph that are no scalars, if one of the results is a scalar.

    Parameters
    ----------
    module : torch.fx.GraphModule
        The graph as Dynamo captured it; the class changes the graph.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        """Detach the results in the graph of `module`, unless none of them is a scalar."""
        self._module = module
        self._detached: list[int] = []
        """Positions of detached results."""
        (output,) = module.graph.find_nodes(op="output")
        results = list(output.args[0])
        values = (getattr(node, "meta", {}).get("example_value") for node in results)
        differentiable_values = {
            k: value
            for k, value in enumerate(values)
            if isinstance(value, torch.Tensor) and value.requires_grad
        }
        if all(value.numel() != 1 for value in differentiable_values.values()):
            return
        self._detached = [k for k, value in differentiable_values.items() if value.numel() != 1]
        with module.graph.inserting_before(output):
            for k in self._detached:
                results[k] = module.graph.call_method("detach", (results[k],))
                results[k].meta["example_value"] = differentiable_values[k].detach()
        output.args = (tuple(results),)
        module.recompile()

    def __call__(self, compile_: Callable[[fx.GraphModule], Any]) -> Callable[..., Any]:
        """Return the compiled graph, in which gradients of detached results raise an error."""
        compiled = compile_(self._module)
        if not self._detached:
            return compiled  # type: ignore[no-any-return]

        def run(*arguments: Any) -> Any:
            results = compiled(*arguments)
            if torch.is_grad_enabled():
                for k in self._detached:
                    results[k].requires_grad_().register_hook(_refuse_gradient)
            return results

        return run


def _refuse_gradient(gradient: torch.Tensor) -> None:
    raise CaptureError(
        f"loss_only: a gradient of shape {tuple(gradient.shape)} reached a result that is not the "
        "loss; leave loss_only out, or compute with that result in the compiled function"
    )


_WATCHING: Final[list[RemeasuredGraph]] = []
"""Graphs whose measurement is running."""


def end_measurements() -> None:
    """End running measurements, because a compilation needs the profiler; a later step repeats."""
    for graph in tuple(_WATCHING):
        graph.end_measurement()
