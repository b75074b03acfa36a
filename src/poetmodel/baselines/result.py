"""`run`: a method by its name, judged like any other."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from poetmodel.baselines.registry import method
from poetmodel.errors import InputError, MethodNotApplicableError, VerificationError
from poetmodel.result import Termination
from poetmodel.solve.infeasibility import obstacle
from poetmodel.solve.outcome import Outcome, finish, judge
from poetmodel.solve.request import Request

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
        Keywords of `poetmodel.solve`, such as ``time_limit``. Methods that need no solver only heed
        the `gap`, below which a schedule counts as optimal.

    Returns
    -------
    SolveResult
        With the schedule and the method's name. Of a heuristic the status is ``feasible``, and the
        bound is what every schedule pays; ``optimal`` where the schedule reaches that. Where no
        schedule at all can keep the limits, status ``infeasible``.

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
        outcome = _outcome(problem, entry)
    result = finish(problem, request, outcome, formulation="")
    return replace(result, method=name, backend="", time_limit_s=None)


def _solved(problem: Problem, entry: Method, options: dict[str, Any]) -> SolveResult:
    try:
        result: SolveResult = entry.function()(problem, **options)
    except MethodNotApplicableError as error:
        raise _named(entry, error) from error
    return replace(result, method=entry.name)


def _outcome(problem: Problem, entry: Method) -> Outcome:
    begun_s = time.monotonic()
    try:
        schedule = entry.function()(problem)
    except MethodNotApplicableError as error:
        raise _named(entry, error) from error
    seconds = time.monotonic() - begun_s
    candidate = judge(problem, schedule)
    if candidate.simulation.violations:
        raise VerificationError(candidate.violations)
    if candidate.violations:
        broken = "; ".join(candidate.violations)
        raise MethodNotApplicableError(f"{entry.name}: its schedule breaks a limit: {broken}")
    return Outcome(termination=Termination.STALLED, candidate=candidate, solve_s=seconds)


def _named(entry: Method, error: MethodNotApplicableError) -> MethodNotApplicableError:
    return MethodNotApplicableError(f"{entry.name}: {error}")
