"""Solve a task: find a first schedule, choose the unit of the objective, and prove a bound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from poetmodel.clock import time_limit
from poetmodel.errors import TimeLimitError, TooLargeError
from poetmodel.heuristics.greedy import construct, keep_all_if_within_budgets, page_everything
from poetmodel.heuristics.segments import checkpoint_segments
from poetmodel.result import ModelObjective, Termination
from poetmodel.solver.outcome import (
    Candidate,
    Outcome,
    better_candidate,
    drop_proof,
    is_gap_closed,
    is_refuted,
    is_tight,
    make_valid_candidate,
)
from poetmodel.solver.request import GRACE_S, Request, SolveProgress
from poetmodel.units import format_seconds

if TYPE_CHECKING:
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule
    from poetmodel.solver.policy import Policy


CUT_SHORT: Final = frozenset({Termination.TIME_LIMIT, Termination.INTERRUPTED})
"""Terminations before the end of a proof, after which a schedule found earlier may be returned."""
RETRY_NOTE: Final = (
    "a verified schedule refutes the proof of the solver; the problem is solved again without "
    "presolve"
)
REFINABLE: Final = frozenset({Termination.PROVED, Termination.STALLED})
"""Terminations after which an open gap may be due to a solver's tolerances."""


class StartCheck(NamedTuple):
    """What a task makes of a first schedule, apart from the limits of its problem."""

    is_solution: bool
    """Whether the schedule decides all variables of the task and satisfies all added rows."""
    model_objective: ModelObjective | None = None
    """Value of the schedule in a user-defined objective of a model; None without one."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A problem with the formulation that solves it. The subclass `ModelTask` has a user's model.

    `solve_problem` finds a first schedule, chooses the unit of the objective, and proves a bound.
    It solves the problem of the task or, if time is a makespan, a surrogate.
    """

    problem: Problem
    formulation: str
    """Name of the formulation; for a model, the formulation by which `build` made it."""
    can_restate: ClassVar[bool] = True
    """Whether valid schedules of the problem solve the task, and its limits and objective can be
    replaced; False for models, which may have added rows."""

    @property
    def is_exact(self) -> bool:
        """Whether bounds and infeasibility proved by the formulation hold for the problem."""
        return self.formulation != "paper"

    @property
    def planned_problem(self) -> Problem:
        """The problem whose schedules are planned: `problem`, or a surrogate in `ModelTask`."""
        return self.problem

    @property
    def reduction(self) -> str:
        """Text on how the formulation reduced a graph that it cannot represent; empty otherwise."""
        if self.formulation != "paper":
            return ""
        from poetmodel.model.paper import describe_reduction

        return describe_reduction(self.problem.graph) or ""

    def check_start(self, start: Schedule) -> StartCheck:  # noqa: ARG002 - models have added rows
        """Check a schedule against what the task adds to its problem: nothing."""
        return StartCheck(is_solution=True)

    def solve_problem(self, problem: Problem, request: Request, start: Schedule | None) -> Outcome:
        """Solve `problem`, that of the task or a surrogate, and return the outcome.

        Starts from the best of `start` and the heuristics' schedules; an invalid `start` is
        ignored. Raises the errors of `prove` except `TimeLimitError` and `TooLargeError`, after
        which the outcome has a reason. After Ctrl-C, the outcome has the termination INTERRUPTED.
        If a verified schedule refutes the proof, the problem is solved again without presolve. If a
        schedule refutes the second proof, too, or no time remains for it, the outcome has no proof.
        """
        outcome = self._solve_once(problem, request, start)
        if not is_refuted(problem, outcome):
            return outcome
        unproved_outcome = drop_proof(problem, outcome)
        if request.remaining_s() <= 0 or unproved_outcome.candidate is None:
            return unproved_outcome
        start, log = unproved_outcome.candidate.schedule, f"{outcome.log}poetmodel: {RETRY_NOTE}\n"
        second_outcome = self._solve_once(problem, replace(request, presolve=False), start)
        second_outcome = replace(
            second_outcome,
            candidate=better_candidate(second_outcome.candidate, unproved_outcome.candidate),
        )
        if is_refuted(problem, second_outcome):
            second_outcome = drop_proof(problem, second_outcome)
        return second_outcome.with_solves([replace(unproved_outcome, log=log), second_outcome])

    def _solve_once(self, problem: Problem, request: Request, start: Schedule | None) -> Outcome:
        """Prove a bound, starting with the best of `start` and schedules by heuristics.

        If a time limit, Ctrl-C or a model that is too large ends the proof without a schedule, the
        outcome has the best first schedule, except for a user's model, whose added rows that
        schedule may violate.
        """
        best: Candidate | None = None
        try:
            best = make_valid_candidate(problem, start)  # without a limit, so that it is not lost
            with time_limit(request.remaining_s() + GRACE_S):
                best = better_candidate(best, _segment_candidate(problem, request))
                best = better_candidate(best, _greedy_candidate(problem, request))
                # With page_everything, the peak is the minimum RAM.
                if best is None or not problem.objective.is_sum:
                    best = better_candidate(
                        best, make_valid_candidate(problem, page_everything(problem))
                    )
                best = best or self._construct_restricted(problem, request)
            prove = self._prove_in_fine_units if self.is_exact else self.prove
            outcome = self._check_start(problem, request, best) or prove(problem, request, best)
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
            first_candidate = best if self.can_restate else None
            outcome = Outcome(
                termination=Termination.STALLED, candidate=first_candidate, reason=str(error)
            )
        if outcome.candidate is None and self.can_restate and outcome.termination in CUT_SHORT:
            return replace(outcome, candidate=best)
        return outcome

    def _construct_restricted(self, problem: Problem, request: Request) -> Candidate | None:
        """Construct a schedule without paging or, if that is not valid, without recomputation.

        Such schedules meet many user-defined constraints. Returns None if neither is valid, for a
        problem without user-defined constraints, and for a user's model.
        """
        if not (self.can_restate and problem.constraints):
            return None
        max_s = request.policy.greedy_time_ratio * request.time_limit_s
        for restricted_problem in (
            replace(problem, paging=False),
            replace(problem, recompute=False),
        ):
            candidate = make_valid_candidate(problem, construct(restricted_problem, max_s=max_s))
            if candidate is not None:
                return candidate
        return None

    def _check_start(
        self, problem: Problem, request: Request, first_candidate: Candidate | None
    ) -> Outcome | None:
        """Report the first schedule unless the bound known without a solve proves it optimal.

        Return an outcome if the schedule is optimal, or if the callback stops the solve; None
        otherwise. Also return None, without a report, if there is no first schedule, for ``paper``,
        which has another objective, and for a user's model, which may have more rows.
        """
        if first_candidate is None or not (self.can_restate and self.is_exact):
            return None
        known_bound = problem.objective.known_bound
        if is_tight(problem, first_candidate.value, known_bound):
            return Outcome(
                termination=Termination.PROVED,
                candidate=first_candidate,
                bound=first_candidate.value,
            )
        if request.report(first_candidate.value, known_bound, first_candidate.schedule) is False:
            return Outcome(termination=Termination.INTERRUPTED)
        return None

    def _prove_in_fine_units(
        self, problem: Problem, request: Request, first_candidate: Candidate | None
    ) -> Outcome:
        """Prove a bound, and repeat with finer units of the objective while the gap is open.

        A solver resolves the objective to an absolute tolerance. If the value of `first_candidate`
        is too small or too large for the unit of the objective, that value becomes the reference of
        the unit, unless the task has a user's model. While the gap is open, the problem is solved
        again:

        - If the best value is less than half of the reference, or there is no reference, the best
          value becomes the reference, also for a user's model. This excludes a peak, whose unit has
          no reference.
        - Otherwise, if the quantity is in bytes, the next solve searches for a schedule that saves
          at least one byte. The loop ends if neither schedule nor bound changes.
        - Otherwise, the loop ends.

        The time limit and Ctrl-C also end the loop.
        """
        objective, stated_problem = problem.objective, problem
        if (
            first_candidate is not None
            and self.can_restate
            and not _is_resolvable(problem, first_candidate.value, request.policy)
        ):
            stated_problem = problem.surrogate(reference_value=first_candidate.value)
        outcome = self.prove(stated_problem, request, first_candidate)
        while outcome.termination in REFINABLE and request.remaining_s() > 0:
            candidate = outcome.candidate
            if candidate is None or candidate.violations or outcome.is_infeasible:
                break
            if is_gap_closed(problem, candidate.value, outcome.bound, request.gap):
                break
            reference, start = stated_problem.objective.reference, None
            if objective.is_sum and (reference is None or candidate.value < reference / 2):
                stated_problem, start = (
                    problem.surrogate(reference_value=candidate.value),
                    candidate,
                )
            elif objective.is_in_bytes:
                stated_problem = stated_problem.with_bytes_below(round(candidate.value))
            else:
                break
            outcome_before, reporting_request = (
                outcome,
                _with_known_progress(request, candidate, outcome.bound),
            )
            try:
                next_outcome = self.prove(stated_problem, reporting_request, start, outcome.bound)
            except KeyboardInterrupt:
                return replace(outcome, termination=Termination.INTERRUPTED)
            except TimeLimitError:
                return replace(outcome, termination=Termination.TIME_LIMIT)
            outcome = _merge_outcomes(outcome_before, next_outcome, candidate)
            if start is None and (outcome.bound, outcome.candidate) == (
                outcome_before.bound,
                candidate,
            ):
                break
        return outcome

    def prove(
        self, problem: Problem, request: Request, start: Candidate | None, bound: float = 0.0
    ) -> Outcome:
        """Solve `problem` by the formulation, from the valid schedule `start` if there is one.

        ``lazy`` also starts from `bound`, an earlier `Outcome.bound`, and may fall back to
        ``compact``. Raises `TimeLimitError` if ``lazy`` exceeds the time limit by more than
        `GRACE_S`, `VerificationError` if the verifier rejects a solution of ``compact`` or of a
        user's model and no cover cut excludes this solution, and the other errors of
        `prove_formulation`.
        """
        if self.formulation == "lazy":
            from poetmodel.solver import lazy

            with time_limit(request.remaining_s() + GRACE_S):
                outcome = lazy.prove(problem, request, start=start, bound=bound)
            return _fall_back_to_compact(problem, request, outcome)
        from poetmodel.solver.monolithic import prove_formulation

        return prove_formulation(problem, request, self.formulation, start=start)


