"""The search for schedules in a separate process: its messages, and its end."""

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from kit import jobs
from kit.patience import PATIENCE_S, wait_until
from kit.relaxation import SOLVER_TOLERANCE, run_rounds, solve_relaxation
from kit.rotation import mark_seeds_except
from kit.searches import make_session
from kit.worked import comb_problem
from poetmodel.errors import BackendError
from poetmodel.heuristics.greedy import page_everything
from poetmodel.model.grouping import Grouping
from poetmodel.process import WorkerJob, WorkerProcess
from poetmodel.solver.lazy import primal_worker
from poetmodel.solver.lazy.primal import PrimalHeuristic
from poetmodel.solver.lazy.primal_worker import (
    UPDATE_INTERVAL_S,
    FoundSchedule,
    PrimalSearch,
    PrimalWorker,
    ProofState,
)
from poetmodel.solver.outcome import make_candidate
from poetmodel.solver.policy import Policy
from poetmodel.solver.request import Request

AT_ONCE = Policy(worker_start_s=0.0)
"""Start the process without waiting for the solve to get older."""


def paged_comb(**choices):
    """Return a problem that a search improves, a schedule far from its best, and a solve."""
    problem = comb_problem(14, 13, 5.0)
    start = make_candidate(problem, page_everything(problem))
    return problem, start, session_of(problem, start, **choices)


def request_of(**choices):
    """Return a request with two threads, and time enough."""
    usual = {"gap": 0.0, "time_limit_s": 300.0, "threads": 2, "policy": AT_ONCE}
    return Request(**{**usual, **choices})


def session_of(problem, best=None, **choices):
    """Begin a solve with two threads."""
    request = Request(
        **{"gap": 0.0, "time_limit_s": 300.0, "threads": 2, "policy": AT_ONCE, **choices}
    )
    return make_session(problem, request, best)


def answer_of(session, grouping):
    """Solve a relaxation."""
    relaxation = session.build_relaxation(grouping)
    x = solve_relaxation(relaxation).x
    return relaxation.to_restorations(x)


@pytest.fixture
def search_by(monkeypatch):
    """Let processes do another job."""
    return lambda job: monkeypatch.setattr(primal_worker, "search_schedules", job)


@pytest.fixture
def started(monkeypatch):
    """Return the processes that are started."""
    processes = []

    def start():
        processes.append(WorkerProcess())
        return processes[-1]

    monkeypatch.setattr(primal_worker, "WorkerProcess", start)
    return processes


# -- both sides together -------------------------------------------------------------------------
def test_a_process_finds_better_schedules(started):
    """From the solve's schedule, with a separate interpreter; afterwards there is no process."""
    _, start, session = paged_comb()
    with PrimalWorker(session) as search:
        assert wait_until(lambda: session.search.best is not start)
        assert search.running_event.is_set()
        (process,) = started
    search.raise_error()
    assert session.search.best.value < start.value
    assert not session.search.best.violations
    assert session.search.bound == 0.0
    assert not process.is_alive
    assert not search.running_event.is_set()
    assert not search._thread.is_alive()


def test_a_quick_solve_starts_no_process(started):
    """From no schedule it leads to one of its value; a quick solve starts no process at all."""
    session = session_of(comb_problem())
    session.search.request = replace(
        session.search.request, policy=Policy(worker_start_s=PATIENCE_S)
    )
    with PrimalWorker(session) as search:
        pass
    search.raise_error()
    assert not started
    assert not search._thread.is_alive()
    problem = comb_problem(6, 9, 5.0)
    best = run_rounds(problem).value
    session = session_of(problem)
    solution = answer_of(session, Grouping(12, frozenset({5})))
    with PrimalWorker(session) as search:
        search.send_solution(solution)
        assert wait_until(
            lambda: session.search.best and session.search.best.value <= best + SOLVER_TOLERANCE
        )
        session.search.prove(best)
        assert session.search.is_done()
    search.raise_error()


