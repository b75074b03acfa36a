"""Exported networks on emulated boards: bits, tolerances, and what happens when storage fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kit.export_agreement import (  # noqa: E402
    BATCH,
    SCHEDULES,
    Exported,
    Outcome,
    batches_like,
    condition,
    lowered,
    torch_steps,
)
from kit.rotation import rotating  # noqa: E402
from mcu.networks import NETWORKS  # noqa: E402
from poetmodel.export.board import Target  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from poetmodel.export.board import ProgramRun

pytestmark = pytest.mark.torch

TORN, PAGE, SHORT, CHECKSUM = 1, 2, 3, 5
OTHERS = [name for name in SCHEDULES if name != "keep-all"]


def prepared(name: str, optimizer: str, *batch: int) -> tuple[Any, Any, Any]:
    """Return a network, its step and batches."""
    torch.manual_seed(0)
    training = NETWORKS[name](*batch)
    return training, lowered(training, optimizer, name=name), batches_like(training[2], 2)


def on_board(
    name: str, optimizer: str, folder: Path, target: Target = Target.M4, **options: Any
) -> Outcome:
    """Export a network, run three steps on a board, and return what they leave."""
    _, step, batches = prepared(name, optimizer)
    exported = Exported(step, folder, **options)
    return exported.outcome(batches, 3, target=target, settings=("POISON=1",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "optimizer"),
    rotating(
        [("bert-block", "momentum"), ("resnet8-thin", "sgd"), ("unet", "adam"), ("ds-cnn", "sgd")],
        [("bert-block", "momentum")],
    ),
)
def test_schedules_give_the_bits_of_keep_all(name: str, optimizer: str, tmp_path: Path) -> None:
    """Computed again, paged, tiled in time, read in place: losses and state are the same bits."""
    kept = on_board(name, optimizer, tmp_path / "keep-all")
    for schedule in OTHERS if name == "unet" else ["blocking", "mapped"]:
        found = on_board(name, optimizer, tmp_path / schedule, **SCHEDULES[schedule])
        assert found.same_bits(kept), schedule


@pytest.mark.slow
@pytest.mark.parametrize("target", [Target.M3, Target.M7])
@pytest.mark.parametrize("name", rotating(("bert-block", "resnet8-thin", "m5"), ("bert-block",)))
def test_boards_give_the_same_bits(name: str, target: Target, tmp_path: Path) -> None:
    """Soft floats of an M3 and those of an M7 are those of an M4.

    The C library of cores with floating-point units fuses products and sums in ``expf`` and
    ``erff``, which attention and GELU need: there a core without one is close, not the same.
    """
    found = [
        on_board(name, "adam", tmp_path / each, each, share=0.3) for each in (Target.M4, target)
    ]
    if name == "bert-block" and target is Target.M3:
        assert max(found[0].differences(found[1]).values()) < 1e-5
    else:
        assert found[0].same_bits(found[1])


@pytest.mark.parametrize(
    "name",
    [
        "lenet",
        pytest.param("bert-block", marks=pytest.mark.slow),
        *rotating(("resnet8", "ds-cnn", "autoencoder", "unet", "m5", "vit-block"), ()),
    ],
)
def test_floats_are_near_torch(name: str, tmp_path: Path) -> None:
    """In float, loss and gradients are within 1e-5, or as near as the problem allows.

    What it allows is how far rounding the parameters moves what PyTorch finds in double.
    """
    training, step, batches = prepared(name, "gradients", *BATCH.get(name, ()))
    found = Exported(step, tmp_path, share=0.5).outcome(batches, 1, target=Target.M4)
    apart = found.differences(torch_steps(training, batches, 1))
    moved = condition(training, batches)
    assert all(apart[kind] <= 1e-5 + 3 * moved[kind] for kind in apart), (apart, moved)


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Exported, Any]:
    """Return a perceptron whose state is on storage, by DMA, and its batches."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 16), torch.nn.Tanh(),
        torch.nn.Linear(16, 4),
    )  # fmt: skip
    inputs = (torch.randn(3, 12), torch.randint(0, 4, (3,)))
    training = (model, torch.nn.functional.cross_entropy, inputs)
    folder = tmp_path_factory.mktemp("paged")
    step = lowered(training, "momentum", name="perceptron")
    return Exported(step, folder, **SCHEDULES["dma"]), batches_like(inputs, 2)