def _fall_back_to_compact(problem: Problem, request: Request, lazy_outcome: Outcome) -> Outcome:
    """Solve with ``compact`` if ``lazy`` stalled and stages are limited or decisions rewarded.

    The groups of a relaxation cannot represent some per-stage user-defined constraints, nor some
    rewarded decisions. Returns the outcome of ``compact`` with the better schedule and bound of
    both. Returns `lazy_outcome` if ``compact`` is not needed, is estimated to take longer to build
    than the remaining time, or is too large; after Ctrl-C, with the termination INTERRUPTED.
    """
    candidate = lazy_outcome.candidate
    has_stage_terms = bool(problem.stage_limits) or any(any(column) for column in problem.rewards)
    if (
        lazy_outcome.termination != Termination.STALLED
        or not has_stage_terms
        or request.remaining_s() <= 0
    ):
        return lazy_outcome
    from poetmodel.model.building import estimate_build_s
    from poetmodel.solver.monolithic import prove_formulation

    if estimate_build_s(problem, "compact") > request.remaining_s():
        return lazy_outcome
    reporting_request = (
        request
        if candidate is None
        else _with_known_progress(request, candidate, lazy_outcome.bound)
    )
    try:
        compact_outcome = prove_formulation(problem, reporting_request, "compact", start=candidate)
    except KeyboardInterrupt:
        return replace(lazy_outcome, termination=Termination.INTERRUPTED)
    except TooLargeError:
        return lazy_outcome
    return replace(
        compact_outcome,
        candidate=better_candidate(compact_outcome.candidate, candidate),
        bound=max(lazy_outcome.bound, compact_outcome.bound),
    ).with_solves([lazy_outcome, compact_outcome])


