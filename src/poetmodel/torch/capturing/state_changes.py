"""Python state that a forward pass changes: found, traced to a line, and refused.

A compiled step runs no Python code of the model. What a first pass sets once and for all, such as
a flag or a table, is harmless; what each pass changes would stay as it was.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from poetmodel.torch.capturing.joint_graph import shown_path
from poetmodel.torch.capturing.modules import OWN_ATTRIBUTES, content_copy, fill
from poetmodel.torch.capturing.python_reads import cell_value
from poetmodel.torch.capturing.python_values import ABSENT, PLAIN, describe, form_of, has_tensors
from poetmodel.torch.errors import CaptureError, Origin, origin_of, shown_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from poetmodel.torch.capturing.modules import Attributes
    from poetmodel.torch.capturing.python_reads import Line, PythonReads

    Spot = tuple[int, Any]


@dataclass(slots=True)
class _Container:
    """A dict, list or set whose content the code may change."""

    name: str
    """For people; items are ``name.key`` or ``name[key]``."""
    holder: Any
    before: Any
    """Content before the first forward pass; for a dict those items that are watched."""
    is_namespace: bool = False
    """Whether the keys of a dict are names of attributes."""

    def present(self) -> Any:
        """Return the content; a copy."""
        return content_copy(self.holder)

    def set(self, key: Any, value: Any) -> None:
        """Set an item, or all of the content for the key None of a list or a set."""
        if key is None and not isinstance(self.holder, dict):
            fill(self.holder, value)
        elif value is ABSENT:
            self.holder.pop(key, None)
        else:
            self.holder[key] = value

    def shown(self, key: Any) -> str:
        """Return the name of an item."""
        if key is None and not isinstance(self.holder, dict):
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


class _Names(_Container):
    """Names of a file that code may set."""

    def present(self) -> Any:
        """Return their values."""
        return {key: self.holder.get(key, ABSENT) for key in self.before}


class _Class(_Container):
    """The plain attributes of a class."""

    def present(self) -> Any:
        """Return their values."""
        return plain_attributes(self.holder)

    def set(self, key: Any, value: Any) -> None:
        """Set an attribute."""
        if value is not ABSENT:
            setattr(self.holder, key, value)
        elif key in vars(self.holder):
            delattr(self.holder, key)


class _Cell(_Container):
    """A variable of a closure."""

    def present(self) -> Any:
        """Return its value, by its name."""
        return {key: cell_value(self.holder) for key in self.before}

    def set(self, _: Any, value: Any) -> None:
        """Set the variable."""
        if value is not ABSENT:
            self.holder.cell_contents = value

    def shown(self, _: Any) -> str:
        """Return the name of the variable."""
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
        self._watched: dict[Spot, _Container] = {}
        self._inner: set[int] = set()
        """Identities of what modules reach, and `Attributes` puts back."""
        for path, key, holder, before in attributes.contents():
            self._inner.add(id(holder))
            if key in OWN_ATTRIBUTES:
                continue
            shown = shown_path(f"{path}.{key}" if key else path)
            is_namespace = attributes.is_namespace(holder)
            self._watched[id(holder), None] = _Container(shown, holder, before, is_namespace)
        self.is_seen = False
        """Whether a forward pass of the capture has changed anything."""
        self.alternatives: dict[Spot, Any] = {}
        """Forms of what a forward pass itself leaves, by identity of the dict, and key."""
        reads.on_container = self._watch
        reads.on_class = self._watch_class
        for kind in {base for module in attributes.modules() for base in type(module).__mro__}:
            self._watch_class(kind)

    def _watch(self, name: str, holder: Any, *, is_namespace: bool) -> None:
        known = id(holder) in self._inner or (id(holder), None) in self._watched
        if not known and isinstance(holder, dict | list | set):
            watched = _Container(name, holder, content_copy(holder), is_namespace)
            self._watched[id(holder), None] = watched

    def _watch_class(self, kind: type) -> None:
        if self._reads.is_of_a_user(kind) and (id(kind), None) not in self._watched:
            watched = _Class(kind.__qualname__, kind, plain_attributes(kind), is_namespace=True)
            self._watched[id(kind), None] = watched

    def _watch_variables(self) -> None:
        """Watch the names of files and the variables of closures that code that ran may set."""
        for name, holder, key, first in self._reads.stored_names():
            if (id(holder), key) not in self._watched:
                watched = _Names(name, holder, {key: first}, is_namespace=True)
                self._watched[id(holder), key] = watched
        for name, cell, first in self._reads.stored_cells():
            if (id(cell), None) not in self._watched:
                self._watched[id(cell), None] = _Cell(name, cell, {None: first})

    def note(self) -> None:
        """Note at the end of a forward pass whether it has changed anything."""
        self._watch_variables()
        self.is_seen = self.is_seen or bool(self._forms())

    def _changes(self) -> Iterator[tuple[_Container, Any, Any, Any]]:
        for watched in list(self._watched.values()):
            for key, old, new in watched.changes():
                if form_of(old) != form_of(new):
                    yield watched, key, old, new

    def _forms(self) -> dict[Spot, Any]:
        """Return the forms of all that is not as it was before the capture."""
        return {(id(w.holder), key): form_of(new) for w, key, _, new in self._changes()}

    def put_back(self) -> None:
        """Put back plain values that no module holds."""
        for watched, key, old, _ in list(self._changes()):
            if id(watched.holder) not in self._inner:
                watched.set(key, old)

    # -- what each pass changes --------------------------------------------------------------------

    def check(self, forward: Callable[[], object]) -> None:
        """Run eager forward passes; raise `CaptureError` if each of them changes Python state.

        Parameters
        ----------
        forward : callable
            Runs a forward pass on tensors of its own, whose state the caller puts back.
        """
        forward()
        first = self._forms()
        self.alternatives = first
        by_spot = {(id(w.holder), key): (w, key, old, new) for w, key, old, new in self._changes()}
        forward()
        second = self._forms()
        for watched, key, old, new in self._changes():
            by_spot.setdefault((id(watched.holder), key), (watched, key, old, new))
        counted = [spot for spot in by_spot if first.get(spot) != second.get(spot)]
        if counted:
            self._refuse([by_spot[spot][:2] for spot in counted], forward, by_users=False)
            return
        # What is set in each pass to the same value, and not only if a flag says so.
        again = []
        for spot, (watched, key, old, new) in by_spot.items():
            if not has_tensors(first[spot]) and not self._reads.was_read(watched.holder, key):
                watched.set(key, old)
                again.append((watched, key))
        if again:
            self._refuse(again, forward, by_users=True)

    def _refuse(
        self,
        places: list[tuple[_Container, Any]],
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
            line = tracer.lines.get((id(watched.holder), key))
            if by_users and (line is None or origin_of(line[0]) is not Origin.USER):
                continue
            old, new = tracer.values.get((id(watched.holder), key), (ABSENT, ABSENT))
            how = f" from {describe(old)} to {describe(new)}" if line else ""
            where = f" at {shown_line(*line)}" if line else ""
            faults.append(f"{watched.shown(key)}{how}{where}")
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise CaptureError(
                f"{self._name}: forward changes {faults[0]}{more}, and a compiled step runs no "
                "Python code: it would stay as it is. Keep it in a tensor (register_buffer) and "
                "change that in place, or change it outside of forward"
            )


class _ChangeTracer:
    """Finds the line of a user or a package after which a place is another."""

    def __init__(self, places: list[tuple[_Container, Any]]) -> None:
        self._places = {(id(w.holder), key): (w, key) for w, key in places}
        self._last = {spot: self._value(*place) for spot, place in self._places.items()}
        self._line: Line | None = None
        self.lines: dict[Spot, Line] = {}
        self.values: dict[Spot, tuple[Any, Any]] = {}
        self._previous: Any = None

    @staticmethod
    def _value(watched: _Container, key: Any) -> Any:
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
        if origin_of(path) not in _FOLLOWED:
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


_FOLLOWED: Final = (Origin.USER, Origin.LIBRARY)
