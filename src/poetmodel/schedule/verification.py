"""The verifier: checks a schedule with the simulator against limits and claimed metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poetmodel.device.ram import DeviceRam, device_ram_metrics, gauge_by_json_path, make_gauge
from poetmodel.errors import InputError, ScheduleError, quote
from poetmodel.problem import RELATIVE_TOLERANCE, Constraint, Problem, Quantity, is_within
from poetmodel.problem.infeasibility import commit_space_fault
from poetmodel.schedule.identity import (
    GAP_TOLERANCE,
    OBJECTIVE_BOUND,
    OBJECTIVE_GAP,
    OBJECTIVE_VALUE,
)
from poetmodel.schedule.metrics import METRICS, Display, simulated_metrics
from poetmodel.schedule.relations import Schedule
from poetmodel.schedule.simulation import Simulation, simulate
from poetmodel.units import brief, format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from poetmodel.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of the verifier for a schedule and a problem."""

    simulation: Simulation
    """The simulation of the schedule."""
    violations: tuple[str, ...]
    """Messages of violated rules (see `Simulation.violations`), forbidden decisions, violated
    limits and false claims.

    Empty for a valid schedule."""

    def __repr__(self) -> str:
        faults = f"{len(self.violations)} violations: {'; '.join(self.violations)}"
        peak = f"peak RAM {format_bytes(self.simulation.peak_ram_bytes)}"
        return brief(self, faults if self.violations else "valid", peak)

    @property
    def valid(self) -> bool:
        """Whether there are no violations."""
        return not self.violations


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintValue:
    """A user-defined constraint and the value of its sum in a schedule."""

    row: Constraint
    """The constraint."""
    value: float
    """Value of the constraint's sum."""
    tolerance: float
    """Maximum excess over a limit that counts as a rounding error; 0 for sums of integers, which
    are exact."""

    @property
    def violated_side(self) -> str:
        """``above`` or ``below`` if the value is beyond that limit and the tolerance, else ""."""
        if self.row.lower is not None and self.value < self.row.lower - self.tolerance:
            return "below"
        is_above = self.row.upper is not None and self.value > self.row.upper + self.tolerance
        return "above" if is_above else ""

    @property
    def at_limit(self) -> bool:
        """Whether the value equals the lower or upper limit, within the tolerance."""
        limits = [limit for limit in (self.row.lower, self.row.upper) if limit is not None]
        return any(abs(self.value - limit) <= self.tolerance for limit in limits)

    def to_dict(self) -> dict[str, Any]:
        """Return the constraint, its value and whether that is at a limit, as JSON values (SI)."""
        return self.row.to_dict() | {"value": self.value, "at_limit": self.at_limit}


def constraint_values(problem: Problem, simulation: Simulation) -> tuple[ConstraintValue, ...]:
    """Return the values of user-defined constraints in a simulated schedule, in order.

    The tolerance is 0 for ints, else `RELATIVE_TOLERANCE` times the largest limit or term.
    """
    values = []
    for row in problem.constraints:
        value = simulation.total(problem.graph, row.terms.items())
        tolerance: float = 0  # An int, so that large numbers of bytes are compared exactly.
        if not isinstance(value, int):
            term_values = [simulation.total(problem.graph, (term,)) for term in row.terms.items()]
            tolerance = RELATIVE_TOLERANCE * max(
                map(abs, (row.lower or 0, row.upper or 0, *term_values))
            )
        values.append(ConstraintValue(row=row, value=value, tolerance=tolerance))
    return tuple(values)


def check_schedule(
    problem: Problem,
    schedule: Schedule,
    *,
    stated: Mapping[str, float | None] | None = None,
    makespan_s: float | None = None,
) -> Verdict:
    """Verify a schedule against the rules of execution and the limits of a problem.

    `stated` has the metrics, bounds and gaps that a file claims, such as ``energy_j``; claims of
    None and unknown keys are ignored. `makespan_s` is the makespan of the schedule's plan [s]; a
    deadline that counts ``overlap`` requires it. Raises `ScheduleError` for a schedule of another
    graph, `TooLargeError` if spans with invalid entries have more than `MAX_PAIRS` pairs, and
    `TimeLimitError` after the context's time limit.
    """
    check_identity(problem.graph, schedule)
    if problem.is_overlapping and problem.deadline_s is not None and makespan_s is None:
        raise InputError(
            "deadline: counting 'overlap' requires a plan of the transfers; use "
            "poetmodel.planner.verify, which makes one"
        )
    simulation = simulate_for(problem, schedule, makespan_s=makespan_s)
    return check_simulation(problem, schedule, simulation, stated)


