"""`run`: a method by its name, verified like any other; and the methods that a solver runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from poetmodel import solver
from poetmodel.baselines.engine import watch_rules
from poetmodel.baselines.lookup import method
from poetmodel.baselines.registry import DEFAULT, Method
from poetmodel.clock import rare_collections, time_limit
from poetmodel.errors import (
    InputError,
    MethodNotApplicableError,
    OwnMethodError,
    TimeLimitError,
    TooLargeError,
    VerificationError,
)
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.problem import DeadlineCounts, Problem, Quantity
from poetmodel.problem.infeasibility import describe_limits, infeasibility_reason
from poetmodel.result import SolveResult, Status, Termination
from poetmodel.solver.outcome import Candidate, Outcome, as_candidate, finish
from poetmodel.solver.request import Request, SolveKeywords
from poetmodel.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(problem: Problem, name: str, **options: Unpack[SolveKeywords]) -> SolveResult:
    """Let a method schedule a problem, and verify its schedule.

    Parameters
    ----------
    problem : Problem
        What to schedule, within which limits.
    name : str
        One of `method_names`, or a method of one's own (`poetmodel.baselines.own`).
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
    TypeError
        If an option is none of `poetmodel.solve`.
    MethodNotApplicableError
        If the method does not apply to the graph, or its schedule breaks a limit.
    VerificationError
        If its schedule breaks a rule of execution.
    OwnMethodError
        If a method of one's own raises an exception, returns something else than a schedule, or
        one that breaks a rule of execution.
    """
    entry = method(name)
    request = _request(entry, options)
    try:
        result = _result(problem, entry, request, options)
    except MethodNotApplicableError as error:
        reason = f"{name}: {error}"
        nothing = Outcome(termination=Termination.STALLED, reason=reason)
        refused = finish(problem, request, nothing, formulation="")
        raise MethodNotApplicableError(reason, replace(refused, method=name, backend="")) from error
    return replace(result, method=name)


def _request(entry: Method, options: SolveKeywords) -> Request:
    """Return the request that the options of a method state, which are those of `solve`."""
    known = SolveKeywords.__annotations__
    for unknown in sorted(options.keys() - set(known)):
        raise TypeError(
            f"run() got an unexpected keyword argument {unknown!r}; expected {', '.join(known)}"
        )
    others = {"formulation", "start"}
    for unusable in (*sorted(others), "solver_options") if not entry.by_solver else ():
        if options.get(unusable):
            raise InputError(f"{unusable}: method {entry.name!r} needs no solver; leave it out")
    stated: dict[str, Any] = {k: value for k, value in options.items() if k not in others}
    stated["solver_options"] = dict(stated.get("solver_options") or {})
    return Request(time_limit_s=stated.pop("time_limit", 60.0), **stated)


def _result(
    problem: Problem, entry: Method, request: Request, options: SolveKeywords
) -> SolveResult:
    if entry.name == DEFAULT:
        return solver.solve(problem, **options)
    reason, formulation = infeasibility_reason(problem), ""
    if reason is not None:
        outcome = Outcome(termination=Termination.PROVED, infeasible=True, reason=reason)
    elif entry.by_solver:
        outcome, formulation = _restricted(problem, entry.function()(problem), options)
    else:
        outcome = _heuristic(problem, entry, request)
    result = finish(problem, request, outcome, formulation=formulation)
    return result if entry.by_solver else replace(result, backend="")


def _restricted(
    problem: Problem, restricted: Problem, options: SolveKeywords
) -> tuple[Outcome, str]:
    """Solve another problem, and verify its schedule by the one that was stated.

    What the solver proved holds for the other one only, so the bound is what every schedule pays.
    """
    solved = solver.solve(restricted, **options)
    if solved.status == Status.INFEASIBLE:
        raise MethodNotApplicableError(f"it has no schedule within {describe_limits(restricted)}")
    candidate = None
    if solved.schedule is not None:
        candidate = _within_limits(as_candidate(problem, solved.schedule))
    outcome = Outcome(
        termination=solved.termination,
        candidate=candidate,
        bound=problem.objective.known_bound,
        reason=solved.reason,
        build_s=solved.build_s,
        versions=solved.versions,
        statistics={
            **solved.statistics,
            "restricted_status": str(solved.status),
            "restricted_objective_bound": solved.objective_bound,
        },
        log=solved.log,
    )
    return outcome, solved.formulation


def _heuristic(problem: Problem, entry: Method, request: Request) -> Outcome:
    limit = format_seconds(request.time_limit_s)
    late = Outcome(
        termination=Termination.TIME_LIMIT,
        reason=f"{entry.name}: it was not done within the time limit of {limit}; raise the limit, "
        f"or use method {DEFAULT!r}, which keeps the best schedule that it has found",
    )
    try:
        with time_limit(request.remaining_s()), rare_collections(), watch_rules() as watch:
            candidate = _verified(problem, entry)
    except TimeLimitError:
        return late
    except TooLargeError as error:
        return Outcome(termination=Termination.STALLED, reason=f"{entry.name}: {error}")
    except KeyboardInterrupt:
        return Outcome(termination=Termination.INTERRUPTED, reason=f"{entry.name}: interrupted")
    if candidate.simulation.violations and entry.own is not None:
        raise _refusal(entry, candidate.violations)
    if candidate.simulation.violations:
        raise VerificationError(candidate.violations)
    if not watch.cut_short:
        return Outcome(termination=Termination.STALLED, candidate=_within_limits(candidate))
    return late if candidate.violations else replace(late, candidate=candidate, reason="")


def _verified(problem: Problem, entry: Method) -> Candidate:
    """Run a method and give its schedule to the verifier."""
    schedule = entry.function()(problem)
    try:
        return as_candidate(problem, schedule)
    except InputError as error:
        if entry.own is None:
            raise
        raise _refusal(entry, error.faults) from None


def _refusal(entry: Method, reasons: Sequence[str]) -> OwnMethodError:
    """Return the error of a method of one's own whose schedule cannot be executed."""
    more = f"; and {len(reasons) - 1:,} more" if len(reasons) > 1 else ""
    message = f"method {entry.name!r}: its schedule is refused: {reasons[0]}{more}"
    return OwnMethodError(message, refused=True)


