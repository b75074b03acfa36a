"""`run`: a method by its name, judged like any other."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from poetmodel.baselines.registry import DEFAULT, method
from poetmodel.errors import (
    InputError,
    MethodNotApplicableError,
    TimeLimitError,
    VerificationError,
)
from poetmodel.result import Termination
from poetmodel.solve.collection import rare_collections
from poetmodel.solve.infeasibility import obstacle
from poetmodel.solve.outcome import Outcome, finish, judge
from poetmodel.solve.request import Request
from poetmodel.time_limit import time_limit
from poetmodel.units import format_seconds

if TYPE_CHECKING:
    from poetmodel.baselines.registry import Method
    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult


def run(problem: Problem, name: str, **options: Any) -> SolveResult:
    """Let a method schedule a problem, and judge what it makes.

    Parameters
    ----------
    problem : Problem
        What to schedule, within which limits.
    name : str
        One of `method_names`.
    **options
        Keywords of `poetmodel.solve`, such as ``time_limit``, which holds for every method, the
        check of its schedule included. Of the others, methods that need no solver only heed the
        `gap`, below which a schedule counts as optimal.

    Returns
    -------
    SolveResult
        With the schedule and the method's name. Of a heuristic the status is ``feasible``, and the
        bound is what every schedule pays; ``optimal`` where the schedule reaches that. Where no
        schedule at all can keep the limits, status ``infeasible``; ``unknown``, with the reason,
        where the method was not done within the time limit.

    Raises
    ------
    InputError
        If there is no such method, or the options cannot be used.
    MethodNotApplicableError
        If the method does not apply to the graph, or its schedule breaks a limit.
    VerificationError
        If its schedule breaks a rule of execution.
    """
    entry = method(name)
    if entry.by_solver:
        return _solved(problem, entry, options)
    for unusable in ("formulation", "start"):
        if options.pop(unusable, None) is not None:
            msg = f"{unusable}: method {name!r} needs no solver; leave it out"
            raise InputError(msg)
    request = Request(
        time_limit_s=options.pop("time_limit", 60.0),
        **{key: value for key, value in options.items() if key != "backend"},
    )
    reason = obstacle(problem)
    if reason is not None:
        outcome = Outcome(termination=Termination.PROVED, infeasible=True, reason=reason)
    else:
        outcome = _outcome(problem, entry, request)
    result = finish(problem, request, outcome, formulation="")
    return replace(result, method=name, backend="")


def _solved(problem: Problem, entry: Method, options: dict[str, Any]) -> SolveResult:
    try:
        result: SolveResult = entry.function()(problem, **options)
    except MethodNotApplicableError as error:
        raise _named(entry, error) from error
    return replace(result, method=entry.name)


def _outcome(problem: Problem, entry: Method, request: Request) -> Outcome:
    begun_s = time.monotonic()
    try:
        with time_limit(request.remaining_s()), rare_collections():
            schedule = entry.function()(problem)
            seconds = time.monotonic() - begun_s
            candidate = judge(problem, schedule)
    except MethodNotApplicableError as error:
        raise _named(entry, error) from error
    except TimeLimitError:
        return Outcome(
            termination=Termination.TIME_LIMIT,
            reason=(
                f"{entry.name}: it was not done within the time limit of "
                f"{format_seconds(request.time_limit_s)}; raise the limit, or use method "
                f"{DEFAULT!r}, which keeps the best schedule that it has found"
            ),
            solve_s=time.monotonic() - begun_s,
        )
    if candidate.simulation.violations:
        raise VerificationError(candidate.violations)
    if candidate.violations:
        broken = "; ".join(candidate.violations)
        raise MethodNotApplicableError(f"{entry.name}: its schedule breaks a limit: {broken}")
    return Outcome(termination=Termination.STALLED, candidate=candidate, solve_s=seconds)


def _named(entry: Method, error: MethodNotApplicableError) -> MethodNotApplicableError:
    return MethodNotApplicableError(f"{entry.name}: {error}")
