"""Guards of Python values: check that current values are equal to those that a capture read."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np

from poetmodel.torch.capturing.python_values import (
    ABSENT,
    PLAIN,
    Comparison,
    attributes_of,
    comparison_key,
    describe,
    format_read_line,
    keys_and_values,
    snapshot_of,
)
from poetmodel.torch.errors import FOREIGN_ERRORS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    Line = tuple[str, int]
    """File name and line number."""


class Access(StrEnum):
    """Kind of access by which a value is read from its holder."""

    ATTRIBUTE = "attribute"
    """An instance attribute of an object."""
    CLASS = "class"
    """An attribute of a class itself."""
    ITEM = "item"
    """An item, by a key or an index; also a global of a Python module, in its dict."""
    CELL = "cell"
    """A variable of a closure."""
    COMPUTED = "computed"
    """An attribute by `getattr`: one in ``__slots__``, a field of a named tuple, or the defaults of
    a function."""
    CONTENT = "content"
    """All items of a container."""


@dataclass(slots=True, eq=False)
class GuardedPlace:
    """A place that was read: an attribute, an item, a variable, or all items of a holder."""

    holder: Any
    """The object, class, function, container or cell with the value."""
    access: Access
    key: Any
    """Name of the attribute or variable, or key of the item; None for all items."""
    name: str
    """Name of the place for display."""
    line: Line | None
    """Line of a user's or package's code that reads the place first; None if unknown."""
    first_value_or_id: Any
    """The value at the first read if it is plain, otherwise its ``id``."""
    value: Any = ABSENT
    """`current_value` at the end of the capture, with all state restored. Until then `ABSENT`."""

    def current_value(self) -> Any:
        """Return the current value; for `Access.CONTENT` a snapshot of all items.

        For other kinds of access, returns `ABSENT` if the value is missing, or reading it fails.
        """
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
        except FOREIGN_ERRORS:
            return ABSENT
        return snapshot_of(holder)

    @property
    def item_id(self) -> tuple[int, Any]:
        """(``id`` of the container, class, object or cell with the value, `key`)."""
        holder = attributes_of(self.holder) if self.access is Access.ATTRIBUTE else self.holder
        return (id(holder), None if self.access is Access.CELL else self.key)


class PythonGuards:
    """Checks that `places` have the values of a capture, or `alternatives` that forward sets.

    `alternatives` are comparison keys, by `GuardedPlace.item_id`.
    """

    def __init__(
        self,
        places: Sequence[GuardedPlace] = (),
        alternatives: Mapping[tuple[int, Any], Any] | None = None,
    ) -> None:
        self._places = tuple(places)
        self._alternatives = alternatives or {}
        self.set_constants(())

    def set_constants(self, constants: Sequence[torch.Tensor]) -> None:
        """Prepare the comparisons; tensors in `constants` must stay the same objects."""
        snapshots = {
            id(place.holder): place.value
            for place in self._places
            if place.access is Access.CONTENT
        }
        attributes: dict[int, list[tuple[str, Any]]] = {}
        for place in self._places:
            if place.access in (Access.ATTRIBUTE, Access.COMPUTED):
                attributes.setdefault(id(place.holder), []).append((place.key, place.value))
        self._comparison = Comparison(snapshots, attributes, frozenset(map(id, constants)))
        attribute_places = [
            place for place in self._places if place.access in (Access.ATTRIBUTE, Access.CLASS)
        ]
        self._absent_attributes = [
            (place.holder, place.key) for place in attribute_places if place.value is ABSENT
        ]
        present_places = [place for place in attribute_places if place.value is not ABSENT]
        self._attributes = [(place.holder, place.key) for place in present_places]
        item_places = [
            place
            for place in self._places
            if place.access is Access.ITEM and place.value is not ABSENT
        ]
        item_places = [place for place in item_places if _is_subscriptable(place)]
        self._items = [(place.holder, place.key) for place in item_places]
        self._contents = [
            (place.holder, place.value) for place in self._places if place.access is Access.CONTENT
        ]
        fast_ids = {*map(id, attribute_places), *map(id, item_places)}
        self._slow_places = [
            place
            for place in self._places
            if id(place) not in fast_ids and place.access is not Access.CONTENT
        ]
        self._compared_places = [*present_places, *item_places, *self._slow_places]
        self._expected_values = [place.value for place in self._compared_places]

    def __len__(self) -> int:
        return len(self._places)

    def hold(self) -> bool:
        """Return whether values equal the old ones or those that forward sets; store plain ones."""
        if self._are_identical():
            return True
        if not all(map(self._is_valid, self._places)):
            return False
        for index, place in enumerate(self._compared_places):
            value = place.current_value()
            if isinstance(value, PLAIN):  # then the next check by identity succeeds
                self._expected_values[index] = value
        return True

    def _are_identical(self) -> bool:
        """Return whether all guarded values are identical to the expected ones; a fast check."""
        try:
            values = [holder.__dict__[key] for holder, key in self._attributes]
            values += [holder[key] for holder, key in self._items]
        except FOREIGN_ERRORS:
            return False
        values += [place.current_value() for place in self._slow_places]
        return (
            all(map(is_, values, self._expected_values))
            and not any(key in holder.__dict__ for holder, key in self._absent_attributes)
            and all(_has_identical_items(*content) for content in self._contents)
        )

    def differences(self) -> Iterator[str]:
        """Yield a text for each place whose value is neither the old one nor set by forward."""
        for place in self._places:
            if self._is_valid(place):
                continue
            old_value, new_value = place.value, place.current_value()
            if place.access is Access.CONTENT:
                old_value, new_value = self._display_content(place.holder, old_value, new_value)
                if old_value == new_value:
                    yield f"{place.name} has other items{format_read_line(place.line)}"
                    continue
            texts = describe(old_value), describe(new_value)
            if texts[0] == texts[1]:
                texts = (texts[0], "another one")
            yield f"{place.name} was {texts[0]} and is {texts[1]}{format_read_line(place.line)}"

    def _display_content(self, holder: Any, old_content: Any, new_content: Any) -> tuple[Any, Any]:
        """Convert both snapshots of `holder` to dicts, lists or sets for display, or to ""."""
        if isinstance(holder, dict):
            n_keys = [len(old_content) // 2, len(new_content) // 2]
            return tuple(  # type: ignore[return-value]
                dict(zip(snapshot[:count], snapshot[count:], strict=True))
                for snapshot, count in zip((old_content, new_content), n_keys, strict=True)
            )
        if isinstance(holder, list):
            return list(old_content), list(new_content)
        return (old_content, new_content) if isinstance(holder, set) else ("", "")

    def _is_valid(self, place: GuardedPlace) -> bool:
        """Return whether a place has its old value, or the one that forward sets (`alternatives`).

        For `Access.CONTENT` of a dict, each item may have either value, in the old order.
        """
        value = place.current_value()
        if place.access is Access.CONTENT:
            if self._comparison.is_same_content(place.value, value):
                return True
            return self._is_set_by_forward(place)
        if self._comparison.is_same(place.value, value):
            return True
        alternative = self._alternatives.get(place.item_id, ABSENT)
        return alternative is not ABSENT and comparison_key(value) == alternative

    def _is_set_by_forward(self, place: GuardedPlace) -> bool:
        """Return whether each item that differs from its guarded value has the one forward sets."""
        holder, holder_id = place.holder, id(place.holder)
        if not isinstance(holder, dict):
            return bool(self._alternatives.get((holder_id, None), ABSENT) == comparison_key(holder))
        keys = place.value[: len(place.value) // 2]
        old_items = dict(zip(keys, place.value[len(keys) :], strict=True))
        if [key for key in keys if key in holder] != [key for key in holder if key in old_items]:
            return False
        for key in old_items.keys() | holder.keys():
            if self._comparison.is_same(old_items.get(key, ABSENT), holder.get(key, ABSENT)):
                continue
            if self._alternatives.get((holder_id, key), ABSENT) != comparison_key(
                holder.get(key, ABSENT)
            ):
                return False
        return True


def _is_subscriptable(place: GuardedPlace) -> bool:
    """Return whether ``[]`` returns the stored item itself.

    False for arrays, which create it, and for subclasses of dict, which may have ``__missing__``.
    """
    return type(place.holder) is dict or not isinstance(place.holder, dict | np.ndarray)


def _has_identical_items(holder: Any, snapshot: Any) -> bool:
    """Return whether a container has a snapshot's objects in order; a set or array: equal ones."""
    if isinstance(holder, dict):
        items = keys_and_values(holder)
        return len(items) == len(snapshot) and all(map(is_, items, snapshot))
    if isinstance(holder, set | frozenset):
        return bool(holder == snapshot)
    if isinstance(holder, np.ndarray):
        return bool(snapshot_of(holder) == snapshot)
    return len(holder) == len(snapshot) and all(map(is_, holder, snapshot))
