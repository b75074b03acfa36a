"""The policy: rows and cuts after what is known, and how long a solve may take."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kit.worked import comb_problem
from poetmodel.heuristics.greedy import construct
from poetmodel.solver.lazy import LazyParams
from poetmodel.solver.lazy.bounds import BoundTracker
from poetmodel.solver.lazy.policy import Policy
from poetmodel.solver.outcome import verify_schedule

if TYPE_CHECKING:
    from poetmodel.solver.outcome import Candidate


def candidate(value: float) -> Candidate:
    """Return a valid schedule, with a value of its own."""
    problem = comb_problem()
    schedule = construct(problem)
    assert schedule is not None
    return replace(verify_schedule(problem, schedule), value=value)


def policy_of(value: float, bound: float, minimize: str = "energy") -> Policy:
    """Return the policy where a bound and a schedule of some value are known."""
    problem = comb_problem(minimize=minimize)
    bounds = BoundTracker(problem, 0.0, candidate(value))
    bounds.lower = bound
    return Policy(problem, bounds, LazyParams())


@pytest.mark.parametrize(
    ("value", "rise", "rows"),
    [(10.0, 0.03, 1), (10.0, 0.015, 2), (10.0, 0.005, None), (20.0, 0.03, 1), (20.0, 0.005, 3)],
)
def test_the_last_gain_says_how_many_rows_come(value: float, rise: float, rows: int | None) -> None:
    """One after much, few after some; all near the end where answers only dodge what is enforced.

    Far from it a relaxation with all of them would not be solved in its time.
    """
    policy = policy_of(value, 9.9 / (1 + rise))
    assert policy.rows_to_add(None, 100) == 1  # nothing was added before
    policy.bounds.lower = 9.9
    assert policy.rows_to_add(None, 100) == rows


@pytest.mark.parametrize(
    ("nodes", "groups", "rows"),
    [(0, 40, 20), (1, 41, 20), (1, 3, 1), (2, 40, 1), (None, 40, 1)],
)
def test_more_rows_come_after_a_relaxation_that_needed_no_branching(
    nodes: int | None, groups: int, rows: int
) -> None:
    """Half as many as it has groups; not after a solve that branched, or came to no end."""
    assert policy_of(10.0, 5.0).rows_to_add(nodes, groups) == rows


@pytest.mark.parametrize("minimize", ["energy", "ram"])
@pytest.mark.parametrize(
    ("gap", "at_once", "for_steps"), [(0.5, True, True), (0.05, False, True), (0.01, False, False)]
)
def test_the_gap_says_when_recompute_memory_cuts_are_stated(
    gap: float, minimize: str, *, at_once: bool, for_steps: bool
) -> None:
    """At once only where RAM is the only limit, never where it is minimized or they are off."""
    policy = policy_of(10.0, 10.0 * (1 - gap), minimize)
    may = minimize != "ram"
    assert policy.restores_at_once(only_ram=True) == (at_once and may)
    assert not policy.restores_at_once(only_ram=False)
    assert policy.restores_instead_of_steps() == (for_steps and may)
    policy.params = LazyParams(cuts=frozenset({"interval"}))
    assert not policy.restores_at_once(only_ram=True)
    assert not policy.restores_instead_of_steps()


@pytest.mark.parametrize(("bound", "expected"), [(2.0, 0.75), (9.75, 1.0)])
def test_near_the_end_a_solve_may_take_all_the_time(bound: float, expected: float) -> None:
    """With a wide gap some is left to search; never less than the slice, which doubles."""
    policy = policy_of(10.0, bound)
    first_s = LazyParams().first_slice_s
    assert policy.solve_time_s(1e6) == pytest.approx(expected * 1e6)
    assert policy.solve_time_s(0.0) == first_s
    policy.solves_again()
    assert policy.solve_time_s(0.0) == 2 * first_s
