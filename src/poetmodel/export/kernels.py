"""C files of kernels: headers, prefixes, and a folder that several steps share."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from poetmodel.files import raise_write_errors, write_text
from poetmodel.lowered.kernels import SOURCES, defined_functions, kernel_names, kernel_source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

SHARED: Final = "poetmodel"
"""What the names of shared kernels begin with, in place of a step's prefix."""
LICENCE: Final = "SPDX-License-Identifier: Apache-2.0. Copyright The poetmodel authors."
FORWARDING: Final = '#include "{path}"\n'

_INCLUDE: Final = re.compile(r'^#include "(\w+\.h)"', re.MULTILINE)
_OUR_NAME: Final = re.compile(r"(?:(?<![A-Za-z0-9])|(?<=-D))(pm|PM)(?=_(?!run\b)|\.[ch]\b)")
"""What a prefix replaces: names of C and of its files, but for the program ``pm_run``."""


def prototypes(kernels: Mapping[str, str], shared: Iterable[str] = ()) -> str:
    """Return the header that declares some kernels, which these include too.

    Those that are `shared` are declared elsewhere, under other names.
    """
    declared = [match for text in kernels.values() for match in defined_functions(text)]
    lines = [f"{' '.join(prototype.split())};" for prototype in declared]
    others = [f"#define {name} {renamed(name, SHARED)}" for name in sorted(shared)]
    there = [f'#include "{SHARED}_kernels.h"', *others, ""] if others else []
    return "\n".join(
        (
            "/* The kernels that this step calls. */",
            "#ifndef PM_KERNELS_H",
            "#define PM_KERNELS_H",
            "",
            '#include "pm_real.h"',
            *there,
            "",
            *lines,
            "",
            "#endif",
            "",
        )
    )


def headers(kernels: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the headers beside the kernels that their sources include, and those include."""
    pending = list(kernels)
    seen: set[str] = set()
    while pending:
        for name in _INCLUDE.findall(pending.pop()):
            path = SOURCES / "kernels" / name
            if name not in seen and path.is_file():
                seen.add(name)
                text = path.read_text(encoding="utf-8")
                pending.append(text)
                yield f"src/{name}", text


def renamed(text: str, prefix: str) -> str:
    """Return a text in which all names of C begin with a prefix."""
    if prefix == "pm":
        return text
    return _OUR_NAME.sub(lambda match: prefix if match[1] == "pm" else prefix.upper(), text)


def licensed(name: str, text: str) -> str:
    """Return a text whose first line says how it may be used; values are whose they were."""
    if "weights" in name or name.endswith((".md", ".json")):
        return text
    if name.endswith((".c", ".h", ".ld", ".ino")):
        return f"/* {LICENCE} */\n{text}"
    return f"# {LICENCE}\n{text}"


def write_shared(folder: Path, kernels: Iterable[str]) -> None:
    """Write a folder of kernels; those that another step has put there stay, as they are now."""
    there = {path.stem for path in (folder / "src").glob(f"{SHARED}_*.c")}
    ours = {name for name in kernel_names() if renamed(name, SHARED) in there}
    sources = {name: kernel_source(name) for name in sorted(ours.union(kernels))}
    templates = SOURCES / "shared"
    code = {
        "include/pm_kernels.h": prototypes(sources),
        "include/pm_real.h": (SOURCES / "src" / "pm_real.h").read_text(encoding="utf-8"),
        **{
            f"src/{name}": FORWARDING.format(path=f"../include/{name}")
            for name in ("pm_kernels.h", "pm_real.h")
        },
        **{f"src/{name}.c": text for name, text in sources.items()},
        **dict(headers(sources.values())),
        **{
            name: (templates / name).read_text(encoding="utf-8")
            for name in ("CMakeLists.txt", "library.properties")
        },
        **{
            f"zephyr/{path.name}": path.read_text(encoding="utf-8")
            for path in (templates / "zephyr").iterdir()
        },
    }
    for name, text in code.items():
        path = folder / renamed(name, SHARED)
        with raise_write_errors(folder):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, licensed(name, renamed(text, SHARED)))