# -- what is told --------------------------------------------------------------------------------
def test_what_is_new_is_told_once():
    """A schedule until the search has it, only the latest answer, once; bounds always."""
    _, start, session = paged_comb()
    search = PrimalWorker(session)
    first, last = (answer_of(session, Grouping(28)) for _ in range(2))
    search.send_solution(first)
    search.send_solution(last)
    update = search._next_state()
    assert update.found_schedule == FoundSchedule(start.schedule, start.value)
    assert update.solution is last
    session.search.prove(2.0)
    session.max_columns = 7
    assert search._next_state() == ProofState(
        bound=2.0, max_columns=7, found_schedule=None, solution=None
    )
    search._best_value = 0.0  # the search has sent something better in the meantime
    session.search.best = replace(start, value=1.0)
    assert search._next_state().found_schedule is None


# -- in the process ------------------------------------------------------------------------------
class Peer:
    """The proof's side of a search that runs in a thread: received messages and results."""

    def __init__(self, problem, state=None, **choices):
        self.found = []
        self.job = WorkerJob(self.found.append)
        request = request_of(**choices)
        self.search = PrimalSearch(self.job, problem, request)
        self.search.update(state or ProofState(bound=0.0, max_columns=0))
        self._work = threading.Thread(target=self.search.search_until_done)

    def tell(self, **known):
        """Send new messages."""
        self.job.inbox.put(pickle.dumps(ProofState(**{"bound": 0.0, "max_columns": 0, **known})))

    def __enter__(self):
        self._work.start()
        return self

    def __exit__(self, *_):
        self.search.session.search.stop_event.set()
        self._work.join(PATIENCE_S)
        assert not self.alive

    @property
    def alive(self):
        """Return whether the search continues."""
        return self._work.is_alive()


def test_a_search_ends_with_its_time_or_the_gap():
    """Also without a message, if it receives that the gap is closed."""
    problem, start, _ = paged_comb()
    found = FoundSchedule(start.schedule, start.value)
    known = ProofState(bound=start.value, max_columns=0, found_schedule=found)
    with (
        Peer(problem, time_limit_s=0.2) as late,
        Peer(problem, known) as proved,
        Peer(problem) as told,
    ):
        assert wait_until(lambda: not late.alive)
        assert wait_until(lambda: not proved.alive)
        assert wait_until(lambda: told.found)
        assert told.alive
        told.tell(bound=start.value)
        assert wait_until(lambda: not told.alive)
    assert proved.search.session.search.stop_reason is None


def test_a_search_sends_what_is_better_and_takes_the_latest_answer(monkeypatch):
    """Values are the verifier's, strictly better; the last answer and all bounds are used."""
    problem, start, _ = paged_comb()
    found = FoundSchedule(start.schedule, start.value)
    with Peer(problem, ProofState(bound=0.0, max_columns=0, found_schedule=found)) as peer:
        assert wait_until(lambda: peer.found)
    values = [found.value for found in peer.found]
    assert [start.value, *values] == sorted({start.value, *values}, reverse=True)
    for schedule, value in peer.found:
        candidate = make_candidate(problem, schedule)
        assert (candidate.violations, candidate.value) == ((), value)
    problem = comb_problem(6, 9, 5.0)
    answers = [answer_of(session_of(problem), Grouping(12, frozenset({row}))) for row in (3, 5)]
    assert answers[0] != answers[1]
    taken = []
    monkeypatch.setattr(PrimalHeuristic, "repair", lambda _, solution: taken.append(solution))
    peer = Peer(problem)
    for solution in answers:
        peer.tell(bound=0.5, max_columns=9, solution=solution)
    with peer:
        assert wait_until(lambda: taken)
        assert (peer.search.session.search.bound, peer.search.session.max_columns) == (0.5, 9)
    assert taken == answers[1:]


def test_a_search_without_local_search_waits_for_answers(monkeypatch):
    """It reads messages at most once an interval, and repairs each answer."""
    problem = comb_problem(6, 9, 5.0)
    answer = answer_of(session_of(problem), Grouping(12, frozenset({3})))
    taken, polls, read = [], [], WorkerJob.messages
    monkeypatch.setattr(PrimalHeuristic, "repair", lambda _, solution: taken.append(solution))
    monkeypatch.setattr(WorkerJob, "messages", lambda job: polls.append(job) or read(job))
    started_s = time.monotonic()
    with Peer(problem, policy=Policy(heuristics=frozenset({"repair"}))) as peer:
        assert wait_until(lambda: len(polls) >= 3)
        peer.tell(solution=answer)
        assert wait_until(lambda: taken)
    assert taken == [answer]
    assert len(polls) <= (time.monotonic() - started_s) / UPDATE_INTERVAL_S + 3


