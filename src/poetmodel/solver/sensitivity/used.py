"""Which limits of a solved problem bind: the problem is solved again without each of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from poetmodel.problem import Quantity
from poetmodel.solver.outcome import EQUAL
from poetmodel.solver.sensitivity.variants import ChangedProblem, solve_variants
from poetmodel.units import brief

if TYPE_CHECKING:
    from poetmodel.result import SolveResult

LEAST_S: Final = 0.1
"""Least time for one limit [s]."""


class LimitState(StrEnum):
    """Whether a limit binds."""

    BINDS = "binds"
    """Proven: without the limit there is a better schedule."""
    SLACK = "slack"
    """Proven: nothing is gained without the limit alone."""
    OPEN = "open"
    """Not decided within the time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedLimit:
    """A limit that a schedule keeps; amounts are in bytes, seconds or joules."""

    quantity: Quantity
    """``ram``, ``time`` (the deadline) or ``energy`` (the energy budget)."""
    state: LimitState
    allowed: float
    """The limit."""
    used: float
    """How much of it the schedule takes."""
    saved: float | None
    """How much less of the minimized quantity a schedule needs that was found without the limit."""
    most_saved: float | None
    """Proven: without the limit alone no schedule saves more."""

    def __repr__(self) -> str:
        return brief(self, str(self.quantity), str(self.state))

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, SI."""
        return asdict(self) | {"quantity": str(self.quantity), "state": str(self.state)}


def find_used_limits(
    result: SolveResult, *, time_limit: float = 10.0, threads: int = 1
) -> tuple[UsedLimit, ...]:
    """Find out which limits of a solved problem bind: RAM, and deadline and energy if stated.

    Parameters
    ----------
    result : SolveResult
        The result of the problem.
    time_limit : float
        Wall time for all limits [s].
    threads : int
        As for `poetmodel.solve`.

    Returns
    -------
    tuple of UsedLimit
        The problem is solved again without each limit, from the schedule of the result. Empty
        without a schedule: `explain_infeasible` says which limits are in the way.
    """
    problem, simulation = result.problem, result.simulation
    if simulation is None:
        return ()
    amounts = {
        Quantity.RAM: (problem.usable_ram_bytes, simulation.peak_ram_bytes),
        Quantity.TIME: (problem.deadline_s, simulation.time_s),
        Quantity.ENERGY: (problem.energy_budget_j, simulation.energy_j),
    }
    limits = [quantity for quantity, (allowed, _) in amounts.items() if allowed is not None]
    # A limit on the minimized quantity saves nothing: the best schedule is the same without.
    asked = [quantity for quantity in limits if quantity != problem.minimize]
    results = solve_variants(
        [
            ChangedProblem(problem=problem.without(quantity), gap=result.requested_gap)
            for quantity in asked
        ],
        time_limit=time_limit,
        least_s=LEAST_S,
        threads=threads,
        start=result.schedule,
    )
    freed = dict(zip(asked, results, strict=False))
    used = []
    for quantity in limits:
        state, saved, most_saved = (
            _compared(result, freed.get(quantity))
            if quantity in asked
            else (LimitState.SLACK, 0.0, 0.0)
        )
        allowed, taken = amounts[quantity]
        used.append(
            UsedLimit(
                quantity=quantity,
                state=state,
                allowed=allowed or 0.0,
                used=taken or 0.0,
                saved=saved,
                most_saved=most_saved,
            )
        )
    return tuple(used)


def _compared(
    result: SolveResult, freed: SolveResult | None
) -> tuple[LimitState, float | None, float | None]:
    """Return whether a limit binds, and how much is saved without it: found, and proven at most."""
    if freed is None or freed.value is None:
        return LimitState.OPEN, None, None
    value, bound = result.value or 0.0, result.proven_bound
    saved, most_saved = max(0.0, value - freed.value), max(0.0, value - freed.proven_bound)
    within_gap = result.requested_gap * (value - result.problem.objective.baseline)
    if freed.value < bound - EQUAL * abs(bound):
        return LimitState.BINDS, saved, most_saved
    if most_saved <= max(EQUAL * abs(value), within_gap):
        return LimitState.SLACK, saved, most_saved
    return LimitState.OPEN, saved, most_saved
