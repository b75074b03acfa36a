"""Operators that move elements, reduce rows or make new tensors, against PyTorch."""

import re
from itertools import product

import pytest
import torch

from kit.kernel_calls import (
    KERNELS,
    WARNINGS,
    check,
    check_call,
    include_options,
    lower_operation,
    parse_parameters,
    random_reals,
)
from kit.programs import require_programs, run_command
from kit.rotation import mark_seeds_except
from poetmodel.torch.errors import CaptureError

aten = torch.ops.aten
INFINITY = float("inf")


INDICES = {
    "first": [torch.tensor([2, 0, -1, 2])],
    "second": [None, torch.tensor([[1, 3], [-2, 1]])],
    "last": [None, None, torch.tensor([4, 4, 0])],
    "two": [torch.tensor([2, 0, 2]), torch.tensor([1, -1, 1])],
    "two, broadcast": [None, torch.tensor([[1], [0]]), torch.tensor([1, -1, 1])],
    "two, apart": [torch.tensor([2, 0, 2]), None, torch.tensor([1, -1, 1])],
    "all": [torch.tensor([2, 0]), torch.tensor([1, -1]), torch.tensor(3)],
}


@pytest.mark.parametrize("name", INDICES)
def test_indices(name):
    """Elements at one or several indices are read, written and summed."""
    for x in (random_reals(3, 4, 5), random_reals(5, 4, 3).permute(2, 1, 0)):
        check(aten.index.Tensor, x, INDICES[name])
        check(aten._unsafe_index.Tensor, x, INDICES[name])
        found = aten.index.Tensor(x, INDICES[name])
        check(aten.index_put.default, x, INDICES[name], random_reals(*found.shape), True)
        check(aten.index_put.default, x, INDICES[name], torch.ones((), dtype=torch.float64))
    check(aten.index.Tensor, torch.arange(60).view(3, 4, 5), INDICES[name])


@pytest.mark.parametrize("padding", [-1, 4])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_bags(mode, weighted, padding):
    """Sums, means and maxima of bags of rows, also of none, and the gradient of the table."""
    index = torch.tensor([1, 4, 4, 0, 5, 4, 2, 1, 3])
    weights = random_reals(9) if weighted and mode == 0 else None
    for offsets, last, columns in (
        ([0, 3, 3, 5], False, 3), ([0, 2, 5, 6, 9], True, 3), ([0], False, 3), ([0, 4], False, 20)
    ):  # fmt: skip
        table, bags = random_reals(6, columns), (index, torch.tensor(offsets))
        options = (False, mode, False, weights, last, padding)
        made = aten._embedding_bag.default(table, *bags, *options)
        found = lower_operation(aten._embedding_bag.default, table, *bags, *options).execute()
        torch.testing.assert_close(found[0], made[0], rtol=1e-12, atol=1e-12)
        most = found[3] if mode == 2 else made[3]
        trained = table.clone().requires_grad_()
        functional = torch.nn.functional.embedding_bag
        out = functional(
            index, trained, bags[1], mode=("sum", "mean", "max")[mode], per_sample_weights=weights,
            include_last_offset=last, padding_idx=None if padding < 0 else padding,
        )  # fmt: skip
        lies_in_order = last or columns > 3
        gradient = random_reals(*(out.shape if lies_in_order else out.shape[::-1]))
        gradient = gradient if lies_in_order else gradient.t()
        out.backward(gradient)
        arguments = (gradient, *bags, made[1], made[2], most.long(), 6, *options[:4], padding)
        graph = lower_operation(aten._embedding_bag_backward.default, *arguments)
        torch.testing.assert_close(graph.execute()[0], trained.grad, rtol=1e-12, atol=1e-12)


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
def test_reductions(name, dimensions, *, kept):
    """Some dimensions become one element, of tensors in order, permuted, and with gaps."""
    x = random_reals(3, 4, 5)
    check(REDUCTIONS[name], x, dimensions, kept)
    check(REDUCTIONS[name], x.permute(2, 0, 1), dimensions, kept)
    check(REDUCTIONS[name], x[:, 1:, ::2], dimensions, kept)


