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
Numbers = tuple[str, ...]
"""Numbers in a name, from left to right."""

HEADS: Final = (
    *("size", "energy", "time", "recomputed", "paged out", "paged in", "stages", "in RAM"),
)
"""Columns of the table of decisions after tensor and decision."""
COSTS: Final = ("energy", "time")
"""Columns of costs."""
MAX_TAIL: Final = 14
"""Maximum number of characters at the end of a long name that are always shown."""
DIGITS: Final = 9
"""Significant digits to which costs of equal tensors agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold(Generic[Item]):
    """One or more items that differ only in the numbers in their names."""

    name: str
    """Common name, with ranges in place of numbers: ``block0,2-4.norm``."""
    members: tuple[Item, ...]


def fold(
    items: Iterable[Item], *, name: Callable[[Item], str], key: Callable[[Item], Hashable]
) -> list[Fold[Item]]:
    """Fold items of equal `key` whose names differ only in numbers.

    The name of a fold denotes exactly its members: ``layer1-2.0-1.norm`` denotes four, and if one
    of them is missing, there are two folds. Folds are in the order of their first members.

    Examples
    --------
    >>> names = ["in", "block0.norm", "block1.norm", "block3.norm"]
    >>> [each.name for each in fold(names, name=str, key=lambda _: None)]
    ['in', 'block0-1,3.norm']
    """
    items_by_key: dict[Hashable, dict[Numbers, tuple[int, Item]]] = {}
    for index, item in enumerate(items):
        words, numbers = _split_name(name(item))
        items_by_key.setdefault((words, key(item)), {})[numbers] = (index, item)
    folds: list[tuple[int, Fold[Item]]] = []
    for group in items_by_key.values():
        for box in _boxes(tuple(group)):
            members = sorted((group[point] for point in product(*box)), key=itemgetter(0))
            first, item = members[0]
            words, _ = _split_name(name(item))
            title = words[0] + "".join(
                f"{_format_ranges(numbers)}{word}"
                for numbers, word in zip(box, words[1:], strict=True)
            )
            folds.append((first, Fold(name=title, members=tuple(item for _, item in members))))
    return [folded for _, folded in sorted(folds, key=itemgetter(0))]


def _split_name(name: str) -> tuple[Numbers, Numbers]:
    """Split a name into the texts around its numbers, and the numbers."""
    parts = re.split(r"([0-9]+)", name)
    return tuple(parts[::2]), tuple(parts[1::2])


def _boxes(points: Sequence[Numbers]) -> Iterator[tuple[Numbers, ...]]:
    """Yield Cartesian products of numbers that together contain each point exactly once.

    Each product is a tuple with the numbers of each position.
    """
    if not points[0]:
        yield ()
        return
    rests_by_first: dict[str, list[Numbers]] = {}
    for first, *rest in points:
        rests_by_first.setdefault(first, []).append(tuple(rest))
    firsts_by_rests: dict[frozenset[Numbers], list[str]] = {}
    for first, rests in rests_by_first.items():
        firsts_by_rests.setdefault(frozenset(rests), []).append(first)
    for group in firsts_by_rests.values():
        for box in _boxes(rests_by_first[group[0]]):
            yield tuple(group), *box


def _format_ranges(numbers: Sequence[str]) -> str:
    """Format numbers as ranges: ``0,2-4``; numbers with leading zeros are listed separately."""
    unpadded = sorted({int(number) for number in numbers if str(int(number)) == number})
    zero_padded = sorted(number for number in numbers if str(int(number)) != number)
    sequences = [
        [value for _, value in run]
        for _, run in groupby(enumerate(unpadded), key=lambda at: at[1] - at[0])
    ]
    return ",".join(
        [f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in sequences] + zero_padded
    )


# -- the table of decisions -------------------------------------------------------------------


def decision_table(
    rows: Iterable[Mapping[str, Any]], *, costs: Collection[str] = COSTS
) -> dict[str, Any]:
    """Return the table of decisions, with equal tensors folded, as plain values for the page.

    Parameters
    ----------
    rows : iterable of mapping
        Rows of `poetmodel.report.facts.decision_rows`, one for each tensor.
    costs : collection of str
        Costs with columns: ``energy`` and ``time``, one of them, or none.

    Returns
    -------
    dict
        ``heads``: column names. ``rows``: each with ``name``, ``tail`` (start of the part of the
        name that is always shown), ``choice``, ``tensor`` (its index, None for several), ``cells``
        (a sort key and a text for each column after the decision) and ``members``, the rows of the
        tensors of a fold.
    """
    numbered_rows = [{**row, "index": i} for i, row in enumerate(rows)]
    folds = fold(numbered_rows, name=lambda row: str(row["tensor"]), key=_fold_key)
    return {
        "heads": [head for head in HEADS if head in costs or head not in COSTS],
        "rows": [
            _row(folded.name, folded.members, costs)
            | {
                "members": [
                    _row(row["tensor"], (row,), costs)
                    for row in folded.members
                    if len(folded.members) > 1
                ]
            }
            for folded in folds
        ],
    }


def _fold_key(row: Mapping[str, Any]) -> Hashable:
    """Return the properties that folded tensors share: decision, size, counts and costs."""
    counts = (row["choice"], row["size_bytes"])
    transfers = (row["recomputed"], row["paged_out"], row["paged_in"])
    return (*counts, *transfers, *(f"{row[key]:.{DIGITS}g}" for key in ("energy_j", "time_s")))


def _row(name: str, members: Sequence[Mapping[str, Any]], costs: Collection[str]) -> dict[str, Any]:
    """Return a table row for one tensor or a fold of equal tensors."""
    first, count = members[0], len(members)
    nodes = dict.fromkeys(row["node"] for row in members)
    title = escape_controls(name)
    return {
        "name": title,
        "tail": tail_start(title),
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
                min(r["first_stage"] for r in members), max(r["last_stage"] for r in members)
            ),
            _range_cell(
                min(r["ram_stages"] for r in members), max(r["ram_stages"] for r in members)
            ),
        ],
    }


def _total_cell(
    count: int, value: float, format_value: Callable[[float], str]
) -> tuple[float, str]:
    """Return sort key and text of a sum of equal values: ``10 x 14.82 mJ``."""
    if not value:
        return 0, "0"
    return count * value, format_value(value) if count == 1 else f"{count} x {format_value(value)}"


def _range_cell(lower: int, upper: int) -> tuple[int, str]:
    return lower, f"{lower}" if lower == upper else f"{lower}-{upper}"


def tail_start(name: str) -> int:
    """Return the start of the part of a long name that is always shown."""
    min_start = max(0, len(name) - MAX_TAIL)
    cuts = (separator.end() for separator in re.finditer("[./]", name))
    return next((cut for cut in (0, *cuts) if cut >= min_start), min_start)
