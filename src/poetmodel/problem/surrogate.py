"""Problems that are solved in place of a stated one: another time, other units, fewer choices."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

from poetmodel.problem.objective import Objective, Quantity, TimeSum
from poetmodel.problem.problem import Problem
from poetmodel.problem.rows import within

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from poetmodel.schedule import Schedule, Simulation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageLimit:
    """A row ``sum of terms <= upper`` over what a schedule does in which stage.

    No coefficient is below 0.
    """

    name: str
    recomputed: Mapping[tuple[int, int], float]
    """Coefficients by (stage, node)."""
    paged_in: Mapping[tuple[int, int], float]
    """Coefficients by (stage, tensor)."""
    paged_out: Mapping[int, float]
    """Coefficients by tensor."""
    upper: float
    cuts: frozenset[int]
    """Stages after which coefficients change: between two of them it does not tell stages apart."""

    def is_kept(
        self,
        recomputed: Iterable[tuple[int, int]],
        paged_in: Iterable[tuple[int, int]],
        paged_out: Iterable[int],
    ) -> bool:
        """Return whether a schedule that does this, each once, keeps the row."""
        value = sum(self.recomputed.get(index, 0) for index in recomputed)
        value += sum(self.paged_in.get(index, 0) for index in paged_in)
        value += sum(self.paged_out.get(i, 0) for i in paged_out)
        return within(value, self.upper)


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
    never_recomputed : frozenset of int
        Nodes that are computed once, beside those of which the graph says so.
    stage_limits : tuple of StageLimit
        Further limits, on what is done in which stage.
    """

    transfer_share: float | None = None
    reference_value: float | None = None
    never_recomputed: frozenset[int] = frozenset()
    stage_limits: tuple[StageLimit, ...] = ()

    @classmethod
    def of(cls, problem: Problem, **changes: Any) -> Self:
        """Return a surrogate of a problem, or of another surrogate of it, with these parameters."""
        given = {each.name: getattr(problem, each.name) for each in fields(problem) if each.init}
        return cls(**given | changes)

    def broken_rows(self, schedule: Schedule) -> list[str]:
        """Return the names of the stage rows that a schedule breaks."""
        out = {i for _, i in schedule.M_out}
        return [
            row.name
            for row in self.stage_limits
            if not row.is_kept(set(schedule.R), set(schedule.M_in), out)
        ]

    def may_recompute(self, k: int) -> bool:
        """Return whether node `k` may be computed a second time."""
        return super().may_recompute(k) and k not in self.never_recomputed

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
