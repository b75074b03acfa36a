"""`solve`: the one way in."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

from poetmodel.clock import rare_collections, time_limit
from poetmodel.errors import InputError, TimeLimitError, TooLargeError, shown
from poetmodel.heuristics.greedy import construct, page_everything, trivial
from poetmodel.problem import LinearRow, Problem
from poetmodel.problem.infeasibility import obstacle
from poetmodel.result import OwnObjective, SolveResult, Termination
from poetmodel.schedule import Schedule, check_identity
from poetmodel.solver.outcome import (
    Candidate,
    Outcome,
    accepted,
    as_candidate,
    finish,
    is_closed,
    is_refuted,
    is_tight,
    reported_bound,
    without_proof,
)
from poetmodel.solver.request import GRACE_S, History, Request, SolveProgress
from poetmodel.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyomo.environ as pyo

    from poetmodel.solver.request import OnProgress


DEFAULT: Final = "lazy"
"""The formulation by which a problem is solved unless another is requested."""
_CUT_SHORT: Final = frozenset({Termination.TIME_LIMIT, Termination.INTERRUPTED})
"""After these the schedule to begin from is the answer if the solver has found none."""
AS_TOTALS: Final = (
    "poetmodel: the constraints added to the model are on totals, so that lazy solves the problem "
    "with them"
)
AS_STAGE_LIMITS: Final = (
    "poetmodel: the constraints added to the model name stages, so that lazy solves the problem "
    "and enforces those that its answers break"
)
AGAIN: Final = (
    "a verified schedule refutes what the solver proved; the problem is solved again without "
    "presolve"
)
GREEDY_TIME_RATIO: Final = 0.1
"""Share of the time limit after which greedy returns its best schedule."""
LONGEST_GREEDY_TIME_RATIO: Final = 0.5
"""Share of the time that is left after which greedy ends without one."""
LEAST_UNITS: Final = 1.0
"""Smallest value of a known schedule, in units of the objective, that a solver resolves to a
millionth; below it the problem is stated in finer units."""
MOST_UNITS: Final = 1e5
"""Largest such value."""
_SETTLED: Final = frozenset({Termination.PROVED, Termination.STALLED})
"""After these what is open is below a solver's tolerances."""


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

    history = History(on_progress=on_progress)
    request = Request(
        backend=backend,
        time_limit_s=time_limit,
        gap=gap,
        threads=threads,
        seed=seed,
        on_progress=history.watch,
    )
    find_backend(backend).versions()
    with rare_collections():
        task = _Task.of(problem_or_model, formulation)
        problem, reason = task.problem, obstacle(task.problem)
        if start is not None:
            if not isinstance(start, Schedule):
                raise InputError(f"start: expected a Schedule, got {shown(start)}")
            check_identity(problem.graph, start)
        if reason is not None:
            outcome = Outcome(termination=Termination.PROVED, infeasible=True, reason=reason)
        elif problem.is_overlapping:
            from poetmodel.solver.makespan import solve_makespan

            wants = task.wants_page_outs
            planned = problem.surrogate(wants_page_outs=True) if wants else problem
            restates = task.model is None
            outcome = solve_makespan(planned, request, task.attempt, start=start, restates=restates)
        else:
            outcome = task.solve(problem, request, start)
        if task.model is None and task.exact:
            outcome = _with_reported(problem, outcome, history.best)
        result = finish(problem, request, outcome, formulation=task.formulation)
        return replace(result, reduction=task.reduction(), history=history.of(result))


