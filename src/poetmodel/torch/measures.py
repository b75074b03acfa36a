"""What can be read off tensors and operators: identity, sizes, FLOP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import fx


def storage_key(tensor: torch.Tensor) -> int:
    """Return what tells one storage from all others that are alive."""
    key: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - the only identity on every device
    return key


def tensors_in(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors in a nest of tuples, lists and dicts, in order."""
    import torch
    from torch.utils import _pytree

    return tuple(leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def moved_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that reading some tensors takes: at most a storage for each of its views."""
    return sum(
        min(tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size())
        for tensor in tensors
    )


def flops_of(
    node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any], value: Any
) -> int:
    """Return the FLOP of one operation.

    Notes
    -----
    Convolutions, matrix products and attention as ``torch.utils.flop_counter`` counts them. It
    knows nothing else; any other operation counts one FLOP per element of its largest operand, so
    that devices without a memory bandwidth do not take it for free.
    """
    counted = counted_flops(node, arguments, keywords, value)
    if counted is not None:
        return counted
    sizes = [tensor.numel() for tensor in tensors_in((arguments, keywords, value))]
    return max(sizes, default=0)


def counted_flops(
    node: fx.Node, arguments: tuple[Any, ...], keywords: dict[str, Any], value: Any
) -> int | None:
    """Return the FLOP that ``torch.utils.flop_counter`` counts; None where it knows no formula."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return None
    return int(formula(*arguments, **keywords, out_val=value))


def is_counted(node: fx.Node) -> bool:
    """Return whether an operation is a convolution, matrix product or attention."""
    from torch.utils.flop_counter import flop_registry

    return getattr(node.target, "overloadpacket", None) in flop_registry
