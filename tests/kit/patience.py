"""Waiting for other processes on a machine that may be busy, and a system that fails."""

import os
import time

PATIENCE_S = 120.0
"""How long anything may take on a machine that is busy [s]."""


def until(condition):
    """Return what a function finds, as soon as it is something; AssertionError if it never is."""
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
    return found


def gone(pid):
    """Return whether there is no such process, not even one that waits to be heard of."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def system_fault(number):
    """Return a call that fails with an error of the system."""

    def fail(*_):
        raise OSError(number, os.strerror(number))

    return fail


def in_a_fork(work):
    """Run something in a forked process; return its exit code, that of what it returns."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            code = int(work() or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
