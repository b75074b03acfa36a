"""Search loops of the baselines: repeat a method with different budgets or variants.

`poetmodel.heuristics.execution` executes the steps that a method decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.clock import limit_time, time_left_s
from poetmodel.errors import MethodNotApplicableError, TimeLimitError
from poetmodel.schedule import Schedule, Simulation, simulate
from poetmodel.solver.outcome import make_candidate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from poetmodel.problem import Problem
    from poetmodel.solver.outcome import Candidate

MAX_ATTEMPTS: Final = 24
"""Maximum number of attempts of `fit_budget`, each after the first with less RAM."""
VARIANTS_TIME_RATIO: Final = 0.9
"""Fraction of the remaining time that the variants of a method may use."""


def fit_budget(problem: Problem, schedule_within: Callable[[int], Schedule]) -> Schedule:
    """Repeat a method with less RAM until its schedule meets the RAM budget.

    Each of up to `MAX_ATTEMPTS` attempts has less RAM by the previous excess: the simulator may
    count more RAM than the method, because stages are coarser than a method's steps. An error of
    the first attempt is raised unchanged.
    """
    usable_bytes = ram_bytes = problem.usable_ram_bytes
    peak = 0
    for _ in range(MAX_ATTEMPTS):
        try:
            schedule = schedule_within(ram_bytes)
        except MethodNotApplicableError:
            if not peak:
                raise
            break
        peak = simulate(problem.graph, None, schedule).peak_ram_bytes
        if peak <= usable_bytes:
            return schedule
        ram_bytes -= peak - usable_bytes
        if ram_bytes <= 0:
            break
    raise MethodNotApplicableError(
        f"it cannot keep within the {usable_bytes:,} B that tensors may use; its schedule needs "
        f"{peak:,} B"
    )


def bisect_budget(
    problem: Problem,
    schedule_with: Callable[[int], Schedule | None],
    first_units: int,
    max_units: int,
) -> Schedule | None:
    """Bisect for the largest memory limit of a method that meets the budget; return the best.

    The best schedule is that of the objective, None without one. A method may count more RAM than
    the simulator, so its limit may exceed the budget. More units, from 0 to `max_units`, must mean
    more memory, not necessarily in proportion. `schedule_with` returns None for a limit that is too
    small for the method.
    """
    best: Candidate | None = None
    low, high, units = 0, max_units, first_units
    while low <= high:
        schedule = schedule_with(units)
        candidate = None if schedule is None else make_candidate(problem, schedule)
        usable_bytes = problem.usable_ram_bytes
        if candidate is None or candidate.simulation.peak_ram_bytes <= usable_bytes:
            low = units + 1
        else:
            high = units - 1
        if candidate and low > units and (best is None or candidate.value < best.value):
            best = candidate
        units = (low + high) // 2
    return None if best is None else best.schedule


def select_best_schedule(problem: Problem, variants: Iterable[Callable[[], Schedule]]) -> Schedule:
    """Return the best schedule of the variants of a method, by the problem's objective.

    A schedule without violations is better than any with violations. Variants that are not
    applicable are skipped; if all are, the first error is raised. The variants have nine tenths of
    the remaining time. If the time limit stops one, the best schedule so far is returned (without
    one, `TimeLimitError` is raised), and the limits of `limit_time` record the stop.
    """
    candidates: list[Candidate] = []
    errors: list[MethodNotApplicableError] = []
    with limit_time(VARIANTS_TIME_RATIO * time_left_s()) as limit:
        for variant in variants:
            try:
                candidates.append(make_candidate(problem, variant()))
            except MethodNotApplicableError as error:
                errors.append(error)
            except TimeLimitError:
                if not candidates:
                    raise
                limit.cut_short()
                break
    if not candidates:
        raise errors[0]
    return min(
        candidates, key=lambda candidate: (bool(candidate.violations), candidate.value)
    ).schedule


def simulate_within_budget(
    problem: Problem, schedules: Iterable[Schedule], schedule_kind: str
) -> Iterator[tuple[Schedule, Simulation]]:
    """Yield schedules within the RAM budget, simulated; refuse if none, naming `schedule_kind`."""
    usable_bytes = problem.usable_ram_bytes
    peaks = []
    for schedule in schedules:
        simulation = simulate(problem.graph, problem.costs, schedule)
        peaks.append(simulation.peak_ram_bytes)
        if peaks[-1] <= usable_bytes:
            yield schedule, simulation
    if min(peaks) > usable_bytes:
        raise MethodNotApplicableError(
            f"its {schedule_kind} need at least {min(peaks):,} B, more than the {usable_bytes:,} B "
            "that tensors may use"
        )
