"""The verifier: a schedule against the simulator, the limits of a problem and stated figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from poetmodel.device.ram import DeviceRam, device_ram_metrics, gauge, gauge_by_json_path
from poetmodel.errors import InputError, ScheduleError, shown
from poetmodel.problem import RELATIVE_TOLERANCE, Constraint, Problem, Quantity, within
from poetmodel.problem.infeasibility import commit_space_fault
from poetmodel.schedule.identity import OBJECTIVE_BOUND, OBJECTIVE_GAP, OBJECTIVE_VALUE, PROVED_GAP
from poetmodel.schedule.metrics import METRICS, Display, simulated_metrics
from poetmodel.schedule.relations import Schedule
from poetmodel.schedule.simulation import Simulation, simulate, timed_anew
from poetmodel.units import brief, format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from poetmodel.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verifier's findings on a schedule for a problem."""

    simulation: Simulation
    """Figures of the simulation."""
    violations: tuple[str, ...]
    """Every rule and limit that is broken, in words; empty for a valid schedule."""

    def __repr__(self) -> str:
        faults = f"{len(self.violations)} violations: {'; '.join(self.violations)}"
        peak = f"peak RAM {format_bytes(self.simulation.peak_ram_bytes)}"
        return brief(self, faults if self.violations else "valid", peak)

    @property
    def valid(self) -> bool:
        """Whether nothing is broken."""
        return not self.violations


class PlannedFigures(NamedTuple):
    """Result of a plan whose transfers run beside the computing."""

    makespan_s: float | None
    """How long it takes [s]."""
    ram_bytes: int | None = None
    """Its RAM, if that is minimized [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintValue:
    """An own constraint, and what its sum is in a schedule."""

    row: Constraint
    value: float
    slack: float
    """By how much the value may be off; 0 for sums of whole numbers, which are exact."""

    @property
    def broken(self) -> str:
        """``above`` or ``below`` where the value breaks the limit on that side; else empty."""
        if self.row.lower is not None and self.value < self.row.lower - self.slack:
            return "below"
        above = self.row.upper is not None and self.value > self.row.upper + self.slack
        return "above" if above else ""

    @property
    def at_limit(self) -> bool:
        """Whether the value is a limit."""
        limits = [limit for limit in (self.row.lower, self.row.upper) if limit is not None]
        return any(abs(self.value - limit) <= self.slack for limit in limits)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, SI."""
        return self.row.to_dict() | {"value": self.value, "at_limit": self.at_limit}


def constraint_values(problem: Problem, simulation: Simulation) -> tuple[ConstraintValue, ...]:
    """Return the sums of a problem's own constraints in a schedule."""
    values = []
    for row in problem.constraints:
        value = simulation.total(problem.graph, row.terms.items())
        slack: float = 0  # an int: large bytes stay exact
        if not isinstance(value, int):
            parts = [simulation.total(problem.graph, (term,)) for term in row.terms.items()]
            slack = RELATIVE_TOLERANCE * max(map(abs, (row.lower or 0, row.upper or 0, *parts)))
        values.append(ConstraintValue(row=row, value=value, slack=slack))
    return tuple(values)


