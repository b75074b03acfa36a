"""Eager's dropout instead of ``aten.native_dropout``, the operator of accelerators in captures.

Registers kernels with eager's bits for this operator and its backward in `EAGER_KERNELS`.
"""

from __future__ import annotations

from functools import cache
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch

from poetmodel.torch.graph.operators import EAGER_KERNELS, kernel_of, set_kernel
from poetmodel.torch.graph.tensors import fake_value

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx


def dropout_mask(x: torch.Tensor, p: float) -> torch.Tensor:
    """Draw a boolean mask of the elements that dropout retains, as eager PyTorch does.

    If `p` is 1, no random numbers are drawn. The function has no PyTorch tag as random.
    """
    if p == 1:
        return torch.zeros_like(x, dtype=torch.bool)
    return torch.empty_like(x).bernoulli_(1 - p).to(torch.bool)


def apply_dropout_mask(x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """Return a tensor multiplied by a dropout mask and by 1 / (1 - p), with the bits of eager.

    If `p` is 1, the tensor is multiplied by 0, whatever the mask.
    """
    if p == 1:
        return x.mul(torch.zeros((), dtype=x.dtype, device=x.device))
    return _multiply_noise(mask.to(x.dtype).div_(1 - p), x)


def dropout(
    x: torch.Tensor,
    p: float,
    train: bool | None,  # noqa: FBT001 - the signature is that of PyTorch's operator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor after dropout and the mask of retained elements, with the bits of eager.

    A capture contains the dropout operator of accelerators, which multiplies by the mask, then by
    ``1 / (1 - p)``, and draws even if ``p`` is 1. Eager multiplies once by the product of mask and
    factor, rounded to the tensor's type; so does this function, from the same random numbers. The
    mask is boolean: in single precision, a quarter of the bytes that eager saves.
    """
    if train is False or x.numel() == 0:
        result: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten.native_dropout(x, p, train)
        return result
    mask = dropout_mask(x, p)
    return apply_dropout_mask(x, mask, p), mask


@cache
def _backward_kernel(p: float | None) -> Callable[..., torch.Tensor]:
    """Return a kernel for the backward of dropout, which multiplies as `apply_dropout_mask` does.

    PyTorch's kernel allocates three tensors, this one a single one, in a third of the time. If `p`
    is None, the kernel divides by ``1 / scale``.
    """

    def backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        noise = mask.to(grad.dtype)
        if scale != 0:  # 0 if p is 1, which drops all elements
            noise.div_(1 / scale if p is None else 1 - p)
        return _multiply_noise(noise, grad)

    return backward


def make_in_place_dropout_backward(node: fx.Node) -> Callable[..., torch.Tensor]:
    """Return a kernel for a dropout backward node that overwrites the gradient and returns it.

    It has the bits of `_backward_kernel`: the mask is 0 or 1, so two products round once.
    """
    p = _dropout_probability(node)

    def backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        grad.mul_(mask)
        if scale != 0:
            factor = torch.ones((), dtype=grad.dtype, device=grad.device)
            grad.mul_(factor.div_(1 / scale if p is None else 1 - p))
        return grad

    return backward


def _dropout_probability(node: fx.Node) -> float | None:
    """Return the probability of the mask of a dropout backward; None if no dropout drew it.

    The scale determines the probability only up to a rounding.
    """
    dropout_operator = torch.ops.aten.native_dropout.default
    for mask in node.all_input_nodes:
        for source in mask.all_input_nodes:
            if mask.target is getitem and source.target is dropout_operator:
                probability: Any = source.args[1]
                return float(probability)
    return None


def _multiply_noise(noise: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return ``noise * x``; overwrite the noise if its strides are those of `x`."""
    return noise.mul_(x) if noise.stride() == x.stride() else x * noise


def split_dropout(graph: fx.Graph) -> None:
    """Replace each dropout node by a mask, drawn once, and a product that may be recomputed.

    For `pmt.backend`, which restores no generator state. Backward nodes get kernels of equal bits.
    """
    aten = torch.ops.aten
    # These kernels need the probability, which the dropout nodes have until they are erased below.
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default):
        set_kernel(node, kernel_of(node))
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x, p, train = node.args
        if train is False or fake_value(x).numel() == 0:
            continue
        output_value, mask_value = fake_value(node)
        with graph.inserting_before(node):
            mask = graph.call_function(dropout_mask, (x, p))
            result = graph.call_function(apply_dropout_mask, (x, mask, p))
        for new_node, node_value in ((mask, mask_value), (result, output_value)):
            new_node.meta = dict(node.meta) | {"val": node_value}
        for user in list(node.users):
            user.replace_all_uses_with(result if user.args[1] == 0 else mask)
            graph.erase_node(user)
        graph.erase_node(node)


EAGER_KERNELS[torch.ops.aten.native_dropout.default] = lambda _: dropout
EAGER_KERNELS[torch.ops.aten.native_dropout_backward.default] = lambda node: _backward_kernel(
    _dropout_probability(node)
)
