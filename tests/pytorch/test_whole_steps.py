"""Whole steps: peers train as eager does, and records say what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from pytorch import whole_steps  # noqa: E402
from pytorch.networks import Block  # noqa: E402
from pytorch.peers import checkpoint_per_block, eager  # noqa: E402
from pytorch.runs import OPTIMIZERS, WHOLE_METHODS, TrainingRun  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

nn = torch.nn
pytestmark = pytest.mark.torch

WIDTH = 64


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave threads and the C library of the test run as they are."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(whole_steps, "give_back_at_once", lambda: None)
    yield
    torch.set_num_threads(threads)


def tiny() -> Any:
    """Return a network with parameters inside and outside of blocks, its loss and inputs."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        *(Block(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 10),
    )
    return model, nn.functional.cross_entropy, (torch.randn(8, WIDTH), torch.randint(0, 10, (8,)))


def made() -> Any:
    """Return the same network with the same weights each time."""
    torch.manual_seed(0)
    return tiny()


def trained(training: Any, method: Any, count: int = 4) -> list[torch.Tensor]:
    """Return losses, parameters and moments after some steps."""
    model, _, inputs = training
    torch.manual_seed(1)
    found = [method.run(*inputs) for _ in range(count)]
    for parameter in model.parameters():
        held = method.moments(parameter)
        found += [parameter.detach(), *(held[name] for name in sorted(held))]
    return found


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_in_the_backward_pass_train_as_eager_does(
    optimizer: str, checkpointed: bool
) -> None:
    """Losses, parameters and moments are equal bit for bit, with and without checkpointing."""
    make = whole_steps.MAKERS[optimizer]
    plain = made()
    expected = trained(plain, whole_steps.updated(eager(plain), plain, make))
    training = made()
    if checkpointed:
        checkpoint_per_block(training)
    found = trained(training, whole_steps.in_backward(training, make))
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("method", [name for name in WHOLE_METHODS if "@" not in name])
def test_every_method_of_whole_steps_is_measured(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record has peaks, what was subtracted, the pairs, and that the weights are eager's."""
    monkeypatch.setitem(whole_steps.NETWORKS, "mlp8-b16", tiny)
    run = TrainingRun(
        network="mlp8-b16", method=method, share=1.0, limit_s=5.0, pairs=2, optimizer="adamw"
    )
    facts = whole_steps.measured(run, folder=str(tmp_path))
    assert facts["status"] in ("ran", "optimal", "feasible"), facts["reason"]
    assert facts["equal"] is True
    assert len(facts["pairs"]) == 2
    assert facts["peak_bytes"] >= facts["state_bytes"]
    assert facts["process_peak_bytes"] >= facts["state_bytes"]
    assert facts["baseline_bytes"] > 0
    assert (facts["written_bytes"] > 0) == (method == "safe")
    assert ("budget_bytes" in facts) == (run.own is not None)


def test_steps_that_differ_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that is left out makes the weights, the moments and the losses unequal."""

    def lazy(training: Any, make: Any) -> Any:
        make(training[0].parameters())
        return eager(training)

    monkeypatch.setitem(whole_steps.NETWORKS, "mlp8-b16", tiny)
    monkeypatch.setattr(whole_steps, "in_backward", lazy)
    run = TrainingRun(network="mlp8-b16", method="in-backward", pairs=1, optimizer="momentum")
    facts = whole_steps.measured(run, folder=str(tmp_path))
    assert facts["equal"] is False
    assert facts["unequal"] == 24
    assert "0.weight" in facts["unequal_names"]


def test_budget_of_nothing_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget without a plan is on record with the reason."""
    monkeypatch.setitem(whole_steps.NETWORKS, "mlp8-b16", tiny)
    run = TrainingRun(network="mlp8-b16", method="both", share=0.5, optimizer="adamw")
    facts = whole_steps.measured(run, folder=str(tmp_path), ram_bytes=1000)
    assert facts["status"] == "infeasible"
    assert "1,000 B" in facts["reason"]
