"""The joint graph of a step that TorchDynamo has captured.

Dynamo's graph is executed on fake tensors under AOTAutograd, as the module that it stands for. Its
inputs are found again by identity: parameters and buffers of the model, inputs of the step, and
other tensors, which become constants.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from poetmodel.torch.capturing.checkpoints import inline_checkpoints
from poetmodel.torch.capturing.front import Capture, find_line
from poetmodel.torch.capturing.front_private import (
    TracingContext,
    aot_export_joint_with_descriptors,
    calling_modules,
    retain_random_operations,
    tracing,
)
from poetmodel.torch.capturing.front_readings import ctc_loss
from poetmodel.torch.capturing.joint_graph import (
    ANNOTATION,
    LOCATION,
    InputKind,
    Lookup,
    format_path,
)
from poetmodel.torch.capturing.surroundings import (
    attach_known_values,
    make_fake_mode,
)
from poetmodel.torch.capturing.values import FiniteChecks, KnownValues
from poetmodel.torch.errors import at_line, convert_exceptions, interpreting_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.torch.capturing.joint_graph import InputSpec


class TracedModule(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Executes a captured graph on the parameters and buffers of `module`, and on flat inputs.

    Returns (loss, *outputs, *stored tensors, result of checks). `checks` records assertions and
    readings that are checked at the end of the step.
    """

    def __init__(
        self, name: str, module: torch.nn.Module, capture: Capture, flat_inputs: Sequence[Any],
        checks: FiniteChecks,
    ) -> None:  # fmt: skip
        super().__init__()
        for child_name, child in module.named_children():
            self.add_module(child_name, child)
        self.training = module.training
        self._name, self._capture, self._checks = name, capture, checks
        paths: dict[int, str] = {}
        for path, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ):
            paths.setdefault(id(tensor), path)
        positions = {
            id(value): position
            for position, value in reversed([*enumerate(flat_inputs)])
            if isinstance(value, torch.Tensor)
        }
        self._inputs: list[Any] = []
        """For each input of the graph its path, its position among the flat inputs, or itself."""
        for tensor in capture.tensors:
            key = id(tensor)
            self._inputs.append(paths.get(key, positions.get(key, tensor)))
        self._lookup = Lookup([value for value in self._inputs if isinstance(value, str)])
        self._graph_module = [_prepare_graph(module, capture)]  # no submodule

    def state_positions(self) -> dict[str, int]:
        """Return the position among the inputs of the graph of parameters and buffers, by path."""
        pairs = enumerate(self._inputs)
        return {path: position for position, path in pairs if isinstance(path, str)}

    def read_paths(self) -> list[str]:
        """Return the paths of buffers that Python reads before a step."""
        sources = self._capture.check.source_positions
        return [path for p in sources if isinstance(path := self._inputs[p], str)]

    def __call__(self, *flat_inputs: Any) -> Any:
        """Call `forward` and own hooks; Dynamo's graph has what hooks of all modules do."""
        for hook in self._forward_pre_hooks.values():
            hook(self, flat_inputs)
        return self.forward(*flat_inputs)

    def forward(self, *flat_inputs: Any) -> Any:
        """Return the results of the step for flat inputs."""
        module_tensors = iter(self._lookup(self))
        tensors = [
            next(module_tensors)
            if isinstance(value, str)
            else flat_inputs[value]
            if isinstance(value, int)
            else value
            for value in self._inputs
        ]
        capture, checks = self._capture, self._checks
        late_readings = [reading for reading in capture.readings if reading.is_late]
        with checks.record_asserts():
            outputs = _LineInterpreter(self._name, self._graph_module[0]).run(*tensors)
            n_results = len(capture.result_positions) + len(capture.stored_positions)
            for reading, value in zip(late_readings, outputs[n_results:], strict=True):
                with interpreting_line(reading.line):
                    is_equal = value == reading.tensor.to(value.dtype)
                    checks.add(is_equal.all())
            loss, *others = outputs[:n_results]
            return (loss, *(tensor.detach() for tensor in others), *checks.take_result())


class _LineInterpreter(fx.Interpreter):  # type: ignore[misc, unused-ignore]
    """Interpreter that names the line of each node in messages."""

    def __init__(self, name: str, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._name = name
        self.extra_traceback = False  # our errors name the location

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "output"):
            return super().run_node(n)
        trail = [(n.meta.get("custom") or {}).get(LOCATION, "the step")]
        with interpreting_line(find_line(n)), convert_exceptions(self._name, trail):
            return super().run_node(n)


