"""Plans keep what the schedule promises, and transfers are no later and no earlier than need be."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import pytest

from kit.instances import random_costs, random_graph, random_schedule, seeded
from kit.planner_rules import lower_bound_s
from kit.worked import bench_device, comb_graph, skip_graph
from poetmodel.device import Costs
from poetmodel.errors import PlanError
from poetmodel.plan import Instruction, Op, Plan
from poetmodel.plan.derivation import explicit_steps
from poetmodel.plan.simulation import check_plan
from poetmodel.planner import make_plan
from poetmodel.planner.search import best_transfers
from poetmodel.planner.sequence import moves_of, start_at_use, unread_page_ins
from poetmodel.planner.timing import Timing
from poetmodel.planner.windows import TransferWindows
from poetmodel.schedule import Schedule, checkpoint_all, simulate, storage_entries
from poetmodel.schedule.homes import Homes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.graph import Graph

CASES = 80


class Case(NamedTuple):
    """A schedule, and a budget that it keeps."""

    graph: Graph
    costs: Costs
    schedule: Schedule
    budget: int

    def plan(self, mode: str) -> Plan:
        """Make the plan."""
        graph, costs, schedule, budget = self
        return make_plan(graph, costs, schedule, mode=mode, ram_budget_bytes=budget)


def cases(count: int = CASES) -> Iterator[Case]:
    """Yield random schedules, wasteful ones too, with tight and loose budgets."""
    for number in range(count):
        rng = seeded(f"planning/{number}")
        graph = random_graph(rng, (3, 8))
        costs = random_costs(rng, graph, mode="dma", idle=False)
        schedule = random_schedule(rng, graph)
        peak = simulate(graph, costs, schedule).peak_ram_bytes
        yield Case(graph, costs, schedule, peak + rng.choice((0, 0, 3, 20)))


def test_blocking_plans_have_the_figures_of_the_schedule() -> None:
    """Energy, peak and makespan of a blocking plan are those of the simulation, exactly."""
    for case in cases():
        check = check_plan(case.graph, case.costs, case.plan("blocking"))
        found = simulate(case.graph, case.costs, case.schedule, deadline_counts="serial")
        assert check.violations == ()
        assert check.peak_ram_bytes == found.peak_ram_bytes
        assert check.makespan_s == found.makespan_s
        assert check.energy_j == found.energy_j


def test_dma_plans_are_valid_and_keep_the_budget() -> None:
    """No DMA plan has a violation, within any budget that the schedule keeps."""
    for case in cases():
        plan = case.plan("dma")
        check = check_plan(case.graph, case.costs, plan)
        assert check.violations == ()
        assert check.peak_ram_bytes <= case.budget
        assert explicit_steps(Homes.of(case.graph), plan.program, plan.mode) is not None


def test_dma_plans_compute_and_page_in_what_the_schedule_does() -> None:
    """Computations keep their order and page-ins their number; no page-out is without a page-in."""
    for case in cases():
        program = case.plan("dma").program
        whole = case.plan("blocking").program
        for op in (Op.COMPUTE, Op.PAGE_IN):
            kept = [index for each, index in program if each == op]
            scheduled = [index for each, index in whole if each == op]
            assert (kept if op == Op.COMPUTE else sorted(kept)) == (
                scheduled if op == Op.COMPUTE else sorted(scheduled)
            )
        for place, (op, i) in enumerate(program):
            assert op != Op.PAGE_OUT or (Op.PAGE_IN, i) in program[place:]


def test_energy_differs_by_dropped_page_outs_alone() -> None:
    """What a DMA plan saves is the energy of the page-outs that it leaves out."""
    for case in cases():
        blocking = check_plan(case.graph, case.costs, case.plan("blocking"))
        plan = case.plan("dma")
        dropped = [i for _, i in case.schedule.M_out]
        for op, i in plan.program:
            if op == Op.PAGE_OUT:
                dropped.remove(i)
        energy_j = case.costs.table(case.graph).page_out_energy_j
        check = check_plan(case.graph, case.costs, plan)
        assert check.energy_j is not None
        assert check.energy_j + sum(energy_j[i] for i in dropped) == blocking.energy_j


def test_makespan_lies_between_the_bound_and_the_simple_rules() -> None:
    """No plan is slower than blocking storage or page-ins at their use, or beats the bound."""
    better = 0
    for case in cases():
        table, homes = case.costs.table(case.graph), Homes.of(case.graph)
        moves = moves_of(homes, case.schedule)
        check = check_plan(case.graph, case.costs, case.plan("dma"))
        blocking = check_plan(case.graph, case.costs, case.plan("blocking"))
        at_use = Timing(homes, table, start_at_use(homes, moves), case.budget)
        assert check.makespan_s is not None
        assert blocking.makespan_s is not None
        assert lower_bound_s(table, moves) <= check.makespan_s <= at_use.makespan_s
        assert at_use.makespan_s <= blocking.makespan_s
        better += check.makespan_s < at_use.makespan_s
    assert better > CASES // 5


def test_page_ins_without_a_stall_are_just_in_time() -> None:
    """At any later place such a page-in would stall, or push one that is used later forward."""
    tried = 0
    for case in cases():
        homes = Homes.of(case.graph)
        if unread_page_ins(homes, moves_of(homes, case.schedule)):
            continue
        plan = case.plan("dma")
        check = check_plan(case.graph, case.costs, plan)
        program = plan.program
        for place, step in enumerate(program):
            if step.op != Op.PAGE_IN:
                continue
            wait = program.index(Instruction(Op.WAIT, step.index), place)
            if check.moments[wait].end_s > check.moments[wait].start_s:
                continue
            for later in range(place + 1, wait):
                other = program[later]
                if other.op == Op.PAGE_IN and program.index((Op.WAIT, other.index), later) > wait:
                    break
                moved = (*program[:place], *program[place + 1 : later + 1], step)
                late = replace(plan, program=(*moved, *program[later + 1 :]))
                found = check_plan(case.graph, case.costs, late)
                assert not found.valid or found.stall_s > check.stall_s
                tried += 1
    assert tried > 20


def test_plans_are_the_same_every_time() -> None:
    """Planning twice gives the same program."""
    for case in cases(20):
        assert case.plan("dma").program == case.plan("dma").program


def paged_comb(page_s: float) -> tuple[Graph, Costs, Schedule]:
    """Page two tensors of a comb out and in; computations take 1 s, a transfer `page_s`.

    Stages: f0 f1 f2 g2 g1 g0. f0 and f1 are paged out when made, and in where g1 and g0 read them.
    """
    graph = comb_graph(3)
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[1.0] * 6,
        compute_energy_j=[1.0] * 6,
        page_in=[(page_s, 1.0)] * 6,
        page_out=[(page_s, 1.0)] * 6,
        device=bench_device(mode="dma"),
    )
    kept = [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]
    schedule = Schedule(
        R=tuple((t, t) for t in range(6)),
        S_RAM=tuple(kept),
        S_AUX=((1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (2, 1), (3, 1), (4, 1)),
        M_in=((4, 1), (5, 0)),
        M_out=((0, 0), (1, 1)),
    )
    return graph, costs, schedule


def test_transfers_hide_behind_computations() -> None:
    """Four transfers of 1 s end beside six computations: blocking 10 s, with DMA 6 s."""
    graph, costs, schedule = paged_comb(1.0)
    times = {
        mode: check_plan(graph, costs, make_plan(graph, costs, schedule, mode=mode)).makespan_s
        for mode in ("blocking", "dma")
    }
    assert times["blocking"] == 10.0
    loose = make_plan(graph, costs, schedule, mode="dma", ram_budget_bytes=13)
    check = check_plan(graph, costs, loose)
    # f0 leaves during f1, f1 during f2; f1 comes back during g2 and f0 during g1.
    assert (check.makespan_s, check.stall_s) == (6.0, 0.0)


def test_ram_that_forbids_an_early_start_costs_a_stall() -> None:
    """Without room for a second tensor the bus waits for the computation before."""
    graph, costs, schedule = paged_comb(1.0)
    peak = simulate(graph, costs, schedule).peak_ram_bytes
    tight = check_plan(graph, costs, make_plan(graph, costs, schedule, mode="dma"))
    assert tight.peak_ram_bytes <= peak
    assert tight.makespan_s is not None
    assert tight.makespan_s > 6.0


@pytest.mark.parametrize("spare", [0, 4, 8, 100])
def test_page_ins_ahead_of_their_use_share_what_ram_is_left(spare: int) -> None:
    """Where the bus is the bottleneck many page-ins want to begin early; the budget limits them."""
    teeth = 8
    graph = comb_graph(teeth)
    n, paged = 2 * teeth, range(teeth - 1)
    costs = Costs.from_arrays(
        graph,
        compute_time_s=[1.0] * n,
        compute_energy_j=[1.0] * n,
        page_in=[(1.5, 1.0)] * n,
        page_out=[(0.1, 1.0)] * n,
    )
    uses = [(n - 1 - i, i) for i in paged]
    schedule = Schedule(
        R=tuple((t, t) for t in range(n)),
        S_RAM=tuple((t + 1, t) for t in range(n - 1)),
        S_AUX=storage_entries(graph, uses),
        M_in=tuple(uses),
        M_out=tuple((i, i) for i in paged),
    )
    table, homes = costs.table(graph), Homes.of(graph)
    moves = moves_of(homes, schedule)
    budget = simulate(graph, costs, schedule).peak_ram_bytes + spare
    windows = TransferWindows(homes, table, moves, budget)
    found = Timing(homes, table, windows.steps(best_transfers(windows).transfers), budget)
    at_use = Timing(homes, table, start_at_use(homes, moves), budget)
    assert found.peak_ram_bytes <= budget
    assert found.makespan_s < at_use.makespan_s or spare == 0


def test_a_plan_is_made_without_time_to_improve_it() -> None:
    """It is valid, within the budget, and never quicker than the one with all the time it takes."""
    for graph, costs, schedule, budget in cases(20):
        given = {"mode": "dma", "ram_budget_bytes": budget}
        checks = [
            check_plan(graph, costs, make_plan(graph, costs, schedule, time_limit=limit, **given))
            for limit in (0.0, None)
        ]
        assert [check.violations for check in checks] == [(), ()]
        assert checks[0].makespan_s >= checks[1].makespan_s * (1 - 1e-9)
        assert checks[0].energy_j == pytest.approx(checks[1].energy_j, rel=1e-9)


def test_a_plan_says_what_it_is_for() -> None:
    """Mode, budget, graph and device are in the plan."""
    graph, costs, schedule = paged_comb(1.0)
    plan = make_plan(graph, costs, schedule, mode="dma", ram_budget_bytes=13)
    assert (plan.mode, plan.ram_budget_bytes, plan.device) == ("dma", 13, "bench")
    assert plan.identity is not None
    assert plan.identity.sha256 == graph.sha256


def test_no_plan_of_a_broken_schedule() -> None:
    """A schedule that breaks the rules is refused with what it breaks."""
    graph = skip_graph()
    costs = random_costs(seeded(0), graph)
    with pytest.raises(PlanError, match="needs 'a' in RAM"):
        make_plan(graph, costs, replace(checkpoint_all(graph), S_RAM=()), mode="dma")


def test_no_plan_of_another_mode() -> None:
    """Storage is blocking or has DMA."""
    graph = skip_graph()
    with pytest.raises(ValueError, match="half"):
        make_plan(graph, random_costs(seeded(0), graph), checkpoint_all(graph), mode="half")
