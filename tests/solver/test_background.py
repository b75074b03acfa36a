"""A solve beside other work: better results come, and the process ends with whoever wants them."""

import logging
import os
import sys

import pytest

from kit import jobs
from kit.patience import PATIENCE_S, gone, until
from kit.worked import comb_graph, even_costs
from poetmodel.heuristics.greedy import page_everything
from poetmodel.problem import Problem
from poetmodel.result import SolveResult, Status
from poetmodel.solver import background, solve
from poetmodel.solver.background import BackgroundSolve


def comb_problem():
    """State a problem whose first schedule can be improved."""
    graph = comb_graph(8)
    problem = Problem(graph, even_costs(graph, page_in=(5, 5), page_out=(5, 5)), ram=10)
    return problem, page_everything(problem)


def begin():
    """Begin to solve the problem."""
    problem, start = comb_problem()
    return BackgroundSolve(problem, start=start, time_limit=PATIENCE_S, gap=0.0)


def pid_of(solving):
    """Return the number of the process of a solve."""
    return solving._process.pid


def test_the_result_is_that_of_a_solve():
    """What comes last is as good and as proven as what `solve` returns; each comes once."""
    solving = begin()
    assert solving.wait(PATIENCE_S)
    assert not solving.runs
    found = solving.take()
    problem, _ = comb_problem()
    expected = solve(problem, gap=0.0)
    assert isinstance(found, SolveResult)
    assert found.status == Status.OPTIMAL
    assert found.energy_j == pytest.approx(expected.energy_j)
    assert solving.take() is None


@pytest.mark.parametrize("closes", [True, False])
def test_process_ends_when_solver_is_closed_or_dropped(*, closes, monkeypatch):
    """No process is left, and nothing more comes."""
    monkeypatch.setattr(background, "refine", jobs.endless)
    solving = begin()
    number = pid_of(solving)
    assert solving.runs
    if closes:
        solving.close()
        solving.close()
        assert gone(number)
        assert (solving.runs, solving.take()) == (False, None)
    del solving
    assert until(lambda: gone(number))


def test_a_fork_has_no_part_in_it(monkeypatch):
    """A forked process sees nothing of it, and neither closing nor dropping it there ends it."""
    monkeypatch.setattr(background, "refine", jobs.endless)
    solving = begin()
    child = os.fork()
    if child == 0:
        solving.close()
        os._exit(bool(solving.runs or solving.take()))
    assert os.waitpid(child, 0)[1] == 0
    assert solving.runs
    assert not gone(pid_of(solving))
    solving.close()


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (jobs.failing, "failed: of its own"),
        (jobs.ending, ""),
        (None, "could not be started (no Python interpreter is known)"),
    ],
)
def test_a_process_that_fails_or_cannot_start_is_told_of(job, words, monkeypatch, caplog):
    """The log has its error, and there are no results: whoever asked goes on without."""
    monkeypatch.setattr(background, "refine", job)
    if job is None:
        monkeypatch.setattr(sys, "executable", "")
    with caplog.at_level(logging.WARNING):
        solving = begin()
        assert solving.wait(PATIENCE_S)
        assert job is None or until(lambda: gone(pid_of(solving)))
    assert (solving.runs, solving.take()) == (False, None)
    assert words in caplog.text
    solving.close()
