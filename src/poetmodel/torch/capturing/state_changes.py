"""Python state that a forward pass changes: found, traced to a line, and refused.

A compiled step runs no Python code of the model. What a first pass sets once and for all, such as
a flag or a table, is harmless; what each pass changes would stay as it was.
"""

from __future__ import annotations

import sys
from collections import UserDict, deque
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from torch.utils._python_dispatch import TorchDispatchMode

from poetmodel.torch.capturing.joint_graph import shown_path
from poetmodel.torch.capturing.modules import OWN_ATTRIBUTES, content_copy, fill
from poetmodel.torch.capturing.python_places import cell_value, is_user_defined
from poetmodel.torch.capturing.python_values import (
    ABSENT,
    CONTAINERS,
    PLAIN,
    attributes_of,
    content_of,
    describe,
    form_of,
    has_tensors,
)
from poetmodel.torch.errors import CaptureError, CodeOrigin, code_origin, format_source_line
from poetmodel.torch.graph.tensors import storage_key, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    import torch

    from poetmodel.torch.capturing.modules import Attributes
    from poetmodel.torch.capturing.python_code import Line
    from poetmodel.torch.capturing.python_reads import PythonReads

    Spot = tuple[int, Any]


@dataclass(slots=True)
class _Holder:
    """A container, or the attributes of an object or of a file, that the code may change."""

    name: str
    """For people; items are ``name.key`` or ``name[key]``."""
    holder: Any
    before: Any
    """Content before the first forward pass."""
    has_attributes: bool = False
    """Whether the attributes of a container count, and not its items."""

    @property
    def content(self) -> Any:
        """The dict, list or set that changes; None if there is none."""
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
        """Whether the keys of a dict are names of attributes."""
        return self.has_attributes or not isinstance(self.holder, dict | UserDict)

    def present(self) -> Any:
        """Return the content; a copy."""
        content = self.content
        return self.before if content is None else content_copy(content)

    def set(self, key: Any, value: Any) -> None:
        """Set an item, or all of the content of a list or a set."""
        content = self.content
        if not isinstance(content, dict):
            fill(content, value)
        elif value is ABSENT:
            content.pop(key, None)
        else:
            content[key] = value

    def spot(self, key: Any) -> Spot:
        """Return the identity of the dict, list or cell, and the key in it."""
        return (id(self.content), key)

    def shown(self, key: Any) -> str:
        """Return the name of an item."""
        if not isinstance(self.content, dict):
            return self.name
        return f"{self.name}.{key}".lstrip(".") if self.is_namespace else f"{self.name}[{key!r}]"

    def changes(self) -> Iterator[tuple[Any, Any, Any]]:
        """Yield key, value before and value now of what is another object.

        Of a list or a set all is yielded if anything in it changed, with the key None.
        """
        before, now = self.before, self.present()
        if not isinstance(before, dict):
            if list(map(id, now)) != list(map(id, before)):
                yield None, before, now
            return
        for key in before.keys() | now.keys():
            if self.is_namespace and (key in OWN_ATTRIBUTES or str(key)[:2] == "__"):
                continue
            old, new = before.get(key, ABSENT), now.get(key, ABSENT)
            if old is not new:
                yield key, old, new


class _Name(_Holder):
    """A name of a file that code may set."""

    @property
    def content(self) -> Any:
        """The names of the file."""
        return self.holder

    @property
    def is_namespace(self) -> bool:
        """Whether keys are names."""
        return True

    def present(self) -> Any:
        """Return the value, by the name."""
        return {key: self.holder.get(key, ABSENT) for key in self.before}


class _Class(_Holder):
    """The plain attributes of a class."""

    @property
    def content(self) -> Any:
        """The plain attributes."""
        return plain_attributes(self.holder)

    def present(self) -> Any:
        """Return the plain attributes, and those that were plain before, such as a None."""
        own = vars(self.holder)
        return self.content | {key: own[key] for key in self.before if key in own}

    def spot(self, key: Any) -> Spot:
        """Return the identity of the class, and the name."""
        return (id(self.holder), key)

    def set(self, key: Any, value: Any) -> None:
        """Set an attribute."""
        if value is not ABSENT:
            setattr(self.holder, key, value)
        elif key in vars(self.holder):
            delattr(self.holder, key)


