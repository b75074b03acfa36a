"""Exported programs compile without a warning at each level of optimization."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from kit.digits import STEP
from kit.programs import needs
from poetmodel.export.board import Target, build
from poetmodel.export.exporting import export_step
from poetmodel.export.io import load_step

if TYPE_CHECKING:
    from pathlib import Path

LEVELS: Final = ("-O0", "-Og", "-Os", "-O3")
PLANS: Final[dict[str, dict[str, Any]]] = {
    "paged": {"ram": "90%", "recompute": False},
    "read in place": {"ram": "90%", "device": "nano33ble", "commit": True},
}
NETWORKS: Final = (
    "resnet8-thin", "ds-cnn", "autoencoder", "mobilenetv2-035", "lenet", "bert-block",
    "encoder-layer", "vit-block", "unet", "m5", "mlp",
)  # fmt: skip
"""Those of the export tests whose kernels differ."""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("plan", PLANS)
def test_levels_warn_of_nothing(plan: str, level: str, tmp_path: Path) -> None:
    """The Makefile turns each warning into an error."""
    target = Target.M4 if level == "-Og" else Target.HOST
    needs(target)
    export_step(load_step(STEP), tmp_path, gap=0.5, **PLANS[plan])
    assert build(tmp_path, target, settings=(f"EXTRA={level}",)).is_file()


@pytest.mark.seeds
@pytest.mark.torch
@pytest.mark.parametrize("schedule", ["keep-all", "dma", "mapped", "commits"])
@pytest.mark.parametrize("name", NETWORKS)
def test_levels_warn_of_nothing_in_any_network(name: str, schedule: str, tmp_path: Path) -> None:
    """Each with another optimizer, whichever way it keeps its budget."""
    pytest.importorskip("torch")
    from kit.export_agreement import BATCH, OPTIMIZERS, SCHEDULES, Exported, lowered
    from mcu.networks import NETWORKS as MADE

    needs(Target.HOST, Target.M4)
    optimizers = [each for each in OPTIMIZERS if each != "gradients"]
    optimizer = optimizers[NETWORKS.index(name) % len(optimizers)]
    options = SCHEDULES.get(schedule, {"share": 0.5, "commit": True})
    if schedule == "mapped":  # storage with room for the state of all
        options = options | {"device": "imxrt1062-flash"}
    step = lowered(MADE[name](*BATCH.get(name, ())), optimizer)
    Exported(step, tmp_path, **options)
    for target in (Target.HOST, Target.M4):
        for level in LEVELS:
            assert build(tmp_path, target, settings=(f"EXTRA={level}", "RAM_SIZE=4194304"))
