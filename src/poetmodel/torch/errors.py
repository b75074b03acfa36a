"""Exceptions of the PyTorch front end and their conversion; checks of packages; code origins."""

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

MIN_TORCH: Final = "2.9"
"""Oldest supported release of PyTorch: its exported graphs describe all inputs and outputs."""

FOREIGN_ERRORS: Final = (Exception,)
"""Classes of exceptions that code of users or of PyTorch may raise."""

EXECUTORCH_RELEASE: Final = "1.5"
"""The supported release of ExecuTorch, in any patch version."""


class CaptureError(InputError):
    """A capture that fails, or a model, input or operation that a captured step cannot have."""


class ForbiddenError(RuntimeError):
    """An operation that no step may execute. Its message has ``{where}`` for the source line."""


def foreign_tensor_error(predicate: str) -> ForbiddenError:
    """Return the error for a wrong use of a tensor that is no parameter, buffer or input.

    `predicate` is a verb phrase such as "is changed". The caller replaces ``{where}``.
    """
    return ForbiddenError(
        f"a tensor that is no parameter, buffer or input {predicate}{{where}}, but can only be a "
        "constant of a compiled step; make it a parameter or a buffer of the module "
        "(register_buffer), or one of the inputs"
    )


class PageError(PoetModelError, OSError):
    """A page of a page file or state file could not be written, read or verified."""


def require_torch() -> str:
    """Return the version of PyTorch, without importing it; raise an error if missing or too old."""
    from packaging.version import Version

    try:
        release = version("torch")
    except PackageNotFoundError:
        raise BackendUnavailableError(
            "PyTorch is not installed, and tracing needs it: pip install 'poetmodel[torch]' "
            f"(torch {MIN_TORCH} or newer)"
        ) from None
    if Version(release).release < Version(MIN_TORCH).release:
        raise BackendUnavailableError(
            f"PyTorch {release} is too old: tracing needs torch {MIN_TORCH} or newer"
        )
    return release


@contextmanager
def convert_moved_names() -> Iterator[None]:
    """Context manager: convert an import that a release of PyTorch breaks to one sentence."""
    release = require_torch()
    try:
        yield
    except (ImportError, AttributeError) as error:
        owner = getattr(error, "obj", None)
        path = getattr(owner, "__module__", None) or getattr(owner, "__name__", None) or error.name
        if str(path).partition(".")[0] != "torch":
            raise
        reason = str(error).partition(" (")[0]
        raise BackendUnavailableError(
            f"PyTorch {release} has moved a name that poetmodel needs ({reason}); install an older "
            "release of PyTorch, or a newer one of poetmodel"
        ) from error


def require_package(package: str, purpose: str, *, extra: str | None = None) -> None:
    """Raise `MissingExtraError` unless installed; `purpose` is the message's subject."""
    if find_spec(package) is None:
        raise MissingExtraError(
            f"{purpose} needs the package {package}, not installed here; "
            f'pip install "poetmodel[{extra or package}]" installs it'
        )


@contextmanager
def convert_missing_packages(purpose: str, *, install: str) -> Iterator[None]:
    """Context manager: convert an import of a missing package to `MissingExtraError`.

    `purpose` is the message's subject, `install` what pip installs. Calls `require_torch` first.
    """
    require_torch()
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise MissingExtraError(
            f'{purpose} needs the package {package}, not installed here; pip install "{install}" '
            "installs it"
        ) from None


def require_executorch() -> None:
    """Raise `BackendUnavailableError` unless the supported release of ExecuTorch is installed."""
    advice = "pip install 'poetmodel[executorch]'"
    try:
        release = version("executorch")
    except PackageNotFoundError:
        raise BackendUnavailableError(
            f"ExecuTorch is not installed, and writing its programs needs it: {advice}"
        ) from None
    if not release.startswith(f"{EXECUTORCH_RELEASE}."):
        raise BackendUnavailableError(
            f"ExecuTorch {release} is installed, and programs need release {EXECUTORCH_RELEASE}: "
            f"{advice}"
        )


@contextmanager
def convert_exceptions(subject: str, trail: Sequence[str] = ()) -> Iterator[None]:
    """Context manager that converts exceptions to `CaptureError`, usually with line and advice.

    `subject` begins the message. `trail` has the modules being called, the innermost last, named if
    no line is known. An exception of poetmodel passes unchanged; one in the chain is raised
    instead.
    """
    try:
        yield
    except PoetModelError:
        raise
    except FOREIGN_ERRORS as error:
        # PyTorch's cleanup may fail after our exception: raise the original one.
        for link in exception_chain(error):
            if isinstance(link, PoetModelError):
                raise link from None
        line = _interpreted_line or user_line_of_error(error)
        where = at_line(line) or (f" in {trail[-1]}" if trail else "")
        raise CaptureError(f"{subject}: {_capture_message(error, where)}") from error


@contextmanager
def suppress_warnings() -> Iterator[None]:
    """Context manager that suppresses warnings, and log messages up to level WARNING."""
    old_level = logging.root.manager.disable
    logging.disable(max(old_level, logging.WARNING))
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(old_level)


