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

REFUTED: Final = (
    "a verified schedule refutes what the solver proved, and no other proof was found in time"
)
"""Reason of a result that has a schedule and no proof."""
EQUAL: Final = 1e-6
"""Maximum relative difference between a bound and a value that count as equal, for rounding
errors."""
EQUAL_IN_ALL: Final = 1e-9
"""Maximum difference that counts as equal, relative to the whole energy or time, baseline included:
the tolerance of limits."""
EQUAL_BYTES: Final = 0.5
"""Maximum difference in bytes that counts as equal. Bytes are whole numbers, so a bound less than
one below the value reaches it."""
SOLVER_ERROR: Final = 5e-7
"""Maximum error of a solver's bound, in units of the objective, and relative to a thousand of them:
five times its tolerance. Solvers search only for solutions that improve the incumbent by more than
a tolerance, and report the incumbent's value as the bound at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule with the verifier's verdict."""

    schedule: Schedule
    simulation: Simulation
    violations: tuple[str, ...]
    """Violations that the verifier found."""
    value: float
    """The minimized quantity minus its baseline, in its own unit."""
    own: ModelObjective | None = None
    """The user-defined objective of a model that replaced its problem's; None otherwise."""
    verify_s: float = 0.0
    """Time to verify the schedule [s]."""

    def is_better(self, other: Candidate) -> bool:
        """Return whether this candidate has the better value.

        Compares the user-defined objectives if both candidates have one.
        """
        if self.own is None or other.own is None:
            return self.value < other.value
        if self.own.sense == "minimize":
            return self.own.value < other.own.value
        return self.own.value > other.own.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The termination, best schedule and bound of a search."""

    termination: Termination
    candidate: Candidate | None = None
    """The best schedule found."""
    bound: float = 0.0
    """Proven lower bound on the value of every candidate, in its own unit."""
    infeasible: bool = False
    """Whether it is proved that no schedule exists."""
    reason: str = ""
    """Why no schedule was found, as text."""
    build_s: float = 0.0
    """Time to build and compile [s]."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the solver and its wrapper."""
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """Size of the solved model: columns, rows, ..."""
    log: str = ""

    def with_solves(self, solves: Sequence[Outcome]) -> Outcome:
        """Return this outcome with the sum of the build times and the joined logs of `solves`."""
        build_s = sum(solve.build_s for solve in solves)
        return replace(self, build_s=build_s, log="".join(solve.log for solve in solves))


def as_candidate(
    problem: Problem, schedule: Schedule, *, planning_s: float | None = None
) -> Candidate:
    """Verify a schedule, with its plan if time is a makespan.

    If the plan is not found within `planning_s`, the verifier uses a plan without overlapping
    transfers.
    """
    begun_s = time.monotonic()
    verdict = verify(problem, schedule, planning_s=planning_s)
    return Candidate(
        schedule=schedule,
        simulation=verdict.simulation,
        violations=verdict.violations,
        value=problem.objective.overhead_of(verdict.simulation),
        verify_s=time.monotonic() - begun_s,
    )


def verified_candidate(problem: Problem, schedule: Schedule | None) -> Candidate | None:
    """Verify a schedule. Return None for None, or if the verifier finds a violation."""
    if schedule is None:
        return None
    candidate = as_candidate(problem, schedule)
    return None if candidate.violations else candidate


def better_candidate(first: Candidate | None, other: Candidate | None) -> Candidate | None:
    """Return the candidate with the smaller value; `first` if both are equal.

    Return None if both are None.
    """
    if first is None or other is None:
        return first or other
    return first if first.value <= other.value else other


def safe_bound(problem: Problem, bound: float) -> float:
    """Return a solver's bound minus the maximum error of the bound, in units of the objective.

    For a peak, the error is that of the memory rows, whose unit is a thousand times smaller.
    """
    units = max(1.0, abs(bound) / 1000) if problem.objective.is_sum else 1000.0
    return bound - SOLVER_ERROR * units


