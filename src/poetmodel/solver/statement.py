"""The problem as it is solved: with weighted times in place of a makespan, or in finer units.

A `Statement` counts time or cost differently from the problem that it is solved for (surrogate
relaxation: Glover, 1968). Heuristics, models and the simulator treat it as any problem.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Self

from poetmodel.problem import Constraint, Objective, Problem, Quantity, TimeSum
from poetmodel.problem.objective import may_reward_page_outs
from poetmodel.problem.rows import ROUNDING_ERROR
from poetmodel.problem.totals import Total

if TYPE_CHECKING:
    from poetmodel.problem.objective import SimulatedMetrics

WRITTEN_BYTES_CUTOFF: Final = "fewer bytes written"
"""Name of the constraint that limits written bytes to less than a known value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedTime(Objective):
    """A weighted sum of compute and transfer time as an objective [s], above a single pass."""

    time_sum: TimeSum

    def overhead_of(self, simulation: SimulatedMetrics) -> float:
        """Return the excess of the sum over the baseline; 0 within the rounding error."""
        time_s = self.time_sum.weigh(simulation.compute_s or 0.0, simulation.transfer_s or 0.0)
        overhead_s = time_s - self.baseline
        return overhead_s if overhead_s > ROUNDING_ERROR * time_s else 0.0


@dataclass(frozen=True, eq=False)
class Statement(Problem):
    """A problem as it is solved; `restate` makes it from the problem that it is solved for."""

    transfer_weight: float | None = field(default=None, kw_only=True)
    """Weight of the transfer time in the counted time, 0 to 1, if time is a makespan. The counted
    time is ``compute + weight * transfer``; the deadline limits this time and, if plans execute all
    transfers, the transfer time. Idle power beyond one pass is omitted. With 0 the statement is a
    relaxation: its bounds are valid for the problem. With 1 it is a restriction: a plan that
    computes and transfers one after the other meets the deadline. None leaves the time."""
    reference_value: float | None = field(default=None, kw_only=True)
    """Excess of a valid schedule over the baseline, above 0; None if no schedule is known. Models
    scale the objective to thousandths of this value, and truncate costs above twice the value: only
    better schedules matter."""
    rewards_page_outs: bool = field(default=False, kw_only=True)
    """Whether rows added to a model may reward page-outs that no page-in needs."""

    @property
    def is_overlapping(self) -> bool:
        """Whether the counted time is the makespan of a plan."""
        return self.transfer_weight is None and self.counts_makespan

    @property
    def time_sum(self) -> TimeSum:
        """The counted time as a weighted sum; for a makespan a lower bound, the compute time."""
        if self.transfer_weight is not None:
            return TimeSum(1.0, self.transfer_weight)
        return TimeSum(1.0, 1.0 if self.counts_transfers else 0.0)

    @cached_property
    def plans_all_transfers(self) -> bool:
        """Whether plans execute all transfers of the relevant schedules."""
        may_reward = self.rewards_page_outs or may_reward_page_outs(
            self.single_pass, self.constraints, self.user_objective
        )
        return not self.counts_makespan or not may_reward

    def make_objective(self, quantity: str) -> Objective:
        """Make the objective that minimizes `quantity`, as this statement counts that quantity."""
        objective = Problem.make_objective(self, quantity)
        if quantity == Quantity.TIME and self.transfer_weight is not None:
            values = {entry.name: getattr(objective, entry.name) for entry in fields(objective)}
            values["baseline"] = self.time_sum.weigh(self.pass_compute_s, self.commit_cost.time_s)
            objective = WeightedTime(**values, time_sum=self.time_sum)
        if quantity == self.minimize and self.reference_value is not None and objective.is_sum:
            objective = replace(objective, reference=self.reference_value)
        return objective

    def limited_times_s(self, simulation: SimulatedMetrics) -> tuple[float, ...]:
        """Return the times of a simulated schedule that must each meet the deadline [s]."""
        if self.transfer_weight is None:
            return Problem.limited_times_s(self, simulation)
        compute_s, transfer_s = simulation.compute_s or 0.0, simulation.transfer_s or 0.0
        return tuple(time_sum.weigh(compute_s, transfer_s) for time_sum in self.deadline_sums)

    def without_limits(self, *quantities: Quantity, **changes: Any) -> Self:
        """Return the statement without limits on `quantities`, and without a `reference_value`."""
        changed = {"reference_value": None, **changes}
        return Problem.without_limits(self, *quantities, **changed)


def restate(problem: Problem, **changes: Any) -> Statement:
    """Return the statement of a problem with these changes, in addition to those that it has."""
    if isinstance(problem, Statement):
        return replace(problem, **changes)
    values = {entry.name: getattr(problem, entry.name) for entry in fields(problem) if entry.init}
    return Statement(**values, **changes)


def with_bytes_below(problem: Problem, value: int) -> Problem:
    """Return the problem whose minimized bytes must be below `value`.

    These are written bytes, or the peak RAM without resident bytes. With state, written bytes
    become a constraint: the storage limit also counts state that is not written.
    """
    if problem.objective.quantity == Quantity.RAM:
        return replace(problem, ram=value - 1 + problem.resident_bytes)
    if not problem.graph.state_tensors:
        return problem.with_limit(Quantity.WRITES, value - 1)
    rows = tuple(row for row in problem.constraints if row.name != WRITTEN_BYTES_CUTOFF)
    terms: dict[str, float] = {Total.BYTES_WRITTEN: 1}
    cutoff = Constraint(name=WRITTEN_BYTES_CUTOFF, terms=terms, upper=value - 1)
    return replace(problem, constraints=(*rows, cutoff))
