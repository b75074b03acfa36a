"""`solve`: the one way in."""

from __future__ import annotations

import time
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING, Final

from poetmodel.errors import InputError, TimeLimitError, TooLargeError
from poetmodel.heuristics.greedy import construct, offload_all, trivial
from poetmodel.problem import Problem, Quantity
from poetmodel.problem.infeasibility import obstacle
from poetmodel.result import Termination, relative_gap
from poetmodel.schedule import check_identity
from poetmodel.solver.collection import rare_collections
from poetmodel.solver.outcome import Candidate, Outcome, accepted, finish, is_tight, least_value
from poetmodel.solver.overlap import restated, solve_overlapping, states_problem
from poetmodel.solver.request import GRACE_S, Request, SolveProgress
from poetmodel.time_limit import time_limit
from poetmodel.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyomo.environ as pyo

    from poetmodel.result import SolveResult
    from poetmodel.schedule import Schedule
    from poetmodel.solver.request import OnProgress

GREEDY_SHARE: Final = 0.1
"""Share of the time limit for the greedy schedule."""
LONGEST_GREEDY_SHARE: Final = 0.5
"""Share of what is left of it after which the first attempt at that schedule is given up."""
_CUT_SHORT: Final = frozenset({Termination.TIME_LIMIT, Termination.INTERRUPTED})
"""After these a greedy schedule stands in for one that the solver did not find."""
_SETTLED: Final = frozenset({Termination.PROVED, Termination.STALLED})
"""After these what is open is below a solver's tolerances."""
RESOLVED_UNITS: Final = (1.0, 1e5)
"""Values of a known schedule, in units of the objective, that a solver resolves to a millionth."""
DEFAULT: Final = "lazy"
"""The formulation by which a problem is solved unless another is requested."""


def solve(
    problem_or_model: Problem | pyo.ConcreteModel,
    *,
    formulation: str | None = None,
    backend: str = "highs",
    time_limit: float = 60.0,
    gap: float = 1e-4,
    threads: int = 1,
    seed: int = 0,
    start: Schedule | None = None,
    on_progress: OnProgress | None = None,
) -> SolveResult:
    """Find the best schedule, and prove how good it is.

    Parameters
    ----------
    problem_or_model : Problem or ConcreteModel
        A problem, or a model that `build` made, with whatever was added to it.
    formulation : {'lazy', 'compact', 'paper'}, optional
        For a problem: how to solve it, by default ``lazy``. A model is solved as it was built.
    backend : {'highs', 'scip', 'gurobi'}
        The solver.
    time_limit : float
        Wall time for everything, building included [s].
    gap : float
        Stop when the gap of what can be decided (the overhead, for energy) is at most this.
    threads : int
        Threads that may be used: from two on a process searches for schedules beside the proof.
    seed : int
        Seed of the solver.
    start : Schedule, optional
        A schedule to begin from, valid for the problem; a greedy one is tried beside it.
    on_progress : callable, optional
        Called with a `SolveProgress` now and then; returning False stops the solve.

    Returns
    -------
    SolveResult
        The schedule, verified, with its bound; without one, why.

    Raises
    ------
    InputError
        If the problem, the limits or the start cannot be used.
    BackendUnavailableError
        If the solver is missing, or its licence refuses the model.
    VerificationError
        If the verifier rejects a solution of an exact formulation.

    Notes
    -----
    Ctrl-C ends the solve with the best schedule so far.
    """
    from poetmodel.backends.registry import backend as find_backend

    request = Request(
        backend=backend,
        time_limit_s=time_limit,
        gap=gap,
        threads=threads,
        seed=seed,
        on_progress=on_progress,
    )
    find_backend(backend).versions()
    with rare_collections():
        if isinstance(problem_or_model, Problem):
            return _solve_problem(problem_or_model, request, formulation or DEFAULT, start)
        return _solve_own_model(problem_or_model, request, formulation, start)


def _solve_problem(
    problem: Problem, request: Request, formulation: str, start: Schedule | None
) -> SolveResult:
    _check_formulation(formulation)
    paper = formulation == "paper"
    if paper:
        from poetmodel.model.paper import check_fits

        check_fits(problem)
    if start is not None:
        check_identity(problem.graph, start)

    def attempt(stated: Problem, within: Request, begin: Schedule | None) -> Outcome:
        return _search(stated, within, formulation, begin)

    ruled_out = _ruled_out(problem)
    if ruled_out is not None:
        outcome = ruled_out
    elif problem.is_overlapping:
        outcome = solve_overlapping(problem, request, attempt, start=start)
    else:
        outcome = attempt(problem, request, start)
    return _stated(finish(problem, request, outcome, formulation=formulation))


