"""Places of Python values that a forward pass reads, and the objects that have them."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from poetmodel.torch.capturing.joint_graph import shown_path
from poetmodel.torch.capturing.python_guards import Access, GuardedPlace
from poetmodel.torch.capturing.python_values import (
    ABSENT,
    CONTAINERS,
    PLAIN,
    content_of,
    form_of,
    is_iterator,
    items_of,
    origin_of_module,
    read_at,
)
from poetmodel.torch.errors import RAISED, CodeOrigin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import CellType

    from poetmodel.torch.capturing.python_attributes import AttributeRecorder
    from poetmodel.torch.capturing.python_code import FollowingCode, Line

_MAX_ITEMS: Final = 10_000
"""Containers with more items are not compared before each step."""
_MAX_ARRAY_BYTES: Final = 2**16
_USERS: Final = (CodeOrigin.USER, CodeOrigin.GENERATED)


class RecordedPlaces:
    """The places that were read, and references to the objects that have them.

    Parameters
    ----------
    root : torch.nn.Module
        The module that is captured.
    attributes : AttributeRecorder
        Records attributes of the objects that code reaches.
    """

    def __init__(self, root: torch.nn.Module, attributes: AttributeRecorder) -> None:
        self._root = root
        self._attributes = attributes
        self.places: dict[tuple[int, Access, Any], GuardedPlace] = {}
        self.holders: dict[int, Any] = {}
        """Objects that were read or reached, by identity, so that no other gets the same one."""
        self.names = {id(module): shown_path(path) for path, module in root.named_modules()}
        """Names of objects, by identity, in messages."""
        self.sites: dict[int, set[tuple[str, int, int]]] = {}
        """Attributes that were recorded and the instructions that read them, for each object."""
        self.functions: dict[int, set[int]] = {}
        """Identities of the functions of a code object, by its identity."""
        self._reached: set[int] = set()
        self._kept: set[int] = set()
        self.on_holder: Callable[[str, Any], bool] = lambda *_: False
        """Called with each container and object that code comes to, before the code changes it.

        Returns whether it keeps a reference, until `on_forgotten`.
        """
        self.on_forgotten: Callable[[set[int]], object] = lambda _: None
        """Called with the identities of those that the forward pass made itself."""

    # -- recording -------------------------------------------------------------------------------

    def reach(self, value: Any, name: str) -> None:  # noqa: C901 - one branch for each type
        """Record attributes of a value from now on, of values in it, and of functions it calls."""
        kind = type(value)
        if isinstance(value, type):
            self._attributes.on_class(value)
        if isinstance(value, (*PLAIN, torch.Tensor, BuiltinFunctionType, type)):
            return
        if id(value) in self._reached:
            return
        self._reached.add(id(value))
        self.holders.setdefault(id(value), value)
        self.names.setdefault(id(value), name)
        if isinstance(value, FunctionType):
            self.functions.setdefault(id(value.__code__), set()).add(id(value))
        if isinstance(value, FunctionType | ModuleType):
            if is_user_defined(value):
                self._watch(value.__name__, value)
        elif isinstance(value, partial):
            self._watch(f"keywords of {name}", value.keywords)
        elif isinstance(value, CONTAINERS):
            self._attributes.register(kind)
            self._watch(name, value)
        elif self._attributes.register(kind) and not issubclass(kind, torch.nn.Module):
            self._watch(name, value)
        for part, shown in _reachable_values(value, name):
            self.reach(part, shown)

    def _watch(self, name: str, value: Any) -> None:
        if self.on_holder(name, value):
            self._kept.add(id(value))

    def add(
        self, holder: Any, access: Access, key: Any, value: Any, name: str, line: Line | None
    ) -> None:
        """Record a place that was read; the first record of a place counts."""
        self.holders.setdefault(id(holder), holder)
        try:
            spot = (id(holder), access, (type(key), key))
            if spot in self.places:
                return
        except TypeError:  # a key without a hash
            return
        first = value if isinstance(value, PLAIN) else id(value)
        self.places[spot] = GuardedPlace(holder, access, key, name, line, first)

    def use(self, value: Any, name: str, line: Line | None, after: FollowingCode) -> None:
        """Record the parts of a value that the code after its read uses."""
        if isinstance(value, (*PLAIN, torch.Tensor)):
            return
        if is_iterator(value) and not isinstance(value, torch.nn.Module):
            self.add(value, Access.CONTENT, None, value, name, line)
            return
        self.reach(value, name)
        if isinstance(value, (*CONTAINERS, ModuleType, type, FunctionType)):
            self.follow(value, name, line, after)
        elif isinstance(value, tuple | frozenset | partial):
            self.read_all(value, name, line)

    def follow(self, value: Any, name: str, line: Line | None, after: FollowingCode) -> None:
        """Record the parts of a container that the code `after` its read reads; all if unknown."""
        if isinstance(value, (ModuleType, type, FunctionType)):
            self._follow_namespace(value, line, after)
            return
        content = content_of(value)
        uses = after.read_keys(value)
        if uses is None:
            self.read_all(value, name, line)
            return
        for key, following in uses:
            try:
                is_dict = isinstance(content, dict)
                item = dict.get(content, key, ABSENT) if is_dict else content[key]
            except RAISED:
                self.read_all(value, name, line)
                return
            namespace = content is not value and not isinstance(value, CONTAINERS[4:6])
            shown = f"{name}.{key}" if namespace else f"{name}[{key!r}]"
            self.add(content, Access.ITEM, key, item, shown, line)
            self.use(item, shown, line, following)

    def _follow_namespace(self, value: Any, line: Line | None, after: FollowingCode) -> None:
        """Record the attribute that is read of a module of Python, a class or a function."""
        key, following = after.attribute()
        if key is None or key.startswith("__"):
            return
        if isinstance(value, type):
            for kind in value.__mro__:
                if key in vars(kind) and origin_of_module(kind.__module__) is not CodeOrigin.TORCH:
                    found = vars(kind)[key]
                    shown = f"{kind.__qualname__}.{key}"
                    if not issubclass(kind, PLAIN):
                        self.add(kind, Access.CLASS, key, found, shown, line)
                        self.use(found, shown, line, following)
                    return
            return
        if isinstance(value, ModuleType) and _python_root(value) == "torch":
            return
        found = vars(value).get(key, ABSENT)
        shown = f"{value.__name__}.{key}"
        self.add(vars(value), Access.ITEM, key, found, shown, line)
        self.use(found, shown, line, following)

    def read_all(self, value: Any, name: str, line: Line | None) -> None:
        """Record a value as read with all values in it."""
        if isinstance(value, partial):
            parts: Sequence[tuple[Any, Any]] = [("keywords", value.keywords), ("args", value.args)]
        elif isinstance(value, CONTAINERS):
            content = content_of(value)
            if (id(content), Access.CONTENT, (type(None), None)) in self.places:
                return
            self.add(content, Access.CONTENT, None, content, name, line)
            size = content.size if isinstance(content, np.ndarray) else len(content)
            parts = list(items_of(value)) if size <= _MAX_ITEMS else ()
        else:
            parts = list(enumerate(value))
        for key, part in parts:
            shown = f"{name}[{key!r}]"
            self.reach(part, shown)
            if isinstance(part, (*CONTAINERS, tuple, frozenset, partial)):
                self.read_all(part, shown, line)

    # -- the end of a capture ----------------------------------------------------------------------

    def was_read(self, holder: int, key: Any) -> bool:
        """Return whether an attribute or item was read, alone or with all others.

        `holder` is the identity of the dict that has it, which may be that of an object.
        """
        content = (holder, Access.CONTENT, (type(None), None))
        return content in self.places or any(
            place.spot == (holder, key) for place in self.places.values()
        )

    def classes(self) -> Iterator[type]:
        """Yield the classes of a user whose attributes the code may read."""
        kinds = {type(holder) for holder in self.holders.values()}
        kinds.update(value for value in self.holders.values() if isinstance(value, type))
        kinds.update(type(module) for module in self._root.modules())
        bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
        for kind in bases:
            if is_user_defined(kind):
                yield kind

    def forget_temporary(self) -> None:
        """Remove objects to which nothing else refers: the forward pass made them."""
        for place in self.places.values():
            self.holders.setdefault(id(place.holder), place.holder)
        while True:
            counts = Counter(id(place.holder) for place in self.places.values())
            # References: of the dict and the call, of places, and of who watches it.
            gone = {
                key
                for key in self.holders
                if sys.getrefcount(self.holders[key]) <= 2 + counts[key] + (key in self._kept)
            }
            if not gone:
                return
            self.on_forgotten(gone & self._kept)
            self._kept -= gone
            self.places = {
                spot: place for spot, place in self.places.items() if spot[0] not in gone
            }
            for key in gone:
                self.holders.pop(key)
                self.sites.pop(key, None)
                self.names.pop(key, None)
            self._reached -= gone
            for functions in self.functions.values():
                functions.difference_update(gone)


def is_user_defined(value: Any) -> bool:
    """Return whether a class, function or Python module is the user's."""
    module = value.__name__ if isinstance(value, ModuleType) else value.__module__
    is_plain = isinstance(value, type) and issubclass(value, PLAIN)
    return not is_plain and origin_of_module(str(module)) in _USERS


