"""Memory and gradients between the forward and the backward pass of a compiled function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from poetmodel.torch.dynamo.joint_graph import TANGENTS, storage_sizes
from poetmodel.torch.dynamo.planning import OutsideMemory
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.graph.tensors import HeapWatch, is_profiler_on

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    Compiler = Callable[..., Callable[[list[Any]], Any]]


class RemeasuredGraph:
    """A compiled graph that is planned again once the outside memory of a step is measured.

    The next call or measurement ends a measurement: autograd would restore a profiler that ends
    inside of a backward pass at the end of the pass.
    """

    def __init__(
        self, compile_again: Callable[[OutsideMemory, Sequence[Any]], Callable[..., Any]]
    ) -> None:
        self.compiled_function: Callable[..., Any]
        """Executes the graph by its plan."""
        self._compile_again: Callable[..., Callable[..., Any]] | None = compile_again
        self._heap_watch: HeapWatch | None = None
        """The running measurement, if any."""
        self._tangents_bytes = 0

    def __call__(self, *arguments: Any) -> Any:
        """Execute a call; measure the memory after its forward pass, unless that succeeded before.

        After a measured backward pass, the next call compiles the graph again.
        """
        measured_memory = self.end_measurement()
        if self._compile_again is not None and measured_memory is not None:
            self.compiled_function = self._compile_again(measured_memory, arguments)
            self._compile_again = None
        if self._compile_again is not None and torch.is_grad_enabled() and not is_profiler_on():
            self._heap_watch = HeapWatch(interrupt=self.end_measurement)
        try:
            results = self.compiled_function(*arguments)
        except BaseException:
            self.end_measurement()
            raise
        if self._heap_watch is not None:
            self._heap_watch.start_section()
        return results

    def wrap_backward_compiler(self, compiler: Compiler) -> Compiler:
        """Wrap a compiler of the backward pass; the start of the pass ends the measured section."""

        def compile_backward(
            module: fx.GraphModule, inputs: Sequence[Any]
        ) -> Callable[[list[Any]], Any]:
            """Compile the backward graph, and store the bytes of its tangents."""
            nodes = module.graph.find_nodes(op="placeholder")
            tangents = [node for node in nodes if str(node.target).startswith(TANGENTS)]
            self._tangents_bytes = sum(storage_sizes(tangents).values())
            compiled_pass = compiler(module, inputs)

            def backward(arguments: list[Any]) -> Any:
                if self._heap_watch is not None:
                    self._heap_watch.start_section()
                return compiled_pass(arguments)

            backward._boxed_call = True  # type: ignore[attr-defined] # noqa: SLF001 - as PyTorch's
            return backward

        return compile_backward

    def end_measurement(self) -> OutsideMemory | None:
        """End the running measurement; return None if it included no backward pass."""
        heap_watch, self._heap_watch = self._heap_watch, None
        if heap_watch is None:
            return None
        _, *sections = heap_watch.end()
        if len(sections) < 2:  # noqa: PLR2004 - a forward pass, and no backward pass
            return None
        ram_levels = sections[0]
        rest_bytes = max(0, ram_levels[-1] - self._tangents_bytes)
        return OutsideMemory(peak_bytes=max(ram_levels), rest_bytes=rest_bytes)


class LossOnlyGraph:
    """A graph that detaches its results except scalars, if it returns a loss; changes `module`.

    A scalar has one element; a loss is a scalar result that needs a gradient.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._detached_positions: list[int] = []
        """Positions of the detached results."""
        (output,) = module.graph.find_nodes(op="output")
        results = list(output.args[0])
        values = (getattr(node, "meta", {}).get("example_value") for node in results)
        differentiable_values = {
            position: value
            for position, value in enumerate(values)
            if isinstance(value, torch.Tensor) and value.requires_grad
        }
        if all(value.numel() != 1 for value in differentiable_values.values()):
            return
        self._detached_positions = [
            position for position, value in differentiable_values.items() if value.numel() != 1
        ]
        with module.graph.inserting_before(output):
            for position in self._detached_positions:
                results[position] = module.graph.call_method("detach", (results[position],))
                results[position].meta["example_value"] = differentiable_values[position].detach()
        output.args = (tuple(results),)
        module.recompile()

    def compile_with(self, compiler: Callable[[fx.GraphModule], Any]) -> Callable[..., Any]:
        """Compile the graph; a gradient that reaches a detached result raises `CaptureError`."""
        compiled_function = compiler(self._module)
        if not self._detached_positions:
            return compiled_function  # type: ignore[no-any-return]

        def call_compiled(*arguments: Any) -> Any:
            """Call the compiled graph, and register the refusal of gradients."""
            results = compiled_function(*arguments)
            if torch.is_grad_enabled():
                for position in self._detached_positions:
                    results[position].requires_grad_().register_hook(_refuse_gradient)
            return results

        return call_compiled


def _refuse_gradient(gradient: torch.Tensor) -> None:
    raise CaptureError(
        f"loss_only: a gradient of shape {tuple(gradient.shape)} reached a result that is not the "
        "loss; leave loss_only out, or compute with that result in the compiled function"
    )
