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
    join_names,
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
"""Characters that names must not contain: a colon precedes a variant or a function, a comma
separates names."""

_registered_methods: dict[str, Method] = {}
"""Methods registered in this process with `method`, by name."""


def method(
    name: str, *, summary: str = "", source: str = ""
) -> Callable[[Callable[[Problem], Schedule]], Callable[[Problem], Schedule]]:
    """Register a function as a method under a name that `poetmodel.baselines.run` accepts.

    Parameters
    ----------
    name : str
        Name in this process. A method with the same name is replaced, so that a notebook cell can
        be executed again.
    summary : str, optional
        One-line description. Default: the first line of the function's docstring, or a fixed text
        without one.
    source : str, optional
        Authors and year. Default: ``own``.

    Returns
    -------
    callable
        A decorator that returns the function unchanged. The function takes a `Problem` and returns
        a `Schedule`, or raises `MethodNotApplicableError` with the reason.

    Raises
    ------
    InputError
        If the name is no text, is empty, is that of a shipped method, or contains white space, a
        comma or a colon. The decorator raises it for an object that is not callable.
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
        _registered_methods[name] = _make_method(name, function, summary=summary, source=source)
        return function

    return register


def find_user_method(name: str) -> Method | None:
    """Return the user-defined method of a name, registered or ``FILE.py:FUNCTION``, else None.

    Imports the file. `InputError` if file or function is missing, `UserMethodError` if the file
    raises an exception.
    """
    if name in _registered_methods:
        return _registered_methods[name]
    if name.endswith(_SUFFIX):
        raise InputError(f"method {name!r}: name a function of the file: {name}:FUNCTION")
    path, _, function_name = name.rpartition(":")
    if path.endswith(_SUFFIX):
        return _load_method(name, Path(path), function_name)
    return None


def registered_names() -> tuple[str, ...]:
    """Return the names of all methods registered with `method`, in order of first registration."""
    return tuple(_registered_methods)


def is_found_by_other_processes(name: str) -> bool:
    """Return whether other processes can find a method by name: not if `method` registered it."""
    return name not in _registered_methods


def list_method_files(entry: Method) -> tuple[Path, ...]:
    """Return the paths of a method's file and of the imported modules in its folder, sorted."""
    file = "" if entry.user_function is None else _find_file(entry.user_function)
    if not Path(file).is_file():  # such as a function typed in an interactive session
        return ()
    folder = Path(file).resolve().parent
    module_files = [
        getattr(module, "__file__", None) or ""
        for name, module in list(sys.modules.items())
        if not name.startswith(_PREFIX)
    ]
    files = {Path(name).resolve() for name in module_files if name.endswith(_SUFFIX)}
    files = {path for path in files if path.parent == folder and path.is_file()}
    return tuple(sorted(files | {Path(file).resolve()}))


def hash_method_files(entry: Method) -> str:
    """Return 16 hex digits of a SHA-256 hash of the contents of `list_method_files`, or ""."""
    files = list_method_files(entry)
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16] if files else ""


# -- import of methods -----------------------------------------------------------------------------


def _load_method(name: str, path: Path, function_name: str) -> Method:
    """Import a file and return the method of its function."""
    try:
        modified_ns = path.stat().st_mtime_ns
    except OSError as error:
        raise InputError(f"method {name!r}: {path}: {error.strerror}") from None
    module = _import_file(name, path.resolve(), modified_ns)
    function_names = [
        attribute
        for attribute, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    if not callable(getattr(module, function_name, None)):
        function_list = join_names(function_names) or "none"
        raise InputError(
            f"method {name!r}: {path} has no function {function_name!r} (it has {function_list})"
        )
    return _make_method(name, getattr(module, function_name))


@cache
def _import_file(name: str, path: Path, _modified_ns: int) -> ModuleType:
    """Import a file, once for each method name and modification time.

    Its folder is appended to ``sys.path``, so that it can import its neighbours.
    """
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
    """Return the method of a user's function, summarized by the first line of its docstring."""
    if not callable(function):
        raise InputError(f"method {name!r}: expected a function of a problem, got {function!r}")
    docstring = inspect.getdoc(function) if inspect.isfunction(function) else None
    return Method(
        name=name,
        summary=summary or (docstring or "a user-defined method").partition("\n")[0],
        source=source or "own",
        assumptions="",
        function_path="",
        user_function=_add_checks(name, function),
    )


# -- execution of methods --------------------------------------------------------------------------


def _add_checks(name: str, function: Callable[..., Any]) -> Callable[[Problem], Schedule]:
    """Return a wrapper that checks a user's function and its result; prints go to stderr."""

    @wraps(function)
    def call_function(problem: Problem) -> Schedule:
        """Call the user's function with its output on stderr; check the type of its result."""
        try:
            with redirect_stdout(sys.stderr):  # standard output may carry results of a command
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
                f"method {name!r} returned {type_name}{_format_definition(function)}, "
                "not a Schedule"
            )
        return schedule

    return call_function


def _raise_method_error(
    context: str, error: BaseException, origin: str | Callable[..., Any] = ""
) -> NoReturn:
    """Raise `UserMethodError` for an exception of a file or function, with file name and line."""
    file = origin if isinstance(origin, str) else _find_file(origin)
    if isinstance(error, SyntaxError):
        message, line = error.msg, error.lineno
        position = _format_position(error.filename or file, line)
    else:
        message = str(error)
        frames = traceback.extract_tb(error.__traceback__)
        file_frames = [frame for frame in frames if frame.filename == file]
        if file_frames or isinstance(origin, str):
            position = _format_position(
                (file_frames or frames)[-1].filename, (file_frames or frames)[-1].lineno
            )
        else:
            position = _format_definition(origin)
    description = f"{type(error).__name__}: {message}" if message else type(error).__name__
    raise UserMethodError(f"{context} {' '.join(description.split())}{position}") from error


def _format_position(file: str, line: int | None) -> str:
    return f" ({Path(file).name})" if line is None else f" ({Path(file).name}, line {line})"


def _find_file(function: Callable[..., Any]) -> str:
    try:
        return inspect.getfile(inspect.unwrap(function))
    except TypeError:  # a callable object
        return ""


def _format_definition(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else _format_position(code.co_filename, code.co_firstlineno)