@pytest.mark.slow
def test_late_transfers_give_the_same_bits(paged: Any) -> None:
    """A driver that moves data at the wait and not before changes nothing."""
    exported, batches = paged
    plain = exported.outcome(batches, 3, target=Target.HOST)
    late = exported.outcome(batches, 3, target=Target.HOST, settings=("LATE=1", "POISON=1"))
    assert exported.ops["wait"] > 0
    assert late.same_bits(plain)


def test_missing_waits_are_noticed(paged: Any) -> None:
    """Without its waits, a step on the late driver fails, or computes from what is not there."""
    exported, batches = paged
    source = exported.folder / "src" / "pm_step.c"
    text = source.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if "pm_page_wait" not in line]
    assert len(lines) < len(text.splitlines())
    try:
        source.write_text("\n".join(lines) + "\n", encoding="utf-8")
        found = exported.run(batches, 2, target=Target.HOST, settings=("LATE=1", "POISON=1"))
    finally:
        source.write_text(text, encoding="utf-8")
    assert found.status != 0 or not np.isfinite(list(found.losses.values())).all()


@pytest.mark.parametrize(("kind", "error"), [("fail", PAGE), ("short", SHORT)])
def test_storage_that_fails_ends_the_step(paged: Any, kind: str, error: int) -> None:
    """At whichever call: with its error and the state as before, or torn."""
    exported, batches = paged
    settings = {"target": Target.HOST, "settings": ("FAULTS=1",)}
    before = [exported.run(batches, steps, **settings) for steps in (0, 1, 2)]
    calls = [sum(each.figures[f"storage_{way}"] for way in ("reads", "writes")) for each in before]
    reading = calls[0] - _calls_of_init(exported, batches, settings)
    first, last = calls[1] - reading + 1, calls[2] - reading
    errors = []
    for call in range(first, last + 1):
        found = exported.run(batches, 2, words=(f"{kind}:{call}",), **settings)
        assert len(found.losses) == 1
        assert found.error in (error, TORN)
        errors.append(found.error)
        if found.error == error:
            assert found.state == before[1].state
    assert errors == sorted(errors, reverse=True)
    assert set(errors) == {error, TORN}


def _calls_of_init(exported: Exported, batches: Any, settings: Any) -> int:
    """Return how often `pm_init` uses storage: the first call that fails after it lets it end."""
    call = 1
    while True:
        found = exported.run(batches, 0, words=(f"fail:{call}",), **settings)
        if "pm_init" not in found.messages:
            return call - 1
        call += 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flip", "old", "empty"])
def test_checksum_notices_wrong_pages(paged: Any, kind: str) -> None:
    """A flipped bit, a lost write, a read that did nothing: unnoticed without the checksum."""
    exported, batches = paged
    plain, *silent = _with_faults(exported, batches, kind, "FAULTS=1")
    assert any(each.status == 0 and each.state != plain.state for each in silent)
    whole, *found = _with_faults(exported, batches, kind, "FAULTS=1", "CHECKSUM=1")
    assert whole.state == plain.state
    assert any(each.error in (CHECKSUM, TORN) for each in found)
    assert all(each.error in (CHECKSUM, TORN) or each.state == plain.state for each in found)


def _with_faults(exported: Exported, batches: Any, kind: str, *settings: str) -> list[ProgramRun]:
    """Return a run without a fault, and some with one in the middle."""
    options = {"target": Target.HOST, "settings": settings}
    plain = exported.run(batches, 3, **options).require_success()
    middle = plain.figures["storage_writes" if kind == "old" else "storage_reads"] // 2
    calls = range(middle - 2, middle + 3)
    return [plain, *(exported.run(batches, 3, words=(f"{kind}:{k}",), **options) for k in calls)]