def _within_limits(candidate: Candidate) -> Candidate:
    if candidate.violations:
        raise MethodNotApplicableError(
            f"its schedule breaks a limit: {'; '.join(candidate.violations)}"
        )
    return candidate


# -- methods that solve a mixed-integer program: the problem that is solved ------------------------


def optimal(problem: Problem) -> Problem:
    """Recompute and page with the least energy (POET, ICML 2022, section 5)."""
    return problem


def paging_only(problem: Problem) -> Problem:
    """Leave recomputation out (POET, ICML 2022, section 6.2)."""
    fits = problem.usable_ram_bytes >= checkpoint_all_peak_bytes(problem.graph)
    if not problem.can_page and not fits:
        raise MethodNotApplicableError("there is no storage to page to")
    return replace(problem, recompute=False)


def recompute_only(problem: Problem) -> Problem:
    """Leave paging out (POET, ICML 2022, section 6.2)."""
    return replace(problem, paging=False)


def resident(problem: Problem) -> Problem:
    """Keep all state in RAM, and schedule the rest with the least energy.

    On a graph without state the program is that of `optimal`.
    """
    state = problem.graph.state_tensors
    if not state:
        return problem

    def all_of_it(v: Any) -> Any:
        return sum(v.resident[i] for i in state) >= len(state)

    return problem.subject_to(**{"all state in RAM": all_of_it})


def checkmate(problem: Problem) -> Problem:
    """Recompute with the least compute time (Jain et al., MLSys 2020, section 4).

    Nothing is paged, and time is that of the core; the verifier alone sees deadline and energy
    budget, as Checkmate knows neither.

    Checkmate's stages are those of this package. Its memory is counted by the rules of execution
    here: workspaces count, and tensors are freed after their last use in a stage.
    """
    return replace(
        problem,
        paging=False,
        minimize=Quantity.TIME,
        deadline_counts=DeadlineCounts.COMPUTE,
        deadline=None,
        energy_budget=None,
    )
