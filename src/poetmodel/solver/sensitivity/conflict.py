"""Which rows of a model contradict.

Notes
-----
QuickXplain (Junker, 2004): what is stated stands before what was added, so that an added row is
named only where the others do without it; halves of the rest are tried, so that few of many rows
are found in few solves.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from poetmodel.backends.protocol import Limits
from poetmodel.backends.registry import backend
from poetmodel.model.arrays import Label
from poetmodel.problem import CONSTRAINTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.backends.standard_form import StandardForm

T = TypeVar("T")

PART: Final = 0.25
"""Largest part of the time limit for one solve."""


def least(
    fails: Callable[[list[T]], bool], kept: list[T], more: list[T], *, asked: bool = False
) -> list[T]:
    """Return the members of `more` needed, beside those kept, for a contradiction.

    What `fails` does so for certain. With `asked` those kept may do so by themselves.
    """
    if asked and fails(kept):
        return []
    if len(more) == 1:
        return more
    first, second = more[: len(more) // 2], more[len(more) // 2 :]
    needed = least(fails, [*kept, *first], second, asked=True)
    return [*least(fails, [*kept, *needed], first, asked=bool(needed)), *needed]


def conflicting_rows(form: StandardForm, *, time_limit: float) -> list[int]:
    """Return rows, ascending, that no values within the columns' bounds satisfy together.

    Rows of a user are told apart, those that `build` states by their constraint. What was not
    decided within the time limit [s] is kept; empty where that is whether all rows contradict.
    """
    ends_s = time.monotonic() + time_limit
    groups: dict[Any, list[int]] = {}
    for number, row in enumerate(form.rows):
        stated = isinstance(row, Label)
        key = (row.family, row.key[0] if row.family == CONSTRAINTS else None) if stated else number
        groups.setdefault(key, []).append(number)

    def fails(kept: list[Any]) -> bool:
        rows = sorted(number for key in kept for number in groups[key])
        left_s = min(ends_s - time.monotonic(), PART * time_limit)
        part = replace(
            form,
            matrix=form.matrix[rows],
            objective=np.zeros(form.n_columns),
            row_lower=form.row_lower[rows],
            row_upper=form.row_upper[rows],
            rows=[form.rows[number] for number in rows],
            layout=None,
        )
        return left_s > 0 and backend("highs").solve(part, Limits(time_s=left_s)).infeasible

    keys = sorted(groups, key=lambda key: isinstance(key, int))  # what is stated first
    conflict = least(fails, [], keys) if fails(keys) else []
    return sorted(number for key in conflict for number in groups[key])
