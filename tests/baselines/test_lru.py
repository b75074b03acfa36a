"""Demand paging: the order of evictions, what is written, and the budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from baseline_checks import valid_or_refused
from instances import random_instances
from poetmodel.baselines.lru import lru_paging
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, floor, operation
from poetmodel.problem import Problem
from poetmodel.schedule import checkpoint_all, simulate
from strategies import graphs
from worked import even_costs, skip_graph, skip_problem


def _trace_graph() -> Graph:
    """Make a graph whose evictions in 8 bytes are worked by hand.

    ====  =====  =======  ===================================================================
    node  bytes  reads    in 8 bytes
    ====  =====  =======  ===================================================================
    a     2
    b     2
    c     2      a
    d     3               6 + 3: `b` goes, used in step 2; `a` was read in step 3
    e     1      a b      `b` comes: 7 + 2, `c` goes (step 3; `d` is of step 4); 7 + 1
    f     1      c d e    `c` comes: 4 + 2; 6 + 1
    ====  =====  =======  ===================================================================
    """
    return Graph(
        name="trace",
        nodes=(
            operation("a", output_bytes=2),
            operation("b", output_bytes=2),
            operation("c", output_bytes=2, inputs=("a",)),
            operation("d", output_bytes=3),
            operation("e", output_bytes=1, inputs=("a", "b")),
            operation("f", output_bytes=1, inputs=("c", "d", "e")),
        ),
    )


def test_hand_trace() -> None:
    """What was used longest ago goes, comes back when read, and the peak is the budget."""
    graph = _trace_graph()
    schedule = lru_paging(Problem(graph, even_costs(graph), ram=8))
    assert schedule.M_in == ((4, 1), (5, 2))
    assert schedule.M_out == ((1, 1), (2, 2))
    assert schedule.S_RAM == (
        (1, 0),
        (2, 0),
        (2, 1),
        (3, 0),
        (3, 2),
        (4, 0),
        (4, 3),
        (5, 3),
        (5, 4),
    )
    assert all(t == k for t, k in schedule.R)
    assert simulate(graph, None, schedule).peak_ram_bytes == 8


def test_storage_limit_counts_all_that_was_written() -> None:
    """The trace writes two tensors of 2 bytes: 4 bytes of storage are enough, 3 are not."""
    graph = _trace_graph()
    assert lru_paging(Problem(graph, even_costs(graph), ram=8, aux_bytes=4)).M_in
    with pytest.raises(MethodNotApplicableError, match="the step 'b' on the way to 'e'"):
        lru_paging(Problem(graph, even_costs(graph), ram=8, aux_bytes=3))


def test_nothing_is_paged_at_full_ram() -> None:
    """At the checkpoint-all peak the schedule is checkpoint-all, with or without storage."""
    problem = skip_problem(ram="100%", paging=False)
    assert lru_paging(problem) == checkpoint_all(problem.graph)


def test_schedules_keep_the_budget_or_are_refused() -> None:
    """Whatever the graph, the schedule is valid, within RAM and storage, or there is a reason."""
    paged = 0
    for problem in random_instances(300, (3, 9), seed=61, resident=True, below_floor=True):
        schedule = valid_or_refused(lru_paging, problem)
        if schedule is not None:
            paged += bool(schedule.M_in)
            sizes, limit = problem.graph.tensor_bytes, problem.aux_limit_bytes
            assert limit is None or sum(sizes[i] for _, i in schedule.M_out) <= limit
            assert all(t == k for t, k in schedule.R)
    assert paged > 20


@settings(max_examples=40)
@given(graph=graphs(max_nodes=10, on_aux=True))
def test_the_floor_is_enough(graph: Graph) -> None:
    """With storage a budget of the largest working set is always kept, the same way each time."""
    problem = Problem(graph, even_costs(graph), ram=max(1, floor(graph).bytes))
    assert valid_or_refused(lru_paging, problem) == lru_paging(problem)


def test_samples_on_storage_need_no_page_out() -> None:
    """A tensor that lies on storage from the start is dropped and paged in."""
    graph = skip_graph(on_aux=True)
    schedule = lru_paging(Problem(graph, even_costs(graph), ram=13, aux_bytes=0))
    assert (schedule.M_out, schedule.M_in) == ((), ((3, 0),))


def test_refused_without_room_on_storage() -> None:
    """With 3 bytes of storage for the 4 of `a`, or none at all, the step `c` does not fit."""
    for limits in ({"aux_bytes": 3}, {"paging": False}):
        with pytest.raises(MethodNotApplicableError, match="the step 'c'"):
            lru_paging(skip_problem(**limits))
