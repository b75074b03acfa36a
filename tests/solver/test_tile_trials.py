"""Trials of tile sizes: the cheapest is selected, within a fraction of the time."""

import time
from dataclasses import replace

import pytest

from kit.worked import comb_problem
from poetmodel.result import Termination
from poetmodel.solver import solve
from poetmodel.solver.facade import execute
from poetmodel.solver.request import Request, SolveProgress
from poetmodel.solver.tile_trials import find_cheapest_tiles

SIZES = (4096, 3072, 2048)


def test_the_cheapest_size_is_taken_with_its_schedule():
    """The largest of equal ones; a size that cannot be as cheap as one before ends early."""
    wide, narrow = comb_problem(8, 13), comb_problem(8, 11)
    values = {problem: solve(problem, gap=0.0).value for problem in (wide, narrow)}
    assert values[wide] < values[narrow]
    for problems, best in (((narrow, wide, wide), 1), ((wide, narrow, narrow), 0)):
        told = []
        chosen = find_cheapest_tiles(
            list(zip(SIZES, problems, strict=True)),
            lambda problem: problem,
            Request(gap=0.0, time_limit_s=60.0, on_progress=told.append),
        )
        assert (chosen.tile_bytes, chosen.step) == (SIZES[best], problems[best])
        assert chosen.result.value == pytest.approx(values[wide])
        assert not chosen.is_interrupted
        assert told
        assert [trial.tile_bytes for trial in chosen.trials] == list(SIZES)
        least = values[wide]
        for trial, problem in zip(chosen.trials, problems, strict=True):
            assert trial.bound <= values[problem] * (1 + 1e-9)
            known = trial.value is not None and trial.value <= least * (1 + 1e-9)
            assert known == (problem is wide) or trial.bound >= least * (1 - 1e-9)


def test_sizes_whose_program_does_not_fit_come_last():
    """The cheapest that fits is selected, and the one with the smallest excess if none fits."""
    wide, narrow = comb_problem(8, 13), comb_problem(8, 11)
    for excess, best in (((9, 0, 0), 1), ((0, 0, 9), 0), ((3, 2, 1), 2)):
        problems = [replace(wide), replace(narrow), replace(narrow)]
        chosen = find_cheapest_tiles(
            list(zip(SIZES, problems, strict=True)),
            lambda problem: problem,
            Request(gap=0.0, time_limit_s=60.0),
            excess_bytes=lambda problem, _result: next(
                size
                for size, candidate in zip(excess, problems, strict=True)  # noqa: B023
                if candidate is problem
            ),
        )
        assert chosen.tile_bytes == SIZES[best]
        assert chosen.result.schedule is not None


def test_a_single_size_is_not_tried():
    """Neither is any after the time limit: the largest is selected then."""
    problem, late = comb_problem(8, 13), Request(started_s=time.monotonic() - 100.0)
    for candidates in ([(None, problem)], [(4096, problem)]):
        chosen = find_cheapest_tiles(candidates, lambda problem: problem, Request())
        assert (chosen.tile_bytes, chosen.step) == candidates[0]
        assert (chosen.trials, chosen.result) == ((), None)
    both = [(4096, problem), (2048, replace(problem))]
    chosen = find_cheapest_tiles(both, lambda problem: problem, late)
    assert (chosen.tile_bytes, chosen.trials) == (4096, ())


def test_no_size_follows_once_the_observer_stops():
    """Ctrl-C ends the trials, too; earlier results are kept."""
    problem = comb_problem(8, 13)
    chosen = find_cheapest_tiles(
        [(size, problem) for size in SIZES],
        lambda problem: problem,
        Request(gap=0.0, on_progress=lambda progress: progress.overhead is None),
    )
    assert (chosen.is_interrupted, len(chosen.trials)) == (True, 1)
    assert chosen.result.require_schedule()


def test_a_stop_by_the_observer_counts_also_at_the_cutoff():
    """The second size is no better; the report that proves it is the one that ends the trials."""
    problem, reports = comb_problem(8, 13), []

    def stop_second_trial(progress):
        reports.append(progress)
        return len(reports) < 2

    def solve_once(problem, request):
        on_progress, alone = request.on_progress, replace(request, on_progress=None)
        if not reports:
            assert on_progress(SolveProgress(seconds=0.0, overhead=None, overhead_bound=None))
            return execute(problem, alone)
        first_value = execute(problem, alone).value
        assert not on_progress(
            SolveProgress(seconds=0.0, overhead=None, overhead_bound=2 * first_value)
        )
        return replace(execute(problem, alone), termination=Termination.INTERRUPTED)

    chosen = find_cheapest_tiles(
        [(size, problem) for size in SIZES],
        lambda problem: problem,
        Request(gap=0.0, on_progress=stop_second_trial),
        solve=solve_once,
    )
    assert (chosen.is_interrupted, len(chosen.trials)) == (True, 2)
