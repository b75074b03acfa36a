"""Operators that move elements, and new tensors, against PyTorch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kit.kernel_calls import check, lowered, real  # noqa: E402
from poetmodel.torch.errors import CaptureError  # noqa: E402

pytestmark = pytest.mark.torch
aten = torch.ops.aten


@pytest.mark.parametrize("dimension", [0, 1, -1])
def test_pieces_together(dimension: int) -> None:
    """Tensors are put together along a dimension, each as it lies."""
    x, y = real(3, 4), real(4, 3).t()
    check(aten.cat.default, [x, y, x], dimension)
    check(aten.cat.default, [x, torch.zeros(0, dtype=torch.float64), y], dimension)
    check(aten.cat.default, [torch.arange(6).view(2, 3), torch.arange(6).view(2, 3)], dimension)
    check(aten.stack.default, [x, y], dimension)


def test_gradients_of_pieces() -> None:
    """The gradient of a part is 0 elsewhere."""
    check(aten.slice_backward.default, real(3, 2), [3, 6], 1, 1, 5, 2)
    check(aten.slice_backward.default, real(2, 6), [3, 6], 0, 1, 9223372036854775807, 1)
    check(aten.slice_backward.default, real(2, 6), [3, 6], 0, -2, 3, 1)
    check(aten.select_backward.default, real(6), [3, 6], 0, -1)
    check(aten.select_backward.default, real(3), [3, 6], 1, 2)
    check(aten.unfold_backward.default, real(3, 4, 3), [3, 6], 1, 3, 1)
    check(aten.unfold_backward.default, real(2, 6, 2), [5, 6], 0, 2, 3)


def test_parts_replaced() -> None:
    """A part of a copy is replaced."""
    check(aten.slice_scatter.default, real(3, 6), real(3, 2), 1, 1, 5, 2)
    check(aten.slice_scatter.default, real(3, 6), real(1, 6), 0, None, 1)
    check(aten.select_scatter.default, real(3, 6), real(3), 1, -1)


def test_repeats() -> None:
    """A tensor is repeated along its dimensions, and along new ones."""
    check(aten.repeat.default, real(2, 3), [1, 2])
    check(aten.repeat.default, real(3, 2).t(), [2, 3, 2])


def test_orders() -> None:
    """Elements come in another order."""
    x = real(3, 4, 5)
    check(aten.flip.default, x, [1])
    check(aten.flip.default, x.transpose(0, 2), [0, -1])
    check(aten.roll.default, x, [1], [-1])
    check(aten.roll.default, x, [-2, 6], [0, 1])
    check(aten.roll.default, x, [7])
    check(aten.roll.default, x, [5], [2])


@pytest.mark.parametrize("diagonal", [-2, 0, 1, 9])
def test_triangles(diagonal: int) -> None:
    """What is above or below a diagonal becomes 0."""
    for operator in (aten.tril.default, aten.triu.default):
        check(operator, real(3, 5), diagonal)
        check(operator, real(2, 5, 3).transpose(1, 2), diagonal)
        check(operator, torch.ones(4, 4, dtype=torch.bool), diagonal)


def test_new_tensors() -> None:
    """Tensors of one value, and of numbers in a row."""
    x, floats = real(4, 3).t(), {"dtype": torch.float64}
    check(aten.zeros.default, [2, 3], **floats)
    check(aten.zeros.default, [2, 3], dtype=torch.bool)
    check(aten.ones.default, [2, 3], dtype=torch.int64)
    check(aten.full.default, [2, 3], -float("inf"), **floats)
    check(aten.full.default, [2], True, dtype=torch.bool)
    check(aten.zeros_like.default, x)
    check(aten.ones_like.default, x)
    check(aten.full_like.default, x, 2.5)
    check(aten.new_zeros.default, x, [2])
    check(aten.new_ones.default, x, [2])
    check(aten.new_full.default, x, [2], 2.5)
    check(aten.scalar_tensor.default, 2.5, **floats)
    check(aten.fill.Scalar, x, 2.5)
    check(aten.fill.Tensor, x, torch.tensor(2.5, **floats))
    check(aten.arange.default, 7)
    check(aten.arange.start, 2, 7)
    check(aten.arange.start_step, 9, 1, -3)
    check(aten.arange.start_step, 0.5, 3, 0.25, **floats)
    assert not lowered(aten.empty_like.default, x).operation.calls


@pytest.mark.parametrize("shape", [(4,), (2, 3), ()], ids=str)
def test_embedding(shape: tuple[int, ...]) -> None:
    """Rows are read where indices say, and gradients summed there, but not that of the padding."""
    weight = real(5, 6)
    index = torch.tensor([4, 0, 4, 1, 2, 4])[: max(1, torch.Size(shape).numel())].view(shape)
    check(aten.embedding.default, weight, index)
    check(aten.embedding.default, real(6, 5).t(), index)
    gradient = real(*shape, 6)
    check(aten.embedding_dense_backward.default, gradient, index, 5, -1, False)
    check(aten.embedding_dense_backward.default, gradient, index, 5, 4, False)
    with pytest.raises(CaptureError, match="scale_grad_by_freq=True has no kernel"):
        lowered(aten.embedding_dense_backward.default, gradient, index, 5, -1, True)


INDICES: dict[str, list[Any]] = {
    "first": [torch.tensor([2, 0, -1, 2])],
    "second": [None, torch.tensor([[1, 3], [-2, 1]])],
    "last": [None, None, torch.tensor([4, 4, 0])],
    "two": [torch.tensor([2, 0, 2]), torch.tensor([1, -1, 1])],
    "two, broadcast": [None, torch.tensor([[1], [0]]), torch.tensor([1, -1, 1])],
    "two, apart": [torch.tensor([2, 0, 2]), None, torch.tensor([1, -1, 1])],
    "all": [torch.tensor([2, 0]), torch.tensor([1, -1]), torch.tensor(3)],
}


@pytest.mark.parametrize("name", INDICES)
def test_indices(name: str) -> None:
    """Elements are read, written and summed where one or several indices say."""
    for x in (real(3, 4, 5), real(5, 4, 3).permute(2, 1, 0)):
        check(aten.index.Tensor, x, INDICES[name])
        check(aten._unsafe_index.Tensor, x, INDICES[name])
        found = aten.index.Tensor(x, INDICES[name])
        check(aten.index_put.default, x, INDICES[name], real(*found.shape), True)
        check(aten.index_put.default, x, INDICES[name], torch.ones((), dtype=torch.float64))
    check(aten.index.Tensor, torch.arange(60).view(3, 4, 5), INDICES[name])


def test_index_select() -> None:
    """Indices along one dimension."""
    check(aten.index_select.default, real(3, 4), -1, torch.tensor([3, 3, 0]))


def test_masks_as_indices() -> None:
    """Truth values as indices are refused."""
    x = real(3, 4)
    with pytest.raises(CaptureError, match="expected integers as indices"):
        lowered(aten.index.Tensor, x, [x > 0])


@pytest.mark.parametrize("dimension", [0, -1])
def test_gather_and_scatter(dimension: int) -> None:
    """Each element has an index of its own along a dimension."""
    x, index = real(3, 4), torch.tensor([[0, 2, 1], [1, 0, 2]])
    for tensor in (x, real(4, 3).t()):
        check(aten.gather.default, tensor, dimension, index)
        check(aten.scatter.src, tensor, dimension, index, real(2, 3))
        check(aten.scatter.src, tensor, dimension, index, real(5, 4).t())
        check(aten.scatter.value, tensor, dimension, index, 2.5)
        check(aten.scatter_add.default, tensor, dimension, index % 2, real(2, 3))
    check(aten.gather.default, torch.arange(12).view(3, 4), dimension, index)


@pytest.mark.parametrize("padding", [-1, 4])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_bags(mode: int, weighted: bool, padding: int) -> None:
    """Sums, means and maxima of bags of rows, also of none, and the gradient of the table."""
    table, index = real(6, 3), torch.tensor([1, 4, 4, 0, 5, 4, 2, 1, 3])
    weights = real(9) if weighted and mode == 0 else None
    for offsets, last in (([0, 3, 3, 5], False), ([0, 2, 5, 6, 9], True), ([0], False)):
        bags = (index, torch.tensor(offsets))
        options = (False, mode, False, weights, last, padding)
        made = aten._embedding_bag.default(table, *bags, *options)
        found = lowered(aten._embedding_bag.default, table, *bags, *options).execute()
        torch.testing.assert_close(found[0], made[0], rtol=1e-12, atol=1e-12)
        most = found[3] if mode == 2 else made[3]
        trained = table.clone().requires_grad_()
        functional = torch.nn.functional.embedding_bag
        out = functional(
            index, trained, bags[1], mode=("sum", "mean", "max")[mode], per_sample_weights=weights,
            include_last_offset=last, padding_idx=None if padding < 0 else padding,
        )  # fmt: skip
        gradient = real(*out.shape[::-1]).t()
        out.backward(gradient)
        arguments = (gradient, *bags, made[1], made[2], most.long(), 6, *options[:4], padding)
        graph = lowered(aten._embedding_bag_backward.default, *arguments)
        torch.testing.assert_close(graph.execute()[0], trained.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "place"), [("scale_grad_by_freq", 0), ("sparse", 2)])
def test_bags_with_options_of_the_gradient_are_refused(name: str, place: int) -> None:
    """The sentence names the option."""
    options: list[Any] = [False, 0, False, None, False, -1]
    options[place] = True
    bags = (torch.tensor([1, 2]), torch.tensor([0]))
    with pytest.raises(CaptureError, match=f"{name}=True has no kernel; leave it out"):
        lowered(aten._embedding_bag.default, real(6, 3), *bags, *options)
