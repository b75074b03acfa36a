"""Certificates: a compiled step beside eager PyTorch, in bits, memory and time."""

from __future__ import annotations

import operator
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.capturing.joint_graph import InputKind
from poetmodel.torch.graph.tensors import heap_peak_bytes
from poetmodel.torch.runtime.comparison import (
    ResultDifference,
    State,
    differences,
    eager_step,
    listed,
)
from poetmodel.torch.runtime.profiling import MEASURING_S
from poetmodel.torch.step.scheduled import always_resident_bytes
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from poetmodel.torch.compiled import Compiled

REPEATS: Final = 5
"""Number of runs of which the least time is taken, if they take no more than `MEASURING_S`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Observations of one run of eager PyTorch and of a compiled step from the same state."""

    name: str
    """The step."""
    compared: int
    """Results that were compared: the loss, gradients, buffers."""
    differences: tuple[ResultDifference, ...]
    """Those that are not equal."""
    random_equal: bool
    """Whether the state of the random generator afterwards is eager's."""
    budget_bytes: int
    """The budget for tensors and workspaces [B]."""
    plan_peak_bytes: int
    """The peak that the plan promises, with what is reserved beside it [B]."""
    heap_peak_bytes: int
    """Measured peak of the heap: tensors and workspaces, parameters and gradients excluded [B]."""
    eager_heap_peak_bytes: int
    """The same of eager PyTorch [B]."""
    second_gradients_bytes: int
    """Bytes of gradients that wait for the end of the step beside those that are there already
    (``rollback``); no part of the measured peaks, and 0 where nothing waits [B]."""
    written_bytes: int
    """Paged out in a step, as counted [B]."""
    read_bytes: int
    """Paged in in a step, as counted [B]."""
    plan_written_bytes: int
    """Paged out, as planned [B]."""
    plan_read_bytes: int
    """Paged in, as planned [B]."""
    time_s: float
    """Least time of a step [s]."""
    plan_time_s: float | None
    """Time of a step as planned [s], by the costs that were solved with."""
    plan_device: str | None
    """The device that the planned time is for; None where costs are those of no named device."""
    eager_time_s: float
    """Least time of a step of eager PyTorch [s]."""
    threads: int
    """Threads that PyTorch computed with."""
    state_on_storage_bytes: int = 0
    """Size of the state that has its home on storage [B]."""
    mirrored_bytes: int = 0
    """Written in a step of state whose home is RAM, so that the file has all of the state and a
    step that fails can be undone (``rollback``); 0 where no state lies on storage [B]."""
    updates: bool = False
    """Whether an optimizer's updates are part of the step: results are then parameters and moments
    in place of gradients, and peaks hold state and inputs too."""

    @property
    def equal(self) -> bool:
        """Whether all results, and the random generator, are exactly those of eager PyTorch."""
        return not self.differences and self.random_equal

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak of the heap is within the budget."""
        return self.heap_peak_bytes <= self.budget_bytes

    def summary(self) -> str:
        """Return the findings, in a few lines."""
        if self.differences:
            shown = listed(self.differences, most=5)
            same = f"{len(self.differences)} of {self.compared} results differ from eager: {shown}"
        else:
            what = "parameters, optimizer state" if self.updates else "gradients"
            same = f"all {self.compared} results (loss, {what}, buffers) equal eager's"
        if not self.random_equal:
            same += "; the random generator is in another state than eager's"
        verdict = "within" if self.within_budget else "ABOVE"
        second = ""
        if self.second_gradients_bytes:
            size = format_bytes(self.second_gradients_bytes)
            second = f"; while gradients accumulate, {size} more hold those that wait (rollback)"
        homes = ""
        if self.state_on_storage_bytes:
            homes = f"; {format_bytes(self.state_on_storage_bytes)} of the state lie on storage"
        if self.mirrored_bytes:
            size = format_bytes(self.mirrored_bytes)
            homes += f", and each step writes a copy of {size} that lie in RAM (rollback)"
        planned = ""
        if self.plan_time_s is not None:
            where = f" on {self.plan_device}" if self.plan_device else ""
            planned = f", plan {format_seconds(self.plan_time_s)}{where}"
        here = " on this host" if self.plan_device else ""
        return "\n".join(
            (
                f"{self.name}: {same}",
                f"heap peak {format_bytes(self.heap_peak_bytes)}, {verdict} the budget of "
                f"{format_bytes(self.budget_bytes)} (plan {format_bytes(self.plan_peak_bytes)}, "
                f"eager {format_bytes(self.eager_heap_peak_bytes)}){second}",
                f"written {format_bytes(self.written_bytes)} and read "
                f"{format_bytes(self.read_bytes)} a step (plan "
                f"{format_bytes(self.plan_written_bytes)} and "
                f"{format_bytes(self.plan_read_bytes)}){homes}",
                f"time {format_seconds(self.time_s)} a step{here}{planned}, "
                f"eager {format_seconds(self.eager_time_s)}{here}, {self.threads} thread(s)",
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        values = asdict(self)
        values["differences"] = [difference.to_dict() for difference in self.differences]
        return {**values, "equal": self.equal, "within_budget": self.within_budget}


def certify(compiled: Compiled, inputs: Sequence[Any]) -> Certificate:
    """Run eager PyTorch and a compiled step from the same state, compare and measure.

    Parameters, gradients, buffers, flat inputs and the state of the random generator stay as they
    were.

    Results are compared with gradients that were None before. Peaks are measured with gradients
    that are there already, so that theirs does not count. All runs but one are timed, and further
    ones where steps are short. The memory that verifying takes is not bounded by the budget.
    """
    joint, runner = compiled.trace.joint, compiled.runner
    state = State(joint, inputs)
    eager = _Timed(partial(eager_step, joint, inputs))
    ours = _Timed(partial(runner, inputs))
    accumulating = partial(ours, waits=False)
    with state.kept():
        with runner.trial():
            expected, expected_random = state.results(eager)
            actual, actual_random = state.results(ours)
            apart = tuple(differences(compiled.trace, expected, actual))
            count = len(expected.keys() | actual.keys())
            del expected, actual
            state.reset()
        state.fill()
        with runner.trial():  # with moments, which a first step has nowhere to read from
            before, mirrored = runner.traffic, runner.mirrored_bytes
            heap = state.again(lambda: heap_peak_bytes(accumulating))
            written, read = map(operator.sub, runner.traffic, before)
            mirrored = runner.mirrored_bytes - mirrored
            eager_heap = state.again(lambda: heap_peak_bytes(eager))
            while len(ours.times) < REPEATS and sum(eager.times + ours.times) < MEASURING_S:
                for step in (eager, ours):
                    state.again(step)
            state.reset()
    runner.move_state()
    # The learning rate is an input, and made anew in each step.
    rate_bytes = sum(joint.value(a).nbytes for a in joint.arguments_of(InputKind.LEARNING_RATE))
    there = always_resident_bytes(compiled.trace) - rate_bytes
    ours_there = there - compiled.runner.away_bytes
    return Certificate(
        name=compiled.trace.graph.name,
        compared=count,
        differences=apart,
        random_equal=torch.equal(expected_random, actual_random),
        updates=joint.optimizer is not None,
        budget_bytes=compiled.budget_bytes,
        plan_peak_bytes=compiled.peak_bytes,
        heap_peak_bytes=ours_there + heap,
        eager_heap_peak_bytes=there + eager_heap,
        second_gradients_bytes=(
            compiled.trace.graph.resident_bytes.get("gradients", 0) if compiled.runner.waits else 0
        ),
        state_on_storage_bytes=compiled.runner.away_bytes,
        mirrored_bytes=mirrored,
        written_bytes=written,
        read_bytes=read,
        plan_written_bytes=compiled.check.written_bytes,
        plan_read_bytes=compiled.check.read_bytes,
        time_s=min(ours.times),
        plan_time_s=compiled.check.makespan_s,
        plan_device=compiled.device,
        eager_time_s=min(eager.times),
        threads=torch.get_num_threads(),
    )


class _Timed:
    """A step, and how long it took each time."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self.times: list[float] = []
        """The time of each run [s]."""

    def __call__(self, **options: Any) -> Any:
        begin_s = perf_counter()
        value = self._step(**options)
        self.times.append(perf_counter() - begin_s)
        return value
