"""``lazy``: the proof by row generation, and the check whether any schedule meets the deadline."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poetmodel.backends.worker import run_interruptibly
from poetmodel.errors import TimeLimitError
from poetmodel.graph import checkpoint_all_profile
from poetmodel.heuristics.greedy import construct
from poetmodel.model.grouping import Grouping
from poetmodel.problem import Problem, Quantity
from poetmodel.problem.infeasibility import infeasibility_proof
from poetmodel.result import Termination
from poetmodel.solver.lazy.row_generation import RowGeneration
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.outcome import make_valid_candidate
from poetmodel.solver.request import PATIENCE_S

if TYPE_CHECKING:
    from poetmodel.solver.search import Search

PROOF_MARGIN: Final = 1e-6
"""Margin above the deadline, relative to it, up to which the search for the fastest schedule must
exclude schedules. It exceeds every tolerance."""


def prove(search: Search, *, first_grouping: Grouping | None = None) -> None:
    """Solve the problem of a search by row generation over groups of stages.

    Enforces the rows of `first_grouping` at the start. With two or more threads, a second process
    searches for schedules. Without any schedule after a fraction of the time, `decide_deadline`
    precedes a second row generation. ``docs/concepts/lazy.md`` proves that each reduction is exact.
    With one thread, problem and seed determine the result, unless a time limit ends a search.
    """
    request, may_search_fastest = search.request, can_search_fastest(search.problem)
    search.statistics = {}
    if search.best is None and may_search_fastest:
        search.give_up_s = request.elapsed_s()
        search.give_up_s += request.policy.without_schedule_time_ratio * request.remaining_s()
    generate_rows(search, first_grouping)
    if search.termination != Termination.TIME_LIMIT or request.remaining_s() <= 0:
        return
    # A schedule may have been found just after the search gave up.
    if search.best is None and not may_search_fastest:
        return
    search.resume()
    if search.best is None and decide_deadline(search):
        return
    generate_rows(search, first_grouping)


def generate_rows(search: Search, first_grouping: Grouping | None = None) -> None:
    """Execute one row generation of a search, and end the search.

    By default, `first_grouping` is the stage row with the largest load of keep-all. A row
    generation that exceeds the time limit by `PATIENCE_S`, such as in a solver, is abandoned.
    """
    if first_grouping is None:
        loads = checkpoint_all_profile(search.problem.graph)
        worst_stage = max(range(len(loads)), key=loads.__getitem__)
        first_grouping = Grouping(len(loads), frozenset({worst_stage}))
    session = Session(search)
    row_generation = RowGeneration(session, first_grouping)
    max_s = search.request.remaining_wall_s() + PATIENCE_S
    try:
        is_infeasible = run_interruptibly(
            row_generation.execute_rounds, search.stop_event, max_s=max_s
        )
    except TimeLimitError:
        search.abandon()
        is_infeasible = False
    if is_infeasible:
        reason = infeasibility_proof(search.problem)
    else:
        reason = f"no schedule was found within {search.request.elapsed_s():.3g} s"
    is_proved = is_infeasible or search.is_closed()
    termination = Termination.PROVED if is_proved else search.stop_reason or Termination.STALLED
    search.end(termination, reason, is_infeasible=is_infeasible)
    search.versions = session.solver.versions()
    grouping = row_generation.grouping
    root_bound = search.bound if session.root_bound is None else session.root_bound
    _add_counts(
        search,
        rounds=row_generation.n_rounds,
        enforced_rows=len(grouping.stage_rows) + len(grouping.step_rows),
        columns=session.max_columns,
        rows=session.max_rows,
        nodes=session.n_nodes,
        root_bound=root_bound,
    )


def _add_counts(search: Search, **counts: float) -> None:
    """Update statistics: rounds and nodes are summed, columns and rows maxima, others replaced."""
    for name, count in counts.items():
        before = search.statistics.get(name, 0)
        if name in ("rounds", "nodes"):
            search.statistics[name] = before + count
        else:
            search.statistics[name] = max(before, count) if name in ("columns", "rows") else count


# -- deadlines -----------------------------------------------------------------------------------


def can_search_fastest(problem: Problem) -> bool:
    """Return whether minimizing time can decide if the deadline can be met."""
    return (
        problem.deadline_s is not None
        and problem.minimize != Quantity.TIME
        and not problem.counts_makespan
    )


def decide_deadline(search: Search) -> bool:
    """Minimize time within all other limits until it is decided whether the deadline can be met.

    Takes at most `Policy.fastest_time_ratio` of the remaining time. A schedule that meets the
    deadline becomes the best. Return whether the search has ended: infeasibility is proved, or it
    is interrupted.
    """
    problem, request = search.problem, search.request
    if problem.deadline_s is None:
        msg = "the problem has no deadline"
        raise ValueError(msg)
    max_overhead = problem.deadline_s - problem.make_objective(Quantity.TIME).baseline
    ceiling = max_overhead + PROOF_MARGIN * problem.deadline_s
    time_problem = problem.without_limits(Quantity.TIME, minimize=Quantity.TIME)
    limit_s = request.elapsed_s() + request.policy.fastest_time_ratio * request.remaining_s()
    fastest = search.child(
        time_problem,
        request=replace(request, time_limit_s=limit_s),
        bound=0.0,
        ceiling=ceiling,
        target=max_overhead,
        parent=None,
        forward=lambda *_: search.report(),
    )
    fastest.best = make_valid_candidate(
        time_problem, construct(time_problem, max_s=fastest.request.remaining_s() / 4)
    )
    if not fastest.is_closed():
        generate_rows(fastest)
        _add_counts(
            search,
            **{name: fastest.statistics[name] for name in ("rounds", "columns", "rows", "nodes")},
        )
        search.add_build_time(fastest.build_s)
    if fastest.best is not None:
        candidate = make_valid_candidate(problem, fastest.best.schedule)
        if candidate is not None:
            search.accept(candidate)
    if search.best is None and (fastest.is_infeasible or fastest.bound >= ceiling):
        search.end(Termination.PROVED, infeasibility_proof(problem), is_infeasible=True)
        return True
    if fastest.termination == Termination.INTERRUPTED:
        search.end(Termination.INTERRUPTED, fastest.reason)
        return True
    return False
