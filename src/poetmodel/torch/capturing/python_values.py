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

from poetmodel.torch.errors import FOREIGN_ERRORS, CodeOrigin, code_origin, format_source_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import CellType


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT: Final = _Absent()
"""Value of a missing name, key or attribute."""

PLAIN: Final = (
    NoneType, bool, int, float, complex, str, bytes, range, slice, Enum, np.generic, Fraction,
    Decimal, PurePath, re.Pattern, datetime.date, datetime.time, datetime.timedelta, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.Size, type(...), type(NotImplemented),
    _Absent,
)  # fmt: skip
"""Types of immutable values without inner values."""
CONTAINERS: Final = (dict, list, set, deque, UserDict, UserList, np.ndarray, SimpleNamespace)
"""Types of containers, whose content may change."""
_MAX_DEPTH: Final = 6
"""Maximum depth to which nested values are compared."""
_MAX_TEXT_LENGTH: Final = 60
"""Maximum length of the description of a value [characters]."""


def content_of(container: Any) -> Any:
    """Return the dict or list itself in a UserDict, UserList or SimpleNamespace, or the object."""
    if isinstance(container, UserDict | UserList):
        return container.data
    return vars(container) if isinstance(container, SimpleNamespace) else container


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the dict of an object's attributes itself; None for classes, or without ``__dict__``.

    Runs no code of the object, except that of a property ``__dict__``.
    """
    if isinstance(value, type):
        return None
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict or isinstance(attributes, dict) else None


def cell_value(cell: CellType) -> Any:
    """Return the value of a closure variable; `ABSENT` if it is not set."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def is_iterator(value: Any) -> bool:
    """Return whether a value is an iterator, whose state cannot be compared. False for files."""
    kind = type(value)
    return issubclass(kind, AnyIterator) and not issubclass(kind, (*PLAIN, IOBase))


# -- comparison keys -----------------------------------------------------------------------------


