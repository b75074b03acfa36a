"""State of the process on which a step depends, and which no object of the model holds."""

from __future__ import annotations

import itertools
import os
import sys
from collections import OrderedDict
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.capturing.front_private import GLOBAL_HOOKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_FLAGS: Final[dict[str, Callable[[], object]]] = {
    "torch.are_deterministic_algorithms_enabled()": torch.are_deterministic_algorithms_enabled,
    "torch.get_default_dtype()": torch.get_default_dtype,
}
"""Settings of PyTorch that code of a model may read."""


@contextmanager
def record_environment() -> Iterator[dict[str, str | None]]:
    """Context manager that yields the environment variables read so far; None for a missing one."""
    values: dict[str, str | None] = {}
    kind: Any = type(os.environ)

    class Recording(kind):  # type: ignore[misc]
        def __getitem__(self, key: str) -> str:
            values[key] = None
            values[key] = value = super().__getitem__(key)
            return str(value)

    os.environ.__class__ = Recording
    try:
        yield values
    finally:
        os.environ.__class__ = kind


class HeldContainers:
    """Containers that modules hold, and whose change Dynamo's guards do not notice.

    These are the order of each ``OrderedDict``, and lists of plain values in tuples, read or not.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._contents: list[tuple[str, Any, Any]] = []
        for module in modules:
            for name, value in vars(module).items():
                if name not in _OWN_ATTRIBUTES:
                    self._collect(name, value, in_tuple=False, depth=0)

    def _collect(self, path: str, value: Any, *, in_tuple: bool, depth: int) -> None:
        """Record a value and those in it."""
        if depth > _MAX_DEPTH or not isinstance(value, dict | list | tuple):
            return
        if isinstance(value, OrderedDict) or (isinstance(value, list) and in_tuple):
            self._contents.append((path, value, _plain_content(value)))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        is_tuple = isinstance(value, tuple)
        for key, item in itertools.islice(items, _MAX_ITEMS):
            self._collect(f"{path}[{key!r}]", item, in_tuple=is_tuple, depth=depth + 1)

    def differences(self) -> Iterator[str]:
        """Yield a text for each change since the object was made."""
        for path, value, content in self._contents:
            if (current := _plain_content(value)) != content:
                kind = "the order of " if isinstance(value, dict) else ""
                yield f"{kind}{path} was {content} and is {current}"


def _plain_content(value: Any) -> list[Any]:
    """Return the keys of a dict, or the plain values in a list."""
    if isinstance(value, dict):
        return list(value)
    return [item for item in value if isinstance(item, bool | int | float | str | None)]


_OWN_ATTRIBUTES: Final = frozenset(vars(torch.nn.Module()))
_MAX_DEPTH: Final = 4
_MAX_ITEMS: Final = 100
"""Maximum number of items of a container that are searched for others."""


class ClassState:
    """The methods of classes whose `code` a graph has, as the classes find them, and their bases.

    Dynamo's guards do not notice that another method takes the place of one.
    """

    def __init__(self, classes: Iterable[type], code: frozenset[CodeType]) -> None:
        names = [(kind, _guarded_names(kind, code)) for kind in classes if _is_changeable(kind)]
        self._names = [(kind, kind_names) for kind, kind_names in names if kind_names]
        self._getters = [(_make_getter(kind, names), kind) for kind, names in self._names]
        self._old_values = [get(kind) for get, kind in self._getters]
        """For each class the value of its only name, or a tuple with that of each name."""

    def is_unchanged(self) -> bool:
        """Return whether the classes find the same methods in the same bases."""
        try:
            return [get(kind) for get, kind in self._getters] == self._old_values
        except AttributeError:
            return False

    def differences(self) -> Iterator[str]:
        """Yield a text for each change of a class since the object was made."""
        for (kind, names), old_value in zip(self._names, self._old_values, strict=True):
            old_values = old_value if len(names) > 1 else (old_value,)
            for name, value in zip(names, old_values, strict=True):
                if value not in (getattr(kind, name, None), _find_stored(kind, name)):
                    subject = "__bases__" if name == "__mro__" else name
                    yield f"{subject} of the class {kind.__name__} was replaced"


def _is_changeable(kind: type) -> bool:
    """Return whether a class is no part of Python."""
    return kind.__module__.partition(".")[0] not in sys.stdlib_module_names


def _guarded_names(kind: type, code: frozenset[CodeType]) -> list[str]:
    """Return the names of a class and its bases but `Module`, whose functions have `code`.

    Bases are guarded, too, except for those of PyTorch's classes.
    """
    bases = [base for base in kind.__mro__ if base not in (object, torch.nn.Module)]
    names = {
        name
        for base in bases
        for name, value in vars(base).items()
        if not code.isdisjoint(_codes_of(value))
    }
    is_foreign = kind.__module__.partition(".")[0] == "torch"
    return sorted(names if is_foreign else names | {"__mro__"})


def _make_getter(kind: type, names: Sequence[str]) -> Callable[[type], Any]:
    """Return a function that reads attributes of a class, stored ones if reading converts any."""
    get = attrgetter(*names)
    with suppress(AttributeError):
        if get(kind) == get(kind):  # a `partialmethod` is another object each time
            return get
    if len(names) == 1:
        return partial(_find_stored, name=names[0])
    return lambda kind: tuple(_find_stored(kind, name) for name in names)


def _find_stored(kind: type, name: str) -> Any:
    """Return an attribute of a class as it or a base has it, or None."""
    if name == "__mro__":
        return kind.__mro__
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _codes_of(value: Any) -> Iterator[CodeType]:
    """Yield the code of a function, of a method of any kind, or of a property."""
    for attribute in ("__func__", "fget", "func"):
        value = getattr(value, attribute, None) or value
    if isinstance(value, FunctionType):
        yield value.__code__


class ProcessState:
    """Current environment variables of given names, hooks on all modules, and flags of PyTorch."""

    def __init__(self, environment: Mapping[str, str | None]) -> None:
        self._environment = dict(environment)
        self._hooks = _hook_keys()
        self._flags = {name: get() for name, get in _FLAGS.items()}

    def differences(self) -> Iterator[str]:
        """Yield a text for each change since the object was made."""
        for key, value in self._environment.items():
            if os.environ.get(key) != value:
                yield f"the environment variable {key} was {value} and is {os.environ.get(key)}"
        if self._hooks != _hook_keys():
            yield "hooks of all modules (register_module_forward_hook, ...) were added or removed"
        for name, flag in self._flags.items():
            if (current_flag := _FLAGS[name]()) != flag:
                yield f"{name} was {flag} and is {current_flag}"


def _hook_keys() -> list[list[int]]:
    return [*map(list, GLOBAL_HOOKS)]


@contextmanager
def temporary_setting(
    setter: Callable[[Any], object], value: Any, old_value: Any
) -> Iterator[None]:
    """Context manager that calls a setter with `value`, and at the end with `old_value`."""
    setter(value)
    try:
        yield
    finally:
        setter(old_value)
