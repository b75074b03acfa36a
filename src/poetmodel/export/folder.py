"""The folder that is exported: generated code, the kernels that it calls, runtime, weights.

``manifest.json`` and ``README.md`` say what it holds, for programs and for people.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from poetmodel import __version__
from poetmodel.errors import InputError
from poetmodel.export.emitter import elements
from poetmodel.export.source import StepSource
from poetmodel.export.step import DataType, Weights
from poetmodel.files import check_writable, write_bytes, write_text, writing
from poetmodel.schedule import GraphIdentity
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.resources.abc import Traversable
    from pathlib import Path

    from poetmodel.export.deployment import Deployment
    from poetmodel.export.step import Step, Value

SOURCES: Final = files("poetmodel.export") / "c"
"""The C that is copied."""
_PROTOTYPE: Final = re.compile(r"^((?:void|int) pm_\w+\([^{;]*\))\s*\{", re.MULTILINE)
_LAST_WORD: Final = re.compile(r"\w+$")
_INCLUDE: Final = re.compile(r'^#include "(\w+\.h)"', re.MULTILINE)


def check_folder(folder: Path) -> None:
    """Raise unless a folder could be written; leaves nothing there."""
    with writing(folder):
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        if not there.is_dir():
            raise InputError(f"{folder}: expected a folder to write, and {there} is a file")
    check_writable(there / "pm_step.h")


def write_folder(deployment: Deployment, folder: Path, *, command: str) -> None:
    """Write all files of a deployment; those of an earlier one are replaced."""
    weights = Weights.of(deployment.step)
    source = StepSource(deployment, weights)
    kernels = {name: _kernel(name) for name in source.kernels}
    texts = {
        "pm_step.h": source.header(),
        "pm_step.c": source.source(),
        "pm_kernels.h": _prototypes(kernels),
        **{f"kernels/{name}.c": text for name, text in kernels.items()},
        **dict(_headers(kernels)),
        **dict(_runtime(SOURCES)),
        "config.mk": _config(deployment, kernels),
        "manifest.json": manifest(deployment, source, command=command),
        "README.md": readme(deployment, command=command),
    }
    with writing(folder):
        (folder / "kernels").mkdir(parents=True, exist_ok=True)
        (folder / "board").mkdir(exist_ok=True)
    for name in (*texts, "weights.bin"):
        check_writable(folder / name)
    with writing(folder / "kernels"):
        for path in (folder / "kernels").glob("pm_*.[ch]"):
            if f"kernels/{path.name}" not in texts:  # of an earlier export
                path.unlink()
    for name, text in texts.items():
        write_text(folder / name, text)
    write_bytes(folder / "weights.bin", weights.data)


def _config(deployment: Deployment, kernels: Iterable[str]) -> str:
    """Return what the Makefile has to know."""
    sources = (f" kernels/{name}.c" for name in kernels)
    driver = "DRIVER ?= ram\n" if deployment.plan.memory_mapped else ""
    return (
        f"{driver}RAM_SIZE = {deployment.ram_bytes}\n"
        f"STACK_SIZE = {deployment.stack_bytes}\n"
        f"SOURCES = pm_step.c pm_state.c pm_weights.c{''.join(sources)}\n"
    )


def kernel_names() -> frozenset[str]:
    """Return the kernels that there are."""
    folder = SOURCES / "kernels"
    return frozenset(
        path.name.removesuffix(".c") for path in folder.iterdir() if path.name.endswith(".c")
    )


def parameters(kernel: str) -> tuple[str, ...]:
    """Return the types of what a kernel takes, such as ``const pm_real *``."""
    (declared,) = (each for each in _PROTOTYPE.findall(_kernel(kernel)) if f" {kernel}(" in each)
    listed = declared[declared.index("(") + 1 : -1].split(",")
    return tuple(_LAST_WORD.sub("", " ".join(each.split())).strip() for each in listed)


def _kernel(name: str) -> str:
    return (SOURCES / "kernels" / f"{name}.c").read_text(encoding="utf-8")


def _prototypes(kernels: dict[str, str]) -> str:
    """Return the header that declares some kernels."""
    found = [match for text in kernels.values() for match in _PROTOTYPE.findall(text)]
    lines = [f"{' '.join(each.split())};" for each in found]
    return "\n".join(
        (
            "/* The kernels that this step calls. */",
            "#ifndef PM_KERNELS_H",
            "#define PM_KERNELS_H",
            "",
            '#include "pm_real.h"',
            "",
            *lines,
            "",
            "#endif",
            "",
        )
    )


def _headers(kernels: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the headers beside the kernels that these include, and those include."""
    pending = list(kernels.values())
    seen: set[str] = set()
    while pending:
        for name in _INCLUDE.findall(pending.pop()):
            path = SOURCES / "kernels" / name
            if name not in seen and path.is_file():
                seen.add(name)
                text = path.read_text(encoding="utf-8")
                pending.append(text)
                yield f"kernels/{name}", text


def _runtime(folder: Traversable, below: str = "") -> Iterator[tuple[str, str]]:
    """Yield what every folder has: all files that are no kernels."""
    for path in folder.iterdir():
        name = f"{below}{path.name}"
        if path.is_file():
            yield name, path.read_text(encoding="utf-8")
        elif name != "kernels":
            yield from _runtime(path, f"{name}/")


_DTYPES: Final = {DataType.REAL: "float32", DataType.INT32: "int32", DataType.UINT8: "uint8"}


