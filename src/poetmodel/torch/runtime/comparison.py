"""Comparing eager PyTorch and a compiled step from one state, bit for bit."""

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
from poetmodel.torch.errors import CaptureError, explained
from poetmodel.torch.runtime.profiling import limited_threads
from poetmodel.torch.step.optimizers import Moments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from poetmodel.torch.capturing.joint_graph import Joint
    from poetmodel.torch.runtime.runner import Runner
    from poetmodel.torch.step.trace import Trace

    Results = dict[str, torch.Tensor]

_LOG: Final = logging.getLogger("poetmodel.torch.comparison")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultDifference:
    """A result that is not that of eager PyTorch, bit for bit."""

    name: str
    """Which result: ``loss``, ``output logits``, ``gradient of conv1.weight``, ``mutation of
    bn1.running_mean``."""
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


def check_agreement(trace: Trace, runner: Runner) -> None:
    """Run eager PyTorch again and a compiled step once on the inputs of the capture, and compare.

    Raises `CaptureError` if loss or gradients differ by more than the rounding of sums in another
    order; the log has smaller differences.

    A capture holds what Python code computed while it ran: the time, a count of calls, a number
    from a generator that PyTorch does not know. Where eager gives other results when it runs again,
    with modules as the first run left them, a captured step would be wrong from its second run on.
    """
    joint = trace.joint
    state = State(joint, joint.inputs)
    eager = partial(_eager, joint)
    with runner.trial(), state.kept():
        expected, expected_random = state.results(eager)
        unstable = _unstable(trace, state, expected)
        if unstable and torch.get_num_threads() > 1:
            # Sums that several threads share have no order of their own: that is no constant.
            with limited_threads(1):
                unstable = _unstable(trace, state, state.results(eager)[0])
        if unstable:
            raise CaptureError(
                f"{joint.name}: PyTorch itself gives other results when the step runs again from "
                f"the same parameters, buffers and random state: {listed(unstable)}; what "
                "changes them (a clock, random numbers of another library, an attribute that "
                "forward counts up) would be frozen: make it an input or a buffer; where forward "
                "makes modules, call the model once before"
            )
        actual, actual_random = state.results(lambda: runner(joint.inputs))
    all_apart = list(differences(trace, expected, actual))
    apart = [difference for difference in all_apart if not _is_rounding(difference, expected)]
    if apart:
        raise CaptureError(
            f"{joint.name}: the captured step does not compute what PyTorch does: "
            f"{listed(apart)}; replace the operations that these come from"
            + (_CHECKPOINTED if any(d.name.startswith(OutputKind.MUTATION) for d in apart) else "")
        )
    if all_apart:
        _LOG.warning("%s: not all bits are those of PyTorch: %s", joint.name, listed(all_apart))
    if not torch.equal(expected_random, actual_random):
        _LOG.warning("%s: the random generator is left in another state than eager's", joint.name)


def _eager(joint: Joint, *, backward: bool = True) -> Any:
    with explained(f"{joint.name}: one step of PyTorch"):
        return eager_step(joint, joint.inputs, backward=backward)


def _unstable(trace: Trace, state: State, expected: Results) -> list[ResultDifference]:
    """Return the results that differ when eager runs again, with modules as it left them.

    Where it left nothing behind, and loss and buffers of another forward pass are the same, what
    the backward pass computes is too: no Python code of the model runs in it.
    """
    if state.is_as_before:
        forward = state.results(partial(_eager, trace.joint, backward=False), attributes=False)[0]
        same = {name: value for name, value in expected.items() if name in forward}
        if not any(differences(trace, same, forward)):
            return []
    again = state.results(partial(_eager, trace.joint), attributes=False)[0]
    return list(differences(trace, expected, again))


_CHECKPOINTED: Final = (
    "; what changes a buffer inside of torch.utils.checkpoint does so again in eager's backward "
    "pass: leave the checkpoint out, a compiled step decides itself what it computes again"
)


def _is_rounding(difference: ResultDifference, expected: Results) -> bool:
    """Whether a difference is as small as sums in another order make it.

    Those of gradients are seen beside the largest one.
    """
    name, value = difference.name, expected.get(difference.name)
    if value is None or difference.largest is None or not value.is_floating_point():
        return False
    alike = [value]
    if name.startswith(OutputKind.GRADIENT):
        alike = [v for name, v in expected.items() if name.startswith(OutputKind.GRADIENT)]
    reach = max(map(_largest, alike))
    return bool(difference.largest <= torch.finfo(value.dtype).eps ** 0.5 * reach)


def _largest(value: torch.Tensor) -> float:
    magnitudes = value.detach().abs()
    return float(magnitudes[magnitudes.isfinite()].max()) if magnitudes.isfinite().any() else 0.0


