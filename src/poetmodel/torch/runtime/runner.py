"""Execution of a plan as one training step, which either completes or changes nothing."""

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
    "the step updates parameters as early as possible: some may have been updated, others not"
)
"""Note for a failed step with updates that cannot be rolled back."""


_RETURNED: Final = (OutputKind.LOSS, OutputKind.OUTPUT)


class Runner:
    """A captured step with its compiled program and its page file.

    Parameters
    ----------
    trace : Trace
    plan : Plan
        A valid plan.
    storage_indices : sequence of int
        Storage index of each tensor of the plan's graph.
    program : Program, optional
        The plan's program with operation indices, if these differ from the node indices.
    folder : str or Path, optional
        Folder of the page file and the state file.
    rollback : bool
        Whether a failed step changes nothing. Gradients are then added to existing ones only at the
        end of steps that page. If updates are part of the step, state is restored from `folder`.
    state_store : StateStore, optional
        State file of the same step with other inputs, to be shared.
    """

    def __init__(
        self,
        trace: Trace,
        plan: Plan,
        storage_indices: Sequence[int],
        *,
        program: Program | None = None,
        folder: str | Path | None = None,
        rollback: bool = True,
        state_store: StateStore | None = None,
    ) -> None:
        """Write and compile the program; create the page file and the state file if needed."""
        self.trace = trace
        program = plan.program if program is None else program
        writer = (
            StepWriter(trace, program, storage_indices)
            if trace.joint.optimizer is None
            else TrainingWriter(trace, program, storage_indices, resident=plan.resident or ())
        )
        self.program = writer.write()
        self.file: PageFile | None = None
        self.state_store = state_store
        on_storage = self.program.state_indices
        paged_storages = {
            storage_indices[i] for op, i in plan.program if op == Op.PAGE_OUT
        }.difference(on_storage)
        if paged_storages:
            pages = (trace.step_graph.storages[i] for i in sorted(paged_storages))
            self.file = PageFile(folder or ".", pages)
        rolls_back = trace.joint.optimizer is not None and folder is not None and rollback
        if state_store is None and (on_storage or rolls_back):
            states = frozenset(on_storage.values())
            self.state_store = StateStore(trace, states, folder=folder or ".", rollback=rollback)
        file_number_of = {} if self.state_store is None else self.state_store.numbers_of(trace)
        self._file_numbers = {index: file_number_of[number] for index, number in on_storage.items()}
        """Number in the state file of each state on storage and of its replacement."""
        self.delays_gradients = rollback and (
            self.file is not None or bool(trace.joint.finite_check_lines)
        )
        """Whether gradients are added to existing ones only at the end of the step."""
        joint = trace.joint
        indices = {argument.node: index for index, argument in enumerate(joint.arguments)}
        self._targets = _gradient_targets(trace, indices)
        """Target of each gradient, by output index, in the order of completion."""
        results = [output.result for output in self.program.end_results.values()]
        self._returned = [results.index(r) for r in joint.results if r.kind in _RETURNED]
        """Positions among the end results that a step returns: the loss first."""
        self._checks = [k for k, result in enumerate(results) if result.kind is OutputKind.CHECK]
        targets = {k: result.target for k, result in enumerate(results)}
        self._changed = {k: indices[t.node] for k, t in targets.items() if t is not None}
        """For end results that are new values: the argument into which they are copied."""
        self._random = any(operation.is_random for operation in trace.step_graph.operations)
        self._module_indices = [indices[argument.node] for argument in joint.module_arguments]
        self._inputs = [
            (indices[a.node], a.position) for a in joint.arguments_of(InputKind.USER_INPUT)
        ]
        constant_kinds = (InputKind.TANGENT, InputKind.CONSTANT_TENSOR)
        self._fixed = [
            joint.value(a) if a.kind in constant_kinds else None for a in joint.arguments
        ]
        """Arguments that are equal in each step; None for arguments that are not."""
        output_keys = trace.step_graph.output_keys
        stored_positions = [
            indices[a.node]
            for a in joint.arguments
            if output_keys.get(a.node, (None,))[0] in self._file_numbers
        ]
        self._state = (
            None
            if joint.optimizer is None
            else OptimizerState(joint, positions_on_storage=stored_positions)
        )

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes written and read by all steps so far, without mirrored state [B]."""
        written_bytes, read_bytes = -self.mirrored_bytes, 0
        for file in (self.file, None if self.state_store is None else self.state_store.file):
            if file is not None:
                written_bytes, read_bytes = (
                    written_bytes + file.written_bytes,
                    read_bytes + file.read_bytes,
                )
        return written_bytes, read_bytes

    @property
    def mirrored_bytes(self) -> int:
        """Bytes of state in RAM that all steps so far wrote to storage for rollback [B]."""
        return 0 if self.state_store is None else self.state_store.mirrored_bytes

    @property
    def state_on_storage_bytes(self) -> int:
        """Bytes of state with its home on storage [B]."""
        storages = set(self.program.state_indices.values())
        return sum(self.trace.step_graph.storages[storage].bytes for storage in storages)

    def trial(self) -> AbstractContextManager[None]:
        """Context manager for trial steps: restores the state on storage at the end."""
        if self.state_store is None:
            return nullcontext()
        self.move_state()
        return self.state_store.trial()

    def move_state(self) -> None:
        """Move state to the homes of the plan: storage or RAM."""
        if self.state_store is not None:
            self.state_store.begin(frozenset(self._file_numbers.values()))

    def close(self) -> None:
        """Remove the page file; the state file remains."""
        if self.file is not None:
            self.file.close()

    def __call__(self, inputs: Sequence[Any], *, delays_gradients: bool | None = None) -> Any:
        """Execute one step on flat inputs; return its loss, or the model's output.

        Changes gradients, buffers and the random state, and parameters and moments if updates are
        part of the step. `delays_gradients` overrides the attribute.

        Raises `PageError` if a page is lost, and `CaptureError` if a check for finite numbers
        fails. Parameters, gradients, buffers and the random state are then unchanged, or the error
        has the note `TORN`.
        """
        self.move_state()
        values = self._values(inputs)
        if self._state is not None:
            values.append(self._state.fill_arguments(values))
        is_delayed = self.delays_gradients if delays_gradients is None else delays_gradients
        gradients = Gradients(self._targets, values, delayed=is_delayed)
        random_state = torch.default_generator.get_state() if self._random else None
        try:
            results = self.run(values, gradients.add)
            if self._state is not None:
                self._state.store_first_moments(values)
            if self.state_store is not None:
                self.state_store.commit()
        except BaseException as error:
            if random_state is not None:
                torch.default_generator.set_state(random_state)
            self._restore_state(error)
            raise
        with torch.no_grad():
            gradients.commit()
            if self._changed:
                new_values = [results[k] for k in self._changed]
                torch._foreach_copy_(
                    [values[index] for index in self._changed.values()], new_values
                )
        loss, *further_results = [results[k] for k in self._returned]
        # An output of the model may be an argument itself.
        return self.trace.joint.build_output(loss, [value.detach() for value in further_results])

    def _restore_state(self, error: BaseException) -> None:
        """Restore the state before a failed step, or add the note `TORN` to its error."""
        if self.state_store is not None:
            self.state_store.rollback()
        if self._state is not None and not (
            self.state_store is not None and self.state_store.has_two_generations
        ):
            error.add_note(TORN)

    def _values(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the current values of the arguments, in order."""
        values: list[Any] = self._fixed.copy()
        tensors = self.trace.joint.module_tensors()
        for index, value in zip(self._module_indices, tensors, strict=True):
            values[index] = value
        for index, position in self._inputs:
            values[index] = inputs[position]
        return values

    def run(self, values: Sequence[Any], emit: Emit) -> list[torch.Tensor]:
        """Execute the program on the values of the arguments; return ``program.end_results``.

        `emit` is called once per gradient, with its output index. Outside of the program only the
        random state changes, and state that is updated.
        """
        pages = self._pages()
        try:
            plain = torch._C.DisableTorchFunctionSubclass()  # noqa: SLF001 - its only name
            with torch.no_grad(), plain:  # gradients are plain tensors, whatever inputs are
                results = list(self.program.function(values, emit, pages))
                self._check(results)
        except BaseException as error:
            # Otherwise the exception would hold the tensors in the program's frames.
            traceback.clear_frames(error.__traceback__)
            raise
        return results

    def _check(self, results: Sequence[torch.Tensor]) -> None:
        """Raise `CaptureError` if a check for finite numbers has failed."""
        if not all(results[k] for k in self._checks):
            joint = self.trace.joint
            raise CaptureError(
                f"{joint.name}: not all numbers are finite or in range, or a matrix cannot be "
                f"inverted. The model tests this at {listed(joint.finite_check_lines)}, and a step "
                "supports only passed tests; nothing has changed: leave this batch out, or run it "
                "with eager PyTorch"
            )

    def _pages(self) -> Pages | None:
        """Return the pages of a step, after a check of the page file; None without files."""
        if self.file is None and self.state_store is None:
            return None
        if self.file is not None:
            self.file.check()
        if self.state_store is None:
            return Pages(self.file)
        return Pages(self.file, state=self.state_store.file, file_numbers=self._file_numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientTarget:
    """The argument whose ``.grad`` receives the gradient of one output."""

    argument: int
    key: int
    """Equal for all gradients of one weight: a weight with several names has several gradients,
    which are summed first, as PyTorch does."""
    is_last: bool
    """Whether the gradient is the last one of its key."""
    is_sole_reader: bool
    """Whether no other operation or output reads the gradient's storage."""


class Gradients:
    """The gradients of one step, which are stored in or added to ``.grad``.

    A target without ``.grad`` gets the new gradient when the step is complete. Otherwise the new
    gradient is added to the existing one: immediately, or at the end if pages could still fail.
    """

    def __init__(
        self, targets: Mapping[int, GradientTarget], values: Sequence[Any], *, delayed: bool
    ) -> None:
        """Begin without gradients; `values` are the arguments of the step."""
        self._targets = targets
        self._values = values
        self._delayed = delayed
        self._sums: dict[int, torch.Tensor] = {}
        """Sum of the gradients so far, by the key of their target."""

    def add(self, number: int, value: torch.Tensor) -> None:
        """Add a gradient to the sum of its key, or to an existing ``.grad``."""
        gradient_target = self._targets[number]
        target = self._values[gradient_target.argument]
        gradient_sum = self._sums.pop(gradient_target.key, None)
        if gradient_sum is not None:
            value = gradient_sum.add_(value)
        if gradient_target.is_last and target.grad is not None and not self._delayed:
            target.grad.add_(value)
            return
        # A gradient that fills its memory with the strides of its weight needs no copy.
        fills_storage = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        is_owned = (
            gradient_target.is_sole_reader and fills_storage and value.stride() == target.stride()
        )
        if gradient_sum is None and not is_owned:
            value = torch.empty_like(target, requires_grad=False).copy_(value)
        self._sums[gradient_target.key] = value

    def commit(self) -> None:
        """Store the remaining gradients in ``.grad``, or add them to existing ones."""
        for gradient_target in self._targets.values():
            if not gradient_target.is_last or gradient_target.key not in self._sums:
                continue
            value = self._sums.pop(gradient_target.key)
            target = self._values[gradient_target.argument]
            if target.grad is None:
                target.grad = value
            else:
                target.grad.add_(value)


def _gradient_targets(trace: Trace, arguments: Mapping[fx.Node, int]) -> dict[int, GradientTarget]:
    """Return the target of each gradient, by output index, in the order of completion."""
    step_graph = trace.step_graph
    readers = [operation.reads for operation in step_graph.operations]
    readers += [output.reads for output in step_graph.outputs]
    n_readers = Counter(number for reads in readers for number in reads.storages)
    targets = {
        number: output.result.target
        for number, output in enumerate(step_graph.outputs)
        if not output.is_returned_at_end and output.result.target is not None
    }
    keys = {number: id(trace.joint.value(target)) for number, target in targets.items()}
    last_output = {key: number for number, key in keys.items()}
    return {
        number: GradientTarget(
            argument=arguments[targets[number].node],
            key=key,
            is_last=last_output[key] == number,
            is_sole_reader=[n_readers[i] for i in step_graph.outputs[number].reads.storages] == [1],
        )
        for number, key in keys.items()
    }
