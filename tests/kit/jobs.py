"""Jobs for processes of their own, which import this module."""

import os
import sys
import time

from poetmodel.errors import InputError, VerificationError


def number(_):
    """Return the number of the process."""
    return os.getpid()


def echo(job, *arguments):
    """Tell each argument, and return all."""
    for argument in arguments:
        job.tell(argument)
    return arguments


def noisy(_):
    """Print where only pickles may come from, and read what is not for it."""
    os.write(1, b"noise")
    for stream in (sys.stdout, sys.stderr):
        stream.write("noise")
        stream.flush()
    return "done"


def answering(job):
    """Tell what each message says, until that is "end"."""
    while True:
        for message in job.messages():
            if message == "end":
                return
            job.tell(message)
        time.sleep(0.01)


def endless(*_):
    """Do nothing, and look at nothing."""
    while True:
        time.sleep(0.01)


def attentive(job):
    """Wait until the job is cancelled."""
    job.tell("begun")
    while not job.cancelled:
        time.sleep(0.001)
    return "noticed"


def failing(*_):
    """Fail."""
    msg = "of its own"
    raise LookupError(msg)


def refusing(_):
    """Raise an error with several faults."""
    raise InputError(["one", "two"])


def rejecting(_):
    """Raise an error that another process cannot make again."""
    raise VerificationError(["one", "two"])


def ending(_, *arguments):
    """End the process in the middle of the job."""
    del arguments
    os.kill(os.getpid(), 9)
    raise AssertionError


def leaving(_):
    """Leave Python."""
    sys.exit("left")


class Unreadable:
    """Something that can be written and not read."""

    def __reduce__(self):
        return (int, ("no number",))


def unreadable(_):
    """Return what cannot be read."""
    return Unreadable()
