"""Kernels of CMSIS-NN beside those of quantized layers: the same numbers, on an emulated core.

``--set source=FOLDER`` names a clone of CMSIS-NN, which is not kept here; ``git clone`` it from the
address in `ADDRESS`. It is copied into a temporary folder and not changed. Needs GCC for Arm and
QEMU, and PyTorch to say its version.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from harness import REQUIRED, Cell, Study, record
from mcu.boards import tools
from mcu.quantized import INT8, Layers, mobilenet_front, square
from poetmodel.errors import InputError
from poetmodel.export.board import Target, ToolchainError, build, require, run
from poetmodel.export.exporting import export_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from poetmodel.export.board import ProgramRun
    from poetmodel.lowered.calls import ConvolutionSizes
    from poetmodel.sweeps.measurement import Record

NAME: Final = "int8 layers"
KIND: Final = "cmsis-nn"
"""Kind of the records."""
ADDRESS: Final = "https://github.com/ARM-software/CMSIS-NN"
LAYERS: Final = (
    *(("of the front", kernel, sizes) for kernel, sizes in mobilenet_front()),
    ("of 128 to 128 channels, 6 x 6", "pm_q8_pointwise", square(128, 128, 6)),
    ("of 16 to 16 channels, 32 x 32", "pm_q8_conv2d", square(16, 16, 32, 3)),
    ("of 64 channels, 24 x 24", "pm_q8_depthwise", square(64, 64, 24, 3, 1, 64)),
)
"""What a layer is of, its kernel and sizes: those of MobileNetV2-0.35, and some alone."""
KINDS: Final = ("pm_q8_conv2d", "pm_q8_depthwise", "pm_q8_pointwise")
"""In the order of `PROGRAM`."""
PROGRAM: Final = Path(__file__).with_name("cmsis_nn_layers.c")
"""What computes layers by both."""
SOURCES: Final = ("ConvolutionFunctions", "NNSupportFunctions")
"""What is compiled of CMSIS-NN."""
FLOATS: Final = ("f16.c", "f32.c")
"""What of it is not for integers."""
SCRATCH_BYTES: Final = 2**16
"""What CMSIS-NN may ask for [B]."""
APART: Final = 0.002
"""Which share of the elements may differ, by one step: CMSIS-NN rounds scales to 31 bits, and
biases to steps of the sum."""
LIMIT_S: Final = 600.0


def commit_of(source: Path) -> str:
    """Return the commit of a clone of CMSIS-NN.

    Raises
    ------
    InputError
        Where it is none.
    """
    command = ["git", "-C", str(source), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not (source / "Include" / "arm_nnfunctions.h").is_file():
        raise InputError(
            f"source: expected a clone of CMSIS-NN, which is not kept here (git clone {ADDRESS}), "
            f"and {source} is none"
        )
    return done.stdout.strip()


# -- layers in CMSIS-NN's words --------------------------------------------------------------------


def in_31_bits(factor: float) -> tuple[int, int]:
    """Return a factor as CMSIS-NN has it: 31 bits, and a power of two."""
    fraction, shift = math.frexp(factor)
    multiplier = round(fraction * 2**31)
    return (multiplier // 2, shift + 1) if multiplier == 2**31 else (multiplier, shift)


def header(layers: Layers, sizes: Sequence[ConvolutionSizes]) -> str:
    """Return what `PROGRAM` includes: layers with their numbers."""
    lines, rows = [], []
    for k, (call, shape) in enumerate(zip(layers.calls, sizes, strict=True)):
        given = layers.given(call)
        factors = [in_31_bits(float(s) * given["inverse"]) for s in given["scale"]]
        rounded = np.rint(given["bias"].astype(np.float64) / given["scale"]).astype(np.int64)
        arrays: dict[str, tuple[str, Any]] = {
            "shape": ("const int32_t", shape),
            "x": ("const int8_t", given["x"]),
            "w": ("const int8_t", given["w"]),
            "start": ("const int32_t", given["start"]),
            "scale": ("const float", map(float.hex, given["scale"].astype(float))),
            "bias": ("const float", map(float.hex, given["bias"].astype(float))),
            "multiplier": ("int32_t", [multiplier for multiplier, _ in factors]),
            "shift": ("int32_t", [shift for _, shift in factors]),
            "rounded": ("const int32_t", rounded),
        }
        for name, (kind, values) in arrays.items():
            lines.append(f"static {kind} {name}_{k}[] = {{{', '.join(map(str, values))}}};")
        # Of a 1 x 1 kernel the zero of x is only in what its sums begin with.
        zero_x = _zero_of(given) if call.kernel == KINDS[2] else given["zero_x"]
        numbers = f"{KINDS.index(call.kernel)}, {zero_x}, {given['zero']}, {given['inverse']!r}f"
        rows.append(f"    {{{numbers}, {', '.join(f'{name}_{k}' for name in arrays)}}},")
    most = max(shape.results * shape.out_plane for shape in sizes)
    return "\n".join((
        f"#define MOST_ELEMENTS {most}",
        f"#define SCRATCH_BYTES {SCRATCH_BYTES}",
        *lines,
        "static const layer_t layers[] = {",
        *rows,
        "};",
        "",
    ))  # fmt: skip


def _zero_of(given: Mapping[str, Any]) -> int:
    """Return the zero of what a layer reads, from the sums of its weights."""
    summed = given["w"].reshape(given["results"], -1).sum(1, dtype=np.int64)
    k = int(np.abs(summed).argmax())
    return -int(given["start"][k]) // int(summed[k])


# -- programs --------------------------------------------------------------------------------------


def program(source: Path, folder: Path, wanted: Sequence[tuple[str, str, Any]]) -> ProgramRun:
    """Return what both do; it is built in an exported folder, by its makefile, for its board."""
    layers, sizes = Layers(), [shape for _, _, shape in wanted]
    for _, kernel, shape in wanted:
        layers.layer(kernel, shape, limits=INT8)
    step = layers.step(handed=False)
    export_step(step, folder, ram="100%", paging=False, time_limit=LIMIT_S, gap=0.5)
    shutil.copytree(source / "Include", folder / "cmsis" / "Include")
    files = [PROGRAM.name, "host/pm_text.c", *(f"src/{kernel}.c" for kernel in KINDS)]
    for part in SOURCES:
        found = shutil.copytree(source / "Source" / part, folder / "cmsis" / part)
        names = (path.relative_to(folder).as_posix() for path in sorted(found.rglob("*.c")))
        files += [name for name in names if not name.endswith(FLOATS)]
    shutil.copy(PROGRAM, folder)
    (folder / "cmsis_nn_layers.h").write_text(header(layers, sizes), encoding="utf-8")
    settings = (f"SOURCES={' '.join(files)}", "EXTRA=-w -I. -Isrc -Ihost -Icmsis/Include")
    built = build(folder, Target.M4, settings=settings)
    return run(built, Target.M4, folder, inputs=b"", steps=1, learning_rate=0.0).require_success()


def checked(found: ProgramRun) -> dict[str, int]:
    """Return in how many elements CMSIS-NN and ours are apart.

    Raises
    ------
    ToolchainError
        If they do not compute the same.
    """
    names = ("elements", "apart", "most", "scratch_bytes")
    figures = {name: found.figures[name] for name in names}
    if figures["most"] > 1 or figures["apart"] > APART * figures["elements"]:
        raise ToolchainError(f"CMSIS-NN and ours compute other results: {figures}")
    return figures


def macs(sizes: ConvolutionSizes) -> int:
    """Return the products of a layer."""
    return sizes.results * sizes.out_plane * sizes.group_channels * sizes.window


def rows(found: ProgramRun, wanted: Sequence[tuple[str, str, Any]]) -> list[dict[str, Any]]:
    """Return products and instructions of layers, by what they are of and their kernel."""
    sums: dict[tuple[str, str], Counter[str]] = {}
    for k, (of, kernel, sizes) in enumerate(wanted):
        both = {
            name: found.node_instructions[2 * k + n] for n, name in enumerate(("theirs", "ours"))
        }
        sums.setdefault((of, kernel), Counter()).update({"layers": 1, "macs": macs(sizes), **both})
    return [{"of": of, "kernel": kernel, **row} for (of, kernel), row in sums.items()]


def measure(fields: dict[str, Any], folder: str) -> Record:
    """Return the record of layers by CMSIS-NN, whose clone is in a folder, and by ours."""
    begun, source = time.perf_counter(), Path(folder)
    with tempfile.TemporaryDirectory() as temporary:
        found = program(source, Path(temporary), LAYERS)
    return record(
        KIND,
        NAME,
        cell=fields,
        seconds=time.perf_counter() - begun,
        limit_s=LIMIT_S,
        rows=rows(found, LAYERS),
        **checked(found),
        source=commit_of(source),
        tools=tools(),
    )


def runs(source: str = REQUIRED) -> Iterator[Cell]:
    """Yield the run, where CMSIS-NN's clone and the programs are at hand."""
    commit_of(Path(source))
    require(Target.M4)
    yield Cell(NAME, {"network": NAME})


STUDY: Final = Study(
    name="cmsis-nn",
    kind=KIND,
    runs=runs,
    smoke_runs=lambda: (),
    measure=measure,
    start_of=lambda _run, _store, settings: settings["source"],
    alone=False,
)
