"""Work in another process, the clock that limits all work, and rare garbage collections."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from kit import jobs
from kit.patience import PATIENCE_S, has_ended, wait_until
from poetmodel import clock as home
from poetmodel.clock import (
    GC_ALLOCATIONS,
    GC_COLLECTIONS,
    check_time_limit,
    infrequent_gc,
    iterate_in_time,
    limit_time,
    processor_clock,
)
from poetmodel.errors import InputError, PoetModelError, TimeLimitError
from poetmodel.process import LocalProcesses, ProcessEndedError, WorkerProcess

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no such signals")


@pytest.fixture
def process():
    """Start a process, and assert that it has ended afterwards."""
    started = WorkerProcess()
    yield started
    started.close()
    assert has_ended(started.pid)
    assert not started.is_alive
    assert not started._reader.is_alive()


def test_jobs_come_and_go(process):
    """One process runs several jobs in turn, each with its reports, which precede its result.

    Output of jobs has no effect: standard output belongs to the other process.
    """
    assert process.call(jobs.return_pid).result(PATIENCE_S) == process.pid != os.getpid()
    for given in ((1, "two"), (b"\n" * 300_000,), ()):  # more than a pipe holds
        news = []
        assert process.call(jobs.echo, *given, on_progress=news.append).result(PATIENCE_S) == given
        assert news == list(given)
        assert process.call(jobs.write_noise).result(PATIENCE_S) == "done"
    assert not process.is_busy


def test_messages_reach_the_job(process):
    """In their order; unread messages are those of a job that has ended."""
    news = []
    job = process.call(jobs.echo_messages, on_progress=news.append)
    assert process.is_busy
    for message in (1, 2, "end", 3):
        process.send(message)
    job.result(PATIENCE_S)
    assert wait_until(lambda: process.has_sent_all)
    again = process.call(jobs.echo_messages, on_progress=news.append)
    process.send("end")
    again.result(PATIENCE_S)
    assert news == [1, 2]


def test_errors_come_back(process):
    """With their class, where another process can make it, and with the traceback as a note."""
    with pytest.raises(LookupError, match="of its own") as failed:
        process.call(jobs.raise_lookup_error).result(PATIENCE_S)
    assert "in raise_lookup_error" in failed.value.__notes__[-1]
    for job, error, words in (
        (jobs.raise_input_error, InputError, "one; two"),
        (jobs.raise_verification_error, PoetModelError, "not valid: one; two"),
        (jobs.exit_process, RuntimeError, "SystemExit: left"),
    ):
        with pytest.raises(error, match=words):
            process.call(job).result(PATIENCE_S)
    with pytest.raises(ValueError, match="no number"):
        process.call(jobs.echo, jobs.Unreadable()).result(PATIENCE_S)
    assert process.call(jobs.echo, 1).result(PATIENCE_S) == (1,)


def unheard(_):
    """Fail as a listener, with the error of a closed pipe."""
    raise EOFError("heard")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [((jobs.return_unreadable,), ValueError, "no number"), ((jobs.echo, 1), EOFError, "heard")],
)
def test_a_result_or_listener_that_fails_ends_the_process(process, call, error, words):
    """The job is an error, not one that is waited for."""
    with pytest.raises(error, match=words):
        process.call(*call, on_progress=unheard).result(PATIENCE_S)
    assert wait_until(lambda: not process.is_alive)


def test_a_job_that_nobody_wants_ends(process):
    """By itself, or interrupted; the next one is done, and not interrupted."""
    begun = []
    noticed = process.call(jobs.wait_for_cancel, on_progress=begun.append)
    assert wait_until(lambda: begun)
    process.cancel()
    assert noticed.result(PATIENCE_S) == "noticed"
    interrupted = process.call(jobs.sleep_forever)
    process.cancel()
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        interrupted.result(PATIENCE_S)
    process.cancel()
    assert process.call(jobs.echo, 1).result(PATIENCE_S) == (1,)


def test_ctrl_c_does_not_reach_it(process):
    """In a terminal, it is sent to all processes, at any time."""
    os.kill(process.pid, signal.SIGINT)
    assert process.call(jobs.echo, 1).result(PATIENCE_S) == (1,)
    job = process.call(jobs.echo_messages)
    os.kill(process.pid, signal.SIGINT)
    process.send("end")
    assert job.result(PATIENCE_S) is None


def test_an_end_is_told(process):
    """Both to the caller that waits for the job, and to one that starts another job."""
    for job in (jobs.kill_process, jobs.return_pid):
        with pytest.raises(ProcessEndedError, match=r"ended unexpectedly \(status -9\)"):
            process.call(job).result(PATIENCE_S)
        assert not process.is_alive


def test_a_late_job_is_killed():
    """Its process ends; a job that ends in time is not disturbed."""
    process = WorkerProcess()
    assert process.call(jobs.echo, 1, limit_s=PATIENCE_S).result(PATIENCE_S) == (1,)
    with pytest.raises(TimeLimitError, match="within 0 s"):
        process.call(jobs.sleep_forever, limit_s=0.1).result(PATIENCE_S)
    assert wait_until(lambda: has_ended(process.pid))


def test_programs_of_a_job_read_nothing(process):
    """The standard input that they inherit is empty; jobs come by another pipe."""
    assert process.call(jobs.read_standard_input).result(PATIENCE_S).strip() == b"''"
    assert process.call(jobs.echo, 1).result(PATIENCE_S) == (1,)


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.3])
def test_it_is_ended_at_any_moment(delay_s):
    """Before it has read, with more to read than a pipe holds, and at work; also twice."""
    process = WorkerProcess()
    job = process.call(jobs.sleep_forever, b"\n" * 1_000_000)
    time.sleep(delay_s)
    process.close()
    process.close()
    assert has_ended(process.pid)
    with pytest.raises(ProcessEndedError):
        job.result(PATIENCE_S)


def test_its_threads_end_with_it():
    """No thread and no open pipe is left."""
    before = threading.active_count()
    process = WorkerProcess()
    process.call(jobs.return_pid).result(PATIENCE_S)
    process.close()
    pipes = (process._process.stdin, process._process.stdout)
    assert wait_until(lambda: all(pipe.closed for pipe in pipes))
    assert wait_until(lambda: threading.active_count() <= before)


def test_a_fork_has_no_part_in_it(process):
    """Neither ending nor dropping it there ends it."""
    child = os.fork()
    if child == 0:
        process.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert process.call(jobs.return_pid).result(PATIENCE_S) == process.pid


def test_it_does_not_outlive_its_owner():
    """If the process that started it is killed, it ends by itself, in any state."""
    program = (
        "import sys; sys.path[:] = eval(sys.argv[1])\n"
        "from kit import jobs\n"
        "from poetmodel.process import WorkerProcess\n"
        "process = WorkerProcess()\n"
        "assert process.call(jobs.return_pid).result() == process.pid\n"
        "process.call(jobs.sleep_forever)\n"
        "print(process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, repr(sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as owner:
        pid = int(owner.stdout.readline())
        owner.kill()
    assert wait_until(lambda: has_ended(pid))


@pytest.mark.parametrize("executable", ["", "no-such-python"])
def test_without_an_interpreter_there_is_none(executable, monkeypatch):
    """For example, if Python is embedded in another program."""
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(OSError, match=r"no Python interpreter|no-such-python"):
        WorkerProcess()


@pytest.mark.parametrize("most", [0, 1])
def test_without_room_for_threads_there_is_none(most, monkeypatch):
    """And started threads are ended."""
    started = []
    start, popen = threading.Thread.start, subprocess.Popen
    count = iter(range(most))

    def noted(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    def limited(thread):
        if next(count, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(subprocess, "Popen", noted)
    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(OSError, match="can't start new thread"):
        WorkerProcess()
    assert has_ended(started[0].pid)


def test_many_at_once():
    """Each has its own pipes: the end of one is the end of no other."""
    first, *others = [WorkerProcess() for _ in range(3)]
    assert first.call(jobs.return_pid).result(PATIENCE_S) == first.pid
    first.close()
    for process in others:
        assert process.call(jobs.return_pid).result(PATIENCE_S) == process.pid
        process.close()


def test_processes_are_reused_and_replaced():
    """Two jobs at once have two processes; a dead process is replaced; the end kills all."""
    with LocalProcesses() as processes:
        pid = processes.submit(os.getpid).result(PATIENCE_S)
        assert processes.submit(os.getpid).result(PATIENCE_S) == pid
        busy = processes.submit(jobs.sleep_forever)
        with pytest.raises(ProcessEndedError):
            processes.submit(jobs.kill_process, 0).result(PATIENCE_S)
        assert processes.submit(os.getpid).result(PATIENCE_S) != pid
    with pytest.raises(ProcessEndedError):
        busy.result(PATIENCE_S)
    assert has_ended(pid)


def test_processes_of_limited_jobs_are_new():
    """Each ends with its job, or after its limit; modules are loaded before the job."""
    with LocalProcesses(lambda *given: given[0], preloaded=("colorsys",)) as processes:
        loaded = processes.submit(jobs.list_modules, PATIENCE_S).result(PATIENCE_S)
        assert "colorsys" in loaded
        pids = [processes.submit(jobs.return_pid, 60).result(PATIENCE_S) for _ in range(2)]
        assert wait_until(lambda: all(has_ended(pid) for pid in pids))
        assert pids[0] != pids[1]
        with pytest.raises(TimeLimitError):
            processes.submit(jobs.sleep_forever, 0.1).result(PATIENCE_S)


# -- the clock -----------------------------------------------------------------------------------
class Clock:
    """A clock that is set by hand."""

    now_s = processor_s = 0.0

    def monotonic(self):
        """Return the time."""
        return self.now_s

    def process_time(self):
        """Return the processor time."""
        return self.processor_s


@pytest.fixture
def clock(monkeypatch):
    """Put a clock that is set by hand in place of the machine's."""
    found = Clock()
    monkeypatch.setattr(home, "time", found)
    return found


