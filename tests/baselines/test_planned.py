"""Gaps, what they weigh, and carrying a plan of gaps out."""

from __future__ import annotations

import pytest

from instances import random_instances
from poetmodel.baselines.planned import Gap, carry_out, fitting, gaps_of, loads_of
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import floor
from poetmodel.problem import Problem
from poetmodel.schedule import checkpoint_all, simulate
from worked import even_costs, skip_graph, skip_problem


def test_gaps_and_loads_worked_by_hand() -> None:
    """Only `a` is unused for a stage or more; in the one of `c` it makes the peak."""
    graph = skip_graph()
    assert gaps_of(graph) == [Gap(0, 1, 3)]
    assert loads_of(graph).tolist() == [4, 10, 15, 12]


def test_a_plan_without_gaps_is_checkpoint_all() -> None:
    """What never leaves is kept to its last use."""
    for problem in random_instances(40, (3, 8), seed=41):
        assert carry_out(problem, {}) == checkpoint_all(problem.graph)


@pytest.mark.parametrize("page", [True, False])
def test_a_gap_is_paged_or_recomputed(page: bool) -> None:
    """The tensor is out of RAM in the gap, and comes back in the way that the plan says."""
    schedule = carry_out(skip_problem(), {Gap(0, 1, 3): page})
    assert (2, 0) not in schedule.S_RAM
    assert schedule.M_in == (((3, 0),) if page else ())
    assert ((3, 0) in schedule.R) is not page


def test_loads_are_what_the_judge_finds() -> None:
    """With every gap on storage each stage holds its working set, and the peak is the floor."""
    for problem in random_instances(40, (3, 8), seed=42, zero_bytes=False):
        graph = problem.graph
        schedule = carry_out(problem, dict.fromkeys(gaps_of(graph), True))
        assert simulate(graph, None, schedule).peak_ram_bytes == floor(graph).bytes
        points = simulate(graph, None, checkpoint_all(graph)).curve
        assert [point.ram_bytes for point in points] == loads_of(graph).tolist()


def test_what_does_not_fit_is_refused() -> None:
    """The reason names the peak, its node and the budget."""
    graph = skip_graph()
    schedule = checkpoint_all(graph)
    assert fitting(Problem(graph, even_costs(graph), ram=15), schedule) is schedule
    with pytest.raises(MethodNotApplicableError, match="needs 15 B at 'c', and tensors may use 14"):
        fitting(Problem(graph, even_costs(graph), ram=14), schedule)
