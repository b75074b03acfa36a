"""Which limits of a problem bind: what would be better without each of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from poetmodel.problem import Problem, Quantity
from poetmodel.result import Status
from poetmodel.solver.facade import solve
from poetmodel.solver.outcome import EQUAL

if TYPE_CHECKING:
    from poetmodel.result import SolveResult

LEAST_S: Final = 1.0
"""Least time for the question without one of the limits [s]."""


class Limit(StrEnum):
    """A limit of a problem."""

    RAM = "ram"
    """The RAM budget."""
    TIME = "time"
    """The deadline."""
    ENERGY = "energy"
    """The energy budget."""


class Binding(StrEnum):
    """Whether a limit binds."""

    YES = "binds"
    """A schedule without it is better than any with it, or there is none with it."""
    NO = "slack"
    """Proved: nothing is gained without it."""
    IMPOSSIBLE = "impossible"
    """Proved: no schedule keeps it, whatever the other limits."""
    OPEN = "open"
    """Not decided within the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitAnswer:
    """What a limit costs."""

    limit: Limit
    """The limit left out."""
    binding: Binding
    """The answer."""
    without: float | None
    """The minimized quantity without it, where a schedule was found, in its own unit."""
    used: float | None
    """How much of it the schedule takes, in its own unit; None without a schedule."""
    allowed: float
    """The limit, in its own unit."""


def binding_limits(
    result: SolveResult, *, time_limit: float = 10.0, gap: float = 1e-4
) -> tuple[LimitAnswer, ...]:
    """Say for each limit of a solved problem whether it binds.

    Parameters
    ----------
    result : SolveResult
        A schedule with its proof, or the proof that there is none.
    time_limit : float
        Wall time for each limit [s].
    gap : float
        Gap of these solves.

    Returns
    -------
    tuple of LimitAnswer
        One for the RAM budget, one for the deadline and one for the energy budget, where stated.

    Notes
    -----
    The problem is solved again without the limit. It binds where a schedule is found that is better
    than the bound proved with the limit, or any where there is none with it; it does not where the
    bound proved without it reaches the schedule with it. Where there is no schedule with or without
    it, the limit is asked for alone.
    """
    return tuple(
        _ask(result, limit, time_limit=max(LEAST_S, time_limit), gap=gap)
        for limit in Limit
        if _allowed(result.problem, limit) is not None
    )


def _ask(result: SolveResult, limit: Limit, *, time_limit: float, gap: float) -> LimitAnswer:
    problem = result.problem
    freed = solve(problem.without(Quantity(limit)), time_limit=time_limit, gap=gap)
    binding = _compare(result, freed)
    if result.status == Status.INFEASIBLE and freed.status == Status.INFEASIBLE:
        others = (Quantity(other) for other in Limit if other != limit)
        alone = solve(problem.without(*others), time_limit=time_limit, gap=gap)
        if alone.status == Status.INFEASIBLE:
            binding = Binding.IMPOSSIBLE
    return LimitAnswer(
        limit=limit,
        binding=binding,
        without=freed.objective_value,
        used=_used(result, limit),
        allowed=_allowed(problem, limit) or 0.0,
    )


def _compare(result: SolveResult, freed: SolveResult) -> Binding:
    if result.schedule is None:
        if result.status != Status.INFEASIBLE or freed.status == Status.UNKNOWN:
            return Binding.OPEN
        return Binding.YES if freed.schedule is not None else Binding.NO
    value, bound = result.objective_value or 0.0, result.objective_bound or 0.0
    least, found = freed.objective_bound or 0.0, freed.objective_value
    if found is not None and found < bound - EQUAL * abs(bound):
        return Binding.YES
    if least >= value - max(EQUAL * abs(value), result.requested_gap * _beyond(result)):
        return Binding.NO
    return Binding.OPEN


def _beyond(result: SolveResult) -> float:
    """Return the part of the minimized value that decisions could change."""
    if result.problem.minimize == Quantity.ENERGY:
        return result.overhead_j or 0.0
    if result.problem.minimize == Quantity.TIME:
        return (result.objective_value or 0.0) - result.problem.pass_time_s
    return result.objective_value or 0.0


def _allowed(problem: Problem, limit: Limit) -> float | None:
    if limit == Limit.RAM:
        return problem.usable_ram_bytes
    return problem.deadline_s if limit == Limit.TIME else problem.energy_budget_j


def _used(result: SolveResult, limit: Limit) -> float | None:
    simulation = result.simulation
    if simulation is None:
        return None
    if limit == Limit.RAM:
        return simulation.peak_ram_bytes
    return simulation.time_s if limit == Limit.TIME else simulation.energy_j
