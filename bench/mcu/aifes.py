"""Comparison of AIfES with exported steps: equal networks, weights, batches and compiler flags.

``--set source=FOLDER`` names the source of AIfES for Arduino, which is not part of this repository
(AGPL-3.0); ``git clone`` it from the address in `ADDRESS`. It is copied to a temporary folder and
not changed. Programs run on an emulated core. Needs PyTorch, GCC for Arm and QEMU.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn

from harness import REQUIRED, Cell, Study, make_record
from mcu.boards import ROOMY, tools
from mcu.networks import parameters, step_macs
from mcu.small_networks import NETWORKS, training
from poetmodel import torch as pmt
from poetmodel.errors import InputError
from poetmodel.export.board import (
    Target,
    ToolchainError,
    build_program,
    require_programs,
    run_program,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mcu.networks import Training
    from poetmodel.export.board import ProgramResult
    from poetmodel.export.deployment import Deployment
    from poetmodel.sweeps.measurement import Record

KIND: Final = "aifes"
"""Kind of the records."""
ADDRESS: Final = "https://github.com/Fraunhofer-IMS/AIfES_for_Arduino"
EXPORTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "keep_all": {"recompute": False},
    "least_ram": {"minimize": "ram"},
}
"""Exported steps of a network, all without paging, and their options."""
STEPS: Final = 5
LEARNING_RATE: Final = 0.05
LOSS_TOLERANCE: Final = 1e-5
"""Maximum relative difference of losses between AIfES and exported steps."""
LIMIT_S: Final = 60.0
"""Time limit of each export [s]."""
GAP: Final = 1e-4
ROOMY_BYTES: Final = 2**20
"""Initial size of the stack, and of AIfES' parameter and training memory [B]."""
STACK_ALIGNMENT: Final = 16
LOOP: Final = Path(__file__).with_name("aifes_training.c")
"""Program with the training loop that calls AIfES."""
SOURCES: Final = ("core", "basic/base", "basic/default", "cnn")
"""Source files of AIfES that are compiled."""


# -- AIfES's source, and networks in its notation --------------------------------------------------


def version_of(source: Path) -> str:
    """Return the version of AIfES in a folder.

    Raises
    ------
    InputError
        Where it has none.
    """
    wanted = f"the folder of AIfES for Arduino, which is not kept here (git clone {ADDRESS})"
    properties = source / "library.properties"
    lines = properties.read_text(encoding="utf-8").splitlines() if properties.is_file() else []
    facts = dict(line.split("=", 1) for line in lines if "=" in line)
    if not facts.get("name", "").startswith("AIfES") or not (source / "src" / "aifes.h").is_file():
        raise InputError(f"source: expected {wanted}, and {source} is not it")
    return facts.get("version", "unknown")


def digest_of(source: Path) -> str:
    """Return a hash of the names and contents of AIfES' C files."""
    found = hashlib.sha256()
    for path in sorted((source / "src").rglob("*.[ch]")):
        found.update(path.relative_to(source).as_posix().encode() + path.read_bytes())
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of AIfES."""

    kind: str
    sizes: tuple[int | str, ...] = ()
    order: str = ""
    """Part of its function's name for the order with channels first."""
    parameters: tuple[torch.Tensor, ...] = ()
    """Parameters in AIfES' order and layout."""
    text: str = ""
    """Its name on pages; "" if they omit it."""

    @property
    def initial(self) -> str:
        """Its initial value in C."""
        return f"AILAYER_{self.kind.upper()}_F32_A({', '.join(map(str, self.sizes))})"


