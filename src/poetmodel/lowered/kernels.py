"""The C kernels that a step calls: their names, parameters and sources."""

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
"""The folder of the C sources that an export copies, kernels included."""
RANDOM_KERNELS: Final = frozenset(
    ("pm_dropout", "pm_dropout_bits", "pm_bernoulli", "pm_normal", "pm_uniform",
     "pm_q8_stochastic", "pm_q8_pointwise_dw_stochastic", "pm_q8_conv2d_dw_stochastic",
     "pm_q8_depthwise_dw_stochastic")
)  # fmt: skip
"""Kernels whose results depend on the number of the step, ``pm_random_step`` of ``pm_random.h``."""

_PROTOTYPE: Final = re.compile(r"^((?:void|int) pm_\w+\([^{;]*\))\s*\{", re.MULTILINE)
_LAST_WORD: Final = re.compile(r"\w+$")


@cache
def kernel_names() -> frozenset[str]:
    """Return the names of all kernels: the C sources in the folder ``kernels``."""
    folder = SOURCES / "kernels"
    return frozenset(
        path.name.removesuffix(".c") for path in folder.iterdir() if path.name.endswith(".c")
    )


@cache
def parameter_types(kernel: str) -> tuple[str, ...]:
    """Return the parameter types of a kernel, such as ``const pm_real *``, in order.

    Raises `FileNotFoundError` for an unknown name.
    """
    return tuple(
        _LAST_WORD.sub("", declaration).strip() for declaration in _parameter_declarations(kernel)
    )


def written_refs(call: Call) -> list[Ref]:
    """Return the pointers through which a call may write: those of parameters without ``const``.

    Pointers to the workspace are included, null pointers omitted.
    """
    pairs = zip(call.arguments, parameter_types(call.kernel), strict=True)
    return [
        argument
        for argument, parameter_type in pairs
        if isinstance(argument, Ref) and not parameter_type.startswith("const")
    ]


@cache
def parameter_names(kernel: str) -> tuple[str, ...]:
    """Return the parameter names of a kernel, in order.

    Raises `FileNotFoundError` for an unknown name.
    """
    return tuple(
        _LAST_WORD.findall(declaration)[0] for declaration in _parameter_declarations(kernel)
    )


def _parameter_declarations(kernel: str) -> Iterator[str]:
    """Yield the parameter declarations of a kernel, such as ``const pm_real *x``, in order.

    Raises `FileNotFoundError` for an unknown name.
    """
    text = kernel_source(kernel)
    (function_prototype,) = (
        prototype for prototype in find_prototypes(text) if f" {kernel}(" in prototype
    )
    for parameter in function_prototype[function_prototype.index("(") + 1 : -1].split(","):
        yield " ".join(parameter.split())


def kernel_source(name: str) -> str:
    """Return the C source of a kernel; raise `FileNotFoundError` for an unknown name."""
    return (SOURCES / "kernels" / f"{name}.c").read_text(encoding="utf-8")


def find_prototypes(source: str) -> list[str]:
    """Return the prototypes of the functions ``void pm_...`` and ``int pm_...`` of a C source.

    Functions that are static, only declared, or return another type are omitted.
    """
    return _PROTOTYPE.findall(source)
