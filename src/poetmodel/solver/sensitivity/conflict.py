"""Minimal sets of limits and user constraints, or of rows of a model, that conflict.

Notes
-----
QuickXplain (Junker, 2004): limits are kept before user constraints, so a user constraint is in the
set only if the limits alone do not conflict. Halves of the rest are tried, so few of many
constraints are found in few solves. The constraints of one rule, ``name[...]``, are one member at
first.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from poetmodel.backends.protocol import Limits
from poetmodel.backends.registry import backend
from poetmodel.model.arrays import Label
from poetmodel.planner import verify
from poetmodel.problem import USER_CONSTRAINTS, Problem, Quantity
from poetmodel.result import Status, Termination
from poetmodel.solver.facade import solve
from poetmodel.solver.sensitivity.remedies import (
    LEAST_S,
    Rows,
    Stated,
    stated_limits,
    without_limits,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.backends.standard_form import StandardForm
    from poetmodel.schedule import Schedule

T = TypeVar("T")

PART: Final = 0.25
"""Maximum fraction of the time limit for one solve."""
MAX_ROWS: Final = 5
"""Maximum number of constraints of rules that are named one by one."""


@dataclass(kw_only=True)
class _ConflictSearch:
    """Decides whether a schedule keeps some of the limits of a problem."""

    problem: Problem
    time_limit: float
    threads: int
    all: list[Stated] = field(default_factory=list)
    """All limits and user constraints of the problem."""
    begun_s: float = field(default_factory=time.monotonic)
    known: list[Schedule] = field(default_factory=list)
    """Schedules found so far."""
    complete: bool = True
    """Whether all solves ended with a schedule or a proof."""

    def fails(self, kept: list[Stated]) -> bool:
        """Return whether it is proven that no schedule keeps these limits."""
        others = [stated for stated in self.all if stated not in kept]
        problem = without_limits(self.problem, *others, minimize=Quantity.ENERGY)
        if any(verify(problem, schedule).valid for schedule in self.known):
            return False
        left_s = self.begun_s + self.time_limit - time.monotonic()
        if left_s < LEAST_S:
            self.complete = False
            return False
        limit_s = min(left_s, PART * self.time_limit)
        result = solve(problem, time_limit=limit_s, gap=1.0, threads=self.threads)
        if result.termination == Termination.INTERRUPTED:
            raise KeyboardInterrupt
        if result.schedule is not None:
            self.known.append(result.schedule)
        elif result.status != Status.INFEASIBLE:
            self.complete = False
        return result.status == Status.INFEASIBLE


def minimal_conflict(
    fails: Callable[[list[T]], bool], kept: list[T], more: list[T], *, asked: bool = False
) -> list[T]:
    """Return a minimal part of `more` that conflicts together with `kept`.

    `fails` returns whether limits are proven to conflict, and holds for `kept` and `more` together.
    With `asked`, `kept` alone may conflict: then the part is empty.
    """
    if asked and fails(kept):
        return []
    if len(more) == 1:
        return more
    first, second = more[: len(more) // 2], more[len(more) // 2 :]
    needed = minimal_conflict(fails, [*kept, *first], second, asked=True)
    return [*minimal_conflict(fails, [*kept, *needed], first, asked=bool(needed)), *needed]


def conflicting_rows(form: StandardForm, *, time_limit: float) -> list[int]:
    """Return the numbers of rows, ascending, that no point within the columns' bounds satisfies.

    Added rows are members by themselves, the rows of `build` by constraint family. A row stays in
    the set if its removal was not decided within the time limit [s]; the set is empty if it was not
    decided whether all rows conflict.
    """
    ends_s = time.monotonic() + time_limit
    groups: dict[Any, list[int]] = {}
    for number, row in enumerate(form.rows):
        stated = isinstance(row, Label)
        key = (
            (row.family, row.key[0] if row.family == USER_CONSTRAINTS else None)
            if stated
            else number
        )
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

    keys = sorted(groups, key=lambda key: isinstance(key, int))  # rows of `build` first
    conflict = minimal_conflict(fails, [], keys) if fails(keys) else []
    return sorted(number for key in conflict for number in groups[key])


def find_conflict(
    problem: Problem, *, time_limit: float, threads: int = 1
) -> tuple[list[Stated], bool]:
    """Return limits and user constraints that no schedule keeps together.

    Also returns whether the set is irreducible: without any one member there is a schedule. A
    member stays in the set if its removal was not decided within the time limit [s].

    Raises
    ------
    KeyboardInterrupt
        After Ctrl-C, since a part of the search proves nothing.
    """
    rules: dict[str, Rows] = {}
    for row in problem.constraints:
        rule = row.name.rpartition("[")[0] if row.name.endswith("]") else row.name
        rules[rule] = (*rules.get(rule, ()), row)
    limits = list(stated_limits(problem))
    search = _ConflictSearch(problem=problem, time_limit=time_limit, threads=threads)
    search.all = [*limits, *rules.values()]
    conflict = minimal_conflict(search.fails, [], search.all)
    complete = search.complete
    if complete and any(isinstance(stated, tuple) and len(stated) > 1 for stated in conflict):
        search.all = [*limits, *((row,) for row in problem.constraints)]
        single = [stated for stated in search.all if stated in conflict or _is_of(stated, conflict)]
        refined = minimal_conflict(search.fails, [], single)
        if search.complete and sum(stated not in limits for stated in refined) <= MAX_ROWS:
            return refined, True
    return conflict, complete


def _is_of(row: Stated, conflict: list[Stated]) -> bool:
    """Return whether a single constraint is one of a rule in the conflict."""
    return any(isinstance(stated, tuple) and row[0] in stated for stated in conflict)
