"""The search for schedules in a process of its own: what is told, and how it ends."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import pytest

from kit import jobs
from kit.instances import scarce_problem, seeded
from kit.patience import PATIENCE_S, until
from kit.relaxation import CLOSE, random_rows, run_rounds, solved
from kit.rotation import Part, parts
from kit.worked import comb_graph, even_costs
from poetmodel.errors import BackendError
from poetmodel.heuristics.greedy import page_everything
from poetmodel.model.aggregated import Grouping
from poetmodel.problem import Problem
from poetmodel.problem.infeasibility import obstacle
from poetmodel.process import WorkerJob, WorkerProcess
from poetmodel.solver.lazy import LazyParams, primal_worker
from poetmodel.solver.lazy.primal import PrimalHeuristic
from poetmodel.solver.lazy.primal_worker import (
    FoundSchedule,
    PrimalSearch,
    PrimalWorker,
    ProofState,
)
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.outcome import verify_schedule
from poetmodel.solver.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from poetmodel.schedule import Schedule
    from poetmodel.solver.outcome import Candidate
    from poetmodel.solver.request import SolveProgress

AT_ONCE = LazyParams(worker_start_s=0.0)
"""Start the process without waiting for the solve to get older."""


def comb_problem(teeth: int = 14, ram: int = 13) -> Problem:
    """State a problem that a search improves step by step: a comb, with page-ins at 5 J."""
    graph = comb_graph(teeth)
    return Problem(graph, even_costs(graph, page_in=(5, 5), page_out=(5, 5)), ram=ram)


def everything_paged(problem: Problem) -> Candidate:
    """Return a schedule that is far from the best."""
    schedule = page_everything(problem)
    assert schedule is not None
    return verify_schedule(problem, schedule)


def session_of(problem: Problem, best: Candidate | None = None, **choices: Any) -> Session:
    """Begin a solve with two threads."""
    request = Request(**{"gap": 0.0, "time_limit_s": 300.0, "threads": 2, **choices})
    return Session(problem, request, best, params=AT_ONCE)


def answer_of(session: Session, grouping: Grouping) -> Schedule:
    """Solve a relaxation."""
    relaxation = session.build(grouping)
    x = solved(relaxation).x
    assert x is not None
    return relaxation.disaggregate(x).schedule()


@pytest.fixture
def search_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], None]:
    """Let processes do another job."""
    return lambda job: monkeypatch.setattr(primal_worker, "search_schedules", job)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[WorkerProcess]:
    """Return the processes that are started."""
    processes: list[WorkerProcess] = []

    def start() -> WorkerProcess:
        processes.append(WorkerProcess())
        return processes[-1]

    monkeypatch.setattr(primal_worker, "WorkerProcess", start)
    return processes


# -- both sides together -------------------------------------------------------------------------


def test_a_process_finds_better_schedules(started: list[WorkerProcess]) -> None:
    """From what the solve has, without its interpreter; afterwards there is no process."""
    problem = comb_problem()
    start = everything_paged(problem)
    session = session_of(problem, start)
    with PrimalWorker(session) as search:
        assert until(lambda: session.bounds.incumbent is not start)
        assert search.runs.is_set()
        (process,) = started
    search.check()
    assert session.bounds.incumbent is not None
    assert session.bounds.incumbent.value < start.value
    assert not session.bounds.incumbent.violations
    assert session.bounds.lower == 0.0
    assert not process.is_alive
    assert not search.runs.is_set()
    assert not search._thread.is_alive()


def test_an_answer_is_searched_with_in_the_process() -> None:
    """Nothing else leads from no schedule at all to one whose value is that of the answer."""
    problem = comb_problem(6, 9)
    best = run_rounds(problem).value
    assert best is not None
    session = session_of(problem)
    answer = answer_of(session, Grouping(12, frozenset({5})))
    with PrimalWorker(session) as search:
        search.put(answer)
        assert until(
            lambda: (
                session.bounds.incumbent is not None
                and session.bounds.incumbent.value <= best + CLOSE
            )
        )
        session.raise_bound(best)
        assert session.done()
    search.check()


def test_a_quick_solve_starts_no_process(started: list[WorkerProcess]) -> None:
    """What is over before its process would start costs nothing."""
    session = session_of(comb_problem())
    session.params = LazyParams(worker_start_s=PATIENCE_S)
    with PrimalWorker(session) as search:
        pass
    search.check()
    assert not started
    assert not search._thread.is_alive()


def test_a_process_is_left_at_any_moment(
    search_by: Callable[[Any], None], started: list[WorkerProcess]
) -> None:
    """Before it has read, with more to read than a pipe holds, it is ended and waited for."""
    search_by(jobs.endless)
    problem = comb_problem(400, 13)
    for _ in range(3):
        with PrimalWorker(session_of(problem)) as search:
            assert until(search.runs.is_set)
        search.check()
    assert len(started) == 3
    assert not any(process.is_alive for process in started)


# -- what is told --------------------------------------------------------------------------------


def test_what_is_new_is_told_once() -> None:
    """A schedule until the search knows it, an answer once and only the latest; bounds always."""
    problem = comb_problem()
    start = everything_paged(problem)
    session = session_of(problem, start)
    search = PrimalWorker(session)
    first, last = (answer_of(session, Grouping(28)) for _ in range(2))
    search.put(first)
    search.put(last)
    update = search._update()
    assert update.found == FoundSchedule(start.schedule, start.value)
    assert update.answer is last
    session.raise_bound(2.0)
    session.columns = 7
    assert search._update() == ProofState(bound=2.0, columns=7, found=None, answer=None)
    search._known = 0.0  # the search has sent something better in the meantime
    session.bounds.incumbent = replace(start, value=1.0)
    assert search._update().found is None


def test_what_is_told_survives_the_way() -> None:
    """Answers, with all they hold, are equal on the other side."""
    count = 0
    for number in range(20):
        problem = scarce_problem(f"told/{number}", (6, 10))
        session = session_of(problem)
        relaxation = session.build(random_rows(seeded(f"told/{number}"), problem))
        raw = solved(relaxation)
        if raw.x is None:
            continue
        answer = relaxation.disaggregate(raw.x).schedule()
        count += any(k < t for t, k in answer.R) or bool(answer.M_in)
        assert pickle.loads(pickle.dumps(answer)) == answer  # noqa: S301
    assert count > 5


# -- in the process ------------------------------------------------------------------------------


class Peer:
    """The proof's side of a search that runs in a thread: what it is told and what it finds."""

    def __init__(self, problem: Problem, state: ProofState | None = None, **choices: Any) -> None:
        self.found: list[FoundSchedule] = []
        self.job = WorkerJob(self.found.append)
        request = Request(**{"gap": 0.0, "time_limit_s": 300.0, "threads": 2, **choices})
        self.search = PrimalSearch(self.job, problem, request, LazyParams())
        self.search.take(state or ProofState(bound=0.0, columns=0))
        self._work = threading.Thread(target=self.search.run)

    def tell(self, **known: Any) -> None:
        """Send what is new."""
        self.job.inbox.put(pickle.dumps(ProofState(**{"bound": 0.0, "columns": 0, **known})))

    def __enter__(self) -> Self:
        self._work.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.search.session.stop.set()
        self._work.join(PATIENCE_S)
        assert not self.alive

    @property
    def alive(self) -> bool:
        """Whether the search goes on."""
        return self._work.is_alive()


