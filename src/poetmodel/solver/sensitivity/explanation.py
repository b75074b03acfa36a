"""Explain why a problem has no schedule, and find the nearest limits with which it has one.

Each limit is changed by itself: the problem is solved for the smallest RAM, time, energy or storage
that suffices within the other limits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from poetmodel.errors import InputError, join_names
from poetmodel.problem import DEADLINE_ROWS, USER_CONSTRAINTS, Problem
from poetmodel.problem.infeasibility import (
    infeasibility_proof,
    infeasibility_reason,
    infeasibility_reasons,
)
from poetmodel.solver.facade import solve
from poetmodel.solver.request import SearchOptions
from poetmodel.solver.sensitivity.conflict import Conflict, find_conflict, find_conflicting_rows
from poetmodel.solver.sensitivity.remedies import (
    LIMITS,
    MIN_CHANGE_S,
    Change,
    Remedy,
    StatedLimit,
    constraint_name,
    find_remedies,
    stated_limits,
    without_limits,
)
from poetmodel.units import brief, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyomo.environ as pyo

    from poetmodel.problem import Constraint
    from poetmodel.result import SolveResult


EXPLANATION_FRACTION: Final = 0.2
"""Time limit of an explanation, as a fraction of that of the solve before it."""
MAX_ROWS: Final = 5
"""Maximum number of user-defined constraints that a sentence names."""
CONFLICT_FRACTION: Final = 0.5
"""Fraction of the time limit for finding a conflict of user-defined constraints."""
_LIMIT_NAMES: Final = {
    "memory": "the RAM budget",
    "storage": "the storage",
    "energy_budget": "the energy budget",
    **dict.fromkeys(DEADLINE_ROWS, "the deadline"),
}
"""Name of the limit that rows of a family state, in messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Reasons why a problem has no schedule, and changes that permit one."""

    reason: str
    """The reason in the result of the solve; if a conflict was found and the reason is not in
    `obstacles`, a sentence that states the conflict."""
    obstacles: tuple[str, ...]
    """Messages on each limit that evidently no schedule meets, even without the other limits; () if
    added constraints are explained."""
    remedies: tuple[Remedy, ...]
    """Results of changes of a single limit or of the batch size; () if added constraints are
    explained."""
    added_constraints: tuple[str, ...] = ()
    """Names of constraints added to a model that contradict each other or the limits."""
    user_constraints: tuple[str, ...] = ()
    """Names of the problem's user-defined constraints that contradict each other or the limits."""
    limits: tuple[str, ...] = ()
    """Names of the limits in the conflict. If added constraints are explained, also the problem's
    user-defined constraints, and ``the rules of execution``."""
    unchecked: tuple[str, ...] = ()
    """Names of constraints and limits that may belong to the conflict: this was not decided within
    the time limit."""
    notes: tuple[str, ...] = ()
    """Remarks for users, for example on resident bytes or the batch size."""

    def __repr__(self) -> str:
        working_changes = [str(remedy.change) for remedy in self.remedies if remedy.works]
        return brief(
            self,
            f"would suffice: {' or '.join(working_changes)}" if working_changes else "",
            self.reason,
        )

    @property
    def working_remedies(self) -> tuple[Remedy, ...]:
        """The remedies whose change is sufficient by itself."""
        return tuple(remedy for remedy in self.remedies if remedy.works)

    @property
    def whole_reason(self) -> str:
        """The reason and all obstacles that it does not contain."""
        other_obstacles = [
            obstacle for obstacle in dict.fromkeys(self.obstacles) if obstacle not in self.reason
        ]
        return "; ".join(obstacle for obstacle in (self.reason, *other_obstacles) if obstacle)

    def sentences(self) -> Iterator[str]:
        """Yield the obstacles that are not equal to the reason, then the hints, as sentences."""
        yield from (obstacle for obstacle in self.obstacles if obstacle != self.reason)
        yield from self.hints()

    def hints(self) -> Iterator[str]:
        """Yield sentences on the conflict, the changes and the notes.

        Undecided changes are always stated; changes that do not suffice, only if no change does.
        If there are two or more changes, all proven not to suffice, one sentence replaces them.
        """
        context = f" together with {' and '.join(self.limits)}" if self.limits else ""
        if self.user_constraints:
            subject = _list_names(self.user_constraints, "constraint")
            is_plural = len(self.user_constraints) > 1
            predicate = "cannot be met"
            if self.unchecked:
                predicate = "take part in a conflict" if is_plural else "takes part in a conflict"
            yield f"{subject} {predicate}{context}"
        if self.added_constraints:
            names_text = join_names(self.added_constraints)
            predicate = "take part in a conflict" if self.unchecked else "cannot be met"
            yield f"these added constraints {predicate}{context}: {names_text}"
        if self.unchecked:
            yield f"not decided in time whether in the conflict: {join_names(self.unchecked)}"
        yield from (remedy.sentence() for remedy in self.working_remedies)
        failed_remedies = [remedy for remedy in self.remedies if not remedy.works]
        if (
            not self.working_remedies
            and len(failed_remedies) > 1
            and all(remedy.works is False for remedy in failed_remedies)
        ):
            yield "no change of a single limit suffices: at least two must change"
        else:
            yield from (
                remedy.sentence()
                for remedy in failed_remedies
                if remedy.works is None or not self.working_remedies
            )
        yield from self.notes

    def to_dict(self) -> dict[str, Any]:
        """Return the explanation as plain values in SI units.

        ``changes`` has the remedies, and ``constraints`` the names in `added_constraints` and
        `user_constraints`. ``sentences`` has the results of the method `sentences`, which include
        the notes.
        """
        return {
            "reason": self.reason,
            "sentences": list(self.sentences()),
            "obstacles": list(self.obstacles),
            "changes": [remedy.to_dict() for remedy in self.remedies],
            "constraints": [*self.added_constraints, *self.user_constraints],
            "limits": list(self.limits),
            "unchecked": list(self.unchecked),
        }


