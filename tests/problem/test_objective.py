"""Objectives: what schedules pay of each quantity agrees with the simulator."""

from dataclasses import replace

import pytest

from kit.instances import random_instances, seeded
from kit.rotation import parts
from kit.worked import skip_problem
from poetmodel.graph import floor
from poetmodel.heuristics.greedy import construct, page_everything
from poetmodel.problem import Coefficients, DeadlineCounts, Quantity, weighted
from poetmodel.schedule import simulate


def paid(schedule, coefficients):
    """Return what the decisions of a schedule add up to."""
    again = sum(coefficients.compute[k] for t, k in schedule.R if k < t)
    into = sum(coefficients.page_in[i] for _, i in schedule.M_in)
    return again + into + sum(coefficients.page_out[i] for _, i in schedule.M_out)


@pytest.mark.parametrize("counts", ["compute", "serial"])
@pytest.mark.parametrize("minimize", ["energy", "time", "writes"])
@parts(4)
def test_a_sum_over_decisions_is_what_the_simulator_adds_up(part, minimize, counts):
    """On schedules that recompute and page: baseline and overhead are those of the simulation."""
    found = 0
    for problem in part.of(random_instances(100, (3, 8), seed=17, minimize=minimize)):
        stated = replace(problem, deadline_counts=counts)
        unpaged = replace(stated, paging=False)
        for schedule in (construct(stated), construct(unpaged), page_everything(stated)):
            if schedule is None:
                continue
            simulation = simulate(
                stated.graph, stated.costs, schedule, deadline_counts=stated.deadline_counts
            )
            objective = stated.objective
            overhead = objective.overhead(simulation)
            assert paid(schedule, objective.coefficients) == pytest.approx(overhead)
            assert objective.measured(simulation) == pytest.approx(objective.baseline + overhead)
            found += overhead > 0
    assert found > part.share(5)


def test_units_sums_and_limits():
    """The peak has the minimum RAM as its bound, and no decision adds to it by itself.

    Writes have no baseline: the largest tensor counts 1. A pass takes 10 s and 10 J of linear
    limits; the tolerance is included. Weighted sums go decision by decision.
    """
    objective = skip_problem(minimize="ram").objective
    assert not objective.is_sum
    assert objective.least == floor(skip_problem().graph).bytes
    assert not any(sum(column) for column in objective.coefficients)
    assert objective.unit == 0.013
    assert skip_problem(minimize="ram", ram=99).objective.unit == 0.015  # keep-all takes no more
    problem = skip_problem(minimize="writes")
    assert problem.objective.baseline == 0
    assert problem.objective.unit == max(problem.graph.tensor_bytes)
    schedule = construct(replace(problem, ram=99))
    written = problem.objective.measured(simulate(problem.graph, problem.costs, schedule))
    assert (written, type(written)) == (0, int)
    assert problem.quantity(Quantity.ENERGY) == problem.energy
    assert problem.quantity("writes") == problem.objective
    problem = skip_problem(deadline=12, energy_budget=11, ram=13)
    assert {limit.name: limit.upper for limit in problem.linear_limits} == {
        "deadline": pytest.approx(2),
        "energy_budget": pytest.approx(1),
    }
    assert all(limit.upper > 0 for limit in replace(problem, deadline=10).linear_limits)
    assert skip_problem(ram=13).linear_limits == ()
    rng = seeded("weighted")
    one, two = (
        Coefficients(*([rng.random() for _ in range(3)] for _ in range(4))) for _ in range(2)
    )
    both = weighted((one, 2.0), (two, 0.5))
    assert both.page_out[1] == 2.0 * one.page_out[1] + 0.5 * two.page_out[1]
    assert [len(column) for column in both] == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("minimize", "shown", "in_bytes"),
    [
        ("energy", "2 J", False),
        ("time", "2 s", False),
        ("ram", "2 B", True),
        ("writes", "2 B", True),
    ],
)
def test_amounts_have_units(minimize, shown, in_bytes):
    """Joules, seconds and bytes; those of bytes are whole."""
    objective = skip_problem(minimize=minimize).objective
    assert objective.format(2) == shown
    assert objective.in_bytes == in_bytes


def test_sums_of_each_meaning_of_time():
    """Compute alone; with transfers; and for a makespan two sums that are each necessary."""
    expected = {
        DeadlineCounts.COMPUTE: [(1, 0)],
        DeadlineCounts.SERIAL: [(1, 1)],
        DeadlineCounts.OVERLAP: [(1, 0), (0, 1)],
    }
    for counts, sums in expected.items():
        problem = replace(skip_problem(deadline=12), deadline_counts=counts)
        assert [tuple(counted) for counted in problem.deadline_sums] == sums
        assert tuple(problem.time_sum) == sums[0]
        assert problem.is_overlapping == (counts == "overlap")
        names = [limit.name for limit in problem.linear_limits]
        assert names == ["deadline", "bus_deadline"][: len(sums)]
