"""The C kernels that a step calls: names, parameters and sources, read from the C files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.resources.abc import Traversable

SOURCES: Final[Traversable] = files("poetmodel") / "c"
"""The folder of the C sources that an export copies, kernels included."""

_PROTOTYPE: Final = re.compile(r"^((?:void|int) pm_\w+\([^{;]*\))\s*\{", re.MULTILINE)
_LAST_WORD: Final = re.compile(r"\w+$")
_RANDOM: Final = re.compile(r'^#include "pm_random\.h"|^#define PM_Q8_STOCHASTIC\b', re.MULTILINE)


class Parameter(NamedTuple):
    """A parameter of a kernel."""

    name: str
    type: str
    """The C type, such as ``const pm_real *``."""

    @property
    def is_written(self) -> bool:
        """Whether the kernel may write through this pointer."""
        return self.type.endswith("*") and not self.type.startswith("const")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A C function that calls name, as its C file declares it."""

    name: str
    source: str
    """The text of the C file."""
    parameters: tuple[Parameter, ...]
    index_of: Mapping[str, int]
    """Position of each parameter, by name."""
    is_random: bool
    """Whether results depend on the number of the step, ``pm_random_step`` of ``pm_random.h``."""


@cache
def kernel_names() -> frozenset[str]:
    """Return the names of all kernels: the C sources in the folder ``kernels``."""
    folder = SOURCES / "kernels"
    return frozenset(
        path.name.removesuffix(".c") for path in folder.iterdir() if path.name.endswith(".c")
    )


@cache
def find_kernel(name: str) -> Kernel:
    """Return a kernel; raise `FileNotFoundError` for an unknown name."""
    source = (SOURCES / "kernels" / f"{name}.c").read_text(encoding="utf-8")
    (prototype,) = (each for each in find_prototypes(source) if f" {name}(" in each)
    declarations = (
        " ".join(text.split()) for text in prototype[prototype.index("(") + 1 : -1].split(",")
    )
    parameters = tuple(
        Parameter(_LAST_WORD.findall(text)[0], _LAST_WORD.sub("", text).strip())
        for text in declarations
    )
    return Kernel(
        name=name,
        source=source,
        parameters=parameters,
        index_of={parameter.name: k for k, parameter in enumerate(parameters)},
        is_random=_RANDOM.search(source) is not None,
    )


def find_prototypes(source: str) -> list[str]:
    """Return the prototypes of non-static functions ``void pm_...`` and ``int pm_...`` in C."""
    return _PROTOTYPE.findall(source)
