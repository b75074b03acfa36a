"""Methods that solve a mixed-integer program: the paper's own, its ablations, and Checkmate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.problem import DeadlineCounts, Problem, Quantity
from poetmodel.problem.infeasibility import limits_in_words, obstacle
from poetmodel.result import Status, Termination
from poetmodel.solver.outcome import Outcome, finish, verify_schedule
from poetmodel.solver.request import Request

if TYPE_CHECKING:
    from poetmodel.result import SolveResult


def optimal(problem: Problem, **options: Any) -> SolveResult:
    """Recompute and page with the least energy (POET, ICML 2022, section 5).

    Parameters
    ----------
    problem : Problem
        What to schedule.
    **options
        Keywords of `poetmodel.solve`.

    Returns
    -------
    SolveResult
        As `poetmodel.solve` gives it, bound included.
    """
    from poetmodel.solver import solve

    return solve(problem, **options)


def paging_only(problem: Problem, **options: Any) -> SolveResult:
    """Solve the problem without recomputation (POET, ICML 2022, section 6.2).

    Parameters, result and errors are those of `recompute_only`. Without storage it applies only
    where keep-all fits.
    """
    fits = problem.usable_ram_bytes >= checkpoint_all_peak_bytes(problem.graph)
    if not problem.can_page and not fits and obstacle(problem) is None:
        msg = "there is no storage to page to"
        raise MethodNotApplicableError(msg)
    return _restricted(problem, options, recompute=False)


def recompute_only(problem: Problem, **options: Any) -> SolveResult:
    """Solve the problem without paging (POET, ICML 2022, section 6.2).

    Parameters
    ----------
    problem : Problem
        What to schedule.
    **options
        Keywords of `poetmodel.solve`.

    Returns
    -------
    SolveResult
        Of the problem as it was stated. What the solver proved holds for the restricted problem
        only, so the bound is what every schedule pays; the restricted problem's bound and status
        are among the statistics.

    Raises
    ------
    MethodNotApplicableError
        If the restricted problem has no schedule within the limits.
    """
    return _restricted(problem, options, paging=False)


def checkmate(problem: Problem, **options: Any) -> SolveResult:
    """Recompute with the least compute time (Jain et al., MLSys 2020, section 4).

    Solves the problem without paging for the least compute time, in the meaning ``compute``;
    the verifier alone sees deadline and energy budget, as Checkmate knows neither.

    Parameters, result and errors are those of `recompute_only`.

    Notes
    -----
    Checkmate's stages are those of this package. Its memory is counted by the rules of execution
    here: workspaces count, and tensors are freed after their last use in a stage.
    """
    return _restricted(
        problem,
        options,
        paging=False,
        minimize=Quantity.TIME,
        deadline_counts=DeadlineCounts.COMPUTE,
        deadline=None,
        energy_budget=None,
    )


def _restricted(problem: Problem, options: dict[str, Any], **changes: Any) -> SolveResult:
    """Solve another problem, and verify its schedule by the one that was stated."""
    request = Request(
        backend=options.get("backend", "highs"),
        time_limit_s=options.get("time_limit", 60.0),
        gap=options.get("gap", 1e-4),
    )
    reason = obstacle(problem)
    if reason is not None:
        ruled_out = Outcome(termination=Termination.PROVED, infeasible=True, reason=reason)
        return finish(problem, request, ruled_out, formulation="")
    restricted = replace(problem, **changes)
    found = optimal(restricted, **options)
    outcome = Outcome(
        termination=found.termination,
        bound=problem.objective.least,
        reason=found.reason,
        build_s=found.build_s,
        versions=found.versions,
        statistics={
            **found.statistics,
            "restricted_status": str(found.status),
            "restricted_objective_bound": found.objective_bound,
        },
        log=found.log,
    )
    if found.status == Status.INFEASIBLE:
        msg = f"it has no schedule within {limits_in_words(restricted)}"
        raise MethodNotApplicableError(msg)
    if found.schedule is not None:
        candidate = verify_schedule(problem, found.schedule)
        if candidate.violations:
            broken = "; ".join(candidate.violations)
            msg = f"its schedule breaks a limit: {broken}"
            raise MethodNotApplicableError(msg)
        outcome = replace(outcome, candidate=candidate)
    return finish(problem, request, outcome, formulation=found.formulation)
