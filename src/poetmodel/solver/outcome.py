"""Convert the outcome of a search to a result. The verifier checks every schedule first."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.planner import verify
from poetmodel.problem import Problem, Quantity
from poetmodel.result import ModelObjective, SolveResult, Status, Termination, relative_gap
from poetmodel.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from poetmodel.schedule import Schedule, Simulation
    from poetmodel.solver.request import Request

REFUTED: Final = "a verified schedule refutes the proof of the solver, and no valid proof was found"
"""Reason of a result whose schedule contradicts the proof, which is dropped."""
EQUALITY_TOLERANCE: Final = 1e-6
"""Maximum difference between a value and a bound that counts as a rounding error, relative to the
value."""
TOTAL_TOLERANCE: Final = 1e-9
"""Maximum difference that counts as a rounding error, relative to the value with its baseline. It
equals the tolerance of limits."""
BYTES_TOLERANCE: Final = 0.5
"""Difference in bytes below which a bound counts as equal to a value [B]. Bytes are whole numbers,
so no value is between them."""
SOLVER_ERROR: Final = 5e-7
"""Maximum error of a solver's bound, in units of the objective; above a thousand units it grows in
proportion to the bound. It is five times a solver's tolerance: solvers search only for solutions
that improve the incumbent by more than a tolerance, and then report the incumbent's value as the
bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule with its simulation, its violations and its value."""

    schedule: Schedule
    simulation: Simulation
    violations: tuple[str, ...]
    """Violations that the verifier found."""
    value: float
    """The minimized quantity minus its baseline, in the unit of the quantity."""
    model_objective: ModelObjective | None = None
    """The user-defined objective of a model, if it replaced the problem's; None otherwise."""
    verify_s: float = 0.0
    """Time to verify the schedule [s]."""

    def is_better(self, other: Candidate) -> bool:
        """Return whether this candidate has a strictly better value than `other`.

        Compares the user-defined objectives of models, by their sense, if both candidates have one.
        Otherwise the smaller `value` is better.
        """
        if self.model_objective is None or other.model_objective is None:
            return self.value < other.value
        if self.model_objective.sense == "minimize":
            return self.model_objective.value < other.model_objective.value
        return self.model_objective.value > other.model_objective.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The termination, best schedule and bound of a search."""

    termination: Termination
    candidate: Candidate | None = None
    """The best schedule found; None without one."""
    bound: float = 0.0
    """Proven lower bound on the `Candidate.value` of every valid schedule; 0 if none is proven."""
    is_infeasible: bool = False
    """Whether it is proved that no schedule exists."""
    reason: str = ""
    """Reason why no schedule was found, or `REFUTED`. With a schedule, other texts are ignored."""
    build_s: float = 0.0
    """Time to build and compile models [s]."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the solver and its wrapper, by name."""
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """Size of the solved model, such as ``columns`` and ``rows``, and further metrics by name."""
    log: str = ""

    def with_solves(self, solves: Sequence[Outcome]) -> Outcome:
        """Return this outcome with the total build time and the joined logs of `solves`.

        They replace the build time and log of this outcome.
        """
        build_s = sum(solve.build_s for solve in solves)
        return replace(self, build_s=build_s, log="".join(solve.log for solve in solves))


def make_candidate(
    problem: Problem, schedule: Schedule, *, planning_s: float | None = None
) -> Candidate:
    """Verify a schedule, with its plan if time is a makespan; return it with all violations.

    If the plan is not found within `planning_s` of wall time [s], the verifier uses a plan without
    overlapping transfers; None is no limit. Raises `ScheduleError` for a schedule of another graph,
    `TooLargeError` as `verify`, and `TimeLimitError` after the time limit of a caller. If that
    limit passes while a plan is made within `planning_s`, planning ends without this error.
    """
    started_s = time.monotonic()
    verdict = verify(problem, schedule, planning_s=planning_s)
    return Candidate(
        schedule=schedule,
        simulation=verdict.simulation,
        violations=verdict.violations,
        value=problem.objective.overhead_of(verdict.simulation),
        verify_s=time.monotonic() - started_s,
    )


def make_valid_candidate(problem: Problem, schedule: Schedule | None) -> Candidate | None:
    """Verify a schedule; return None without a schedule, or if the verifier finds a violation.

    Raises the errors of `make_candidate`.
    """
    if schedule is None:
        return None
    candidate = make_candidate(problem, schedule)
    return None if candidate.violations else candidate


def better_candidate(first: Candidate | None, second: Candidate | None) -> Candidate | None:
    """Return the candidate with the smaller `value`; `first` if their values are equal.

    Ignores `Candidate.model_objective`. Return the other candidate if one is None, and None if both
    are.
    """
    if first is None or second is None:
        return first or second
    return first if first.value <= second.value else second


def safe_bound(problem: Problem, bound: float) -> float:
    """Return a solver's bound minus its maximum error, in units of the objective.

    For a peak, the error is that of the memory rows, whose unit is a thousand times larger.
    """
    error_units = max(1.0, abs(bound) / 1000) if problem.objective.is_sum else 1000.0
    return bound - SOLVER_ERROR * error_units


