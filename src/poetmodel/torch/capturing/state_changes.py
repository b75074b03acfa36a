"""Detection of Python state that forward passes change, and refusal of such a step.

A compiled step runs no Python code of the model. An attribute that only the first pass sets, such
as a flag or a table, is allowed. State that each pass changes would stay unchanged in a compiled
step, so the step is refused with the line of code that changes the state.
"""

from __future__ import annotations

import sys
from collections import UserDict, deque
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from poetmodel.torch.capturing.joint_graph import format_path
from poetmodel.torch.capturing.modules import OWN_ATTRIBUTES, copy_content, replace_content
from poetmodel.torch.capturing.python_places import is_user_defined
from poetmodel.torch.capturing.python_values import (
    ABSENT,
    CONTAINERS,
    PLAIN,
    attributes_of,
    cell_value,
    comparison_key,
    content_of,
    describe,
    key_has_tensors,
)
from poetmodel.torch.errors import CaptureError, CodeOrigin, code_origin, format_source_line
from poetmodel.torch.graph.tensors import storage_key, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from poetmodel.torch.capturing.modules import ModuleSnapshot
    from poetmodel.torch.capturing.python_code import Line
    from poetmodel.torch.capturing.python_reads import PythonReads

    ItemId = tuple[int, Any]
    """(``id`` of the content, class or cell, key), which identifies an item. The key is None for
    all content of a list, set or deque, and for a closure variable."""


