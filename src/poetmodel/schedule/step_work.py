"""The work of a training step, of a schedule or a plan: its bytes, times and energies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from poetmodel.device.cost import FREE, Cost

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Mapping

    from poetmodel.device import CostTable
    from poetmodel.schedule.homes import Homes


class Traffic(NamedTuple):
    """Bytes on storage, and bytes that transfers move; see `Simulation` for each field."""

    aux_used_bytes: int
    written_bytes: int
    read_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Numbers of computations and transfers in a training step, by index, and their sums."""

    table: CostTable | None
    """Costs of times and energies, which are 0 without it."""
    computations: Counter[int]
    """Number of computations of each node, first reads of state included."""
    page_ins: Counter[int]
    """Number of page-ins of each tensor, first reads of state included."""
    page_outs: Counter[int]
    """Number of page-outs of each tensor."""

    def traffic(self, homes: Homes) -> Traffic:
        """Return the bytes of storage and transfers."""
        sizes = homes.graph.tensor_bytes
        paged_out = self.page_outs.keys() - homes.stored - homes.graph.state_of.keys()
        return Traffic(
            homes.storage_bytes + sum(sizes[i] for i in paged_out),
            self.committed_bytes
            + sum(sizes[i] * count for i, count in self.uncommitted_page_outs.items()),
            sum(sizes[i] * count for i, count in self.page_ins.items()),
        )

    @property
    def committed_bytes(self) -> int:
        """Bytes that commits write, on average per step [B]."""
        commit = None if self.table is None else self.table.commit
        return 0 if commit is None else commit.written_bytes

    @cached_property
    def uncommitted_page_outs(self) -> Mapping[int, int]:
        """The page-outs that are no writes of a commit."""
        commit = None if self.table is None else self.table.commit
        if commit is None:
            return self.page_outs
        return {i: n for i, n in self.page_outs.items() if i not in commit.replacements}

    @cached_property
    def compute_cost(self) -> Cost:
        """Cost of all computations."""
        return FREE if self.table is None else self.table.compute_totals(self.computations)

    @cached_property
    def pass_cost(self) -> Cost:
        """Cost of one computation of each node."""
        table = self.table
        if table is None:
            return FREE
        return Cost(sum(table.compute_time_s), sum(table.compute_energy_j))

    @cached_property
    def recompute_cost(self) -> Cost:
        """Cost of all computations beyond `pass_cost`, summed separately."""
        if self.table is None:
            return FREE
        nodes = range(len(self.table.compute_time_s))
        return self.table.compute_totals({k: self.computations[k] - 1 for k in nodes})

    @cached_property
    def transfer_cost(self) -> Cost:
        """Cost of all transfers except writes of commits."""
        if self.table is None:
            return FREE
        return self.table.transfer_totals(self.page_ins, self.uncommitted_page_outs)

    @cached_property
    def commit_cost(self) -> Cost:
        """Cost of commits."""
        return FREE if self.table is None else self.table.commit_totals()

    @property
    def transfer_s(self) -> float:
        """Time of all transfers, commits included [s]."""
        return self.transfer_cost.time_s + self.commit_cost.time_s

    def energy_j(self, idle_w: float, counted_s: float) -> float:
        """Return the energy of the step with idle power over the counted time [J]."""
        active_cost = self.compute_cost + self.transfer_cost + self.commit_cost
        return active_cost.energy_j + idle_w * counted_s
