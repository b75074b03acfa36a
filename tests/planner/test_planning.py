"""Plans have the values of the schedule, and transfers are neither too late nor too early."""

from dataclasses import replace

import pytest

from kit.instances import make_rng, random_costs, random_graph, random_schedule
from kit.least_makespan import find_min_makespan_s
from kit.plans import bus_costs, lower_bound_s, parse_plan, plan_cases, random_state_case
from kit.worked import comb_graph, even_costs, make_state_node, make_update_node, skip_graph
from poetmodel.device import Costs
from poetmodel.errors import PlanError
from poetmodel.graph import Graph, operation
from poetmodel.plan import Instruction, Op, check_plan
from poetmodel.planner import make_plan
from poetmodel.planner.search import choose_transfers
from poetmodel.planner.sequence import (
    extract_actions,
    find_unread_page_ins,
    move_page_ins_to_readers,
)
from poetmodel.planner.timing import Timing, delay_page_ins
from poetmodel.planner.windows import PageIn, PageOut, TransferWindows
from poetmodel.schedule import Schedule, checkpoint_all, simulate, storage_entries
from poetmodel.schedule.compilation import compile_schedule
from poetmodel.schedule.homes import Homes

SAME = [
    *("energy_j", "makespan_s", "compute_s", "transfer_s"),
    *("aux_used_bytes", "written_bytes", "read_bytes"),
]
"""The figures that a blocking plan shares with its schedule, beside the peak."""


def thrifty(graph, schedule):
    """Return a schedule that frees all tensors that the next stage does not use."""
    kept = set(schedule.S_RAM)
    for t, i in sorted(kept, reverse=True):
        used = any((t, k) in schedule.R for k in graph.users_of[i])
        if not used and (t + 1, i) not in kept and (t, i) not in schedule.M_out:
            kept.discard((t, i))
    return replace(schedule, S_RAM=tuple(kept))


@pytest.mark.parametrize("with_state", [False, True])
def test_blocking_plans_have_the_figures_of_the_schedule(*, with_state):
    """Times, energy and bytes are equal; the peak, too, unless tensors are kept for no use."""
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
            table, moves = (
                case.costs.table(case.graph),
                extract_actions(homes, case.schedule),
            )
            at_use = Timing(homes, table, move_page_ins_to_readers(homes, moves), case.budget)
            assert lower_bound_s(table, moves) <= check.makespan_s <= at_use.makespan_s
            assert at_use.makespan_s <= blocking.makespan_s
            better += check.makespan_s < at_use.makespan_s
    assert quicker > (45 if with_state else 0)
    assert better > 20 or with_state


