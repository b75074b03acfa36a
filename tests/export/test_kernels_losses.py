"""Losses and their gradients against PyTorch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kit.kernel_calls import check, real  # noqa: E402

pytestmark = pytest.mark.torch
aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize(
    ("name", "numbers"), [("mse_loss", ()), ("smooth_l1_loss", (0.7,)), ("huber_loss", (0.7,))]
)
def test_regression(name: str, numbers: tuple[float, ...], reduction: int) -> None:
    """Losses of distances, and their gradients; targets lie alike, otherwise, or repeat."""
    x = real(3, 4)
    forward, backward = (getattr(aten, n).default for n in (name, f"{name}_backward"))
    gradient = real(3, 4) if reduction == NONE else torch.tensor(1.3, dtype=torch.float64)
    for y in (real(3, 4) - 1, real(4, 3).t(), x.clone()):
        check(forward, x, y, reduction, *numbers)
        assert check(backward, gradient, x, y, reduction, *numbers).elementwise
    if name == "mse_loss":
        check(forward, x, real(4), reduction)


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("weighted", [False, True])
def test_binary_cross_entropy(reduction: int, *, weighted: bool) -> None:
    """The cross entropy of probabilities, the certain ones among them, and of logits."""
    x, y = real(3, 4).sigmoid(), real(4, 3).t().abs().clamp(max=1)
    x[0, 0], x[0, 1] = 0, 1
    weight = real(4).abs() if weighted else None
    gradient = real(3, 4) if reduction == NONE else torch.tensor(1.3, dtype=torch.float64)
    check(aten.binary_cross_entropy.default, x, y, weight, reduction)
    check(aten.binary_cross_entropy_backward.default, gradient, x, y, weight, reduction)
    positive = real(1, 4).abs() if weighted else None
    logits = 20 * real(3, 4)
    operator = aten.binary_cross_entropy_with_logits.default
    check(operator, logits, y, weight, positive, reduction)


@pytest.mark.parametrize("reduction", [NONE, MEAN, SUM])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 4, 3, 5)], ids=str)
def test_negative_log_likelihood(shape: tuple[int, ...], reduction: int, *, weighted: bool) -> None:
    """The loss of classes of vectors, batches and images; some targets are ignored."""
    x = real(*shape)
    places = shape[:1] + shape[2:] if len(shape) > 1 else ()
    target = torch.arange(2, 2 + max(1, torch.Size(places).numel())).view(places) % 4
    weight = real(8)[::2].abs() if weighted else None
    name = "nll_loss2d" if len(shape) > 2 else "nll_loss"
    for ignored in (-100, 3):
        arguments = (target, weight, reduction, ignored)
        forward = getattr(aten, f"{name}_forward").default
        check(forward, x, *arguments)
        _, total = forward(x, *arguments)
        gradient = real(*places) if reduction == NONE else torch.tensor(1.3, dtype=torch.float64)
        check(getattr(aten, f"{name}_backward").default, gradient, x, *arguments, total)


def test_negative_log_likelihood_of_other_layouts() -> None:
    """Classes may lie apart, and targets in any order."""
    x, target = real(4, 3).t(), torch.tensor([0, 9, 3, 9, 1])[::2]
    check(aten.nll_loss_forward.default, x, target, None, MEAN, -100)
    image = real(1, 5, 3, 4).permute(0, 3, 1, 2)
    places = torch.arange(15).view(1, 3, 5).transpose(1, 2) % 4
    check(aten.nll_loss2d_forward.default, image, places, None, MEAN, -100)
