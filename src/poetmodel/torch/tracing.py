"""Tracing: a module, its loss and inputs become a training graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from poetmodel.graph import Graph, Node, Phase, Tensor
from poetmodel.torch.joint import Joint, capture
from poetmodel.torch.measures import is_counted, storage_key
from poetmodel.torch.roles import Purpose, Source
from poetmodel.torch.units import Units, find_units
from poetmodel.torch.workspace import workspace_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A training step as PyTorch captured it, and as the training graph that is scheduled.

    Node ``k`` of the graph is ``units[k]``, tensor ``i`` is ``storages[i]``.
    """

    joint: Joint
    """The captured step: the graph of PyTorch and the roles of what goes in and out."""
    parts: Units
    """Units, storages and emissions."""
    graph: Graph
    """The training graph."""

    @cached_property
    def held_bytes(self) -> int:
        """Bytes of the results that are handed out only at the end of the step: loss, buffers [B].

        The graph frees them after their last reader; whoever runs a plan holds them until the end,
        so a budget has to leave room for them.
        """
        held = {
            index
            for emission in self.parts.emissions
            if emission.result.purpose is not Purpose.GRADIENT
            for index in emission.reads.storages
        }
        return sum(self.parts.storages[index].bytes for index in held)


def trace(
    model: torch.nn.Module,
    loss_fn: Callable[..., torch.Tensor] | None,
    inputs: Sequence[Any],
    *,
    name: str | None = None,
    measure_workspace: bool = True,
) -> Trace:
    """Trace a training step.

    Parameters
    ----------
    model : torch.nn.Module
        The network, in the mode (train or eval) that it is to run in.
    loss_fn : callable, optional
        The loss is ``loss_fn(model(*inputs[:-1]), inputs[-1])``; without it, it is
        ``model(*inputs)``.
    inputs : sequence
        Example inputs, the target last; the first dimension of the first one is the batch size.
    name : str, optional
        Name of the graph; by default the class of `model`.
    measure_workspace : bool
        Whether to measure the memory that operations need beside their outputs; takes two runs.

    Returns
    -------
    Trace
        Parameters, gradients, buffers and the state of random generators stay as they were.

    Raises
    ------
    CaptureError
        If the step cannot be captured: says which operation, where, and what to do.
    BackendUnavailableError
        If PyTorch is missing or too old.
    """
    joint = capture(model, loss_fn, inputs, name=name)
    parts = find_units(joint)
    workspace = workspace_bytes(joint, parts) if measure_workspace else (0,) * len(parts.units)
    return Trace(joint=joint, parts=parts, graph=_graph(joint, parts, workspace))


def _graph(joint: Joint, parts: Units, workspace: Sequence[int]) -> Graph:
    names = [storage.name for storage in parts.storages]
    nodes = tuple(
        Node(
            name=unit.label.name,
            op=unit.label.op,
            phase=unit.label.phase,
            inputs=tuple(names[index] for index in unit.reads.storages),
            outputs=tuple(
                Tensor(name=names[index], bytes=parts.storages[index].bytes)
                for index in unit.storages
            ),
            workspace_bytes=extra,
            flops=unit.flops,
            bytes_moved=unit.moved_bytes,
        )
        for unit, extra in zip(parts.units, workspace, strict=True)
    )
    counted = sum(
        unit.flops
        for unit in parts.units
        if unit.label.phase is Phase.FORWARD and is_counted(unit.node)
    )
    trained = _distinct(
        tensor for tensor in map(joint.value, joint.of(Source.PARAMETER)) if tensor.requires_grad
    )
    return Graph(
        name=joint.name,
        nodes=nodes,
        batch_size=_batch_size(joint),
        dtype=_dtype(joint),
        resident_bytes=_resident_bytes(joint, trained),
        parameters=sum(tensor.numel() for tensor in trained),
        forward_macs=counted // 2,
    )


def _resident_bytes(joint: Joint, trained: Sequence[torch.Tensor]) -> dict[str, int]:
    """Return what is in memory for the whole step.

    ``parameters`` are all that the step finds in place: parameters, frozen ones too, buffers and
    constants, but not the inputs, which belong to the caller. ``gradients`` are those of
    parameters: a new gradient is added to them and let go as soon as it is computed.
    """
    there = _distinct(
        joint.value(argument)
        for argument in joint.arguments
        if argument.source in (Source.PARAMETER, Source.BUFFER, Source.CONSTANT)
    )
    return {
        "parameters": sum(tensor.untyped_storage().nbytes() for tensor in there),
        "gradients": sum(tensor.numel() * tensor.element_size() for tensor in trained),
    }


def _distinct(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the tensors that do not share their storage with an earlier one."""
    return tuple({storage_key(tensor): tensor for tensor in tensors}.values())


def _batch_size(joint: Joint) -> int:
    first = next((value for value in joint.inputs if getattr(value, "ndim", 0)), None)
    return 1 if first is None else max(1, int(first.shape[0]))


def _dtype(joint: Joint) -> str:
    return str(joint.value(joint.of(Source.PARAMETER)[0]).dtype).removeprefix("torch.")