def test_dma_plans_do_what_the_schedule_does_but_for_idle_page_outs():
    """Computations keep their order and page-ins their number; all page-outs have page-ins.

    A DMA plan saves the energy of the omitted page-outs.
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
        homes = Homes.from_resident(case.graph)
        if find_unread_page_ins(homes, extract_actions(homes, case.schedule)):
            continue
        plan = case.plan("dma")
        check = check_plan(case.graph, case.costs, plan)
        program = plan.program
        for place, step in enumerate(program):
            if step.op != Op.PAGE_IN:
                continue
            wait = program.index(Instruction(Op.WAIT, step.index), place)
            if check.records[wait].end_s > check.records[wait].start_s:
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

    Stages: f0 f1 f2 g2 g1 g0. f0 and f1 are paged out after their computation, and in where g1
    and g0 read them.
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
    """If the bus is the bottleneck, many page-ins begin early; the budget limits them."""
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
    table, homes = costs.table(graph), Homes.from_resident(graph)
    moves = extract_actions(homes, schedule)
    budget = simulate(graph, costs, schedule).peak_ram_bytes + spare
    windows = TransferWindows(homes, table, moves, budget)
    found = Timing(
        homes, table, windows.insert_transfers(choose_transfers(windows).transfers), budget
    )
    at_use = Timing(homes, table, move_page_ins_to_readers(homes, moves), budget)
    assert found.peak_ram_bytes <= budget
    assert found.makespan_s < at_use.makespan_s or spare == 0


def test_a_plan_is_the_same_every_time_and_made_without_time_to_improve_it():
    """It is valid, within the budget, and never faster than the plan without a time limit."""
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
    """Mode, budget, graph and device are in the plan; invalid schedules are refused.

    Storage has two modes.
    """
    graph, costs, schedule = paged_comb(1.0)
    plan = make_plan(graph, costs, schedule, mode="dma", ram_budget_bytes=13)
    assert (plan.mode, plan.ram_budget_bytes, plan.device) == ("dma", 13, "bench")
    assert plan.identity.sha256 == graph.sha256
    graph, costs = skip_graph(), random_costs(make_rng(0), skip_graph())
    with pytest.raises(PlanError, match="needs 'a' in RAM"):
        make_plan(graph, costs, replace(checkpoint_all(graph), S_RAM=()), mode="dma")
    with pytest.raises(ValueError, match="half"):
        make_plan(graph, costs, checkpoint_all(graph), mode="half")


# -- state ---------------------------------------------------------------------------------------
def test_plans_say_where_state_is():
    """Homes are those of the schedule; version 1 graphs have none."""
    for case in plan_cases(20, with_state=True):
        plan = case.plan("blocking")
        assert plan.resident == case.schedule.resident
        assert plan.memory_mapped == case.costs.device.is_memory_mapped
    graph = Graph(name="one", nodes=(operation("a", output_bytes=1),))
    costs = Costs.from_arrays(graph, compute_time_s=[1], compute_energy_j=[1])
    assert make_plan(graph, costs, checkpoint_all(graph), mode="dma").resident is None


def layers():
    """Return three layers y = f(y, w), w+ = u(w, y), each with all of its state on storage.

    f takes 4 s, u 1 s, a page-in 3 s and a page-out 2 s; w has 10 B and y 1 B. In a stage, its
    w is read, used and written back. Nodes: x, then w, f, u of each layer.
    """
    nodes = [operation("x", output_bytes=1)]
    for layer, before in enumerate(("x", "y0", "y1")):
        nodes += [
            make_state_node(f"w{layer}", 10),
            operation(f"y{layer}", output_bytes=1, inputs=(before, f"w{layer}")),
            make_update_node(f"u{layer}", f"y{layer}", **{f"w{layer}": 10}),
        ]
    graph = Graph(name="layers", nodes=tuple(nodes))
    times = [0.0, *([0.0, 4.0, 1.0] * 3)]
    costs = bus_costs(graph, times, 3.0, 2.0)
    # Tensors are numbered as their nodes.
    kept = []
    for first in (1, 4, 7):
        before = first - 2 if first > 1 else 0
        kept += [(first, before), (first + 1, before)]
        kept += [(first + 1, first), (first + 2, first), (first + 2, first + 1)]
        kept += [(first + 3, first + 1)] if first < 7 else []
    schedule = Schedule(
        R=tuple((t, t) for t in range(10)),
        S_RAM=tuple(kept),
        S_AUX=tuple((t, first) for first in (1, 4, 7) for t in (first + 1, first + 2)),
        M_out=((3, 3), (6, 6), (9, 9)),
    )
    return graph, costs, schedule


@pytest.mark.parametrize(
    ("budget", "makespan_s"),
    [
        # Room for one w: 3 layers of 3 + 4 + 1 + 2 s, one after the other.
        pytest.param(12, 30.0, id="one"),
        # Room for two: w1 is read beside f0, and w0 goes beside f1; w2 has to wait for that.
        pytest.param(22, 3 + 3 * 5 + 2 + 2.0, id="two"),
        # Room for all three: everything but the first read and the last write is hidden.
        pytest.param(32, 3 + 3 * 5 + 2.0, id="three"),
    ],
)
def test_state_is_read_ahead_and_written_back_behind(budget, makespan_s):
    """Each w is paged in during the layer before and out during the layer after, if RAM permits."""
    graph, costs, schedule = layers()
    simulation = simulate(graph, costs, schedule)
    assert (simulation.violations, simulation.peak_ram_bytes) == ((), 12)
    plan = make_plan(graph, costs, schedule, mode="dma", ram_budget_bytes=budget)
    check = check_plan(graph, costs, plan)
    assert check.violations == ()
    assert check.peak_ram_bytes <= budget
    assert check.makespan_s == pytest.approx(makespan_s)


def test_the_room_of_a_replacement_is_held_until_it_is_written_back():
    """Right after the update the RAM is that of w; it falls with the free, after the wait."""
    graph, costs, schedule = layers()
    plan = make_plan(graph, costs, schedule, mode="dma", ram_budget_bytes=22)
    check = check_plan(graph, costs, plan)
    program = plan.program
    update_place = program.index((Op.COMPUTE, 3))
    out, wait, free = (program.index((op, 3)) for op in (Op.PAGE_OUT, Op.WAIT, Op.FREE))
    assert update_place < out < wait < free
    assert program.index((Op.COMPUTE, 5), out) < wait  # y1 is computed meanwhile
    assert check.records[free].peak_bytes - check.records[free].ram_bytes == 10


def in_place_chain():
    """Return a, b in place of a, c = f(b), d = g(c, a) with a paged out; 10 B and 2 s each."""
    graph = Graph(
        name="chain",
        nodes=(
            operation("a", output_bytes=10),
            operation("b", output_bytes=10, inputs=("a",), in_place={"b": "a"}),
            operation("c", output_bytes=1, inputs=("b",)),
            operation("d", output_bytes=1, inputs=("c", "a")),
        ),
    )
    costs = bus_costs(graph, [2.0] * 4, 1.0, 3.0)
    schedule = Schedule(
        R=tuple((t, t) for t in range(4)),
        S_RAM=((1, 0), (2, 1), (3, 2)),
        S_AUX=((1, 0), (2, 0), (3, 0)),
        M_in=((3, 0),),
        M_out=((0, 0),),
    )
    return graph, costs, schedule


def test_an_input_that_is_paged_out_is_written_over_when_that_is_done():
    """In 12 B the core waits 3 s for the page-out before b; in 21 B b has memory of its own."""
    graph, costs, schedule = in_place_chain()
    assert simulate(graph, costs, schedule).peak_ram_bytes == 12
    tight, loose = (
        check_plan(graph, costs, make_plan(graph, costs, schedule, mode="dma", ram_budget_bytes=b))
        for b in (12, 21)
    )
    assert (tight.violations, tight.peak_ram_bytes, tight.makespan_s) == ((), 12, 12.0)
    assert (loose.violations, loose.makespan_s) == ((), 9.0)
    assert loose.peak_ram_bytes > 12


# -- the search ----------------------------------------------------------------------------------
TRANSFERS = range(4, 11)


def cases(count, *, with_state, number=0):
    """Yield schedules of five to seven nodes with four to ten transfers; half of the budgets tight.

    Tight is the minimum for page-ins at their use. With state, some of it is on storage.
    """
    found = 0
    while found < count:
        number += 1
        rng = make_rng(f"exhaustive/{'state/' if with_state else ''}{number}")
        if with_state:
            graph, costs, schedule = random_state_case(rng, (5, 7))
            homes = make_plan(graph, costs, schedule, mode="blocking").homes(graph)
        else:
            graph = random_graph(rng, (5, 6))
            costs = random_costs(rng, graph, mode="dma", idle=False)
            homes, schedule = Homes.from_resident(graph), random_schedule(rng, graph, thrift=0.6)
        moves = extract_actions(homes, schedule)
        transfers = sum(op != Op.COMPUTE for op, _ in moves)
        if transfers not in TRANSFERS or find_unread_page_ins(homes, moves):
            continue
        if with_state and not homes.first_reads:
            continue
        table = costs.table(graph)
        tight = Timing(homes, table, move_page_ins_to_readers(homes, moves), 0).peak_ram_bytes
        found += 1
        yield homes, table, moves, tight + rng.choice((0, 0, 0, 1, 3, 6))


@pytest.mark.parametrize(
    ("count", "with_state", "first"),
    [
        (30, False, 0),
        (10, True, 0),
        *(pytest.param(30, False, 10**4 * k, marks=pytest.mark.seeds) for k in range(1, 17)),
        *(pytest.param(10, True, 10**4 * k, marks=pytest.mark.seeds) for k in range(1, 25)),
    ],
)
def test_the_search_is_nearly_always_optimal(count, first, *, with_state):
    """Of small cases all but one have the least makespan there is; that one is not far from it."""
    far = []
    for homes, table, moves, budget in cases(count, with_state=with_state, number=first):
        windows = TransferWindows(homes, table, moves, budget)
        steps = windows.insert_transfers(choose_transfers(windows).transfers)
        timing = Timing(homes, table, steps, budget)
        at_use = Timing(homes, table, move_page_ins_to_readers(homes, moves), budget)
        least = find_min_makespan_s(homes, table, moves, budget)
        assert timing.peak_ram_bytes <= budget
        assert least <= timing.makespan_s <= at_use.makespan_s
        far.append(timing.makespan_s / least - 1 if least else 0.0)
    assert sum(distance > 0 for distance in far) <= 1
    assert max(far) < 0.1


def test_the_least_makespan_is_found_by_hand_too():
    """A transfer of 1 s each way is hidden, or stalls if RAM is for one tensor at a time.

    Computations take 1, 2, 3, 4 s. `a` is paged out beside `b`. In 15 B it is paged in beside
    `c`, which needs 6 + 5 of them: 10 s. In 14 B it cannot, and `d` waits for it: 11 s. `c`
    needs 11 B.
    """
    graph = skip_graph()
    table = even_costs(graph).table(graph)
    moves = parse_plan("c0 o0 c1 c2 i0 c3").program
    homes = Homes.from_resident(graph)
    assert find_min_makespan_s(homes, table, moves, 15) == 10.0
    assert find_min_makespan_s(homes, table, moves, 14) == 11.0
    assert find_min_makespan_s(homes, table, moves, 11) is None


def test_every_page_in_must_have_a_reader():
    """Events that the search keeps in place are refused."""
    graph = skip_graph()
    with pytest.raises(ValueError, match="reader"):
        find_min_makespan_s(
            Homes.from_resident(graph),
            even_costs(graph).table(graph),
            parse_plan("c0 o0 i0").program,
            100,
        )


# -- simple rules and their clocks -----------------------------------------------------------------
GRAPH = skip_graph()
HOMES = Homes.from_resident(GRAPH)
TABLE = even_costs(GRAPH).table(GRAPH)
"""Computations of 1, 2, 3, 4 s, transfers of 1 s."""

SCHEDULE = Schedule(
    R=((0, 0), (1, 1), (2, 2), (3, 3)),
    S_RAM=((1, 0), (2, 1), (3, 2)),
    S_AUX=((1, 0), (2, 0), (3, 0)),
    M_in=((3, 0),),
    M_out=((0, 0), (1, 1)),
)
"""`a` is paged out and in; nothing reads the page-out of `b`."""

MOVES = parse_plan("c0 o0 c1 c2 i0 c3").program
EARLY = parse_plan("c0 o0 c1 i0 c2 c3").program


def test_the_program_of_a_schedule_frees_after_last_uses():
    """Algorithm 2 step by step: tensors go where no later step of the schedule needs them.

    A page-out that no page-in reads is left out of its moves.
    """
    whole = parse_plan("c0 o0 c1 f0 o1 c2 f1 i0 c3 f0 f2 f3", "blocking")
    assert compile_schedule(HOMES, SCHEDULE).program == whole.program
    assert extract_actions(HOMES, SCHEDULE) == MOVES


def test_page_ins_at_their_use_stall_and_early_ones_take_more_ram():
    """The device waits 1 s for `a`: 1 + 2 + 3 + 1 + 4.

    If the page-in follows the page-out directly, there is no stall, for 4 + 6 + 5 bytes.
    """
    assert move_page_ins_to_readers(HOMES, EARLY) == MOVES
    for steps, figures in ((MOVES, (11.0, 1.0, 12)), (EARLY, (10.0, 0.0, 15))):
        timing = Timing(HOMES, TABLE, steps, 15)
        assert (timing.makespan_s, timing.stall_s, timing.peak_ram_bytes) == figures


def test_waits_for_page_outs_come_where_ram_is_short():
    """A page-out of 5 s ends after `b`, at 6 s; the core waits for it only without room for `c`."""
    costs = even_costs(GRAPH, page_out=(5.0, 1.0))
    table = costs.table(GRAPH)
    tight, loose = (Timing(HOMES, table, MOVES[:4], budget) for budget in (14, 15))
    assert (tight.stall_s, tight.makespan_s, tight.peak_ram_bytes) == (3.0, 9.0, 11)
    assert (loose.stall_s, loose.makespan_s, loose.peak_ram_bytes) == (0.0, 6.0, 15)


def test_page_ins_by_hand():
    """A page-in of 1 s begins before `c`, which hides it; one that takes 0 s, after `c`.

    Computations take 10 s; transfers of 1 s take 2, of 7 s 14. A page-in before the tensor is
    recomputed, or at the end, has no reader. While `a` is paged in, `b` and `c` are in RAM: 4 +
    6 + 5 bytes, however soon `b` is freed.
    """
    timing = Timing(HOMES, TABLE, EARLY, 99)
    assert delay_page_ins(timing) == EARLY
    quick = even_costs(GRAPH, page_in=(0.0, 1.0)).table(GRAPH)
    assert delay_page_ins(Timing(HOMES, quick, EARLY, 99)) == MOVES
    slow = even_costs(GRAPH, page_in=(7.0, 1.0), page_out=(7.0, 1.0)).table(GRAPH)
    assert lower_bound_s(TABLE, MOVES) == 10.0
    assert lower_bound_s(slow, MOVES) == 14.0
    assert find_unread_page_ins(HOMES, parse_plan("c0 o0 c1 c2 i0 c3 i0").program) == {6}
    assert find_unread_page_ins(HOMES, parse_plan("c0 o0 c1 c2 i0 c0 c3").program) == {4}
    steps = parse_plan("c0 o0 c1 c2 i0 o1 c3").program
    assert Timing(HOMES, TABLE, steps, 15).peak_ram_bytes == 15


def test_the_windows_of_transfers():
    """`a` may be paged out from the first gap on, and in before `c` if 4 + 6 + 5 bytes fit."""
    for budget, first, due in ((15, 2, 3), (14, 3, 2)):
        windows = TransferWindows(HOMES, TABLE, MOVES, budget)
        assert windows.min_ram_bytes == [4, 10, 11, 12]
        assert windows.remaining_s == [10.0, 9.0, 7.0, 4.0, 0.0]
        assert windows.page_ins == [
            PageIn(
                tensor=0,
                bytes=4,
                time_s=1.0,
                first_interval=first,
                last_interval=3,
                page_out_index=0,
            )
        ]
        assert windows.page_outs == [
            PageOut(
                tensor=0,
                bytes=4,
                time_s=1.0,
                first_interval=1,
                last_interval=4,
                first_dead_interval=2,
                due_interval=due,
            )
        ]