def _search(
    problem: Problem, request: Request, formulation: str, start: Schedule | None
) -> Outcome:
    """Begin with what is quickly found, then solve as the formulation does."""
    paper = formulation == "paper"
    best: Candidate | None = None
    try:
        with time_limit(request.remaining_s() + GRACE_S):
            best = _first(problem, request, accepted(problem, start))
            if (
                best is not None
                and not paper
                and is_tight(problem, best.value, least_value(problem))
            ):
                return Outcome(termination=Termination.PROVED, candidate=best, bound=best.value)
            # What `paper` finds is its own: nothing is announced or given to it to begin from.
            if not paper and _announce(request, problem, best) is False:
                outcome = Outcome(termination=Termination.INTERRUPTED)
            else:
                outcome = _state_and_solve(problem, request, formulation, None if paper else best)
    except KeyboardInterrupt:
        outcome = Outcome(termination=Termination.INTERRUPTED)
    except TimeLimitError:
        outcome = Outcome(termination=Termination.TIME_LIMIT, reason=_too_late(problem, request))
    except TooLargeError as error:
        outcome = Outcome(termination=Termination.STALLED, candidate=best, reason=str(error))
    if outcome.candidate is None and outcome.termination in _CUT_SHORT:
        outcome = replace(outcome, candidate=best)
    return outcome


def _too_late(problem: Problem, request: Request) -> str:
    return (
        f"no schedule of the {len(problem.graph.nodes):,} nodes was made within the time limit of "
        f"{format_seconds(request.time_limit_s)}; raise the limit, or coarsen the graph"
    )


def _solve_in_units(
    problem: Problem,
    request: Request,
    best: Candidate | None,
    attempt: Callable[[Problem, Request, Candidate | None, float], Outcome],
    *,
    own_rows: bool = False,
) -> Outcome:
    """Solve a problem, again in units of what was found where those of its model are too coarse.

    A solver resolves the objective to an absolute tolerance. Where the best value is next to
    nothing in the units of the objective, or beyond them, the problem is stated anew, measured by
    that value. What is open of bytes then is decided: is there a schedule with one byte less?

    Parameters
    ----------
    problem : Problem
        What to solve.
    request : Request
        Its gap and time.
    best : Candidate or None
        A valid schedule to begin from.
    attempt : callable
        Solves a problem within a request, from a schedule and with a bound that are known.
    own_rows : bool
        Whether `attempt` solves a user's model: `best` may break some of its rows.
    """
    from poetmodel.model.quantities import objective_unit

    of_ram = problem.minimize == Quantity.RAM
    stated = problem
    if best is not None and best.value > 0 and not (of_ram or own_rows):
        least, most = RESOLVED_UNITS
        if not least <= best.value / objective_unit(problem) <= most:
            stated = problem.better_than(best.value)
    outcome = attempt(stated, request, best, 0.0)
    while outcome.termination in _SETTLED and request.remaining_s() > 0:
        found = outcome.candidate
        if found is None or found.violations or _is_closed(problem, request, found, outcome.bound):
            break
        reference, start = stated.reference_value, None
        if not of_ram and (reference is None or found.value < reference / 2):
            stated, start = problem.better_than(found.value), found
        elif problem.minimize in (Quantity.RAM, Quantity.WRITES):
            stated = stated.below_bytes(round(found.value))
        else:
            break
        before = outcome
        try:
            after = attempt(stated, _telling(request, found, outcome.bound), start, outcome.bound)
        except KeyboardInterrupt:
            return replace(outcome, termination=Termination.INTERRUPTED)
        outcome = _joined(before, after, found)
        if start is None and (outcome.bound, outcome.candidate) == (before.bound, found):
            break
    return outcome


def _telling(request: Request, found: Candidate, bound: float) -> Request:
    """Return a request whose progress is never behind what is known already."""
    tell = request.on_progress
    if tell is None:
        return request

    def report(progress: SolveProgress) -> bool | None:
        value, least = progress.incumbent, progress.bound
        return tell(
            replace(
                progress,
                incumbent=found.value if value is None else min(value, found.value),
                bound=min(found.value, bound if least is None else max(least, bound)),
            )
        )

    return replace(request, on_progress=report)


def _is_closed(problem: Problem, request: Request, found: Candidate, bound: float) -> bool:
    return is_tight(problem, found.value, bound) or relative_gap(found.value, bound) <= request.gap


def _joined(before: Outcome, after: Outcome, found: Candidate) -> Outcome:
    """Return what two solves found together, the second one of what is better than `found`."""
    bound = found.value if after.infeasible else min(after.bound, found.value)
    return replace(
        after,
        candidate=_better(after.candidate, found),
        bound=max(before.bound, bound),
        infeasible=False,
        build_s=before.build_s + after.build_s,
        solve_s=before.solve_s + after.solve_s,
        log=before.log + after.log,
    )


def _state_and_solve(
    problem: Problem, request: Request, formulation: str, best: Candidate | None
) -> Outcome:
    # Pyomo takes a second to load: not before the first schedule has been announced.
    def attempt(stated: Problem, within: Request, start: Candidate | None, bound: float) -> Outcome:
        if formulation == "lazy":
            from poetmodel.solver.lazy import solve_lazily

            return solve_lazily(stated, within, start=start, bound=bound)
        return _build_and_solve(stated, within, formulation, start)

    if formulation == "paper":  # its bound proves nothing
        return attempt(problem, request, best, 0.0)
    return _solve_in_units(problem, request, best, attempt)


