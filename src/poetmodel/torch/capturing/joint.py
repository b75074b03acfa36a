"""Capture of a module on inputs: forward pass, loss and backward pass as one functional graph.

This module (``aot_export_joint_with_descriptors``), `joint_graph` (descriptors), `values` and
`surroundings` use functions of PyTorch that may change. PyTorch 2.9 and newer have them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.clock import infrequent_gc
from poetmodel.torch.capturing.captures import StepCaptures
from poetmodel.torch.capturing.front import StepFront
from poetmodel.torch.capturing.front_joint import (
    TracedModule,
    constant_positions,
    export_joint,
)
from poetmodel.torch.capturing.inputs import (
    OutputStructure,
    find_loss,
    flatten,
    input_names,
    refuse,
    step_errors,
    takes_keywords,
    unflatten,
)
from poetmodel.torch.capturing.joint_graph import (
    BODY,
    Joint,
    OutputKind,
    format_path,
    input_specs,
    location_suffix,
    output_specs,
)
from poetmodel.torch.capturing.modules import AssignedBuffers, has_hooks
from poetmodel.torch.capturing.passes import Passes
from poetmodel.torch.capturing.process_state import ProcessState, record_environment
from poetmodel.torch.capturing.settling import Settled, capture_settled, refuse_draw
from poetmodel.torch.capturing.surroundings import (
    native_operators,
    onednn_kernels,
)
from poetmodel.torch.capturing.values import (
    FiniteChecks,
    KnownValues,
    ValueGuards,
)
from poetmodel.torch.errors import convert_exceptions
from poetmodel.torch.graph.tensors import tensors_in
from poetmodel.torch.int8.reading import with_fronts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import fx

    from poetmodel.torch.capturing.inputs import Inputs

_LOG: Final = logging.getLogger(__name__)

LOSS: Final = "loss"
"""Name of a loss module in the captured module."""


def capture(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Inputs,
    *,
    name: str | None = None,
    follows_state: bool = False,
    is_snapshot: bool = False,
) -> Joint:
    """Capture a training step: forward pass, loss, and backward pass.

    Executes forward several times, also eagerly on copies of the inputs. Changes no parameter,
    gradient, buffer, random generator or attribute of the model; names outside of it are as after a
    pass in eager mode. Logs a warning if forward reads the value of a buffer that the step changes.

    Parameters
    ----------
    model, loss_fn, inputs
        As for `compile`.
    name : str, optional
        Name of the step in messages; by default the class of `model`.
    follows_state : bool
        Whether a further capture may follow Python state that forward changes in each step.
    is_snapshot : bool
        Whether the graph is executed without guards, so that later passes must compute what it
        computes.

    Returns
    -------
    Joint
        The captured step, in which an int8 front replaces each module quantized by PT2E.

    Raises
    ------
    CaptureError
        If the step cannot be captured. Most messages have a remedy; if they are known, they name
        the operation and its line.
    InputError
        If a module quantized by PT2E cannot be converted to an int8 front.
    """
    name = name or type(model).__name__
    refuse(name, step_errors(model, loss_fn, inputs))
    model = with_fronts(model)
    checks = FiniteChecks()
    with _capture_graph(
        name, model, loss_fn, inputs, follows_state=follows_state, is_snapshot=is_snapshot
    ) as step:
        flat_inputs, captured = step.flat_inputs, step.settled.capture
        with convert_exceptions(name):
            traced_module = TracedModule(name, step.module, captured, flat_inputs, checks)
        graph_module, values = _export(traced_module, flat_inputs, checks, step.passes)
    names = input_names(step.input_spec, by_name=step.output is not None)
    arguments = tuple(input_specs(name, graph_module, names))
    results = output_specs(
        name,
        graph_module,
        arguments,
        step.output,
        has_check=bool(checks.lines),
        n_stored=len(captured.stored_positions),
    )
    joint = Joint(
        name=name,
        module=step.module,
        graph_module=graph_module,
        arguments=arguments,
        results=tuple(results),
        input_spec=step.input_spec,
        inputs=tuple(flat_inputs),
        value_guards=ValueGuards(tuple(values.reads.values())),
        process_state=ProcessState(step.environment),
        captures=StepCaptures(
            step.front,
            (captured, *step.settled.equal_captures),
            flat_inputs,
            step.input_spec,
            constant_positions(captured, graph_module, arguments),
            traced_module.state_positions(),
            is_settled=step.settled.is_settled,
        ),
        output=step.output,
        finite_check_lines=tuple(checks.lines),
    )
    refuse(name, _capture_errors(joint))
    paths = [source.path for source in joint.value_guards.sources]
    _warn_of_unstable_reads(joint, [*paths, *traced_module.read_paths()])
    return joint


def check_snapshot(
    name: str,
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Inputs,
) -> None:
    """Raise `CaptureError` if one graph of a step does not compute what later steps compute.

    Executes forward passes; restores modules, tensors and random generators, but no other objects.
    """
    with _capture_graph(name, model, loss_fn, inputs, is_snapshot=True):
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """A step that Dynamo has captured, without a backward pass."""

    front: StepFront
    settled: Settled
    module: torch.nn.Module
    """Computes the loss from flat inputs."""
    passes: Passes
    environment: dict[str, str | None]
    """Environment variables that forward reads."""
    flat_inputs: list[Any]
    input_spec: Any
    output: OutputStructure | None
    """Structure of the output, for named inputs."""


@contextmanager
def _capture_graph(
    name: str,
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Inputs,
    *,
    follows_state: bool = False,
    is_snapshot: bool,
) -> Iterator[_Captured]:
    """Context manager with a captured step; restores at its end what passes have changed."""
    parts = [part for part in (model, loss_fn) if isinstance(part, torch.nn.Module)]
    refuse(name, chain.from_iterable(map(_backward_hook_errors, parts)))
    flat_inputs, spec = flatten(inputs)
    if is_snapshot:
        refuse(name, _gradient_hook_errors(parts, flat_inputs))
    batch = unflatten(flat_inputs, spec)
    uses_keywords = takes_keywords(
        model, inputs if loss_fn is None or isinstance(inputs, Mapping) else inputs[:-1]
    )
    output_structures: list[OutputStructure] | None = [] if isinstance(inputs, Mapping) else None
    module, assigned_buffers = _wrap_with_loss(
        name,
        model,
        loss_fn,
        spec,
        uses_keywords=uses_keywords,
        output_structures=output_structures,
    )
    passes = Passes(name, module, flat_inputs)
    try:
        with record_environment() as environment:
            first_results = passes.execute(may_draw=True)
        if passes.drawn:
            front = StepFront(name, model, loss_fn, uses_keywords=uses_keywords)
            refuse_draw(front, batch, passes)
        passes.snapshot.restore()
        assigned_buffers.register_assigned()
        output = output_structures[0] if output_structures else None
        front = StepFront(
            name,
            model,
            loss_fn,
            uses_keywords=uses_keywords,
            accesses=output.accesses if output else (),
            assigned_buffers=assigned_buffers.registered(),
            needs_guards=not is_snapshot,
        )
        settled = capture_settled(
            front,
            batch,
            passes,
            first_results,
            follows_state=follows_state,
            is_snapshot=is_snapshot,
        )
        yield _Captured(
            front=front,
            settled=settled,
            module=module,
            passes=passes,
            environment=environment,
            flat_inputs=flat_inputs,
            input_spec=spec,
            output=output,
        )
    finally:
        passes.restore()


def _export(
    traced_module: TracedModule, flat_inputs: Sequence[Any], checks: FiniteChecks, passes: Passes
) -> tuple[fx.GraphModule, KnownValues]:
    """Return (joint graph, values that operators read); `checks` then has all assertions."""
    uses_onednn = torch.backends.mkldnn.enabled
    has_lstm = any(isinstance(part, torch.nn.LSTM) for part in traced_module.modules())
    with (
        convert_exceptions(passes.name),
        passes.generator_states.restore_at_end(),
        # The backward pass of oneDNN's LSTM cannot be captured.
        onednn_kernels(enabled=uses_onednn and not has_lstm),
        native_operators(),
        infrequent_gc(),
    ):
        graph_module, values = export_joint(traced_module, flat_inputs, uses_onednn=uses_onednn)
        if checks.enable_asserts(graph_module, values):
            graph_module, values = export_joint(traced_module, flat_inputs, uses_onednn=uses_onednn)
    for node in graph_module.graph.nodes:
        values.detach(node.meta.get("val"))
    return graph_module, values


def _warn_of_unstable_reads(joint: Joint, paths: Sequence[str]) -> None:
    """Log the buffers, among those at `paths`, that are read and that each step changes."""
    changed_paths = {result.target.target for result in joint.results if result.target is not None}
    unstable_names = [format_path(path) for path in paths if path and path in changed_paths]
    if unstable_names:
        _LOG.warning(
            "%s: forward reads %s, which each step changes: once a value differs, the step is "
            "refused, or compiled again (dynamic='retrace')",
            joint.name,
            ", ".join(unstable_names),
        )


def _backward_hook_errors(model: torch.nn.Module) -> Iterator[str]:
    """Yield a text for each module of a model with backward hooks."""
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:  # noqa: SLF001 - no other way
            yield (
                f"{path or type(module).__name__} has a backward hook, which TorchDynamo does not "
                "capture; register a hook of its output in a forward hook (output.register_hook)"
            )


def _gradient_hook_errors(
    parts: Sequence[torch.nn.Module], flat_inputs: Sequence[Any]
) -> Iterator[str]:
    """Yield a text for each parameter of `parts`, and each input, with gradient hooks."""
    parameters = chain.from_iterable(part.named_parameters() for part in parts)
    inputs = ((f"inputs[{i}]", value) for i, value in enumerate(flat_inputs))
    for name, value in chain(parameters, inputs):
        if isinstance(value, torch.Tensor) and has_hooks(value):
            yield (
                f"{name} has a hook of its gradient, whose Python is not part of the graph; remove "
                "it, or change the gradient in the loss"
            )


def _wrap_with_loss(
    name: str,
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    spec: Any,
    *,
    uses_keywords: bool,
    output_structures: list[OutputStructure] | None,
) -> tuple[torch.nn.Module, AssignedBuffers]:
    """Return (module that computes the loss from flat inputs, tracker of its assigned buffers).

    With `loss_fn`, the last input is only its target. With a list `output_structures`, a pass sets
    its content and returns all other tensors, too, detached.
    """

    class FlatModule(torch.nn.Module):  # type: ignore[misc, unused-ignore]
        """Applies model and loss to flat inputs."""

        def __init__(self) -> None:
            super().__init__()
            self.add_module(BODY, model)
            if isinstance(loss_fn, torch.nn.Module):
                self.add_module(LOSS, loss_fn)
            self.training = model.training

        def __call__(self, *flat_inputs: Any) -> Any:
            """Call `forward` alone: hooks of all modules see only the user's modules."""
            return self.forward(*flat_inputs)

        def forward(self, *flat_inputs: Any) -> Any:
            """Return (loss, *other tensors), or the loss itself without `output_structures`."""
            with assigned_buffers.track_pass():
                inputs = unflatten(flat_inputs, spec)
                arguments = inputs if loss_fn is None else inputs[:-1]
                output = model(**arguments[0]) if uses_keywords else model(*arguments)
                loss = find_loss(name, output if loss_fn is None else loss_fn(output, inputs[-1]))
                if output_structures is None:
                    return loss
                structure, other_tensors = OutputStructure.from_output(output, loss)
                output_structures[:] = [structure]
                return (loss, *(tensor.detach() for tensor in other_tensors))

    captured_module = FlatModule()
    assigned_buffers = AssignedBuffers(captured_module, name=name)
    return captured_module, assigned_buffers


