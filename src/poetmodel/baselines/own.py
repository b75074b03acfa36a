"""User-defined methods: a decorator, and functions in files; each is a function of a problem.

The functions are not trusted: their exceptions are reported with file and line, and their schedules
are verified like any other.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

from poetmodel.baselines.registry import METHODS, Method
from poetmodel.errors import (
    InputError,
    MethodNotApplicableError,
    TimeLimitError,
    TooLargeError,
    UserMethodError,
)
from poetmodel.schedule import Schedule
from poetmodel.user_files import (
    UserObject,
    convert_user_errors,
    format_definition,
    hash_files,
    list_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from poetmodel.problem import Problem

_METHOD: Final = UserObject("method", "function", callable, UserMethodError)
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
    function = _METHOD.load(name)
    return None if function is None else _make_method(name, function)


def registered_names() -> tuple[str, ...]:
    """Return the names of all methods registered with `method`, in order of first registration."""
    return tuple(_registered_methods)


def is_found_by_other_processes(name: str) -> bool:
    """Return whether other processes can find a method by name: not if `method` registered it."""
    return name not in _registered_methods


def list_method_files(entry: Method) -> tuple[Path, ...]:
    """Return the paths of a method's file and of the imported modules in its folder, sorted."""
    return () if entry.user_function is None else list_files(entry.user_function)


def hash_method_files(entry: Method) -> str:
    """Return 16 hex digits of a SHA-256 hash of the contents of `list_method_files`, or ""."""
    return "" if entry.user_function is None else hash_files(entry.user_function)


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


def _add_checks(name: str, function: Callable[..., Any]) -> Callable[[Problem], Schedule]:
    """Return a wrapper of a user's function that raises `UserMethodError` if it fails.

    That is for exceptions, except `MethodNotApplicableError`, `TimeLimitError` and `TooLargeError`,
    and for a result that is no `Schedule`. Prints go to stderr.
    """
    call = convert_user_errors(
        function,
        UserMethodError,
        f"method {name!r} raised",
        passed=(MethodNotApplicableError, TimeLimitError, TooLargeError),
    )

    @wraps(function)
    def call_function(problem: Problem) -> Schedule:
        """Call the user's function; check the type of its result."""
        schedule = call(problem)
        if not isinstance(schedule, Schedule):
            if inspect.iscoroutine(schedule):
                schedule.close()
            type_name = type(schedule).__name__
            raise UserMethodError(
                f"method {name!r} returned {type_name}{format_definition(function)}, not a Schedule"
            )
        return schedule

    return call_function