def test_a_search_ends_with_its_time_or_the_gap() -> None:
    """Without being told to, whenever it hears that the gap is closed."""
    problem = comb_problem()
    start = everything_paged(problem)
    found = FoundSchedule(start.schedule, start.value)
    known = ProofState(bound=start.value, columns=0, found=found)
    with (
        Peer(problem, time_limit_s=0.2) as late,
        Peer(problem, known) as proved,
        Peer(problem) as told,
    ):
        assert until(lambda: not late.alive)
        assert until(lambda: not proved.alive)
        assert until(lambda: told.found)
        assert told.alive
        told.tell(bound=start.value)
        assert until(lambda: not told.alive)
    assert proved.search.session.stopped is None


def test_a_search_sends_what_is_better_than_it_was_given() -> None:
    """Not what came from the other side; values are those of the verifier, ever better."""
    problem = comb_problem()
    start = everything_paged(problem)
    found = FoundSchedule(start.schedule, start.value)
    with Peer(problem, ProofState(bound=0.0, columns=0, found=found)) as peer:
        assert until(lambda: peer.found)
    values = [found.value for found in peer.found]
    assert [start.value, *values] == sorted({start.value, *values}, reverse=True)
    for schedule, value in peer.found:
        candidate = verify_schedule(problem, schedule)
        assert not candidate.violations
        assert candidate.value == value


