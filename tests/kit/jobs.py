"""Jobs of separate processes, which import this module."""

import os
import sys
import time

from poetmodel.errors import InputError, VerificationError


def number(_):
    """Return the number of the process."""
    return os.getpid()


def echo(job, *arguments):
    """Send each argument as a message, and return all."""
    for argument in arguments:
        job.report_progress(argument)
    return arguments


def noisy(_):
    """Write to stdout and stderr, which must not disturb messages."""
    os.write(1, b"noise")
    for stream in (sys.stdout, sys.stderr):
        stream.write("noise")
        stream.flush()
    return "done"


def answering(job):
    """Send back each message until one is "end"."""
    while True:
        for message in job.messages():
            if message == "end":
                return
            job.report_progress(message)
        time.sleep(0.01)


def endless(*_):
    """Sleep forever without reading messages."""
    while True:
        time.sleep(0.01)


def attentive(job):
    """Wait until the job is cancelled."""
    job.report_progress("begun")
    while not job.cancelled:
        time.sleep(0.001)
    return "noticed"


def failing(*_):
    """Fail."""
    msg = "of its own"
    raise LookupError(msg)


def refusing(_):
    """Raise an error with several messages."""
    raise InputError(["one", "two"])


def rejecting(_):
    """Raise an error that cannot be unpickled."""
    raise VerificationError(["one", "two"])


def ending(_, *arguments):
    """End the process in the middle of the job."""
    del arguments
    os.kill(os.getpid(), 9)
    raise AssertionError


def leaving(_):
    """Raise `SystemExit`."""
    sys.exit("left")


class Unreadable:
    """An object that can be pickled but not unpickled."""

    def __reduce__(self):
        return (int, ("no number",))


def unreadable(_):
    """Return an object that cannot be unpickled."""
    return Unreadable()