def test_limit_ends_what_runs_in_it_and_nothing_after(clock):
    """Only in the block, after its seconds have passed; without a limit, it has no effect."""
    with limit_time(5):
        clock.now_s = 5.0
        check_time_limit()
        clock.now_s = 5.1
        with pytest.raises(TimeLimitError):
            check_time_limit()
    clock.now_s = 1e9
    check_time_limit()
    assert list(iterate_in_time(range(3))) == [0, 1, 2]


def test_inner_limit_cannot_be_later_than_the_outer_one(clock):
    """A limit within a limit only shortens it, and leaves it as it was."""
    with limit_time(5):
        with limit_time(60):
            clock.now_s = 6.0
            with pytest.raises(TimeLimitError):
                check_time_limit()
        clock.now_s = 4.0
        with limit_time(0.5):
            clock.now_s = 4.6
            with pytest.raises(TimeLimitError):
                check_time_limit()
        check_time_limit()


def test_processor_time_counts_whatever_the_machine_does_beside(clock):
    """Limits inside are of processor time; wall time ends them, too, and counts again after."""
    with limit_time(50):
        with processor_clock(100), limit_time(5):
            clock.now_s, clock.processor_s = 49.0, 4.0
            check_time_limit()
            clock.processor_s = 5.1
            with pytest.raises(TimeLimitError):
                check_time_limit()
            clock.now_s, clock.processor_s = 50.5, 4.0
            with pytest.raises(TimeLimitError):
                check_time_limit()
        clock.now_s, clock.processor_s = 49.0, 1e9
        check_time_limit()