# -- how it ends ---------------------------------------------------------------------------------
def test_what_the_process_cannot_read_is_an_error():
    """Also in the middle of its work: not a search that silently ends."""
    _, start, session = paged_comb()
    with PrimalWorker(session) as search:
        assert wait_until(lambda: session.search.best is not start)
        search.send_solution(jobs.Unreadable())
        assert wait_until(session.search.stop_event.is_set)
    with pytest.raises(BackendError, match=r"invalid literal.*'no number'"):
        search.raise_error()


@pytest.mark.skipif(os.name == "nt", reason="no such signals")
@pytest.mark.parametrize(
    ("is_killed", "words"),
    [(True, "ended unexpectedly (status -9); the solve goes on"), (False, "could not be started")],
)
def test_without_a_process_the_proof_goes_on(search_by, caplog, monkeypatch, is_killed, words):
    """For lack of memory, or if Python is embedded in another program; with a log message."""
    search_by(jobs.kill_process)
    if not is_killed:
        monkeypatch.setattr(sys, "executable", "")
    session = session_of(comb_problem(14, 13, 5.0))
    with caplog.at_level(logging.WARNING), PrimalWorker(session) as search:
        assert wait_until(lambda: session.search.log)
        assert not session.search.is_done()
        assert not search.running_event.is_set()
    search.raise_error()
    assert words in session.search.log[-1]
    assert words.partition(" (")[0] in caplog.text


def test_a_search_or_a_watcher_that_fails_is_an_error(search_by):
    """The solve is stopped, and raises its error, with the last lines of a traceback."""

    def fail(_):
        raise LookupError("heard")

    *_, session = paged_comb(on_progress=fail)
    with PrimalWorker(session) as search:
        assert wait_until(session.search.stop_event.is_set)
    with pytest.raises(LookupError, match="heard"):
        search.raise_error()
    search_by(jobs.raise_lookup_error)
    session = session_of(comb_problem())
    with PrimalWorker(session) as search:
        assert wait_until(session.search.stop_event.is_set)
    with pytest.raises(BackendError, match=r"one thread(.|\n)*LookupError: of its own"):
        search.raise_error()
    assert not search.running_event.is_set()


# -- whole solves --------------------------------------------------------------------------------
SCRIPT = """
import os
from poetmodel import Costs, Device, Problem, solve
from poetmodel.graph import floor
from poetmodel.graph.catalogue import load_model
from poetmodel.solver.lazy import primal_worker
from poetmodel.solver.lazy.session import Session
from poetmodel.solver.policy import Policy

print("once", flush=True)  # a script without a main of its own
Session.policy = Policy(worker_start_s=0.0)
tell = primal_worker.PrimalWorker._send_updates

def say_and_tell(self, process, search):
    print("begun", flush=True)
    tell(self, process, search)

primal_worker.PrimalWorker._send_updates = say_and_tell
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


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="no such signals")
@pytest.mark.parametrize("after_s", mark_seeds_except([0.0, 0.1, 2.5, None], [0.1, None]))
def test_ctrl_c_in_a_terminal_and_a_time_limit_end_both(after_s, tmp_path):
    """Whatever the process is doing: no traceback or warning, no process left, one script run."""
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT.format(limit=3.0 if after_s is None else 300.0), encoding="utf-8")
    with subprocess.Popen(  # as a shell starts it: a group of processes that hears Ctrl-C
        [sys.executable, "-W", "error", "-X", "dev", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        lines = [running.stdout.readline() for _ in range(2)]
        if after_s is not None:
            time.sleep(after_s)
            os.killpg(running.pid, signal.SIGINT)
        out, errors = running.communicate(timeout=PATIENCE_S)
    assert lines == ["once\n", "begun\n"]
    ended = "time_limit" if after_s is None else "interrupted"
    assert out.splitlines() == [f"{ended} True", "no process left"]
    assert errors == ""
