"""A captured step as a graph of operations: its names and phases, state, inputs and updates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.graph import Phase
from poetmodel.torch.capturing.joint import LOSS
from poetmodel.torch.capturing.joint_graph import (
    ANNOTATION,
    BODY,
    InputKind,
    InputSpec,
    Joint,
    OutputKind,
    OutputSpec,
    format_path,
)
from poetmodel.torch.graph.profiles import OpProfile, OpProfiler, TensorLayout
from poetmodel.torch.graph.step_graph import GraphReader, StepGraph
from poetmodel.torch.graph.tensors import storage_key
from poetmodel.torch.step.in_place import in_place_pair, in_place_workspace_bytes
from poetmodel.torch.step.updates import (
    BufferUpdate,
    CustomOperation,
    ParameterUpdate,
    QuantizedUpdate,
    Update,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import fx

    from poetmodel.torch.graph.step_graph import Operation, Reads, TensorStorage

_INPUT_KINDS = (InputKind.USER_INPUT, InputKind.LEARNING_RATE)
_SCALARS_BYTES: Final = 16
"""Size of the scalars of an update: a factor in double precision, and one in the tensors' type
[B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """A result of a step, the storages that contain it, and the last operation that computes it."""

    result: OutputSpec
    reads: Reads
    last_operation: int | None
    """Index of the operation after which the result is complete: the last one that allocates a
    storage of the result. None if no operation does: the result is an argument without a source
    operation, or a view of one."""

    @property
    def is_returned_at_end(self) -> bool:
        """Whether the result is returned at the end of the step, as are all but gradients."""
        return self.result.kind is not OutputKind.GRADIENT


def read_step(joint: Joint, profiles: Mapping[fx.Node, OpProfile], *, has_state: bool) -> StepGraph:
    """Return the operations of a captured step, by the profiles of its nodes.

    A backward operation belongs to the module of the forward operation with its sequence number, a
    sum of gradients to the innermost common module of its summands. With `has_state`, parameters,
    moments, buffers and constants that the step reads are state. A parameter is updated as soon as
    its gradient and any clipping factor exist and it has no later reader. Buffers are updated once
    no operation will read the outputs of their readers: until then these readers, such as batch
    norm, may be recomputed.
    """
    paths, backward = _module_paths(joint), _tangent_descendants(joint)
    arguments = {argument.node: argument for argument in joint.arguments}

    def phase_of(node: fx.Node) -> Phase:
        """Return the phase of a node: FORWARD also for unknown modules."""
        if node in arguments:
            return Phase.INPUT if arguments[node].kind in _INPUT_KINDS else Phase.STATE
        if isinstance(node.target, CustomOperation):
            return Phase.UPDATE
        if _is_tagged_backward(node) or node in backward:
            return Phase.BACKWARD
        path = paths.get(node, BODY)
        return Phase.FORWARD if path.partition(".")[0] == BODY else Phase.LOSS

    def path_of(node: fx.Node) -> str:
        """Return a module path for display; "" for the user's module, `LOSS` for other code."""
        path = paths.get(node, BODY)
        return format_path(path) if path else LOSS

    reader = GraphReader(
        joint.graph_module.graph, name=joint.name, phase_of=phase_of, path_of=path_of
    )
    if not has_state:
        return reader.read(profiles)
    _add_sources(reader, joint)
    step_graph = _link_updates(reader.read(profiles))
    return _overwrite_inputs(_reorder(step_graph, list(_execution_order(step_graph))), joint)


def find_outputs(joint: Joint, step_graph: StepGraph) -> list[StepOutput]:
    """Return one output per result, ordered by `last_operation`; outputs without one are last."""
    outputs = []
    for result in joint.results:
        reads = step_graph.find_reads((result.node,))
        last_operation = max(
            (step_graph.storages[index].operation for index in reads.storages), default=None
        )
        outputs.append(StepOutput(result=result, reads=reads, last_operation=last_operation))
    count = len(step_graph.operations)
    return sorted(
        outputs,
        key=lambda output: count if output.last_operation is None else output.last_operation,
    )


# -- state and inputs --------------------------------------------------------------------------


def _add_sources(reader: GraphReader, joint: Joint) -> None:
    """Add a source for each storage of state and inputs; numbers and tangents have none."""
    index_of_storage: dict[int, int] = {}
    values = list(map(joint.value, joint.arguments))  # keeps storage keys unique
    for argument, value in zip(joint.arguments, values, strict=True):
        if argument.kind is InputKind.TANGENT or not isinstance(value, torch.Tensor):
            continue
        storage_index = index_of_storage.setdefault(storage_key(value), len(reader.storages))
        if storage_index == len(reader.storages):
            _add_source(reader, argument, value)
        storage, layout = reader.storages[storage_index], TensorLayout.from_tensor(value)
        if layout not in storage.layouts:
            storage = replace(storage, layouts=(*storage.layouts, layout))
            reader.storages[storage_index] = storage
        reader.output_keys[argument.node] = storage_index, storage.layouts.index(layout)


def _add_source(reader: GraphReader, argument: InputSpec, value: torch.Tensor) -> None:
    """Append the source operation and storage of a graph input; rates are inputs."""
    is_moment = argument.kind is InputKind.MOMENT
    kind = argument.name.rpartition(".")[2] if is_moment else str(argument.kind)
    reader.add_source(
        argument.node,
        name=argument.name,
        op=kind.replace(" ", "_"),
        layout=TensorLayout.from_tensor(value),
        size_bytes=value.untyped_storage().nbytes(),
    )


# -- updates -----------------------------------------------------------------------------------


def _link_updates(step_graph: StepGraph) -> StepGraph:
    """Make outputs of updates the replacements of their state, ``NAME+``; set the updates' FLOP."""
    operations, storages = list(step_graph.operations), list(step_graph.storages)
    for operation in step_graph.operations:
        update: Any = operation.node.target
        if not isinstance(update, Update):
            continue
        state: Any = operation.node.args[0]
        for storage_index, node in zip(operation.storages, state, strict=True):
            state_index, layout_index = step_graph.output_keys[node]
            old_storage, new_storage = storages[state_index], storages[storage_index]
            layout = replace(
                old_storage.layouts[layout_index], position=new_storage.layouts[0].position
            )
            storages[storage_index] = replace(
                new_storage,
                name=f"{old_storage.name}+",
                bytes=old_storage.bytes,
                layouts=(layout,),
                replaces=state_index,
            )
        rule = update.rule
        if rule is not None:
            flops = rule.flops_of(_meta_parameter(storages[operation.storages[0]]))
            profile = replace(operation.profile, flops=flops)
            operations[operation.index] = replace(operation, profile=profile)
    return replace(step_graph, operations=tuple(operations), storages=tuple(storages))


def _overwrite_inputs(step_graph: StepGraph, joint: Joint) -> StepGraph:
    """Set the inputs that operations may overwrite, and the workspaces that this needs."""
    result_storages = step_graph.find_reads(result.node for result in joint.results).storages
    operations = []
    for operation in step_graph.operations:
        pair = in_place_pair(step_graph, operation, frozenset(result_storages))
        in_place = replace(operation, in_place=pair)
        workspace_bytes = in_place_workspace_bytes(step_graph, in_place)
        profile = replace(operation.profile, workspace_bytes=workspace_bytes)
        operations.append(replace(in_place, profile=profile))
    return replace(step_graph, operations=tuple(operations))


def _meta_parameter(storage: TensorStorage) -> torch.Tensor:
    """Return a meta tensor with the layout of an updated parameter."""
    layout = storage.layouts[0]
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")


def gradient_storages(step_graph: StepGraph, operation: Operation) -> tuple[int, ...]:
    """Return the indices of the storages from which an update's first gradient is read."""
    gradients: Any = operation.node.args[1]
    return step_graph.find_reads(gradients[:1]).storages


def owns_gradient(step_graph: StepGraph, operation: Operation) -> bool:
    """Return whether a parameter's update may overwrite the first gradient that it reads.

    The gradient must be computed, fill its storage, and have no later reader.
    """
    storages = gradient_storages(step_graph, operation)
    computed_storages = [
        i for i in storages if not step_graph.operations[step_graph.storages[i].operation].is_source
    ]
    fills_storage = _gradient_fits(operation)[1] and len(computed_storages) == len(storages) == 1
    return fills_storage and step_graph.last_uses[computed_storages[0]] == operation.index


def update_workspace_bytes(step_graph: StepGraph, operation: Operation) -> int:
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
    parameter = _meta_parameter(step_graph.storages[operation.storages[0]])
    is_copied = not has_strides or (writes_gradient and not owns_gradient(step_graph, operation))
    # The rule states it for all steps: a measured one, the first, may need less (RAdam).
    scratch_bytes: int = update.rule.scratch_bytes(parameter) + scalars_bytes
    return is_copied * int(parameter.nbytes) + scratch_bytes


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


# -- the order ---------------------------------------------------------------------------------


def _execution_order(step_graph: StepGraph) -> Iterator[Operation]:
    """Yield operations in execution order: FX order, updates as early as dependencies allow.

    Each source directly precedes its first reader; those without a reader are omitted. Indices
    are not renumbered yet.
    """
    custom_indices = {
        operation.index
        for operation in step_graph.operations
        if isinstance(operation.node.target, CustomOperation)
    }
    computed_operations = [
        operation
        for operation in step_graph.operations
        if not operation.is_source and operation.index not in custom_indices
    ]
    updates_after: dict[int, list[Operation]] = {}
    for index, predecessor in _find_predecessors(
        step_graph, sorted(custom_indices), computed_operations
    ).items():
        updates_after.setdefault(predecessor, []).append(step_graph.operations[index])
    yielded_indices: set[int] = set()
    for operation in computed_operations:
        for next_operation in (operation, *updates_after.get(operation.index, ())):
            maker_indices = {
                step_graph.storages[i].operation for i in next_operation.reads.storages
            } - yielded_indices
            sources = [
                step_graph.operations[index]
                for index in sorted(maker_indices)
                if step_graph.operations[index].is_source
            ]
            yielded_indices.update(source.index for source in sources)
            yield from (*sources, next_operation)


def _find_predecessors(
    step_graph: StepGraph, custom_indices: Sequence[int], computed_operations: Sequence[Operation]
) -> dict[int, int]:
    """Map the index of each custom operation to that of the last one that must precede it.

    These are makers of operands, readers of the replaced state and, for buffers, users of the
    readers' outputs. `custom_indices` are sorted.
    """
    last_uses = [storage.operation for storage in step_graph.storages]
    readers: dict[int | None, list[Operation]] = {}
    for operation in computed_operations:
        for storage_index in operation.reads.storages:
            last_uses[storage_index] = operation.index
            readers.setdefault(storage_index, []).append(operation)
    predecessors: dict[int, int] = {}
    for operation in (step_graph.operations[index] for index in custom_indices):
        maker_indices = (
            step_graph.storages[storage_index].operation
            for storage_index in operation.reads.storages
        )
        required_indices = [predecessors.get(index, index) for index in maker_indices]
        old_storages = [
            step_graph.storages[storage_index].replaces for storage_index in operation.storages
        ]
        for reader in (
            reading_operation
            for old_storage in old_storages
            for reading_operation in readers.get(old_storage, ())
        ):
            required_indices.append(reader.index)
            if isinstance(operation.node.target, BufferUpdate):
                required_indices += [last_uses[storage_index] for storage_index in reader.storages]
        required_indices += [
            predecessor
            for index, predecessor in predecessors.items()
            if not set(old_storages).isdisjoint(step_graph.operations[index].reads.storages)
        ]
        predecessors[operation.index] = max(required_indices)
    return predecessors


def _reorder(step_graph: StepGraph, order: Sequence[Operation]) -> StepGraph:
    """Return the graph with `order` as its operations, and their storages, numbered by it."""
    new_operation_index = {operation.index: position for position, operation in enumerate(order)}
    retained_storages = [
        storage_index for operation in order for storage_index in operation.storages
    ]
    new_storage_index: dict[int | None, int] = {
        storage_index: position for position, storage_index in enumerate(retained_storages)
    }
    storages = tuple(
        replace(
            step_graph.storages[storage_index],
            index=position,
            operation=new_operation_index[step_graph.storages[storage_index].operation],
            replaces=new_storage_index.get(step_graph.storages[storage_index].replaces),
        )
        for position, storage_index in enumerate(retained_storages)
    )
    operations = tuple(
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
    )
    output_keys = {
        node: (new_storage_index[storage_index], layout_index)
        for node, (storage_index, layout_index) in step_graph.output_keys.items()
        if storage_index in new_storage_index
    }
    values = replace(step_graph.values, output_keys=output_keys)
    return StepGraph(operations=operations, storages=storages, values=values)


# -- names and phases ---------------------------------------------------------------------------


def _module_paths(joint: Joint) -> dict[fx.Node, str]:
    """Return the path of each node's module; nodes without a known module are omitted."""
    path_of_sequence: dict[int, str] = {}
    paths: dict[fx.Node, str] = {}
    for node in joint.graph_module.graph.nodes:
        path = node.meta.get("custom", {}).get(ANNOTATION)
        sequence_number = node.meta.get("seq_nr")
        if path is None and node.meta.get("is_gradient_acc", False):
            path = _common_module(
                [paths[source] for source in node.all_input_nodes if source in paths]
            )
        elif path is None:
            path = path_of_sequence.get(sequence_number)
        elif sequence_number is not None and not _is_tagged_backward(node):
            path_of_sequence.setdefault(sequence_number, path)
        if path is not None:
            paths[node] = path
    return paths


def _common_module(paths: Sequence[str]) -> str | None:
    """Return the path of the innermost module that contains all `paths`; None if none does."""
    names = zip(*(path.split(".") for path in paths), strict=False)
    common_names = takewhile(lambda names_at_depth: len(set(names_at_depth)) == 1, names)
    return ".".join(names_at_depth[0] for names_at_depth in common_names) or None


def _tangent_descendants(joint: Joint) -> frozenset[fx.Node]:
    """Return the tangents, which start the backward pass, and the nodes that depend on them."""
    descendants = {argument.node for argument in joint.arguments_of(InputKind.TANGENT)}
    for node in joint.graph_module.graph.nodes:
        if any(source in descendants for source in node.all_input_nodes):
            descendants.add(node)
    return frozenset(descendants)


def _is_tagged_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("partitioner_tag") == "is_backward")
