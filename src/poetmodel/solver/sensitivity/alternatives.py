"""Compute the cost of a decision, and the smallest RAM budget that permits a better schedule.

The cost of a decision is found by solving the problem without it. User-defined constraints on
totals forbid the decision, so the bounds of the changed problem are valid for the alternative.
Costs and savings are in the unit of the minimized quantity.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from poetmodel.problem import USER_OBJECTIVE, Constraint, Problem, Quantity
from poetmodel.problem.totals import CONSTANT, Count, Total
from poetmodel.result import SolveResult, Status
from poetmodel.schedule import GraphIdentity, Schedule
from poetmodel.schedule.decisions import Treatment, find_decisions
from poetmodel.solver.outcome import (
    Candidate,
    better_candidate,
    is_gap_closed,
    make_candidate,
    make_valid_candidate,
)
from poetmodel.solver.request import SearchOptions
from poetmodel.solver.sensitivity.variants import MIN_SOLVE_S, Variants, with_graph_identity
from poetmodel.units import brief

if TYPE_CHECKING:
    from collections.abc import Iterator

GAP: Final = 1e-4
"""Gap tolerance of alternatives, and the minimum improvement that counts, relative to the
overhead."""
MIN_GAIN_RATIO: Final = 1e-7
"""Minimum improvement that counts, relative to the value with its baseline. It exceeds the
tolerance of limits."""


class Forbidden(StrEnum):
    """Decisions on a tensor that an alternative forbids."""

    RECOMPUTATION = "recomputation"
    """The tensor's node is not recomputed."""
    PAGING = "paging"
    """The tensor is not paged."""
    BOTH = "recomputation and paging"
    """The tensor is kept from its first computation to its last use."""
    KEEPING = "keeping"
    """The tensor is evicted before its last use, and recomputed or paged in."""
    STORAGE = "a home on storage"
    """The state tensor has its home in RAM."""
    RESIDENCE = "a home in RAM"
    """The state tensor has its home on storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best schedule without a decision, compared with the given schedule."""

    tensor: int
    forbidden: Forbidden
    status: Status
    """``optimal``: proven to be the cheapest schedule without the decision, within the gap.
    ``infeasible``: proven that no schedule exists without the decision. ``feasible``: a schedule
    was found, but not proven to be the cheapest. ``unknown``: no schedule was found."""
    becomes: Treatment | None = None
    """The treatment of the tensor in the found schedule; None without a schedule."""
    extra: float | None = None
    """Extra cost of the found schedule, in the unit of the minimized quantity; negative if it is
    better than the given one. None without a schedule."""
    min_extra: float | None = None
    """Proven lower bound on the extra cost of every schedule without the decision; None if
    infeasible."""
    extra_s: float | None = None
    """Extra time of the found schedule, as the deadline counts it [s]; None without a schedule."""
    schedule: Schedule | None = None
    """The found schedule; None if none was found."""

    def __repr__(self) -> str:
        extra = "no schedule" if self.extra is None else f"{self.extra:+.6g}"
        return brief(self, f"without {self.forbidden}", str(self.status), extra)

    @property
    def proven(self) -> bool:
        """Whether the status is ``optimal`` or ``infeasible``."""
        return self.status in (Status.OPTIMAL, Status.INFEASIBLE)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields except tensor and schedule, plus `proven`, as plain values in SI units.

        `forbidden` has the key ``without``.
        """
        return {
            "without": str(self.forbidden),
            "status": str(self.status),
            "becomes": None if self.becomes is None else str(self.becomes),
            "extra": self.extra,
            "min_extra": self.min_extra,
            "extra_s": self.extra_s,
            "proven": self.proven,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RamStep:
    """The smallest RAM budget that permits a better schedule, and the improvement."""

    status: Status
    """``optimal``: `ram_bytes` is proven to be the smallest. ``feasible``: a smaller budget may
    suffice. ``infeasible``: proven that no budget permits a better schedule. ``unknown``: no better
    schedule was found."""
    ram_bytes: int | None = None
    """The smallest RAM budget found with a better schedule, at least that of the problem [B]; None
    without one."""
    min_ram_bytes: int | None = None
    """Proven: no smaller RAM budget permits a better schedule [B]; None without a bound."""
    saved: float | None = None
    """Saving of the best schedule found within `ram_bytes`, in the unit of the minimized quantity;
    None without one."""
    max_saved: float | None = None
    """Proven maximum saving within `ram_bytes`; None without a better schedule."""

    @property
    def proven(self) -> bool:
        """Whether it is proven that no smaller budget, or no budget, permits a better schedule."""
        return self.status in (Status.OPTIMAL, Status.INFEASIBLE)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields and `proven` as plain values in SI units."""
        return asdict(self) | {"status": str(self.status), "proven": self.proven}


