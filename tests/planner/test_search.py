"""The search against all programs with the same events."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

from kit.instances import random_costs, random_graph, random_schedule, seeded
from kit.least_makespan import least_makespan_s
from kit.plans import random_state_case
from kit.worked import even_costs, skip_graph
from poetmodel.plan import Instruction, Op
from poetmodel.planner import make_plan
from poetmodel.planner.search import best_transfers
from poetmodel.planner.sequence import moves_of, start_at_use, unread_page_ins
from poetmodel.planner.timing import Timing
from poetmodel.planner.windows import TransferWindows
from poetmodel.schedule.homes import Homes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.device import CostTable
    from poetmodel.plan import Program

SMALL = 30
FULL = 500
TRANSFERS = range(4, 11)


class Case(NamedTuple):
    """Moves of a schedule, and a budget that they keep."""

    homes: Homes
    table: CostTable
    moves: Program
    budget: int


def cases(count: int) -> Iterator[Case]:
    """Yield schedules of five or six nodes with four to ten transfers; half of the budgets tight.

    Tight is the least that page-ins at their use come to.
    """
    number = found = 0
    while found < count:
        number += 1
        rng = seeded(f"exhaustive/{number}")
        graph = random_graph(rng, (5, 6))
        costs = random_costs(rng, graph, mode="dma", idle=False)
        homes = Homes.of(graph)
        moves = moves_of(homes, random_schedule(rng, graph, thrift=0.6))
        transfers = sum(op != Op.COMPUTE for op, _ in moves)
        if transfers not in TRANSFERS or unread_page_ins(homes, moves):
            continue
        table = costs.table(graph)
        tight = Timing(homes, table, start_at_use(homes, moves), 0).peak_ram_bytes
        found += 1
        yield Case(homes, table, moves, tight + rng.choice((0, 0, 0, 1, 3, 6)))


def state_cases(count: int) -> Iterator[Case]:
    """Yield the same for training steps with state on storage and operators in place."""
    number = found = 0
    while found < count:
        number += 1
        rng = seeded(f"exhaustive/state/{number}")
        graph, costs, schedule = random_state_case(rng, (5, 7))
        homes = make_plan(graph, costs, schedule, mode="blocking").homes(graph)
        moves = moves_of(homes, schedule)
        transfers = sum(op != Op.COMPUTE for op, _ in moves)
        if not homes.first_reads or transfers not in TRANSFERS or unread_page_ins(homes, moves):
            continue
        table = costs.table(graph)
        tight = Timing(homes, table, start_at_use(homes, moves), 0).peak_ram_bytes
        found += 1
        yield Case(homes, table, moves, tight + rng.choice((0, 0, 0, 1, 3, 6)))


def distances(cases: Iterator[Case]) -> list[float]:
    """Return how far the search is from the optimum, relatively, for each case."""
    found = []
    for homes, table, moves, budget in cases:
        windows = TransferWindows(homes, table, moves, budget)
        steps = windows.steps(best_transfers(windows).transfers)
        timing = Timing(homes, table, steps, budget)
        at_use = Timing(homes, table, start_at_use(homes, moves), budget)
        least = least_makespan_s(homes, table, moves, budget)
        assert least is not None
        assert timing.peak_ram_bytes <= budget
        assert least <= timing.makespan_s <= at_use.makespan_s
        found.append(timing.makespan_s / least - 1 if least else 0.0)
    return found


def test_the_search_is_nearly_always_optimal() -> None:
    """More than 95 % of small cases are planned with the least makespan there is."""
    for found in (cases(SMALL), state_cases(SMALL // 3)):
        far = distances(found)
        assert sum(distance == 0 for distance in far) > 0.95 * len(far)


@pytest.mark.seeds
def test_the_search_is_nearly_always_optimal_on_many() -> None:
    """So it is over 500 cases, and the worst is within a tenth of the optimum."""
    for found in (cases(FULL), state_cases(FULL // 2)):
        far = distances(found)
        assert sum(distance == 0 for distance in far) > 0.95 * len(far)
        assert max(far) < 0.1


def test_the_least_makespan_is_found_by_hand_too() -> None:
    """A transfer of 1 s each way is hidden, or stalls where RAM is for one tensor at a time.

    Computations take 1, 2, 3, 4 s. `a` leaves beside `b`. In 15 B it comes back beside `c`, which
    needs 6 + 5 of them: 10 s. In 14 B it cannot, and `d` waits for it: 11 s. `c` needs 11 B.
    """
    graph = skip_graph()
    table = even_costs(graph).table(graph)
    steps = ((Op.COMPUTE, 0), (Op.PAGE_OUT, 0), (Op.COMPUTE, 1), (Op.COMPUTE, 2), (Op.PAGE_IN, 0))
    moves = tuple(Instruction(*step) for step in (*steps, (Op.COMPUTE, 3)))
    homes = Homes.of(graph)
    assert least_makespan_s(homes, table, moves, 15) == 10.0
    assert least_makespan_s(homes, table, moves, 14) == 11.0
    assert least_makespan_s(homes, table, moves, 11) is None


def test_every_page_in_must_have_a_reader() -> None:
    """Events that the search keeps in place are refused."""
    graph = skip_graph()
    moves = tuple(
        Instruction(*step) for step in ((Op.COMPUTE, 0), (Op.PAGE_OUT, 0), (Op.PAGE_IN, 0))
    )
    with pytest.raises(ValueError, match="reader"):
        least_makespan_s(Homes.of(graph), even_costs(graph).table(graph), moves, 100)
