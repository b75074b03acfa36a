"""What solvers report during a solve, and what becomes of it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from poetmodel.backends import BackendProgress, Limits
from poetmodel.backends.call import SolverCall, finite
from poetmodel.backends.standard_form import MAXIMIZE, MINIMIZE, StandardForm


def form(sense: int = MINIMIZE) -> StandardForm:
    """Return a form of one integer column."""
    return StandardForm.from_arrays([[1.0]], [1.0], integer=True, sense=sense)


def at(value: float) -> np.ndarray:
    """Return a solution of `form`."""
    return np.array([value])


@pytest.mark.parametrize(
    ("value", "kept"),
    [(1.5, 1.5), (-1e19, -1e19), (1e20, None), (-1e100, None), (np.inf, None), (np.nan, None)],
)
def test_finite(value: float, kept: float | None) -> None:
    """Solvers' ways to say none all become None."""
    assert finite(value) == kept


@pytest.mark.parametrize(("sense", "values"), [(MINIMIZE, [5, 6, 4, 4]), (MAXIMIZE, [5, 4, 6, 6])])
def test_only_better_solutions_are_reported(sense: int, values: list[float]) -> None:
    """Solvers repeat and deteriorate; listeners see improvements, rounded."""
    seen: list[BackendProgress] = []
    call = SolverCall(form(sense), Limits(), seen.append)
    for value in values:
        call.solution(value, lambda value=value: at(value + 1e-7))
    assert [news.incumbent for news in seen] == [values[0], values[2]]
    assert [None if news.x is None else news.x[0] for news in seen] == [values[0], values[2]]


def test_bounds_never_slacken() -> None:
    """A listener sees the best bound so far."""
    seen: list[BackendProgress] = []
    call = SolverCall(form(), Limits(), seen.append)
    for bound, objective in ((1.0, 9.0), (0.5, 8.0), (None, 7.0), (2.0, 6.0)):
        call.solution(objective, lambda: at(0.0), bound)
    assert [news.bound for news in seen] == [1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize(("sense", "bound"), [(MINIMIZE, 7.0), (MAXIMIZE, 3.0)])
def test_bounds_beyond_the_cutoff_prove_the_cutoff(sense: int, bound: float) -> None:
    """With a cutoff, no bound says more than that nothing is better than it."""
    seen: list[BackendProgress] = []
    call = SolverCall(form(sense), Limits(objective_cutoff=5.0), seen.append)
    call.solution(9.0, lambda: at(0.0), bound)
    assert seen[0].bound == 5.0


def test_ticks_are_thinned_out() -> None:
    """News without a solution comes at most a few times a second."""
    seen: list[BackendProgress] = []
    call = SolverCall(form(), Limits(), seen.append)
    for _ in range(100):
        call.tick(1.0)
    assert len(seen) < 10
    threading.Event().wait(0.15)
    call.tick(2.0)
    assert (seen[-1].bound, seen[-1].x) == (2.0, None)


def test_time() -> None:
    """Without a limit time does not run out; with one, it does."""
    assert SolverCall(form(), Limits()).remaining_s is None
    call = SolverCall(form(), Limits(time_s=1e-9))
    assert call.elapsed_s > 0
    assert call.remaining_s == 0.0