def listed(differences: Sequence[ResultDifference], *, most: int = 3) -> str:
    """Return the first few of some differences, and how many more there are."""
    more = len(differences) - most
    return "; ".join(map(str, differences[:most])) + (f"; and {more} more" if more > 0 else "")


def eager_step(joint: Joint, inputs: Sequence[Any], *, backward: bool = True) -> Any:
    """Run the step as PyTorch does, or its forward pass alone; return what a step does."""
    with torch.enable_grad():
        outputs = joint.module(*inputs)
        loss, *others = (outputs,) if joint.output is None else outputs
        if not backward:
            return joint.build_output(loss.detach(), others)
        (loss / joint.accumulate).backward()
    if joint.optimizer is not None:
        others = [value.clone() for value in others]  # what is a parameter is updated below
        if joint.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(joint.module.parameters(), joint.clip_grad_norm)
        joint.optimizer.step()
        joint.optimizer.zero_grad()
    return joint.build_output(loss.detach(), others)


class State:
    """All that a step may change, and how it was."""

    def __init__(self, joint: Joint, inputs: Sequence[Any]) -> None:
        self._joint = joint
        self.targets = {
            argument.name: joint.value(argument, inputs)
            for argument in joint.arguments
            if argument.kind in (InputKind.PARAMETER, InputKind.USER_INPUT)
            and isinstance(joint.value(argument, inputs), torch.Tensor)
        }
        """Whatever may have a gradient, by name."""
        changed = [r.target for r in joint.results if r.kind is OutputKind.MUTATION]
        if joint.optimizer is not None:
            changed = list(joint.arguments_of(InputKind.BUFFER))
        self.changed = {a.name: joint.value(a, inputs) for a in changed if a is not None}
        """Objects changed in place, by name; buffers that are not in the graph stay."""
        self._parameters = {a.name: joint.value(a) for a in joint.arguments_of(InputKind.PARAMETER)}
        self._moments = Moments(joint)
        there = (*self.changed.values(), *joint.module.parameters(), *joint.module.buffers())
        distinct = {id(tensor): tensor for tensor in there}.values()
        self._values = [(tensor, tensor.detach().clone()) for tensor in distinct]
        """Values before, also of what only eager changes: an embedding that bounds its rows."""
        self._random = torch.get_rng_state()
        self._attributes = ModuleSnapshot(joint.module)
        self._draws = GeneratorStates(joint.name, self._attributes)

    @property
    def is_as_before(self) -> bool:
        """Whether all attributes and hooks of modules are as they were."""
        return self._attributes.is_unchanged()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Take the gradients away for a while, and put all back at the end."""
        gradients = {name: tensor.grad for name, tensor in self.targets.items()}
        self._clear_gradients()
        try:
            with self._draws.restored():
                yield
        finally:
            self._moments.discard_created()
            self.reset()
            for name, tensor in self.targets.items():
                tensor.grad = gradients[name]

    def fill(self) -> None:
        """Let gradients, or the moments of an optimizer, be there before each of the next steps."""
        if self._moments.is_in_use:
            self._moments.create_missing()
            return
        for tensor in self.targets.values():
            if tensor.requires_grad and tensor.is_leaf:
                tensor.grad = torch.zeros_like(tensor)

    def reset(self, *, attributes: bool = True) -> None:
        """Put back what was changed in place, the state of the random generator, and modules."""
        if attributes:
            self._attributes.restore()
        with torch.no_grad():
            for tensor, value in self._values:
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        self._moments.reset()
        torch.set_rng_state(self._random)

    def again(self, work: Callable[[], Any]) -> Any:
        """Run something from the state before."""
        self.reset()
        return work()

    def results(
        self, work: Callable[[], Any], *, attributes: bool = True
    ) -> tuple[Results, torch.Tensor]:
        """Run a step from the state before; return its results by name, and the random state.

        Where asked for, modules have their attributes as another step left them.
        """
        self.reset(attributes=attributes)
        # What a model returns may be a buffer, which the next run changes.
        results = {
            name: value.clone() for name, value in self._joint.results_by_name(work()).items()
        }
        for name, tensor in self.targets.items():
            if tensor.grad is not None:
                results[f"{OutputKind.GRADIENT} of {name}"] = tensor.grad
        for name, tensor in self.changed.items():
            results[f"{OutputKind.MUTATION} of {name}"] = tensor.detach().clone()
        if self._moments.is_in_use:
            for name, tensor in (self._parameters | self._moments.values()).items():
                results[f"update of {name}"] = tensor.detach().clone()
        self._clear_gradients()
        return results, torch.get_rng_state()

    def _clear_gradients(self) -> None:
        for tensor in self.targets.values():
            tensor.grad = None


def differences(trace: Trace, expected: Results, actual: Results) -> Iterator[ResultDifference]:
    """Yield the results that are not equal bit for bit."""
    parts = trace.parts
    ops = {
        output.result.name: parts.operations[output.completed_by].name
        for output in parts.outputs
        if output.completed_by is not None
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