def _prepare_graph(module: torch.nn.Module, capture: Capture) -> fx.GraphModule:
    """Return the graph of a capture with annotated nodes, and loss, outputs and readings alone."""
    graph = fx.Graph()
    mapped: dict[fx.Node, fx.Node] = {}
    returned = graph.graph_copy(capture.graph_module.graph, mapped)
    positions = (
        *capture.result_positions,
        *capture.stored_positions,
        *(reading.position for reading in capture.readings if reading.is_late),
    )
    graph.output(tuple(returned[position] for position in positions))
    graph_module = fx.GraphModule(capture.graph_module, graph)
    inline_checkpoints(graph_module, capture.tensors)
    for node in graph.nodes:
        if node.target is ctc_loss:
            node.target = torch.ctc_loss
    for part in graph_module.modules():  # with the graphs of autograd functions
        if isinstance(part, fx.GraphModule):
            _annotate(part.graph, module)
    graph.eliminate_dead_code(is_impure_node=_is_kept)
    graph_module.recompile()
    return graph_module


def _annotate(graph: fx.Graph, module: torch.nn.Module) -> None:
    """Annotate each node of a graph with the module being called, and its line."""
    names = {id(part): path for path, part in module.named_modules()}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        callers = [key for key in calling_modules(node) if key in names]
        path = names[callers[-1]] if callers else ""
        location = _describe_module(module, path)
        line = find_line(node)
        notes = node.meta.get("custom") or {}
        location += at_line(line)
        node.meta["custom"] = {**notes, ANNOTATION: path, LOCATION: location}


def _is_kept(node: fx.Node) -> bool:
    """Return whether a node without readers is kept: all but readings, which are checked before."""
    return node.op in ("placeholder", "output") or "mark_reading" not in str(node.target)


def _describe_module(module: torch.nn.Module, path: str) -> str:
    """Return the module at a path as text for messages."""
    if not path:
        return "the loss function"
    display_path = format_path(path)
    if display_path:
        return f"module {display_path!r}"
    return f"module {type(module.get_submodule(path)).__name__}"


def export_joint(
    traced_module: TracedModule, flat_inputs: Sequence[Any], *, uses_onednn: bool
) -> tuple[fx.GraphModule, KnownValues]:
    """Return (joint graph of a captured step, values that operators read of tensors)."""
    values = KnownValues()
    context = TracingContext(make_fake_mode(values, uses_onednn=uses_onednn))
    with (
        attach_known_values(traced_module, flat_inputs, values),
        retain_random_operations(),
        ExitStack() as stack,
        tracing(context),
    ):
        export_result = aot_export_joint_with_descriptors(stack, traced_module, tuple(flat_inputs))
    return export_result.graph_module, values


def constant_positions(
    capture: Capture, graph_module: fx.GraphModule, arguments: Sequence[InputSpec]
) -> dict[str, int]:
    """Return the position among the inputs of Dynamo's graph of each constant that is one."""
    positions = {id(tensor): position for position, tensor in enumerate(capture.tensors)}
    found = {}
    for argument in arguments:
        if argument.kind is InputKind.CONSTANT_TENSOR:
            value = getattr(graph_module, argument.target, None)
            if id(value) in positions:
                found[argument.target] = positions[id(value)]
    return found


def is_same_graph(capture: Capture, other: Capture) -> bool:
    """Return whether the graphs of two captures compute the same of the same tensors."""
    if (
        len(capture.tensors) != len(other.tensors)
        or any(a is not b for a, b in zip(capture.tensors, other.tensors, strict=True))
        or capture.result_positions != other.result_positions
        or capture.stored_positions != other.stored_positions
        or len(capture.readings) != len(other.readings)
    ):
        return False
    return _code(capture.graph_module) == _code(other.graph_module) and all(
        (a.kind, a.position, repr(a.value)) == (b.kind, b.position, repr(b.value))
        for a, b in zip(capture.readings, other.readings, strict=True)
    )


def _code(graph_module: fx.GraphModule) -> list[Any]:
    """Return the code of a graph and of graphs in it, and the tensors that are its attributes."""
    codes: list[Any] = [
        part.code for part in graph_module.modules() if isinstance(part, fx.GraphModule)
    ]
    tensors = (*graph_module.parameters(), *graph_module.buffers())
    return [*codes, *map(id, tensors)]
