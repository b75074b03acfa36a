"""Capture of a module on inputs: forward pass, loss and backward pass as one functional graph.

This module (``aot_export_joint_with_descriptors``), `joint_graph` (descriptors), `values` and
`surroundings` use functions of PyTorch that may change. PyTorch 2.9 and newer have them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.clock import infrequent_gc
from poetmodel.torch.capturing.captures import StepCaptures
from poetmodel.torch.capturing.front import Capture, Changed, StepFront, Unreplayable
from poetmodel.torch.capturing.front_joint import (
    TracedModule,
    constant_positions,
    export_joint,
    is_same_graph,
)
from poetmodel.torch.capturing.inputs import (
    OutputStructure,
    copy_inputs,
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
from poetmodel.torch.capturing.modules import (
    AssignedBuffers,
)
from poetmodel.torch.capturing.passes import Passes, settle, settling_message
from poetmodel.torch.capturing.process_state import ProcessState, record_environment
from poetmodel.torch.capturing.surroundings import (
    native_operators,
    onednn_kernels,
)
from poetmodel.torch.capturing.values import (
    FiniteChecks,
    KnownValues,
    ValueGuards,
)
from poetmodel.torch.errors import CaptureError, convert_exceptions
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
    parts = [part for part in (model, loss_fn) if isinstance(part, torch.nn.Module)]
    refuse(name, chain.from_iterable(map(_backward_hook_errors, parts)))
    flat_inputs, spec = flatten(inputs)
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
            first_results = passes.execute()
        passes.snapshot.restore()
        assigned_buffers.register_assigned()
        front = StepFront(
            name,
            model,
            loss_fn,
            uses_keywords=uses_keywords,
            accesses=output_structures[0].accesses if output_structures else (),
            assigned_buffers=assigned_buffers.registered(),
        )
        batch = unflatten(flat_inputs, spec)
        captured = _capture_or_record(front, batch, passes, first_results)
        equal_captures, is_settled = _settle(
            front, captured, batch, passes, first_results, follows_state=follows_state
        )
        checks = FiniteChecks()
        with convert_exceptions(name):
            traced_module = TracedModule(name, module, captured, flat_inputs, checks)
        graph_module, values = _export(traced_module, flat_inputs, checks, passes)
    finally:
        passes.restore()
    output = output_structures[0] if output_structures else None
    names = input_names(spec, by_name=output is not None)
    arguments = tuple(input_specs(name, graph_module, names))
    results = output_specs(
        name,
        graph_module,
        arguments,
        output,
        has_check=bool(checks.lines),
        n_stored=len(captured.stored_positions),
    )
    joint = Joint(
        name=name,
        module=module,
        graph_module=graph_module,
        arguments=arguments,
        results=tuple(results),
        input_spec=spec,
        inputs=tuple(flat_inputs),
        value_guards=ValueGuards(tuple(values.reads.values())),
        process_state=ProcessState(environment),
        captures=StepCaptures(
            front,
            (captured, *equal_captures),
            flat_inputs,
            spec,
            constant_positions(captured, graph_module, arguments),
            traced_module.state_positions(),
            is_settled=is_settled,
        ),
        output=output,
        finite_check_lines=tuple(checks.lines),
    )
    refuse(name, _capture_errors(joint))
    paths = [source.path for source in joint.value_guards.sources]
    _warn_of_unstable_reads(joint, [*paths, *traced_module.read_paths()])
    return joint


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


def _capture_or_record(
    front: StepFront,
    batch: Sequence[Any],
    passes: Passes,
    first_results: Sequence[torch.Tensor],
) -> Capture:
    """Return a capture; if Dynamo refuses, one with the values that an eager pass reads."""
    try:
        return front.capture(batch)
    except Unreplayable:
        raise
    except CaptureError as error:
        refusal = error
    passes.execute(lambda: front.record_readings(copy_inputs(batch)))
    passes.restore(keeps_new=True)
    try:
        return front.capture(batch)
    except CaptureError as error:
        last_refusal = error
        passes.restore(keeps_new=False)  # a flag may say that a hook is there, which is not
        _refuse_other_results(front.name, first_results, passes.execute())
        with suppress(CaptureError):
            front.capture(batch)  # in the state that a pass leaves
            advice = "only its first pass does this: call the model once, and compile it then"
            last_refusal = CaptureError(f"{refusal}; {advice}")
        raise last_refusal from refusal


def _refuse_other_results(
    name: str, first_results: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> None:
    """Raise `CaptureError` if two passes from the same state have other results."""
    if not _are_equal(first_results, results):
        raise CaptureError(
            f"{name}: the loss differs when forward runs again from the same parameters, buffers, "
            "modules and random state: the cause (a clock, random numbers of another library, a "
            "name or object outside of the model that forward changes) would be frozen: make it "
            "an input or a buffer; if forward makes modules, call the model once before"
        )


def _settle(
    front: StepFront,
    captured: Capture,
    batch: Sequence[Any],
    passes: Passes,
    first_results: Sequence[torch.Tensor],
    *,
    follows_state: bool,
) -> tuple[list[Capture], bool]:
    """Return (further captures with the graph of `captured`, whether state has settled).

    Refuses state that forward changes in each step; with `follows_state`, only outside of modules.
    """
    _refuse_other_results(front.name, first_results, passes.execute())
    further, reasons, is_settled = settle(front, captured, batch, passes.execute)
    passes.restore()
    if not is_settled and not follows_state:
        raise CaptureError(settling_message(front.name, reasons))
    try:
        front.find(batch)
    except Changed as change:
        raise CaptureError(settling_message(front.name, change.reasons)) from None
    return [capture for capture in further if is_same_graph(captured, capture)], is_settled


def _are_equal(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Return whether the results of two passes are equal, except for the order of sums."""
    if len(results) != len(others) or any(
        a.shape != b.shape for a, b in zip(results, others, strict=True)
    ):
        return False
    if any(a.is_meta for a in results):
        return True
    if torch.get_num_threads() == 1:
        return all(
            torch.equal(a.nan_to_num(), b.nan_to_num())
            for a, b in zip(results, others, strict=True)
        )
    return all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-6, equal_nan=True)
        for a, b in zip(results, others, strict=True)
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
