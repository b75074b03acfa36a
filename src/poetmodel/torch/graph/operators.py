"""Operators: name, module, FLOP, effects, and the kernel that gives what eager does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.flop_counter import flop_registry

from poetmodel.torch.graph.tensors import fake, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    Kernel = Callable[..., Any]

_COLLECTIVES: Final = ("_c10d_functional", "c10d_functional")
"""Namespaces of functional collectives."""
_COPYING: Final = ("all_reduce", "broadcast")
"""Collectives that clone their input first."""


def operator_name(node: fx.Node) -> str:
    """Return the name of the operator of a node, without its overload."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).rpartition("::")[2]
    return str(getattr(node.target, "__name__", node.target))


def module_of(node: fx.Node) -> str:
    """Return the path of the module that an operation of the forward or backward pass is of."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    return path.removeprefix("L['self']").replace("L['model']", "").strip(".")


def is_effect(node: fx.Node) -> bool:
    """Whether a node is there for what it does: writes an argument, or checks values."""
    return node.target is torch.ops.aten.copy_.default or (
        node.op == "call_function" and fake(node) is None and node.is_impure()
    )


def is_foreign(target: Any) -> bool:
    """Whether an operator is neither PyTorch's nor ours, or runs functions of a user."""
    namespace = getattr(target, "namespace", "aten")
    return namespace not in ("aten", "prims", "prim", "_operator", "poetmodel")


def is_collective(target: Any) -> bool:
    """Return whether an operator communicates with other processes: all of them must call it."""
    return getattr(target, "namespace", "") in _COLLECTIVES and not is_wait(target)


def is_wait(target: Any) -> bool:
    """Return whether an operator waits for a collective and returns its result as it is."""
    return getattr(target, "namespace", "") in _COLLECTIVES and (
        getattr(target, "_opname", "") == "wait_tensor"
    )


def copies_input(target: Any) -> bool:
    """Return whether a collective works on a copy of its input, which it does not hold."""
    return getattr(target, "_opname", "") in _COPYING


def is_counted(node: fx.Node) -> bool:
    """Whether an operation is a convolution, matrix product or attention."""
    return getattr(node.target, "overloadpacket", None) in flop_registry


def flops_of(target: Any, arguments: Sequence[Any], keywords: dict[str, Any], value: Any) -> int:
    """Return the FLOP of one operation that makes a value of its arguments.

    Convolutions, matrix products and attention as ``torch.utils.flop_counter`` counts them. It
    knows nothing else; any other operation counts one FLOP per element of its largest operand, so
    that devices without a memory bandwidth do not take it for free.
    """
    if target is torch.ops.aten.convolution_backward.default:
        return _gradient_flops(*arguments[:3], transposed=arguments[7], wanted=arguments[-1])
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    if formula is not None:
        return int(formula(*arguments, **keywords, out_val=value))
    sizes = [tensor.numel() for tensor in tensors_in((arguments, keywords, value))]
    return max(sizes, default=0)


def _gradient_flops(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, *, transposed: bool, wanted: Sequence[bool]
) -> int:
    """Return the FLOP of a convolution's gradients: each takes as many as the convolution.

    PyTorch's counter takes that of the weight for one over all channels, whatever the groups.
    """
    macs = (x if transposed else dy).numel() * (w.numel() // max(1, w.shape[0]))
    return 2 * int(macs) * sum(wanted[:2])


# -- kernels -----------------------------------------------------------------------------------

KERNEL: Final = "poetmodel.kernel"
"""Key under a node's ``meta``: its target, and what to call in place of it. PyTorch copies ``meta``
to other operators, which must not be replaced."""

EAGER: Final[dict[object, Callable[[fx.Node], Kernel]]] = {}
"""Operators that a capture has in place of eager's, with the kernel that gives eager's bits."""


def set_kernel(node: fx.Node, kernel: Kernel) -> None:
    """Let something else be called in place of a node's target, with the same arguments."""
    node.meta[KERNEL] = (node.target, kernel)


def chosen_kernel(node: fx.Node) -> Kernel | None:
    """Return the kernel that `set_kernel` chose for a node, if any."""
    target, kernel = node.meta.get(KERNEL, (None, None))
    return kernel if target is node.target else None


def kernel_of(node: fx.Node) -> Kernel:
    """Return the function for the operation of a node: nearly always its target itself."""
    chosen = chosen_kernel(node)
    if chosen is not None:
        return chosen
    target: Any = node.target
    return EAGER[target](node) if target in EAGER else target