@pytest.mark.parametrize("name", ["sum", "mean", "prod", "max", "min", "any", "all"])
def test_all_elements(name):
    """All elements become one; a tensor without dimensions has one."""
    operator = getattr(aten, name).default
    for x in (random_reals(3, 4), random_reals(4, 3).t(), random_reals()):
        given = x > 0 if name in ("any", "all") else x
        check(operator, given)
        if name in ("any", "all"):
            check(operator, given | True)
            check(operator, given & False)


@pytest.mark.parametrize("order", [1.0, 2.0])
def test_distances_of_all_pairs(order):
    """Distances and their gradients, of batches too and of tensors that do not lie in order."""
    for x, y in (
        (random_reals(4, 3), random_reals(3, 5).t()),
        (random_reals(2, 4, 3), -random_reals(2, 5, 3)),
        (random_reals(7, 20), -random_reals(9, 20)),
        (
            random_reals(4, 3),
            torch.cat((random_reals(4, 3)[1:], 2 * random_reals(1, 3))),
        ),  # some are 0
    ):
        check(aten._cdist_forward.default, x, y, order, None)
        distances = torch.cdist(x, y, order)
        gradient = random_reals(*distances.shape)
        check(aten._cdist_backward.default, gradient, x, y, order, distances)


def test_long_sums_lose_nothing():
    """A long sum is as good as a short one."""
    x = torch.cat([torch.full((1,), 1e8, dtype=torch.float64), torch.full((100_000,), 1e-9)])
    found = lower_operation(aten.sum.default, x).execute()[0]
    assert abs(found.item() - 1e8 - 1e-4) <= 2e-8


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 4, 5), ()])
def test_softmax(shape):
    """Softmax, its logarithm, and their gradients, along each dimension."""
    x, gradient = 5 * random_reals(*shape), random_reals(*shape) + 0.5
    for dimension in range(-1, len(shape)):
        for name in ("_softmax", "_log_softmax"):
            forward = getattr(aten, name).default
            backward = getattr(aten, f"{name}_backward_data").default
            check(forward, x, dimension, False)
            check(forward, x.transpose(0, -1) if shape else x, dimension, False)
            y = forward(x, dimension, False)
            assert check(backward, gradient, y, dimension, torch.float64).can_overwrite_operand
            if len(shape) == 2:
                check(backward, random_reals(4, 3).t(), y, dimension, torch.float64)


