"""The kernels in C that a step calls: their names, parameters and sources."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from poetmodel.lowered.calls import Ref

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.resources.abc import Traversable

    from poetmodel.lowered.calls import Call

SOURCES: Final[Traversable] = files("poetmodel") / "export" / "c"
"""The C that an export copies, and whose kernels a step calls."""
RANDOM: Final = frozenset(
    ("pm_dropout", "pm_dropout_bits", "pm_bernoulli", "pm_normal", "pm_uniform",
     "pm_q8_stochastic", "pm_q8_pointwise_dw_stochastic", "pm_q8_conv2d_dw_stochastic",
     "pm_q8_depthwise_dw_stochastic")
)  # fmt: skip
"""Kernels whose numbers depend on the number of the step: see ``pm_random.h``."""

_PROTOTYPE: Final = re.compile(r"^((?:void|int) pm_\w+\([^{;]*\))\s*\{", re.MULTILINE)
_LAST_WORD: Final = re.compile(r"\w+$")


@cache
def kernel_names() -> frozenset[str]:
    """Return the kernels that there are."""
    folder = SOURCES / "kernels"
    return frozenset(
        path.name.removesuffix(".c") for path in folder.iterdir() if path.name.endswith(".c")
    )


@cache
def parameters(kernel: str) -> tuple[str, ...]:
    """Return the types of what a kernel takes, such as ``const pm_real *``."""
    return tuple(_LAST_WORD.sub("", declared).strip() for declared in _declared(kernel))


def changed(call: Call) -> list[Ref]:
    """Return what a call writes to."""
    pairs = zip(call.arguments, parameters(call.kernel), strict=True)
    return [a for a, kind in pairs if isinstance(a, Ref) and not kind.startswith("const")]


@cache
def parameter_names(kernel: str) -> tuple[str, ...]:
    """Return what a kernel calls its parameters."""
    return tuple(_LAST_WORD.findall(declared)[0] for declared in _declared(kernel))


def _declared(kernel: str) -> Iterator[str]:
    """Yield the parameters of a kernel as its source has them."""
    text = kernel_source(kernel)
    (declared,) = (prototype for prototype in defined_functions(text) if f" {kernel}(" in prototype)
    for part in declared[declared.index("(") + 1 : -1].split(","):
        yield " ".join(part.split())


def kernel_source(name: str) -> str:
    """Return the C of a kernel."""
    return (SOURCES / "kernels" / f"{name}.c").read_text(encoding="utf-8")


def defined_functions(source: str) -> list[str]:
    """Return the prototypes of the functions that the C of a kernel defines."""
    return _PROTOTYPE.findall(source)
