"""Fold table rows of equal blocks into one: ``block0-9.ffn.linear1`` stands for ten tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby, product
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from poetmodel.report.presenter import escape_controls
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Collection,
        Hashable,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

Item = TypeVar("Item")
NameParts = tuple[str, ...]
"""Texts or numbers of a name, from left to right."""

HEADS: Final = (
    "size", "energy", "time", "recomputed", "paged out", "paged in", "stages", "in RAM"
)  # fmt: skip
"""Columns of the table of decisions that follow the tensor and its decision."""
COSTS: Final = ("energy", "time")
"""Columns of the table that contain costs."""
MAX_TAIL: Final = 14
"""Maximum number of characters at the end of a long name that are always shown."""
DIGITS: Final = 9
"""Significant digits to which costs of equal tensors agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold(Generic[Item]):
    """One or more items of equal key whose names differ only in numbers."""

    name: str
    """Common name, with ranges in place of numbers: ``block0,2-4.norm``."""
    members: tuple[Item, ...]
    """The items, in the order of the input."""


def fold(
    items: Iterable[Item], *, name: Callable[[Item], str], key: Callable[[Item], Hashable]
) -> list[Fold[Item]]:
    """Fold items of equal `key` whose names differ only in numbers; names must be unique.

    The name of a fold denotes exactly its members: ``layer1-2.0-1.norm`` denotes four. Folds are in
    the order of their first members.

    Examples
    --------
    >>> names = ["in", "block0.norm", "block1.norm", "block3.norm"]
    >>> [each.name for each in fold(names, name=str, key=lambda _: None)]
    ['in', 'block0-1,3.norm']
    """
    items_by_key: dict[Hashable, dict[NameParts, tuple[int, Item]]] = {}
    for index, item in enumerate(items):
        texts, numbers = _split_name(name(item))
        items_by_key.setdefault((texts, key(item)), {})[numbers] = (index, item)
    folds: list[tuple[int, Fold[Item]]] = []
    for items_by_numbers in items_by_key.values():
        for product_numbers in _cartesian_products(tuple(items_by_numbers)):
            members = sorted(
                (items_by_numbers[point] for point in product(*product_numbers)), key=itemgetter(0)
            )
            first, item = members[0]
            texts, _ = _split_name(name(item))
            folded_name = texts[0] + "".join(
                f"{_format_ranges(numbers)}{text}"
                for numbers, text in zip(product_numbers, texts[1:], strict=True)
            )
            folds.append(
                (first, Fold(name=folded_name, members=tuple(item for _, item in members)))
            )
    return [folded for _, folded in sorted(folds, key=itemgetter(0))]


def _split_name(name: str) -> tuple[NameParts, NameParts]:
    """Split a name into the texts around its numbers, and the numbers."""
    fragments = re.split(r"([0-9]+)", name)
    return tuple(fragments[::2]), tuple(fragments[1::2])


def _cartesian_products(points: Sequence[NameParts]) -> Iterator[tuple[NameParts, ...]]:
    """Yield Cartesian products of numbers that together contain each point exactly once."""
    if not points[0]:
        yield ()
        return
    rests_by_first: dict[str, list[NameParts]] = {}
    for first, *other_numbers in points:
        rests_by_first.setdefault(first, []).append(tuple(other_numbers))
    firsts_by_rests: dict[frozenset[NameParts], list[str]] = {}
    for first, rests in rests_by_first.items():
        firsts_by_rests.setdefault(frozenset(rests), []).append(first)
    for firsts in firsts_by_rests.values():
        for factors in _cartesian_products(rests_by_first[firsts[0]]):
            yield tuple(firsts), *factors