def _list_names(names: Sequence[str], noun: str) -> str:
    """Return the noun, at most `MAX_ROWS` quoted names, and the number of further names."""
    *first_names, last_name = map(repr, names[:MAX_ROWS])
    n_hidden = len(names) - MAX_ROWS
    if n_hidden > 0:
        return f"{noun}s {', '.join((*first_names, last_name))} and {n_hidden} more"
    return (
        f"{noun}s {', '.join(first_names)} and {last_name}"
        if first_names
        else f"{noun} {last_name}"
    )


def explain_infeasible(
    result: SolveResult,
    *,
    model: pyo.ConcreteModel | None = None,
    time_limit: float = 10.0,
    threads: int = 1,
) -> Explanation:
    """Find the limits that make a problem infeasible, and changes that permit a schedule.

    Parameters
    ----------
    result : SolveResult
        The result that proves infeasibility.
    model : ConcreteModel, optional
        The solved model, if a model was solved. If a schedule is found for the problem itself,
        without the additions to the model (rows, fixed variables), the explanation has the added
        rows and the limits that conflict, and no changes.
    time_limit : float
        Time for the whole explanation [s]. For the conflict of user-defined constraints this is
        processor time, so that other work on the machine does not change the result, and at most
        four times as much wall time. Each change has at least `MIN_CHANGE_S`, also beyond the
        limit.
    threads : int
        As for `solve`.

    Returns
    -------
    Explanation
        Changes of one limit each, or of the batch size, with the smallest amount found that
        suffices. Every "does not help" is proven, and for every amount that suffices, the verifier
        accepted a schedule. For problems with user-defined constraints, also a set of limits that
        conflicts, minimal if `unchecked` is empty; changes of limits outside the set do not help,
        and are not solved for. A constraint that is not proven to belong to the set is in
        `unchecked`, and in `remedies` only if its change suffices.

    Raises
    ------
    InputError
        If `result` is a problem instead of the result of its solve.
    KeyboardInterrupt
        After Ctrl-C in the search for a conflict of user-defined constraints.
    """
    argument: object = result
    if isinstance(argument, Problem):
        raise InputError(
            "explain_infeasible: expected the result of a solve, got a Problem; give "
            "pm.solve(problem)"
        )
    end_s = time.process_time() + time_limit
    problem = result.problem
    if model is not None:
        model_explanation = _explain_added_rows(result, model, end_s=end_s, threads=threads)
        if model_explanation is not None:
            return model_explanation
    conflict: Conflict[StatedLimit] | None = None
    if problem.constraints:
        conflict = find_conflict(problem, CONFLICT_FRACTION * time_limit, threads=threads)
    members = None if conflict is None else conflict.members
    needed_members, unchecked = (
        ((), ()) if conflict is None else (conflict.needed, conflict.unchecked)
    )
    remedies = find_remedies(
        problem,
        conflict=members,
        search=SearchOptions(
            time_limit_s=max(MIN_CHANGE_S, end_s - time.process_time()), threads=threads
        ),
    )
    if model is None:
        remedies = tuple(remedy.raise_bound_above_stated() for remedy in remedies)
    unchecked_names = {constraint_name(member) for member in unchecked if _is_constraint(member)}
    remedies = tuple(
        remedy for remedy in remedies if remedy.works or remedy.constraint not in unchecked_names
    )
    obstacles = tuple(infeasibility_reasons(problem))
    is_joint_conflict = members and result.reason not in obstacles
    return Explanation(
        reason=_describe_conflict(problem, conflict)
        if is_joint_conflict and conflict
        else result.reason,
        obstacles=obstacles,
        remedies=remedies,
        user_constraints=tuple(
            constraint_name(member) for member in needed_members if _is_constraint(member)
        ),
        limits=tuple(LIMITS[limit] for limit in LIMITS if limit in needed_members),
        unchecked=tuple(_describe_limit(member) for member in unchecked),
        notes=tuple(_list_notes(problem, remedies)),
    )


def _is_constraint(limit: StatedLimit) -> TypeGuard[tuple[Constraint, ...]]:
    """Return whether a limit is a tuple: a user-defined constraint, or all of one rule."""
    return isinstance(limit, tuple)