def _reachable_values(value: Any, name: str) -> Iterator[tuple[Any, str]]:
    """Yield (value, name) of the items of a container, or of the values that a callable has."""
    if isinstance(value, FunctionType):
        for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            yield default, f"a default of {value.__qualname__}"
        yield vars(value).get("__wrapped__"), name
    elif isinstance(value, MethodType):
        yield value.__self__, name
        yield value.__func__, name
    elif isinstance(value, partial):
        yield from ((part, name) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, tuple | frozenset):
        yield from ((item, f"{name}[{key}]") for key, item in enumerate(value))
    elif (
        isinstance(value, CONTAINERS)
        and not isinstance(value, np.ndarray)
        and len(content_of(value)) <= _MAX_ITEMS
    ):
        yield from ((item, f"{name}[{key!r}]") for key, item in items_of(value))


def cell_value(cell: CellType) -> Any:
    """Return the value of the variable of a closure; `ABSENT` before it is set."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _python_root(module: ModuleType) -> str:
    return module.__name__.partition(".")[0]


def guard_fault(place: GuardedPlace) -> str | None:
    """Return why a place cannot be guarded; None if it can."""
    value = place.holder if place.access is Access.CONTENT else None
    if value is None:
        return None
    where = read_at(place.line)
    if is_iterator(value):
        return (
            f"{place.name} is an iterator ({type(value).__name__}){where}: each pass would go on "
            "with it, and a compiled step does not; take the next item outside of the step and "
            "give it as an input"
        )
    if isinstance(value, np.ndarray):
        size, limit, unit = value.nbytes, _MAX_ARRAY_BYTES, "bytes"
    else:
        size, limit, unit = len(value), _MAX_ITEMS, "items"
    if size <= limit:
        return None
    return (
        f"{place.name} has {size:,} {unit}{where}, too many to compare before each step (at most "
        f"{limit:,}); make it a buffer of the model (register_buffer), or a tuple"
    )


def is_unchanged(place: GuardedPlace) -> bool:
    """Return whether a place has the value that was read; if not, forward had set that itself."""
    if place.access is Access.CONTENT:
        return True
    value = place.value
    if isinstance(value, PLAIN) and isinstance(place.first, PLAIN):
        return bool(form_of(value) == form_of(place.first))
    return bool(id(value) == place.first)