WIDE = (random_reals(9, 40), random_reals(40, 9).t().contiguous().t(), random_reals(2, 40, 9))
X, DEEP, FLOATS = random_reals(4, 3).t(), random_reals(3, 4, 5), {"dtype": torch.float64}
NOT_ALL_NUMBERS = torch.tensor([[1.0, float("nan"), -3.0], [1.0, -2.0, 0.5]], **FLOATS)
MASKED_ROW = torch.tensor([[-INFINITY] * 3, [1.0, -INFINITY, 2.0]], **FLOATS)
WORDS = [torch.tensor(i) for i in ([4, 0, 4, 1], [[4, 0, 4], [1, 2, 4]], 4)]
EACH = torch.tensor([[0, 2, 1], [1, 0, 2]])
EQUAL = torch.tensor([[1.0, 3.0, 3.0], [-1.0, -1.0, 2.0]], **FLOATS)
NANS = torch.tensor([1.0, float("nan"), 7.0, float("nan")], **FLOATS)
PIECES = (
    [random_reals(3, 4), random_reals(4, 3).t(), random_reals(3, 4)],
    [random_reals(3, 4), torch.zeros(0, **FLOATS), random_reals(4, 3).t()],
    [torch.arange(6).view(2, 3), torch.arange(6).view(2, 3)],
)
PLANES = (
    random_reals(3, 5),
    random_reals(2, 5, 3).transpose(1, 2),
    torch.ones(4, 4, dtype=torch.bool),
)
CALLS = [
    # gradients of parts, and parts of copies replaced
    (aten.slice_backward.default, random_reals(3, 2), [3, 6], 1, 1, 5, 2),
    (aten.slice_backward.default, random_reals(2, 6), [3, 6], 0, 1, 9223372036854775807, 1),
    (aten.slice_backward.default, random_reals(2, 6), [3, 6], 0, -2, 3, 1),
    (aten.select_backward.default, random_reals(6), [3, 6], 0, -1),
    (aten.select_backward.default, random_reals(3), [3, 6], 1, 2),
    (aten.slice_scatter.default, random_reals(3, 6), random_reals(3, 2), 1, 1, 5, 2),
    (aten.slice_scatter.default, random_reals(3, 6), random_reals(1, 6), 0, None, 1),
    (aten.select_scatter.default, random_reals(3, 6), random_reals(3), 1, -1),
    *((aten.cat.default, pieces, d) for pieces in PIECES for d in (0, 1, -1)),
    *((aten.stack.default, [random_reals(3, 4), random_reals(4, 3).t()], d) for d in (0, 1, -1)),
    *((o.default, x, d) for o in (aten.tril, aten.triu) for x in PLANES for d in (-2, 0, 1, 9)),
    # rows that indices say, and their gradients, but not that of the padding
    *(
        (aten.embedding.default, w, i)
        for w in (random_reals(5, 6), random_reals(6, 5).t())
        for i in WORDS
    ),
    *(
        (aten.embedding_dense_backward.default, random_reals(*i.shape, 6), i, 5, padding, False)
        for i in WORDS
        for padding in (-1, 4)
    ),
    # each element has an index of its own along a dimension
    *(
        (operator, x, d, EACH, *more)
        for d in (0, -1)
        for x in (random_reals(3, 4), random_reals(4, 3).t())
        for operator, *more in (
            (aten.gather.default,),
            (aten.scatter.src, random_reals(2, 3)),
            (aten.scatter.src, random_reals(5, 4).t()),
            (aten.scatter.value, 2.5),
        )
    ),
    *(
        (aten.scatter_add.default, random_reals(3, 4), d, EACH % 2, random_reals(2, 3))
        for d in (0, -1)
    ),
    *(
        (aten.scatter_add.default, random_reals(4, 3).t(), d, EACH % 2, random_reals(2, 3))
        for d in (0, -1)
    ),
    *((aten.gather.default, torch.arange(12).view(3, 4), d, EACH) for d in (0, -1)),
    # a tensor without dimensions counts as one of size 1
    *(
        (operator, torch.tensor(3.0, **FLOATS), 0, torch.zeros(size, dtype=torch.int64), *more)
        for size in ((), (1,), (3,))
        for operator, more in (
            (aten.gather.default, ()),
            (aten.scatter.src, (random_reals(*size),)),
            (aten.scatter.value, (2.5,)),
            (aten.scatter_add.default, (random_reals(*size),)),
        )
    ),
    # the position of an extreme is that of the first of several, or of what is no number
    *(
        (operator, x, *dimension)
        for operator in (aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default)
        for x in (EQUAL, EQUAL.t(), random_reals(4, 6)[:, ::2])
        for dimension in ((1,), (0, True))
    ),
    *((o.default, x) for o in (aten.argmax, aten.argmin) for x in (EQUAL, EQUAL.t())),
    *((o, NANS, 0) for o in (aten.max.dim, aten.min.dim)),
    *((o.default, NANS, 0) for o in (aten.argmax, aten.argmin)),
    # repeated, in another order, chosen by indices
    (aten.repeat.default, random_reals(2, 3), [1, 2]),
    (aten.repeat.default, random_reals(3, 2).t(), [2, 3, 2]),
    (aten.flip.default, DEEP, [1]),
    (aten.flip.default, DEEP.transpose(0, 2), [0, -1]),
    (aten.roll.default, DEEP, [1], [-1]),
    (aten.roll.default, DEEP, [-2, 6], [0, 1]),
    (aten.roll.default, DEEP, [7]),
    (aten.roll.default, DEEP, [5], [2]),
    (aten.index_select.default, random_reals(3, 4), -1, torch.tensor([3, 3, 0])),
    # new tensors
    (aten.zeros.default, [2, 3], FLOATS),
    (aten.zeros.default, [2, 3], {"dtype": torch.bool}),
    (aten.ones.default, [2, 3], {"dtype": torch.int64}),
    (aten.full.default, [2, 3], -INFINITY, FLOATS),
    (aten.full.default, [2], True, {"dtype": torch.bool}),
    (aten.zeros_like.default, X),
    (aten.ones_like.default, X),
    (aten.full_like.default, X, 2.5),
    (aten.new_zeros.default, X, [2]),
    (aten.new_ones.default, X, [2]),
    (aten.new_full.default, X, [2], 2.5),
    (aten.scalar_tensor.default, 2.5, FLOATS),
    (aten.fill.Scalar, X, 2.5),
    (aten.fill.Tensor, X, torch.tensor(2.5, **FLOATS)),
    (aten.arange.default, 7),
    (aten.arange.start, 2, 7),
    (aten.arange.start_step, 9, 1, -3),
    (aten.arange.start_step, 0.5, 3, 0.25, FLOATS),
    # rows made one
    (aten.var_mean.correction, DEEP, [0, 2], {"correction": 0, "keepdim": True}),
    (aten.linalg_vector_norm.default, NOT_ALL_NUMBERS, INFINITY, [1]),
    (aten.linalg_vector_norm.default, random_reals(3, 4), 2, [1], True),
    (aten.linalg_vector_norm.default, random_reals(3, 4)),
    (aten.norm.Scalar, random_reals(3, 4)),
    *((aten.linalg_vector_norm.default, X, order, [1]) for order in (1, 0.5, 3, INFINITY)),
    *(
        (aten.norm.ScalarOpt_dim, random_reals(3, 4, 2), o, [2, 0], True)
        for o in (1, 0.5, 3, INFINITY)
    ),
    *(
        (operator.correction, *operands, {"correction": correction, **keywords})
        for operator in (aten.var, aten.std)
        for correction in (None, 0, 1, 2)
        for *operands, keywords in (
            (DEEP + 1000, [1], {}),
            (DEEP + 1000, [0, 2], {"keepdim": True}),
            ((DEEP + 1000).transpose(0, 1), {}),
        )
    ),
    (aten.prod.dim_int, random_reals(3, 4), 1),
    # larger ones, by which kernels are measured
    *(
        (operator, *operands)
        for x in WIDE
        for operator, *operands in (
            (aten.any.dim, x > 0, 1),
            (aten.argmax.default, x, 1),
            (aten.prod.dim_int, x, 1),
            (aten.linalg_vector_norm.default, x, 3, [1]),
            (aten.tril.default, x > 0, 1),
        )
    ),
    (aten.zeros.default, [9, 40], {"dtype": torch.bool}),
    (aten.arange.start_step, 0.0, 30.0, 0.25, FLOATS),
    (aten.index.Tensor, WIDE[0], [torch.arange(70) % 9, torch.arange(70) % 40]),
    *((operator.dim, random_reals(3, 4) > 0, 1) for operator in (aten.any, aten.all)),
    *((operator.dims, random_reals(3, 4) > 0, [0, 1], True) for operator in (aten.any, aten.all)),
    (aten.sum.default, torch.arange(12).view(3, 4).t()),
    (aten.sum.dim_IntList, random_reals(3, 4) > 0, [1]),
    (aten.sum.dim_IntList, random_reals(3, 4) > 0, [1], FLOATS),
    (aten.cumsum.default, random_reals(3, 4), 0),
    (aten.cumsum.default, random_reals(4, 3).t(), -1),
    # the safe softmax of a row of -infinity is 0; the other has no number
    (aten._safe_softmax.default, MASKED_ROW, -1),
    (aten._softmax.default, MASKED_ROW, -1, False),
    (aten._softmax.default, torch.full((1, 2), 1000.0, **FLOATS), -1, False),
]


