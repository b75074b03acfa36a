"""Problems as they are solved: weighted times, and units of a value that is known."""

import pickle
from dataclasses import replace

import pytest

from kit.worked import skip_problem
from poetmodel.problem import Quantity
from poetmodel.schedule import Schedule
from poetmodel.solver.outcome import make_candidate
from poetmodel.solver.statement import restate


def problem_of(minimize="energy"):
    """Return a problem whose time is a makespan; a pass takes 10 s."""
    problem = skip_problem(ram=13, deadline=12, minimize=minimize)
    return replace(problem, deadline_counts="overlap")


def test_it_adds_a_share_of_the_transfers():
    """It is no makespan any more; it can be pickled, as its problem can."""
    surrogate = restate(problem_of(), transfer_weight=0.25)
    for found in (surrogate, pickle.loads(pickle.dumps(surrogate))):  # noqa: S301 - its own
        assert not found.is_overlapping
        assert [tuple(counted) for counted in found.deadline_sums] == [(1, 0.25), (0, 1)]
        assert found.time_sum.weigh(4.0, 8.0) == 6.0
        assert (found.ram_budget_bytes, found.deadline_s) == (13, 12.0)
    assert problem_of().is_overlapping


def test_a_reference_changes_units_alone():
    """The time stays a makespan, the unit is a thousandth of the reference, a share stays.

    The value that is known is one of the old objective. Nodes may be left out of recomputing.
    """
    problem = problem_of()
    surrogate = restate(problem, reference_value=5.0)
    assert surrogate.is_overlapping
    assert surrogate.objective.unit == 0.005
    assert surrogate.objective.coefficients == problem.objective.coefficients
    assert surrogate.objective != problem.objective
    shared = restate(problem_of("time"), transfer_weight=0.5)
    both = restate(shared, reference_value=2.0)
    assert both.time_sum == shared.time_sum
    assert both.objective.unit == replace(both, ram=12).objective.unit == 0.002
    surrogate = restate(problem_of(), reference_value=5.0, transfer_weight=0.5)
    fastest = surrogate.without_limits(Quantity.TIME, minimize="time")
    assert fastest.objective.reference is None
    assert fastest.transfer_weight == 0.5


@pytest.mark.parametrize(("share", "value"), [(0.0, 2.0), (0.5, 5.0), (1.0, 8.0)])
def test_the_time_of_a_surrogate_is_its_sum(share, value):
    """12 s of compute and 6 s of transfers, beside a pass of 10 s."""

    class Simulated:
        compute_s, transfer_s, overtime_s = 12.0, 6.0, 1.0

    simulation = Simulated()
    objective = restate(problem_of("time"), transfer_weight=share).objective
    assert objective.overhead_of(simulation) == value
    assert problem_of("time").objective.overhead_of(simulation) == 1.0


@pytest.mark.parametrize(("weight", "is_valid"), [(0.0, True), (0.5, True), (0.75, False)])
def test_each_sum_of_times_is_held_against_the_deadline(weight, is_valid):
    """Compute plus a share of the transfers, and the transfers alone; no plan is needed."""
    problem = skip_problem()
    paged = Schedule(
        R=((0, 0), (1, 1), (2, 2), (3, 3)),
        S_RAM=((1, 0), (2, 1), (3, 2)),
        S_AUX=((3, 0),),
        M_in=((3, 0),),
        M_out=((0, 0),),
    )
    times = make_candidate(problem, paged).simulation
    half = times.compute_s + times.transfer_s / 2
    problem = replace(problem, deadline=half, deadline_counts="overlap")
    stated = restate(problem, transfer_weight=weight)
    assert bool(make_candidate(stated, paged).violations) != is_valid
