"""A solve beside other work: better results come, and the process ends with whoever wants them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kit import jobs
from kit.patience import PATIENCE_S, gone, until
from kit.worked import comb_graph, even_costs
from poetmodel.heuristics.greedy import page_everything
from poetmodel.problem import Problem
from poetmodel.result import SolveResult, Status
from poetmodel.solver import background, solve
from poetmodel.solver.background import BackgroundSolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.schedule import Schedule


def comb_problem() -> tuple[Problem, Schedule]:
    """State a problem whose first schedule can be improved."""
    graph = comb_graph(8)
    problem = Problem(graph, even_costs(graph, page_in=(5, 5), page_out=(5, 5)), ram=10)
    start = page_everything(problem)
    assert start is not None
    return problem, start


def begin(*, time_limit: float = PATIENCE_S) -> BackgroundSolve:
    """Begin to solve the problem."""
    problem, start = comb_problem()
    return BackgroundSolve(problem, start=start, time_limit=time_limit, gap=0.0)


def pid_of(solving: BackgroundSolve) -> int:
    """Return the number of the process of a solve."""
    assert solving._process is not None
    return solving._process.pid


def test_the_result_is_that_of_a_solve() -> None:
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


def test_closing_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is left, and nothing more comes."""
    monkeypatch.setattr(background, "refine", jobs.endless)
    solving = begin()
    number = pid_of(solving)
    assert solving.runs
    solving.close()
    solving.close()
    assert not solving.runs
    assert gone(number)
    assert solving.take() is None


def test_process_ends_when_solver_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody holds it any more, there is no process."""
    monkeypatch.setattr(background, "refine", jobs.endless)
    solving = begin()
    number = pid_of(solving)
    del solving
    assert until(lambda: gone(number))


def test_a_fork_has_no_part_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked process sees nothing of it, and neither closing nor dropping it there ends it."""
    monkeypatch.setattr(background, "refine", jobs.endless)
    solving = begin()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        solving.close()
        os.write(tell, b"n" if solving.runs or solving.take() else b"y")
        os._exit(0)
    os.close(tell)
    assert os.read(told, 1) == b"y"
    os.close(told)
    os.waitpid(child, 0)
    assert solving.runs
    assert not gone(pid_of(solving))
    solving.close()


def test_the_process_does_not_outlive_its_owner() -> None:
    """Where the one that started it is killed, it ends by itself."""
    program = (
        "import os, sys; sys.path[:] = eval(sys.argv[1])\n"
        "from test_background import begin, pid_of\n"
        "solving = begin(time_limit=1000.0)\n"
        "print(pid_of(solving), flush=True)\n"
        "sys.stdin.read()\n"
    )
    paths = [os.path.dirname(__file__), *sys.path]  # noqa: PTH120 - entries of the path are texts
    owner = subprocess.Popen(
        [sys.executable, "-c", program, repr(paths)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    number = int(owner.stdout.readline())
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    owner.stdin.close()
    assert until(lambda: gone(number))


@pytest.mark.parametrize(
    ("job", "words"), [(jobs.failing, "failed: of its own"), (jobs.ending, "")]
)
def test_a_process_that_fails_is_told_of(
    job: Callable[..., None],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log has its error, and there are no results."""
    monkeypatch.setattr(background, "refine", job)
    with caplog.at_level(logging.WARNING):
        solving = begin()
        assert solving.wait(PATIENCE_S)
        number = pid_of(solving)
        assert until(lambda: gone(number))
    assert solving.take() is None
    assert words in caplog.text


def test_a_process_that_cannot_start_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever asked for it goes on without."""
    monkeypatch.setattr(sys, "executable", "")
    with caplog.at_level(logging.WARNING):
        solving = begin()
    assert not solving.runs
    assert solving.take() is None
    solving.close()
    assert "could not be started (no Python interpreter is known)" in caplog.text
