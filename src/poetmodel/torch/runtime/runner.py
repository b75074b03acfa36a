"""Execution of a plan as one training step, and rollback of a step that fails."""

from __future__ import annotations

import traceback
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.errors import join_names
from poetmodel.plan import Op
from poetmodel.torch.capturing.joint_graph import InputKind, OutputKind
from poetmodel.torch.capturing.modules import has_hooks
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.runtime.program import StepWriter
from poetmodel.torch.state.pages import Pages, ScratchFile
from poetmodel.torch.state.store import StateStore
from poetmodel.torch.step.optimizers import OptimizerState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from poetmodel.torch.runtime.program import Emit
    from poetmodel.torch.step.scheduled import WholePlan
    from poetmodel.torch.step.trace import Trace


TORN_NOTE: Final = (
    "the step updates parameters as early as possible: some may have been updated, others not"
)
"""Note for a failed step with updates that cannot be rolled back."""

_RETURNED_KINDS: Final = (OutputKind.LOSS, OutputKind.OUTPUT, OutputKind.STORED)
"""Kinds of the results that `Runner.run` returns."""


class Runner:
    """Executes a captured step by a plan.

    The program is compiled, and its transfers block. `folder` is that of page and state file, whose
    creation moves state to the homes of the plan. With `rollback`, a failed
    step leaves parameters, gradients and state unchanged; updates are undone from the state file. A
    step with inputs of other shapes shares `state_store`.
    """

    def __init__(
        self,
        trace: Trace,
        plan: WholePlan,
        *,
        folder: str | Path | None = None,
        rollback: bool = True,
        state_store: StateStore | None = None,
    ) -> None:
        self.trace = trace
        self.program = StepWriter(trace, plan).write()
        self.page_file: ScratchFile | None = None
        self.state_store = state_store
        paged_storages = {i for op, i in plan.program if op == Op.PAGE_OUT} - plan.stored_state
        if paged_storages:
            page_sizes = (trace.step_graph.storages[i].bytes for i in paged_storages)
            self.page_file = ScratchFile(folder or ".", page_sizes)
        rolls_back = trace.joint.optimizer is not None and folder is not None and rollback
        self._state_keys = {index: trace.state_key(index) for index in plan.stored_state}
        """Key of each storage of state on storage, and of its replacement."""
        self._stored = frozenset(self._state_keys.values())
        if state_store is None and (self._stored or rolls_back):
            self.state_store = StateStore(
                trace, self._stored, folder=folder or ".", rollback=rollback
            )
        if self.state_store is not None:
            self.state_store.check_state(trace)
        self._rollback = rollback
        self.delays_gradients = rollback and (
            self.page_file is not None or bool(trace.joint.finite_check_lines)
        )
        """Whether gradients are added to existing ones only at the end of the step."""
        joint = trace.joint
        positions = joint.argument_positions
        self._targets = _gradient_targets(trace)
        """Target of each gradient, by output index, in the order of completion."""
        results = [output.result for output in self.program.end_results.values()]
        self._returned_positions = [
            results.index(r) for r in joint.results if r.kind in _RETURNED_KINDS
        ]
        """Positions among the end results of the results that a step returns: the loss first."""
        self._n_outputs = sum(r.kind is OutputKind.OUTPUT for r in joint.results)
        self._check_positions = [
            position for position, result in enumerate(results) if result.kind is OutputKind.CHECK
        ]
        targets = {position: result.target for position, result in enumerate(results)}
        self._changed_arguments = {
            position: positions[target.node]
            for position, target in targets.items()
            if target is not None
        }
        """Index of each argument whose new value is an end result, by position of the result."""
        self._is_random = any(operation.is_random for operation in trace.step_graph.operations)
        self._module_indices = [positions[argument.node] for argument in joint.module_arguments]
        """Indices of the arguments that are tensors of modules."""
        self._input_positions = [
            (positions[a.node], a.position) for a in joint.arguments_of(InputKind.USER_INPUT)
        ]
        """(index among the arguments, position in the flat inputs) of each input."""
        constant_kinds = (InputKind.TANGENT, InputKind.CONSTANT_TENSOR)
        self._fixed_values = [
            joint.value(a) if a.kind in constant_kinds else None for a in joint.arguments
        ]
        """Values of the arguments that are equal in each step; None for other arguments."""
        self._constant_indices = [
            (a.target, positions[a.node]) for a in joint.arguments_of(InputKind.CONSTANT_TENSOR)
        ]
        output_keys = trace.step_graph.output_keys
        stored_positions = [
            positions[a.node]
            for a in joint.arguments
            if output_keys.get(a.node, (None,))[0] in self._state_keys
        ]
        self._optimizer_state = (
            None
            if joint.optimizer is None
            else OptimizerState(joint, positions_on_storage=stored_positions)
        )

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes (written to, read from) page and state file, except `mirrored_bytes` [B]."""
        written_bytes, read_bytes = -self.mirrored_bytes, 0
        for file in (self.page_file, None if self.state_store is None else self.state_store.file):
            if file is not None:
                written_bytes, read_bytes = (
                    written_bytes + file.written_bytes,
                    read_bytes + file.read_bytes,
                )
        return written_bytes, read_bytes

    @property
    def mirrored_bytes(self) -> int:
        """Bytes of state in RAM that steps have written to the state file for rollback [B]."""
        return 0 if self.state_store is None else self.state_store.mirrored_bytes

    @property
    def state_on_storage_bytes(self) -> int:
        """Bytes of state with its home on storage [B]."""
        storages = self.trace.step_graph.storages
        return sum(storages[i].bytes for i in self._state_keys if storages[i].replaces is None)

    def trial(self) -> AbstractContextManager[None]:
        """Move state to its homes, and return a context manager for trial steps.

        With two generations in the state file, its end restores state on storage; with one, steps
        change it. The caller restores state in RAM.
        """
        if self.state_store is None:
            return nullcontext()
        self.move_state()
        return self.state_store.trial()

    def move_state(self) -> None:
        """Prepare a step: commit changed state to the state file; move state to the plan's homes.

        With one generation, only state on storage is written. Within `trial`, with two generations,
        only discards the results of the last step.
        """
        if self.state_store is not None:
            self.state_store.prepare_step(self._stored)

    def close(self) -> None:
        """Remove the page file; the state file remains."""
        if self.page_file is not None:
            self.page_file.close()

    def __call__(self, inputs: Sequence[Any], *, delays_gradients: bool | None = None) -> Any:
        """Execute one step on flat inputs, as `run`; return its loss, or the model's output."""
        return self.build_output(self.run(inputs, delays_gradients=delays_gradients))

    def build_output(self, results: Sequence[torch.Tensor]) -> Any:
        """Return the output of a step, given the results of `run`."""
        loss, *others = results
        return self.trace.joint.build_output(loss, others[: self._n_outputs])

    def run(
        self,
        inputs: Sequence[Any],
        *,
        delays_gradients: bool | None = None,
        constants: Mapping[str, torch.Tensor] | None = None,
        module_tensors: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Execute one step on flat inputs; return loss, outputs and stored tensors.

        `constants` has current tensors in place of constants, by the target of the argument;
        `module_tensors` are those of `Joint.module_tensors`, if the caller has them.
        Changes gradients, buffers, inputs that the model changes, and the random state; with
        updates also parameters and moments. A `PageError` or `CaptureError` restores the random
        state and, with `rollback`, all state, unless the error has the note `TORN_NOTE`.
        `delays_gradients` overrides the attribute unless it is None.
        """
        self.move_state()
        if module_tensors is None:
            module_tensors = self.trace.joint.module_tensors()
        values = self._argument_values(inputs, module_tensors)
        if constants:
            for target, index in self._constant_indices:
                values[index] = constants.get(target, values[index])
        if self._optimizer_state is not None:
            values.append(self._optimizer_state.fill_arguments(values))
        is_delayed = self.delays_gradients if delays_gradients is None else delays_gradients
        gradients = Gradients(self._targets, values, is_delayed=is_delayed)
        random_state = torch.default_generator.get_state() if self._is_random else None
        try:
            results = self.execute_program(values, gradients.add)
            if self._optimizer_state is not None:
                self._optimizer_state.store_first_moments(values)
            if self.state_store is not None:
                self.state_store.commit()
        except BaseException as error:
            if random_state is not None:
                torch.default_generator.set_state(random_state)
            self._restore_state(error)
            raise
        with torch.no_grad():
            if self._changed_arguments:
                new_values = [results[position] for position in self._changed_arguments]
                torch._foreach_copy_(
                    [values[index] for index in self._changed_arguments.values()], new_values
                )
            gradients.store_remaining()
        loss, *further_results = [results[position] for position in self._returned_positions]
        return [loss, *(value.detach() for value in further_results)]

    def _restore_state(self, error: BaseException) -> None:
        """Undo the updates of a failed step, or add the note `TORN_NOTE` to its error."""
        if self.state_store is not None:
            self.state_store.rollback()
        if not self._can_restore_state:
            error.add_note(TORN_NOTE)

    @property
    def _can_restore_state(self) -> bool:
        """Whether a failed step leaves parameters and moments as before it."""
        return self._optimizer_state is None or (
            self.state_store is not None and self.state_store.has_two_generations
        )

    def _argument_values(
        self, inputs: Sequence[Any], module_tensors: Sequence[torch.Tensor]
    ) -> list[Any]:
        """Return the values of the step's arguments; None for moments and learning rates."""
        values: list[Any] = self._fixed_values.copy()
        for index, value in zip(self._module_indices, module_tensors, strict=True):
            values[index] = value
        for index, position in self._input_positions:
            values[index] = inputs[position]
        return values

    def execute_program(self, values: Sequence[Any], emit: Emit) -> list[torch.Tensor]:
        """Execute the program on its argument values; return all of `StepProgram.end_results`.

        With updates, the last of `values` is the set of positions of new moments. `emit` is called
        once per gradient, with its output index and value.
        """
        pager = self._make_pager()
        try:
            disable_subclasses = torch._C.DisableTorchFunctionSubclass()  # noqa: SLF001 - its only name
            # Gradients are plain tensors even if inputs are not.
            with torch.no_grad(), disable_subclasses:
                results = list(self.program.function(values, emit, pager))
                self._check_finite(results)
        except BaseException as error:
            # Otherwise the exception would hold the tensors in the program's frames.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            if pager is not None:
                pager.close()
        return results

    def _check_finite(self, results: Sequence[torch.Tensor]) -> None:
        """Refuse a step in whose end results a test of `Joint.finite_check_lines` has failed."""
        if not all(results[position] for position in self._check_positions):
            joint = self.trace.joint
            is_rolled_back = self._rollback and self._can_restore_state
            unchanged_text = "nothing has changed: " if is_rolled_back else ""
            raise CaptureError(
                f"{joint.name}: not all numbers are finite or in range, or a matrix cannot be "
                f"inverted. The model tests this at {join_names(joint.finite_check_lines)}, and a "
                f"step supports only passed tests; {unchanged_text}leave this batch out, or run it "
                "with eager PyTorch"
            )

    def _make_pager(self) -> Pages | None:
        """Return the pager of a step, if it has a file; a forked process gets a new one."""
        if self.page_file is None and self.state_store is None:
            return None
        if self.page_file is not None:
            self.page_file.check()
        return Pages(
            self.trace.step_graph.storages,
            self.page_file,
            state_file=None if self.state_store is None else self.state_store.file,
            state_keys=self._state_keys,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientTarget:
    """The argument whose ``.grad`` receives one of the gradients that a step emits."""

    argument: int
    """Index among the arguments of the step."""
    key: int
    """``id`` of the argument's tensor. A weight with several names has several gradients, which are
    summed before they are added to ``.grad``, as PyTorch does."""
    is_last: bool
    """Whether the gradient is the last one of its key."""
    is_sole_reader: bool
    """Whether the gradient is in one storage, which no operation and no other output reads."""


class Gradients:
    """The gradients of one step, added to ``.grad`` at once; some at its end.

    These are new ones, those of tensors with hooks, which may change tensors that the step still
    reads, and all if `is_delayed`.
    """

    def __init__(
        self, targets: Mapping[int, GradientTarget], values: Sequence[Any], *, is_delayed: bool
    ) -> None:
        self._targets = targets
        self._values = values
        self._is_delayed = is_delayed
        self._gradient_sums: dict[int, torch.Tensor] = {}
        """Sum of the gradients of a weight so far, by `GradientTarget.key`."""

    def add(self, output_index: int, value: torch.Tensor) -> None:
        """Add a gradient to the sum of its weight, and the complete sum to an existing ``.grad``.

        Retains the sum of a gradient that waits for the end for `store_remaining`.
        """
        gradient_target = self._targets[output_index]
        target = self._values[gradient_target.argument]
        gradient_sum = self._gradient_sums.pop(gradient_target.key, None)
        if gradient_sum is not None:
            value = gradient_sum.add_(value)
        is_added = target.grad is not None and not self._is_delayed and not has_hooks(target)
        if gradient_target.is_last and is_added:
            target.grad.add_(value)
            return
        # A gradient that alone fills its memory with the strides of its weight needs no copy.
        fills_storage = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        is_owned = (
            gradient_target.is_sole_reader and fills_storage and value.stride() == target.stride()
        )
        if gradient_sum is None and not is_owned:
            value = torch.empty_like(target, requires_grad=False).copy_(value)
        self._gradient_sums[gradient_target.key] = value

    def store_remaining(self) -> None:
        """Add each retained sum to ``.grad``, or make it ``.grad``; call it once at the end.

        PyTorch itself adds the gradient of a tensor with hooks, and calls these.
        """
        for gradient_target in self._targets.values():
            if not gradient_target.is_last or gradient_target.key not in self._gradient_sums:
                continue
            value = self._gradient_sums.pop(gradient_target.key)
            target = self._values[gradient_target.argument]
            if has_hooks(target):
                torch.autograd.backward(target, value)
            elif target.grad is None:
                target.grad = value
            else:
                target.grad.add_(value)


def _gradient_targets(trace: Trace) -> dict[int, GradientTarget]:
    """Return a `GradientTarget` for each gradient that a step emits, by output index."""
    step_graph = trace.step_graph
    readers = [operation.reads for operation in step_graph.operations]
    readers += [output.reads for output in trace.outputs]
    n_readers = Counter(storage_index for reads in readers for storage_index in reads.storages)
    targets = {
        output_index: output.result.target
        for output_index, output in enumerate(trace.outputs)
        if not output.is_returned_at_end and output.result.target is not None
    }
    keys = {output_index: id(trace.joint.value(target)) for output_index, target in targets.items()}
    last_output = {key: output_index for output_index, key in keys.items()}
    return {
        output_index: GradientTarget(
            argument=trace.joint.argument_positions[targets[output_index].node],
            key=key,
            is_last=last_output[key] == output_index,
            is_sole_reader=[n_readers[i] for i in trace.outputs[output_index].reads.storages]
            == [1],
        )
        for output_index, key in keys.items()
    }
