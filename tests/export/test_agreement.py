"""Exported C holds against PyTorch: both compute in double, from the same weights and batches."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from kit.export_agreement import (  # noqa: E402
    BATCH,
    OPTIMIZERS,
    SCHEDULES,
    Exported,
    Outcome,
    Target,
    batches_like,
    lowered,
    torch_steps,
    torch_steps_from,
    two_groups,
)
from kit.rotation import rotating  # noqa: E402
from mcu.networks import NETWORKS  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

STEPS = 5
CLOSE = 1e-12
"""How far results may be apart, over the largest of their kind."""
NOISE = 200
"""How many times what one rounding error of every parameter makes of PyTorch's results."""


def compare(
    name: str, optimizer: str, folder: Path, **options: Any
) -> tuple[Exported, dict[str, float]]:
    """Export a network, run steps, and return it with the worst of their differences from PyTorch.

    In PyTorch each step begins with what the C held after the one before: some networks multiply
    rounding errors in each step by a hundred. The differences are those beyond what rounding
    errors grow to in PyTorch itself, in that one step.
    """
    torch.manual_seed(0)
    training = NETWORKS[name](*BATCH.get(name, ()))
    batches = batches_like(training[2], 3)
    steps = 1 if optimizer == "gradients" else STEPS
    exported = Exported(lowered(training, optimizer, name=name), folder, **options)
    held = [exported.outcome(batches, count) for count in range(1, steps + 1)]
    assert all(each.losses == held[-1].losses[: len(each.losses)] for each in held)
    expected = torch_steps_from(training, batches, held, optimizer)
    rounded = torch_steps_from(training, batches, held, optimizer, rounded=True)
    worst: dict[str, float] = {}
    for its, mine, noisy in zip(expected, held, rounded, strict=True):
        apart = Outcome(mine.losses[-1:], mine.tensors).differences(its)
        noise = noisy.differences(its)
        beyond = {kind: apart[kind] - NOISE * noise[kind] for kind in apart}
        assert not any(map(math.isnan, beyond.values())), (apart, noise)
        worst = {kind: max(x, worst.get(kind, x)) for kind, x in beyond.items()}
    return exported, worst


@pytest.mark.slow
@pytest.mark.parametrize("name", rotating(NETWORKS, ("lenet", "bert-block")))
def test_gradients_are_those_of_torch(name: str, tmp_path: Path) -> None:
    """Without an optimizer, the loss and all gradients are PyTorch's."""
    _, apart = compare(name, "gradients", tmp_path)
    assert max(apart.values()) <= CLOSE, apart


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "nadam", "rmsprop", "adagrad", "groups"])
def test_state_is_that_of_torch(optimizer: str, tmp_path: Path) -> None:
    """After each of five steps parameters and moments are PyTorch's."""
    _, apart = compare("mlp", optimizer, tmp_path)
    assert max(apart.values()) <= CLOSE, apart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        pytest.param(name, optimizer, marks=[] if name == "mlp" else pytest.mark.seeds)
        for name in NETWORKS
        for optimizer in OPTIMIZERS
        if (optimizer in ("momentum", "adam") and name != "mlp")
        or optimizer == "sgd"
        or (optimizer == "groups" and name == "resnet8-thin")
        or (optimizer in ("adamw", "clipped") and name in ("mlp", "resnet8-thin"))
    ],
)
def test_state_of_networks_is_that_of_torch(name: str, optimizer: str, tmp_path: Path) -> None:
    """So it is with every optimizer and in every network, running statistics too."""
    _, apart = compare(name, optimizer, tmp_path)
    assert max(apart.values()) <= CLOSE, apart


@pytest.mark.parametrize("factor", [pytest.param(1.0, marks=pytest.mark.slow), 0.25])
def test_rates_of_all_groups_follow_that_of_the_first(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called with a part of the rate of the export, each group has that part of its own."""
    torch.manual_seed(0)
    training = NETWORKS["mlp"]()
    batches = batches_like(training[2], 3)
    exported = Exported(lowered(training, "groups"), tmp_path)
    assert exported.manifest["learning_rate"] == 0.02
    exported.manifest["learning_rate"] *= factor
    monkeypatch.setitem(OPTIMIZERS, "groups", (partial(two_groups, factor=factor), None))
    expected = torch_steps(training, batches, STEPS, "groups")
    apart = exported.outcome(batches, STEPS).differences(expected)
    assert max(apart.values()) <= CLOSE, apart
    comment = (tmp_path / "include/pm.h").read_text().split("int pm_step(")[0]
    assert "first group" in comment


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "keep-all"])
@pytest.mark.parametrize("name", rotating(("bert-block", "resnet8-thin"), ("bert-block",)))
def test_schedules_train_as_torch(name: str, schedule: str, tmp_path: Path) -> None:
    """So they do where tensors are computed again or paged, and state is on storage."""
    # Moments would take so much of the RAM that there is nothing to compute again.
    optimizer = "sgd" if schedule == "recomputed" else "adam"
    exported, apart = compare(name, optimizer, tmp_path, **SCHEDULES[schedule])
    ops, manifest = exported.ops, exported.manifest
    homes = {each["home"] for each in manifest["states"]}
    assert {
        "recomputed": ops["again"] > 0 == ops["page_in"],
        "blocking": ops["page_out"] > 0 == ops["wait"] and "storage" in homes,
        "dma": ops["wait"] > 0 and "storage" in homes,
        "mapped": "mapped" in homes,
    }[schedule], (ops, homes)
    assert max(apart.values()) <= CLOSE, apart


@pytest.mark.parametrize("optimizer", ["nadam", "rmsprop"])
def test_optimizers_update_storage_that_is_read_like_ram(optimizer: str, tmp_path: Path) -> None:
    """So it is where kernels of updates get their state in pieces."""
    exported, apart = compare("mlp", optimizer, tmp_path, **SCHEDULES["mapped"])
    assert "mapped" in {each["home"] for each in exported.manifest["states"]}
    assert max(apart.values()) <= CLOSE, apart


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("target", [Target.HOST, Target.HOST_DOUBLE])
def test_training_goes_on_after_a_reset_as_if_there_were_none(
    target: Target, optimizer: str, tmp_path: Path
) -> None:
    """What `pm_resume` loads has the next masks of dropout, and constants of double builds, too."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 4))
    training = (module, functional.mse_loss, (torch.randn(8, 6), torch.randn(8, 4)))
    batches = batches_like(training[2], 4)
    exported = Exported(lowered(training, optimizer), tmp_path, share=0.5, commit=True)
    whole = exported.run(batches, 4, target=target)
    exported.run(batches, 2, target=target)
    rest = exported.run(batches, 2, target=target, words=("resume",))
    assert [whole.losses[k] for k in (3, 4)] == [rest.losses[k] for k in (3, 4)]
    assert whole.state == rest.state


@pytest.mark.slow
def test_commits_train_as_torch(tmp_path: Path) -> None:
    """So they do with two generations of all state on storage."""
    exported, apart = compare("bert-block", "momentum", tmp_path, share=0.3, commit=True)
    assert exported.manifest["commit"]
    assert max(apart.values()) <= CLOSE, apart
