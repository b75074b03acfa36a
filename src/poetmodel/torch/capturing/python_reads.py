"""Python values that a forward pass reads: recorded while it is captured, guarded afterwards.

Code of the model runs once. A number that it reads from an object, a name of a file, or a closure
is part of the captured step, so each place that was read is looked at again before each step.

Attributes are recorded where they are read: while the forward pass runs, the classes of the model,
and of all objects that it comes to, have a ``__getattribute__`` that records. Names of files and of
closures are found in the code that ran, line by line. Of a container, the key is recorded where
the code that follows the read is a subscript (``self.d["a"]``), and the whole content otherwise.
"""

from __future__ import annotations

import dis
import gc
import sys
from bisect import bisect_right
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from poetmodel.torch.capturing.joint_graph import shown_path
from poetmodel.torch.capturing.python_guards import Access, GuardedPlace, PythonGuards
from poetmodel.torch.capturing.python_values import (
    ABSENT,
    CONTAINERS,
    PLAIN,
    attributes_of,
    content_of,
    form_of,
    is_iterator,
    items_of,
    origin_of_module,
    read_at,
)
from poetmodel.torch.errors import RAISED, CaptureError, CodeOrigin, origin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import CellType, FrameType

    Line = tuple[str, int]


_MAX_ITEMS: Final = 10_000
"""Containers with more items are not compared before each step."""
_MAX_ARRAY_BYTES: Final = 2**16
_OWN: Final = frozenset(vars(torch.nn.Module())) | {"_flat_weights"}
"""Attributes of modules that other guards cover."""
_NOT_FOLLOWED: Final = frozenset((CodeOrigin.TORCH, CodeOrigin.OWN, CodeOrigin.STANDARD))
"""Origins of functions whose names of files and closures are not the user's."""
_USERS: Final = (CodeOrigin.USER, CodeOrigin.GENERATED)
_PATCHED_STANDARD: Final = ("argparse",)
"""Modules of the standard library with objects that hold a user's values."""
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8
"""Flags of a class: it was made by Python code; its attributes cannot be set."""
_WRITES: Final = frozenset(
    ("add", "append", "appendleft", "clear", "discard", "extend", "insert", "update")
)
"""Methods of containers that change them, and whose result does not depend on the content."""
_READ_LOCAL: Final = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK")
_READ_CONSTANT: Final = ("LOAD_CONST", "LOAD_SMALL_INT")
_READ_GLOBAL: Final = ("LOAD_GLOBAL", "LOAD_NAME")
_READ_CLOSURE: Final = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_READ_ATTRIBUTE: Final = ("LOAD_ATTR", "LOAD_METHOD")
_LOOKUPS: Final = ("__getattribute__", "__getattr__")
_MODULE_FILE: Final = torch.nn.Module.__call__.__code__.co_filename
_SKIPPED: Final = frozenset(
    ("CACHE", "EXTENDED_ARG", "NOP", "NOT_TAKEN", "PRECALL", "PUSH_NULL", "RESUME")
)


