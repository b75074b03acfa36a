"""Tracing: capture a module with its loss as a training graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from poetmodel.graph import Graph, Node, Phase
from poetmodel.torch.capturing.inputs import empty_input_errors, refuse
from poetmodel.torch.capturing.joint import capture
from poetmodel.torch.capturing.joint_graph import InputKind, Joint
from poetmodel.torch.capturing.replay import profile_on_inputs
from poetmodel.torch.graph.operators import has_flop_formula
from poetmodel.torch.graph.tensors import storage_key
from poetmodel.torch.step.reading import (
    StepOutput,
    UpdateProfiler,
    find_outputs,
    read_step,
    update_workspace_bytes,
)
from poetmodel.torch.step.state_keys import find_state
from poetmodel.torch.step.updates import Update, check_optimizer, extend_with_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from torch import fx

    from poetmodel.torch.capturing.inputs import Inputs
    from poetmodel.torch.capturing.joint_graph import InputSpec
    from poetmodel.torch.graph.profiles import OpProfile
    from poetmodel.torch.graph.step_graph import Operation, StepGraph
    from poetmodel.torch.step.state_keys import StateKey


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A training step as captured from PyTorch, and as a training graph.

    Node ``k`` of the graph is ``step_graph.operations[k]``, tensor ``i`` is
    ``step_graph.storages[i]``.
    """

    joint: Joint
    step_graph: StepGraph
    graph: Graph

    @cached_property
    def outputs(self) -> list[StepOutput]:
        """One output per result, ordered by `last_operation`; outputs without one are last."""
        return find_outputs(self.joint, self.step_graph)

    @cached_property
    def state(self) -> dict[int, tuple[StateKey, InputSpec]]:
        """Key and first argument of each state storage, by storage index; empty for constants."""
        return find_state(self.joint, self.step_graph)

    def state_key(self, storage_index: int) -> StateKey:
        """Return the key of a state storage, or of the one that a storage replaces."""
        replaced_index = self.step_graph.storages[storage_index].replaces
        return self.state[storage_index if replaced_index is None else replaced_index][0]

    @cached_property
    def held_bytes(self) -> int:
        """Bytes of all storages that contain results returned at the end of the step [B].

        These results are all except gradients: the loss, outputs and, in a step without updates,
        new buffer values. The graph frees these results after their last reader. A runtime holds
        them until the end, so a budget must also cover them.
        """
        indices = {
            i for output in self.outputs if output.is_returned_at_end for i in output.reads.storages
        }
        return sum(self.step_graph.storages[index].bytes for index in indices)


def trace(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Inputs,
    *,
    name: str | None = None,
    measure_workspace: bool = True,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    clip_grad_norm: float | None = None,
) -> Trace:
    """Trace a training step: capture it, and execute its operations on `inputs` for their profiles.

    Parameters
    ----------
    model, loss_fn, inputs
        As for `compile`; the first dimension of the first input that has one is the batch size.
    name : str, optional
        Name of the graph; by default the class of `model`.
    measure_workspace : bool
        Whether to measure workspaces: the memory that operations need in addition to their outputs.
        Otherwise, and on the ``meta`` device, workspaces are 0.
    optimizer : torch.optim.Optimizer or sequence of them, optional
        Add the updates of this optimizer to the graph: SGD, Adam, AdamW, NAdam, RMSprop, Adagrad,
        Adamax, RAdam, Muon or `QuantizedSGD`. Parameters, moments, buffers and constants are then
        state tensors, and batch and learning rate are inputs. Each parameter is updated as early as
        possible, and operators may run in place. Without an optimizer, the graph ends with the
        gradients.
    clip_grad_norm : float, optional
        Clip the total norm of all gradients, like ``torch.nn.utils.clip_grad_norm_`` with
        ``model.parameters()``. All parameter updates wait for the norm. Needs an `optimizer`.

    Returns
    -------
    Trace
        The step and its training graph. Parameters, gradients, buffers and the state of random
        generators are left unchanged. Warnings are logged as by `capture`.

    Raises
    ------
    CaptureError
        If the step, or an update of the optimizer, cannot be captured; if an operation fails; if
        `clip_grad_norm` is given without an optimizer or is no positive number; or if a profiler of
        PyTorch is on while workspaces are measured. The message names the cause and, where known,
        its line and a remedy.
    InputError
        If a module quantized by PT2E cannot be converted to an int8 front.
    """
    if isinstance(inputs, tuple | list | Mapping):
        refuse(name or type(model).__name__, empty_input_errors(inputs))
    joint = capture_step(
        model,
        loss_fn,
        inputs,
        name=name,
        optimizer=optimizer,
        clip_grad_norm=clip_grad_norm,
        is_snapshot=True,
    )
    return build_trace(joint, profile_step(joint, measure_workspaces=measure_workspace))


