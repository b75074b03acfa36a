"""Certificates: comparison of a compiled step with eager PyTorch, in results, memory and time."""

from __future__ import annotations

import operator
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.capturing.joint_graph import InputKind
from poetmodel.torch.capturing.modules import has_hooks
from poetmodel.torch.graph.tensors import heap_peak_bytes
from poetmodel.torch.runtime.comparison import (
    ResultDifference,
    StepState,
    execute_eager_step,
    find_differences,
    format_differences,
)
from poetmodel.torch.runtime.profiling import MEASURING_S
from poetmodel.torch.step.scheduled import always_resident_bytes
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from poetmodel.torch.compiled import Compiled

REPEATS: Final = 5
"""Maximum number of timed executions of each step, the fastest of which counts. After two of each
step, no further pair begins once all executions have taken `MEASURING_S` together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Comparison of eager PyTorch with a compiled step that starts from the same state."""

    name: str
    """Name of the step."""
    compared: int
    """Number of compared results: loss, outputs, gradients, buffers; see also `updates`."""
    differences: tuple[ResultDifference, ...]
    """Results that are not equal; NaN equals NaN."""
    random_equal: bool
    """Whether the final state of PyTorch's random generator is that of eager."""
    budget_bytes: int
    """Budget for tensors and workspaces [B]."""
    plan_peak_bytes: int
    """Peak RAM of the plan, including reserved bytes [B]."""
    heap_peak_bytes: int
    """Measured peak of the heap: tensors and workspaces [B]. Parameters and gradients are excluded,
    unless `updates` is true."""
    eager_heap_peak_bytes: int
    """Measured peak of the heap of eager PyTorch [B], counted like `heap_peak_bytes`."""
    second_gradients_bytes: int
    """Bytes of gradients that are added to existing gradients only at the end of the step (with
    ``rollback``, or with hooks) [B]. Not included in the measured peaks."""
    written_bytes: int
    """Bytes paged out in a step, measured [B]."""
    read_bytes: int
    """Bytes paged in in a step, measured [B]."""
    plan_written_bytes: int
    """Bytes paged out in a step, as planned [B]."""
    plan_read_bytes: int
    """Bytes paged in in a step, as planned [B]."""
    time_s: float
    """Shortest time of a compiled step [s]."""
    plan_time_s: float | None
    """Planned time of a step [s], by the costs of the solved problem; None without costs."""
    plan_device: str | None
    """Name of the device of the planned time; None if the costs have no device."""
    eager_time_s: float
    """Shortest time of a step of eager PyTorch [s]."""
    threads: int
    """Number of PyTorch's threads."""
    state_on_storage_bytes: int = 0
    """Bytes of state with its home on storage [B]."""
    mirrored_bytes: int = 0
    """Bytes of state in RAM that a step writes to storage, so that a failed step can be undone
    (``rollback``) [B]; 0 unless there are an optimizer, ``storage`` and ``rollback``."""
    updates: bool = False
    """Whether an optimizer's updates are part of the step. Results are then parameters and moments
    instead of gradients, and peaks include state and inputs."""

    @property
    def equal(self) -> bool:
        """Whether all results and the random state equal those of eager PyTorch."""
        return not self.differences and self.random_equal

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak of the heap is within the budget."""
        return self.heap_peak_bytes <= self.budget_bytes

    def summary(self) -> str:
        """Return four lines of text: results, heap peak, bytes written and read, and time.

        The first line names at most five differences.
        """
        if self.differences:
            list_text = format_differences(self.differences, max_count=5)
            results_text = (
                f"{len(self.differences)} of {self.compared} results differ from eager: {list_text}"
            )
        else:
            updated_kinds = "parameters, optimizer state" if self.updates else "gradients"
            results_text = (
                f"all {self.compared} results (loss, {updated_kinds}, buffers) equal eager's"
            )
        if not self.random_equal:
            results_text += "; the random generator is in another state than eager's"
        comparison = "within" if self.within_budget else "ABOVE"
        gradients_text = ""
        if self.second_gradients_bytes:
            size = format_bytes(self.second_gradients_bytes)
            gradients_text = f"; accumulation needs {size} more for delayed gradients"
        homes_text = ""
        if self.state_on_storage_bytes:
            homes_text = (
                f"; {format_bytes(self.state_on_storage_bytes)} of the state are on storage"
            )
        if self.mirrored_bytes:
            size = format_bytes(self.mirrored_bytes)
            homes_text += f", and each step writes a copy of {size} of state in RAM (rollback)"
        plan_text = ""
        if self.plan_time_s is not None:
            device_text = f" on {self.plan_device}" if self.plan_device else ""
            plan_text = f", plan {format_seconds(self.plan_time_s)}{device_text}"
        host_text = " on this host" if self.plan_device else ""
        return "\n".join(
            (
                f"{self.name}: {results_text}",
                f"heap peak {format_bytes(self.heap_peak_bytes)}, {comparison} the budget of "
                f"{format_bytes(self.budget_bytes)} (plan {format_bytes(self.plan_peak_bytes)}, "
                f"eager {format_bytes(self.eager_heap_peak_bytes)}){gradients_text}",
                f"written {format_bytes(self.written_bytes)} and read "
                f"{format_bytes(self.read_bytes)} a step (plan "
                f"{format_bytes(self.plan_written_bytes)} and "
                f"{format_bytes(self.plan_read_bytes)}){homes_text}",
                f"time {format_seconds(self.time_s)} a step{host_text}{plan_text}, "
                f"eager {format_seconds(self.eager_time_s)}{host_text}, {self.threads} thread(s)",
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields and properties as plain values for JSON."""
        values = asdict(self)
        values["differences"] = [difference.to_dict() for difference in self.differences]
        return {**values, "equal": self.equal, "within_budget": self.within_budget}