def layer_of(layer: nn.Module) -> Layer:
    """Convert a layer of PyTorch to a layer of AIfES.

    Raises
    ------
    InputError
        If it is none of those that this module knows.
    """
    if isinstance(layer, nn.Linear):
        width = layer.out_features
        weights = (layer.weight.T, layer.bias)
        return Layer("dense", (width,), parameters=weights, text=f"dense {width}")
    if isinstance(layer, nn.Conv2d):
        shape = (layer.kernel_size, layer.stride, layer.dilation, layer.padding)
        height, width = layer.kernel_size
        text = f"{layer.out_channels} filters of {height} x {width}"
        sizes = (layer.out_channels, *map(_pair, shape))
        return Layer("conv2d", sizes, "_chw", (layer.weight, layer.bias), text)
    if isinstance(layer, nn.BatchNorm2d):
        sizes = (f"{1 - (layer.momentum or 0.0):g}f", f"{layer.eps:g}f")
        return Layer("batch_norm", sizes, "_cfirst", (layer.bias, layer.weight), "batch norm")
    if isinstance(layer, nn.MaxPool2d):
        windows = tuple(map(_pair, (layer.kernel_size, layer.stride, layer.padding)))
        return Layer("maxpool2d", windows, "_chw", text="max pool")
    if isinstance(layer, (nn.ReLU, nn.Flatten)):
        return Layer(type(layer).__name__.lower())
    raise InputError(
        f"{type(layer).__name__}: expected Linear, Conv2d, BatchNorm2d, MaxPool2d, ReLU or "
        "Flatten: no other layer is written for AIfES here"
    )


def _pair(size: Any) -> str:
    height, width = (size, size) if isinstance(size, int) else size
    return f"HW({height}, {width})"


def network_header(made: Training, parameter_bytes: int, training_bytes: int) -> str:
    """Return the header of `LOOP`: a network, its weights, and the sizes of its memory [B]."""
    model, _, (x, _) = made
    layers = list(map(layer_of, model))
    values = [value.detach().numpy().ravel() for layer in layers for value in layer.parameters]
    bits = np.concatenate(values).astype("<f4").view("<u4")
    names = [f"layer_{number}" for number in range(len(layers))]
    defines = {
        "PARAMETER_BYTES": parameter_bytes,
        "TRAINING_BYTES": training_bytes,
        "BATCH": len(x),
        "CLASSES": model[-1].out_features,
        "SAMPLE_ELEMENTS": x.numel(),
        "DIMENSIONS": x.dim(),
    }
    kinds = [f"ailayer_{layer.kind}_f32_t {name} = {layer.initial}"
             for layer, name in zip(layers, names, strict=True)]  # fmt: skip
    calls = [f"last = ailayer_{layer.kind}{layer.order}_f32_default(&{name}, last)"
             for layer, name in zip(layers, names, strict=True)]  # fmt: skip
    return "\n".join((
        *(f"#define {name} {value}u" for name, value in defines.items()),
        f"static const uint32_t first_weights[] = {{{', '.join(map(hex, bits.tolist()))}}};",
        f"static uint16_t sample_shape[] = {{{', '.join(map(str, x.shape))}}};",
        "static ailayer_input_f32_t input_layer = AILAYER_INPUT_F32_A(DIMENSIONS, sample_shape);",
        *(f"static {kind};" for kind in kinds),
        "static ailayer_t *connected_layers(aimodel_t *model)",
        "{",
        "    ailayer_t *last = model->input_layer = ailayer_input_f32_default(&input_layer);",
        *(f"    {call};" for call in calls),
        "    return last;",
        "}",
        "",
    ))  # fmt: skip


# -- programs --------------------------------------------------------------------------------------


def batches(made: Training) -> bytes:
    """Return random samples and classes for each step, in the input format of both programs."""
    model, _, (x, y) = made
    classes = model[-1].out_features
    generator = torch.Generator().manual_seed(1)
    parts = []
    for _ in range(STEPS):
        parts.append(torch.randn(x.shape, generator=generator).numpy().tobytes())
        labels = torch.randint(0, classes, y.shape, generator=generator)
        parts.append(labels.int().numpy().tobytes())
    return b"".join(parts)


def ran(folder: Path, data: bytes, stack_bytes: int, *settings: str) -> ProgramResult:
    """Build a folder for a Cortex-M4F with a stack size [B]; execute it, return its run."""
    size = stack_bytes + -stack_bytes % STACK_ALIGNMENT
    program = build_program(folder, Target.M4, settings=(f"STACK_SIZE={size}", *settings))
    found = run_program(
        program, Target.M4, folder, inputs=data, steps=STEPS, learning_rate=LEARNING_RATE
    ).require_success()
    if len(found.losses) != STEPS:
        raise ToolchainError(f"{folder}: expected {STEPS} losses, got {len(found.losses)}")
    return found


def our_program(folder: Path, data: bytes) -> ProgramResult:
    """Execute an exported step with the smallest stack that it needs."""
    return ran(folder, data, ran(folder, data, ROOMY_BYTES).metrics["stack_bytes"])


