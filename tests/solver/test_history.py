"""How incumbent and bound met, as results and files tell it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kit.instances import random_instance, seeded
from kit.worked import comb_problem, skip_problem
from poetmodel.problem import Problem
from poetmodel.result import SolveResult, Status
from poetmodel.schedule.io import parse_document
from poetmodel.schedule.relations import dump
from poetmodel.solver import SolveProgress, solve
from poetmodel.solver.request import MOST_MOMENTS, History


def _rising(values: list[float | None]) -> bool:
    known = [value for value in values if value is not None]
    return known == sorted(known) and values[len(values) - len(known) :] == known


def check(result: SolveResult) -> None:
    """Check that times rise, both sides close in, and that the end is the result."""
    seconds, incumbents, bounds = map(list, zip(*result.history, strict=True))
    assert all(0 <= one <= other for one, other in pairwise(seconds))
    assert _rising([None if value is None else -value for value in incumbents])
    assert _rising(bounds)
    assert result.simulation is not None
    objective = result.problem.objective
    assert incumbents[-1] == objective.overhead(result.simulation)
    assert objective.baseline + bounds[-1] == pytest.approx(result.proven_bound)
    assert seconds[-1] == result.wall_s


@pytest.mark.parametrize("minimize", ["energy", "time", "ram", "writes"])
@pytest.mark.parametrize("formulation", ["lazy", "compact"])
def test_history_ends_with_the_result(formulation: str, minimize: str) -> None:
    """Incumbents fall and bounds rise, in the unit of what is minimized, until they meet."""
    result = solve(skip_problem(minimize=minimize), formulation=formulation)
    assert result.status == Status.OPTIMAL
    check(result)


@pytest.mark.parametrize("counts", ["serial", "overlap"])
def test_history_of_a_deadline(counts: str) -> None:
    """A makespan, which is solved through surrogates, has one history."""
    problem = comb_problem()
    late = Problem(
        problem.graph,
        problem.costs,
        ram=problem.ram_budget_bytes,
        deadline=2 * problem.pass_time_s,
        deadline_counts=counts,
    )
    check(solve(late))


@pytest.mark.parametrize("seed", range(6))
def test_watcher_sees_what_the_history_keeps(seed: int) -> None:
    """Each moment before the end was reported, and a watcher still stops the solve."""
    told: list[SolveProgress] = []
    problem = random_instance(seeded(seed))
    result = solve(problem, on_progress=told.append)
    if result.schedule is None:
        return
    check(result)
    assert {moment[0] for moment in result.history[:-1]} <= {each.seconds for each in told}
    stopped = solve(comb_problem(), on_progress=lambda _: False)
    assert stopped.status == Status.FEASIBLE


def test_long_histories_are_thinned() -> None:
    """First and last moment stay, and what is left out lies between its neighbours."""
    history = History()
    for at in range(10_000):
        history.watch(SolveProgress(seconds=float(at), incumbent=20_000.0 - at, bound=float(at)))
    assert len(history.moments) <= MOST_MOMENTS
    assert history.moments[0] == (0.0, 20_000.0, 0.0)
    assert history.moments[-1] == (9999.0, 10_001.0, 9999.0)


def test_what_says_nothing_new_is_left_out() -> None:
    """A worse value or bound than one told before is none of the history."""
    history = History()
    for seconds, incumbent, bound in (
        (1, None, None),
        (2, None, 3),
        (3, 9, 2),
        (4, 9, 3),
        (5, 8, 4),
    ):
        history.watch(SolveProgress(seconds=seconds, incumbent=incumbent, bound=bound))
    assert history.moments == [(2, None, 3), (3, 9, 3), (5, 8, 4)]


def test_file_keeps_the_history() -> None:
    """What is written is read, to ten digits."""
    result = solve(comb_problem())
    document = parse_document(dump(result.to_dict()), source="x")
    assert len(document.history) == len(result.history)
    for read, made in zip(document.history, result.history, strict=True):
        assert read == pytest.approx(made, rel=1e-9)