class _Cell(_Holder):
    """A variable of a closure."""

    @property
    def content(self) -> Any:
        """The value, by the key None."""
        return {None: cell_value(self.holder)}

    def spot(self, key: Any) -> Spot:
        """Return the identity of the variable."""
        return (id(self.holder), key)

    def set(self, key: Any, value: Any) -> None:
        """Set the variable."""
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
    """The plain values that forward passes of a capture change.

    Parameters
    ----------
    name : str
        Of the step, in messages.
    attributes : Attributes
        What the modules hold.
    reads : PythonReads
        What the code comes to beside that; its callbacks are set.
    """

    def __init__(self, name: str, attributes: Attributes, reads: PythonReads) -> None:
        self._name = name
        self._reads = reads
        self._watched: dict[Spot, _Holder] = {}
        self._inner: set[int] = set()
        """Identities of the dicts, lists and sets that `Attributes` puts back."""
        for path, key, holder, before, is_owner in attributes.contents():
            shown = shown_path(f"{path}.{key}" if key else path)
            watched = _Holder(shown, holder, before, is_owner)
            self._inner.add(id(watched.content))
            if key not in OWN_ATTRIBUTES:
                self._watched[id(watched.content), None] = watched
        self.alternatives: dict[Spot, Any] = {}
        """Forms of what a forward pass itself leaves, by identity of the dict, and key."""
        reads.observe(on_holder=self._watch, on_forgotten=self._forget, on_class=self._watch_class)
        for kind in {base for module in attributes.modules() for base in type(module).__mro__}:
            self._watch_class(kind)

    def _watch(self, name: str, value: Any) -> bool:
        """Watch a container or an object from now on; return whether it was not."""
        kind = type(value)
        is_plain = isinstance(value, CONTAINERS) or kind.__module__ == "builtins"
        if not is_plain and not is_user_defined(kind):
            return False  # a package may set an attribute of its objects around a call
        watched = _Holder(name, value, None)
        content = watched.content
        if content is None or id(content) in self._inner or (id(value), None) in self._watched:
            return False
        watched.before = content_copy(content)
        self._watched[id(value), None] = watched
        return True

    def _forget(self, identities: set[int]) -> None:
        for identity in identities:
            self._watched.pop((identity, None), None)

    def _watch_class(self, kind: type) -> None:
        if is_user_defined(kind) and (id(kind), None) not in self._watched:
            watched = _Class(kind.__qualname__, kind, plain_attributes(kind))
            self._watched[id(kind), None] = watched

    def _watch_variables(self) -> None:
        """Watch the names of files and the variables of closures that code that ran may set."""
        for name, holder, key, first in self._reads.stored_names():
            if (id(holder), key) not in self._watched:
                self._watched[id(holder), key] = _Name(name, holder, {key: first})
        for name, cell, first in self._reads.stored_cells():
            if (id(cell), None) not in self._watched:
                self._watched[id(cell), None] = _Cell(name, cell, {None: first})

    def _changes(self) -> Iterator[tuple[_Holder, Any, Any, Any]]:
        for watched in list(self._watched.values()):
            is_inner = id(watched.content) in self._inner
            for key, old, new in watched.changes():
                if not is_inner and has_tensors(form_of(old)):
                    continue  # it was set around the code that came to it first
                if form_of(old) != form_of(new):
                    yield watched, key, old, new

    def _forms(self) -> dict[Spot, Any]:
        """Return the forms of all that is not as it was before the capture."""
        return {w.spot(key): form_of(new) for w, key, _, new in self._changes()}

    def put_back(self) -> None:
        """Put back plain values that no module holds."""
        for watched, key, old, _ in list(self._changes()):
            if watched.spot(key)[0] not in self._inner:
                watched.set(key, old)

    # -- what each pass changes --------------------------------------------------------------------

    def check(self, forward: Callable[[], object], put_back: Callable[[], object]) -> None:
        """Raise `CaptureError` if each forward pass changes Python state: one has just run.

        Parameters
        ----------
        forward : callable
            Runs another one. It runs if the first one has changed anything.
        put_back : callable
            Puts back what it has changed.
        """
        self._watch_variables()
        first = self._forms()
        self.alternatives = first
        if not first:
            return
        by_spot = {w.spot(key): (w, key, old) for w, key, old, _ in self._changes()}
        forward()
        second = self._forms()
        for watched, key, old, _ in self._changes():
            by_spot.setdefault(watched.spot(key), (watched, key, old))
        counted = [spot for spot in by_spot if first.get(spot) != second.get(spot)]
        if counted:
            put_back()
            holders = {spot[0] for spot in counted}
            places = [place[:2] for spot, place in by_spot.items() if spot[0] in holders]
            self._refuse(places, forward, by_users=False)
            return
        # What is set in each pass to the same value, and not only if a flag says so.
        again = []
        for spot, (watched, key, old) in by_spot.items():
            if not has_tensors(first[spot]) and not self._reads.places.was_read(*spot):
                watched.set(key, old)
                again.append((watched, key))
        if again:
            self._refuse(again, forward, by_users=True)

    def _refuse(
        self,
        places: list[tuple[_Holder, Any]],
        forward: Callable[[], object],
        *,
        by_users: bool,
    ) -> None:
        """Run a forward pass once more, and raise with the lines that change some places.

        `by_users` says that only lines of a user's code count; those of packages keep what they
        have computed.
        """
        tracer = _ChangeTracer(places)
        with tracer:
            forward()
        faults = []
        for watched, key in places:
            spot = watched.spot(key)
            if spot not in tracer.lines:
                continue
            line, (old, new) = tracer.lines[spot], tracer.values[spot]
            if by_users and code_origin(line[0]) is not CodeOrigin.USER:
                continue
            how = f"sets {watched.shown(key)} to {describe(new)}"
            if old is not ABSENT:
                how = f"changes {watched.shown(key)} from {describe(old)} to {describe(new)}"
            faults.append(f"{how} at {format_source_line(*line)}")
        if not faults and not by_users:
            faults = [f"changes {watched.shown(key)}" for watched, key in places]
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise CaptureError(
                f"{self._name}: forward {faults[0]}{more}, and a compiled step runs no "
                "Python code: it would stay as it is. Keep it in a tensor (register_buffer) and "
                "change that in place, or change it outside of forward"
            )


