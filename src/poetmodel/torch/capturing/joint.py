"""Capture of a module on inputs: forward pass, loss and backward pass as one functional graph.

This module (``aot_export_joint_with_descriptors``), `joint_graph` (descriptors), `values` and
`surroundings` use functions of PyTorch that may change. PyTorch 2.9 and newer have them.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing

from poetmodel.clock import infrequent_gc
from poetmodel.errors import join_names
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
    InputKind,
    Joint,
    OutputKind,
    format_path,
    input_specs,
    location_suffix,
    output_specs,
)
from poetmodel.torch.capturing.modules import (
    AssignedBuffers,
    GeneratorStates,
    Leftovers,
    ModuleSnapshot,
)
from poetmodel.torch.capturing.passes import Passes
from poetmodel.torch.capturing.process_state import ProcessState, record_environment
from poetmodel.torch.capturing.python_reads import PythonReads
from poetmodel.torch.capturing.replay import temporary_setting
from poetmodel.torch.capturing.state_changes import StateChanges, WrittenTensors
from poetmodel.torch.capturing.surroundings import (
    annotate_nodes,
    attach_known_values,
    bypass_checkpoints,
    make_fake_mode,
    native_operators,
    onednn_kernels,
    refuse_seeding,
    retain_random_operations,
)
from poetmodel.torch.capturing.values import (
    FiniteChecks,
    KnownValues,
    ValueGuards,
    is_unknown_value_error,
)
from poetmodel.torch.errors import FOREIGN_ERRORS, CaptureError, convert_exceptions
from poetmodel.torch.graph.tensors import tensors_in
from poetmodel.torch.int8.reading import with_fronts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import fx

    from poetmodel.torch.capturing.inputs import Inputs

_LOG: Final = logging.getLogger(__name__)

USES_DYNAMO = True
"""Whether TorchDynamo captures steps, instead of the front of this module."""

_MAX_PASSES: Final = 2
"""Number of further passes in which what forward reads must be as the pass before left it."""

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
    if USES_DYNAMO:
        return _capture_by_dynamo(model, loss_fn, inputs, name=name, follows_state=follows_state)
    flat_inputs, spec = flatten(inputs)
    uses_keywords = takes_keywords(
        model, inputs if loss_fn is None or isinstance(inputs, Mapping) else inputs[:-1]
    )
    # The captured module stores the structure of its output in this list.
    output_structures: list[OutputStructure] | None = [] if isinstance(inputs, Mapping) else None
    checks = FiniteChecks()
    captured_module, assigned_buffers = _wrap_with_loss(
        name,
        model,
        loss_fn,
        spec,
        uses_keywords=uses_keywords,
        output_structures=output_structures,
        checks=checks,
    )
    snapshot = ModuleSnapshot(captured_module)
    python_reads = PythonReads(captured_module, loss_fn)
    state_changes = StateChanges(name, snapshot, python_reads)
    generator_states = GeneratorStates(name, snapshot)
    leftovers = Leftovers()

    def prepare_forward() -> None:
        # PyTorch calls the model more than once; each call must start from the same state.
        snapshot.restore(is_capturing=True)
        leftovers.empty_holders()

    module_trail: list[str] = []  # paths of the modules that are being called, for messages
    uses_onednn = torch.backends.mkldnn.enabled
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    has_lstm = any(isinstance(module, torch.nn.LSTM) for module in captured_module.modules())
    try:
        with (
            # An error that is raised need not be logged with its traceback too.
            temporary_setting(logger.setLevel, logging.CRITICAL, logger.level),
            generator_states.restore_at_end(),
            convert_exceptions(name, module_trail),
            refuse_seeding(),
            # The backward pass of oneDNN's LSTM cannot be captured.
            onednn_kernels(enabled=uses_onednn and not has_lstm),
            native_operators(),
            infrequent_gc(),
        ):
            with generator_states.restore_at_end(), record_environment() as environment:
                _record_python_reads(
                    captured_module, flat_inputs, snapshot, python_reads, state_changes
                )
            assigned_buffers.before_forward = prepare_forward
            annotate = partial(
                annotate_nodes, captured_module, module_trail, generator_states.check
            )
            export = partial(
                _try_export,
                captured_module,
                flat_inputs,
                annotate,
                checks,
                snapshot,
                leftovers,
                uses_onednn=uses_onednn,
            )
            while (
                (export_result := export()) is None
                or assigned_buffers.register_assigned()
                or checks.enable_asserts(*export_result)
            ):
                snapshot.restore()
            graph_module, values = export_result
            generator_states.check()
    finally:
        assigned_buffers.before_forward = None
        restored_attributes = snapshot.restore()
        leftovers.remove_tensors()
        state_changes.restore()
    if leftovers.holder_names:
        _LOG.warning(
            "%s: forward stores tensors outside of the model (%s), which a compiled step does not: "
            "the previous content was restored",
            name,
            join_names(sorted(leftovers.holder_names)),
        )
    if restored_attributes:
        _LOG.warning(
            "%s: forward sets %s, which a compiled step does not: the code of the model runs once, "
            "and the attribute was restored; to have it updated, make it a buffer "
            "(register_buffer) and assign it with .detach()",
            name,
            ", ".join(format_path(f"{path}.{key}") for path, key in restored_attributes),
        )
    for node in graph_module.graph.nodes:
        values.detach(node.meta.get("val"))
    output = output_structures[0] if output_structures else None
    names = input_names(spec, by_name=output is not None)
    arguments = tuple(input_specs(name, graph_module, names))
    joint = Joint(
        name=name,
        module=captured_module,
        graph_module=graph_module,
        arguments=arguments,
        results=tuple(
            output_specs(name, graph_module, arguments, output, has_check=bool(checks.lines))
        ),
        input_spec=spec,
        inputs=tuple(flat_inputs),
        value_guards=ValueGuards(tuple(values.reads.values())),
        python_guards=python_reads.make_guards(name, state_changes.first_pass_keys),
        process_state=ProcessState(environment),
        output=output,
        finite_check_lines=tuple(checks.lines),
    )
    constants = joint.arguments_of(InputKind.CONSTANT_TENSOR)
    joint.python_guards.set_constants([joint.value(argument) for argument in constants])
    refuse(name, _capture_errors(joint))
    _warn_of_unstable_reads(joint, [s.path for s in joint.value_guards.sources])
    return joint


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


def _capture_by_dynamo(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Inputs,
    *,
    name: str,
    follows_state: bool,
) -> Joint:
    """Return a step whose graph TorchDynamo captures; arguments are as for `capture`."""
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
        checks=FiniteChecks(),
    )
    passes = Passes(name, module, flat_inputs)
    uses_onednn = torch.backends.mkldnn.enabled
    has_lstm = any(isinstance(part, torch.nn.LSTM) for part in module.modules())
    checks = FiniteChecks()
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
        with (
            convert_exceptions(name),
            passes.generator_states.restore_at_end(),
            onednn_kernels(enabled=uses_onednn and not has_lstm),
            native_operators(),
            infrequent_gc(),
        ):
            while True:
                traced_module = TracedModule(name, module, captured, flat_inputs, checks)
                graph_module, values = export_joint(
                    traced_module, flat_inputs, uses_onednn=uses_onednn
                )
                if not checks.enable_asserts(graph_module, values):
                    break
    finally:
        passes.restore()
    for node in graph_module.graph.nodes:
        values.detach(node.meta.get("val"))
    output = output_structures[0] if output_structures else None
    names = input_names(spec, by_name=output is not None)
    arguments = tuple(input_specs(name, graph_module, names))
    joint = Joint(
        name=name,
        module=module,
        graph_module=graph_module,
        arguments=arguments,
        results=tuple(
            output_specs(
                name,
                graph_module,
                arguments,
                output,
                has_check=bool(checks.lines),
                n_stored=len(captured.stored_positions),
            )
        ),
        input_spec=spec,
        inputs=tuple(flat_inputs),
        value_guards=ValueGuards(tuple(values.reads.values())),
        process_state=ProcessState(environment),
        output=output,
        finite_check_lines=tuple(checks.lines),
    )
    constants = joint.arguments_of(InputKind.CONSTANT_TENSOR)
    positions = constant_positions(captured, graph_module, constants)
    captures = StepCaptures(
        front,
        (captured, *equal_captures),
        flat_inputs,
        spec,
        positions,
        is_settled=is_settled,
    )
    joint = replace(joint, captures=captures)
    refuse(name, _capture_errors(joint))
    paths = [source.path for source in joint.value_guards.sources]
    _warn_of_unstable_reads(joint, [*paths, *traced_module.read_paths()])
    return joint


def _backward_hook_errors(model: torch.nn.Module) -> Iterator[str]:
    """Yield a text for each module of a model with backward hooks."""
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:  # noqa: SLF001 - no other way
            yield (
                f"{path or type(module).__name__} has a backward hook, which TorchDynamo does not "
                "capture; register a hook of its output in a forward hook (output.register_hook)"
            )


def _copy_batch(batch: Sequence[Any]) -> Sequence[Any]:
    """Return a batch of copies."""
    flat_inputs, spec = flatten(batch)
    return unflatten(list(copy_inputs(tuple(flat_inputs))), spec)


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
    passes.execute(lambda: front.record_readings(_copy_batch(batch)))
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
    reasons: tuple[str, ...] = ()
    equal_captures: list[Capture] = []
    is_settled = False
    last = captured
    for pass_index in range(_MAX_PASSES):
        results = passes.execute()
        if not pass_index:
            _refuse_other_results(front.name, first_results, results)
        try:
            current = front.find(batch)[0]
        except Changed as change:
            reasons = reasons or change.reasons
            last = front.capture(batch)
            if is_same_graph(captured, last):
                equal_captures.append(last)
        else:
            if current is last:
                is_settled = True
                break
            last = current
    passes.restore()
    if not is_settled and not follows_state:
        raise CaptureError(_settling_message(front.name, reasons))
    try:
        front.find(batch)
    except Changed as change:
        raise CaptureError(_settling_message(front.name, change.reasons)) from None
    return equal_captures, is_settled


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


def _settling_message(name: str, reasons: Sequence[str]) -> str:
    """Return the message for state that each forward pass changes."""
    pattern = r" was (.*?) and is (.*?), read at "
    text = re.sub(pattern, r" from \1 to \2 at ", "; ".join(reasons[:1]), count=1)
    return (
        f"{name}: forward changes {text or 'what it reads'}, and one graph cannot follow; make it "
        "a buffer or an input, or leave the change out"
    )


def _record_python_reads(
    captured_module: torch.nn.Module,
    flat_inputs: Sequence[Any],
    snapshot: ModuleSnapshot,
    python_reads: PythonReads,
    state_changes: StateChanges,
) -> None:
    """Execute an eager forward pass on copies of the inputs; record the Python values it reads.

    Executes up to two more passes if the pass sets any. Restores tensors, modules, Python and
    random state. The capture that follows raises the error of the first pass.
    """
    written_tensors = WrittenTensors(captured_module.buffers())

    def forward() -> None:
        """Execute the captured module on copies of the inputs."""
        random_state = torch.random.fork_rng(devices=[])
        with random_state, warnings.catch_warnings(action="ignore"), written_tensors:
            captured_module(*copy_inputs(tuple(flat_inputs)))

    def restore() -> None:
        snapshot.restore()
        state_changes.restore()
        written_tensors.restore()

    try:
        with python_reads.record_reads(), suppress(*FOREIGN_ERRORS):
            forward()
        python_reads.places.remove_temporary_objects()
        state_changes.check(forward, restore)
    finally:
        restore()


def _try_export(
    captured_module: torch.nn.Module,
    flat_inputs: Sequence[Any],
    annotate: Callable[[], AbstractContextManager[None]],
    checks: FiniteChecks,
    snapshot: ModuleSnapshot,
    leftovers: Leftovers,
    *,
    uses_onednn: bool,
) -> tuple[fx.GraphModule, KnownValues] | None:
    """Return (joint graph, known values); None if the export failed and must be repeated.

    It is repeated once for tensors left in objects, then registered in `leftovers`, and once for an
    unknown value (``checks.records_tests``). Errors restore `snapshot`.
    """
    values = KnownValues()
    context = TracingContext(make_fake_mode(values, uses_onednn=uses_onednn))
    try:
        with (
            annotate(),
            bypass_checkpoints(captured_module),
            attach_known_values(captured_module, flat_inputs, values),
            retain_random_operations(),
            ExitStack() as stack,
            tracing(context),
        ):
            export_result = aot_export_joint_with_descriptors(
                stack, captured_module, tuple(flat_inputs)
            )
    except FOREIGN_ERRORS as error:
        snapshot.restore()
        if leftovers.register_holders(error):
            return None
        if checks.records_tests or not is_unknown_value_error(error):
            raise
        checks.records_tests = True
        return None
    return export_result.graph_module, values


def _wrap_with_loss(
    name: str,
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    spec: Any,
    *,
    uses_keywords: bool,
    output_structures: list[OutputStructure] | None,
    checks: FiniteChecks,
) -> tuple[torch.nn.Module, AssignedBuffers]:
    """Return (module that computes the loss from flat inputs, tracker of its assigned buffers).

    With `loss_fn`, the last input is only its target. With a list `output_structures`, a pass sets
    its content and returns all other tensors, too, detached. The last result is that of `checks`.
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
            """Call `forward` and own hooks; hooks of all modules see only the user's modules."""
            for hook in self._forward_pre_hooks.values():
                hook(self, flat_inputs)
            results = self.forward(*flat_inputs)
            for hook in self._forward_hooks.values():
                hook(self, flat_inputs, results)
            return results

        def forward(self, *flat_inputs: Any) -> Any:
            """Return (loss, *other tensors, result of checks), or the loss itself if alone."""
            with assigned_buffers.track_pass(), checks.record_tests():
                inputs = unflatten(flat_inputs, spec)
                arguments = inputs if loss_fn is None else inputs[:-1]
                output = model(**arguments[0]) if uses_keywords else model(*arguments)
                loss = find_loss(name, output if loss_fn is None else loss_fn(output, inputs[-1]))
                check_result = checks.take_result()
                if output_structures is None:
                    return (loss, *check_result) if check_result else loss
                structure, other_tensors = OutputStructure.from_output(output, loss)
                output_structures[:] = [structure]
                return (loss, *(tensor.detach() for tensor in other_tensors), *check_result)

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
