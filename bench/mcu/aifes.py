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
from mcu.boards import ROOMY, read_tool_versions
from mcu.networks import count_parameters, count_step_macs
from mcu.small_networks import NETWORKS, make_training
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
"""Options of the exported steps of a network, all without paging."""
STEPS: Final = 5
"""Number of executed training steps."""
LEARNING_RATE: Final = 0.05
LOSS_TOLERANCE: Final = 1e-5
"""Maximum relative difference of losses between AIfES and exported steps."""
LIMIT_S: Final = 60.0
"""Time limit of each export [s]."""
GAP: Final = 1e-4
ROOMY_BYTES: Final = 2**20
"""Initial size of the stack, and of AIfES' parameter and training memory [B]."""
STACK_ALIGNMENT: Final = 16
"""Divisor of stack sizes [B]."""
LOOP: Final = Path(__file__).with_name("aifes_training.c")
"""Program with the training loop that calls AIfES."""
SOURCES: Final = ("core", "basic/base", "basic/default", "cnn")
"""Folders of AIfES that are compiled."""


# -- AIfES's source, and networks in its notation --------------------------------------------------


def read_version(source: Path) -> str:
    """Return the version of AIfES in a folder.

    Raises
    ------
    InputError
        If the folder is not the source of AIfES.
    """
    expected = f"the folder of AIfES for Arduino, which is not kept here (git clone {ADDRESS})"
    properties = source / "library.properties"
    lines = properties.read_text(encoding="utf-8").splitlines() if properties.is_file() else []
    fields = dict(line.split("=", 1) for line in lines if "=" in line)
    if not fields.get("name", "").startswith("AIfES") or not (source / "src" / "aifes.h").is_file():
        raise InputError(f"source: expected {expected}, and {source} is not it")
    return fields.get("version", "unknown")


