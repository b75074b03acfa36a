"""Comparison of eager PyTorch and a compiled step from one state, element by element."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.capturing.joint_graph import InputKind, OutputKind
from poetmodel.torch.capturing.modules import GeneratorStates, ModuleSnapshot, without_hooks
from poetmodel.torch.errors import CaptureError, convert_exceptions
from poetmodel.torch.runtime.profiling import limit_threads
from poetmodel.torch.step.optimizers import MomentSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from poetmodel.torch.capturing.joint_graph import Joint
    from poetmodel.torch.runtime.runner import Runner
    from poetmodel.torch.step.trace import Trace

    Results = dict[str, torch.Tensor]

_LOG: Final = logging.getLogger("poetmodel.torch.comparison")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultDifference:
    """A result that differs from that of eager PyTorch."""

    name: str
    """Name of the result: ``loss``, ``output logits``, ``gradient of conv1.weight``, ``mutation of
    bn1.running_mean``, or with an optimizer ``update of conv1.weight``."""
    largest: float | None
    """Largest absolute difference of an element; not finite if an element of either result is not.
    None if only one of the steps has the result, or the shapes differ."""
    op: str
    """Name of the operation that computes the result; empty if unknown."""

    @property
    def text(self) -> str:
        """The size of the difference as text, for display."""
        if self.largest is None:
            return "only one of both has it, or the shapes differ"
        return f"by up to {self.largest:.3g}"

    def __str__(self) -> str:
        operation_text = f", from {self.op}" if self.op else ""
        return f"{self.name} ({self.text}{operation_text})"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and `text` for JSON; ``largest`` is None if not finite."""
        values = asdict(self)
        if self.largest is not None and not isfinite(self.largest):
            values["largest"] = None
        return {**values, "text": self.text}


def check_agreement(trace: Trace, runner: Runner) -> None:
    """Compare a compiled step with eager PyTorch, on the inputs of the capture.

    Raises `CaptureError` if results differ by more than the rounding of sums in another order. Two
    eager executions that differ, also with one thread, depend on values that Python computes, such
    as the time: the capture contains these as constants, so that later steps would be wrong.
    Logs smaller differences. Restores all state, and moves it to the homes of the plan.
    """
    joint = trace.joint
    state = StepState(joint, joint.inputs)
    eager_step = partial(_execute_eager, joint)
    with runner.trial(), state.restore_at_end():
        expected, expected_random = state.execute_step(eager_step)
        is_settled = joint.captures.is_settled
        unstable_results = _unstable_results(trace, state, expected) if is_settled else []
        if unstable_results and torch.get_num_threads() > 1:
            # Several threads add in no fixed order: such differences are not due to captured
            # values.
            with limit_threads(1):
                unstable_results = _unstable_results(
                    trace, state, state.execute_step(eager_step)[0]
                )
        if unstable_results:
            raise CaptureError(
                f"{joint.name}: PyTorch itself gives other results when the step runs again from "
                "the same parameters, buffers and random state: "
                f"{format_differences(unstable_results)}; the cause (a clock, "
                "random numbers of another library, an attribute that forward "
                "counts up) would be frozen: make it an input or a buffer; if forward makes "
                "modules, call the model once before"
            )
        actual, actual_random = state.execute_step(lambda: runner(joint.inputs))
    result_differences = list(find_differences(trace, expected, actual))
    mismatches = [
        difference for difference in result_differences if not _is_rounding(difference, expected)
    ]
    if mismatches:
        raise CaptureError(
            f"{joint.name}: the captured step does not compute what PyTorch does: "
            f"{format_differences(mismatches)}; replace the operations that these come from"
            + (
                _CHECKPOINT_ADVICE
                if any(d.name.startswith(OutputKind.MUTATION) for d in mismatches)
                else ""
            )
        )
    if result_differences:
        message = "%s: not all bits are those of PyTorch: %s"
        _LOG.warning(message, joint.name, format_differences(result_differences))
    if not torch.equal(expected_random, actual_random):
        _LOG.warning("%s: the random generator is in another state than after eager", joint.name)


def _execute_eager(joint: Joint, *, backward: bool = True) -> Any:
    """Execute a step in eager PyTorch on the captured inputs; raise `CaptureError` if it fails."""
    with convert_exceptions(f"{joint.name}: one step of PyTorch"):
        return execute_eager_step(joint, joint.inputs, backward=backward)