@dataclass(slots=True)
class _WatchedHolder:
    """A container, or the attributes of an object or Python module, that code may change."""

    name: str
    """Name for display; items are ``name.key`` or ``name[key]``."""
    holder: Any
    """The container, object, Python module, class, globals or cell."""
    old_content: Any
    """Copy of the content before code of the first forward pass could change it."""
    ignores_items: bool = False
    """Whether the content is the attributes of the holder, also if it is a container with items."""

    @property
    def content(self) -> Any:
        """The dict, list, set or deque that holds the items, or the dict of attributes; no copy."""
        holder = self.holder
        if self.ignores_items:
            attributes = attributes_of(holder)
            # A weak proxy has attributes, but `attributes_of` returns None for it.
            return vars(holder) if attributes is None else attributes
        if isinstance(holder, CONTAINERS):
            holder = content_of(holder)
        elif not isinstance(holder, dict | list | set | deque):
            holder = vars(holder) if isinstance(holder, ModuleType) else attributes_of(holder)
        return holder if isinstance(holder, dict | list | set | deque) else None

    @property
    def is_namespace(self) -> bool:
        """Whether the keys are names of attributes, not keys of a dict or `UserDict`."""
        return self.ignores_items or not isinstance(self.holder, dict | UserDict)

    def copy_current(self) -> Any:
        """Return a copy of the current content; the old content if there is none."""
        content = self.content
        return self.old_content if content is None else copy_content(content)

    def set_item(self, key: Any, value: Any) -> None:
        """Set an item, or an attribute in ``__dict__``; `ABSENT` deletes it.

        For a list, set or deque, `key` is None, and `value` replaces all content.
        """
        content = self.content
        if not isinstance(content, dict):
            replace_content(content, value)
        elif value is ABSENT:
            content.pop(key, None)
        else:
            content[key] = value

    def item_id(self, key: Any) -> ItemId:
        """Return (``id`` of the content, key)."""
        return (id(self.content), key)

    def format_item(self, key: Any) -> str:
        """Return the name of an item for display."""
        if not isinstance(self.content, dict):
            return self.name
        return f"{self.name}.{key}".lstrip(".") if self.is_namespace else f"{self.name}[{key!r}]"

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yield (key, old value, new value) of each item that is no longer the same object."""
        old_content, new_content = self.old_content, self.copy_current()
        is_module = issubclass(type(self.holder), torch.nn.Module)
        if not isinstance(old_content, dict):
            if list(map(id, new_content)) != list(map(id, old_content)):
                yield None, old_content, new_content
            return
        for key in old_content.keys() | new_content.keys():
            if self.is_namespace and str(key)[:2] == "__":
                continue
            if is_module and key in OWN_ATTRIBUTES:
                continue
            old_value, new_value = old_content.get(key, ABSENT), new_content.get(key, ABSENT)
            if old_value is not new_value:
                yield key, old_value, new_value


class _WatchedGlobal(_WatchedHolder):
    """A global of a Python file that code may set; the holder is the dict of all globals."""

    @property
    def content(self) -> Any:
        """The globals of the file."""
        return self.holder

    @property
    def is_namespace(self) -> bool:
        """True: keys are names."""
        return True

    def copy_current(self) -> Any:
        """Return the current value, or `ABSENT`, as a dict, by the name of the global."""
        return {key: self.holder.get(key, ABSENT) for key in self.old_content}


class _WatchedClass(_WatchedHolder):
    """The attributes of a class that are plain values or tuples."""

    @property
    def content(self) -> Any:
        """The plain attributes, by name."""
        return plain_attributes(self.holder)

    def copy_current(self) -> Any:
        """Return the plain attributes, and the current values of attributes that were plain."""
        attributes = vars(self.holder)
        return self.content | {
            key: attributes[key] for key in self.old_content if key in attributes
        }

    def item_id(self, key: Any) -> ItemId:
        """Return (``id`` of the class, name)."""
        return (id(self.holder), key)

    def set_item(self, key: Any, value: Any) -> None:
        """Set an attribute; `ABSENT` deletes it."""
        if value is not ABSENT:
            setattr(self.holder, key, value)
        elif key in vars(self.holder):
            delattr(self.holder, key)


class _WatchedVariable(_WatchedHolder):
    """A closure variable; the holder is its cell, the key is None."""

    @property
    def content(self) -> Any:
        """The value, with the key None."""
        return {None: cell_value(self.holder)}

    def item_id(self, key: Any) -> ItemId:
        """Return (``id`` of the cell, key)."""
        return (id(self.holder), key)

    def set_item(self, key: Any, value: Any) -> None:
        """Set the variable; has no effect for `ABSENT`."""
        del key
        if value is not ABSENT:
            self.holder.cell_contents = value

    def format_item(self, key: Any) -> str:
        """Return the name of the variable."""
        del key
        return self.name


def plain_attributes(kind: type) -> dict[str, Any]:
    """Return the attributes of a class itself that are `PLAIN` values or tuples, by name."""
    return {
        key: value
        for key, value in vars(kind).items()
        if isinstance(value, (*PLAIN, tuple)) and not key.startswith("__")
    }


class StateChanges:
    """Finds Python values that forward passes change; sets the callbacks of `reads`."""

    def __init__(self, name: str, snapshot: ModuleSnapshot, reads: PythonReads) -> None:
        self._name = name
        self._reads = reads
        self._watched: dict[ItemId, _WatchedHolder] = {}
        """Watched holders, by (``id``, key). The ``id`` is that of a content in modules, or of
        another object, class, dict of globals or cell; the key is a global's name, else None."""
        self._snapshot_ids: set[int] = set()
        """``id`` of each dict, list, set and deque that the module snapshot restores."""
        for path, key, holder, old_content, is_owner in snapshot.contents():
            display_name = format_path(f"{path}.{key}" if key else path)
            watched_holder = _WatchedHolder(display_name, holder, old_content, is_owner)
            self._snapshot_ids.add(id(watched_holder.content))
            if key not in OWN_ATTRIBUTES:
                self._watched[id(watched_holder.content), None] = watched_holder
        self.first_pass_keys: dict[ItemId, Any] = {}
        """Comparison keys of the values that the first forward pass sets, by `ItemId`; empty before
        `check`. Guards accept these values too, besides the captured ones."""
        reads.set_callbacks(
            on_holder=self._watch, on_forgotten=self._unwatch, on_class=self._watch_class
        )
        for kind in {base for module in snapshot.modules() for base in type(module).__mro__}:
            self._watch_class(kind)

    def _watch(self, name: str, value: Any) -> bool:
        """Watch a container or object; return whether this begins to watch it."""
        kind = type(value)
        is_builtin = isinstance(value, CONTAINERS) or kind.__module__ == "builtins"
        if not is_builtin and not is_user_defined(kind):
            return False  # packages may set attributes of their objects around a call
        watched_holder = _WatchedHolder(name, value, None)
        content = watched_holder.content
        if (
            content is None
            or id(content) in self._snapshot_ids
            or (id(value), None) in self._watched
        ):
            return False
        watched_holder.old_content = copy_content(content)
        self._watched[id(value), None] = watched_holder
        return True

    def _unwatch(self, identities: set[int]) -> None:
        """Stop watching the objects with these ``id``, which the forward pass created itself."""
        for identity in identities:
            self._watched.pop((identity, None), None)

    def _watch_class(self, kind: type) -> None:
        if is_user_defined(kind) and (id(kind), None) not in self._watched:
            watched_holder = _WatchedClass(kind.__qualname__, kind, plain_attributes(kind))
            self._watched[id(kind), None] = watched_holder

    def _watch_variables(self) -> None:
        """Watch the globals and closure variables that code of the forward pass may set.

        Their old values are those before that code was first executed.
        """
        for name, holder, key, first_value in self._reads.stored_globals():
            if (id(holder), key) not in self._watched:
                self._watched[id(holder), key] = _WatchedGlobal(name, holder, {key: first_value})
        for name, cell, first_value in self._reads.stored_closure_variables():
            if (id(cell), None) not in self._watched:
                self._watched[id(cell), None] = _WatchedVariable(name, cell, {None: first_value})

    def _find_changes(self) -> Iterator[tuple[_WatchedHolder, Any, Any, Any]]:
        """Yield (watched holder, key, old value, new value) of each item with another value.

        Omits old values with tensors outside of modules: only callers of the model set those.
        """
        for watched_holder in list(self._watched.values()):
            is_in_snapshot = id(watched_holder.content) in self._snapshot_ids
            for key, old_value, new_value in watched_holder.changes():
                if not is_in_snapshot and key_has_tensors(comparison_key(old_value)):
                    continue  # callers of the model, not forward, set tensors outside of modules
                if comparison_key(old_value) != comparison_key(new_value):
                    yield watched_holder, key, old_value, new_value

    def _find_changed_keys(self) -> dict[ItemId, Any]:
        """Return the comparison key of each changed item's new value, by `ItemId`."""
        return {
            watched_holder.item_id(key): comparison_key(new_value)
            for watched_holder, key, _, new_value in self._find_changes()
        }

    def restore(self) -> None:
        """Restore the old values of `_find_changes`, except those that the snapshot restores."""
        for watched_holder, key, old_value, _ in list(self._find_changes()):
            if watched_holder.item_id(key)[0] not in self._snapshot_ids:
                watched_holder.set_item(key, old_value)

    # -- changes of each pass ----------------------------------------------------------------------

    def check(self, forward: Callable[[], object], restore: Callable[[], object]) -> None:
        """Raise `CaptureError` if each forward pass changes Python state; call this after a pass.

        Executes a second pass if the first one set values (`first_pass_keys`), and a third one to
        find the line, or to see whether reset values are set again. State is not restored at the
        end.
        """
        self._watch_variables()
        first_keys = self._find_changed_keys()
        self.first_pass_keys = first_keys
        if not first_keys:
            return
        changed_item_by_id = {
            watched_holder.item_id(key): (watched_holder, key, old_value)
            for watched_holder, key, old_value, _ in self._find_changes()
        }
        with self._reads.find_stored_variables() as stored_ids:
            forward()
        second_keys = self._find_changed_keys()
        for watched_holder, key, old_value, _ in self._find_changes():
            changed_item_by_id.setdefault(
                watched_holder.item_id(key), (watched_holder, key, old_value)
            )
        differing_ids = [
            item_id
            for item_id in changed_item_by_id
            if first_keys.get(item_id) != second_keys.get(item_id)
        ]
        if differing_ids:
            restore()
            holder_ids = {item_id[0] for item_id in differing_ids}
            items = [
                item[:2] for item_id, item in changed_item_by_id.items() if item_id[0] in holder_ids
            ]
            self._refuse_changes(items, forward, only_user_lines=False)
            return
        # Does each pass set these items to the same value? Reset them and run forward again.
        reset_items = []
        for item_id, (watched_holder, key, old_value) in changed_item_by_id.items():
            is_set_once = (
                isinstance(watched_holder, _WatchedGlobal | _WatchedVariable)
                and old_value is not ABSENT  # guards ignore a global that was missing
                and item_id not in stored_ids
            )
            if (
                not is_set_once
                and not key_has_tensors(first_keys[item_id])
                and not self._reads.places.was_read(*item_id)
            ):
                watched_holder.set_item(key, old_value)
                reset_items.append((watched_holder, key))
        if reset_items:
            self._refuse_changes(reset_items, forward, only_user_lines=True)

    def _refuse_changes(
        self,
        items: list[tuple[_WatchedHolder, Any]],
        forward: Callable[[], object],
        *,
        only_user_lines: bool,
    ) -> None:
        """Execute a forward pass to find the lines that change `items`; raise `CaptureError`.

        With `only_user_lines`, accepts changes by packages, and those without a known line.
        """
        tracer = _ChangeTracer(items)
        with tracer:
            forward()
        errors = []
        for watched_holder, key in items:
            item_id = watched_holder.item_id(key)
            if item_id not in tracer.lines:
                continue
            line, (old_value, new_value) = tracer.lines[item_id], tracer.values[item_id]
            if only_user_lines and code_origin(line[0]) is not CodeOrigin.USER:
                continue
            change = f"sets {watched_holder.format_item(key)} to {describe(new_value)}"
            if old_value is not ABSENT:
                change = (
                    f"changes {watched_holder.format_item(key)} from {describe(old_value)} to "
                    f"{describe(new_value)}"
                )
            errors.append(f"{change} at {format_source_line(*line)}")
        if not errors and not only_user_lines:
            errors = [f"changes {watched_holder.format_item(key)}" for watched_holder, key in items]
        if errors:
            count_text = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
            raise CaptureError(
                f"{self._name}: forward {errors[0]}{count_text}, and a compiled step runs no "
                "Python code: the value would stay unchanged. Store it in a tensor "
                "(register_buffer) and change that in place, or change it outside of forward"
            )


