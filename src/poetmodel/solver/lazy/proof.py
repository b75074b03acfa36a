"""``lazy``: the proof by row generation, and the check whether any schedule meets the deadline."""

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
from poetmodel.solver.outcome import Candidate, Outcome, verified_candidate
from poetmodel.solver.request import PATIENCE_S, Request, SolveProgress

if TYPE_CHECKING:
    from collections.abc import Sequence


FASTEST_TIME_RATIO: Final = 0.8
"""Maximum fraction of the remaining time for the search for the fastest schedule."""
PROOF_MARGIN: Final = 1e-6
"""Relative margin above the deadline up to which schedules are excluded: more than any
tolerance."""


def prove(
    problem: Problem,
    request: Request,
    *,
    start: Candidate | None,
    first: Grouping | None = None,
    bound: float = 0.0,
    params: LazyParams | None = None,
) -> Outcome:
    """Solve a problem by row generation over groups of stages.

    `first` has the rows that are enforced at the start, by default the stage row with the largest
    load of keep-all. `bound` is a proven bound, in the unit of the minimized quantity. With two or
    more threads, a second process searches for schedules during the proof. After Ctrl-C, the
    outcome has the best schedule and bound so far. If no schedule is found within a fraction of the
    time, the fastest schedule is searched, which decides whether any schedule meets the deadline.

    ``docs/concepts/lazy.md`` proves that each reduction is exact. With one thread, problem and seed
    determine the result unless a time limit ends a phase.
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
    outcomes, candidate = [outcome], outcome.candidate  # it may have come just as the time was over
    if candidate is None:
        fastest = find_fastest(problem, request, outcome.bound, params)
        outcomes, candidate = [outcome, fastest], fastest.candidate
        if fastest.infeasible:
            reason = infeasibility_proof(problem)
            outcome = replace(
                outcome, termination=Termination.PROVED, infeasible=True, reason=reason
            )
            return _merge_statistics(outcome, outcomes)
        if fastest.termination == Termination.INTERRUPTED:
            outcome = replace(outcome, termination=Termination.INTERRUPTED, candidate=candidate)
            return _merge_statistics(outcome, outcomes)
    session = Session(problem, request, candidate, bound=outcome.bound, params=params)
    final_outcome = generate_rows(session, first)
    return _merge_statistics(final_outcome, [*outcomes, final_outcome])


def generate_rows(session: Session, first: Grouping | None = None) -> Outcome:
    """Execute the row generation of one session, and return its outcome."""
    if first is None:
        loads = checkpoint_all_profile(session.problem.graph)
        worst = max(range(len(loads)), key=loads.__getitem__)
        first = Grouping(len(loads), frozenset({worst}))
    generation = RowGeneration(session, first)
    max_s = session.request.remaining_wall_s() + PATIENCE_S
    try:
        infeasible = run_interruptibly(generation.run, session.stop, max_s=max_s)
    except TimeLimitError:
        session.abandon()
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


def _merge_statistics(last: Outcome, outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome of the last session with the statistics of all sessions."""
    statistics = dict(last.statistics)
    for name, combine in (("rounds", sum), ("columns", max), ("rows", max), ("nodes", sum)):
        values = [outcome.statistics[name] for outcome in outcomes if name in outcome.statistics]
        if values:
            statistics[name] = combine(values)
    return replace(last, statistics=statistics).with_solves(outcomes)


# -- deadlines -----------------------------------------------------------------------------------


def has_fastest(problem: Problem) -> bool:
    """Return whether the smallest time decides feasibility: a deadline limits a sum of times."""
    return (
        problem.deadline_s is not None
        and problem.minimize != Quantity.TIME
        and problem.deadline_counts != DeadlineCounts.OVERLAP
    )


def find_fastest(problem: Problem, request: Request, bound: float, params: LazyParams) -> Outcome:
    """Minimize time within all other limits until it is decided whether the deadline can be met.

    Raise `ValueError` for problems without `has_fastest`. The search takes a fraction of the
    remaining time, and reports `bound`, the proven bound of the problem. The candidate of the
    outcome meets every limit. The outcome is interrupted only if the caller's callback or Ctrl-C
    ended the search.
    """
    if problem.deadline_s is None:
        msg = "there is no deadline to keep"
        raise ValueError(msg)
    max_overhead = problem.deadline_s - problem.make_objective(Quantity.TIME).baseline
    ceiling = max_overhead + PROOF_MARGIN * problem.deadline_s
    fastest = problem.without_limits(Quantity.TIME, minimize=Quantity.TIME)
    meets_deadline = False

    def watch(progress: SolveProgress) -> bool:
        """Report the bound; return False once a schedule meets the deadline or the user stops."""
        nonlocal meets_deadline
        meets_deadline = meets_deadline or (
            progress.overhead is not None and progress.overhead <= max_overhead
        )
        on_progress = request.on_progress
        known_progress = SolveProgress(
            seconds=progress.seconds, overhead=None, overhead_bound=bound
        )
        return not meets_deadline and (
            on_progress is None or on_progress(known_progress) is not False
        )

    limit_s = request.elapsed_s() + FASTEST_TIME_RATIO * request.remaining_s()
    limited_request = replace(request, time_limit_s=limit_s, on_progress=watch)
    candidate = verified_candidate(
        fastest, construct(fastest, max_s=limited_request.remaining_s() / 4)
    )
    if candidate is not None and candidate.value <= max_overhead:
        outcome = Outcome(termination=Termination.STALLED, candidate=candidate)
    else:
        outcome = generate_rows(
            Session(fastest, limited_request, candidate, ceiling=ceiling, params=params)
        )
    best = outcome.candidate
    start = None if best is None else verified_candidate(problem, best.schedule)
    no_schedule = start is None and (outcome.infeasible or outcome.bound >= ceiling)
    termination = outcome.termination
    if meets_deadline and termination == Termination.INTERRUPTED:
        termination = Termination.STALLED
    return replace(outcome, termination=termination, candidate=start, infeasible=no_schedule)
