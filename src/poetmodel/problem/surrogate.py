"""Problems that are solved in place of a stated one: a sum of times for a makespan, other units."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

from poetmodel.problem.objective import Objective, Quantity, TimeSum
from poetmodel.problem.problem import Problem

if TYPE_CHECKING:
    from poetmodel.schedule import Simulation


@dataclass(frozen=True, eq=False)
class Surrogate(Problem):
    """A problem that is solved in place of a stated one (surrogate relaxation: Glover, 1968).

    Parameters
    ----------
    transfer_share : float, optional
        For a problem whose time is a makespan: how much of the transfer time counts beside all of
        the compute time, 0 to 1. Its time is ``compute + share * transfer``; the deadline limits
        that and the transfer time, and idle power beyond one pass is left out. With 0 it is a
        relaxation: its bounds hold. With 1 it is a restriction: a plan that transfers and computes
        one after the other keeps the deadline.
    reference_value : float, optional
        The value of a valid schedule, above 0: the minimized quantity beyond what every schedule
        pays. Models state the quantity in thousandths of it, and whatever costs more than twice as
        much by itself as twice as much: only better schedules matter.
    """

    transfer_share: float | None = None
    reference_value: float | None = None

    @classmethod
    def of(cls, problem: Problem, **changes: Any) -> Self:
        """Return a surrogate of a problem, or of another surrogate of it, with these parameters."""
        given = {each.name: getattr(problem, each.name) for each in fields(problem) if each.init}
        return cls(**given | changes)

    @property
    def is_overlapping(self) -> bool:
        """Whether time is still the makespan of a plan."""
        return super().is_overlapping and self.transfer_share is None

    @property
    def time_sum(self) -> TimeSum:
        """The sum that is minimized as time."""
        if self.transfer_share is None:
            return super().time_sum
        return TimeSum(1.0, self.transfer_share)

    def limited_times_s(self, simulation: Simulation) -> tuple[float, ...]:
        """Return the times of a schedule that must each keep the deadline [s]."""
        if self.transfer_share is None:
            return super().limited_times_s(simulation)
        compute_s, transfer_s = simulation.compute_s or 0.0, simulation.transfer_s or 0.0
        return tuple(counted.of(compute_s, transfer_s) for counted in self.deadline_sums)

    def quantity(self, quantity: str) -> Objective:
        """Return a quantity as this surrogate counts it, in the unit of its reference."""
        found = super().quantity(quantity)
        if quantity == Quantity.TIME and self.transfer_share is not None:
            found = replace(found, counted=self.time_sum)
        if quantity == self.minimize and self.reference_value is not None and found.is_sum:
            found = replace(found, reference=self.reference_value)
        return found

    def without(self, *quantities: Quantity, **changes: Any) -> Self:
        """Return the surrogate without its limits on some quantities, and without its reference."""
        return super().without(*quantities, **{"reference_value": None} | changes)
