"""Surrogates: sums of times in place of a makespan, and units of a known value."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from poetmodel.problem import Problem, Quantity, Surrogate
from worked import skip_problem


def problem_of(minimize: str = "energy") -> Problem:
    """State a problem whose time is a makespan; a pass takes 10 s."""
    problem = skip_problem(ram=13, deadline=12, minimize=minimize)
    return replace(problem, deadline_counts="overlap")


def test_it_adds_a_share_of_the_transfers() -> None:
    """It is no makespan any more; it survives pickling, as its problem does."""
    surrogate = Surrogate.of(problem_of(), transfer_share=0.25)
    for found in (surrogate, pickle.loads(pickle.dumps(surrogate))):  # noqa: S301 - its own
        assert not found.is_overlapping
        assert [tuple(counted) for counted in found.deadline_sums] == [(1, 0.25), (0, 1)]
        assert found.time_sum.of(4.0, 8.0) == 6.0
        assert (found.ram_budget_bytes, found.deadline_s) == (13, 12.0)
    assert problem_of().is_overlapping


def test_a_reference_changes_units_alone() -> None:
    """The time stays a makespan, and the unit is a thousandth of the reference."""
    problem = problem_of()
    surrogate = Surrogate.of(problem, reference_value=5.0)
    assert surrogate.is_overlapping
    assert surrogate.objective.unit == 0.005
    assert surrogate.objective.coefficients == problem.objective.coefficients
    assert surrogate.objective != problem.objective


def test_a_surrogate_of_a_surrogate_is_both() -> None:
    """The share stays where a reference is added."""
    shared = Surrogate.of(problem_of("time"), transfer_share=0.5)
    both = Surrogate.of(shared, reference_value=2.0)
    assert both.time_sum == shared.time_sum
    assert both.objective.unit == 0.002
    assert replace(both, ram=12).objective.unit == 0.002


def test_another_objective_has_no_reference() -> None:
    """The value that is known is one of the old objective."""
    surrogate = Surrogate.of(problem_of(), reference_value=5.0, transfer_share=0.5)
    fastest = surrogate.without(Quantity.TIME, minimize="time")
    assert fastest.objective.reference is None
    assert fastest.transfer_share == 0.5


@pytest.mark.parametrize(("share", "value"), [(0.0, 2.0), (0.5, 5.0), (1.0, 8.0)])
def test_the_time_of_a_surrogate_is_its_sum(share: float, value: float) -> None:
    """12 s of compute and 6 s of transfers, beside a pass of 10 s."""

    class Simulated:
        compute_s, transfer_s, overtime_s = 12.0, 6.0, 1.0

    simulation: Any = Simulated()
    objective = Surrogate.of(problem_of("time"), transfer_share=share).objective
    assert objective.overhead(simulation) == value
    assert problem_of("time").objective.overhead(simulation) == 1.0