_LIMITED_COUNTS: Final = {
    Forbidden.RECOMPUTATION: (Count.RECOMPUTATIONS,),
    Forbidden.PAGING: (Count.PAGE_INS, Count.PAGE_OUTS),
    Forbidden.BOTH: (Count.RECOMPUTATIONS, Count.PAGE_INS, Count.PAGE_OUTS),
    Forbidden.KEEPING: (Count.RECOMPUTATIONS, Count.PAGE_INS),
}
"""Counts that a constraint limits to forbid a decision on a tensor that is no state."""


def find_alternatives(
    problem: Problem,
    schedule: Schedule,
    tensor: int,
    *,
    bound: float | None = None,
    time_limit: float = 10.0,
    threads: int = 1,
) -> tuple[Alternative, ...]:
    """Solve a problem again without each decision of a valid schedule on one tensor.

    Parameters
    ----------
    problem : Problem
        The problem of the schedule.
    schedule : Schedule
        A valid schedule of the problem.
    tensor : int
        Position of the tensor in the graph.
    bound : float, optional
        A proven lower bound on the minimized quantity, baseline included, in the unit of the
        quantity; it is also valid for alternatives.
    time_limit : float
        Wall time for all alternatives [s]; each solve has at least 0.1 s.
    threads : int
        As for `poetmodel.solve`.

    Returns
    -------
    tuple of Alternative
        One for each decision of the schedule that can be forbidden: recomputation, paging, both
        (then the tensor is kept), keeping, or the home of state. Empty if none can be forbidden.

    Raises
    ------
    KeyboardInterrupt
        After Ctrl-C, which ends a solve.
    """
    given_candidate = make_candidate(problem, schedule)
    known_bound = -math.inf if bound is None else bound - problem.objective.baseline
    forbidden_decisions = tuple(
        _list_forbiddable(problem, find_decisions(problem, schedule)[tensor].treatment, tensor)
    )
    search = SearchOptions(time_limit_s=max(time_limit, MIN_SOLVE_S), threads=threads)
    variants = Variants(len(forbidden_decisions), search, shares_schedules=False)
    alternatives: list[Alternative] = []
    for forbidden in forbidden_decisions:
        matching_alternative = next(
            (
                alternative
                for alternative in alternatives
                if _is_alternative_for(alternative, forbidden)
            ),
            None,
        )
        if matching_alternative is not None:
            variants.skip()
            alternatives.append(replace(matching_alternative, forbidden=forbidden))
            continue
        result = variants.solve_uninterrupted(_forbid(problem, tensor, forbidden), gap=GAP)
        alternatives.append(
            _make_alternative(problem, given_candidate, tensor, forbidden, result, known_bound)
        )
    return tuple(alternatives)


def _is_alternative_for(alternative: Alternative, forbidden: Forbidden) -> bool:
    """Return whether a weaker restriction's alternative is also the one for `forbidden`."""
    return forbidden == Forbidden.BOTH and alternative.becomes == Treatment.KEPT


