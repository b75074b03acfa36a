"""Schedules whose addresses fit: solved again with less RAM until the block fits the budget."""

import time
from dataclasses import replace

import pytest

from kit.instances import make_rng, random_instance, scarce_problem
from kit.worked import comb_problem, skip_problem
from poetmodel.errors import InputError, PlanError
from poetmodel.placement import place
from poetmodel.plan import check_arena, check_plan
from poetmodel.result import Status, Termination
from poetmodel.schedule import check_schedule
from poetmodel.solver import fit_arena, fitting, solve


def checked(problem, found):
    """Return schedule, plan and addresses that fit, after their checks."""
    assert check_schedule(problem, found.result.require_schedule()).valid
    plan, usable = found.plan, problem.usable_ram_bytes
    assert plan.ram_budget_bytes == usable
    assert check_plan(problem.graph, problem.costs, plan).violations == ()
    assert check_arena(problem.graph, plan, found.arena).violations == ()
    assert found.arena.bytes <= usable
    return found


def test_the_excess_is_taken_off():
    """A block that fits is that of the first solve.

    Keep-all needs 15 B, 4 + 8 + 8 = 20 B in blocks of 4; a must be paged or recomputed for 1 J,
    which is a gap. After `max_solves`, the error has the smallest block and a remedy; likewise
    without time for another schedule. A wrong alignment is refused at once.
    """
    problem = skip_problem(ram=13)
    found = checked(problem, fit_arena(problem, mode="blocking", alignment=1))
    assert found.result.energy_j == solve(problem).energy_j == 11.0
    assert found.result.status == Status.OPTIMAL
    problem = skip_problem(ram=16)
    assert solve(problem).energy_j == 10.0
    found = checked(problem, fit_arena(problem, mode="blocking", alignment=4))
    assert (found.result.energy_j, found.arena.bytes) == (11.0, 16)
    assert found.result.problem is problem
    assert (found.result.status, found.result.bound_j) == (Status.FEASIBLE, 10.0)
    assert (found.result.termination, found.result.gap) == (Termination.STALLED, 1.0)
    found = fit_arena(skip_problem(ram=16), mode="blocking", alignment=4, max_solves=1)
    assert found.result.status == Status.UNKNOWN
    assert found.result.reason == (
        "no schedule was found whose addresses fit the 16 B that tensors may use: the smallest "
        "block found takes 4 B more; add as much to ram"
    )
    hurried = {"solve": lambda given, **_: late(given, method="chen"), "time_limit": 1e-6}
    found = fit_arena(skip_problem(ram=16), mode="blocking", alignment=4, **hurried)
    assert (found.plan, found.result.status) == (None, Status.UNKNOWN)
    assert "or raise the time limit" in found.result.reason
    with pytest.raises(PlanError, match="power of two"):
        fit_arena(skip_problem(), mode="blocking", alignment=3, solve=lambda: None)


@pytest.mark.parametrize(
    ("ram", "mode", "words"),
    [
        # Neither b nor c can go, and each takes 8 B in blocks of 4, which is more than 13.
        (13, "blocking", "no addresses fit the 13 B that tensors may use: "),
        (11, "dma", "RAM budget 11 B"),  # there is nothing to place
    ],
)
def test_that_no_addresses_fit_is_proved(ram, mode, words):
    """Nor is there a plan."""
    found = fit_arena(skip_problem(ram=ram), mode=mode, alignment=4)
    assert (found.plan, found.arena, found.result.schedule) == (None, None, None)
    assert found.result.status == Status.INFEASIBLE
    assert found.result.reason.startswith(words)


def test_ctrl_c_in_a_later_solve_is_reported():
    """16 B suffice for the tensors, not for their addresses; the second solve is interrupted."""
    calls = []

    def solve_once(problem, **keywords):
        calls.append(problem)
        found = solve(problem, **keywords)
        if len(calls) == 1:
            return found
        nothing = {"schedule": None, "simulation": None, "status": Status.UNKNOWN}
        return replace(found, termination=Termination.INTERRUPTED, **nothing)

    found = fit_arena(skip_problem(ram=16), mode="blocking", alignment=4, solve=solve_once)
    assert len(calls) == 2
    assert found.result.termination == Termination.INTERRUPTED
    assert found.result.reason.startswith("interrupted")


@pytest.mark.parametrize("seed", range(12))
def test_random_problems_fit_or_are_refused(seed):
    """Results are valid; for an infeasible one, no blocking plan fits."""
    problem = random_instance(make_rng(f"fit/{seed}"), (3, 5))
    mode = "dma" if problem.is_overlapping else "blocking"
    found = fit_arena(problem, mode=mode, alignment=4)
    if found.arena is not None:
        checked(problem, found)
    else:
        assert found.result.schedule is None
        assert found.result.reason


