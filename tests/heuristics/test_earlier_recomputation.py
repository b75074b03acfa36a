"""What does not fit into its stage, recomputed in an earlier one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kit.instances import random_instances, seeded
from kit.rotation import Part, parts
from kit.worked import even_costs
from poetmodel.graph import Graph, operation
from poetmodel.heuristics.earlier_recomputation import EarlierRecomputation
from poetmodel.heuristics.greedy import construct
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.heuristics.restorations import RECOMPUTE, Restoration
from poetmodel.problem import Problem
from poetmodel.solver.outcome import verify_schedule

if TYPE_CHECKING:
    import pytest


def beside_problem() -> Problem:
    """State a problem in which `a` must be made again, but not in the stage that reads it.

    ====  ====== ===== ========= =====================================
    node  reads  bytes workspace RAM with `a` made again
    ====  ====== ===== ========= =====================================
    p            3               3
    a     p      4               3 + 4 = 7
    m     a      1               3 + 4 + 1 = 8
    h     m      1     4         3 + 1 + 1 + 4 = 9, and 10 with `a`
    g     h      3               3 + 1 + 4 = 8 for `a`, 4 + 1 + 3 = 8
    r     a, g   2               3 + 4 + 3 = 10 for `a`, 4 + 3 + 2 = 9
    ====  ====== ===== ========= =====================================
    """
    graph = Graph(
        name="beside",
        nodes=(
            operation("p", output_bytes=3),
            operation("a", output_bytes=4, inputs=("p",)),
            operation("m", output_bytes=1, inputs=("a",)),
            operation("h", output_bytes=1, inputs=("m",), workspace_bytes=4),
            operation("g", output_bytes=3, inputs=("h",)),
            operation("r", output_bytes=2, inputs=("a", "g")),
        ),
    )
    return Problem(graph, even_costs(graph, page_in=None, page_out=None), ram=9)


def test_greedy_recomputes_where_there_is_room() -> None:
    """In the stage of `g`: in that of `r`, which reads `a`, its input would be one too many."""
    schedule = construct(beside_problem())
    assert schedule is not None
    assert [(t, k) for t, k in schedule.R if k < t] == [(4, 1)]


def test_nothing_moves_farther_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero stages leave it where it is, one is enough, and a stage that fits is left alone."""
    problem = beside_problem()
    late, early = Restoration(5, 1, RECOMPUTE), Restoration(4, 1, RECOMPUTE)
    for stages, moved in ((0, False), (1, True)):
        monkeypatch.setattr("poetmodel.heuristics.earlier_recomputation.STAGES", stages)
        partial = PartialSchedule(problem.graph, [late], working=problem.working_graph)
        earlier = EarlierRecomputation(
            partial=partial,
            limit_bytes=problem.usable_ram_bytes,
            has_room_for=lambda _: True,
        )
        assert not earlier.relieve(4)
        assert earlier.relieve(5) is moved
        assert partial.restorations() == [early if moved else late]


@parts(3)
def test_a_move_lowers_the_excess_and_adds_nothing(part: Part) -> None:
    """On 300 random problems with random restorations: as many as before or fewer, none new."""
    moves = 0
    for number, problem in part.of(enumerate(random_instances(300, (6, 14), seed=97, paging=True))):
        rng, n = seeded(f"earlier/{number}"), len(problem.graph.nodes)
        partial = PartialSchedule(problem.graph, working=problem.working_graph)
        for t in range(1, n):
            k = rng.randrange(t)
            if problem.may_recompute(k):
                partial.add(Restoration(t, k, RECOMPUTE))
        limit = problem.usable_ram_bytes
        earlier = EarlierRecomputation(
            partial=partial,
            limit_bytes=limit,
            has_room_for=lambda _: True,
        )
        for t in range(n):
            excess = (partial.peaks() - limit).clip(min=0).sum()
            before = {(r.item, r.kind) for r in partial.restorations()}
            count = len(partial.restorations())
            if not earlier.relieve(t):
                assert len(partial.restorations()) == count
                continue
            moves += 1
            assert (partial.peaks() - limit).clip(min=0).sum() < excess
            after = partial.restorations()
            assert len(after) <= count
            assert {(r.item, r.kind) for r in after} <= before
            found = verify_schedule(problem, partial.schedule()).violations
            limits = ("peak RAM", "time", "energy", "storage")
            assert all(one.startswith(limits) for one in found), found
    assert moves > part.share(20)
