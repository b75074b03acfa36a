"""Operators: name, module path, FLOP, effects, and the kernel with the bits of eager mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch.utils.flop_counter import flop_registry

from poetmodel.torch.graph.tensors import fake_value, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import fx

    Kernel = Callable[..., Any]
F = TypeVar("F")

_COLLECTIVES: Final = ("_c10d_functional", "c10d_functional")
"""Namespaces of functional collectives."""
_COPYING_COLLECTIVES: Final = ("all_reduce", "broadcast")
"""Collectives that clone their input first."""


def register_in(table: dict[Any, F]) -> Callable[..., Callable[[F], F]]:
    """Return a decorator, with keys as arguments, that adds a function to a table."""

    def with_keys(*keys: Any) -> Callable[[F], F]:
        def register(function: F) -> F:
            table.update(dict.fromkeys(keys, function))
            return function

        return register

    return with_keys


def operator_name(node: fx.Node) -> str:
    """Return the name of a node's operator without namespace and overload."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).rpartition("::")[2]
    return str(getattr(node.target, "__name__", node.target))


def arguments_with_defaults(node: fx.Node) -> tuple[Any, ...]:
    """Return the arguments of a node, in the order of its operator's schema and with defaults."""
    schema = getattr(node.target, "_schema", None)
    arguments: list[Any] = list(node.args)
    for argument in [] if schema is None else schema.arguments[len(arguments) :]:
        default = argument.default_value if argument.has_default_value() else None
        arguments.append(node.kwargs.get(argument.name, default))
    return tuple(arguments)


def module_path(node: fx.Node) -> str:
    """Return the path of a forward or backward node's innermost module; "" if root or unknown."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    return path.removeprefix("L['self']").replace("L['model']", "").strip(".")


def is_random(target: Any) -> bool:
    """Return whether PyTorch tags an operator as random; `dropout_mask` has no tag."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def has_effect(node: fx.Node) -> bool:
    """Return whether a node is ``aten.copy_``, or an impure call without a value (a check)."""
    return node.target is torch.ops.aten.copy_.default or (
        node.op == "call_function" and fake_value(node) is None and node.is_impure()
    )


def is_foreign(target: Any) -> bool:
    """Return whether an operator has another namespace than ATen, ``prims`` or poetmodel.

    True for higher-order operators, False for a Python function.
    """
    namespace = getattr(target, "namespace", "aten")
    return namespace not in ("aten", "prims", "prim", "_operator", "poetmodel")


def is_collective(target: Any) -> bool:
    """Return whether an operator communicates with other processes; waits do not count."""
    return getattr(target, "namespace", "") in _COLLECTIVES and not is_wait(target)


def is_wait(target: Any) -> bool:
    """Return whether an operator waits for a collective and returns the collective's result."""
    return getattr(target, "namespace", "") in _COLLECTIVES and (
        getattr(target, "_opname", "") == "wait_tensor"
    )


def copies_input(target: Any) -> bool:
    """Return whether a collective copies its input first, so that the input may be freed."""
    return getattr(target, "_opname", "") in _COPYING_COLLECTIVES


def has_flop_formula(node: fx.Node) -> bool:
    """Return whether PyTorch's FLOP counter has a formula for the operator of a node."""
    return getattr(node.target, "overloadpacket", None) in flop_registry


def flops_of(target: Any, arguments: Sequence[Any], keywords: dict[str, Any], value: Any) -> int:
    """Return the FLOP of one call of an operator with the output `value`.

    By ``torch.utils.flop_counter``; without a formula one FLOP per element of the largest operand,
    so that it takes time also on devices without a memory bandwidth.
    """
    if target is torch.ops.aten.convolution_backward.default:
        return _convolution_backward_flops(
            *arguments[:3], transposed=arguments[7], output_mask=arguments[-1]
        )
    formula = flop_registry.get(getattr(target, "overloadpacket", None))
    if formula is not None:
        return int(formula(*arguments, **keywords, out_val=value))
    sizes = [tensor.numel() for tensor in tensors_in((arguments, keywords, value))]
    return max(sizes, default=0)


def _convolution_backward_flops(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    transposed: bool,
    output_mask: Sequence[bool],
) -> int:
    """Return the FLOP of gradients of `x` and `w`, not bias; PyTorch's formula ignores groups."""
    macs = (x if transposed else dy).numel() * (w.numel() // max(1, w.shape[0]))
    return 2 * int(macs) * sum(output_mask[:2])


# -- kernels -----------------------------------------------------------------------------------

KERNEL_KEY: Final = "poetmodel.kernel"
"""Key of (target, kernel to call instead of the target) in a node's ``meta``. The target is stored
because PyTorch copies ``meta`` to nodes of other operators, whose kernels must not change."""

EAGER_KERNELS: Final[dict[object, Callable[[fx.Node], Kernel]]] = {}
"""Functions that return the kernel of a node with the bits of eager mode, by operator. A capture
contains these operators in place of eager's."""


def set_kernel(node: fx.Node, kernel: Kernel) -> None:
    """Set the kernel that is called with a node's arguments instead of its target."""
    node.meta[KERNEL_KEY] = (node.target, kernel)


def stored_kernel(node: fx.Node) -> Kernel | None:
    """Return the kernel set by `set_kernel`; None if none was set, or if the target has changed."""
    target, kernel = node.meta.get(KERNEL_KEY, (None, None))
    return kernel if target is node.target else None


def kernel_of(node: fx.Node) -> Kernel:
    """Return the function to call for a node: its stored or eager kernel, otherwise its target."""
    kernel = stored_kernel(node)
    if kernel is not None:
        return kernel
    target: Any = node.target
    return EAGER_KERNELS[target](node) if target in EAGER_KERNELS else target
