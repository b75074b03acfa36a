"""Training: many steps with optimizers give the weights that eager gives."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kit.eager_steps import eager_step, outcome, unequal  # noqa: E402
from kit.networks import residual_step  # noqa: E402
from poetmodel.torch import compile  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.torch


def sgd(model: torch.nn.Module) -> tuple[Any, Any]:
    """Return SGD with momentum, and a schedule."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)


def adam(model: torch.nn.Module) -> tuple[Any, Any]:
    """Return Adam, and a schedule."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def train(
    model: torch.nn.Module,
    run: Callable[..., torch.Tensor],
    batches: list[Any],
    make: Callable[[torch.nn.Module], tuple[Any, Any]],
) -> list[torch.Tensor]:
    """Train on batches, two to an update, with clipping; return the losses."""
    torch.manual_seed(7)
    optimizer, schedule = make(model)
    losses = []
    for number, batch in enumerate(batches):
        losses.append(run(*batch))
        if number % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return losses


def check_training(own: Any, folder: Path, make: Any, steps: int, **options: Any) -> None:
    """Train a model and its copy side by side, and compare everything."""
    model, loss_fn, (x, y) = own
    twin = copy.deepcopy(model)
    batches = [(torch.randn_like(x), torch.randint_like(y, 10)) for _ in range(steps)]
    with compile(model, loss_fn, (x, y), storage=folder, **options) as step:
        assert step.result.overhead_j is not None
        assert step.result.overhead_j > 0
        found = train(model, step, batches, make)
        ours = outcome(model, found[-1])
    expected = train(twin, lambda *batch: eager_step(twin, loss_fn, batch), batches, make)
    assert [loss.item() for loss in found] == [loss.item() for loss in expected]
    assert unequal(outcome(twin, expected[-1]), ours) == []


@pytest.mark.parametrize("make", [sgd, adam])
def test_optimizers_see_eagers_gradients(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches, clipping, schedules, dropout and batch norm: the same weights at the end."""
    monkeypatch.setattr(os, "fdatasync", lambda _: None)  # nothing here depends on the medium
    torch.manual_seed(1)
    own = residual_step(size=16)
    check_training(own, tmp_path, make, 20, ram="60%", device="rpi4b")


@pytest.mark.slow
def test_two_hundred_steps_under_half_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small residual network is identical to eager's after 200 steps."""
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    torch.manual_seed(1)
    own = residual_step(size=16, blocks=2)
    check_training(own, tmp_path, sgd, 200, ram="50%", device="rpi4b", time_limit=5)


@pytest.mark.slow
def test_two_hundred_steps_of_resnet18(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ResNet-18 with dropout on images of 32 x 32 under 50 % is identical to eager's."""
    monkeypatch.setattr(os, "fdatasync", lambda _: None)
    torch.manual_seed(1)
    own = residual_step(batch=8, size=32, widths=(64, 128, 256, 512), blocks=2)
    check_training(own, tmp_path, sgd, 200, ram="50%", device="rpi4b", time_limit=30)