@pytest.mark.parametrize("operation", CALLS, ids=lambda operation: str(operation[0]))
def test_calls(operation):
    """Operators whose arguments are few."""
    check_call(operation)


def test_empty_tensors():
    """An empty tensor needs no call."""
    assert not lower_operation(aten.empty_like.default, X).operation.calls


# -- how kernels are written, and what has none ----------------------------------------------------
SOURCE_FILES = sorted(KERNELS.glob("*.c"))
BOARD = ("-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "level"),
    mark_seeds_except(
        product(("cc", "arm-none-eabi-gcc"), ("-O0", "-Og", "-Os", "-O2", "-O3")),
        {("arm-none-eabi-gcc", "-O2")},
    ),
)
def test_kernels_build_without_warnings(compiler, level, tmp_path):
    """In float, no kernel has double arithmetic or anything else that a compiler warns of."""
    require_programs(compiler)
    board = BOARD if compiler.startswith("arm") else ()
    flags = [*board, *WARNINGS, "-std=c11", level]
    run_command([compiler, *flags, "-c", *include_options(), *SOURCE_FILES], tmp_path)


@pytest.mark.parametrize("path", SOURCE_FILES, ids=lambda path: path.stem)
def test_kernels_are_written_as_the_exporter_reads_them(path):
    """A file has one function that is called: results are first, then inputs, then numbers.

    One without results returns a value.
    """
    kinds = [
        0 if re.match(r"(pm_real|int32_t|u?int8_t) \*", p) else 1 if "*" in p else 2
        for p in parse_parameters(path.stem)
    ]
    assert kinds == sorted(kinds), parse_parameters(path.stem)
    assert 0 in kinds or f"\nint {path.stem}(" in path.read_text()


