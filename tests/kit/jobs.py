"""Jobs for tests of worker processes, which import this module."""

import os
import subprocess
import sys
import time

from poetmodel.errors import InputError, VerificationError


def return_pid(_):
    """Return the id of the worker process."""
    return os.getpid()


def list_modules(_):
    """Return the names of the imported modules."""
    return list(sys.modules)


def echo(job, *arguments):
    """Report each argument as progress, and return all arguments."""
    for argument in arguments:
        job.report_progress(argument)
    return arguments


def write_noise(_):
    """Write to stdout and stderr, which must not disturb messages; return "done"."""
    os.write(1, b"noise")
    for stream in (sys.stdout, sys.stderr):
        stream.write("noise")
        stream.flush()
    return "done"


def read_standard_input(_):
    """Return what a program reads from the standard input that it inherits."""
    command = (sys.executable, "-c", "import sys; print(repr(sys.stdin.read()))")
    return subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout


def echo_messages(job):
    """Report each received message as progress, until one is "end"."""
    while True:
        for message in job.messages():
            if message == "end":
                return
            job.report_progress(message)
        time.sleep(0.01)


def sleep_forever(*_):
    """Sleep forever without reading messages."""
    while True:
        time.sleep(0.01)


def wait_for_cancel(job):
    """Report "begun", wait until the job is cancelled, and return "noticed"."""
    job.report_progress("begun")
    while not job.cancelled:
        time.sleep(0.001)
    return "noticed"


def raise_lookup_error(*_):
    """Raise `LookupError`."""
    msg = "of its own"
    raise LookupError(msg)


def raise_input_error(_):
    """Raise an error with several messages."""
    raise InputError(["one", "two"])


def raise_verification_error(_):
    """Raise an error that cannot be unpickled."""
    raise VerificationError(["one", "two"])


def kill_process(_, *arguments):
    """Kill the worker process during the job."""
    del arguments
    os.kill(os.getpid(), 9)
    raise AssertionError


def exit_process(_):
    """Raise `SystemExit`."""
    sys.exit("left")


class Unreadable:
    """An object that can be pickled but not unpickled."""

    def __reduce__(self):
        return (int, ("no number",))


def return_unreadable(_):
    """Return an object that cannot be unpickled."""
    return Unreadable()
