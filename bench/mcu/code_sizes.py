"""Measure the table of code sizes by exported steps that are compiled and linked by GCC.

``python -m mcu.code_sizes`` in ``bench`` takes minutes and writes
``src/poetmodel/export/code_sizes.json``; with ``--new`` it only adds kernels that are missing
there. Each kernel is linked alone, to find its bytes and the
members of the C library that it calls, and so are updates of memory-mapped state in linked steps.
Their other bytes, without tables, are fitted to the counts of repeated code.
Needs PyTorch and GCC for Arm, with newlib.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from scipy.optimize import nnls
from torch import nn
from torch.nn import functional

import poetmodel.export
from mcu import small_networks
from mcu.instructions import TOO_LARGE, Functions, make_image_layers, sum_losses
from mcu.networks import NETWORKS
from poetmodel.device import Device
from poetmodel.errors import PoetModelError
from poetmodel.export.exporting import export_step
from poetmodel.export.flash import TABLE_FILE, count_elements, table_bytes
from poetmodel.export.kernels import make_kernel_header
from poetmodel.lowered import kernels as our
from poetmodel.torch.lowering.inference import with_evaluation, with_inference
from poetmodel.torch.lowering.step import lower

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from poetmodel.export.deployment import Deployment
    from poetmodel.lowered.step import LoweredStep

COMPILER: Final = "arm-none-eabi-gcc"
FLAGS: Final = (
    *("-std=c11", "-O2", "-ffp-contract=off", "-fno-math-errno", "-ffunction-sections"),
    *("-fdata-sections", "-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16"),
)
"""Compiler flags of an exported folder's Makefile, for ``m4``."""
LINK_FLAGS: Final = (
    "-nostartfiles",
    "--specs=nosys.specs",
    "-Wl,--gc-sections",
    "-Wl,-e,app",
    "-lm",
)
UPDATES: Final = "pm_mapped"
"""The source that divides updates of memory-mapped state, as large in each step that has one."""
DIGITS: Final = 4
"""Significant digits of fitted numbers in the table."""

_SECTION: Final = re.compile(
    r"^ (\.(?:text|rodata|data|ARM\.ex)\S*)\s+0x0*([0-9a-f]+)\s+0x([0-9a-f]+) (\S.*)$", re.MULTILINE
)
_MEMBER: Final = re.compile(r"\((\S+)\)$")

APPLICATION: Final = Path(__file__).with_name("whole_step.c")
"""Source of a program that calls all functions of a step; its bytes are not counted."""


def measure_linked_bytes(sources: Sequence[Path], folder: Path, *options: str) -> Counter[str]:
    """Compile and link sources in `folder`; return the bytes of each source and library member.

    Options are further flags of the compiler. Raises RuntimeError if it fails.
    """
    objects = []
    for source in sources:
        object_path = folder / f"{source.stem}.o"
        run_compiler([COMPILER, *FLAGS, *options, "-c", source, "-o", object_path])
        objects.append(object_path)
    run_compiler(
        [
            COMPILER,
            *FLAGS,
            *objects,
            *LINK_FLAGS,
            f"-Wl,-Map={folder / 'map'}",
            "-o",
            folder / "app",
        ]
    )
    map_text = (folder / "map").read_text(encoding="utf-8")
    map_text = map_text[map_text.index("Linker script and memory map") :]
    # After a long name the numbers are on the next line.
    map_text = re.sub(r"^( \.\S+)\n\s+(0x)", r"\1 \2", map_text, flags=re.MULTILINE)
    sizes: Counter[str] = Counter()
    for _, address, size, origin in _SECTION.findall(map_text):
        member = _MEMBER.search(origin)
        sizes[member[1] if member else Path(origin).stem] += (
            int(size, 16) if int(address, 16) else 0
        )
    return sizes


def run_compiler(command: Sequence[str | Path]) -> None:
    """Execute a compiler; raise RuntimeError with its error output if it fails."""
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{command[0]}: {process.stderr[-2000:]}")