def _capture_errors(joint: Joint) -> Iterator[str]:
    """Yield each reason to refuse a captured step; callers stop at the first."""
    losses = [result.node.meta["val"] for result in joint.results if result.kind is OutputKind.LOSS]
    if len(losses) != 1 or losses[0].numel() != 1:
        shapes = [tuple(loss.shape) for loss in losses]
        yield (
            f"expected one loss with one element, got shapes {shapes}; "
            "reduce it with .mean() or .sum()"
        )
    if losses[0].is_complex():
        yield "expected a loss that is a real number; return its .real or .abs()"
    if not any(result.kind is OutputKind.GRADIENT for result in joint.results):
        yield "the loss depends on no parameter that requires a gradient"
    graph = joint.graph_module.graph
    for node in graph.find_nodes(op="get_attr"):
        value = attrgetter(str(node.target))(joint.graph_module)
        if not isinstance(value, torch.Tensor):
            yield _object_error(next(iter(node.users), node), type(value).__name__)
    for node in graph.nodes:
        if any(value.layout != torch.strided for value in tensors_in(node.meta.get("val"))):
            yield (
                f"{node.target}{location_suffix(node)} makes a sparse tensor, which cannot be "
                "scheduled; use dense ones (for an embedding: sparse=False)"
            )
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None and schema.is_mutable:
            yield (
                f"{node.target}{location_suffix(node)} changes a tensor in place and cannot be "
                "replayed; use its functional form"
            )


def _object_error(user: fx.Node, kind: str) -> str:
    """Return the message for an operation with an object argument, such as a random generator."""
    return (
        f"{user.target}{location_suffix(user)} takes a {kind}, which cannot be replayed; leave it "
        "out (random numbers come from the default generator)"
    )
