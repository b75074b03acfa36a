"""What is called for an operation: PyTorch's kernel, or a quicker one with the same results."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch


def kernel_of(target: Any) -> Callable[..., Any]:
    """Return what to call for the target of a node: nearly always the target itself."""
    found: Callable[..., Any] = _kernels().get(target, target)
    return found


@cache
def _kernels() -> Mapping[Any, Callable[..., Any]]:
    import torch

    return {torch.ops.aten.native_dropout_backward.default: _dropout_backward}


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """Return ``grad * mask * scale``, the products in the order and precision of PyTorch's kernel.

    Notes
    -----
    A capture has the dropout of accelerators, whose mask is boolean: a quarter of the bytes that
    eager saves on the processor. There its backward kernel mixes types and makes three tensors;
    to convert first and to multiply in place makes one, and takes a third of the time.
    """
    import torch

    if grad.stride() != mask.stride() or not grad.is_floating_point():
        return torch.ops.aten.native_dropout_backward.default(grad, mask, scale)
    return mask.to(grad.dtype).mul_(grad).mul_(scale)
