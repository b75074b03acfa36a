"""Measure the table of code sizes: bytes of real exported steps, compiled and linked by GCC.

``python -m mcu.code_sizes`` in ``bench`` writes ``src/poetmodel/export/code_sizes.json``, in
minutes. Each kernel is linked alone, to find its bytes and its members of the C library. The bytes
of linked steps outside kernels, library and tables are fitted to the counts of repeated code.
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
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from scipy.optimize import nnls
from torch import nn
from torch.nn import functional

import poetmodel.export
from mcu import small_networks
from mcu.instructions import TOO_LARGE, Functions, every_loss, planes
from mcu.networks import NETWORKS
from poetmodel.device import Device
from poetmodel.errors import PoetModelError
from poetmodel.export.exporting import export_step
from poetmodel.export.flash import TABLE_FILE, count_elements, table_bytes
from poetmodel.export.kernels import make_kernel_header
from poetmodel.export.source import StepSource
from poetmodel.lowered import kernels as our
from poetmodel.lowered.step import Weights
from poetmodel.torch.lowering.inference import with_evaluation, with_inference
from poetmodel.torch.lowering.step import lower

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.export.deployment import Deployment
    from poetmodel.lowered.step import LoweredStep

COMPILER: Final = "arm-none-eabi-gcc"
FLAGS: Final = (
    *("-std=c11", "-O2", "-ffp-contract=off", "-fno-math-errno", "-ffunction-sections"),
    *("-fdata-sections", "-mcpu=cortex-m4", "-mthumb", "-mfloat-abi=hard", "-mfpu=fpv4-sp-d16"),
)
"""Compiler flags of an exported folder's Makefile, for ``m4``."""
LINK: Final = ("-nostartfiles", "--specs=nosys.specs", "-Wl,--gc-sections", "-Wl,-e,app", "-lm")
DIGITS: Final = 4
"""Significant digits of the table."""

_SECTION: Final = re.compile(
    r"^ (\.(?:text|rodata|ARM|data)\S*)\s+0x0*([0-9a-f]+)\s+0x([0-9a-f]+) (\S.*)$", re.MULTILINE
)
_MEMBER: Final = re.compile(r"\((\S+)\)$")

APPLICATION: Final = Path(__file__).with_name("whole_step.c")
"""Program that calls all functions of a step; its bytes are not counted."""


def linked(sources: Sequence[Path], folder: Path, *options: str) -> Counter[str]:
    """Return the bytes of each source and of each member of the C library in a linked program."""
    objects = []
    for source in sources:
        to = folder / f"{source.stem}.o"
        run([COMPILER, *FLAGS, *options, "-c", source, "-o", to])
        objects.append(to)
    run([COMPILER, *FLAGS, *objects, *LINK, f"-Wl,-Map={folder / 'map'}", "-o", folder / "app"])
    text = (folder / "map").read_text(encoding="utf-8")
    text = text[text.index("Linker script and memory map") :]
    # After a long name the numbers are on the next line.
    text = re.sub(r"^( \.\S+)\n\s+(0x)", r"\1 \2", text, flags=re.MULTILINE)
    sizes: Counter[str] = Counter()
    for _, address, size, origin in _SECTION.findall(text):
        member = _MEMBER.search(origin)
        sizes[member[1] if member else Path(origin).stem] += (
            int(size, 16) if int(address, 16) else 0
        )
    return sizes


def run(command: Sequence[str | Path]) -> None:
    """Execute a compiler; raise with its error output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {done.stderr[-2000:]}")


def kernel_sizes(folder: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return bytes and library members of each kernel, and the bytes of each member."""
    kernels: dict[str, Any] = {}
    library: dict[str, int] = {}
    names = sorted(our.kernel_names())
    header = make_kernel_header({name: our.kernel_source(name) for name in names})
    (folder / "pm_kernels.h").write_text(header, encoding="utf-8")
    random = folder / "random.c"
    step = "#include <stdint.h>\nextern uint32_t pm_random_step;\nuint32_t pm_random_step;\n"
    random.write_text(step, encoding="utf-8")
    for name in names:
        calling = f'#include "pm_kernels.h"\nextern void *app;\nvoid *app = (void *)(long){name};\n'
        (folder / "calling.c").write_text(calling, encoding="utf-8")
        kernel = Path(str(our.SOURCES / "kernels" / f"{name}.c"))
        sizes = linked(
            [folder / "calling.c", random, kernel],
            folder,
            *(f"-I{path}" for path in (folder, our.SOURCES / "src", our.SOURCES / "kernels")),
        )
        members = {part: size for part, size in sizes.items() if part.endswith(".o")}
        library |= members
        kernels[name] = {"bytes": sizes[name], "library": sorted(members)}
    return kernels, library


