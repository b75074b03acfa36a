"""``lazy``: the proof, and what is asked first where no schedule keeps the deadline."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poetmodel.backends.worker import run_interruptibly
from poetmodel.errors import TimeLimitError
from poetmodel.graph import checkpoint_all_profile
from poetmodel.heuristics.greedy import construct
from poetmodel.model.grouping import Grouping
from poetmodel.problem import DeadlineCounts, Problem, Quantity
from poetmodel.problem.infeasibility import infeasibility_proof
from poetmodel.result import Termination
from poetmodel.solver.lazy.params import LazyParams
from poetmodel.solver.lazy.row_generation import RowGeneration
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.outcome import Candidate, Outcome, accepted
from poetmodel.solver.request import PATIENCE_S, Request, SolveProgress

if TYPE_CHECKING:
    from collections.abc import Sequence


FASTEST_TIME_RATIO: Final = 0.8
"""Most of the time that is left for the search for the fastest schedule."""
MARGIN: Final = 1e-6
"""How much more than the deadline is proved away, relatively: more than any tolerance."""


def prove(
    problem: Problem,
    request: Request,
    *,
    start: Candidate | None,
    first: Grouping | None = None,
    bound: float = 0.0,
    params: LazyParams | None = None,
) -> Outcome:
    """Solve a problem by row generation over groups of stages, from a valid schedule if given.

    Rows to enforce from the beginning are those of `first`, by default the stage row that
    keep-all loads most. `bound` is what is proved already, in the unit of the minimized
    quantity. With two threads or more, a process searches for schedules beside the proof. After
    Ctrl-C the outcome has the best schedule and bound so far.

    Where a part of the time has brought no schedule, it is asked whether any keeps the deadline.

    ``docs/concepts/lazy.md`` has the argument why each reduction is exact. With one thread the
    course is determined by problem and seed as long as no limit or slice of time has ended a part
    of it.
    """
    params = params or LazyParams()
    give_up_s = math.inf
    if start is None and has_fastest(problem):
        give_up_s = request.elapsed_s()
        give_up_s += params.without_schedule_time_ratio * request.remaining_s()
    session = Session(problem, request, start, bound=bound, params=params, give_up_s=give_up_s)
    outcome = generate_rows(session, first)
    if outcome.termination != Termination.TIME_LIMIT or request.remaining_s() <= 0:
        return outcome
    parts, begin = [outcome], outcome.candidate  # it may have come just as the time was over
    if begin is None:
        fastest = find_fastest(problem, request, outcome.bound, params)
        parts, begin = [outcome, fastest], fastest.candidate
        if fastest.infeasible:
            reason = infeasibility_proof(problem)
            outcome = replace(
                outcome, termination=Termination.PROVED, infeasible=True, reason=reason
            )
            return _together(outcome, parts)
        if fastest.termination == Termination.INTERRUPTED:
            outcome = replace(outcome, termination=Termination.INTERRUPTED, candidate=begin)
            return _together(outcome, parts)
    session = Session(problem, request, begin, bound=outcome.bound, params=params)
    after = generate_rows(session, first)
    return _together(after, [*parts, after])


def generate_rows(session: Session, first: Grouping | None = None) -> Outcome:
    """Run the row generation of one session, and say how it ended."""
    if first is None:
        loads = checkpoint_all_profile(session.problem.graph)
        worst = max(range(len(loads)), key=loads.__getitem__)
        first = Grouping(len(loads), frozenset({worst}))
    generation = RowGeneration(session, first)
    most_s = session.request.remaining_wall_s() + PATIENCE_S
    try:
        infeasible = run_interruptibly(generation.run, session.stop, max_s=most_s)
    except TimeLimitError:
        session.leave_behind()
        infeasible = False
    if infeasible:
        reason = infeasibility_proof(session.problem)
    else:
        reason = f"no schedule was found within {session.request.elapsed_s():.3g} s"
    grouping = generation.grouping
    proved = infeasible or session.bounds.closed()
    return Outcome(
        termination=Termination.PROVED if proved else session.stopped or Termination.STALLED,
        candidate=session.bounds.incumbent,
        bound=session.bounds.lower,
        infeasible=infeasible,
        reason=reason,
        build_s=session.build_s,
        versions=session.solver.versions(),
        statistics={
            "rounds": generation.rounds,
            "enforced_rows": len(grouping.stage_rows) + len(grouping.step_rows),
            "columns": session.columns,
            "rows": session.rows,
            "nodes": session.nodes,
            "root_bound": session.bounds.lower
            if session.root_bound is None
            else session.root_bound,
        },
        log="".join(session.log),
    )


def _together(last: Outcome, parts: Sequence[Outcome]) -> Outcome:
    """Return the last of several sessions with the figures of all."""
    figures = dict(last.statistics)
    for name, combine in (("rounds", sum), ("columns", max), ("rows", max), ("nodes", sum)):
        values = [part.statistics[name] for part in parts if name in part.statistics]
        if values:
            figures[name] = combine(values)
    return replace(last, statistics=figures).with_parts(parts)


# -- deadlines -----------------------------------------------------------------------------------


def has_fastest(problem: Problem) -> bool:
    """Return whether the least time decides: there is a deadline, on a sum of times."""
    return (
        problem.deadline_s is not None
        and problem.minimize != Quantity.TIME
        and problem.deadline_counts != DeadlineCounts.OVERLAP
    )


def find_fastest(problem: Problem, request: Request, bound: float, params: LazyParams) -> Outcome:
    """Minimize the time within all other limits, until that decides whether the deadline holds.

    For problems with `has_fastest`. It takes a part of what is left of the request's time, and
    tells `bound`, which is proved of the problem so far, meanwhile. The candidate keeps every
    limit; interrupted is only what the caller has ended.
    """
    if problem.deadline_s is None:
        msg = "there is no deadline to keep"
        raise ValueError(msg)
    most = problem.deadline_s - problem.quantity(Quantity.TIME).baseline
    ceiling = most + MARGIN * problem.deadline_s
    fastest = problem.without(Quantity.TIME, minimize=Quantity.TIME)
    kept = False

    def watch(progress: SolveProgress) -> bool:
        nonlocal kept
        kept = kept or (progress.overhead is not None and progress.overhead <= most)
        tell = request.on_progress
        known = SolveProgress(seconds=progress.seconds, overhead=None, overhead_bound=bound)
        return not kept and (tell is None or tell(known) is not False)

    limit_s = request.elapsed_s() + FASTEST_TIME_RATIO * request.remaining_s()
    within = replace(request, time_limit_s=limit_s, on_progress=watch)
    begin = accepted(fastest, construct(fastest, most_s=within.remaining_s() / 4))
    if begin is not None and begin.value <= most:
        outcome = Outcome(termination=Termination.STALLED, candidate=begin)
    else:
        outcome = generate_rows(Session(fastest, within, begin, ceiling=ceiling, params=params))
    best = outcome.candidate
    start = None if best is None else accepted(problem, best.schedule)
    no_schedule = start is None and (outcome.infeasible or outcome.bound >= ceiling)
    termination = outcome.termination
    if kept and termination == Termination.INTERRUPTED:
        termination = Termination.STALLED
    return replace(outcome, termination=termination, candidate=start, infeasible=no_schedule)
