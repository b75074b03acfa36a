"""Comparison of CMSIS-NN with exported kernels of int8 layers, on equal data and an emulated core.

``--set source=FOLDER`` names a clone of CMSIS-NN, which is not part of this repository;
``git clone`` it from the address in `ADDRESS`. It is copied to a temporary folder and not changed.
Needs GCC for Arm and QEMU; PyTorch is needed only for the version in records.
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
from mcu.boards import read_tool_versions
from mcu.quantized import INT8, Layers, list_mobilenet_layers, pool_sizes, square_sizes
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
    *(("of the front", kind, sizes) for kind, sizes in list_mobilenet_layers()),
    ("of 128 to 128 channels, 6 x 6", "pointwise", square_sizes(128, 128, 6)),
    ("of 16 to 16 channels, 32 x 32", "conv2d", square_sizes(16, 16, 32, 3)),
    ("of 64 channels, 24 x 24", "depthwise", square_sizes(64, 64, 24, 3, 1, 64)),
    ("of 640 to 128", "linear", square_sizes(640, 128, 1)),
    ("of 128 to 640", "linear", square_sizes(128, 640, 1)),
    ("of 64 to 10", "linear", square_sizes(64, 10, 1)),
    ("of 64 channels, 24 x 24", "add", square_sizes(64, 64, 24)),
    ("of 3 x 3, 64 channels, 24 x 24", "maximum", square_sizes(64, 64, 24, 3, 2, 64)),
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
"""Folders of CMSIS-NN's source that are compiled."""
FLOATS: Final = ("f16.c", "f32.c")
"""Ends of names of its files for floats, which are not compiled."""
SCRATCH_BYTES: Final = 2**16
"""Size of the scratch memory for CMSIS-NN [B]."""
ADD_SHIFT: Final = 20
"""Bits by which CMSIS-NN shifts elements before it adds them."""
MAX_DIFFERENT: Final = 0.002
"""Upper limit on the fraction of elements that differ, by one step each: CMSIS-NN rounds scales to
31 bits, and biases to steps of the sum."""
DEVICE: Final = "stm32h743"
"""Device whose flash is large enough for all layers."""
LIMIT_S: Final = 600.0
"""Time limit of the solve of the export [s]."""

Layer: TypeAlias = tuple[str, str, "ConvolutionSizes"]
"""Group, kind and sizes of a layer."""


