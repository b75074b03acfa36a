"""Surrogates: sums of times in place of a makespan, and units of a known value."""

import pickle
from dataclasses import replace

import pytest

from kit.worked import skip_problem
from poetmodel.problem import LinearRow, Quantity
from poetmodel.solver import solve
from poetmodel.solver.outcome import accepted, as_candidate


def problem_of(minimize="energy"):
    """State a problem whose time is a makespan; a pass takes 10 s."""
    problem = skip_problem(ram=13, deadline=12, minimize=minimize)
    return replace(problem, deadline_counts="overlap")


def test_it_adds_a_share_of_the_transfers():
    """It is no makespan any more; it survives pickling, as its problem does."""
    surrogate = problem_of().surrogate(transfer_share=0.25)
    for found in (surrogate, pickle.loads(pickle.dumps(surrogate))):  # noqa: S301 - its own
        assert not found.is_overlapping
        assert [tuple(counted) for counted in found.deadline_sums] == [(1, 0.25), (0, 1)]
        assert found.time_sum.of(4.0, 8.0) == 6.0
        assert (found.ram_budget_bytes, found.deadline_s) == (13, 12.0)
    assert problem_of().is_overlapping


def test_a_reference_changes_units_alone():
    """The time stays a makespan, the unit is a thousandth of the reference, a share stays.

    The value that is known is one of the old objective. Nodes may be left out of recomputing.
    """
    problem = problem_of()
    surrogate = problem.surrogate(reference_value=5.0)
    assert surrogate.is_overlapping
    assert surrogate.objective.unit == 0.005
    assert surrogate.objective.coefficients == problem.objective.coefficients
    assert surrogate.objective != problem.objective
    shared = problem_of("time").surrogate(transfer_share=0.5)
    both = shared.surrogate(reference_value=2.0)
    assert both.time_sum == shared.time_sum
    assert both.objective.unit == replace(both, ram=12).objective.unit == 0.002
    surrogate = problem_of().surrogate(reference_value=5.0, transfer_share=0.5)
    fastest = surrogate.without(Quantity.TIME, minimize="time")
    assert fastest.objective.reference is None
    assert fastest.stand_in.transfer_share == 0.5
    problem = skip_problem()
    surrogate = problem.surrogate(never_recomputed=frozenset({1}))
    again = surrogate.surrogate(reference_value=2.0)
    for found in (surrogate, again, replace(again, paging=False)):
        assert not found.may_recompute(1)
        assert found.may_recompute(0) == problem.may_recompute(0)


@pytest.mark.parametrize(("share", "value"), [(0.0, 2.0), (0.5, 5.0), (1.0, 8.0)])
def test_the_time_of_a_surrogate_is_its_sum(share, value):
    """12 s of compute and 6 s of transfers, beside a pass of 10 s."""

    class Simulated:
        compute_s, transfer_s, overtime_s = 12.0, 6.0, 1.0

    simulation = Simulated()
    objective = problem_of("time").surrogate(transfer_share=share).objective
    assert objective.overhead(simulation) == value
    assert problem_of("time").objective.overhead(simulation) == 1.0


def test_a_row_over_stages_is_kept_by_what_is_done_in_them():
    """A schedule that breaks one is not accepted, though it keeps every rule."""
    problem = skip_problem(ram=12)
    schedule = solve(problem).require_schedule()
    family = "paged_in" if schedule.M_in else "recomputed"
    done = next(iter(schedule.M_in or schedule.R))
    terms = [(2, (family, done)), (1, ("paged_out", 0))]
    row = LinearRow.of(terms, name="once", upper=1)
    assert row.is_kept({("paged_out", 0)}.__contains__)
    assert not row.is_kept({(family, done)}.__contains__)
    assert accepted(problem, schedule) is not None
    limited = problem.surrogate(rows=(row,))
    candidate = as_candidate(limited, schedule)
    assert candidate.violations == ("constraint 'once' is broken",)
    assert accepted(limited, schedule) is None
    roomy = problem.surrogate(rows=(replace(row, upper=3),))
    assert accepted(roomy, schedule) is not None
