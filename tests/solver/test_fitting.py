"""Schedules whose addresses fit: solved again with less RAM until the block fits the budget."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kit.instances import random_instance, seeded
from kit.worked import skip_problem
from poetmodel.errors import InputError, PlanError
from poetmodel.placement import place
from poetmodel.plan import check_arena, check_plan
from poetmodel.result import Status, Termination
from poetmodel.schedule import verify
from poetmodel.solver import Fitted, fit_arena, solve

if TYPE_CHECKING:
    from poetmodel.problem import Problem
    from poetmodel.result import SolveResult
    from poetmodel.schedule import Schedule


def checked(problem: Problem, found: Fitted) -> Fitted:
    """Return what fits once schedule, plan and addresses have been checked."""
    assert found.plan is not None
    assert found.arena is not None
    schedule = found.result.require_schedule()
    assert verify(problem, schedule).valid
    plan, usable = found.plan, problem.usable_ram_bytes
    assert plan.ram_budget_bytes == usable
    assert check_plan(problem.graph, problem.costs, plan).violations == ()
    assert check_arena(problem.graph, plan, found.arena).violations == ()
    assert found.arena.bytes <= usable
    return found


def test_a_block_that_fits_is_that_of_the_first_solve() -> None:
    """Nothing is solved again: the result is that of `solve`."""
    problem = skip_problem(ram=13)
    found = checked(problem, fit_arena(problem, mode="blocking", alignment=1))
    assert found.result.energy_j == solve(problem).energy_j == 11.0
    assert found.result.status == Status.OPTIMAL


def test_the_excess_is_taken_off() -> None:
    """Keep-all takes 15 B, 4 + 8 + 8 = 20 B in blocks of 4; a must go for 1 J, which is a gap."""
    problem = skip_problem(ram=16)
    assert solve(problem).energy_j == 10.0
    found = checked(problem, fit_arena(problem, mode="blocking", alignment=4))
    assert found.arena is not None
    assert (found.result.energy_j, found.arena.bytes) == (11.0, 16)
    assert found.result.problem is problem
    assert (found.result.status, found.result.bound_j) == (Status.FEASIBLE, 10.0)
    assert found.result.termination == Termination.STALLED
    assert found.result.objective_gap == 1.0


def test_that_no_addresses_fit_is_proved() -> None:
    """Neither b nor c can go, and each takes 8 B in blocks of 4, which is more than 13."""
    problem = skip_problem(ram=13)
    found = fit_arena(problem, mode="blocking", alignment=4)
    assert (found.plan, found.arena, found.result.schedule) == (None, None, None)
    assert found.result.status == Status.INFEASIBLE
    assert found.result.reason.startswith("no addresses fit the 13 B that tensors may use: ")


def test_without_a_schedule_there_is_nothing_to_place() -> None:
    """The result is that of the solve."""
    problem = skip_problem(ram=11)
    found = fit_arena(problem, mode="dma")
    assert (found.plan, found.arena) == (None, None)
    assert found.result.status == Status.INFEASIBLE
    assert "minimum" in found.result.reason or "11" in found.result.reason


@pytest.mark.parametrize("seed", range(12))
def test_random_problems_fit_or_are_refused(seed: int) -> None:
    """What is returned is valid; what is called infeasible has no blocking plan that fits."""
    problem = random_instance(seeded(f"fit/{seed}"), (3, 5))
    mode = "dma" if problem.is_overlapping else "blocking"
    found = fit_arena(problem, mode=mode, alignment=4)
    if found.arena is not None:
        checked(problem, found)
    else:
        assert found.result.schedule is None
        assert found.result.reason


def test_plans_that_need_not_begin_transfers_early_wait() -> None:
    """With DMA, a plan is made again with less RAM before anything is solved again."""
    problem = skip_problem(ram=17, recompute=False)
    calls: list[Problem] = []

    def counted(given: Problem, **options: Any) -> SolveResult:
        calls.append(given)
        return solve(given, **options)

    found = checked(problem, fit_arena(problem, mode="dma", alignment=1, solve=counted))
    assert len(calls) == 1
    assert found.plan is not None
    assert place(problem.graph, found.plan, alignment=1).bytes <= 17


def test_it_ends_where_nothing_fits() -> None:
    """After `most_solves` the smallest block found is told, and what to do."""
    problem = skip_problem(ram=16)
    found = fit_arena(problem, mode="blocking", alignment=4, most_solves=1)
    assert found.result.status == Status.UNKNOWN
    assert found.result.reason == (
        "no schedule was found whose addresses fit the 16 B that tensors may use: the smallest "
        "block found takes 4 B more; add as much to ram"
    )


def test_all_solves_together_keep_the_time_limit() -> None:
    """Each may end before the limit of all, so that there is time for plans and addresses."""
    begun_s, ends_s = time.monotonic(), []

    def seen(given: Problem, *, time_limit: float) -> SolveResult:
        ends_s.append(time.monotonic() - begun_s + time_limit)
        return solve(given, time_limit=time_limit)

    problem = skip_problem(ram=16)
    found = fit_arena(problem, mode="blocking", alignment=4, solve=seen, time_limit=60)
    assert len(ends_s) == 2
    assert all(0 < end_s < 60 for end_s in ends_s)
    assert found.result.time_limit_s == 60


def test_the_time_that_is_left_goes_into_a_better_schedule() -> None:
    """It begins from the one whose addresses fit, and the better bound of both holds."""
    problem, starts = skip_problem(ram=13), []

    def hurried(given: Problem, *, start: Schedule | None = None, **options: Any) -> SolveResult:
        starts.append(start)
        if start is None:
            paged = solve(replace(given, recompute=False), **options)
            assert (paged.energy_j or 0.0) > 11
            return replace(
                solve(given, **options),
                schedule=paged.schedule,
                simulation=paged.simulation,
                objective_bound=10.0,
                overhead_bound_j=0.0,
                status=Status.FEASIBLE,
                termination=Termination.TIME_LIMIT,
            )
        return solve(given, start=start, **options)

    found = checked(problem, fit_arena(problem, mode="blocking", alignment=1, solve=hurried))
    assert [start is not None for start in starts] == [False, True]
    assert (found.result.energy_j, found.result.bound_j) == (11.0, 11.0)
    assert (found.result.status, found.result.termination) == (
        Status.OPTIMAL,
        Termination.PROVED,
    )


@pytest.mark.parametrize("device", ["blocking", "dma"])
def test_what_fits_is_returned_without_time_for_another_solve(device: str) -> None:
    """Where the time is up and the block of the best schedule is too large, a quick one fits."""
    calls: list[Problem] = []

    def late(given: Problem, **_: Any) -> SolveResult:
        calls.append(given)
        found = solve(given)
        return replace(found, termination=Termination.TIME_LIMIT, status=Status.FEASIBLE)

    problem = skip_problem(ram=16)
    found = checked(
        problem, fit_arena(problem, mode=device, alignment=4, solve=late, time_limit=1e-6)
    )
    assert len(calls) == 1
    assert found.result.termination == Termination.TIME_LIMIT
    assert found.result.bound_j == 10.0
    assert found.result.require_schedule()


def test_a_baseline_never_answers_with_another_schedule() -> None:
    """Where the time is up its answer does not fit, and that is said with what to do."""

    def late(given: Problem, **_: Any) -> SolveResult:
        return replace(solve(given), termination=Termination.TIME_LIMIT, method="chen")

    problem = skip_problem(ram=16)
    found = fit_arena(problem, mode="blocking", alignment=4, solve=late, time_limit=1e-6)
    assert (found.plan, found.result.status) == (None, Status.UNKNOWN)
    assert "or raise the time limit" in found.result.reason


def test_alignment_is_checked_before_anything_is_solved() -> None:
    """A mistake costs no time."""
    with pytest.raises(PlanError, match="power of two"):
        fit_arena(skip_problem(), mode="blocking", alignment=3, solve=lambda: None)  # type: ignore[arg-type]


def test_a_plan_without_overlap_is_none_of_a_deadline_that_counts_it() -> None:
    """Its transfers take longer; without paging both are the same."""
    problem = skip_problem(ram=13, deadline_counts="overlap")
    with pytest.raises(InputError, match="state 'serial'"):
        fit_arena(problem, mode="blocking", alignment=1)
    checked(problem, fit_arena(problem, mode="dma", alignment=1))
    problem = replace(problem, paging=False)
    checked(problem, fit_arena(problem, mode="blocking", alignment=1))
