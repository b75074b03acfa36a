"""The certificate: eager PyTorch and a compiled step from the same state, compared and measured."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from poetmodel.torch.peaks import heap_peak_bytes, storage_peak_bytes
from poetmodel.torch.roles import Purpose, Source
from poetmodel.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from poetmodel.torch.preparation import Compiled

REPEATS: Final = 3
"""Of how many runs the least time is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A result that is not that of eager PyTorch, bit by bit."""

    name: str
    """Which result: ``loss``, ``gradient of conv1.weight``, ``mutation of bn1.running_mean``."""
    largest: float | None
    """Largest absolute difference of an element; None where only one of the two has the result."""
    op: str
    """The operation that it comes from; empty where it is unknown."""

    @property
    def told(self) -> str:
        """How far apart the two are, in words."""
        if self.largest is None:
            return "only one of both has it"
        return f"by up to {self.largest:.3g}"

    def __str__(self) -> str:
        where = f", from {self.op}" if self.op else ""
        return f"{self.name} ({self.told}{where})"

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values that JSON has; what is not finite is only `told`."""
        values = asdict(self)
        if self.largest is not None and not isfinite(self.largest):
            values["largest"] = None
        return {**values, "told": self.told}


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What one run of eager PyTorch and of a compiled step from the same state showed."""

    name: str
    """The step."""
    compared: int
    """Results that were compared: the loss, gradients, buffers."""
    differences: tuple[Difference, ...]
    """Those that are not equal."""
    random_equal: bool
    """Whether the state of the random generator afterwards is eager's."""
    budget_bytes: int
    """The budget for tensors and workspaces [B]."""
    plan_peak_bytes: int
    """The peak that the plan promises, with what is reserved beside it [B]."""
    storage_peak_bytes: int
    """Measured peak of tensors, parameters and gradients excluded [B]."""
    heap_peak_bytes: int
    """Measured peak of the heap: tensors and workspaces [B]."""
    eager_heap_peak_bytes: int
    """The same of eager PyTorch [B]."""
    second_gradients_bytes: int
    """What gradients that wait for the end of the step take beside those that are there already
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

    @property
    def equal(self) -> bool:
        """Whether all results, and the random generator, are exactly those of eager PyTorch."""
        return not self.differences and self.random_equal

    @property
    def within_budget(self) -> bool:
        """Whether the measured peak of the heap is within the budget."""
        return self.heap_peak_bytes <= self.budget_bytes

    def summary(self) -> str:
        """Return what was found, in a few lines."""
        if self.differences:
            told = "; ".join(map(str, self.differences[:_SHOWN]))
            more = len(self.differences) - _SHOWN
            told += f"; and {more} more" if more > 0 else ""
            same = f"{len(self.differences)} of {self.compared} results differ from eager: {told}"
        else:
            same = f"all {self.compared} results (loss, gradients, buffers) equal eager's"
        if not self.random_equal:
            same += "; the random generator is in another state than eager's"
        verdict = "within" if self.within_budget else "ABOVE"
        second = ""
        if self.second_gradients_bytes:
            size = format_bytes(self.second_gradients_bytes)
            second = f"; while gradients accumulate, {size} more hold those that wait (rollback)"
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
                f"tensors {format_bytes(self.storage_peak_bytes)}, "
                f"eager {format_bytes(self.eager_heap_peak_bytes)}){second}",
                f"written {format_bytes(self.written_bytes)} and read "
                f"{format_bytes(self.read_bytes)} a step (plan "
                f"{format_bytes(self.plan_written_bytes)} and "
                f"{format_bytes(self.plan_read_bytes)})",
                f"time {format_seconds(self.time_s)} a step{here}{planned}, "
                f"eager {format_seconds(self.eager_time_s)}{here}",
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        values = asdict(self)
        values["differences"] = [difference.to_dict() for difference in self.differences]
        return {**values, "equal": self.equal, "within_budget": self.within_budget}


_SHOWN: Final = 5
"""Most differences that a summary tells."""


def certify(compiled: Compiled, inputs: Sequence[Any]) -> Certificate:
    """Run eager PyTorch and a compiled step from the same state, compare and measure.

    Parameters
    ----------
    compiled : Compiled
        The step.
    inputs : sequence
        Flat inputs.

    Returns
    -------
    Certificate
        Parameters, gradients, buffers, inputs and the state of the random generator are as before.

    Notes
    -----
    Results are compared with gradients that were None before. Peaks are measured with gradients
    that are there already, so that theirs does not count. Time and memory are those of several
    steps of each kind; the memory that verifying takes is not bounded by the budget.
    """
    state = _State(compiled, inputs)

    def eager() -> torch.Tensor:
        return _eager(compiled, inputs)

    def ours() -> torch.Tensor:
        return compiled.runner(inputs)

    def accumulating() -> torch.Tensor:
        return compiled.runner(inputs, waits=False)

    with state.kept():
        expected, expected_random = state.results(eager)
        traffic = compiled.runner.traffic
        before = (traffic.written_bytes, traffic.read_bytes)
        found, found_random = state.results(ours)
        traffic = compiled.runner.traffic
        moved = (traffic.written_bytes - before[0], traffic.read_bytes - before[1])
        differences = tuple(_differences(compiled, expected, found))
        count = len(expected.keys() | found.keys())
        del expected, found
        state.make_gradients()
        storage = state.again(lambda: storage_peak_bytes(accumulating, state.tensors()))
        heap = state.again(lambda: heap_peak_bytes(accumulating))
        eager_heap = state.again(lambda: heap_peak_bytes(eager))
        times = [(state.again(_timed(eager)), state.again(_timed(ours))) for _ in range(REPEATS)]
    return Certificate(
        name=compiled.trace.graph.name,
        compared=count,
        differences=differences,
        random_equal=bool((expected_random == found_random).all()),
        budget_bytes=compiled.budget_bytes,
        plan_peak_bytes=compiled.peak_bytes,
        storage_peak_bytes=storage,
        heap_peak_bytes=heap,
        eager_heap_peak_bytes=eager_heap,
        second_gradients_bytes=(
            compiled.trace.graph.resident_bytes.get("gradients", 0) if compiled.runner.waits else 0
        ),
        written_bytes=moved[0],
        read_bytes=moved[1],
        plan_written_bytes=compiled.check.written_bytes,
        plan_read_bytes=compiled.check.read_bytes,
        time_s=min(ours_s for _, ours_s in times),
        plan_time_s=compiled.check.makespan_s,
        plan_device=compiled.device,
        eager_time_s=min(eager_s for eager_s, _ in times),
    )


def _timed(work: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        begin = perf_counter()
        work()
        return perf_counter() - begin

    return run


def _eager(compiled: Compiled, inputs: Sequence[Any]) -> torch.Tensor:
    """Run the step as PyTorch does."""
    import torch
    from torch.utils import _pytree

    joint = compiled.trace.joint
    with torch.enable_grad():
        loss = joint.module(*_pytree.tree_unflatten(list(inputs), joint.input_spec))
        loss.backward()
    detached: torch.Tensor = loss.detach()
    return detached


class _State:
    """All that a step may change, and how it was."""

    def __init__(self, compiled: Compiled, inputs: Sequence[Any]) -> None:
        import torch

        joint = compiled.trace.joint
        self.targets = {
            argument.name: joint.value(argument, inputs)
            for argument in joint.arguments
            if argument.source in (Source.PARAMETER, Source.INPUT)
            and isinstance(joint.value(argument, inputs), torch.Tensor)
        }
        """Whatever may have a gradient, by name."""
        changed = [r.of for r in joint.results if r.purpose is Purpose.MUTATION]
        self.changed = {of.name: joint.value(of, inputs) for of in changed if of is not None}
        """What is changed in place, by name; buffers that are not in the graph stay."""
        self.others = [joint.value(a) for a in joint.of(Source.BUFFER) + joint.of(Source.CONSTANT)]
        there = itertools.chain(
            self.changed.values(), joint.module.parameters(), joint.module.buffers()
        )
        self._values = [
            (tensor, tensor.detach().clone()) for tensor in {id(t): t for t in there}.values()
        ]
        """Values before, also of what only eager changes: an embedding that bounds its rows."""
        self._random = torch.get_rng_state()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield everything that is there before a step."""
        for tensor in self.targets.values():
            yield tensor
            if tensor.grad is not None:
                yield tensor.grad
        yield from self.changed.values()
        yield from self.others

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Take the gradients away for a while, and put all back at the end."""
        gradients = {name: tensor.grad for name, tensor in self.targets.items()}
        self._clear_gradients()
        try:
            yield
        finally:
            self.reset()
            for name, tensor in self.targets.items():
                tensor.grad = gradients[name]

    def reset(self) -> None:
        """Put back what was changed in place, and the state of the random generator."""
        import torch

        with torch.no_grad():
            for tensor, value in self._values:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        torch.set_rng_state(self._random)

    def again(self, work: Callable[[], Any]) -> Any:
        """Run something from the state before."""
        self.reset()
        return work()

    def results(
        self, work: Callable[[], torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Run a step from the state before; return its results by name, and the random state."""
        import torch

        self.reset()
        found = {"loss": work()}
        for name, tensor in self.targets.items():
            if tensor.grad is not None:
                found[f"{Purpose.GRADIENT} of {name}"] = tensor.grad
        for name, tensor in self.changed.items():
            found[f"{Purpose.MUTATION} of {name}"] = tensor.detach().clone()
        self._clear_gradients()
        return found, torch.get_rng_state()

    def make_gradients(self) -> None:
        """Give gradients of zeros to all that are trained."""
        import torch

        for tensor in self.targets.values():
            if tensor.requires_grad and tensor.is_leaf:
                tensor.grad = torch.zeros_like(tensor)

    def _clear_gradients(self) -> None:
        for tensor in self.targets.values():
            tensor.grad = None


def _differences(
    compiled: Compiled, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> Iterator[Difference]:
    ops = _ops(compiled)
    for name in sorted(expected.keys() | found.keys()):
        one, other = expected.get(name), found.get(name)
        if one is None or other is None or one.shape != other.shape:
            yield Difference(name=name, largest=None, op=ops.get(name, ""))
        elif not _same(one, other):
            largest = float((one.double() - other.double()).abs().max())
            yield Difference(name=name, largest=largest, op=ops.get(name, ""))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal; NaN counts as equal to NaN."""
    import torch

    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def _ops(compiled: Compiled) -> dict[str, str]:
    """Return the name of the operation that each result comes from."""
    parts = compiled.trace.parts
    return {
        emission.result.name: parts.units[emission.after].label.name
        for emission in parts.emissions
        if emission.after is not None
    }
