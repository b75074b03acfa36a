"""Python values that a forward pass reads: recorded during the capture, then guarded.

Code of the model does not run in a compiled step. Each value that it reads from an object, a global
or a closure becomes part of the captured step, so before each step a guard checks each place that
was read.

Attributes are recorded when they are read. During the forward pass the classes of the model and of
objects that the code reads have a ``__getattribute__`` that records each read, except most classes
of Python and PyTorch (`poetmodel.torch.capturing.python_attributes`). Globals and closure variables
are found in the executed lines of code (`poetmodel.torch.capturing.python_code`). Of a container
only the items are recorded that following code reads (``self.d["a"]``); if these are unknown, the
whole content (`poetmodel.torch.capturing.python_places`).
"""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from threading import get_ident
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.clock import no_gc
from poetmodel.torch.capturing.python_attributes import AttributeRecorder
from poetmodel.torch.capturing.python_code import (
    READ_ATTRIBUTE,
    READ_CLOSURE,
    READ_GLOBAL,
    STORE_CLOSURE,
    STORE_GLOBAL,
    ExecutedCode,
    FollowingCode,
    find_user_line,
)
from poetmodel.torch.capturing.python_guards import Access, PythonGuards
from poetmodel.torch.capturing.python_places import (
    RecordedPlaces,
    guard_error,
    is_unchanged,
    is_user_defined,
)
from poetmodel.torch.capturing.python_values import (
    ABSENT,
    CONTAINERS,
    PLAIN,
    attributes_of,
    cell_value,
)
from poetmodel.torch.errors import CaptureError, CodeOrigin, code_origin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import CellType, FrameType

    from poetmodel.torch.capturing.python_code import Line

_MODULE_ATTRIBUTES: Final = frozenset(vars(torch.nn.Module())) | {"_flat_weights"}
"""Attributes of modules that other guards cover, except `_MODE` outside of the captured module."""
_MODE: Final = "training"
_LOOKUP_METHODS: Final = ("__getattribute__", "__getattr__")
_MODULE_FILE: Final = torch.nn.Module.__call__.__code__.co_filename
"""File of `torch.nn.Module`, whose own reads are ignored, except of ``forward``."""


