"""The policy: rows and cuts after what is known, and when a solve is left."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from poetmodel.heuristics.greedy import construct
from poetmodel.solver.lazy import LazyParams
from poetmodel.solver.lazy.bounds import BoundTracker
from poetmodel.solver.lazy.policy import Policy
from poetmodel.solver.outcome import verify_schedule
from worked import comb_problem

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


def test_a_solve_looks_for_a_part_of_a_wide_gap_only() -> None:
    """Of a narrow one it looks for everything, as where nothing is known to be better than."""
    assert policy_of(10.0, 2.0).target() == pytest.approx(3.0)
    assert policy_of(10.0, 9.75).target() is None
    policy = policy_of(10.0, 2.0)
    policy.bounds.incumbent = None
    assert policy.target() is None


@pytest.mark.parametrize("minimize", ["ram", "writes"])
def test_bytes_are_proved_at_once(minimize: str) -> None:
    """A bound between two whole numbers would be a proof with a gap."""
    assert policy_of(10.0, 2.0, minimize).target() is None


def test_a_target_that_is_ruled_out_leads_to_the_next() -> None:
    """The step is longer if that took a single node, and all of the gap if the bound stays.

    What a relaxation with more rows proves easily is not known yet: it begins anew.
    """
    policy = policy_of(10.0, 2.0)
    near = policy.target()
    policy.target_ruled_out(rose=True, nodes=17)
    assert policy.target() == near
    policy.target_ruled_out(rose=True, nodes=1)
    assert policy.target() == pytest.approx(4.0)
    policy.target_ruled_out(rose=False, nodes=1)
    assert policy.target() is None
    policy.rows_to_add()
    assert policy.target() == near


@pytest.mark.parametrize(
    ("value", "rise", "rows"),
    [(10.0, 0.03, 1), (10.0, 0.015, 2), (10.0, 0.005, None), (20.0, 0.03, 1), (20.0, 0.005, 3)],
)
def test_the_last_gain_says_how_many_rows_come(value: float, rise: float, rows: int | None) -> None:
    """One after much, few after some; all near the end where answers only dodge what is enforced.

    Far from it a relaxation with all of them would not be solved in its time.
    """
    policy = policy_of(value, 9.9 / (1 + rise))
    assert policy.rows_to_add() == 1  # nothing was added before
    policy.bounds.lower = 9.9
    assert policy.rows_to_add() == rows


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


def test_a_solve_without_an_answer_is_given_more_time_and_less_to_prove() -> None:
    """Half the step, not below the least; twice the slice."""
    policy = policy_of(10.0, 2.0)
    policy.params = LazyParams(least_target_step_ratio=0.05)
    slice_s = policy.slice_s
    policy.ran_out_of_time()
    assert (policy.slice_s, policy.step_ratio) == (2 * slice_s, 1 / 16)
    policy.ran_out_of_time()
    assert (policy.slice_s, policy.step_ratio) == (4 * slice_s, 0.05)
    policy.kept_all_rows()
    assert policy.slice_s == 8 * slice_s


@pytest.mark.parametrize(
    ("bound", "to_target", "expected"),
    [(2.0, True, 0.4), (2.0, False, 0.75), (9.75, False, 1.0), (9.75, True, 0.4)],
)
def test_near_the_end_a_solve_may_take_all_the_time(
    bound: float, expected: float, *, to_target: bool
) -> None:
    """With a wide gap some is left to search for schedules; less for a part of the gap."""
    policy = policy_of(10.0, bound)
    assert policy.solve_time_s(1e6, to_target=to_target) == pytest.approx(expected * 1e6)
    assert policy.solve_time_s(0.0, to_target=to_target) == LazyParams().first_slice_s


def test_a_solve_is_left_whose_own_gap_is_small_beside_the_whole() -> None:
    """With 1 % open in all, 0.2 % is no longer small."""
    wide, narrow = policy_of(10.0, 5.0), policy_of(10.0, 9.9)
    assert wide.leaves(0.002)
    assert not wide.leaves(0.01)
    assert not narrow.leaves(0.002)
    assert narrow.leaves(0.0005)
