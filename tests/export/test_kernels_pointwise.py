"""Kernels that compute element by element against PyTorch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import booleans, data, integers, lists, permutations

from kit.elementwise_calls import ABOVE_ZERO, UNARY
from kit.kernel_calls import check, check_call, lower_operation
from poetmodel.torch.errors import CaptureError

aten = torch.ops.aten

EDGES = (-6.0, -3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0, 25.0, -40.0)
"""Where activations have their corners, and beyond where exponentials matter."""


def real(*shape):
    """Return random numbers, some of them at corners of activations."""
    generator = torch.Generator().manual_seed(sum(shape))
    found = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    edges = torch.tensor(EDGES, dtype=torch.float64)[: found.numel()]
    found.view(-1)[: len(edges)] = edges
    return found


def positive(*shape):
    """Return random numbers above 0."""
    return real(*shape).abs() + 0.1


SMOOTH = ("sigmoid", "tanh", "silu", "mish", "gelu", "hardswish", "hardsigmoid")
BACKWARD = {name: (getattr(aten, f"{name}_backward").default,) for name in SMOOTH} | {
    "gelu by tanh": (aten.gelu_backward.default, {"approximate": "tanh"}),
    "threshold": (aten.threshold_backward.default, 0.0),
    "hardtanh": (aten.hardtanh_backward.default, -0.5, 3.0),
    "leaky relu": (aten.leaky_relu_backward.default, 0.2, False),
    "softplus": (aten.softplus_backward.default, 1.5, 8.0),
    "hardshrink": (aten.hardshrink_backward.default, 0.5),
    "softshrink": (aten.softshrink_backward.default, 0.5),
}
COMPARISONS = ("lt", "le", "eq", "ne", "ge", "gt")
BINARY = {
    **{name: getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div", *COMPARISONS)},
    **{name: getattr(aten, name).default for name in ("maximum", "minimum")},
}


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    """An operator of one tensor, in order, transposed, and with gaps."""
    x = real(4, 5, 6)
    assert check_call(UNARY[name], x).can_overwrite_operand
    check_call(UNARY[name], x.transpose(0, 2))
    check_call(UNARY[name], x[:, ::2, 1:4])


@pytest.mark.parametrize("name", ABOVE_ZERO)
def test_unary_above_zero(name):
    """An operator of one tensor that is above 0."""
    check_call(ABOVE_ZERO[name], positive(4, 5))
    check_call(ABOVE_ZERO[name], positive(4, 5)[:, 2])


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name):
    """The gradient of an activation; gradient and activation lie alike, and otherwise."""
    x, gradient = real(5, 6), torch.randn(5, 6, dtype=torch.float64)
    assert check_call(BACKWARD[name], gradient, x).can_overwrite_operand
    check_call(BACKWARD[name], torch.randn(6, 5, dtype=torch.float64).t(), x)
    check_call(BACKWARD[name], torch.ones((), dtype=torch.float64).expand(5, 6), x)


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize(
    "shapes",
    [
        ((3, 4), (3, 4)),
        ((3, 4), (4,)),
        ((3, 1), (1, 4)),
        ((), (2, 3)),
        ((2, 1, 3, 1, 2), (5, 1, 4, 2)),
        ((1,), (1,)),
    ],
)
def test_binary(name, shapes):
    """An operator of two tensors that are broadcast; some of their elements are the same."""
    x, y = (real(*shape) for shape in shapes)
    check(BINARY[name], x, y)


@settings(max_examples=50)
@given(data())
def test_any_layout(draw):
    """Sums of tensors that are permuted, cut, turned around or repeated in any way."""
    shape = draw.draw(lists(integers(1, 4), min_size=0, max_size=4))

    def operand():
        sizes = [1 if draw.draw(booleans()) else size for size in shape]
        order = draw.draw(permutations(range(len(shape))))
        steps = [draw.draw(integers(1, 2)) for _ in shape]
        whole = real(*(sizes[k] * steps[k] for k in order))
        cut = whole[tuple(slice(None, None, steps[k]) for k in order)]
        return cut.permute([order.index(k) for k in range(len(shape))])

    x, y = operand(), operand()
    assert check(aten.add.Tensor, x, y.expand(shape), alpha=0.5).can_overwrite_operand
    check(aten.clone.default, x.expand(shape), memory_format=torch.contiguous_format)


def test_many_dimensions():
    """Six dimensions that lie apart are the most; dimensions that lie together count once."""
    x = real(2, 3, 2, 3, 2, 3, 2)
    check(
        aten.clone.default, x.permute(6, 0, 1, 4, 5, 2, 3).contiguous().permute(0, 2, 1, 3, 5, 4, 6)
    )
    with pytest.raises(CaptureError, match="at most 6 dimensions that cannot be merged, got 7"):
        lower_operation(
            aten.clone.default,
            x.permute(6, 4, 2, 0, 5, 3, 1),
            memory_format=torch.contiguous_format,
        )


def test_log_sigmoid():
    """The log of a sigmoid, and its gradient; the value that PyTorch saves for it is not needed."""
    x, gradient = real(3, 5), torch.randn(3, 5, dtype=torch.float64)
    found = lower_operation(aten.log_sigmoid_forward.default, x).execute()[0]
    torch.testing.assert_close(found, torch.nn.functional.logsigmoid(x), rtol=1e-12, atol=1e-12)
    check(aten.log_sigmoid_backward.default, gradient, x, torch.exp(-x.abs()))


@pytest.mark.parametrize(
    "name", ["relu", "clamp", "threshold", "maximum", "minimum", "ne", "eq", "sgn"]
)
def test_nan(name):
    """NaN stays NaN, and is unequal to all numbers."""
    x = torch.tensor([float("nan"), 1.0, -1.0, float("inf"), -float("inf")], dtype=torch.float64)
    if name in BINARY:
        check(BINARY[name], x, x.flip(0))
        check(BINARY[name], x, x)
    elif name != "sgn":
        check_call(UNARY[name], x)
    check(aten.isnan.default, x)


def test_bytes_are_not_taken_for_truth_values():
    """Numbers become truth values, and no bytes; those that are there may be read and copied."""
    bytes_ = torch.tensor([0, 1, 7, 255], dtype=torch.uint8)
    for numbers in (real(4), torch.arange(4)):
        with pytest.raises(CaptureError, match="converts numbers to bytes"):
            lower_operation(aten._to_copy.default, numbers, dtype=torch.uint8)
    check(aten._to_copy.default, bytes_, dtype=torch.int64)
    check(aten.mul.Tensor, bytes_, real(4))
    check(aten.clone.default, bytes_)
    check(aten._to_copy.default, bytes_ > 1, dtype=torch.uint8)


X, ROW, COLUMN = real(3, 4), real(4), positive(3, 1)
MANY = torch.arange(120).view(4, 30)
NUMBERS, FEW = torch.arange(6).view(2, 3), torch.tensor([3, -1, 2])
TRUTH, OTHER = torch.tensor([[True], [False]]), torch.tensor([True, False, True])
GRADIENT, MASK, NOUGHTS = real(3, 4) + 1, real(3, 1) > 0, 0 * real(2)
SLOPED, PERMUTED = (real(2, 3, 4), real(1, 3, 1)), real(2, 3, 4).permute(2, 0, 1)
CALLS = [
    (aten.add.Tensor, X, ROW, {"alpha": -0.3}),
    (aten.sub.Tensor, X, ROW, {"alpha": 0.3}),
    (aten.addcmul.default, X, ROW, COLUMN, {"value": 0.3}),
    (aten.addcdiv.default, X, ROW, COLUMN, {"value": 0.3}),
    (aten.lerp.Scalar, X, ROW, 0.3),
    (aten.lerp.Scalar, X, ROW, 0.8),
    (aten.lerp.Tensor, X, ROW, COLUMN / COLUMN.max()),
    (aten.elu_backward.default, GRADIENT, 0.7, 1.05, 0.9, False, X),
    (aten.elu_backward.default, GRADIENT, 0.7, 1.05, 0.9, True, X),
    (aten._prelu_kernel.default, *SLOPED),
    (aten._prelu_kernel_backward.default, real(2, 3, 4) + 1, *SLOPED),
    (aten.xlogy.Tensor, X.abs(), positive(3, 4)),
    (aten.xlogy.Tensor, NOUGHTS, NOUGHTS),
    (aten.clone.default, real(2, 3, 4, 5), {"memory_format": torch.channels_last}),
    # outputs in their own steps, whatever those of the operands are
    (aten.mul.Tensor, PERMUTED, real(4, 2, 3), {"strides": {0: (1, 12, 4)}}),
    (aten.add.Tensor, PERMUTED, real(4, 2, 3)[:1], {"strides": {0: (6, 3, 1)}}),
    (aten.relu.default, real(4, 2, 3), {"strides": {0: (1, 4, 8)}}),
    # one half of a tensor is gated by the other
    *((aten.glu.default, x, d) for x in (real(4, 6), real(6, 4).t()) for d in (0, -1)),
    *((aten.glu_backward.default, real(2, 6) + 1, x, 0) for x in (real(4, 6), real(6, 4).t())),
    *((aten.glu_backward.default, real(4, 3) + 1, x, -1) for x in (real(4, 6), real(6, 4).t())),
    # into another order, and to other types
    *(
        row
        for kind in (torch.float64, torch.int64, torch.bool)
        for x in [real(3, 4).round().to(kind)]
        for row in (
            (aten.clone.default, x.t(), {"memory_format": torch.contiguous_format}),
            (aten.clone.default, x.t()),
            (aten.clone.default, x[:, :1].expand(3, 5), {"memory_format": torch.contiguous_format}),
            (aten._unsafe_view.default, x, [2, 6]),
            (aten.copy.default, torch.zeros(3, 4, dtype=kind), x[:, 1:2]),
            *(
                (aten._to_copy.default, x.t(), {"dtype": other})
                for other in (torch.float64, torch.int64, torch.bool)
            ),
        )
    ),
    # comparisons with numbers
    *(
        (getattr(aten, name).Scalar, *operands)
        for name in COMPARISONS
        for operands in ((real(3, 4), 0.5), (NUMBERS, 2), (NUMBERS.t(), 2.5))
    ),
    # integers, and numbers of several types
    (aten.lt.Tensor, NUMBERS, NUMBERS.flip(1)),
    *((aten.lt.Tensor, x, 2 * x.flip(1)) for x in (MANY, MANY[:, 1:])),
    *((aten.lt.Scalar, x, 60) for x in (MANY, MANY[:, 1:])),
    *((aten.add.Tensor, x, 2 * x, {"alpha": 3}) for x in (MANY, MANY[:, 1:])),
    (aten.eq.Tensor, NUMBERS, NUMBERS.double()),
    (aten.add.Tensor, NUMBERS, FEW, {"alpha": 2}),
    (aten.sub.Tensor, NUMBERS, FEW),
    (aten.mul.Tensor, NUMBERS, FEW),
    (aten.add.Tensor, NUMBERS, 4),
    (aten.mul.Scalar, NUMBERS, -2),
    (aten.neg.default, NUMBERS),
    (aten.mul.Tensor, NUMBERS, OTHER),
    (aten.mul.Tensor, X, X > 0),
    (aten.mul.Tensor, X > 0, X),
    (aten.add.Tensor, X, torch.arange(4)),
    (aten.sub.Tensor, torch.arange(3)[:, None], X),
    # truth values, and what is chosen by them
    *((getattr(aten, f"logical_{way}").default, TRUTH, OTHER) for way in ("and", "or", "xor")),
    *((getattr(aten, f"bitwise_{way}").Tensor, TRUTH, OTHER) for way in ("and", "or", "xor")),
    (aten.logical_not.default, OTHER),
    (aten.bitwise_not.default, OTHER),
    (aten.where.self, MASK, X, ROW),
    (aten.where.self, MASK, torch.arange(4), torch.zeros((), dtype=torch.int64)),
    (aten.where.self, MASK, MASK, torch.tensor([True, False]).repeat(2)),
    (aten.masked_fill.Scalar, X, MASK, -float("inf")),
    (aten.masked_fill.Tensor, X, MASK, torch.tensor(2.0, dtype=torch.float64)),
    (aten.masked_fill.Scalar, torch.arange(4), MASK, 7),
    (aten.native_dropout_backward.default, X, X > 0, 1.25),
]


@pytest.mark.parametrize("operation", CALLS, ids=lambda operation: str(operation[0]))
def test_calls(operation):
    """Operators of several tensors, of integers, and of truth values."""
    check_call(operation)
