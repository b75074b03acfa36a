"""Guards of Python values: whether they are what a capture read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from poetmodel.torch.capturing.python_values import (
    ABSENT,
    PLAIN,
    Comparison,
    attributes_of,
    describe,
    form_of,
    read_at,
    snapshot_of,
)
from poetmodel.torch.errors import RAISED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    Line = tuple[str, int]


class Access(StrEnum):
    """How a value is read of what holds it."""

    ATTRIBUTE = "attribute"
    """Of an object's own attributes."""
    CLASS = "class"
    """Of the attributes of a class itself."""
    ITEM = "item"
    """By a key or a position; also a name of a file, of its dict."""
    CELL = "cell"
    """The variable of a closure."""
    COMPUTED = "computed"
    """By `getattr`: a slot, the defaults of a function."""
    CONTENT = "content"
    """All items."""


@dataclass(slots=True, eq=False)
class Place:
    """A place that was read."""

    holder: Any
    access: Access
    key: Any
    name: str
    """Name of the place, for people."""
    line: Line | None
    """File and line of the user's code that reads it first."""
    first: Any
    """The plain value that was read first; the identity of any other value."""
    value: Any = ABSENT
    """The value when the capture ended, with everything put back."""

    def present(self) -> Any:
        """Return the value that is there now; `ABSENT` if there is none."""
        holder, key = self.holder, self.key
        try:
            if self.access is Access.ATTRIBUTE:
                return (attributes_of(holder) or {}).get(key, ABSENT)
            if self.access is Access.CLASS:
                return vars(holder).get(key, ABSENT)
            if self.access is Access.ITEM:
                return dict.get(holder, key, ABSENT) if isinstance(holder, dict) else holder[key]
            if self.access is Access.CELL:
                return holder.cell_contents
            if self.access is Access.COMPUTED:
                return getattr(holder, key)
        except RAISED:
            return ABSENT
        return snapshot_of(holder)

    @property
    def spot(self) -> tuple[int, Any]:
        """The identity of the dict, list or cell that holds the value, and its key there."""
        holder = attributes_of(self.holder) if self.access is Access.ATTRIBUTE else self.holder
        return (id(holder), self.key)