def _build_and_solve(
    problem: Problem, request: Request, formulation: str, best: Candidate | None
) -> Outcome:
    from pyomo.common.log import LoggingIntercept

    from poetmodel.model import build
    from poetmodel.model.size import estimated_build_s
    from poetmodel.solver.monolithic import solve_model

    expected_s = estimated_build_s(problem, formulation)
    if expected_s > request.remaining_s():
        reason = (
            f"building the model of {formulation!r} takes about {expected_s:.0f} s, more than the "
            "time limit"
        )
        return Outcome(termination=Termination.TIME_LIMIT, candidate=best, reason=reason)
    begun = time.monotonic()
    try:
        # Pyomo logs every exception of a rule as an error, this one too.
        with time_limit(request.remaining_s()), LoggingIntercept(StringIO(), "pyomo.core"):
            model = build(problem, formulation)
    except TimeLimitError:
        reason = f"the time limit passed while the model of {formulation!r} was built"
        return Outcome(
            termination=Termination.TIME_LIMIT,
            candidate=best,
            reason=reason,
            build_s=time.monotonic() - begun,
        )
    return solve_model(model, request, start=best, trimmed=True, build_s=time.monotonic() - begun)


def _solve_own_model(
    model: pyo.ConcreteModel, request: Request, formulation: str | None, start: Schedule | None
) -> SolveResult:
    problem = getattr(model, "problem", None)
    if not isinstance(problem, Problem):
        msg = "solve takes a Problem or a model made by build(problem), which carries its problem"
        raise InputError(msg)
    built_as = model.formulation.name
    if formulation is not None and not built_as.startswith(formulation):
        msg = f"formulation: the model was built as {built_as!r}; leave it out, or pass the problem"
        raise InputError(msg)
    if start is not None:
        check_identity(problem.graph, start)
    from poetmodel.solver.monolithic import solve_model

    def attempt(stated: Problem, within: Request, begin: Schedule | None) -> Outcome:
        def solve_stated(
            measured: Problem, told: Request, start: Candidate | None, _: float
        ) -> Outcome:
            with restated(model, measured):
                return solve_model(model, told, start=start, trimmed=False)

        best = accepted(stated, begin)
        try:
            best = _first(stated, within, best)
            if not (model.exact and states_problem(model)):
                return solve_stated(stated, within, best, 0.0)
            return _solve_in_units(stated, within, best, solve_stated, own_rows=True)
        except KeyboardInterrupt:
            return Outcome(termination=Termination.INTERRUPTED)

    ruled_out = _ruled_out(problem)
    if ruled_out is not None:
        outcome = ruled_out
    elif problem.is_overlapping:
        outcome = solve_overlapping(problem, request, attempt, start=start)
    else:
        outcome = attempt(problem, request, start)
    return _stated(finish(problem, request, outcome, formulation=built_as))


def _stated(result: SolveResult) -> SolveResult:
    """Return a result that says how its formulation reduced the graph."""
    if result.formulation != "paper":
        return result
    from poetmodel.model.paper import reduction_in_words

    return replace(result, reduction=reduction_in_words(result.problem.graph) or "")


def _check_formulation(formulation: str) -> None:
    if formulation == DEFAULT:
        return
    from poetmodel.model import FORMULATIONS

    if formulation not in FORMULATIONS:
        msg = f"formulation: expected lazy, {' or '.join(FORMULATIONS)}, got {formulation!r}"
        raise InputError(msg)


def _ruled_out(problem: Problem) -> Outcome | None:
    reason = obstacle(problem)
    if reason is None:
        return None
    return Outcome(termination=Termination.PROVED, infeasible=True, reason=reason)


def _first(problem: Problem, request: Request, given: Candidate | None) -> Candidate | None:
    """Return the schedule to begin from, the given one or what is quickly found."""
    best = _better(given, _greedy(problem, request))
    return accepted(problem, offload_all(problem)) if best is None else best


def _greedy(problem: Problem, request: Request) -> Candidate | None:
    """Return checkpoint-all if it is valid and cannot be beaten, else what is built greedily."""
    plain = accepted(problem, trivial(problem))
    if plain is not None and problem.minimize != Quantity.RAM:
        return plain
    try:
        with time_limit(max(request.remaining_s() * LONGEST_GREEDY_SHARE, GRACE_S)):
            made = construct(problem, most_s=request.time_limit_s * GREEDY_SHARE)
            return _better(plain, accepted(problem, made))
    except (TimeLimitError, TooLargeError):  # on graphs of thousands of nodes
        return plain


def _better(one: Candidate | None, other: Candidate | None) -> Candidate | None:
    if one is None or other is None:
        return one or other
    return one if one.value <= other.value else other


def _announce(request: Request, problem: Problem, best: Candidate | None) -> bool | None:
    """Tell of the schedule to begin with; return what the caller's callback answers."""
    if request.on_progress is None or best is None:
        return None
    return request.on_progress(
        SolveProgress(seconds=request.elapsed_s(), incumbent=best.value, bound=least_value(problem))
    )
