"""C files of kernels: header, name prefixes, licence lines, and a folder of shared kernels."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from poetmodel.files import LICENCE_FILE, licence_text, raise_write_errors, write_text
from poetmodel.lowered.kernels import SOURCES, find_kernel, find_prototypes, kernel_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

SHARED_PREFIX: Final = "poetmodel"
"""Prefix of the names of shared kernels, in place of a step's prefix."""
LICENCE: Final = "SPDX-License-Identifier: Apache-2.0. Copyright The poetmodel authors."
FORWARDING_HEADER: Final = '#include "{path}"\n'
"""Template of a header that only includes another one."""

_INCLUDE: Final = re.compile(r'^#include "(\w+\.h)"', re.MULTILINE)
_PM_NAME: Final = re.compile(r"(?:(?<![A-Za-z0-9])|(?<=-D))(pm|PM)(?=_(?!run\b)|\.[ch]\b)")
"""The ``pm`` at the beginning of C symbols and file names, except of the program ``pm_run``."""


def make_kernel_header(kernels: Mapping[str, str], shared_names: Iterable[str] = ()) -> str:
    """Return the text of the header that declares the functions of kernels.

    `kernels` has their C source by name. Each of `shared_names` becomes a macro for the name with
    `SHARED_PREFIX` in place of ``pm``.
    """
    prototypes = [match for text in kernels.values() for match in find_prototypes(text)]
    lines = [f"{' '.join(prototype.split())};" for prototype in prototypes]
    macros = [
        f"#define {name} {apply_prefix(name, SHARED_PREFIX)}" for name in sorted(shared_names)
    ]
    include = [f'#include "{SHARED_PREFIX}_kernels.h"', *macros, ""] if macros else []
    return "\n".join(
        (
            "/* Declarations of kernels. */",
            "#ifndef PM_KERNELS_H",
            "#define PM_KERNELS_H",
            "",
            '#include "pm_real.h"',
            *include,
            "",
            *lines,
            "",
            "#endif",
            "",
        )
    )


def find_included_headers(sources: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield (``src/NAME``, text) of each header that C sources include, also indirectly, once."""
    pending_texts = list(sources)
    visited: set[str] = set()
    while pending_texts:
        for name in _INCLUDE.findall(pending_texts.pop()):
            path = SOURCES / "kernels" / name
            if name not in visited and path.is_file():
                visited.add(name)
                text = path.read_text(encoding="utf-8")
                pending_texts.append(text)
                yield f"src/{name}", text


def apply_prefix(text: str, prefix: str) -> str:
    """Return a text in which `prefix` replaces the ``pm`` of C symbols and file names.

    ``PM`` is replaced by the prefix in upper case. The program name ``pm_run`` is unchanged.
    """
    if prefix == "pm":
        return text
    return _PM_NAME.sub(lambda match: prefix if match[1] == "pm" else prefix.upper(), text)


def add_licence(name: str, text: str) -> str:
    """Return the text of file `name` with the licence as first line."""
    if "weights" in name or name.endswith((".md", ".json")):
        return text
    if name.endswith((".c", ".h", ".ld", ".ino")):
        return f"/* {LICENCE} */\n{text}"
    return f"# {LICENCE}\n{text}"


def write_shared_kernels(folder: Path, kernels: Iterable[str]) -> None:
    """Write a folder of the kernels named `kernels` and of those already in it, in this version."""
    present_stems = {path.stem for path in (folder / "src").glob(f"{SHARED_PREFIX}_*.c")}
    present_kernels = {
        name for name in kernel_names() if apply_prefix(name, SHARED_PREFIX) in present_stems
    }
    sources = {name: find_kernel(name).source for name in sorted(present_kernels.union(kernels))}
    template_folder = SOURCES / "shared"
    files = {
        "include/pm_kernels.h": make_kernel_header(sources),
        "include/pm_real.h": (SOURCES / "src" / "pm_real.h").read_text(encoding="utf-8"),
        **{
            f"src/{name}": FORWARDING_HEADER.format(path=f"../include/{name}")
            for name in ("pm_kernels.h", "pm_real.h")
        },
        **{f"src/{name}.c": text for name, text in sources.items()},
        **dict(find_included_headers(sources.values())),
        **{
            name: (template_folder / name).read_text(encoding="utf-8")
            for name in ("CMakeLists.txt", "library.properties")
        },
        **{
            f"zephyr/{path.name}": path.read_text(encoding="utf-8")
            for path in (template_folder / "zephyr").iterdir()
        },
    }
    for name, text in files.items():
        path = folder / apply_prefix(name, SHARED_PREFIX)
        with raise_write_errors(folder):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, add_licence(name, apply_prefix(text, SHARED_PREFIX)))
    write_text(folder / LICENCE_FILE, licence_text())
