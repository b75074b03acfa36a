"""Python state that a forward pass changes: found, located and refused.

A compiled step runs no Python code of the model. State that a first pass sets once, such as a flag
or a table, is harmless. State that each pass changes would stay unchanged.
"""

from __future__ import annotations

import sys
from collections import UserDict, deque
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from torch.utils._python_dispatch import TorchDispatchMode

from poetmodel.torch.capturing.joint_graph import shown_path
from poetmodel.torch.capturing.modules import OWN_ATTRIBUTES, content_copy, replace_content
from poetmodel.torch.capturing.python_places import cell_value, is_user_defined
from poetmodel.torch.capturing.python_values import (
    ABSENT,
    CONTAINERS,
    PLAIN,
    attributes_of,
    comparison_key,
    content_of,
    describe,
    has_tensors,
)
from poetmodel.torch.errors import CaptureError, CodeOrigin, code_origin, format_source_line
from poetmodel.torch.graph.tensors import storage_key, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    import torch

    from poetmodel.torch.capturing.modules import ModuleSnapshot
    from poetmodel.torch.capturing.python_code import Line
    from poetmodel.torch.capturing.python_reads import PythonReads

    Spot = tuple[int, Any]


@dataclass(slots=True)
class _Holder:
    """A container, or the attributes of an object or of a Python file, that code may change."""

    name: str
    """Name for display; items are ``name.key`` or ``name[key]``."""
    holder: Any
    before: Any
    """Copy of the content before the first forward pass."""
    has_attributes: bool = False
    """Whether the content is the attributes of a container instead of its items."""

    @property
    def content(self) -> Any:
        """The dict, list or set with the content; None if there is none."""
        holder = self.holder
        if self.has_attributes:
            attributes = attributes_of(holder)
            return vars(holder) if attributes is None else attributes  # of a weak proxy
        if isinstance(holder, CONTAINERS):
            holder = content_of(holder)
        elif not isinstance(holder, dict | list | set | deque):
            holder = vars(holder) if isinstance(holder, ModuleType) else attributes_of(holder)
        return holder if isinstance(holder, dict | list | set | deque) else None

    @property
    def is_namespace(self) -> bool:
        """Whether the keys are names of attributes."""
        return self.has_attributes or not isinstance(self.holder, dict | UserDict)

    def current(self) -> Any:
        """Return a copy of the current content."""
        content = self.content
        return self.before if content is None else content_copy(content)

    def set(self, key: Any, value: Any) -> None:
        """Set an item, or the whole content of a list or set; `ABSENT` deletes an item."""
        content = self.content
        if not isinstance(content, dict):
            replace_content(content, value)
        elif value is ABSENT:
            content.pop(key, None)
        else:
            content[key] = value

    def spot(self, key: Any) -> Spot:
        """Return (``id`` of the dict, list or cell, key), which identifies an item."""
        return (id(self.content), key)

    def shown(self, key: Any) -> str:
        """Return the name of an item for display."""
        if not isinstance(self.content, dict):
            return self.name
        return f"{self.name}.{key}".lstrip(".") if self.is_namespace else f"{self.name}[{key!r}]"

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yield (key, old value, new value) of each item that is another object now.

        A changed list or set is yielded as a whole, with the key None.
        """
        old_content, new_content = self.before, self.current()
        if not isinstance(old_content, dict):
            if list(map(id, new_content)) != list(map(id, old_content)):
                yield None, old_content, new_content
            return
        for key in old_content.keys() | new_content.keys():
            if self.is_namespace and (key in OWN_ATTRIBUTES or str(key)[:2] == "__"):
                continue
            old_value, new_value = old_content.get(key, ABSENT), new_content.get(key, ABSENT)
            if old_value is not new_value:
                yield key, old_value, new_value


class _Name(_Holder):
    """A global name of a Python file that code may set."""

    @property
    def content(self) -> Any:
        """The globals of the file."""
        return self.holder

    @property
    def is_namespace(self) -> bool:
        """True: keys are names."""
        return True

    def current(self) -> Any:
        """Return the current value, by the name."""
        return {key: self.holder.get(key, ABSENT) for key in self.before}


class _Class(_Holder):
    """The attributes of a class that are plain values."""

    @property
    def content(self) -> Any:
        """The plain attributes, by name."""
        return plain_attributes(self.holder)

    def current(self) -> Any:
        """Return the plain attributes, and the current values of previously plain ones."""
        attributes = vars(self.holder)
        return self.content | {key: attributes[key] for key in self.before if key in attributes}

    def spot(self, key: Any) -> Spot:
        """Return (``id`` of the class, name)."""
        return (id(self.holder), key)

    def set(self, key: Any, value: Any) -> None:
        """Set an attribute; `ABSENT` deletes it."""
        if value is not ABSENT:
            setattr(self.holder, key, value)
        elif key in vars(self.holder):
            delattr(self.holder, key)


class _Cell(_Holder):
    """A variable of a closure."""

    @property
    def content(self) -> Any:
        """The value, with the key None."""
        return {None: cell_value(self.holder)}

    def spot(self, key: Any) -> Spot:
        """Return (``id`` of the cell, key)."""
        return (id(self.holder), key)

    def set(self, key: Any, value: Any) -> None:
        """Set the variable, except to `ABSENT`."""
        del key
        if value is not ABSENT:
            self.holder.cell_contents = value

    def shown(self, key: Any) -> str:
        """Return the name of the variable."""
        del key
        return self.name


def plain_attributes(kind: type) -> dict[str, Any]:
    """Return the attributes of a class itself that are plain values, by name."""
    return {
        key: value
        for key, value in vars(kind).items()
        if isinstance(value, (*PLAIN, tuple)) and not key.startswith("__")
    }


class StateChanges:
    """Finds plain values that the forward passes of a capture change.

    Parameters
    ----------
    name : str
        Name of the step in messages.
    snapshot : ModuleSnapshot
        State of the modules.
    reads : PythonReads
        Records the other objects that the code reads; its callbacks are set.
    """

    def __init__(self, name: str, snapshot: ModuleSnapshot, reads: PythonReads) -> None:
        """Watch the modules, their containers and their classes; set the callbacks of `reads`."""
        self._name = name
        self._reads = reads
        self._watched: dict[Spot, _Holder] = {}
        self._inner: set[int] = set()
        """``id`` of each dict, list and set that the snapshot restores."""
        for path, key, holder, old_content, is_owner in snapshot.contents():
            display_name = shown_path(f"{path}.{key}" if key else path)
            holder_record = _Holder(display_name, holder, old_content, is_owner)
            self._inner.add(id(holder_record.content))
            if key not in OWN_ATTRIBUTES:
                self._watched[id(holder_record.content), None] = holder_record
        self.alternatives: dict[Spot, Any] = {}
        """Comparison keys of values that a forward pass leaves, by spot: ``id`` and key."""
        reads.observe(on_holder=self._watch, on_forgotten=self._unwatch, on_class=self._watch_class)
        for kind in {base for module in snapshot.modules() for base in type(module).__mro__}:
            self._watch_class(kind)

    def _watch(self, name: str, value: Any) -> bool:
        """Watch a container or object.

        Returns False for objects of packages, and for objects that are already watched.
        """
        kind = type(value)
        is_plain = isinstance(value, CONTAINERS) or kind.__module__ == "builtins"
        if not is_plain and not is_user_defined(kind):
            return False  # packages may set attributes of their objects around a call
        watched = _Holder(name, value, None)
        content = watched.content
        if content is None or id(content) in self._inner or (id(value), None) in self._watched:
            return False
        watched.before = content_copy(content)
        self._watched[id(value), None] = watched
        return True

    def _unwatch(self, identities: set[int]) -> None:
        for identity in identities:
            self._watched.pop((identity, None), None)

    def _watch_class(self, kind: type) -> None:
        if is_user_defined(kind) and (id(kind), None) not in self._watched:
            watched = _Class(kind.__qualname__, kind, plain_attributes(kind))
            self._watched[id(kind), None] = watched

    def _watch_variables(self) -> None:
        """Watch the globals and closure variables that executed code may set."""
        for name, holder, key, first_value in self._reads.stored_names():
            if (id(holder), key) not in self._watched:
                self._watched[id(holder), key] = _Name(name, holder, {key: first_value})
        for name, cell, first_value in self._reads.stored_cells():
            if (id(cell), None) not in self._watched:
                self._watched[id(cell), None] = _Cell(name, cell, {None: first_value})

    def _changes(self) -> Iterator[tuple[_Holder, Any, Any, Any]]:
        """Yield (holder, key, old value, new value) of each changed item with another key."""
        for holder_record in list(self._watched.values()):
            is_inner = id(holder_record.content) in self._inner
            for key, old_value, new_value in holder_record.changes():
                if not is_inner and has_tensors(comparison_key(old_value)):
                    continue  # callers of the code that read it first have set the tensor
                if comparison_key(old_value) != comparison_key(new_value):
                    yield holder_record, key, old_value, new_value

    def _changed_keys(self) -> dict[Spot, Any]:
        """Return the comparison key of each changed item, by spot."""
        return {
            holder_record.spot(key): comparison_key(new_value)
            for holder_record, key, _, new_value in self._changes()
        }

    def restore(self) -> None:
        """Restore changed values outside of modules."""
        for holder_record, key, old_value, _ in list(self._changes()):
            if holder_record.spot(key)[0] not in self._inner:
                holder_record.set(key, old_value)

    # -- changes of each pass ----------------------------------------------------------------------

    def check(self, forward: Callable[[], object], restore: Callable[[], object]) -> None:
        """Raise `CaptureError` if each forward pass changes Python state; call this after a pass.

        Parameters
        ----------
        forward : callable
            Executes another pass. Called if the first pass has changed any value.
        restore : callable
            Restores the state before the first pass.
        """
        self._watch_variables()
        first_keys = self._changed_keys()
        self.alternatives = first_keys
        if not first_keys:
            return
        by_spot = {w.spot(key): (w, key, old_value) for w, key, old_value, _ in self._changes()}
        forward()
        second_keys = self._changed_keys()
        for watched, key, old_value, _ in self._changes():
            by_spot.setdefault(watched.spot(key), (watched, key, old_value))
        changing_spots = [spot for spot in by_spot if first_keys.get(spot) != second_keys.get(spot)]
        if changing_spots:
            restore()
            holders = {spot[0] for spot in changing_spots}
            items = [item[:2] for spot, item in by_spot.items() if spot[0] in holders]
            self._refuse(items, forward, by_users=False)
            return
        # Each pass sets these items to the same value, unless a flag prevents it: reset and repeat.
        reset_items = []
        for spot, (watched, key, old_value) in by_spot.items():
            if not has_tensors(first_keys[spot]) and not self._reads.places.was_read(*spot):
                watched.set(key, old_value)
                reset_items.append((watched, key))
        if reset_items:
            self._refuse(reset_items, forward, by_users=True)

    def _refuse(
        self,
        items: list[tuple[_Holder, Any]],
        forward: Callable[[], object],
        *,
        by_users: bool,
    ) -> None:
        """Run a forward pass again; raise `CaptureError` with the lines that change some items.

        `by_users` restricts the lines to a user's code, because packages may cache values; it
        returns if no such line is found. Otherwise it always raises.
        """
        tracer = _ChangeTracer(items)
        with tracer:
            forward()
        errors = []
        for holder_record, key in items:
            spot = holder_record.spot(key)
            if spot not in tracer.lines:
                continue
            line, (old_value, new_value) = tracer.lines[spot], tracer.values[spot]
            if by_users and code_origin(line[0]) is not CodeOrigin.USER:
                continue
            change = f"sets {holder_record.shown(key)} to {describe(new_value)}"
            if old_value is not ABSENT:
                change = (
                    f"changes {holder_record.shown(key)} from {describe(old_value)} to "
                    f"{describe(new_value)}"
                )
            errors.append(f"{change} at {format_source_line(*line)}")
        if not errors and not by_users:
            errors = [f"changes {holder_record.shown(key)}" for holder_record, key in items]
        if errors:
            count_text = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            raise CaptureError(
                f"{self._name}: forward {errors[0]}{count_text}, and a compiled step runs no "
                "Python code: the value would stay unchanged. Store it in a tensor "
                "(register_buffer) and change that in place, or change it outside of forward"
            )


class _ChangeTracer:
    """Finds the line of a user or a package after which an item has another value."""

    def __init__(self, items: list[tuple[_Holder, Any]]) -> None:
        self._items = {w.spot(key): (w, key) for w, key in items}
        self._last = {spot: self._value(*item) for spot, item in self._items.items()}
        self._line: Line | None = None
        self.lines: dict[Spot, Line] = {}
        self.values: dict[Spot, tuple[Any, Any]] = {}
        self._previous: Any = None

    @staticmethod
    def _value(watched: _Holder, key: Any) -> Any:
        current = watched.current()
        return current.get(key, ABSENT) if isinstance(current, dict) else list(current)

    def __enter__(self) -> None:
        self._previous = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._previous)
        self._compare()

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """Compare the items before each line of followed code, for `sys.settrace`."""
        path = frame.f_code.co_filename
        if code_origin(path) not in _FOLLOWED:
            return None
        self._compare()
        if event in ("call", "line", "return"):
            self._line = (path, frame.f_lineno)
        return self._trace

    def _compare(self) -> None:
        """Record the last line and both values for each item that has changed."""
        for spot, item in self._items.items():
            old_value, new_value = self._last[spot], self._value(*item)
            if spot in self.lines or comparison_key(old_value) == comparison_key(new_value):
                continue
            self._last[spot] = new_value
            if self._line is not None:
                self.lines[spot] = self._line
                self.values[spot] = old_value, new_value


_FOLLOWED: Final = (CodeOrigin.USER, CodeOrigin.LIBRARY)


class WrittenTensors(TorchDispatchMode):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """Saves the values of existing tensors before a forward pass writes them.

    Parameters
    ----------
    buffers : iterable of torch.Tensor
        Tensors that are saved in any case.
    """

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._made: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        for buffer in buffers:  # a batch norm's schema does not state that it writes statistics
            self._save(buffer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Save the existing tensors that an operator writes, then call the operator."""
        keywords = kwargs or {}
        schema = func._schema  # noqa: SLF001 - the only source of writes
        for position, argument in enumerate(schema.arguments if schema.is_mutable else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else keywords.get(argument.name)
                for tensor in tensors_in(value):
                    self._save(tensor)
        outputs = func(*args, **keywords)
        input_keys = {storage_key(tensor) for tensor in tensors_in((args, keywords))}
        self._made.update({storage_key(tensor) for tensor in tensors_in(outputs)} - input_keys)
        return outputs

    def _save(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._made and key not in self._before and not tensor.is_meta:
            storage = tensor.untyped_storage()
            self._before[key] = (storage, storage.clone())

    def restore(self) -> None:
        """Restore the saved values."""
        for storage, values in self._before.values():
            storage.copy_(values)
        self._made.clear()
