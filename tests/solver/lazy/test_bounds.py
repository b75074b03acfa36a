"""Bound, incumbent and gap."""

from __future__ import annotations

import math

import pytest

from kit.worked import skip_problem
from poetmodel.heuristics.greedy import page_everything
from poetmodel.schedule import Schedule
from poetmodel.solver.lazy.bounds import BoundTracker
from poetmodel.solver.outcome import verify_schedule

RECOMPUTED = Schedule(R=((0, 0), (1, 1), (2, 2), (3, 0), (3, 3)), S_RAM=((1, 0), (2, 1), (3, 2)))
"""The skip connection with `a` made again: 1 J."""


def test_only_what_is_better_counts() -> None:
    """A bound that is higher, a schedule that costs less."""
    problem = skip_problem()
    bounds = BoundTracker(problem, 0.0)
    assert [bounds.raise_to(bound) for bound in (0.25, 0.5, 0.3, 0.5)] == [True, True, False, False]
    assert bounds.lower == 0.5
    best, paged = verify_schedule(problem, RECOMPUTED), page_everything(problem)
    assert paged is not None
    assert bounds.replace_incumbent(verify_schedule(problem, paged))
    assert bounds.replace_incumbent(best)
    assert not bounds.replace_incumbent(verify_schedule(problem, paged))
    assert bounds.incumbent is best


def test_a_bound_alone_closes_nothing() -> None:
    """Unless it reaches the ceiling, above which nothing is of use."""
    bounds = BoundTracker(skip_problem(), 0.0)
    bounds.raise_to(100.0)
    assert (bounds.upper(), bounds.gap()) == (None, math.inf)
    assert not bounds.closed()
    assert BoundTracker(skip_problem(), 0.0, ceiling=2.0, lower=2.0).closed()


def test_the_gap_is_that_to_what_schedules_must_be_below() -> None:
    """The incumbent or the ceiling, whichever is less; closed once it is within the tolerance."""
    problem = skip_problem()
    best = verify_schedule(problem, RECOMPUTED)
    bounds = BoundTracker(problem, 0.5, best, ceiling=0.5, lower=0.25)
    assert bounds.upper() == 0.5
    assert bounds.gap() == pytest.approx(0.5)
    bounds.ceiling = math.inf
    assert bounds.upper() == pytest.approx(1.0)
    assert not bounds.closed()
    bounds.raise_to(0.5)
    assert bounds.closed()


def test_where_ram_is_minimized_the_floor_is_a_bound() -> None:
    """Without any solve."""
    assert BoundTracker(skip_problem(minimize="ram"), 0.0).lower > 0
