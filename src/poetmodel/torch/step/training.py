"""The graph of a training step with state and inputs, and each update as early as possible."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.graph import Phase
from poetmodel.torch.capturing.joint_graph import InputKind, InputSpec
from poetmodel.torch.graph.profiles import OpProfile, OpProfiler, TensorLayout
from poetmodel.torch.graph.tensors import storage_key
from poetmodel.torch.step.captured import CapturedGraph
from poetmodel.torch.step.in_place import in_place_pair, in_place_workspace_bytes
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

_INPUT_KINDS = (InputKind.USER_INPUT, InputKind.LEARNING_RATE)
_SCALARS_BYTES: Final = 16
"""Size of the scalars of an update: a factor in double precision, and one in the tensors' type
[B]."""


class TrainingGraph(CapturedGraph):
    """The operations of a captured step that ends with the updates of an optimizer.

    Parameters, moments, buffers and constants that the step reads are state. A parameter is updated
    as soon as its gradient and any clipping factor exist and it has no later reader. Buffers are
    updated once no operation will read the outputs of their readers: until then these readers, such
    as batch norm, may be recomputed.
    """

    last_uses: tuple[int, ...] = ()
    """For each storage the index of the last operation that computes or reads it; () before the
    operations are sorted."""

    def _add_sources(self) -> None:
        """Add an operation for each storage of state and inputs; numbers and tangents have none.

        Registers each of these arguments in `output_keys`.
        """
        index_of_storage: dict[int, int] = {}
        values = list(map(self._joint.value, self._joint.arguments))  # keeps storage keys unique
        for argument, value in zip(self._joint.arguments, values, strict=True):
            if argument.kind is InputKind.TANGENT or not isinstance(value, torch.Tensor):
                continue
            storage_index = index_of_storage.setdefault(storage_key(value), len(self.operations))
            if storage_index == len(self.operations):
                self._add_source(argument, value)
            layouts = self.storages[storage_index].layouts
            if TensorLayout.from_tensor(value) not in layouts:
                layouts = (*layouts, TensorLayout.from_tensor(value))
                self.storages[storage_index] = replace(
                    self.storages[storage_index], layouts=layouts
                )
            self.output_keys[argument.node] = (
                storage_index,
                layouts.index(TensorLayout.from_tensor(value)),
            )

    def _add_source(self, argument: InputSpec, value: torch.Tensor) -> None:
        """Append the source operation and storage of a graph input; rates are inputs."""
        is_moment = argument.kind is InputKind.MOMENT
        kind = argument.name.rpartition(".")[2] if is_moment else str(argument.kind)
        self.add_source(
            argument.node,
            name=argument.name,
            op=kind.replace(" ", "_"),
            phase=Phase.INPUT if argument.kind in _INPUT_KINDS else Phase.STATE,
            layout=TensorLayout.from_tensor(value),
            size_bytes=value.untyped_storage().nbytes(),
        )

    def phase_of(self, node: fx.Node) -> Phase:
        """Return UPDATE for a `CustomOperation`, otherwise the phase as in `CapturedGraph`."""
        is_custom = isinstance(node.target, CustomOperation)
        return Phase.UPDATE if is_custom else super().phase_of(node)

    def _finish_operations(self) -> None:
        """Link updates to the state that they replace, sort operations, and set in-place pairs."""
        for operation in self.operations:
            if isinstance(operation.node.target, Update):
                self._set_replacements(operation)
        self._renumber(list(self._execution_order()))
        result_nodes = (result.node for result in self._joint.results)
        result_storages = frozenset(self.find_reads(result_nodes).storages)
        self.last_uses = self._find_last_uses()
        self.operations = [
            replace(
                operation, in_place=in_place_pair(self, operation, self.last_uses, result_storages)
            )
            for operation in self.operations
        ]
        self.operations = [
            replace(
                operation,
                profile=replace(
                    operation.profile, workspace_bytes=in_place_workspace_bytes(self, operation)
                ),
            )
            for operation in self.operations
        ]

    def _set_replacements(self, operation: Operation) -> None:
        """Make an update's outputs the replacements of its state, ``NAME+``; set its FLOP."""
        state: Any = operation.node.args[0]
        for storage_index, node in zip(operation.storages, state, strict=True):
            state_index, layout_index = self.output_keys[node]
            old_storage, new_storage = self.storages[state_index], self.storages[storage_index]
            layout = replace(
                old_storage.layouts[layout_index], position=new_storage.layouts[0].position
            )
            self.storages[storage_index] = replace(
                new_storage,
                name=f"{old_storage.name}+",
                bytes=old_storage.bytes,
                layouts=(layout,),
                replaces=state_index,
            )
        update: Any = operation.node.target
        rule = update.rule
        if rule is not None:
            flops = rule.flops_of(self._meta_parameter(operation))
            self.operations[operation.index] = replace(
                operation, profile=replace(operation.profile, flops=flops)
            )

    def _meta_parameter(self, update: Operation) -> torch.Tensor:
        """Return a meta tensor with the layout of an update's parameter."""
        layout = self.storages[update.storages[0]].layouts[0]
        return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")

    def gradient_storages(self, operation: Operation) -> tuple[int, ...]:
        """Return the indices of the storages from which an update's first gradient is read."""
        gradients: Any = operation.node.args[1]
        return self.find_reads(gradients[:1]).storages

    def owns_gradient(self, operation: Operation) -> bool:
        """Return whether a parameter's update may overwrite the first gradient that it reads.

        The gradient must be computed, fill its storage, and have no later reader.
        """
        storages = self.gradient_storages(operation)
        computed_storages = [
            i for i in storages if not self.operations[self.storages[i].operation].is_source
        ]
        fills_storage = (
            _gradient_fits(operation)[1] and len(computed_storages) == len(storages) == 1
        )
        return fills_storage and self.last_uses[computed_storages[0]] == operation.index

    def update_workspace_bytes(self, operation: Operation) -> int:
        """Return the workspace of an update in addition to its gradient [B].

        Includes a copy of a gradient with other strides than the parameter, or one that is
        overwritten but not owned.
        """
        update: Any = operation.node.target
        if isinstance(update, QuantizedUpdate):
            return operation.profile.workspace_bytes
        scalars_bytes = min(operation.profile.workspace_bytes, _SCALARS_BYTES)
        if not isinstance(update, ParameterUpdate):
            return scalars_bytes
        has_strides, _ = _gradient_fits(operation)
        writes_gradient = update.writes_gradient(operation.node.args[1:])
        parameter = self._meta_parameter(operation)
        is_copied = not has_strides or (writes_gradient and not self.owns_gradient(operation))
        # The measured workspace includes a copy of the gradient where the update makes one.
        measured_bytes = (
            operation.profile.workspace_bytes
            - (writes_gradient or not has_strides) * parameter.nbytes
        )
        # The formula holds for all steps: the measured one, the first, may need less (RAdam).
        scratch_bytes: int = max(
            update.rule.scratch_bytes(parameter) + scalars_bytes, measured_bytes
        )
        return is_copied * int(parameter.nbytes) + scratch_bytes

    # -- the order -------------------------------------------------------------------------------

    def _find_last_uses(self) -> tuple[int, ...]:
        """Return for each storage the index of the last operation that computes or reads it."""
        last_uses = [storage.operation for storage in self.storages]
        for operation in self.operations:
            for storage_index in operation.reads.storages:
                last_uses[storage_index] = max(last_uses[storage_index], operation.index)
        return tuple(last_uses)

    def _execution_order(self) -> Iterator[Operation]:
        """Yield operations in execution order: FX order, updates as early as dependencies allow.

        Each source directly precedes its first reader; those without a reader are omitted. Indices
        are not renumbered yet.
        """
        custom_indices = {
            operation.index
            for operation in self.operations
            if isinstance(operation.node.target, CustomOperation)
        }
        computed_operations = [
            operation
            for operation in self.operations
            if not operation.is_source and operation.index not in custom_indices
        ]
        updates_after: dict[int, list[Operation]] = {}
        for index, predecessor in self._find_predecessors(
            sorted(custom_indices), computed_operations
        ).items():
            updates_after.setdefault(predecessor, []).append(self.operations[index])
        yielded_indices: set[int] = set()
        for operation in computed_operations:
            for next_operation in (operation, *updates_after.get(operation.index, ())):
                maker_indices = {
                    self.storages[i].operation for i in next_operation.reads.storages
                } - yielded_indices
                sources = [
                    self.operations[index]
                    for index in sorted(maker_indices)
                    if self.operations[index].is_source
                ]
                yielded_indices.update(source.index for source in sources)
                yield from (*sources, next_operation)

    def _find_predecessors(
        self, custom_indices: Sequence[int], computed_operations: Sequence[Operation]
    ) -> dict[int, int]:
        """Map the index of each custom operation to that of the last one that must precede it.

        These are makers of operands, readers of the replaced state and, for buffers, users of the
        readers' outputs. `custom_indices` are sorted.
        """
        last_uses = [storage.operation for storage in self.storages]
        readers: dict[int | None, list[Operation]] = {}
        for operation in computed_operations:
            for storage_index in operation.reads.storages:
                last_uses[storage_index] = operation.index
                readers.setdefault(storage_index, []).append(operation)
        predecessors: dict[int, int] = {}
        for operation in (self.operations[index] for index in custom_indices):
            maker_indices = (
                self.storages[storage_index].operation for storage_index in operation.reads.storages
            )
            required_indices = [predecessors.get(index, index) for index in maker_indices]
            old_storages = [
                self.storages[storage_index].replaces for storage_index in operation.storages
            ]
            for reader in (
                reading_operation
                for old_storage in old_storages
                for reading_operation in readers.get(old_storage, ())
            ):
                required_indices.append(reader.index)
                if isinstance(operation.node.target, BufferUpdate):
                    required_indices += [
                        last_uses[storage_index] for storage_index in reader.storages
                    ]
            required_indices += [
                predecessor
                for index, predecessor in predecessors.items()
                if not set(old_storages).isdisjoint(self.operations[index].reads.storages)
            ]
            predecessors[operation.index] = max(required_indices)
        return predecessors

    def _renumber(self, order: list[Operation]) -> None:
        """Renumber operations and their storages by `order`, and delete all that it lacks."""
        new_operation_index = {
            operation.index: position for position, operation in enumerate(order)
        }
        retained_storages = [
            storage_index for operation in order for storage_index in operation.storages
        ]
        new_storage_index: dict[int | None, int] = {
            storage_index: position for position, storage_index in enumerate(retained_storages)
        }
        self.storages = [
            replace(
                self.storages[storage_index],
                index=position,
                operation=new_operation_index[self.storages[storage_index].operation],
                replaces=new_storage_index.get(self.storages[storage_index].replaces),
            )
            for position, storage_index in enumerate(retained_storages)
        ]
        self.operations = [
            replace(
                operation,
                index=position,
                reads=replace(
                    operation.reads,
                    storages=tuple(sorted(new_storage_index[i] for i in operation.reads.storages)),
                ),
                storages=tuple(new_storage_index[i] for i in operation.storages),
            )
            for position, operation in enumerate(order)
        ]
        self.output_keys = {
            node: (new_storage_index[storage_index], layout_index)
            for node, (storage_index, layout_index) in self.output_keys.items()
            if storage_index in new_storage_index
        }


def _gradient_fits(update: Operation) -> tuple[bool, bool]:
    """Return (first gradient has the parameter's strides, it fills its storage) of an update."""
    if update.profile.gradient_fits is None:
        raise TypeError(update.name)
    return update.profile.gradient_fits


class UpdateProfiler(OpProfiler):
    """Profiler that sets `OpProfile.gradient_fits` for updates of parameters."""

    def profile(self, node: fx.Node, arguments: Any, keywords: Any, value: Any) -> OpProfile:
        """Return the profile of a call, with `gradient_fits` for a `ParameterUpdate`."""
        profile = super().profile(node, arguments, keywords, value)
        if not isinstance(node.target, ParameterUpdate):
            return profile
        (parameter, *_), (gradient, *_), *_ = arguments
        fills_storage = gradient.untyped_storage().nbytes() == gradient.numel() * gradient.itemsize
        return replace(
            profile, gradient_fits=(gradient.stride() == parameter.stride(), fills_storage)
        )
