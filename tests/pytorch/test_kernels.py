"""Kernels in place of PyTorch's give the bits of eager, in less memory."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from poetmodel.torch.kernels import kernel_of  # noqa: E402
from poetmodel.torch.peaks import heap_peak_bytes  # noqa: E402

if TYPE_CHECKING:
    from torch import fx

nn = torch.nn
pytestmark = pytest.mark.torch

aten = torch.ops.aten


def dropout_nodes(p: float) -> tuple[fx.Node, fx.Node]:
    """Return the nodes of dropout and its backward in a graph of the two."""
    graph = torch.fx.Graph()
    x, grad = graph.placeholder("x"), graph.placeholder("grad")
    forward = graph.call_function(aten.native_dropout.default, (x, p, True))
    mask = graph.call_function(operator.getitem, (forward, 1))
    scale = 0.0 if p == 1 else 1 / (1 - p)
    backward = graph.call_function(aten.native_dropout_backward.default, (grad, mask, scale))
    return forward, backward


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return images of another layout in memory."""
    if layout == "channels_last":
        return x.to(memory_format=torch.channels_last)
    if layout == "transposed":
        return x.transpose(2, 3)
    if layout == "sliced":
        return x[:, ::2]
    return x[:1].expand(4, 6, 5, 5) if layout == "expanded" else x


def test_other_operations_are_their_own_kernels() -> None:
    """Whatever needs no other kernel is called as it is."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for target in (aten.mm.default, max):
        assert kernel_of(graph.call_function(target, (x, x))) is target


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "layout", ["contiguous", "channels_last", "transposed", "sliced", "expanded"]
)
@pytest.mark.parametrize("p", [0.15, 0.3, 0.45, 0.5, 1.0])
def test_dropout_is_that_of_eager(p: float, layout: str, dtype: torch.dtype) -> None:
    """Values, types, strides and draws are eager's for every layout, infinities and NaN too."""
    torch.manual_seed(1)
    x = laid_out(torch.randn(4, 6, 5, 5).to(dtype), layout).detach().requires_grad_()
    grad = torch.randn(4, 6, 5, 5).to(dtype)
    grad[0, 0, 0, 0], grad[0, 0, 0, 1], grad[0, 0, 0, 2] = torch.inf, torch.nan, -0.0
    grad = laid_out(grad, layout)
    state = torch.get_rng_state()
    expected = nn.functional.dropout(x, p, training=True)
    (expected_grad,) = torch.autograd.grad(expected, x, grad)
    state_after = torch.get_rng_state()
    torch.set_rng_state(state)
    forward, backward = dropout_nodes(p)
    values, mask = kernel_of(forward)(x.detach(), p, True)
    found_grad = kernel_of(backward)(grad, mask, backward.args[2])
    assert torch.equal(torch.get_rng_state(), state_after)
    assert mask.dtype == torch.bool
    for one, other in ((values, expected), (found_grad, expected_grad)):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
        assert one.stride() == other.stride()
        assert one.dtype == dtype


def test_backward_of_a_mask_from_elsewhere_takes_the_scale() -> None:
    """Where the graph does not say how a mask was drawn, its scale does."""
    graph = torch.fx.Graph()
    grad, mask = graph.placeholder("grad"), graph.placeholder("mask")
    node = graph.call_function(aten.native_dropout_backward.default, (grad, mask, 2.0))
    found = kernel_of(node)(torch.ones(2), torch.tensor([True, False]), 2.0)
    assert found.tolist() == [2.0, 0.0]


def test_dropout_makes_its_results_and_nothing_else() -> None:
    """What is taken beside results is a few numbers, where PyTorch takes another tensor."""
    x = torch.randn(1024)
    forward, backward = dropout_nodes(0.3)
    mask = torch.rand(1024) > 0.3
    assert heap_peak_bytes(lambda: kernel_of(forward)(x, 0.3, True)) < 5 * 1024 + 64
    assert heap_peak_bytes(lambda: kernel_of(backward)(x, mask, 2.0)) < 4096 + 64
    assert heap_peak_bytes(lambda: backward.target(x, mask, 2.0)) >= 2 * 4096