@dataclass(frozen=True, kw_only=True)
class _Task:
    """Input of a solve: a problem by a formulation, or a user's model of it."""

    problem: Problem
    formulation: str
    """Its name; of a model the one that it was built by."""
    model: pyo.ConcreteModel | None = None
    """The user's model. Whether a schedule keeps its rows is known only once it is compiled."""

    @classmethod
    def of(cls, given: Problem | pyo.ConcreteModel, formulation: str | None) -> _Task:
        """Return the settings in the arguments of `solve`."""
        if isinstance(given, Problem):
            name = formulation or DEFAULT
            _check_formulation(given, name)
            return cls(problem=given, formulation=name)
        problem = getattr(given, "problem", None)
        if not isinstance(problem, Problem):
            raise InputError(
                "solve takes a Problem or a model made by build(problem), which carries its problem"
            )
        name = given.formulation.name
        if formulation is not None and not name.startswith(formulation):
            raise InputError(
                f"formulation: the model was built as {name!r}; leave it out, or pass the problem"
            )
        return cls(problem=problem, formulation=name, model=given)

    @property
    def exact(self) -> bool:
        """Whether what is proved of it holds for the problem."""
        if self.model is None:
            return self.formulation != "paper"
        from poetmodel.solver.monolithic import states_problem

        return bool(self.model.exact) and states_problem(self.model)

    @property
    def wants_page_outs(self) -> bool:
        """Whether what was added to the model may want page-outs that no page-in needs."""
        if self.model is None:
            return False
        from poetmodel.solver.added import names_page_outs

        return names_page_outs(self.model)

    @cached_property
    def added(self) -> list[LinearRow] | None:
        """The rows that were added to the model, as far as they are over its decisions alone."""
        from poetmodel.solver.added import added_rows

        return added_rows(self.model)

    def solve(self, problem: Problem, request: Request, start: Schedule | None) -> Outcome:
        """Solve a model as a problem where what was added to it can be stated so."""
        stated = None
        if self.model is not None:
            from poetmodel.solver.added import as_problem

            with time_limit(request.remaining_s() + GRACE_S), suppress(TimeLimitError):
                stated = as_problem(self.model, self.added)
        if stated is None:
            return self.attempt(problem, request, start)
        own = stated.objective != problem.objective
        within = request
        if own:  # progress of the user's own objective says nothing of the problem's
            within = replace(request, on_progress=lambda _: request.report(None, None))
        outcome = _Task(problem=stated, formulation=DEFAULT).attempt(stated, within, start)
        told = AS_STAGE_LIMITS if stated.stand_in.rows else AS_TOTALS
        outcome = replace(outcome, log=f"{told}\n{outcome.log}")
        if own:
            outcome = _with_own_objective(self.model, problem, stated, outcome)
        if outcome.infeasible:
            from poetmodel.solver.monolithic import nothing_keeps

            reason = nothing_keeps(problem, getattr(self.model, "formulation", None))
            instead = "" if stated.stand_in.rows else ", or problem.subject_to, which drops nothing"
            return replace(outcome, reason=reason + instead)
        if outcome.candidate is None and outcome.termination == Termination.STALLED:
            after = self.attempt(problem, request, start)
            return after.with_parts([outcome, after])
        return outcome

    def attempt(self, problem: Problem, request: Request, start: Schedule | None) -> Outcome:
        """Begin with what is quickly found, then solve the problem or a surrogate of it.

        What a verified schedule refutes is solved again without presolve, and holds as far as that
        proves it.
        """
        outcome = self._attempt_once(problem, request, start)
        if not is_refuted(problem, outcome):
            return outcome
        known = without_proof(problem, outcome)
        if request.remaining_s() <= 0 or known.candidate is None:
            return known
        start, told = known.candidate.schedule, f"{outcome.log}poetmodel: {AGAIN}\n"
        again = self._attempt_once(problem, replace(request, presolve=False), start)
        again = replace(again, candidate=_better(again.candidate, known.candidate))
        if is_refuted(problem, again):
            again = without_proof(problem, again)
        return again.with_parts([replace(known, log=told), again])

    def _attempt_once(self, problem: Problem, request: Request, start: Schedule | None) -> Outcome:
        """Begin with what is quickly found, then solve once with what is known."""
        best: Candidate | None = None
        kept = self.model is None  # all that is accepted keeps the limits of a problem
        try:
            with time_limit(request.remaining_s() + GRACE_S):
                best = _better(accepted(problem, start), _greedy(problem, request))
                if best is None or not problem.objective.is_sum:  # its peak is the floor
                    best = _better(best, accepted(problem, page_everything(problem)))
                best, kept = self._keeping_rows(problem, request, best)
            solve = self._solve_in_units if self.exact else self._solve_once
            outcome = self._settle(problem, request, best) or solve(problem, request, best)
        except KeyboardInterrupt:
            outcome = Outcome(termination=Termination.INTERRUPTED)
        except TimeLimitError:
            reason = (
                f"no schedule of the {len(problem.graph.nodes):,} nodes was made within the time "
                f"limit of {format_seconds(request.time_limit_s)}; raise the limit, or coarsen the "
                "graph"
            )
            outcome = Outcome(termination=Termination.TIME_LIMIT, reason=reason)
        except TooLargeError as error:
            known = best if self.model is None else None
            outcome = Outcome(termination=Termination.STALLED, candidate=known, reason=str(error))
        if outcome.candidate is None and kept and outcome.termination in _CUT_SHORT:
            return replace(outcome, candidate=best)
        return outcome

    def _keeping_rows(
        self, problem: Problem, request: Request, best: Candidate | None
    ) -> tuple[Candidate | None, bool]:
        """Return a schedule to begin from, and whether it is known to keep what was added.

        Without paging, or without recomputations, schedules keep many rows on these.
        """
        keeps: Callable[[Schedule], bool] | None = None
        if self.model is not None:
            from poetmodel.solver.added import row_check

            keeps = row_check(self.model, self.added)
            if keeps is None:
                return best, False
        if best is not None and (keeps is None or keeps(best.schedule)):
            return best, True
        if keeps is None and not (problem.constraints or problem.stand_in.rows):
            return best, False
        most_s = GREEDY_TIME_RATIO * request.time_limit_s
        for other in (replace(problem, paging=False), replace(problem, recompute=False)):
            rival = accepted(problem, construct(other, most_s=most_s))
            if rival is not None and (keeps is None or keeps(rival.schedule)):
                return rival, True
        return best, False

    def _settle(self, problem: Problem, request: Request, best: Candidate | None) -> Outcome | None:
        """Report the schedule to begin from; return an outcome if it ends the solve.

        That of ``paper`` is its own, and that of a model may break its rows: neither is reported.
        """
        if best is None or self.model is not None or not self.exact:
            return None
        least = problem.objective.least
        if is_tight(problem, best.value, least):
            return Outcome(termination=Termination.PROVED, candidate=best, bound=best.value)
        if request.report(best.value, least, best.schedule) is False:
            return Outcome(termination=Termination.INTERRUPTED)
        return None

    def _solve_in_units(
        self, problem: Problem, request: Request, best: Candidate | None
    ) -> Outcome:
        """Solve, again in units of what was found where those of the model are too coarse.

        A solver resolves the objective to an absolute tolerance. Where the best value is next to
        nothing in the units of the objective, or beyond them, the problem is stated anew, measured
        by that value. What is open of bytes then is decided: can one byte be saved?
        """
        objective, stated = problem.objective, problem
        if best is not None and self.model is None and not _is_resolved(problem, best.value):
            stated = problem.surrogate(reference_value=best.value)
        outcome = self._solve_once(stated, request, best)
        while outcome.termination in _SETTLED and request.remaining_s() > 0:
            candidate = outcome.candidate
            if candidate is None or candidate.violations or outcome.infeasible:
                break
            if is_closed(problem, candidate.value, outcome.bound, request.gap):
                break
            reference, start = stated.objective.reference, None
            if objective.is_sum and (reference is None or candidate.value < reference / 2):
                stated, start = problem.surrogate(reference_value=candidate.value), candidate
            elif objective.in_bytes:
                stated = stated.below_bytes(round(candidate.value))
            else:
                break
            before, within = outcome, _never_behind(request, candidate, outcome.bound)
            try:
                after = self._solve_once(stated, within, start, outcome.bound)
            except KeyboardInterrupt:
                return replace(outcome, termination=Termination.INTERRUPTED)
            except TimeLimitError:
                return replace(outcome, termination=Termination.TIME_LIMIT)
            outcome = _joined(before, after, candidate)
            if start is None and (outcome.bound, outcome.candidate) == (before.bound, candidate):
                break
        return outcome

    def _solve_once(
        self, stated: Problem, request: Request, start: Candidate | None, bound: float = 0.0
    ) -> Outcome:
        """Solve a problem as it is stated, from a schedule and with a bound that are known."""
        # Pyomo takes a second to load: not before the first schedule has been reported.
        if self.formulation == "lazy":
            from poetmodel.solver.lazy import solve_lazily

            with time_limit(request.remaining_s() + GRACE_S):
                outcome = solve_lazily(stated, request, start=start, bound=bound)
            return _go_on_by_stage(stated, request, outcome)
        from poetmodel.solver.monolithic import build_and_solve, solve_model

        if self.model is None:
            return build_and_solve(stated, request, self.formulation, start=start)
        return solve_model(self.model, request, start=start, trimmed=False, problem=stated)

    def reduction(self) -> str:
        """Return in words how the formulation reduced a graph that it could not state as it is."""
        if self.formulation != "paper":
            return ""
        from poetmodel.model.paper import reduction_in_words

        return reduction_in_words(self.problem.graph) or ""


