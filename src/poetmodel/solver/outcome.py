"""Candidates: verified schedules with their values, and the tolerances of values and bounds."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from poetmodel.planner import verify
from poetmodel.result import relative_gap
from poetmodel.schedule import check_schedule
from poetmodel.solver.statement import Statement

if TYPE_CHECKING:
    from poetmodel.problem import Problem
    from poetmodel.result import ModelObjective
    from poetmodel.schedule import Schedule, Simulation

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
        """Return whether this candidate is better, by objectives of users if both have one."""
        if self.model_objective is None or other.model_objective is None:
            return self.value < other.value
        if self.model_objective.sense == "minimize":
            return self.model_objective.value < other.model_objective.value
        return self.model_objective.value > other.model_objective.value


def make_candidate(
    problem: Problem, schedule: Schedule, *, planning_s: float | None = None
) -> Candidate:
    """Verify a schedule, with its plan if time is a makespan; return it with all violations.

    If the plan is not found within `planning_s` of wall time [s], the verifier uses a plan without
    overlapping transfers; None is no limit.
    """
    started_s = time.monotonic()
    if isinstance(problem, Statement) and problem.transfer_weight is not None:
        # Without idle power beyond one pass.
        verdict = check_schedule(problem, schedule, makespan_s=problem.pass_time_s)
    else:
        verdict = verify(problem, schedule, planning_s=planning_s)
    return Candidate(
        schedule=schedule,
        simulation=verdict.simulation,
        violations=verdict.violations,
        value=problem.objective.overhead_of(verdict.simulation),
        verify_s=time.monotonic() - started_s,
    )


def make_valid_candidate(problem: Problem, schedule: Schedule | None) -> Candidate | None:
    """Verify a schedule; None without a schedule, or if the verifier finds a violation."""
    if schedule is None:
        return None
    candidate = make_candidate(problem, schedule)
    return None if candidate.violations else candidate


def better_candidate(first: Candidate | None, second: Candidate | None) -> Candidate | None:
    """Return the candidate with the smaller `value`, ignoring objectives of users."""
    if first is None or second is None:
        return first or second
    return first if first.value <= second.value else second


def safe_bound(problem: Problem, bound: float) -> float:
    """Return a solver's bound minus its maximum error, in units of the objective."""
    error_units = max(1.0, abs(bound) / 1000) if problem.objective.is_sum else 1000.0
    return bound - SOLVER_ERROR * error_units


def is_tight(problem: Problem, value: float, bound: float) -> bool:
    """Return whether a bound reaches a value within rounding errors; both exclude the baseline."""
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


def reported_bound(problem: Problem, candidate: Candidate, bound: float) -> float:
    """Return the bound to report: at least the bound known without a solve; the value if tight."""
    bound = max(bound, problem.objective.known_bound)
    return candidate.value if is_tight(problem, candidate.value, bound) else bound
