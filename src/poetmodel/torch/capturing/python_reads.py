"""Python values that a forward pass reads: recorded during the capture, guarded afterwards.

Code of the model runs once. Each number that it reads from an object, a global or a closure becomes
part of the captured step, so a guard compares each place that was read before each step.

Attributes are recorded when they are read. During the forward pass the classes of the model and of
all objects that the code reads have a ``__getattribute__`` that records
(`poetmodel.torch.capturing.python_attributes`). Globals and closure variables are found in the
executed lines of code (`poetmodel.torch.capturing.python_code`). For a container the key is
recorded if the code after the read is a subscript (``self.d["a"]``), otherwise the whole content
(`poetmodel.torch.capturing.python_places`).
"""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from threading import get_ident
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.torch.capturing.python_attributes import AttributeRecorder
from poetmodel.torch.capturing.python_code import (
    READ_ATTRIBUTE,
    READ_CLOSURE,
    READ_GLOBAL,
    ExecutedCode,
    FollowingCode,
    user_line_of,
)
from poetmodel.torch.capturing.python_guards import Access, PythonGuards
from poetmodel.torch.capturing.python_places import (
    RecordedPlaces,
    cell_value,
    guard_error,
    is_unchanged,
    is_user_defined,
)
from poetmodel.torch.capturing.python_values import ABSENT, CONTAINERS, PLAIN, attributes_of
from poetmodel.torch.errors import CaptureError, CodeOrigin, code_origin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import CellType, FrameType

    from poetmodel.torch.capturing.python_code import Line

_OWN: Final = frozenset(vars(torch.nn.Module())) | {"_flat_weights"}
"""Attributes of modules that other guards cover."""
_LOOKUPS: Final = ("__getattribute__", "__getattr__")
_MODULE_FILE: Final = torch.nn.Module.__call__.__code__.co_filename