class PythonReads:
    """Records the places that forward passes read, and the variables that their code may set."""

    def __init__(self, captured_module: torch.nn.Module, loss_fn: object) -> None:
        self._attributes = AttributeRecorder(self._record_attribute)
        self.places = RecordedPlaces(captured_module, self._attributes)
        self._captured_ids = set(map(id, captured_module.modules()))
        self._codes: dict[int, ExecutedCode] = {}
        """Executed code, by the ``id`` of its code object."""
        self._first_globals: dict[tuple[int, str], Any] = {}
        """Value of each global before the first call of code that names it, or `ABSENT`, by (``id``
        of the dict of globals, name)."""
        self._is_active = self._is_busy = False
        """Whether reads are recorded, and whether the recorder itself reads, which is ignored."""
        self._thread = get_ident()
        self._loss_fn = loss_fn

    # -- recording -------------------------------------------------------------------------------

    def set_callbacks(
        self,
        *,
        on_holder: Callable[[str, Any], bool],
        on_forgotten: Callable[[set[int]], object],
        on_class: Callable[[type], object],
    ) -> None:
        """Set the callbacks with these names of `RecordedPlaces` and `AttributeRecorder`."""
        self.places.on_holder, self.places.on_forgotten = on_holder, on_forgotten
        self._attributes.on_class = on_class

    @contextmanager
    def record_reads(self) -> Iterator[None]:
        """Context manager that records the places that a forward pass in this thread reads."""
        self._thread = get_ident()
        self._is_active = True
        self.places.record_use(self._loss_fn, "loss_fn", None, FollowingCode.unknown(None))
        with self._attributes.patch_classes():
            try:
                with _trace_calls(self._trace_call):
                    yield
            finally:
                self._is_active = False

    def _trace_call(self, frame: FrameType, _: str, __: Any) -> Any:
        """Record the code of a call, traced or not; return its line tracer, None if not traced."""
        code = frame.f_code
        executed_code = self._codes.get(id(code))
        if executed_code is None:
            executed_code = self._codes[id(code)] = ExecutedCode(code, frame.f_globals)
            if executed_code.is_traced:
                self._register_names(executed_code, frame)
        return executed_code.trace_line if executed_code.is_traced else None

    def _register_names(self, executed_code: ExecutedCode, frame: FrameType) -> None:
        """Register values that code may read, and record those that it may set, before a call."""
        self._is_busy = True
        try:
            code, local_values = frame.f_code, frame.f_locals
            for name in executed_code.global_names:
                value = frame.f_globals.get(name, ABSENT)
                self._first_globals.setdefault((id(frame.f_globals), name), value)
                self.places.register(value, f"{_module_name(frame.f_globals)}.{name}")
            if executed_code.stored_closure_names:
                known_ids = self.places.functions.get(id(code), ())  # also functions in gc.freeze
                known_functions = [self.places.holders[key] for key in known_ids]
                for function in (*known_functions, *_find_functions({id(code)})):
                    for cell in function.__closure__ or ():
                        executed_code.first_closure_values[id(cell)] = cell_value(cell)
            for name in code.co_freevars:
                self.places.register(local_values.get(name), f"{name} of {code.co_qualname}")
            for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
                self._attributes.register(type(local_values.get(name)))
        finally:
            self._is_busy = False

    def _record_attribute(self, value: Any, name: str, attribute: Any) -> None:
        """Record that code reads an attribute, with its value or `ABSENT`."""
        if self._is_busy or not self._is_active or get_ident() != self._thread:
            return
        if name[:2] == "__" and name != "__dict__":
            return
        kind = type(value)
        is_module = issubclass(kind, torch.nn.Module)
        is_covered = name != _MODE or id(value) in self._captured_ids
        if is_module and name in _MODULE_ATTRIBUTES and is_covered:
            return
        frame = sys._getframe(2)  # noqa: SLF001 - the code that reads
        if name == "__dict__" and code_origin(frame.f_code.co_filename) is CodeOrigin.TORCH:
            return
        while frame.f_code.co_name in _LOOKUP_METHODS and frame.f_back is not None:
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
        """Record the place of attribute `name` of an object, `value`, that `frame` reads."""
        self.places.holders.setdefault(id(value), value)  # so that the ``id`` in sites stays unique
        origin = code_origin(frame.f_code.co_filename)
        if origin is CodeOrigin.OWN:
            return
        attributes = attributes_of(value)
        owner_name = self.places.names.get(id(value))
        line = find_user_line(frame)
        if name == "__dict__":
            if attributes is not None:
                display_name = f"attributes of {owner_name or type(value).__qualname__}"
                self.places.record_keys(
                    attributes, display_name, line, FollowingCode(frame, may_call=True)
                )
            return
        display_name = f"{owner_name}.{name}" if owner_name else name
        if owner_name is None and not isinstance(value, torch.nn.Module):
            display_name = f"{type(value).__qualname__}.{name}"
        if attributes is not None and name in attributes:
            attribute = attributes[name]
            self.places.add(value, Access.ATTRIBUTE, name, attribute, display_name, line)
            self.places.record_use(attribute, display_name, line, FollowingCode(frame))
            return
        if isinstance(value, torch.nn.Module) and any(
            name in attributes[key]
            for key in ("_parameters", "_buffers", "_modules")
            if attributes and key in attributes
        ):
            return
        if attributes is not None and not (
            attribute is not ABSENT and _is_package_attribute(value, name)
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
        """Record a class attribute or slot that was read through `value`, an instance."""
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
                slot_value = getattr(value, name, ABSENT)
                self.places.add(value, Access.COMPUTED, name, slot_value, display_name, line)
                self.places.record_use(slot_value, display_name, line, FollowingCode(frame))
            elif is_user_defined(kind) or isinstance(attribute, (*PLAIN, *CONTAINERS, tuple)):
                self.places.add(
                    kind, Access.CLASS, name, attribute, f"{kind.__qualname__}.{name}", line
                )
                self.places.record_use(
                    attribute, f"{kind.__qualname__}.{name}", line, FollowingCode(frame)
                )
            return

    # -- the end of a capture ----------------------------------------------------------------------

    def stored_globals(self) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
        """Yield each global that executed code may set or delete, once for each function that does.

        Yields (name of the Python module, its globals, name of the global, value before the first
        call of a function that names the global or `ABSENT`).
        """
        for executed_code in self._codes.values():
            if executed_code.is_traced:
                global_values = executed_code.global_values
                for key in executed_code.stored_global_names:
                    first_value = self._first_globals[id(global_values), key]
                    yield _module_name(global_values), global_values, key, first_value

    def stored_closure_variables(self) -> Iterator[tuple[str, CellType, Any]]:
        """Yield (name, cell, first value or `ABSENT`) per closure variable that code may set."""
        if any(
            executed_code.is_traced and executed_code.stored_closure_names
            for executed_code in self._codes.values()
        ):
            self._register_functions()
        for executed_code in list(self._codes.values()):
            if executed_code.is_traced and executed_code.stored_closure_names:
                first_values = executed_code.first_closure_values
                for name, cells in self._lasting_cells(executed_code).items():
                    if name in executed_code.stored_closure_names:
                        display_name = f"{name} of {executed_code.code.co_qualname}"
                        for cell in cells:
                            yield display_name, cell, first_values.get(id(cell), ABSENT)

    @contextmanager
    def find_stored_variables(self) -> Iterator[set[tuple[int, Any]]]:
        """Context manager around a pass: finds the globals and closure variables that it sets.

        At its end, the set that it yields has their item ids (`ItemId`).
        """
        codes: dict[int, ExecutedCode] = {}

        def trace_call(frame: FrameType, _: str, __: Any) -> Any:
            code = frame.f_code
            executed_code = codes.get(id(code))
            if executed_code is None:
                executed_code = codes[id(code)] = ExecutedCode(code, frame.f_globals)
            return executed_code.trace_line if executed_code.is_traced else None

        item_ids: set[tuple[int, Any]] = set()
        with _trace_calls(trace_call):
            yield item_ids
        for executed_code in codes.values():
            if executed_code.is_traced:
                for name, _ in executed_code.find_uses(STORE_GLOBAL):
                    item_ids.add((id(executed_code.global_values), name))
                cells = self._lasting_cells(executed_code)
                for name, _ in executed_code.find_uses(STORE_CLOSURE):
                    item_ids.update((id(cell), None) for cell in cells.get(name, ()))

    def _register_functions(self) -> None:
        """Find, and add to `places`, executed closures that no registered object refers to."""
        missing_ids = {
            id(executed_code.code)
            for executed_code in self._codes.values()
            if executed_code.is_traced
            and executed_code.code.co_freevars
            and id(executed_code.code) not in self.places.functions
        }
        for function in _find_functions(missing_ids) if missing_ids else ():
            self.places.holders[id(function)] = function
            self.places.functions.setdefault(id(function.__code__), set()).add(id(function))

    def _record_code(self) -> None:
        """Record the globals, closure variables, defaults and class attributes that code reads."""
        for executed_code in list(self._codes.values()):
            if not executed_code.is_traced:
                continue
            global_values = executed_code.global_values
            cells = self._lasting_cells(executed_code)
            for name, following_code in executed_code.find_uses(READ_GLOBAL):
                value = self._first_globals.get(
                    (id(global_values), name), global_values.get(name, ABSENT)
                )
                if value is ABSENT:  # a builtin, or not set before the first call
                    continue
                display_name = f"{_module_name(global_values)}.{name}"
                line = following_code.line
                if not (executed_code.is_library and isinstance(value, _DEFINITION_TYPES)):
                    self.places.add(global_values, Access.ITEM, name, value, display_name, line)
                self.places.record_use(value, display_name, line, following_code)
            for name, following_code in executed_code.find_uses(READ_CLOSURE):
                display_name = f"{name} of {executed_code.code.co_qualname}"
                line = following_code.line
                for cell in cells.get(name, ()):
                    value = cell_value(cell)
                    self.places.add(cell, Access.CELL, name, value, display_name, line)
                    self.places.record_use(value, display_name, line, following_code)
            self._record_defaults(executed_code)
        self._record_classes()

    def _record_defaults(self, executed_code: ExecutedCode) -> None:
        """Record the default arguments of the known functions of an executed code object.

        Records ``__defaults__`` and ``__kwdefaults__`` with all their items, used or not.
        """
        code = executed_code.code
        for function in [
            self.places.holders[key] for key in self.places.functions.get(id(code), ())
        ]:
            for key in ("__defaults__", "__kwdefaults__"):
                value = getattr(function, key)
                if value is not None:
                    display_name = f"defaults of {function.__qualname__}"
                    line = (code.co_filename, code.co_firstlineno)
                    self.places.add(function, Access.COMPUTED, key, value, display_name, line)
                    self.places.record_all(value, display_name, line)

    def _record_classes(self) -> None:
        """Record plain values and containers in the user's classes that executed code may read."""
        line_of_name: dict[str, Line | None] = {}
        for executed_code in self._codes.values():
            if executed_code.is_traced and not executed_code.is_library:
                for name, following_code in executed_code.find_uses(READ_ATTRIBUTE):
                    line_of_name.setdefault(name, following_code.line)
        for kind in list(self.places.user_classes()):
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

    def _lasting_cells(self, executed_code: ExecutedCode) -> dict[str, list[CellType]]:
        """Return the cells of a code object's closure variables that outlive the pass, by name."""
        code = executed_code.code
        if not code.co_freevars:
            return {}
        function_ids = self.places.functions.get(id(code), set())
        parents = [parent for parent in self._codes.values() if code in parent.code.co_consts]
        local_names = {name for parent in parents for name in parent.code.co_cellvars}
        cells: dict[str, dict[int, CellType]] = {}
        for function in (self.places.holders[key] for key in function_ids):
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
                if name not in local_names:
                    cells.setdefault(name, {})[id(cell)] = cell
        for parent in parents if not function_ids else ():
            for name, parent_cells in self._lasting_cells(parent).items():
                cells.setdefault(name, {}).update({id(cell): cell for cell in parent_cells})
        return {name: list(cells_by_id.values()) for name, cells_by_id in cells.items()}

    def make_guards(self, name: str, alternatives: Mapping[tuple[int, Any], Any]) -> PythonGuards:
        """Return guards of places that forward did not set first; refuse what cannot be guarded."""
        self._register_functions()
        self._record_code()
        self.places.remove_temporary_objects()
        places = list(self.places.places.values())
        for place in places:
            error = guard_error(place)
            if error:
                raise CaptureError(f"{name}: {error}")
            place.value = place.current_value()
        unchanged_places = [place for place in places if is_unchanged(place)]
        return PythonGuards(unchanged_places, alternatives)


_DEFINITION_TYPES: Final = (ModuleType, type, FunctionType, BuiltinFunctionType)
"""Types of imported and defined names; such globals of a library are not guarded."""


@contextmanager
def _trace_calls(tracer: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    """Context manager: replace the tracer of `sys.settrace`, and collect no garbage."""
    old_tracer = sys.gettrace()
    with no_gc():
        sys.settrace(tracer)
        try:
            yield
        finally:
            sys.settrace(old_tracer)


def _find_functions(code_ids: set[int]) -> Iterator[FunctionType]:
    """Yield all functions in the process whose code object has an ``id`` in `code_ids`."""
    for value in gc.get_objects():
        if type(value) is FunctionType and id(value.__code__) in code_ids:
            yield value


def _module_name(global_values: Mapping[str, Any]) -> str:
    return str(global_values.get("__name__", "")) or "a file"


def _is_package_attribute(value: Any, name: str) -> bool:
    """Return whether the first class of `value` that defines attribute `name` is not the user's."""
    for kind in type(value).__mro__:
        if name in vars(kind):
            is_plain = isinstance(vars(kind)[name], (*PLAIN, *CONTAINERS, tuple))
            return name != "forward" and not is_plain and not is_user_defined(kind)
    return False