def capture_step(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Inputs,
    *,
    name: str | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    clip_grad_norm: float | None = None,
    follows_state: bool = False,
    is_snapshot: bool = False,
) -> Joint:
    """Return a captured step, extended by the updates of `optimizer`; log its warnings."""
    check_optimizer(model, loss_fn, optimizer, name=name, clip_grad_norm=clip_grad_norm)
    joint = capture(
        model, loss_fn, inputs, name=name, follows_state=follows_state, is_snapshot=is_snapshot
    )
    if optimizer is not None:
        joint = extend_with_optimizer(joint, optimizer, clip_grad_norm=clip_grad_norm)
    return joint


def profile_step(joint: Joint, *, measure_workspaces: bool = True) -> dict[fx.Node, OpProfile]:
    """Execute a captured step on its inputs; return profiles in the order of the nodes.

    Workspaces are 0 without `measure_workspaces`, and without memory (device ``meta``).
    """
    is_meta = any(joint.value(a).is_meta for a in joint.arguments_of(InputKind.PARAMETER))
    profiler = UpdateProfiler(measure_workspaces=measure_workspaces and not is_meta)
    profiles = profile_on_inputs(joint, profiler)
    return {node: profiles[node] for node in joint.graph_module.graph.nodes if node in profiles}


def build_trace(joint: Joint, profiles: Mapping[fx.Node, OpProfile]) -> Trace:
    """Return the trace of a captured step with the profiles of its nodes."""
    step_graph = read_step(joint, profiles, has_state=joint.optimizer is not None)
    return Trace(joint=joint, step_graph=step_graph, graph=_build_graph(joint, step_graph))


def _build_graph(joint: Joint, step_graph: StepGraph) -> Graph:
    """Return the training graph of a captured step, without a node for its results.

    The batch size is the first dimension of the first input that has one.
    """
    nodes = tuple(_make_node(step_graph, operation) for operation in step_graph.operations)
    forward_operations = [
        operation for operation in step_graph.operations if operation.phase is Phase.FORWARD
    ]
    flops = sum(
        operation.profile.flops
        for operation in forward_operations
        if has_flop_formula(operation.node)
    )
    trained_tensors = _distinct_storages(
        tensor
        for tensor in map(joint.value, joint.arguments_of(InputKind.PARAMETER))
        if tensor.requires_grad
    )
    first_tensor = next((value for value in joint.inputs if getattr(value, "ndim", 0)), None)
    return Graph(
        name=joint.name,
        nodes=nodes,
        batch_size=1 if first_tensor is None else max(1, int(first_tensor.shape[0])),
        dtype=str(joint.value(joint.arguments_of(InputKind.PARAMETER)[0]).dtype).removeprefix(
            "torch."
        ),
        resident_bytes=_resident_bytes(joint, trained_tensors) if joint.optimizer is None else {},
        parameters=sum(tensor.numel() for tensor in trained_tensors),
        forward_macs=flops // 2,
        kernels="pytorch",
    )


def _make_node(step_graph: StepGraph, operation: Operation) -> Node:
    """Return the node of an operation; state, inputs and updates are not recomputable."""
    workspace_bytes, moved_bytes = operation.profile.workspace_bytes, operation.profile.moved_bytes
    if isinstance(operation.node.target, Update):
        workspace_bytes = update_workspace_bytes(step_graph, operation)
    return step_graph.training_node(
        operation,
        workspace_bytes=workspace_bytes,
        # Only computed tensors can be recomputed: inputs are supplied once, state is updated once.
        recomputable=operation.phase not in (Phase.INPUT, Phase.STATE, Phase.UPDATE),
        bytes_moved=None if operation.phase is Phase.STATE else moved_bytes,
    )


def _resident_bytes(joint: Joint, trained_tensors: Sequence[torch.Tensor]) -> dict[str, int]:
    """Return the bytes in RAM for the whole step: ``parameters`` and ``gradients`` [B].

    Buffers and constants are ``parameters``. Each trained tensor counts one ``.grad``; new
    gradients are tensors of the graph.
    """
    resident_tensors = _distinct_storages(
        joint.value(argument)
        for argument in joint.arguments
        if argument.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    )
    return {
        "parameters": sum(tensor.untyped_storage().nbytes() for tensor in resident_tensors),
        "gradients": sum(tensor.numel() * tensor.element_size() for tensor in trained_tensors),
    }


def _distinct_storages(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return one tensor for each storage that the tensors use: the last tensor in the storage."""
    return tuple({storage_key(tensor): tensor for tensor in tensors}.values())