def certify(compiled: Compiled, inputs: Sequence[Any]) -> Certificate:
    """Execute eager PyTorch and a compiled step from the same state; compare and measure them.

    `inputs` are flat. All state is restored, and moved to the homes of the plan. Peaks are measured
    with existing gradients or moments, so that their memory does not count as new. The budget does
    not bound the memory of this function. Raises `CaptureError` if a profiler of PyTorch is on, and
    the errors of `Runner`.
    """
    joint, runner = compiled.trace.joint, compiled.runner
    state = StepState(joint, inputs)
    eager = _TimedStep(partial(execute_eager_step, joint, inputs))
    compiled_step = _TimedStep(partial(runner, inputs))
    accumulating_step = partial(compiled_step, delays_gradients=False)
    with state.restore_at_end():
        with runner.trial():
            expected, expected_random = state.execute_step(eager)
            actual, actual_random = state.execute_step(compiled_step)
            result_differences = tuple(find_differences(compiled.trace, expected, actual))
            n_compared = len(expected.keys() | actual.keys())
            del expected, actual
            state.reset()
        state.create_accumulators()
        with runner.trial():  # with moments: before the first step storage has none
            earlier_traffic, mirrored_bytes = runner.traffic, runner.mirrored_bytes
            heap_bytes = state.execute_from_start(lambda: heap_peak_bytes(accumulating_step))
            written_bytes, read_bytes = map(operator.sub, runner.traffic, earlier_traffic)
            mirrored_bytes = runner.mirrored_bytes - mirrored_bytes
            eager_heap_bytes = state.execute_from_start(lambda: heap_peak_bytes(eager))
            while (
                len(compiled_step.times_s) < REPEATS
                and sum(eager.times_s + compiled_step.times_s) < MEASURING_S
            ):
                for step in (eager, compiled_step):
                    state.execute_from_start(step)
            state.reset()
    runner.move_state()
    # The learning rate is an input that each step creates.
    rate_bytes = sum(joint.value(a).nbytes for a in joint.arguments_of(InputKind.LEARNING_RATE))
    resident_bytes = always_resident_bytes(compiled.trace) - rate_bytes
    resident_in_ram_bytes = resident_bytes - compiled.runner.state_on_storage_bytes
    return Certificate(
        name=compiled.trace.graph.name,
        compared=n_compared,
        differences=result_differences,
        random_equal=torch.equal(expected_random, actual_random),
        updates=joint.optimizer is not None,
        budget_bytes=compiled.budget_bytes,
        plan_peak_bytes=compiled.peak_bytes,
        heap_peak_bytes=resident_in_ram_bytes + heap_bytes,
        eager_heap_peak_bytes=resident_bytes + eager_heap_bytes,
        second_gradients_bytes=(
            compiled.trace.graph.resident_bytes.get("gradients", 0)
            if runner.delays_gradients
            else sum(t.nbytes for t in state.gradient_tensors.values() if has_hooks(t))
        ),
        state_on_storage_bytes=compiled.runner.state_on_storage_bytes,
        mirrored_bytes=mirrored_bytes,
        written_bytes=written_bytes,
        read_bytes=read_bytes,
        plan_written_bytes=compiled.check.written_bytes,
        plan_read_bytes=compiled.check.read_bytes,
        time_s=min(compiled_step.times_s),
        plan_time_s=compiled.check.makespan_s,
        plan_device=compiled.device,
        eager_time_s=min(eager.times_s),
        threads=torch.get_num_threads(),
    )


class _TimedStep:
    """A step as a function that records the time of each call."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self.times_s: list[float] = []
        """Time of each call [s]."""

    def __call__(self, **options: Any) -> Any:
        begin_s = perf_counter()
        value = self._step(**options)
        self.times_s.append(perf_counter() - begin_s)
        return value
