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
from poetmodel.solver.lazy.row_generation import RowGeneration
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.outcome import Candidate, Outcome, make_valid_candidate
from poetmodel.solver.request import PATIENCE_S, Request, SolveProgress

if TYPE_CHECKING:
    from collections.abc import Sequence


PROOF_MARGIN: Final = 1e-6
"""Margin above the deadline, relative to it, up to which the search for the fastest schedule must
exclude schedules. It exceeds every tolerance."""


def prove(
    problem: Problem,
    request: Request,
    *,
    start: Candidate | None,
    first_grouping: Grouping | None = None,
    bound: float = 0.0,
) -> Outcome:
    """Solve a problem by row generation over groups of stages.

    `start` is a valid schedule, the first incumbent. `first_grouping` has the rows that are
    enforced at the start, by default the stage row with the largest load of keep-all. `bound` is a
    proven bound, without the baseline, in the unit of the minimized quantity. With two or more
    threads, a second process searches for schedules during the proof. After Ctrl-C, the outcome has
    the best schedule and bound so far.

    Without `start`, if no schedule is found within `Policy.without_schedule_time_ratio` of the
    remaining time and `can_search_fastest` is True, `find_fastest_schedule` searches for one that
    meets the deadline. Unless that search proves that there is none, or is interrupted, a second
    row generation follows. Raises `TimeLimitError` if the limit of the context passes during that
    search, and the errors of `generate_rows`.

    ``docs/concepts/lazy.md`` proves that each reduction is exact. With one thread, problem and seed
    determine the result unless a time limit ends a phase.
    """
    give_up_s = math.inf
    if start is None and can_search_fastest(problem):
        give_up_s = request.elapsed_s()
        give_up_s += request.policy.without_schedule_time_ratio * request.remaining_s()
    session = Session(problem, request, start, bound=bound, give_up_s=give_up_s)
    outcome = generate_rows(session, first_grouping)
    if outcome.termination != Termination.TIME_LIMIT or request.remaining_s() <= 0:
        return outcome
    # A candidate may have been found just after the search gave up.
    outcomes, candidate = [outcome], outcome.candidate
    if candidate is None:
        if not can_search_fastest(problem):
            return outcome
        fastest_outcome = find_fastest_schedule(problem, request, outcome.bound)
        outcomes, candidate = [outcome, fastest_outcome], fastest_outcome.candidate
        if fastest_outcome.is_infeasible:
            reason = infeasibility_proof(problem)
            outcome = replace(
                outcome, termination=Termination.PROVED, is_infeasible=True, reason=reason
            )
            return _merge_statistics(outcome, outcomes)
        if fastest_outcome.termination == Termination.INTERRUPTED:
            outcome = replace(outcome, termination=Termination.INTERRUPTED, candidate=candidate)
            return _merge_statistics(outcome, outcomes)
    session = Session(problem, request, candidate, bound=outcome.bound)
    final_outcome = generate_rows(session, first_grouping)
    return _merge_statistics(final_outcome, [*outcomes, final_outcome])


def generate_rows(session: Session, first_grouping: Grouping | None = None) -> Outcome:
    """Execute the row generation of one session, and return its outcome.

    If the row generation exceeds the time limit by `PATIENCE_S`, for example in a solver, it is
    abandoned. Then, and after Ctrl-C, the outcome has the schedule and bound so far.
    `first_grouping` is by default the stage row with the largest load of keep-all. Raises the
    errors of the solver, of the progress callback and of the primal worker.
    """
    if first_grouping is None:
        loads = checkpoint_all_profile(session.problem.graph)
        worst_stage = max(range(len(loads)), key=loads.__getitem__)
        first_grouping = Grouping(len(loads), frozenset({worst_stage}))
    row_generation = RowGeneration(session, first_grouping)
    max_s = session.request.remaining_wall_s() + PATIENCE_S
    try:
        is_infeasible = run_interruptibly(
            row_generation.execute_rounds, session.stop_event, max_s=max_s
        )
    except TimeLimitError:
        session.abandon()
        is_infeasible = False
    if is_infeasible:
        reason = infeasibility_proof(session.problem)
    else:
        reason = f"no schedule was found within {session.request.elapsed_s():.3g} s"
    grouping = row_generation.grouping
    is_proved = is_infeasible or session.bounds.is_closed()
    return Outcome(
        termination=Termination.PROVED if is_proved else session.stop_reason or Termination.STALLED,
        candidate=session.bounds.incumbent,
        bound=session.bounds.lower_bound,
        is_infeasible=is_infeasible,
        reason=reason,
        build_s=session.build_s,
        versions=session.solver.versions(),
        statistics={
            "rounds": row_generation.n_rounds,
            "enforced_rows": len(grouping.stage_rows) + len(grouping.step_rows),
            "columns": session.max_columns,
            "rows": session.max_rows,
            "nodes": session.n_nodes,
            "root_bound": session.bounds.lower_bound
            if session.root_bound is None
            else session.root_bound,
        },
        log="".join(session.log),
    )


