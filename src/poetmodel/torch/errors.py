"""Exceptions of the PyTorch front end, and what others say."""

from __future__ import annotations

import linecache
import logging
import os
import sys
import traceback
import warnings
from contextlib import contextmanager
from enum import StrEnum
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from poetmodel.errors import (
    BackendUnavailableError,
    InputError,
    MissingExtraError,
    PoetModelError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import FrameType

LEAST: Final = "2.9"
"""Oldest release whose capture says what goes in and out."""

RAISED: Final = (Exception,)
"""Exceptions of a user's or PyTorch's code: anything, also classes of a user's own."""


EXECUTORCH: Final = "1.5"
"""The release of ExecuTorch whose programs are made."""


class CaptureError(InputError):
    """A module, loss or input that cannot be captured as one graph."""


class ForbiddenError(RuntimeError):
    """Something that no step may do; its text has ``{where}`` for the place."""


def foreign(how: str) -> ForbiddenError:
    """Return the error where a tensor of nobody is changed, or would need a gradient."""
    return ForbiddenError(
        f"a tensor that is no parameter, buffer or input {how}{{where}}, and can only be a "
        "constant of a compiled step; make it a parameter or a buffer of the module "
        "(register_buffer), or one of the inputs"
    )


class PageError(PoetModelError, OSError):
    """A page could not be written, read, or trusted; the step was undone."""


def require_torch() -> str:
    """Return the version of the installed PyTorch.

    Raises `BackendUnavailableError` if it is missing or older than `LEAST`.
    """
    from packaging.version import Version

    try:
        installed = version("torch")
    except PackageNotFoundError:
        raise BackendUnavailableError(
            "PyTorch is not installed, and tracing needs it: pip install 'poetmodel[torch]' "
            f"(torch {LEAST} or newer)"
        ) from None
    if Version(installed).release < Version(LEAST).release:
        raise BackendUnavailableError(
            f"PyTorch {installed} is too old: tracing needs torch {LEAST} or newer"
        )
    return installed


def require_package(package: str, what: str, *, extra: str | None = None) -> None:
    """Raise `MissingExtraError` unless a package of an extra is installed.

    The name of the extra is by default that of the package.
    """
    if find_spec(package) is None:
        raise MissingExtraError(
            f"{what} needs the package {package}, not installed here; "
            f'pip install "poetmodel[{extra or package}]" installs it'
        )


def require_executorch() -> None:
    """Raise `BackendUnavailableError` unless the release of ExecuTorch is there that is used."""
    advice = "pip install 'poetmodel[executorch]'"
    try:
        installed = version("executorch")
    except PackageNotFoundError:
        raise BackendUnavailableError(
            f"ExecuTorch is not installed, and its programs are made with it: {advice}"
        ) from None
    if not installed.startswith(f"{EXECUTORCH}."):
        raise BackendUnavailableError(
            f"ExecuTorch {installed} is installed, and programs are made with {EXECUTORCH}: "
            f"{advice}"
        )


@contextmanager
def explained(subject: str, trail: Sequence[str] = ()) -> Iterator[None]:
    """Turn what is raised inside into a `CaptureError` that says where and what to do.

    `trail` has the modules that run when something is raised, the innermost one last: that is said
    where no line of the user's code is known.
    """
    try:
        yield
    except PoetModelError:
        raise
    except RAISED as error:
        # What PyTorch does to clean up may fail in its turn: the first failure counts.
        for link in chain(error):
            if isinstance(link, PoetModelError):
                raise link from None
        line = user_place(error)
        where = f" at {line}" if line else f" in {trail[-1]}" if trail else ""
        raise CaptureError(f"{subject}: {_reason(error, where)}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what other libraries warn and log about their own code to themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


_MEMORY: Final = ("can't allocate memory", "not enough memory", "out of memory")
_MEMORY_ADVICE: Final = (
    "compile runs whole steps on the example inputs, also as PyTorch does: it needs the memory of "
    "ordinary training; free some, or give a smaller batch"
)
_NUMPY: Final = (".numpy() is not supported", "numpy() on", "__array__", "data pointer")
_DATA_DEPENDENT: Final = frozenset(
    ("DataDependentOutputException", "GuardOnDataDependentSymNode", "UserError")
)
_COMPILED: Final = ("torchinductor", "_inductor")
"""Part of the paths of code that ``torch.compile`` makes."""
_LONGEST: Final = 300
"""Most characters of another's message that are repeated."""


def _is_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(mark in str(error) for mark in _MEMORY)


def _reason(error: BaseException, where: str) -> str:
    """Return the part that cannot be captured, its place, and a remedy."""
    kinds = {kind.__name__ for link in chain(error) for kind in type(link).__mro__}
    operators = (getattr(link, "func", None) for link in chain(error))
    operation = next(filter(None, operators), "an operation")
    text = " ".join(str(error).split())
    if isinstance(error, ForbiddenError):
        return str(error).format(where=where)
    if _is_memory(error):
        return f"there is not enough memory{where}; {_MEMORY_ADVICE}"
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(
        code.co_name == "compile_wrapper" or any(mark in code.co_filename for mark in _COMPILED)
        for code in codes
    ):
        return (
            f"a function that is called{where} is compiled (torch.compile), and its operations "
            "cannot be captured; give the function that it was made of"
        )
    if any(mark in text for mark in _NUMPY):
        return (
            f".numpy() or the like{where} cannot be captured; stay with torch operations, or "
            "convert outside of the step"
        )
    if "mutating a non-functional tensor" in text:
        return str(foreign("is changed")).format(where=where)
    if "did not receive a gradient" in text:
        return (
            "a parameter that requires a gradient gets none, for the loss does not depend on it; "
            "freeze what is not used (requires_grad_(False)), or leave it out"
        )
    if "DynamicOutputShapeException" in kinds:
        return (
            f"the shape that {operation} makes{where} depends on values and cannot be captured; "
            "shapes must not depend on values: multiply by the mask, or use torch.where or "
            "masked_fill"
        )
    if kinds & _DATA_DEPENDENT:
        return (
            f"{operation}{where} reads a tensor's value (an if, .item(), float(), ...) and cannot "
            "be captured: it depends on parameters, or on more than inputs and buffers; choose "
            "with torch.where, or compute the value outside of the step"
        )
    reason = text[:_LONGEST].rstrip(".") + ("..." if len(text) > _LONGEST else "")
    return (
        f"capture stopped{where} with {type(error).__name__}: {reason}; try one ordinary training "
        "step first, and replace what cannot be traced"
    )


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that it was raised from."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def user_place(error: BaseException) -> str | None:
    """Return the innermost line that belongs neither to PyTorch nor to this package."""
    return _users(reversed(list(traceback.walk_tb(error.__traceback__))))


def user_line(frame: FrameType, *, within: str | None = None) -> str | None:
    """Return the innermost such line that runs now, from a frame outwards.

    Frames are looked at up to the first one of the file `within`.
    """
    frames = traceback.walk_stack(frame)
    return _users(takewhile(lambda place: place[0].f_code.co_filename != within, frames))


def _users(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    """Return the first line of a user's code."""
    for frame, line in frames:
        path = frame.f_code.co_filename
        if origin_of(path) in (CodeOrigin.USER, CodeOrigin.LIBRARY):
            return shown_line(path, line)
    return None


def shown_line(path: str, line: int) -> str:
    """Return a line of code for people: its file, its number and its text."""
    text = linecache.getline(path, line).strip()
    return f"{path}:{line}" + (f" ({text})" if text else "")


class CodeOrigin(StrEnum):
    """Whose code a file has."""

    USER = "user"
    LIBRARY = "library"
    """Of an installed package."""
    GENERATED = "generated"
    """Of no file: made by a dataclass, by torch.fx, or by torch.compile."""
    STANDARD = "standard library"
    TORCH = "torch"
    OWN = "poetmodel"


@cache
def origin_of(path: str) -> CodeOrigin:
    """Return whose code the file of a code object has."""
    file = Path(path)
    if path.startswith("<frozen "):
        return CodeOrigin.STANDARD
    if path.startswith("<") or "torchinductor" in path:
        return CodeOrigin.GENERATED
    if file.is_relative_to(Path(__file__).parents[1]):
        return CodeOrigin.OWN
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch is not None and file.is_relative_to(Path(torch).parent):
        return CodeOrigin.TORCH
    if not {"site-packages", "dist-packages"}.isdisjoint(file.parts):
        return CodeOrigin.LIBRARY
    return CodeOrigin.STANDARD if file.is_relative_to(Path(os.__file__).parent) else CodeOrigin.USER
