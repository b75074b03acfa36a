"""Python values that a step depends on: plain values, containers, comparison, description."""

from __future__ import annotations

import datetime
import re
import sys
from collections import UserDict, UserList, deque
from collections.abc import Iterator as AnyIterator
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from io import IOBase
from pathlib import PurePath
from types import FunctionType, MethodType, ModuleType, NoneType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from poetmodel.torch.errors import RAISED, CodeOrigin, code_origin, format_source_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT: Final = _Absent()
"""Stands for a name, key or attribute that is not there."""

PLAIN: Final = (
    NoneType, bool, int, float, complex, str, bytes, range, slice, Enum, np.generic, Fraction,
    Decimal, PurePath, re.Pattern, datetime.date, datetime.time, datetime.timedelta, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.Size, type(...), type(NotImplemented),
    _Absent,
)  # fmt: skip
"""Types of immutable values without parts."""
CONTAINERS: Final = (dict, list, set, deque, UserDict, UserList, np.ndarray, SimpleNamespace)
"""Types whose content may change while they stay the same object."""
_DEPTH: Final = 6
"""How deep nested values are described."""
_WORDS: Final = 60
"""Longest description of a value [characters]."""


def content_of(container: Any) -> Any:
    """Return the dict, list, set or array with the content of a container or of a namespace."""
    if isinstance(container, UserDict | UserList):
        return container.data
    return vars(container) if isinstance(container, SimpleNamespace) else container


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the instance attributes of an object; None if it has no `__dict__`, and for classes.

    Does not run code of the object.
    """
    if isinstance(value, type):
        return None
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict or isinstance(attributes, dict) else None


def is_iterator(value: Any) -> bool:
    """Return whether a value is an iterator, whose position cannot be compared; files are none."""
    kind = type(value)
    return issubclass(kind, AnyIterator) and not issubclass(kind, (*PLAIN, IOBase))


# -- forms ---------------------------------------------------------------------------------------


def form_of(value: Any, depth: int = _DEPTH) -> Any:
    """Return a comparable description of a value: equal forms mean equal values.

    Of tensors it is shape and type, of modules and functions their name.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), str(value.dtype))
    if issubclass(kind, torch.nn.Module):
        return ("module", kind.__qualname__)
    if isinstance(value, PLAIN) or depth == 0:
        return (kind, repr(value) if isinstance(value, PLAIN) else None)
    if isinstance(value, type | FunctionType | ModuleType):
        return (kind, value.__name__)
    if isinstance(value, np.ndarray):
        return (kind, str(value.dtype), value.shape, value.tobytes())
    content = content_of(value)
    if isinstance(content, dict):
        return (kind, tuple((form_of(k), form_of(x, depth - 1)) for k, x in content.items()))
    if isinstance(content, list | tuple | deque):
        return (kind, tuple([form_of(item, depth - 1) for item in content]))
    if isinstance(content, set | frozenset):
        return (kind, frozenset(form_of(item, depth - 1) for item in content))
    attributes = attributes_of(value)
    if attributes is None or origin_of_module(kind.__module__) is CodeOrigin.STANDARD:
        return (kind,)
    return (kind, tuple((key, form_of(x, depth - 1)) for key, x in attributes.items()))


def has_tensors(form: Any) -> bool:
    """Return whether a form is that of a tensor or has one inside."""
    if not isinstance(form, tuple | frozenset):
        return False
    return (isinstance(form, tuple) and form[:1] == ("tensor",)) or any(map(has_tensors, form))


def origin_of_module(module: str) -> CodeOrigin:
    """Return whose code a module of Python is; a module of C is as the standard library."""
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names and root != "__main__":
        return CodeOrigin.STANDARD
    if root in ("torch", "poetmodel"):
        return CodeOrigin.TORCH if root == "torch" else CodeOrigin.OWN
    file = getattr(sys.modules.get(module), "__file__", None)
    return CodeOrigin.USER if file is None else code_origin(file)


# -- comparison ----------------------------------------------------------------------------------


