"""Plans keep what the schedule promises, and transfers are no later and no earlier than need be."""

from dataclasses import replace

import pytest

from kit.instances import random_costs, seeded
from kit.plans import bus_costs, lower_bound_s, plan_cases
from kit.worked import comb_graph, skip_graph
from poetmodel.errors import PlanError
from poetmodel.plan import Instruction, Op
from poetmodel.plan.simulation import check_plan
from poetmodel.planner import make_plan
from poetmodel.planner.search import best_transfers
from poetmodel.planner.sequence import moves_of, start_at_use, unread_page_ins
from poetmodel.planner.timing import Timing
from poetmodel.planner.windows import TransferWindows
from poetmodel.schedule import Schedule, checkpoint_all, simulate, storage_entries
from poetmodel.schedule.homes import Homes

SAME = [
    *("energy_j", "makespan_s", "compute_s", "transfer_s"),
    *("aux_used_bytes", "written_bytes", "read_bytes"),
]
"""The figures that a blocking plan shares with its schedule, beside the peak."""


def thrifty(graph, schedule):
    """Return a schedule that lets go at once what the next stage makes no use of."""
    kept = set(schedule.S_RAM)
    for t, i in sorted(kept, reverse=True):
        used = any((t, k) in schedule.R for k in graph.users_of[i])
        if not used and (t + 1, i) not in kept and (t, i) not in schedule.M_out:
            kept.discard((t, i))
    return replace(schedule, S_RAM=tuple(kept))


@pytest.mark.parametrize("with_state", [False, True])
def test_blocking_plans_have_the_figures_of_the_schedule(*, with_state):
    """Times, energy and bytes, exactly; the peak too, unless tensors are kept for nothing."""
    wasted = 0
    for case in plan_cases(150, with_state=with_state):
        graph, costs, schedule, _ = case
        found, check = simulate(graph, costs, schedule), case.check("blocking")
        assert all(getattr(check, key) == getattr(found, key) for key in SAME if key != "energy_j")
        assert check.peak_ram_bytes <= found.peak_ram_bytes
        wasted += check.peak_ram_bytes < found.peak_ram_bytes
        lean = thrifty(graph, schedule) if with_state else schedule
        found = simulate(graph, costs, lean, deadline_counts="serial")
        check = case._replace(schedule=lean, budget=None).check("blocking")
        assert found.violations == ()
        assert all(getattr(check, key) == getattr(found, key) for key in (*SAME, "peak_ram_bytes"))
        assert check.makespan_s == found.time_s
    assert wasted < (15 if with_state else 1)


@pytest.mark.parametrize("with_state", [False, True])
def test_dma_plans_are_valid_keep_the_budget_and_are_no_slower(*, with_state):
    """No plan is slower than blocking storage or page-ins at their use, or beats the bound."""
    quicker = better = 0
    for case in plan_cases(100, with_state=with_state):
        if case.costs.device.is_memory_mapped:
            continue
        plan, check, blocking = case.plan("dma"), case.check("dma"), case.check("blocking")
        assert check.peak_ram_bytes <= case.budget
        assert max(check.compute_s, check.transfer_s) <= check.makespan_s <= blocking.makespan_s
        quicker += check.makespan_s < blocking.makespan_s
        homes = plan.homes(case.graph)
        if not with_state:
            table, moves = case.costs.table(case.graph), moves_of(homes, case.schedule)
            at_use = Timing(homes, table, start_at_use(homes, moves), case.budget)
            assert lower_bound_s(table, moves) <= check.makespan_s <= at_use.makespan_s
            assert at_use.makespan_s <= blocking.makespan_s
            better += check.makespan_s < at_use.makespan_s
    assert quicker > (45 if with_state else 0)
    assert better > 20 or with_state


def test_dma_plans_do_what_the_schedule_does_but_for_idle_page_outs():
    """Computations keep their order and page-ins their number; no page-out is without a page-in.

    What a DMA plan saves is the energy of the page-outs that it leaves out.
    """
    for case in plan_cases(80):
        plan = case.plan("dma")
        program, whole = plan.program, case.plan("blocking").program
        for op, order in ((Op.COMPUTE, list), (Op.PAGE_IN, sorted)):
            kept, scheduled = ([i for each, i in made if each == op] for made in (program, whole))
            assert order(kept) == order(scheduled)
        dropped = [i for _, i in case.schedule.M_out]
        for place, (op, i) in enumerate(program):
            if op == Op.PAGE_OUT:
                assert (Op.PAGE_IN, i) in program[place:]
                dropped.remove(i)
        energy_j = case.costs.table(case.graph).page_out_energy_j
        saved = sum(energy_j[i] for i in dropped)
        assert case.check("dma").energy_j + saved == case.check("blocking").energy_j