def _unstable_results(trace: Trace, state: StepState, expected: Results) -> list[ResultDifference]:
    """Return the results that differ in a second eager step, with modules as the first left them.

    The backward pass is omitted if modules and the results of a second forward pass are equal: only
    custom autograd functions and hooks, which alone cause no repetition, execute Python in it.
    """
    if state.is_unchanged:
        execute_forward = partial(_execute_eager, trace.joint, backward=False)
        forward_results = state.execute_step(execute_forward, restore_modules=False)[0]
        expected_results = {
            name: value for name, value in expected.items() if name in forward_results
        }
        if not any(find_differences(trace, expected_results, forward_results)):
            return []
    results = state.execute_step(partial(_execute_eager, trace.joint), restore_modules=False)[0]
    return list(find_differences(trace, expected, results))


_CHECKPOINT_ADVICE: Final = (
    "; a buffer that is changed inside of torch.utils.checkpoint is changed again in eager's "
    "backward pass: leave the checkpoint out, because a compiled step decides itself what it "
    "recomputes"
)


def _is_rounding(difference: ResultDifference, expected: Results) -> bool:
    """Return whether a difference is small enough to come from the order of sums.

    The limit is sqrt(eps) times the largest finite expected value, for a gradient of all gradients.
    """
    name, value = difference.name, expected.get(difference.name)
    if value is None or difference.largest is None or not value.is_floating_point():
        return False
    reference_tensors = [value]
    if name.startswith(OutputKind.GRADIENT):
        reference_tensors = [
            gradient for name, gradient in expected.items() if name.startswith(OutputKind.GRADIENT)
        ]
    magnitude = max(map(_max_magnitude, reference_tensors))
    return bool(difference.largest <= torch.finfo(value.dtype).eps ** 0.5 * magnitude)


def _max_magnitude(value: torch.Tensor) -> float:
    """Return the largest absolute value of the finite elements; 0 if there are none."""
    magnitudes = value.detach().abs()
    return float(magnitudes[magnitudes.isfinite()].max()) if magnitudes.isfinite().any() else 0.0


def format_differences(differences: Sequence[ResultDifference], *, max_count: int = 3) -> str:
    """Return the first `max_count` differences and the number of omitted ones as text."""
    n_omitted = len(differences) - max_count
    list_text = "; ".join(map(str, differences[:max_count]))
    return list_text + (f"; and {n_omitted} more" if n_omitted > 0 else "")


def execute_eager_step(joint: Joint, inputs: Sequence[Any], *, backward: bool = True) -> Any:
    """Execute a step in eager PyTorch; return its output, with a detached undivided loss.

    Adds gradients to ``.grad`` or, with an optimizer, updates parameters and clears gradients.
    Without `backward` only the forward pass, which may change buffers, is executed.
    """
    with torch.enable_grad():
        outputs = joint.module(*inputs)
        loss, *further_results = (outputs,) if joint.output is None else outputs
        if not backward:
            return joint.build_output(loss.detach(), further_results)
        (loss / joint.accumulate).backward()
    if joint.optimizer is not None:
        # An output may be a parameter, which the optimizer updates below.
        further_results = [value.clone() for value in further_results]
        if joint.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(joint.module.parameters(), joint.clip_grad_norm)
        joint.optimizer.step()
        joint.optimizer.zero_grad()
    return joint.build_output(loss.detach(), further_results)