def _with_own_objective(
    model: pyo.ConcreteModel | None, problem: Problem, stated: Problem, outcome: Outcome
) -> Outcome:
    """Return an outcome of a model's own objective, stated as a problem's, as one of the model."""
    from poetmodel.solver.added import own_objective

    best, objective = outcome.candidate, own_objective(model)
    if best is None or objective is None:
        return replace(outcome, bound=0.0)
    sign, baseline = objective.sense, stated.objective.baseline
    own = OwnObjective(
        name=objective.name,
        sense="minimize" if sign > 0 else "maximize",
        value=sign * (baseline + best.value),
        bound=sign * (baseline + reported_bound(stated, best, outcome.bound)),
    )
    candidate = replace(as_candidate(problem, best.schedule), own=own)
    return replace(outcome, candidate=candidate, bound=0.0)


def _go_on_by_stage(problem: Problem, request: Request, before: Outcome) -> Outcome:
    """Go on with ``compact`` where ``lazy`` came to its end with something open.

    What own constraints want for its own sake has no place in a relaxation's groups. Where nothing
    is left to enforce and it fits into no stage of the answer, only stages can tell.
    """
    candidate, wants = before.candidate, any(any(column) for column in problem.wanted)
    if before.termination != Termination.STALLED or not wants or request.remaining_s() <= 0:
        return before
    if problem.stand_in.rows:
        return before  # which ``compact`` does not state
    from poetmodel.model.building import estimated_build_s
    from poetmodel.solver.monolithic import build_and_solve

    if estimated_build_s(problem, "compact") > request.remaining_s():
        return before
    within = request if candidate is None else _never_behind(request, candidate, before.bound)
    try:
        after = build_and_solve(problem, within, "compact", start=candidate)
    except KeyboardInterrupt:
        return replace(before, termination=Termination.INTERRUPTED)
    except TooLargeError:
        return before
    return replace(
        after,
        candidate=_better(after.candidate, candidate),
        bound=max(before.bound, after.bound),
    ).with_parts([before, after])


