"""What is called for an operation: PyTorch's kernel, or one that gives what eager does."""

from __future__ import annotations

import operator
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import fx


def kernel_of(node: fx.Node) -> Callable[..., Any]:
    """Return what to call for the operation of a node: nearly always its target itself."""
    import torch

    aten = torch.ops.aten
    if node.target is aten.native_dropout.default:
        return _dropout
    if node.target is aten.native_dropout_backward.default:
        return _dropout_backward(_dropped_ratio(node))
    found: Callable[..., Any] = node.target
    return found


def _dropout(
    x: torch.Tensor,
    p: float,
    train: bool | None,  # noqa: FBT001 - the signature is that of PyTorch's operator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor after dropout, and which elements were kept.

    Notes
    -----
    A capture has the dropout of accelerators, whose mask is boolean: a quarter of the bytes that
    eager saves on the processor. It multiplies by the mask and by ``1 / (1 - p)`` one after the
    other, where eager's multiplies by their product, rounded to the type of the tensor; and it
    draws where ``p`` is 1. This computes what eager does, of the same random numbers.
    """
    import torch

    if train is False or x.numel() == 0:
        values: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten.native_dropout(x, p, train)
        return values
    if p == 1:
        return x.mul(torch.zeros((), dtype=x.dtype, device=x.device)), torch.zeros_like(
            x, dtype=torch.bool
        )
    noise = torch.empty_like(x).bernoulli_(1 - p)
    mask = noise.to(torch.bool)
    return _multiplied(noise.div_(1 - p), x), mask


@cache
def _dropout_backward(p: float | None) -> Callable[..., torch.Tensor]:
    """Return the backward of dropout: the gradient times what the input was multiplied by.

    Notes
    -----
    PyTorch's kernel mixes types and makes three tensors; to convert first and to multiply in place
    makes one, and takes a third of the time.
    """

    def backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        noise = mask.to(grad.dtype)
        if scale != 0:  # 0 where p is 1: nothing was kept
            noise.div_(1 / scale if p is None else 1 - p)
        return _multiplied(noise, grad)

    return backward


def _dropped_ratio(node: fx.Node) -> float | None:
    """Return with which ratio the mask was drawn that a backward of dropout reads.

    The scale alone tells it up to a rounding; None where the mask comes from elsewhere.
    """
    import torch

    dropout = torch.ops.aten.native_dropout.default
    for mask in node.all_input_nodes:
        for source in mask.all_input_nodes:
            if mask.target is operator.getitem and source.target is dropout:
                ratio: Any = source.args[1]
                return float(ratio)
    return None


def _multiplied(noise: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the product, in place of the noise where that does not change its strides."""
    return noise.mul_(x) if noise.stride() == x.stride() else x * noise
