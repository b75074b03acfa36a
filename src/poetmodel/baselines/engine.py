"""The engine of the baselines: it runs the rules of a method until a schedule keeps the budget.

What executes a step as a rule decides is in `poetmodel.heuristics.execution`.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from poetmodel.clock import time_left_s, time_limit
from poetmodel.errors import MethodNotApplicableError, TimeLimitError
from poetmodel.schedule import Schedule, Simulation, simulate
from poetmodel.solver.outcome import as_candidate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from poetmodel.problem import Problem
    from poetmodel.solver.outcome import Candidate

ATTEMPTS: Final = 24
"""How often `fitted` runs a method, each time with less RAM to fill."""
FOR_RULES: Final = 0.9
"""Share of the time left that the rules of a method may take."""


@dataclass(slots=True)
class RuleWatch:
    """Whether the time limit has stopped rules of a method."""

    cut_short: bool = False


_RULE_WATCH: Final[ContextVar[RuleWatch | None]] = ContextVar("rule_watch", default=None)


@contextmanager
def watch_rules() -> Iterator[RuleWatch]:
    """Yield a watch that records whether `cheapest`, called inside, omits rules at its limit."""
    watch = RuleWatch()
    before = _RULE_WATCH.set(watch)
    try:
        yield watch
    finally:
        _RULE_WATCH.reset(before)


def fitted(problem: Problem, run: Callable[[int], Schedule]) -> Schedule:
    """Return the schedule of a method that may fill as much RAM as keeps the budget.

    The stages of a schedule are coarser than the steps of a method, so the simulator may count more
    RAM than the method did. Each attempt gets less RAM by the excess of the one before. The method
    gets the RAM that it may fill [B] and raises `MethodNotApplicableError` where that is too
    little; the reason of the first attempt is passed on.
    """
    usable = fill = problem.usable_ram_bytes
    peak = 0
    for _ in range(ATTEMPTS):
        try:
            schedule = run(fill)
        except MethodNotApplicableError:
            if not peak:
                raise
            break
        peak = simulate(problem.graph, None, schedule).peak_ram_bytes
        if peak <= usable:
            return schedule
        fill -= peak - usable
        if fill <= 0:
            break
    raise MethodNotApplicableError(
        f"it cannot keep within the {usable:,} B that tensors may use; its schedule needs "
        f"{peak:,} B"
    )


def bisected(
    problem: Problem, run: Callable[[int], Schedule | None], first: int, most: int
) -> Schedule | None:
    """Return the best schedule seen while the largest memory that keeps the budget is looked for.

    A method may count more RAM than the simulator does, so that it may fill more than the budget.
    It gets a memory of 0 to `most` units, the `first` one being the budget.
    """
    best: Candidate | None = None
    low, high, units = 0, most, first
    while low <= high:
        schedule = run(units)
        candidate = None if schedule is None else as_candidate(problem, schedule)
        usable = problem.usable_ram_bytes
        if candidate is None or candidate.simulation.peak_ram_bytes <= usable:
            low = units + 1
        else:
            high = units - 1
        if candidate and low > units and (best is None or candidate.value < best.value):
            best = candidate
        units = (low + high) // 2
    return None if best is None else best.schedule


def cheapest(problem: Problem, rules: Iterable[Callable[[], Schedule]]) -> Schedule:
    """Return the best schedule of several rules of a method, by what the problem minimizes.

    Rules that do not apply are passed over. If none does, the reason of the first is raised. Rules
    have nine tenths of the time, as the caller verifies the schedule. If its end stops a rule, the
    schedules found before count, and the `RuleWatch` around it records that.
    """
    found: list[Candidate] = []
    refusals: list[MethodNotApplicableError] = []
    with time_limit(FOR_RULES * time_left_s()):
        for rule in rules:
            try:
                found.append(as_candidate(problem, rule()))
            except MethodNotApplicableError as error:
                refusals.append(error)
            except TimeLimitError:
                if not found:
                    raise
                watch = _RULE_WATCH.get()
                if watch is not None:
                    watch.cut_short = True
                break
    if not found:
        raise refusals[0]
    return min(found, key=lambda each: (bool(each.violations), each.value)).schedule


def fitting(
    problem: Problem, schedules: Iterable[Schedule], what: str
) -> Iterator[tuple[Schedule, Simulation]]:
    """Yield the schedules that keep the RAM budget, simulated; at the end raise if there was none.

    The error says `what` of the method needs more.
    """
    usable = problem.usable_ram_bytes
    peaks = []
    for schedule in schedules:
        simulation = simulate(problem.graph, problem.costs, schedule)
        peaks.append(simulation.peak_ram_bytes)
        if peaks[-1] <= usable:
            yield schedule, simulation
    if min(peaks) > usable:
        raise MethodNotApplicableError(
            f"its {what} need at least {min(peaks):,} B, more than the {usable:,} B that tensors "
            "may use"
        )