def _is_resolved(problem: Problem, value: float) -> bool:
    """Return whether a solver resolves a value in the units in which a problem is stated."""
    if value <= 0 or not problem.objective.is_sum:
        return True
    return LEAST_UNITS <= value / problem.objective.unit <= MOST_UNITS


def _never_behind(request: Request, known: Candidate, bound: float) -> Request:
    """Return a request whose progress is never behind what is known already."""

    def report_best(progress: SolveProgress) -> bool | None:
        value, least = progress.incumbent, progress.bound
        least = bound if least is None else max(least, bound)
        if value is not None and value < known.value:
            return request.report(value, least, progress.schedule)
        return request.report(known.value, min(least, known.value), known.schedule)

    return replace(request, on_progress=report_best)


def _joined(before: Outcome, after: Outcome, known: Candidate) -> Outcome:
    """Return the joint result of two solves, the second of which sought better than `known`."""
    bound = known.value if after.infeasible else min(after.bound, known.value)
    return replace(
        after,
        candidate=_better(after.candidate, known),
        bound=max(before.bound, bound),
        infeasible=False,
    ).with_parts([before, after])


def _check_formulation(problem: Problem, formulation: str) -> None:
    if formulation == DEFAULT:
        return
    from poetmodel.model import FORMULATIONS
    from poetmodel.model.paper import check_fits

    if formulation not in FORMULATIONS:
        raise InputError(
            f"formulation: expected lazy, {' or '.join(FORMULATIONS)}, got {formulation!r}"
        )
    if formulation == "paper":
        check_fits(problem)


def _with_reported(problem: Problem, outcome: Outcome, best: SolveProgress | None) -> Outcome:
    """Return an outcome that was cut short with the best schedule that was reported on the way."""
    candidate, schedule = outcome.candidate, None if best is None else best.schedule
    known = candidate is not None and candidate.schedule is schedule
    if schedule is None or known or outcome.termination not in _CUT_SHORT:
        return outcome
    return replace(outcome, candidate=_better(candidate, accepted(problem, schedule)))


def _greedy(problem: Problem, request: Request) -> Candidate | None:
    """Return keep-all if it is valid and cannot be beaten, else what is built greedily."""
    plain = accepted(problem, trivial(problem))
    if plain is not None and is_tight(problem, plain.value, problem.objective.least):
        return plain
    try:
        with time_limit(max(request.remaining_s() * LONGEST_GREEDY_TIME_RATIO, GRACE_S)):
            schedule = construct(problem, most_s=request.time_limit_s * GREEDY_TIME_RATIO)
            return _better(plain, accepted(problem, schedule))
    except (TimeLimitError, TooLargeError):  # on graphs of thousands of nodes
        return plain


def _better(first: Candidate | None, other: Candidate | None) -> Candidate | None:
    if first is None or other is None:
        return first or other
    return first if first.value <= other.value else other
