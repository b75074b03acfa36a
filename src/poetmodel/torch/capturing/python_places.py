"""Places of Python values that a forward pass reads, and the objects that hold them."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from poetmodel.torch.capturing.joint_graph import format_path
from poetmodel.torch.capturing.python_guards import Access, GuardedPlace
from poetmodel.torch.capturing.python_values import (
    ABSENT,
    CONTAINERS,
    PLAIN,
    comparison_key,
    content_of,
    format_read_line,
    is_iterator,
    items_of,
    origin_of_module,
)
from poetmodel.torch.errors import FOREIGN_ERRORS, CodeOrigin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from poetmodel.torch.capturing.python_attributes import AttributeRecorder
    from poetmodel.torch.capturing.python_code import FollowingCode, Line

_MAX_ITEMS: Final = 10_000
"""Containers with more items are refused, instead of compared before each step."""
_MAX_ARRAY_BYTES: Final = 2**16
"""Larger arrays are refused, instead of compared before each step [B]."""
_USER_ORIGINS: Final = (CodeOrigin.USER, CodeOrigin.GENERATED)


class RecordedPlaces:
    """Records the places that are read, with references to the objects that hold them."""

    def __init__(self, root: torch.nn.Module, attributes: AttributeRecorder) -> None:
        self._root = root
        self._attributes = attributes
        self.places: dict[tuple[int, Access, Any], GuardedPlace] = {}
        """Recorded places, by (``id`` of the holder, access, (type of the key, key))."""
        self.holders: dict[int, Any] = {}
        """Objects that were read or registered, by ``id``. The references prevent other objects
        from getting the same ``id``."""
        self.names = {id(module): format_path(path) for path, module in root.named_modules()}
        """Names of objects in messages, by ``id``."""
        self.sites: dict[int, set[tuple[str, int, int]]] = {}
        """(attribute, ``id`` of the code, instruction) of each read, by the object's ``id``."""
        self.functions: dict[int, set[int]] = {}
        """``id`` of each function of a code object, by the code's ``id``."""
        self._registered_ids: set[int] = set()
        self._watched_ids: set[int] = set()
        """``id`` of each object to which the callee of `on_holder` retains a reference."""
        self.on_holder: Callable[[str, Any], bool] = lambda *_: False
        """Called with the name and value of each object to watch, before code can change it.

        See `register` for these objects. Returns whether the callee retains a reference until
        `on_forgotten`.
        """
        self.on_forgotten: Callable[[set[int]], object] = lambda _: None
        """Called with the set of the ``id`` of each retained object that forward created itself."""

    # -- recording -------------------------------------------------------------------------------

    def register(self, value: Any, name: str) -> None:  # noqa: C901 - one branch for each type
        """Register a value and those in it (`_reachable_values`), so that their reads are recorded.

        Has no effect for plain values, tensors, built-in functions, and values registered before.
        Adds all other values except classes to `holders` and `names`, and functions to `functions`.
        Classes are only reported to `AttributeRecorder.on_class`. Registers the classes of
        containers and other objects with the `AttributeRecorder`. Reports to `on_holder`
        containers, keywords of partial functions, the user's functions and Python modules, and
        objects except `torch.nn.Module` for whose class `AttributeRecorder.register` returns True.
        """
        kind = type(value)
        if isinstance(value, type):
            self._attributes.on_class(value)
        if isinstance(value, (*PLAIN, torch.Tensor, BuiltinFunctionType, type)):
            return
        if id(value) in self._registered_ids:
            return
        self._registered_ids.add(id(value))
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
        for inner_value, inner_name in _reachable_values(value, name):
            self.register(inner_value, inner_name)

    def _watch(self, name: str, value: Any) -> None:
        """Report an object to `on_holder`; remember it if a reference is retained."""
        if self.on_holder(name, value):
            self._watched_ids.add(id(value))

    def add(
        self, holder: Any, access: Access, key: Any, value: Any, name: str, line: Line | None
    ) -> None:
        """Record a place that was read, once, if its key has a hash; always retain `holder`."""
        self.holders.setdefault(id(holder), holder)
        try:
            place_key = (id(holder), access, (type(key), key))
            if place_key in self.places:
                return
        except TypeError:  # the key has no hash
            return
        first_value = value if isinstance(value, PLAIN) else id(value)
        self.places[place_key] = GuardedPlace(holder, access, key, name, line, first_value)

    def record_use(
        self, value: Any, name: str, line: Line | None, following_code: FollowingCode
    ) -> None:
        """Register a value; record its items or the attribute that the code after its read uses."""
        if isinstance(value, (*PLAIN, torch.Tensor)):
            return
        if is_iterator(value) and not isinstance(value, torch.nn.Module):
            self.add(value, Access.CONTENT, None, value, name, line)
            return
        self.register(value, name)
        if isinstance(value, (*CONTAINERS, ModuleType, type, FunctionType)):
            self.record_keys(value, name, line, following_code)
        elif isinstance(value, tuple | frozenset | partial):
            self.record_all(value, name, line)

    def record_keys(
        self, value: Any, name: str, line: Line | None, following_code: FollowingCode
    ) -> None:
        """Record the items that code after the read of a container uses; all items if unknown."""
        if isinstance(value, (ModuleType, type, FunctionType)):
            self._record_next_attribute(value, line, following_code)
            return
        content = content_of(value)
        read_keys = following_code.find_read_keys(value)
        if read_keys is None:
            self.record_all(value, name, line)
            return
        for key, code_after_key in read_keys:
            try:
                is_dict = isinstance(content, dict)
                item = dict.get(content, key, ABSENT) if is_dict else content[key]
            except FOREIGN_ERRORS:
                self.record_all(value, name, line)
                return
            # CONTAINERS[4:6] are UserDict and UserList.
            is_namespace = content is not value and not isinstance(value, CONTAINERS[4:6])
            display_name = f"{name}.{key}" if is_namespace else f"{name}[{key!r}]"
            self.add(content, Access.ITEM, key, item, display_name, line)
            self.record_use(item, display_name, line, code_after_key)

    def _record_next_attribute(
        self, value: Any, line: Line | None, following_code: FollowingCode
    ) -> None:
        """Record the next attribute read of a Python module, class or function, not PyTorch's."""
        key, code_after_key = following_code.find_read_attribute()
        if key is None or key.startswith("__"):
            return
        if isinstance(value, type):
            for kind in value.__mro__:
                if key in vars(kind) and origin_of_module(kind.__module__) is not CodeOrigin.TORCH:
                    attribute = vars(kind)[key]
                    display_name = f"{kind.__qualname__}.{key}"
                    if not issubclass(kind, PLAIN):
                        self.add(kind, Access.CLASS, key, attribute, display_name, line)
                        self.record_use(attribute, display_name, line, code_after_key)
                    return
            return
        if isinstance(value, ModuleType) and _root_package(value) == "torch":
            return
        attribute = vars(value).get(key, ABSENT)
        display_name = f"{value.__name__}.{key}"
        self.add(vars(value), Access.ITEM, key, attribute, display_name, line)
        self.record_use(attribute, display_name, line, code_after_key)

    def record_all(self, value: Any, name: str, line: Line | None) -> None:
        """Record that a container, tuple, frozenset or partial function was read with all values.

        The place of a container's content is recorded; if it is already, there is no effect. All
        items, or keywords and arguments of a partial function, are registered, and recorded in turn
        if they are of these types. Items of containers with over `_MAX_ITEMS` items, and of
        arrays, are ignored.
        """
        if isinstance(value, partial):
            items: Sequence[tuple[Any, Any]] = [("keywords", value.keywords), ("args", value.args)]
        elif isinstance(value, CONTAINERS):
            content = content_of(value)
            if (id(content), Access.CONTENT, (type(None), None)) in self.places:
                return
            self.add(content, Access.CONTENT, None, content, name, line)
            size = content.size if isinstance(content, np.ndarray) else len(content)
            items = list(items_of(value)) if size <= _MAX_ITEMS else ()
        else:
            items = list(enumerate(value))
        for key, item in items:
            display_name = f"{name}[{key!r}]"
            self.register(item, display_name)
            if isinstance(item, (*CONTAINERS, tuple, frozenset, partial)):
                self.record_all(item, display_name, line)

    # -- the end of a capture ----------------------------------------------------------------------

    def was_read(self, holder_id: int, key: Any) -> bool:
        """Return whether an attribute or item was read, alone or with all other items."""
        content_key = (holder_id, Access.CONTENT, (type(None), None))
        return content_key in self.places or any(
            place.item_id == (holder_id, key) for place in self.places.values()
        )

    def user_classes(self) -> Iterator[type]:
        """Yield each user-defined class among the recorded ones and their bases, once."""
        kinds = {type(holder) for holder in self.holders.values()}
        kinds.update(value for value in self.holders.values() if isinstance(value, type))
        kinds.update(type(module) for module in self._root.modules())
        bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
        for kind in bases:
            if is_user_defined(kind):
                yield kind

    def remove_temporary_objects(self) -> None:
        """Remove objects to which only the recorder refers, with their places."""
        for place in self.places.values():
            self.holders.setdefault(id(place.holder), place.holder)
        while True:
            n_places = Counter(id(place.holder) for place in self.places.values())
            # References of the recorder: of the dict and the call, of places, of the watcher.
            removed_ids = {
                holder_id
                for holder_id in self.holders
                if sys.getrefcount(self.holders[holder_id])
                <= 2 + n_places[holder_id] + (holder_id in self._watched_ids)
            }
            if not removed_ids:
                return
            self.on_forgotten(removed_ids & self._watched_ids)
            self._watched_ids -= removed_ids
            self.places = {
                place_key: place
                for place_key, place in self.places.items()
                if place_key[0] not in removed_ids
            }
            for holder_id in removed_ids:
                self.holders.pop(holder_id)
                self.sites.pop(holder_id, None)
                self.names.pop(holder_id, None)
            self._registered_ids -= removed_ids
            for function_ids in self.functions.values():
                function_ids.difference_update(removed_ids)