def test_a_search_takes_the_latest_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that came before another is dropped; bounds and columns are taken note of."""
    problem = comb_problem(6, 9)
    answers = [answer_of(session_of(problem), Grouping(12, frozenset({row}))) for row in (3, 5)]
    assert answers[0] != answers[1]
    taken: list[Schedule] = []
    monkeypatch.setattr(PrimalHeuristic, "repair", lambda _, answer: taken.append(answer))
    peer = Peer(problem)
    for answer in answers:
        peer.tell(bound=0.5, columns=9, answer=answer)
    with peer:
        assert until(lambda: taken)
        assert peer.search.session.bounds.lower == 0.5
        assert peer.search.session.columns == 9
    assert taken == answers[1:]


@parts(2)
def test_a_search_finds_nothing_wrong(part: Part) -> None:
    """On random problems all it sends is valid, and nothing is better than the optimum."""
    count = 0
    for number in part.of(range(15)):
        problem = scarce_problem(f"service/{number}", (5, 9))
        if obstacle(problem) is not None:
            continue
        best = run_rounds(problem).value
        session = session_of(problem)
        relaxation = session.build(random_rows(seeded(f"service/{number}"), problem))
        raw = solved(relaxation)
        if raw.x is None or best is None:
            continue
        answer = relaxation.disaggregate(raw.x).schedule()
        with Peer(problem, ProofState(bound=0.0, columns=0, answer=answer)) as peer:
            if until(lambda peer=peer: peer.found):
                count += 1
        for schedule, value in peer.found:
            assert not verify_schedule(problem, schedule).violations
            assert value >= best - CLOSE, number
    assert count > part.share(5)


# -- how it ends ---------------------------------------------------------------------------------


def test_a_search_that_fails_is_an_error(search_by: Callable[[Any], None]) -> None:
    """The solve is stopped, and the last lines of the traceback are told."""
    search_by(jobs.failing)
    session = session_of(comb_problem())
    with PrimalWorker(session) as search:
        assert until(session.stop.is_set)
    with pytest.raises(BackendError, match=r"one thread(.|\n)*LookupError: of its own"):
        search.check()
    assert not search.runs.is_set()


def test_what_the_process_cannot_read_is_an_error() -> None:
    """Also in the middle of its work: not a search that silently ends."""
    problem = comb_problem()
    start = everything_paged(problem)
    session = session_of(problem, start)
    with PrimalWorker(session) as search:
        assert until(lambda: session.bounds.incumbent is not start)
        unreadable: Any = jobs.Unreadable()
        search.put(unreadable)
        assert until(session.stop.is_set)
    with pytest.raises(BackendError, match=r"invalid literal.*'no number'"):
        search.check()


@pytest.mark.skipif(os.name == "nt", reason="no such signals")
def test_a_process_that_is_killed_is_noted(
    search_by: Callable[[Any], None], caplog: pytest.LogCaptureFixture
) -> None:
    """As for want of memory: the proof goes on, and says so."""
    search_by(jobs.ending)
    session = session_of(comb_problem())
    with caplog.at_level(logging.WARNING), PrimalWorker(session) as search:
        assert until(lambda: session.log)
        assert not session.done()
        assert not search.runs.is_set()
    search.check()
    assert "ended unexpectedly (status -9); the solve goes on" in session.log[-1]
    assert "ended unexpectedly" in caplog.text


@pytest.mark.parametrize("executable", ["", "no-such-python"])
def test_without_an_interpreter_the_proof_goes_on(
    executable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where Python is part of another program, say."""
    monkeypatch.setattr(sys, "executable", executable)
    session = session_of(comb_problem())
    with caplog.at_level(logging.WARNING), PrimalWorker(session) as search:
        assert until(lambda: session.log)
        assert not session.done()
    search.check()
    assert "could not be started" in session.log[-1]