def test_many_items_are_watched_while_they_are_read(clock, monkeypatch):
    """A walk over items is stopped between two chunks, not only before the first."""
    monkeypatch.setattr(home, "CHUNK", 10)
    seen = []

    def walk():
        for item in iterate_in_time(range(100)):
            seen.append(item)
            clock.now_s = item / 20

    with limit_time(1), pytest.raises(TimeLimitError):
        walk()
    assert seen == list(range(30))


@pytest.fixture(autouse=True)
def _thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_rare_collections_end_with_the_outermost_solve():
    """Two solves at once: the thresholds return when the last one ends, also with an error."""
    gc.set_threshold(700, 11, 12)
    with infrequent_gc():
        with pytest.raises(KeyboardInterrupt), infrequent_gc():
            raise KeyboardInterrupt
        assert gc.get_threshold() == (GC_ALLOCATIONS, GC_COLLECTIONS, GC_COLLECTIONS)
    assert gc.get_threshold() == (700, 11, 12)
    with pytest.raises(KeyboardInterrupt), infrequent_gc():
        raise KeyboardInterrupt
    assert gc.get_threshold() == (700, 11, 12)


@pytest.mark.parametrize("first", [0, 2 * GC_ALLOCATIONS])
def test_rare_collections_leave_rarer_ones_alone(first):
    """If collections are off or rarer still, they are unchanged."""
    gc.set_threshold(first, 11, 12)
    with infrequent_gc():
        assert gc.get_threshold() == (first, 11, 12)
    assert gc.get_threshold() == (first, 11, 12)
