"""The folder that is exported: generated code, the kernels that it calls, runtime, weights."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from poetmodel.data import check_writable, write_bytes, write_text, writing
from poetmodel.errors import InputError
from poetmodel.export.manifest import manifest, readme
from poetmodel.export.source import StepSource
from poetmodel.export.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from importlib.resources.abc import Traversable
    from pathlib import Path

    from poetmodel.export.deployment import Deployment

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