def steps() -> Iterator[tuple[LoweredStep, tuple[dict[str, Any], ...]]]:
    """Yield steps, each with its export options."""
    entropy = functional.cross_entropy
    ways: tuple[dict[str, Any], ...] = (
        {"device": "nrf52840"},
        {"device": "nrf52840", "ram": "85%"},
        {"device": "nrf52840", "ram": "85%", "commit": True},
        {"device": "nano33ble", "commit": True},
        {"device": "nano33ble", "ram": "80%"},
        {"device": "nrf52840", "tile": "4KiB"},
    )
    for name in small_networks.NETWORKS:
        yield captured(*small_networks.training(name)), ways
        yield captured(*small_networks.training(name), torch.optim.Adam, infer=True), ways[1:4]
    gradients = captured(*small_networks.training("lenet"), None, infer=True)
    yield gradients, tuple(way for way in ways[:5] if "commit" not in way)
    frozen = captured(*small_networks.training("lenet"), frozen=4, evaluate=True)
    both = {"evaluate": True, "commit": True, "migrate": True}
    yield frozen, tuple({**way, "ram": "150%"} for way in (
        {"evaluate": True}, {"evaluate": True, "commit": True}, {"commit": True, "migrate": True},
        {"replay": 4}, {"commit": True, "replay": 4}, {"replay": 4, **both}, both,
        {"device": "nano33ble", "replay": 4, **both}, {"device": "nano33ble", **both},
        {"device": "nano33ble", "commit": True, "replay": 4},
    ))  # fmt: skip
    for masks in (True, False):
        rows = (torch.randn(3, 6), torch.rand(3, 10))
        yield captured(Functions(6, 10), every_loss, rows, masks=masks), ways[:1]
        images = (torch.randn(1, 3, 15, 15), torch.randint(0, 7, (1,)))
        yield captured(planes(8, 2), entropy, images, masks=masks), ways[:1]
    for name, make in NETWORKS.items():
        torch.manual_seed(0)
        if name != TOO_LARGE:
            yield captured(*make()), tuple({"ram": "110%", **way} for way in ways[:4:3])


def captured(
    model: nn.Module,
    loss: Any,
    inputs: tuple[torch.Tensor, ...],
    rule: Any = torch.optim.SGD,
    *,
    infer: bool = False,
    masks: bool = True,
    frozen: int = 0,
    evaluate: bool = False,
) -> LoweredStep:
    """Return a step that is updated by an optimizer class, with an inference if requested.

    The first `frozen` parameters are frozen.
    """
    for parameter in islice(model.parameters(), frozen):
        parameter.requires_grad_(requires_grad=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = None if rule is None else rule(trained, lr=0.01)
    step = lower(model, loss, inputs, optimizer=optimizer, masks=masks)
    step = with_evaluation(step, model, loss, inputs) if evaluate else step
    return with_inference(step, model, loss, inputs) if infer else step


def linked_step(folder: Path) -> Counter[str]:
    """Return the bytes of each component of an exported step in a program that calls all functions.

    Bytes of the program itself and initial values of state are not counted.
    """
    shutil.copy(APPLICATION, folder / "app.c")
    sources = [*sorted((folder / "src").glob("*.c")), folder / "app.c"]
    weights = f'-DPM_WEIGHTS_FILE="{folder / "src/pm_weights.bin"}"'
    with tempfile.TemporaryDirectory() as objects:
        sizes = linked(sources, Path(objects), f"-I{folder / 'include'}", f"-I{folder}", weights)
    del sizes["app"], sizes["pm_weights"]
    return sizes


def measured(deployment: Deployment, folder: Path) -> tuple[Counter[str], int, Counter[str]]:
    """Return counts of repeated code, bytes outside kernels and tables, and library members."""
    source = StepSource(deployment, Weights.from_step(deployment.step))
    sizes = linked_step(folder)
    library = Counter({part: size for part, size in sizes.items() if part.endswith(".o")})
    others = library.keys() | set(source.kernels)
    own = sum(size for part, size in sizes.items() if part not in others)
    counts = count_elements(deployment, source.statements)
    return counts, own - table_bytes(deployment, source), library


def fitted(samples: Sequence[tuple[Counter[str], int]]) -> dict[str, float]:
    """Fit the bytes of each kind of repeated code by least relative errors."""
    columns = sorted({what for counts, _ in samples for what in counts})
    matrix = np.array([[counts[what] / size for what in columns] for counts, size in samples])
    values, _ = nnls(matrix, np.ones(len(samples)))
    off = 100 * np.abs(matrix @ values - 1)
    logging.info("%d programs: worst %.1f %%, mean %.1f %%", len(samples), off.max(), off.mean())
    found = zip(columns, values, strict=True)
    return {what: float(f"{value:.{DIGITS}g}") for what, value in found if value}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, link, fit and write; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(poetmodel.export.__file__).parent / TABLE_FILE
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        kernels, library = kernel_sizes(Path(folder))
    samples, of_runtime = [], set()
    known = {member for kernel in kernels.values() for member in kernel["library"]}
    for step, ways in steps():
        for way in ways:
            with tempfile.TemporaryDirectory() as folder:
                device = replace(Device.load(way.get("device", "nrf52840")), flash=None)
                given = {"gap": 0.5, "time_limit": 20.0, **way, "device": device}
                try:
                    given["infer"] = step.inference is not None
                    if given.pop("migrate", False):
                        given["migrate_from"] = Path(folder, "before")
                        export_step(step, Path(folder, "before"), device=device, commit=True)
                    made = export_step(step, Path(folder), **given)
                except PoetModelError as error:
                    logging.info("%s %s: left out, %s", step.graph.name, way, error)
                    continue
                counts, size, needed = measured(made, Path(folder))
            samples.append((counts, size))
            of_runtime |= needed.keys() - known
            library |= needed
            logging.info("%s %s: %d B", step.graph.name, way, size)
    median = sorted(entry["bytes"] for entry in kernels.values())[len(kernels) // 2]
    table = {
        "kernels": kernels,
        "library": library,
        "other": {"bytes": median, "library": []},
        "program": fitted(samples),
        "runtime": {"bytes": 0, "library": sorted(of_runtime)},
    }
    text = json.dumps(table, indent=0, sort_keys=True)
    options.out.write_text(f"{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
