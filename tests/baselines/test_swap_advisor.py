"""The genetic search over swap sets."""

from itertools import product

import pytest

from kit.baseline_checks import graph_of, valid_or_refused
from kit.instances import random_instances
from kit.worked import gap_graph
from poetmodel.baselines.paging import execute_gaps, gaps_of
from poetmodel.baselines.swap_advisor import _GeneticSearch, swap_advisor
from poetmodel.device import Costs
from poetmodel.planner import verify
from poetmodel.problem import Problem
from poetmodel.schedule import simulate


def _either(transfer_j, **limits):
    """State a problem in which `a` or `b` must be out while `c` is computed; `b` is read first."""
    graph = gap_graph()
    ones = [1.0] * 5
    pages = [(1.0, joules) for joules in (*transfer_j, 1.0, 1.0, 1.0)]
    costs = Costs.from_arrays(
        graph, compute_time_s=ones, compute_energy_j=ones, page_in=pages, page_out=pages
    )
    return Problem(graph, costs, ram=9, **limits)  # type: ignore[arg-type]


def test_hidden_transfers_are_free_by_hand():
    """The gap of `a` hides both of its transfers, 1.5 s each way in 3 s; that of `b` 1 s of 2 s.

    So `a` goes where only the time counts that nothing hides, and `b` where transfers add up.
    """
    graph = gap_graph()
    ones = [1.0] * 5
    pages = [(seconds, 1.0) for seconds in (1.5, 1.0, 1.0, 1.0, 1.0)]
    costs = Costs.from_arrays(
        graph, compute_time_s=ones, compute_energy_j=ones, page_in=pages, page_out=pages
    )
    problem = Problem(graph, costs, ram=9, minimize="time", deadline_counts="overlap")
    added, hidden = (_GeneticSearch(problem, 0, hidden=hidden) for hidden in (False, True))
    assert [gap.tensor for gap in added.run()] == [1]
    assert [gap.tensor for gap in hidden.run()] == [0]
    assert hidden.late_s.tolist() == [0.0, 1.0]
    best = min(verify(problem, search.schedule()).simulation.time_s for search in (added, hidden))
    assert verify(problem, swap_advisor(problem)).simulation.time_s == best


def test_best_of_all_swap_sets():
    """On small graphs it is as cheap as the cheapest of all sets of tensors that are paged."""
    compared = 0
    for problem in random_instances(
        60, 6, seed=81, recompute=False, paging=True, switches=False, deadline=False,
        energy_budget=False, aux_limit=False, minimize="energy",
    ):  # fmt: skip
        schedule = valid_or_refused(swap_advisor, problem)
        if schedule is None or not schedule.M_in:
            continue
        least = _least_overhead_j(problem)
        found = simulate(
            problem.graph, problem.costs, schedule, deadline_counts=problem.deadline_counts
        ).overhead_j
        assert found == pytest.approx(least, rel=1e-9)
        compared += 1
    assert compared > 8


def _least_overhead_j(problem):
    """Try every set of gaps, by the simulator."""
    gaps = gaps_of(problem.graph)
    least = float("inf")
    for chosen in product((False, True), repeat=len(gaps)):
        plan = {gap: True for gap, out in zip(gaps, chosen, strict=True) if out}
        simulation = simulate(
            problem.graph,
            problem.costs,
            execute_gaps(problem, plan),
            deadline_counts=problem.deadline_counts,
        )
        if simulation.peak_ram_bytes <= problem.usable_ram_bytes:
            least = min(least, simulation.overhead_j or 0.0)
    return least


def test_storage_limit_is_heeded_where_it_can_be():
    """With room for `b` alone the search takes `b`, though `a` is cheaper to move."""
    graph = graph_of("room", "a 6; b 4; c 5; d 1 a b")
    ones = [1.0] * 4
    pages = [(1.0, 1.0), (1.0, 5.0), (1.0, 1.0), (1.0, 1.0)]
    costs = Costs.from_arrays(
        graph, compute_time_s=ones, compute_energy_j=ones, page_in=pages, page_out=pages
    )
    free = swap_advisor(Problem(graph, costs, ram=11))
    tight = swap_advisor(Problem(graph, costs, ram=11, aux_bytes=5))
    assert ([i for _, i in free.M_in], [i for _, i in tight.M_in]) == ([0], [1])


@pytest.mark.parametrize("minimize", ["time", "writes", "ram"])
def test_every_quantity_can_be_minimized(minimize):
    """The search follows what the problem minimizes, and keeps the budget."""
    assert swap_advisor(_either((1, 10), minimize=minimize)).M_in
    assert swap_advisor(_either((1, 10), minimize=minimize, deadline_counts="compute")).M_in
