"""Registry of back ends by name.

A back end is a subclass of `Solver`. `register` adds one; ``FILE.py:CLASS`` names one in a file.
Built-in back ends are listed here by module and class; the module is imported when the back end is
first requested.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from poetmodel.errors import BackendError, InputError
from poetmodel.user_files import UserObject

if TYPE_CHECKING:
    from poetmodel.backends.solver import Solver

_BUILT_IN: Final = {
    "highs": "poetmodel.backends.highs:Highs",
    "scip": "poetmodel.backends.scip:Scip",
    "gurobi": "poetmodel.backends.gurobi:Gurobi",
}
"""Module and class of each built-in back end, the default one first."""
_registered_solvers: Final[dict[str, type[Solver]]] = {}
"""Back ends that `register` added, by name."""


def _is_solver_class(value: object) -> bool:
    from poetmodel.backends.solver import Solver

    return isinstance(value, type) and issubclass(value, Solver) and value is not Solver


_BACKEND: Final = UserObject("backend", "class", _is_solver_class, BackendError)


def backend_names() -> tuple[str, ...]:
    """Return the names of built-in and registered back ends, installed or not; default first."""
    return (*_BUILT_IN, *_registered_solvers)


def register(solver: type[Solver]) -> type[Solver]:
    """Register a back end under its name, for `solve` and reports; return its class.

    May be used as a class decorator. It lasts as long as the process: a command names the class
    instead, ``--backend FILE.py:CLASS``.

    Parameters
    ----------
    solver : type of Solver
        The class, with its declarations (`name`, `display_name`, `package`, `remedy`).

    Raises
    ------
    InputError
        If a declaration or a method is missing, or another back end has the same name.
    """
    _check_declarations(solver)
    if solver.name in _BUILT_IN or _registered_solvers.get(solver.name, solver) is not solver:
        raise InputError(f"back end {solver.__name__}: the name {solver.name!r} is already taken")
    _registered_solvers[solver.name] = solver
    return solver


def _check_declarations(solver: type[Solver]) -> None:
    """Raise `InputError` if a back end declares no name, package and so on, or lacks a method."""
    missing_names = [
        name
        for name in ("name", "display_name", "package", "remedy")
        if not getattr(solver, name, "")
    ]
    missing_names += sorted(getattr(solver, "__abstractmethods__", ()))
    if missing_names:
        raise InputError(f"back end {solver.__name__}: declares no {', '.join(missing_names)}")


def backend_class(name: str) -> type[Solver]:
    """Return the class of a back end by its name; import its module, but not the solver's package.

    The file of ``FILE.py:CLASS`` is imported, and its folder is appended to ``sys.path``.

    Raises
    ------
    InputError
        If no back end has that name, or a file lacks the class, or a class lacks a declaration.
    BackendError
        If the file raises an exception when it is imported.

    Examples
    --------
    >>> backend_class("highs").package
    'highspy'
    """
    if name in _registered_solvers:
        return _registered_solvers[name]
    if name not in _BUILT_IN:
        user_solver: type[Solver] | None = _BACKEND.load(name)
        if user_solver is None:
            names = ", ".join(backend_names())
            raise InputError(f"backend {name!r}: expected one of {names}, or FILE.py:CLASS")
        _check_declarations(user_solver)
        return user_solver
    module, _, class_name = _BUILT_IN[name].partition(":")
    solver: type[Solver] = getattr(import_module(module), class_name)
    return solver


def backend(name: str) -> Solver:
    """Return a new instance of `backend_class`, without importing the solver's package.

    Parameters
    ----------
    name : str
        One of `backend_names`, or ``FILE.py:CLASS``.

    Raises
    ------
    InputError, BackendError
        As for `backend_class`.

    Examples
    --------
    >>> backend("highs").name
    'highs'
    """
    return backend_class(name)()


def solver_packages() -> tuple[str, ...]:
    """Return the import name of each back end's Python package, in `backend_names` order."""
    return tuple(backend_class(name).package for name in backend_names())
