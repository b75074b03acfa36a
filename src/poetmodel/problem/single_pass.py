"""The single pass: every node computed once. Each schedule pays at least its time and energy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from poetmodel.problem.objective import DeadlineCounts

if TYPE_CHECKING:
    from poetmodel.device import Costs, CostTable
    from poetmodel.device.cost import Cost
    from poetmodel.graph import Graph


@dataclass(frozen=True)
class SinglePass:
    """Time and energy of a step that computes every node once, commits included."""

    graph: Graph
    costs: Costs
    deadline_counts: DeadlineCounts
    """Which time counts."""

    @cached_property
    def table(self) -> CostTable:
        """The costs in the graph's order."""
        return self.costs.table(self.graph)

    @property
    def idle_power_w(self) -> float:
        """Power drawn over the time that counts [W]."""
        return self.costs.device.idle_power_w if self.costs.device is not None else 0.0

    @property
    def compute_s(self) -> float:
        """Compute time [s]."""
        return sum(self.table.compute_time_s)

    @cached_property
    def committing(self) -> Cost:
        """Cost of commits: all replaced state is written to storage."""
        return self.table.commit_totals()

    @property
    def time_s(self) -> float:
        """Time that counts [s].

        Commits are a part of it where transfers count. Where transfers overlap computation, only
        the writes that come last in any case are.
        """
        commit = self.table.commit
        if commit is None or self.deadline_counts == DeadlineCounts.COMPUTE:
            return self.compute_s
        serial = self.deadline_counts == DeadlineCounts.SERIAL
        counted = self.committing if serial else commit.other_cost
        return self.compute_s + counted.time_s

    @property
    def energy_j(self) -> float:
        """Energy, idle power included [J]."""
        pass_j = sum(self.table.compute_energy_j) + self.committing.energy_j
        return pass_j + self.idle_power_w * self.time_s
