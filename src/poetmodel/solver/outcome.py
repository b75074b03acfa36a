"""From what a search found to the result that people get: nothing leaves without the verifier."""

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
"""Why a result has a schedule and no proof."""
EQUAL: Final = 1e-6
"""A bound and a value closer than this, relatively, are the same number with rounding errors."""
EQUAL_IN_ALL: Final = 1e-9
"""The same, relative to all energy or time, baseline included: the contract's tolerance."""
EQUAL_BYTES: Final = 0.5
"""The same for bytes, which are whole: a bound within less than one of the value reaches it."""
SOLVER_ERROR: Final = 5e-7
"""By how much a solver's bound may be wrong, in units of the objective, and relative to a thousand
of them: five times its tolerance. Solvers look only for what is better by a tolerance than what
they have, and at the end call the value of that their bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A schedule that the verifier has seen."""

    schedule: Schedule
    simulation: Simulation
    violations: tuple[str, ...]
    """The verifier's objections."""
    value: float
    """The minimized quantity beyond what every schedule pays, in its own unit."""
    own: ModelObjective | None = None
    """The model's own objective, where it optimises another than its problem's."""
    verify_s: float = 0.0
    """Time to verify it [s]."""

    def is_better(self, other: Candidate) -> bool:
        """Return whether this one is preferred to another, by the model's own objective if any."""
        if self.own is None or other.own is None:
            return self.value < other.value
        if self.own.sense == "minimize":
            return self.own.value < other.own.value
        return self.own.value > other.own.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a search ended."""

    termination: Termination
    candidate: Candidate | None = None
    """The best schedule found."""
    bound: float = 0.0
    """Proven lower bound on the value of every candidate, in its own unit."""
    infeasible: bool = False
    """Whether it is proved that there is no schedule."""
    reason: str = ""
    """In words why there is no schedule."""
    build_s: float = 0.0
    """Time to build and compile [s]."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the solver and its wrapper."""
    statistics: Mapping[str, Any] = field(default_factory=dict)
    """Size of the solved model: columns, rows, ..."""
    log: str = ""

    def with_parts(self, parts: Sequence[Outcome]) -> Outcome:
        """Return this outcome with the building time and the log of several solves."""
        build_s = sum(part.build_s for part in parts)
        return replace(self, build_s=build_s, log="".join(part.log for part in parts))


def as_candidate(
    problem: Problem, schedule: Schedule, *, planning_s: float | None = None
) -> Candidate:
    """Give a schedule to the verifier, with its plan where time is a makespan.

    Where so many seconds do not suffice for the plan, transfers and computing take turns.
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


def accepted(problem: Problem, schedule: Schedule | None) -> Candidate | None:
    """Return a schedule as a candidate; None where there is none or the verifier objects."""
    if schedule is None:
        return None
    candidate = as_candidate(problem, schedule)
    return None if candidate.violations else candidate


def better(first: Candidate | None, other: Candidate | None) -> Candidate | None:
    """Return the candidate of less value, the first one of equals; None where there is none."""
    if first is None or other is None:
        return first or other
    return first if first.value <= other.value else other


def safe_bound(problem: Problem, bound: float) -> float:
    """Return the part of a solver's bound that its tolerances leave certain, in the same units.

    For the peak it is that of the rows that state it, which count a thousand times.
    """
    units = max(1.0, abs(bound) / 1000) if problem.objective.is_sum else 1000.0
    return bound - SOLVER_ERROR * units


def is_tight(problem: Problem, value: float, bound: float) -> bool:
    """Return whether a bound reaches a value, rounding errors aside."""
    if bound >= value:
        return True
    missing = value - bound
    if problem.objective.is_in_bytes:
        return missing < EQUAL_BYTES
    whole = abs(problem.objective.baseline) + value
    return missing <= EQUAL * value and missing <= EQUAL_IN_ALL * whole


def is_closed(problem: Problem, value: float, bound: float, gap: float) -> bool:
    """Return whether a value is proved within a gap tolerance."""
    return is_tight(problem, value, bound) or relative_gap(value, bound) <= gap


def is_refuted(problem: Problem, outcome: Outcome) -> bool:
    """Return whether a valid schedule disproves what a solver proved: its bound, or that none is.

    Rounding errors apart; bytes have none.
    """
    candidate = outcome.candidate
    if candidate is None or candidate.violations or candidate.own is not None:
        return False
    slack = EQUAL_BYTES
    if not problem.objective.is_in_bytes:
        slack = EQUAL * abs(candidate.value) + EQUAL_IN_ALL * abs(problem.objective.baseline)
    return outcome.infeasible or outcome.bound > candidate.value + slack


def without_proof(problem: Problem, outcome: Outcome) -> Outcome:
    """Return an outcome of which only the schedule holds."""
    proved = outcome.termination == Termination.PROVED
    return replace(
        outcome,
        bound=problem.objective.known_bound,
        infeasible=False,
        termination=Termination.STALLED if proved else outcome.termination,
        reason=REFUTED,
    )


def reported_bound(problem: Problem, candidate: Candidate, bound: float) -> float:
    """Return the bound to report for a candidate: never above its value."""
    bound = max(bound, problem.objective.known_bound)
    return candidate.value if is_tight(problem, candidate.value, bound) else bound


def finish(
    problem: Problem, request: Request, outcome: Outcome, *, formulation: str
) -> SolveResult:
    """Turn an outcome into a result."""
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
        return blank if outcome.infeasible else replace(blank, termination=_unproved(outcome))
    own, bound = candidate.own, 0.0
    if not candidate.violations and own is None:
        bound = reported_bound(problem, candidate, outcome.bound)
    gap = relative_gap(candidate.value, bound) if own is None else own.gap
    proved = not candidate.violations and gap <= request.gap
    objective = problem.objective
    whole = min(objective.baseline + bound, objective.value_of(candidate.simulation))
    return replace(
        blank,
        status=Status.OPTIMAL if proved else Status.FEASIBLE,
        termination=Termination.PROVED if proved else _unproved(outcome),
        schedule=candidate.schedule,
        simulation=candidate.simulation,
        violations=candidate.violations,
        objective_bound=whole if own is None else None,
        own_objective=own,
        verify_s=candidate.verify_s,
        overhead_bound_j=bound if problem.minimize == Quantity.ENERGY else 0.0,
        reason=REFUTED if outcome.reason == REFUTED else "",
    )


def _unproved(outcome: Outcome) -> Termination:
    """Return why a search stopped that proved less than requested: its solver's proof was another.

    A solver may prove the optimum of a restriction of the problem, or of a user's own objective.
    """
    proved = outcome.termination == Termination.PROVED
    return Termination.STALLED if proved else outcome.termination