def _format_ranges(numbers: Sequence[str]) -> str:
    """Format numbers as ranges: ``0,2-4``; numbers with leading zeros are listed after them."""
    unpadded = sorted({int(number) for number in numbers if str(int(number)) == number})
    zero_padded = sorted(number for number in numbers if str(int(number)) != number)
    sequences = [
        [value for _, value in pairs]
        for _, pairs in groupby(enumerate(unpadded), key=lambda pair: pair[1] - pair[0])
    ]
    return ",".join(
        [
            f"{sequence[0]}" if len(sequence) == 1 else f"{sequence[0]}-{sequence[-1]}"
            for sequence in sequences
        ]
        + zero_padded
    )


# -- the table of decisions -------------------------------------------------------------------


def decision_table(
    rows: Iterable[Mapping[str, Any]], *, costs: Collection[str] = COSTS
) -> dict[str, Any]:
    """Return the table of decisions as plain values for the page, with tensors folded by `fold`.

    `rows` come from `decision_rows`. Returned rows have ``tail``, where the part of the name begins
    that is always shown, and ``cells``, pairs of sort key and text. `costs` are columns to show.
    """
    numbered_rows = [{**row, "index": i} for i, row in enumerate(rows)]
    folds = fold(numbered_rows, name=lambda row: str(row["tensor"]), key=_fold_key)
    return {
        "heads": [head for head in HEADS if head in costs or head not in COSTS],
        "rows": [
            _table_row(folded.name, folded.members, costs)
            | {
                "members": [
                    _table_row(row["tensor"], (row,), costs)
                    for row in folded.members
                    if len(folded.members) > 1
                ]
            }
            for folded in folds
        ],
    }


def _fold_key(row: Mapping[str, Any]) -> Hashable:
    """Return the properties in which folded tensors are equal: decision, size, counts and costs."""
    properties = (row["choice"], row["size_bytes"])
    counts = (row["recomputed"], row["paged_out"], row["paged_in"])
    return (*properties, *counts, *(f"{row[key]:.{DIGITS}g}" for key in ("energy_j", "time_s")))


def _table_row(
    name: str, members: Sequence[Mapping[str, Any]], costs: Collection[str]
) -> dict[str, Any]:
    """Return the row of a tensor or of a fold, with cells like ``10 x 14.82 mJ``, ``0-12``."""
    first, count = members[0], len(members)
    nodes = dict.fromkeys(row["node"] for row in members)
    display_name = escape_controls(name)
    return {
        "name": display_name,
        "tail": tail_start(display_name),
        "choice": first["choice"],
        "tensor": first["index"] if count == 1 else None,
        "node": escape_controls(first["node"]) if len(nodes) == 1 else None,
        "cells": [
            _total_cell(count, first["size_bytes"], format_bytes),
            *([_total_cell(count, first["energy_j"], format_joules)] if "energy" in costs else []),
            *([_total_cell(count, first["time_s"], format_seconds)] if "time" in costs else []),
            *(
                _total_cell(count, first[key], str)
                for key in ("recomputed", "paged_out", "paged_in")
            ),
            _range_cell(
                min(row["first_stage"] for row in members),
                max(row["last_stage"] for row in members),
            ),
            _range_cell(
                min(row["ram_stages"] for row in members), max(row["ram_stages"] for row in members)
            ),
        ],
    }


def _total_cell(
    count: int, value: float, format_value: Callable[[float], str]
) -> tuple[float, str]:
    """Return sort key and text of the sum of `count` equal values: ``10 x 14.82 mJ``, or ``0``."""
    if not value:
        return 0, "0"
    return count * value, format_value(value) if count == 1 else f"{count} x {format_value(value)}"


def _range_cell(lower: int, upper: int) -> tuple[int, str]:
    return lower, f"{lower}" if lower == upper else f"{lower}-{upper}"


def tail_start(name: str) -> int:
    """Return the index from which the page always shows a name: at a ``.`` or ``/`` if possible."""
    min_start = max(0, len(name) - MAX_TAIL)
    separator_ends = (separator.end() for separator in re.finditer("[./](?!$)", name))
    return next((start for start in (0, *separator_ends) if start >= min_start), min_start)