def simulate_for(
    problem: Problem, schedule: Schedule, *, makespan_s: float | None = None
) -> Simulation:
    """Simulate a schedule with the costs of a problem, and the time that its deadline counts."""
    return simulate(
        problem.graph,
        problem.costs,
        schedule,
        deadline_counts=problem.deadline_counts,
        makespan_s=makespan_s,
    )


def check_simulation(
    problem: Problem,
    schedule: Schedule,
    simulation: Simulation,
    stated: Mapping[str, float | None] | None = None,
) -> Verdict:
    """Verify a schedule by its simulation, as `check_schedule` does."""
    violations = (
        *simulation.violations,
        *_forbidden_entries(problem, schedule),
        *violated_limits(problem, simulation),
        *(false_claims(problem, simulation, stated) if stated else ()),
    )
    return Verdict(simulation=simulation, violations=violations)


def violated_limits(problem: Problem, simulation: Simulation) -> tuple[str, ...]:
    """Return a message for each limit and user constraint that a simulated schedule violates."""
    return (*_limit_violations(problem, simulation), *_constraint_violations(problem, simulation))


def check_identity(graph: Graph, schedule: Schedule) -> None:
    """Raise `ScheduleError` for an object that is no Schedule, or a schedule of another graph."""
    value: Any = schedule
    if not isinstance(value, Schedule):
        hint = "; give its .schedule" if hasattr(value, "schedule") else ""
        raise ScheduleError(f"expected a Schedule, got {quote(value)}{hint}")
    if schedule.identity is not None:
        schedule.identity.check(graph, kind="schedule", error=ScheduleError)


def _forbidden_entries(problem: Problem, schedule: Schedule) -> Iterator[str]:
    """Yield a message for each decision that the problem forbids."""
    if not problem.recompute:
        for t, k in schedule.R:
            if k < t:
                yield f"R[{t},{k}]: the problem allows no recomputation"
    if not problem.can_page:
        for name in ("M_in", "M_out"):
            for t, i in getattr(schedule, name):
                yield f"{name}[{t},{i}]: the problem allows no paging"
        for i in sorted(set(problem.graph.state_tensors) - set(schedule.resident)):
            name = problem.graph.tensors[i].name
            yield f"resident: state {name!r} is on storage, but the problem allows no paging"
    rewarded_tensors = [i for i, reward in enumerate(problem.rewards.page_out) if reward]
    for i in rewarded_tensors:
        stages = [t for t, j in schedule.M_out if j == i]
        name = problem.graph.tensors[i].name
        for t in stages[1:]:
            yield (
                f"M_out[{t},{i}]: tensor {name!r} is on storage already; if page-outs are "
                "rewarded, each tensor is paged out only once"
            )


def _limit_violations(problem: Problem, simulation: Simulation) -> Iterator[str]:
    """Yield a message for each violated limit: RAM, storage, commits, deadline, energy.

    The RAM limit applies to the peak of the schedule, not of a plan. Times and energies have the
    tolerance of `is_within`.
    """
    usable_bytes = problem.usable_ram_bytes
    peak = simulation.peak
    if peak.ram_bytes > usable_bytes:
        node = problem.graph.nodes[peak.node].name
        yield (
            f"peak RAM {peak.ram_bytes:,} B at stage {peak.stage}, step {peak.node} ({node!r}) is "
            f"{format_bytes(peak.ram_bytes - usable_bytes)} above the {usable_bytes:,} B that "
            "tensors may use"
        )
    limit_bytes = problem.aux_limit_bytes
    if limit_bytes is not None and simulation.aux_used_bytes > limit_bytes:
        yield (
            f"storage used {simulation.aux_used_bytes:,} B is above the limit of {limit_bytes:,} B"
        )
    commit_fault = commit_space_fault(problem)
    if commit_fault is not None:
        yield commit_fault
    for time_s in problem.limited_times_s(simulation):
        if not is_within(time_s, problem.deadline_s):
            yield (
                f"time {format_seconds(time_s)} ({problem.deadline_counts}) is above the "
                f"deadline of {format_seconds(problem.deadline_s or 0.0)}"
            )
    if simulation.energy_j is not None and not is_within(
        simulation.energy_j, problem.energy_budget_j
    ):
        yield (
            f"energy {format_joules(simulation.energy_j)} is above the budget of "
            f"{format_joules(problem.energy_budget_j or 0.0)}"
        )


def _constraint_violations(problem: Problem, simulation: Simulation) -> Iterator[str]:
    """Yield a message for each user-defined constraint violated by more than its tolerance."""
    for constraint in constraint_values(problem, simulation):
        row = constraint.row
        if constraint.violated_side:
            yield (
                f"constraint {row.name!r}: {row.format_value(constraint.value)} is "
                f"{constraint.violated_side} its limit, {row.describe_limits()}"
            )