def manifest(deployment: Deployment, source: StepSource, *, command: str) -> str:
    """Return the text of ``manifest.json``; sizes are those of the build for float."""
    step, arena, plan = deployment.step, deployment.arena, deployment.plan
    identity = GraphIdentity.of(step.graph)
    result = deployment.result
    document: dict[str, Any] = {
        "format": "poetmodel-export",
        "version": 1,
        "graph": {"name": identity.name, "sha256": identity.sha256},
        "device": plan.device,
        "budget": {"ram_bytes": deployment.ram_bytes, "arena_bytes": deployment.arena_bytes},
        "ram": deployment.ram_map(),
        "arena": arena.to_dict(),
        "alignment": arena.alignment,
        "learning_rate": step.learning_rate,
        "updates": step.learning_rate is not None,
        "commit": deployment.commit,
        "memory_mapped": plan.memory_mapped,
        "mode": str(plan.mode),
        "status": None if result is None else str(result.status),
        "inputs": [_value(value) for value in step.inputs],
        "outputs": [_value(value) for value in _outputs(step)],
        "states": [
            {**_value(value), "home": _home(value, source), "pieces": len(value.pieces)}
            for value in step.states
        ],
        "gradients": [_value(value) for value in step.gradients],
        "slots": list(deployment.slots),
        "nodes": [
            {"name": node.name, "op": node.op, "kernels": [call.kernel for call in calls]}
            for node, calls in zip(step.graph.nodes, step.calls, strict=True)
        ],
        "program": [[str(op), index] for op, index in plan.program],
        "tensors": [tensor.name for tensor in step.graph.tensors],
        "versions": {"poetmodel": __version__, **step.versions},
        "command": command,
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def summary(deployment: Deployment) -> dict[str, Any]:
    """Return what was decided, for programs: RAM by use, homes, and the schedule's figures."""
    result = deployment.result
    return {
        "graph": deployment.step.graph.name,
        "device": deployment.plan.device,
        "ram_bytes": deployment.ram_bytes,
        "ram": deployment.ram_map(),
        "arena_bytes": deployment.arena_bytes,
        "arena_lower_bound_bytes": deployment.arena.lower_bound_bytes,
        "slots": len(deployment.slots),
        "schedule": None if result is None else result.to_dict(),
    }


def _outputs(step: Step) -> Iterator[Value]:
    """Yield what an inference writes for its caller."""
    if step.inference is not None and step.inference.output is not None:
        yield step.inference.output


def _value(value: Value) -> dict[str, Any]:
    return {
        "name": value.name,
        "shape": list(value.shape),
        "dtype": _DTYPES[value.type],
        "bytes": elements(value) * value.type.itemsize,
    }


def _home(value: Value, source: StepSource) -> str:
    """Return the home of a state tensor; of one in tiles that have several, both."""
    return "+".join(sorted({source.home(ref.buffer) for ref in value.pieces}))


def readme(deployment: Deployment, *, command: str) -> str:
    """Return the text of ``README.md``."""
    step, plan = deployment.step, deployment.plan
    rows = [f"| {what} | {size:,} |" for what, size in deployment.ram_map().items()]
    inputs = ", ".join(f"`{value.name}` {list(value.shape)}" for value in step.inputs)
    trains = step.learning_rate is not None
    what = "updates all trained parameters" if trains else "hands out the gradients"
    return _README.format(
        name=step.graph.name,
        device=plan.device or "no device",
        ram=format_bytes(deployment.ram_bytes),
        what=what,
        rows="\n".join(rows),
        inputs=inputs,
        rate=step.learning_rate if trains else 0,
        command=command,
        mapped=_MAPPED if plan.memory_mapped else "",
        infer=_infer_text(step.inference),
        slots=len(deployment.slots),
    )


def _infer_text(inference: Step | None) -> str:
    if inference is None or inference.output is None:
        return ""
    shape = list(inference.output.shape)
    count = len(inference.inputs)
    inputs = "input" if count == 1 else f"{count} inputs"
    return _INFER.format(inputs=inputs, shape=shape)


_MAPPED: Final = """
   The core reads this storage like RAM: write `pm_storage_address` too, or `pm_page_address` and
   `pm_page_write`."""

_INFER: Final = """\
9. Call `pm_infer(inputs, outputs)` between steps for what the model says now, in evaluation mode:
   it reads the first {inputs} of a step, and writes an array of {shape}.
"""

_README: Final = """\
# {name}: a training step in C

`pm_step` runs forward pass, loss and backward pass of one batch, and {what}.
It was planned for {device} and {ram} of RAM. Nothing is allocated while it runs.

| RAM | bytes |
|---|---|
{rows}

The folder was made by

```sh
{command}
```

## Try it

```sh
make host                                     # build/host/pm_run
build/host/pm_run STEPS LEARNING_RATE INPUTS STATE
make run-m4 ARGS="STEPS LEARNING_RATE INPUTS STATE"   # on an emulated Cortex-M4
```

INPUTS is a file of raw batches, one after the other: {inputs}.
STATE is written: all state tensors, in the order of `manifest.json`. `make host-double` computes in
double, under sanitizers. The learning rate when this was exported: {rate}.

## Port it to your board

1. Compile `pm_step.c`, `pm_state.c`, `pm_weights.c` and `kernels/*.c` with `-ffp-contract=off`.
2. Give the linker script of your board the stack of the table above.
3. Storage: compile `pm_pages.c` too, and write the two functions of `pm_storage.h` for yours;
   `driver_spi_flash.c` has them for serial flash. Or, with DMA, write the three of `pm_driver.h`
   instead, for {slots} slots whose sizes `pm_slot_bytes` has.{mapped}
4. Call `pm_init()` once.
5. Put a batch into arrays of your own, in the order of `manifest.json`.
6. Call `pm_step(inputs, learning_rate, &loss)` for each batch, with the rate of the optimizer's
   first group of trained parameters; the others keep their proportion to it.
7. An error number other than `PM_TORN` leaves state as it was: call again.
8. Read the new weights with `pm_read_state`.
{infer}"""
