"""The limits of a step, each declared once for commands, functions and the explorer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from poetmodel.budgets import Budget
from poetmodel.errors import BudgetError
from poetmodel.units import parse_energy, parse_size, parse_time

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from poetmodel.device import Costs
    from poetmodel.graph import Graph
    from poetmodel.problem.job import Job
    from poetmodel.problem.totals import Constraint, Terms


@dataclass(frozen=True)
class Limits:
    """Limits, objective and allowed decisions, as stated; `poetmodel.Problem` documents each.

    Code passes limits on as this object, so that a new field reaches all that use limits.
    """

    ram: str | int | Budget | None = None
    deadline: str | float | None = None
    deadline_counts: str | None = None
    aux_bytes: str | int | None = None
    recompute: bool = True
    paging: bool = True
    minimize: str | None = None
    """None for energy, or for the objective of user-defined constraints."""
    energy_budget: str | float | None = None
    count_parameters: bool = False
    commit: int | None = None
    constraints: tuple[Constraint, ...] = ()

    @property
    def energy_settings(self) -> tuple[str | None, int | None]:
        """Limits that the energy of a schedule depends on: counted time, and commits."""
        return self.deadline_counts, self.commit

    def check(self) -> None:
        """Raise `BudgetError` with the errors in the texts of budgets, such as unknown units."""
        parsers: tuple[tuple[Any, Callable[[Any], object]], ...] = (
            (self.ram, Budget.parse),
            (self.deadline, lambda value: parse_time(value, field="deadline", base_s=1.0)),
            (self.aux_bytes, lambda value: parse_size(value, field="aux", base_bytes=1)),
            (
                self.energy_budget,
                lambda value: parse_energy(value, field="energy budget", base_j=1.0),
            ),
        )
        faults: list[str] = []
        for value, parse in parsers:
            try:
                if value is not None:
                    parse(value)
            except BudgetError as error:
                faults.extend(error.faults)
        if faults:
            raise BudgetError(faults)

    def with_job(self, job: Job | None, graph: Graph) -> Self:
        """Return the limits, with a step's deadline and energy budget where the job has them."""
        if job is None:
            return self
        deadline_s, energy_j = job.deadline_s(graph), job.energy_budget_j(graph)
        return replace(
            self,
            deadline=self.deadline if deadline_s is None else deadline_s,
            energy_budget=self.energy_budget if energy_j is None else energy_j,
        )


@dataclass(frozen=True)
class _GraphAndCosts:
    """Makes graph and costs the first parameters of `Problem`, before those of `Limits`."""

    graph: Graph
    costs: Costs


@dataclass(frozen=True, eq=False)
class StatedProblem(Limits, _GraphAndCosts):  # Fields of the last base come first.
    """A problem as stated: the fields of `Problem`, which checks them."""

    minimize: str = "energy"
    user_objective: Terms = ()

    @property
    def resident_bytes(self) -> int:
        """Parameters, gradients and optimizer state in the budget [B]; 0 if it excludes them."""
        return self.graph.total_resident_bytes if self.count_parameters else 0
