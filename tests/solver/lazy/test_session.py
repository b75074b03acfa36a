"""What the parts of a lazy solve share: what is offered, and which cuts go along."""

from __future__ import annotations

import pytest

from kit.instances import scarce_problem
from kit.worked import even_costs, skip_problem
from poetmodel.graph import Graph, operation
from poetmodel.model.aggregated import Grouping
from poetmodel.problem import Problem
from poetmodel.schedule import Schedule
from poetmodel.solver.lazy.cuts import Cut
from poetmodel.solver.lazy.cuts.recompute_memory import (
    RecomputeMemoryOrigin,
    RecomputeMemorySeparator,
)
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.request import Request


def session_of(problem: Problem) -> Session:
    """Begin a solve."""
    return Session(problem, Request(gap=0.0, time_limit_s=300.0), None)


def test_what_serves_nothing_is_dropped_from_an_offer() -> None:
    """A page-in and a page-out of `b` that nobody needs cost nothing in the end."""
    wasteful = Schedule(
        R=((0, 0), (1, 1), (2, 2), (3, 0), (3, 3)),
        S_RAM=((1, 0), (2, 1), (3, 2)),
        S_AUX=((2, 1), (3, 1)),
        M_in=((3, 1),),
        M_out=((1, 1),),
    )
    session = session_of(skip_problem())
    assert session.offer(wasteful)
    assert session.bounds.incumbent is not None
    assert session.bounds.incumbent.value == pytest.approx(1.0)
    assert session.bounds.incumbent.schedule.M_in == ()


def test_cuts_go_along_into_finer_groupings() -> None:
    """Each is stated again in the columns of the new relaxation."""
    count = 0
    for number in range(10):
        problem = scarce_problem(f"along/{number}", (9, 12), minimize="energy")
        session = session_of(problem)
        n = len(problem.graph.nodes)
        coarse = session.build(Grouping(n, frozenset(range(1, n, 2))))
        point = [0.3] * coarse.form.n_columns
        coarse.cuts = coarse.separators["interval"].separate(point, 1e-3)
        finer = session.build(coarse.grouping.add([t for t in range(n) if t % 3 == 0]), coarse)
        assert len(finer.cuts) <= len(coarse.cuts)
        origins = {cut.origin for cut in coarse.cuts}
        assert {cut.origin for cut in finer.cuts} <= origins
        count += len(finer.cuts)
    assert count > 10


def crowded_session() -> Session:
    """Begin a solve in which to make `k` again takes 3 + 3 beside the 5 of `a`, of 10.

    The row of `y`, stage 2, is enforced: not both of `k` and `a` stay through it.
    """
    graph = Graph(
        name="crowded",
        nodes=(
            operation("k", output_bytes=3, workspace_bytes=3),
            operation("a", output_bytes=5),
            operation("y", output_bytes=0, workspace_bytes=3, recomputable=False),
            operation("x", output_bytes=0, inputs=("k",), recomputable=False),
            operation("m", output_bytes=0, recomputable=False),
            operation("x2", output_bytes=0, inputs=("k",), recomputable=False),
            operation("z", output_bytes=0, inputs=("a",), recomputable=False),
        ),
    )
    costs = even_costs(graph, page_in=None, page_out=None)
    session = session_of(Problem(graph, costs, ram=10))
    session.restoring = True
    return session


def test_recompute_memory_cuts_go_along_once_each_for_every_group() -> None:
    """A group that is parted has the cut in both; those that last stay apart from the others."""
    session = crowded_session()
    coarse = session.build(Grouping(7, frozenset({2})))
    origin = RecomputeMemoryOrigin(first_stage=3, last_stage=6, node=0, output=0, tensors=(1,))
    noted = Cut.of((), lower=0.0, origin=origin)
    cuts = [*RecomputeMemorySeparator(coarse, 400).restate(noted)]
    assert len(cuts) == 1
    coarse.cuts, coarse.lasting = [*cuts, *cuts], cuts
    finer = session.build(coarse.grouping.add([4]), coarse)
    spans = {(3, 4), (5, 6)}
    for stated in (finer.cuts, finer.lasting):
        assert len(stated) == 2
        origins = [cut.origin for cut in stated]
        assert {(one.first_stage, one.last_stage) for one in origins if one is not None} == spans
    assert finer.cut_form().n_rows == finer.form.n_rows + 4
    assert session.build(coarse.grouping).cuts == []


def test_recompute_memory_cuts_hold_only_where_tensors_may_come_back() -> None:
    """So a session that does not let them builds relaxations without."""
    session = crowded_session()
    coarse = session.build(Grouping(7, frozenset({2})))
    origin = RecomputeMemoryOrigin(first_stage=3, last_stage=6, node=0, output=0, tensors=(1,))
    noted = Cut.of((), lower=0.0, origin=origin)
    coarse.cuts = coarse.lasting = [*RecomputeMemorySeparator(coarse, 400).restate(noted)]
    assert coarse.model.restoring
    session.restoring = False
    finer = session.build(coarse.grouping.add([4]), coarse)
    assert not finer.model.restoring
    assert (finer.cuts, finer.lasting) == ([], [])
