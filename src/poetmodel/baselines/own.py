"""User-defined methods: a decorator, and functions in files; each is a function of a problem.

The functions are not trusted: their exceptions are reported with file and line, and their schedules
are verified like any other.
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
    TimeLimitError,
    TooLargeError,
    UserMethodError,
    listed,
)
from poetmodel.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from poetmodel.problem import Problem

_SUFFIX: Final = ".py"
_PREFIX: Final = "poetmodel_own_"
"""Prefix of the module names under which files of methods are imported."""
_FORBIDDEN_CHARACTERS: Final = frozenset(":,")
"""Characters that names must not contain: a colon separates variants and functions, a comma
names."""

_registered: dict[str, Method] = {}
"""Methods registered in this process, by name."""


def method(
    name: str, *, summary: str = "", source: str = ""
) -> Callable[[Callable[[Problem], Schedule]], Callable[[Problem], Schedule]]:
    """Register a function as a method under a name that `poetmodel.baselines.run` accepts.

    Parameters
    ----------
    name : str
        Name in this process. A method with the same name is replaced, so that a cell of a notebook
        can be run again.
    summary : str, optional
        One-line description. Default: the first line of its docstring.
    source : str, optional
        Authors and year.

    Returns
    -------
    callable
        A decorator that returns the function unchanged. The function takes a `Problem` and returns
        a `Schedule`, or raises `MethodNotApplicableError` with the reason.

    Raises
    ------
    InputError
        If the name is that of a shipped method, is empty, or contains a space, a comma or a colon.
    """
    if not isinstance(name, str):
        raise InputError('method: give it a name: @pm.method("mine")')
    if (
        not name
        or name in METHODS
        or _FORBIDDEN_CHARACTERS.intersection(name)
        or name != "".join(name.split())
    ):
        raise InputError(
            f"method {name!r}: expected a name without spaces, commas and colons that no shipped "
            "method has"
        )

    def register(function: Callable[[Problem], Schedule]) -> Callable[[Problem], Schedule]:
        _registered[name] = _make_method(name, function, summary=summary, source=source)
        return function

    return register


def find_user_method(name: str) -> Method | None:
    """Return the user-defined method of a name, or None.

    The name is a registered name, or ``FILE.py:FUNCTION``.

    Raises
    ------
    InputError
        If the file cannot be read, or has no such function.
    UserMethodError
        If the file raises an exception when it is imported.
    """
    if name in _registered:
        return _registered[name]
    if name.endswith(_SUFFIX):
        raise InputError(f"method {name!r}: name a function of the file: {name}:FUNCTION")
    path, _, function = name.rpartition(":")
    if path.endswith(_SUFFIX):
        return _method_from_file(name, Path(path), function)
    return None


def registered_names() -> tuple[str, ...]:
    """Return the names of all registered methods."""
    return tuple(_registered)


def known_elsewhere(name: str) -> bool:
    """Return whether other processes can find the method by its name; False for registered ones."""
    return name not in _registered


def files_of(entry: Method) -> tuple[Path, ...]:
    """Return the file of a user-defined method, and the modules that it imports from its folder.

    Return () for shipped methods, and for functions without a file. Files of other
    methods are excluded unless they are imported.
    """
    file = "" if entry.user_function is None else _file_of(entry.user_function)
    if not Path(file).is_file():  # such as a function typed in an interactive session
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
    """Return a hash of the files of a user-defined method; "" for shipped methods."""
    files = files_of(entry)
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16] if files else ""


# -- import of methods
# ------------------------------------------------------------------------------


def _method_from_file(name: str, path: Path, function: str) -> Method:
    """Import a file and return the method of its function; raise `InputError` if missing."""
    try:
        stamp = path.stat().st_mtime_ns
    except OSError as error:
        raise InputError(f"method {name!r}: {path}: {error.strerror}") from None
    module = _import_file(name, path.resolve(), stamp)
    functions = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    if not callable(getattr(module, function, None)):
        function_list = listed(functions) or "none"
        raise InputError(
            f"method {name!r}: {path} has no function {function!r} (it has {function_list})"
        )
    return _make_method(name, getattr(module, function))


@cache
def _import_file(name: str, path: Path, _stamp: int) -> ModuleType:
    """Import a file, again if it has changed; it can import modules of its folder."""
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
    except (Exception, SystemExit) as error:  # noqa: BLE001 - users' files may raise anything
        del sys.modules[module_name]
        _raise_method_error(f"method {name!r}: {path.name} cannot be imported:", error, str(path))
    return module


def _make_method(name: str, function: Any, *, summary: str = "", source: str = "") -> Method:
    """Return the entry of a user's function; the default summary is its docstring's first line."""
    if not callable(function):
        raise InputError(f"method {name!r}: expected a function of a problem, got {function!r}")
    text = inspect.getdoc(function) if inspect.isfunction(function) else None
    return Method(
        name=name,
        summary=summary or (text or "a user-defined method").partition("\n")[0],
        source=source or "own",
        assumptions="",
        function_path="",
        user_function=_with_checks(name, function),
    )


# -- execution of methods
# ---------------------------------------------------------------------------


def _with_checks(name: str, function: Callable[..., Any]) -> Callable[[Problem], Schedule]:
    """Wrap a user's function: it returns a `Schedule`, or raises an error with file and line."""

    @wraps(function)
    def run(problem: Problem) -> Schedule:
        """Call the user's function with its output on stderr.

        Raise `UserMethodError` for its errors, except those that methods may raise.
        """
        try:
            with redirect_stdout(sys.stderr):  # its output must not mix with ours
                schedule = function(problem)
        except (MethodNotApplicableError, TimeLimitError, TooLargeError):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - users' functions may raise anything
            _raise_method_error(f"method {name!r} raised", error, function)
        if not isinstance(schedule, Schedule):
            if inspect.iscoroutine(schedule):
                schedule.close()
            type_name = type(schedule).__name__
            raise UserMethodError(
                f"method {name!r} returned {type_name}{_format_begin(function)}, not a Schedule"
            )
        return schedule

    return run


def _raise_method_error(
    context: str, error: BaseException, origin: str | Callable[..., Any] = ""
) -> NoReturn:
    """Raise `UserMethodError` for an exception of a file or function, with file name and line.

    If the exception was raised outside the file, the position is the begin of the function, which
    was called with wrong arguments.
    """
    file = origin if isinstance(origin, str) else _file_of(origin)
    if isinstance(error, SyntaxError):
        message, line = error.msg, error.lineno
        position = _format_position(error.filename or file, line)
    else:
        message = str(error)
        frames = traceback.extract_tb(error.__traceback__)
        own_frames = [frame for frame in frames if frame.filename == file]
        if own_frames or isinstance(origin, str):
            position = _format_position(
                (own_frames or frames)[-1].filename, (own_frames or frames)[-1].lineno
            )
        else:
            position = _format_begin(origin)
    description = f"{type(error).__name__}: {message}" if message else type(error).__name__
    raise UserMethodError(f"{context} {' '.join(description.split())}{position}") from error


def _format_position(file: str, line: int | None) -> str:
    return f" ({Path(file).name})" if line is None else f" ({Path(file).name}, line {line})"


def _file_of(function: Callable[..., Any]) -> str:
    try:
        return inspect.getfile(inspect.unwrap(function))
    except TypeError:  # a callable object
        return ""


def _format_begin(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else _format_position(code.co_filename, code.co_firstlineno)