def check_schedule(
    problem: Problem,
    schedule: Schedule,
    *,
    stated: Mapping[str, float | None] | None = None,
    makespan_s: float | Callable[[Simulation], PlannedFigures] | None = None,
) -> Verdict:
    """Verify a schedule against the rules of execution and the limits of a problem.

    Parameters
    ----------
    problem : Problem
        Graph, costs and limits.
    schedule : Schedule
        The relations.
    stated : mapping of str to number, optional
        Figures that a file claims, such as ``energy_j`` and ``peak_ram_bytes``; each is compared
        with the simulated one.
    makespan_s : float or callable, optional
        Where transfers run beside the computing: how long a plan of the schedule takes, as its own
        simulator found [s], or what tells that of the simulation of the schedule;
        `poetmodel.planner.verify` makes a plan and passes it.

    Returns
    -------
    Verdict
        Figures and every violation.

    Raises
    ------
    ScheduleError
        If the schedule was made for another graph.
    InputError
        For a deadline in the meaning ``overlap`` without the makespan of a plan.
    """
    check_identity(problem.graph, schedule)
    if problem.stand_in.transfer_share is not None:
        makespan_s = problem.pass_time_s  # of sums: no idle power beyond one pass
    elif problem.is_overlapping and problem.deadline_s is not None and makespan_s is None:
        raise InputError(
            "deadline: one that counts 'overlap' is held against a plan of the transfers; use "
            "poetmodel.planner.verify, which makes it"
        )
    graph, costs, counts = problem.graph, problem.costs, problem.deadline_counts
    known_s = None if callable(makespan_s) else makespan_s
    simulation = simulate(graph, costs, schedule, deadline_counts=counts, makespan_s=known_s)
    if callable(makespan_s):
        planned_s, ram_bytes = makespan_s(simulation)
        simulation = timed_anew(
            simulation,
            graph,
            costs,
            schedule,
            deadline_counts=counts,
            makespan_s=planned_s,
            ram_bytes=ram_bytes,
        )
    violations = (
        *simulation.violations,
        *_choices(problem, schedule),
        *broken_limits(problem, simulation),
        *(_claims(problem, simulation, stated) if stated else ()),
    )
    return Verdict(simulation=simulation, violations=violations)


def broken_limits(problem: Problem, simulation: Simulation) -> tuple[str, ...]:
    """Return the limits and own constraints of a problem that a schedule breaks, in words."""
    return (*_limits(problem, simulation), *_constraints(problem, simulation))


def check_identity(graph: Graph, schedule: Schedule) -> None:
    """Raise `ScheduleError` if the schedule is none, or names another graph than this one."""
    given: Any = schedule
    if not isinstance(given, Schedule):
        hint = "; give its .schedule" if hasattr(given, "schedule") else ""
        raise ScheduleError(f"expected a Schedule, got {shown(given)}{hint}")
    if schedule.identity is not None:
        schedule.identity.check(graph, kind="schedule", error=ScheduleError)


def _choices(problem: Problem, schedule: Schedule) -> Iterator[str]:
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
    wanted = [i for i, amount in enumerate(problem.rewards.page_out) if amount]
    for i in wanted:
        stages = [t for t, j in schedule.M_out if j == i]
        name = problem.graph.tensors[i].name
        for t in stages[1:]:
            yield (
                f"M_out[{t},{i}]: tensor {name!r} is on storage already; where page-outs are "
                "wanted, each tensor goes there once"
            )


def _limits(problem: Problem, simulation: Simulation) -> Iterator[str]:
    usable = problem.usable_ram_bytes
    peak = simulation.peak
    if peak.ram_bytes > usable:
        node = problem.graph.nodes[peak.node].name
        yield (
            f"peak RAM {peak.ram_bytes:,} B at stage {peak.stage}, step {peak.node} ({node!r}) is "
            f"{format_bytes(peak.ram_bytes - usable)} above the {usable:,} B that tensors may use"
        )
    limit = problem.aux_limit_bytes
    if limit is not None and simulation.aux_used_bytes > limit:
        yield f"storage used {simulation.aux_used_bytes:,} B is above the limit of {limit:,} B"
    generations = commit_space_fault(problem)
    if generations is not None:
        yield generations
    for time_s in problem.limited_times_s(simulation):
        if not within(time_s, problem.deadline_s):
            yield (
                f"time {format_seconds(time_s)} ({problem.deadline_counts}) is above the "
                f"deadline of {format_seconds(problem.deadline_s or 0.0)}"
            )
    if simulation.energy_j is not None and not within(simulation.energy_j, problem.energy_budget_j):
        yield (
            f"energy {format_joules(simulation.energy_j)} is above the budget of "
            f"{format_joules(problem.energy_budget_j or 0.0)}"
        )