def measure_kernels(folder: Path, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, int]]:
    """Link each kernel alone; return its bytes and library members, and bytes of all members."""
    kernels: dict[str, Any] = {}
    library: dict[str, int] = {}
    header = make_kernel_header({name: our.find_kernel(name).source for name in names})
    (folder / "pm_kernels.h").write_text(header, encoding="utf-8")
    random_path = folder / "random.c"
    random_source = (
        "#include <stdint.h>\nextern uint32_t pm_random_step;\nuint32_t pm_random_step;\n"
    )
    random_path.write_text(random_source, encoding="utf-8")
    for name in names:
        caller = f'#include "pm_kernels.h"\nextern void *app;\nvoid *app = (void *)(long){name};\n'
        (folder / "calling.c").write_text(caller, encoding="utf-8")
        kernel = Path(str(our.SOURCES / "kernels" / f"{name}.c"))
        sizes = measure_linked_bytes(
            [folder / "calling.c", random_path, kernel],
            folder,
            *(f"-I{path}" for path in (folder, our.SOURCES / "src", our.SOURCES / "kernels")),
        )
        members = {part: size for part, size in sizes.items() if part.endswith(".o")}
        library |= members
        kernels[name] = {"bytes": sizes[name], "library": sorted(members)}
    return kernels, library


def make_steps() -> Iterator[tuple[LoweredStep, tuple[dict[str, Any], ...]]]:
    """Yield steps, each with the options of all its exports."""
    cross_entropy = functional.cross_entropy
    options: tuple[dict[str, Any], ...] = (
        {"device": "nrf52840"},
        {"device": "nrf52840", "ram": "85%"},
        {"device": "nrf52840", "ram": "85%", "commit": True},
        {"device": "nano33ble", "commit": True},
        {"device": "nano33ble", "ram": "80%"},
        {"device": "nano33ble", "ram": "80%", "commit": True, "checksum": False},
        {"device": "nrf52840", "tile": "4KiB"},
    )
    for name in small_networks.NETWORKS:
        yield capture_step(*small_networks.make_training(name)), options
        yield (
            capture_step(*small_networks.make_training(name), torch.optim.Adam, infer=True),
            options[1:6],
        )
    gradients = capture_step(*small_networks.make_training("lenet"), None, infer=True)
    yield gradients, tuple(entry for entry in options[:6] if "commit" not in entry)
    frozen = capture_step(*small_networks.make_training("lenet"), frozen=4, evaluate=True)
    moved = {"evaluate": True, "commit": True, "migrate": True}
    yield frozen, tuple({**entry, "ram": "150%"} for entry in (
        {"evaluate": True}, {"evaluate": True, "commit": True}, {"commit": True, "migrate": True},
        {"replay": 4}, {"commit": True, "replay": 4}, {"replay": 4, **moved}, moved,
        {"device": "nano33ble", "replay": 4, **moved}, {"device": "nano33ble", **moved},
        {"device": "nano33ble", "commit": True, "replay": 4},
    ))  # fmt: skip
    for masks in (True, False):
        row_inputs = (torch.randn(3, 6), torch.rand(3, 10))
        yield capture_step(Functions(6, 10), sum_losses, row_inputs, masks=masks), options[:1]
        image_inputs = (torch.randn(1, 3, 15, 15), torch.randint(0, 7, (1,)))
        yield (
            capture_step(make_image_layers(8, 2), cross_entropy, image_inputs, masks=masks),
            options[:1],
        )
    for name, make_training in NETWORKS.items():
        torch.manual_seed(0)
        if name != TOO_LARGE:
            yield (
                capture_step(*make_training()),
                tuple({"ram": "110%", **entry} for entry in options[:4:3]),
            )


