"""Kernels of norms and of their gradients against PyTorch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kit.kernel_calls import check, lowered  # noqa: E402
from poetmodel.torch import CaptureError  # noqa: E402

pytestmark = pytest.mark.torch
aten = torch.ops.aten

SHAPES = {
    "images": (2, 6, 5, 4),
    "one image": (1, 4, 3, 3),
    "one dimension": (3, 4, 7),
    "rows": (5, 4),
}
EPSILON = 1e-5


def normal(*shape: int) -> Any:
    """Return a random tensor, not around zero."""
    return torch.randn(shape, dtype=torch.float64) * 2 + 3


def layouts(tensor: Any) -> list[Any]:
    """Return a tensor, and one of the same values whose channels lie last."""
    if tensor.ndim < 3:
        return [tensor]
    return [tensor, tensor.movedim(1, -1).contiguous().movedim(-1, 1)]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_batch_norm_is_pytorchs(shape: tuple[int, ...], affine: bool) -> None:
    """Training and evaluation, running statistics and gradients are PyTorch's."""
    channels = shape[1]
    w, b = (normal(channels), normal(channels)) if affine else (None, None)
    mean, variance = normal(channels), normal(channels).abs()
    masks = [[True] * 3, [True, False, False]]
    masks += [[False, True, True], [False, True, False], [True, False, True]] if affine else []
    for x in layouts(normal(*shape)):
        for training in (True, False):
            check(
                aten._native_batch_norm_legit_functional.default,
                *(x, w, b, mean, variance, training, 0.3, EPSILON),
            )
        check(aten._native_batch_norm_legit.no_stats, x, w, b, True, 0.1, EPSILON)
        own = (x, w, b, mean, variance, 0.1, EPSILON)
        check(aten._native_batch_norm_legit_no_training.default, *own)
        dy = torch.randn_like(x)
        _, center, scale = aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, EPSILON)
        for training in (True, False):
            for mask in masks:
                check(
                    aten.native_batch_norm_backward.default,
                    *(dy, x, w, mean, variance, center, scale, training, EPSILON, mask),
                )


def test_batch_norm_takes_permuted_gradients() -> None:
    """Tensors of one operation may lie in different orders, and a gradient may be one number."""
    x = normal(2, 4, 3, 5)
    _, mean, scale = aten._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, EPSILON)
    number = torch.tensor(0.5, dtype=torch.float64)
    for dy in (*layouts(normal(2, 4, 3, 5)), number.expand(2, 4, 3, 5)):
        rest = (None, None, None, mean, scale, True, EPSILON, [True, False, False])
        check(aten.native_batch_norm_backward.default, dy, x, *rest)


def test_batch_norm_of_one_value_is_refused() -> None:
    """The running variance of a single value is not defined: it is refused by name."""
    state = (normal(4), normal(4).abs())
    arguments = (normal(1, 4, 1, 1), None, None, *state, True, 0.1, EPSILON)
    with pytest.raises(CaptureError, match=r"_native_batch_norm_legit.*more than one value"):
        lowered(aten._native_batch_norm_legit_functional.default, *arguments)


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_batch_norm_keeps_digits(offset: float) -> None:
    """Values far from zero lose no more digits than their difference from the mean must."""
    x = torch.randn((2, 3, 40, 40), dtype=torch.float64) + offset
    arguments = (aten._native_batch_norm_legit.no_stats, x, None, None, True, 0.1, EPSILON)
    check(*arguments, tolerance=1e-12 if offset == 0 else 1e-9)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("shape", "inner"), [((2, 5, 6), 1), ((7, 4), 1), ((2, 3, 4, 5), 2), ((6,), 1), ((2, 4), 2)]
)
def test_layer_norm_is_pytorchs(shape: tuple[int, ...], inner: int, affine: bool) -> None:
    """Result, statistics and gradients are PyTorch's."""
    own = list(shape[len(shape) - inner :])
    w, b = (normal(*own), normal(*own)) if affine else (None, None)
    x, dy = normal(*shape), normal(*shape)
    check(aten.native_layer_norm.default, x, own, w, b, EPSILON)
    _, mean, scale = aten.native_layer_norm(x, own, w, b, EPSILON)
    masks = [[True, True, True], [False, False, True]] if affine else []
    for mask in ([True, False, False], *masks):
        check(aten.native_layer_norm_backward.default, dy, x, own, mean, scale, w, b, mask)


def test_layer_norm_takes_permuted_tokens() -> None:
    """Tokens that come out of a convolution lie channel by channel."""
    w, b = normal(6), normal(6)
    x, dy = (normal(2, 6, 10).transpose(1, 2) for _ in range(2))
    check(aten.native_layer_norm.default, x, [6], w, b, EPSILON)
    _, mean, scale = aten.native_layer_norm(x, [6], w, b, EPSILON)
    for back in (dy, dy.contiguous()):
        rest = (mean, scale, w, b, [True, True, True])
        check(aten.native_layer_norm_backward.default, back, x, [6], *rest)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm_is_pytorchs(groups: int, affine: bool) -> None:
    """Result, statistics and gradients are PyTorch's."""
    w, b = (normal(6), normal(6)) if affine else (None, None)
    for x in layouts(normal(3, 6, 4, 5)):
        check(aten.native_group_norm.default, x, w, b, 3, 6, 20, groups, EPSILON)
        _, mean, scale = aten.native_group_norm(x, w, b, 3, 6, 20, groups, EPSILON)
        rest = (mean, scale, w, 3, 6, 20, groups)
        masks = [[True, False, False]] if x.is_contiguous() else []  # PyTorch crashes on others
        masks += [[True, True, True]] if affine else []
        for mask in masks:
            dy = torch.randn_like(x)
            check(aten.native_group_norm_backward.default, dy, x, *rest, mask)
