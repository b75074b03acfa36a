"""Which limits and own constraints of an infeasible problem, or rows of a model, contradict.

Notes
-----
QuickXplain (Junker, 2004): limits stand before own constraints, so that a constraint is named only
where the limits do without it; halves of the rest are tried, so that few of many constraints are
found in few solves. The rows of one rule, ``name[...]``, go together at first.
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
from poetmodel.problem import CONSTRAINTS, Problem, Quantity
from poetmodel.result import Status, Termination
from poetmodel.solver.facade import solve
from poetmodel.solver.sensitivity.remedies import LEAST_S, Rows, Stated, freed, stated_limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.backends.standard_form import StandardForm
    from poetmodel.schedule import Schedule

T = TypeVar("T")

PART: Final = 0.25
"""Largest part of the time limit for one solve."""
MOST_ROWS: Final = 5
"""Most rows of rules with several that are named one by one."""


@dataclass(kw_only=True)
class _ConflictSearch:
    """Finds out whether some of the limits of a problem can be kept."""

    problem: Problem
    time_limit: float
    threads: int
    all: list[Stated] = field(default_factory=list)
    """Limits of the problem, rows alone or together."""
    begun_s: float = field(default_factory=time.monotonic)
    known: list[Schedule] = field(default_factory=list)
    """Schedules that keep some of the limits."""
    complete: bool = True
    """Whether every question was answered."""

    def fails(self, kept: list[Stated]) -> bool:
        """Return whether it is proven that no schedule keeps these limits."""
        others = [stated for stated in self.all if stated not in kept]
        problem = freed(self.problem, *others, minimize=Quantity.ENERGY)
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


def find_conflict(
    problem: Problem, *, time_limit: float, threads: int = 1
) -> tuple[list[Stated], bool]:
    """Return limits of an infeasible problem that no schedule keeps together, own constraints too.

    Also whether they are irreducible: without any one of them there is a schedule. What was not
    decided within the time limit [s] is kept.

    Raises
    ------
    KeyboardInterrupt
        After Ctrl-C: what was found by then says nothing.
    """
    rules: dict[str, Rows] = {}
    for row in problem.constraints:
        rule = row.name.rpartition("[")[0] if row.name.endswith("]") else row.name
        rules[rule] = (*rules.get(rule, ()), row)
    limits = list(stated_limits(problem))
    search = _ConflictSearch(problem=problem, time_limit=time_limit, threads=threads)
    search.all = [*limits, *rules.values()]
    conflict = least(search.fails, [], search.all)
    complete = search.complete
    if complete and any(isinstance(stated, tuple) and len(stated) > 1 for stated in conflict):
        search.all = [*limits, *((row,) for row in problem.constraints)]
        single = [stated for stated in search.all if stated in conflict or _is_of(stated, conflict)]
        refined = least(search.fails, [], single)
        if search.complete and sum(stated not in limits for stated in refined) <= MOST_ROWS:
            return refined, True
    return conflict, complete


def _is_of(row: Stated, conflict: list[Stated]) -> bool:
    """Return whether a single row is among rows that go together."""
    return any(isinstance(stated, tuple) and row[0] in stated for stated in conflict)
