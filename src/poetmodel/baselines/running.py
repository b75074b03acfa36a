"""`run`: schedule a problem by a named method and verify the schedule; the MILP-based methods."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from poetmodel.baselines.lookup import method
from poetmodel.baselines.registry import DEFAULT, Method
from poetmodel.clock import infrequent_gc, limit_time
from poetmodel.errors import (
    InputError,
    MethodNotApplicableError,
    TimeLimitError,
    TooLargeError,
    UserMethodError,
    VerificationError,
)
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.problem import DeadlineCounts, Problem, Quantity
from poetmodel.problem.infeasibility import describe_limits, infeasibility_reason
from poetmodel.result import SolveResult, Status, Termination
from poetmodel.solver.facade import execute
from poetmodel.solver.outcome import Candidate, make_candidate
from poetmodel.solver.request import Request, SolveKeywords
from poetmodel.solver.search import Search
from poetmodel.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.schedule import Schedule


def run(problem: Problem, name: str, **options: Unpack[SolveKeywords]) -> SolveResult:
    """Schedule a problem by a method, and verify the schedule.

    Parameters
    ----------
    problem : Problem
        Graph, costs and limits.
    name : str
        One of `method_names`, or a user-defined method (`poetmodel.baselines.own`).
    **options
        Keywords of `poetmodel.solve`. ``time_limit`` applies to each method; without a solver, it
        includes the verification of the schedule. Methods without a solver use only ``time_limit``
        and ``gap``, the gap up to which a schedule counts as optimal. They reject ``formulation``,
        ``start`` and ``solver_options``.

    Returns
    -------
    SolveResult
        Result with the schedule and the method's name. Except for the default method, the bound is
        a trivial lower bound on every schedule. The status is ``optimal`` if the gap between
        schedule and bound is at most ``gap``, else ``feasible``. It is ``infeasible`` if no
        schedule meets the limits, which only the default method proves with a solver. It is
        ``unknown``, with a reason, if the method stopped before it found a schedule within the
        limits, for example at the time limit.

    Raises
    ------
    InputError
        If no method has that name, or the options are invalid or not for this method.
    TypeError
        If an option is not a keyword of `poetmodel.solve`.
    MethodNotApplicableError
        If the method does not apply to the graph, has no schedule within the limits, or its
        schedule violates a limit. Its `result` has no schedule.
    BackendUnavailableError
        If the method uses a solver that is missing or whose licence refuses the model.
    VerificationError
        If the schedule of a method of this package violates a rule of execution.
    UserMethodError
        If the file of a user-defined method raises an exception, or the method one other than
        `MethodNotApplicableError`, `TimeLimitError` and `TooLargeError`; also if the method returns
        no schedule or one that violates the rules of execution.
    """
    keywords = SolveKeywords.__annotations__
    for unknown_name in sorted(options.keys() - set(keywords)):
        raise TypeError(
            f"run() got an unexpected keyword argument {unknown_name!r}; "
            f"expected {', '.join(keywords)}"
        )
    request = replace(Request.of_keywords(**options), method=name)
    return run_method(problem, request, options.get("start"))


def run_method(problem: Problem, request: Request, start: Schedule | None = None) -> SolveResult:
    """Schedule a problem by the method of a request, as `run` does."""
    entry = method(request.method)
    if not entry.uses_solver:
        for option, value in (
            ("formulation", request.formulation),
            ("start", start),
            ("solver_options", request.solver_options),
        ):
            if value:
                raise InputError(f"{option}: method {entry.name!r} needs no solver; leave it out")
    name = request.method
    try:
        result = _solve_by_method(problem, entry, request, start)
    except MethodNotApplicableError as error:
        reason = f"{name}: {error}"
        no_schedule = Search(problem=problem, request=request)
        no_schedule.end(Termination.STALLED, reason)
        result = no_schedule.result(formulation="")
        raise MethodNotApplicableError(reason, replace(result, method=name, backend="")) from error
    return replace(result, method=name)


def _solve_by_method(
    problem: Problem, entry: Method, request: Request, start: Schedule | None
) -> SolveResult:
    """Return the result of a method, verified with the original problem.

    Other methods than the default are ``infeasible`` only by inspection, and name no back end
    without a solver. If the time limit stops a method, the result has its best schedule within all
    limits, or none.
    """
    if entry.name == DEFAULT:
        return execute(problem, request, start)
    reason, formulation = infeasibility_reason(problem), ""
    search = Search(problem=problem, request=request)
    if reason is not None:
        search.end(Termination.PROVED, reason, is_infeasible=True)
    elif entry.uses_solver:
        formulation = _solve_restricted(search, entry.function()(problem), start)
    else:
        _run_heuristic(search, entry)
    result = search.result(formulation=formulation)
    return result if entry.uses_solver else replace(result, backend="")


def _solve_restricted(search: Search, restricted_problem: Problem, start: Schedule | None) -> str:
    """Solve a restricted problem, verify its schedule with the original one, end the search.

    Returns the name of the formulation. Bounds of the restricted problem are not valid for the
    original one.
    """
    restricted_result = execute(restricted_problem, search.request, start)
    if restricted_result.status == Status.INFEASIBLE:
        raise MethodNotApplicableError(
            f"it has no schedule within {describe_limits(restricted_problem)}"
        )
    if restricted_result.schedule is not None:
        candidate = make_candidate(search.problem, restricted_result.schedule)
        search.best = _require_within_limits(candidate)
    search.end(restricted_result.termination, restricted_result.reason)
    search.build_s, search.versions = restricted_result.build_s, restricted_result.versions
    search.log.append(restricted_result.log)
    search.statistics = {
        **restricted_result.statistics,
        "restricted_status": str(restricted_result.status),
        "restricted_objective_bound": restricted_result.objective_bound,
    }
    return restricted_result.formulation


def _run_heuristic(search: Search, entry: Method) -> None:
    """Run a method without a solver in the time limit; end the search with schedule or reason."""
    limit_text = format_seconds(search.request.time_limit_s)
    timeout_reason = (
        f"{entry.name}: it did not finish within the time limit of {limit_text}; "
        f"raise the limit, or use method {DEFAULT!r}, which returns its best schedule so far"
    )
    try:
        with limit_time(search.request.remaining_s()) as limit, infrequent_gc():
            candidate = _run_and_verify(search.problem, entry)
    except TimeLimitError:
        search.end(Termination.TIME_LIMIT, timeout_reason)
        return
    except TooLargeError as error:
        search.end(Termination.STALLED, f"{entry.name}: {error}")
        return
    except KeyboardInterrupt:
        search.end(Termination.INTERRUPTED, f"{entry.name}: interrupted")
        return
    if candidate.simulation.violations and entry.user_function is not None:
        raise _invalid_schedule_error(entry, candidate.violations)
    if candidate.simulation.violations:
        raise VerificationError(candidate.violations)
    if not limit.is_cut_short:
        search.best = _require_within_limits(candidate)
        search.end(Termination.STALLED)
        return
    search.end(Termination.TIME_LIMIT, timeout_reason)
    search.best = None if candidate.violations else candidate


def _run_and_verify(problem: Problem, entry: Method) -> Candidate:
    """Run a method without a solver; return its schedule with all violations."""
    schedule = entry.function()(problem)
    try:
        return make_candidate(problem, schedule)
    except InputError as error:
        if entry.user_function is None:
            raise
        raise _invalid_schedule_error(entry, error.faults) from None


def _invalid_schedule_error(entry: Method, reasons: Sequence[str]) -> UserMethodError:
    """Return the error for a user-defined method whose schedule cannot be executed."""
    further_text = f"; and {len(reasons) - 1:,} more" if len(reasons) > 1 else ""
    message = f"method {entry.name!r}: its schedule is refused: {reasons[0]}{further_text}"
    return UserMethodError(message, refused=True)


def _require_within_limits(candidate: Candidate) -> Candidate:
    """Return the candidate; raise `MethodNotApplicableError` if it has a violation."""
    if candidate.violations:
        raise MethodNotApplicableError(
            f"its schedule breaks a limit: {'; '.join(candidate.violations)}"
        )
    return candidate


# -- MILP-based methods: each returns the problem to solve ----------------------------------------


def optimal(problem: Problem) -> Problem:
    """Return the problem itself, by default of minimum energy (POET, ICML 2022)."""
    return problem


def paging_only(problem: Problem) -> Problem:
    """Return the problem without recomputation (POET, ICML 2022, section 6.2)."""
    keep_all_fits = problem.usable_ram_bytes >= checkpoint_all_peak_bytes(problem.graph)
    if not problem.can_page and not keep_all_fits:
        raise MethodNotApplicableError("it pages tensors, and the problem allows no paging")
    return replace(problem, recompute=False)


def recompute_only(problem: Problem) -> Problem:
    """Return the problem without paging (POET, ICML 2022, section 6.2)."""
    return replace(problem, paging=False)


def resident(problem: Problem) -> Problem:
    """Return the problem with all state in RAM, required by a user-defined constraint."""
    state = problem.graph.state_tensors
    if not state:
        return problem

    def state_in_ram(v: Any) -> Any:
        return sum(v.resident[i] for i in state) >= len(state)

    return problem.subject_to(**{"all state in RAM": state_in_ram})


def checkmate(problem: Problem) -> Problem:
    """Return the problem of Checkmate: minimum compute time by recomputation.

    From Jain et al., MLSys 2020, section 4. There is no paging; deadline and energy budget are
    removed, because Checkmate has none, and only the verifier checks them. Stages and memory are
    those of this package: workspaces count, and tensors are freed after their last use in a stage.
    """
    return problem.without_limits(
        Quantity.TIME,
        Quantity.ENERGY,
        paging=False,
        minimize=Quantity.TIME,
        deadline_counts=DeadlineCounts.COMPUTE,
    )
