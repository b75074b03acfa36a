"""Solving in a thread, and Ctrl-C."""

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from poetmodel.backends import run_interruptibly
from poetmodel.clock import check_time_limit, time_limit
from poetmodel.errors import TimeLimitError


def test_result_comes_back():
    """From a thread of its own, Python's handler of Ctrl-C is the same; also in other threads.

    What the solve raises is raised; a limit that is open ends it. One that ends too late is told to
    stop, and nobody waits for it.
    """
    stop, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def slow():
        threading.Event().wait(0.3)
        return threading.current_thread()

    assert run_interruptibly(slow, stop) is not threading.current_thread()
    assert signal.getsignal(signal.SIGINT) is before
    with ThreadPoolExecutor(1) as pool:  # one that may not touch signals
        assert pool.submit(run_interruptibly, slow, stop).result().name == "poetmodel-solve"
    assert not stop.is_set()

    def fail():
        raise LookupError("no")

    with pytest.raises(LookupError, match="no"):
        run_interruptibly(fail, threading.Event())
    with time_limit(-1), pytest.raises(TimeLimitError):
        run_interruptibly(check_time_limit, threading.Event())
    stop, over = threading.Event(), threading.Event()
    with pytest.raises(TimeLimitError):
        run_interruptibly(over.wait, stop, most_s=0.0)
    assert stop.is_set()
    over.set()


LEFT_BEHIND = """\
import threading, time
from poetmodel.backends import run_interruptibly, worker
from poetmodel.errors import TimeLimitError
def solve():
    time.sleep(0.5)
    print("ended")
def endless():
    threading.Event().wait()
if {solve} is endless:
    worker._MOST_AT_EXIT_S = 0.2
try:
    run_interruptibly({solve}, threading.Event(), most_s=0.0)
except TimeLimitError:
    print("left")
"""


@pytest.mark.parametrize(("solve", "said"), [("solve", ["left", "ended"]), ("endless", ["left"])])
def test_the_program_ends_with_what_was_left_behind(solve, said):
    """A solver that calls back into a Python that has ended would abort it: it is waited for.

    But not for ever: HiGHS has been seen in a loop without an end.
    """
    command = [sys.executable, "-c", LEFT_BEHIND.format(solve=solve)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, said), done.stderr


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
def test_ctrl_c(*, obedient, end):
    """The first Ctrl-C asks the solver to stop and waits for it; a second one does not wait."""
    child = subprocess.Popen(
        [sys.executable, "-c", STUBBORN.format(obedient=obedient)],
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
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


def test_ctrl_c_may_strike_anywhere():
    """Wherever the waiting thread is, it asks the solver to stop and returns its answer."""
    done = subprocess.run(
        [sys.executable, "-c", STRUCK], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