def _is_resolvable(problem: Problem, value: float, policy: Policy) -> bool:
    """Return whether the unit of the objective suits `value`, or the unit has no reference."""
    if value <= 0 or not problem.objective.is_sum:
        return True
    return policy.min_units <= value / problem.objective.unit <= policy.max_units


def _with_known_progress(request: Request, known_candidate: Candidate, bound: float) -> Request:
    """Return a request that reports the known schedule and bound in place of worse ones."""

    def report_best(progress: SolveProgress) -> bool | None:
        """Report the better of the progress and the known schedule, and the higher bound.

        If the known schedule is reported, the reported bound is at most its value. Return the
        result of `Request.report`: False requests the end of the solve.
        """
        overhead, overhead_bound = progress.overhead, progress.overhead_bound
        overhead_bound = bound if overhead_bound is None else max(overhead_bound, bound)
        if overhead is not None and overhead < known_candidate.value:
            return request.report(overhead, overhead_bound, progress.schedule)
        return request.report(
            known_candidate.value,
            min(overhead_bound, known_candidate.value),
            known_candidate.schedule,
        )

    return replace(request, on_progress=report_best)


def _merge_outcomes(
    first_outcome: Outcome, second_outcome: Outcome, known_candidate: Candidate
) -> Outcome:
    """Merge two outcomes; the second solve started from `known_candidate` or excluded its value.

    Return the second outcome with the better of its schedule and `known_candidate`, the higher
    bound, the total build time and both logs. The second bound counts only up to the value of
    `known_candidate`. If the second solve is infeasible, that value is the second bound, and
    `is_infeasible` becomes False.
    """
    bound = (
        known_candidate.value
        if second_outcome.is_infeasible
        else min(second_outcome.bound, known_candidate.value)
    )
    return replace(
        second_outcome,
        candidate=better_candidate(second_outcome.candidate, known_candidate),
        bound=max(first_outcome.bound, bound),
        is_infeasible=False,
    ).with_solves([first_outcome, second_outcome])


