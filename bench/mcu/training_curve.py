"""Train thin ResNet-8 on an emulated Cortex-M4 and with PyTorch, on the same images; record both.

``python -m mcu.training_curve --out results/$(date +%F)-curve.jsonl`` in ``bench`` exports a step
for 256 KiB of RAM, runs it in QEMU, and writes a JSON line with the loss of every step of both. The
images are made up: a smooth pattern for each of four classes, and noise. It needs PyTorch, the
compiler for Arm and QEMU.
"""

from __future__ import annotations

import argparse
import copy
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional

from harness import latest, parsed, record
from mcu.networks import NETWORKS
from poetmodel import torch as pmt
from poetmodel.export.board import ProgramRun, Target, build, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.bench.measurement import Record

KIND: Final = "training-curve"
"""Kind of the records."""
CLASSES: Final = 4
LIMIT_S: Final = 3600.0
SIZE: Final = 32
"""Pixels on each side of an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What is trained, and how."""

    network: str = "resnet8-thin"
    device: str = "nrf52840"
    ram: str = "256KiB"
    steps: int = 200
    batch: int = 2
    learning_rate: float = 0.02
    noise: float = 0.5
    """Deviation of what is added to a pattern; a pattern's own is 1."""
    seed: int = 0


def batches(curve: Curve) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return images and their classes for each step."""
    make = torch.Generator().manual_seed(curve.seed)
    coarse = torch.randn(CLASSES, 3, 4, 4, generator=make)
    patterns = functional.interpolate(coarse, (SIZE, SIZE), mode="bilinear", align_corners=True)
    patterns /= patterns.std((1, 2, 3), keepdim=True)
    labels = torch.randint(0, CLASSES, (curve.steps, curve.batch), generator=make)
    noise = torch.randn(curve.steps, curve.batch, 3, SIZE, SIZE, generator=make) * curve.noise
    return [(patterns[here] + noise[k], here) for k, here in enumerate(labels)]


def torch_losses(model: torch.nn.Module, curve: Curve, dtype: torch.dtype) -> list[float]:
    """Return the losses of a copy of the model as PyTorch trains it."""
    twin = copy.deepcopy(model).to(dtype)
    updates = torch.optim.SGD(twin.parameters(), lr=curve.learning_rate)
    losses = []
    for x, label in batches(curve):
        updates.zero_grad()
        loss = functional.cross_entropy(twin(x.to(dtype)), label)
        loss.backward()
        updates.step()
        losses.append(float(loss.detach()))
    return losses


def emulated(folder: Path, curve: Curve) -> ProgramRun:
    """Run an exported step on the emulated board."""
    data = b"".join(x.numpy().tobytes() + y.int().numpy().tobytes() for x, y in batches(curve))
    program = build(folder, Target.M4, time_limit_s=LIMIT_S)
    return run(
        program, Target.M4, folder, inputs=data, steps=curve.steps,
        learning_rate=curve.learning_rate, time_limit_s=LIMIT_S,
    ).require_success()  # fmt: skip


def measure(curve: Curve) -> Record:
    """Export, train on the board and with PyTorch, and return the record."""
    torch.manual_seed(curve.seed)
    torch.set_num_threads(1)
    model, loss_fn, inputs = NETWORKS[curve.network](curve.batch)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        deployment = pmt.export(
            model, loss_fn, inputs, folder=folder, name=curve.network, device=curve.device,
            ram=curve.ram, optimizer=torch.optim.SGD(model.parameters(), lr=curve.learning_rate),
        )  # fmt: skip
        found = emulated(folder, curve)
    return record(
        KIND,
        curve.network,
        cell=asdict(curve),
        seconds=time.perf_counter() - begun,
        ram=deployment.ram_map(),
        board=dict(found.figures),
        losses=list(found.losses.values()),
        torch_losses=torch_losses(model, curve, torch.float32),
        torch_double_losses=torch_losses(model, curve, torch.float64),
        tools=_tools(),
    )


def _tools() -> dict[str, str]:
    commands = {"gcc": "arm-none-eabi-gcc", "qemu": "qemu-system-arm"}
    found: dict[str, Any] = {"torch": torch.__version__}
    for name, command in commands.items():
        said = subprocess.run([command, "--version"], check=True, capture_output=True, text=True)
        found[name] = said.stdout.splitlines()[0]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Record a curve; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=Curve().steps)
    parser.add_argument("--seed", type=int, default=Curve().seed)
    options = parsed(parser, "curve.jsonl", arguments)
    latest(options.out).add(measure(Curve(steps=options.steps, seed=options.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