def _constraints(problem: Problem, simulation: Simulation) -> Iterator[str]:
    """Yield the own constraints that a schedule breaks."""
    for constraint in constraint_values(problem, simulation):
        row = constraint.row
        if constraint.broken:
            yield (
                f"constraint {row.name!r}: {row.amount(constraint.value)} is {constraint.broken} "
                f"its limit, {row.describe_limits()}"
            )


def _claims(
    problem: Problem, simulation: Simulation, stated: Mapping[str, float | None]
) -> Iterator[str]:
    room = DeviceRam.compare(problem.costs.device, problem.graph, simulation.peak_use)
    figures: dict[str, Any] = simulated_metrics(Display.FILE, simulation)
    exact_as = {metric.key: metric.as_exact_as or metric.key for metric in METRICS}
    figures |= device_ram_metrics(room) | gauge_by_json_path(gauge(room))
    figures[OBJECTIVE_VALUE] = problem.objective.value_of(simulation)
    for key, claim in stated.items():
        value = figures.get(key)
        if claim is None or value is None:
            continue
        scale = figures[exact_as.get(key, key)]
        slack = 0.0 if key.endswith("bytes") else RELATIVE_TOLERANCE * abs(scale or 0.0)
        if abs(claim - value) > slack:
            yield f"{key}: the file says {claim!r}, the simulation gives {value!r}"
    for key, what, value in (
        ("bound_j", "energy", simulation.energy_j),
        (OBJECTIVE_BOUND, "objective", figures[OBJECTIVE_VALUE]),
    ):
        bound = stated.get(key)
        if bound is not None and value is not None and not within(bound, value):
            yield f"{key}: the stated bound {bound!r} is above the simulated {what} {value!r}"
    yield from _gap_claims(simulation, stated.get("overhead_bound_j"), stated.get("gap"))
    yield from _proof_claims(problem, simulation, stated)


def _gap_claims(simulation: Simulation, bound_j: float | None, gap: float | None) -> Iterator[str]:
    """Compare the gap that a file claims with its bound, and that with the simulated overhead."""
    overhead_j, energy_j = simulation.overhead_j, simulation.energy_j
    if bound_j is None or overhead_j is None or energy_j is None:
        return
    slack_j = RELATIVE_TOLERANCE * abs(energy_j)
    if bound_j > overhead_j + slack_j:
        yield (
            f"overhead_bound_j: the stated bound {bound_j!r} is above the simulated overhead "
            f"{overhead_j!r}"
        )
    elif gap is not None:
        missing_j = max(0.0, overhead_j - bound_j)
        if abs(gap * overhead_j - missing_j) > slack_j:
            yield (
                f"gap: the file says {gap!r}, but its bound {bound_j!r} leaves {missing_j!r} J of "
                f"the simulated overhead {overhead_j!r} J"
            )


def _proof_claims(
    problem: Problem, simulation: Simulation, stated: Mapping[str, float | None]
) -> Iterator[str]:
    """Compare the gap of the minimized quantity with its bound, and an optimum with that gap."""
    objective, gap = problem.objective, stated.get(OBJECTIVE_GAP)
    if gap is None:
        return
    value, above = objective.value_of(simulation), max(0.0, objective.overhead_of(simulation))
    slack = RELATIVE_TOLERANCE * max(abs(value), abs(objective.baseline))
    bound, asked = stated.get(OBJECTIVE_BOUND), stated.get(PROVED_GAP)
    compared = problem.minimize == Quantity.ENERGY and gap == stated.get("gap")
    missing = gap * above if bound is None else min(max(0.0, value - bound), above)
    if not compared and abs(gap * above - missing) > slack:
        yield (
            f"{OBJECTIVE_GAP}: the file says {gap!r}, but its bound {bound!r} leaves {missing!r} "
            f"of the {above!r} beyond what every schedule pays"
        )
    if asked is not None and (gap - asked) * above > slack:
        yield f"status: the file says optimal to a gap of {asked!r}, but its gap is {gap!r}"