class PythonReads:
    """The places that forward passes read, and the plain state that their code may change.

    Parameters
    ----------
    stepped : torch.nn.Module
        The module that is captured.
    loss_fn : object
        The user's loss; None without one.
    """

    def __init__(self, stepped: torch.nn.Module, loss_fn: object) -> None:
        self._places: dict[tuple[int, Access, Any], GuardedPlace] = {}
        self._holders: dict[int, Any] = {}
        """Objects that were read or reached, by identity, so that no other gets the same one."""
        self._names: dict[int, str] = {}
        self._sites: dict[int, set[tuple[str, int, int]]] = {}
        """Attributes that were recorded and the instructions that read them, for each object."""
        self._codes: dict[int, _Code] = {}
        self._functions: dict[int, set[int]] = {}
        """Identities of the functions of a code object, by its identity."""
        self._reached: set[int] = set()
        self._classes: set[type] = {torch.nn.Module}
        self._kinds: dict[type, bool] = {}
        """Whether attributes of instances are recorded."""
        self._patched: list[tuple[type, Any]] = []
        self._is_active = self._is_busy = False
        self._thread = get_ident()
        self.on_holder: Callable[[str, Any], bool] = lambda *_: False
        """Called with each container and object that code comes to, before the code changes it.

        Returns whether it keeps a reference, until `on_forgotten`.
        """
        self.on_forgotten: Callable[[set[int]], object] = lambda _: None
        """Called with the identities of those that the forward pass made itself."""
        self._kept: set[int] = set()
        self.on_class: Callable[[type], object] = lambda _: None
        for path, module in stepped.named_modules():
            self._names[id(module)] = shown_path(path)
        self._root = stepped
        self._loss_fn = loss_fn

    # -- recording -------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what the forward pass inside reads."""
        self._thread = get_ident()
        self._is_active = True
        self._use(self._loss_fn, "loss_fn", None, _Next.unknown(None))
        for kind in list(self._classes):
            self._patch(kind)
        previous = sys.gettrace()
        sys.settrace(self._trace_call)
        try:
            yield
        finally:
            sys.settrace(previous)
            self._is_active = False
            for kind, before in self._patched:
                if before is None:
                    del kind.__getattribute__
                else:
                    kind.__getattribute__ = before  # type: ignore[method-assign, unused-ignore]
            self._patched.clear()

    def _patch(self, kind: type) -> None:
        """Let instances of a class, and of those below it, record what is read of them."""
        original: Any = kind.__getattribute__

        def recorded(value: Any, name: str) -> Any:
            try:
                found = original(value, name)
            except AttributeError:
                self._record_attribute(value, name, ABSENT)
                raise
            self._record_attribute(value, name, found)
            return found

        before = vars(kind).get("__getattribute__")
        try:
            kind.__getattribute__ = recorded  # type: ignore[assignment, method-assign, unused-ignore]
        except (AttributeError, TypeError):  # a metaclass forbids it
            return
        self._patched.append((kind, before))

    def _is_recorded(self, kind: type) -> bool:
        """Return whether attributes of instances are recorded, and see to it that they are."""
        known = self._kinds.get(kind)
        if known is None:
            anchor = _anchor(kind)
            for base in kind.__mro__:
                self.on_class(base)
            known = self._kinds[kind] = anchor is not None
            if anchor is not None and anchor not in self._classes:
                self._classes.add(anchor)
                if self._is_active:
                    self._patch(anchor)
        return known

    def _trace_call(self, frame: FrameType, _: str, __: Any) -> Any:
        code = frame.f_code
        known = self._codes.get(id(code))
        if known is None:
            known = self._codes[id(code)] = _Code(code, frame.f_globals)
            if known.is_followed:
                self._enter(known, frame)
        return known.trace_line if known.is_followed else None

    def _enter(self, known: _Code, frame: FrameType) -> None:
        """Reach what a function may read, before its first line runs."""
        self._is_busy = True
        try:
            code, names = frame.f_code, frame.f_locals
            for name in known.global_names:
                value = frame.f_globals.get(name, ABSENT)
                known.first.setdefault(name, value)
                self._reach(value, f"{_module_name(frame.f_globals)}.{name}")
            for name in code.co_freevars:
                if name in known.stored_cells:
                    known.first_cells.setdefault(name, names.get(name, ABSENT))
                self._reach(names.get(name), f"{name} of {code.co_qualname}")
            for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
                self._is_recorded(type(names.get(name)))
        finally:
            self._is_busy = False

    def _reach(self, value: Any, name: str) -> None:  # noqa: C901 - one branch for each type
        """Record attributes of a value from now on, of what it contains, and of what it calls."""
        kind = type(value)
        if isinstance(value, type):
            self.on_class(value)
        if isinstance(value, (*PLAIN, torch.Tensor, BuiltinFunctionType, type)):
            return
        if id(value) in self._reached:
            return
        self._reached.add(id(value))
        self._holders.setdefault(id(value), value)
        self._names.setdefault(id(value), name)
        if isinstance(value, FunctionType):
            self._functions.setdefault(id(value.__code__), set()).add(id(value))
        if isinstance(value, FunctionType | ModuleType):
            if self.is_of_a_user(value):
                self._watch(value.__name__, value)
        elif isinstance(value, partial):
            self._watch(f"keywords of {name}", value.keywords)
        elif isinstance(value, CONTAINERS):
            self._is_recorded(kind)
            self._watch(name, value)
        elif self._is_recorded(kind) and not issubclass(kind, torch.nn.Module):
            self._watch(name, value)
        for part, shown in _yield_parts(value, name):
            self._reach(part, shown)

    def _watch(self, name: str, value: Any) -> None:
        if self.on_holder(name, value):
            self._kept.add(id(value))

    def _record_attribute(self, value: Any, name: str, found: Any) -> None:
        """Note that an attribute was read; `ABSENT` if there was none."""
        if self._is_busy or not self._is_active or get_ident() != self._thread:
            return
        if name[:2] == "__" and name != "__dict__":
            return
        kind = type(value)
        is_module = issubclass(kind, torch.nn.Module)
        if is_module and name in _OWN:
            return
        frame = sys._getframe(2)  # noqa: SLF001 - the code that reads
        if name == "__dict__" and origin_of(frame.f_code.co_filename) is CodeOrigin.TORCH:
            return
        while frame.f_code.co_name in _LOOKUPS and frame.f_back is not None:
            frame = frame.f_back
        if is_module and name != "forward" and frame.f_code.co_filename == _MODULE_FILE:
            return
        sites = self._sites.setdefault(id(value), set())
        site = (name, id(frame.f_code), frame.f_lasti)
        if site in sites:
            return
        sites.add(site)
        self._is_busy = True
        try:
            self._record_read(value, name, found, frame)
        finally:
            self._is_busy = False

    def _record_read(self, value: Any, name: str, found: Any, frame: FrameType) -> None:
        self._holders.setdefault(id(value), value)  # for the site
        origin = origin_of(frame.f_code.co_filename)
        if origin is CodeOrigin.OWN:
            return
        attributes = attributes_of(value)
        owner = self._names.get(id(value))
        line = _line_of(frame)
        if name == "__dict__":
            if attributes is not None:
                shown = f"attributes of {owner or type(value).__qualname__}"
                self._follow(attributes, shown, line, _Next(frame, calls=True))
            return
        shown = f"{owner}.{name}" if owner else name
        if owner is None and not isinstance(value, torch.nn.Module):
            shown = f"{type(value).__qualname__}.{name}"
        if attributes is not None and name in attributes:
            found = attributes[name]
            self._add(value, Access.ATTRIBUTE, name, found, shown, line)
            self._use(found, shown, line, _Next(frame))
            return
        if isinstance(value, torch.nn.Module) and any(
            name in attributes[kind]
            for kind in ("_parameters", "_buffers", "_modules")
            if attributes and kind in attributes
        ):
            return
        if attributes is not None and not (found is not ABSENT and _is_of_a_package(value, name)):
            self._add(value, Access.ATTRIBUTE, name, ABSENT, shown, line)
        if isinstance(value, dict) and found is ABSENT and name in value:
            self._add(value, Access.ITEM, name, dict.get(value, name), shown, line)
            self._use(dict.get(value, name), shown, line, _Next(frame))
            return
        self._record_of_class(value, name, shown, line, frame)

    def _record_of_class(
        self, value: Any, name: str, shown: str, line: Line | None, frame: FrameType
    ) -> None:
        """Note that an attribute of a class was read, by an instance that has none of its own."""
        for kind in type(value).__mro__:
            if name not in vars(kind):
                continue
            found = vars(kind)[name]
            function = getattr(found, "__func__", found)  # of static and class methods
            if isinstance(function, FunctionType):
                self._reach(function, shown)
            if isinstance(found, property) and isinstance(found.fget, FunctionType):
                self._reach(found.fget, shown)
            if type(found).__name__ in ("member_descriptor", "_tuplegetter"):
                slot = getattr(value, name, ABSENT)
                self._add(value, Access.COMPUTED, name, slot, shown, line)
                self._use(slot, shown, line, _Next(frame))
            elif self.is_of_a_user(kind) or isinstance(found, (*PLAIN, *CONTAINERS, tuple)):
                self._add(kind, Access.CLASS, name, found, f"{kind.__qualname__}.{name}", line)
                self._use(found, f"{kind.__qualname__}.{name}", line, _Next(frame))
            return

    def _add(
        self, holder: Any, access: Access, key: Any, value: Any, name: str, line: Line | None
    ) -> None:
        """Note a place that was read."""
        self._holders.setdefault(id(holder), holder)
        try:
            spot = (id(holder), access, (type(key), key))
            if spot in self._places:
                return
        except TypeError:  # a key without a hash
            return
        first = value if isinstance(value, PLAIN) else id(value)
        self._places[spot] = GuardedPlace(holder, access, key, name, line, first)

    def _use(self, value: Any, name: str, line: Line | None, after: _Next) -> None:
        """Note what becomes of a value that was read: containers are read further."""
        if isinstance(value, (*PLAIN, torch.Tensor)):
            return
        if is_iterator(value) and not isinstance(value, torch.nn.Module):
            self._add(value, Access.CONTENT, None, value, name, line)
            return
        self._reach(value, name)
        if isinstance(value, (*CONTAINERS, ModuleType, type, FunctionType)):
            self._follow(value, name, line, after)
        elif isinstance(value, tuple | frozenset | partial):
            self._read_all(value, name, line)

    def _follow(self, value: Any, name: str, line: Line | None, after: _Next) -> None:
        """Note which part of a value the code that follows reads; all of it if that is unknown."""
        if isinstance(value, (ModuleType, type, FunctionType)):
            self._follow_namespace(value, line, after)
            return
        content = content_of(value)
        uses = after.uses(value)
        if uses is None:
            self._read_all(value, name, line)
            return
        for key, following in uses:
            try:
                is_dict = isinstance(content, dict)
                item = dict.get(content, key, ABSENT) if is_dict else content[key]
            except RAISED:
                self._read_all(value, name, line)
                return
            namespace = content is not value and not isinstance(value, CONTAINERS[4:6])
            shown = f"{name}.{key}" if namespace else f"{name}[{key!r}]"
            self._add(content, Access.ITEM, key, item, shown, line)
            self._use(item, shown, line, following)

    def _follow_namespace(self, value: Any, line: Line | None, after: _Next) -> None:
        """Note the attribute that is read of a module of Python, a class or a function."""
        key, following = after.attribute()
        if key is None or key.startswith("__"):
            return
        if isinstance(value, type):
            for kind in value.__mro__:
                if key in vars(kind) and origin_of_module(kind.__module__) is not CodeOrigin.TORCH:
                    found = vars(kind)[key]
                    shown = f"{kind.__qualname__}.{key}"
                    if not issubclass(kind, PLAIN):
                        self._add(kind, Access.CLASS, key, found, shown, line)
                        self._use(found, shown, line, following)
                    return
            return
        if isinstance(value, ModuleType) and _root(value) == "torch":
            return
        found = vars(value).get(key, ABSENT)
        shown = f"{value.__name__}.{key}"
        self._add(vars(value), Access.ITEM, key, found, shown, line)
        self._use(found, shown, line, following)

    def _read_all(self, value: Any, name: str, line: Line | None) -> None:
        """Note that all of a value is read, with what it contains."""
        if isinstance(value, partial):
            parts: Sequence[tuple[Any, Any]] = [("keywords", value.keywords), ("args", value.args)]
        elif isinstance(value, CONTAINERS):
            content = content_of(value)
            if (id(content), Access.CONTENT, (type(None), None)) in self._places:
                return
            self._add(content, Access.CONTENT, None, content, name, line)
            size = content.size if isinstance(content, np.ndarray) else len(content)
            parts = list(items_of(value)) if size <= _MAX_ITEMS else ()
        else:
            parts = list(enumerate(value))
        for key, part in parts:
            shown = f"{name}[{key!r}]"
            self._reach(part, shown)
            if isinstance(part, (*CONTAINERS, tuple, frozenset, partial)):
                self._read_all(part, shown, line)

    # -- the end of a capture ----------------------------------------------------------------------

    def was_read(self, holder: int, key: Any) -> bool:
        """Return whether an attribute or item was read, alone or with all others.

        `holder` is the identity of the dict that has it, which may be that of an object.
        """
        content = (holder, Access.CONTENT, (type(None), None))
        return content in self._places or any(
            place.spot == (holder, key) for place in self._places.values()
        )

    def stored_names(self) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
        """Yield the names of files that the code that ran may set, with their first value.

        Name of the file, its dict, the name in it, and the value before the code ran.
        """
        for code in self._codes.values():
            if code.is_followed:
                for key in code.stored_globals:
                    yield _module_name(code.globals), code.globals, key, code.first[key]

    def stored_cells(self) -> Iterator[tuple[str, CellType, Any]]:
        """Yield the variables of closures that the code that ran may set, with their first value.

        Variables of the forward pass itself are left out.
        """
        if any(code.is_followed and code.stored_cells for code in self._codes.values()):
            self._find_functions()
        for code in list(self._codes.values()):
            if code.is_followed and code.stored_cells:
                for name, cell in self._cells(code).items():
                    if name in code.stored_cells:
                        yield f"{name} of {code.code.co_qualname}", cell, code.first_cells[name]

    def classes(self) -> Iterator[type]:
        """Yield the classes of a user whose attributes the code may read."""
        kinds = {type(holder) for holder in self._holders.values()}
        kinds.update(value for value in self._holders.values() if isinstance(value, type))
        kinds.update(type(module) for module in self._root.modules())
        bases = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
        for kind in bases:
            if self.is_of_a_user(kind):
                yield kind

    @staticmethod
    def is_of_a_user(value: Any) -> bool:
        """Return whether a class, function or Python module is no package's."""
        module = value.__name__ if isinstance(value, ModuleType) else value.__module__
        is_plain = isinstance(value, type) and issubclass(value, PLAIN)
        return not is_plain and origin_of_module(str(module)) in _USERS

    def forget_temporary(self) -> None:
        """Forget the objects that only this recorder still holds: forward made them."""
        for place in self._places.values():
            self._holders.setdefault(id(place.holder), place.holder)
        while True:
            counts = Counter(id(place.holder) for place in self._places.values())
            # References: of the dict and the call, of places, and of who watches it.
            gone = {
                key
                for key in self._holders
                if sys.getrefcount(self._holders[key]) <= 2 + counts[key] + (key in self._kept)
            }
            if not gone:
                return
            self.on_forgotten(gone & self._kept)
            self._kept -= gone
            self._places = {
                spot: place for spot, place in self._places.items() if spot[0] not in gone
            }
            for key in gone:
                self._holders.pop(key)
                self._sites.pop(key, None)
                self._names.pop(key, None)
            self._reached -= gone
            for functions in self._functions.values():
                functions.difference_update(gone)

    def _find_functions(self) -> None:
        """Find the functions of closures that ran, and that no name or attribute has led to."""
        missing = {
            id(code.code)
            for code in self._codes.values()
            if code.is_followed and code.code.co_freevars and id(code.code) not in self._functions
        }
        for value in gc.get_objects() if missing else ():
            if type(value) is FunctionType and id(value.__code__) in missing:
                self._holders[id(value)] = value
                self._functions.setdefault(id(value.__code__), set()).add(id(value))

    def _read_of_code(self) -> None:
        """Note the names of files and closures that lines that ran have read."""
        for code in list(self._codes.values()):
            if not code.is_followed:
                continue
            cells = self._cells(code)
            for name, following in code.reads(_READ_GLOBAL):
                value = code.first.get(name, code.globals.get(name, ABSENT))
                if value is ABSENT:  # of the builtins
                    continue
                shown = f"{_module_name(code.globals)}.{name}"
                line = following.line
                if not (code.is_library and isinstance(value, _LINKS)):
                    self._add(code.globals, Access.ITEM, name, value, shown, line)
                self._use(value, shown, line, following)
            for name, following in code.reads(_READ_CLOSURE):
                if name not in cells:
                    continue
                value = cell_value(cells[name])
                shown = f"{name} of {code.code.co_qualname}"
                self._add(cells[name], Access.CELL, name, value, shown, following.line)
                self._use(value, shown, following.line, following)
            self._read_defaults(code)
        self._read_of_classes()

    def _read_defaults(self, code: _Code) -> None:
        """Note the defaults of a function that ran."""
        for function in [self._holders[key] for key in self._functions.get(id(code.code), ())]:
            for key in ("__defaults__", "__kwdefaults__"):
                value = getattr(function, key)
                if value is not None:
                    shown = f"defaults of {function.__qualname__}"
                    line = (code.code.co_filename, code.code.co_firstlineno)
                    self._add(function, Access.COMPUTED, key, value, shown, line)
                    self._read_all(value, shown, line)

    def _read_of_classes(self) -> None:
        """Note attributes of classes and of Python modules whose names the code that ran reads.

        So ``type(self).beta`` is found, and ``cls.beta``: what is on the stack cannot be seen.
        """
        read: dict[str, Line | None] = {}
        for code in self._codes.values():
            if code.is_followed and not code.is_library:
                for name, following in code.reads(_READ_ATTRIBUTE):
                    read.setdefault(name, following.line)
        for kind in list(self.classes()):
            for name in read.keys() & vars(kind).keys():
                value = vars(kind)[name]
                is_known = (id(kind), Access.CLASS, (str, name)) in self._places
                if not is_known and isinstance(value, (*PLAIN, *CONTAINERS, tuple)):
                    shown = f"{kind.__qualname__}.{name}"
                    self._add(kind, Access.CLASS, name, value, shown, read[name])
                    self._use(value, shown, read[name], _Next.unknown(read[name]))

    def _cells(self, code: _Code) -> dict[str, CellType]:
        """Return the variables of a closure that live longer than the forward pass."""
        if not code.code.co_freevars:
            return {}
        functions = self._functions.get(id(code.code), set())
        parents = [c for c in self._codes.values() if code.code in c.code.co_consts]
        local = {name for parent in parents for name in parent.code.co_cellvars}
        cells: dict[str, CellType] = {}
        for function in (self._holders[key] for key in functions):
            pairs = zip(code.code.co_freevars, function.__closure__ or (), strict=False)
            cells.update({name: cell for name, cell in pairs if name not in local})
        for parent in parents if not functions else ():
            cells.update(self._cells(parent))
        return cells

    def guards(self, name: str, alternatives: Mapping[tuple[int, Any], Any]) -> PythonGuards:
        """Return the guards of all places, with everything put back as it was before the capture.

        `alternatives` has the form that forward itself gives to a place when it runs.
        Raises `CaptureError` if a place cannot be guarded.
        """
        self._find_functions()
        self._read_of_code()
        self.forget_temporary()
        places = list(self._places.values())
        for place in places:
            place.value = place.present()
            fault = _fault(place)
            if fault:
                raise CaptureError(f"{name}: {fault}")
        kept = [place for place in places if _is_guarded(place)]
        return PythonGuards(kept, alternatives)


