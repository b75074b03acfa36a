"""Operators in place: which of them may write their result over an input, and what then runs.

Element-wise operators compute each element from those at its place, so that the memory of an input
of the same shape, strides and type may take the result: PyTorch has such variants (``relu_``, or
``threshold_backward`` with ``grad_input=``), which give the same bits.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx

from poetmodel.torch.graph.dropout import dropout_backward_in_place

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from poetmodel.torch.graph.step_graph import Operation, TensorStorage
    from poetmodel.torch.step.captured import CapturedGraph

    Kernel = Callable[..., torch.Tensor]

_DROPOUT_BACKWARD: Final = torch.ops.aten.native_dropout_backward.default


def pair_in_place(
    parts: CapturedGraph, operation: Operation, last: Sequence[int], kept: Collection[int]
) -> tuple[tuple[int, int], ...]:
    """Return the numbers of an output and an input that may share memory, or none.

    `last` has for each storage its last reader. The input must be a whole tensor that an operation
    has made and none reads later, none of those `kept`, and read as it is, not as a view.
    """
    if len(operation.storages) != 1 or operation.is_source:
        return ()
    (number,) = operation.storages
    output = parts.storages[number]
    if output.replaces is not None or not _is_whole(output):
        return ()
    behind_views = {
        index
        for view in operation.reads.views
        for source in view.all_input_nodes
        if source in parts.direct
        for index in (parts.direct[source][0],)
    }
    for position, argument in enumerate(operation.node.args):
        if not isinstance(argument, fx.Node) or argument not in parts.direct:
            continue
        read = parts.direct[argument][0]
        storage = parts.storages[read]
        if (
            last[read] == operation.index
            and read not in kept
            and read not in behind_views
            and not parts.operations[storage.operation].is_source
            and _lie_alike(output, storage)
            and kernel_in_place(operation.node, position) is not None
        ):
            return ((number, read),)
    return ()


def workspace_in_place_bytes(parts: CapturedGraph, operation: Operation) -> int:
    """Return the workspace of an operation in place, if workspaces are measured [B].

    The gradient of dropout is multiplied by the mask in its own type, which is a tensor of its own.
    """
    whole_bytes = operation.profile.workspace_bytes
    if not (whole_bytes and operation.in_place and operation.node.target is _DROPOUT_BACKWARD):
        return whole_bytes
    return whole_bytes + parts.storages[operation.in_place[0][0]].bytes


def place_of(parts: CapturedGraph, operation: Operation, read: int) -> int:
    """Return the argument of an operation that is a storage read as it is."""
    return next(
        position
        for position, argument in enumerate(operation.node.args)
        if isinstance(argument, fx.Node) and parts.direct.get(argument, (-1, 0))[0] == read
    )


def kernel_in_place(node: fx.Node, position: int) -> Kernel | None:
    """Return the function that computes a node in an argument's memory; None for none.

    It takes the arguments of the node, and returns the tensor of that memory.
    """
    target: Any = node.target
    if target is _DROPOUT_BACKWARD:
        return dropout_backward_in_place(node) if position == 0 else None
    tags = getattr(target, "tags", ())
    name = getattr(getattr(target, "_schema", None), "name", "").removeprefix("aten::")
    elementwise = torch.Tag.pointwise in tags or name in _ELEMENTWISE
    if not elementwise or torch.Tag.nondeterministic_seeded in tags:
        return None
    variant = _variant(target, position == 0)
    if variant is None:
        return None
    kernel, out = variant
    return kernel if out is None else partial(_with_out, kernel, out, position)


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
"""Operators that PyTorch does not tag as such, and that compute element by element all the same."""


def _with_out(
    kernel: Kernel, out: str, position: int, *arguments: Any, **keywords: Any
) -> torch.Tensor:
    return kernel(*arguments, **keywords, **{out: arguments[position]})


@cache
def _variant(operator: Any, first: bool) -> tuple[Kernel, str | None] | None:  # noqa: FBT001 - for the cache
    """Return a variant of an operator that writes over its first argument, or into any tensor.

    With the name of the parameter that it writes into, where it is one that has no name otherwise.
    Variants that PyTorch derives from the operator itself would make new memory and copy.
    """
    if operator is torch.ops.aten.mul.Scalar:  # whose own rounds the number to half precision
        return (torch.ops.aten.mul_.Tensor, None) if first else None
    packet = operator.overloadpacket
    name, overload = operator._schema.name, operator._overloadname  # noqa: SLF001 - PyTorch's own words
    if first:
        twin = getattr(torch.ops.aten, f"{name.removeprefix('aten::')}_", None)
        if twin is not None and overload in twin.overloads():
            return getattr(twin, overload), None
    given = _operand_types(operator)
    for other in packet.overloads():
        variant = getattr(packet, other)
        written = [a.name for a in variant._schema.arguments if a.is_out]  # noqa: SLF001 - as above
        full = f"{name}.{other}"
        if (
            len(written) == 1
            and _operand_types(variant) == given
            and bool(torch._C._dispatch_has_kernel_for_dispatch_key(full, "CPU"))  # noqa: SLF001
        ):
            return variant, written[0]
    return None


def _operand_types(operator: Any) -> list[tuple[str, str]]:
    """Return names and types of what an operator reads."""
    arguments = operator._schema.arguments  # noqa: SLF001 - PyTorch's own words
    return [(a.name, str(a.type)) for a in arguments if not a.is_out]


def _is_whole(storage: TensorStorage) -> bool:
    """Whether one tensor is all there is in a storage."""
    if len(storage.layouts) != 1:
        return False
    (layout,) = storage.layouts
    size: int = math.prod(layout.shape) * layout.dtype.itemsize
    return size == storage.bytes > 0


def _lie_alike(storage: TensorStorage, other: TensorStorage) -> bool:
    """Whether the tensors of two storages have the same type and the same memory."""
    if len(other.layouts) != 1 or storage.bytes != other.bytes:
        return False
    first, second = storage.layouts[0], other.layouts[0]
    return (first.dtype, first.shape, first.stride, first.offset) == (
        second.dtype,
        second.shape,
        second.stride,
        second.offset,
    )
