"""Solving in a thread, and Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from poetmodel.backends import run_interruptibly
from poetmodel.clock import check_time_limit, time_limit
from poetmodel.errors import TimeLimitError


def test_result_comes_back() -> None:
    """What the solve returns is returned, from a thread of its own."""
    stop = threading.Event()
    thread = run_interruptibly(threading.current_thread, stop)
    assert thread is not threading.current_thread()
    assert not stop.is_set()


def test_exception_comes_back() -> None:
    """What the solve raises is raised."""

    def fail() -> None:
        raise LookupError("no")

    with pytest.raises(LookupError, match="no"):
        run_interruptibly(fail, threading.Event())


def test_signal_handler_is_left_as_it_was() -> None:
    """Whatever the solver does to Ctrl-C, Python's handler is the same afterwards."""
    before = signal.getsignal(signal.SIGINT)
    run_interruptibly(lambda: threading.Event().wait(0.3), threading.Event())
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread() -> None:
    """It works in threads that may not touch signals."""
    results: list[int] = []

    def slow() -> int:
        threading.Event().wait(0.2)
        return 7

    thread = threading.Thread(
        target=lambda: results.append(run_interruptibly(slow, threading.Event()))
    )
    thread.start()
    thread.join()
    assert results == [7]


def test_a_solve_that_ends_too_late_is_left_behind() -> None:
    """It is told to stop, and nobody waits for it."""
    stop, over = threading.Event(), threading.Event()
    with pytest.raises(TimeLimitError):
        run_interruptibly(over.wait, stop, most_s=0.0)
    assert stop.is_set()
    over.set()


LEFT_BEHIND = """\
import threading, time
from poetmodel.backends import run_interruptibly
from poetmodel.errors import TimeLimitError
def solve():
    time.sleep(0.5)
    print("ended")
try:
    run_interruptibly(solve, threading.Event(), most_s=0.0)
except TimeLimitError:
    print("left")
"""


def test_the_program_ends_after_what_was_left_behind() -> None:
    """A solver that calls back into a Python that has ended would abort it."""
    done = subprocess.run(
        [sys.executable, "-c", LEFT_BEHIND], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, ["left", "ended"]), done.stderr


NEVER_ENDS = """\
import threading
from poetmodel.backends import run_interruptibly, worker
from poetmodel.errors import TimeLimitError
worker._MOST_AT_EXIT_S = 0.2
try:
    run_interruptibly(threading.Event().wait, threading.Event(), most_s=0.0)
except TimeLimitError:
    print("left")
"""


def test_the_program_ends_where_what_was_left_behind_does_not() -> None:
    """HiGHS has been seen in a loop without an end."""
    done = subprocess.run(
        [sys.executable, "-c", NEVER_ENDS],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["left"]), done.stderr


def test_time_limit_holds_in_the_thread() -> None:
    """A limit that is open where the solve is started ends the solve."""
    with time_limit(-1), pytest.raises(TimeLimitError):
        run_interruptibly(check_time_limit, threading.Event())


STUBBORN = """
import os, threading
from poetmodel.backends import run_interruptibly
stop = threading.Event()
def solve():
    print("running", flush=True)
    stop.wait()
    print("asked to stop", flush=True)
    if {obedient}:
        return "what there is"
    threading.Event().wait(60.0)
try:
    print(run_interruptibly(solve, stop), flush=True)
except KeyboardInterrupt:
    print("gave up", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("obedient", "end"),
    [(True, "what there is\n"), (False, "gave up\n")],
    ids=["obeys", "stubborn"],
)
def test_ctrl_c(*, obedient: bool, end: str) -> None:
    """The first Ctrl-C asks the solver to stop and waits for it; a second one does not wait."""
    child = subprocess.Popen(
        [sys.executable, "-c", STUBBORN.format(obedient=obedient)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "running\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "asked to stop\n"
        if not obedient:
            child.send_signal(signal.SIGINT)
        assert child.stdout.read() == end


STRUCK = """
import os, signal, sys, threading
from poetmodel.backends import run_interruptibly, worker
worker._POLL_S = 1e-3
INSIDE = ("worker.py", "threading.py", "_base.py")

def struck_at(moment):
    passed, stop = 0, threading.Event()
    def trace(frame, event, _):
        nonlocal passed
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_code.co_filename.endswith(INSIDE):
            passed += 1
            if passed == moment:
                sys.settrace(None)
                os.kill(os.getpid(), signal.SIGINT)
        return trace
    def solve():
        return stop.wait(20.0)
    sys.settrace(trace)
    try:
        return run_interruptibly(solve, stop)
    except KeyboardInterrupt:
        return "not begun"
    finally:
        sys.settrace(None)

ends = [struck_at(moment) for moment in range(1, 500)]
begun = ends.index(True)
assert set(ends[:begun]) == {"not begun"} and set(ends[begun:]) == {True}, ends
"""


def test_ctrl_c_may_strike_anywhere() -> None:
    """Wherever the waiting thread is, it asks the solver to stop and returns its answer."""
    done = subprocess.run(
        [sys.executable, "-c", STRUCK], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
