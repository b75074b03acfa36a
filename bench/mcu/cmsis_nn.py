"""Comparison of CMSIS-NN with exported kernels of int8 layers, on equal data and an emulated core.

``--set source=FOLDER`` names a clone of CMSIS-NN, which is not part of this repository;
``git clone`` it from the address in `ADDRESS`. It is copied to a temporary folder and not changed.
Needs GCC for Arm and QEMU, and PyTorch for its version.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from harness import REQUIRED, Cell, Study, make_record
from mcu.boards import tools
from mcu.quantized import INT8, Layers, mobilenet_layers, pool_sizes, square
from poetmodel.errors import InputError
from poetmodel.export.board import (
    Target,
    ToolchainError,
    build_program,
    require_programs,
    run_program,
)
from poetmodel.export.exporting import export_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from poetmodel.export.board import ProgramResult
    from poetmodel.lowered.calls import ConvolutionSizes
    from poetmodel.sweeps.measurement import Record

NAME: Final = "int8 layers"
KIND: Final = "cmsis-nn"
"""Kind of the records."""
ADDRESS: Final = "https://github.com/ARM-software/CMSIS-NN"
CONVOLUTIONS: Final = ("conv2d", "depthwise", "pointwise", "linear")
"""Kinds of layers with weights."""
KINDS: Final = (*CONVOLUTIONS, "add", "maximum", "average")
"""Kinds of layers, in the order of `PROGRAM`."""
LAYERS: Final = (
    *(("of the front", kind, sizes) for kind, sizes in mobilenet_layers()),
    ("of 128 to 128 channels, 6 x 6", "pointwise", square(128, 128, 6)),
    ("of 16 to 16 channels, 32 x 32", "conv2d", square(16, 16, 32, 3)),
    ("of 64 channels, 24 x 24", "depthwise", square(64, 64, 24, 3, 1, 64)),
    ("of 640 to 128", "linear", square(640, 128, 1)),
    ("of 128 to 640", "linear", square(128, 640, 1)),
    ("of 64 to 10", "linear", square(64, 10, 1)),
    ("of 64 channels, 24 x 24", "add", square(64, 64, 24)),
    ("of 3 x 3, 64 channels, 24 x 24", "maximum", square(64, 64, 24, 3, 2, 64)),
    ("of 2 x 2, 16 channels, 32 x 32", "maximum", pool_sizes(16, (32, 32), (2, 2), 2)),
    ("of 3 x 3, 32 channels, 25 x 25", "average", pool_sizes(32, (25, 25), (3, 3), 2)),
    ("of 25 x 5, 64 channels, 25 x 5", "average", pool_sizes(64, (25, 5), (25, 5), 1)),
    ("of 3 x 3, 1280 channels, 3 x 3", "average", pool_sizes(1280, (3, 3), (3, 3), 1)),
)
"""Group, kind and sizes of each layer: those of MobileNetV2-0.35, and single ones.