def _describe_limit(limit: StatedLimit) -> str:
    """Return the name of a limit or user-defined constraint for messages."""
    if isinstance(limit, Change):
        return LIMITS[limit]
    return f"constraint {constraint_name(limit)!r}"


def _describe_conflict(problem: Problem, conflict: Conflict[StatedLimit]) -> str:
    """Return the reason of infeasibility with the amounts of the conflicting limits only."""
    if conflict.unchecked:
        n_rows = len(problem.constraints)
        return infeasibility_proof(
            replace(problem, constraints=()), f"and all {n_rows} constraints together"
        )
    members = {row for member in conflict.needed if _is_constraint(member) for row in member}
    other_members: list[StatedLimit] = [
        limit for limit in stated_limits(problem) if limit not in conflict.needed
    ]
    other_members += [(row,) for row in problem.constraints if row not in members]
    return infeasibility_proof(
        without_limits(problem, *other_members), ram=Change.RAM in conflict.needed
    )


def _list_notes(problem: Problem, remedies: Sequence[Remedy]) -> Iterator[str]:
    """Yield notes on the device's RAM, resident bytes, large gradients and the batch size."""
    device = problem.costs.device
    for remedy in remedies:
        nearest_bytes = remedy.nearest if remedy.change == Change.RAM else None
        if device is not None and nearest_bytes is not None and nearest_bytes > device.ram_bytes:
            ram = format_bytes(device.ram_bytes)
            yield (
                f"{format_bytes(int(nearest_bytes))} is more than the {ram} of RAM that device "
                f"{device.short_name} has"
            )
    resident_bytes = problem.resident_bytes
    if resident_bytes:
        yield (
            f"{resident_bytes:,} bytes ({format_bytes(resident_bytes)}) are counted for "
            "parameters, gradients and optimizer state"
        )
    if _has_gradient_at_min_ram(problem):
        node = problem.graph.nodes[problem.floor.node]
        yield (
            f"node {node.name!r} holds the whole gradient of a parameter; where a graph splits "
            "larger parameters, as --tile 32KiB does for built-in networks, it takes less RAM"
        )
    batch_size = problem.graph.batch_size
    if batch_size > 1 and infeasibility_reason(problem) is not None:
        yield (
            f"a training step has a batch of {batch_size}; a graph made for a smaller batch takes "
            "less RAM"
        )


def _has_gradient_at_min_ram(problem: Problem) -> bool:
    """Return whether the largest working set exceeds the budget and contains a whole gradient."""
    graph, floor = problem.graph, problem.floor
    if not graph.replacement_of or floor.bytes <= problem.usable_ram_bytes:
        return False
    updates = {graph.node_of[new] for new in graph.state_of}
    tensors = (*graph.inputs_of[floor.node], *graph.outputs_of[floor.node])
    largest = max(tensors, key=graph.tensor_bytes.__getitem__)
    return floor.node in updates or bool(updates.intersection(graph.users_of[largest]))


def _explain_added_rows(
    result: SolveResult, model: pyo.ConcreteModel, *, end_s: float, threads: int
) -> Explanation | None:
    """Explain an infeasible model by the rows that were added to it, without remedies.

    None if no schedule was found without these rows. `end_s` refers to ``time.process_time()`` [s];
    each search has at least `MIN_CHANGE_S`.
    """
    from poetmodel.backends.compiler import compile_model
    from poetmodel.model.arrays import Label

    remaining_s = end_s - time.process_time()
    problem_result = solve(
        result.problem, time_limit=max(MIN_CHANGE_S, remaining_s / 2), gap=1.0, threads=threads
    )
    if problem_result.schedule is None:
        return None
    form = compile_model(model)
    remaining_s = max(MIN_CHANGE_S, end_s - time.process_time())
    conflict = find_conflicting_rows(form, remaining_s)
    needed_rows, unchecked = ((), ()) if conflict is None else (conflict.needed, conflict.unchecked)
    rows = [form.rows[i] for i in needed_rows]
    added_rows = [_describe_row(row) for row in rows if not isinstance(row, Label)]
    limit_texts = [_describe_row(row) for row in rows if isinstance(row, Label)]
    unchecked_rows = [_describe_row(form.rows[i]) for i in unchecked]
    notes = ["without the additions to the model, a schedule exists"]
    if conflict is None:
        notes.append("which of the added constraints conflict was not decided in time")
    elif not added_rows and not unchecked_rows:
        notes.append("no added constraint takes part: check variables that are fixed or bounded")
    return Explanation(
        reason=result.reason,
        obstacles=(),
        remedies=(),
        added_constraints=tuple(dict.fromkeys(added_rows)),
        limits=tuple(dict.fromkeys(limit_texts)),
        unchecked=tuple(dict.fromkeys(unchecked_rows)),
        notes=tuple(notes),
    )


def _describe_row(row: Any) -> str:
    """Return the name of an added row, or of the limit that a row of `build` states."""
    from poetmodel.model.arrays import Label

    if not isinstance(row, Label):
        return row if isinstance(row, str) else str(row.name)
    if row.family == USER_CONSTRAINTS:
        return f"constraint {row.key[0]!r}"
    return _LIMIT_NAMES.get(row.family, "the rules of execution")
