"""Calls of the system that fail, and processes that are forked."""

import os


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
