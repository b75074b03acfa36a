"""What the parts of a lazy solve share: the best schedule and bound, when to stop, the solver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kit.instances import scarce_problem
from kit.worked import comb_graph, even_costs, skip_graph, skip_problem
from poetmodel.errors import TimeLimitError
from poetmodel.graph import Graph, operation
from poetmodel.model.aggregated import Grouping
from poetmodel.problem import Problem
from poetmodel.result import Termination
from poetmodel.schedule import Schedule, checkpoint_all
from poetmodel.solver.lazy.cuts import Cut
from poetmodel.solver.lazy.cuts.recompute_memory import (
    RecomputeMemoryOrigin,
    RecomputeMemorySeparator,
)
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.outcome import verify_schedule
from poetmodel.solver.request import Request

if TYPE_CHECKING:
    from poetmodel.solver.request import SolveProgress


def session_of(problem: Problem, start: Schedule | None = None, **choices: Any) -> Session:
    """Begin a solve."""
    best = None if start is None else verify_schedule(problem, start)
    return Session(problem, Request(**{"gap": 0.0, "time_limit_s": 300.0, **choices}), best)


def paged() -> Schedule:
    """Return the schedule of the skip connection that pages `a`: 2 J."""
    stages = range(4)
    return Schedule(
        R=tuple((t, t) for t in stages),
        S_RAM=((1, 0), (2, 1), (3, 2)),
        S_AUX=((1, 0), (2, 0), (3, 0)),
        M_in=((3, 0),),
        M_out=((0, 0),),
    )


def recomputed() -> Schedule:
    """Return the schedule of the skip connection that makes `a` again: 1 J."""
    return Schedule(R=((0, 0), (1, 1), (2, 2), (3, 0), (3, 3)), S_RAM=((1, 0), (2, 1), (3, 2)))


def test_only_a_better_bound_counts() -> None:
    """It never falls, and each better one is told."""
    told: list[SolveProgress] = []
    session = session_of(skip_problem(), on_progress=told.append)
    for bound in (0.25, 0.5, 0.3, 0.5):
        session.raise_bound(bound)
    assert session.bounds.lower == 0.5
    assert [progress.bound for progress in told] == [0.25, 0.5]


def test_only_a_better_valid_schedule_counts() -> None:
    """The verifier decides; a valid one that is no better is valid all the same."""
    told: list[SolveProgress] = []
    session = session_of(skip_problem(), on_progress=told.append)
    assert not session.offer(checkpoint_all(skip_graph()))
    assert session.bounds.incumbent is None
    assert session.offer(paged())
    assert session.offer(recomputed())
    assert session.offer(paged())
    assert session.bounds.incumbent is not None
    assert session.bounds.incumbent.value == pytest.approx(1.0)
    assert [progress.incumbent for progress in told] == pytest.approx([2.0, 1.0])


def test_what_serves_nothing_is_dropped_from_an_offer() -> None:
    """A page-in and a page-out of `b` that nobody needs cost nothing in the end."""
    wasteful = recomputed()
    wasteful = Schedule(
        R=wasteful.R,
        S_RAM=wasteful.S_RAM,
        S_AUX=((2, 1), (3, 1)),
        M_in=((3, 1),),
        M_out=((1, 1),),
    )
    session = session_of(skip_problem())
    assert session.offer(wasteful)
    assert session.bounds.incumbent is not None
    assert session.bounds.incumbent.value == pytest.approx(1.0)
    assert session.bounds.incumbent.schedule.M_in == ()


def test_a_solve_is_done_once_bound_and_schedule_meet() -> None:
    """Or come as near as was asked for; before that there is something left to do."""
    session = session_of(skip_problem(), recomputed())
    assert not session.done()
    session.raise_bound(0.5)
    assert not session.bounds.closed()
    session.raise_bound(1.0)
    assert session.bounds.closed()
    assert session.done()
    assert session.stopped is None
    rough = session_of(skip_problem(), recomputed(), gap=0.5)
    rough.raise_bound(0.5)
    assert rough.done()


def test_a_bound_alone_ends_nothing() -> None:
    """Without a schedule nothing is proved, whatever the bound."""
    session = session_of(skip_problem())
    session.raise_bound(100.0)
    assert not session.done()


def test_a_session_without_time_solves_nothing() -> None:
    """It says so, and why; nor does it build what it would not solve."""
    grouping = Grouping(4, frozenset({2}))
    form = session_of(skip_problem()).build(grouping).form
    session = session_of(skip_problem(), time_limit_s=1e-9)
    assert session.done()
    assert session.stopped == Termination.TIME_LIMIT
    assert session.solve(form) is None
    with pytest.raises(TimeLimitError):
        session.build(grouping)


def test_a_signal_ends_a_session() -> None:
    """Whoever set it; solves that begin later end at once."""
    session = session_of(skip_problem())
    relaxation = session.build(Grouping(4, frozenset({2})))
    session.stop.set()
    session.solve(relaxation.form)
    assert session.done()
    assert session.stopped == Termination.INTERRUPTED
    assert session.solve(relaxation.form) is None


def test_a_watcher_ends_a_session_by_its_answer() -> None:
    """From then on nothing is solved."""
    session = session_of(skip_problem(), on_progress=lambda _: False)
    session.tell()
    assert session.stopped == Termination.INTERRUPTED
    assert session.solve(session.build(Grouping(4)).form) is None


def test_a_cutoff_lies_just_above_the_best() -> None:
    """So that rounding errors do not cut the best itself off; without a schedule there is none."""
    problem = skip_problem()
    relaxation = session_of(problem).build(Grouping(4, frozenset({2})))
    assert session_of(problem).cutoff(relaxation) == {}
    cutoff = session_of(problem, paged()).cutoff(relaxation)["objective_cutoff"]
    assert 2.0 < cutoff * relaxation.unit < 2.0 * (1 + 2e-6)
    # What a solver proves of the cutoff holds up to its error: of the best, all of it.
    assert session_of(problem, paged()).within_cutoff(relaxation, cutoff) == 2.0


def test_what_is_built_and_solved_is_counted() -> None:
    """The time to build, and the most columns and rows of any model that was solved."""
    graph = comb_graph(8)
    problem = Problem(graph, even_costs(graph, page_in=(3, 3), page_out=(3, 3)), ram=9)
    session = session_of(problem)
    large = session.build(Grouping(16, frozenset(range(2, 15))))
    small = session.build(Grouping(16))
    assert session.build_s > 0
    session.solve(large.with_cuts([Cut(((0, 1.0),), 0.0)]))
    session.solve(small.form.relaxed())
    assert session.columns == large.form.n_columns
    assert session.rows == large.form.n_rows + 1


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
    noted = Cut((), 0.0, origin=origin)
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
    noted = Cut((), 0.0, origin=origin)
    coarse.cuts = coarse.lasting = [*RecomputeMemorySeparator(coarse, 400).restate(noted)]
    assert coarse.model.restoring
    session.restoring = False
    finer = session.build(coarse.grouping.add([4]), coarse)
    assert not finer.model.restoring
    assert (finer.cuts, finer.lasting) == ([], [])