Average pools have windows of odd sizes: the kernels round ties to the even byte, CMSIS-NN rounds
them away from 0.
"""
PROGRAM: Final = Path(__file__).with_name("cmsis_nn_layers.c")
"""Source of the program that computes each layer with both libraries."""
SOURCES: Final = (
    "BasicMathFunctions",
    "ConvolutionFunctions",
    "FullyConnectedFunctions",
    "NNSupportFunctions",
    "PoolingFunctions",
)
"""Folders of CMSIS-NN that are compiled."""
FLOATS: Final = ("f16.c", "f32.c")
"""Suffixes of its files for floats, which are not compiled."""
SCRATCH_BYTES: Final = 2**16
"""Size of the scratch memory for CMSIS-NN [B]."""
ADD_SHIFT: Final = 20
"""Bits by which CMSIS-NN shifts elements before it adds them."""
APART: Final = 0.002
"""Upper limit on the fraction of elements that differ, by one step each: CMSIS-NN rounds scales to
31 bits, and biases to steps of the sum."""
DEVICE: Final = "stm32h743"
"""A device whose flash has room for all layers."""
LIMIT_S: Final = 600.0

Layer: TypeAlias = tuple[str, str, "ConvolutionSizes"]
"""Group, kind and sizes of a layer."""


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


# -- layers in CMSIS-NN's notation -----------------------------------------------------------------


def kernel_of(kind: str) -> str:
    """Return the kernel of a kind of layer."""
    return "pm_q8_pointwise" if kind == "linear" else f"pm_q8_{kind}"


def in_31_bits(factor: float) -> tuple[int, int]:
    """Return a factor in CMSIS-NN's format: 31 bits, and a power of two."""
    fraction, shift = math.frexp(factor)
    multiplier = round(fraction * 2**31)
    return (multiplier // 2, shift + 1) if multiplier == 2**31 else (multiplier, shift)


def header(layers: Layers, kinds: Sequence[str], sizes: Sequence[ConvolutionSizes]) -> str:
    """Return the header of `PROGRAM` with the data of all layers."""
    lines, rows = [], []
    for k, (call, kind, shape) in enumerate(zip(layers.calls, kinds, sizes, strict=True)):
        given = layers.given(call)
        numbers, arrays = _fields(kind, given)
        numbers |= {"kind": KINDS.index(kind), "zero": given.get("zero", 0)}
        numbers["inverse"] = f"{given.get('inverse', 0.0)!r}f"
        fields = [f".{name} = {value}" for name, value in numbers.items()]
        for name, (type_, values) in {"shape": ("const int32_t", shape), **arrays}.items():
            lines.append(f"static {type_} {name}_{k}[] = {{{', '.join(map(str, values))}}};")
            fields.append(f".{name} = {name}_{k}")
        rows.append(f"    {{{', '.join(fields)}}},")
    most = max(shape.results * shape.out_plane for shape in sizes)
    return "\n".join((
        f"#define MOST_ELEMENTS {most}",
        f"#define SCRATCH_BYTES {SCRATCH_BYTES}",
        f"#define ADD_SHIFT {ADD_SHIFT}",
        *lines,
        "static const layer_t layers[] = {",
        *rows,
        "};",
        "",
    ))  # fmt: skip


def _fields(
    kind: str, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, tuple[str, Iterable[Any]]]]:
    """Return the numbers, and the arrays with their types, of a layer of `PROGRAM`."""
    if kind == "add":
        scales = np.array([given["a_scale"], given["b_scale"]])
        # As in TensorFlow Lite: elements in steps of twice the larger scale.
        twice = 2 * float(scales.max())
        factors = [*map(float, scales / twice), twice * given["inverse"] / 2**ADD_SHIFT]
        numbers = {"zero_x": given["a_zero"], "zero_w": given["b_zero"]}
        data = {"x": given["a"], "w": given["b"]}
        return numbers, {**_bytes(data), **_scale_arrays(scales, factors)}
    if kind not in CONVOLUTIONS:
        ends = {name: ("const int32_t", given[name]) for name in ("rows", "columns")}
        scales = np.array([given.get("scale", 0.0)])
        numbers = {"zero_x": given.get("zero_x", 0)}
        return numbers, {**_bytes({"x": given["x"]}), **ends, **_scale_arrays(scales, ())}
    scales = given["scale"]
    rounded = np.rint(given["bias"].astype(np.float64) / scales).astype(np.int64)
    arrays: dict[str, tuple[str, Iterable[Any]]] = {
        "start": ("const int32_t", given["start"]),
        "bias": ("const float", map(float.hex, given["bias"].astype(float))),
        "rounded_bias": ("const int32_t", rounded),
    }
    # Kernels of 1 x 1 windows receive the zero of x only within `start`.
    zero_x = given["zero_x"] if "zero_x" in given else _zero_of(given)
    factors = [float(scale) * given["inverse"] for scale in scales]
    data = {name: given[name] for name in ("x", "w")}
    return {"zero_x": zero_x}, {**_bytes(data), **arrays, **_scale_arrays(scales, factors)}


def _bytes(data: Mapping[str, Any]) -> dict[str, tuple[str, Iterable[Any]]]:
    return {name: ("const int8_t", values) for name, values in data.items()}


def _scale_arrays(scales: Any, factors: Sequence[float]) -> dict[str, tuple[str, Iterable[Any]]]:
    """Return the arrays of scales, and of factors in 31 bits unless there are none."""
    arrays: dict[str, tuple[str, Iterable[Any]]] = {
        "scale": ("const float", map(float.hex, scales.astype(float)))
    }
    if factors:
        multipliers, shifts = zip(*map(in_31_bits, factors), strict=True)
        arrays |= {"multiplier": ("int32_t", multipliers), "shift": ("int32_t", shifts)}
    return arrays


def _zero_of(given: Mapping[str, Any]) -> int:
    """Return the zero of the input of a layer, from the sums of its weights."""
    summed = given["w"].reshape(given["results"], -1).sum(1, dtype=np.int64)
    k = int(np.abs(summed).argmax())
    return -int(given["start"][k]) // int(summed[k])


