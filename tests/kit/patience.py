"""Waits for other processes on busy machines, forked processes, and failing system calls."""

import os
import time

PATIENCE_S = 120.0
"""Timeout of every wait [s], long enough for a busy machine."""


def wait_until(condition):
    """Call a function until its result is true; return the result. Fail after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)
    return result


def has_ended(pid):
    """Return whether a process has ended and its parent has reaped it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def make_system_fault(number):
    """Return a function that raises `OSError` with an error number, for any arguments."""

    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def run_in_fork(work):
    """Call a function in a forked process; return the exit code of the process.

    It is the function's result, 0 for None; 1 after an exception; negative after a signal.
    """
    process = os.fork()
    if process == 0:
        code = 1
        try:
            code = int(work() or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