def _merge_statistics(last_outcome: Outcome, outcomes: Sequence[Outcome]) -> Outcome:
    """Return `last_outcome` with the merged statistics, logs and build times of all `outcomes`.

    Rounds, nodes and build times are sums; columns and rows are maxima; logs are joined. All
    further statistics are those of `last_outcome`.
    """
    statistics = dict(last_outcome.statistics)
    for name, combine in (("rounds", sum), ("columns", max), ("rows", max), ("nodes", sum)):
        values = [outcome.statistics[name] for outcome in outcomes if name in outcome.statistics]
        if values:
            statistics[name] = combine(values)
    return replace(last_outcome, statistics=statistics).with_solves(outcomes)


# -- deadlines -----------------------------------------------------------------------------------


def can_search_fastest(problem: Problem) -> bool:
    """Return whether a search for the fastest schedule can decide if the deadline can be met.

    This requires a deadline that does not count ``overlap``, and a minimized quantity other than
    time.
    """
    return (
        problem.deadline_s is not None
        and problem.minimize != Quantity.TIME
        and problem.deadline_counts != DeadlineCounts.OVERLAP
    )


def find_fastest_schedule(problem: Problem, request: Request, bound: float) -> Outcome:
    """Minimize time within all other limits until it is decided whether the deadline can be met.

    The search takes at most `Policy.fastest_time_ratio` of the remaining time, and reports no
    schedules, only `bound`, the proven bound of the problem. The candidate of the outcome meets
    every limit, or is None; its bound is one on the time beyond a single pass. The outcome is
    infeasible if it is proved that no schedule meets all limits.
    """
    if problem.deadline_s is None:
        msg = "the problem has no deadline"
        raise ValueError(msg)
    max_overhead = problem.deadline_s - problem.make_objective(Quantity.TIME).baseline
    ceiling = max_overhead + PROOF_MARGIN * problem.deadline_s
    time_problem = problem.without_limits(Quantity.TIME, minimize=Quantity.TIME)
    meets_deadline = False

    def report_bound(progress: SolveProgress) -> bool:
        """Report `bound`, without a schedule; return whether the search continues.

        It ends, without a report, after the first schedule that meets the deadline, and if the
        caller's callback returns False.
        """
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

    limit_s = request.elapsed_s() + request.policy.fastest_time_ratio * request.remaining_s()
    limited_request = replace(request, time_limit_s=limit_s, on_progress=report_bound)
    candidate = make_valid_candidate(
        time_problem, construct(time_problem, max_s=limited_request.remaining_s() / 4)
    )
    if candidate is not None and candidate.value <= max_overhead:
        outcome = Outcome(termination=Termination.STALLED, candidate=candidate)
    else:
        outcome = generate_rows(Session(time_problem, limited_request, candidate, ceiling=ceiling))
    best = outcome.candidate
    valid_candidate = None if best is None else make_valid_candidate(problem, best.schedule)
    is_infeasible = valid_candidate is None and (outcome.is_infeasible or outcome.bound >= ceiling)
    termination = outcome.termination
    if meets_deadline and termination == Termination.INTERRUPTED:
        termination = Termination.STALLED
    return replace(
        outcome, termination=termination, candidate=valid_candidate, is_infeasible=is_infeasible
    )