class PythonGuards:
    """Whether Python values are what a capture read.

    Parameters
    ----------
    places : sequence of Place
        What was read.
    alternatives : mapping
        The forms that forward gives to places when it runs, by identity of the dict and key.
    """

    def __init__(
        self,
        places: Sequence[Place] = (),
        alternatives: Mapping[tuple[int, Any], Any] | None = None,
    ) -> None:
        self._places = tuple(places)
        self._alternatives = alternatives or {}
        self.use_constants(())

    def use_constants(self, constants: Sequence[torch.Tensor]) -> None:
        """Take another tensor in the place of a constant of the graph for a change."""
        snapshots = {id(p.holder): p.value for p in self._places if p.access is Access.CONTENT}
        parts: dict[int, list[tuple[str, Any]]] = {}
        for place in self._places:
            if place.access in (Access.ATTRIBUTE, Access.COMPUTED):
                parts.setdefault(id(place.holder), []).append((place.key, place.value))
        self._comparison = Comparison(snapshots, parts, frozenset(map(id, constants)))
        groups: dict[tuple[int, Access], list[Place]] = {}
        for place in self._places:
            groups.setdefault((id(place.holder), place.access), []).append(place)
        self._groups = [_Group(group) for group in groups.values()]

    def __len__(self) -> int:
        return len(self._places)

    def hold(self) -> bool:
        """Return whether all values are what they were; equal new objects count as the same."""
        for group in self._groups:
            if not group.is_identical():
                if not all(map(self._holds, group.places)):
                    return False
                group.refresh()
        return True

    def differences(self) -> Iterator[str]:
        """Yield in words which values are not what they were."""
        for place in self._places:
            if self._holds(place):
                continue
            before, now = place.value, place.present()
            if place.access is Access.CONTENT:
                before, now = self._shown_content(place.holder, before, now)
                if before == now:
                    yield f"{place.name} has other items{read_at(place.line)}"
                    continue
            words = describe(before), describe(now)
            if words[0] == words[1]:
                words = (words[0], "another one")
            yield f"{place.name} was {words[0]} and is {words[1]}{read_at(place.line)}"

    def _shown_content(self, holder: Any, before: Any, now: Any) -> tuple[Any, Any]:
        """Return two snapshots of a container as containers of its kind."""
        if isinstance(holder, dict):
            halves = [len(before) // 2, len(now) // 2]
            return tuple(  # type: ignore[return-value]
                dict(zip(s[:k], s[k:], strict=True))
                for s, k in zip((before, now), halves, strict=True)
            )
        if isinstance(holder, list):
            return list(before), list(now)
        return (before, now) if isinstance(holder, set) else ("", "")

    def _holds(self, place: Place) -> bool:
        now = place.present()
        if place.access is Access.CONTENT:
            if self._comparison.is_same_content(place.value, now):
                return True
            return self._is_left_by_forward(place)
        if self._comparison.is_same(place.value, now):
            return True
        alternative = self._alternatives.get(place.spot, ABSENT)
        return alternative is not ABSENT and form_of(now) == alternative

    def _is_left_by_forward(self, place: Place) -> bool:
        """Return whether the items of a container that differ are as forward makes them."""
        holder, spot = place.holder, id(place.holder)
        if not isinstance(holder, dict):
            return bool(self._alternatives.get((spot, None), ABSENT) == form_of(holder))
        keys = place.value[: len(place.value) // 2]
        before = dict(zip(keys, place.value[len(keys) :], strict=True))
        for key in before.keys() | holder.keys():
            if self._comparison.is_same(before.get(key, ABSENT), holder.get(key, ABSENT)):
                continue
            if self._alternatives.get((spot, key), ABSENT) != form_of(holder.get(key, ABSENT)):
                return False
        return True


class _Group:
    """The places of one holder, and a fast comparison with what was there."""

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = tuple(places)
        first = places[0]
        self._holder, self._access = first.holder, first.access
        there = [place for place in places if place.value is not ABSENT]
        self._absent = tuple(place.key for place in places if place.value is ABSENT)
        keys = [place.key for place in there]
        self._expected = tuple(place.value for place in there)
        if len(keys) == 1:  # so that a tuple comes
            keys, self._expected = keys * 2, self._expected * 2
        self._keys = keys
        self._get: Any = itemgetter(*keys) if keys else None

    def refresh(self) -> None:
        """Take equal values that are there now for those that are compared with."""
        if self._get is not None and self._access in (Access.ATTRIBUTE, Access.ITEM):
            now = self._read()
            if now is not None:
                pairs = zip(self._expected, now, strict=True)
                self._expected = tuple(n if isinstance(n, PLAIN) else e for e, n in pairs)

    def _read(self) -> Any:
        holder = self._holder
        if self._access is Access.ATTRIBUTE:
            holder = holder.__dict__
        elif self._access is Access.CLASS:
            holder = vars(holder)
        try:
            if self._absent and not holder.keys().isdisjoint(self._absent):
                return None
            if self._get is None:
                return ()
            if isinstance(holder, dict) and type(holder) is not dict:  # no __missing__
                return [dict.__getitem__(holder, key) for key in self._keys]
            return self._get(holder)
        except RAISED:
            return None

    def is_identical(self) -> bool:
        """Return whether the very same objects are there."""
        access = self._access
        if access is Access.CONTENT:
            return self._is_identical_content()
        if access in (Access.CELL, Access.COMPUTED):
            return all(place.present() is place.value for place in self.places)
        now = self._read()
        return now is not None and all(map(is_, now, self._expected))

    def _is_identical_content(self) -> bool:
        holder, expected = self._holder, self._expected[0]
        if isinstance(holder, dict):
            size = len(expected) // 2
            return len(holder) == size and all(map(is_, (*holder, *dict.values(holder)), expected))
        if isinstance(holder, set | frozenset):
            return bool(holder == expected)
        if isinstance(holder, np.ndarray):
            return bool(snapshot_of(holder) == expected)
        return len(holder) == len(expected) and all(map(is_, holder, expected))
