"""Sums over dimensions, and what works on whole rows, against PyTorch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kit.kernel_calls import check, lowered, real  # noqa: E402
from poetmodel.torch.errors import CaptureError  # noqa: E402

pytestmark = pytest.mark.torch
aten = torch.ops.aten
INFINITY = float("inf")


DIMENSIONS = [[0], [1], [-1], [0, 2], [2, 1], [0, 1, 2]]
REDUCTIONS = {
    "sum": aten.sum.dim_IntList,
    "mean": aten.mean.dim,
    "amax": aten.amax.default,
    "amin": aten.amin.default,
    "logsumexp": aten.logsumexp.default,
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dimensions", DIMENSIONS, ids=str)
@pytest.mark.parametrize("kept", [False, True])
def test_reductions(name: str, dimensions: list[int], *, kept: bool) -> None:
    """Some dimensions become one element, of tensors in order, permuted, and with gaps."""
    x = real(3, 4, 5)
    check(REDUCTIONS[name], x, dimensions, kept)
    check(REDUCTIONS[name], x.permute(2, 0, 1), dimensions, kept)
    check(REDUCTIONS[name], x[:, 1:, ::2], dimensions, kept)


@pytest.mark.parametrize("name", ["sum", "mean", "prod", "max", "min", "any", "all"])
def test_all_elements(name: str) -> None:
    """All elements become one; a tensor without dimensions has one."""
    operator = getattr(aten, name).default
    for x in (real(3, 4), real(4, 3).t(), real()):
        given = x > 0 if name in ("any", "all") else x
        check(operator, given)
        if name in ("any", "all"):
            check(operator, given | True)
            check(operator, given & False)


@pytest.mark.parametrize("name", ["var", "std"])
@pytest.mark.parametrize("correction", [None, 0, 1, 2])
def test_variance(name: str, correction: int | None) -> None:
    """Variance and deviation with each correction."""
    operator = getattr(aten, name).correction
    x = real(3, 4, 5) + 1000
    check(operator, x, [1], correction=correction)
    check(operator, x, [0, 2], correction=correction, keepdim=True)
    check(operator, x.transpose(0, 1), correction=correction)


def test_variance_and_mean() -> None:
    """Both at once."""
    check(aten.var_mean.correction, real(3, 4, 5), [0, 2], correction=0, keepdim=True)


@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
def test_positions(name: str) -> None:
    """The position of an extreme is that of the first of several, or of what is no number."""
    x = torch.tensor([[1.0, 3.0, 3.0], [-1.0, -1.0, 2.0]], dtype=torch.float64)
    nan = torch.tensor([1.0, float("nan"), 7.0, float("nan")], dtype=torch.float64)
    operator = getattr(aten, name).dim if name in ("max", "min") else getattr(aten, name).default
    for tensor in (x, x.t(), real(4, 6)[:, ::2]):
        check(operator, tensor, 1)
        check(operator, tensor, 0, True)
        if name in ("argmax", "argmin"):
            check(operator, tensor)
    check(operator, nan, 0)


def test_norms() -> None:
    """Norms of any order above 0; others are refused."""
    check(aten.linalg_vector_norm.default, real(3, 4), 2, [1], True)
    check(aten.linalg_vector_norm.default, real(3, 4))
    check(aten.norm.Scalar, real(3, 4))
    for order in (1, 0.5, 3, float("inf")):
        check(aten.linalg_vector_norm.default, real(3, 4).t(), order, [1])
        check(aten.norm.ScalarOpt_dim, real(3, 4, 2), order, [2, 0], True)
    for order in (0, -1):
        with pytest.raises(CaptureError, match=rf"norm of an order above 0, got {order}"):
            lowered(aten.linalg_vector_norm.default, real(3, 4), order, [1])


def test_norms_of_what_is_no_number() -> None:
    """The largest of numbers that have a NaN among them is NaN."""
    x = torch.tensor([[1.0, float("nan"), -3.0], [1.0, -2.0, 0.5]], dtype=torch.float64)
    check(aten.linalg_vector_norm.default, x, float("inf"), [1])


@pytest.mark.parametrize("order", [1.0, 2.0])
def test_distances_of_all_pairs(order: float) -> None:
    """Distances and their gradients, of batches too and of tensors that do not lie in order."""
    for x, y in (
        (real(4, 3), real(3, 5).t()),
        (real(2, 4, 3), -real(2, 5, 3)),
        (real(4, 3), torch.cat((real(4, 3)[1:], 2 * real(1, 3)))),  # some are 0
    ):
        check(aten._cdist_forward.default, x, y, order, None)
        distances = torch.cdist(x, y, order)
        gradient = real(*distances.shape)
        check(aten._cdist_backward.default, gradient, x, y, order, distances)


def test_other_distances_are_refused() -> None:
    """The sentence says which there are."""
    with pytest.raises(CaptureError, match="distances of order 1 or 2, got 3"):
        lowered(aten._cdist_forward.default, real(4, 3), real(5, 3), 3.0, None)
    with pytest.raises(CaptureError, match=r"as many batches .* got \[2\] and \[1\]"):
        lowered(aten._cdist_forward.default, real(2, 4, 3), real(1, 5, 3), 2.0, None)


def test_products_and_truth_values() -> None:
    """Products, and whether any or all hold, along a dimension."""
    check(aten.prod.dim_int, real(3, 4), 1)
    x = real(3, 4) > 0
    for operator in (aten.any, aten.all):
        check(operator.dim, x, 1)
        check(operator.dims, x, [0, 1], True)


def test_sums_of_integers() -> None:
    """Integers and truth values are counted."""
    check(aten.sum.default, torch.arange(12).view(3, 4).t())
    check(aten.sum.dim_IntList, real(3, 4) > 0, [1])
    check(aten.sum.dim_IntList, real(3, 4) > 0, [1], dtype=torch.float64)


def test_long_sums_lose_nothing() -> None:
    """A long sum is as good as a short one."""
    x = torch.cat([torch.full((1,), 1e8, dtype=torch.float64), torch.full((100_000,), 1e-9)])
    found = lowered(aten.sum.default, x).execute()[0]
    assert abs(found.item() - 1e8 - 1e-4) <= 2e-8


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4, 5), ()])
def test_softmax(shape: tuple[int, ...]) -> None:
    """Softmax, its logarithm, and their gradients, along each dimension."""
    x, gradient = 5 * real(*shape), real(*shape) + 0.5
    for dimension in range(-1, len(shape)):
        for name in ("_softmax", "_log_softmax"):
            forward = getattr(aten, name).default
            backward = getattr(aten, f"{name}_backward_data").default
            check(forward, x, dimension, False)
            check(forward, x.transpose(0, -1) if shape else x, dimension, False)
            y = forward(x, dimension, False)
            assert check(backward, gradient, y, dimension, torch.float64).elementwise
            if len(shape) == 2:
                check(backward, real(4, 3).t(), y, dimension, torch.float64)


def test_softmax_of_masked_rows() -> None:
    """The safe softmax of a row of -infinity is 0; the other has no number."""
    x = torch.tensor([[-INFINITY] * 3, [1.0, -INFINITY, 2.0]], dtype=torch.float64)
    check(aten._safe_softmax.default, x, -1)
    check(aten._softmax.default, x, -1, False)
    check(aten._softmax.default, torch.full((1, 2), 1000.0, dtype=torch.float64), -1, False)


def test_cumulative_sums() -> None:
    """Running sums along a dimension."""
    check(aten.cumsum.default, real(3, 4), 0)
    check(aten.cumsum.default, real(4, 3).t(), -1)
