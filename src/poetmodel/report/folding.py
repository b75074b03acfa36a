"""Rows of equal blocks as one: ``block0-9.ffn.linear1`` stands for ten tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby, product
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from poetmodel.report.presenter import escaped
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
"""The numbers in a name, from the left."""

HEADS: Final = (
    *("size", "energy", "time", "recomputed", "paged out", "paged in", "stages", "in RAM"),
)
"""The columns of the table of decisions, after tensor and decision."""
COSTS: Final = ("energy", "time")
"""Those of them that are costs."""
TAIL: Final = 14
"""Most characters at the end of a name that are shown where there is no room for it all."""
DIGITS: Final = 9
"""Digits to which costs of equal tensors agree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold(Generic[Item]):
    """Things that differ only in the numbers of their names, one or more."""

    name: str
    """The name of all of them, with ranges in place of numbers: ``block0,2-4.norm``."""
    members: tuple[Item, ...]


def fold(
    items: Iterable[Item], *, name: Callable[[Item], str], key: Callable[[Item], Hashable]
) -> list[Fold[Item]]:
    """Fold things of equal `key` whose names differ only in numbers.

    The name of a fold stands for its members and nothing else: ``layer1-2.0-1.norm`` are four, and
    where one of them is missing, there are two folds. Folds are in the order of their first
    members.

    Examples
    --------
    >>> names = ["in", "block0.norm", "block1.norm", "block3.norm"]
    >>> [each.name for each in fold(names, name=str, key=lambda _: None)]
    ['in', 'block0-1,3.norm']
    """
    alike: dict[Hashable, dict[Numbers, tuple[int, Item]]] = {}
    for index, item in enumerate(items):
        words, numbers = _apart(name(item))
        alike.setdefault((words, key(item)), {})[numbers] = (index, item)
    folds: list[tuple[int, Fold[Item]]] = []
    for group in alike.values():
        for box in _boxes(tuple(group)):
            members = sorted((group[point] for point in product(*box)), key=itemgetter(0))
            first, item = members[0]
            words, _ = _apart(name(item))
            title = words[0] + "".join(
                f"{_ranges(numbers)}{word}" for numbers, word in zip(box, words[1:], strict=True)
            )
            folds.append((first, Fold(name=title, members=tuple(item for _, item in members))))
    return [folded for _, folded in sorted(folds, key=itemgetter(0))]


def _apart(name: str) -> tuple[Numbers, Numbers]:
    """Split a name into what is around its numbers, and the numbers."""
    parts = re.split(r"([0-9]+)", name)
    return tuple(parts[::2]), tuple(parts[1::2])


def _boxes(points: Sequence[Numbers]) -> Iterator[tuple[Numbers, ...]]:
    """Yield products of numbers that cover each point once, and nothing else."""
    if not points[0]:
        yield ()
        return
    rests: dict[str, list[Numbers]] = {}
    for first, *rest in points:
        rests.setdefault(first, []).append(tuple(rest))
    firsts: dict[frozenset[Numbers], list[str]] = {}
    for first, others in rests.items():
        firsts.setdefault(frozenset(others), []).append(first)
    for together in firsts.values():
        for box in _boxes(rests[together[0]]):
            yield tuple(together), *box


def _ranges(numbers: Sequence[str]) -> str:
    """Write numbers as ranges: ``0,2-4``; those with leading zeros stand alone."""
    plain = sorted({int(number) for number in numbers if str(int(number)) == number})
    odd = sorted(number for number in numbers if str(int(number)) != number)
    runs = [
        [value for _, value in run]
        for _, run in groupby(enumerate(plain), key=lambda at: at[1] - at[0])
    ]
    return ",".join([f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs] + odd)


# -- the table of decisions -------------------------------------------------------------------


def decision_table(
    rows: Iterable[Mapping[str, Any]], *, costs: Collection[str] = COSTS
) -> dict[str, Any]:
    """Return the table of decisions, equal tensors folded, as plain values that a page shows.

    Parameters
    ----------
    rows : iterable of mapping
        What `poetmodel.report.facts.decision_rows` yields, one for each tensor.
    costs : collection of str
        Which costs have columns: ``energy`` and ``time``, one of them, or none.

    Returns
    -------
    dict
        ``heads``: names of the columns. ``rows``: each with ``name``, ``tail`` (where the end of
        the name begins that is shown in any case), ``choice``, ``tensor`` (its number, None for
        several), ``cells`` (a number to sort by and a text for each column after the decision) and
        ``members``, the rows of several tensors.
    """
    numbered = [{**row, "index": i} for i, row in enumerate(rows)]
    folds = fold(numbered, name=lambda row: str(row["tensor"]), key=_equal)
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


def _equal(row: Mapping[str, Any]) -> Hashable:
    """Return the common properties of equal tensors: decision, size, counts and costs."""
    counts = (row["choice"], row["size_bytes"])
    moved = (row["recomputed"], row["paged_out"], row["paged_in"])
    return (*counts, *moved, *(f"{row[key]:.{DIGITS}g}" for key in ("energy_j", "time_s")))


def _row(name: str, members: Sequence[Mapping[str, Any]], costs: Collection[str]) -> dict[str, Any]:
    first, many = members[0], len(members)
    nodes = dict.fromkeys(row["node"] for row in members)
    title = escaped(name)
    return {
        "name": title,
        "tail": tail(title),
        "choice": first["choice"],
        "tensor": first["index"] if many == 1 else None,
        "node": escaped(first["node"]) if len(nodes) == 1 else None,
        "cells": [
            _of_all(many, first["size_bytes"], format_bytes),
            *([_of_all(many, first["energy_j"], format_joules)] if "energy" in costs else []),
            *([_of_all(many, first["time_s"], format_seconds)] if "time" in costs else []),
            *(_of_all(many, first[key], str) for key in ("recomputed", "paged_out", "paged_in")),
            _from_to(min(r["first_stage"] for r in members), max(r["last_stage"] for r in members)),
            _from_to(min(r["ram_stages"] for r in members), max(r["ram_stages"] for r in members)),
        ],
    }


def _of_all(many: int, value: float, form: Callable[[float], str]) -> tuple[float, str]:
    """Return the sum of equal figures, and how it is made up: ``10 x 14.82 mJ``."""
    if not value:
        return 0, "0"
    return many * value, form(value) if many == 1 else f"{many} x {form(value)}"


def _from_to(least: int, most: int) -> tuple[int, str]:
    return least, f"{least}" if least == most else f"{least}-{most}"


def tail(name: str) -> int:
    """Return the start of the part of a name that is shown if the whole does not fit."""
    least = max(0, len(name) - TAIL)
    cuts = (at.end() for at in re.finditer("[./]", name))
    return next((cut for cut in (0, *cuts) if cut >= least), least)