def test_a_watcher_that_fails_is_heard() -> None:
    """Also when it is told of a schedule that the process has found."""

    def fail(_: SolveProgress) -> None:
        msg = "heard"
        raise LookupError(msg)

    problem = comb_problem()
    session = session_of(problem, everything_paged(problem), on_progress=fail)
    with PrimalWorker(session) as search:
        assert until(session.stop.is_set)
    with pytest.raises(LookupError, match="heard"):
        search.check()


def test_what_is_printed_in_the_process_disturbs_nobody(search_by: Callable[[Any], None]) -> None:
    """Solvers print as they like."""
    search_by(jobs.noisy_search)
    problem = comb_problem()
    start = everything_paged(problem)
    session = session_of(problem, start)
    with PrimalWorker(session) as search:
        assert until(lambda: session.bounds.incumbent is not start)
    search.check()


# -- whole solves --------------------------------------------------------------------------------

SCRIPT = """
import os
from poetmodel import Costs, Device, Problem, solve
from poetmodel.graph import floor
from poetmodel.graph.catalogue import load_model
from functools import partial
from poetmodel.solver import lazy
from poetmodel.solver.lazy import primal_worker

print("once", flush=True)  # a script without a main of its own
params = lazy.LazyParams(worker_start_s=0.0)
lazy.solve_lazily = partial(lazy.solve_lazily, params=params)
tell = primal_worker.PrimalWorker._tell

def say_and_tell(self, process, search):
    print("begun", flush=True)
    tell(self, process, search)

primal_worker.PrimalWorker._tell = say_and_tell
graph = load_model("paper/resnet50")
costs = Costs.estimate(graph, Device.load("paper-a72"))
ram = floor(graph).bytes * 102 // 100  # a solve of many minutes
problem = Problem(graph, costs, ram=ram, deadline="115%", deadline_counts="serial")
result = solve(problem, threads=2, time_limit={limit}, gap=0)
print(result.termination, result.schedule is not None)
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("no process left")
"""


def script(folder: Path, limit: float) -> subprocess.Popen[str]:
    """Start a script of a user, as a shell does: a group of processes that hears Ctrl-C."""
    path = folder / "mine.py"
    path.write_text(SCRIPT.format(limit=limit), encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-X", "dev", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="no such signals")
@pytest.mark.parametrize("after_s", [0.0, 0.1, 2.5])
def test_ctrl_c_in_a_terminal_keeps_the_schedule(after_s: float, tmp_path: Path) -> None:
    """Whatever the process is doing: no traceback, no process left, the script is run once."""
    with script(tmp_path, 300.0) as running:
        assert running.stdout is not None
        lines = [running.stdout.readline() for _ in range(2)]
        time.sleep(after_s)
        os.killpg(running.pid, signal.SIGINT)
        out, errors = running.communicate(timeout=PATIENCE_S)
    assert lines == ["once\n", "begun\n"]
    assert out.splitlines() == ["interrupted True", "no process left"]
    assert errors == ""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="no such signals")
def test_a_time_limit_ends_both(tmp_path: Path) -> None:
    """Without a warning of anything left open."""
    with script(tmp_path, 3.0) as running:
        out, errors = running.communicate(timeout=PATIENCE_S)
    assert out.splitlines() == ["once", "begun", "time_limit True", "no process left"]
    assert errors == ""
