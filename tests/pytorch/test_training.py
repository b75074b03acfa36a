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


SLOW = pytest.mark.slow
RESNET18 = {"batch": 8, "size": 32, "widths": (64, 128, 256, 512), "blocks": 2}


@pytest.mark.parametrize(
    ("make", "network", "steps", "options"),
    [
        pytest.param(sgd, {}, 20, {"ram": "60%"}, id="sgd"),
        pytest.param(adam, {}, 20, {"ram": "60%"}, id="adam", marks=SLOW),
        pytest.param(
            sgd, {"blocks": 2}, 200, {"ram": "50%", "time_limit": 5}, id="half", marks=SLOW
        ),
        pytest.param(sgd, RESNET18, 200, {"ram": "50%", "time_limit": 30}, id="18", marks=SLOW),
    ],
)
def test_optimizers_see_eagers_gradients(
    make: Any, network: Any, steps: int, options: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Micro-batches, clipping, schedules, dropout and batch norm: the same weights at the end."""
    monkeypatch.setattr(os, "fdatasync", lambda _: None)  # nothing here depends on the medium
    torch.manual_seed(1)
    model, loss_fn, (x, y) = residual_step(**{"size": 16, **network})
    twin = copy.deepcopy(model)
    batches = [(torch.randn_like(x), torch.randint_like(y, 10)) for _ in range(steps)]
    with compile(model, loss_fn, (x, y), storage=tmp_path, device="rpi4b", **options) as step:
        assert step.result.overhead_j is not None
        assert step.result.overhead_j > 0
        found = train(model, step, batches, make)
        ours = outcome(model, found[-1])
    expected = train(twin, lambda *batch: eager_step(twin, loss_fn, batch), batches, make)
    assert [loss.item() for loss in found] == [loss.item() for loss in expected]
    assert unequal(outcome(twin, expected[-1]), ours) == []