_LINKS: Final = (ModuleType, type, FunctionType, BuiltinFunctionType)
"""Types of what names of a library's files mostly stand for."""


def _anchor(kind: type) -> type | None:
    """Return the class to patch so that reads of all instances are recorded; None if none is.

    It is the last one of a user or a package before those of others: an own ``__getattribute__``
    of a class above it, which may translate names, calls it.
    """
    if issubclass(kind, torch.nn.Module):
        module: type = torch.nn.Module
        return module
    if issubclass(kind, (torch.Tensor, type, ModuleType, BaseException, *PLAIN)):
        return None
    anchor = None
    for base in kind.__mro__:
        own = origin_of_module(base.__module__) in (
            CodeOrigin.USER,
            CodeOrigin.LIBRARY,
            CodeOrigin.GENERATED,
        )
        own = own or base.__module__ in _PATCHED_STANDARD
        flags = base.__flags__
        if own and flags & _HEAP_TYPE and not flags & _IMMUTABLE_TYPE:
            anchor = base
    return anchor


def _line_of(frame: FrameType | None) -> Line | None:
    """Return the innermost line of a user or a package."""
    while frame is not None:
        if origin_of(frame.f_code.co_filename) in (CodeOrigin.USER, CodeOrigin.LIBRARY):
            return (frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def _yield_parts(value: Any, name: str) -> Iterator[tuple[Any, str]]:
    """Yield the values in a container, or that calls of a function use, with their names."""
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


def _module_name(names: Mapping[str, Any]) -> str:
    return str(names.get("__name__", "")) or "a file"


def _root(module: ModuleType) -> str:
    return module.__name__.partition(".")[0]


def _is_of_a_package(value: Any, name: str) -> bool:
    """Return whether an attribute of an object is a method that a package defines."""
    for kind in type(value).__mro__:
        if name in vars(kind):
            is_plain = isinstance(vars(kind)[name], (*PLAIN, *CONTAINERS, tuple))
            return name != "forward" and not is_plain and not PythonReads.is_of_a_user(kind)
    return False


def cell_value(cell: CellType) -> Any:
    """Return the value of the variable of a closure; `ABSENT` before it is set."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _fault(place: GuardedPlace) -> str | None:
    """Return why a place cannot be guarded."""
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
        size, most, what = value.nbytes, _MAX_ARRAY_BYTES, "bytes"
    else:
        size, most, what = len(value), _MAX_ITEMS, "items"
    if size <= most:
        return None
    return (
        f"{place.name} has {size:,} {what}{where}, too many to compare before each step (at most "
        f"{most:,}); make it a buffer of the model (register_buffer), or a tuple"
    )


def _is_guarded(place: GuardedPlace) -> bool:
    """Return whether a place has what was read of it; otherwise forward had set it before."""
    if place.access is Access.CONTENT:
        return True
    value = place.value
    if isinstance(value, PLAIN) and isinstance(place.first, PLAIN):
        return bool(form_of(value) == form_of(place.first))
    return bool(id(value) == place.first)


# -- code ----------------------------------------------------------------------------------------


class _Code:
    """The code of a function that ran, and the lines that did."""

    def __init__(self, code: CodeType, names: dict[str, Any]) -> None:
        self.code = code
        self.globals = names
        origin = origin_of(code.co_filename)
        self.is_followed = origin not in _NOT_FOLLOWED
        self.is_library = origin is CodeOrigin.LIBRARY
        self.first: dict[str, Any] = {}
        """Values of the names of the file when the function was called first."""
        self.first_cells: dict[str, Any] = {}
        """Values of the variables of the closure then."""
        self._lines: set[int] = set()
        if not self.is_followed:
            return
        self.listing = _Listing.of(code)
        kinds = self.listing.names
        self.global_names = kinds(_READ_GLOBAL) | kinds(("STORE_GLOBAL", "DELETE_GLOBAL"))
        self.stored_globals = kinds(("STORE_GLOBAL", "DELETE_GLOBAL"))
        free = frozenset(code.co_freevars)
        self.stored_cells = kinds(("STORE_DEREF", "DELETE_DEREF")) & free

    def trace_line(self, frame: FrameType, event: str, _: Any) -> Any:
        """Note a line that runs."""
        if event == "line":
            self._lines.add(frame.f_lineno)
        return self.trace_line

    def reads(self, kinds: tuple[str, ...]) -> Iterator[tuple[str, _Next]]:
        """Yield the names that lines that ran read by some instructions, and what follows."""
        listing = self.listing
        for position, instruction in enumerate(listing.instructions):
            if instruction.opname in kinds and listing.lines[position] in self._lines:
                after = _Next(None, listing=listing, position=position + 1)
                after.line = (self.code.co_filename, listing.lines[position])
                yield str(instruction.argval), after


@dataclass(slots=True, eq=False)
class _Listing:
    """The instructions of a code object that matter here."""

    code: CodeType
    instructions: list[dis.Instruction] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)

    @staticmethod
    def of(code: CodeType) -> _Listing:
        """Return the instructions of a code object."""
        known = _LISTINGS.get(id(code))
        if known is not None and known.code is code:
            return known
        listing = _Listing(code)
        # From Python 3.13 on some instructions have no line.
        starts: dict[int, Any] = dict(dis.findlinestarts(code))
        line = code.co_firstlineno
        for instruction in dis.get_instructions(code):
            line = starts.get(instruction.offset) or line
            if instruction.opname not in _SKIPPED:
                listing.instructions.append(instruction)
                listing.offsets.append(instruction.offset)
                listing.lines.append(line)
        if len(_LISTINGS) > _MAX_ITEMS:
            _LISTINGS.clear()
        _LISTINGS[id(code)] = listing
        return listing

    def names(self, kinds: tuple[str, ...]) -> frozenset[str]:
        """Return the names that some instructions have."""
        return frozenset(str(i.argval) for i in self.instructions if i.opname in kinds)


_LISTINGS: Final[dict[int, _Listing]] = {}


class _Next:
    """The instructions that follow where a value was read."""

    def __init__(
        self,
        frame: FrameType | None,
        *,
        listing: _Listing | None = None,
        position: int | None = None,
        calls: bool = False,
        depth: int = 3,
    ) -> None:
        self._depth = depth
        """How many local variables that are set to one another are followed."""
        self._frame = frame
        self._listing = listing
        self._position = position
        self.line: Line | None = None
        if frame is None or listing is not None:
            return
        self._listing = _Listing.of(frame.f_code)
        position = bisect_right(self._listing.offsets, frame.f_lasti) - 1
        reading = self._listing.instructions[position].opname if position >= 0 else ""
        if reading in _READ_ATTRIBUTE or (calls and reading.startswith("CALL")):
            self._position = position + 1

    @classmethod
    def unknown(cls, line: Line | None) -> _Next:
        """Return what follows where nothing is known of it."""
        after = cls(None)
        after.line = line
        return after

    def _at(self, ahead: int) -> dis.Instruction | None:
        if self._listing is None or self._position is None:
            return None
        number = self._position + ahead
        instructions = self._listing.instructions
        return instructions[number] if number < len(instructions) else None

    def _further(self, ahead: int) -> _Next:
        position = None if self._position is None else self._position + ahead
        after = _Next(self._frame, listing=self._listing, position=position)
        after.line = self.line
        return after

    def attribute(self) -> tuple[str | None, _Next]:
        """Return the attribute that is read next, and what follows; None if none is."""
        following = self._at(0)
        if following is None or following.opname not in _READ_ATTRIBUTE:
            return None, self
        return str(following.argval), self._further(1)

    def uses(self, value: Any) -> list[tuple[Any, _Next]] | None:
        """Return the keys that are read of a container, with what follows each.

        None if it may be all of it. Keys that are only set are left out.
        """
        following = self._at(0)
        if following is None or self._listing is None:
            return None
        if following.opname == "STORE_FAST" and self._depth:
            return self._uses_of_variable(str(following.argval), value)
        name, after = self.attribute()
        if name is not None:
            return self._uses_of_attribute(name, after, value)
        is_known, key = self._key(following)
        if not is_known:
            return None
        ahead = 1
        while (instruction := self._at(ahead)) is not None and instruction.opname == "COPY":
            ahead += 1
        if instruction is not None and _is_subscript(instruction):
            # ``d[k] += 1`` reads too; there, what is read is used by the code after the copies.
            return [(key, self._further(ahead + 1))]
        if instruction is not None and instruction.opname == "STORE_SUBSCR":
            return []
        return None

    def _uses_of_attribute(
        self, name: str, after: _Next, value: Any
    ) -> list[tuple[Any, _Next]] | None:
        content = content_of(value)
        if content is not value and not isinstance(value, CONTAINERS[4:6]):
            return [(name, after)]  # an attribute of a namespace
        if name in _WRITES:
            return []
        if name == "get" and isinstance(content, dict):
            argument = after._at(0)
            if argument is not None and argument.opname in _READ_CONSTANT:
                return [(argument.argval, _Next.unknown(self.line))]
        is_own = not hasattr(dict, name) and not hasattr(list, name)
        return [] if is_own and type(value) not in CONTAINERS else None

    def _uses_of_variable(self, name: str, value: Any) -> list[tuple[Any, _Next]] | None:
        """Return the keys by which a local variable that is set once is read."""
        listing, stores, keys = self._listing, 0, []
        if listing is None:
            return None
        for position, instruction in enumerate(listing.instructions):
            argument = instruction.argval
            if not any(kind in instruction.opname for kind in ("FAST", "DEREF", "CLOSURE")):
                continue
            if argument != name and not (isinstance(argument, tuple) and name in argument):
                continue
            if instruction.opname == "STORE_FAST":
                stores += 1
                continue
            if instruction.opname not in _READ_LOCAL:
                return None
            after = _Next(None, listing=listing, position=position + 1, depth=self._depth - 1)
            after.line = self.line
            uses = after.uses(value)
            if uses is None:
                return None
            keys += uses
        return keys if stores == 1 else None

    def _key(self, instruction: dis.Instruction) -> tuple[bool, Any]:
        """Return whether a key is known that an instruction loads, and the key."""
        if instruction.opname in _READ_CONSTANT:
            return not isinstance(instruction.argval, slice | tuple), instruction.argval
        if instruction.opname in _READ_LOCAL and self._frame is not None:
            key = self._frame.f_locals.get(str(instruction.argval), ABSENT)
            return isinstance(key, str | int) and type(key) in (str, int), key
        return False, None


def _is_subscript(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_SUBSCR" or (
        instruction.opname == "BINARY_OP" and instruction.argrepr == "[]"
    )