class StepState:
    """A snapshot of the state that a step may change, and execution of steps from this state.

    Steps call no gradient hook of the user, which may change anything.
    """

    def __init__(self, joint: Joint, inputs: Sequence[Any]) -> None:
        self._joint = joint
        self.gradient_tensors = {
            argument.name: joint.value(argument, inputs)
            for argument in joint.arguments
            if argument.kind in (InputKind.PARAMETER, InputKind.USER_INPUT)
            and isinstance(joint.value(argument, inputs), torch.Tensor)
        }
        """Tensors that may have a gradient, by name."""
        changed_arguments = [
            result.target for result in joint.results if result.kind is OutputKind.MUTATION
        ]
        if joint.optimizer is not None:
            changed_arguments = list(joint.arguments_of(InputKind.BUFFER))
        self.changed_tensors = {
            a.name: joint.value(a, inputs) for a in changed_arguments if a is not None
        }
        """Tensors that the step changes in place, by name; with an optimizer, all buffers."""
        self._parameters = {a.name: joint.value(a) for a in joint.arguments_of(InputKind.PARAMETER)}
        self._moments = MomentSnapshot(joint)
        tensors = (
            *self.changed_tensors.values(),
            *joint.module.parameters(),
            *joint.module.buffers(),
        )
        distinct_tensors = {id(tensor): tensor for tensor in tensors}.values()
        self._values = [(tensor, tensor.detach().clone()) for tensor in distinct_tensors]
        """(tensor, value in the snapshot), also of tensors that only eager mode changes (embeddings
        with ``max_norm``)."""
        self._random_state = torch.get_rng_state()
        with self._suspend_hooks():
            self._modules = ModuleSnapshot(joint.module)
        self._generator_states = GeneratorStates(joint.name, self._modules)

    @property
    def is_unchanged(self) -> bool:
        """Whether all state of modules that `ModuleSnapshot` covers is that of the snapshot."""
        return self._modules.is_unchanged()

    def _suspend_hooks(self) -> AbstractContextManager[None]:
        """Return a context manager in which tensors that may have a gradient have no hooks."""
        return without_hooks(self.gradient_tensors.values())

    @contextmanager
    def restore_at_end(self) -> Iterator[None]:
        """Context manager that clears gradients; at the end restores them and the snapshot."""
        gradients = {name: tensor.grad for name, tensor in self.gradient_tensors.items()}
        self._clear_gradients()
        with self._suspend_hooks():
            try:
                with self._generator_states.restore_at_end():
                    yield
            finally:
                self._moments.discard_created()
                self.reset()
                for name, tensor in self.gradient_tensors.items():
                    tensor.grad = gradients[name]

    def create_accumulators(self) -> None:
        """Set gradients to zeros or, with an optimizer, create moments; `reset` retains both."""
        if self._moments.has_optimizer:
            self._moments.create_missing()
            return
        for tensor in self.gradient_tensors.values():
            if tensor.requires_grad and tensor.is_leaf:
                tensor.grad = torch.zeros_like(tensor)

    def reset(self, *, restore_modules: bool = True) -> None:
        """Restore tensors, moments, random state and the `ModuleSnapshot`, but no gradients."""
        if restore_modules:
            self._modules.restore()
        with torch.no_grad():
            for tensor, value in self._values:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        self._moments.reset()
        torch.set_rng_state(self._random_state)

    def execute_from_start(self, step: Callable[[], Any]) -> Any:
        """Reset the state, and call `step`; return its result."""
        self.reset()
        return step()

    def execute_step(
        self, step: Callable[[], Any], *, restore_modules: bool = True
    ) -> tuple[Results, torch.Tensor]:
        """Reset the state and call `step`; return (results by name, random state after the step).

        Clears the gradients at the end. Without `restore_modules`, modules are those of the
        previous step.
        """
        self.reset(restore_modules=restore_modules)
        # An output of a model may be a buffer, which the next step changes.
        results = {
            name: value.clone() for name, value in self._joint.tensors_by_name(step()).items()
        }
        for name, tensor in self.gradient_tensors.items():
            if tensor.grad is not None:
                results[f"{OutputKind.GRADIENT} of {name}"] = tensor.grad
        for name, tensor in self.changed_tensors.items():
            results[f"{OutputKind.MUTATION} of {name}"] = tensor.detach().clone()
        if self._moments.has_optimizer:
            for name, tensor in (self._parameters | self._moments.read_moments()).items():
                results[f"update of {name}"] = tensor.detach().clone()
        self._clear_gradients()
        return results, torch.get_rng_state()

    def _clear_gradients(self) -> None:
        for tensor in self.gradient_tensors.values():
            tensor.grad = None


def find_differences(
    trace: Trace, expected: Results, actual: Results
) -> Iterator[ResultDifference]:
    """Yield the results, by name, that only one step has, or whose shapes or elements differ.

    NaN equals NaN, and types are not compared. `trace` only provides the names of operations.
    """
    step_graph = trace.step_graph
    operation_names = {
        output.result.name: step_graph.operations[output.last_operation].name
        for output in trace.outputs
        if output.last_operation is not None
    }
    for name in sorted(expected.keys() | actual.keys()):
        reference, value = expected.get(name), actual.get(name)
        largest_difference = None
        if reference is not None and value is not None and reference.shape == value.shape:
            if (
                torch.equal(reference, value)
                or ((reference == value) | (reference.isnan() & value.isnan())).all()
            ):
                continue
            largest_difference = float((reference.double() - value.double()).abs().max())
        yield ResultDifference(
            name=name, largest=largest_difference, op=operation_names.get(name, "")
        )