def is_tight(problem: Problem, value: float, bound: float) -> bool:
    """Return whether a bound reaches a value within rounding errors; both exclude the baseline.

    A rounding error in bytes is below `BYTES_TOLERANCE`. In another unit, it is at most
    `EQUALITY_TOLERANCE` times the value, and at most `TOTAL_TOLERANCE` times the sum of the value
    and the absolute baseline.
    """
    if bound >= value:
        return True
    shortfall = value - bound
    if problem.objective.is_in_bytes:
        return shortfall < BYTES_TOLERANCE
    total_value = abs(problem.objective.baseline) + value
    return shortfall <= EQUALITY_TOLERANCE * value and shortfall <= TOTAL_TOLERANCE * total_value


def is_gap_closed(problem: Problem, value: float, bound: float, gap: float) -> bool:
    """Return whether the gap between a value and a bound is at most `gap`, or a rounding error."""
    return is_tight(problem, value, bound) or relative_gap(value, bound) <= gap


def is_refuted(problem: Problem, outcome: Outcome) -> bool:
    """Return whether the valid schedule of an outcome contradicts its bound or infeasibility.

    Differences within rounding errors are no contradiction. Return False without a valid schedule,
    and if a model's objective replaced the problem's.
    """
    candidate = outcome.candidate
    if candidate is None or candidate.violations or candidate.model_objective is not None:
        return False
    tolerance = BYTES_TOLERANCE
    if not problem.objective.is_in_bytes:
        tolerance = EQUALITY_TOLERANCE * abs(candidate.value) + TOTAL_TOLERANCE * abs(
            problem.objective.baseline
        )
    return outcome.is_infeasible or outcome.bound > candidate.value + tolerance


def drop_proof(problem: Problem, outcome: Outcome) -> Outcome:
    """Return an outcome with its schedule, without its proof, and with the reason `REFUTED`.

    The bound becomes the one known without a solve, and the termination PROVED becomes STALLED.
    """
    is_proved = outcome.termination == Termination.PROVED
    return replace(
        outcome,
        bound=problem.objective.known_bound,
        is_infeasible=False,
        termination=Termination.STALLED if is_proved else outcome.termination,
        reason=REFUTED,
    )


def reported_bound(problem: Problem, candidate: Candidate, bound: float) -> float:
    """Return the bound to report for a candidate: at least the bound known without a solve.

    A bound that reaches the candidate's value within rounding errors becomes that value.
    """
    bound = max(bound, problem.objective.known_bound)
    return candidate.value if is_tight(problem, candidate.value, bound) else bound


def make_result(
    problem: Problem, request: Request, outcome: Outcome, *, formulation: str
) -> SolveResult:
    """Convert an outcome to a result; drop a proof that the outcome's valid schedule contradicts.

    Such a proof is infeasibility, or a bound above the value of the schedule. After a drop, the
    bound is the one known without a solve, and the reason is `REFUTED`.

    With a schedule, the status is OPTIMAL and the termination PROVED if the gap is at most that of
    the request and there are no violations; otherwise the status is FEASIBLE. Without a schedule,
    the status is INFEASIBLE or UNKNOWN. The termination PROVED becomes STALLED unless the status is
    OPTIMAL or INFEASIBLE.

    The bound of a schedule with violations is at most the baseline. `objective_bound` is None
    without a schedule and for the user-defined objective of a model, whose gap is
    `ModelObjective.gap`. A caller adds method, reduction and history.
    """
    base_result = SolveResult(
        problem=problem,
        status=Status.INFEASIBLE if outcome.is_infeasible else Status.UNKNOWN,
        termination=outcome.termination,
        reason=outcome.reason,
        formulation=formulation,
        backend=request.backend,
        solver_options=dict(request.solver_options),
        time_limit_s=float(request.time_limit_s),
        requested_gap=float(request.gap),
        build_s=outcome.build_s,
        solve_s=max(0.0, request.elapsed_s() - outcome.build_s),
        versions={"poetmodel": __version__, **outcome.versions},
        statistics=outcome.statistics,
        log=outcome.log,
    )
    if is_refuted(problem, outcome):
        outcome = drop_proof(problem, outcome)
    candidate = outcome.candidate
    if candidate is None:
        return (
            base_result
            if outcome.is_infeasible
            else replace(base_result, termination=_unproved_termination(outcome))
        )
    model_objective, bound = candidate.model_objective, 0.0
    if not candidate.violations and model_objective is None:
        bound = reported_bound(problem, candidate, outcome.bound)
    gap = relative_gap(candidate.value, bound) if model_objective is None else model_objective.gap
    is_proved = not candidate.violations and gap <= request.gap
    objective = problem.objective
    total_bound = min(objective.baseline + bound, objective.value_of(candidate.simulation))
    return replace(
        base_result,
        status=Status.OPTIMAL if is_proved else Status.FEASIBLE,
        termination=Termination.PROVED if is_proved else _unproved_termination(outcome),
        schedule=candidate.schedule,
        simulation=candidate.simulation,
        violations=candidate.violations,
        objective_bound=total_bound if model_objective is None else None,
        model_objective=model_objective,
        verify_s=candidate.verify_s,
        overhead_bound_j=bound if problem.minimize == Quantity.ENERGY else 0.0,
        reason=REFUTED if outcome.reason == REFUTED else "",
    )


def _unproved_termination(outcome: Outcome) -> Termination:
    """Return the termination of an outcome without a valid proof: STALLED in place of PROVED.

    A solver may have proved the optimum of a restriction of the problem, or of a user-defined
    objective.
    """
    is_proved = outcome.termination == Termination.PROVED
    return Termination.STALLED if is_proved else outcome.termination
