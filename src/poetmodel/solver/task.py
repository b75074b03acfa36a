"""A task: from a schedule to begin with, in units that a solver resolves, to the proof."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final

from poetmodel.clock import time_limit
from poetmodel.errors import TimeLimitError, TooLargeError
from poetmodel.heuristics.greedy import construct, page_everything, trivial
from poetmodel.heuristics.segments import checkpoint_segments
from poetmodel.result import Termination
from poetmodel.solver.outcome import (
    Candidate,
    Outcome,
    accepted,
    better,
    is_closed,
    is_refuted,
    is_tight,
    without_proof,
)
from poetmodel.solver.request import GRACE_S, Request, SolveProgress
from poetmodel.units import format_seconds

if TYPE_CHECKING:
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule


CUT_SHORT: Final = frozenset({Termination.TIME_LIMIT, Termination.INTERRUPTED})
"""After these the schedule to begin from is the answer if the solver has found none."""
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
SETTLED: Final = frozenset({Termination.PROVED, Termination.STALLED})
"""After these what is open is below a solver's tolerances."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A problem, to be solved by a formulation; `ModelTask` is one that a model states.

    `answer` searches for a schedule to begin from, scales the statement to what a solver resolves,
    and has it proved. It takes the problem, or a surrogate where time is a makespan.
    """

    problem: Problem
    formulation: str
    """Its name; of a model the one that it was built by."""
    restates: ClassVar[bool] = True
    """Whether it states any limits and objective anew; a model keeps the rows that it has."""

    @property
    def exact(self) -> bool:
        """Whether what is proved of it holds for the problem."""
        return self.formulation != "paper"

    @property
    def planned(self) -> Problem:
        """The problem, with what plans must serve."""
        return self.problem

    @property
    def reduction(self) -> str:
        """In words how the formulation reduced a graph that it could not state as it is."""
        if self.formulation != "paper":
            return ""
        from poetmodel.model.paper import describe_reduction

        return describe_reduction(self.problem.graph) or ""

    def answer(self, problem: Problem, request: Request, start: Schedule | None) -> Outcome:
        """Solve the problem or a surrogate of it, from a schedule if given.

        What a verified schedule refutes is solved again without presolve, and holds as far as that
        proves it.
        """
        outcome = self._search(problem, request, start)
        if not is_refuted(problem, outcome):
            return outcome
        known = without_proof(problem, outcome)
        if request.remaining_s() <= 0 or known.candidate is None:
            return known
        start, told = known.candidate.schedule, f"{outcome.log}poetmodel: {AGAIN}\n"
        again = self._search(problem, replace(request, presolve=False), start)
        again = replace(again, candidate=better(again.candidate, known.candidate))
        if is_refuted(problem, again):
            again = without_proof(problem, again)
        return again.with_parts([replace(known, log=told), again])

    def _search(self, problem: Problem, request: Request, start: Schedule | None) -> Outcome:
        """Search for a schedule to begin from, and have the rest proved."""
        best: Candidate | None = None
        try:
            with time_limit(request.remaining_s() + GRACE_S):
                best = better(accepted(problem, start), _by_segments(problem, request))
                best = better(best, _greedy(problem, request))
                if best is None or not problem.objective.is_sum:  # its peak is the floor
                    best = better(best, accepted(problem, page_everything(problem)))
                best = best or self._from_fewer_choices(problem, request)
            prove = self._scale if self.exact else self.prove
            outcome = self._settle(problem, request, best) or prove(problem, request, best)
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
            known = best if self.restates else None
            outcome = Outcome(termination=Termination.STALLED, candidate=known, reason=str(error))
        if outcome.candidate is None and self.restates and outcome.termination in CUT_SHORT:
            return replace(outcome, candidate=best)
        return outcome

    def _from_fewer_choices(self, problem: Problem, request: Request) -> Candidate | None:
        """Return a schedule without paging, or recomputations: these keep many own constraints."""
        if not (self.restates and problem.constraints):
            return None
        most_s = GREEDY_TIME_RATIO * request.time_limit_s
        for other in (replace(problem, paging=False), replace(problem, recompute=False)):
            rival = accepted(problem, construct(other, most_s=most_s))
            if rival is not None:
                return rival
        return None

    def _settle(self, problem: Problem, request: Request, best: Candidate | None) -> Outcome | None:
        """Report the schedule to begin from; return an outcome if it ends the solve.

        That of ``paper`` is its own, and that of a model may break its rows: neither is reported.
        """
        if best is None or not (self.restates and self.exact):
            return None
        least = problem.objective.known_bound
        if is_tight(problem, best.value, least):
            return Outcome(termination=Termination.PROVED, candidate=best, bound=best.value)
        if request.report(best.value, least, best.schedule) is False:
            return Outcome(termination=Termination.INTERRUPTED)
        return None

    def _scale(self, problem: Problem, request: Request, best: Candidate | None) -> Outcome:
        """Prove, again in units of what was found where those of the model are too coarse.

        A solver resolves the objective to an absolute tolerance. Where the best value is next to
        nothing in the units of the objective, or beyond them, the problem is stated anew, measured
        by that value. What is open of bytes then is decided: can one byte be saved?
        """
        objective, stated = problem.objective, problem
        if best is not None and self.restates and not _is_resolved(problem, best.value):
            stated = problem.surrogate(reference_value=best.value)
        outcome = self.prove(stated, request, best)
        while outcome.termination in SETTLED and request.remaining_s() > 0:
            candidate = outcome.candidate
            if candidate is None or candidate.violations or outcome.infeasible:
                break
            if is_closed(problem, candidate.value, outcome.bound, request.gap):
                break
            reference, start = stated.objective.reference, None
            if objective.is_sum and (reference is None or candidate.value < reference / 2):
                stated, start = problem.surrogate(reference_value=candidate.value), candidate
            elif objective.is_in_bytes:
                stated = stated.with_bytes_below(round(candidate.value))
            else:
                break
            before, within = outcome, _never_behind(request, candidate, outcome.bound)
            try:
                after = self.prove(stated, within, start, outcome.bound)
            except KeyboardInterrupt:
                return replace(outcome, termination=Termination.INTERRUPTED)
            except TimeLimitError:
                return replace(outcome, termination=Termination.TIME_LIMIT)
            outcome = _joined(before, after, candidate)
            if start is None and (outcome.bound, outcome.candidate) == (before.bound, candidate):
                break
        return outcome

    def prove(
        self, stated: Problem, request: Request, start: Candidate | None, bound: float = 0.0
    ) -> Outcome:
        """Solve a problem as it is stated, from a schedule and with a bound that are known."""
        if self.formulation == "lazy":
            from poetmodel.solver import lazy

            with time_limit(request.remaining_s() + GRACE_S):
                outcome = lazy.prove(stated, request, start=start, bound=bound)
            return _go_on_by_stage(stated, request, outcome)
        from poetmodel.solver.monolithic import prove_formulation

        return prove_formulation(stated, request, self.formulation, start=start)


def _go_on_by_stage(problem: Problem, request: Request, before: Outcome) -> Outcome:
    """Go on with ``compact`` where ``lazy`` came to its end with something open.

    What own constraints want, for its own sake or by stage, may have no place in a relaxation's
    groups. Where nothing
    is left to enforce and it fits into no stage of the answer, only stages can tell.
    """
    candidate = before.candidate
    wants = bool(problem.stage_limits) or any(any(column) for column in problem.rewards)
    if before.termination != Termination.STALLED or not wants or request.remaining_s() <= 0:
        return before
    from poetmodel.model.building import estimate_build_s
    from poetmodel.solver.monolithic import prove_formulation

    if estimate_build_s(problem, "compact") > request.remaining_s():
        return before
    within = request if candidate is None else _never_behind(request, candidate, before.bound)
    try:
        after = prove_formulation(problem, within, "compact", start=candidate)
    except KeyboardInterrupt:
        return replace(before, termination=Termination.INTERRUPTED)
    except TooLargeError:
        return before
    return replace(
        after,
        candidate=better(after.candidate, candidate),
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
        value, least = progress.overhead, progress.overhead_bound
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
        candidate=better(after.candidate, known),
        bound=max(before.bound, bound),
        infeasible=False,
    ).with_parts([before, after])


def _by_segments(problem: Problem, request: Request) -> Candidate | None:
    """Return the best schedule by segments; None if there is none, or no time to make it."""
    try:
        with time_limit(request.remaining_s() + GRACE_S):
            return accepted(problem, checkpoint_segments(problem))
    except (TimeLimitError, TooLargeError):
        return None


def _greedy(problem: Problem, request: Request) -> Candidate | None:
    """Return keep-all if it is valid and cannot be beaten, else what is built greedily."""
    plain = accepted(problem, trivial(problem))
    if plain is not None and is_tight(problem, plain.value, problem.objective.known_bound):
        return plain
    try:
        with time_limit(max(request.remaining_s() * LONGEST_GREEDY_TIME_RATIO, GRACE_S)):
            schedule = construct(problem, most_s=request.time_limit_s * GREEDY_TIME_RATIO)
            return better(plain, accepted(problem, schedule))
    except (TimeLimitError, TooLargeError):  # on graphs of thousands of nodes
        return plain
