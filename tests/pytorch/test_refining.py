"""A schedule that is improved beside training: same results, better plans."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

import poetmodel.torch as pmt  # noqa: E402
from kit.eager_steps import keep_all  # noqa: E402
from poetmodel.result import Termination  # noqa: E402
from poetmodel.solver.background import BackgroundSolve  # noqa: E402
from poetmodel.torch import compiled  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

nn = torch.nn
pytestmark = pytest.mark.torch

PATIENCE_S = 120.0
"""How long anything may take on a machine that is busy [s]."""


def own() -> tuple[Any, ...]:
    """Return a step of a few layers whose activations are not all of one size."""
    torch.manual_seed(1)
    sizes = (64, 256, 32, 512, 128, 384, 64, 256, 8)
    layers = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(sizes)]
    return nn.Sequential(*layers), nn.functional.mse_loss, (torch.randn(64, 64), torch.randn(64, 8))


def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first solve return whatever it begins with, as on a network that takes long."""
    solve = compiled.solve

    def stopped(problem: Any, **limits: Any) -> Any:
        limits["on_progress"] = lambda progress: progress.schedule is None
        return solve(problem, **limits)

    def timed_out(problem: Any, **limits: Any) -> Any:
        found = stopped(problem, **limits)
        return compiled.replace(found, termination=Termination.TIME_LIMIT)

    monkeypatch.setattr(compiled, "solve", timed_out)


def gradients(model: Any) -> list[Any]:
    """Return copies of all gradients, and clear them."""
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


def test_better_plans_run_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps before and after have the same bits, and the result says which schedule runs."""
    hurried(monkeypatch)
    model, loss_fn, inputs = own()
    options: dict[str, Any] = {"ram": "70%", "storage": tmp_path, "device": "rpi4b", "gap": 0.0}
    with pmt.compile(model, loss_fn, inputs, refine=True, **options) as step:
        first, plan = step.result, step.plan
        assert step.refining
        losses, grads = [step(*inputs)], [gradients(model)]
        assert step.compiled.refinement is not None
        assert step.compiled.refinement.wait(PATIENCE_S)
        assert not step.refining
        losses.append(step(*inputs))
        grads.append(gradients(model))
        assert step.result.energy_j < first.energy_j
        assert step.result.schedule != first.schedule
        assert step.plan != plan
        assert torch.equal(*losses)
        assert all(map(torch.equal, *grads))
        assert step.verify().equal
        assert len(list(tmp_path.iterdir())) <= 1
    assert not list(tmp_path.iterdir())


def test_closing_a_step_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes on behind a step that is closed, and it can still run."""
    hurried(monkeypatch)
    model, loss_fn, inputs = own()
    step = pmt.compile(model, loss_fn, inputs, ram="70%", device="rpi4b", refine=True, gap=0.0)
    step.close()
    assert not step.refining
    step(*inputs)


def test_a_step_that_is_refused_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the check against PyTorch fails, the process is ended."""
    hurried(monkeypatch)
    begun: list[BackgroundSolve] = []

    class Watched(BackgroundSolve):
        def __init__(self, *given: Any, **limits: Any) -> None:
            super().__init__(*given, **limits)
            begun.append(self)

    def refuse(_: object) -> None:
        raise pmt.CaptureError("other results")

    monkeypatch.setattr(compiled, "BackgroundSolve", Watched)
    monkeypatch.setattr(compiled, "check_agreement", refuse)
    with pytest.raises(pmt.CaptureError, match="other results"):
        pmt.compile(*own(), ram="70%", device="rpi4b", refine=True, gap=0.0)
    assert len(begun) == 1
    assert not begun[0].runs


def test_what_is_proved_at_once_is_not_refined() -> None:
    """With room for everything there is nothing to look for."""
    step = keep_all(*own(), refine=True)
    assert not step.refining
    assert step.compiled.refinement is None
