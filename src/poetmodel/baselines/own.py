"""Methods of one's own: a decorator or a file, each a function of a problem.

Nothing that such a function does is trusted. What it raises is told with its file and line, and its
schedule passes the verifier like any other.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from contextlib import redirect_stdout
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from poetmodel.baselines.registry import METHODS, Method
from poetmodel.errors import (
    InputError,
    MethodNotApplicableError,
    OwnMethodError,
    TimeLimitError,
    TooLargeError,
    listed,
)
from poetmodel.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from poetmodel.problem import Problem

_SUFFIX: Final = ".py"
_PREFIX: Final = "poetmodel_own_"
"""What the names of modules begin with that are files of methods."""
_IN_NAMES: Final = frozenset(":,")
"""What a name cannot have: a colon is for variants and files, a comma is between names."""

_registered: dict[str, Method] = {}
"""Methods of this process, by name."""


def method(
    name: str, *, summary: str = "", source: str = ""
) -> Callable[[Callable[[Problem], Schedule]], Callable[[Problem], Schedule]]:
    """Register a function as a method, under a name by which `poetmodel.baselines.run` knows it.

    Parameters
    ----------
    name : str
        What it is called in this process. A name that was registered before is replaced, so that a
        cell of a notebook can run again.
    summary : str, optional
        What it does, in one line; by default the first line of its docstring.
    source : str, optional
        Authors and year.

    Returns
    -------
    callable
        A decorator, which returns the function as it is. The function takes a `Problem` and returns
        a `Schedule`, or raises `MethodNotApplicableError` with the reason.

    Raises
    ------
    InputError
        If the name is that of a shipped method, is empty, or has a space, a comma or a colon.
    """
    if not isinstance(name, str):
        raise InputError('method: give it a name: @pm.method("mine")')
    if not name or name in METHODS or _IN_NAMES.intersection(name) or name != "".join(name.split()):
        raise InputError(
            f"method {name!r}: expected a name without spaces, commas and colons that no shipped "
            "method has"
        )

    def register(function: Callable[[Problem], Schedule]) -> Callable[[Problem], Schedule]:
        _registered[name] = _entry(name, function, summary=summary, source=source)
        return function

    return register


def own_method(name: str) -> Method | None:
    """Return a method of one's own, or None.

    A name is one that was registered in this process, or ``FILE.py:FUNCTION``.

    Raises
    ------
    InputError
        If the file cannot be read, or has no such function.
    OwnMethodError
        If the file raises an exception when it is imported.
    """
    if name in _registered:
        return _registered[name]
    if name.endswith(_SUFFIX):
        raise InputError(f"method {name!r}: say which function of the file: {name}:FUNCTION")
    path, _, function = name.rpartition(":")
    if path.endswith(_SUFFIX):
        return _of_file(name, Path(path), function)
    return None


def own_names() -> tuple[str, ...]:
    """Return the names of all methods that were registered."""
    return tuple(_registered)


def known_elsewhere(name: str) -> bool:
    """Whether another process finds a method under this name, too."""
    return name not in _registered


def files_of(entry: Method) -> tuple[Path, ...]:
    """Return the file of a method of one's own, and the modules that it imports from its folder.

    Empty for shipped methods, and for functions that are in no file. Files of other methods are
    left out, unless they are imported, too.
    """
    file = "" if entry.own is None else _file_of(entry.own)
    if not Path(file).is_file():  # also what is typed into a session
        return ()
    folder = Path(file).resolve().parent
    modules = [
        getattr(module, "__file__", None) or ""
        for name, module in list(sys.modules.items())
        if not name.startswith(_PREFIX)
    ]
    files = {Path(module).resolve() for module in modules if module.endswith(_SUFFIX)}
    files = {path for path in files if path.parent == folder and path.is_file()}
    return tuple(sorted(files | {Path(file).resolve()}))


def fingerprint(entry: Method) -> str:
    """Return an identifier of the files of a method of one's own; "" for shipped methods."""
    files = files_of(entry)
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16] if files else ""


# -- where methods come from -----------------------------------------------------------------------


def _of_file(name: str, path: Path, function: str) -> Method:
    try:
        stamp = path.stat().st_mtime_ns
    except OSError as error:
        raise InputError(f"method {name!r}: {path}: {error.strerror}") from None
    module = _module(name, path.resolve(), stamp)
    functions = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    if not callable(getattr(module, function, None)):
        known = listed(functions) or "none"
        raise InputError(f"method {name!r}: {path} has no function {function!r} (it has {known})")
    return _entry(name, getattr(module, function))


@cache
def _module(name: str, path: Path, _stamp: int) -> ModuleType:
    """Import a file, again where it has changed; files beside it can be imported, too."""
    module_name = f"{_PREFIX}{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"method {name!r}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the file does
        del sys.modules[module_name]
        _blame(f"method {name!r}: {path.name} cannot be imported:", error, str(path))
    return module


def _entry(name: str, function: Any, *, summary: str = "", source: str = "") -> Method:
    if not callable(function):
        raise InputError(f"method {name!r}: expected a function of a problem, got {function!r}")
    text = inspect.getdoc(function) if inspect.isfunction(function) else None
    return Method(
        name=name,
        summary=summary or (text or "a method of one's own").partition("\n")[0],
        source=source or "own",
        assumptions="",
        home="",
        own=_guarded(name, function),
    )


# -- what it does when it runs ---------------------------------------------------------------------


def _guarded(name: str, function: Callable[..., Any]) -> Callable[[Problem], Schedule]:
    """Return the function so that it returns a schedule, or raises an error that says where."""

    @wraps(function)
    def run(problem: Problem) -> Schedule:
        try:
            with redirect_stdout(sys.stderr):  # what it prints is no part of an answer
                schedule = function(problem)
        except (MethodNotApplicableError, TimeLimitError, TooLargeError):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever its function does
            _blame(f"method {name!r} raised", error, function)
        if not isinstance(schedule, Schedule):
            if inspect.iscoroutine(schedule):
                schedule.close()
            kind = type(schedule).__name__
            raise OwnMethodError(
                f"method {name!r} returned {kind}{_begin_of(function)}, not a Schedule"
            )
        return schedule

    return run


def _blame(what: str, error: BaseException, by: str | Callable[..., Any] = "") -> NoReturn:
    """Raise an error that says in one sentence what went wrong in which file and line.

    It was done by a file or a function. What is raised outside of its file is where the function
    begins: it was called with the wrong arguments.
    """
    file = by if isinstance(by, str) else _file_of(by)
    if isinstance(error, SyntaxError):
        message, line = error.msg, error.lineno
        position = _position(error.filename or file, line)
    else:
        message = str(error)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == file]
        if own or isinstance(by, str):
            position = _position((own or frames)[-1].filename, (own or frames)[-1].lineno)
        else:
            position = _begin_of(by)
    description = f"{type(error).__name__}: {message}" if message else type(error).__name__
    raise OwnMethodError(f"{what} {' '.join(description.split())}{position}") from error


def _position(file: str, line: int | None) -> str:
    return f" ({Path(file).name})" if line is None else f" ({Path(file).name}, line {line})"


def _file_of(function: Callable[..., Any]) -> str:
    try:
        return inspect.getfile(inspect.unwrap(function))
    except TypeError:  # an object with __call__
        return ""


def _begin_of(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else _position(code.co_filename, code.co_firstlineno)