def aifes_program(source: Path, folder: Path, made: Training, data: bytes) -> ProgramResult:
    """Execute AIfES with the smallest memory and stack that it needs.

    It is built in the folder of an exported step, by the same makefile for the same board.
    """
    shutil.copytree(source / "src", folder / "aifes")
    shutil.copy(LOOP, folder)
    header = folder / "aifes_network.h"
    files = [LOOP.name, "host/pm_text.c"]
    for part in SOURCES:
        below = sorted((folder / "aifes" / part).rglob("*.c"))
        files += [path.relative_to(folder).as_posix() for path in below]
    settings = (f"SOURCES={' '.join(files)}", "EXTRA=-w -I. -Ihost -Iaifes")
    header.write_text(network_header(made, ROOMY_BYTES, ROOMY_BYTES))
    asked = ran(folder, data, ROOMY_BYTES, *settings).metrics
    header.write_text(network_header(made, asked["parameter_bytes"], asked["training_bytes"]))
    return ran(folder, data, asked["stack_bytes"], *settings)


def program_facts(found: ProgramResult) -> dict[str, Any]:
    """Return the record fields of an executed program."""
    names = ("ram_bytes", "stack_bytes", "flash_bytes")
    facts = {name: found.metrics[name] for name in names}
    losses = list(found.losses.values())
    return {"instructions": found.metrics["step_instructions"], **facts, "losses": losses}


def exported_facts(deployment: Deployment, found: ProgramResult) -> dict[str, Any]:
    """Return the record fields of an exported step, with its solver's results."""
    result = deployment.result
    if result is None:
        raise ValueError(f"{deployment.step.graph.name}: expected the result of a solve")
    facts = {"arena_bytes": deployment.arena.bytes, "solved": str(result.status)}
    return {**program_facts(found), **facts, "gap": result.gap}


def loss_difference(programs: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the maximum relative difference of losses between AIfES and keep-all.

    Raises
    ------
    ToolchainError
        If it exceeds `LOSS_TOLERANCE`.
    """
    theirs, ours = (programs[name]["losses"] for name in ("aifes", "keep_all"))
    apart = float(max(abs(a - b) / abs(b) for a, b in zip(theirs, ours, strict=True)))
    if not apart <= LOSS_TOLERANCE:
        raise ToolchainError(f"losses: AIfES has {theirs}, and the exported step has {ours}")
    return apart


def measure(fields: dict[str, Any], folder: str) -> Record:
    """Execute AIfES, whose source is in a folder, and exported steps; return the record."""
    begun, network, source = time.perf_counter(), fields["network"], Path(folder)
    made = training(network)
    model, loss_fn, inputs = made
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    data = batches(made)
    programs = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, options in EXPORTS.items():
            at = Path(temporary) / name
            deployment = pmt.export(
                model, loss_fn, inputs, folder=at, name=network, optimizer=optimizer, ram=ROOMY,
                paging=False, time_limit=LIMIT_S, gap=GAP, **options,
            )  # fmt: skip
            programs[name] = exported_facts(deployment, our_program(at, data))
        found = aifes_program(source, Path(temporary) / "keep_all", made, data)
        programs["aifes"] = program_facts(found)
    return make_record(
        KIND,
        network,
        cell=fields,
        seconds=time.perf_counter() - begun,
        limit_s=LIMIT_S,
        batch=len(inputs[0]),
        input_shape=list(inputs[0].shape[1:]),
        layers=[text for layer in model if (text := layer_of(layer).text)],
        parameters=parameters(made),
        step_macs=step_macs(made),
        steps=STEPS,
        loss_difference=loss_difference(programs),
        programs=programs,
        aifes={"version": version_of(source), "sha256": digest_of(source)},
        tools=tools(),
    )


def runs(networks: tuple[str, ...] = tuple(NETWORKS), source: str = REQUIRED) -> Iterator[Cell]:
    """Yield a run for each network if AIfES' source and the tools are available."""
    version_of(Path(source))
    require_programs(Target.M4)
    for network in networks:
        yield Cell(network, {"network": network})


STUDY: Final = Study(
    name="aifes",
    kind=KIND,
    runs=runs,
    smoke_runs=lambda: (),
    measure=measure,
    start_of=lambda _run, _store, settings: settings["source"],
    has_own_process=False,
)