def is_user_defined(value: Any) -> bool:
    """Return whether a class, function or Python module is user code, by `origin_of_module`."""
    module = value.__name__ if isinstance(value, ModuleType) else value.__module__
    is_plain = isinstance(value, type) and issubclass(value, PLAIN)
    return not is_plain and origin_of_module(str(module)) in _USER_ORIGINS


def _reachable_values(value: Any, name: str) -> Iterator[tuple[Any, str]]:
    """Yield (value, name) of each value one level down, to which the caller applies this again.

    Items of tuples, frozensets and containers (no arrays, at most `_MAX_ITEMS` items), defaults and
    ``__wrapped__`` of functions (not their closures), and the parts of methods and partials.
    """
    if isinstance(value, FunctionType):
        for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            yield default, f"a default of {value.__qualname__}"
        yield vars(value).get("__wrapped__"), name
    elif isinstance(value, MethodType):
        yield value.__self__, name
        yield value.__func__, name
    elif isinstance(value, partial):
        yield from ((item, name) for item in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, tuple | frozenset):
        yield from ((item, f"{name}[{key}]") for key, item in enumerate(value))
    elif (
        isinstance(value, CONTAINERS)
        and not isinstance(value, np.ndarray)
        and len(content_of(value)) <= _MAX_ITEMS
    ):
        yield from ((item, f"{name}[{key!r}]") for key, item in items_of(value))


