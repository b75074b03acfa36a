"""The way of a solve: from the call to the solver by few hands, whatever time means."""

import sys
import threading
import traceback
from pathlib import Path

import pytest

import poetmodel
from kit.worked import comb_problem
from poetmodel.backends import highs, registry
from poetmodel.model import build
from poetmodel.result import Termination
from poetmodel.solver import solve, task

MOST_FRAMES = 20
PACKAGE = str(Path(poetmodel.__file__).parent)


@pytest.fixture
def depths(monkeypatch):
    """Return the frames from `solve` to each call of a back end that was made since."""
    seen = []

    class Watched(highs.Highs):
        """HiGHS, and who called it."""

        name = "watched"

        def solve(self, *arguments, **options):
            stack = traceback.extract_stack()
            if threading.current_thread() is not threading.main_thread():
                waiting = sys._current_frames()[threading.main_thread().ident]
                stack = [*traceback.extract_stack(waiting), *stack]
            own = [frame.name for frame in stack if frame.filename.startswith(PACKAGE)]
            seen.append(own[own.index("solve") :])
            return super().solve(*arguments, **options)

    monkeypatch.setattr(
        registry, "_registered_solvers", {**registry._registered_solvers, "watched": Watched}
    )
    return seen


@pytest.mark.parametrize("counts", ["overlap", pytest.param("serial", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [lambda problem: problem, build], ids=["problem", "model"])
@pytest.mark.parametrize("deadline", ["120%", pytest.param(None, marks=pytest.mark.slow)])
def test_the_way_to_the_solver_is_short(depths, counts, make, deadline):
    """From `solve` to the solver in two threads there are at most twenty functions."""
    problem = comb_problem(8, 10, deadline=deadline, deadline_counts=counts)
    assert solve(make(problem), backend="watched").schedule is not None
    assert depths
    assert len(max(depths, key=len)) <= MOST_FRAMES


def test_a_start_is_verified_although_the_time_has_passed(monkeypatch):
    """As on a busy machine, if the verification of a large graph takes longer than the rest."""
    problem = comb_problem(8, 10)
    start = solve(problem).schedule
    monkeypatch.setattr(task, "GRACE_S", -1.0)
    late = solve(problem, start=start, time_limit=1e-6)
    assert late.termination == Termination.TIME_LIMIT
    assert late.schedule is not None