class PythonReads:
    """The places that forward passes read, and the plain state that their code may change.

    Parameters
    ----------
    captured_module : torch.nn.Module
        The captured module.
    loss_fn : object
        The user's loss; None without one.
    """

    def __init__(self, captured_module: torch.nn.Module, loss_fn: object) -> None:
        self._attributes = AttributeRecorder(self._record_attribute)
        self.places = RecordedPlaces(captured_module, self._attributes)
        self._codes: dict[int, ExecutedCode] = {}
        self._is_active = self._is_busy = False
        self._thread = get_ident()
        self._loss_fn = loss_fn

    # -- recording -------------------------------------------------------------------------------

    def observe(
        self,
        *,
        on_holder: Callable[[str, Any], bool],
        on_forgotten: Callable[[set[int]], object],
        on_class: Callable[[type], object],
    ) -> None:
        """Set the callbacks.

        Parameters
        ----------
        on_holder : callable
            Called with the name and object of each container and object before the code changes it.
            Returns whether the callback retains a reference until `on_forgotten`.
        on_forgotten : callable
            Called with the ``id`` of each retained object that the forward pass created itself.
        on_class : callable
            Called with each class of recorded objects, and with each of its base classes.
        """
        self.places.on_holder, self.places.on_forgotten = on_holder, on_forgotten
        self._attributes.on_class = on_class

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager that records the places that the forward pass inside reads."""
        self._thread = get_ident()
        self._is_active = True
        self.places.record_use(self._loss_fn, "loss_fn", None, FollowingCode.unknown(None))
        with self._attributes.patches():
            previous = sys.gettrace()
            sys.settrace(self._trace_call)
            try:
                yield
            finally:
                sys.settrace(previous)
                self._is_active = False

    def _trace_call(self, frame: FrameType, _: str, __: Any) -> Any:
        """Register the code object of a call, for `sys.settrace`; return its line tracer."""
        code = frame.f_code
        executed_code = self._codes.get(id(code))
        if executed_code is None:
            executed_code = self._codes[id(code)] = ExecutedCode(code, frame.f_globals)
            if executed_code.is_followed:
                self._register_names(executed_code, frame)
        return executed_code.trace_line if executed_code.is_followed else None

    def _register_names(self, executed_code: ExecutedCode, frame: FrameType) -> None:
        """Register the globals, closure and arguments of a function before its first line."""
        self._is_busy = True
        try:
            code, names = frame.f_code, frame.f_locals
            for name in executed_code.global_names:
                value = frame.f_globals.get(name, ABSENT)
                executed_code.first.setdefault(name, value)
                self.places.register(value, f"{_module_name(frame.f_globals)}.{name}")
            for name in code.co_freevars:
                if name in executed_code.stored_cells:
                    executed_code.first_cells.setdefault(name, names.get(name, ABSENT))
                self.places.register(names.get(name), f"{name} of {code.co_qualname}")
            for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
                self._attributes.register(type(names.get(name)))
        finally:
            self._is_busy = False

    def _record_attribute(self, value: Any, name: str, attribute: Any) -> None:
        """Record that code reads an attribute; `attribute` is `ABSENT` if the object has none."""
        if self._is_busy or not self._is_active or get_ident() != self._thread:
            return
        if name[:2] == "__" and name != "__dict__":
            return
        kind = type(value)
        is_module = issubclass(kind, torch.nn.Module)
        if is_module and name in _OWN:
            return
        frame = sys._getframe(2)  # noqa: SLF001 - the code that reads
        if name == "__dict__" and code_origin(frame.f_code.co_filename) is CodeOrigin.TORCH:
            return
        while frame.f_code.co_name in _LOOKUPS and frame.f_back is not None:
            frame = frame.f_back
        if is_module and name != "forward" and frame.f_code.co_filename == _MODULE_FILE:
            return
        sites = self.places.sites.setdefault(id(value), set())
        site = (name, id(frame.f_code), frame.f_lasti)
        if site in sites:
            return
        sites.add(site)
        self._is_busy = True
        try:
            self._record_read(value, name, attribute, frame)
        finally:
            self._is_busy = False

    def _record_read(self, value: Any, name: str, attribute: Any, frame: FrameType) -> None:
        """Record an attribute read as an instance attribute, item, absence or class attribute."""
        self.places.holders.setdefault(id(value), value)  # so that the ``id`` in sites stays unique
        origin = code_origin(frame.f_code.co_filename)
        if origin is CodeOrigin.OWN:
            return
        attributes = attributes_of(value)
        owner = self.places.names.get(id(value))
        line = user_line_of(frame)
        if name == "__dict__":
            if attributes is not None:
                display_name = f"attributes of {owner or type(value).__qualname__}"
                self.places.record_keys(
                    attributes, display_name, line, FollowingCode(frame, calls=True)
                )
            return
        display_name = f"{owner}.{name}" if owner else name
        if owner is None and not isinstance(value, torch.nn.Module):
            display_name = f"{type(value).__qualname__}.{name}"
        if attributes is not None and name in attributes:
            attribute = attributes[name]
            self.places.add(value, Access.ATTRIBUTE, name, attribute, display_name, line)
            self.places.record_use(attribute, display_name, line, FollowingCode(frame))
            return
        if isinstance(value, torch.nn.Module) and any(
            name in attributes[kind]
            for kind in ("_parameters", "_buffers", "_modules")
            if attributes and kind in attributes
        ):
            return
        if attributes is not None and not (
            attribute is not ABSENT and _is_package_method(value, name)
        ):
            self.places.add(value, Access.ATTRIBUTE, name, ABSENT, display_name, line)
        if isinstance(value, dict) and attribute is ABSENT and name in value:
            self.places.add(value, Access.ITEM, name, dict.get(value, name), display_name, line)
            self.places.record_use(dict.get(value, name), display_name, line, FollowingCode(frame))
            return
        self._record_class_attribute(value, name, display_name, line, frame)

    def _record_class_attribute(
        self, value: Any, name: str, display_name: str, line: Line | None, frame: FrameType
    ) -> None:
        """Record a class attribute that was read through an instance."""
        for kind in type(value).__mro__:
            if name not in vars(kind):
                continue
            attribute = vars(kind)[name]
            function = getattr(attribute, "__func__", attribute)  # of static and class methods
            if isinstance(function, FunctionType):
                self.places.register(function, display_name)
            if isinstance(attribute, property) and isinstance(attribute.fget, FunctionType):
                self.places.register(attribute.fget, display_name)
            if type(attribute).__name__ in ("member_descriptor", "_tuplegetter"):
                slot = getattr(value, name, ABSENT)
                self.places.add(value, Access.COMPUTED, name, slot, display_name, line)
                self.places.record_use(slot, display_name, line, FollowingCode(frame))
            elif is_user_defined(kind) or isinstance(attribute, (*PLAIN, *CONTAINERS, tuple)):
                self.places.add(
                    kind, Access.CLASS, name, attribute, f"{kind.__qualname__}.{name}", line
                )
                self.places.record_use(
                    attribute, f"{kind.__qualname__}.{name}", line, FollowingCode(frame)
                )
            return

    # -- the end of a capture ----------------------------------------------------------------------

    def stored_names(self) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
        """Yield (file's module, globals, name, first value) of each global that code may set.

        Only executed code counts. The first value is the value before the code was executed.
        """
        for code in self._codes.values():
            if code.is_followed:
                for key in code.stored_globals:
                    yield _module_name(code.globals), code.globals, key, code.first[key]

    def stored_cells(self) -> Iterator[tuple[str, CellType, Any]]:
        """Yield (name, cell, first value) of each closure variable that executed code may set.

        Variables of the forward pass itself are omitted.
        """
        if any(code.is_followed and code.stored_cells for code in self._codes.values()):
            self._find_functions()
        for code in list(self._codes.values()):
            if code.is_followed and code.stored_cells:
                for name, cell in self._lasting_cells(code).items():
                    if name in code.stored_cells:
                        yield f"{name} of {code.code.co_qualname}", cell, code.first_cells[name]

    def _find_functions(self) -> None:
        """Find the functions of executed closures that no registered object refers to."""
        missing_ids = {
            id(code.code)
            for code in self._codes.values()
            if code.is_followed
            and code.code.co_freevars
            and id(code.code) not in self.places.functions
        }
        for value in gc.get_objects() if missing_ids else ():
            if type(value) is FunctionType and id(value.__code__) in missing_ids:
                self.places.holders[id(value)] = value
                self.places.functions.setdefault(id(value.__code__), set()).add(id(value))

    def _record_code(self) -> None:
        """Record the globals and closure variables that executed lines read."""
        for code in list(self._codes.values()):
            if not code.is_followed:
                continue
            cells = self._lasting_cells(code)
            for name, following in code.reads(READ_GLOBAL):
                value = code.first.get(name, code.globals.get(name, ABSENT))
                if value is ABSENT:  # a builtin
                    continue
                display_name = f"{_module_name(code.globals)}.{name}"
                line = following.line
                if not (code.is_library and isinstance(value, _LINKS)):
                    self.places.add(code.globals, Access.ITEM, name, value, display_name, line)
                self.places.record_use(value, display_name, line, following)
            for name, following in code.reads(READ_CLOSURE):
                if name not in cells:
                    continue
                value = cell_value(cells[name])
                display_name = f"{name} of {code.code.co_qualname}"
                self.places.add(cells[name], Access.CELL, name, value, display_name, following.line)
                self.places.record_use(value, display_name, following.line, following)
            self._record_defaults(code)
        self._record_classes()

    def _record_defaults(self, code: ExecutedCode) -> None:
        """Record the defaults of the functions of an executed code object."""
        for function in [
            self.places.holders[key] for key in self.places.functions.get(id(code.code), ())
        ]:
            for key in ("__defaults__", "__kwdefaults__"):
                value = getattr(function, key)
                if value is not None:
                    display_name = f"defaults of {function.__qualname__}"
                    line = (code.code.co_filename, code.code.co_firstlineno)
                    self.places.add(function, Access.COMPUTED, key, value, display_name, line)
                    self.places.record_all(value, display_name, line)

    def _record_classes(self) -> None:
        """Record plain attributes of the user's classes whose names the executed code reads.

        This finds ``type(self).beta`` and ``cls.beta``, whose holder is not known from the code.
        """
        line_of_name: dict[str, Line | None] = {}
        for code in self._codes.values():
            if code.is_followed and not code.is_library:
                for name, following in code.reads(READ_ATTRIBUTE):
                    line_of_name.setdefault(name, following.line)
        for kind in list(self.places.classes()):
            for name in line_of_name.keys() & vars(kind).keys():
                value = vars(kind)[name]
                is_known = (id(kind), Access.CLASS, (str, name)) in self.places.places
                if not is_known and isinstance(value, (*PLAIN, *CONTAINERS, tuple)):
                    display_name = f"{kind.__qualname__}.{name}"
                    self.places.add(
                        kind, Access.CLASS, name, value, display_name, line_of_name[name]
                    )
                    self.places.record_use(
                        value,
                        display_name,
                        line_of_name[name],
                        FollowingCode.unknown(line_of_name[name]),
                    )

    def _lasting_cells(self, code: ExecutedCode) -> dict[str, CellType]:
        """Return the closure variables of a code object that outlive the forward pass."""
        if not code.code.co_freevars:
            return {}
        functions = self.places.functions.get(id(code.code), set())
        parents = [c for c in self._codes.values() if code.code in c.code.co_consts]
        local_names = {name for parent in parents for name in parent.code.co_cellvars}
        cells: dict[str, CellType] = {}
        for function in (self.places.holders[key] for key in functions):
            pairs = zip(code.code.co_freevars, function.__closure__ or (), strict=False)
            cells.update({name: cell for name, cell in pairs if name not in local_names})
        for parent in parents if not functions else ():
            cells.update(self._lasting_cells(parent))
        return cells

    def guards(self, name: str, alternatives: Mapping[tuple[int, Any], Any]) -> PythonGuards:
        """Return the guards of all places; call this after all state is restored.

        `alternatives` has the comparison keys of values that forward itself sets, by spot.
        Raises `CaptureError` if a place cannot be guarded.
        """
        self._find_functions()
        self._record_code()
        self.places.remove_temporary()
        places = list(self.places.places.values())
        for place in places:
            place.value = place.current_value()
            error = guard_error(place)
            if error:
                raise CaptureError(f"{name}: {error}")
        unchanged = [place for place in places if is_unchanged(place)]
        return PythonGuards(unchanged, alternatives)


_LINKS: Final = (ModuleType, type, FunctionType, BuiltinFunctionType)
"""Types of the values that most globals of a library's files have."""


def _module_name(names: Mapping[str, Any]) -> str:
    return str(names.get("__name__", "")) or "a file"


def _is_package_method(value: Any, name: str) -> bool:
    """Return whether an attribute of an object is a package's method."""
    for kind in type(value).__mro__:
        if name in vars(kind):
            is_plain = isinstance(vars(kind)[name], (*PLAIN, *CONTAINERS, tuple))
            return name != "forward" and not is_plain and not is_user_defined(kind)
    return False