# -- programs --------------------------------------------------------------------------------------


def add_layer(layers: Layers, kind: str, sizes: ConvolutionSizes) -> None:
    """Add a call of the kernel of a layer to layers."""
    if kind == "add":
        layers.add(sizes.results * sizes.out_plane, limits=INT8)
    elif kind in CONVOLUTIONS:
        layers.layer(kernel_of(kind), sizes, limits=INT8)
    else:
        layers.pool(kernel_of(kind), sizes, limits=INT8, same_scale=True)


def program(source: Path, folder: Path, wanted: Sequence[Layer]) -> ProgramResult:
    """Build `PROGRAM` in an exported folder by its makefile, and run it on the emulated board.

    Each kind must be among the wanted layers, because the program calls all kernels.
    """
    layers = Layers()
    for _, kind, sizes in wanted:
        add_layer(layers, kind, sizes)
    step = layers.step(handed=False)
    export_step(step, folder, device=DEVICE, ram="100%", paging=False, time_limit=LIMIT_S, gap=0.5)
    shutil.copytree(source / "Include", folder / "cmsis" / "Include")
    kernels = sorted(set(map(kernel_of, KINDS)))
    files = [PROGRAM.name, "host/pm_text.c", *(f"src/{kernel}.c" for kernel in kernels)]
    for part in SOURCES:
        found = shutil.copytree(source / "Source" / part, folder / "cmsis" / part)
        names = (path.relative_to(folder).as_posix() for path in sorted(found.rglob("*.c")))
        files += [name for name in names if not name.endswith(FLOATS)]
    shutil.copy(PROGRAM, folder)
    content = header(layers, [kind for _, kind, _ in wanted], [sizes for _, _, sizes in wanted])
    (folder / "cmsis_nn_layers.h").write_text(content, encoding="utf-8")
    settings = (f"SOURCES={' '.join(files)}", "EXTRA=-w -I. -Isrc -Ihost -Icmsis/Include")
    built = build_program(folder, Target.M4, settings=settings)
    return run_program(
        built, Target.M4, folder, inputs=b"", steps=1, learning_rate=0.0
    ).require_success()


def checked(found: ProgramResult) -> dict[str, int]:
    """Return the numbers of elements and of differences, the largest one, and scratch memory [B].

    Raises
    ------
    ToolchainError
        If results of CMSIS-NN and the kernels differ by more than one step, or too often.
    """
    names = ("elements", "apart", "most", "scratch_bytes")
    figures = {name: found.metrics[name] for name in names}
    if figures["most"] > 1 or figures["apart"] > APART * figures["elements"]:
        raise ToolchainError(f"CMSIS-NN and ours compute other results: {figures}")
    return figures


def terms(kind: str, sizes: ConvolutionSizes) -> int:
    """Return the terms of the results of a layer: products, addends, or elements of windows."""
    each = 2 if kind == "add" else sizes.group_channels * sizes.window
    return sizes.results * sizes.out_plane * each


def rows(found: ProgramResult, wanted: Sequence[Layer]) -> list[dict[str, Any]]:
    """Return terms and instructions of layers by group and kind."""
    sums: dict[tuple[str, str], Counter[str]] = {}
    for k, (of, kind, sizes) in enumerate(wanted):
        both = {
            name: found.node_instructions[2 * k + n] for n, name in enumerate(("theirs", "ours"))
        }
        counted = {"layers": 1, "terms": terms(kind, sizes), **both}
        sums.setdefault((of, kind), Counter()).update(counted)
    return [{"of": of, "kind": kind, **row} for (of, kind), row in sums.items()]


def measure(fields: dict[str, Any], folder: str) -> Record:
    """Execute layers with CMSIS-NN, cloned in a folder, and exported kernels; return the record."""
    begun, source = time.perf_counter(), Path(folder)
    with tempfile.TemporaryDirectory() as temporary:
        found = program(source, Path(temporary), LAYERS)
    return make_record(
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
    """Yield the run if CMSIS-NN's clone and the tools are available."""
    commit_of(Path(source))
    require_programs(Target.M4)
    yield Cell(NAME, {"network": NAME})


STUDY: Final = Study(
    name="cmsis-nn",
    kind=KIND,
    runs=runs,
    smoke_runs=lambda: (),
    measure=measure,
    start_of=lambda _run, _store, settings: settings["source"],
    has_own_process=False,
)