def read_commit(source: Path) -> str:
    """Return the commit of a clone of CMSIS-NN.

    Raises
    ------
    InputError
        If the folder is not such a clone.
    """
    command = ["git", "-C", str(source), "rev-parse", "HEAD"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode or not (source / "Include" / "arm_nnfunctions.h").is_file():
        raise InputError(
            f"source: expected a clone of CMSIS-NN, which is not kept here (git clone {ADDRESS}), "
            f"and {source} is none"
        )
    return process.stdout.strip()


# -- layers in CMSIS-NN's notation -----------------------------------------------------------------


def choose_kernel(kind: str) -> str:
    """Return the name of the kernel for a kind of layer."""
    return "pm_q8_pointwise" if kind == "linear" else f"pm_q8_{kind}"


def split_factor(factor: float) -> tuple[int, int]:
    """Return (multiplier, shift) of a factor in CMSIS-NN: multiplier 2^(shift - 31), in 31 bits."""
    fraction, shift = math.frexp(factor)
    multiplier = round(fraction * 2**31)
    return (multiplier // 2, shift + 1) if multiplier == 2**31 else (multiplier, shift)


def format_header(layers: Layers, kinds: Sequence[str], sizes: Sequence[ConvolutionSizes]) -> str:
    """Format the header of `PROGRAM` with the data of all layers."""
    lines, rows = [], []
    for index, (call, kind, shape) in enumerate(zip(layers.calls, kinds, sizes, strict=True)):
        arguments = layers.named_arguments(call)
        numbers, arrays = _list_fields(kind, arguments)
        numbers |= {"kind": KINDS.index(kind), "zero": arguments.get("zero", 0)}
        numbers["inverse"] = f"{arguments.get('inverse', 0.0)!r}f"
        fields = [f".{name} = {value}" for name, value in numbers.items()]
        for name, (c_type, values) in {"shape": ("const int32_t", shape), **arrays}.items():
            lines.append(f"static {c_type} {name}_{index}[] = {{{', '.join(map(str, values))}}};")
            fields.append(f".{name} = {name}_{index}")
        rows.append(f"    {{{', '.join(fields)}}},")
    max_elements = max(shape.results * shape.out_plane for shape in sizes)
    return "\n".join((
        f"#define MOST_ELEMENTS {max_elements}",
        f"#define SCRATCH_BYTES {SCRATCH_BYTES}",
        f"#define ADD_SHIFT {ADD_SHIFT}",
        *lines,
        "static const layer_t layers[] = {",
        *rows,
        "};",
        "",
    ))  # fmt: skip


def _list_fields(
    kind: str, arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, tuple[str, Iterable[Any]]]]:
    """Return the fields of a layer in `PROGRAM`: numbers, and (C type, values) of arrays."""
    if kind == "add":
        scales = np.array([arguments["a_scale"], arguments["b_scale"]])
        # As in TensorFlow Lite, elements are in steps of twice the larger scale.
        step = 2 * float(scales.max())
        factors = [*map(float, scales / step), step * arguments["inverse"] / 2**ADD_SHIFT]
        numbers = {"zero_x": arguments["a_zero"], "zero_w": arguments["b_zero"]}
        data = {"x": arguments["a"], "w": arguments["b"]}
        return numbers, {**_int8_arrays(data), **_scale_arrays(scales, factors)}
    if kind not in CONVOLUTIONS:
        bounds = {name: ("const int32_t", arguments[name]) for name in ("rows", "columns")}
        scales = np.array([arguments.get("scale", 0.0)])
        numbers = {"zero_x": arguments.get("zero_x", 0)}
        return numbers, {
            **_int8_arrays({"x": arguments["x"]}),
            **bounds,
            **_scale_arrays(scales, ()),
        }
    scales = arguments["scale"]
    rounded_biases = np.rint(arguments["bias"].astype(np.float64) / scales).astype(np.int64)
    arrays: dict[str, tuple[str, Iterable[Any]]] = {
        "start": ("const int32_t", arguments["start"]),
        "bias": ("const float", map(float.hex, arguments["bias"].astype(float))),
        "rounded_bias": ("const int32_t", rounded_biases),
    }
    # Kernels of 1 x 1 windows receive the zero of x only within `start`.
    zero_x = arguments["zero_x"] if "zero_x" in arguments else _derive_zero(arguments)
    factors = [float(scale) * arguments["inverse"] for scale in scales]
    data = {name: arguments[name] for name in ("x", "w")}
    return {"zero_x": zero_x}, {**_int8_arrays(data), **arrays, **_scale_arrays(scales, factors)}


def _int8_arrays(data: Mapping[str, Any]) -> dict[str, tuple[str, Iterable[Any]]]:
    return {name: ("const int8_t", values) for name, values in data.items()}


def _scale_arrays(scales: Any, factors: Sequence[float]) -> dict[str, tuple[str, Iterable[Any]]]:
    """Return the arrays of scales and, if there are factors, of their multipliers and shifts."""
    arrays: dict[str, tuple[str, Iterable[Any]]] = {
        "scale": ("const float", map(float.hex, scales.astype(float)))
    }
    if factors:
        multipliers, shifts = zip(*map(split_factor, factors), strict=True)
        arrays |= {"multiplier": ("int32_t", multipliers), "shift": ("int32_t", shifts)}
    return arrays


def _derive_zero(arguments: Mapping[str, Any]) -> int:
    """Derive the zero of a layer's input from its ``start`` and the sums of its weights."""
    weight_sums = arguments["w"].reshape(arguments["results"], -1).sum(1, dtype=np.int64)
    index = int(np.abs(weight_sums).argmax())
    return -int(arguments["start"][index]) // int(weight_sums[index])


# -- programs --------------------------------------------------------------------------------------


def add_layer(layers: Layers, kind: str, sizes: ConvolutionSizes) -> None:
    """Add a call of the kernel for a kind of layer to `layers`."""
    if kind == "add":
        layers.add_elements("pm_q8_add", sizes.results * sizes.out_plane, limits=INT8)
    elif kind in CONVOLUTIONS:
        layers.add_convolution(choose_kernel(kind), sizes, limits=INT8)
    else:
        layers.add_pool(choose_kernel(kind), sizes, limits=INT8, same_scale=True)


def execute_layers(source: Path, folder: Path, chosen: Sequence[Layer]) -> ProgramResult:
    """Build `PROGRAM` in an exported folder by its makefile, and execute it on the emulated board.

    Each kind must be among the wanted layers, because the program calls all kernels.
    """
    layers = Layers()
    for _, kind, sizes in chosen:
        add_layer(layers, kind, sizes)
    step = layers.build_step(returns_all=False)
    export_step(step, folder, device=DEVICE, ram="100%", paging=False, time_limit=LIMIT_S, gap=0.5)
    shutil.copytree(source / "Include", folder / "cmsis" / "Include")
    kernels = sorted(set(map(choose_kernel, KINDS)))
    files = [PROGRAM.name, "host/pm_text.c", *(f"src/{kernel}.c" for kernel in kernels)]
    for folder_name in SOURCES:
        copied_folder = shutil.copytree(
            source / "Source" / folder_name, folder / "cmsis" / folder_name
        )
        names = (path.relative_to(folder).as_posix() for path in sorted(copied_folder.rglob("*.c")))
        files += [name for name in names if not name.endswith(FLOATS)]
    shutil.copy(PROGRAM, folder)
    content = format_header(
        layers, [kind for _, kind, _ in chosen], [sizes for _, _, sizes in chosen]
    )
    (folder / "cmsis_nn_layers.h").write_text(content, encoding="utf-8")
    settings = (f"SOURCES={' '.join(files)}", "EXTRA=-w -I. -Isrc -Ihost -Icmsis/Include")
    program = build_program(folder, Target.M4, settings=settings)
    return run_program(
        program, Target.M4, folder, inputs=b"", steps=1, learning_rate=0.0
    ).require_success()


def check_results(result: ProgramResult) -> dict[str, int]:
    """Return the number of elements, of differences, the largest one, and scratch memory [B].

    Raises
    ------
    ToolchainError
        If results of CMSIS-NN and the kernels differ by more than one step, or in more than the
        fraction `MAX_DIFFERENT` of all elements.
    """
    keys = ("elements", "apart", "most", "scratch_bytes")
    metrics = {key: result.metrics[key] for key in keys}
    if metrics["most"] > 1 or metrics["apart"] > MAX_DIFFERENT * metrics["elements"]:
        raise ToolchainError(f"CMSIS-NN and ours compute other results: {metrics}")
    return metrics


def count_terms(kind: str, sizes: ConvolutionSizes) -> int:
    """Count the terms of all results of a layer: products, addends, or elements of windows."""
    terms_per_result = 2 if kind == "add" else sizes.group_channels * sizes.window
    return sizes.results * sizes.out_plane * terms_per_result


def sum_rows(result: ProgramResult, chosen: Sequence[Layer]) -> list[dict[str, Any]]:
    """Return the sums of terms and instructions of layers by group and kind."""
    sums: dict[tuple[str, str], Counter[str]] = {}
    for index, (group, kind, sizes) in enumerate(chosen):
        instructions = {
            name: result.node_instructions[2 * index + offset]
            for offset, name in enumerate(("theirs", "ours"))
        }
        counts = {"layers": 1, "terms": count_terms(kind, sizes), **instructions}
        sums.setdefault((group, kind), Counter()).update(counts)
    return [{"of": group, "kind": kind, **row} for (group, kind), row in sums.items()]


def measure(fields: dict[str, Any], folder: str) -> Record:
    """Execute all layers with CMSIS-NN, cloned in `folder`, and with kernels; return the record."""
    begin_s, source = time.perf_counter(), Path(folder)
    with tempfile.TemporaryDirectory() as temporary:
        result = execute_layers(source, Path(temporary), LAYERS)
    return make_record(
        KIND,
        NAME,
        cell=fields,
        seconds=time.perf_counter() - begin_s,
        limit_s=LIMIT_S,
        rows=sum_rows(result, LAYERS),
        **check_results(result),
        source=read_commit(source),
        tools=read_tool_versions(),
    )


def runs(source: str = REQUIRED) -> Iterator[Cell]:
    """Yield the only run; raise an exception if the clone of CMSIS-NN or a tool is missing."""
    read_commit(Path(source))
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