def comparison_key(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Return a hashable key, nested to `depth`: different keys mean different values or orders."""
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
        return (
            kind,
            tuple(
                (comparison_key(key), comparison_key(item, depth - 1))
                for key, item in content.items()
            ),
        )
    if isinstance(content, list | tuple | deque):
        return (kind, tuple([comparison_key(item, depth - 1) for item in content]))
    if isinstance(content, set | frozenset):
        return (kind, frozenset(comparison_key(item, depth - 1) for item in content))
    attributes = attributes_of(value)
    if attributes is None or origin_of_module(kind.__module__) is CodeOrigin.STANDARD:
        return (kind,)
    return (
        kind,
        tuple((key, comparison_key(attribute, depth - 1)) for key, attribute in attributes.items()),
    )


def key_has_tensors(key: Any) -> bool:
    """Return whether a comparison key is the key of a tensor or contains one."""
    if not isinstance(key, tuple | frozenset):
        return False
    return (isinstance(key, tuple) and key[:1] == ("tensor",)) or any(map(key_has_tensors, key))


def origin_of_module(module: str) -> CodeOrigin:
    """Return the origin of a Python module's code, by the module's name."""
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names and root != "__main__":
        return CodeOrigin.STANDARD
    if root in ("torch", "poetmodel"):
        return CodeOrigin.TORCH if root == "torch" else CodeOrigin.OWN
    file = getattr(sys.modules.get(module), "__file__", None)
    return CodeOrigin.USER if file is None else code_origin(file)


# -- comparison ----------------------------------------------------------------------------------


class Comparison:
    """Compares values of a capture with current ones, by old snapshots and attributes per ``id``.

    A tensor of `constants` (ids), a constant of the graph, is never the same as another one.
    """

    def __init__(
        self,
        snapshots: Mapping[int, Any],
        attributes: Mapping[int, Sequence[tuple[str, Any]]],
        constants: frozenset[int],
    ) -> None:
        self._snapshots = snapshots
        self._attributes = attributes
        self._constants = constants

    def is_same(self, old_value: Any, new_value: Any, depth: int = _MAX_DEPTH) -> bool:
        """Return whether a step captured with `old_value` is also valid for `new_value`."""
        if old_value is new_value:
            return True
        kind = type(old_value)
        if isinstance(old_value, torch.Tensor):
            if not isinstance(new_value, torch.Tensor) or id(old_value) in self._constants:
                return False
            return bool(comparison_key(old_value) == comparison_key(new_value))
        if kind is not type(new_value) or depth == 0:
            return False
        if isinstance(old_value, PLAIN):
            return repr(old_value) == repr(new_value)
        if isinstance(old_value, CONTAINERS):
            old_content = self._snapshots.get(id(content_of(old_value)))
            if old_content is None:
                old_content = snapshot_of(content_of(old_value))
            return self.is_same_content(old_content, snapshot_of(content_of(new_value)), depth)
        return self._is_same_object(old_value, new_value, depth)

    def _is_same_object(self, old_value: Any, new_value: Any, depth: int) -> bool:
        """Return whether tuples, frozensets, callables or objects of one type have equal values."""
        if isinstance(old_value, tuple | frozenset):
            return self.is_same_content(snapshot_of(old_value), snapshot_of(new_value), depth)
        if isinstance(old_value, partial):
            pairs = [(old_value.func, new_value.func), (old_value.args, new_value.args)]
            pairs.append((old_value.keywords, new_value.keywords))
        elif isinstance(old_value, MethodType):
            pairs = [
                (old_value.__func__, new_value.__func__),
                (old_value.__self__, new_value.__self__),
            ]
        elif isinstance(old_value, FunctionType):
            closure_values = [
                [cell_value(cell) for cell in function.__closure__ or ()]
                for function in (old_value, new_value)
            ]
            pairs = [
                (old_value.__code__, new_value.__code__),
                (old_value.__defaults__, new_value.__defaults__),
            ]
            pairs += [
                (old_value.__kwdefaults__, new_value.__kwdefaults__),
                (closure_values[0], closure_values[1]),
            ]
            if old_value.__code__ is not new_value.__code__:
                return False
        elif id(old_value) in self._attributes and not isinstance(old_value, torch.nn.Module):
            pairs = [
                (old_attribute, _get_attribute(new_value, key))
                for key, old_attribute in self._attributes[id(old_value)]
            ]
        else:
            return False
        return all(self.is_same(old_inner, new_inner, depth - 1) for old_inner, new_inner in pairs)

    def is_same_content(self, old_content: Any, new_content: Any, depth: int = _MAX_DEPTH) -> bool:
        """Return whether two snapshots (`snapshot_of`) have the same items in the same order."""
        if type(old_content) is not type(new_content) or len(old_content) != len(new_content):
            return False
        if isinstance(old_content, frozenset):
            return bool(comparison_key(old_content) == comparison_key(new_content))
        if isinstance(old_content, bytes | str):
            return bool(old_content == new_content)
        return all(
            self.is_same(old_item, new_item, depth - 1)
            for old_item, new_item in zip(old_content, new_content, strict=True)
        )


def _get_attribute(value: Any, key: str) -> Any:
    try:
        return getattr(value, key)
    except FOREIGN_ERRORS:
        return ABSENT


def snapshot_of(content: Any) -> Any:
    """Return an immutable, shallow copy of a container's content."""
    if isinstance(content, dict):
        return keys_and_values(content)
    if isinstance(content, np.ndarray):
        return (str(content.dtype), tuple(content.shape), content.tobytes())
    return frozenset(content) if isinstance(content, set | frozenset) else tuple(content)


def keys_and_values(items: dict[Any, Any]) -> tuple[Any, ...]:
    """Return the keys of a dict in their order, then the value of each."""
    if type(items) is dict:
        return (*items, *items.values())
    keys = tuple(items)  # an OrderedDict has an order of its own
    return (*keys, *(dict.get(items, key) for key in keys))


# -- text ----------------------------------------------------------------------------------------


def describe(value: Any) -> str:
    """Describe a value for display; long plain values, containers and tuples are abridged.

    Functions and classes are described by name, tensors by shape, any other object by its class.
    """
    if isinstance(value, _Absent):
        return "absent"
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)}"
    if isinstance(value, FunctionType | type):
        return value.__qualname__
    if isinstance(value, (*PLAIN, *CONTAINERS, tuple, frozenset)):
        text = " ".join(repr(value).split())
        return text if len(text) <= _MAX_TEXT_LENGTH else f"{text[: _MAX_TEXT_LENGTH - 3]}..."
    return f"a {type(value).__qualname__}"


def format_read_line(line: tuple[str, int] | None) -> str:
    """Return ", read at FILE:LINE" for a message; empty if the line is unknown."""
    return f", read at {format_source_line(*line)}" if line else ""


def items_of(container: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (key, value) of a dict's items, or (index, item); empty for arrays."""
    content = content_of(container)
    if isinstance(content, dict):
        yield from list(dict.items(content))
    elif not isinstance(content, np.ndarray):
        yield from enumerate(list(content))
