"""The single pass, every node computed once: lower bounds on time and energy of all schedules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from poetmodel.problem.quantities import DeadlineCounts
from poetmodel.problem.rows import Coefficients

if TYPE_CHECKING:
    from poetmodel.device import Costs, CostTable
    from poetmodel.device.cost import Cost
    from poetmodel.graph import Graph


@dataclass(frozen=True)
class SinglePass:
    """Time and energy of a step that computes every node once, including commits.

    All state is resident, so the step has no transfers except those of commits.
    """

    graph: Graph
    """The training graph."""
    costs: Costs
    """Costs by name, including commits."""
    deadline_counts: DeadlineCounts
    """The time that the deadline counts."""

    @cached_property
    def table(self) -> CostTable:
        """The costs, indexed by node and tensor."""
        return self.costs.table(self.graph)

    @cached_property
    def totals(self) -> tuple[tuple[str, int], ...]:
        """All decisions of `Coefficients`, as pairs (field, index), field by field.

        The index is that of a node for ``compute``, else of any tensor, also for ``storage_home``.
        """
        n_tensors = len(self.graph.tensors)
        sizes = (len(self.graph.nodes), n_tensors, n_tensors, n_tensors)
        columns = zip(Coefficients._fields, sizes, strict=True)
        return tuple((field, item) for field, size in columns for item in range(size))

    @property
    def reads_in_place(self) -> bool:
        """Whether the core reads state from storage in place (memory-mapped storage)."""
        device = self.costs.device
        return device is not None and device.is_memory_mapped

    @property
    def idle_power_w(self) -> float:
        """Power drawn during the counted time [W]; 0 without a device."""
        return self.costs.device.idle_power_w if self.costs.device is not None else 0.0

    @property
    def compute_s(self) -> float:
        """Compute time [s]."""
        return sum(self.table.compute_time_s)

    @cached_property
    def commit_cost(self) -> Cost:
        """Cost per step of commits, which write all replaced state; 0 without commits."""
        return self.table.commit_totals()

    @property
    def time_s(self) -> float:
        """Time that the deadline counts [s].

        ``overlap`` adds only `Commit.other_cost`, whose actions follow all other actions of a step.
        """
        commit = self.table.commit
        if commit is None or self.deadline_counts == DeadlineCounts.COMPUTE:
            return self.compute_s
        is_serial = self.deadline_counts == DeadlineCounts.SERIAL
        counted_cost = self.commit_cost if is_serial else commit.other_cost
        return self.compute_s + counted_cost.time_s

    @property
    def energy_j(self) -> float:
        """Energy, including commits and idle power over `time_s` [J]."""
        pass_j = sum(self.table.compute_energy_j) + self.commit_cost.energy_j
        return pass_j + self.idle_power_w * self.time_s