def capture_step(
    model: nn.Module,
    loss: Any,
    inputs: tuple[torch.Tensor, ...],
    optimizer_class: Any = torch.optim.SGD,
    *,
    infer: bool = False,
    masks: bool = True,
    frozen: int = 0,
    evaluate: bool = False,
) -> LoweredStep:
    """Capture a step with an optimizer class, None for gradients, and optionally with an inference.

    Freezes the first `frozen` parameters of the model. `evaluate` adds an evaluation.
    """
    for parameter in islice(model.parameters(), frozen):
        parameter.requires_grad_(requires_grad=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = None if optimizer_class is None else optimizer_class(trained, lr=0.01)
    step = lower(model, loss, inputs, optimizer=optimizer, masks=masks)
    step = with_evaluation(step, model, loss, inputs) if evaluate else step
    return with_inference(step, model, loss, inputs) if infer else step


def measure_step_bytes(folder: Path) -> Counter[str]:
    """Link an exported step with `APPLICATION`; return the bytes of each source and library member.

    Writes ``app.c`` into the folder. The application and initial values of state are not counted.
    """
    shutil.copy(APPLICATION, folder / "app.c")
    sources = [*sorted((folder / "src").glob("*.c")), folder / "app.c"]
    weights = f'-DPM_WEIGHTS_FILE="{folder / "src/pm_weights.bin"}"'
    with tempfile.TemporaryDirectory() as objects:
        sizes = measure_linked_bytes(
            sources, Path(objects), f"-I{folder / 'include'}", f"-I{folder}", weights
        )
    del sizes["app"], sizes["pm_weights"]
    return sizes


def measure_deployment(
    deployment: Deployment, folder: Path
) -> tuple[Counter[str], int, int, Counter[str]]:
    """Link a deployed step; return counts of repeated code and the bytes of three components.

    These are all bytes outside kernels, library and tables, without the next; those of
    ``pm_mapped.c``; and those of each library member.
    """
    source = deployment.source
    sizes = measure_step_bytes(folder)
    library = Counter({part: size for part, size in sizes.items() if part.endswith(".o")})
    other_parts = library.keys() | {*source.kernels, UPDATES}
    own_bytes = sum(size for part, size in sizes.items() if part not in other_parts)
    counts = count_elements(deployment, source.statements)
    del counts["updates"]
    return counts, own_bytes - table_bytes(source), sizes[UPDATES], library


def fit_bytes(samples: Sequence[tuple[Counter[str], int]]) -> dict[str, float]:
    """Fit the bytes of each kind of repeated code by least squares of relative errors; log these.

    Kinds with 0 bytes are omitted.
    """
    columns = sorted({kind for counts, _ in samples for kind in counts})
    matrix = np.array([[counts[kind] / size for kind in columns] for counts, size in samples])
    values, _ = nnls(matrix, np.ones(len(samples)))
    errors = 100 * np.abs(matrix @ values - 1)
    logging.info(
        "%d programs: worst %.1f %%, mean %.1f %%", len(samples), errors.max(), errors.mean()
    )
    pairs = zip(columns, values, strict=True)
    return {kind: float(f"{value:.{DIGITS}g}") for kind, value in pairs if value}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure kernels and steps, fit the table and write it; return the exit status.

    Exports that the package refuses are left out, and logged. With ``--new``, all else stays as in
    the existing table.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(poetmodel.export.__file__).parent / TABLE_FILE
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--new", action="store_true", help="only kernels that the table lacks")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    table: dict[str, Any] = {"kernels": {}, "library": {}}
    if options.new:
        table = json.loads(options.out.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        names = sorted(our.kernel_names() - table["kernels"].keys())
        kernels, library = measure_kernels(Path(folder), names)
    if options.new:
        table["kernels"] |= kernels
        table["library"] |= library
        write_table(table, options.out)
        return 0
    samples, runtime_members, update_bytes = [], set(), []
    kernel_members = {member for kernel in kernels.values() for member in kernel["library"]}
    for step, entries in make_steps():
        for entry in entries:
            with tempfile.TemporaryDirectory() as folder:
                device = replace(Device.load(entry.get("device", "nrf52840")), flash=None)
                options_of_export = {"gap": 0.5, "time_limit": 20.0, **entry, "device": device}
                try:
                    options_of_export["infer"] = step.inference is not None
                    if options_of_export.pop("migrate", False):
                        options_of_export["migrate_from"] = Path(folder, "before")
                        export_step(step, Path(folder, "before"), device=device, commit=True)
                    deployment = export_step(step, Path(folder), **options_of_export)
                except PoetModelError as error:
                    logging.info("%s %s: left out, %s", step.graph.name, entry, error)
                    continue
                counts, size, updates, members = measure_deployment(deployment, Path(folder))
            samples.append((counts, size))
            update_bytes += [updates] if updates else []
            runtime_members |= members.keys() - kernel_members
            library |= members
            logging.info("%s %s: %d B", step.graph.name, entry, size)
    table = {
        "kernels": kernels,
        "library": library,
        "other": {
            "bytes": median_high(entry["bytes"] for entry in kernels.values()),
            "library": [],
        },
        "program": {**fit_bytes(samples), "updates": float(median_high(update_bytes))},
        "runtime": {"bytes": 0, "library": sorted(runtime_members)},
    }
    write_table(table, options.out)
    return 0


def write_table(table: Mapping[str, Any], path: Path) -> None:
    """Write a table of code sizes."""
    path.write_text(json.dumps(table, indent=0, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