_MEMORY_MARKS: Final = ("can't allocate memory", "not enough memory", "out of memory")
"""Substrings of messages about exhausted memory."""
_MEMORY_ADVICE: Final = (
    "compile executes whole steps on the example inputs, also in eager PyTorch: it needs the "
    "memory of ordinary training; free some, or use a smaller batch"
)
_NUMPY_MARKS: Final = (".numpy() is not supported", "numpy() on", "__array__", "data pointer")
"""Substrings of messages about tensors that cannot be converted to NumPy."""
_DATA_DEPENDENT_ERRORS: Final = frozenset(
    ("DataDependentOutputException", "GuardOnDataDependentSymNode", "UserError")
)
"""Names of PyTorch's exceptions for code that needs the value of a tensor during capture."""
_INDUCTOR_MARKS: Final = ("torchinductor", "_inductor")
"""Substrings of paths of the compiler of ``torch.compile``, and of the code that it generates."""
_MAX_MESSAGE: Final = 300
"""Maximum number of characters of another library's message that our message repeats."""


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception reports exhausted memory."""
    return isinstance(error, MemoryError) or any(mark in str(error) for mark in _MEMORY_MARKS)


def _capture_message(error: BaseException, where: str) -> str:
    """Return the message for an exception; `where`, like " at FILE:LINE", may be ""."""
    class_names = {kind.__name__ for link in exception_chain(error) for kind in type(link).__mro__}
    operations = (getattr(link, "func", None) for link in exception_chain(error))
    operation = next(filter(None, operations), "an operation")
    text = " ".join(str(error).split())
    if isinstance(error, ForbiddenError):
        return str(error).format(where=where)
    if _is_out_of_memory(error):
        return f"there is not enough memory{where}; {_MEMORY_ADVICE}"
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(
        code.co_name == "compile_wrapper"
        or any(mark in code.co_filename for mark in _INDUCTOR_MARKS)
        for code in codes
    ):
        return (
            f"a function that is called{where} is compiled (torch.compile), and its operations "
            "cannot be captured; call the original function"
        )
    if any(mark in text for mark in _NUMPY_MARKS):
        return (
            f".numpy() or a similar conversion{where} cannot be captured; use torch operations, or "
            "convert outside of the step"
        )
    if "mutating a non-functional tensor" in text:
        return str(foreign_tensor_error("is changed")).format(where=where)
    if "did not receive a gradient" in text:
        return (
            "a parameter that requires a gradient gets none, because the loss does not depend on "
            "it; freeze unused parameters (requires_grad_(False)), or leave them out"
        )
    if "DynamicOutputShapeException" in class_names:
        return (
            f"the output shape of {operation}{where} depends on values and cannot be captured; "
            "shapes must not depend on values: multiply by the mask, or use torch.where or "
            "masked_fill"
        )
    if class_names & _DATA_DEPENDENT_ERRORS:
        return (
            f"{operation}{where} reads a tensor's value (an if, .item(), float(), ...) and cannot "
            "be captured: it depends on parameters, or on more than inputs and buffers; select "
            "with torch.where, or compute the value outside of the step"
        )
    reason = text[:_MAX_MESSAGE].rstrip(".") + ("..." if len(text) > _MAX_MESSAGE else "")
    return (
        f"capture stopped{where} with {type(error).__name__}: {reason}; try one ordinary training "
        "step first, and replace what cannot be traced"
    )


def exception_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes or else contexts, also suppressed ones, each once."""
    link: BaseException | None = error
    seen_ids: set[int] = set()
    while link is not None and id(link) not in seen_ids:
        seen_ids.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def user_line_of_error(error: BaseException) -> str | None:
    """Return the innermost line of the user's or a library's code in a traceback, if any."""
    return _first_user_line(reversed(list(traceback.walk_tb(error.__traceback__))))


_interpreted_line = ""


@contextmanager
def interpreting_line(line: str) -> Iterator[None]:
    """Context manager in which a line, if not empty, counts as that of the operations."""
    global _interpreted_line  # noqa: PLW0603 - captures hold a lock
    old_line, _interpreted_line = _interpreted_line, line
    try:
        yield
    finally:
        _interpreted_line = old_line


def interpreted_line() -> str:
    """Return the line of code that is being interpreted; "" if unknown."""
    return _interpreted_line


def _first_user_line(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    """Return the first line of user or library code among (frame, line); None if there is none."""
    for frame, line in frames:
        path = frame.f_code.co_filename
        if code_origin(path) in (CodeOrigin.USER, CodeOrigin.LIBRARY):
            return format_source_line(path, line)
    return None


def format_source_line(path: str, line: int) -> str:
    """Format a line of code for display: file, line number and, if it can be read, text."""
    text = linecache.getline(path, line).strip()
    return f"{path}:{line}" + (f" ({text})" if text else "")


def at_line(line: str | None) -> str:
    """Return " at LINE" for a message; "" if the line is not known."""
    return f" at {line}" if line else ""


class CodeOrigin(StrEnum):
    """The origin of the code in a file."""

    USER = "user"
    LIBRARY = "library"
    """An installed package other than PyTorch and poetmodel."""
    GENERATED = "generated"
    """Code without a file, such as that of torch.fx, or code that torch.compile generates."""
    STANDARD = "standard library"
    TORCH = "torch"
    OWN = "poetmodel"


@cache
def code_origin(path: str) -> CodeOrigin:
    """Return the origin of the code in a file, by the path of its code object; USER by default."""
    file = Path(path)
    if path.startswith("<frozen "):
        return CodeOrigin.STANDARD
    if path.startswith("<") or "torchinductor" in path:
        return CodeOrigin.GENERATED
    if file.is_relative_to(Path(__file__).parents[1]):
        return CodeOrigin.OWN
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    if torch_file is not None and file.is_relative_to(Path(torch_file).parent):
        return CodeOrigin.TORCH
    if not {"site-packages", "dist-packages"}.isdisjoint(file.parts):
        return CodeOrigin.LIBRARY
    return CodeOrigin.STANDARD if file.is_relative_to(Path(os.__file__).parent) else CodeOrigin.USER