def find_ram_step(
    problem: Problem, schedule: Schedule, *, time_limit: float = 10.0, threads: int = 1
) -> RamStep | None:
    """Find the smallest RAM budget that permits a better schedule than the valid `schedule`.

    First, RAM is minimized subject to a value below that of the schedule by the minimum improvement
    that counts. Then the problem is solved again within `RamStep.ram_bytes`: the found budget, or
    the budget of `problem` if that is larger. `time_limit` is the wall time for both solves [s];
    each has at least 0.1 s. Returns budgets and savings, not the schedule; None if RAM itself is
    minimized. If no better schedule is found, the result has no `ram_bytes`; its status is
    INFEASIBLE if a better one is proved not to exist.

    Raises
    ------
    KeyboardInterrupt
        After Ctrl-C, which ends a solve.
    """
    if problem.minimize == Quantity.RAM:
        return None
    search = SearchOptions(time_limit_s=max(time_limit, MIN_SOLVE_S), threads=threads)
    variants = Variants(2, search)
    given_candidate = make_candidate(problem, schedule)
    objective = problem.objective
    value = objective.value_of(given_candidate.simulation)
    min_gain = max(GAP * given_candidate.value, MIN_GAIN_RATIO * abs(value))
    if objective.is_in_bytes:
        min_gain = max(1.0, min_gain)
    if given_candidate.value - objective.known_bound < min_gain:
        return RamStep(status=Status.INFEASIBLE)
    cheaper_problem = _limit_objective(
        problem.without_limits(Quantity.RAM, minimize=Quantity.RAM), value - min_gain, problem
    )
    min_ram_result = variants.solve_uninterrupted(cheaper_problem, gap=0.0)
    bound = min_ram_result.objective_bound
    min_ram_bytes = None if bound is None else int(bound) + problem.resident_bytes
    if min_ram_result.schedule is None:
        return RamStep(status=min_ram_result.status, min_ram_bytes=min_ram_bytes)
    # The plan of a makespan may need more RAM than its schedule.
    needed_bytes = math.ceil(min_ram_result.value or 0) + problem.resident_bytes
    ram_bytes = max(needed_bytes, problem.ram_budget_bytes)
    larger_problem = replace(problem, ram=ram_bytes)
    best_result = variants.solve_uninterrupted(
        larger_problem, gap=GAP, start=min_ram_result.schedule
    )
    best_candidate = better_candidate(
        make_valid_candidate(larger_problem, best_result.schedule),
        make_valid_candidate(larger_problem, min_ram_result.schedule),
    )
    max_saved = value - best_result.proven_bound
    return RamStep(
        status=min_ram_result.status,
        ram_bytes=ram_bytes,
        min_ram_bytes=min_ram_bytes,
        saved=None if best_candidate is None else given_candidate.value - best_candidate.value,
        max_saved=max_saved,
    )


def _limit_objective(changed_problem: Problem, upper_limit: float, problem: Problem) -> Problem:
    """Return `changed_problem` with an upper limit on the quantity that `problem` minimizes.

    The limit includes the baseline, and replaces the energy budget or the deadline. `problem` must
    not minimize RAM.
    """
    if problem.minimize in (Quantity.ENERGY, Quantity.TIME):
        return changed_problem.with_limit(Quantity(problem.minimize), upper_limit)
    terms = dict(
        problem.user_objective
        if problem.minimize == USER_OBJECTIVE
        else ((Total.BYTES_WRITTEN, 1),)
    )
    upper = upper_limit - terms.pop(CONSTANT, 0)
    row = Constraint(name=_free_name(changed_problem, "objective"), terms=terms, upper=upper)
    return replace(
        changed_problem, constraints=(*changed_problem.constraints, row), user_objective=()
    )


def _list_forbiddable(problem: Problem, treatment: Treatment, i: int) -> Iterator[Forbidden]:
    """Yield the decisions that can be forbidden if tensor `i` has `treatment` in the schedule."""
    can_recompute = problem.may_recompute(problem.graph.node_of[i])
    if treatment in (Treatment.RECOMPUTED, Treatment.BOTH):
        yield Forbidden.RECOMPUTATION
    if treatment.is_paged:
        yield Forbidden.PAGING
    if treatment == Treatment.BOTH or (
        problem.can_page
        if treatment == Treatment.RECOMPUTED
        else treatment.is_paged and can_recompute
    ):
        yield Forbidden.BOTH
    if treatment == Treatment.KEPT and (can_recompute or problem.can_page):
        yield Forbidden.KEEPING
    if treatment == Treatment.ON_STORAGE:
        yield Forbidden.STORAGE
    if treatment == Treatment.RESIDENT and problem.can_page:
        yield Forbidden.RESIDENCE


def _forbid(problem: Problem, i: int, forbidden: Forbidden) -> Problem:
    """Return the problem with a constraint that forbids the decisions `forbidden` on tensor `i`."""
    graph = problem.graph
    names = dict.fromkeys(Count, graph.tensors[i].name)
    names[Count.RECOMPUTATIONS] = graph.nodes[graph.node_of[i]].name
    counts = _LIMITED_COUNTS.get(forbidden, (Count.RESIDENT,))
    has_lower_limit = forbidden in (Forbidden.KEEPING, Forbidden.STORAGE)
    row = Constraint(
        name=_free_name(problem, f"without {forbidden}"),
        terms={f"{count}:{names[count]}": 1 for count in counts},
        lower=1 if has_lower_limit else None,
        upper=None if has_lower_limit else 0,
    )
    return replace(problem, constraints=(*problem.constraints, row))


def _free_name(problem: Problem, name: str) -> str:
    """Return a name that no constraint of the problem has: `name`, with primes until it is free."""
    used_names = {row.name for row in problem.constraints}
    while name in used_names:
        name += "'"
    return name