def _root_package(module: ModuleType) -> str:
    return module.__name__.partition(".")[0]


def guard_error(place: GuardedPlace) -> str | None:
    """Return the error for an iterator or large container that was read as a whole, else None."""
    value = place.holder if place.access is Access.CONTENT else None
    if value is None:
        return None
    line = format_read_line(place.line)
    if is_iterator(value):
        return (
            f"{place.name} is an iterator ({type(value).__name__}){line}: each pass would advance "
            "it, and a compiled step does not; take the next item outside of the step and pass it "
            "as an input"
        )
    if isinstance(value, np.ndarray):
        size, limit, unit = value.nbytes, _MAX_ARRAY_BYTES, "bytes"
    else:
        size, limit, unit = len(value), _MAX_ITEMS, "items"
    if size <= limit:
        return None
    return (
        f"{place.name} has {size:,} {unit}{line}, too many to compare before each step (at most "
        f"{limit:,}); make it a buffer of the model (register_buffer), or a tuple"
    )


def is_unchanged(place: GuardedPlace) -> bool:
    """Return whether the stored `GuardedPlace.value` is the value of the first read."""
    if place.access is Access.CONTENT:
        return True
    value = place.value
    if isinstance(value, PLAIN) and isinstance(place.first_value_or_id, PLAIN):
        return bool(comparison_key(value) == comparison_key(place.first_value_or_id))
    return bool(id(value) == place.first_value_or_id)
