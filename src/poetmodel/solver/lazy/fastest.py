"""Is there a schedule within the deadline? The least time that one takes decides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from poetmodel.heuristics.greedy import construct
from poetmodel.problem import DeadlineCounts, Problem, Quantity
from poetmodel.result import Termination
from poetmodel.solver.outcome import Candidate, Outcome, accepted
from poetmodel.solver.request import SolveProgress

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.solver.request import Request

    Attempt = Callable[[Problem, Request, Candidate | None, float], Outcome]
    """Solves a problem, from a schedule on where there is one, up to a value."""

PART: Final = 0.8
"""Most of the time that is left for this."""
MARGIN: Final = 1e-6
"""How much more than the deadline is proved away, relatively: more than any tolerance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastestResult:
    """What was found out."""

    outcome: Outcome
    """How the search for the fastest schedule ended."""
    start: Candidate | None = None
    """A schedule that keeps every limit."""
    infeasible: bool = False
    """Whether it is proved that there is none."""
    interrupted: bool = False
    """Whether the caller ended the search."""


def has_fastest(problem: Problem) -> bool:
    """Return whether the least time decides: there is a deadline, on a sum of times."""
    return (
        problem.deadline_s is not None
        and problem.minimize != Quantity.TIME
        and problem.deadline_counts != DeadlineCounts.OVERLAP
    )


def find_fastest(
    problem: Problem, request: Request, bound: float, attempt: Attempt
) -> FastestResult:
    """Minimize the time within all other limits, until that decides whether the deadline holds.

    Parameters
    ----------
    problem : Problem
        One for which `has_fastest` is true.
    request : Request
        The limits of the whole solve; this takes a part of what is left of its time.
    bound : float
        What is proved of the problem so far, to be told meanwhile.
    attempt : callable
        What solves a problem.

    Returns
    -------
    FastestResult
        A valid schedule, a proof that there is none, or neither.

    Raises
    ------
    ValueError
        If there is no deadline.
    """
    if problem.deadline_s is None:
        msg = "there is no deadline to keep"
        raise ValueError(msg)
    most = problem.deadline_s - problem.pass_time_s
    ceiling = most + MARGIN * problem.deadline_s
    fastest = problem.without(Quantity.TIME, minimize=Quantity.TIME)
    found = False

    def watch(progress: SolveProgress) -> bool:
        nonlocal found
        found = found or (progress.incumbent is not None and progress.incumbent <= most)
        tell = request.on_progress
        known = SolveProgress(seconds=progress.seconds, incumbent=None, bound=bound)
        return not found and (tell is None or tell(known) is not False)

    limit_s = request.elapsed_s() + PART * request.remaining_s()
    within = replace(request, time_limit_s=limit_s, on_progress=watch)
    begin = accepted(fastest, construct(fastest, most_s=within.remaining_s() / 4))
    if begin is not None and begin.value <= most:
        outcome = Outcome(termination=Termination.STALLED, candidate=begin)
    else:
        outcome = attempt(fastest, within, begin, ceiling)
    fastest_yet = outcome.candidate
    start = None if fastest_yet is None else accepted(problem, fastest_yet.schedule)
    return FastestResult(
        outcome=outcome,
        start=start,
        infeasible=start is None and (outcome.infeasible or outcome.bound >= ceiling),
        interrupted=outcome.termination == Termination.INTERRUPTED and not found,
    )