def _make_alternative(
    problem: Problem,
    given_candidate: Candidate,
    i: int,
    forbidden: Forbidden,
    result: SolveResult,
    known_bound: float,
) -> Alternative:
    """Convert the result of a solve without decision `forbidden` on tensor `i`.

    Extra cost and time are relative to `given_candidate`. For `KEEPING`, the schedule must evict
    the tensor before its last use: `_evict_in_longest_interval` may replace the result's.
    """
    base_alternative = Alternative(tensor=i, forbidden=forbidden, status=result.status)
    if result.status == Status.INFEASIBLE:
        return base_alternative
    bound = max(known_bound, result.proven_bound - problem.objective.baseline)
    base_alternative = replace(
        base_alternative, status=Status.UNKNOWN, min_extra=bound - given_candidate.value
    )
    best_candidate = None
    if result.schedule is not None:
        best_candidate = make_valid_candidate(
            problem, with_graph_identity(result.schedule, problem.graph)
        )
    if forbidden == Forbidden.KEEPING:
        if best_candidate is not None and not _is_read_after_restore(
            problem, best_candidate.schedule, i
        ):
            best_candidate = None  # the tensor was not evicted before its last use
        best_candidate = better_candidate(
            best_candidate, _evict_in_longest_interval(problem, given_candidate.schedule, i)
        )
    if best_candidate is None:
        return base_alternative
    is_proven = is_gap_closed(problem, best_candidate.value, bound, GAP)
    extra = best_candidate.value - given_candidate.value
    times_s = (best_candidate.simulation.time_s, given_candidate.simulation.time_s)
    return replace(
        base_alternative,
        status=Status.OPTIMAL if is_proven else Status.FEASIBLE,
        becomes=find_decisions(problem, best_candidate.schedule)[i].treatment,
        extra=extra,
        min_extra=min(bound - given_candidate.value, extra),
        extra_s=(times_s[0] or 0.0) - (times_s[1] or 0.0),
        schedule=best_candidate.schedule,
    )


def _is_read_after_restore(problem: Problem, schedule: Schedule, i: int) -> bool:
    """Return whether tensor `i` is read in or after the stage of its first restoration."""
    graph, k = problem.graph, problem.graph.node_of[i]
    restore_stages = [t for t, j in schedule.R if j == k and t > k]
    restore_stages += [t for t, j in schedule.M_in if j == i]
    read_stages = [t for t, j in schedule.R if j in graph.users_of[i]]
    return min(restore_stages, default=len(graph.nodes)) <= max(read_stages, default=-1)


def _evict_in_longest_interval(problem: Problem, schedule: Schedule, i: int) -> Candidate | None:
    """Evict the kept tensor `i` in its longest interval; return the better of two schedules.

    One recomputes the tensor in the stage of its next use, the other pages it out and in. None if
    neither is permitted and valid.
    """
    graph, k = problem.graph, problem.graph.node_of[i]
    stages = sorted({t for t, j in schedule.R if j in graph.users_of[i]} | {k})
    intervals = [(reader - first, first, reader) for first, reader in pairwise(stages)]
    if not intervals:
        return None
    _, first, reader = max(intervals)
    kept_spans = [span for span in schedule.kept if span[0] != i]
    for _, begin, end in (span for span in schedule.kept if span[0] == i):
        kept_spans += [(i, begin, min(end, first)), (i, max(begin, reader + 1), end)]
    common_relations: dict[str, Any] = {
        "kept": kept_spans,
        "resident": schedule.resident,
        "identity": GraphIdentity.from_graph(graph),
    }
    best_candidate = None
    if problem.may_recompute(k) and reader <= graph.last_stages[k]:
        with_recomputation = Schedule.from_spans(
            R=(*schedule.R, (reader, k)),
            stored=schedule.stored,
            M_in=schedule.M_in,
            M_out=schedule.M_out,
            **common_relations,
        )
        best_candidate = make_valid_candidate(problem, with_recomputation)
    if problem.can_page:
        with_page_in = Schedule.from_spans(
            R=schedule.R,
            stored=(*schedule.stored, (i, k + 1, reader)),
            M_in=(*schedule.M_in, (reader, i)),
            M_out=(*schedule.M_out, (k, i)),
            **common_relations,
        )
        best_candidate = better_candidate(
            best_candidate, make_valid_candidate(problem, with_page_in)
        )
    return best_candidate
