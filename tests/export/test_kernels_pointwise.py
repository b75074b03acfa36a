"""Kernels that compute element by element against PyTorch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis.strategies import booleans, data, integers, lists, permutations  # noqa: E402

from kit.kernel_calls import check, lowered  # noqa: E402
from poetmodel.torch.errors import CaptureError  # noqa: E402

pytestmark = pytest.mark.torch
aten = torch.ops.aten

EDGES = (-6.0, -3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 6.0, 25.0, -40.0)
"""Where activations have their corners, and beyond where exponentials matter."""


def real(*shape: int) -> Any:
    """Return random numbers, some of them at corners of activations."""
    generator = torch.Generator().manual_seed(sum(shape))
    found = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    edges = torch.tensor(EDGES, dtype=torch.float64)[: found.numel()]
    found.view(-1)[: len(edges)] = edges
    return found


def positive(*shape: int) -> Any:
    """Return random numbers above 0."""
    return real(*shape).abs() + 0.1


UNARY: dict[str, tuple[Any, ...]] = {
    "abs": (aten.abs.default,),
    "neg": (aten.neg.default,),
    "exp": (aten.exp.default,),
    "expm1": (aten.expm1.default,),
    "sin": (aten.sin.default,),
    "cos": (aten.cos.default,),
    "erf": (aten.erf.default,),
    "tanh": (aten.tanh.default,),
    "floor": (aten.floor.default,),
    "ceil": (aten.ceil.default,),
    "round": (aten.round.default,),
    "sgn": (aten.sgn.default,),
    "sign": (aten.sign.default,),
    "sigmoid": (aten.sigmoid.default,),
    "relu": (aten.relu.default,),
    "relu6": (aten.relu6.default,),
    "silu": (aten.silu.default,),
    "mish": (aten.mish.default,),
    "gelu": (aten.gelu.default,),
    "gelu by tanh": (aten.gelu.default, {"approximate": "tanh"}),
    "hardswish": (aten.hardswish.default,),
    "hardsigmoid": (aten.hardsigmoid.default,),
    "hardtanh": (aten.hardtanh.default, -0.5, 3.0),
    "threshold": (aten.threshold.default, 0.5, -2.0),
    "leaky relu": (aten.leaky_relu.default, 0.2),
    "softplus": (aten.softplus.default, 1.5, 8.0),
    "hardshrink": (aten.hardshrink.default, 0.5),
    "softshrink": (aten.softshrink.default, 0.5),
    "elu": (aten.elu.default, 0.7),
    "selu": (aten.elu.default, 1.6732632423543772, 1.0507009873554805),
    "celu": (aten.celu.default, 0.7),
    "clamp": (aten.clamp.default, -1, 3.0),
    "clamp above": (aten.clamp.default, None, 0.5),
    "clamp_min": (aten.clamp_min.default, -0.5),
    "clamp_max": (aten.clamp_max.default, 0.5),
    "add a number": (aten.add.Tensor, 0.3),
    "add a multiple": (aten.add.Scalar, 0.3, 2.0),
    "subtract a number": (aten.sub.Tensor, 0.3),
    "subtract a multiple": (aten.sub.Scalar, 0.3, 2.0),
    "subtract from a number": (aten.rsub.Scalar, 0.3, 2.0),
    "multiply by a number": (aten.mul.Tensor, -1.7),
    "multiply by a scalar": (aten.mul.Scalar, -1.7),
    "divide by a number": (aten.div.Tensor, 7),
    "divide by a scalar": (aten.div.Scalar, 7),
    "square": (aten.pow.Tensor_Scalar, 2),
    "cube": (aten.pow.Tensor_Scalar, 3),
    "first power": (aten.pow.Tensor_Scalar, 1.0),
}
ABOVE_ZERO: dict[str, tuple[Any, ...]] = {
    "sqrt": (aten.sqrt.default,),
    "rsqrt": (aten.rsqrt.default,),
    "reciprocal": (aten.reciprocal.default,),
    "log": (aten.log.default,),
    "log1p": (aten.log1p.default,),
    "root": (aten.pow.Tensor_Scalar, 0.5),
    "power": (aten.pow.Tensor_Scalar, 1.3),
    "inverse root": (aten.pow.Tensor_Scalar, -0.5),
    "inverse": (aten.pow.Tensor_Scalar, -1),
}
BACKWARD: dict[str, tuple[Any, ...]] = {
    "threshold": (aten.threshold_backward.default, 0.0),
    "hardtanh": (aten.hardtanh_backward.default, -0.5, 3.0),
    "leaky relu": (aten.leaky_relu_backward.default, 0.2, False),
    "softplus": (aten.softplus_backward.default, 1.5, 8.0),
    "hardshrink": (aten.hardshrink_backward.default, 0.5),
    "softshrink": (aten.softshrink_backward.default, 0.5),
    "sigmoid": (aten.sigmoid_backward.default,),
    "tanh": (aten.tanh_backward.default,),
    "silu": (aten.silu_backward.default,),
    "mish": (aten.mish_backward.default,),
    "gelu": (aten.gelu_backward.default,),
    "gelu by tanh": (aten.gelu_backward.default, {"approximate": "tanh"}),
    "hardswish": (aten.hardswish_backward.default,),
    "hardsigmoid": (aten.hardsigmoid_backward.default,),
}
BINARY: dict[str, Any] = {
    "add": aten.add.Tensor,
    "sub": aten.sub.Tensor,
    "mul": aten.mul.Tensor,
    "div": aten.div.Tensor,
    "maximum": aten.maximum.default,
    "minimum": aten.minimum.default,
    "lt": aten.lt.Tensor,
    "le": aten.le.Tensor,
    "eq": aten.eq.Tensor,
    "ne": aten.ne.Tensor,
    "ge": aten.ge.Tensor,
    "gt": aten.gt.Tensor,
}


def call(operation: tuple[Any, ...], *tensors: Any) -> Any:
    """Check an operator with its numbers, and return how it was lowered."""
    operator, *rest = operation
    keywords = rest.pop() if rest and isinstance(rest[-1], dict) else {}
    return check(operator, *tensors, *rest, **keywords)


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    """An operator of one tensor, in order, transposed, and with gaps."""
    x = real(4, 5, 6)
    assert call(UNARY[name], x).elementwise
    call(UNARY[name], x.transpose(0, 2))
    call(UNARY[name], x[:, ::2, 1:4])


@pytest.mark.parametrize("name", ABOVE_ZERO)
def test_unary_above_zero(name: str) -> None:
    """An operator of one tensor that is above 0."""
    call(ABOVE_ZERO[name], positive(4, 5))
    call(ABOVE_ZERO[name], positive(4, 5)[:, 2])


@pytest.mark.parametrize("name", BACKWARD)
def test_backward(name: str) -> None:
    """The gradient of an activation; gradient and activation lie alike, and otherwise."""
    x, gradient = real(5, 6), torch.randn(5, 6, dtype=torch.float64)
    assert call(BACKWARD[name], gradient, x).elementwise
    call(BACKWARD[name], torch.randn(6, 5, dtype=torch.float64).t(), x)
    call(BACKWARD[name], torch.ones((), dtype=torch.float64).expand(5, 6), x)


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
def test_binary(name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """An operator of two tensors that are broadcast; some of their elements are the same."""
    x, y = (real(*shape) for shape in shapes)
    check(BINARY[name], x, y)


@settings(max_examples=50)
@given(data())
def test_any_layout(draw: Any) -> None:
    """Sums of tensors that are permuted, cut, turned around or repeated in any way."""
    shape = draw.draw(lists(integers(1, 4), min_size=0, max_size=4))

    def operand() -> Any:
        sizes = [1 if draw.draw(booleans()) else size for size in shape]
        order = draw.draw(permutations(range(len(shape))))
        steps = [draw.draw(integers(1, 2)) for _ in shape]
        whole = real(*(sizes[k] * steps[k] for k in order))
        cut = whole[tuple(slice(None, None, steps[k]) for k in order)]
        return cut.permute([order.index(k) for k in range(len(shape))])

    x, y = operand(), operand()
    assert check(aten.add.Tensor, x, y.expand(shape), alpha=0.5).elementwise
    check(aten.clone.default, x.expand(shape), memory_format=torch.contiguous_format)


def test_permuted_outputs() -> None:
    """An output is written in its own steps, whatever those of the operands are."""
    x, y = real(2, 3, 4).permute(2, 0, 1), real(4, 2, 3)
    check(aten.mul.Tensor, x, y, strides={0: (1, 12, 4)})
    check(aten.add.Tensor, x, y[:1], strides={0: (6, 3, 1)})
    check(aten.relu.default, y, strides={0: (1, 4, 8)})


def test_many_dimensions() -> None:
    """Six dimensions that lie apart are the most; dimensions that lie together count once."""
    x = real(2, 3, 2, 3, 2, 3, 2)
    check(
        aten.clone.default, x.permute(6, 0, 1, 4, 5, 2, 3).contiguous().permute(0, 2, 1, 3, 5, 4, 6)
    )
    with pytest.raises(CaptureError, match="at most 6 dimensions that lie apart, got 7"):
        lowered(
            aten.clone.default,
            x.permute(6, 4, 2, 0, 5, 3, 1),
            memory_format=torch.contiguous_format,
        )


def test_add_of_a_multiple() -> None:
    """The second operand of a sum may have a factor."""
    x, y = real(3, 4), real(4)
    check(aten.add.Tensor, x, y, alpha=-0.3)
    check(aten.sub.Tensor, x, y, alpha=0.3)


def test_ternary() -> None:
    """Operators of three tensors."""
    x, y, z = real(3, 4), real(4), positive(3, 1)
    check(aten.addcmul.default, x, y, z, value=0.3)
    check(aten.addcdiv.default, x, y, z, value=0.3)
    check(aten.lerp.Scalar, x, y, 0.3)
    check(aten.lerp.Scalar, x, y, 0.8)
    check(aten.lerp.Tensor, x, y, z / z.max())


@pytest.mark.parametrize("is_result", [False, True])
def test_elu_backward(*, is_result: bool) -> None:
    """The gradient of ELU from its input, or from its output."""
    x, gradient = real(3, 5), torch.randn(3, 5, dtype=torch.float64)
    check(aten.elu_backward.default, gradient, 0.7, 1.05, 0.9, is_result, x)


def test_log_sigmoid() -> None:
    """The log of a sigmoid, and its gradient; what PyTorch keeps for that is not needed."""
    x, gradient = real(3, 5), torch.randn(3, 5, dtype=torch.float64)
    found = lowered(aten.log_sigmoid_forward.default, x).execute()[0]
    torch.testing.assert_close(found, torch.nn.functional.logsigmoid(x), rtol=1e-12, atol=1e-12)
    check(aten.log_sigmoid_backward.default, gradient, x, torch.exp(-x.abs()))


def test_prelu() -> None:
    """ReLU with a learned slope, and its gradients."""
    x, slope = real(2, 3, 4), real(1, 3, 1)
    check(aten._prelu_kernel.default, x, slope)
    check(aten._prelu_kernel_backward.default, real(2, 3, 4) + 1, x, slope)


@pytest.mark.parametrize("dimension", [0, -1])
def test_glu(dimension: int) -> None:
    """One half of a tensor is gated by the other."""
    x = real(4, 6)
    y = aten.glu.default(x, dimension)
    for tensor in (x, real(6, 4).t()):
        check(aten.glu.default, tensor, dimension)
        check(aten.glu_backward.default, real(*y.shape) + 1, tensor, dimension)


def test_xlogy() -> None:
    """A product with a logarithm is 0 where its other factor is."""
    check(aten.xlogy.Tensor, real(3, 4).abs(), positive(3, 4))
    check(
        aten.xlogy.Tensor, torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    )


@pytest.mark.parametrize(
    "name", ["relu", "clamp", "threshold", "maximum", "minimum", "ne", "eq", "sgn"]
)
def test_nan(name: str) -> None:
    """What is no number stays none, and is unequal to all."""
    x = torch.tensor([float("nan"), 1.0, -1.0, float("inf"), -float("inf")], dtype=torch.float64)
    if name in BINARY:
        check(BINARY[name], x, x.flip(0))
        check(BINARY[name], x, x)
    elif name != "sgn":
        call(UNARY[name], x)
    check(aten.isnan.default, x)


@pytest.mark.parametrize("name", ["lt", "le", "eq", "ne", "ge", "gt"])
def test_comparisons_with_numbers(name: str) -> None:
    """Reals and integers are compared with numbers."""
    operator = getattr(aten, name).Scalar
    check(operator, real(3, 4), 0.5)
    check(operator, torch.arange(6).view(2, 3), 2)
    check(operator, torch.arange(6).view(2, 3).t(), 2.5)


def test_comparisons_of_integers() -> None:
    """Integers are compared with integers, and with reals."""
    x = torch.arange(6).view(2, 3)
    check(aten.lt.Tensor, x, x.flip(1))
    check(aten.eq.Tensor, x, x.double())


def test_truth_values() -> None:
    """Functions of truth values."""
    x, y = torch.tensor([[True], [False]]), torch.tensor([True, False, True])
    for name in ("logical_and", "logical_or", "logical_xor"):
        check(getattr(aten, name).default, x, y)
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        check(getattr(aten, name).Tensor, x, y)
    check(aten.logical_not.default, y)
    check(aten.bitwise_not.default, y)


def test_masks() -> None:
    """Elements are chosen by truth values."""
    x, y, mask = real(3, 4), real(4), real(3, 1) > 0
    check(aten.where.self, mask, x, y)
    check(aten.where.self, mask, torch.arange(4), torch.zeros((), dtype=torch.int64))
    check(aten.where.self, mask, mask, torch.tensor([True, False]).repeat(2))
    check(aten.masked_fill.Scalar, x, mask, -float("inf"))
    check(aten.masked_fill.Tensor, x, mask, torch.tensor(2.0, dtype=torch.float64))
    check(aten.masked_fill.Scalar, torch.arange(4), mask, 7)
    check(aten.native_dropout_backward.default, x, x > 0, 1.25)


def test_operands_of_other_types() -> None:
    """Truth values and integers become numbers where they are computed with."""
    x = real(3, 4)
    check(aten.mul.Tensor, x, x > 0)
    check(aten.mul.Tensor, x > 0, x)
    check(aten.add.Tensor, x, torch.arange(4))
    check(aten.sub.Tensor, torch.arange(3)[:, None], x)


def test_integers() -> None:
    """Sums and products of integers."""
    x, y = torch.arange(6).view(2, 3), torch.tensor([3, -1, 2])
    check(aten.add.Tensor, x, y, alpha=2)
    check(aten.sub.Tensor, x, y)
    check(aten.mul.Tensor, x, y)
    check(aten.add.Tensor, x, 4)
    check(aten.mul.Scalar, x, -2)
    check(aten.neg.default, x)
    check(aten.mul.Tensor, x, torch.tensor([True, False, True]))


def test_integers_and_truth_values_without_a_kernel_are_refused() -> None:
    """A kernel of real numbers would not compile with them."""
    integers_, truth = torch.arange(6).view(2, 3), torch.tensor([[True], [False]])
    for operator, *operands in (
        (aten.abs.default, integers_), (aten.relu.default, integers_),
        (aten.maximum.default, integers_, integers_), (aten.pow.Tensor_Scalar, integers_, 2),
        (aten.amax.default, integers_, [1]), (aten.max.dim, integers_, 1),
        (aten.prod.default, integers_), (aten.scatter.src, integers_, 1, integers_ * 0, integers_),
    ):  # fmt: skip
        with pytest.raises(CaptureError, match=r"expected real numbers, got integers"):
            lowered(operator, *operands)
    for operator in (aten.mul.Tensor, aten.add.Tensor):
        with pytest.raises(CaptureError, match=r"expected real numbers, got truth values"):
            lowered(operator, truth, truth)


def test_bytes_are_not_taken_for_truth_values() -> None:
    """Numbers become truth values, and no bytes; those that are there may be read and copied."""
    bytes_ = torch.tensor([0, 1, 7, 255], dtype=torch.uint8)
    for numbers in (real(4), torch.arange(4)):
        with pytest.raises(CaptureError, match=r"no kernel that makes bytes of them"):
            lowered(aten._to_copy.default, numbers, dtype=torch.uint8)
    for operator, *operands in (
        (aten.bitwise_and.Tensor, bytes_, bytes_), (aten.bitwise_not.default, bytes_),
    ):  # fmt: skip
        with pytest.raises(CaptureError, match=r"expected truth values"):
            lowered(operator, *operands)
    check(aten._to_copy.default, bytes_, dtype=torch.int64)
    check(aten.mul.Tensor, bytes_, real(4))
    check(aten.clone.default, bytes_)
    check(aten._to_copy.default, bytes_ > 1, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_copies(dtype: torch.dtype) -> None:
    """Tensors are copied into another order, and to other types."""
    x = real(3, 4).round().to(dtype)
    check(aten.clone.default, x.t(), memory_format=torch.contiguous_format)
    check(aten.clone.default, x.t())
    check(aten.clone.default, x[:, :1].expand(3, 5), memory_format=torch.contiguous_format)
    check(aten._unsafe_view.default, x, [2, 6])
    check(aten.copy.default, torch.zeros(3, 4, dtype=dtype), x[:, 1:2])
    for other in (torch.float64, torch.int64, torch.bool):
        check(aten._to_copy.default, x.t(), dtype=other)


def test_clone_in_a_memory_format() -> None:
    """A copy may lie channels last."""
    check(aten.clone.default, real(2, 3, 4, 5), memory_format=torch.channels_last)