class _ChangeTracer:
    """Context manager that finds the lines of a user's or package's code that change items.

    Replaces the tracer of `sys.settrace` until its end.
    """

    def __init__(self, items: list[tuple[_WatchedHolder, Any]]) -> None:
        self._item_by_id = {
            watched_holder.item_id(key): (watched_holder, key) for watched_holder, key in items
        }
        self._last_values = {
            item_id: self._current_value(*item) for item_id, item in self._item_by_id.items()
        }
        self._last_line: Line | None = None
        self.lines: dict[ItemId, Line] = {}
        """The line that changed an item first, by `ItemId`."""
        self.values: dict[ItemId, tuple[Any, Any]] = {}
        """(old value, new value) of that change, by `ItemId`."""
        self._old_tracer: Any = None

    @staticmethod
    def _current_value(watched_holder: _WatchedHolder, key: Any) -> Any:
        content = watched_holder.copy_current()
        return content.get(key, ABSENT) if isinstance(content, dict) else list(content)

    def __enter__(self) -> None:
        self._old_tracer = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._old_tracer)
        self._compare()

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """Compare the items at each event of a user's or package's code; then store its line."""
        path = frame.f_code.co_filename
        if code_origin(path) not in _TRACED_ORIGINS:
            return None
        self._compare()
        if event in ("call", "line", "return"):
            self._last_line = (path, frame.f_lineno)
        return self._trace

    def _compare(self) -> None:
        """Record the last traced line, the old and the new value at the first change of each item.

        Values differ if their comparison keys do. Changes before the first traced line are ignored.
        """
        for item_id, item in self._item_by_id.items():
            old_value, new_value = self._last_values[item_id], self._current_value(*item)
            if item_id in self.lines or comparison_key(old_value) == comparison_key(new_value):
                continue
            self._last_values[item_id] = new_value
            if self._last_line is not None:
                self.lines[item_id] = self._last_line
                self.values[item_id] = old_value, new_value


