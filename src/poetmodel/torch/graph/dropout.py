"""Eager's dropout, in place of ``aten.native_dropout``, the accelerators' that a capture has."""

from __future__ import annotations

from functools import cache
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch

from poetmodel.torch.graph.operators import EAGER, kernel_of, set_kernel
from poetmodel.torch.graph.tensors import fake

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx


def dropout_mask(x: torch.Tensor, p: float) -> torch.Tensor:
    """Draw which elements of a tensor dropout keeps, as eager PyTorch does.

    It carries no tag: `JointGraph.is_repeatable` knows it by name.
    """
    if p == 1:
        return torch.zeros_like(x, dtype=torch.bool)
    return torch.empty_like(x).bernoulli_(1 - p).to(torch.bool)


def dropped(x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """Return a tensor after dropout with a mask: the bits of eager PyTorch."""
    if p == 1:
        return x.mul(torch.zeros((), dtype=x.dtype, device=x.device))
    return _multiplied(mask.to(x.dtype).div_(1 - p), x)


def dropout(
    x: torch.Tensor,
    p: float,
    train: bool | None,  # noqa: FBT001 - the signature is that of PyTorch's operator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor after dropout, and which elements were kept.

    A capture has the dropout of accelerators, whose mask is boolean: a quarter of the bytes that
    eager saves on the processor. It multiplies by the mask and by ``1 / (1 - p)`` one after the
    other, where eager's multiplies by their product, rounded to the type of the tensor; and it
    draws where ``p`` is 1. This computes what eager does, of the same random numbers.
    """
    if train is False or x.numel() == 0:
        values: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten.native_dropout(x, p, train)
        return values
    mask = dropout_mask(x, p)
    return dropped(x, mask, p), mask


@cache
def _backward(p: float | None) -> Callable[..., torch.Tensor]:
    """Return the backward of dropout: the gradient times what the input was multiplied by.

    PyTorch's kernel mixes types and makes three tensors; to convert first and to multiply in place
    makes one, and takes a third of the time.
    """

    def backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        noise = mask.to(grad.dtype)
        if scale != 0:  # 0 where p is 1: nothing was kept
            noise.div_(1 / scale if p is None else 1 - p)
        return _multiplied(noise, grad)

    return backward


def dropout_backward_in_place(node: fx.Node) -> Callable[..., torch.Tensor]:
    """Return the backward of dropout that multiplies the gradient where it is, by the same number.

    The mask is 0 or 1, so that two products after each other round once, as one does.
    """
    p = _dropped_ratio(node)

    def backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        grad.mul_(mask)
        if scale != 0:
            factor = torch.ones((), dtype=grad.dtype, device=grad.device)
            grad.mul_(factor.div_(1 / scale if p is None else 1 - p))
        return grad

    return backward


def _dropped_ratio(node: fx.Node) -> float | None:
    """Return with which ratio the mask was drawn that a backward of dropout reads.

    The scale alone tells it up to a rounding; None where the mask comes from elsewhere.
    """
    dropout = torch.ops.aten.native_dropout.default
    for mask in node.all_input_nodes:
        for source in mask.all_input_nodes:
            if mask.target is getitem and source.target is dropout:
                ratio: Any = source.args[1]
                return float(ratio)
    return None


def _multiplied(noise: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the product, in place of the noise where that does not change its strides."""
    return noise.mul_(x) if noise.stride() == x.stride() else x * noise


def split_dropout(graph: fx.Graph) -> None:
    """Take dropout apart into its mask, which is drawn once, and what can be computed again.

    For `pmt.backend`, which restores no generator's state. The backward pass gets the kernel that
    gives eager's bits.
    """
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default):
        set_kernel(node, kernel_of(node))
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x, p, train = node.args
        if train is False or fake(x).numel() == 0:
            continue
        output, kept = fake(node)
        with graph.inserting_before(node):
            mask = graph.call_function(dropout_mask, (x, p))
            result = graph.call_function(dropped, (x, mask, p))
        for new, value in ((mask, kept), (result, output)):
            new.meta = dict(node.meta) | {"val": value}
        for user in list(node.users):
            user.replace_all_uses_with(result if user.args[1] == 0 else mask)
            graph.erase_node(user)
        graph.erase_node(node)


EAGER[torch.ops.aten.native_dropout.default] = lambda _: dropout
EAGER[torch.ops.aten.native_dropout_backward.default] = lambda node: _backward(_dropped_ratio(node))
