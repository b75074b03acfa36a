"""Plans of schedules with the checks of the verifier."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from poetmodel.device import StorageMode
from poetmodel.device.ram import DeviceRam
from poetmodel.errors import PlanError
from poetmodel.plan import check_arena
from poetmodel.plan.simulation import check_plan_of
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from poetmodel.graph import Graph
    from poetmodel.plan import Arena, ArenaCheck, Plan, PlanCheck
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPlan:
    """A plan, its addresses if requested, and the verifier's checks of both."""

    problem: Problem
    plan: Plan
    check: PlanCheck
    arena: Arena | None = None
    arena_check: ArenaCheck | None = None
    """Check of the addresses; None without addresses."""

    @classmethod
    def of_schedule(
        cls,
        problem: Problem,
        schedule: Schedule,
        *,
        ram_budget_bytes: int | None,
        mode: StorageMode | None = None,
        alignment: int | None = None,
        may_delay_transfers: bool = False,
    ) -> CheckedPlan:
        """Plan a schedule, with addresses if an alignment [B] is given; verify plan and addresses.

        `ram_budget_bytes` is for tensors, None for no limit. With `may_delay_transfers`,
        overlapping transfers may start later if the addresses exceed the budget otherwise. Raises
        `PlanError` if the schedule violates a rule of execution.
        """
        from poetmodel.planner import make_plan
        from poetmodel.solver.fitting import plan_and_place

        graph, costs = problem.graph, problem.costs
        mode = mode or problem.transfer_mode
        if alignment is None:
            plan = make_plan(graph, costs, schedule, mode=mode, ram_budget_bytes=ram_budget_bytes)
            return cls.of_plan(problem, plan)
        plan, arena = plan_and_place(
            graph,
            costs,
            schedule,
            mode=mode,
            ram_budget_bytes=ram_budget_bytes,
            alignment=alignment,
            may_delay_transfers=may_delay_transfers,
        )
        return cls.of_plan(problem, plan, arena)

    @classmethod
    def of_plan(cls, problem: Problem, plan: Plan, arena: Arena | None = None) -> CheckedPlan:
        """Verify a plan against its own RAM budget and the storage limit of a problem."""
        graph = problem.graph
        return cls(
            problem=problem,
            plan=plan,
            check=check_plan_of(problem, plan),
            arena=arena,
            arena_check=None if arena is None else check_arena(graph, plan, arena),
        )

    def with_addresses(self) -> CheckedPlan:
        """Return a plan without violations with new addresses; any other plan unchanged."""
        if self.check.violations:
            return self
        from poetmodel.placement import place

        arena = place(self.graph, self.plan)
        return replace(self, arena=arena, arena_check=check_arena(self.graph, self.plan, arena))

    def require_arena(self) -> Arena:
        """Return the addresses; raise `PlanError` without them."""
        if self.arena is None:
            raise PlanError("the plan has no addresses")
        return self.arena

    @property
    def graph(self) -> Graph:
        """The graph of the problem."""
        return self.problem.graph

    @property
    def violations(self) -> tuple[str, ...]:
        """Violations of the plan; if it has none, those of its addresses."""
        if self.check.violations or self.arena_check is None or self.arena is None:
            return self.check.violations
        budget = self.plan.ram_budget_bytes
        if budget is None or self.arena.bytes <= budget:
            return self.arena_check.violations
        return (
            f"arena: {self.arena.bytes:,} B are {format_bytes(self.arena.bytes - budget)} above "
            f"the {budget:,} B that tensors may use; 'poetmodel solve' with --plan FILE --arena "
            "searches for another schedule, or give a larger --ram",
        )

    @property
    def device_ram(self) -> DeviceRam | None:
        """Device RAM that the plan uses; None without a device."""
        return DeviceRam.compare(self.problem.costs.device, self.graph, self.check.peak_ram_bytes)


def blocking_warnings(problem: Problem) -> list[str]:
    """Return a warning if the counted time assumes overlap that the device lacks, else []."""
    device, is_blocking = problem.costs.device, problem.transfer_mode == StorageMode.BLOCKING
    if device is None or not problem.is_overlapping or not is_blocking:
        return []
    return [
        "the time of this schedule assumes that transfers overlap computation, but the core of "
        f"{device.short_name} waits for each transfer, and so does the plan; 'poetmodel "
        "plan --mode dma' makes a plan with overlap"
    ]
