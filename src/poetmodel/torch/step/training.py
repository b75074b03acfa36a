"""The graph of a whole training step: state and inputs too, and each update at its place."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.graph import Phase
from poetmodel.torch.capturing.joint_graph import InputKind, InputSpec
from poetmodel.torch.graph.profiles import OpProfile, OpProfiler, TensorLayout
from poetmodel.torch.graph.tensors import storage_key
from poetmodel.torch.step.captured import CapturedGraph
from poetmodel.torch.step.in_place import pair_in_place, workspace_in_place_bytes
from poetmodel.torch.step.updates import (
    BufferUpdate,
    CustomOperation,
    ParameterUpdate,
    QuantizedUpdate,
    Update,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import fx

    from poetmodel.torch.graph.step_graph import Operation

_INPUTS = (InputKind.USER_INPUT, InputKind.LEARNING_RATE)
_NUMBERS_BYTES: Final = 16
"""Scalars of an update, if any: a factor in double, and in the type of a tensor."""


class TrainingGraph(CapturedGraph):
    """The operations of a captured step that ends with the updates of an optimizer.

    Parameters, moments, buffers and constants that the step reads are state, each an operation in
    front of its first reader; so are the inputs of the step. The update of a parameter comes as
    soon as its gradient is there and nothing else reads the parameter. Buffers get new values once
    nothing reads what their readers make: until then these may be recomputed, as batch norm.
    """

    last: tuple[int, ...] = ()
    """For each storage the last operation that makes or reads it."""

    def _profiler(self, *, measured: bool) -> OpProfiler:
        return _UpdateProfiler(measured=measured)

    def _add_sources(self) -> None:
        """Add an operation for each storage that is there before the step."""
        numbers: dict[int, int] = {}
        values = list(map(self._joint.value, self._joint.arguments))  # held: keys are of the living
        for argument, value in zip(self._joint.arguments, values, strict=True):
            if argument.kind is InputKind.TANGENT or not isinstance(value, torch.Tensor):
                continue
            number = numbers.setdefault(storage_key(value), len(self.operations))
            if number == len(self.operations):
                self._add_source(argument, value)
            layouts = self.storages[number].layouts
            if TensorLayout.of(value) not in layouts:
                layouts = (*layouts, TensorLayout.of(value))
                self.storages[number] = replace(self.storages[number], layouts=layouts)
            self.direct[argument.node] = (number, layouts.index(TensorLayout.of(value)))

    def _add_source(self, argument: InputSpec, value: torch.Tensor) -> None:
        moment = argument.kind is InputKind.MOMENT
        kind = argument.name.rpartition(".")[2] if moment else str(argument.kind)
        self.add_source(
            argument.node,
            name=argument.name,
            op=kind.replace(" ", "_"),
            phase=Phase.INPUT if argument.kind in _INPUTS else Phase.STATE,
            layout=TensorLayout.of(value),
            size_bytes=value.untyped_storage().nbytes(),
        )

    def phase_of(self, node: fx.Node) -> Phase:
        """Return the phase of an operation."""
        own = isinstance(node.target, CustomOperation)
        return Phase.UPDATE if own else super().phase_of(node)

    def _end(self) -> None:
        """Let updates replace state, put all operations in order, and find what may be in place."""
        for operation in self.operations:
            if isinstance(operation.node.target, Update):
                self._replace_state(operation)
        self._renumber(list(self._in_order()))
        results = (result.node for result in self._joint.results)
        kept = frozenset(self.reading(results).storages)
        self.last = self._last_readers()
        self.operations = [
            replace(operation, in_place=pair_in_place(self, operation, self.last, kept))
            for operation in self.operations
        ]
        self.operations = [
            replace(
                operation,
                profile=replace(
                    operation.profile, workspace_bytes=workspace_in_place_bytes(self, operation)
                ),
            )
            for operation in self.operations
        ]

    def _replace_state(self, operation: Operation) -> None:
        """Let the outputs of an update lie where its state does."""
        state: Any = operation.node.args[0]
        for number, node in zip(operation.storages, state, strict=True):
            replaced, layout_index = self.direct[node]
            old, new = self.storages[replaced], self.storages[number]
            layout = replace(old.layouts[layout_index], position=new.layouts[0].position)
            self.storages[number] = replace(
                new, name=f"{old.name}+", bytes=old.bytes, layouts=(layout,), replaces=replaced
            )
        update: Any = operation.node.target
        rule = update.rule
        if rule is not None:
            flops = rule.flops_of(self._parameter(operation))
            self.operations[operation.index] = replace(
                operation, profile=replace(operation.profile, flops=flops)
            )

    def _parameter(self, update: Operation) -> torch.Tensor:
        """Return a tensor like the parameter of an update, without memory."""
        layout = self.storages[update.storages[0]].layouts[0]
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")

    def gradient_storages(self, operation: Operation) -> tuple[int, ...]:
        """Return the storages of the first gradient of an update."""
        gradients: Any = operation.node.args[1]
        return self.reading(gradients[:1]).storages

    def owns_gradient(self, operation: Operation) -> bool:
        """Whether an update may write in the memory of its gradient, if that dies there."""
        numbers = self.gradient_storages(operation)
        computed = [i for i in numbers if not self.operations[self.storages[i].operation].is_source]
        whole = _fits(operation)[1] and len(computed) == len(numbers) == 1
        return whole and self.last[computed[0]] == operation.index

    def update_workspace_bytes(self, operation: Operation) -> int:
        """Return the reads of an update beside its gradient: tensors and numbers [B]."""
        update: Any = operation.node.target
        if isinstance(update, QuantizedUpdate):
            return operation.profile.workspace_bytes
        numbers_bytes = min(operation.profile.workspace_bytes, _NUMBERS_BYTES)
        if not isinstance(update, ParameterUpdate):
            return numbers_bytes
        fits, _ = _fits(operation)
        writes = update.writes_gradient(operation.node.args[1:])
        parameter = self._parameter(operation)
        copied = not fits or (writes and not self.owns_gradient(operation))
        # What was measured has a copy of a gradient that is read as it is elsewhere.
        seen_bytes = operation.profile.workspace_bytes - (writes or not fits) * parameter.nbytes
        scratch_bytes: int = max(update.rule.scratch_bytes(parameter) + numbers_bytes, seen_bytes)
        return copied * int(parameter.nbytes) + scratch_bytes

    # -- the order -------------------------------------------------------------------------------

    def _last_readers(self) -> tuple[int, ...]:
        """Return the last operation that makes or reads each storage."""
        last = [storage.operation for storage in self.storages]
        for operation in self.operations:
            for number in operation.reads.storages:
                last[number] = max(last[number], operation.index)
        return tuple(last)

    def _in_order(self) -> Iterator[Operation]:
        """Yield the operations in the order of the training graph, as they are numbered so far."""
        own = {
            operation.index
            for operation in self.operations
            if isinstance(operation.node.target, CustomOperation)
        }
        computed = [
            operation
            for operation in self.operations
            if not operation.is_source and operation.index not in own
        ]
        after: dict[int, list[Operation]] = {}
        for index, predecessor in self._predecessors(sorted(own), computed).items():
            after.setdefault(predecessor, []).append(self.operations[index])
        there: set[int] = set()
        for operation in computed:
            for scheduled in (operation, *after.get(operation.index, ())):
                makers = {self.storages[i].operation for i in scheduled.reads.storages} - there
                sources = [
                    self.operations[k] for k in sorted(makers) if self.operations[k].is_source
                ]
                there.update(source.index for source in sources)
                yield from (*sources, scheduled)

    def _predecessors(self, own: Sequence[int], computed: Sequence[Operation]) -> dict[int, int]:
        """Return the operation that comes before each one that PyTorch has none for."""
        last = [storage.operation for storage in self.storages]
        readers: dict[int | None, list[Operation]] = {}
        for operation in computed:
            for number in operation.reads.storages:
                last[number] = operation.index
                readers.setdefault(number, []).append(operation)
        predecessors: dict[int, int] = {}
        for operation in (self.operations[k] for k in own):
            made_by = (self.storages[number].operation for number in operation.reads.storages)
            waits = [predecessors.get(k, k) for k in made_by]
            replaced = [self.storages[number].replaces for number in operation.storages]
            for reader in (user for old in replaced for user in readers.get(old, ())):
                waits.append(reader.index)
                if isinstance(operation.node.target, BufferUpdate):
                    waits += [last[number] for number in reader.storages]
            waits += [
                predecessor
                for k, predecessor in predecessors.items()
                if not set(replaced).isdisjoint(self.operations[k].reads.storages)
            ]
            predecessors[operation.index] = max(waits)
        return predecessors

    def _renumber(self, order: list[Operation]) -> None:
        """Give operations the numbers of another order, and storages likewise; drop all others."""
        operations = {operation.index: k for k, operation in enumerate(order)}
        kept = [number for operation in order for number in operation.storages]
        numbers: dict[int | None, int] = {number: k for k, number in enumerate(kept)}
        self.storages = [
            replace(
                self.storages[number],
                index=k,
                operation=operations[self.storages[number].operation],
                replaces=numbers.get(self.storages[number].replaces),
            )
            for k, number in enumerate(kept)
        ]
        self.operations = [
            replace(
                operation,
                index=k,
                reads=replace(
                    operation.reads,
                    storages=tuple(sorted(numbers[i] for i in operation.reads.storages)),
                ),
                storages=tuple(numbers[i] for i in operation.storages),
            )
            for k, operation in enumerate(order)
        ]
        self.direct = {
            node: (numbers[number], layout_index)
            for node, (number, layout_index) in self.direct.items()
            if number in numbers
        }


def _fits(update: Operation) -> tuple[bool, bool]:
    """Whether the gradient of an update lies as its parameter, and fills its memory."""
    if update.profile.gradient_fits is None:
        raise TypeError(update.name)
    return update.profile.gradient_fits


class _UpdateProfiler(OpProfiler):
    """Looks at the gradients of updates too."""

    def profile(self, node: fx.Node, arguments: Any, keywords: Any, value: Any) -> OpProfile:
        seen = super().profile(node, arguments, keywords, value)
        if not isinstance(node.target, ParameterUpdate):
            return seen
        (parameter, *_), (gradient, *_), *_ = arguments
        whole = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.itemsize
        return replace(seen, gradient_fits=(gradient.stride() == parameter.stride(), whole))