def test_plans_that_need_not_begin_transfers_early_wait():
    """With DMA, a plan is made again with less RAM before anything is solved again."""
    problem = skip_problem(ram=17, recompute=False)
    calls = []

    def counted(given, **options):
        calls.append(given)
        return solve(given, **options)

    found = checked(problem, fit_arena(problem, mode="dma", alignment=1, solve=counted))
    assert len(calls) == 1
    assert found.plan is not None
    assert place(problem.graph, found.plan, alignment=1).bytes <= 17


def test_a_block_that_is_larger_by_chance_takes_no_more_off(monkeypatch):
    """The next budget is the used bytes minus the smallest excess of all blocks so far."""
    problem, results, excess = comb_problem(6, 15), [], [2, 9]
    placed = fitting.plan_and_place

    def solving(given, **options):
        results.append(solve(given, **options))
        return results[-1]

    def placing(*given, arena_limit_bytes, **options):
        plan, arena = placed(*given, arena_limit_bytes=arena_limit_bytes, **options)
        return plan, replace(arena, bytes=arena_limit_bytes + excess.pop(0)) if excess else arena

    monkeypatch.setattr(fitting, "plan_and_place", placing)
    fit_arena(problem, mode="blocking", alignment=1, solve=solving)
    budgets = [result.problem.usable_ram_bytes for result in results]
    used = [result.simulation.peak_ram_bytes for result in results]
    assert budgets[:3] == [15, used[0] - 2, used[1] - 2]


def late(given, **more):
    """Solve, and let the time be up."""
    return replace(solve(given), termination=Termination.TIME_LIMIT, status=Status.FEASIBLE, **more)


def test_all_solves_together_keep_the_time_limit():
    """Each may end before the limit of all, so that there is time for plans and addresses."""
    begun_s, ends_s = time.monotonic(), []

    def seen(given, *, time_limit):
        ends_s.append(time.monotonic() - begun_s + time_limit)
        return solve(given, time_limit=time_limit)

    problem = skip_problem(ram=16)
    found = fit_arena(problem, mode="blocking", alignment=4, solve=seen, time_limit=60)
    assert len(ends_s) == 2
    assert all(0 < end_s < 60 for end_s in ends_s)
    assert found.result.time_limit_s == 60


def test_the_time_that_is_left_goes_into_a_better_schedule():
    """It begins from the one whose addresses fit, and the better bound of both holds."""
    problem, starts = skip_problem(ram=13), []

    def hurried(given, *, start=None, **options):
        starts.append(start)
        if start is not None:
            return solve(given, start=start, **options)
        paged = solve(replace(given, recompute=False), **options)
        assert paged.energy_j > 11
        given_up = {"objective_bound": 10.0, "overhead_bound_j": 0.0}
        return late(given, schedule=paged.schedule, simulation=paged.simulation, **given_up)

    found = checked(problem, fit_arena(problem, mode="blocking", alignment=1, solve=hurried))
    assert [start is not None for start in starts] == [False, True]
    assert (found.result.energy_j, found.result.bound_j) == (11.0, 11.0)
    assert (found.result.status, found.result.termination) == (Status.OPTIMAL, Termination.PROVED)


@pytest.mark.parametrize("mode", ["blocking", "dma"])
def test_what_fits_is_returned_without_time_for_another_solve(mode):
    """Where the time is up and the block of the best schedule is too large, a quick one fits."""
    problem, calls = skip_problem(ram=16), []

    def hurried(given, **_):
        calls.append(given)
        return late(given)

    found = fit_arena(problem, mode=mode, alignment=4, solve=hurried, time_limit=1e-6)
    assert len(calls) == 1
    checked(problem, found)
    assert (found.result.termination, found.result.bound_j) == (Termination.TIME_LIMIT, 10.0)


@pytest.mark.parametrize("number", [19, pytest.param(41, marks=pytest.mark.slow)])
def test_a_search_alone_follows_a_solve_that_was_cut_short(number):
    """With a wide gap, because a bound for less RAM is useless; it finds the solve's schedule."""
    problem, calls = scarce_problem(f"improve/{number}", (8, 14)), []

    def hurried(given, **_):
        calls.append(given)
        return late(given, objective_bound=given.objective.known_bound, overhead_bound_j=0.0)

    found = checked(problem, fit_arena(problem, mode="blocking", alignment=2, solve=hurried))
    solved = fit_arena(problem, mode="blocking", alignment=2)
    assert len(calls) == 1
    assert found.result.energy_j == pytest.approx(solved.result.energy_j)
    assert found.result.status == Status.FEASIBLE


def test_a_plan_without_overlap_is_none_of_a_deadline_that_counts_it():
    """Its transfers take longer; without paging, both are the same."""
    problem = skip_problem(ram=13, deadline_counts="overlap")
    with pytest.raises(InputError, match="state 'serial'"):
        fit_arena(problem, mode="blocking", alignment=1)
    checked(problem, fit_arena(problem, mode="dma", alignment=1))
    problem = replace(problem, paging=False)
    checked(problem, fit_arena(problem, mode="blocking", alignment=1))
