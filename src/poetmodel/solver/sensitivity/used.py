"""Find the binding limits of a solved problem by solving it again without each of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from poetmodel.problem import Quantity
from poetmodel.solver.outcome import EQUALITY_TOLERANCE
from poetmodel.solver.request import SearchOptions
from poetmodel.solver.sensitivity.variants import Variants
from poetmodel.units import brief

if TYPE_CHECKING:
    from poetmodel.result import SolveResult

MIN_LIMIT_S: Final = 0.1
"""Minimum time for one limit [s]."""


class LimitState(StrEnum):
    """Whether a limit binds."""

    BINDS = "binds"
    """Proven: without the limit, a better schedule exists."""
    SLACK = "slack"
    """Proven: removing this limit alone permits no better schedule, within the gap tolerance."""
    OPEN = "open"
    """Not decided: the schedules and bounds found within the time limit do not suffice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedLimit:
    """A limit of a solved problem, and whether it binds; amounts are in bytes, s or J."""

    quantity: Quantity
    """``ram``, ``time`` (the deadline) or ``energy`` (the energy budget)."""
    state: LimitState
    allowed: float
    """The amount that the limit permits; for RAM without resident bytes."""
    used: float
    """The amount that the schedule uses; for RAM without resident bytes."""
    saved: float | None
    """Saving of the minimized quantity by the schedule found without the limit, 0 or more; 0 if the
    limit is on the minimized quantity, None if no schedule was found."""
    max_saved: float | None
    """Proven maximum saving without this limit alone, 0 or more; 0 if the limit is on the minimized
    quantity, None if no schedule was found."""

    def __repr__(self) -> str:
        return brief(self, str(self.quantity), str(self.state))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values in SI units."""
        return asdict(self) | {"quantity": str(self.quantity), "state": str(self.state)}


def find_used_limits(
    result: SolveResult, *, time_limit: float = 10.0, threads: int = 1
) -> tuple[UsedLimit, ...]:
    """Decide which limits of a solved problem bind: RAM, and deadline and energy budget if stated.

    Parameters
    ----------
    result : SolveResult
        The result of a problem, not of a user's model.
    time_limit : float
        Wall time for all limits [s]; each has at least `MIN_LIMIT_S`.
    threads : int
        As for `poetmodel.solve`.

    Returns
    -------
    tuple of UsedLimit
        One for each of these limits, in this order. Each limit is decided by solving the problem
        again without it, from the best valid schedule of the earlier solves; if there is none, from
        that of the result. A limit on the minimized quantity is slack without a solve. After
        Ctrl-C, limits without a solve are open. Empty if the result has no schedule: use
        `explain_infeasible` for infeasible results.
    """
    problem, simulation = result.problem, result.simulation
    if simulation is None:
        return ()
    amounts = {
        Quantity.RAM: (problem.usable_ram_bytes, simulation.peak_ram_bytes),
        Quantity.TIME: (problem.deadline_s, simulation.time_s),
        Quantity.ENERGY: (problem.energy_budget_j, simulation.energy_j),
    }
    quantities = [quantity for quantity, (allowed, _) in amounts.items() if allowed is not None]
    variants = Variants(
        sum(quantity != problem.minimize for quantity in quantities),
        SearchOptions(time_limit_s=max(time_limit, MIN_LIMIT_S), threads=threads),
        min_s=MIN_LIMIT_S,
        start=result.schedule,
    )
    used_limits = []
    for quantity in quantities:
        comparison: tuple[LimitState, float | None, float | None] = LimitState.SLACK, 0.0, 0.0
        if quantity != problem.minimize:  # else the best schedule is the same without the limit
            unlimited_problem = problem.without_limits(quantity)
            comparison = _compare_results(
                result, variants.solve(unlimited_problem, gap=result.requested_gap)
            )
        state, saved, max_saved = comparison
        allowed, used_amount = amounts[quantity]
        used_limits.append(
            UsedLimit(
                quantity=quantity,
                state=state,
                allowed=allowed or 0.0,
                used=used_amount or 0.0,
                saved=saved,
                max_saved=max_saved,
            )
        )
    return tuple(used_limits)


def _compare_results(
    result: SolveResult, unlimited_result: SolveResult | None
) -> tuple[LimitState, float | None, float | None]:
    """Return whether a limit binds, the saving found without it, and the proven maximum saving.

    It binds if the schedule without it has a value below the bound with it, and is slack if the
    maximum saving is within the gap tolerance. `unlimited_result` is None after Ctrl-C.
    """
    if unlimited_result is None or unlimited_result.value is None:
        return LimitState.OPEN, None, None
    value, bound = result.value or 0.0, result.proven_bound
    saved, max_saved = (
        max(0.0, value - unlimited_result.value),
        max(0.0, value - unlimited_result.proven_bound),
    )
    gap_tolerance = result.requested_gap * (value - result.problem.objective.baseline)
    if unlimited_result.value < bound - EQUALITY_TOLERANCE * abs(bound):
        return LimitState.BINDS, saved, max_saved
    if max_saved <= max(EQUALITY_TOLERANCE * abs(value), gap_tolerance):
        return LimitState.SLACK, saved, max_saved
    return LimitState.OPEN, saved, max_saved
