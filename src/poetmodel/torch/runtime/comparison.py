"""Comparison of eager PyTorch and a compiled step from one state, bit for bit."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.capturing.joint_graph import InputKind, OutputKind
from poetmodel.torch.capturing.modules import GeneratorStates, ModuleSnapshot
from poetmodel.torch.errors import CaptureError, convert_exceptions
from poetmodel.torch.runtime.profiling import limited_threads
from poetmodel.torch.step.optimizers import MomentSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
    bn1.running_mean``."""
    largest: float | None
    """Largest absolute difference of an element; None if only one side has the result."""
    op: str
    """The operation that computes the result; empty if unknown."""

    @property
    def text(self) -> str:
        """The size of the difference as text, for display."""
        if self.largest is None:
            return "only one of both has it"
        return f"by up to {self.largest:.3g}"

    def __str__(self) -> str:
        operation_text = f", from {self.op}" if self.op else ""
        return f"{self.name} ({self.text}{operation_text})"

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as plain values for JSON; only its text has non-finite numbers."""
        values = asdict(self)
        if self.largest is not None and not isfinite(self.largest):
            values["largest"] = None
        return {**values, "told": self.text}


def check_agreement(trace: Trace, runner: Runner) -> None:
    """Compare a compiled step with eager PyTorch, on the inputs of the capture.

    Restores all state. Logs differences that are as small as the rounding of sums in another order.

    Raises `CaptureError` if loss or gradients differ by more. Also raises it if eager itself gives
    other results when it runs again, with modules as its first run left them. A capture contains
    the values that Python code computed meanwhile, such as the time, a count of calls, or a number
    of another library's generator. A captured step would then be wrong from its second execution.
    """
    joint = trace.joint
    state = StepState(joint, joint.inputs)
    eager = partial(_run_eager, joint)
    with runner.trial(), state.restored():
        expected, expected_random = state.results(eager)
        unstable_results = _unstable_results(trace, state, expected)
        if unstable_results and torch.get_num_threads() > 1:
            # Sums of several threads have no fixed order; these differences are no captured values.
            with limited_threads(1):
                unstable_results = _unstable_results(trace, state, state.results(eager)[0])
        if unstable_results:
            raise CaptureError(
                f"{joint.name}: PyTorch itself gives other results when the step runs again from "
                "the same parameters, buffers and random state: "
                f"{list_differences(unstable_results)}; the cause (a clock, "
                "random numbers of another library, an attribute that forward "
                "counts up) would be frozen: make it an input or a buffer; if forward makes "
                "modules, call the model once before"
            )
        actual, actual_random = state.results(lambda: runner(joint.inputs))
    result_differences = list(differences(trace, expected, actual))
    errors = [
        difference for difference in result_differences if not _is_rounding(difference, expected)
    ]
    if errors:
        raise CaptureError(
            f"{joint.name}: the captured step does not compute what PyTorch does: "
            f"{list_differences(errors)}; replace the operations that these come from"
            + (_CHECKPOINTED if any(d.name.startswith(OutputKind.MUTATION) for d in errors) else "")
        )
    if result_differences:
        message = "%s: not all bits are those of PyTorch: %s"
        _LOG.warning(message, joint.name, list_differences(result_differences))
    if not torch.equal(expected_random, actual_random):
        _LOG.warning("%s: the random generator is in another state than after eager", joint.name)


def _run_eager(joint: Joint, *, backward: bool = True) -> Any:
    with convert_exceptions(f"{joint.name}: one step of PyTorch"):
        return eager_step(joint, joint.inputs, backward=backward)


def _unstable_results(trace: Trace, state: StepState, expected: Results) -> list[ResultDifference]:
    """Return the results that differ when eager runs again with the modules of its first run.

    If modules are unchanged, and loss and buffers of another forward pass are equal, the backward
    pass is not repeated: the backward pass executes no Python code of the model.
    """
    if state.is_unchanged:
        run_forward = partial(_run_eager, trace.joint, backward=False)
        forward_results = state.results(run_forward, attributes=False)[0]
        expected_forward = {
            name: value for name, value in expected.items() if name in forward_results
        }
        if not any(differences(trace, expected_forward, forward_results)):
            return []
    results = state.results(partial(_run_eager, trace.joint), attributes=False)[0]
    return list(differences(trace, expected, results))


_CHECKPOINTED: Final = (
    "; a buffer that is changed inside of torch.utils.checkpoint is changed again in eager's "
    "backward pass: leave the checkpoint out, because a compiled step decides itself what it "
    "recomputes"
)


def _is_rounding(difference: ResultDifference, expected: Results) -> bool:
    """Return whether a difference is small enough to come from the order of sums.

    It may be sqrt(eps) times the largest number of the result, or of all gradients for a gradient.
    """
    name, value = difference.name, expected.get(difference.name)
    if value is None or difference.largest is None or not value.is_floating_point():
        return False
    references = [value]
    if name.startswith(OutputKind.GRADIENT):
        references = [
            gradient for name, gradient in expected.items() if name.startswith(OutputKind.GRADIENT)
        ]
    magnitude = max(map(_max_magnitude, references))
    return bool(difference.largest <= torch.finfo(value.dtype).eps ** 0.5 * magnitude)


def _max_magnitude(value: torch.Tensor) -> float:
    magnitudes = value.detach().abs()
    return float(magnitudes[magnitudes.isfinite()].max()) if magnitudes.isfinite().any() else 0.0


def list_differences(differences: Sequence[ResultDifference], *, max_count: int = 3) -> str:
    """Return the first differences as text, and the number of omitted ones."""
    n_omitted = len(differences) - max_count
    list_text = "; ".join(map(str, differences[:max_count]))
    return list_text + (f"; and {n_omitted} more" if n_omitted > 0 else "")


def eager_step(joint: Joint, inputs: Sequence[Any], *, backward: bool = True) -> Any:
    """Execute a step in eager PyTorch, or its forward pass alone; return the step's output.

    Changes the state of a step: gradients, or parameters and moments, and buffers.
    """
    with torch.enable_grad():
        outputs = joint.module(*inputs)
        loss, *further_results = (outputs,) if joint.output is None else outputs
        if not backward:
            return joint.build_output(loss.detach(), further_results)
        (loss / joint.accumulate).backward()
    if joint.optimizer is not None:
        further_results = [
            value.clone() for value in further_results
        ]  # parameters among them are updated below
        if joint.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(joint.module.parameters(), joint.clip_grad_norm)
        joint.optimizer.step()
        joint.optimizer.zero_grad()
    return joint.build_output(loss.detach(), further_results)


class StepState:
    """A snapshot of all state that a step may change."""

    def __init__(self, joint: Joint, inputs: Sequence[Any]) -> None:
        """Copy the tensors, moments, random state and module state of a step."""
        self._joint = joint
        self.targets = {
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
        self.changed = {a.name: joint.value(a, inputs) for a in changed_arguments if a is not None}
        """Tensors changed in place, by name; buffers outside of the graph are not changed."""
        self._parameters = {a.name: joint.value(a) for a in joint.arguments_of(InputKind.PARAMETER)}
        self._moments = MomentSnapshot(joint)
        tensors = (*self.changed.values(), *joint.module.parameters(), *joint.module.buffers())
        distinct_tensors = {id(tensor): tensor for tensor in tensors}.values()
        self._values = [(tensor, tensor.detach().clone()) for tensor in distinct_tensors]
        """Values in the snapshot, also of tensors that only eager changes (bounded embeddings)."""
        self._random = torch.get_rng_state()
        self._modules = ModuleSnapshot(joint.module)
        self._draws = GeneratorStates(joint.name, self._modules)

    @property
    def is_unchanged(self) -> bool:
        """Whether all attributes and hooks of modules are those of the snapshot."""
        return self._modules.is_unchanged()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context manager that removes gradients, and restores them and all state at the end."""
        gradients = {name: tensor.grad for name, tensor in self.targets.items()}
        self._clear_gradients()
        try:
            with self._draws.restore_at_end():
                yield
        finally:
            self._moments.discard_created()
            self.reset()
            for name, tensor in self.targets.items():
                tensor.grad = gradients[name]

    def create_accumulators(self) -> None:
        """Create zero gradients, or missing moments of an optimizer; later resets retain them."""
        if self._moments.has_optimizer:
            self._moments.create_missing()
            return
        for tensor in self.targets.values():
            if tensor.requires_grad and tensor.is_leaf:
                tensor.grad = torch.zeros_like(tensor)

    def reset(self, *, attributes: bool = True) -> None:
        """Restore tensors, moments and the random state, and modules if `attributes`."""
        if attributes:
            self._modules.restore()
        with torch.no_grad():
            for tensor, value in self._values:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        self._moments.reset()
        torch.set_rng_state(self._random)

    def run_from_start(self, work: Callable[[], Any]) -> Any:
        """Reset the state, and call `work`; return its result."""
        self.reset()
        return work()

    def results(
        self, work: Callable[[], Any], *, attributes: bool = True
    ) -> tuple[Results, torch.Tensor]:
        """Reset the state and run a step; return its results by name, and the random state.

        Without `attributes`, modules keep their attributes of the previous step. Gradients are
        removed afterwards.
        """
        self.reset(attributes=attributes)
        # An output of a model may be a buffer, which the next run changes.
        results = {
            name: value.clone() for name, value in self._joint.tensors_by_name(work()).items()
        }
        for name, tensor in self.targets.items():
            if tensor.grad is not None:
                results[f"{OutputKind.GRADIENT} of {name}"] = tensor.grad
        for name, tensor in self.changed.items():
            results[f"{OutputKind.MUTATION} of {name}"] = tensor.detach().clone()
        if self._moments.has_optimizer:
            for name, tensor in (self._parameters | self._moments.read_moments()).items():
                results[f"update of {name}"] = tensor.detach().clone()
        self._clear_gradients()
        return results, torch.get_rng_state()

    def _clear_gradients(self) -> None:
        for tensor in self.targets.values():
            tensor.grad = None


def differences(trace: Trace, expected: Results, actual: Results) -> Iterator[ResultDifference]:
    """Yield the results that are not equal bit for bit; NaN equals NaN."""
    step_graph = trace.step_graph
    ops = {
        output.result.name: step_graph.operations[output.last_operation].name
        for output in step_graph.outputs
        if output.last_operation is not None
    }
    for name in sorted(expected.keys() | actual.keys()):
        reference, value = expected.get(name), actual.get(name)
        largest = None
        if reference is not None and value is not None and reference.shape == value.shape:
            # NaN counts as equal to NaN.
            if (
                torch.equal(reference, value)
                or ((reference == value) | (reference.isnan() & value.isnan())).all()
            ):
                continue
            largest = float((reference.double() - value.double()).abs().max())
        yield ResultDifference(name=name, largest=largest, op=ops.get(name, ""))