class _ChangeTracer:
    """Finds the line of a user or a package after which a place is another."""

    def __init__(self, places: list[tuple[_Holder, Any]]) -> None:
        self._places = {w.spot(key): (w, key) for w, key in places}
        self._last = {spot: self._value(*place) for spot, place in self._places.items()}
        self._line: Line | None = None
        self.lines: dict[Spot, Line] = {}
        self.values: dict[Spot, tuple[Any, Any]] = {}
        self._previous: Any = None

    @staticmethod
    def _value(watched: _Holder, key: Any) -> Any:
        present = watched.present()
        return present.get(key, ABSENT) if isinstance(present, dict) else list(present)

    def __enter__(self) -> None:
        self._previous = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._previous)
        self._compare()

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        if code_origin(path) not in _FOLLOWED:
            return None
        self._compare()
        if event in ("call", "line", "return"):
            self._line = (path, frame.f_lineno)
        return self._trace

    def _compare(self) -> None:
        for spot, place in self._places.items():
            old, new = self._last[spot], self._value(*place)
            if spot in self.lines or form_of(old) == form_of(new):
                continue
            self._last[spot] = new
            if self._line is not None:
                self.lines[spot] = self._line
                self.values[spot] = old, new


_FOLLOWED: Final = (CodeOrigin.USER, CodeOrigin.LIBRARY)


class WrittenTensors(TorchDispatchMode):  # type: ignore[misc, no-untyped-call, unused-ignore]
    """Keeps the values of tensors that a forward pass writes and has not made itself.

    Parameters
    ----------
    buffers : iterable of torch.Tensor
        Those that are kept in any case.
    """

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._made: set[int] = set()
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        for buffer in buffers:  # a batch norm does not say that it writes its statistics
            self._keep(buffer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        schema = func._schema  # noqa: SLF001 - what is written is known by it alone
        for position, argument in enumerate(schema.arguments if schema.is_mutable else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else keywords.get(argument.name)
                for tensor in tensors_in(value):
                    self._keep(tensor)
        found = func(*args, **keywords)
        given = {storage_key(tensor) for tensor in tensors_in((args, keywords))}
        self._made.update({storage_key(tensor) for tensor in tensors_in(found)} - given)
        return found

    def _keep(self, tensor: torch.Tensor) -> None:
        key = storage_key(tensor)
        if key not in self._made and key not in self._before and not tensor.is_meta:
            storage = tensor.untyped_storage()
            self._before[key] = (storage, storage.clone())

    def put_back(self) -> None:
        """Put the values back."""
        for storage, values in self._before.values():
            storage.copy_(values)
        self._made.clear()
