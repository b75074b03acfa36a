"""Simple rules, their order of moves and their clocks, on a graph that is worked out by hand."""

from __future__ import annotations

from kit.planner_rules import lower_bound_s, prefetch_early
from kit.worked import even_costs, skip_graph
from poetmodel.plan import Instruction, Op
from poetmodel.planner.sequence import moves_of, start_at_use, unread_page_ins
from poetmodel.planner.timing import Timing, just_in_time
from poetmodel.planner.windows import PageIn, PageOut, TransferWindows
from poetmodel.schedule import Schedule
from poetmodel.schedule.compilation import compiled
from poetmodel.schedule.homes import Homes

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

A_OUT, A_IN = Instruction(Op.PAGE_OUT, 0), Instruction(Op.PAGE_IN, 0)
COMPUTE = tuple(Instruction(Op.COMPUTE, k) for k in range(4))
MOVES = (COMPUTE[0], A_OUT, COMPUTE[1], COMPUTE[2], A_IN, COMPUTE[3])
EARLY = (COMPUTE[0], A_OUT, COMPUTE[1], A_IN, COMPUTE[2], COMPUTE[3])


def test_the_program_of_a_schedule_frees_after_last_uses() -> None:
    """Algorithm 2 step by step: tensors go where no later step of the schedule needs them."""
    free = [Instruction(Op.FREE, i) for i in range(4)]
    assert compiled(HOMES, SCHEDULE).program == (
        COMPUTE[0],
        A_OUT,
        COMPUTE[1],
        free[0],
        Instruction(Op.PAGE_OUT, 1),
        COMPUTE[2],
        free[1],
        A_IN,
        COMPUTE[3],
        free[0],
        free[2],
        free[3],
    )


def test_moves_are_without_idle_page_outs() -> None:
    """A page-out that no page-in reads is left out."""
    assert moves_of(HOMES, SCHEDULE) == MOVES


def test_page_ins_at_their_use_stall() -> None:
    """The device waits 1 s for `a`: 1 + 2 + 3 + 1 + 4."""
    timing = Timing(HOMES, TABLE, start_at_use(HOMES, EARLY), 15)
    assert start_at_use(HOMES, EARLY) == MOVES
    assert (timing.makespan_s, timing.stall_s, timing.peak_ram_bytes) == (11.0, 1.0, 12)


def test_page_ins_as_early_as_can_be_take_more_ram() -> None:
    """`a` comes back as soon as its page-out is done: no stall, 4 + 6 + 5 bytes."""
    steps = prefetch_early(HOMES, TABLE, MOVES)
    timing = Timing(HOMES, TABLE, steps, 15)
    assert steps == EARLY
    assert (timing.makespan_s, timing.stall_s, timing.peak_ram_bytes) == (10.0, 0.0, 15)


def test_waits_for_page_outs_come_where_ram_is_short() -> None:
    """A page-out of 5 s ends after `b`, at 6 s; the core waits for it only without room for `c`."""
    costs = even_costs(GRAPH, page_out=(5.0, 1.0))
    table = costs.table(GRAPH)
    tight, loose = (Timing(HOMES, table, MOVES[:4], budget) for budget in (14, 15))
    assert (tight.stall_s, tight.makespan_s, tight.peak_ram_bytes) == (3.0, 9.0, 11)
    assert (loose.stall_s, loose.makespan_s, loose.peak_ram_bytes) == (0.0, 6.0, 15)


def test_page_ins_are_moved_to_the_last_place_without_a_stall() -> None:
    """A page-in of 1 s begins before `c`, which hides it; one that takes no time, after `c`."""
    timing = Timing(HOMES, TABLE, EARLY, 99)
    assert just_in_time(timing) == EARLY
    quick = even_costs(GRAPH, page_in=(0.0, 1.0)).table(GRAPH)
    assert just_in_time(Timing(HOMES, quick, EARLY, 99)) == MOVES


def test_the_windows_of_transfers() -> None:
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


def test_the_bound_is_the_busier_of_core_and_bus() -> None:
    """Computations take 10 s; transfers of 1 s take 2, of 7 s 14."""
    slow = even_costs(GRAPH, page_in=(7.0, 1.0), page_out=(7.0, 1.0)).table(GRAPH)
    assert lower_bound_s(TABLE, MOVES) == 10.0
    assert lower_bound_s(slow, MOVES) == 14.0


def test_page_ins_that_nothing_reads_are_found() -> None:
    """A page-in before the tensor is made again, or at the end, has no reader."""
    moves = (*MOVES, A_IN)
    assert unread_page_ins(HOMES, moves) == {6}
    assert unread_page_ins(HOMES, (*MOVES[:4], A_IN, COMPUTE[0], COMPUTE[3])) == {4}
