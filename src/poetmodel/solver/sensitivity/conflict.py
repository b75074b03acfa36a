"""Find minimal sets of limits and user-defined constraints, or of rows of a model, that conflict.

Notes
-----
QuickXplain (Junker, 2004): limits precede user-defined constraints, so the set has a constraint
only if the limits alone do not conflict. The search halves the members, so it needs few solves if
few of many constraints conflict. The constraints of one rule, ``name[...]``, are one member at
first. A solve may end undecided at its time limit, so QuickXplain may retain a member that is
not needed. `find_minimal_conflict` therefore returns a member as needed only if the rest of the
set is proven feasible.

References
----------
U. Junker, "QuickXplain: preferred explanations and relaxations for over-constrained problems",
AAAI, 2004.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import numpy as np

from poetmodel.backends.protocol import Limits
from poetmodel.backends.registry import backend
from poetmodel.clock import processor_clock
from poetmodel.errors import TimeLimitError
from poetmodel.model.arrays import Label
from poetmodel.planner import verify
from poetmodel.problem import USER_CONSTRAINTS, Problem, Quantity
from poetmodel.result import Status, Termination
from poetmodel.solver.facade import execute
from poetmodel.solver.request import Request
from poetmodel.solver.sensitivity.remedies import (
    MIN_CHANGE_S,
    Rows,
    StatedLimit,
    stated_limits,
    without_limits,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.backends.standard_form import StandardForm
    from poetmodel.schedule import Schedule

T = TypeVar("T")

SOLVE_FRACTION: Final = 0.25
"""Maximum fraction of the time limit for one solve."""
WALL_RATIO: Final = 4.0
"""Maximum wall time of a solve, as a multiple of its limit on processor time."""
MAX_ROWS: Final = 5
"""Maximum number of single constraints in a conflict. With more, the conflict has their rules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict(Generic[T]):
    """A set of limits, or of rows of a model, that no schedule or point meets together."""

    needed: list[T]
    """Members of the set; without any one of them, the other members are proven feasible. All rows
    of one family of `build`, or of one user-defined constraint, are left out together."""
    unchecked: list[T] = field(default_factory=list)
    """Members without which it was not decided in time whether the rest is feasible."""

    @property
    def members(self) -> list[T]:
        """Needed and unchecked members."""
        return [*self.needed, *self.unchecked]


@dataclass(kw_only=True)
class _ConflictSearch:
    """Decides whether subsets of a problem's limits conflict."""

    problem: Problem
    limit_s: float
    """Processor time for all solves."""
    threads: int
    all_limits: list[StatedLimit]
    """All limits and user-defined constraints of the problem."""
    started_s: float = field(default_factory=time.process_time)
    """Processor time of this process when the search began [s]."""
    schedules: list[Schedule] = field(default_factory=list)
    """Schedules found so far."""

    def decide_conflict(self, limits: list[StatedLimit]) -> bool | None:
        """Return whether no schedule meets `limits` alone; None if undecided in time."""
        removed_limits = [limit for limit in self.all_limits if limit not in limits]
        problem = without_limits(self.problem, *removed_limits, minimize=Quantity.ENERGY)
        if any(verify(problem, schedule).valid for schedule in self.schedules):
            return False
        remaining_s = self.started_s + self.limit_s - time.process_time()
        if remaining_s < MIN_CHANGE_S:
            return None
        limit_s = min(remaining_s, SOLVE_FRACTION * self.limit_s)
        try:
            with processor_clock(WALL_RATIO * limit_s):
                request = Request(time_limit_s=limit_s, gap=1.0, threads=self.threads)
                result = execute(problem, request)
        except TimeLimitError:  # the wall-time limit passed outside the solver
            return None
        if result.termination == Termination.INTERRUPTED:
            raise KeyboardInterrupt
        if result.schedule is not None:
            self.schedules.append(result.schedule)
            return False
        return True if result.status == Status.INFEASIBLE else None


def find_minimal_conflict(
    decide_conflict: Callable[[list[T]], bool | None], members: list[T]
) -> Conflict[T]:
    """Return a minimal subset of `members` that conflicts, found by QuickXplain.

    Preferred members come first; all together conflict. An undecided subset (None) counts as no
    conflict. The set is minimal if no member is unchecked.
    """
    feasible_sets: list[set[int]] = []

    def is_conflict(subset: list[int]) -> bool:
        verdict = decide_conflict([members[i] for i in subset])
        if verdict is False:
            feasible_sets.append(set(subset))
        return verdict is True

    def is_feasible(subset: list[int]) -> bool:
        return any(feasible_set.issuperset(subset) for feasible_set in feasible_sets)

    conflict_members = find_minimal_subset(is_conflict, [], list(range(len(members))))
    for i in tuple(conflict_members):
        remaining = [j for j in conflict_members if j != i]
        if not is_feasible(remaining) and is_conflict(remaining):
            conflict_members = remaining
    needed_members = [
        i for i in conflict_members if is_feasible([j for j in conflict_members if j != i])
    ]
    return Conflict(
        needed=[members[i] for i in needed_members],
        unchecked=[members[i] for i in conflict_members if i not in needed_members],
    )


