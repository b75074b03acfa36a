"""How good the transfer planner's plans are, and how long it takes to make one."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import pytest

import poetmodel as pm
from grid import SMOKE_LIMIT_S, graph_of
from poetmodel.device import Costs, Device, StorageMode
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.plan import Instruction, Op
from poetmodel.plan.simulation import check_plan
from poetmodel.planner import make_plan
from poetmodel.planner.sequence import moves_of, start_at_use
from poetmodel.planner.timing import Timing
from poetmodel.planner.windows import TransferWindows
from poetmodel.schedule import simulate
from poetmodel.schedule.homes import Homes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from poetmodel.device import CostTable
    from poetmodel.plan import Plan, Program

LIMIT_S: Final = 20.0
"""Wall time to find a schedule [s]."""
UNLIMITED: Final = 2**53
"""More RAM than any program takes [B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCase:
    """A schedule that is planned for a device, whose storage gets a DMA channel."""

    model: str
    device: str
    ram_ratio: float
    """RAM budget, as a share of the keep-all peak."""
    recompute: bool
    """Whether the schedule may recompute, or has to page."""

    @property
    def name(self) -> str:
        """Its name in the records."""
        kind = "recompute and page" if self.recompute else "page only"
        return f"{self.model} | {self.device} | {self.ram_ratio:.0%} | {kind}"

    @property
    def costs(self) -> Costs:
        """Costs on the device."""
        device = Device.load(self.device)
        assert device.storage is not None
        storage = replace(device.storage, mode=StorageMode.DMA)
        return Costs.estimate(graph_of(self.model), replace(device, storage=storage))

    @property
    def ram_budget_bytes(self) -> int:
        """RAM budget [B]."""
        return int(self.ram_ratio * checkpoint_all_peak_bytes(graph_of(self.model)))


_MODELS: Final = ("paper/resnet18-cifar", "paper/vgg16-cifar", "paper/bert")
_AXES: Final = product(_MODELS, ("jetson-tx2", "paper-a72"), (True, False), (0.3, 0.5, 0.7))
_ALL: Final = [PlanCase(model=m, device=d, recompute=r, ram_ratio=x) for m, d, r, x in _AXES]
CASES: Final = [x for x in _ALL if x.ram_budget_bytes >= floor(graph_of(x.model)).bytes]
"""Every case that some schedule can keep."""


def prefetch_early(homes: Homes, table: CostTable, moves: Sequence[Instruction]) -> Program:
    """Put each page-in where its tensor is on storage and out of RAM, whatever RAM it takes.

    Moves are in the order of a schedule, see `moves_of`. Page-outs come right after the computation
    that makes their tensor.
    """
    # With room for everything at all times, windows end at nothing but the life of copies.
    windows = TransferWindows(homes, table, moves, sum(homes.sizes) * (len(moves) + 1))
    core = bus = 0.0
    stored: dict[int | None, float] = {None: 0.0}
    arrives: dict[int, float] = {}
    chosen: list[tuple[int, Instruction]] = []
    for gap in range(len(windows.nodes)):
        for x, out in enumerate(windows.page_outs):
            if out.first == gap:
                bus = stored[x] = max(core, bus) + out.time_s
                chosen.append((gap, Instruction(Op.PAGE_OUT, out.tensor)))
        for e, into in enumerate(windows.page_ins):
            ready = into.first <= gap and stored.get(into.source, core + 1) <= core
            if e not in arrives and (ready or into.last == gap):
                bus = arrives[e] = max(core, bus) + into.time_s
                chosen.append((gap, Instruction(Op.PAGE_IN, into.tensor)))
            if into.last == gap:
                core = max(core, arrives[e])
        core += windows.compute_s[gap]
    return windows.steps(chosen)


def lower_bound_s(table: CostTable, moves: Sequence[Instruction]) -> float:
    """Return the longer of compute and bus time: no program of the moves takes less [s]."""
    paging = {Op.PAGE_IN: table.page_in_time_s, Op.PAGE_OUT: table.page_out_time_s}
    compute_s = sum(table.compute_time_s[i] for op, i in moves if op == Op.COMPUTE)
    return max(compute_s, sum(paging[op][i] for op, i in moves if op != Op.COMPUTE))


@pytest.mark.parametrize("plan_case", CASES, ids=lambda case: case.name)
def test_planner(
    benchmark: Any, plan_case: PlanCase, keep: Callable[..., None], *, smoke: bool
) -> None:
    """Planning one schedule, beside simpler rules and the lower bound."""
    if smoke and plan_case != CASES[0]:
        pytest.skip("a smoke run takes one case")
    if smoke:
        plan_case = replace(plan_case, model="paper/linear", ram_ratio=0.7)
    graph, costs, budget = graph_of(plan_case.model), plan_case.costs, plan_case.ram_budget_bytes
    problem = pm.Problem(
        graph, costs, ram=budget, deadline_counts="compute", recompute=plan_case.recompute
    )
    limit_s = SMOKE_LIMIT_S if smoke else LIMIT_S
    schedule = pm.solve(problem, time_limit=limit_s, gap=1e-2).require_schedule()

    def plan() -> Plan:
        return make_plan(graph, costs, schedule, mode=StorageMode.DMA, ram_budget_bytes=budget)

    begin_s = time.process_time()
    plan()
    cpu_s = time.process_time() - begin_s
    benchmark.group = f"plan {plan_case.model}"
    made = benchmark.pedantic(plan, rounds=1 if smoke else 3, iterations=1)
    check = check_plan(graph, costs, made)
    assert check.valid, check.violations
    table, homes = costs.table(graph), Homes.of(graph)
    moves = moves_of(homes, schedule)
    early = Timing(homes, table, prefetch_early(homes, table, moves), UNLIMITED)
    facts = {
        "cpu_s": cpu_s,
        "moves": len(moves),
        "page_ins": sum(op == "page_in" for op, _ in moves),
        "page_outs": sum(op == "page_out" for op, _ in moves),
        "ram_budget_bytes": budget,
        "blocking_s": simulate(graph, costs, schedule).makespan_s,
        "start_at_use_s": Timing(homes, table, start_at_use(homes, moves), budget).makespan_s,
        "early_s": early.makespan_s,
        "early_peak_ram_bytes": early.peak_ram_bytes,
        "makespan_s": check.makespan_s,
        "stall_s": check.stall_s,
        "peak_ram_bytes": check.peak_ram_bytes,
        "lower_bound_s": lower_bound_s(table, moves),
    }
    benchmark.extra_info.update(facts)
    seconds = benchmark.stats.stats.median
    keep("plan", plan_case.name, seconds=seconds, case=asdict(plan_case), **facts)
