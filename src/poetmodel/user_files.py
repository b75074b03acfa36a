"""Objects in Python files of users, named ``FILE.py:NAME``: import, files and errors.

The code of users is not trusted: its exceptions are reported in one sentence with file and line.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import sys
import traceback
from contextlib import redirect_stdout
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from poetmodel.errors import InputError, join_names

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from poetmodel.errors import PoetModelError

_SUFFIX: Final = ".py"
_MODULE_PREFIX: Final = "poetmodel_own_"
"""Prefix of the names of modules that are imported from files of users."""
ROOT_VARIABLE: Final = "POETMODEL_USER_FILES"
"""Environment variable of workers of a sweep: folder that has the caller's files, by absolute path.
Processes that a worker starts inherit it."""


class UserObject(NamedTuple):
    """A kind of object that users name as ``FILE.py:NAME``, with words for messages about it."""

    option: str
    """Subject of messages, such as ``method``."""
    noun: str
    """Kind of the object, such as ``function``."""
    is_candidate: Callable[[object], bool]
    """Whether a value of a file is such an object."""
    error: type[PoetModelError]
    """Class of exceptions that replace those of the file."""

    def load(self, text: str) -> Any:
        """Import the object of ``FILE.py:NAME``; None for texts that name no ``.py`` file.

        Raises `error` for exceptions of the file's code, and `InputError` for a file without a
        name, or if the file cannot be read or has no such object.
        """
        subject = f"{self.option} {text!r}"
        if text.endswith(_SUFFIX):
            raise InputError(
                f"{subject}: name a {self.noun} of the file: {text}:{self.noun.upper()}"
            )
        file, _, name = text.rpartition(":")
        if not file.endswith(_SUFFIX):
            return None
        root, path = os.environ.get(ROOT_VARIABLE), Path(file)
        if root is not None:
            path = Path(root) / make_relative(path) if path.is_absolute() else path
        module = self._import_file(subject, path)
        found = getattr(module, name, None)
        if not self.is_candidate(found):
            names = [
                other
                for other, value in vars(module).items()
                if self.is_candidate(value)
                and getattr(value, "__module__", None) == module.__name__
                and not other.startswith("__")
            ]
            raise InputError(
                f"{subject}: {path} has no {self.noun} {name!r} (it has "
                f"{join_names(names) or 'none'})"
            )
        return found

    def _import_file(self, subject: str, path: Path) -> ModuleType:
        """Import a file, again if it was modified; `subject` begins the error messages."""
        try:
            modified_ns = path.stat().st_mtime_ns
        except OSError as error:
            raise InputError(f"{subject}: {path}: {error.strerror}") from None
        path = path.resolve()
        try:
            module = _import_once(path, modified_ns)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - users' files may raise anything
            context = f"{subject}: {path.name} cannot be imported:"
            raise_user_error(self.error, context, error, str(path))
        if module is None:
            raise InputError(f"{subject}: {path} is no Python file")
        return module


@cache
def _import_once(path: Path, _modified_ns: int) -> ModuleType | None:
    """Import a file, once for each modification time; None if it is no Python file.

    Its folder is appended to ``sys.path``, so that it can import its neighbours.
    """
    module_name = f"{_MODULE_PREFIX}{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def make_relative(path: Path) -> str:
    """Return the absolute path without its anchor, and without ``..``: ``home/me/own.py``."""
    absolute = Path(os.path.normpath(path.absolute()))
    return str(absolute.relative_to(absolute.anchor))


def is_in_user_file(value: object) -> bool:
    """Return whether a function or class was imported from a file by `UserObject.load`."""
    return str(getattr(value, "__module__", "")).startswith(_MODULE_PREFIX)


def list_files(value: object) -> tuple[Path, ...]:
    """Return the file of a function or class and imported modules in its folder; () for no file."""
    file = find_file(value)
    if not Path(file).is_file():  # such as a function typed in an interactive session
        return ()
    folder = Path(file).resolve().parent
    module_files = [
        getattr(module, "__file__", None) or ""
        for name, module in list(sys.modules.items())
        if not name.startswith(_MODULE_PREFIX)
    ]
    resolve_folder = cache(lambda name: Path(name).resolve())  # thousands of modules, few folders
    neighbours = {
        Path(name).resolve()
        for name in module_files
        if name.endswith(_SUFFIX) and resolve_folder(os.path.dirname(name)) == folder  # noqa: PTH120
    }
    files = {path for path in neighbours if path.parent == folder and path.is_file()}
    return tuple(sorted(files | {Path(file).resolve()}))


def hash_files(value: object) -> str:
    """Return 16 hex digits of a SHA-256 hash of the contents of `list_files`, or ""."""
    files = list_files(value)
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16] if files else ""


def convert_user_errors(
    function: Callable[..., Any],
    error: type[PoetModelError],
    context: str,
    *,
    passed: tuple[type[PoetModelError], ...],
) -> Callable[..., Any]:
    """Return a wrapper that raises `error` with `context` for exceptions not in `passed`."""

    @wraps(function)
    def call_function(*arguments: Any, **keywords: Any) -> Any:
        """Call `function` with its prints on stderr; convert its exceptions."""
        try:
            with redirect_stdout(sys.stderr):  # standard output may carry results of a command
                return function(*arguments, **keywords)
        except passed:
            raise
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - users' functions may raise anything
            raise_user_error(error, context, raised, function)

    return call_function


def raise_user_error(
    kind: type[PoetModelError],
    context: str,
    error: BaseException,
    origin: str | Callable[..., Any] = "",
) -> NoReturn:
    """Raise `kind` with `context`, the exception, and its line in `origin` (a file or function)."""
    file = origin if isinstance(origin, str) else find_file(origin)
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
            position = format_definition(origin)
    description = f"{type(error).__name__}: {message}" if message else type(error).__name__
    raise kind(f"{context} {' '.join(description.split())}{position}") from error


def _format_position(file: str, line: int | None) -> str:
    return f" ({Path(file).name})" if line is None else f" ({Path(file).name}, line {line})"


def find_file(value: object) -> str:
    """Return the path of the file that defines a function or class, or ""."""
    try:
        return inspect.getfile(inspect.unwrap(value))  # type: ignore[arg-type]
    except (TypeError, OSError):  # a callable object; a class without a module
        return ""


def format_definition(function: Callable[..., Any]) -> str:
    """Return `` (solver.py, line 12)`` for a function, "" for another callable."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else _format_position(code.co_filename, code.co_firstlineno)
