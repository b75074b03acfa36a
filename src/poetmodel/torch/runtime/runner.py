"""A plan as one training step: its program as Python, run so that all happens or nothing does."""

from __future__ import annotations

import traceback
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.errors import listed
from poetmodel.plan import Op
from poetmodel.torch.capturing.joint_graph import InputKind, OutputKind
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.runtime.program import StepWriter, TrainingWriter
from poetmodel.torch.state.pages import PageFile, Pages
from poetmodel.torch.state.store import StateStore
from poetmodel.torch.step.optimizers import OptimizerState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import fx

    from poetmodel.plan import Plan, Program
    from poetmodel.torch.runtime.program import Emit
    from poetmodel.torch.step.trace import Trace


TORN: Final = (
    "the step updates parameters as soon as it can: some may have been updated, and others not"
)
"""Note on a step that fails if updates are part of it."""


_RETURNED: Final = (OutputKind.LOSS, OutputKind.OUTPUT)


class Runner:
    """A captured step with its compiled program and its page file.

    `plan` is valid. `numbers` has for each tensor of its graph the number of the storage; `program`
    is the plan's in operations, where its nodes are not the same. With `rollback` gradients that
    are added to existing ones wait for the end of steps that page; where updates are part of the
    step, and there is a folder, a step that fails leaves state as it was. The files are made in
    `folder`; `homes` is the state file of the same step with other inputs, if there is one.
    """

    def __init__(
        self,
        trace: Trace,
        plan: Plan,
        numbers: Sequence[int],
        *,
        program: Program | None = None,
        folder: str | Path | None = None,
        rollback: bool = True,
        homes: StateStore | None = None,
    ) -> None:
        self.trace = trace
        program = plan.program if program is None else program
        writer = (
            StepWriter(trace, program, numbers)
            if trace.joint.optimizer is None
            else TrainingWriter(trace, program, numbers, resident=plan.resident or ())
        )
        self.program = writer.write()
        self.file: PageFile | None = None
        self.homes = homes
        away = self.program.homes
        paged = {numbers[i] for op, i in plan.program if op == Op.PAGE_OUT}.difference(away)
        if paged:
            self.file = PageFile(folder or ".", (trace.parts.storages[i] for i in sorted(paged)))
        kept = trace.joint.optimizer is not None and folder is not None and rollback
        if homes is None and (away or kept):
            on_storage = frozenset(away.values())
            self.homes = StateStore(trace, on_storage, folder=folder or ".", rollback=rollback)
        view = {} if self.homes is None else self.homes.numbers_of(trace)
        self._away = {index: view[number] for index, number in away.items()}
        """The numbers in the state file of state on storage, and of what replaces it."""
        self.waits = rollback and (self.file is not None or bool(trace.joint.finite_check_lines))
        """Whether gradients that are added to existing ones wait for the end of the step."""
        joint = trace.joint
        indices = {argument.node: index for index, argument in enumerate(joint.arguments)}
        self._places = _gradient_places(trace, indices)
        """Where gradients go, by the number of their output, in the order they come."""
        held = [output.result for output in self.program.held.values()]
        self._returned = [held.index(r) for r in joint.results if r.kind in _RETURNED]
        """Which of what is held a step returns: the loss first."""
        self._checks = [k for k, result in enumerate(held) if result.kind is OutputKind.CHECK]
        targets = {k: result.target for k, result in enumerate(held)}
        self._changed = {k: indices[t.node] for k, t in targets.items() if t is not None}
        """Which of what is held goes to which arguments at the end of a step."""
        self._random = any(operation.is_random for operation in trace.parts.operations)
        self._owned = [indices[argument.node] for argument in joint.module_arguments]
        self._inputs = [
            (indices[a.node], a.position) for a in joint.arguments_of(InputKind.USER_INPUT)
        ]
        lasting = (InputKind.TANGENT, InputKind.CONSTANT_TENSOR)
        self._fixed = [joint.value(a) if a.kind in lasting else None for a in joint.arguments]
        """Arguments that are the same in each step; None for others."""
        direct = trace.parts.direct
        unread = [
            indices[a.node] for a in joint.arguments if direct.get(a.node, (None,))[0] in self._away
        ]
        self._state = None if joint.optimizer is None else OptimizerState(joint, on_storage=unread)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes written and read by all steps so far, as planned [B]."""
        written, read = -self.mirrored_bytes, 0
        for file in (self.file, None if self.homes is None else self.homes.file):
            if file is not None:
                written, read = written + file.written_bytes, read + file.read_bytes
        return written, read

    @property
    def mirrored_bytes(self) -> int:
        """Bytes of state with a home in RAM written by all steps so far, for a rollback [B]."""
        return 0 if self.homes is None else self.homes.mirrored_bytes

    @property
    def away_bytes(self) -> int:
        """The size of the state that has its home on storage [B]."""
        numbers = set(self.program.homes.values())
        return sum(self.trace.parts.storages[number].bytes for number in numbers)

    def trial(self) -> AbstractContextManager[None]:
        """Run steps that count for nothing: the state of before is put back in the end."""
        if self.homes is None:
            return nullcontext()
        self.move_state()
        return self.homes.trial()

    def move_state(self) -> None:
        """Let state that a plan has on storage be there, and the rest in RAM."""
        if self.homes is not None:
            self.homes.begin(frozenset(self._away.values()))

    def close(self) -> None:
        """Remove the page file; state stays where it is."""
        if self.file is not None:
            self.file.close()

    def __call__(self, inputs: Sequence[Any], *, waits: bool | None = None) -> Any:
        """Run one step on flat inputs; return its loss, or what the model returns.

        `waits` goes before the field.

        Raises `PageError` if a page is lost; parameters, gradients, buffers and the state of the
        random generator are as before the step then.
        """
        self.move_state()
        values = self._values(inputs)
        if self._state is not None:
            values.append(self._state.fill_arguments(values))
        gradients = Gradients(self._places, values, waits=self.waits if waits is None else waits)
        before = torch.default_generator.get_state() if self._random else None
        try:
            held = self.run(values, gradients.emit)
            if self._state is not None:
                self._state.store_first_moments(values)
            if self.homes is not None:
                self.homes.commit()
        except BaseException as error:
            if before is not None:
                torch.default_generator.set_state(before)
            self._put_back(error)
            raise
        with torch.no_grad():
            gradients.commit()
            if self._changed:
                new = [held[k] for k in self._changed]
                torch._foreach_copy_([values[index] for index in self._changed.values()], new)
        loss, *others = [held[k] for k in self._returned]
        # What the model returns may be an argument as it is.
        return self.trace.joint.build_output(loss, [value.detach() for value in others])

    def _put_back(self, error: BaseException) -> None:
        """Put back the state of before a step that failed, or say that it is torn."""
        if self.homes is not None:
            self.homes.rollback()
        if self._state is not None and not (
            self.homes is not None and self.homes.has_two_generations
        ):
            error.add_note(TORN)

    def _values(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the present objects of the arguments, in their order."""
        values: list[Any] = self._fixed.copy()
        for index, value in zip(self._owned, self.trace.joint.module_tensors(), strict=True):
            values[index] = value
        for index, position in self._inputs:
            values[index] = inputs[position]
        return values

    def run(self, values: Sequence[Any], emit: Emit) -> list[torch.Tensor]:
        """Run the program on the values of the arguments; return those of ``program.held``.

        `emit` is called with the number of an output and its gradient, once for each. Nothing but
        the state of the random generator changes outside of the program, and state that is updated.
        """
        pages = self._pages()
        try:
            plain = torch._C.DisableTorchFunctionSubclass()  # noqa: SLF001 - its only name
            with torch.no_grad(), plain:  # gradients are plain tensors whatever inputs are
                held = list(self.program.function(values, emit, pages))
                self._check(held)
        except BaseException as error:
            # The frames of the program would hold its tensors for as long as the exception lives.
            traceback.clear_frames(error.__traceback__)
            raise
        return held

    def _check(self, held: Sequence[torch.Tensor]) -> None:
        """Raise `CaptureError` where numbers are not what the step took them for."""
        if not all(held[k] for k in self._checks):
            joint = self.trace.joint
            raise CaptureError(
                f"{joint.name}: not all numbers are finite or in range, or a matrix cannot be "
                f"inverted. The model tests this at {listed(joint.finite_check_lines)}, and a step "
                "supports only passed tests; nothing has changed: leave this batch out, or run it "
                "with eager PyTorch"
            )

    def _pages(self) -> Pages | None:
        if self.file is None and self.homes is None:
            return None
        if self.file is not None:
            self.file.check()
        if self.homes is None:
            return Pages(self.file)
        return Pages(self.file, state=self.homes.file, homes=self._away)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the gradient of one output goes."""

    argument: int
    key: int
    """The same for all gradients of one weight, which has several if it is used by several names;
    they are summed before anything else, as PyTorch does."""
    last: bool
    """Whether no other one of its key comes after it."""
    alone: bool
    """Whether nobody else reads the memory that it lies in."""


class Gradients:
    """The gradients of one step on their way into ``.grad``.

    Where there was no gradient the new one takes its place when the step is done. Where there was
    one, the new one is added to it: at once, or at the end where pages could still fail.
    """

    def __init__(self, places: Mapping[int, Place], values: Sequence[Any], *, waits: bool) -> None:
        self._places = places
        self._values = values
        self._waits = waits
        self._sums: dict[int, torch.Tensor] = {}
        """Values so far, by the key of their place."""

    def emit(self, number: int, value: torch.Tensor) -> None:
        """Take a gradient."""
        destination = self._places[number]
        target = self._values[destination.argument]
        total = self._sums.pop(destination.key, None)
        if total is not None:
            value = total.add_(value)
        if destination.last and target.grad is not None and not self._waits:
            target.grad.add_(value)
            return
        # A gradient that fills its memory, in the order of its weight, is handed out as it is.
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        own = destination.alone and whole and value.stride() == target.stride()
        if total is None and not own:
            value = torch.empty_like(target, requires_grad=False).copy_(value)
        self._sums[destination.key] = value

    def commit(self) -> None:
        """Hand out what has waited."""
        for destination in self._places.values():
            if not destination.last or destination.key not in self._sums:
                continue
            value = self._sums.pop(destination.key)
            target = self._values[destination.argument]
            if target.grad is None:
                target.grad = value
            else:
                target.grad.add_(value)


def _gradient_places(trace: Trace, arguments: Mapping[fx.Node, int]) -> dict[int, Place]:
    """Return the place of each gradient, by the number of its output, in the order they come."""
    parts = trace.parts
    readers = [operation.reads for operation in parts.operations]
    readers += [output.reads for output in parts.outputs]
    read = Counter(number for reads in readers for number in reads.storages)
    targets = {
        number: output.result.target
        for number, output in enumerate(parts.outputs)
        if not output.is_returned_at_end and output.result.target is not None
    }
    keys = {number: id(trace.joint.value(target)) for number, target in targets.items()}
    final = {key: number for number, key in keys.items()}
    return {
        number: Place(
            argument=arguments[targets[number].node],
            key=key,
            last=final[key] == number,
            alone=[read[i] for i in parts.outputs[number].reads.storages] == [1],
        )
        for number, key in keys.items()
    }