NUMBERS, BYTES = torch.arange(6).view(2, 3), torch.tensor([0, 7, 255], dtype=torch.uint8)
TRUTH, X, IMAGE = torch.tensor([[True], [False]]), random_reals(3, 4), random_reals(1, 2, 3, 2)
INDEX, BAG = torch.tensor([4, 0, 1]), (random_reals(6, 3), torch.tensor([1, 2]), torch.tensor([0]))
REFUSED = [
    ("real numbers, got integers", aten.abs.default, NUMBERS),
    ("real numbers, got integers", aten.relu.default, NUMBERS),
    ("real numbers, got integers", aten.maximum.default, NUMBERS, NUMBERS),
    ("real numbers, got integers", aten.pow.Tensor_Scalar, NUMBERS, 2),
    ("real numbers, got integers", aten.amax.default, NUMBERS, [1]),
    ("real numbers, got integers", aten.max.dim, NUMBERS, 1),
    ("real numbers, got integers", aten.prod.default, NUMBERS),
    ("real numbers, got integers", aten.scatter.src, NUMBERS, 1, NUMBERS * 0, NUMBERS),
    ("real numbers, got truth values", aten.mul.Tensor, TRUTH, TRUTH),
    ("real numbers, got truth values", aten.add.Tensor, TRUTH, TRUTH),
    ("expected truth values", aten.bitwise_and.Tensor, BYTES, BYTES),
    ("expected truth values", aten.bitwise_not.default, BYTES),
    ("integers as indices", aten.index.Tensor, X, [X > 0]),
    (r"aten\.convolution.*one or two spatial dimensions, got 3", aten.convolution.default,
     random_reals(1, 2, 4, 4, 4), random_reals(3, 2, 2, 2, 2), None, *([k] * 3 for k in (1, 0, 1)),
     False, [0] * 3, 1),
    ("order above 0, got 0", aten.linalg_vector_norm.default, X, 0, [1]),
    ("order above 0, got -1", aten.linalg_vector_norm.default, X, -1, [1]),
    ("order 1 or 2, got 3", aten._cdist_forward.default,
     random_reals(4, 3), random_reals(5, 3), 3.0, None),
    (r"equal batch dimensions, got \[2\] and \[1\]", aten._cdist_forward.default,
     random_reals(2, 4, 3), random_reals(1, 5, 3), 2.0, None),
    ("scale_grad_by_freq=True", aten.embedding_dense_backward.default,
     random_reals(3, 6), INDEX, 5, -1, True),
    ("scale_grad_by_freq=True", aten._embedding_bag.default,
     *BAG, True, 0, False, None, False, -1),
    ("sparse=True", aten._embedding_bag.default, *BAG, False, 0, True, None, False, -1),
    # where all of a window lies in the padding, no element has the gradient of its maximum
    ("contains only padding", aten.max_pool2d_with_indices.default,
     IMAGE, [1, 2], [1, 1], [0, 1], [1, 3]),
    ("contains only padding", aten.max_pool2d_with_indices.default,
     IMAGE, [2, 1], [1, 1], [1, 0], [4, 1]),
    # the running variance of one value is not defined
    ("_native_batch_norm_legit.*more than one value",
     aten._native_batch_norm_legit_functional.default,
     random_reals(1, 4, 1, 1), None, None, random_reals(4), random_reals(4).abs(), True, 0.1, 1e-5),
]  # fmt: skip


@pytest.mark.parametrize("given", REFUSED, ids=lambda given: f"{given[1]}, {given[0]}")
def test_what_has_no_kernel_is_refused(given):
    """A kernel of other types would not compile, or would compute something else."""
    words, operator, *operands = given
    with pytest.raises(CaptureError, match=words):
        lower_operation(operator, *operands)