def _segment_candidate(problem: Problem, request: Request) -> Candidate | None:
    """Return the schedule of `checkpoint_segments`; None if there is none, or it is not valid.

    Also None if construction and verification raise `TooLargeError`, or together take longer than
    the remaining time plus `GRACE_S`.
    """
    try:
        with time_limit(request.remaining_s() + GRACE_S):
            return make_valid_candidate(problem, checkpoint_segments(problem))
    except (TimeLimitError, TooLargeError):
        return None


def _greedy_candidate(problem: Problem, request: Request) -> Candidate | None:
    """Return the better schedule of keep-all and `construct`; None if neither is valid.

    `construct` is not called if keep-all reaches the bound known without a solve. Its schedule is
    ignored if `TooLargeError` is raised, or if construction and verification together take longer
    than both `GRACE_S` and `max_greedy_time_ratio` of the remaining time.
    """
    policy = request.policy
    keep_all = make_valid_candidate(problem, keep_all_if_within_budgets(problem))
    if keep_all is not None and is_tight(problem, keep_all.value, problem.objective.known_bound):
        return keep_all
    try:
        with time_limit(max(request.remaining_s() * policy.max_greedy_time_ratio, GRACE_S)):
            schedule = construct(problem, max_s=request.time_limit_s * policy.greedy_time_ratio)
            return better_candidate(keep_all, make_valid_candidate(problem, schedule))
    except (TimeLimitError, TooLargeError):  # on graphs of thousands of nodes
        return keep_all