def compute_digest(source: Path) -> str:
    """Return the SHA-256 hash of paths and contents of AIfES' C files."""
    digest = hashlib.sha256()
    for path in sorted((source / "src").rglob("*.[ch]")):
        digest.update(path.relative_to(source).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of AIfES."""

    kind: str
    """Its kind in names of types and functions."""
    sizes: tuple[int | str, ...] = ()
    """Arguments of its initializer in C."""
    order: str = ""
    """Suffix of its function for layouts with channels first."""
    parameters: tuple[torch.Tensor, ...] = ()
    """Parameters in AIfES' order and layout."""
    text: str = ""
    """Its description on pages; empty if they omit it."""

    @property
    def initial(self) -> str:
        """Its initializer in C."""
        return f"AILAYER_{self.kind.upper()}_F32_A({', '.join(map(str, self.sizes))})"


def convert_layer(layer: nn.Module) -> Layer:
    """Convert a layer of PyTorch to a layer of AIfES.

    Raises
    ------
    InputError
        If the type of the layer is not supported here.
    """
    if isinstance(layer, nn.Linear):
        width = layer.out_features
        weights = (layer.weight.T, layer.bias)
        return Layer("dense", (width,), parameters=weights, text=f"dense {width}")
    if isinstance(layer, nn.Conv2d):
        shape = (layer.kernel_size, layer.stride, layer.dilation, layer.padding)
        height, width = layer.kernel_size
        text = f"{layer.out_channels} filters of {height} x {width}"
        sizes = (layer.out_channels, *map(_format_pair, shape))
        return Layer("conv2d", sizes, "_chw", (layer.weight, layer.bias), text)
    if isinstance(layer, nn.BatchNorm2d):
        sizes = (f"{1 - (layer.momentum or 0.0):g}f", f"{layer.eps:g}f")
        return Layer("batch_norm", sizes, "_cfirst", (layer.bias, layer.weight), "batch norm")
    if isinstance(layer, nn.MaxPool2d):
        windows = tuple(map(_format_pair, (layer.kernel_size, layer.stride, layer.padding)))
        return Layer("maxpool2d", windows, "_chw", text="max pool")
    if isinstance(layer, (nn.ReLU, nn.Flatten)):
        return Layer(type(layer).__name__.lower())
    raise InputError(
        f"{type(layer).__name__}: expected Linear, Conv2d, BatchNorm2d, MaxPool2d, ReLU or "
        "Flatten: no other layer is written for AIfES here"
    )


def _format_pair(size: Any) -> str:
    height, width = (size, size) if isinstance(size, int) else size
    return f"HW({height}, {width})"


def format_header(training: Training, parameter_bytes: int, training_bytes: int) -> str:
    """Format the header of `LOOP`: a network, its weights, and the sizes of its memory [B]."""
    model, _, (x, _) = training
    layers = list(map(convert_layer, model))
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


def make_batches(training: Training) -> bytes:
    """Return random samples and classes for each step, in the input format of both programs."""
    model, _, (x, y) = training
    classes = model[-1].out_features
    generator = torch.Generator().manual_seed(1)
    parts = []
    for _ in range(STEPS):
        parts.append(torch.randn(x.shape, generator=generator).numpy().tobytes())
        labels = torch.randint(0, classes, y.shape, generator=generator)
        parts.append(labels.int().numpy().tobytes())
    return b"".join(parts)


def execute_program(folder: Path, data: bytes, stack_bytes: int, *settings: str) -> ProgramResult:
    """Build the program of a folder for a Cortex-M4F with a stack size [B]; execute it.

    `data` are the batches. Raises `ToolchainError` if the number of losses is not `STEPS`.
    """
    size = stack_bytes + -stack_bytes % STACK_ALIGNMENT
    program = build_program(folder, Target.M4, settings=(f"STACK_SIZE={size}", *settings))
    result = run_program(
        program, Target.M4, folder, inputs=data, steps=STEPS, learning_rate=LEARNING_RATE
    ).require_success()
    if len(result.losses) != STEPS:
        raise ToolchainError(f"{folder}: expected {STEPS} losses, got {len(result.losses)}")
    return result


def execute_export(folder: Path, data: bytes) -> ProgramResult:
    """Execute an exported step twice, to measure its stack and then with this size of stack."""
    return execute_program(
        folder, data, execute_program(folder, data, ROOMY_BYTES).metrics["stack_bytes"]
    )


def execute_aifes(source: Path, folder: Path, training: Training, data: bytes) -> ProgramResult:
    """Execute AIfES twice, to measure its memory and stack and then with these sizes.

    It is copied into the folder of an exported step, and built by the same makefile for the same
    board.
    """
    shutil.copytree(source / "src", folder / "aifes")
    shutil.copy(LOOP, folder)
    header = folder / "aifes_network.h"
    files = [LOOP.name, "host/pm_text.c"]
    for folder_name in SOURCES:
        paths = sorted((folder / "aifes" / folder_name).rglob("*.c"))
        files += [path.relative_to(folder).as_posix() for path in paths]
    settings = (f"SOURCES={' '.join(files)}", "EXTRA=-w -I. -Ihost -Iaifes")
    header.write_text(format_header(training, ROOMY_BYTES, ROOMY_BYTES))
    measured = execute_program(folder, data, ROOMY_BYTES, *settings).metrics
    header.write_text(
        format_header(training, measured["parameter_bytes"], measured["training_bytes"])
    )
    return execute_program(folder, data, measured["stack_bytes"], *settings)


def list_program_facts(result: ProgramResult) -> dict[str, Any]:
    """Return the record fields of an executed program."""
    names = ("ram_bytes", "stack_bytes", "flash_bytes")
    facts = {name: result.metrics[name] for name in names}
    losses = list(result.losses.values())
    return {"instructions": result.metrics["step_instructions"], **facts, "losses": losses}


def list_export_facts(deployment: Deployment, result: ProgramResult) -> dict[str, Any]:
    """Return the record fields of an exported step, results of its solve included."""
    solved = deployment.result
    facts = {"arena_bytes": deployment.arena.bytes, "solved": str(solved.status)}
    return {**list_program_facts(result), **facts, "gap": solved.gap}


def compare_losses(programs: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the maximum relative difference of losses between AIfES and keep-all.

    Raises
    ------
    ToolchainError
        If it exceeds `LOSS_TOLERANCE`.
    """
    their_losses, our_losses = (programs[name]["losses"] for name in ("aifes", "keep_all"))
    difference = float(
        max(
            abs(their_loss - our_loss) / abs(our_loss)
            for their_loss, our_loss in zip(their_losses, our_losses, strict=True)
        )
    )
    if not difference <= LOSS_TOLERANCE:
        raise ToolchainError(
            f"losses: AIfES has {their_losses}, and the exported step has {our_losses}"
        )
    return difference


def measure(fields: dict[str, Any], folder: str) -> Record:
    """Execute AIfES, whose source is in `folder`, and exported steps; return the record."""
    begin_s, network, source = time.perf_counter(), fields["network"], Path(folder)
    training = make_training(network)
    model, loss_fn, inputs = training
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    data = make_batches(training)
    programs = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, options in EXPORTS.items():
            path = Path(temporary) / name
            deployment = pmt.export(
                model, loss_fn, inputs, folder=path, name=network, optimizer=optimizer, ram=ROOMY,
                paging=False, time_limit=LIMIT_S, gap=GAP, **options,
            )  # fmt: skip
            programs[name] = list_export_facts(deployment, execute_export(path, data))
        result = execute_aifes(source, Path(temporary) / "keep_all", training, data)
        programs["aifes"] = list_program_facts(result)
    return make_record(
        KIND,
        network,
        cell=fields,
        seconds=time.perf_counter() - begin_s,
        limit_s=LIMIT_S,
        batch=len(inputs[0]),
        input_shape=list(inputs[0].shape[1:]),
        layers=[text for layer in model if (text := convert_layer(layer).text)],
        parameters=count_parameters(training),
        step_macs=count_step_macs(training),
        steps=STEPS,
        loss_difference=compare_losses(programs),
        programs=programs,
        aifes={"version": read_version(source), "sha256": compute_digest(source)},
        tools=read_tool_versions(),
    )


def runs(networks: tuple[str, ...] = tuple(NETWORKS), source: str = REQUIRED) -> Iterator[Cell]:
    """Yield a run for each network; raise an exception if AIfES' source or a tool is missing."""
    read_version(Path(source))
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
