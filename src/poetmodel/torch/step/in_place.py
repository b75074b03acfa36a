"""Operators in place: which operators may overwrite an input, and the kernels that do.

An element-wise operator computes each element from the input elements at the same index. It may
therefore overwrite an input of the same shape, strides and type with the result. PyTorch has
variants that do so (``relu_``, or ``threshold_backward`` with ``grad_input=``), with the same bits.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from poetmodel.torch.graph.dropout import make_in_place_dropout_backward
from poetmodel.torch.graph.operators import is_random

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from poetmodel.torch.graph.step_graph import Operation, StepGraph, TensorStorage

    Kernel = Callable[..., torch.Tensor]

_DROPOUT_BACKWARD: Final = torch.ops.aten.native_dropout_backward.default


def in_place_pair(
    step_graph: StepGraph, operation: Operation, excluded_indices: Collection[int]
) -> tuple[tuple[int, int], ...]:
    """Return ((output, input),) if the only output may overwrite an argument, otherwise ().

    Both are storage indices. The input must be computed, last used here, read directly, not in
    `excluded_indices`, and of the output's layout; the output must replace no state.
    """
    if len(operation.storages) != 1 or operation.is_source:
        return ()
    (output_index,) = operation.storages
    output = step_graph.storages[output_index]
    if output.replaces is not None or not _fills_storage(output):
        return ()
    viewed_indices = {
        index
        for view in operation.reads.views
        for source in view.all_input_nodes
        if source in step_graph.output_keys
        for index in (step_graph.output_keys[source][0],)
    }
    for position, argument in enumerate(operation.node.args):
        if not isinstance(argument, fx.Node) or argument not in step_graph.output_keys:
            continue
        input_index = step_graph.output_keys[argument][0]
        storage = step_graph.storages[input_index]
        if (
            step_graph.last_uses[input_index] == operation.index
            and input_index not in excluded_indices
            and input_index not in viewed_indices
            and not step_graph.operations[storage.operation].is_source
            and _has_equal_layout(output, storage)
            and in_place_kernel(operation.node, position) is not None
        ):
            return ((output_index, input_index),)
    return ()


def in_place_workspace_bytes(step_graph: StepGraph, operation: Operation) -> int:
    """Return the workspace of an operation; 0 if not measured [B].

    In place, dropout's backward needs memory for a mask, for which it else uses the output.
    """
    workspace_bytes = operation.profile.workspace_bytes
    is_measured = operation.profile.time_s > 0  # A measured workspace may be 0, if p is 1.
    if not (is_measured and operation.in_place and operation.node.target is _DROPOUT_BACKWARD):
        return workspace_bytes
    return workspace_bytes + step_graph.storages[operation.in_place[0][0]].bytes


def argument_position(step_graph: StepGraph, operation: Operation, storage_index: int) -> int:
    """Return the position of the first argument that is a storage, not a view of it."""
    return next(
        position
        for position, argument in enumerate(operation.node.args)
        if isinstance(argument, fx.Node)
        and step_graph.output_keys.get(argument, (-1, 0))[0] == storage_index
    )


def in_place_kernel(node: fx.Node, position: int) -> Kernel | None:
    """Return a kernel that computes a node into its argument at `position`, if there is one.

    The caller checks that this argument has the layout of the output.
    """
    target: Any = node.target
    if target is _DROPOUT_BACKWARD:
        return make_in_place_dropout_backward(node) if position == 0 else None
    tags = getattr(target, "tags", ())
    name = getattr(getattr(target, "_schema", None), "name", "").removeprefix("aten::")
    is_elementwise = torch.Tag.pointwise in tags or name in _ELEMENTWISE
    if not is_elementwise or is_random(target):
        return None
    variant = _find_variant(target, position == 0)
    if variant is None:
        return None
    kernel, out_name = variant
    return kernel if out_name is None else partial(_call_with_out, kernel, out_name, position)


_ELEMENTWISE: Final = frozenset(
    (
        "elu_backward",
        "hardsigmoid_backward",
        "hardtanh_backward",
        "huber_loss_backward",
        "leaky_relu_backward",
        "log_sigmoid_backward",
        "mse_loss_backward",
        "smooth_l1_loss_backward",
        "softplus_backward",
        "softshrink_backward",
    )
)
"""Element-wise operators without PyTorch's ``pointwise`` tag."""


def _call_with_out(
    kernel: Kernel, out_name: str, position: int, *arguments: Any, **keywords: Any
) -> torch.Tensor:
    return kernel(*arguments, **keywords, **{out_name: arguments[position]})


@cache
def _find_variant(operator: Any, is_first: bool) -> tuple[Kernel, str | None] | None:  # noqa: FBT001 - for the cache
    """Return (variant of an operator that overwrites a tensor, name of its out parameter or None).

    Without that name, it overwrites its first argument, like ``relu_``. Variants that PyTorch
    derives are excluded: they would allocate and copy.
    """
    if operator is torch.ops.aten.mul.Scalar:
        # Its variant ``mul_.Scalar`` rounds the number to half precision.
        return (torch.ops.aten.mul_.Tensor, None) if is_first else None
    packet = operator.overloadpacket
    name, overload = operator._schema.name, operator._overloadname  # noqa: SLF001 - PyTorch's own words
    if is_first:
        method_packet = getattr(torch.ops.aten, f"{name.removeprefix('aten::')}_", None)
        if method_packet is not None and overload in method_packet.overloads():
            return getattr(method_packet, overload), None
    operand_types = _operand_types(operator)
    for overload_name in packet.overloads():
        variant = getattr(packet, overload_name)
        out_names = [a.name for a in variant._schema.arguments if a.is_out]  # noqa: SLF001 - as above
        full_name = f"{name}.{overload_name}"
        if (
            len(out_names) == 1
            and _operand_types(variant) == operand_types
            and bool(torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CPU"))  # noqa: SLF001
        ):
            return variant, out_names[0]
    return None


def _operand_types(operator: Any) -> list[tuple[str, str]]:
    """Return (name, type) of an operator's arguments except out parameters."""
    arguments = operator._schema.arguments  # noqa: SLF001 - PyTorch's own words
    return [(a.name, str(a.type)) for a in arguments if not a.is_out]


def _fills_storage(storage: TensorStorage) -> bool:
    """Return whether a storage has one layout, whose tensor occupies all bytes; False if empty."""
    if len(storage.layouts) != 1:
        return False
    (layout,) = storage.layouts
    size: int = math.prod(layout.shape) * layout.dtype.itemsize
    return size == storage.bytes > 0


def _has_equal_layout(storage: TensorStorage, other_storage: TensorStorage) -> bool:
    """Return whether two storages, the first of one tensor, are equal in size and layout."""
    if len(other_storage.layouts) != 1 or storage.bytes != other_storage.bytes:
        return False
    layout, other_layout = storage.layouts[0], other_storage.layouts[0]
    return (layout.dtype, layout.shape, layout.stride, layout.offset) == (
        other_layout.dtype,
        other_layout.shape,
        other_layout.stride,
        other_layout.offset,
    )