def test_page_ins_without_a_stall_are_just_in_time():
    """At any later place such a page-in would stall, or push one that is used later forward."""
    tried = 0
    for case in plan_cases(80):
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


def paged_comb(page_s):
    """Page two tensors of a comb out and in; computations take 1 s, a transfer `page_s`.

    Stages: f0 f1 f2 g2 g1 g0. f0 and f1 are paged out when made, and in where g1 and g0 read them.
    """
    graph = comb_graph(3)
    costs = bus_costs(graph, [1.0] * 6, page_s, page_s)
    kept = [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]
    schedule = Schedule(
        R=tuple((t, t) for t in range(6)),
        S_RAM=tuple(kept),
        S_AUX=((1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (2, 1), (3, 1), (4, 1)),
        M_in=((4, 1), (5, 0)),
        M_out=((0, 0), (1, 1)),
    )
    return graph, costs, schedule


def test_transfers_hide_behind_computations():
    """Four transfers of 1 s end beside six computations: blocking 10 s, with DMA 6 s.

    Without room for a second tensor the bus waits for the computation before.
    """
    graph, costs, schedule = paged_comb(1.0)
    blocking, tight, loose = (
        check_plan(graph, costs, make_plan(graph, costs, schedule, mode=mode, ram_budget_bytes=ram))
        for mode, ram in (("blocking", None), ("dma", None), ("dma", 13))
    )
    assert blocking.makespan_s == 10.0
    # f0 leaves during f1, f1 during f2; f1 comes back during g2 and f0 during g1.
    assert (loose.makespan_s, loose.stall_s) == (6.0, 0.0)
    assert tight.peak_ram_bytes <= simulate(graph, costs, schedule).peak_ram_bytes
    assert tight.makespan_s > 6.0


@pytest.mark.parametrize("spare", [0, 4, 8, 100])
def test_page_ins_ahead_of_their_use_share_what_ram_is_left(spare):
    """Where the bus is the bottleneck many page-ins want to begin early; the budget limits them."""
    teeth = 8
    graph = comb_graph(teeth)
    n, paged = 2 * teeth, range(teeth - 1)
    costs = bus_costs(graph, [1.0] * n, 1.5, 0.1)
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


def test_a_plan_is_the_same_every_time_and_made_without_time_to_improve_it():
    """It is valid, within the budget, and never quicker than the one with all the time it takes."""
    for case in plan_cases(20):
        graph, costs, schedule, budget = case
        assert case.plan("dma").program == case.plan("dma").program
        given = {"mode": "dma", "ram_budget_bytes": budget}
        checks = [
            check_plan(graph, costs, make_plan(graph, costs, schedule, time_limit=limit, **given))
            for limit in (0.0, None)
        ]
        assert [check.violations for check in checks] == [(), ()]
        assert checks[0].makespan_s >= checks[1].makespan_s * (1 - 1e-9)
        assert checks[0].energy_j == pytest.approx(checks[1].energy_j, rel=1e-9)


def test_a_plan_says_what_it_is_for():
    """Mode, budget, graph and device are in the plan; what a schedule breaks is refused.

    Storage has two modes.
    """
    graph, costs, schedule = paged_comb(1.0)
    plan = make_plan(graph, costs, schedule, mode="dma", ram_budget_bytes=13)
    assert (plan.mode, plan.ram_budget_bytes, plan.device) == ("dma", 13, "bench")
    assert plan.identity.sha256 == graph.sha256
    graph, costs = skip_graph(), random_costs(seeded(0), skip_graph())
    with pytest.raises(PlanError, match="needs 'a' in RAM"):
        make_plan(graph, costs, replace(checkpoint_all(graph), S_RAM=()), mode="dma")
    with pytest.raises(ValueError, match="half"):
        make_plan(graph, costs, checkpoint_all(graph), mode="half")
