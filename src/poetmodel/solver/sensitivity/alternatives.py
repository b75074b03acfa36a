"""The cost of a decision: a problem solved again without it, and with the next step of RAM.

Decisions are forbidden by constraints on totals, so every formulation and back end solves what is
left, and its bounds hold. Amounts are of the quantity that the problem minimizes.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from poetmodel.problem import USER_OBJECTIVE, Constraint, Problem, Quantity
from poetmodel.problem.totals import CONSTANT, Count, Total
from poetmodel.result import SolveResult, Status, Termination
from poetmodel.schedule import GraphIdentity, Schedule
from poetmodel.schedule.decisions import Treatment, find_decisions
from poetmodel.solver.outcome import Candidate, accepted, as_candidate, better, is_closed
from poetmodel.solver.sensitivity.variants import ChangedProblem, of_graph, solve_variants
from poetmodel.units import brief

if TYPE_CHECKING:
    from collections.abc import Iterator

GAP: Final = 1e-4
"""Gap to which alternatives are solved, and the least gain that counts, of the overhead."""
LEAST_GAIN: Final = 1e-7
"""The least gain that counts, of the whole amount: above the tolerance of limits."""


class Forbidden(StrEnum):
    """What an alternative does without."""

    RECOMPUTATION = "recomputation"
    """The node of the tensor is not computed again."""
    PAGING = "paging"
    """The tensor is not paged."""
    BOTH = "recomputation and paging"
    """The tensor is kept from its first computation to its last use."""
    KEEPING = "keeping"
    """The tensor leaves RAM before its last use, and is recomputed or paged in."""
    STORAGE = "a home on storage"
    """The state tensor has its home in RAM."""
    RESIDENCE = "a home in RAM"
    """The state tensor has its home on storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best schedule without a decision; amounts are beyond those of the given schedule."""

    tensor: int
    forbidden: Forbidden
    status: Status
    """``optimal``: nothing cheaper does without the decision, within the gap. ``infeasible``: it is
    proven that nothing does. ``feasible``, ``unknown``: not decided within the time limit."""
    becomes: Treatment | None = None
    """The decision on the tensor in the schedule found; None without one."""
    extra: float | None = None
    """What that schedule costs more, in the unit of the minimized quantity; may be negative."""
    least_extra: float | None = None
    """Proven: every schedule without the decision costs this much more; None if infeasible."""
    extra_s: float | None = None
    """What it takes longer, as the deadline counts it [s]."""
    schedule: Schedule | None = None
    """The schedule found."""

    def __repr__(self) -> str:
        extra = "no schedule" if self.extra is None else f"{self.extra:+.6g}"
        return brief(self, f"without {self.forbidden}", str(self.status), extra)

    @property
    def proven(self) -> bool:
        """Whether it is decided what doing without costs."""
        return self.status in (Status.OPTIMAL, Status.INFEASIBLE)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, SI."""
        return {
            "without": str(self.forbidden),
            "status": str(self.status),
            "becomes": None if self.becomes is None else str(self.becomes),
            "extra": self.extra,
            "least_extra": self.least_extra,
            "extra_s": self.extra_s,
            "proven": self.proven,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RamStep:
    """The least RAM budget that allows a better schedule, and how much better it is."""

    status: Status
    """``infeasible``: it is proven that no RAM does. ``unknown``: no better schedule was found."""
    ram_bytes: int | None = None
    """The least RAM budget found with a better schedule, that of the problem or more [B]."""
    least_ram_bytes: int | None = None
    """Proven: within less RAM there is none [B]."""
    saved: float | None = None
    """What the best schedule found within `ram_bytes` saves, in the minimized unit."""
    most_saved: float | None = None
    """Proven: no schedule within `ram_bytes` saves more."""

    @property
    def proven(self) -> bool:
        """Whether it is proven that nothing is gained by less RAM, or by any."""
        return self.status in (Status.OPTIMAL, Status.INFEASIBLE)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, SI."""
        return asdict(self) | {"status": str(self.status), "proven": self.proven}


_COUNTED: Final = {
    Forbidden.RECOMPUTATION: (Count.RECOMPUTATIONS,),
    Forbidden.PAGING: (Count.PAGE_INS, Count.PAGE_OUTS),
    Forbidden.BOTH: (Count.RECOMPUTATIONS, Count.PAGE_INS, Count.PAGE_OUTS),
    Forbidden.KEEPING: (Count.RECOMPUTATIONS, Count.PAGE_INS),
}
"""What is counted to forbid a decision on a tensor that is no state."""


def find_alternatives(
    problem: Problem,
    schedule: Schedule,
    tensor: int,
    *,
    bound: float | None = None,
    time_limit: float = 10.0,
    threads: int = 1,
) -> tuple[Alternative, ...]:
    """Solve a problem again without what a valid schedule decides on a tensor.

    Parameters
    ----------
    problem : Problem
        The problem of the schedule.
    schedule : Schedule
        A valid one.
    tensor : int
        Position of the tensor in the graph.
    bound : float, optional
        A proven bound on the minimized quantity, in its own unit; it holds for alternatives too.
    time_limit : float
        Wall time for all alternatives [s].
    threads : int
        As for `poetmodel.solve`.

    Returns
    -------
    tuple of Alternative
        One for each decision of the schedule that can be forbidden: recomputation, paging, both
        (then the tensor is kept), keeping, or the home of state. Empty where there is no choice.

    Raises
    ------
    KeyboardInterrupt
        After Ctrl-C, which ends a solve.
    """
    ends_s = time.monotonic() + time_limit
    before = as_candidate(problem, schedule)
    known = -math.inf if bound is None else bound - problem.objective.baseline
    ways = tuple(_ways(problem, find_decisions(problem, schedule)[tensor].choice, tensor))
    found: list[Alternative] = []
    for number, way in enumerate(ways):
        same = next((other for other in found if _does_without(other, way)), None)
        if same is not None:
            found.append(replace(same, forbidden=way))
            continue
        share_s = (ends_s - time.monotonic()) / (len(ways) - number)
        changed = ChangedProblem(problem=_without(problem, tensor, way), gap=GAP)
        result = _solved(changed, share_s, threads)
        found.append(_alternative(problem, before, tensor, way, result, known))
    return tuple(found)


def _does_without(other: Alternative, way: Forbidden) -> bool:
    """Return whether an alternative, which forbids less, is the best schedule of another one.

    Without recomputation, or without paging, the best schedule may keep the tensor.
    """
    return way == Forbidden.BOTH and other.becomes == Treatment.KEPT


def find_ram_step(
    problem: Problem, schedule: Schedule, *, time_limit: float = 10.0, threads: int = 1
) -> RamStep | None:
    """Find the least RAM budget within which a schedule is better than a valid one.

    That is the problem of the least RAM whose minimized quantity is below that of the schedule by
    more than the gap; the problem is then solved again within that budget. `time_limit` is for both
    [s]. Returns None if RAM itself is minimized.

    Raises
    ------
    KeyboardInterrupt
        After Ctrl-C, which ends a solve.
    """
    if problem.minimize == Quantity.RAM:
        return None
    ends_s = time.monotonic() + time_limit
    before = as_candidate(problem, schedule)
    objective = problem.objective
    value = objective.value_of(before.simulation)
    gain = max(GAP * before.value, LEAST_GAIN * abs(value))
    if objective.is_in_bytes:
        gain = max(1.0, gain)
    if before.value - objective.known_bound < gain:
        return RamStep(status=Status.INFEASIBLE)
    cheaper = _limited(problem.without(Quantity.RAM, minimize=Quantity.RAM), value - gain, problem)
    least = _solved(ChangedProblem(problem=cheaper, gap=0.0), time_limit / 2, threads)
    bound = least.objective_bound
    least_bytes = None if bound is None else int(bound) + problem.resident_bytes
    if least.schedule is None:
        return RamStep(status=least.status, least_ram_bytes=least_bytes)
    needed_bytes = (least.peak_ram_bytes or 0) + problem.resident_bytes
    ram_bytes = max(needed_bytes, problem.ram_budget_bytes)
    roomier = replace(problem, ram=ram_bytes)
    left_s = max(0.1, ends_s - time.monotonic())
    best = _solved(ChangedProblem(problem=roomier, gap=GAP), left_s, threads, least.schedule)
    found = better(accepted(roomier, best.schedule), accepted(roomier, least.schedule))
    most_saved = value - best.proven_bound
    return RamStep(
        status=least.status,
        ram_bytes=ram_bytes,
        least_ram_bytes=least_bytes,
        saved=None if found is None else before.value - found.value,
        most_saved=most_saved,
    )


def _solved(
    changed: ChangedProblem, limit_s: float, threads: int, start: Schedule | None = None
) -> SolveResult:
    (result,) = solve_variants([changed], time_limit=limit_s, threads=threads, start=start)
    if result.termination == Termination.INTERRUPTED:
        raise KeyboardInterrupt
    return result


def _limited(changed: Problem, most: float, problem: Problem) -> Problem:
    """Return a changed problem in which what a problem minimizes may be `most`."""
    if problem.minimize == Quantity.ENERGY:
        return replace(changed, energy_budget=most)
    if problem.minimize == Quantity.TIME:
        return replace(changed, deadline=most)
    terms = dict(
        problem.own_objective if problem.minimize == USER_OBJECTIVE else ((Total.BYTES_WRITTEN, 1),)
    )
    upper = most - terms.pop(CONSTANT, 0)
    row = Constraint(name=_free_name(changed, "objective"), terms=terms, upper=upper)
    return replace(changed, constraints=(*changed.constraints, row), own_objective=())


def _ways(problem: Problem, choice: Treatment, i: int) -> Iterator[Forbidden]:
    """Yield what can be forbidden of the decision on a tensor."""
    again = problem.may_recompute(problem.graph.node_of[i])
    if choice in (Treatment.RECOMPUTED, Treatment.BOTH):
        yield Forbidden.RECOMPUTATION
    if choice.is_paged:
        yield Forbidden.PAGING
    if choice == Treatment.BOTH or (
        problem.can_page if choice == Treatment.RECOMPUTED else choice.is_paged and again
    ):
        yield Forbidden.BOTH
    if choice == Treatment.KEPT and (again or problem.can_page):
        yield Forbidden.KEEPING
    if choice == Treatment.ON_STORAGE:
        yield Forbidden.STORAGE
    if choice == Treatment.RESIDENT and problem.can_page:
        yield Forbidden.RESIDENCE


def _without(problem: Problem, i: int, way: Forbidden) -> Problem:
    """Return the problem with a constraint that forbids a decision on a tensor."""
    graph = problem.graph
    names = dict.fromkeys(Count, graph.tensors[i].name)
    names[Count.RECOMPUTATIONS] = graph.nodes[graph.node_of[i]].name
    counted = _COUNTED.get(way, (Count.RESIDENT,))
    lower = way in (Forbidden.KEEPING, Forbidden.STORAGE)
    row = Constraint(
        name=_free_name(problem, f"without {way}"),
        terms={f"{count}:{names[count]}": 1 for count in counted},
        lower=1 if lower else None,
        upper=None if lower else 0,
    )
    return replace(problem, constraints=(*problem.constraints, row))


def _free_name(problem: Problem, name: str) -> str:
    """Return a name that no constraint of the problem has."""
    taken = {row.name for row in problem.constraints}
    while name in taken:
        name += "'"
    return name


def _alternative(
    problem: Problem, before: Candidate, i: int, way: Forbidden, result: SolveResult, known: float
) -> Alternative:
    """Return the result of a solve without a decision, given a proven bound on the overhead."""
    blank = Alternative(tensor=i, forbidden=way, status=result.status)
    if result.status == Status.INFEASIBLE:
        return blank
    bound = max(known, result.proven_bound - problem.objective.baseline)
    blank = replace(blank, status=Status.UNKNOWN, least_extra=bound - before.value)
    found = None
    if result.schedule is not None:
        found = accepted(problem, of_graph(result.schedule, problem.graph))
    if way == Forbidden.KEEPING:
        if found is not None and not _returns(problem, found.schedule, i):
            found = None  # what is computed again after its last use may stay in RAM until then
        found = better(found, _dropped(problem, before.schedule, i))
    if found is None:
        return blank
    proven = is_closed(problem, found.value, bound, GAP)
    extra = found.value - before.value
    times = (found.simulation.time_s, before.simulation.time_s)
    return replace(
        blank,
        status=Status.OPTIMAL if proven else Status.FEASIBLE,
        becomes=find_decisions(problem, found.schedule)[i].choice,
        extra=extra,
        least_extra=min(bound - before.value, extra),
        extra_s=(times[0] or 0.0) - (times[1] or 0.0),
        schedule=found.schedule,
    )


def _returns(problem: Problem, schedule: Schedule, i: int) -> bool:
    """Return whether a tensor is read once it was recomputed or paged in."""
    graph, k = problem.graph, problem.graph.node_of[i]
    fetched = [t for t, j in schedule.R if j == k and t > k]
    fetched += [t for t, j in schedule.M_in if j == i]
    reads = [t for t, j in schedule.R if j in graph.users_of[i]]
    return min(fetched, default=len(graph.nodes)) <= max(reads, default=-1)


def _dropped(problem: Problem, schedule: Schedule, i: int) -> Candidate | None:
    """Return the best valid schedule in which a kept tensor is absent in its longest interval.

    The rest of the schedule is unchanged; the tensor is paged or recomputed for its next use. None
    if neither keeps the limits.
    """
    graph, k = problem.graph, problem.graph.node_of[i]
    stages = sorted({t for t, j in schedule.R if j in graph.users_of[i]} | {k})
    intervals = [(after - first, first, after) for first, after in pairwise(stages)]
    if not intervals:
        return None
    _, first, after = max(intervals)
    kept = [span for span in schedule.kept if span[0] != i]
    for _, begin, end in (span for span in schedule.kept if span[0] == i):
        kept += [(i, begin, min(end, first)), (i, max(begin, after + 1), end)]
    rest: dict[str, Any] = {
        "kept": kept,
        "resident": schedule.resident,
        "identity": GraphIdentity.of(graph),
    }
    best = None
    if problem.may_recompute(k) and after <= graph.last_stages[k]:
        recomputed = Schedule.from_spans(
            R=(*schedule.R, (after, k)),
            stored=schedule.stored,
            M_in=schedule.M_in,
            M_out=schedule.M_out,
            **rest,
        )
        best = accepted(problem, recomputed)
    if problem.can_page:
        paged = Schedule.from_spans(
            R=schedule.R,
            stored=(*schedule.stored, (i, k + 1, after)),
            M_in=(*schedule.M_in, (after, i)),
            M_out=(*schedule.M_out, (k, i)),
            **rest,
        )
        best = better(best, accepted(problem, paged))
    return best
