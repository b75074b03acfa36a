"""How good the transfer planner's plans are, and how long it takes to make one."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pytest

import poetmodel as pm
from grid import SMOKE_LIMIT_S, graph_of
from planner_rules import lower_bound_s, prefetch_early
from poetmodel.device import Costs, Device, StorageMode
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.plan.simulation import check_plan
from poetmodel.planner import make_plan
from poetmodel.planner.sequence import moves_of, start_at_use
from poetmodel.planner.timing import Timing
from poetmodel.schedule import simulate
from poetmodel.schedule.homes import Homes

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.plan import Plan
    from poetmodel.schedule import Schedule

ROUNDS: Final = 3
MODELS: Final = ("paper/resnet18-cifar", "paper/vgg16-cifar", "paper/bert")
DEVICES: Final = ("jetson-tx2", "paper-a72")
BUDGETS: Final = (0.3, 0.5, 0.7)
LIMIT_S: Final = 20.0
"""Wall time to find a schedule [s]."""
UNLIMITED: Final = 2**53
"""More RAM than any program takes [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCase:
    """A schedule that is planned for a device with DMA."""

    model: str
    """A shipped model."""
    device: str
    """A shipped device; its storage gets a DMA channel."""
    ram_ratio: float
    """RAM budget, as a share of the keep-all peak."""
    recompute: bool
    """Whether the schedule may recompute, or has to page."""

    @property
    def name(self) -> str:
        """What identifies it in a run."""
        kind = "recompute and page" if self.recompute else "page only"
        return f"{self.model} | {self.device} | {self.ram_ratio:.0%} | {kind}"

    @property
    def costs(self) -> Costs:
        """Costs on the device."""
        device = Device.load(self.device)
        if device.storage is not None:
            device = replace(device, storage=replace(device.storage, mode=StorageMode.DMA))
        return Costs.estimate(graph_of(self.model), device)

    @property
    def ram_budget_bytes(self) -> int:
        """RAM budget [B]."""
        return int(self.ram_ratio * checkpoint_all_peak_bytes(graph_of(self.model)))


def _cases() -> tuple[PlanCase, ...]:
    """Return every case whose budget is at least the minimum RAM of its graph."""
    cases = (
        PlanCase(model=model, device=device, ram_ratio=ratio, recompute=recompute)
        for model in MODELS
        for device in DEVICES
        for recompute in (True, False)
        for ratio in BUDGETS
    )
    return tuple(x for x in cases if x.ram_budget_bytes >= floor(graph_of(x.model)).bytes)


@cache
def schedule_of(case: PlanCase, limit_s: float = LIMIT_S) -> Schedule:
    """Find the schedule of a case, without a deadline."""
    problem = pm.Problem(
        graph_of(case.model),
        case.costs,
        ram=case.ram_budget_bytes,
        deadline_counts="compute",
        recompute=case.recompute,
    )
    return pm.solve(problem, time_limit=limit_s, gap=1e-2).require_schedule()


@pytest.mark.parametrize("plan_case", _cases(), ids=lambda case: case.name)
def test_planner(
    benchmark: Any, plan_case: PlanCase, keep: Callable[..., None], *, smoke: bool
) -> None:
    """Planning one schedule, beside simpler rules and the lower bound."""
    if smoke and plan_case != _cases()[0]:
        pytest.skip("a smoke run takes one case")
    if smoke:
        plan_case = replace(plan_case, model="paper/linear", ram_ratio=0.7)
    graph, costs = graph_of(plan_case.model), plan_case.costs
    schedule = schedule_of(plan_case, SMOKE_LIMIT_S if smoke else LIMIT_S)
    budget = plan_case.ram_budget_bytes

    def plan() -> Plan:
        return make_plan(graph, costs, schedule, mode=StorageMode.DMA, ram_budget_bytes=budget)

    begin_s = time.process_time()
    plan()
    cpu_s = time.process_time() - begin_s
    benchmark.group = f"plan {plan_case.model}"
    made = benchmark.pedantic(plan, rounds=1 if smoke else ROUNDS, iterations=1)
    check = check_plan(graph, costs, made)
    assert check.valid, check.violations
    table, homes = costs.table(graph), Homes.of(graph)
    moves = moves_of(homes, schedule)
    at_use = Timing(homes, table, start_at_use(homes, moves), budget)
    early = Timing(homes, table, prefetch_early(homes, table, moves), UNLIMITED)
    facts = {
        "cpu_s": cpu_s,
        "moves": len(moves),
        "page_ins": sum(op == "page_in" for op, _ in moves),
        "page_outs": sum(op == "page_out" for op, _ in moves),
        "ram_budget_bytes": budget,
        "blocking_s": simulate(graph, costs, schedule).makespan_s,
        "start_at_use_s": at_use.makespan_s,
        "early_s": early.makespan_s,
        "early_peak_ram_bytes": early.peak_ram_bytes,
        "makespan_s": check.makespan_s,
        "stall_s": check.stall_s,
        "peak_ram_bytes": check.peak_ram_bytes,
        "lower_bound_s": lower_bound_s(table, moves),
    }
    benchmark.extra_info.update(facts)
    keep(
        "plan",
        plan_case.name,
        seconds=benchmark.stats.stats.median,
        case=asdict(plan_case),
        **facts,
    )