def is_tight(problem: Problem, value: float, bound: float) -> bool:
    """Return whether a bound reaches a value within rounding errors."""
    if bound >= value:
        return True
    missing = value - bound
    if problem.objective.is_in_bytes:
        return missing < EQUAL_BYTES
    whole_value = abs(problem.objective.baseline) + value
    return missing <= EQUAL * value and missing <= EQUAL_IN_ALL * whole_value


def is_closed(problem: Problem, value: float, bound: float, gap: float) -> bool:
    """Return whether the gap between a value and a bound is at most `gap`."""
    return is_tight(problem, value, bound) or relative_gap(value, bound) <= gap


def is_refuted(problem: Problem, outcome: Outcome) -> bool:
    """Return whether the valid schedule of an outcome contradicts its bound or infeasibility.

    Differences within rounding errors are no contradiction.
    """
    candidate = outcome.candidate
    if candidate is None or candidate.violations or candidate.own is not None:
        return False
    slack = EQUAL_BYTES
    if not problem.objective.is_in_bytes:
        slack = EQUAL * abs(candidate.value) + EQUAL_IN_ALL * abs(problem.objective.baseline)
    return outcome.infeasible or outcome.bound > candidate.value + slack


def without_proof(problem: Problem, outcome: Outcome) -> Outcome:
    """Return an outcome with its schedule, but without its proof.

    The bound is that which is known of the problem without a solve.
    """
    is_proved = outcome.termination == Termination.PROVED
    return replace(
        outcome,
        bound=problem.objective.known_bound,
        infeasible=False,
        termination=Termination.STALLED if is_proved else outcome.termination,
        reason=REFUTED,
    )


def reported_bound(problem: Problem, candidate: Candidate, bound: float) -> float:
    """Return the bound to report for a candidate. It never exceeds the candidate's value."""
    bound = max(bound, problem.objective.known_bound)
    return candidate.value if is_tight(problem, candidate.value, bound) else bound


def make_result(
    problem: Problem, request: Request, outcome: Outcome, *, formulation: str
) -> SolveResult:
    """Convert an outcome to a result. Discards a proof that the outcome's schedule refutes."""
    blank = SolveResult(
        problem=problem,
        status=Status.INFEASIBLE if outcome.infeasible else Status.UNKNOWN,
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
        outcome = without_proof(problem, outcome)
    candidate = outcome.candidate
    if candidate is None:
        return (
            blank
            if outcome.infeasible
            else replace(blank, termination=_unproved_termination(outcome))
        )
    model_objective, bound = candidate.own, 0.0
    if not candidate.violations and model_objective is None:
        bound = reported_bound(problem, candidate, outcome.bound)
    gap = relative_gap(candidate.value, bound) if model_objective is None else model_objective.gap
    is_proved = not candidate.violations and gap <= request.gap
    objective = problem.objective
    whole_bound = min(objective.baseline + bound, objective.value_of(candidate.simulation))
    return replace(
        blank,
        status=Status.OPTIMAL if is_proved else Status.FEASIBLE,
        termination=Termination.PROVED if is_proved else _unproved_termination(outcome),
        schedule=candidate.schedule,
        simulation=candidate.simulation,
        violations=candidate.violations,
        objective_bound=whole_bound if model_objective is None else None,
        model_objective=model_objective,
        verify_s=candidate.verify_s,
        overhead_bound_j=bound if problem.minimize == Quantity.ENERGY else 0.0,
        reason=REFUTED if outcome.reason == REFUTED else "",
    )


def _unproved_termination(outcome: Outcome) -> Termination:
    """Return the termination of an outcome with too large a gap: STALLED in place of PROVED.

    A solver may have proved the optimum of a restriction of the problem, or of a user-defined
    objective.
    """
    proved = outcome.termination == Termination.PROVED
    return Termination.STALLED if proved else outcome.termination
