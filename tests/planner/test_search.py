"""The search against all programs with the same events."""

import pytest

from kit.instances import random_costs, random_graph, random_schedule, seeded
from kit.least_makespan import least_makespan_s
from kit.plans import lower_bound_s, plan, random_state_case
from kit.worked import even_costs, skip_graph
from poetmodel.plan import Op
from poetmodel.planner import make_plan
from poetmodel.planner.search import best_transfers
from poetmodel.planner.sequence import moves_of, start_at_use, unread_page_ins
from poetmodel.planner.timing import Timing, just_in_time
from poetmodel.planner.windows import PageIn, PageOut, TransferWindows
from poetmodel.schedule import Schedule
from poetmodel.schedule.compilation import compiled
from poetmodel.schedule.homes import Homes

TRANSFERS = range(4, 11)


def cases(count, *, with_state, number=0):
    """Yield schedules of five to seven nodes with four to ten transfers; half of the budgets tight.

    Tight is the least that page-ins at their use come to. With state, some of it is on storage.
    """
    found = 0
    while found < count:
        number += 1
        rng = seeded(f"exhaustive/{'state/' if with_state else ''}{number}")
        if with_state:
            graph, costs, schedule = random_state_case(rng, (5, 7))
            homes = make_plan(graph, costs, schedule, mode="blocking").homes(graph)
        else:
            graph = random_graph(rng, (5, 6))
            costs = random_costs(rng, graph, mode="dma", idle=False)
            homes, schedule = Homes.of(graph), random_schedule(rng, graph, thrift=0.6)
        moves = moves_of(homes, schedule)
        transfers = sum(op != Op.COMPUTE for op, _ in moves)
        if transfers not in TRANSFERS or unread_page_ins(homes, moves):
            continue
        if with_state and not homes.first_reads:
            continue
        table = costs.table(graph)
        tight = Timing(homes, table, start_at_use(homes, moves), 0).peak_ram_bytes
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
        steps = windows.steps(best_transfers(windows).transfers)
        timing = Timing(homes, table, steps, budget)
        at_use = Timing(homes, table, start_at_use(homes, moves), budget)
        least = least_makespan_s(homes, table, moves, budget)
        assert timing.peak_ram_bytes <= budget
        assert least <= timing.makespan_s <= at_use.makespan_s
        far.append(timing.makespan_s / least - 1 if least else 0.0)
    assert sum(distance > 0 for distance in far) <= 1
    assert max(far) < 0.1


def test_the_least_makespan_is_found_by_hand_too():
    """A transfer of 1 s each way is hidden, or stalls where RAM is for one tensor at a time.

    Computations take 1, 2, 3, 4 s. `a` leaves beside `b`. In 15 B it comes back beside `c`, which
    needs 6 + 5 of them: 10 s. In 14 B it cannot, and `d` waits for it: 11 s. `c` needs 11 B.
    """
    graph = skip_graph()
    table = even_costs(graph).table(graph)
    moves = plan("c0 o0 c1 c2 i0 c3").program
    homes = Homes.of(graph)
    assert least_makespan_s(homes, table, moves, 15) == 10.0
    assert least_makespan_s(homes, table, moves, 14) == 11.0
    assert least_makespan_s(homes, table, moves, 11) is None


def test_every_page_in_must_have_a_reader():
    """Events that the search keeps in place are refused."""
    graph = skip_graph()
    with pytest.raises(ValueError, match="reader"):
        least_makespan_s(
            Homes.of(graph), even_costs(graph).table(graph), plan("c0 o0 i0").program, 100
        )


# -- simple rules and their clocks -----------------------------------------------------------------
GRAPH = skip_graph()
HOMES = Homes.of(GRAPH)
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

MOVES = plan("c0 o0 c1 c2 i0 c3").program
EARLY = plan("c0 o0 c1 i0 c2 c3").program


def test_the_program_of_a_schedule_frees_after_last_uses():
    """Algorithm 2 step by step: tensors go where no later step of the schedule needs them.

    A page-out that no page-in reads is left out of its moves.
    """
    whole = plan("c0 o0 c1 f0 o1 c2 f1 i0 c3 f0 f2 f3", "blocking")
    assert compiled(HOMES, SCHEDULE).program == whole.program
    assert moves_of(HOMES, SCHEDULE) == MOVES


def test_page_ins_at_their_use_stall_and_early_ones_take_more_ram():
    """The device waits 1 s for `a`: 1 + 2 + 3 + 1 + 4.

    Where it comes back as soon as its page-out is done, nothing stalls, for 4 + 6 + 5 bytes.
    """
    assert start_at_use(HOMES, EARLY) == MOVES
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
    """A page-in of 1 s begins before `c`, which hides it; one that takes no time, after `c`.

    Computations take 10 s; transfers of 1 s take 2, of 7 s 14. A page-in before the tensor is made
    again, or at the end, has no reader. While `a` comes back, `b` and `c` are there: 4 + 6 + 5
    bytes, however soon `b` is gone.
    """
    timing = Timing(HOMES, TABLE, EARLY, 99)
    assert just_in_time(timing) == EARLY
    quick = even_costs(GRAPH, page_in=(0.0, 1.0)).table(GRAPH)
    assert just_in_time(Timing(HOMES, quick, EARLY, 99)) == MOVES
    slow = even_costs(GRAPH, page_in=(7.0, 1.0), page_out=(7.0, 1.0)).table(GRAPH)
    assert lower_bound_s(TABLE, MOVES) == 10.0
    assert lower_bound_s(slow, MOVES) == 14.0
    assert unread_page_ins(HOMES, plan("c0 o0 c1 c2 i0 c3 i0").program) == {6}
    assert unread_page_ins(HOMES, plan("c0 o0 c1 c2 i0 c0 c3").program) == {4}
    steps = plan("c0 o0 c1 c2 i0 o1 c3").program
    assert Timing(HOMES, TABLE, steps, 15).peak_ram_bytes == 15


def test_the_windows_of_transfers():
    """`a` may leave from the first gap on, and come back before `c` if 4 + 6 + 5 bytes fit."""
    for budget, first, due in ((15, 2, 3), (14, 3, 2)):
        windows = TransferWindows(HOMES, TABLE, MOVES, budget)
        assert windows.need_bytes == [4, 10, 11, 12]
        assert windows.rest_s == [10.0, 9.0, 7.0, 4.0, 0.0]
        assert windows.page_ins == [
            PageIn(tensor=0, bytes=4, time_s=1.0, first=first, last=3, source=0)
        ]
        assert windows.page_outs == [
            PageOut(tensor=0, bytes=4, time_s=1.0, first=1, last=4, unused=2, due=due)
        ]