_TRACED_ORIGINS: Final = (CodeOrigin.USER, CodeOrigin.LIBRARY)
"""Origins of the code whose lines are traced."""


class WrittenTensors(TorchDispatchMode):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """Dispatch mode that saves the values of existing tensors before a forward pass writes them.

    Parameters
    ----------
    buffers : iterable of torch.Tensor
        Tensors that are saved at once, whether or not an operator writes them.
    """

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._created_keys: set[int] = set()
        """Storage keys of tensors that the forward pass created."""
        self._saved_storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """(storage, copy of its old content), by storage key."""
        for buffer in buffers:
            self._save(buffer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Save the existing tensors that the schema of an operator writes; call the operator."""
        keywords = kwargs or {}
        schema = func._schema  # noqa: SLF001 - the only source of writes
        for position, argument in enumerate(schema.arguments if schema.is_mutable else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else keywords.get(argument.name)
                for tensor in tensors_in(value):
                    self._save(tensor)
        outputs = func(*args, **keywords)
        input_keys = {storage_key(tensor) for tensor in tensors_in((args, keywords))}
        self._created_keys.update(
            {storage_key(tensor) for tensor in tensors_in(outputs)} - input_keys
        )
        return outputs

    def _save(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._created_keys and key not in self._saved_storages and not tensor.is_meta:
            storage = tensor.untyped_storage()
            self._saved_storages[key] = (storage, storage.clone())

    def restore(self) -> None:
        """Restore the saved values, and clear the record of tensors that the forward pass created.

        The next pass may thus save these tensors, too. The saved values remain for further
        restorations.
        """
        for storage, values in self._saved_storages.values():
            storage.copy_(values)
        self._created_keys.clear()
