"""Waiting for other processes on busy machines, and simulated failures of system calls."""

import os
import time

PATIENCE_S = 120.0
"""Timeout of any wait on a busy machine [s]."""


def until(condition):
    """Call a function until its result is true; return that. Raise `AssertionError` on timeout."""
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
    return found


def gone(pid):
    """Return whether a process has ended and was reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def system_fault(number):
    """Return a function that raises `OSError` with an error number."""

    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def in_a_fork(work):
    """Call a function in a forked process; return the exit code, which is the function's result."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            code = int(work() or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