def find_minimal_subset(
    is_conflict: Callable[[list[T]], bool],
    base: list[T],
    members: list[T],
    *,
    check_base: bool = False,
) -> list[T]:
    """Return a minimal subset of `members`, in their order, that conflicts together with `base`.

    Earlier members are preferred; `base` and `members` together must conflict. With `check_base`,
    the subset is empty if `base` alone conflicts. Minimal only if `is_conflict` finds every
    conflict.
    """
    if check_base and is_conflict(base):
        return []
    if len(members) == 1:
        return members
    first_half, second_half = members[: len(members) // 2], members[len(members) // 2 :]
    second_needed = find_minimal_subset(
        is_conflict, [*base, *first_half], second_half, check_base=True
    )
    return [
        *find_minimal_subset(
            is_conflict, [*base, *second_needed], first_half, check_base=bool(second_needed)
        ),
        *second_needed,
    ]


def find_conflicting_rows(form: StandardForm, limit_s: float) -> Conflict[int] | None:
    """Find rows, by index, that no point satisfies together; None if none or undecided.

    Each row added after `build`, each constraint family of `build` and each user-defined constraint
    is one member of the search, within `limit_s` of wall time.
    """
    end_s = time.monotonic() + limit_s
    rows_of_key: dict[Any, list[int]] = {}
    for row_number, row in enumerate(form.rows):
        is_build_row = isinstance(row, Label)
        key = (
            (row.family, row.key[0] if row.family == USER_CONSTRAINTS else None)
            if is_build_row
            else row_number
        )
        rows_of_key.setdefault(key, []).append(row_number)

    def decide_conflict(subset_keys: list[Any]) -> bool | None:
        """Return whether the rows of `subset_keys` conflict; None if undecided in time."""
        rows = sorted(row_number for key in subset_keys for row_number in rows_of_key[key])
        remaining_s = min(end_s - time.monotonic(), SOLVE_FRACTION * limit_s)
        if remaining_s <= 0:
            return None
        subset_form = replace(
            form,
            matrix=form.matrix[rows],
            objective=np.zeros(form.n_columns),
            row_lower=form.row_lower[rows],
            row_upper=form.row_upper[rows],
            rows=[form.rows[row_number] for row_number in rows],
            layout=None,
        )
        solution = backend("highs").solve(subset_form, Limits(time_s=remaining_s))
        if solution.is_infeasible:
            return True
        return None if solution.x is None else False

    keys = sorted(rows_of_key, key=lambda key: isinstance(key, int))  # rows of `build` first
    if not decide_conflict(keys):
        return None
    conflict = find_minimal_conflict(decide_conflict, keys)
    return Conflict(
        needed=sorted(row_number for key in conflict.needed for row_number in rows_of_key[key]),
        unchecked=sorted(
            row_number for key in conflict.unchecked for row_number in rows_of_key[key]
        ),
    )


def find_conflict(problem: Problem, limit_s: float, *, threads: int = 1) -> Conflict[StatedLimit]:
    """Return limits and user-defined constraints of an infeasible problem that conflict.

    The set is minimal if no member is unchecked. `limit_s` is processor time, so that other
    work on the machine does not change the set. All constraints of a rule are one member at first,
    divided if there are at most `MAX_ROWS`. Raises `KeyboardInterrupt` after Ctrl-C, because an
    interrupted search is no proof.
    """
    rows_of_rule: dict[str, Rows] = {}
    for row in problem.constraints:
        rule = row.name.rpartition("[")[0] if row.name.endswith("]") else row.name
        rows_of_rule[rule] = (*rows_of_rule.get(rule, ()), row)
    limits = list(stated_limits(problem))
    search = _ConflictSearch(
        problem=problem,
        limit_s=limit_s,
        threads=threads,
        all_limits=[*limits, *rows_of_rule.values()],
    )
    conflict = find_minimal_conflict(search.decide_conflict, search.all_limits)
    has_rule = any(isinstance(limit, tuple) and len(limit) > 1 for limit in conflict.needed)
    if has_rule and not conflict.unchecked:
        search = replace(search, all_limits=[*limits, *((row,) for row in problem.constraints)])
        members = [
            limit
            for limit in search.all_limits
            if limit in conflict.needed or _is_in_rules(limit, conflict.needed)
        ]
        refined_conflict = find_minimal_conflict(search.decide_conflict, members)
        n_rows = sum(limit not in limits for limit in refined_conflict.needed)
        if not refined_conflict.unchecked and n_rows <= MAX_ROWS:
            return refined_conflict
    return conflict


def _is_in_rules(limit: StatedLimit, conflict: list[StatedLimit]) -> bool:
    """Return whether a limit is a single constraint that belongs to a rule in the conflict."""
    return isinstance(limit, tuple) and any(
        isinstance(member, tuple) and limit[0] in member for member in conflict
    )