class Comparison:
    """Compares what a capture read with what is there now.

    Parameters
    ----------
    snapshots : mapping
        Content of containers at the capture, by their identity; they may have changed since.
    parts : mapping
        For the identity of an object the attributes that were read, with their values.
    constants : set of int
        Identities of tensors that are constants of the graph: another one is a change.
    """

    def __init__(
        self,
        snapshots: Mapping[int, Any],
        parts: Mapping[int, Sequence[tuple[str, Any]]],
        constants: frozenset[int],
    ) -> None:
        self._snapshots = snapshots
        self._parts = parts
        self._constants = constants

    def is_same(self, before: Any, now: Any, depth: int = _DEPTH) -> bool:
        """Return whether a step that was captured with one value holds for another one."""
        if before is now:
            return True
        kind = type(before)
        if isinstance(before, torch.Tensor):
            if not isinstance(now, torch.Tensor) or id(before) in self._constants:
                return False
            return bool(form_of(before) == form_of(now))
        if kind is not type(now) or depth == 0:
            return False
        if isinstance(before, PLAIN):
            return repr(before) == repr(now)
        if isinstance(before, CONTAINERS):
            content = self._snapshots.get(id(content_of(before)))
            if content is None:
                content = snapshot_of(content_of(before))
            return self.is_same_content(content, snapshot_of(content_of(now)), depth)
        return self._is_same_object(before, now, depth - 1)

    def _is_same_object(self, before: Any, now: Any, depth: int) -> bool:
        if isinstance(before, tuple | frozenset):
            return self.is_same_content(snapshot_of(before), snapshot_of(now), depth)
        if isinstance(before, partial):
            pairs = [(before.func, now.func), (before.args, now.args)]
            pairs.append((before.keywords, now.keywords))
        elif isinstance(before, MethodType):
            pairs = [(before.__func__, now.__func__), (before.__self__, now.__self__)]
        elif isinstance(before, FunctionType):
            cells = [[c.cell_contents for c in f.__closure__ or ()] for f in (before, now)]
            pairs = [(before.__code__, now.__code__), (before.__defaults__, now.__defaults__)]
            pairs += [(before.__kwdefaults__, now.__kwdefaults__), (cells[0], cells[1])]
            if before.__code__ is not now.__code__:
                return False
        elif id(before) in self._parts and not isinstance(before, torch.nn.Module):
            pairs = [(x, _attribute(now, key)) for key, x in self._parts[id(before)]]
        else:
            return False
        return all(self.is_same(one, other, depth) for one, other in pairs)

    def is_same_content(self, before: Any, now: Any, depth: int = _DEPTH) -> bool:
        """Return whether two snapshots have the same items in the same order."""
        if type(before) is not type(now) or len(before) != len(now):
            return False
        if isinstance(before, frozenset):
            return bool(form_of(before) == form_of(now))
        if isinstance(before, bytes | str):
            return bool(before == now)
        return all(self.is_same(x, y, depth - 1) for x, y in zip(before, now, strict=True))


def _attribute(value: Any, key: str) -> Any:
    try:
        return getattr(value, key)
    except RAISED:
        return ABSENT


def snapshot_of(content: Any) -> Any:
    """Return a copy of a content that does not change: tuples of keys and values, or of items."""
    if isinstance(content, dict):
        return (*content, *dict.values(content))
    if isinstance(content, np.ndarray):
        return (str(content.dtype), tuple(content.shape), content.tobytes())
    return frozenset(content) if isinstance(content, set | frozenset) else tuple(content)


# -- words ---------------------------------------------------------------------------------------


def describe(value: Any) -> str:
    """Return a value for people: short."""
    if isinstance(value, _Absent):
        return "not there"
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, FunctionType | type):
        return value.__qualname__
    if isinstance(value, (*PLAIN, *CONTAINERS, tuple, frozenset)):
        text = " ".join(repr(value).split())
        return text if len(text) <= _WORDS else f"{text[: _WORDS - 3]}..."
    return f"a {type(value).__qualname__}"


def read_at(line: tuple[str, int] | None) -> str:
    """Return words for the line that reads a value; empty if it is not known."""
    return f", read at {format_source_line(*line)}" if line else ""


def items_of(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys and values of a container, or the positions and items."""
    content = content_of(container)
    if isinstance(content, dict):
        yield from list(dict.items(content))
    elif not isinstance(content, np.ndarray):
        yield from enumerate(list(content))