def false_claims(
    problem: Problem, simulation: Simulation, stated: Mapping[str, float | None]
) -> Iterator[str]:
    """Yield a message for each claimed metric, bound, gap or optimality that is false.

    Bounds may exceed values by `RELATIVE_TOLERANCE`; see `false_metrics`.
    """
    device_ram = DeviceRam.compare(problem.costs.device, problem.graph, simulation.peak_use)
    metrics: dict[str, Any] = simulated_metrics(Display.FILE, simulation)
    metrics |= device_ram_metrics(device_ram) | gauge_by_json_path(make_gauge(device_ram))
    metrics[OBJECTIVE_VALUE] = problem.objective.value_of(simulation)
    yield from false_metrics(metrics, stated)
    for key, noun, value in (
        ("bound_j", "energy", simulation.energy_j),
        (OBJECTIVE_BOUND, "objective", metrics[OBJECTIVE_VALUE]),
    ):
        bound = stated.get(key)
        if bound is not None and value is not None and not is_within(bound, value):
            yield f"{key}: the stated bound {bound!r} is above the simulated {noun} {value!r}"
    yield from _false_gap_claims(simulation, stated.get("overhead_bound_j"), stated.get("gap"))
    yield from _false_proof_claims(problem, simulation, stated)


def false_metrics(
    metrics: Mapping[str, float | None], stated: Mapping[str, float | None]
) -> Iterator[str]:
    """Yield a message for each stated metric that differs from that of a simulation.

    Bytes must be equal. Other metrics agree within `RELATIVE_TOLERANCE`, relative to that of their
    `exactness_key`. Keys that only one side has, and None, are ignored.
    """
    exactness_key_of = {metric.key: metric.exactness_key or metric.key for metric in METRICS}
    for key, stated_value in stated.items():
        value = metrics.get(key)
        if stated_value is None or value is None:
            continue
        scale = metrics[exactness_key_of.get(key, key)]
        tolerance = 0.0 if key.endswith("bytes") else RELATIVE_TOLERANCE * abs(scale or 0.0)
        if abs(stated_value - value) > tolerance:
            yield f"{key}: the file says {stated_value!r}, the simulation gives {value!r}"


def _false_gap_claims(
    simulation: Simulation, bound_j: float | None, gap: float | None
) -> Iterator[str]:
    """Yield a message if the claimed bound exceeds the overhead, or the gap contradicts both."""
    overhead_j, energy_j = simulation.overhead_j, simulation.energy_j
    if bound_j is None or overhead_j is None or energy_j is None:
        return
    tolerance_j = RELATIVE_TOLERANCE * abs(energy_j)
    if bound_j > overhead_j + tolerance_j:
        yield (
            f"overhead_bound_j: the stated bound {bound_j!r} is above the simulated overhead "
            f"{overhead_j!r}"
        )
    elif gap is not None:
        missing_j = max(0.0, overhead_j - bound_j)
        if abs(gap * overhead_j - missing_j) > tolerance_j:
            yield (
                f"gap: the file says {gap!r}, but its bound {bound_j!r} leaves {missing_j!r} J of "
                f"the simulated overhead {overhead_j!r} J"
            )


def _false_proof_claims(
    problem: Problem, simulation: Simulation, stated: Mapping[str, float | None]
) -> Iterator[str]:
    """Yield a message for each false claim about the objective's gap; none if no gap is claimed.

    The gap must be the difference of value and bound, limited to [0, overhead], as a fraction of
    the overhead, and at most a claimed `GAP_TOLERANCE`. The metric ``gap`` of an energy is
    excluded.
    """
    objective, gap = problem.objective, stated.get(OBJECTIVE_GAP)
    if gap is None:
        return
    value, excess = objective.value_of(simulation), max(0.0, objective.overhead_of(simulation))
    rounding_tolerance = RELATIVE_TOLERANCE * max(abs(value), abs(objective.baseline))
    bound, tolerance = stated.get(OBJECTIVE_BOUND), stated.get(GAP_TOLERANCE)
    is_checked = problem.minimize == Quantity.ENERGY and gap == stated.get("gap")
    distance = gap * excess if bound is None else min(max(0.0, value - bound), excess)
    if not is_checked and abs(gap * excess - distance) > rounding_tolerance:
        yield (
            f"{OBJECTIVE_GAP}: the file says {gap!r}, but its bound {bound!r} leaves {distance!r} "
            f"of the {excess!r} beyond the baseline"
        )
    if tolerance is not None and (gap - tolerance) * excess > rounding_tolerance:
        yield f"status: the file says optimal to a gap of {tolerance!r}, but its gap is {gap!r}"
